"""A deployment is conducted by the same loop as a simulation: it ends, plans and remembers alike."""

import asyncio
import os
import threading
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from adaptsfl.config import load_recipe
from adaptsfl.decisions import Decision
from adaptsfl.deploy.parties.edge import conductor as conducting
from adaptsfl.deploy.parties.edge.journal import Journal, RunProgress
from adaptsfl.deploy.parties.edge.resources import MeasuredFleet
from adaptsfl.deploy.status.board import Status
from adaptsfl.deploy.terms import Terms
from adaptsfl.errors import InvalidInput
from adaptsfl.fleet import FIXED, RATES, Fleet, Server
from adaptsfl.latency import PHASES
from adaptsfl.report.timeline import round_timeline
from adaptsfl.runs.beliefs import UNMEASURED_INTERVAL, Calibrated
from adaptsfl.runs.folder import RECORD, Run, read_run
from adaptsfl.runs.record import Block
from adaptsfl.simulation.experiment import Experiment
from deploy.in_process import PATIENCE_S, RECIPE, Deployment, deployed
from deploy.watching_policy import SHOWN, THINK, describe

TWO = "fleet.devices=2"
SCRIPTED = 'options = { "deploy.scripted_policy:Scripted" = { plans = [31234, 22222, 53142] } }\n'


@pytest.fixture(autouse=True)
def _alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(conducting, "SHUTDOWN_S", 0.0)
    SHOWN.clear()
    THINK.clear()
    yield
    for event in THINK:
        event.set()


def by(policy: str, **options: Any) -> str:
    """The recipe of the tests with another policy, and without its script."""
    name = policy if policy == "adaptsfl" else f"deploy.watching_policy:{policy}"
    told = ", ".join(f"{key} = {value}" for key, value in options.items())
    recipe = RECIPE.replace(SCRIPTED, f'options = {{ "{name}" = {{ {told} }} }}\n' if options else "")
    return recipe.replace("deploy.scripted_policy:Scripted", name)


def devices(here: Deployment, count: int = 2) -> list["asyncio.Task[str]"]:
    return [asyncio.create_task(here.device(f"device-{k}", probe_links=False).run()) for k in range(1, count + 1)]


def played(scenario: Any) -> None:
    asyncio.run(asyncio.wait_for(scenario, PATIENCE_S))


async def crash_after(here: Deployment, rounds: int) -> None:
    """Train so many rounds, then stop the edge server as if it were killed; what it wrote so far is what is left.

    It is killed before the next block is planned.
    """
    save, observe = here.conductor.journal.save, here.conductor.observe

    def saved(progress: RunProgress, common: Any) -> None:
        save(progress, common)
        if progress.rounds >= rounds:
            raise Crash

    async def observed() -> Any:
        await here.conductor._kept()
        return await observe()

    here.conductor.journal.save, here.conductor.observe = saved, observed  # type: ignore[method-assign]
    await crashed(here)


async def crashed(here: Deployment) -> None:
    """Run until the edge server breaks off; its devices are gone then, too."""
    running = devices(here)
    with pytest.raises(Crash):
        await here.run
    for device in running:
        device.cancel()
    await asyncio.gather(*running, return_exceptions=True)


class Crash(Exception):
    """What breaks an edge server off."""


# --- when a run ends ---


def test_a_run_that_has_converged_ends_in_both_worlds(tmp_path: Path) -> None:
    """With a learning rate of almost nothing accuracy never rises: six evaluations end it, 100 rounds are allowed."""
    changes = (TWO, "run.rounds=100", "run.evaluate_every=1", "run.converged=true", "training.learning_rate=1e-12")
    recipe = by("ByUplink", interval=1)

    async def scenario() -> None:
        async with deployed(tmp_path / "deployed", None, *changes, recipe=recipe) as here:
            await here.finish(devices(here))
            assert here.conductor.ended_by == "converged"
            assert here.conductor.progress.rounds < 12

    played(scenario())
    experiment = Experiment(load_recipe(tmp_path / "deployed" / "recipe.toml", changes), tmp_path / "simulated")
    (simulated,) = experiment.execute()
    assert simulated.ended_by == "converged"
    assert read_run(tmp_path / "deployed" / "edge").ended_by == "converged"


