"""The backend of a simulated fleet: time is virtual, and no block is trained twice.

Weights depend on the schedule alone: intervals, L_c, and which devices were present. Where a layer below L_c runs
changes only the clock. So the key of a block is a hash over its schedule and all blocks before it, and a block that was
trained before (in this run before an interruption, or under another fleet) is looked up. A run that was stopped is
replayed from its first block on.
"""

import json
from collections.abc import Callable
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from adaptsfl.decisions import Decision
from adaptsfl.errors import InvalidInput, RankFailed
from adaptsfl.fleet import Fleet
from adaptsfl.policies import Policy
from adaptsfl.runs.backend import Learned, Order, Scene, Trained
from adaptsfl.runs.beliefs import MovingFleet
from adaptsfl.simulation.clock import Clock
from adaptsfl.simulation.faults import Faults
from adaptsfl.simulation.ghost_batches import check_parts, limits_with_batch_norm
from adaptsfl.simulation.learner import Learner
from adaptsfl.simulation.store import Store
from adaptsfl.simulation.trainers import TRAINERS
from adaptsfl.simulation.world import World
from adaptsfl.training.batchnorm import mixes_samples
from adaptsfl.training.checkpoint import has_checkpoint, read_extra
from adaptsfl.training.estimate import CONSTANTS_COST


class Observer:
    """The fleet as a policy sees it, round by round; smoothed for policies that plan with calibrated estimates."""

    def __init__(self, measured_at: Callable[[int], Fleet], *, smoothed: bool) -> None:
        self.measured_at, self.smoothed = measured_at, smoothed
        self._moving = MovingFleet()

    def at(self, round_: int) -> Fleet:
        """Return the fleet in round 1, 2, …. It must be called for every round: each one's rates enter the average."""
        measured = self.measured_at(round_)
        return self._moving.observe(measured) if self.smoothed else measured


