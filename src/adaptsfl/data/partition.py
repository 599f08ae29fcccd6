"""Assign training samples to devices. A partition uses each sample at most once and depends on its seed alone."""

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import numpy as np

from adaptsfl import checks
from adaptsfl.checks import FloatArray, IntArray
from adaptsfl.config import PartitionConfig
from adaptsfl.errors import InvalidInput

Parts = tuple[IntArray, ...]  # the numbers of each device's samples, ascending

FIELD = "data.partition"
KEYS = {  # the keys that each kind reads, besides the seed
    "iid": (),
    "shards": ("shards_per_device", "shard_size"),
    "dirichlet": ("alpha", "min_samples"),
    "files": ("files",),
}


def make_partition(config: PartitionConfig, labels: IntArray, devices: int, *, batch_size: int = 1) -> Parts:
    """Partition samples with these labels among the devices as `[data.partition]` says.

    `batch_size` is the default of `min_samples` for a Dirichlet partition.
    """
    check_keys(config)
    checks.whole_number("devices", devices)
    rng = np.random.default_rng(config.seed)
    match config.kind:
        case "iid":
            return iid(len(labels), devices, rng)
        case "shards":
            per_device = 2 if config.shards_per_device is None else config.shards_per_device
            return shards(labels, devices, rng, shards_per_device=per_device, shard_size=config.shard_size)
        case "dirichlet":
            least = batch_size if config.min_samples is None else config.min_samples
            alpha = 0.5 if config.alpha is None else config.alpha
            return dirichlet(labels, devices, rng, alpha=alpha, min_samples=least)
        case "files":
            return index_files([Path(file) for file in config.files or ()], len(labels))


def check_keys(config: PartitionConfig) -> None:
    """Raise if a key is given that only another kind of partition reads: it would be ignored silently."""
    for kind, keys in KEYS.items():
        for key in keys:
            if kind != config.kind and getattr(config, key) is not None:
                problem = f"is given, but kind is {config.kind!r}"
                raise InvalidInput(f"{FIELD}.{key}", problem, f"Remove it, or set kind = {kind!r}")


def iid(samples: int, devices: int, rng: np.random.Generator) -> Parts:
    """Deal shuffled samples out evenly: sizes differ by one at most."""
    return tuple(np.sort(part) for part in np.array_split(rng.permutation(samples), devices))


def shards(
    labels: IntArray,
    devices: int,
    rng: np.random.Generator,
    *,
    shards_per_device: int = 2,
    shard_size: int | None = None,
) -> Parts:
    """Sort by label, cut into shards of one size, deal `shards_per_device` of them to every device at random.

    The paper: 40 shards, 2 for each of 20 devices. Without `shard_size` the shards take all samples, so their number
    must divide the number of samples; with it, samples and shards may be left over.
    """
    _one_label_each("shards", labels)
    checks.whole_number(f"{FIELD}.shards_per_device", shards_per_device)
    needed = devices * shards_per_device
    if shard_size is None:
        if len(labels) % needed or len(labels) < needed:
            raise _undivided(len(labels), devices, shards_per_device)
        shard_size = len(labels) // needed
    checks.whole_number(f"{FIELD}.shard_size", shard_size)
    available = len(labels) // shard_size
    if available < needed:
        problem = f"is {shard_size}: {len(labels)} samples give {available} shards, {devices} devices need {needed}"
        raise InvalidInput(f"{FIELD}.shard_size", problem, f"Give at most {len(labels) // needed}, or fewer devices")
    by_label = np.argsort(labels, kind="stable")[: available * shard_size].reshape(available, shard_size)
    dealt = rng.permutation(available)[:needed].reshape(devices, shards_per_device)
    return tuple(np.sort(by_label[mine].ravel()) for mine in dealt)


def dirichlet(labels: IntArray, devices: int, rng: np.random.Generator, *, alpha: float, min_samples: int = 1) -> Parts:
    """Distribute every class in proportions drawn from Dirichlet(α, …, α): a smaller α gives a device fewer classes.

    A device with fewer than `min_samples` gets samples from the device that has the most. (The usual way, drawing again
    until every device has enough, practically never ends with many devices and a small α.)
    """
    _one_label_each("dirichlet", labels)
    checks.number(f"{FIELD}.alpha", alpha, positive=True)
    checks.whole_number(f"{FIELD}.min_samples", min_samples, at_least=0)
    if devices * min_samples > len(labels):
        problem = f"is {min_samples}, for {devices} devices and {len(labels)} samples"
        raise InvalidInput(f"{FIELD}.min_samples", problem, f"Give at most {len(labels) // devices}, or fewer devices")
    shuffled = rng.permutation(len(labels))
    held: list[list[IntArray]] = [[] for _ in range(devices)]
    for label in np.unique(labels):
        members = shuffled[labels[shuffled] == label]
        shares = rng.dirichlet(np.full(devices, alpha))
        bounds = np.rint(np.cumsum(shares)[:-1] * len(members)).astype(np.int64)
        for device, part in enumerate(np.split(members, bounds)):
            held[device].append(part)
    parts = [list(rng.permutation(np.concatenate(mine))) for mine in held]
    while len(poorest := min(parts, key=len)) < min_samples:
        poorest.append(max(parts, key=len).pop())
    return tuple(np.sort(np.array(part, dtype=np.int64)) for part in parts)


