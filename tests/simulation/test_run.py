"""Whole runs: the same record every time, a clock that keeps its word, faults, ends, and experiments on disk."""

import json
import math
from pathlib import Path
from typing import Any

import pytest

from adaptsfl.config import Recipe, load_recipe
from adaptsfl.errors import InvalidInput
from adaptsfl.fleet import RATES
from adaptsfl.latency import PHASES
from adaptsfl.policies import BasePolicy, Decision, Observation
from adaptsfl.policies.registry import POLICIES
from adaptsfl.runs.folder import RUN, read_run
from adaptsfl.runs.record import Block, block_line
from adaptsfl.simulation.clock import parallel_time
from adaptsfl.simulation.experiment import MODEL, Experiment
from adaptsfl.simulation.jobs import Job, Watcher
from adaptsfl.simulation.store import Store
from adaptsfl.simulation.world import World, make_world
from adaptsfl.training import Engine, Sequential
from adaptsfl.training.estimate import CONSTANTS_COST
from simulation.tiny import learning, recipe, record_of, simulation, step, world

# Short intervals, so that eight rounds are several blocks.
SHORT: dict[str, Any] = {"planner": {"max_interval": 3}}
OPTIONS: dict[str, dict[str, Any]] = {
    "fixed": {"interval": 3, "cut": 2},
    "fedavg": {"interval": 3},
    "psl": {"rounds": 3},
    "vanilla-sl": {"rounds": 3},
    "centralized": {"rounds": 3},
    "dama+rms": {"first": 1},
    "adacomm": {"every": 3},
    "post-local": {"interval": 3, "switch_round": 2},
}
FAULTY: dict[str, Any] = {
    "faults": {"dropout_rate": 0.2, "return_rate": 0.5, "straggler_rate": 0.5, "straggler_factor": 3.0, "seed": 1}
}


@pytest.fixture(scope="module")
def short() -> World:
    return world(**SHORT)


@pytest.fixture(scope="module")
def twin() -> World:
    """Another world of the same recipe."""
    return world(**SHORT)


@pytest.fixture(scope="module")
def faulty() -> World:
    return world(**SHORT, **FAULTY, run={"rounds": 12})