class SimulatedBackend:
    """Trains the blocks of one run, or looks up their results, and charges virtual time.

    As a context manager, it lets the other ranks return from `Learner.follow` at its end.

    Args:
        store: the results of blocks that were trained before.
        folder: where checkpoints go; none are written without it.
        on_round: called after every round that is trained, with its number and loss.

    Attributes:
        round: rounds done.
        key: identifies all blocks trained so far.
    """

    measures = True
    planning_limit_s: float | None = None  # virtual time stands still while a policy decides

    def __init__(
        self,
        world: World,
        policy: Policy,
        faults: Faults,
        store: Store,
        *,
        folder: Path | None = None,
        on_round: Callable[[int, float], None] = lambda _round, _loss: None,
    ) -> None:
        self.world, self.kind, self.faults, self.store = world, TRAINERS[policy.trainer], faults, store
        self.folder = folder
        self.recipe, self.seed, self.limits = world.recipe, world.seed, world.recipe.planner
        self._batch_norm = mixes_samples(world.model.pieces)
        if self._batch_norm:
            self.limits = limits_with_batch_norm(self.limits, self.recipe.training)
        self.clock = Clock(world.fleet_at, world.costs, world.batch_size, faults, self.kind.round_time)
        self.compares = self.kind.compared_round is not None
        mode = policy.adapt.get("mode", world.recipe.adapt.mode)
        self.observer = Observer(world.measured_at, smoothed=policy.estimates and mode == "calibrated")
        self.reestimates = self.kind.reestimates(world)
        self.key = _name(f"{world.learning_identity} {policy.trainer} {policy.divergence}")
        self.round = 0
        self._learner = Learner(world, policy.trainer, divergence=policy.divergence, on_round=on_round, folder=folder)
        self._waiting: list[tuple[str, Order]] = []  # blocks found in the store, not trained here
        self._trained_key: str | None = self.key  # of the block that was trained last; None in the middle of one
        self._saved_round = 0
        self._first_loss: float | None = None
        self._first_decision: Decision | None = None

    def __enter__(self) -> "SimulatedBackend":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        # After an interruption or the loss of a rank, the other ranks may be waiting in any other collective call.
        if kind is None or (issubclass(kind, Exception) and not issubclass(kind, RankFailed)):
            self._learner.end()

    # --- the interface for `runs` ---

    @property
    def devices(self) -> int:
        """N."""
        return self.world.devices

    @property
    def layers(self) -> int:
        """L."""
        return self.world.costs.layers

    def observe(self, round_: int) -> Scene:
        """Return the devices of a block that begins with round 1, 2, …, and their rates as measured then."""
        members = self.faults.taking_part(round_ - 1)
        fleet = self.observer.at(round_)
        here = fleet if len(members) == self.devices else fleet.subset(members)
        return Scene(members, here, self.world.costs, self.world.epoch_rounds)

    def check(self, decision: Decision) -> None:
        """Refuse a decision that the trainer cannot follow."""
        self._first_decision = self._first_decision or decision
        self.kind.check(decision, self._first_decision)
        check_parts(decision, self.recipe.training, self.kind, batch_norm=self._batch_norm)

    def block_rounds(self, decision: Decision) -> int:
        """Return all rounds of a decision: a simulated block may contain several averagings."""
        return decision.length

    def train(self, order: Order, scene: Scene) -> Trained:
        """Train one block or look up its result; charge the time that it takes."""
        if self.faults.active:
            began = order.first_round - 1
            present = tuple(self.faults.still_there(began, began + k) for k in range(order.rounds))
            order = replace(order, present=present)
        learned = self.learn(order)
        predicted_s = self.clock.predicted_s(order, scene.fleet)  # before `charge` advances the schedule
        measuring = CONSTANTS_COST if order.measure else 0
        reestimated = [t for t, _, _ in learned.evaluations] if self.reestimates else []
        charged = self.clock.charge(order, scene.members, measuring, reestimated)
        for t in range(order.first_round + 1, order.last_round + 1):
            self.observer.at(t)  # every round's rates enter the average; `observe` added those of the first
        cuts = np.zeros(self.devices, dtype=int)
        cuts[list(scene.members)] = order.decision.placement
        ends_s = dict(enumerate(charged.ends_s, start=order.first_round - 1))
        return Trained(
            learned,
            cuts=tuple(int(cut) for cut in cuts),
            time_s=self.clock.now_s,
            seconds=charged.elapsed.seconds,
            bottleneck=charged.elapsed.bottleneck,
            bits=charged.elapsed.bits,
            predicted_s=predicted_s,
            evaluations=tuple((t, ends_s[t], accuracy, loss) for t, accuracy, loss in learned.evaluations),
            present=order.present,
            reestimated=bool(reestimated),
        )

    # --- learning ---

    def learn(self, order: Order) -> Learned:
        """Return the result of the next block; train it only if the store does not have it."""
        key = _name(f"{self.key} {_schedule(order, batch_norm=self._batch_norm)}")
        known = self.store.find(key)
        if known is None:
            self._catch_up()
            known = self._train(key, order)
            self.store.add(key, known)
            if self._learner.round - self._saved_round >= self.world.run.checkpoint_every:
                self.save()
        else:
            self._waiting.append((key, order))
            self._first_loss = self._first_loss or known.losses[0]
        self.key, self.round = key, self.round + order.rounds
        return known

    def state(self) -> dict[str, Tensor]:
        """Return the global model as it is now."""
        self._catch_up()
        return self._learner.state()

    def save(self) -> None:
        """Write a checkpoint after the last trained block; none in the middle of a block, which has no key yet."""
        learner = self._learner
        if not learner.begun or self._trained_key is None:
            return
        if self.folder is not None and learner.round > self._saved_round:
            extra = {"key": self._trained_key, "divergence": list(learner.divergence.items())}
            learner.save(extra, self._identity)
            self._saved_round = learner.round

    @property
    def _identity(self) -> dict[str, Any]:
        return {"learning": self.world.learning_identity, "trainer": self.kind.name}

    def _catch_up(self) -> None:
        """Train the blocks that were only looked up, starting from the checkpoint if it belongs to one of them."""
        if not self._learner.begun and self._waiting:
            self._restore()
        waiting, self._waiting = self._waiting, []
        for key, order in waiting:
            self._train(key, order)

    def _restore(self) -> None:
        if self.folder is None or not has_checkpoint(self.folder):
            return
        try:
            extra = read_extra(self.folder, identity=self._identity)
        except InvalidInput:
            return  # damaged, or of another run: training again gives the same
        keys = [key for key, _ in self._waiting]
        if extra["key"] in keys:
            done = keys.index(extra["key"]) + 1
            trained = sum(order.rounds for _, order in self._waiting[:done])
            divergence = {int(layer): apart for layer, apart in extra["divergence"]}
            if self._learner.restore(self._waiting[0][1].decision, trained, divergence, self._identity):
                self._saved_round, self._trained_key = trained, extra["key"]
                self._waiting = self._waiting[done:]

    def _train(self, key: str, order: Order) -> Learned:
        """Train the rounds of one block, whose key is `key` once it is complete."""
        self._trained_key = None
        learned = self._learner.train(order, self._first_loss)
        self._first_loss = self._first_loss or learned.losses[0]
        self._trained_key = key
        return learned


def _name(text: str) -> str:
    return sha256(text.encode()).hexdigest()[:32]


def _schedule(order: Order, *, batch_norm: bool) -> str:
    """Return, as text, all parts of an order that determine the result of the block."""
    decision = order.decision
    intervals = sorted(decision.layer_intervals.items())
    parts: list[object] = [
        order.rounds,
        decision.interval,
        decision.deepest,
        intervals,
        order.present,
        order.measure,
        order.final,
    ]
    if not decision.exact_wire:  # activations are rounded where each device is cut
        parts += [decision.wire_dtype, decision.placement, order.members]
    if order.compared:
        parts += [order.compared, decision.placement, order.members]
    if batch_norm and decision.micro_batches > 1:  # it normalises every part of a mini-batch by itself
        parts += ["micro-batches", decision.micro_batches]
    return json.dumps(parts)
