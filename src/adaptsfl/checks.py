"""Validate what callers pass and convert it to arrays and numbers, or raise an error that says what is wrong."""

import math
import numbers
from collections.abc import Sequence, Sized
from typing import Any

import numpy as np
from numpy.typing import NDArray

from adaptsfl.errors import InvalidInput

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]
BoolArray = NDArray[np.bool_]

# A number outside this range is a wrong unit or a failed computation, and products of a few such numbers overflow.
SMALLEST, LARGEST = 1e-50, 1e50
LARGEST_WHOLE = 10**15


def vector(field: str, values: Any, *, length: int | None = None, of: str = "", positive: bool = False) -> FloatArray:
    """Return `values` as a read-only float vector of finite numbers: all > 0 if `positive`, else all ≥ 0.

    `of` says what fixes the length ("one per device"), for the error message.
    """
    try:
        array = np.array(values, dtype=np.float64)
    except (TypeError, ValueError):
        raise InvalidInput(field, f"is not a list of numbers: {short(values)}", "Give numbers only") from None
    if array.ndim != 1 or array.size == 0:
        shape = "empty" if array.size == 0 else f"of shape {array.shape}"
        raise InvalidInput(field, f"is {shape}", f"Give a plain list with at least one number{_per(of)}")
    if length is not None and array.size != length:
        raise InvalidInput(field, f"has {array.size} entries, expected {length}", f"Give {length}{_per(of)}")
    size = np.abs(array)
    bad = ~(size <= LARGEST) | (array < 0) | ((size < SMALLEST) & (positive | (array != 0)))
    if bad.any():
        index = int(np.argmax(bad))
        number(f"{field}[{index}]", float(array[index]), positive=positive)  # raises the matching error
    array.setflags(write=False)
    return array


def number(
    field: str, value: Any, *, positive: bool = False, at_least: float = 0, at_most: float | None = None
) -> float:
    """Return `value` as a finite float that is > 0 if `positive`, else ≥ `at_least`, and ≤ `at_most` if given."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise InvalidInput(field, f"is not a number: {short(value)}", "Give a number")
    result = float(value)
    if not math.isfinite(result):
        raise InvalidInput(field, f"is {result}", "Give a finite number")
    if result < at_least or (positive and result == 0) or (at_most is not None and result > at_most):
        allowed = "above zero" if positive else f"≥ {at_least:g}"
        most = "" if at_most is None else f" and at most {at_most:g}"
        raise InvalidInput(field, f"is {result:g}", f"Give a number {allowed}{most}")
    if result != 0 and not SMALLEST <= result <= LARGEST:
        raise InvalidInput(field, f"is {result:g}", f"Give a number between {SMALLEST:g} and {LARGEST:g}, in SI units")
    return result


def one_of(field: str, value: str, *, names: Sequence[str]) -> None:
    """Refuse a name that is not known."""
    if value not in names:
        raise InvalidInput(field, f"is {value!r}", f"Choose from: {', '.join(names)}")


def not_empty(field: str, values: Sized) -> None:
    """Refuse a list or a table without entries."""
    if not len(values):
        raise InvalidInput(field, "is empty", "Give at least one entry, or remove it")


def whole_number(field: str, value: Any, *, at_least: int = 1, at_most: int = LARGEST_WHOLE) -> int:
    """Return `value` as an int between `at_least` and `at_most`."""
    allowed = f"a whole number from {at_least:,} to {at_most:,}"
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        raise InvalidInput(field, f"is not a whole number: {short(value)}", f"Give {allowed}")
    number = int(value)
    if not at_least <= number <= at_most:
        raise InvalidInput(field, f"is {short(number)}", f"Give {allowed}")
    return number


def bounds(field: str, value: float | Sequence[float], *, positive: bool = True) -> tuple[float, float]:
    """Return one number, or [low, high], as lower and upper bound: above 0 if `positive`, else 0 or more."""
    values = value if isinstance(value, Sequence) else (value, value)
    if len(values) != 2:
        raise InvalidInput(field, f"has {len(values)} entries", "Give one number, or [low, high]")
    low, high = (number(f"{field}[{k}]", bound, positive=positive) for k, bound in enumerate(values))
    if low > high:
        raise InvalidInput(field, f"is [{low:g}, {high:g}]", "Give the lower bound first")
    return low, high


def rising(field: str, values: FloatArray) -> FloatArray:
    """Return `values` if they never decrease: cumulative costs grow with the cut."""
    falls = np.flatnonzero(np.diff(values) < 0)
    if falls.size:
        at = int(falls[0]) + 1
        raise InvalidInput(
            f"{field}[{at}]",
            f"is {values[at]:g}, below {values[at - 1]:g} before it, but it counts layers 1..{at + 1} together",
            "Give cumulative values, which never fall with the cut",
        )
    return values


def cut_numbers(field: str, values: Sequence[int] | IntArray, layers: int) -> IntArray:
    """Return `values` as an array of cuts, each a whole number in 1..layers."""
    cuts = [whole_number(f"{field}[{k}]", value, at_most=layers) for k, value in enumerate(values)]
    if not cuts:
        raise InvalidInput(field, "is empty", "Give at least one cut")
    return np.array(cuts, dtype=np.int64)


def names(field: str, values: Sequence[str], length: int, of: str) -> tuple[str, ...]:
    """Return `values` as a tuple of printable names; it may be empty."""
    if values and len(values) != length:
        raise InvalidInput(field, f"has {len(values)} entries, expected {length}", f"Give {length}{_per(of)}")
    for index, name in enumerate(values):
        if not isinstance(name, str) or not name or not name.isprintable():
            raise InvalidInput(f"{field}[{index}]", f"is {short(name)}", "Give a name of printable characters")
    return tuple(values)


def _per(of: str) -> str:
    return f", {of}" if of else ""


def printable(text: str, most: int = 500) -> str:
    """Return untrusted text so that a terminal can show it: one line, no control characters, at most `most` long."""
    shown = "".join(letter if letter.isprintable() else "\N{REPLACEMENT CHARACTER}" for letter in text[: most + 1])
    return shown if len(shown) <= most else shown[: most - 1] + "…"


def short(value: Any) -> str:
    """Return the `repr` of a value, truncated to 60 characters."""
    try:
        text = repr(value)
    except ValueError:  # Python refuses to print integers of thousands of digits
        return "a number of thousands of digits"
    return text if len(text) <= 60 else text[:57] + "..."
