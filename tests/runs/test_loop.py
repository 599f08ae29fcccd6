"""The loop by itself, with a backend that trains nothing: who is asked, for what, and when it ends."""

import json
import pickle
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from adaptsfl.config import AdaptConfig, PlannerConfig, Recipe, TrainingConfig, parse
from adaptsfl.costs import ASSUMED_FACTORS
from adaptsfl.decisions import Decision
from adaptsfl.errors import InvalidInput
from adaptsfl.fleet import FLEETS
from adaptsfl.latency import PHASES
from adaptsfl.paper_costs import vgg16
from adaptsfl.policies import BasePolicy, Observation
from adaptsfl.runs.backend import Learned, Order, Scene, Trained
from adaptsfl.runs.deciding import Decider
from adaptsfl.runs.ending import Ending
from adaptsfl.runs.loop import BlockLoop
from adaptsfl.runs.record import Block, block_line, block_of
from adaptsfl.training.estimate import ConstantsSample

FLEET = FLEETS["heterogeneous"].sample(3, np.random.default_rng(0))
COSTS = vgg16(10, 16)


class Nowhere:
    """A backend that trains nothing.

    Args:
        there: who is there, block by block; the last ones stay.
        accuracy: of every evaluation, by round.
        loss: of training, by round.
    """

    def __init__(
        self,
        *,
        there: Sequence[tuple[int, ...]] = ((0, 1, 2),),
        accuracy: Callable[[int], float] = lambda round_: round_ / 100,
        loss: Callable[[int], float] = lambda _round: 1.0,
        by_interval: bool = True,
        measures: bool = False,
        compares: bool = False,
        limit_s: float | None = None,
        wire_dtype: str = "float32",
        **run: Any,
    ) -> None:
        model = {"name": "vgg16", "wire_dtype": wire_dtype}
        self.recipe = parse(Recipe, {"model": model, "fleet": {"devices": 3}, "run": {"rounds": 8, **run}})
        self.seed, self.devices, self.layers, self.limits = 0, 3, COSTS.layers, PlannerConfig()
        self.there, self.accuracy, self.loss, self.by_interval = list(there), accuracy, loss, by_interval
        self.constants: ConstantsSample | None = None
        self.measures, self.compares, self.planning_limit_s = measures, compares, limit_s
        self.orders: list[Order] = []

    def observe(self, round_: int) -> Scene:
        members = self.there.pop(0) if len(self.there) > 1 else self.there[0]
        return Scene(members, FLEET.subset(members), COSTS, epoch_rounds=5)

    def check(self, decision: Decision) -> None:
        pass

    def block_rounds(self, decision: Decision) -> int:
        return decision.interval if self.by_interval and decision.interval else decision.length

    def train(self, order: Order, scene: Scene) -> Trained:
        self.orders.append(order)
        cuts = np.zeros(self.devices, dtype=int)
        cuts[list(scene.members)] = order.decision.cuts
        row = (order.last_round, float(order.last_round), self.accuracy(order.last_round), 1.0)
        return Trained(
            Learned(
                tuple(self.loss(t) for t in range(order.first_round, order.last_round + 1)),
                divergence=(order.last_round / 10,),
                constants=self.constants if order.measure else None,
                wires=dict.fromkeys(order.compared, 1 + order.first_round / 100),
            ),
            cuts=tuple(cuts.tolist()),
            time_s=float(order.last_round),
            seconds=dict.fromkeys(PHASES, 0.0),
            bottleneck=("device 1", "a1"),
            bits=0.0,
            predicted_s=0.0,
            evaluations=(row,),
            restart={},
        )


def scene_of(block: Block) -> Scene:
    members = tuple(device for device, rate in enumerate(block.resources["flops"]) if not np.isnan(rate))
    return Scene(members, FLEET.subset(members), COSTS, epoch_rounds=5)


class Told(BasePolicy):
    """Answers what it is told to, the last answer for ever; and remembers what it saw."""

    divergence = True

    def __init__(self, *answers: Callable[[Observation], Decision], estimates: bool = False) -> None:
        self.answers, self.estimates = list(answers), estimates  # type: ignore[misc]
        self.seen: list[Observation] = []

    def decide(self, seen: Observation) -> Decision:
        self.seen.append(seen)
        return self.answers[min(len(self.seen), len(self.answers)) - 1](seen)


