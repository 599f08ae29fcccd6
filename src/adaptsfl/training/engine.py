"""The fast engine: the same rounds as `reference`, with equal weights up to rounding.

Where a client-specific layer runs, on the device or on the edge server, does not change its weights; so every device
runs its own copies of layers 1..L_c, and the common layers run once on the samples of many devices.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import islice
from typing import Unpack

import torch
from torch import Tensor

from adaptsfl.decisions import Decision
from adaptsfl.models import SplitModel
from adaptsfl.training.batchnorm import check_statistics, mixes_samples
from adaptsfl.training.passes import ChunkForward, Passes, Work, add_to, one_after_another
from adaptsfl.training.precision import ServerGradients, affine_gradient, products, repeated, rounds_factor
from adaptsfl.training.ranks import ALONE
from adaptsfl.training.settings import Batch, OptimizerSettings, Statistics, present_devices, shares_of
from adaptsfl.training.sharding import Sharding
from adaptsfl.training.stack import means, merge
from adaptsfl.training.trainer import Trainer, TrainerOptions
from adaptsfl.training.wire_format import Crossing, Dither


def compared_round(
    engine: "Engine", batches: Sequence[Batch], present: Sequence[int] | None, types: Sequence[str]
) -> tuple[Tensor, dict[str, float]]:
    """Measure what types of numbers cost in rounds, and train the round exactly; return its losses and the factors."""
    factors = engine.wire_factors(batches, types, present)
    return engine.round(batches, present, exact_wire=True), factors


class Engine(Trainer):
    """Trains a split model with one copy of layers 1..L_c per device and one of the others.

    Args:
        statistics: whose samples give batch-norm in the common part its mean and variance.
        sharding: which rank holds which devices; by default all are in this process.
        chunk: devices that run together; see `Passes`.
        chunk_forward: how a chunk runs through the client-specific layers.
        record_divergence: store each layer's divergence at its last averaging in `last_divergence`. The engine then
            makes copies also with I = 1, where it does not need them otherwise.
        options: weights, loss and device; see `Trainer`.
    """

    def __init__(
        self,
        model: SplitModel,
        plan: Decision,
        optimizer: OptimizerSettings,
        *,
        statistics: Statistics = "pooled",
        sharding: Sharding | None = None,
        chunk: int | None = None,
        chunk_forward: ChunkForward = one_after_another,
        record_divergence: bool = False,
        **options: Unpack[TrainerOptions],
    ) -> None:
        check_statistics(statistics, model, ALONE if sharding is None else sharding.ranks)
        self._ghosts = mixes_samples(model.pieces)
        plan = self._followed(plan)
        super().__init__(model, plan, optimizer, statistics=statistics, sharding=sharding, **options)
        self.record_divergence = record_divergence
        self._at_mean = False
        self._passes = Passes(self.layers, self.loss, statistics, self.device, chunk=chunk, chunk_forward=chunk_forward)

    def round(
        self, batches: Sequence[Batch], present: Sequence[int] | None = None, *, exact_wire: bool = False
    ) -> Tensor:
        """Train one round on one batch per present device; return every present device's loss.

        With `exact_wire`, mini-batches are whole, and activations and gradients arrive as they were sent, whatever the
        plan says.
        """
        wire = None if exact_wire or self.schedule.plan.exact_wire else self.schedule.plan.wire_dtype
        local, own = self._begin(batches, present), self._own_layers(wire)
        shares = self._last_shares()
        parts = 1 if exact_wire else self.schedule.plan.micro_batches
        work = Work(local, shares, own, self.sharding.ranks, self._crossings(wire, local, shares), parts)
        for layer in self.layers[:own]:
            layer.spread()
        rate = self.settings.rate(self.schedule.round + 1, common=False)

        def update_own(devices: Sequence[int], gradients: list[list[Tensor]]) -> None:
            for layer, collected in zip(self.layers[:own], gradients, strict=True):
                layer.update(devices, collected, rate)

        losses, gradients = self._passes.accumulate(work, update_own)
        self._update_common(work, gradients)
        due = [(number, self.layers[number - 1]) for number in self.schedule.advance()]
        if self.record_divergence:
            self.last_divergence |= {number: layer.divergence(shares) for number, layer in due}
        merge([layer for _, layer in due], shares, self.settings.at_averaging)
        return self.sharding.all_losses(losses, self.present)

    def change_plan(self, plan: Decision) -> None:
        """Follow another plan from the next round on, with all weights, buffers and optimiser state."""
        plan = self._followed(plan)
        plan.check(len(self.weights), self.model.layers)
        if plan == self.schedule.plan:
            return
        self.schedule.change(plan)
        merge(self.layers[plan.deepest :], self._last_shares(), "average")  # layers that become common

    def divergence(self) -> list[float]:
        """Return how far apart the copies of each client-specific layer are: the mean of ‖w_i - w̄‖ / ‖w̄‖.

        The mean and w̄ are over the devices of the last round, by their weights. It is largest just before an
        averaging, where `record_divergence` stores it.
        """
        shares = self._last_shares()
        return [layer.divergence(shares) for layer in self.layers[: self.schedule.plan.deepest]]

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """Replace the copies by their mean over the devices of the last round, and restore them at the end."""
        kept = [(layer.parameters, layer.buffers) for layer in self.layers]
        groups = [group for pair in kept for group in pair]
        merged = iter(means(groups, self._last_shares(), self.sharding))
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
        alone: bool = False,
    ) -> list[Tensor]:
        """Return the gradient of every layer as one vector, the weighted mean over `devices` (by default all).

        It is computed at every device's own copies, or inside `averaged` at their mean, and changes nothing. On several
        ranks, every rank gives the batches of its own devices, and gets the gradient over all devices. With `alone`,
        all `devices` belong to this rank, and the other ranks need not call it.
        """
        chosen, own = present_devices(devices, len(self.weights)), self.schedule.plan.deepest
        local = self._local(batches, chosen)
        assert not alone or len(local) == len(chosen), "devices of other ranks cannot be asked alone"
        if self._at_mean and not any(layer.mixes_samples for layer in self.layers[:own]):
            own = 0  # all devices run on the same weights, so they can run together
        ranks = ALONE if alone else self.sharding.ranks
        work = Work(local, shares_of(self.weights, chosen), own, ranks)
        with self._unchanged_buffers():
            sums = self._weighted_gradients(work)
        nothing = torch.zeros(0, device=self.device)
        vectors = [torch.cat([tensor.flatten() for tensor in summed]) if summed else nothing for summed in sums]
        ranks.all_reduce_sum(vectors)
        return vectors

    def wire_factors(
        self, batches: Sequence[Batch], types: Iterable[str], present: Sequence[int] | None = None
    ) -> dict[str, float]:
        """Return by what factor each type of numbers would multiply the rounds, from one round's mini-batches.

        Nothing changes. On several ranks, every rank gives the batches of its own devices, and gets the same factors.
        """
        chosen = present_devices(present, len(self.weights))
        local, shares = self._local(batches, chosen), shares_of(self.weights, chosen)
        exact = self._server_gradients("float32", local, shares)
        factors = {}
        for wire_dtype in types:
            numbers = products(exact, self._server_gradients(wire_dtype, local, shares), shares)
            factors[wire_dtype] = rounds_factor([*numbers[:3], *self.sharding.ranks.sum_numbers(numbers[3:])])
        return factors

    def _server_gradients(self, wire_dtype: str, batches: dict[int, Batch], shares: Sequence[float]) -> ServerGradients:
        """Return what the edge server and the devices would see of one round's gradients with this type."""
        crossings, own = self._crossings(wire_dtype, batches, shares), self.schedule.plan.deepest
        at_cut: dict[int, Tensor] = {}
        for device, (_, way) in crossings.items():
            way.observe = partial(_keep_affine_gradient, at_cut, device)
        with self._unchanged_buffers(), repeated(self.device):
            sums = self._weighted_gradients(Work(batches, shares, own, self.sharding.ranks, crossings))
        common = [tensor for layer in sums[own:] for tensor in layer]
        self.sharding.ranks.all_reduce_sum(common)
        return ServerGradients(common, at_cut)

    def _weighted_gradients(self, work: Work) -> list[list[Tensor]]:
        """Return for every layer the sum of the gradients of this rank's devices, each times its share."""
        own_sums: list[list[Tensor]] = [[] for _ in range(work.own)]

        def add_own(devices: Sequence[int], gradients: list[list[Tensor]]) -> None:
            for layer, summed, collected in zip(self.layers[: work.own], own_sums, gradients, strict=True):
                width = len(layer.trained)
                for k, device in enumerate(devices):
                    own = collected[k * width : (k + 1) * width]
                    add_to(summed, [work.shares[device] * tensor for tensor in own])

        _, common = self._passes.accumulate(work, add_own, work.scale)
        remaining = iter(common)
        return [
            *(summed or layer.zeros() for summed, layer in zip(own_sums, self.layers, strict=False)),
            *(list(islice(remaining, len(layer.trained))) for layer in self.layers[work.own :]),
        ]

    @contextmanager
    def _unchanged_buffers(self) -> Iterator[None]:
        """Run passes on copies of batch-norm's running statistics, and discard the copies at the end."""
        kept = [layer.buffers for layer in self.layers]
        try:
            for layer in self.layers:
                layer.buffers = {name: tensor.clone() for name, tensor in layer.buffers.items()}
            yield
        finally:
            for layer, buffers in zip(self.layers, kept, strict=True):
                layer.buffers = buffers
            for norm in self._passes.sliced:
                norm.forget()

    def _crossings(
        self, wire_dtype: str | None, devices: Iterable[int], shares: Sequence[float]
    ) -> dict[int, tuple[int, Crossing]]:
        """Return where each of these devices sends its activations in the next round; nothing without a type.

        The gradient that comes back is that of the device's own loss, as in `Passes` times its share over the largest.
        """
        if wire_dtype is None:
            return {}
        crossings = {}
        for device in devices:
            dither = Dither(device, self.schedule.round + 1)
            way = Crossing(wire_dtype, dither, shares[device] / max(shares))
            crossings[device] = self.schedule.plan.placement[device], way
        return crossings

    def _followed(self, plan: Decision) -> Decision:
        """Return a plan with whole mini-batches, unless batch-norm sees in how many parts they come.

        Parts that batch-norm normalises one by one are called ghost batches. Without it the gradients of the parts add
        up to that of the whole, up to rounding.
        """
        return plan if self._ghosts else replace(plan, micro_batches=1)

    def _own_layers(self, wire_dtype: str | None) -> int:
        """Return how many layers need one copy per device in the next round: L_c, or none.

        Where all copies are equal and are averaged after the round, the mean of their updates is the update by the
        mean gradient, if the optimiser is linear and every sample's gradient depends on that sample alone. Absent
        devices get the mean as well, so no device needs a copy. Measuring the divergence needs copies, and so does
        rounding at every device's own cut.
        """
        plan = self.schedule.plan
        if wire_dtype is not None:
            return plan.deepest
        stateless = self.settings.name == "sgd" or self.settings.at_averaging != "keep"
        if self.schedule.lone_round and self.settings.linear and stateless and not self.record_divergence:
            mixed = any(layer.mixes_samples for layer in self.layers[: plan.deepest])
            return plan.deepest if mixed else 0
        return plan.deepest

    def _update_common(self, work: Work, gradients: list[Tensor]) -> None:
        """Update the layers that have a single copy by the mean gradient."""
        norms = self._passes.sliced
        uses = torch.tensor([norm.uses for norm in norms], dtype=torch.int64)
        if norms:  # a rank without present devices does not know
            self.sharding.ranks.all_reduce_max([uses])
        statistics = [norm.round_statistics(count) for norm, count in zip(norms, uses.tolist(), strict=True)]
        self.sharding.ranks.all_reduce_sum([*gradients, *statistics])
        if gradients:
            torch._foreach_mul_(gradients, work.scale)
        remaining = iter(gradients)
        for number, layer in enumerate(self.layers[work.own :], start=work.own + 1):
            rate = self.settings.rate(self.schedule.round + 1, common=number > self.schedule.plan.deepest)
            layer.update(None, list(islice(remaining, len(layer.trained))), rate)
        for norm, seen in zip(norms, statistics, strict=True):
            norm.finish(seen)


def _keep_affine_gradient(kept: dict[int, Tensor], device: int, activations: Tensor, gradient: Tensor) -> None:
    kept[device] = affine_gradient(activations, gradient)
