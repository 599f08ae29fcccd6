"""The loop of a run, in simulation and deployment: observe, decide, train and charge, record, end; block by block."""

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from adaptsfl.decisions import Decision
from adaptsfl.fleet import FIXED, RATES, Fleet
from adaptsfl.policies import Observation, Policy
from adaptsfl.runs.backend import Backend, Learned, Order, Scene, Trained
from adaptsfl.runs.beliefs import beliefs_from
from adaptsfl.runs.deciding import Decider
from adaptsfl.runs.ending import Ending
from adaptsfl.runs.recipe import rate_schedule
from adaptsfl.runs.record import Block
from adaptsfl.runs.wires import WireCosts
from adaptsfl.training.estimate import CONSTANTS_COST

POLICY_STREAM = 20  # random stream, different from those of the fleet and of faults


@dataclass(frozen=True)
class Standing:
    """A decision in force: for which devices, and for how many more rounds."""

    decision: Decision
    members: tuple[int, ...]
    left: int


class BlockLoop:
    """Executes a policy. Iterating trains and yields one `Block` after another until the run ends.

    Attributes:
        rounds, blocks: the numbers done so far.
        ended_by: what ended the run: rounds, samples, seconds, target or converged; empty until then.
    """

    def __init__(self, backend: Backend, policy: Policy) -> None:
        recipe = backend.recipe
        assert recipe.run is not None
        self.backend, self.policy = backend, policy
        self.adapt = recipe.adapt.model_copy(update=dict(policy.adapt))
        self.beliefs = beliefs_from(recipe, self.adapt, backend.layers)
        self.wires = WireCosts(recipe, policy, self.adapt.measure_every)
        self.ending = Ending(recipe.run, recipe.training.batch_size)
        self.rounds = self.blocks = 0
        self.ended_by = ""
        self._decider = Decider(policy, backend.planning_limit_s)
        self._standing: Standing | None = None
        self._measured_at: int | None = None  # the round of the last measurement of constants
        self._divergence: tuple[float, ...] = ()
        self._losses = array("d")  # of every round: eight bytes each, for runs of millions of rounds
        self._learning_rate, self._rates = recipe.training.learning_rate, rate_schedule(recipe.training)

    def __iter__(self) -> Iterator[Block]:
        while not self.ended_by:
            block = self._block()
            self._count(block)
            yield block

    def go_on(self, past: Sequence[tuple[Block, Scene]], divergence: Sequence[float]) -> None:
        """Continue after blocks that were recorded before a restart; `divergence` is that of the last averaging.

        The policy decides again on the same observations, so that its state is the same as without the restart.
        """
        for block, scene in past:
            kept = block.restart
            self._divergence = tuple(kept["divergence"])
            if kept["asked"]:
                self._decider.ask_again(self._observation(scene))
            if not kept["late"]:
                self._decider.drop_answer()
            decision = Decision(
                tuple(kept["cuts"]),
                block.interval,
                rounds=kept["rounds"],
                micro_batches=block.micro_batches,
                wire_dtype=block.wire_dtype,
            )
            self._standing = Standing(decision, scene.members, kept["left"])
            self._count(block)
        self._divergence = tuple(divergence)

    def evaluated_last(self, accuracy: float) -> None:
        """Process an evaluation made after the last block: it may have reached the target."""
        if self.ending.is_target(accuracy):
            self.ended_by = "target"

    def interrupt(self) -> None:
        """End the wait for a policy, from another thread, because the run is being stopped."""
        self._decider.interrupt()

    def _block(self) -> Block:
        """Observe, decide, train and record one block."""
        scene = self.backend.observe(self.rounds + 1)
        asked_before, divergence = self._decider.asked, self._divergence
        standing = self._decision(scene)
        order = self._order(standing)
        trained = self.backend.train(order, scene)
        self._standing = Standing(standing.decision, scene.members, standing.left - order.rounds)
        self._learn(trained.learned, order)
        restart = {
            "asked": self._decider.asked > asked_before,
            "late": self._decider.pending,
            "cuts": standing.decision.cuts,
            "rounds": standing.decision.rounds,
            "left": self._standing.left,
            "divergence": divergence,
        }
        return self._record(order, scene, trained, restart)

    def _decision(self, scene: Scene) -> Standing:
        """Return the last decision while rounds of it are left for the same devices, else the policy's next."""
        last = self._standing
        if last is not None and last.left > 0 and last.members == scene.members:
            return last
        decision = self._decider.decide(self._observation(scene), wait=last is None)
        if decision is None:  # the policy takes too long: the last decision is kept
            assert last is not None
            decision = _fitted(last, scene.members)
        if decision.wire_dtype is None:
            decision = replace(decision, wire_dtype=self.backend.recipe.model.usual_wire_dtype)
        decision.check(len(scene.members), self.backend.layers)
        self.backend.check(decision)
        return Standing(decision, scene.members, decision.length)

    def _observation(self, scene: Scene) -> Observation:
        all_present = len(scene.members) == self.backend.devices
        return Observation(
            round=self.rounds,
            block=self._decider.asked,
            fleet=scene.fleet,
            costs=scene.costs,
            batch_size=self.backend.recipe.training.batch_size,
            convergence=self.beliefs.model(len(scene.members)),
            epoch_rounds=scene.epoch_rounds,
            rng=np.random.default_rng([self.backend.seed, POLICY_STREAM, self._decider.asked]),
            divergence=np.array(self._divergence),
            limits=self.backend.limits,
            present=() if all_present else scene.members,
            losses=np.array(self._losses),
            learning_rate=self._learning_rate * self._rates.decay(self.rounds + 1),
            trust=self.beliefs.trust(),
            wires=self.wires.factors,
        )

    def _measurement_due(self) -> bool:
        if not (self.backend.measures and self.policy.estimates and self.beliefs.needs_constants):
            return False
        return self._measured_at is None or self.rounds - self._measured_at >= self.adapt.measure_every

    def _order(self, standing: Standing) -> Order:
        decision, left = standing.decision, self.ending.rounds_left(self.rounds)
        rounds = min(standing.left, self.backend.block_rounds(decision))
        rounds = rounds if left is None else min(rounds, left)
        estimates = self.beliefs.data(decision) if self.policy.estimates else {}
        compared = self.wires.due(self.rounds) if self.backend.compares else ()
        return Order(
            decision,
            rounds,
            self.rounds + 1,
            standing.members,
            measure=self._measurement_due() and not compared,
            compared=compared,
            final=rounds == left,
            estimates={**estimates, **self.wires.data()},
        )

    def _learn(self, learned: Learned, order: Order) -> None:
        self._divergence = learned.divergence
        if learned.constants is not None:
            self.beliefs.measured(learned.constants)
            self._measured_at = order.last_round

    def _record(self, order: Order, scene: Scene, trained: Trained, restart: dict[str, Any]) -> Block:
        decision = order.decision
        return Block(
            block=self.blocks + 1,
            first_round=order.first_round,
            rounds=order.rounds,
            time_s=trained.time_s,
            interval=decision.interval,
            cuts=trained.cuts,
            deepest=decision.deepest,
            layer_intervals={str(layer): interval for layer, interval in sorted(decision.layer_intervals.items())},
            seconds=dict(trained.seconds),
            bottleneck=trained.bottleneck,
            bits=trained.bits,
            loss=float(np.mean(trained.learned.losses)),
            evaluations=trained.evaluations,
            estimates={**order.estimates, **trained.estimates},
            resources=rates_seen(scene.fleet, scene.members, self.backend.devices),
            predicted_s=trained.predicted_s,
            measuring=CONSTANTS_COST if order.measure else 0,
            present=trained.present,
            losses=trained.learned.losses,
            restart={**restart, **trained.restart} if trained.restart is not None else {},
            reestimated=trained.reestimated,
            micro_batches=decision.micro_batches,
            wire_dtype=decision.wire_dtype,
            wires=dict(trained.learned.wires),
        )

    def _count(self, block: Block) -> None:
        """Update counters and beliefs with a block that was trained, now or before a restart."""
        self.rounds, self.blocks = block.last_round, block.block
        self._losses.extend(block.losses)
        if self.policy.estimates:
            self.beliefs.learn(block)
        self.wires.learn(block)
        self.ended_by = self.ending.after(block)


def _fitted(last: Standing, members: tuple[int, ...]) -> Decision:
    """Return the last decision for the devices present now; a device that was absent before gets its shallowest cut."""
    cuts = dict(zip(last.members, last.decision.cuts, strict=True))
    least = min(last.decision.cuts)
    fitted, kept = tuple(cuts.get(device, least) for device in members), last.decision
    return Decision(fitted, kept.interval, micro_batches=kept.micro_batches, wire_dtype=kept.wire_dtype)


def rates_seen(observed: Fleet, members: Sequence[int], devices: int) -> dict[str, tuple[float, ...]]:
    """Return the observed rates, and fixed seconds that are not 0, as a block records them: NaN for absent devices."""
    names = (*RATES, *(name for name in FIXED if np.any(getattr(observed, name))))
    rates = {name: np.full(devices, np.nan) for name in names}
    for name, values in rates.items():
        values[list(members)] = getattr(observed, name)
    return {name: tuple(values.tolist()) for name, values in rates.items()}
