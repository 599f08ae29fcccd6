"""Write files atomically, and lock folders so that one process at a time writes to them."""

import os
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

try:
    import fcntl
except ImportError:  # Windows has no fcntl
    fcntl = None  # type: ignore[assignment]

from adaptsfl.errors import InvalidInput, NotWritten, first_line

if TYPE_CHECKING:  # files without tensors must not need torch
    from torch import Tensor

TEMPORARY = ".unfinished-"  # prefix of a file's name while it is being written
LOCK = ".lock"


def replace_file(path: Path, write: Callable[[Path], object]) -> None:
    """Let `write` fill a file beside `path`, then rename it: readers see the old file or the new one, never a part.

    The content is synced to disk before the rename, and the rename before this returns, so the order of writes also
    survives a power failure.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(prefix=f"{TEMPORARY}{path.stem[:100]}-", dir=path.parent)
    os.close(handle)
    temporary = Path(name)
    try:
        write(temporary)
        _synchronise(temporary)
        os.replace(temporary, path)
        if os.name == "posix":  # elsewhere a folder cannot be opened
            _synchronise(path.parent)
    finally:
        temporary.unlink(missing_ok=True)


@contextmanager
def writing(path: Path, remedy: str) -> Iterator[None]:
    """Turn an OSError, such as a full disk or a missing permission, into `NotWritten`."""
    try:
        yield
    except OSError as error:
        raise NotWritten(f"{path}: cannot be written ({error.strerror or first_line(error)}). {remedy}.") from error


@contextmanager
def held(folder: Path) -> Iterator[None]:
    """Lock a folder for this process; raise `InvalidInput` if another process has locked it.

    Two processes that write to one folder would leave files from which no run can resume. The lock is released as soon
    as the process ends, however it ends; the lock file stays.
    """
    with writing(folder, "Free some space or give another folder by --out"):
        folder.mkdir(parents=True, exist_ok=True)
        file = (folder / LOCK).open("w")
    with file:
        if fcntl is not None:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                remedy = "Wait until it ends or stop it, or give another folder by --out"
                raise InvalidInput("", "is in use by another process", remedy, source=str(folder)) from None
            except OSError:  # a file system without locks: the user must avoid two processes
                pass
        yield


@contextmanager
def waits_for(folder: Path) -> Iterator[None]:
    """Lock a folder for this process; wait until no other process holds this lock.

    Worker processes of a call that was killed continue until they notice, and then save their results: the next call
    waits for them.
    """
    folder.mkdir(parents=True, exist_ok=True)
    handle = os.open(folder, os.O_RDONLY)
    try:
        if fcntl is not None:
            with suppress(OSError):  # a file system without locks: the user must avoid two processes
                fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def write_tensors(path: Path, tensors: "Mapping[str, Tensor]", about: Mapping[str, str] | None = None) -> None:
    """Write one safetensors file at exactly this path; raise OSError if the disk is full, as other writers do."""
    from safetensors import SafetensorError  # noqa: PLC0415 (installed for training only)
    from safetensors.torch import save_file  # noqa: PLC0415 (imports torch)

    try:
        save_file(dict(tensors), path, dict(about) if about else None)
    except SafetensorError as error:  # how safetensors reports a full disk
        raise OSError(str(error)) from error


def about_tensors(path: Path) -> dict[str, str]:
    """Return the `about` that `write_tensors` wrote to a file; empty if the file cannot be read."""
    from safetensors import SafetensorError, safe_open  # noqa: PLC0415

    try:
        with safe_open(path, framework="pt") as file:
            return dict(file.metadata() or {})
    except (OSError, SafetensorError):
        return {}


def _synchronise(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY if path.is_dir() else os.O_RDWR)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
