"""Code that all HTML pages share: assets, Content-Security-Policy, tables."""

import base64
import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from html import escape
from importlib import resources
from pathlib import Path
from typing import Any

from adaptsfl.errors import InvalidInput

MOST_SHOWN = 6  # of the different values of one setting


def asset(name: str, room: str = "adaptsfl.report") -> str:
    """Return the text of a file in the assets/ folder of a package, `room`."""
    return resources.files(room).joinpath("assets", name).read_text(encoding="utf-8")


def filled(template: str, parts: Mapping[str, str]) -> str:
    """Return the template with every {{name}} replaced, in one pass: inserted text is not searched again."""
    return re.sub(r"\{\{(\w+)\}\}", lambda found: parts[found.group(1)], template)


def embedded(data: Any) -> str:
    """Return JSON in which no character can end the script element around it."""
    text = json.dumps(data, allow_nan=False, ensure_ascii=True, separators=(",", ":"))
    return text.replace("&", r"\u0026").replace("<", r"\u003c").replace(">", r"\u003e")


@contextmanager
def writing(what: str, path: Path) -> Iterator[None]:
    """Turn an OSError into an InvalidInput that says why a file cannot be written."""
    try:
        yield
    except OSError as error:
        problem = f"{path} cannot be written ({error.strerror})"
        raise InvalidInput(what, problem, "Give a file in a folder that can be written") from None


def write_text(text: str, out: Path, what: str = "report") -> None:
    """Write a page or a table, creating its folder."""
    with writing(what, out):
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(text, encoding="utf-8", newline="\n")


def security(css: str, script: str = "", *, images: bool = False, fetches: bool = False) -> str:
    """Return a Content-Security-Policy that allows this style and this script only.

    Args:
        images: also allow images that are embedded in the page.
        fetches: also allow the script to fetch from the page's own origin.
    """

    def digest(text: str) -> str:
        return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()

    allowed = [
        "default-src 'none'",
        *([f"script-src 'sha256-{digest(script)}'"] if script else []),
        f"style-src 'sha256-{digest(css)}'",
        *(["img-src data:"] if images else []),
        *(["connect-src 'self'"] if fetches else []),
    ]
    return "; ".join([*allowed, "base-uri 'none'", "form-action 'none'"])


def table(headings: Sequence[str], rows: Sequence[str]) -> str:
    """Return a table; its rows are markup already."""
    head = "".join(f'<th scope="col">{escape(heading)}</th>' for heading in headings)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(rows)}</tbody></table>"


def row(head: str, cells: Iterable[str]) -> str:
    """Return a row of a table; head and cells are markup already."""
    return f'<tr><th scope="row">{head}</th>{"".join(f"<td>{cell}</td>" for cell in cells)}</tr>'


def merged(tables: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """Return every key with its value, or with its different values if the tables differ."""
    found = {}
    for key in dict.fromkeys(key for table in tables for key in table):
        values = list(dict.fromkeys(str(table.get(key, "–")) for table in tables))
        found[key] = ", ".join(values[:MOST_SHOWN]) + (", …" if len(values) > MOST_SHOWN else "")
    return found


def settings(entries: Mapping[str, str]) -> str:
    """Return names and values as a list."""
    return f"<dl>{''.join(f'<dt>{escape(key)}</dt><dd>{escape(value)}</dd>' for key, value in entries.items())}</dl>"
