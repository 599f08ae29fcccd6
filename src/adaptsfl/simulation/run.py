"""One run: a policy decides, the trajectory learns, the clock charges, the record remembers; block by block."""

import traceback
from collections.abc import Callable, Iterator, Sequence
from copy import copy
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from adaptsfl.checks import short
from adaptsfl.config import RunConfig
from adaptsfl.costs import CutCosts
from adaptsfl.errors import AdaptSFLError, InvalidInput, first_line
from adaptsfl.fleet import RATES, Fleet
from adaptsfl.policies import Decision, Observation, Policy, Trainer
from adaptsfl.simulation.beliefs import MovingFleet, beliefs_from
from adaptsfl.simulation.clock import Elapsed, round_time, together
from adaptsfl.simulation.faults import Faults
from adaptsfl.simulation.learner import Learned, Step
from adaptsfl.simulation.record import Block
from adaptsfl.simulation.trajectory import Trajectory
from adaptsfl.simulation.world import World
from adaptsfl.training import TrainingPlan
from adaptsfl.training.schedule import Schedule

POLICY_STREAM = 20  # of randomness, beside those of the fleet and of faults
# The paper's rule: accuracy has risen by less than this over so many evaluations.
CONVERGED_RISE, CONVERGED_OVER = 2e-4, 5


@dataclass(frozen=True)
class Charged:
    """The clock's account of one block.

    Attributes:
        elapsed: all of it.
        ends_s: virtual seconds at the end of every round, since the run began.
    """

    elapsed: Elapsed
    ends_s: tuple[float, ...]


class Clock:
    """Virtual time over the rounds of a run, with each round's true resources.

    Args:
        fleet_at: the true resources in round 1, 2, ….
    """

    def __init__(
        self,
        fleet_at: Callable[[int], Fleet],
        costs: CutCosts,
        batch_size: int,
        faults: Faults,
        trainer: Trainer,
    ) -> None:
        self.fleet_at, self.costs, self.batch_size = fleet_at, costs, batch_size
        self.faults, self.trainer = faults, trainer
        self.now_s = 0.0
        self.schedule: Schedule | None = None

    def charge(
        self, step: Step, cuts: Sequence[int], members: Sequence[int], first_round: int, measuring: int
    ) -> Charged:
        """Charge one block; `measuring` rounds' worth of exchanges come on top of its last round.

        Args:
            cuts: where the model of every one of `members` is cut in truth.
            members: who began the block, as indices of the whole fleet.
        """
        self.schedule = self.ahead(plan_of(step))
        rounds: list[Elapsed] = []
        ends: list[float] = []
        for k in range(step.rounds):
            t = first_round + k
            present = members if step.present is None else step.present[k]
            fleet = self.faults.slowed(self.fleet_at(t), t - 1)
            here = fleet if len(present) == fleet.size else fleet.subset(present)
            placed = [cuts[members.index(device)] for device in present]
            moment = (self.trainer, placed, here, self.costs, self.batch_size)
            new = [round_time(*moment, self.schedule.advance())]
            if measuring and k == step.rounds - 1:
                new += [round_time(*moment)] * measuring
            rounds += new
            self.now_s += sum(elapsed.total_s for elapsed in new)
            ends.append(self.now_s)
        return Charged(together(rounds), tuple(ends))

    def ahead(self, plan: TrainingPlan) -> Schedule:
        """Return a schedule that follows `plan` from now on; copies that were not averaged last keep their age."""
        if self.schedule is None:
            return Schedule(plan)
        schedule = copy(self.schedule)
        if plan != schedule.plan:
            schedule.change(plan)
        return schedule

    def predicted_s(self, step: Step, cuts: Sequence[int], observed: Fleet) -> float:
        """Return how long a block takes if everybody stays and rates stay as observed."""
        schedule = self.ahead(plan_of(step))
        rounds = [
            round_time(self.trainer, cuts, observed, self.costs, self.batch_size, schedule.advance())
            for _ in range(step.rounds)
        ]
        return together(rounds).total_s


def plan_of(step: Step) -> TrainingPlan:
    """Return the plan of a step as far as averaging is concerned, which L_c and the intervals decide."""
    return TrainingPlan((step.deepest,), step.interval, dict(step.layer_intervals))