LAST = (TWO, "run.rounds=4", "run.evaluate_every=100", "run.target_accuracy=0.01")  # reached when all rounds are done


def test_the_last_evaluation_may_reach_the_target(tmp_path: Path) -> None:
    """As in a simulation, where the rounds have ended too."""

    async def scenario() -> None:
        async with deployed(tmp_path / "deployed", None, *LAST, recipe=by("ByUplink")) as here:
            await here.finish(devices(here))
            status = here.conductor.board.status
            assert (status.block, status.interval) == (1, 4)  # evaluating is no block

    played(scenario())
    recipe = load_recipe(tmp_path / "deployed" / "recipe.toml", LAST)
    (simulated,) = Experiment(recipe, tmp_path / "simulated").execute()
    real = read_run(tmp_path / "deployed" / "edge")
    assert real.ended_by == simulated.ended_by == "target"
    assert real.rounds_to(0.01) == simulated.rounds_to(0.01) == 4


def test_the_last_evaluation_is_recorded_once(tmp_path: Path) -> None:
    """The edge server is killed right after it was written, before run.json says that all is done."""

    async def scenario() -> None:
        async with deployed(tmp_path, None, *LAST, recipe=by("ByUplink")) as here:
            evaluated = here.conductor.journal.evaluated

            def crash(*row: Any) -> None:
                evaluated(*row)
                raise Crash

            here.conductor.journal.evaluated = crash  # type: ignore[method-assign]
            await crashed(here)
        async with deployed(tmp_path, None, *LAST, recipe=by("ByUplink")) as here:
            await here.finish(devices(here))

    played(scenario())
    run = read_run(tmp_path / "edge")
    assert (run.status, run.ended_by) == ("done", "target")
    assert run.evaluations.rounds.tolist() == [4]


# --- what is believed ---


def test_given_convergence_allows_any_interval(tmp_path: Path) -> None:
    """No drift, the recipe says: long intervals are planned, and not the five rounds of a prior."""
    given = "convergence={ initial_gap = 2.3, budget = 1.0, drift = { per_layer = [0, 0, 0, 0, 0, 0], power = 2 } }"

    async def scenario() -> None:
        changes = (TWO, "run.rounds=20", given)
        async with deployed(tmp_path, None, *changes, recipe=by("adaptsfl")) as here:
            assert here.conductor.loop.beliefs.trust().longest_interval > 1000
            await here.finish(devices(here))

    played(scenario())
    assert [block.rounds for block in read_run(tmp_path / "edge").blocks] == [20]


def believed(run: Run) -> list[dict[str, Any]]:
    """What was believed about convergence when every block began."""
    added = ("predicted", "measured")  # by the edge server, to every block
    return [{key: value for key, value in block.estimates.items() if key not in added} for block in run.blocks]


def both_worlds(folder: Path, monkeypatch: pytest.MonkeyPatch, *changes: str) -> tuple[Run, Run]:
    """Run AdaptSFL in a deployment and in a simulation, on one fleet.

    The edge server is told the simulated fleet's resources, so that plans do not depend on the seconds of this machine.
    """
    changes = (TWO, "fleet.redraw=[]", "planner.allowed_cuts=[1, 2, 3, 4, 5]", *changes)
    file = folder / "recipe.toml"
    file.write_text(by("adaptsfl"))
    (simulated,) = Experiment(load_recipe(file, changes), folder / "simulated").execute()
    rates = {name: np.array(simulated.blocks[0].resources[name]) for name in RATES}
    fleet = Fleet(**rates, server=simulated.server, names=simulated.devices)
    monkeypatch.setattr(MeasuredFleet, "fleet", lambda _measured, numbers: fleet.subset(numbers))
    monkeypatch.setattr(MeasuredFleet, "costs", property(lambda measured: measured.nominal))

    async def scenario() -> None:
        async with deployed(folder, None, *changes, recipe=by("adaptsfl")) as here:
            assert isinstance(here.conductor.loop.beliefs, Calibrated)
            await here.finish(devices(here))

    played(scenario())
    return read_run(folder / "edge"), simulated


