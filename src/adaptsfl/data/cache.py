"""Cache decoded samples between runs: one safetensors file per source, replaced when the source changes."""

import hashlib
import json
import math
import os
import warnings
import zlib
from collections.abc import Callable, Sequence
from io import BufferedReader
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from adaptsfl.data.samples import Choice, Samples
from adaptsfl.files import replace_file, write_tensors

FORMAT = "adaptsfl-samples-1"  # increase when decoding changes, so that older caches are ignored
BLOCK_BYTES = 2**20  # block size for the checksum of a file that is not loaded whole

Decoded = tuple[Samples, tuple[str, ...]]  # with the names of the classes


def cache_folder(given: str | None) -> Path:
    """Return the recipe's folder, else that of ADAPTSFL_CACHE, else `adaptsfl` in the user's cache folder."""
    if chosen := given or os.environ.get("ADAPTSFL_CACHE"):
        return Path(chosen)
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "adaptsfl"


def cached(
    folder: Path, origin: Path, sources: Sequence[Path], decode: Callable[[], Decoded], *, reading: str
) -> Decoded:
    """Return the result of `decode`, from the cache if the files `sources` have not changed since it was written.

    `origin` is the file or folder of the sources; there is one cache file for each origin. `reading` is everything else
    that the result depends on, such as the column of the labels or the classes.
    """
    identity, kept = _identity(sources, reading), _cache_file(folder, origin)
    found = _read(kept, identity)
    if found is not None:
        return found
    samples, classes = decode()
    try:
        _write(kept, identity, samples, classes)
    except OSError as error:
        reason = error.strerror or str(error)
        advice = "set data.cache or ADAPTSFL_CACHE to a folder that can be written"
        warnings.warn(f"{kept.parent}: cannot keep decoded images ({reason}); {advice}", stacklevel=2)
    return samples, classes


def cached_part(folder: Path, origin: Path, sources: Sequence[Path], choose: Choice, *, reading: str) -> Decoded | None:
    """Return chosen samples from the cache file of `cached`, or None if it is missing, out of date or damaged.

    Only these samples take memory: the whole file is read once for the checksum, one block at a time.
    """
    identity, kept = _identity(sources, reading), _cache_file(folder, origin)
    try:
        with safe_open(kept, framework="pt"):  # checks the lengths of the file's parts
            pass
        with kept.open("rb") as file:
            return _read_part(file, identity, choose)
    except (OSError, SafetensorError):
        return None


def _cache_file(folder: Path, origin: Path) -> Path:
    return folder / f"{origin.parent.name[:40]}-{origin.stem[:40]}-{_hash(str(origin.resolve()))}.safetensors"


def _identity(sources: Sequence[Path], reading: str) -> str:
    """Return a hash of every file's size and modification time: hashing contents would cost what the cache saves."""
    files = [(str(path.resolve()), (stat := path.stat()).st_size, stat.st_mtime_ns) for path in sources]
    return _hash([reading, files])


def _read(kept: Path, identity: str) -> Decoded | None:
    """Return the cached samples, or None if the cache is missing, out of date or damaged, and must be rewritten."""
    try:
        with safe_open(kept, framework="pt") as file:
            about = file.metadata() or {}
            if (about.get("format"), about.get("identity")) != (FORMAT, identity):
                return None
            inputs, labels = file.get_tensor("inputs"), file.get_tensor("labels")
        if about.get("checksum") != _checksum(inputs, labels):
            return None
        return Samples(inputs, labels), tuple(json.loads(about["classes"]))
    except (OSError, SafetensorError):
        return None


def _read_part(file: BufferedReader, identity: str, choose: Choice) -> Decoded | None:
    # Not by safetensors: it maps the whole file, and all pages that were read stay in memory until the map is closed.
    header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
    about = header.get("__metadata__", {})
    if (about.get("format"), about.get("identity")) != (FORMAT, identity):
        return None
    data = file.tell()
    first_label, first_input = (data + header[name]["data_offsets"][0] for name in ("labels", "inputs"))
    count, *shape = header["inputs"]["shape"]
    size = math.prod(shape)
    file.seek(first_label)
    labels = torch.from_numpy(np.fromfile(file, np.int64, math.prod(header["labels"]["shape"])))
    file.seek(first_input)
    if about.get("checksum") != f"{_crc(labels, _crc_ahead(file, count * size)):08x}":
        return None
    labels = labels.reshape(header["labels"]["shape"])
    rows = choose(labels)
    inputs = np.empty((len(rows), *shape), np.uint8)
    for row, into in zip(rows.tolist(), inputs, strict=True):
        file.seek(first_input + row * size)
        file.readinto(into.data)
    return Samples(torch.from_numpy(inputs), labels[torch.from_numpy(rows)]), tuple(json.loads(about["classes"]))


def _crc_ahead(file: BufferedReader, size: int) -> int:
    """Return the checksum of the next bytes of a file."""
    value = 0
    for done in range(0, size, BLOCK_BYTES):
        value = zlib.crc32(file.read(min(BLOCK_BYTES, size - done)), value)
    return value


def _write(kept: Path, identity: str, samples: Samples, classes: tuple[str, ...]) -> None:
    tensors = {"inputs": samples.inputs, "labels": samples.labels}
    about = {"format": FORMAT, "identity": identity, "classes": json.dumps(classes), "checksum": _checksum(**tensors)}
    replace_file(kept, lambda path: write_tensors(path, tensors, about))


def _checksum(inputs: Tensor, labels: Tensor) -> str:
    return f"{_crc(labels, _crc(inputs)):08x}"


def _crc(tensor: Tensor, value: int = 0) -> int:
    return zlib.crc32(tensor.flatten().view(torch.uint8).numpy().data, value)


def _hash(parts: object) -> str:
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:20]
