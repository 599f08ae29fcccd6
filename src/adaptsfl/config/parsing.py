"""Parse the content of files into sections, or raise an error that names the key, its value and the remedy."""

import difflib
import re
from collections.abc import Collection, Mapping
from typing import Any, TypeVar, get_args

import pydantic

from adaptsfl.checks import short
from adaptsfl.config.ranges import OUT_OF_RANGE
from adaptsfl.config.sections import Section
from adaptsfl.errors import InvalidInput

AnySection = TypeVar("AnySection", bound=Section)


def parse(section: type[AnySection], content: Any, *, source: str = "") -> AnySection:
    """Return `content` as a `section`, or raise `InvalidInput` for the first value that does not fit."""
    try:
        return section.model_validate(content)
    except pydantic.ValidationError as error:
        raise explained(error, _keys(section), source=source) from None


def explained(error: pydantic.ValidationError, keys: Collection[str] = (), *, source: str = "") -> InvalidInput:
    """Return the first of pydantic's errors as an `InvalidInput`; `keys` are all known keys."""
    first = error.errors(include_url=False)[0]
    union = first["type"] not in ("extra_forbidden", "missing")
    field, problem, remedy = _dotted(first["loc"], union=union), *_explain(first, keys)
    if first["type"] == OUT_OF_RANGE:
        field += first["ctx"]["index"]
    return InvalidInput(field, problem, remedy, source=source)


def _explain(error: Mapping[str, Any], keys: Collection[str]) -> tuple[str, str]:
    """Return the problem and the remedy, in words that fit TOML and JSON files."""
    given = short(error["input"])
    name = str(error["loc"][-1]) if error["loc"] else ""
    match error["type"]:
        case "missing":
            return "is missing", "Add it"
        case "extra_forbidden":
            near = difflib.get_close_matches(name, keys, n=1)
            return f"is not a known key (its value is {given})", f"Did you mean {near[0]!r}?" if near else "Remove it"
        case "out_of_range":
            return error["ctx"]["problem"], error["ctx"]["remedy"]
        case _:
            return f"is {given}", _in_plain_words(error["msg"])


def _in_plain_words(message: str) -> str:
    """Rewrite pydantic's message without Python terms."""
    message = re.sub(r"a valid dictionary or instance of \w+", "a table of keys", message)
    message = message.replace("Input should be", "Give").replace("a valid integer", "a whole number")
    return message.replace("a valid string", "text in quotes").replace("valid ", "")


def _keys(section: type[Section]) -> set[str]:
    """Return every key of `section` and of the sections inside it."""
    keys: set[str] = set()
    for key, field in section.model_fields.items():
        keys.add(key)
        for inner in (field.annotation, *get_args(field.annotation)):  # a section, or a section or None
            if isinstance(inner, type) and issubclass(inner, Section):
                keys |= _keys(inner)
    return keys


def _dotted(location: tuple[str | int, ...], *, union: bool) -> str:
    """Turn ('devices', 'flops', 3) into devices.flops[3]; leave out the branch names of a `union`."""
    text = ""
    for part in location:
        if isinstance(part, int):
            text += f"[{part}]"
        elif not (union and (part in ("bool", "float", "int", "str") or "[" in part)):
            name = part if part and part.isprintable() else repr(part)
            text += f".{name}" if text else name
    return text
