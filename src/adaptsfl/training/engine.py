"""The rounds of `reference`, fast: the same weights up to rounding.

Where a client-specific layer runs, on the device or on the edge server, does not change its weights; so every device
runs its own copies of layers 1..L_c, and the common layers run once on the samples of many devices. Devices come in
chunks, each done with before the next begins, so memory does not grow with their number but for their own layers.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from itertools import islice, pairwise

import torch
from torch import Tensor, nn

from adaptsfl import checks
from adaptsfl.decisions import Decision
from adaptsfl.errors import InvalidInput
from adaptsfl.models import SplitModel
from adaptsfl.training.batchnorm import (
    SlicedBatchNorm,
    Slices,
    check_statistics,
    slice_batch_norm,
    spread_batch_norm,
)
from adaptsfl.training.ranks import ALONE, Ranks
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
from adaptsfl.training.snapshot import EngineState, restore_layers
from adaptsfl.training.stack import LayerStack, Slot, means, merge
from adaptsfl.training.statistics import reestimated

CHUNK_SAMPLES = 160  # enough for the kernels to be busy, and little enough for memory

# From the layers of every device in a chunk, and its inputs, to all activations behind each other.
ChunkForward = Callable[[Sequence[Sequence[nn.Module]], Sequence[Tensor]], Tensor]


def one_after_another(devices: Sequence[Sequence[nn.Module]], inputs: Sequence[Tensor]) -> Tensor:
    """Run every device's own layers on its own inputs: on a CPU faster than batching the weights."""
    outputs = []
    for layers, given in zip(devices, inputs, strict=True):
        x = given
        for layer in layers:
            x = layer(x)
        outputs.append(x)
    return torch.cat(outputs) if len(outputs) > 1 else outputs[0]


