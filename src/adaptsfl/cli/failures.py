"""What can go wrong in any command, said in words and ended with an exit code."""

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
    """Print what went wrong, with the file that it is about, and end with 1."""
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
    """End with 130 when a person stops what writes to a folder, and say that the same command goes on."""
    try:
        yield
    except KeyboardInterrupt:
        if speaks():
            say(f"stopped. What was done is in {folder}; the same command goes on from there.")
        raise typer.Exit(130) from None


def speaks() -> bool:
    """Whether this process says what all of a machine would say: the first of those that torchrun started there."""
    return os.environ.get("LOCAL_RANK", "0") == "0"


def need_torch() -> None:
    """Refuse to go on without what training takes."""
    _need("simulate", "train", "torch")


def need_deploy() -> None:
    """Refuse to go on without what devices and servers take."""
    _need("deploy", "deploy", "torch", "grpc", "cryptography")


def need_cryptography() -> None:
    """Refuse to go on without what certificates take, which is neither torch nor gRPC."""
    _need("certs", "deploy", "cryptography")


def _need(whose: str, extra: str, *modules: str) -> None:
    for module in modules:
        if find_spec(module) is None:
            raise InvalidInput(whose, f"needs {module}", f"Install it: pip install 'adaptsfl[{extra}]'")