@pytest.fixture
def rounds(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many devices trained in every round, whoever trained."""
    counted: list[int] = []
    for trainer in (Engine, Sequential):

        def counting(self, batches, present=None, original=trainer.round):
            counted.append(len(batches))
            return original(self, batches, present)

        monkeypatch.setattr(trainer, "round", counting)
    return counted


def blocks_of(here: World, policy: str, store: Store | None = None) -> list[Block]:
    return list(simulation(here, policy, store, **OPTIONS.get(policy, {})))


def lines(blocks: list[Block]) -> list[str]:
    return [block_line(block) for block in blocks]


@pytest.mark.parametrize("policy", POLICIES)
def test_the_same_seed_gives_the_same_record(policy: str, short: World, twin: World) -> None:
    """Also with another world of the same recipe, and with the time of every block as predicted.

    Rates are constant and measured without error, so nothing but measuring keeps a block from its prediction. The
    calibrated policies see 1/(1/rate), which may be another number in the last place.
    """
    first = blocks_of(short, policy)
    assert lines(first) == lines(blocks_of(twin, policy))
    assert sum(block.rounds for block in first) == 8
    assert len(first) > 1 or policy.startswith("splitfed")  # whose blocks are epochs
    now = 0.0
    for number, block in enumerate(first, start=1):
        assert block.block == number
        assert block.first_round == 1 + sum(earlier.rounds for earlier in first[: number - 1])
        assert set(block.seconds) == set(PHASES)
        now += block.length_s
        assert block.time_s == pytest.approx(now, rel=1e-12)
        if not block.measuring:
            error = 1e-12 if POLICIES[policy].estimates else 0
            assert abs(block.predicted_s - block.length_s) <= error * block.length_s
        assert all(row[1] <= block.time_s for row in block.evaluations)
    assert [row[0] for block in first for row in block.evaluations] == [4, 8]
    assert first[-1].evaluations[-1][1] == first[-1].time_s


def test_rules_follow_the_loss_and_the_learning_rate() -> None:
    """AdaComm: the loss falls, and with it the interval. QSR: half the learning rate, four times the interval."""
    falling = world(run={"rounds": 60}, training={"learning_rate": 0.2})
    blocks = list(simulation(falling, "adacomm", tau0=10, every=10, cut=2))
    found = [block.interval or 0 for block in blocks]
    assert blocks[-1].loss < blocks[0].loss
    assert found[0] == 10 > found[-1] >= 1
    assert found == sorted(found, reverse=True)
    stepped = world(run={"rounds": 24}, training={"schedule": {"kind": "steps", "rounds": [8], "factor": 0.5}})
    assert [block.interval for block in simulation(stepped, "qsr", base=4, cut=2)] == [4, 4, 16]


def test_fedlama_averages_some_layers_seldom() -> None:
    """In every block but the first; where layers are averaged less often, less is sent."""
    blocks = list(simulation(world(run={"rounds": 24}), "fedlama", interval=2, factor=3, cut=4))
    assert set(blocks[0].layer_intervals.values()) == {2}
    assert all(set(block.layer_intervals.values()) == {2, 6} for block in blocks[1:])
    assert all(block.bits < blocks[0].bits for block in blocks[1:])


def test_measuring_is_charged() -> None:
    """Four more rounds, without an averaging, after the last round of the block in which constants were measured."""
    short = world(**SHORT, adapt={"mode": "paper", "target": 5.0})
    first = blocks_of(short, "adaptsfl")[0]
    assert first.measuring == CONSTANTS_COST == 4
    cuts, fleet = first.cuts, short.fleet_at(1)
    alone = parallel_time(cuts, fleet, short.costs, short.batch_size)
    averaged = parallel_time(cuts, fleet, short.costs, short.batch_size, range(1, first.deepest + 1))
    expected = (first.rounds - 1 + CONSTANTS_COST) * alone.total_s + averaged.total_s
    assert first.time_s == pytest.approx(expected)
    assert first.length_s == pytest.approx(expected)
    assert first.predicted_s == pytest.approx(expected - CONSTANTS_COST * alone.total_s)


def test_another_fleet_learns_the_same_in_another_time(rounds: list[int]) -> None:
    """The cuts of a fixed policy are the same everywhere; the slower fleet only takes longer, and trains nothing."""
    store = Store()
    here = blocks_of(world(), "fixed", store)
    assert len(rounds) == 8
    there = blocks_of(world(fleet={"base": "paper", "seed": 9}), "fixed", store)
    assert len(rounds) == 8
    assert [block.loss for block in here] == [block.loss for block in there]
    assert [row[2:] for block in here for row in block.evaluations] == [
        row[2:] for block in there for row in block.evaluations
    ]
    assert here[-1].time_s != there[-1].time_s


@pytest.mark.parametrize("policy", POLICIES)
def test_a_run_with_faults(policy: str, faulty: World) -> None:
    """Every policy goes on; who is recorded as present trained, was charged, and nobody else was seen or cut."""
    blocks = blocks_of(faulty, policy)
    assert sum(block.rounds for block in blocks) == 12
    for block in blocks:
        assert block.present is not None
        assert len(block.present) == block.rounds
        began = set(block.present[0])
        assert all(set(later) <= set(earlier) for earlier, later in zip(block.present, block.present[1:], strict=False))
        assert began == {device for device, cut in enumerate(block.cuts) if cut > 0}
        for name in RATES:
            assert {device for device, rate in enumerate(block.resources[name]) if not math.isnan(rate)} == began
    assert any(len(there) < 4 for block in blocks for there in block.present or ())
    assert any(len(set(block.present or ())) > 1 for block in blocks) or len(blocks) > 4  # somebody left within a block


def test_averages_are_over_those_present(rounds: list[int]) -> None:
    """A run with faults learns what the engine learns when it is told the same absences."""
    here = world(**FAULTY, run={"rounds": 12})
    blocks = list(simulation(here, "fixed", interval=4, cut=3))
    present = [there for block in blocks for there in block.present or ()]
    assert rounds == [len(there) for there in present]
    engine = Engine(here.model, Decision((3,) * 4, 4), here.optimizer, weights=here.data.weights.tolist())
    losses = [float(engine.round(here.batches(t, there), there).mean()) for t, there in enumerate(present, start=1)]
    expected = [sum(losses[k : k + 4]) / 4 for k in range(0, 12, 4)]
    assert [block.loss for block in blocks] == pytest.approx(expected, rel=1e-6)
    assert blocks[-1].evaluations[-1][2:] == here.evaluate(engine.state())


def test_participation() -> None:
    """Half of four devices takes part in a block, other ones in other blocks."""
    blocks = list(simulation(world(faults={"participation": 0.5}), "fixed", interval=2, cut=2))
    assert all(block.present is not None and {len(there) for there in block.present} == {2} for block in blocks)
    assert len({block.present for block in blocks}) > 1


def test_cuts_belong_to_devices_whoever_is_there() -> None:
    """Cuts are given for the whole fleet; device k has cut k + 1 in whichever blocks it takes part."""
    blocks = list(simulation(world(faults={"participation": 0.5}), "fixed", interval=2, cuts=[1, 2, 3, 4]))
    for block in blocks:
        assert block.present is not None
        assert block.cuts == tuple(k + 1 if k in block.present[0] else 0 for k in range(4))


def test_stragglers_cost_time_only() -> None:
    """Everybody is three times as slow in every round: three times the seconds of devices, nothing else changed."""
    plain = list(simulation(world(), "fixed", interval=3, cut=2))
    slow = list(simulation(world(faults={"straggler_rate": 1.0, "straggler_factor": 3.0}), "fixed", interval=3, cut=2))
    assert [block.loss for block in slow] == [block.loss for block in plain]
    assert [block.predicted_s for block in slow] == [block.predicted_s for block in plain]
    for phase, seconds in plain[0].seconds.items():
        times = 1 if phase in ("a3", "b2") else 3
        assert slow[0].seconds[phase] == pytest.approx(times * seconds), phase


def test_every_seed_has_its_own_faults() -> None:
    """`run.seed` is of everything random, faults too."""
    names = [[block.present for block in blocks_of(world(seed, **SHORT, **FAULTY), "fixed")] for seed in range(2)]
    assert names[0] != names[1]


def test_paper_mode_with_given_constants() -> None:
    """Nothing is measured; a bound without any room for drift plans I = 1."""
    given = {
        "initial_gap": 2.3,
        "smoothness": 10.0,
        "gradient_moment": [5.0] * 6,
        "gradient_variance": [0.1] * 6,
        "target": 1.0,
    }
    blocks = blocks_of(world(adapt={"mode": "paper"}, convergence=given), "adaptsfl")
    assert {block.interval for block in blocks} == {1}
    assert all(block.measuring == 0 and block.estimates == {} for block in blocks)
    loose = {**given, "smoothness": 0.01}
    assert blocks_of(world(adapt={"mode": "paper"}, convergence=loose), "adaptsfl")[0].interval != 1


@pytest.mark.parametrize("policy", ["adaptsfl", "rma+ms", "ma+rms"])
def test_paper_mode_measures_its_constants(policy: str) -> None:
    """After the first block the record has β, G², σ², whatever interval was planned."""
    here = world(**SHORT, adapt={"mode": "paper", "target": 5.0, "measure_every": 2})
    blocks = blocks_of(here, policy)
    assert blocks[0].measuring == CONSTANTS_COST
    assert blocks[0].estimates == {}
    for block in blocks[1:]:
        assert block.estimates["smoothness"] > 0
        assert len(block.estimates["gradient_moment"]) == len(block.estimates["gradient_variance"]) == 6
        assert block.estimates["target"] == 5.0
    assert lines(blocks) == lines(blocks_of(here, policy))


def test_measured_no_oftener_than_asked() -> None:
    """Blocks of two rounds: measured in the first, which ends at round 2, then in the first that begins at 2 + 4."""
    here = world(adapt={"mode": "paper", "target": 5.0, "measure_every": 4}, planner={"interval": 2})
    assert [block.measuring for block in blocks_of(here, "adaptsfl")] == [CONSTANTS_COST, 0, 0, CONSTANTS_COST]


def test_paper_mode_needs_a_target() -> None:
    with pytest.raises(InvalidInput, match=r"adapt\.target.*is missing"):
        simulation(world(adapt={"mode": "paper"}), "adaptsfl")


@pytest.mark.parametrize(
    ("run", "ended_by", "expected"),
    [
        ({"rounds": 5}, "rounds", 5),
        ({"rounds": None, "samples": 25}, "samples", 7),  # batches of 4: 28 samples are the first that reach 25
        ({"rounds": 50, "samples": 8}, "samples", 2),
        ({"rounds": 6, "target_accuracy": 0.01}, "target", 4),  # evaluated every fourth round, in blocks of two
        ({"rounds": 6, "target_accuracy": 1.0}, "rounds", 6),
        ({"rounds": None, "seconds": 1e-9}, "seconds", 2),
    ],
)
def test_ends(run: dict[str, Any], ended_by: str, expected: int) -> None:
    sim = simulation(world(run=run), "fixed", interval=2, cut=2)
    blocks = list(sim)
    assert sim.ended_by == ended_by
    assert sum(block.rounds for block in blocks) == expected


def test_ends_when_converged() -> None:
    """At a rate too small to change any prediction accuracy never rises: six evaluations, the last five no better."""
    here = world(training={"learning_rate": 1e-9}, run={"rounds": None, "converged": True, "evaluate_every": 1})
    sim = simulation(here, "sfl")
    assert sum(block.rounds for block in sim) == 6
    assert sim.ended_by == "converged"


def test_a_run_without_an_end_is_refused(tmp_path: Path) -> None:
    """And claims no folder, so that the mended recipe can have it."""
    with pytest.raises(InvalidInput, match="has no end"):
        Experiment(recipe(run=None), tmp_path, policies=["sfl"]).execute()
    Experiment(recipe(run={"rounds": 1}), tmp_path, policies=["sfl"]).execute()


def test_a_recipe_without_data_trains_on_digits(tmp_path: Path) -> None:
    (run,) = Experiment(recipe(data=None, run={"rounds": 2}), tmp_path, policies=["sfl"]).execute()
    assert run.status == "done"


def test_centralised_is_the_engine_with_interval_one(short: World) -> None:
    """Plain SGD without normalisation: averaging after every round is a step on the pooled batch."""
    pooled, averaged = (learning(short, trainer, Store()).learn(step(8, 1, 3)) for trainer in ("centralized", "engine"))
    assert pooled.losses == pytest.approx(averaged.losses, abs=1e-6)
    assert pooled.losses[-1] != pooled.losses[0]


# --- experiments on disk ---


class StoppedHere(KeyboardInterrupt):
    """As if by Ctrl-C."""


def stop_after(blocks: int) -> Watcher:
    seen: list[Block] = []

    def on_block(_job: Job, block: Block) -> None:
        seen.append(block)
        if len(seen) == blocks:
            raise StoppedHere

    return Watcher(on_block=on_block)


def stop_in_round(wanted: int) -> Watcher:
    def on_round(_job: Job, round_: int, _trained: int) -> None:
        if round_ == wanted:
            raise StoppedHere

    return Watcher(on_round=on_round)


def with_options(**changes: Any) -> Recipe:
    run = {"options": OPTIONS, **changes.pop("run", {})}
    return recipe(**{**SHORT, **changes}, run=run)


@pytest.mark.parametrize("policy", ["adaptsfl", "dama+rms", "splitfed-v2", "vanilla-sl", "centralized"])
def test_interrupted_after_every_block(policy: str, tmp_path: Path) -> None:
    """Stopped after its first block, started again, stopped after the second, and so on: the same bytes at the end."""
    given = with_options(**FAULTY, model={"options": {"width": 0.25, "dropout": 0.2}})
    whole = Experiment(given, tmp_path / "whole", policies=[policy])
    (expected,) = whole.execute()
    for blocks in range(1, len(expected.blocks)):
        with pytest.raises(StoppedHere):
            Experiment(given, tmp_path / "pieces", policies=[policy]).execute(stop_after(blocks))
        assert read_run(tmp_path / "pieces" / whole.jobs[0].folder_name).status == "stopped"
    pieces = Experiment(given, tmp_path / "pieces", policies=[policy])
    (run,) = pieces.execute()
    assert record_of(pieces) == record_of(whole)
    assert (run.status, run.ended_by) == ("done", "rounds")
    assert (run.folder / MODEL).read_bytes() == (expected.folder / MODEL).read_bytes()


@pytest.mark.parametrize("policy", ["fixed", "vanilla-sl", "centralized"])
def test_interrupted_with_a_schedule(policy: str, tmp_path: Path) -> None:
    """Stopped after its first block, a run goes on with the learning rate of the next round; a constant one differs."""
    given = with_options(training={"schedule": {"kind": "cosine", "rounds": 7, "floor": 0.2, "warmup_rounds": 2}})
    whole, pieces, flat = (tmp_path / name for name in ("whole", "pieces", "flat"))
    (expected,) = Experiment(given, whole, policies=[policy]).execute()
    with pytest.raises(StoppedHere):
        Experiment(given, pieces, policies=[policy]).execute(stop_after(1))
    (run,) = Experiment(given, pieces, policies=[policy]).execute()
    assert (run.folder / MODEL).read_bytes() == (expected.folder / MODEL).read_bytes()
    (other,) = Experiment(with_options(), flat, policies=[policy]).execute()
    assert (other.folder / MODEL).read_bytes() != (expected.folder / MODEL).read_bytes()


@pytest.mark.parametrize("damage", ["checkpoint gone", "checkpoint damaged", "line torn", "record torn"])
def test_interrupted_and_damaged(damage: str, tmp_path: Path) -> None:
    """Stopped in the sixth round, in the middle of a block."""
    given = with_options()
    whole, pieces = (Experiment(given, tmp_path / name, policies=["fixed"]) for name in ("whole", "pieces"))
    whole.execute()
    with pytest.raises(StoppedHere):
        pieces.execute(stop_in_round(6 - 1))
    folder = pieces.folder / pieces.jobs[0].folder_name
    (steps,) = (pieces.folder / "trajectories").glob("*.jsonl")
    match damage:
        case "checkpoint gone":
            (folder / "checkpoint.json").unlink()
        case "checkpoint damaged":
            (folder / "checkpoint.json").write_text("{}")
        case "line torn":
            steps.write_bytes(steps.read_bytes()[:-20])
        case "record torn":
            (folder / "record.jsonl").write_bytes((folder / "record.jsonl").read_bytes()[:-20])
    again = Experiment(given, pieces.folder, policies=["fixed"])
    again.execute()
    assert record_of(again) == record_of(whole)


def test_a_finished_run_is_not_trained_again(tmp_path: Path, rounds: list[int]) -> None:
    """A finished run is not run again, and a policy that is added takes its place beside it."""
    given = with_options()
    first = Experiment(given, tmp_path, policies=["fixed"])
    first.execute()
    record = record_of(first)
    rounds.clear()
    runs = Experiment(given, tmp_path, policies=["fixed", "sfl"]).execute()
    assert [run.policy for run in runs] == ["fixed", "sfl"]
    assert len(rounds) == 8
    assert record_of(first) == record


def test_fleets_share_what_is_learned(tmp_path: Path, rounds: list[int]) -> None:
    """One schedule under two fleets is trained once, with the final weights in both folders."""
    fleets = {"fast": {"base": "paper"}, "slow": {"uplink_mbps": 1.0}}
    experiment = Experiment(with_options(run={"fleets": fleets}), tmp_path, policies=["fixed"])
    fast, slow = experiment.execute()
    assert len(rounds) == 8
    assert fast.blocks[-1].time_s < slow.blocks[-1].time_s
    assert [block.loss for block in fast.blocks] == [block.loss for block in slow.blocks]
    assert (fast.folder / MODEL).read_bytes() == (slow.folder / MODEL).read_bytes()


def test_several_of_one_policy(tmp_path: Path) -> None:
    """`fixed@1` and `fixed@3` have options of their own, also in a call for another policy."""
    options = {"fixed@1": {"interval": 1, "cut": 1}, "fixed@3": {"interval": 3, "cut": 2}}
    given = recipe(run={"rounds": 3, "options": options})
    runs = Experiment(given, tmp_path, policies=["fixed@1", "fixed@3"]).execute()
    assert [run.title for run in runs] == ["fixed 1", "fixed 3"]
    assert [[block.interval for block in run.blocks] for run in runs] == [[1, 1, 1], [3]]
    Experiment(given, tmp_path, policies=["sfl"]).execute()


@pytest.mark.parametrize("name", ["nobody", "nobody@2"])
def test_options_of_unknown_policies_are_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="nobody"):
        Experiment(recipe(run={"options": {name: {}}}), tmp_path, policies=["sfl"])


def test_a_run_without_its_model_is_not_done(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the final weights cannot be written, the same call tries again."""
    experiment = Experiment(with_options(), tmp_path, policies=["fixed"])

    def full(*_args: Any) -> None:
        raise OSError("no space left")

    with monkeypatch.context() as broken:
        broken.setattr("adaptsfl.simulation.experiment.write_tensors", full)
        with pytest.raises(Exception, match="no space left"):
            experiment.execute()
    folder = tmp_path / experiment.jobs[0].folder_name
    assert json.loads((folder / RUN).read_text())["status"] == "failed"
    Experiment(with_options(), tmp_path, policies=["fixed"]).execute()
    assert (folder / MODEL).exists()


class Whimsical(BasePolicy):
    """Changes depth and interval in every block, never averages in some, and remembers how often it was asked."""

    def __init__(self) -> None:
        self.asked = 0

    def decide(self, seen: Observation) -> Decision:
        self.asked += 1
        plans = [((1, 3, 2, 4), 2), ((2, 2, 2, 2), None), ((1, 2, 1, 1), 3), ((4, 4, 4, 4), 1)]
        cuts, interval = plans[self.asked % 4]
        return Decision(cuts, interval, rounds=2 if interval is None else None)


def test_plans_that_change_all_the_time(tmp_path: Path) -> None:
    """The clock averages when the engine does, and predictions know how old the copies are."""
    name = "simulation.test_run:Whimsical"
    given = recipe(run={"rounds": 12})
    whole, pieces = (Experiment(given, tmp_path / folder, policies=[name]) for folder in ("whole", "pieces"))
    (run,) = whole.execute()
    assert [block.interval for block in run.blocks] == [None, 3, 1, 2, None, 3][: len(run.blocks)]
    assert all(block.predicted_s == block.length_s for block in run.blocks)
    with pytest.raises(StoppedHere):
        pieces.execute(stop_after(3))
    pieces.execute()
    assert record_of(pieces) == record_of(whole)


class NotABasePolicy:
    """Lacks `divergence`."""

    title, trainer, estimates = "own", "engine", False

    def decide(self, seen: Observation) -> Decision:
        return Decision((1,) * seen.devices, 1)


def test_an_incomplete_policy_is_refused_at_once(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="without 'divergence'"):
        Experiment(recipe(), tmp_path, policies=["simulation.test_run:NotABasePolicy"])


def test_adaptsfl_learns_the_digits() -> None:
    """The recipe of the first run, with fewer devices: its own estimates lead to 95 % of the test samples.

    That takes about 70 rounds; there is time for 250.
    """
    digits = load_recipe(Path(__file__).parents[2] / "recipes" / "digits.toml")
    run = digits.run.model_copy(update={"rounds": 250, "target_accuracy": 0.95, "evaluate_every": 10})
    fleet = digits.fleet.model_copy(update={"devices": 6})
    sim = simulation(make_world(digits.model_copy(update={"run": run, "fleet": fleet}), 0), "adaptsfl")
    blocks = list(sim)
    assert sim.ended_by == "target"
    assert max(row[2] for row in blocks[-1].evaluations) >= 0.95
    assert blocks[0].estimates["averagings"] == 0 < blocks[-1].estimates["averagings"]
    assert any(block.interval != 1 for block in blocks)
