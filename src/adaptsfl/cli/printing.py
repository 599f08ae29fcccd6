"""What commands print: results to standard output, remarks and errors to standard error."""

import json
import sys
import time
from typing import Any

from rich.console import Console

from adaptsfl.checks import printable


def plain_console() -> Console:
    """Return a console that prints names as they are, whatever brackets they hold."""
    return Console(markup=False, emoji=False, highlight=False)


def print_json(data: dict[str, Any]) -> None:
    """Print one object on one line, and at once, for programs that read along."""
    sys.stdout.write(json.dumps(data, allow_nan=False) + "\n")
    sys.stdout.flush()


def tell(text: str) -> None:
    """Print a line of what goes on, with the time; what others say in it cannot move the cursor."""
    plain_console().print(f"{time.strftime('%H:%M:%S')} {printable(text, 2000)}", soft_wrap=True)


def say(message: str) -> None:
    """Print a remark where it does not mix with results."""
    Console(stderr=True, emoji=False).print(message, markup=False, highlight=False, soft_wrap=True)


def complain(message: str) -> None:
    """Print an error."""
    console = Console(stderr=True, emoji=False)  # :x: in a name is no picture
    console.print(f"error: {message}", style="red", markup=False, highlight=False, soft_wrap=True)
