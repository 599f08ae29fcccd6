"""Error handling that all commands share: prints an error message and sets the exit code."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

import typer

from adaptsfl.cli.printing import complain, say
from adaptsfl.errors import InvalidInput, RankFailed, Stopped, message_of


@contextmanager
def explaining(file: Path | None = None) -> Iterator[None]:
    """Print an error, with the file that it concerns, and exit with 1; exit with 130 if a run was stopped."""
    try:
        yield
    except (typer.Exit, KeyboardInterrupt):
        raise
    except Stopped as error:
        say(str(error))
        raise typer.Exit(130) from None
    except Exception as error:
        message = message_of(error)
        named = file is None or str(file) in message or not isinstance(error, InvalidInput) or error.source
        if speaks() or isinstance(error, RankFailed):
            complain(message if named else f"{file}: {message}")
        raise typer.Exit(1) from None


@contextmanager
def stopped_by_ctrl_c(folder: Path) -> Iterator[None]:
    """On Ctrl-C, say that the same command resumes from what is in the folder, and exit with 130."""
    try:
        yield
    except KeyboardInterrupt:
        if speaks():
            say(f"stopped. What was done is in {folder}; the same command goes on from there.")
        raise typer.Exit(130) from None


def speaks() -> bool:
    """Whether this process prints for all ranks of its machine: only local rank 0 does."""
    return os.environ.get("LOCAL_RANK", "0") == "0"


def need_torch() -> None:
    """Raise an error if a package that training needs is not installed."""
    _need("simulate", "train", "torch")


def need_deploy() -> None:
    """Raise an error if a package that devices and servers need is not installed."""
    _need("deploy", "deploy", "torch", "grpc", "cryptography")


def need_cryptography() -> None:
    """Raise an error if cryptography is not installed; certificates need neither torch nor gRPC."""
    _need("certs", "deploy", "cryptography")


def _need(whose: str, extra: str, *modules: str) -> None:
    for module in modules:
        if find_spec(module) is None:
            raise InvalidInput(whose, f"needs {module}", f"Install it: pip install 'adaptsfl[{extra}]'")