def rounds_planned(run: RunConfig, batch_size: int) -> int | None:
    """Return after how many rounds a run ends at the latest; None if rounds do not end it."""
    limits = [] if run.rounds is None else [run.rounds]
    if run.samples is not None:
        limits.append(-(-run.samples // batch_size))
    return min(limits, default=None)


def decided(policy: Policy, seen: Observation) -> Decision:
    """Return what a policy decides; whatever goes wrong in one of the user's own is said in their terms."""
    try:
        decision = policy.decide(seen)
    except AdaptSFLError:
        raise
    except Exception as error:
        if type(policy).__module__.startswith("adaptsfl."):
            raise
        frame = traceback.extract_tb(error.__traceback__)[-1]
        place = f"{Path(frame.filename).name}, line {frame.lineno}"
        problem = f"{policy.title} raised {type(error).__name__} in {place}: {first_line(error)}"
        raise InvalidInput("policy", problem, "Mend its decide") from error
    if not isinstance(decision, Decision):
        raise InvalidInput("policy", f"{policy.title} decided {short(decision)}", "Return a Decision from decide")
    return decision


class Observer:
    """The fleet as a policy sees it, asked round by round: smoothed for those who plan by measured drift."""

    def __init__(self, measured_at: Callable[[int], Fleet], *, smoothed: bool) -> None:
        self.measured_at, self.smoothed = measured_at, smoothed
        self._moving = MovingFleet()

    def at(self, round_: int) -> Fleet:
        """Return what is seen in round 1, 2, …; every round's rates are measured, whether a block begins or not."""
        measured = self.measured_at(round_)
        return self._moving.observe(measured) if self.smoothed else measured


def rates_seen(observed: Fleet, members: Sequence[int], devices: int) -> dict[str, tuple[float, ...]]:
    """Return the rates of the devices that were there, as a block records them: no number for the others."""
    rates = {name: np.full(devices, np.nan) for name in RATES}
    for name, values in rates.items():
        values[list(members)] = getattr(observed, name)
    return {name: tuple(values.tolist()) for name, values in rates.items()}


class Simulation:
    """A policy in a world. Iterating gives one `Block` after another until the recipe's end is reached.

    Attributes:
        ended_by: what ended it: rounds, samples, seconds, target or converged; empty before.
    """

    def __init__(self, world: World, policy: Policy, faults: Faults, trajectory: Trajectory) -> None:
        self.world, self.policy, self.faults, self.trajectory = world, policy, faults, trajectory
        self.clock = Clock(world.fleet_at, world.costs, world.batch_size, faults, policy.trainer)
        self.adapt = world.recipe.adapt.model_copy(update=dict(policy.adapt))
        self.beliefs = beliefs_from(world.recipe, self.adapt, world.costs.layers)
        self.ended_by = ""
        smoothed = policy.estimates and self.adapt.mode == "calibrated"
        self.observer = Observer(world.measured_at, smoothed=smoothed)
        self._measured_at: int | None = None  # the round of the last measurement of drift or constants
        self._divergence: tuple[float, ...] = ()
        self._turns: tuple[int, int | None] | None = None  # cut and interval of those who take turns
        self._accuracies: list[float] = []

    def __iter__(self) -> Iterator[Block]:
        rounds, blocks = 0, 0
        while not self.ended_by:
            block = self._block(rounds, blocks)
            rounds, blocks = rounds + block.rounds, blocks + 1
            self.ended_by = self._end(rounds, block)
            yield block

    def _block(self, rounds: int, blocks: int) -> Block:
        """Decide, train, charge and record one block."""
        first = rounds + 1
        members = self.faults.taking_part(rounds)
        everybody = len(members) == self.world.devices
        fleet = self.observer.at(first)
        here = fleet if everybody else fleet.subset(members)
        due = self._measurement_due(rounds)
        seen = Observation(
            round=rounds,
            block=blocks,
            fleet=here,
            costs=self.world.costs,
            batch_size=self.world.batch_size,
            convergence=self.beliefs.model(len(members)),
            epoch_rounds=self.world.epoch_rounds,
            rng=np.random.default_rng([self.world.seed, POLICY_STREAM, blocks]),
            divergence=np.array(self._divergence),
            limits=self.world.recipe.planner,
            present=() if everybody else members,
            trusted_interval=self.beliefs.trusted_interval,
            probe=self.beliefs.probe if due else 1,
        )
        decision = decided(self.policy, seen)
        decision.check(len(members), self.world.costs.layers)
        self._check_turns(decision)
        due = due or self._on_new_ground(decision)
        step = self._step(decision, rounds, members, measure=due)
        learned = self.trajectory.advance(step)
        measuring = self.beliefs.cost if step.measure is not None else 0
        predicted_s = self.clock.predicted_s(step, decision.cuts, here)
        charged = self.clock.charge(step, decision.cuts, members, first, measuring)
        estimates = self.beliefs.data() if self.policy.estimates else {}
        for t in range(first + 1, first + step.rounds):
            self.observer.at(t)  # every round's rates are measured; the first one's were, above
        self._learn(learned, step, rounds)
        return self._record(decision, step, learned, charged, members, here, estimates, predicted_s, blocks)

    def _check_turns(self, decision: Decision) -> None:
        """Refuse what those who take turns could not follow: they keep one cut for all, and one interval."""
        if self.policy.trainer not in ("turns", "relay"):
            return
        plan = decision.plan
        first, self._turns = self._turns, (plan.deepest, plan.interval)
        if len(set(plan.cuts)) > 1 or first not in (None, self._turns):
            problem = f"is {plan.cuts}, with interval {plan.interval}"
            remedy = f"Trainer {self.policy.trainer!r} needs one cut for all and one interval, kept for the whole run"
            raise InvalidInput("decision.plan.cuts", problem, remedy)

    def _measurement_due(self, rounds: int) -> bool:
        if not self.policy.estimates or self.beliefs.measurement is None:
            return False
        return self._measured_at is None or rounds - self._measured_at >= self.adapt.measure_every

    def _on_new_ground(self, decision: Decision) -> bool:
        plan = decision.plan
        return self.policy.estimates and self.beliefs.is_new_ground(plan.interval, plan.deepest)

    def _step(self, decision: Decision, rounds: int, members: tuple[int, ...], *, measure: bool) -> Step:
        left = self._rounds_left(rounds)
        length = decision.length if left is None else min(decision.length, left)
        present = None
        if self.faults.active:
            present = tuple(self.faults.still_there(rounds, rounds + k) for k in range(length))
        plan = decision.plan
        drifts = length >= 2 and (plan.interval is None or plan.interval >= 2)
        wanted = self.beliefs.measurement if measure and (drifts or self.beliefs.probe == 1) else None
        return Step(
            rounds=length,
            interval=plan.interval,
            deepest=plan.deepest,
            layer_intervals=tuple(sorted(plan.layer_intervals.items())),
            present=present,
            measure=wanted,
            evaluate_last=left is not None and length == left,
        )

    def _rounds_left(self, rounds: int) -> int | None:
        planned = rounds_planned(self.world.run, self.world.batch_size)
        return None if planned is None else planned - rounds

    def _learn(self, learned: Learned, step: Step, rounds: int) -> None:
        self.beliefs.learn(learned)
        if step.measure is not None:
            self._measured_at = rounds + step.rounds
        self._divergence = learned.divergence
        self._accuracies += [accuracy for _, accuracy, _ in learned.evaluations]

    def _record(
        self,
        decision: Decision,
        step: Step,
        learned: Learned,
        charged: Charged,
        members: tuple[int, ...],
        observed: Fleet,
        estimates: dict[str, object],
        predicted_s: float,
        blocks: int,
    ) -> Block:
        first = self.trajectory.round - step.rounds + 1
        cuts = np.zeros(self.world.devices, dtype=int)
        cuts[list(members)] = decision.cuts
        return Block(
            block=blocks + 1,
            first_round=first,
            rounds=step.rounds,
            time_s=self.clock.now_s,
            interval=step.interval,
            cuts=tuple(int(cut) for cut in cuts),
            deepest=step.deepest,
            layer_intervals={str(layer): interval for layer, interval in step.layer_intervals},
            seconds=dict(charged.elapsed.seconds),
            bottleneck=charged.elapsed.bottleneck,
            bits=charged.elapsed.bits,
            loss=float(np.mean(learned.losses)),
            evaluations=tuple(
                (t, charged.ends_s[t - first], accuracy, loss) for t, accuracy, loss in learned.evaluations
            ),
            estimates=estimates,
            resources=rates_seen(observed, members, self.world.devices),
            predicted_s=predicted_s,
            measuring=self.beliefs.cost if step.measure is not None else 0,
            present=step.present,
        )

    def _end(self, rounds: int, block: Block) -> str:
        """Return what ends the run now; nothing if it goes on."""
        run = self.world.run
        if run.target_accuracy is not None and any(row[2] >= run.target_accuracy for row in block.evaluations):
            return "target"
        if run.rounds is not None and rounds >= run.rounds:
            return "rounds"
        if run.samples is not None and rounds * self.world.batch_size >= run.samples:
            return "samples"
        if run.seconds is not None and block.time_s >= run.seconds:
            return "seconds"
        return "converged" if run.converged and self._converged() else ""

    def _converged(self) -> bool:
        recent, before = self._accuracies[-CONVERGED_OVER:], self._accuracies[:-CONVERGED_OVER]
        return bool(before) and max(recent) - max(before) < CONVERGED_RISE
