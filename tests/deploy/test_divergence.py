"""How far apart devices' copies were when the fed server averaged them: as in a simulation, whatever is lost."""

import asyncio
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import pytest
import torch

from adaptsfl.config import load_recipe
from adaptsfl.decisions import Decision
from adaptsfl.deploy import wire_pb2 as wire
from adaptsfl.deploy.layers_file import LayerStates
from adaptsfl.deploy.parties.fed import server as fed_module
from adaptsfl.deploy.parties.fed.client import LARGEST_DIVERGENCE, FedClient
from adaptsfl.deploy.parties.fed.server import FedServer
from adaptsfl.deploy.protocol.events import Averaged
from adaptsfl.deploy.terms import Terms
from adaptsfl.errors import BadMessage
from adaptsfl.runs.backend import Order
from adaptsfl.simulation.learner import Learner
from adaptsfl.simulation.world import make_world
from adaptsfl.training import Engine
from deploy.in_process import PATIENCE_S, RECIPE, deployed

ATTEMPT = 77
CUTS = {"device-1": 1, "device-2": 2, "device-3": 3}
WEIGHTS = {"device-1": 1.0, "device-2": 2.0, "device-3": 3.0}


@pytest.fixture
def fed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FedServer:
    """A fed server of three devices that believes to be called by the edge server."""

    async def anybody(_context: Any, _role: Any) -> None:
        return None

    monkeypatch.setattr(fed_module, "require", anybody)
    return fed_server(tmp_path)


def fed_server(folder: Path) -> FedServer:
    (folder / "recipe.toml").write_text(RECIPE)
    return FedServer(Terms.of(load_recipe(folder / "recipe.toml", ["fleet.devices=3"])), folder / "fed")


def deliver(fed: FedServer, copies: dict[str, LayerStates]) -> None:
    """Open a block at the fed server and put all copies there, each from the party that would bring it."""
    fed.block = fed_module.FedBlock(ATTEMPT, 0, max(CUTS.values()), CUTS, {})
    for name, cut in CUTS.items():
        fed.block.from_devices[name] = {k: state for k, state in copies[name].items() if k <= cut}
        fed.block.from_edge[name] = {k: state for k, state in copies[name].items() if k > cut}


def copies_of(fed: FedServer, *factors: float) -> dict[str, LayerStates]:
    """Return copies of all devices: the model's own weights, times a number for each device."""
    states = {number: fed.template.layer(number).state() for number in range(1, 4)}
    return {
        name: {number: {key: factor * tensor for key, tensor in state.items()} for number, state in states.items()}
        for name, factor in zip(CUTS, factors, strict=True)
    }


def close(fed: FedServer, *, divergence: bool = True) -> wire.Closed:
    return asyncio.run(fed.close(wire.Closing(attempt=ATTEMPT, weights=WEIGHTS, divergence=divergence), None))


def test_by_hand(fed: FedServer) -> None:
    """Copies w, 2w and 4w with weights 1, 2 and 3: w̄ = (1 + 4 + 12)/6 w = 17/6 w.

    They are 11/6, 5/6 and 7/6 of ‖w‖ from it, in the mean (11 + 2·5 + 3·7)/36 = 42/36; over 17/6 that is 7/17.
    """
    deliver(fed, copies_of(fed, 1, 2, 4))
    assert close(fed).divergence == pytest.approx([7 / 17] * 3)


def test_it_is_what_the_engine_measures_of_the_same_copies(fed: FedServer) -> None:
    """With a bias and a weight that part at different rates, as training has it."""
    shares = [weight / sum(WEIGHTS.values()) for weight in WEIGHTS.values()]
    engine = Engine(fed.model, Decision((3, 3, 3), 9), fed.terms.optimizer, weights=shares)
    random = torch.Generator().manual_seed(3)
    for _ in range(4):
        engine.round(
            [(torch.randn(8, 1, 8, 8, generator=random), torch.randint(10, (8,), generator=random)) for _ in range(3)]
        )
    deliver(
        fed,
        {
            name: {
                number: {
                    f"parameters.{key}": rows[k].clone() for key, rows in engine.layers[number - 1].parameters.items()
                }
                for number in range(1, 4)
            }
            for k, name in enumerate(CUTS)
        },
    )
    expected = engine.divergence()
    assert min(expected) > 1e-4
    assert close(fed).divergence == pytest.approx(expected, rel=1e-9)


def test_it_is_measured_only_if_asked_for(fed: FedServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fed_module, "divergence", None)
    deliver(fed, copies_of(fed, 1, 2, 4))
    answer = close(fed, divergence=False)
    assert (answer.version, list(answer.divergence)) == (1, [])


def test_a_mean_of_zero_is_told_as_a_number(fed: FedServer) -> None:
    """2 w, -w and 0 with weights 1, 2 and 3 sum to zero, where the simulator says infinity."""
    deliver(fed, copies_of(fed, 2, -1, 0))
    assert list(close(fed).divergence) == [LARGEST_DIVERGENCE] * 3
    deliver(fed, copies_of(fed, 0, 0, 0))
    assert fed._divergence(fed.block, WEIGHTS) == (0.0,) * 3


