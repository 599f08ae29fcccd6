"""Other forms of split and federated learning: decisions for the same engine, or other trainers.

| form | is |
|---|---|
| SFL | a decision with interval 1 |
| parallel split learning | a decision with interval None: never averaged |
| FedAvg | a decision with every cut at L |
| SplitFed V1 | FedAvg with an epoch as interval: where the server's copies run changes no weight |
| centralized | `PooledEngine`: an engine with one device, which trains on the pooled batch |
| SplitFed V2 | `Sequential` |
| vanilla split learning | `Sequential` with relayed=True |
"""

from collections.abc import Sequence
from copy import deepcopy
from itertools import islice
from typing import Any, Unpack

import numpy as np
import torch
from torch import Tensor

from adaptsfl import checks
from adaptsfl.decisions import Decision
from adaptsfl.errors import InvalidInput
from adaptsfl.models import SplitModel
from adaptsfl.training.batchnorm import mixes_samples
from adaptsfl.training.engine import Engine
from adaptsfl.training.ranks import ALONE, Ranks
from adaptsfl.training.settings import Batch, OptimizerSettings
from adaptsfl.training.sharding import Sharding
from adaptsfl.training.snapshot import EngineState
from adaptsfl.training.stack import Slot, merge
from adaptsfl.training.trainer import Trainer, TrainerOptions
from adaptsfl.training.wire_format import Crossing, Dither


class PooledEngine(Engine):
    """One model trained on the batches of all devices together, by the first rank; `present` is then device 0.

    Args:
        devices: how many devices give batches.
        options: those of `Engine`.
    """

    def __init__(
        self,
        model: SplitModel,
        plan: Decision,
        optimizer: OptimizerSettings,
        *,
        devices: int,
        ranks: Ranks = ALONE,
        **options: Any,
    ) -> None:
        sharding = Sharding(ranks, ((0,), *((),) * (ranks.size - 1)))
        refuse_ghosts(plan, model)
        super().__init__(model, plan.levelled(), optimizer, sharding=sharding, **options)
        self.devices = devices

    @property
    def batch_devices(self) -> Sequence[int]:
        """All devices on the first rank, none on the others."""
        return range(self.devices) if self.sharding.ranks.first else ()

    def round(
        self, batches: Sequence[Batch], present: Sequence[int] | None = None, *, exact_wire: bool = False
    ) -> Tensor:
        """Train one round on all samples of the present devices' batches, which nobody sends; return their loss."""
        return super().round(pooled(batches), exact_wire=True)

    def change_plan(self, plan: Decision) -> None:
        """Follow another plan; only its interval is used."""
        refuse_ghosts(plan, self.model)
        super().change_plan(plan.levelled())


def pooled(batches: Sequence[Batch]) -> list[Batch]:
    """Return one batch with all samples, or none without batches."""
    return [(torch.cat([x for x, _ in batches]), torch.cat([y for _, y in batches]))] if batches else []


def refuse_ghosts(plan: Decision, model: SplitModel) -> None:
    """Refuse parts of mini-batches that batch-norm would have to normalise one by one."""
    if plan.micro_batches > 1 and mixes_samples(model.pieces):
        problem = f"is {plan.micro_batches}, but this trainer's batch-norm normalises whole mini-batches"
        raise InvalidInput("decision.micro_batches", problem, "Give 1, or train with Engine")


class Sequential(Trainer):
    """Devices take turns with one server model, which is updated after every device's batch.

    As SplitFed V2, every device has its own client layers, averaged every `interval` rounds (usually an epoch), and
    the order of the devices is drawn anew each round. With `relayed`, as in vanilla split learning, there is one
    client model, passed from device to device in their order. Batch-norm normalises one device's batch at a time.
    """

    def __init__(
        self,
        model: SplitModel,
        cut: int,
        devices: int,
        optimizer: OptimizerSettings,
        *,
        interval: int | None = None,
        relayed: bool = False,
        wire_dtype: str | None = None,
        seed: int = 0,
        **options: Unpack[TrainerOptions],
    ) -> None:
        self.relayed, self.seed = relayed, seed
        cuts = (int(checks.cut_numbers("cut", [cut], model.layers)[0]),) * checks.whole_number("devices", devices)
        if interval is not None:
            checks.whole_number("interval", interval)
        plan = self._followed(Decision(cuts, interval, wire_dtype=wire_dtype))
        super().__init__(model, plan, optimizer, statistics="device", **options)
        self._slots = [Slot(deepcopy(layer.piece)) for layer in self.layers]

    def round(self, batches: Sequence[Batch], present: Sequence[int] | None = None) -> Tensor:
        """Train on every present device's batch in turn; return their losses, in the order of the devices."""
        given, own = self._begin(batches, present), self.layers[: 0 if self.relayed else self.schedule.plan.deepest]
        for layer in own:
            layer.spread()
        losses = {k: self._turn(k, given[k]) for k in self.order(self.schedule.round + 1) if k in given}
        if self.schedule.advance():
            merge(own, self._last_shares(), self.settings.at_averaging)
        if self.relayed:
            self.schedule.ages = [0] * self.schedule.plan.deepest  # a single client model has age 0
        return torch.stack([losses[k] for k in given])

    def order(self, t: int) -> list[int]:
        """Return the devices in the order of round `t`; absent devices are skipped."""
        if self.relayed:
            return list(range(len(self.weights)))
        return [int(k) for k in np.random.default_rng([self.seed, t]).permutation(len(self.weights))]

    def change_plan(self, plan: Decision) -> None:
        """Refuse another cut or interval: both are kept for the whole run."""
        refuse_ghosts(plan, self.model)
        if self._followed(plan) != self.schedule.plan:
            problem = f"is {self._followed(plan)}, this trainer's is {self.schedule.plan}"
            raise InvalidInput("plan", problem, "Keep one cut for all and one interval for the whole run")

    def restore(self, state: EngineState) -> None:
        """Resume from a snapshot of the same trainer class, with the same model, devices and optimiser."""
        if state.plan != self.schedule.plan:
            problem = f"is {state.plan}, this trainer's is {self.schedule.plan}"
            raise InvalidInput("state.plan", problem, "Give a snapshot of a trainer with the same cut and interval")
        super().restore(state)

    def _followed(self, plan: Decision) -> Decision:
        """Return the part of a plan that this trainer follows."""
        wire = None if plan.exact_wire else plan.wire_dtype
        return Decision(plan.cuts, None if self.relayed else plan.interval, wire_dtype=wire)

    def _turn(self, device: int, batch: Batch) -> Tensor:
        """Train on one device's batch: its client layers and the server's."""
        plan, cut = self.schedule.plan, self.schedule.plan.deepest
        own = 0 if self.relayed else cut
        x, y = (tensor.to(self.device) for tensor in batch)
        for number, (layer, slot) in enumerate(zip(self.layers, self._slots, strict=True), start=1):
            layer.point(slot, device if number <= own else None)
            x = slot.run(x)
            if number == cut and not plan.exact_wire:
                assert plan.wire_dtype is not None
                x = Crossing(plan.wire_dtype, Dither(device, self.schedule.round + 1))(x)
        loss = self.loss(x, y).mean()
        wanted = [tensor for slot in self._slots for tensor in slot.trained]
        gradients = iter(torch.autograd.grad(loss, wanted, allow_unused=True, materialize_grads=True))
        for number, layer in enumerate(self.layers, start=1):
            rate = self.settings.rate(self.schedule.round + 1, common=number > cut)
            devices = [device] if number <= own else None
            layer.update(devices, list(islice(gradients, len(layer.trained))), rate)
        return loss.detach()
