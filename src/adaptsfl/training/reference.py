"""Algorithm 1 in plain loops: the edge devices, the edge server and the fed server as plain objects.

It is slow and meant to be read; every faster trainer is tested against it. Numbers in comments are the pseudocode's
lines. Lines 2 and 3 are the caller's: it chooses how long to train and the plan, and may change it after an averaging.
"""

from collections.abc import Sequence
from copy import deepcopy
from itertools import islice

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.modules.batchnorm import _BatchNorm

from adaptsfl.decisions import Decision
from adaptsfl.models import SplitModel
from adaptsfl.training.batchnorm import check_statistics
from adaptsfl.training.layers import Layer, average, gradients_of, parameters_of, run, summed, update, weighted_mean
from adaptsfl.training.schedule import Schedule
from adaptsfl.training.settings import (
    Batch,
    Loss,
    OptimizerSettings,
    Statistics,
    batch_parts,
    check_batches,
    check_trainable,
    device_weights,
    present_devices,
    sample_cross_entropy,
    shares_of,
)
from adaptsfl.training.wire_format import Dither, arriving


class DeviceSide:
    """An edge device: the layers up to its cut, w_{c,i}, and what it keeps of the round under way.

    A mini-batch may go through the round in equal parts, one behind the other: all forward passes come first, gradients
    may arrive in any order, and are summed until the layers follow them once.
    """

    def __init__(self, layers: list[Layer]) -> None:
        self.layers = layers
        self.activations: dict[int, Tensor] = {}  # by part, with their autograd graphs, until they are backpropagated
        self._gradients: list[Tensor] = []

    def forward(self, x: Tensor, part: int = 0) -> Tensor:
        """Run the device's layers on a part of a mini-batch; return the activations without their autograd graph.

        Part 0 begins a round: what is left of another one is dropped.
        """
        if part == 0:
            self.activations, self._gradients = {}, []
        self.activations[part] = run(self.layers, x)
        return self.activations[part].detach()

    def pieces(self) -> dict[int, nn.Module]:
        """Return the layers as modules, by number."""
        return dict(enumerate((layer.piece for layer in self.layers), start=1))

    def backward(self, received: Tensor, rate: float, part: int = 0) -> None:
        """Backpropagate the gradient received for a part; if it was the last one missing, update the layers."""
        found = gradients_of(self.activations.pop(part), parameters_of(self.layers), received)
        self._gradients = summed(self._gradients, list(found))
        if not self.activations:
            update(self.layers, iter(self._gradients), rate)