def test_intervals_and_cuts_adapt_as_in_a_simulation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """AdaptSFL with its default beliefs: the losses are the same in both worlds, so κ and plans are.

    Averaging takes long in that fleet: plans are for more than the 5 rounds of the paper's mode.
    """
    links = ("fed_uplink", "fed_downlink", "server_to_fed", "server_from_fed")
    slow = tuple(f"fleet.{link}_mbps=20" for link in links)
    real, simulated = both_worlds(tmp_path, monkeypatch, "run.rounds=100", "run.evaluate_every=100", *slow)
    plans = [(block.interval, block.cuts, block.rounds) for block in real.blocks]
    assert plans == [(block.interval, block.cuts, block.rounds) for block in simulated.blocks]
    assert min(block.interval for block in real.blocks) > UNMEASURED_INTERVAL
    assert len(set(plans)) > 2
    for ours, theirs in zip(believed(real), believed(simulated), strict=True):
        assert ours.pop("growth")["factors"] == pytest.approx(theirs.pop("growth")["factors"], rel=1e-3)
        assert ours == pytest.approx(theirs, rel=1e-3)
    assert len({block.estimates["kappa"] for block in real.blocks}) > 2  # it learned


def test_types_and_parts_are_chosen_as_in_a_simulation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first round is exact, so that both worlds measure the same factors before anything is rounded."""
    auto = ('model.wire_dtype="auto"', 'planner.micro_batches="auto"', "planner.max_interval=4", "run.rounds=12")
    real, simulated = both_worlds(tmp_path, monkeypatch, *auto)

    def plans(run: Run) -> list[tuple[Any, ...]]:
        return [
            (block.interval, block.cuts, block.rounds, block.micro_batches, block.wire_dtype) for block in run.blocks
        ]

    assert plans(real) == plans(simulated)
    assert max(block.micro_batches for block in real.blocks) > 1
    assert {block.wire_dtype for block in real.blocks} != {"float32"}
    ours, theirs = real.blocks[0].wires, simulated.blocks[0].wires
    assert ours == pytest.approx(theirs, rel=1e-4)
    assert {"float32": 1.0, **ours} == real.blocks[1].estimates["wires"]
    assert [block.losses for block in real.blocks[:1]] == [pytest.approx(simulated.blocks[0].losses, rel=1e-3)]


def test_a_restarted_edge_server_believes_what_it_did_before(tmp_path: Path) -> None:
    """Killed after three blocks; blocks are as long as is trusted, which is more than 5 rounds and grows."""
    recipe, changes, plan = by("AsTrusted"), (TWO, "run.rounds=36"), Decision((3, 3), 12)

    async def scenario() -> None:
        async with deployed(tmp_path, None, *changes, recipe=recipe) as here:
            await crash_after(here, 24)
            before = dict(here.conductor.loop.beliefs.data(plan))
        async with deployed(tmp_path, None, *changes, recipe=recipe) as here:
            await here.finish(devices(here))
        assert before["averagings"] == 2
        assert believed(read_run(tmp_path / "edge"))[-1] == before

    played(scenario())
    assert [block.interval for block in read_run(tmp_path / "edge").blocks] == [8, 8, 8, 12]


def test_people_see_what_the_record_says_was_believed(tmp_path: Path) -> None:
    """Of the last block: how rounds grow, and the resources of devices and servers; phases of both halves."""

    async def scenario() -> Status:
        async with deployed(tmp_path, None, TWO, "run.rounds=24", recipe=by("AsTrusted")) as here:
            await here.finish(devices(here))
            return here.conductor.board.status

    status = asyncio.run(asyncio.wait_for(scenario(), PATIENCE_S))
    run = read_run(tmp_path / "edge")
    last = run.blocks[-1]
    timeline = round_timeline(run, last)
    assert timeline is not None
    assert timeline.server_s == pytest.approx(last.estimates["predicted"]["a3"])  # type: ignore[index]
    assert status.rounds_believed is not None
    assert asdict(status.rounds_believed).items() <= last.estimates.items()
    assert status.rounds_believed.averagings == 1
    assert status.server == Server(**last.restart["server"])
    for name in (*RATES, *FIXED):
        shown = tuple(getattr(device.believed, name) for device in status.devices)
        assert shown == last.resources.get(name, (0.0, 0.0))
    assert [phase for phase, *_ in status.phases] == list(PHASES)
    assert all(predicted == last.estimates["predicted"][phase] for phase, predicted, _ in status.phases)  # type: ignore[index]


# --- what a policy is shown ---


def test_the_documented_policy_adapts_in_a_deployment(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with deployed(tmp_path, None, TWO, "run.rounds=8", recipe=by("ByUplink")) as here:
            await here.finish(devices(here))

    played(scenario())
    (seen,) = SHOWN
    assert [block.interval for block in read_run(tmp_path / "edge").blocks] == [4, 2, 1, 1]
    assert not seen[0].divergence.size
    assert all(len(one.divergence) == 3 and one.divergence.min() > 0 for one in seen[1:])


def test_it_is_shown_the_same_divergence_as_in_a_simulation(tmp_path: Path) -> None:
    changes = ("run.rounds=8",)

    async def scenario() -> None:
        async with deployed(tmp_path / "deployed", None, *changes, recipe=by("ByUplink")) as here:
            await here.finish(devices(here, 4))

    played(scenario())
    Experiment(load_recipe(tmp_path / "deployed" / "recipe.toml", changes), tmp_path / "simulated").execute()
    real, simulated = SHOWN[0], SHOWN[-1]
    assert len(real) == len(simulated) == 4
    for ours, theirs in zip(real[1:], simulated[1:], strict=True):
        assert ours.divergence == pytest.approx(theirs.divergence, rel=1e-3)
        assert (ours.round, ours.block) == (theirs.round, theirs.block)
        assert ours.rng.bit_generator.state == theirs.rng.bit_generator.state


def rule(name: str, options: str, rounds: int) -> str:
    """The recipe of the tests with a built-in policy that looks at the learning rate, or at layers."""
    recipe = RECIPE.replace(SCRIPTED, f"options = {{ {name} = {{ {options} }} }}\n").replace(
        "deploy.scripted_policy:Scripted", name
    )
    schedule = "[training.schedule]\nkind = 'steps'\nrounds = [4]\nfactor = 0.5\n"
    return recipe.replace("rounds = 10", f"rounds = {rounds}") + schedule


def test_a_rule_for_the_interval_follows_the_learning_rate_after_a_restart_too(tmp_path: Path) -> None:
    """QSR: half the learning rate, four times the interval. The edge server is killed after the second block."""
    recipe = rule("qsr", "base = 2, cut = 2", 12)

    async def scenario() -> None:
        async with deployed(tmp_path, None, TWO, recipe=recipe) as here:
            await crash_after(here, 4)
        async with deployed(tmp_path, None, TWO, recipe=recipe) as here:
            await here.finish(devices(here))

    played(scenario())
    assert [block.interval for block in read_run(tmp_path / "edge").blocks] == [2, 2, 8]


def test_a_rule_that_averages_some_layers_seldom_is_refused_before_anything_is_trained(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with deployed(tmp_path, None, TWO, recipe=rule("fedlama", "interval = 2", 8)) as here:
            running = devices(here)
            with pytest.raises(InvalidInput, match=r"run.policies: FedLAMA averages some layers at other times"):
                await here.run
            assert here.conductor.progress.rounds == 0
            for device in running:
                device.cancel()
            await asyncio.gather(*running, return_exceptions=True)

    played(scenario())


BATCH_NORM = 'model.options={ width = 0.25, norm = "batch" }'
SENT = 'run.options={{"deploy.scripted_policy:Scripted"={{plans=[222],sent=[{sent}]}}}}'


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ((SENT.format(sent=30),), "micro_batches: is 3, which does not divide the batch size 8"),
        ((SENT.format(sent=40), BATCH_NORM), "decision.micro_batches: is 4, but batch-norm would normalise every part"),
    ],
    ids=["not equal", "batch-norm"],
)
def test_parts_that_cannot_be_trained_are_refused_before_anything_is(
    changes: tuple[str, ...], message: str, tmp_path: Path
) -> None:
    async def scenario() -> None:
        async with deployed(tmp_path, None, TWO, *changes) as here:
            running = devices(here)
            with pytest.raises(InvalidInput, match=message):
                await here.run
            assert here.conductor.progress.rounds == 0
            for device in running:
                device.cancel()
            await asyncio.gather(*running, return_exceptions=True)

    played(scenario())


@pytest.mark.parametrize(("changes", "expected"), [((), "auto"), ((BATCH_NORM,), 1)])
def test_parts_are_chosen_unless_batch_norm_would_see_them(
    changes: tuple[str, ...], expected: object, tmp_path: Path
) -> None:
    async def scenario() -> None:
        async with deployed(tmp_path, None, TWO, 'planner.micro_batches="auto"', *changes) as here:
            assert here.conductor.backend.limits.micro_batches == expected

    played(scenario())


# --- restarts ---


@pytest.mark.parametrize("rounds", [0, 4], ids=["a decision per block", "decisions of several blocks"])
def test_after_a_restart_a_policy_remembers_what_it_saw(tmp_path: Path, rounds: int) -> None:
    """The policy of the second process is shown all that the first was, and then goes on; nothing is asked twice."""
    recipe = by("ByUplink", interval=4 if not rounds else 2, apart=1e-4, rounds=rounds)

    async def scenario() -> None:
        async with deployed(tmp_path, None, TWO, "run.rounds=12", recipe=recipe) as here:
            await crash_after(here, 6)
        first, told = list(SHOWN[0]), here.conductor.progress.rounds
        assert told == 6
        async with deployed(tmp_path, None, TWO, "run.rounds=12", recipe=recipe) as here:
            await here.finish(devices(here))
        again = SHOWN[1]
        assert [describe(one) for one in again[: len(first)]] == [describe(one) for one in first]
        assert [one.block for one in again] == list(range(len(again)))
        assert len({one.round for one in again}) == len(again)

    played(scenario())
    run = read_run(tmp_path / "edge")
    expected = [4, 2, 1, 1, 1, 1, 1, 1] if not rounds else [2, 2, 1, 1, 1, 1, 1, 1, 1, 1]
    assert [block.interval for block in run.blocks] == expected
    assert len(SHOWN[1]) == (len(expected) if not rounds else 3)


def test_a_policy_is_not_asked_for_the_last_evaluation(tmp_path: Path) -> None:
    """Nor after a restart when all rounds are done."""
    recipe = by("ByUplink", interval=2, apart=1e9)

    async def scenario() -> None:
        async with deployed(tmp_path, None, TWO, "run.rounds=4", recipe=recipe) as here:
            await crash_after(here, 4)
            assert len(SHOWN[0]) == 2
        async with deployed(tmp_path, None, TWO, "run.rounds=4", recipe=recipe) as here:
            await here.finish(devices(here))
            assert here.conductor.ended_by == "rounds"
        assert [one.round for one in SHOWN[1]] == [0, 2]

    played(scenario())
    run = read_run(tmp_path / "edge")
    assert run.status == "done"
    assert run.evaluations.rounds.tolist()[-1] == 4


def test_a_block_is_on_the_disk_before_the_checkpoint_says_that_it_is_done(tmp_path: Path) -> None:
    """A loss of power takes what was not synchronised; a record without its last line would be of another run."""
    journal, block = journal_of(tmp_path)
    written, synchronise = [], os.fsync

    def fsync(handle: int) -> None:
        written.append(os.fstat(handle).st_ino)
        synchronise(handle)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(os, "fsync", fsync)
        journal.add(block)
    assert written == [(tmp_path / RECORD).stat().st_ino]


@pytest.mark.parametrize("left", [0, 1])
def test_a_record_that_lacks_blocks_is_refused(tmp_path: Path, left: int) -> None:
    journal, block = journal_of(tmp_path)
    for number in (1, 2):
        journal.add(replace(block, block=number, first_round=number))
    journal.save(RunProgress(rounds=2, blocks=2), {})
    (progress, _, blocks) = journal.begin() or pytest.fail("there is a checkpoint")
    assert progress.rounds == len(blocks) == 2
    lines = (tmp_path / RECORD).read_text().splitlines(keepends=True)
    (tmp_path / RECORD).write_text("".join(lines[:left]))
    with pytest.raises(InvalidInput, match=f"record: has {left} of the 2 blocks before the checkpoint. Restore it"):
        journal.begin()


def journal_of(folder: Path) -> tuple[Journal, Block]:
    """Return a journal in a folder, and a block of one round to write there."""
    file = folder / "recipe.toml"
    file.write_text(RECIPE)
    seconds = dict.fromkeys(PHASES, 0.0)
    block = Block(1, 1, 1, 1.0, 1, (1, 1, 1, 1), 1, {}, seconds, ("device-1", "a1"), 0.0, 1.0, (), {}, {}, 1.0)
    return Journal(folder, Terms.of(load_recipe(file))), block


# --- plans that take long ---


def test_a_plan_that_takes_long_keeps_nobody_waiting(tmp_path: Path) -> None:
    """The second plan is never made in time: blocks go on with the first. Once it has come, it holds."""
    THINK.extend(threading.Event() for _ in range(20))

    async def scenario() -> None:
        changes = (TWO, "run.rounds=8", "deploy.plan_deadline_s=0.05", "deploy.private_start=false")
        async with deployed(tmp_path, None, *changes, recipe=by("Slow")) as here:
            running = devices(here)
            await here.until(lambda: here.conductor.progress.rounds >= 3)
            assert len(SHOWN[0]) == 2  # asked, and not answered
            for event in THINK:
                event.set()
            await here.finish(running)

    played(scenario())
    cuts = [max(block.cuts) for block in read_run(tmp_path / "edge").blocks]
    assert cuts[:3] == [1, 1, 1]
    assert 2 in cuts[3:]
    assert cuts == sorted(cuts)


def test_plans_are_made_beside_the_event_loop(tmp_path: Path) -> None:
    """While a policy thinks, and is waited for, devices that come are answered."""
    THINK.extend(threading.Event() for _ in range(20))

    async def scenario() -> None:
        changes = ("fleet.devices=3", "run.rounds=2", "deploy.plan_deadline_s=1000", "deploy.quorum=0.5")
        changes += ("deploy.start_deadline_s=0",)
        async with deployed(tmp_path, None, *changes, recipe=by("Slow")) as here:
            running = devices(here, 2)
            await here.until(lambda: len(SHOWN[0]) == 2)
            running.append(asyncio.create_task(here.device("device-3", probe_links=False).run()))
            await here.until(lambda: here.conductor.protocol.devices[2].connection is not None)
            assert not here.run.done()
            for event in THINK:
                event.set()
            await here.finish(running)

    played(scenario())


def test_a_server_that_is_stopped_does_not_wait_for_a_plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("adaptsfl.deploy.parties.edge.backend.ENDING_S", 1e6)  # it would wait for ever
    THINK.extend(threading.Event() for _ in range(20))

    async def scenario() -> None:
        changes = (TWO, "run.rounds=2", "deploy.plan_deadline_s=1000")
        async with deployed(tmp_path, None, *changes, recipe=by("Slow")) as here:
            running = devices(here)
            await here.until(lambda: len(SHOWN[0]) == 2)
            here.run.cancel()
            with pytest.raises(asyncio.CancelledError):
                await here.run
            for device in running:
                device.cancel()
            await asyncio.gather(*running, return_exceptions=True)

    played(scenario())