def every(interval: int, cut: int = 2, rounds: int | None = None) -> Callable[[Observation], Decision]:
    return lambda seen: Decision((cut,) * seen.devices, interval, rounds=rounds)


def test_a_decision_holds_for_as_many_rounds_as_it_says() -> None:
    backend, policy = Nowhere(), Told(every(2, rounds=6))
    blocks = list(BlockLoop(backend, policy))
    assert [order.rounds for order in backend.orders] == [2, 2, 2, 2]
    assert [seen.round for seen in policy.seen] == [0, 6]
    assert [order.final for order in backend.orders] == [False, False, False, True]
    assert [block.first_round for block in blocks] == [1, 3, 5, 7]


def test_a_decision_for_others_does_not_hold() -> None:
    backend, policy = Nowhere(there=[(0, 1, 2), (0, 2)]), Told(every(2, rounds=6))
    blocks = list(BlockLoop(backend, policy))
    assert [seen.round for seen in policy.seen] == [0, 2]
    assert [seen.present for seen in policy.seen] == [(), (0, 2)]
    assert blocks[1].cuts == (2, 0, 2)
    assert np.isnan(blocks[1].resources["flops"][1])


def test_a_backend_may_train_a_decision_in_one_block() -> None:
    backend, policy = Nowhere(by_interval=False), Told(every(2, rounds=6))
    list(BlockLoop(backend, policy))
    assert [order.rounds for order in backend.orders] == [6, 2]


def test_constants_are_measured_where_the_bound_is_planned_with() -> None:
    """In the first block, then not before they are due again; only where the backend can, and the policy looks."""
    paper = {"mode": "paper", "target": 1.0, "measure_every": 6}
    for measures, estimates, mode, measured in (
        (True, True, paper, [True, False, False, True]),
        (False, True, paper, [False] * 4),
        (True, False, paper, [False] * 4),
        (True, True, {}, [False] * 4),
    ):
        backend, policy = Nowhere(measures=measures, rounds=20), Told(every(5), estimates=estimates)
        backend.recipe = backend.recipe.model_copy(update={"adapt": parse(AdaptConfig, mode)})
        backend.constants = ConstantsSample(1.0, (0,), np.ones((1, COSTS.layers)), np.ones(COSTS.layers))
        list(BlockLoop(backend, policy))
        assert [order.measure for order in backend.orders] == measured


def test_types_of_numbers_are_compared_where_the_policy_chooses_one() -> None:
    """Before round 1, then after 60 rounds, then whenever the run is twice as long as at the last comparison."""
    for compares, precision, wire_dtype, compared_in in (
        (True, True, "auto", [1, 61, 121, 241]),
        (False, True, "auto", []),
        (True, False, "auto", []),
        (True, True, "int8", []),
    ):
        backend = Nowhere(compares=compares, wire_dtype=wire_dtype, rounds=300)
        policy = Told(every(10), estimates=True)
        policy.precision = precision  # type: ignore[misc]
        blocks = list(BlockLoop(backend, policy))
        orders = [order for order in backend.orders if order.compared]
        assert [order.first_round for order in orders] == compared_in
        assert {order.compared for order in orders} <= {("float16", "bfloat16", "int8", "int4")}
        assert [block.first_round for block in blocks if block.wires] == compared_in
        assert (policy.seen[0].wires is None) == (not (precision and wire_dtype == "auto"))
        assert {block.wire_dtype for block in blocks} == {"float32" if wire_dtype == "auto" else "int8"}


def test_the_first_comparison_replaces_what_was_assumed_and_later_ones_count_half() -> None:
    policy = Told(every(10))
    policy.precision = True  # type: ignore[misc]
    list(BlockLoop(Nowhere(compares=True, wire_dtype="auto", rounds=130), policy))
    seen = [observation.wires for observation in policy.seen]
    assert seen[0] == ASSUMED_FACTORS
    assert [seen[k]["int8"] for k in (1, 6, 7, 12)] == pytest.approx([1.01, 1.01, (1.01 + 1.61) / 2, 1.31])
    assert all(factors["float32"] == 1 for factors in seen)