class ServerSide:
    """The common layers h_s, and for every device the layers h_{m,i} between its cut and L_c.

    Mini-batches may come in equal parts. Every part is trained with `forward`, `backward` and `accumulate`; after the
    last one, `update` follows the sums.

    Attributes:
        gradients: of the part under way: those of the common layers, then of the present devices' own.
    """

    def __init__(self, common: list[Layer], statistics: Statistics, settings: OptimizerSettings, loss: Loss) -> None:
        self.common, self.statistics, self.settings, self.loss = common, statistics, settings, loss
        self.non_common: list[list[Layer]] = []
        # By device and part: activations, and output of its h_{m,i}.
        self._arrived: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}
        self.gradients: list[Tensor] = []
        self._sums: dict[int | None, list[Tensor]] = {}  # by device, None for the common layers: over the parts so far

    def receive(self, device: int, sent: Tensor, part: int = 0) -> None:
        """Run a device's h_{m,i} on the activations that it sent, without waiting for other devices."""
        received = sent.requires_grad_()
        # 13: the predictions ŷ_i, through the device's own layers and then (in `forward`) the common ones
        self._arrived[device, part] = received, run(self.non_common[device], received)

    def received(self, device: int, part: int = 0) -> Tensor:
        """Return the activations that a device sent for a part of this round."""
        return self._arrived[device, part][0].detach()

    def forward(
        self, present: Sequence[int], targets: Sequence[Tensor], weights: Sequence[float], part: int = 0, parts: int = 1
    ) -> Tensor:
        """Return the loss of every present device, the mean over the samples of this part, which have arrived.

        Args:
            weights: of the present devices in the mean over all; they sum to less than 1 if a device is missing that
                was there in an earlier part.
        """
        self._present, self._weights, self._part, self._parts = present, weights, part, parts
        predictions = self.run_common([self._arrived[k, part][1] for k in present], weights)
        # 14: the loss F_i of every device
        self._losses = torch.stack([self.loss(p, y).mean() for p, y in zip(predictions, targets, strict=True)])
        return self._losses.detach()

    def backward(self) -> list[Tensor]:
        """Return the gradient for every present device (line 17: it is sent to the device)."""
        # 14: f, the mean of the losses.
        # Paper: the gradients of every F_i, then their mean. Here: the gradient of the mean; a device's own gradients
        # are divided by its weight. Because: they are equal, and only this is defined for pooled batch-norm.
        mean = (self._losses * self._losses.new_tensor(self._weights)).sum() / self._parts
        received = [self._arrived[k, self._part][0] for k in self._present]
        own = [parameter for k in self._present for parameter in parameters_of(self.non_common[k])]
        wanted = [*parameters_of(self.common), *own]
        self.gradients = [*gradients_of(mean, [*wanted, *received])]
        sent, self.gradients = self.gradients[len(wanted) :], self.gradients[: len(wanted)]
        return [gradient / weight for gradient, weight in zip(sent, self._weights, strict=True)]

    def accumulate(self) -> None:
        """Add the gradients of a part to the sums that `update` follows; divide a device's own by its weight."""
        gradients = iter(self.gradients)
        for k, weight in [(None, 1.0), *zip(self._present, self._weights, strict=True)]:
            layers = self.common if k is None else self.non_common[k]
            found = [gradient / weight for gradient in islice(gradients, len(parameters_of(layers)))]
            self._sums[k] = summed(self._sums.get(k, []), found)
            if k is not None:
                del self._arrived[k, self._part]

    def update(self, round_: int, present: Sequence[int]) -> None:
        """Update the server's layers, at the learning rate of round 1, 2, ….

        Args:
            present: the devices whose parts have all been trained; own layers of others do not change.
        """
        # 15: the common layers follow the mean gradient
        update(self.common, iter(self._sums[None]), self.settings.rate(round_, common=True))
        # 16: the non-common layers of a device follow its own gradient
        for k in present:
            update(self.non_common[k], iter(self._sums[k]), self.settings.rate(round_, common=False))
        self.drop()

    def drop(self) -> None:
        """Drop activations and gradients of a round: it is over, or begins again."""
        self._arrived.clear()
        self._sums.clear()

    def run_common(self, inputs: Sequence[Tensor], weights: Sequence[float]) -> list[Tensor]:
        """Run the common layers; batch-norm normalises all devices' samples together, or each device's separately."""
        if self.statistics == "pooled":
            return list(run(self.common, torch.cat(list(inputs))).split_with_sizes([len(x) for x in inputs]))
        outputs, weights = list(inputs), [weight / sum(weights) for weight in weights]
        for layer in self.common:
            buffers = [{key: value.clone() for key, value in layer.piece.named_buffers()} for _ in inputs]
            outputs = [functional_call(layer.piece, own, (x,)) for own, x in zip(buffers, outputs, strict=True)]
            for key, buffer in layer.piece.named_buffers():  # running statistics: the mean over devices
                copies = [own[key] for own in buffers]
                buffer.copy_(weighted_mean(copies, weights) if buffer.is_floating_point() else copies[0])
        return outputs