def index_files(files: Sequence[Path], samples: int) -> Parts:
    """Read one file per device: the numbers of its samples, as text (one per line) or as a .npy array."""
    parts = tuple(np.sort(_read_indices(k, file, samples)) for k, file in enumerate(files))
    owner = np.full(samples, -1)
    for device, part in enumerate(parts):
        numbers, counts = np.unique(part, return_counts=True)
        taken = numbers[(owner[numbers] >= 0) | (counts > 1)]
        if taken.size:
            first = int(taken[0])
            other = f"{files[owner[first]]} has it too" if owner[first] >= 0 else "more than once"
            raise InvalidInput(
                f"{FIELD}.files[{device}]",
                f"{files[device]} has sample {first}, {other}",
                "Use every sample at most once",
            )
        owner[part] = device
    return parts


def check_parts(parts: Parts, batch_size: int) -> None:
    """Raise unless every device can fill a mini-batch."""
    for device, part in enumerate(parts):
        if len(part) < batch_size:
            have, lower = (f"only {len(part)}", f" to {len(part)}") if len(part) else ("no samples", "")
            raise InvalidInput(
                FIELD,
                f"leaves device {device} with {have}, but a mini-batch takes {batch_size}",
                f"Use fewer devices{', lower training.batch_size' + lower if lower else ''}, or give the device more",
            )


def averaging_weights(parts: Parts, kind: Literal["equal", "size"]) -> FloatArray:
    """Return the weight of each device in an average: equal, or proportional to its samples. The weights sum to 1."""
    sizes = np.array([1 if kind == "equal" else len(part) for part in parts], dtype=np.float64)
    return sizes / sizes.sum()


def _read_indices(device: int, file: Path, samples: int) -> IntArray:
    field = f"{FIELD}.files[{device}]"
    try:
        if file.suffix == ".npy":
            numbers = np.load(file, allow_pickle=False)
        else:
            numbers = np.array([int(line) for line in file.read_text(encoding="utf-8").split()], dtype=np.int64)
    except OSError as error:
        raise InvalidInput(field, f"{file} cannot be read: {error.strerror or error}", "Check the path") from None
    except ValueError as error:
        raise InvalidInput(
            field, f"{file} is not a list of numbers: {error}", "Give one whole number per line"
        ) from None
    if numbers.ndim != 1 or numbers.dtype.kind not in "iu":
        problem = f"{file} holds {numbers.dtype} of shape {numbers.shape}"
        raise InvalidInput(field, problem, "Give a plain list of whole numbers")
    outside = numbers[(numbers < 0) | (numbers >= samples)]
    if outside.size:
        problem = f"{file} names sample {outside[0]}"
        raise InvalidInput(field, problem, f"The training samples are numbered 0 … {samples - 1}")
    return numbers.astype(np.int64)


def _one_label_each(kind: str, labels: IntArray) -> None:
    if labels.ndim != 1:
        problem = f"is {kind!r}, but a sample of this data has {labels.shape[1:]} labels"
        raise InvalidInput(f"{FIELD}.kind", problem, "Use 'iid' or 'files'")


def _undivided(samples: int, devices: int, per_device: int) -> InvalidInput:
    needed = devices * per_device
    works = [n for n in range(1, samples // per_device + 1) if samples % (n * per_device) == 0]
    near = sorted(sorted(works, key=lambda n: abs(n - devices))[:2])
    ways = [f"set shard_size = {samples // needed} and leave the rest"] if samples >= needed else []
    ways += [f"use {' or '.join(map(str, near))} devices"] if near else ["lower shards_per_device"]
    remedy = ", or ".join(ways)
    return InvalidInput(
        f"{FIELD}.shards_per_device",
        f"is {per_device}: {samples} samples do not divide into {devices} × {per_device} = {needed} equal shards",
        remedy[0].upper() + remedy[1:],
    )