def test_constants_and_types_are_not_measured_in_one_block() -> None:
    backend, policy = (
        Nowhere(measures=True, compares=True, wire_dtype="auto", rounds=20),
        Told(every(5), estimates=True),
    )
    policy.adapt, policy.precision = {"mode": "paper", "target": 1.0}, True  # type: ignore[misc]
    list(BlockLoop(backend, policy))
    assert [(order.measure, bool(order.compared)) for order in backend.orders[:2]] == [(False, True), (True, False)]


def test_a_policy_sees_the_losses_of_every_round() -> None:
    backend, policy = Nowhere(loss=lambda round_: 1 / round_), Told(every(3))
    list(BlockLoop(backend, policy))
    assert [seen.losses.tolist() for seen in policy.seen] == [[], [1, 1 / 2, 1 / 3], [1 / k for k in range(1, 7)]]


def test_jumps_of_the_loss_shorten_what_is_planned() -> None:
    """Copies that gain 90 % by themselves and lose it when they are averaged: longer intervals are worth little."""

    def jumping(round_: int) -> float:
        return 2.0 if round_ % 8 == 1 else 0.2

    found = []
    for loss in (jumping, lambda round_: 2.0 - 0.001 * round_):
        policy = Told(every(8), estimates=True)
        list(BlockLoop(Nowhere(loss=loss, rounds=40), policy))
        found.append([float(seen.convergence.rounds(16, COSTS.layers)) for seen in policy.seen])
    worse, better = found
    assert worse[0] == worse[1] == better[0] == better[1]  # before the first averaging is seen
    assert worse[-1] > worse[0] > better[-1]


def test_trust_grows_with_rounds() -> None:
    policy = Told(every(8), estimates=True)
    list(BlockLoop(Nowhere(rounds=80), policy))
    trusted = [seen.trust.longest_interval for seen in policy.seen]
    assert trusted[:4] == [8, 8, 8, 12]
    assert trusted[-1] == 72 // 2
    assert [seen.trust.probe for seen in policy.seen[:5]] == [8, 8, 1, 1, 1]  # until two long blocks were averaged


def test_nobody_is_pessimistic_before_an_averaging_is_seen() -> None:
    policy = Told(every(8), estimates=True)
    list(BlockLoop(Nowhere(rounds=40), policy))
    assert [seen.trust.pessimistic is None for seen in policy.seen] == [True, True, False, False, False]
    for seen in policy.seen[2:]:
        models = (seen.trust.optimistic, seen.convergence, seen.trust.pessimistic)
        low, middle, high = (float(model.rounds(16, COSTS.layers)) for model in models)
        assert low < middle < high


def test_divergence_is_that_of_the_block_before() -> None:
    policy = Told(every(4))
    list(BlockLoop(Nowhere(), policy))
    assert [seen.divergence.tolist() for seen in policy.seen] == [[], [0.4]]


def test_a_policy_is_shown_the_learning_rate_of_the_next_round() -> None:
    """Steps after rounds 3 and 4 of 8; the warm-up of rounds 1 and 2 is left out."""
    backend, policy = Nowhere(), Told(every(2))
    schedule = {"kind": "steps", "rounds": [3, 4], "factor": 0.5, "warmup_rounds": 2}
    training = parse(TrainingConfig, {"learning_rate": 0.4, "schedule": schedule})
    backend.recipe = backend.recipe.model_copy(update={"training": training})
    list(BlockLoop(backend, policy))
    assert [seen.round for seen in policy.seen] == [0, 2, 4, 6]
    assert [seen.learning_rate for seen in policy.seen] == pytest.approx([0.4, 0.4, 0.1, 0.1])
    assert [seen.losses.tolist() for seen in policy.seen] == [[1.0] * done for done in (0, 2, 4, 6)]


# --- ends ---


@pytest.mark.parametrize(
    ("run", "ended_by", "rounds"),
    [
        ({"rounds": 5}, "rounds", 5),
        ({"rounds": None, "samples": 40}, "samples", 3),
        ({"rounds": None, "seconds": 6.5}, "seconds", 8),
        ({"rounds": 50, "target_accuracy": 0.05}, "target", 6),
        ({"rounds": 50, "converged": True}, "rounds", 50),
    ],
)
def test_ends(run: dict[str, Any], ended_by: str, rounds: int) -> None:
    """Blocks are of two rounds, so that what is looked at after a block is seen late; mini-batches are of 16."""
    loop = BlockLoop(Nowhere(**run), Told(every(2)))
    list(loop)
    assert (loop.ended_by, loop.rounds) == (ended_by, rounds)


