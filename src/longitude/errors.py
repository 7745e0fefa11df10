"""Errors for users, with the expected value, the actual value and a remedy; and checks of options that raise them."""

import math
import sys
from collections.abc import Iterable, Mapping, Sequence
from difflib import get_close_matches
from importlib.util import find_spec
from textwrap import shorten
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, NamedTuple, Union, get_args, get_origin, get_type_hints

OLDEST_TORCH = "2.11"  # pyproject.toml has these, too
MODELS = ("transformers", "accelerate", "safetensors", "psutil")
EXTRAS = {
    "models": MODELS,
    "study": (
        *MODELS, "tyro", "msgspec", "rich", "altair", "plotille", "vl_convert", "pandas", "pyarrow", "scipy", "jinja2",
    ),
}  # fmt: skip
"""Packages of each extra, by their import names."""


class UsageError(ValueError):
    """Error of an invalid call or option, with structured fields; str() is its message.

    Args:
        what: The class, function or option that raises it.
        expected: Description of valid values; None if `got` is an unknown name.
        got: The invalid value as text. Pass repr() of a name that a user wrote.
        remedy: Advice, if the other fields do not imply it.
    """

    def __init__(self, what: str, expected: str | None, got: object, remedy: str = "") -> None:
        super().__init__(what, expected, str(got), remedy)  # all of them, so that it can be pickled between processes
        self.what, self.expected, self.got, self.remedy = what, expected, str(got), remedy

    def __str__(self) -> str:
        if self.expected is None:
            return f"unknown {self.what} {self.got}: {self.remedy}"
        reason = f"expected {self.expected}, got {self.got}"
        return (f"{self.what}: " if self.what else "") + reason + (f"; {self.remedy}" if self.remedy else "")


class UnsupportedVersion(ImportError):
    """A package is of a version that we do not support; the message says what to install."""


class MissingPackage(ImportError):
    """An optional package is not installed; the message says what to install."""


def require_extra(who: str, extra: str) -> None:
    """Raise MissingPackage if packages of an extra are not installed: at first use of the extra, not at a later import."""
    missing = [name for name in EXTRAS[extra] if sys.modules.get(name) is None and find_spec(name) is None]
    if missing:
        raise MissingPackage(
            f"{who}: expected the packages of the extra {extra!r}, got an install without {', '.join(missing)}; "
            f"pip install 'longitude[{extra}]'"
        )


def require_torch() -> None:
    """Raise UnsupportedVersion if torch is older than we support."""
    import torch

    version = str(torch.__version__)
    if _release(version) < _release(OLDEST_TORCH):
        raise UnsupportedVersion(
            f"longitude needs torch {OLDEST_TORCH} or newer, and this is torch {version}: pip install --upgrade torch"
        )


def _release(version: str) -> tuple[int, ...]:
    """The first two numbers of a version."""
    return tuple(int(part) for part in version.split("+")[0].split(".")[:2])


def nearest(name: object, valid: Iterable[str]) -> str | None:
    """The valid name that is most like the given one, if any is."""
    by_lower = {name.lower().lstrip("-"): name for name in valid}  # dashes are alike in all options
    near = get_close_matches(str(name).lower().lstrip("-"), by_lower, n=1)
    return by_lower[near[0]] if near else None


def unknown(kind: str, name: object, valid: Iterable[str], where: str) -> UsageError:
    """The error for an unknown name: the nearest valid one, and where the whole list is."""
    valid = sorted(valid)
    near = nearest(name, valid)
    hint = f"did you mean {near!r}?" if near else f"there are: {', '.join(valid)}."
    return UsageError(kind, None, repr(name), f"{hint} {where}".rstrip())


class Within(NamedTuple):
    """Bounds of an option, declared beside its type: Annotated[int, Within(1)].

    Args:
        low: The least value.
        high: The largest value.
        above: A number that the value exceeds.
    """

    low: float = -math.inf
    high: float = math.inf
    above: float = -math.inf

    def holds(self, number: float) -> bool:
        return self.low <= number <= self.high and number > self.above and abs(number) < math.inf

    def __str__(self) -> str:
        if self.above > -math.inf:
            return f" above {self.above:g}"
        if self.high < math.inf:
            return f" from {self.low:.12g} to {self.high:.12g}"
        return "" if self.low == -math.inf else f" of {self.low:.12g} or more"


