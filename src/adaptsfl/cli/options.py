"""Options that several commands take, and what their values mean."""

import re
import tomllib
from pathlib import Path
from typing import Annotated, Any

import typer

from adaptsfl.errors import InvalidInput

Overrides = Annotated[
    list[str] | None,
    typer.Option("--set", help="Say it otherwise than the file does.", metavar="SECTION.KEY=VALUE", show_default=False),
]
Certs = Annotated[
    Path | None,
    typer.Option(help="Folder with ca.pem and this party's certificate and key.", metavar="FOLDER", show_default=False),
]
Insecure = Annotated[bool, typer.Option("--insecure", help="Without TLS, on this machine only.")]


def key_value(text: str) -> tuple[str, bool | int | float | str]:
    """Split `key=value`; a boolean or number is parsed as in TOML, any other value stays text."""
    key, equals, value = text.partition("=")
    if not equals or not key:
        raise InvalidInput("option", f"is {text!r}", "Give KEY=VALUE, for example --option classes=100")
    try:
        parsed = tomllib.loads(f"value = {value}")["value"]
    except tomllib.TOMLDecodeError:
        parsed = value
    return key, parsed if isinstance(parsed, bool | int | float) else value


def folder_name(name: str) -> str:
    """Return the default name of a run's folder, without --out, from the name of its recipe."""
    return re.sub(r"[^\w.+-]+", "-", name).strip(".-") or "experiment"


def chosen_credentials(folder: Path | None, name: str, *, insecure: bool) -> Any:
    """Return a party's certificate and key, or None with --insecure."""
    from adaptsfl.deploy.security.identity import load_credentials  # noqa: PLC0415

    if insecure:
        if folder is not None:
            raise InvalidInput("--insecure", "is given beside --certs", "Give one of them")
        return None
    if folder is None:
        remedy = "Make certificates: adaptsfl certs FOLDER. To try things out on one machine: --insecure"
        raise InvalidInput("--certs", "is missing", remedy)
    return load_credentials(folder, name)