def test_a_run_has_converged_when_five_evaluations_gained_nothing() -> None:
    loop = BlockLoop(Nowhere(rounds=100, converged=True, accuracy=lambda round_: min(round_, 7) / 100), Told(every(1)))
    list(loop)
    assert (loop.ended_by, loop.rounds) == ("converged", 12)


def test_a_block_that_ends_a_run_in_two_ways_counts_as_having_reached_its_target() -> None:
    backend = Nowhere(rounds=4, target_accuracy=0.02)
    loop = BlockLoop(backend, Told(every(4)))
    list(loop)
    assert loop.ended_by == "target"
    assert Ending(backend.recipe.run, 16).rounds_left(1) == 3  # type: ignore[arg-type]


# --- restarts ---


@pytest.mark.parametrize("done", range(1, 5))
@pytest.mark.parametrize("rounds", [None, 4])
def test_going_on_after_any_block_is_as_if_nothing_had_happened(done: int, rounds: int | None) -> None:
    """The record is read back from its lines, as a restarted process does."""

    def make() -> tuple[Nowhere, Told]:
        there = [(0, 1, 2), (0, 1, 2), (0, 2), (0, 2), (0, 1, 2)]
        jumps = {"loss": lambda round_: 2.0 if round_ % 4 == 1 else 1.0}
        backend = Nowhere(there=there, rounds=12, compares=True, wire_dtype="auto", **jumps)
        backend.recipe = backend.recipe.model_copy(update={"adapt": parse(AdaptConfig, {"measure_every": 4})})
        policy = Told(every(2, 3, rounds), every(2, 1, rounds), every(4, 2), estimates=True)
        policy.precision = True  # type: ignore[misc]
        return backend, policy

    backend, whole = make()
    blocks = list(BlockLoop(backend, whole))
    again_backend, again = make()
    again_backend.there = again_backend.there[done:]
    loop = BlockLoop(again_backend, again)
    kept = [block_of(json.loads(block_line(block))) for block in blocks[:done]]
    loop.go_on([(block, scene_of(block)) for block in kept], (kept[-1].last_round / 10,))
    assert loop.blocks == done
    rest = list(loop)
    assert [block_line(block) for block in rest] == [block_line(block) for block in blocks[done:]]
    assert [shown(seen) for seen in again.seen] == [shown(seen) for seen in whole.seen]


def shown(seen: Observation) -> tuple[Any, ...]:
    rounds = [*seen.convergence.rounds(16, np.arange(1, seen.layers + 1)).tolist(), *(seen.wires or {}).values()]
    return seen.round, seen.block, seen.divergence.tolist(), seen.losses.tolist(), rounds, seen.trust.longest_interval


# --- policies that take their time ---


class Thoughtful(BasePolicy):
    """Takes as long as the test likes for every question but the first; the n-th decision cuts at n."""

    def __init__(self) -> None:
        self.asked = 0
        self.go_on = threading.Semaphore(0)

    def decide(self, seen: Observation) -> Decision:
        self.asked += 1
        number = self.asked
        if number > 1:
            self.go_on.acquire()
        return Decision(tuple(range(number, number + seen.devices)), 1)


def test_the_last_decision_is_kept_while_the_next_is_made() -> None:
    """Whoever was not there before gets its shallowest cut; nothing more is asked meanwhile."""
    policy = Thoughtful()
    there = [(0, 1), (0, 1), (0, 2), (0, 1)]
    blocks = iter(BlockLoop(Nowhere(there=there, limit_s=0.0, rounds=10), policy))
    assert [next(blocks).cuts for _ in range(3)] == [(1, 2, 0), (1, 2, 0), (1, 0, 1)]
    assert policy.asked == 2


