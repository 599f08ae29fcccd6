"""Algorithm 1 in plain loops: the edge devices, the edge server and the fed server as plain objects.

It is slow and meant to be read; every faster trainer is tested against it. Numbers in comments are the pseudocode's
lines. Lines 2 and 3 are the caller's: it chooses how long to train and the plan, and may change it after an averaging.
"""

from collections.abc import Sequence
from copy import deepcopy

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.modules.batchnorm import _BatchNorm

from adaptsfl.decisions import Decision
from adaptsfl.models import SplitModel
from adaptsfl.training.batchnorm import check_statistics
from adaptsfl.training.layers import Layer, average, gradients_of, parameters_of, run, update, weighted_mean
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


class DeviceSide:
    """An edge device: the layers up to its cut, w_{c,i}, and the activations of its last forward pass."""

    def __init__(self, layers: list[Layer]) -> None:
        self.layers = layers
        self.activations = torch.zeros(0)

    def forward(self, x: Tensor) -> Tensor:
        """Run the device's layers; return the activations without their autograd graph."""
        self.activations = run(self.layers, x)
        return self.activations.detach()

    def pieces(self) -> dict[int, nn.Module]:
        """Return the layers as modules, by number."""
        return dict(enumerate((layer.piece for layer in self.layers), start=1))

    def backward(self, received: Tensor, rate: float) -> None:
        """Backpropagate the received gradient through the device's layers and update them."""
        update(self.layers, gradients_of(self.activations, parameters_of(self.layers), received), rate)


class ServerSide:
    """The common layers h_s, and for every device the layers h_{m,i} between its cut and L_c."""

    def __init__(self, common: list[Layer], statistics: Statistics, settings: OptimizerSettings, loss: Loss) -> None:
        self.common, self.statistics, self.settings, self.loss = common, statistics, settings, loss
        self.non_common: list[list[Layer]] = []
        self._arrived: dict[int, tuple[Tensor, Tensor]] = {}  # by device: activations, and output of its h_{m,i}
        self.gradients: list[Tensor] = []  # of the common layers, then of the present devices' own

    def receive(self, device: int, sent: Tensor) -> None:
        """Run a device's h_{m,i} on the activations that it sent, without waiting for other devices."""
        received = sent.requires_grad_()
        # 13: the predictions ŷ_i, through the device's own layers and then (in `forward`) the common ones
        self._arrived[device] = received, run(self.non_common[device], received)

    def received(self, device: int) -> Tensor:
        """Return the activations that a device sent for this round."""
        return self._arrived[device][0].detach()

    def forward(self, present: Sequence[int], targets: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
        """Return the loss of every present device, whose activations have arrived."""
        self._present, self._weights = present, weights
        predictions = self.run_common([self._arrived[k][1] for k in present], weights)
        # 14: the loss F_i of every device
        self._losses = torch.stack([self.loss(p, y).mean() for p, y in zip(predictions, targets, strict=True)])
        return self._losses.detach()

    def backward(self) -> list[Tensor]:
        """Return the gradient for every present device (line 17: it is sent to the device)."""
        # 14: f, the mean of the losses.
        # Paper: the gradients of every F_i, then their mean. Here: the gradient of the mean; a device's own gradients
        # are divided by its weight. Because: they are equal, and only this is defined for pooled batch-norm.
        mean = (self._losses * self._losses.new_tensor(self._weights)).sum()
        received = [self._arrived[k][0] for k in self._present]
        own = [parameter for k in self._present for parameter in parameters_of(self.non_common[k])]
        wanted = [*parameters_of(self.common), *own]
        self.gradients = [*gradients_of(mean, [*wanted, *received])]
        sent, self.gradients = self.gradients[len(wanted) :], self.gradients[: len(wanted)]
        return [gradient / weight for gradient, weight in zip(sent, self._weights, strict=True)]

    def update(self, round_: int) -> None:
        """Update the server's layers, at the learning rate of round 1, 2, …."""
        gradients = iter(self.gradients)
        # 15: the common layers follow the mean gradient
        update(self.common, gradients, self.settings.rate(round_, common=True))
        # 16: the non-common layers of a device follow its own gradient
        for k, weight in zip(self._present, self._weights, strict=True):
            update(self.non_common[k], gradients, self.settings.rate(round_, common=False), weight)
        self._arrived.clear()

    def run_common(self, inputs: Sequence[Tensor], weights: Sequence[float]) -> list[Tensor]:
        """Run the common layers; batch-norm normalises all devices' samples together, or each device's separately."""
        if self.statistics == "pooled":
            return list(run(self.common, torch.cat(list(inputs))).split_with_sizes([len(x) for x in inputs]))
        outputs = list(inputs)
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
        t = self.schedule.round + 1
        devices = [self.devices[k] for k in here]
        # 7 to 10: every device runs its layers and sends activations and targets
        sent = [device.forward(x) for device, (x, _) in zip(devices, batches, strict=True)]
        # 12 to 17: the edge server
        for k, activations in zip(here, sent, strict=True):
            self.server.receive(k, activations)
        losses = self.server.forward(here, [y for _, y in batches], [shares[k] for k in here])
        gradients = self.server.backward()
        self.server.update(t)
        # 20 to 22: every device runs its backward pass and updates its layers
        for device, gradient in zip(devices, gradients, strict=True):
            device.backward(gradient, self.settings.rate(t, common=False))
        # 25: layers whose interval has passed (one interval for all layers, unless the plan says otherwise)
        due = self.schedule.advance()
        forged = self.forged()  # 26
        for layer in due:
            # 27, 28: the mean of the present devices' copies, sent back to every copy
            average([own[layer - 1] for own in forged], shares, self.settings.at_averaging)
        return losses

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