Positive = Annotated[float, Within(above=0)]
Rate = Annotated[float, Within(0)]
Count = Annotated[int, Within(0)]
Seed = Annotated[int, Within()]
Share = Annotated[float, Within(0, 1)]


def bound_of(annotation: Any) -> tuple[Any, Within | None, bool]:
    """(type, bounds, whether None is allowed) of an annotation; no bounds if it is no number.

    An int is a size of 1 or more, and a float is finite, unless an `Annotated` declares other bounds.
    """
    declared, optional = None, False
    while (origin := get_origin(annotation)) in (Annotated, Union, UnionType):
        if origin is Annotated:
            annotation, *metadata = get_args(annotation)
            for part in metadata:
                declared = part if isinstance(part, Within) else declared
        else:
            kinds = [kind for kind in get_args(annotation) if kind is not NoneType]
            if len(kinds) > 1:  # a number or another type: the class that takes both checks them
                return object, None, True
            annotation, optional = kinds[0], optional or len(kinds) < len(get_args(annotation))
    return annotation, declared or {int: Within(1), float: Within()}.get(annotation), optional


def excluded(annotation: Any, value: Any) -> str | None:
    """Description of the values that an annotation allows if `value` is not one of them; None if it is, or if any is.

    Numbers, bool and Literal exclude values. A bool is no number, and other types allow every value.
    """
    kind, bound, optional = bound_of(annotation)
    if value is None and optional:
        return None
    if bound is not None:
        numbers = int if kind is int else int | float
        fits = isinstance(value, numbers) and not isinstance(value, bool) and bound.holds(value)
        return None if fits else f"{'an int' if kind is int else 'a finite number'}{bound}"
    if kind is bool:
        return None if isinstance(value, bool) else "True or False"
    if get_origin(kind) is Literal:
        return None if isinstance(value, str) and value in get_args(kind) else either(get_args(kind))
    return None


def check_declared(who: str, annotations: Mapping[str, Any], values: Mapping[str, Any]) -> None:
    """UsageError for a value that the annotation of its name excludes."""
    for name, value in values.items():
        if name in annotations and (expected := excluded(annotations[name], value)) is not None:
            raise UsageError(who, f"{name} to be {expected}", repr(value))


def check_sizes(who: str, **numbers: int) -> None:
    """UsageError unless every number is an int above zero."""
    check_declared(who, dict.fromkeys(numbers, int), numbers)


def check_positive(who: str, **numbers: float) -> None:
    """UsageError unless every number is finite and above zero."""
    check_declared(who, dict.fromkeys(numbers, Positive), numbers)


def check_choice(who: str, kind: Any, **options: Any) -> None:
    """UsageError unless every option is a value of `kind`: a Literal type, or bool, for which any text would count as True."""
    check_declared(who, dict.fromkeys(options, kind), options)


def bounds_of(options: type) -> dict[str, Any]:
    """The annotations of a dataclass of options that declare bounds, by field."""
    hints = get_type_hints(options, include_extras=True)
    return {name: hint for name, hint in hints.items() if Within in map(type, get_args(hint))}


def check_bounds(options: Any) -> None:
    """UsageError for a field of command-line options that is outside of its declared bounds. None is a field left out."""
    for name, annotation in bounds_of(type(options)).items():
        if (value := getattr(options, name)) is not None and (expected := excluded(annotation, value)) is not None:
            raise UsageError(f"--{name.replace('_', '-')}", expected, value)


OWN_CODE = "if it is yours, `longitude check my.py:build` tests the model that your function build() returns"


def one_line_of(error: BaseException) -> str:
    """An error's message in one line, cut off if it is long, and without advice to run code that comes with a checkpoint."""
    if "trust_remote_code" in str(error):
        return f"it is code that comes with the checkpoint, and such code is never run; {OWN_CODE}"
    message = f"KeyError: {error}" if isinstance(error, KeyError) else str(error)  # which prints its key alone
    return shorten(message, 240, placeholder=" ...") or type(error).__name__


def either(values: Sequence[object]) -> str:
    """The values in words, as in "'half' or 'interleaved'"."""
    return " or ".join(filter(None, [", ".join(map(repr, values[:-1])), repr(values[-1])]))
