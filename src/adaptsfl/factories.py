"""Import and call the user's own functions, named in a recipe or on a command line as `package.module:factory`."""

import importlib
import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, redirect_stdout, suppress
from pathlib import Path
from typing import Any

from adaptsfl import own_code
from adaptsfl.errors import InvalidInput, first_line, unknown


def find(field: str, target: str, returns: str) -> Callable[..., Any]:
    """Import the function that `target` names; `returns` describes its result, for the error message."""
    package, _, name = target.partition(":")
    try:
        with _prints_to_stderr():
            found: Any = importlib.import_module(package)
    except (Exception, SystemExit) as error:
        problem = f"{target}: importing {package!r} raised {type(error).__name__}: {first_line(error)}"
        raise InvalidInput(field, problem, "Give package.module:factory of a module that Python can import") from error
    if not callable(getattr(found, name, None)):
        callables = [key for key, value in vars(found).items() if callable(value) and not key.startswith("_")]
        raise unknown(f"{field} {package}", name, callables, f"Give a function of it that returns {returns}")
    own_code.fingerprint(package)  # reads the source now, before it is edited
    factory: Callable[..., Any] = getattr(found, name)
    return factory


def code_of(field: str, target: str) -> str | None:
    """Return a fingerprint of the code behind `target`, and of the user's own code that it uses.

    Return None if the source cannot be read, and "" if `target` is not package.module:factory but a name of ours.
    """
    if ":" not in target:
        return ""
    with importing_from_here():
        find(field, target, "what a recipe names")
        return own_code.fingerprint(target.partition(":")[0])


def call(field: str, name: str, factory: Callable[..., Any], options: dict[str, Any]) -> Any:
    """Call `factory` with `options`; any exception that it raises becomes an `InvalidInput` about `field`."""
    with suppress(ValueError):  # built-in functions may have no signature
        signature = inspect.signature(factory)
        try:
            signature.bind(**options)
        except TypeError as error:
            known = ", ".join(signature.parameters) or "no options"
            raise InvalidInput(field, f"{name} does not take these options: {error}", f"It takes {known}") from None
    try:
        with _prints_to_stderr():
            return factory(**options)
    except InvalidInput:
        raise
    except (Exception, SystemExit) as error:
        problem = f"{name} raised {type(error).__name__}: {first_line(error)}"
        raise InvalidInput(field, problem, "Make the factory work on its own first") from error


def _prints_to_stderr() -> AbstractContextManager[Any]:
    """Redirect what the user's code prints to stderr: our own stdout may be JSON."""
    return redirect_stdout(sys.stderr)


@contextmanager
def importing_from_here() -> Iterator[None]:
    """Let Python import from the working directory, as `python -m` does and an installed command does not."""
    here = str(Path.cwd())
    sys.path.insert(0, here)
    try:
        yield
    finally:
        sys.path.remove(here)
