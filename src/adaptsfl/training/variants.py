"""Other ways of split and federated learning: as decisions for the same engine where they are, else beside it.

| way | is |
|---|---|
| SFL | a decision with interval 1 |
| parallel split learning | a decision with interval None: never averaged |
| FedAvg | a decision with every cut at L |
| SplitFed V1 | FedAvg with an epoch as interval: where the server's copies run changes no weight |
| centralized | a decision for one device, which gets the pooled batch |
| SplitFed V2 | `Sequential` |
| vanilla split learning | `Sequential` with relayed=True |
"""

from collections.abc import Sequence
from copy import deepcopy

import numpy as np
import torch
from torch import Tensor

from adaptsfl import checks
from adaptsfl.decisions import Decision
from adaptsfl.errors import InvalidInput
from adaptsfl.models import SplitModel
from adaptsfl.training.settings import (
    Batch,
    Loss,
    OptimizerSettings,
    check_batches,
    check_trainable,
    device_weights,
    present_devices,
    sample_cross_entropy,
    shares_of,
)
from adaptsfl.training.snapshot import EngineState, restore_layers
from adaptsfl.training.stack import LayerStack, Slot, merge
from adaptsfl.training.statistics import reestimated


class Sequential:
    """Devices take turns with one server model, which is updated after every device's batch.

    As SplitFed V2, every device has its own client layers, averaged every `interval` rounds (usually an epoch), and
    the order of the devices is drawn anew each round. With `relayed`, as in vanilla split learning, there is one
    client model, handed from device to device in their order. Batch-norm sees one device's batch at a time.
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
        seed: int = 0,
        weights: Sequence[float] | None = None,
        loss: Loss = sample_cross_entropy,
        device: str | torch.device = "cpu",
    ) -> None:
        self.cut = int(checks.cut_numbers("cut", [cut], model.layers)[0])
        self.interval = None if interval is None else checks.whole_number("interval", interval)
        self.model, self.settings, self.loss, self.relayed, self.seed = model, optimizer, loss, relayed, seed
        self.device = torch.device(device)
        check_trainable(model)
        self.weights = device_weights(weights, checks.whole_number("devices", devices))
        self.present = tuple(range(devices))  # who took part in the last round; all, before the first
        pieces = [deepcopy(piece).to(self.device).train() for piece in model.pieces]
        self.layers = [LayerStack(piece, optimizer) for piece in pieces]
        self._slots = [Slot(piece) for piece in deepcopy(pieces)]
        self.rounds = 0

    def round(self, batches: Sequence[Batch], present: Sequence[int] | None = None) -> Tensor:
        """Train on every present device's batch in turn; return their losses, in the order of the devices."""
        devices = len(self.weights)
        here = present_devices(present, devices)
        check_batches(batches, len(here))
        self.present = here
        self.rounds += 1
        for layer in [] if self.relayed else self.layers[: self.cut]:
            layer.spread(devices)
        given = dict(zip(here, batches, strict=True))
        losses = {k: self._turn(k, given[k]) for k in self.order(self.rounds) if k in given}
        if not self.relayed and self.interval is not None and self.rounds % self.interval == 0:
            merge(self.layers[: self.cut], shares_of(self.weights, here), self.settings.at_averaging)
        return torch.stack([losses[k] for k in here])

    def order(self, t: int) -> list[int]:
        """Return the devices in the order of round `t`; those that are absent are left out of it."""
        if self.relayed:
            return list(range(len(self.weights)))
        return [int(k) for k in np.random.default_rng([self.seed, t]).permutation(len(self.weights))]

    def state(self, batches: Sequence[Batch] | None = None) -> dict[str, Tensor]:
        """Return the global model: the server's layers and the mean of the clients', under the model's own names.

        With `batches`, one per device of the last round, batch-norm's running statistics are estimated for that model.
        """
        shares = shares_of(self.weights, self.present)
        pieces = [layer.merged(shares) for layer in self.layers]
        if batches is not None:
            check_batches(batches, len(self.present))
            inputs, own = [x.to(self.device) for x, _ in batches], [shares[k] for k in self.present]
            found = reestimated(pieces, self.cut, inputs, own, pooled=False)
            for piece, statistics in zip(pieces, found, strict=True):
                piece.load_state_dict(statistics, strict=False)
        return self.model.merge_state(*(piece.state_dict() for piece in pieces))

    def snapshot(self) -> EngineState:
        """Return a copy of what `restore` needs, in the form of an engine whose devices all cut at the same layer."""
        since = 0 if self.relayed else self.rounds % self.interval if self.interval else self.rounds
        return EngineState(
            self._plan(),
            self.rounds,
            0,
            (since,) * self.cut,
            tuple(tuple(layer.steps) for layer in self.layers),
            tuple(layer.tensors() for layer in self.layers),
            self.present,
        )

    def restore(self, state: EngineState) -> None:
        """Go on from a snapshot of the same way of training, with the same model, devices and optimiser."""
        if state.plan != self._plan():
            problem = f"is {state.plan}, this trainer's is {self._plan()}"
            raise InvalidInput("state.plan", problem, "Give a snapshot of a trainer with the same cut and interval")
        restore_layers(self.layers, state, len(self.weights))
        self.rounds, self.present = state.round, state.present

    def _plan(self) -> Decision:
        return Decision((self.cut,) * len(self.weights), None if self.relayed else self.interval)

    def _turn(self, device: int, batch: Batch) -> Tensor:
        """Train on one device's batch: its client layers and the server's."""
        own = 0 if self.relayed else self.cut
        rows = [device if number <= own else 0 for number in range(1, len(self.layers) + 1)]
        x, y = (tensor.to(self.device) for tensor in batch)
        for layer, slot, row in zip(self.layers, self._slots, rows, strict=True):
            layer.point(slot, row)
            x = slot.run(x)
        loss = self.loss(x, y).mean()
        wanted = [tensor for slot in self._slots for tensor in slot.trained]
        gradients = list(torch.autograd.grad(loss, wanted, allow_unused=True, materialize_grads=True))
        for number, (layer, row) in enumerate(zip(self.layers, rows, strict=True), start=1):
            mine, gradients = gradients[: len(layer.trained)], gradients[len(layer.trained) :]
            layer.update([row], mine, self.settings.rate(self.rounds, common=number > self.cut))
        return loss.detach()
