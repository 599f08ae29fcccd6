"""A tap on all that each server receives: neither gets to see what it must not.

Tensors are looked for as the bytes that they have on the wire. Plain text, so that nothing but the protocol hides them.
"""

import asyncio
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from adaptsfl.deploy import service
from adaptsfl.deploy.layers_file import LayerStates
from adaptsfl.deploy.parties.device.party import DeviceParty
from adaptsfl.deploy.parties.fed import server as fed_module
from adaptsfl.deploy.transfer import chunks
from deploy.in_process import Deployment, deployed

DEVICES = ("device-1", "device-2", "device-3", "device-4")
SHORTEST = 64  # bytes; anything shorter may occur by chance
FLOOR = 2


class Tap:
    """All bytes that a server received, by call; chunks of one body together, so that nothing hides at their seams."""

    def __init__(self) -> None:
        self.bodies: list[bytes] = []

    def found(self, tensors: Sequence[Tensor]) -> int:
        """Return how many tensors came by, whole or in their first or last part; those too short do not count.

        Eight bytes of each part are looked for at every place at once, and then the part.
        """
        parts: dict[int, list[tuple[int, bytes, int]]] = {}  # by these eight bytes: where in the part, part and tensor
        for number, tensor in enumerate(tensors):
            data = _bytes(tensor)
            if not looked_for(data):
                continue
            for part in (data[:256], data[-256:]):
                at = max(range(0, len(part) - 7, 4), key=lambda k: len(set(part[k : k + 8])))
                parts.setdefault(int.from_bytes(part[at : at + 8], "little"), []).append((at, part, number))
        keys = np.array(list(parts), dtype=np.uint64)
        seen: set[int] = set()
        for body in self.bodies:
            for phase in range(min(8, len(body) - 7)):
                words = np.frombuffer(body, "<u8", (len(body) - phase) // 8, phase)
                for place in np.flatnonzero(np.isin(words, keys)).tolist():
                    for at, part, number in parts[int(words[place])]:
                        begin = phase + 8 * place - at
                        if begin >= 0 and body[begin : begin + len(part)] == part:
                            seen.add(number)
        return len(seen)


def looked_for(data: bytes) -> bool:
    """Whether bytes are long enough, and no mere zeros or ones, so that they do not occur by chance."""
    return len(data) >= SHORTEST and len(set(data)) >= 4


class Secrets:
    """What devices have and make, written down where it comes about."""

    def __init__(self) -> None:
        self.weights: dict[str, list[Tensor]] = {name: [] for name in DEVICES}  # layers up to the cut, at any time
        self.averaged: list[Tensor] = []  # layers up to the floor, of any version
        self.activations: list[Tensor] = []
        self.inputs: list[Tensor] = []
        self.labels: list[Tensor] = []


@contextmanager
def tapped(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Tap]]:
    """Keep whatever comes in, before anything is made of it."""
    taps = {"Edge": Tap(), "Fed": Tap()}
    wrapped = service.Service._wrapped

    def listening(self: Any, method: Any, parse: Any, takes_many: bool, gives_many: bool) -> Any:
        tap = taps[self.service]
        inner = wrapped(self, method, parse, takes_many, gives_many)

        async def kept(requests: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
            place = len(tap.bodies)
            tap.bodies.append(b"")
            async for data in requests:
                message = parse(data)
                # Of a chunk its bytes alone: between two of them are a few of the protocol.
                tap.bodies[place] += bytes(getattr(message, "chunk", b"")) or data
                yield data

        def one(request: Any, context: Any) -> Any:
            if takes_many:
                return inner(kept(request), context)
            tap.bodies.append(request)
            return inner(request, context)

        if gives_many:

            async def many(request: Any, context: Any) -> AsyncIterator[Any]:
                async for answer in one(request, context):
                    yield answer

            return many

        async def single(request: Any, context: Any) -> Any:
            return await one(request, context)

        return single

    monkeypatch.setattr(service.Service, "_wrapped", listening)
    yield taps


def watch(device: DeviceParty, secrets: Secrets) -> DeviceParty:
    """Write down all that a device computes with, as it sends it."""
    packed, send, deliver = device._packed, device._send, device._deliver

    def note_weights() -> None:
        if device.held is not None:
            for layer in device.held.device.layers:
                secrets.weights[device.party.name] += [p.detach().clone() for p in layer.parameters]

    def kept(activations: Tensor, labels: Tensor, dtype: str) -> Any:
        secrets.activations.append(activations.detach().clone())
        secrets.labels.append(labels.clone())
        note_weights()
        return packed(activations, labels, dtype)

    async def sent(stream: Any, round_: int) -> None:
        if device.held is not None and 1 <= round_ <= device.held.last_round:
            secrets.inputs.append(device.data.at(round_)[0].clone())
        await send(stream, round_)

    async def delivered(attempt: int, stream: Any, fed: Any) -> None:
        note_weights()
        await deliver(attempt, stream, fed)

    device._packed, device._send, device._deliver = kept, sent, delivered  # type: ignore[method-assign]
    return device


async def trained(deployment: Deployment, secrets: Secrets, monkeypatch: pytest.MonkeyPatch) -> None:
    """Train to the end, and note all averages of the layers up to the floor."""
    averaged = deployment.fed._averaged

    def noting(block: fed_module.FedBlock, weights: dict[str, float]) -> LayerStates:
        states = averaged(block, weights)
        secrets.averaged.extend(tensors_up_to_the_floor(states))
        return states

    monkeypatch.setattr(deployment.fed, "_averaged", noting)
    secrets.averaged.extend(tensors_up_to_the_floor(deployment.fed.versions[0]))
    devices = [asyncio.create_task(watch(deployment.device(name), secrets).run()) for name in DEVICES]
    await deployment.finish(devices)


def tensors_up_to_the_floor(states: LayerStates) -> list[Tensor]:
    return [tensor.clone() for number in range(1, FLOOR + 1) for tensor in states[number].values()]


@pytest.fixture(scope="module", params=["group", "batch"])
def heard(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[dict[str, Tap], Secrets, dict[str, Any]]]:
    """One run with mixed cuts, of which plans change twice, and all that was said in it.

    With batch-norm its statistics are re-estimated, for which devices send more to both servers.
    """
    monkeypatch = pytest.MonkeyPatch()
    secrets, facts = Secrets(), {}

    async def main(taps: dict[str, Tap]) -> None:
        changes = (
            f"deploy.cut_floor={FLOOR}",
            "deploy.private_start=true",
            'run.options={"deploy.scripted_policy:Scripted"={plans=[32345,23333,25243]}}',
            "run.rounds=9",
            "run.evaluate_every=3",
            f'model.options={{width=0.25,norm="{request.param}"}}',
        )
        async with deployed(tmp_path_factory.mktemp("run"), None, *changes) as deployment:
            facts["fed"] = {k: deployment.fed.template.layer(k).state() for k in range(1, FLOOR + 1)}
            facts["edge"] = {k: deployment.conductor.template.layer(k).state() for k in range(1, FLOOR + 1)}
            await trained(deployment, secrets, monkeypatch)
            facts["model"] = deployment.model()
            facts["cuts"] = [line.split("cuts ")[1].split(" (")[0] for line in deployment.lines if "cuts" in line]

    with tapped(monkeypatch) as taps:
        asyncio.run(main(taps))
        yield taps, secrets, facts
    monkeypatch.undo()


def sought(tensors: list[Tensor]) -> list[Tensor]:
    return [tensor for tensor in tensors if looked_for(_bytes(tensor))]


def test_the_run_was_one_with_mixed_cuts_and_other_plans(heard: Any) -> None:
    _, secrets, facts = heard
    assert facts["cuts"][:3] == ["2, 3, 4, 5", "3, 3, 3, 3", "5, 2, 4, 3"]
    assert len(secrets.activations) >= 9 * len(DEVICES)
    assert all(len(sought(tensors)) > 30 for tensors in secrets.weights.values())
    assert len(secrets.averaged) > 10


def test_the_tap_finds_what_servers_do_get(heard: Any) -> None:
    """Else it would find nothing because it looks for the wrong thing."""
    taps, secrets, _ = heard
    assert taps["Edge"].found(secrets.activations) == len(secrets.activations)
    labels = sought(secrets.labels)
    assert labels
    assert taps["Edge"].found(labels) == len(labels)
    for name, tensors in secrets.weights.items():
        assert taps["Fed"].found(sought(tensors)) > 10, name


def test_the_edge_server_gets_no_weights_of_any_device(heard: Any) -> None:
    taps, secrets, _ = heard
    for name, tensors in secrets.weights.items():
        assert taps["Edge"].found(tensors) == 0, name


def test_the_edge_server_gets_no_layers_up_to_the_floor_averaged_or_not(heard: Any) -> None:
    taps, secrets, facts = heard
    assert taps["Edge"].found(secrets.averaged) == 0
    assert taps["Edge"].found(list(facts["model"].values())) == 0


def test_the_fed_server_gets_no_activations_and_no_labels(heard: Any) -> None:
    taps, secrets, _ = heard
    assert taps["Fed"].found(secrets.activations) == 0
    assert taps["Fed"].found(secrets.labels) == 0


def test_no_server_gets_inputs(heard: Any) -> None:
    taps, secrets, _ = heard
    samples = [sample for batch in secrets.inputs for sample in batch]
    assert len(samples) > 200
    for tap in taps.values():
        assert tap.found(secrets.inputs) == 0
        assert tap.found(samples) == 0


def test_the_edge_server_does_not_know_what_private_layers_began_with(heard: Any) -> None:
    *_, facts = heard
    for number in range(1, FLOOR + 1):
        weights = [name for name in facts["fed"][number] if name.startswith("parameters") and "weight" in name]
        differing = [
            name for name in weights if not torch.equal(facts["fed"][number][name], facts["edge"][number][name])
        ]
        assert differing, number


def test_a_tensor_in_several_chunks_is_found() -> None:
    tensor, tap = torch.from_numpy(np.random.default_rng(0).normal(size=1_200_000)), Tap()
    tap.bodies.append(b"header" + b"".join(piece.chunk for piece in chunks(_bytes(tensor))))
    assert tap.found([tensor, tensor + 1, tensor[1:], torch.zeros(1000)]) == 2


def _bytes(tensor: Tensor) -> bytes:
    return tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