def test_an_answer_that_never_comes_is_waited_for_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a policy that hangs would hold up every block for as long as one may take."""
    waited = []

    def wait(_pending: Any, limit_s: float) -> None:
        waited.append(limit_s)
        time.sleep(limit_s)

    monkeypatch.setattr("adaptsfl.runs.deciding.futures.wait", wait)
    blocks = iter(BlockLoop(Nowhere(limit_s=0.1), Thoughtful()))
    assert [next(blocks).cuts for _ in range(4)] == [(1, 2, 3)] * 4
    assert len(waited) == 3
    assert 0.05 < waited[0] <= 0.1
    assert waited[1:] == [0.0, 0.0]


def test_an_answer_that_comes_late_holds_for_the_same_devices_only() -> None:
    policy = Thoughtful()
    decider = Decider(policy, limit_s=0.0)
    all_three, two = (
        Observation(0, 0, FLEET.subset(k), COSTS, 16, None, 1, np.random.default_rng(0), present=k)  # type: ignore[arg-type]
        for k in ((0, 1, 2), (0, 1))
    )
    assert decider.decide(all_three, wait=True) == Decision((1, 2, 3), 1)
    assert decider.decide(all_three, wait=False) is None
    policy.go_on.release()
    while (answer := decider.decide(all_three, wait=False)) is None:
        pass
    assert answer == Decision((2, 3, 4), 1)
    assert decider.decide(two, wait=False) is None  # the third question
    policy.go_on.release(2)
    assert decider.decide(all_three, wait=True) == Decision((4, 5, 6), 1)  # not the answer about two
    assert decider.asked == 4


def test_a_limit_may_be_longer_than_a_clock_can_count() -> None:
    policy = Thoughtful()
    blocks = iter(BlockLoop(Nowhere(limit_s=1e50), policy))
    threading.Timer(0.05, policy.go_on.release).start()
    assert [next(blocks).cuts for _ in range(2)] == [(1, 2, 3), (2, 3, 4)]


def test_an_answer_in_the_moment_of_the_limit_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """The limit is over, and before anybody looks again, the answer is there: nothing has gone wrong."""
    seen = Told(every(1))
    list(BlockLoop(Nowhere(rounds=1), seen))
    policy = Thoughtful()
    decider = Decider(policy, limit_s=0.0)
    decider.decide(seen.seen[0], wait=True)
    is_done = Future.done

    def done(future: "Future[Decision]") -> bool:
        policy.go_on.release()
        future.exception()  # waits for the answer
        return is_done(future)

    monkeypatch.setattr(Future, "done", done)
    assert decider.decide(seen.seen[0], wait=False) == Decision((2, 3, 4), 1)


def test_an_answer_that_came_late_is_not_lost_by_a_restart() -> None:
    """Asked before the second block, answered after it, held in the third; and so for a process that begins there."""

    class InTime(Thoughtful):
        """Has no need to wait for the test."""

        def decide(self, seen: Observation) -> Decision:
            self.go_on.release()
            return super().decide(seen)

    policy = Thoughtful()
    blocks = iter(BlockLoop(Nowhere(limit_s=0.0, rounds=3), policy))
    first = [next(blocks), next(blocks)]
    assert [block.cuts for block in first] == [(1, 2, 3), (1, 2, 3)]
    kept = [block_of(json.loads(block_line(block))) for block in first]
    again = BlockLoop(Nowhere(limit_s=1000.0, rounds=3), replayed := InTime())
    again.go_on([(block, scene_of(block)) for block in kept], (0.2,))
    assert [block.cuts for block in again] == [(2, 3, 4)]
    assert replayed.asked == 2


def test_errors_of_a_policy_arrive_whoever_waits() -> None:
    class Wrong(BasePolicy):
        def decide(self, seen: Observation) -> Decision:
            raise KeyError("uplink")

    seen = Told(every(1))
    list(BlockLoop(Nowhere(rounds=1), seen))
    for limit_s in (None, 100.0):
        with pytest.raises(InvalidInput, match=r"policy: Wrong raised KeyError in test_loop.py, line \d+: .*uplink"):
            Decider(Wrong(), limit_s).decide(seen.seen[0], wait=False)


# --- decisions ---


def test_a_decision_travels_between_processes() -> None:
    decision = Decision((3, 1), 4, {2: 8}, rounds=8, placed=(1, 1))
    assert pickle.loads(pickle.dumps(decision)) == decision
    assert decision.placement == (1, 1)
    assert decision.levelled(3) == Decision((3, 3, 3), 4, {2: 8})
    assert replace(decision, placed=None).placement == (3, 1)
