"""The interface between a run and its trainer: the engine, or another form of split learning in `variants`."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from copy import deepcopy
from typing import TypedDict, Unpack

import torch
from torch import Tensor

from adaptsfl.decisions import Decision
from adaptsfl.models import SplitModel
from adaptsfl.training.schedule import Schedule
from adaptsfl.training.settings import (
    Batch,
    Loss,
    OptimizerSettings,
    Statistics,
    check_batches,
    check_trainable,
    device_weights,
    present_devices,
    sample_cross_entropy,
    shares_of,
)
from adaptsfl.training.sharding import Sharding
from adaptsfl.training.snapshot import EngineState, restore_layers
from adaptsfl.training.stack import LayerStack, moved
from adaptsfl.training.statistics import reestimated


class TrainerOptions(TypedDict, total=False):
    """Arguments that all trainers take; see `Trainer`."""

    weights: Sequence[float] | None
    loss: Loss
    device: str | torch.device


class Trainer(ABC):
    """Trains a split model round by round, with copies of layers 1..L_c and one of the others.

    On several ranks every rank has a trainer with the same arguments, calls the same methods in the same order, and
    gives the batches of its own devices (`batch_devices`) only.

    Args:
        statistics: whose samples give batch-norm in the common part its mean and variance.
        sharding: which rank holds which devices; by default all are in this process.
        weights: the weight of every device in all means; equal by default.
        loss: one loss per sample, by default the cross-entropy; a device's loss is the mean over its batch.
        device: where to compute, as torch names it; by default the CPU.

    Attributes:
        present: the devices that took part in the last round; all of them, before the first.
        last_divergence: by layer, 1..L_c, how far apart its copies were when they were last averaged, if measured.
    """

    def __init__(
        self,
        model: SplitModel,
        plan: Decision,
        optimizer: OptimizerSettings,
        *,
        statistics: Statistics,
        sharding: Sharding | None = None,
        **options: Unpack[TrainerOptions],
    ) -> None:
        devices = len(plan.cuts)
        plan.check(devices, model.layers)
        check_trainable(model)
        self.sharding = Sharding.of(devices) if sharding is None else sharding
        self.model, self.settings, self.statistics, self.schedule = model, optimizer, statistics, Schedule(plan)
        self.loss = options.get("loss", sample_cross_entropy)
        self.device = torch.device(options.get("device", "cpu"))
        self.weights = device_weights(options.get("weights"), devices)
        self.present = tuple(range(devices))
        self.last_divergence: dict[int, float] = {}
        pieces = [deepcopy(piece).to(self.device).train() for piece in model.pieces]
        self.layers = [LayerStack(piece, optimizer, self.sharding) for piece in pieces]
        # A user's factory may draw other weights on every machine.
        groups = [group for layer in self.layers for group in (layer.parameters, layer.buffers)]
        tensors = [tensor for group in groups for tensor in group.values() if not tensor.is_complex()]
        self.sharding.ranks.broadcast_tensors(tensors)

    @property
    def batch_devices(self) -> Sequence[int]:
        """The devices whose batches this rank gives."""
        return self.sharding.local

    @abstractmethod
    def round(self, batches: Sequence[Batch], present: Sequence[int] | None = None) -> Tensor:
        """Train one round on one batch per present device; return every present device's loss.

        On several ranks, batches are those of the rank's own devices that are present, and losses those of all.
        """

    @abstractmethod
    def change_plan(self, plan: Decision) -> None:
        """Follow another plan from the next round on; the same plan changes nothing."""

    def state(self, batches: Sequence[Batch] | None = None) -> dict[str, Tensor]:
        """Return the global model: the common layers and the mean of the others, under the model's own names.

        The mean is that of the devices that took part in the last round, as if all layers were averaged now. With
        `batches`, one per such device, batch-norm's running statistics are estimated for that model on these samples;
        without, they are the mean of the copies' own. Neither changes the training.

        On several ranks, batches are those of the rank's own devices.
        """
        shares = self._last_shares()
        pieces = [layer.merged(shares) for layer in self.layers]
        if batches is not None:
            local = self._local(batches, self.present)
            found = reestimated(
                pieces,
                self.schedule.plan.deepest,
                [moved(x, self.device) for x, _ in local.values()],
                [shares[device] for device in local],
                pooled=self.statistics == "pooled",
                ranks=self.sharding.ranks,
            )
            for piece, statistics in zip(pieces, found, strict=True):
                piece.load_state_dict(statistics, strict=False)
        return self.model.merge_state(*(piece.state_dict() for piece in pieces))

    def snapshot(self) -> EngineState:
        """Return a copy of what `restore` needs: a trainer restored from it continues bit for bit.

        On several ranks it holds the copies of the rank's own devices. `save_checkpoint` on all ranks writes them
        as one checkpoint, from which any number of ranks can resume.
        """
        schedule = self.schedule
        return EngineState(
            schedule.plan,
            schedule.round,
            schedule.planned_at,
            tuple(schedule.ages),
            tuple(tuple(layer.steps) for layer in self.layers),
            tuple(layer.tensors() for layer in self.layers),
            self.present,
            self.sharding.shard,
        )

    def restore(self, state: EngineState) -> None:
        """Resume from a snapshot of a trainer with the same model, devices and optimiser; each rank from its own."""
        state.plan.check(len(self.weights), self.model.layers)
        restore_layers(self.layers, state, len(self.weights))
        self.schedule = Schedule(state.plan)
        self.schedule.round, self.schedule.planned_at = state.round, state.planned_at
        self.schedule.ages, self.present = list(state.ages), state.present

    def _begin(self, batches: Sequence[Batch], present: Sequence[int] | None) -> dict[int, Batch]:
        """Store the devices of the round that begins; return the batches of this rank's devices."""
        chosen = present_devices(present, len(self.weights))
        local = self._local(batches, chosen)
        self.present = chosen
        return local

    def _local(self, batches: Sequence[Batch], devices: Sequence[int]) -> dict[int, Batch]:
        """Return the batches by device, for those of `devices` that this rank holds."""
        local = self.sharding.here(devices)
        check_batches(batches, len(local))
        return dict(zip(local, batches, strict=True))

    def _last_shares(self) -> tuple[float, ...]:
        """Return every device's share in the last round."""
        return shares_of(self.weights, self.present)
