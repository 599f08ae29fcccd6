"""Batch-norm's statistics are those of the averaged model, as in a simulation; what is lost costs one evaluation."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save
from torch import Tensor

from adaptsfl.config import load_recipe
from adaptsfl.deploy import moments_file
from adaptsfl.deploy.moments_file import MomentsTemplate
from adaptsfl.deploy.parties.device.data import load_device_data
from adaptsfl.deploy.parties.device.party import DeviceParty
from adaptsfl.deploy.parties.edge import conductor as conducting
from adaptsfl.deploy.security.identity import Party
from adaptsfl.deploy.service import NotNow
from adaptsfl.deploy.wire_pb2 import Layers, LayersPart
from adaptsfl.errors import BadMessage
from adaptsfl.models import SplitModel, build, split
from adaptsfl.runs.folder import read_run
from adaptsfl.simulation.experiment import MODEL, Experiment
from adaptsfl.training.statistics import Moments, reestimated
from deploy.hostile_client import Hostile, refusal
from deploy.in_process import PATIENCE_S, RECIPE, Deployment, deployed
from deploy.test_bad_luck import BATCH_NORM, THREE, ended, planned, played, started
from deploy.test_one_loop import Crash, crashed
from training.cases import largest_difference

TOLERANCE = 2e-5  # as where weights are compared: sums in another order
OFF = "training.reestimate_statistics=false"
EVERY = "run.evaluate_every=1"
ALL_TESTS = RECIPE.replace("test_samples = 40\n", "")


@pytest.fixture(autouse=True)
def _short_shutdown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(conducting, "SHUTDOWN_S", 0.0)
    monkeypatch.setattr(conducting, "PREPARING_S", 0.0)


def model_of(run: Any) -> dict[str, Tensor]:
    return load_file(run.folder / MODEL)


def written(folder: Path) -> dict[str, Tensor]:
    return load_file(folder / "fed" / "model.safetensors")


def simulated(folder: Path, *changes: str) -> Any:
    (run,) = Experiment(load_recipe(folder / "recipe.toml", changes), folder / "simulated").execute()
    return run


def evaluations_of(folder: Path) -> dict[int, tuple[float, float]]:
    return {row[0]: row[2:] for block in read_run(folder / "edge").blocks for row in block.evaluations}


# --- the same as in a simulation ---


@pytest.mark.parametrize("switch", [(), (OFF,)], ids=["on", "off"])
@pytest.mark.parametrize(
    "changes",
    [(), ('training.statistics="device"', 'data.weights="size"'), ("deploy.cut_floor=2",)],
    ids=["pooled", "device", "floor"],
)
@pytest.mark.filterwarnings("ignore::adaptsfl.training.TrainingWarning")
def test_evaluations_and_the_model_are_those_of_the_simulator(
    tmp_path: Path, changes: tuple[str, ...], switch: tuple[str, ...]
) -> None:
    """Mixed cuts, plans and L_c that change; all test samples, so that both worlds have the same ones."""
    plans = "[32345, 23333, 25243]" if "deploy.cut_floor=2" in changes else "[31234, 22222, 23142]"
    recipe = ALL_TESTS.replace("[31234, 22222, 53142]", plans)
    changes = (BATCH_NORM, EVERY, *changes, *switch)

    async def scenario() -> None:
        async with deployed(tmp_path, None, *changes, recipe=recipe) as here:
            await here.finish(started(here, *[DeviceParty] * 4))
            assert not any("re-estimated" in line for line in here.lines)

    played(scenario())
    run = simulated(tmp_path, *changes)
    theirs = {row[0]: row[2:] for block in run.blocks for row in block.evaluations}
    ours = evaluations_of(tmp_path)
    assert list(ours) == [3, 5, 7, 9, 10]
    for round_, (accuracy, loss) in ours.items():
        assert accuracy == pytest.approx(theirs[round_][0], abs=0.006)  # two of 360 samples may be on the edge
        assert loss == pytest.approx(theirs[round_][1], rel=1e-3)
    blocks = read_run(tmp_path / "edge").blocks
    assert [block.reestimated for block in blocks] == [bool(block.evaluations) and not switch for block in blocks]
    found, expected = written(tmp_path), model_of(run)
    assert largest_difference(found, expected) < TOLERANCE * 5  # running variances are larger than 1


def test_group_norm_needs_no_estimation(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with deployed(tmp_path, None, THREE, "run.rounds=2", EVERY, recipe=planned(1222)) as here:
            assert not here.conductor.reestimates
            await here.finish(started(here, *[DeviceParty] * 3))
            assert here.fed._merged is None

    played(scenario())
    assert list(evaluations_of(tmp_path)) == [1, 2]


# --- what may go wrong ---


def on_estimating(act: Callable[[DeviceParty, int], Any]) -> type[DeviceParty]:
    """A kind of device to which something happens when it is to send what statistics are estimated from."""

    class Estimating(DeviceParty):
        asked = 0

        async def _estimate(self, round_: int, stream: Any, fed: Any) -> None:
            self.asked += 1
            if await act(self, self.asked):
                await super()._estimate(round_, stream, fed)

    return Estimating


def undisturbed(folder: Path, recipe: str, *changes: str) -> dict[str, Tensor]:
    folder.mkdir()
    (folder / "recipe.toml").write_text(recipe)
    return model_of(simulated(folder, *changes))


CHANGES = (THREE, BATCH_NORM, "run.rounds=3", EVERY)


def test_a_device_that_leaves_is_not_waited_for(tmp_path: Path) -> None:
    """It connects again, is asked again, and leaves again: two of three go on without it."""

    async def leave(device: DeviceParty, _asked: int) -> bool:
        raise asyncio.CancelledError

    async def scenario() -> None:
        async with deployed(tmp_path, None, *CHANGES, recipe=planned(1222)) as here:
            devices = started(here, DeviceParty, DeviceParty, on_estimating(leave))
            await here.finish(devices[:2])
            await ended(devices)

    played(scenario())
    assert list(evaluations_of(tmp_path)) == [1, 2, 3]


def test_a_device_that_is_silent_costs_one_deadline(tmp_path: Path) -> None:
    async def sleep(_device: DeviceParty, _asked: int) -> bool:
        await asyncio.Event().wait()
        return False

    async def scenario() -> None:
        changes = (*CHANGES, "deploy.round_deadline_s=0.5")
        async with deployed(tmp_path, None, *changes, recipe=planned(1222)) as here:
            devices = started(here, DeviceParty, DeviceParty, on_estimating(sleep))
            await here.run
            for device in devices:
                device.cancel()
            await ended(devices)

    played(scenario())
    assert 3 in evaluations_of(tmp_path)


def test_a_fed_server_that_forgets_costs_one_evaluation(tmp_path: Path) -> None:
    """It is restarted while moments are merged, after round 1; after rounds 2 and 3 the model is evaluated again."""

    async def scenario() -> None:
        async with deployed(tmp_path / "run", None, *CHANGES, recipe=planned(1231)) as here:
            fed, calls = here.conductor.fed, []
            merge = fed.merge_moments

            async def forgotten(attempt: int, weights: Any) -> Any:
                calls.append(attempt)
                if len(calls) == 1:
                    here.fed.block = None
                return await merge(attempt, weights)

            fed.merge_moments = forgotten  # type: ignore[method-assign]
            await here.finish(started(here, *[DeviceParty] * 3))
            assert any("no evaluation this time" in line for line in here.lines)
            assert all(member.violations == 0 for member in here.conductor.protocol.devices)

    played(scenario())
    assert list(evaluations_of(tmp_path / "run")) == [2, 3]
    expected = undisturbed(tmp_path / "simulated", planned(1231), *CHANGES)
    assert largest_difference(written(tmp_path / "run"), expected) < TOLERANCE * 5


def test_a_fed_server_that_forgets_before_devices_fetch_loses_the_evaluation_only(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with deployed(tmp_path, None, *CHANGES, recipe=planned(1222)) as here:
            fed, done = here.conductor.fed, []
            fetch = fed.fetch_moments

            async def then_forgotten(attempt: int, layers: range) -> Any:
                found = await fetch(attempt, layers)
                if not done:
                    here.fed.block = None
                done.append(attempt)
                return found

            fed.fetch_moments = then_forgotten  # type: ignore[method-assign]
            await here.finish(started(here, *[DeviceParty] * 3))

    played(scenario())
    assert 3 in evaluations_of(tmp_path)


def test_statistics_lost_before_the_model_is_written_are_estimated_again(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with deployed(tmp_path / "run", None, *CHANGES, recipe=planned(1231)) as here:
            hand_over, tried = here.conductor._hand_over, []

            async def lost(common: Any, *, statistics: bool) -> None:
                tried.append(statistics)
                if len(tried) == 1:
                    here.fed._merged = None
                await hand_over(common, statistics=statistics)

            here.conductor._hand_over = lost  # type: ignore[method-assign]
            await here.finish(started(here, *[DeviceParty] * 3))
            assert tried == [True, True]

    played(scenario())
    assert list(evaluations_of(tmp_path / "run")) == [1, 2, 3]
    expected = undisturbed(tmp_path / "simulated", planned(1231), *CHANGES)
    assert largest_difference(written(tmp_path / "run"), expected) < TOLERANCE * 5


def test_a_model_is_written_even_if_statistics_are_lost_again_and_again(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with deployed(tmp_path / "run", None, *CHANGES, recipe=planned(1231)) as here:

            async def never(_attempt: int, _weights: Any) -> Any:
                raise NotNow("it forgets everything")

            here.conductor.fed.merge_moments = never  # type: ignore[method-assign]
            await here.finish(started(here, *[DeviceParty] * 3))
            assert any("averaged statistics of batch-norm" in line for line in here.lines)

    played(scenario())
    assert not evaluations_of(tmp_path / "run")
    expected = undisturbed(tmp_path / "simulated", planned(1231), *CHANGES, OFF)
    assert largest_difference(written(tmp_path / "run"), expected) < TOLERANCE * 5


def test_after_a_restart_of_the_edge_server_the_model_has_its_statistics(tmp_path: Path) -> None:
    """Both servers are killed after the last evaluation was written: it is not repeated, the estimation is."""
    changes, recipe = ("fleet.devices=2", BATCH_NORM, "run.rounds=3", EVERY), planned(123)

    async def scenario() -> None:
        async with deployed(tmp_path / "run", None, *changes, recipe=recipe) as here:

            def crash(*_row: Any) -> None:
                evaluated(*_row)
                raise Crash

            evaluated = here.conductor.journal.evaluated
            here.conductor.journal.evaluated = crash  # type: ignore[method-assign]
            await crashed(here)
        async with deployed(tmp_path / "run", None, *changes, recipe=recipe) as here:
            await here.finish(started(here, *[DeviceParty] * 2))

    played(scenario())
    assert list(evaluations_of(tmp_path / "run")) == [1, 2, 3]
    expected = undisturbed(tmp_path / "simulated", recipe, *changes)
    assert largest_difference(written(tmp_path / "run"), expected) < TOLERANCE * 5


def test_who_claims_moments_that_never_came_is_sent_away(tmp_path: Path) -> None:
    class Claiming(DeviceParty):
        async def _estimate(self, round_: int, stream: Any, fed: Any) -> None:
            class Nothing:
                def __getattr__(self, name: str) -> Any:
                    async def call(*_arguments: Any, **_options: Any) -> None:
                        return None

                    return call

            await super()._estimate(round_, stream, Nothing())  # type: ignore[arg-type]

    async def scenario() -> None:
        async with deployed(tmp_path, None, *CHANGES, recipe=planned(1222)) as here:
            devices = started(here, DeviceParty, DeviceParty, Claiming)
            await here.finish(devices[:2])
            bad = here.conductor.protocol.devices[2]
            assert bad.undelivered > 0 or bad.violations > 0
            assert "none are" in bad.last_error or "times in a row" in bad.last_error
            await ended(devices)

    played(scenario())
    assert 3 in evaluations_of(tmp_path)


@pytest.mark.parametrize("plan", [1442, 1222], ids=["its own layers", "common layers"])
def test_activations_that_swell_the_statistics_cost_their_device_only(tmp_path: Path, plan: int) -> None:
    class Spoiling(DeviceParty):
        estimating = False

        async def _estimate(self, round_: int, stream: Any, fed: Any) -> None:
            self.estimating = True
            await super()._estimate(round_, stream, fed)
            self.estimating = False

        def _packed(self, activations: Tensor, *rest: Any) -> Any:
            return super()._packed(activations * (1e12 if self.estimating else 1.0), *rest)

    async def scenario() -> None:
        async with deployed(tmp_path, None, *CHANGES, recipe=planned(plan)) as here:
            devices = started(here, DeviceParty, DeviceParty, Spoiling)
            await here.finish(devices[:2])
            assert here.conductor.protocol.devices[2].violations > 0
            await ended(devices)

    played(scenario())
    assert 3 in evaluations_of(tmp_path)
    assert all(bool(torch.isfinite(tensor).all()) for tensor in written(tmp_path).values())


# --- the deepest device is gone at the end ---


def test_layers_that_become_common_at_the_end_have_their_statistics_too(tmp_path: Path) -> None:
    """Device 3 has cut 4, the others 2: without it layers 3 and 4 are common when the model is put together."""
    gone = asyncio.Event()

    async def scenario() -> Deployment:
        async with deployed(tmp_path, None, *CHANGES, "run.evaluate_every=9", recipe=planned(3224)) as here:
            devices = started(here, *[DeviceParty] * 3)
            evaluate_last = here.conductor._evaluate_last

            async def without_the_third() -> bool:
                if not gone.is_set():
                    devices[2].cancel()
                    await here.until(lambda: here.conductor.protocol.devices[2].connection is None)
                    gone.set()
                return await evaluate_last()

            here.conductor._evaluate_last = without_the_third  # type: ignore[method-assign]
            await here.finish(devices[:2])
            await ended(devices)
            return here

    here = asyncio.run(asyncio.wait_for(scenario(), PATIENCE_S))
    terms = here.conductor.terms
    model, _ = terms.model()
    found = written(tmp_path)
    model.module.load_state_dict(found)
    inputs = [load_device_data(terms, number, None, 10).at(3)[0] for number in range(2)]
    expected = reestimated(model.pieces, 2, inputs, [0.5, 0.5], pooled=True)
    for layer in expected:
        for name, value in layer.items():
            torch.testing.assert_close(found[name], value, atol=1e-4, rtol=1e-4, msg=lambda m, n=name: f"{n}: {m}")


# --- what the fed server refuses ---


def small() -> SplitModel:
    torch.manual_seed(0)
    built = build("vgg_digits", width=0.25, norm="batch")
    assert built.example_input is not None
    return split(built.module, built.example_input)


def moments(template: MomentsTemplate, layers: range) -> dict[Any, Moments]:
    return {
        norm: Moments(
            1.0, 8.0, torch.zeros(template._channels[norm]).double(), torch.ones(template._channels[norm]).double()
        )
        for norm in template.norms(layers)
    }


def test_moments_come_back_as_they_were() -> None:
    template, layers = MomentsTemplate(small()), range(1, 4)
    given = moments(template, layers)
    data = moments_file.to_bytes(given)
    assert len(data) <= template.largest_bytes(layers)
    found = template.from_bytes(data, layers)
    assert list(found) == list(given)
    for norm, one in found.items():
        assert (one.weight, one.count) == (1.0, 8.0)
        assert torch.equal(one.mean, given[norm].mean)
        assert torch.equal(one.variance, given[norm].variance)


@pytest.mark.parametrize(
    "spoil",
    [
        lambda found: Moments(1.0, 8.0, found.mean.fill_(float("nan")), found.variance),
        lambda found: Moments(1.0, 8.0, found.mean, found.variance.fill_(float("inf"))),
        lambda found: Moments(1.0, 8.0, found.mean, -found.variance),
        lambda found: Moments(1.0, 8.0, found.mean + 1e5, found.variance),
        lambda found: Moments(1.0, 0.0, found.mean, found.variance),
        lambda found: Moments(0.0, 8.0, found.mean, found.variance),
        lambda found: Moments(float("nan"), 8.0, found.mean, found.variance),
        lambda found: Moments(1.0, 8.0, found.mean[1:], found.variance[1:]),
        lambda found: Moments(1.0, 8.0, found.mean[:, None], found.variance),
    ],
    ids=["NaN", "infinity", "negative", "too large", "no count", "no weight", "weight NaN", "channels", "shape"],
)
def test_moments_that_cannot_be_are_refused(spoil: Callable[[Moments], Moments]) -> None:
    template, layers = MomentsTemplate(small()), range(1, 3)
    given = moments(template, layers)
    norm = template.norms(layers)[-1]
    with pytest.raises(BadMessage, match="moments of layer 2 came"):
        template.from_bytes(moments_file.to_bytes({**given, norm: spoil(given[norm])}), layers)


def test_files_that_are_no_moments_are_refused() -> None:
    template, layers = MomentsTemplate(small()), range(1, 3)
    with pytest.raises(BadMessage, match="cannot be read"):
        template.from_bytes(b"nonsense", layers)
    with pytest.raises(BadMessage, match="came as 1 tensors, 6 were expected"):
        template.from_bytes(save({"1.x": torch.zeros(1)}), layers)
    data = moments_file.to_bytes(moments(template, range(2, 4)))
    with pytest.raises(BadMessage, match="moments of layer 1 came without"):
        template.from_bytes(data, layers)


def test_a_member_that_brings_nonsense_is_refused_and_counted(tmp_path: Path) -> None:
    """Wrong layers, and numbers that cannot be: each is a violation. Then it brings what is right, and is believed."""

    async def scenario() -> None:
        async with deployed(tmp_path, None, *CHANGES, recipe=planned(1222)) as here:
            party, template = Party("device", "device-3"), here.fed.moments
            good = moments_file.to_bytes(moments(template, range(1, 3)))
            bad = {norm: one.weighing(-1.0) for norm, one in moments(template, range(1, 3)).items()}

            def brought(last: int, data: bytes) -> list[bytes]:
                assert here.fed.block is not None
                header = Layers(attempt=here.fed.block.attempt, device=party.name, first=1, last=last, size=len(data))
                return [part.SerializeToString() for part in (LayersPart(header=header), LayersPart(chunk=data))]

            async def attack(_device: DeviceParty, asked: int) -> bool:
                if asked == 1:
                    hostile = Hostile(here, party.name, 0)
                    for messages in (brought(3, good), brought(2, moments_file.to_bytes(bad))):
                        code = await hostile.call("Fed", "bring_moments", messages)
                        assert code in refusal("INVALID_ARGUMENT")
                    await hostile.close()
                    assert here.fed.block is not None
                    assert party.name not in here.fed.block.moments
                return True

            await here.finish(started(here, DeviceParty, DeviceParty, on_estimating(attack)))
            assert here.fed._violations[party] == 2

    played(scenario())
    assert list(evaluations_of(tmp_path)) == [1, 2, 3]


def test_members_may_not_merge_and_the_edge_server_gets_nothing_up_to_the_floor(tmp_path: Path) -> None:
    asked: list[tuple[str, str]] = []

    async def scenario() -> None:
        changes = (*CHANGES, "deploy.cut_floor=2")
        async with deployed(tmp_path, None, *changes, recipe=planned(1234)) as here:

            async def attack(device: DeviceParty, _asked: int) -> bool:
                hostile = Hostile(here, device.party.name, 0)
                asked.append(("merge", await hostile.call("Fed", "merge_moments", [b""])))
                await hostile.close()
                fed = here.conductor.fed
                try:
                    await fed.fetch_moments(here.fed.block.attempt, range(2, 4))  # type: ignore[union-attr]
                except Exception as error:
                    asked.append(("edge", str(error)))
                return True

            await here.finish(started(here, DeviceParty, DeviceParty, on_estimating(attack)))

    played(scenario())
    assert asked[0][1] in refusal("PERMISSION_DENIED")
    assert "the edge server asked for layer 2, and the floor is 2" in asked[1][1]


def test_whoever_has_shards_and_batch_norm_is_told_of_group_norm(tmp_path: Path) -> None:
    async def scenario() -> None:
        shards = 'data.partition={kind="shards",shard_size=40}'
        async with deployed(tmp_path, None, THREE, BATCH_NORM, shards, "run.rounds=1", recipe=planned(1222)) as here:
            await here.finish(started(here, *[DeviceParty] * 3))
            assert sum("Group-norm would learn several times faster" in line for line in here.lines) == 1

    played(scenario())
