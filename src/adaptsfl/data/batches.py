"""The mini-batches of every round: a function of (seed, device, round), so that training can resume at any round."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from adaptsfl import checks
from adaptsfl.data.augment import crop_and_flip, draw_shifts
from adaptsfl.data.partition import Parts, check_parts
from adaptsfl.data.samples import Normalisation, Samples
from adaptsfl.errors import InvalidInput

ORDER, SHIFTS = 0, 1  # the random streams of a device


@dataclass(frozen=True, eq=False)
class Batch:
    """One mini-batch of each of K devices, one after the other: `inputs.unflatten(0, (K, b))` separates them."""

    inputs: Tensor  # (K·b, …), normalised and augmented
    labels: Tensor  # (K·b, …)
    indices: Tensor  # (K, b), the numbers of the samples in the training set


@dataclass(frozen=True, eq=False)
class _Epoch:
    """One pass of a device over its samples."""

    number: int
    order: Tensor  # the numbers of its samples, shuffled
    shifts: Tensor | None  # one row per sample, if they are augmented


class DeviceBatches:
    """Each device's samples in mini-batches, without replacement within a pass of the device over its samples.

    The order of a pass depends on (seed, device, pass) alone, and a pass ends when no full mini-batch is left. So the
    batches of any round can be computed on their own, in any order, for some or all devices, and there is no state to
    save. A device that holds only its own samples gets the same batches if `streams` has its number in the fleet.
    """

    def __init__(
        self,
        train: Samples,
        parts: Parts,
        batch_size: int,
        *,
        seed: int = 0,
        normalisation: Normalisation | None = None,
        augmentation: Literal["none", "crop-flip"] = "none",
        streams: Sequence[int] | None = None,
        device: torch.device | str = "cpu",
    ) -> None:
        self.batch_size = checks.whole_number("training.batch_size", batch_size)
        self.seed = checks.whole_number("data.seed", seed, at_least=0)
        check_parts(parts, batch_size)
        if augmentation != "none" and train.inputs.ndim != 4:
            problem = f"is {augmentation!r}, but a sample has the shape {tuple(train.inputs.shape[1:])}"
            raise InvalidInput("data.augmentation", problem, "Only images (channels, height, width) can be cropped")
        self.normalisation = normalisation
        self.augmented = augmentation != "none"
        self._inputs, self._labels = train.inputs.to(device), train.labels.to(device)
        self._parts = [torch.from_numpy(part) for part in parts]
        self._streams = list(range(len(parts)) if streams is None else streams)
        assert len(self._streams) == len(parts), "one stream per device"
        self._epochs: dict[int, _Epoch] = {}  # the current pass of each device; only a cache

    def __len__(self) -> int:
        """Return the number of devices."""
        return len(self._parts)

    def rounds_per_epoch(self, device: int) -> int:
        """Return how many mini-batches one pass of that device has."""
        return len(self._parts[device]) // self.batch_size

    def indices(self, round_: int, devices: Sequence[int] | None = None) -> Tensor:
        """Return the numbers of the samples that the devices (by default all) use in that round: (K, b)."""
        rows = [epoch.order[here] for epoch, here in self._positions(round_, devices)]
        return torch.stack(rows)

    def at(self, round_: int, devices: Sequence[int] | None = None) -> Batch:
        """Return the mini-batches of the devices (by default all) in that round, ready for the model."""
        positions = self._positions(round_, devices)
        indices = torch.stack([epoch.order[here] for epoch, here in positions])
        flat = indices.flatten().to(self._inputs.device)
        inputs = self._inputs.index_select(0, flat)
        if self.augmented:
            shifts = torch.cat([epoch.shifts[here] for epoch, here in positions if epoch.shifts is not None])
            inputs = crop_and_flip(inputs, shifts.to(inputs.device))
        if self.normalisation is not None:
            inputs = self.normalisation(inputs)
        return Batch(inputs, self._labels.index_select(0, flat), indices)

    def _positions(self, round_: int, devices: Sequence[int] | None) -> list[tuple[_Epoch, slice]]:
        """Return each device's pass in that round, and the slice of the round's mini-batch within it."""
        positions = []
        for device in range(len(self)) if devices is None else devices:
            number, step = divmod(round_, self.rounds_per_epoch(device))
            positions.append((self._epoch(device, number), slice(step * self.batch_size, (step + 1) * self.batch_size)))
        return positions

    def _epoch(self, device: int, number: int) -> _Epoch:
        known = self._epochs.get(device)
        if known is not None and known.number == number:
            return known
        part, key = self._parts[device], (self.seed, self._streams[device], number)
        order = part[torch.from_numpy(np.random.default_rng([*key, ORDER]).permutation(len(part)))]
        shifts = None
        if self.augmented:
            state = np.random.SeedSequence([*key, SHIFTS]).generate_state(1, np.uint64)[0]
            shifts = draw_shifts(len(part), torch.Generator().manual_seed(int(state)))
        self._epochs[device] = epoch = _Epoch(number, order, shifts)
        return epoch


def evaluation_batches(
    samples: Samples,
    normalisation: Normalisation | None,
    *,
    batch_size: int = 1000,
    device: torch.device | str = "cpu",
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield all samples once, in order, normalised and never augmented: (inputs, labels)."""
    for start in range(0, len(samples), batch_size):
        here = slice(start, start + batch_size)
        inputs, labels = samples.inputs[here].to(device), samples.labels[here].to(device)
        yield inputs if normalisation is None else normalisation(inputs), labels