class Engine:
    """Trains a split model with one copy of layers 1..L_c per device and one of the others.

    Args:
        weights: how much every device counts in all means; equally, if not given.
        statistics: whose samples give batch-norm in the common part its mean and variance.
        loss: one loss per sample; a device's loss is the mean over its batch.
        device: where to compute, as torch names it.
        chunk: devices that run together; by default as many as have about 160 samples. With pooled statistics in a
            common batch-norm all devices run together, because each sample then depends on all.
        chunk_forward: how a chunk runs through the client-specific layers.
        record_divergence: keep in `last_divergence` how far apart a layer's copies were when they were last averaged.
            Then copies are made with I = 1 too, where the engine would do without.
        ranks: the processes that train together. Every rank has an engine with the same arguments, calls the same
            methods in the same order, and gives the batches of its own devices (`mine`) only.
        parts: the devices of every rank; by default as many as its speed allows.

    Attributes:
        mine: the devices of this rank.
        present: the devices that took part in the last round; all of them, before the first.
        last_divergence: by layer, 1..L_c; see `divergence`.
    """

    def __init__(
        self,
        model: SplitModel,
        plan: Decision,
        optimizer: OptimizerSettings,
        *,
        weights: Sequence[float] | None = None,
        statistics: Statistics = "pooled",
        loss: Loss = sample_cross_entropy,
        device: str | torch.device = "cpu",
        chunk: int | None = None,
        chunk_forward: ChunkForward = one_after_another,
        record_divergence: bool = False,
        ranks: Ranks = ALONE,
        parts: Sequence[Sequence[int]] | None = None,
    ) -> None:
        plan.check(len(plan.cuts), model.layers)
        check_trainable(model)
        check_statistics(statistics, model, ranks)
        self.model, self.settings, self.loss, self.statistics = model, optimizer, loss, statistics
        self.device, self.chunk_forward = torch.device(device), chunk_forward
        self.chunk = None if chunk is None else checks.whole_number("chunk", chunk)
        self.schedule = Schedule(plan)
        self.weights = device_weights(weights, len(plan.cuts))
        self.present = tuple(range(len(plan.cuts)))
        self.ranks = ranks
        self.parts = _checked_parts(ranks.shares(len(plan.cuts)) if parts is None else parts, len(plan.cuts), ranks)
        self.mine = self.parts[ranks.rank]
        self._whose = None if ranks.size == 1 else self.mine
        self._row = {device: row for row, device in enumerate(self.mine)}
        # At least two where there are several ranks, so that one row says on every rank that all copies are equal.
        self._rows = len(self.mine) if ranks.size == 1 else max(2, len(self.mine))
        self.record_divergence = record_divergence
        self.last_divergence: dict[int, float] = {}
        pieces = [deepcopy(piece).to(self.device).train() for piece in model.pieces]
        self.layers = [LayerStack(piece, optimizer) for piece in pieces]
        self._boundary = -1  # own layers for which the modules below were made
        self._own_slots: list[list[Slot]] = []  # for every device of a chunk, its own layers
        self._common_slots: list[Slot] = []
        self._at_mean = False
        self._slices = Slices()
        self._slices.ranks = ranks
        self._sliced: list[SlicedBatchNorm] = []
        if ranks.size > 1:
            self._begin_equal()

    def round(self, batches: Sequence[Batch], present: Sequence[int] | None = None) -> Tensor:
        """Train one round on one batch per present device; return every present device's loss.

        On several ranks, batches are those of the rank's own devices that are present, and losses those of all.
        """
        here = present_devices(present, len(self.weights))
        mine = [device for device in here if device in self._row]
        check_batches(batches, len(mine))
        self.present, shares = here, shares_of(self.weights, here)
        # The loss is scaled so that the heaviest device's own gradients come out right, with equal weights all.
        scale = max(shares)
        own = self._own_layers()
        self._prepare(own)
        gradients: list[Tensor] = []
        losses: list[Tensor] = []
        for chunk in self._chunks(batches, own):
            devices = [mine[k] for k in chunk]
            chunk_losses, found = self._train_chunk(devices, [batches[k] for k in chunk], shares, scale, own)
            losses.append(chunk_losses)
            add_to(gradients, found)
        self._update_common(gradients, scale, own)
        due = self.schedule.advance()
        if self.record_divergence:
            self.last_divergence |= {number: self._divergence(self.layers[number - 1]) for number in due}
        merge([self.layers[number - 1] for number in due], self._local(shares), self.settings.at_averaging, self.ranks)
        return self._all_losses(losses, mine)

    def change_plan(self, plan: Decision) -> None:
        """Follow another plan from the next round on, with all weights, buffers and optimiser state."""
        plan.check(len(self.weights), self.model.layers)
        self.schedule.change(plan)
        # Those that become common.
        merge(self.layers[plan.deepest :], self._last_shares(), "average", self.ranks)

    def state(self, batches: Sequence[Batch] | None = None) -> dict[str, Tensor]:
        """Return the global model: the common layers and the mean of the others, under the model's own names.

        The mean is that of the devices that took part in the last round, as if all layers were averaged now. With
        `batches`, one per such device, batch-norm's running statistics are estimated for that model on these samples;
        without, they are the mean of the copies' own. Training goes on the same in any case.

        On several ranks, batches are those of the rank's own devices.
        """
        rows = self._last_shares()
        pieces = [layer.merged(rows, self.ranks) for layer in self.layers]
        if batches is not None:
            mine = [device for device in self.present if device in self._row]
            check_batches(batches, len(mine))
            shares = shares_of(self.weights, self.present)
            found = reestimated(
                pieces,
                self.schedule.plan.deepest,
                [self._place(x) for x, _ in batches],
                [shares[device] for device in mine],
                pooled=self.statistics == "pooled",
                ranks=self.ranks,
            )
            for piece, statistics in zip(pieces, found, strict=True):
                piece.load_state_dict(statistics, strict=False)
        return self.model.merge_state(*(piece.state_dict() for piece in pieces))

    def divergence(self) -> list[float]:
        """Return how far apart the copies of each client-specific layer are: the mean of ‖w_i - w̄‖ / ‖w̄‖.

        The mean and w̄ are over the devices of the last round, by their weights. Just before an averaging it is largest;
        `record_divergence` keeps it from there.
        """
        return [self._divergence(layer) for layer in self.layers[: self.schedule.plan.deepest]]

    def snapshot(self) -> EngineState:
        """Return a copy of what `restore` needs: an engine restored from it goes on bit for bit.

        On several ranks it holds the copies of the rank's own devices. Written by `save_checkpoint` on all ranks, the
        snapshots are one that any number of ranks can go on from.
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
            self._whose,
        )

    def restore(self, state: EngineState) -> None:
        """Go on from a snapshot of an engine with the same model, devices and optimiser, on each rank its own."""
        if state.mine != self._whose:
            problem = f"holds the copies of {_named(state.mine)}, this rank those of {_named(self._whose)}"
            remedy = "Load the checkpoint with devices=engine.mine" if self._whose is not None else "Load it whole"
            raise InvalidInput("state", problem, remedy)
        state.plan.check(len(self.weights), self.model.layers)
        restore_layers(self.layers, state, len(self.weights), self._rows)
        self.schedule = Schedule(state.plan)
        self.schedule.round, self.schedule.planned_at = state.round, state.planned_at
        self.schedule.ages, self.present = list(state.ages), state.present

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """Put the mean of the copies of the last round in their place, for gradients there; then put them back."""
        kept = [(layer.parameters, layer.buffers) for layer in self.layers]
        merged = iter(means([group for pair in kept for group in pair], self._last_shares(), self.ranks))
        try:
            self._at_mean = True
            for layer in self.layers:
                layer.parameters, layer.buffers = next(merged), next(merged)
            yield
        finally:
            self._at_mean = False
            for layer, (parameters, buffers) in zip(self.layers, kept, strict=True):
                layer.parameters, layer.buffers = parameters, buffers

    def gradients(
        self,
        batches: Sequence[Batch],
        *,
        devices: Sequence[int] | None = None,
        averaged: bool = False,
        alone: bool = False,
    ) -> list[Tensor]:
        """Return the gradient of every layer as one vector, the weighted mean over `devices` (by default all).

        It is taken at every device's own copies, or with `averaged` at the mean of those of the last round. Nothing is
        changed. On several ranks, batches are those of the rank's own devices, and the gradient is that of all; with
        `alone` all devices are this rank's and the others need not ask.
        """
        if averaged:
            with self.averaged():
                return self.gradients(batches, devices=devices, alone=alone)
        here = present_devices(devices, len(self.weights))
        mine = [device for device in here if device in self._row]
        assert not alone or len(mine) == len(here), "devices of other ranks cannot be asked alone"
        check_batches(batches, len(mine))
        shares = shares_of(self.weights, here)
        scale = max(shares)
        own = self.schedule.plan.deepest
        if self._at_mean and not any(layer.mixes_samples for layer in self.layers[:own]):
            own = 0  # all devices run on the same weights, so they can run together
        kept = [layer.buffers for layer in self.layers]
        sums: list[list[Tensor]] = [[] for _ in self.layers]
        try:
            self._slices.ranks = ALONE if alone else self.ranks
            for layer in self.layers:
                layer.buffers = {name: tensor.clone() for name, tensor in layer.buffers.items()}
            self._make_modules(own)
            for chunk in self._chunks(batches, own):
                chosen = [mine[k] for k in chunk]
                _, found, common = self._chunk_gradients(chosen, [batches[k] for k in chunk], shares, scale, own)
                for layer, collected, summed in zip(self.layers[:own], found, sums[:own], strict=True):
                    width = len(layer.trained)
                    for k, device in enumerate(chosen):
                        add_to(summed, [shares[device] * tensor for tensor in collected[k * width : (k + 1) * width]])
                remaining = iter(common)
                for layer, summed in zip(self.layers[own:], sums[own:], strict=True):
                    add_to(summed, [scale * tensor for tensor in islice(remaining, len(layer.trained))])
        finally:
            self._slices.ranks = self.ranks
            for layer, buffers in zip(self.layers, kept, strict=True):
                layer.buffers = buffers
            for norm in self._sliced:
                norm.forget()
        nothing = torch.zeros(0, device=self.device)
        vectors = [
            torch.cat([tensor.flatten() for tensor in summed or layer.zeros()]) if layer.trained else nothing
            for layer, summed in zip(self.layers, sums, strict=True)
        ]
        if not alone:
            self.ranks.sum_(vectors)
        return vectors

    def _own_layers(self) -> int:
        """Return how many layers need one copy per device in the next round: L_c, or none.

        Where all copies are equal and are averaged after the round, the mean of their updates is the update by the
        mean gradient, if the optimiser is linear and every sample's gradient depends on that sample alone. Absent
        devices get the mean as well, so nobody needs a copy. To see how far copies part, they must be made.
        """
        plan = self.schedule.plan
        stateless = self.settings.name == "sgd" or self.settings.at_averaging != "keep"
        if self.schedule.lone_round and self.settings.linear and stateless and not self.record_divergence:
            mixed = any(layer.mixes_samples for layer in self.layers[: plan.deepest])
            return plan.deepest if mixed else 0
        return plan.deepest

    def _chunks(self, batches: Sequence[Batch], own: int) -> list[range]:
        devices = len(batches)
        if self._pools(own):
            return [range(devices)]  # also of nobody: the other ranks need their part of the statistics
        if not devices:
            return []
        samples = sum(len(x) for x, _ in batches)
        size = self.chunk or max(1, round(CHUNK_SAMPLES * devices / samples))
        count = -(-devices // size)  # chunks of nearly equal size
        edges = [devices * k // count for k in range(count + 1)]
        return [range(start, stop) for start, stop in pairwise(edges)]

    def _pools(self, own: int) -> bool:
        """Whether samples of the common layers depend on those of all devices."""
        return self.statistics == "pooled" and any(layer.mixes_samples for layer in self.layers[own:])

    def _local(self, shares: Sequence[float]) -> list[float]:
        """Return the shares of this rank's rows."""
        mine = [shares[device] for device in self.mine]
        return mine + [0.0] * (self._rows - len(mine))

    def _last_shares(self) -> list[float]:
        """Return how much every row counts among the devices of the last round."""
        return self._local(shares_of(self.weights, self.present))

    def _divergence(self, layer: LayerStack) -> float:
        root = next(rank for rank, part in enumerate(self.parts) if self.present[0] in part)
        return layer.divergence(self._last_shares(), self.ranks, root)

    def _begin_equal(self) -> None:
        """Take the first rank's weights: a factory may draw others on every machine."""
        groups = [group for layer in self.layers for group in (layer.parameters, layer.buffers)]
        tensors = [tensor for group in groups for tensor in group.values() if not tensor.is_complex()]
        if not self.ranks.first:
            for tensor in tensors:
                tensor.zero_()
        self.ranks.sum_(tensors)

    def _all_losses(self, losses: Sequence[Tensor], mine: Sequence[int]) -> Tensor:
        """Return the losses of all devices of the round, given those of this rank's."""
        if self.ranks.size == 1:
            return torch.cat(list(losses))
        known = dict(zip(mine, [loss for part in losses for loss in part.tolist()], strict=True))
        return torch.tensor(self.ranks.totals([known.get(device, 0.0) for device in self.present]), dtype=torch.float64)

    def _prepare(self, own: int) -> None:
        """Give every device its own copy of the first layers, and make ready to run."""
        for layer in self.layers[:own]:
            layer.spread(self._rows)
        self._make_modules(own)

    def _make_modules(self, own: int) -> None:
        """Make modules for the layers after the first `own`, if they changed, and point them at the weights."""
        if own != self._boundary:
            self._boundary, self._own_slots = own, []
            pieces = [deepcopy(layer.piece) for layer in self.layers[own:]]
            slicing = self.statistics == "device"
            self._sliced = [norm for piece in pieces if slicing for norm in slice_batch_norm(piece, self._slices)]
            if self.ranks.size > 1 and not slicing:
                for piece in pieces:
                    spread_batch_norm(piece, self._slices)
            self._common_slots = [Slot(piece) for piece in pieces]
        for layer, slot in zip(self.layers[own:], self._common_slots, strict=True):
            layer.point(slot, 0)

    def _point(self, devices: Sequence[int], own: int) -> list[list[Slot]]:
        """Return modules for the devices of a chunk, each pointed at its device's copies."""
        while len(self._own_slots) < len(devices):
            self._own_slots.append([Slot(deepcopy(layer.piece)) for layer in self.layers[:own]])
        slots = self._own_slots[: len(devices)]
        for device, row in zip(devices, slots, strict=True):
            for layer, slot in zip(self.layers[:own], row, strict=True):
                layer.point(slot, self._row[device])
        return slots

    def _train_chunk(
        self, devices: Sequence[int], batches: Sequence[Batch], shares: Sequence[float], scale: float, own: int
    ) -> tuple[Tensor, list[Tensor]]:
        """Update the devices' own layers; return their losses and the common layers' gradient, over `scale`.

        All that the chunk's graph holds is free when this returns.
        """
        losses, mine, common = self._chunk_gradients(devices, batches, shares, scale, own)
        rows = [self._row[device] for device in devices]
        for layer, collected in zip(self.layers[:own], mine, strict=True):
            layer.update(rows, collected, self.settings.rate(self.schedule.round + 1, common=False))
        return losses, common

    def _chunk_gradients(
        self, devices: Sequence[int], batches: Sequence[Batch], shares: Sequence[float], scale: float, own: int
    ) -> tuple[Tensor, list[list[Tensor]], list[Tensor]]:
        """Return the devices' losses, for every own layer all devices' gradients, and the gradient of the common ones.

        A device's own gradients are those of its own loss; the common one is that of the sum of the losses, each times
        the device's share over `scale`.
        """
        slots = self._point(devices, own)
        sizes = [len(x) for x, _ in batches]
        self._slices.sizes, self._slices.weights = sizes, [shares[k] for k in devices]
        relative = [shares[k] / scale for k in devices]
        modules = [[slot.run for slot in row] for row in slots]
        if not devices:
            return self._idle_gradients(shares, own)
        outputs = self.chunk_forward(modules, [self._place(x) for x, _ in batches])  # (samples of the chunk, …)
        if self._pools(own):
            self._shape_for_idle(shares, outputs)
        for slot in self._common_slots:
            outputs = slot.run(outputs)
        per_sample = self.loss(outputs, torch.cat([y.to(self.device, non_blocking=True) for _, y in batches]))
        means = torch.stack([part.mean() for part in per_sample.split_with_sizes(sizes)])
        total = (means * means.new_tensor(relative)).sum()
        # One backward pass for every device's own layers and the common ones.
        wanted = [tensor for row in [*slots, self._common_slots] for slot in row for tensor in slot.trained]
        gradients = iter(torch.autograd.grad(total, wanted, allow_unused=True, materialize_grads=True))
        mine: list[list[Tensor]] = [[] for _ in range(own)]  # per layer, for all devices
        for weight, row in zip(relative, slots, strict=True):
            for collected, slot in zip(mine, row, strict=True):
                found = list(islice(gradients, len(slot.trained)))
                collected.extend(found if weight == 1 else torch._foreach_div(found, weight))
        return means.detach(), mine, list(gradients)

    def _shape_for_idle(self, shares: Sequence[float], outputs: Tensor | None) -> tuple[tuple[int, ...], torch.dtype]:
        """Let ranks without a present device know what the others put into the common layers, if there are any."""
        ranks, given = self._slices.ranks, None if outputs is None else (tuple(outputs.shape[1:]), outputs.dtype)
        busy = [any(shares[device] for device in part) for part in self.parts]
        if ranks.size > 1 and not all(busy):
            given = ranks.told_by(busy.index(True), given)
        assert given is not None
        return given

    def _idle_gradients(self, shares: Sequence[float], own: int) -> tuple[Tensor, list[list[Tensor]], list[Tensor]]:
        """Take part in what ranks tell each other in forward and backward passes, with one sample that does not count.

        Pooled statistics are told layer by layer, so a rank without a present device has to run through them too.
        """
        shape, dtype = self._shape_for_idle(shares, None)
        x = torch.zeros(1, *shape, dtype=dtype, device=self.device)
        behind = any(layer.trained for layer in self.layers[:own])  # then the others' backward passes go to the end
        wanted = [tensor for slot in self._common_slots for tensor in slot.trained]
        wanted += [x.requires_grad_()] if behind else []
        self._slices.idle = True
        try:
            for slot in self._common_slots:
                x = slot.run(x)
            zero = torch.zeros_like(x)
            found = list(torch.autograd.grad(x, wanted, zero, allow_unused=True, materialize_grads=True))
        finally:
            self._slices.idle = False
        return torch.zeros(0), [[] for _ in range(own)], found[:-1] if behind else found

    def _update_common(self, gradients: list[Tensor], scale: float, own: int) -> None:
        """Step the layers of which there is one copy by the mean gradient."""
        if not gradients:  # all devices of this rank are absent
            gradients = [zero for layer in self.layers[own:] for zero in layer.zeros()]
        seen = [norm.seen() for norm in self._sliced]
        self.ranks.sum_([*gradients, *seen])
        if gradients:
            torch._foreach_mul_(gradients, scale)
        remaining = iter(gradients)
        for number, (layer, slot) in enumerate(zip(self.layers[own:], self._common_slots, strict=True), start=own + 1):
            rate = self.settings.rate(self.schedule.round + 1, common=number > self.schedule.plan.deepest)
            layer.update([0], list(islice(remaining, len(slot.trained))), rate)
        for norm, statistics in zip(self._sliced, seen, strict=True):
            norm.finish(statistics)

    def _place(self, x: Tensor) -> Tensor:
        x = x.to(self.device, non_blocking=True)
        return x.contiguous(memory_format=torch.channels_last) if x.dim() == 4 else x


def _checked_parts(parts: Sequence[Sequence[int]], devices: int, ranks: Ranks) -> tuple[tuple[int, ...], ...]:
    """Return the devices of every rank, in order; refuse what leaves one out or lets two ranks have it."""
    found = tuple(tuple(sorted(part)) for part in parts)
    if len(found) != ranks.size or sorted(device for part in found for device in part) != list(range(devices)):
        problem = f"is {[list(part) for part in found]} for {ranks.size} ranks and {devices} devices"
        raise InvalidInput("parts", problem, "Give every rank a list of devices, and every device to one rank")
    return found


def _named(devices: Sequence[int] | None) -> str:
    return "all devices" if devices is None else f"devices {list(devices)}"


def add_to(total: list[Tensor], more: Sequence[Tensor]) -> None:
    """Add tensors to a running sum, which is empty at first."""
    if total:
        torch._foreach_add_(total, list(more))
    else:
        total.extend(more)
