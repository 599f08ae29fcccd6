"""Types of numbers with their ranges, for the keys of sections."""

from collections.abc import Callable
from typing import Annotated, Any, TypeVar

from pydantic import AfterValidator
from pydantic_core import PydanticCustomError

from adaptsfl import checks
from adaptsfl.errors import InvalidInput

OUT_OF_RANGE = "out_of_range"  # the type of the pydantic errors that this module raises

Value = TypeVar("Value")


def checked(check: Callable[..., object], **limits: Any) -> AfterValidator:
    """Return a function of `checks` as a validator: it keeps the message, and pydantic adds the field."""

    def validate(value: Value) -> Value:
        try:
            check("", value, **limits)
        except InvalidInput as error:
            raise refused(error.field, error.problem, error.remedy) from None
        return value

    return AfterValidator(validate)


def refused(field: str, problem: str, remedy: str) -> PydanticCustomError:
    """Return the pydantic error that becomes `InvalidInput` for a field, seen from the place where it is raised."""
    about = {"index": field, "problem": problem, "remedy": remedy}
    return PydanticCustomError(OUT_OF_RANGE, "{problem}. {remedy}", about)


Count = Annotated[int, checked(checks.whole_number)]  # 1, 2, …
Natural = Annotated[int, checked(checks.whole_number, at_least=0)]
Positive = Annotated[float, checked(checks.number, positive=True)]
NonNegative = Annotated[float, checked(checks.number)]
Share = Annotated[float, checked(checks.number, at_most=1)]
PositiveShare = Annotated[float, checked(checks.number, positive=True, at_most=1)]
Range = Annotated[float | list[float], checked(checks.bounds)]  # one value for all devices, or [low, high] to draw from
ZeroRange = Annotated[float | list[float], checked(checks.bounds, positive=False)]  # the same, from 0 on