def test_a_repeated_close_has_the_same_answer_also_after_a_restart(fed: FedServer, tmp_path: Path) -> None:
    deliver(fed, copies_of(fed, 1, 2, 4))
    first = close(fed)
    assert len(first.divergence) == 3
    assert close(fed) == first
    assert close(fed_server(tmp_path)) == first


def test_averages_and_divergence_do_not_depend_on_the_order_of_a_message(fed: FedServer) -> None:
    """Its maps come in another order in every process, and sums of floats differ with theirs."""
    found = []
    for names in (list(WEIGHTS), list(reversed(WEIGHTS))):
        fed._closed = None
        deliver(fed, copies_of(fed, 0.1, 0.7, 1.3))
        request = SimpleNamespace(attempt=ATTEMPT, weights={name: WEIGHTS[name] for name in names}, divergence=True)
        answer = asyncio.run(fed.close(request, None))  # type: ignore[arg-type]
        found.append((list(answer.divergence), fed.versions.pop(1)))
    (apart, states), (apart_again, states_again) = found
    assert apart == apart_again
    for number, state in states.items():
        assert all(torch.equal(tensor, states_again[number][key]) for key, tensor in state.items())


class Answering:
    """A fed server that answers whatever a test likes."""

    def __init__(self, **answer: Any) -> None:
        self.answer = wire.Closed(**answer)

    async def close(self, _request: wire.Closing, *, timeout: float) -> wire.Closed:
        return self.answer


@pytest.mark.parametrize(
    ("found", "problem"),
    [
        ([], "the divergence of 0 layers, 2 were expected"),
        ([0.1], "the divergence of 1 layers, 2 were expected"),
        ([0.1, 0.2, 0.3], "the divergence of 3 layers, 2 were expected"),
        ([0.1, math.nan], "nan as the divergence of layer 2"),
        ([math.inf, 0.1], "inf as the divergence of layer 1"),
        ([0.1, -0.1], "-0.1 as the divergence of layer 2"),
    ],
)
def test_the_edge_server_refuses_what_cannot_be(found: list[float], problem: str, fed: FedServer) -> None:
    client = FedClient(Answering(version=1, divergence=found), fed.template)  # type: ignore[arg-type]
    with pytest.raises(BadMessage, match=f"the fed server sent {problem}"):
        asyncio.run(client.close(ATTEMPT, WEIGHTS, measured=2))


def test_the_edge_server_refuses_what_it_did_not_ask_for(fed: FedServer) -> None:
    client = FedClient(Answering(version=1, divergence=[0.1]), fed.template)  # type: ignore[arg-type]
    with pytest.raises(BadMessage, match="the divergence of 1 layers, 0 were expected"):
        asyncio.run(client.close(ATTEMPT, WEIGHTS))


def test_who_did_not_deliver_is_told_without_it(fed: FedServer) -> None:
    client = FedClient(Answering(version=0, missing=["device-1"]), fed.template)  # type: ignore[arg-type]
    assert asyncio.run(client.close(ATTEMPT, WEIGHTS, measured=2)).missing == ["device-1"]


class Losing:
    """Calls of the fed server, of which every first answer to `close` is lost."""

    def __init__(self, calls: Any) -> None:
        self.calls = calls
        self.lost: set[int] = set()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.calls, name)

    async def close(self, request: wire.Closing, **options: Any) -> wire.Closed:
        answer: wire.Closed = await self.calls.close(request, **options)
        if request.attempt not in self.lost:
            self.lost.add(request.attempt)
            nothing = grpc.aio.Metadata()
            raise grpc.aio.AioRpcError(grpc.StatusCode.UNAVAILABLE, nothing, nothing, "Socket closed")
        return answer


def test_a_deployment_has_the_simulators(tmp_path: Path) -> None:
    """Devices of unequal weights, layers on both sides of cuts, L_c that changes, and answers that are lost."""
    changes = ('data.weights="size"', 'data.partition.kind="dirichlet"')
    found: list[Averaged] = []

    async def scenario() -> None:
        async with deployed(tmp_path, None, *changes) as here:
            averaging, losing = here.conductor.executor.averaging, Losing(here.conductor.fed.calls)
            averaging.measure_divergence, here.conductor.fed.calls = True, losing
            unwatched = averaging.average

            async def watched(*arguments: Any) -> Averaged:
                found.append(await unwatched(*arguments))
                return found[-1]

            averaging.average = watched  # type: ignore[method-assign]
            devices = [here.device(f"device-{k}", probe_links=False) for k in range(1, 5)]
            await here.finish([asyncio.create_task(device.run()) for device in devices])
            assert len(losing.lost) == 3

    asyncio.run(asyncio.wait_for(scenario(), PATIENCE_S))
    world = make_world(load_recipe(tmp_path / "recipe.toml", changes), 0)
    assert len(set(world.data.weights)) > 1
    learner = Learner(world, "engine", divergence=True)
    steps = [Order(Decision((deepest,), rounds), rounds, 1) for rounds, deepest in ((3, 4), (2, 2), (5, 4))]
    expected = [learner.train(step, None).divergence for step in steps]
    assert [averaged.version for averaged in found] == [1, 2, 3]
    assert [len(apart) for apart in expected] == [4, 2, 4]
    for averaged, apart in zip(found, expected, strict=True):
        assert min(apart) > 0
        assert averaged.divergence == pytest.approx(apart, rel=1e-3)
