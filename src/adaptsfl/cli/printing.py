"""What commands print: results to standard output, remarks and errors to standard error."""

import json
import sys
import time
from typing import Any

from rich.console import Console

from adaptsfl.checks import printable


def plain_console() -> Console:
    """Return a console that prints text unchanged, also names with brackets or colons."""
    return Console(markup=False, emoji=False, highlight=False)


def print_json(data: dict[str, Any]) -> None:
    """Print one object on one line, and flush, so that a program can read it at once."""
    sys.stdout.write(json.dumps(data, allow_nan=False) + "\n")
    sys.stdout.flush()


def tell(text: str) -> None:
    """Print a log line with the time; control characters are replaced, since parts may come from other parties."""
    plain_console().print(f"{time.strftime('%H:%M:%S')} {printable(text, 2000)}", soft_wrap=True)


def say(message: str) -> None:
    """Print a remark to standard error, apart from results."""
    Console(stderr=True, emoji=False).print(message, markup=False, highlight=False, soft_wrap=True)


def complain(message: str) -> None:
    """Print an error."""
    console = Console(stderr=True, emoji=False)  # :x: in a name stays text
    console.print(f"error: {message}", style="red", markup=False, highlight=False, soft_wrap=True)