class Reference:
    """Algorithm 1: the devices, the edge server, and the rounds that they train together."""

    def __init__(
        self,
        model: SplitModel,
        plan: Decision,
        optimizer: OptimizerSettings,
        *,
        weights: Sequence[float] | None = None,
        statistics: Statistics = "pooled",
        loss: Loss = sample_cross_entropy,
    ) -> None:
        plan.check(len(plan.cuts), model.layers)
        check_trainable(model)
        check_statistics(statistics, model)
        self.model, self.settings, self.schedule = model, optimizer, Schedule(plan)
        self.weights = device_weights(weights, len(plan.cuts))
        self.present = tuple(range(len(plan.cuts)))  # in the last round; all devices, before the first
        # 1: w_i ← w
        self.server = ServerSide([Layer(piece, optimizer) for piece in model.pieces], statistics, optimizer, loss)
        self.devices: list[DeviceSide] = []
        self._place([[] for _ in plan.cuts], plan)

    def round(self, batches: Sequence[Batch], present: Sequence[int] | None = None) -> Tensor:
        """Train one round on one batch per present device; return every present device's loss."""
        # Paper: every device takes part. Here: only present devices, with weights that sum to 1; absent devices do not
        # change until they receive an average. Because: devices connect and disconnect.
        here = present_devices(present, len(self.devices))
        check_batches(batches, len(here))
        self.present, shares = here, shares_of(self.weights, here)
        weights = [shares[k] for k in here]
        # Paper: all that is sent arrives as it was. Here: in the plan's type. Because: fewer bits arrive sooner.
        t, wire = self.schedule.round + 1, self.schedule.plan.wire_dtype or "float32"
        devices = [self.devices[k] for k in here]
        # Paper: a mini-batch goes through a round at once. Here: in k equal parts, trained one after another before any
        # layer changes. Because: parts can be computed and sent at the same time; their gradients add up to the same.
        parts = self.schedule.plan.micro_batches
        split = [batch_parts(batch, parts) for batch in batches]  # by device
        # 7 to 10: every device runs its layers and sends activations and targets
        for k, device, own in zip(here, devices, split, strict=True):
            for part, (x, _) in enumerate(own):
                self.server.receive(k, arriving(device.forward(x, part), wire), part)
        losses = []
        for part in range(parts):
            # 12 to 17: the edge server
            losses.append(self.server.forward(here, [own[part][1] for own in split], weights, part, parts))
            gradients = self.server.backward()
            self.server.accumulate()
            # 20 to 22: every device runs its backward pass, and after the last part updates its layers
            for k, device, gradient in zip(here, devices, gradients, strict=True):
                received = arriving(gradient, wire, Dither(k, t, first=part * len(gradient)))
                device.backward(received, self.settings.rate(t, common=False), part)
        self.server.update(t, here)
        # 25: layers whose interval has passed (one interval for all layers, unless the plan says otherwise)
        due = self.schedule.advance()
        forged = self.forged()  # 26
        for layer in due:
            # 27, 28: the mean of the present devices' copies, sent back to every copy
            average([own[layer - 1] for own in forged], shares, self.settings.at_averaging)
        return torch.stack(losses).mean(0)

    def forged(self) -> list[list[Layer]]:
        """Return h_{c,i}, every device's layers 1 to L_c, on the device and on the edge server."""
        return [own.layers + rest for own, rest in zip(self.devices, self.server.non_common, strict=True)]

    def change_plan(self, plan: Decision) -> None:
        """Move layers to where another plan places them, with their weights, buffers and optimiser state."""
        plan.check(len(self.devices), self.model.layers)
        self.schedule.change(plan)
        self._place(self.forged(), plan)

    def _place(self, forged: list[list[Layer]], plan: Decision) -> None:
        common = self.server.common
        for copies in reversed([*zip(*(own[plan.deepest :] for own in forged), strict=True)]):  # they become common
            average(copies, shares_of(self.weights, self.present), "average")
            common = [copies[0], *common]
        more = common[: max(0, plan.deepest - len(forged[0]))]  # they become client-specific
        self.server.common = common[len(more) :]
        forged = [[*own[: plan.deepest], *deepcopy(more)] for own in forged]
        self.devices = [DeviceSide(own[:cut]) for own, cut in zip(forged, plan.cuts, strict=True)]
        self.server.non_common = [own[cut:] for own, cut in zip(forged, plan.cuts, strict=True)]

    def state(self, batches: Sequence[Batch] | None = None) -> dict[str, Tensor]:
        """Return the global model: the common layers and the mean of the others, under the model's own names.

        With `batches`, one per device of the last round, batch-norm's running statistics are estimated for that model.
        """
        shares = shares_of(self.weights, self.present)
        merged = [deepcopy(list(copies)) for copies in zip(*self.forged(), strict=True)]
        for copies in merged:
            average(copies, shares, "keep")
        own, common = [copies[0] for copies in merged], deepcopy(self.server.common)
        if batches is not None:
            check_batches(batches, len(self.present))
            here, pooled = [shares[k] for k in self.present], self.server.statistics == "pooled"
            outputs = _estimate(own, [x for x, _ in batches], here)
            _estimate(common, [torch.cat(outputs)] if pooled else outputs, [1.0] if pooled else here)
        return self.model.merge_state(*(layer.piece.state_dict() for layer in [*own, *common]))


@torch.no_grad()
def _estimate(layers: Sequence[Layer], inputs: Sequence[Tensor], shares: Sequence[float]) -> list[Tensor]:
    """Set every batch-norm's running statistics to the moments of its inputs, each device weighted by its share.

    Each entry of `inputs` is normalised separately, without dropout. Returns the outputs of the last layer.
    """
    parts = [part for layer in layers for part in layer.piece.modules()]
    norms = [part for part in parts if isinstance(part, _BatchNorm) and part.training and part.running_mean is not None]
    counts = [norm.get_buffer("num_batches_tracked").clone() for norm in norms]
    seen: dict[nn.Module, list[Tensor]] = {norm: [] for norm in norms}
    for layer in layers:
        layer.piece.eval()
    for norm in norms:
        norm.train()
        norm.register_forward_pre_hook(lambda norm, given: seen[norm].append(given[0].transpose(0, 1).flatten(1)))
    outputs = [run(layers, x) for x in inputs]
    for norm, count in zip(norms, counts, strict=True):
        numbers = torch.cat(seen[norm], 1)  # (channels, numbers of all devices)
        sizes = [x.shape[1] for x in seen[norm]]
        weights = numbers.new_tensor(
            [share / size for share, size in zip(shares, sizes, strict=True) for _ in range(size)]
        )
        mean = (weights * numbers).sum(1)
        variance = (weights * (numbers - mean[:, None]).square()).sum(1) * (sum(sizes) / (sum(sizes) - 1))
        for name, value in (("running_mean", mean), ("running_var", variance), ("num_batches_tracked", count)):
            norm.get_buffer(name).copy_(value)
    return outputs
