"""Bounds of options: declared beside the option, and true of every option that declares some."""

import math
from dataclasses import MISSING, dataclass, fields, replace
from typing import Annotated

import pytest

from longitude.cli.extend import ExtendOptions
from longitude.errors import UsageError, Within, bounds_of, check_bounds
from longitude.extend.plan import Target
from longitude.measure.config import MeasureConfig, require_consistent

CHECKS = {
    MeasureConfig: require_consistent,
    ExtendOptions: lambda options: options.check(),
    Target: lambda target: None,  # when it is made
}
OPTIONS = {
    MeasureConfig: lambda **given: MeasureConfig(lengths=(64, 128), **given),
    ExtendOptions: lambda **given: ExtendOptions(to=64, method="yarn", **given),
    Target: lambda **given: Target(**{"to": 64, "method": "yarn"} | given),
}


def outside(bound: Within) -> list[float]:
    low = bound.low if bound.above == -math.inf else bound.above + 1
    return [low - 1, math.nan, -math.inf, math.inf, *([bound.high + 1] if bound.high < math.inf else [])]


@pytest.mark.parametrize(("options", "name"), [(options, name) for options in OPTIONS for name in bounds_of(options)])
def test_values_outside_are_refused_by_the_name_of_the_option(options, name) -> None:
    for value in outside(bounds_of(options)[name]):
        with pytest.raises(UsageError) as error:
            CHECKS[options](OPTIONS[options](**{name: value}))
        assert error.value.what == f"--{name.replace('_', '-')}" and error.value.got == str(value)


@pytest.mark.parametrize("options", OPTIONS)
def test_defaults_are_within(options) -> None:
    given = {field.name: field.default for field in fields(options) if field.default is not MISSING}
    check_bounds(OPTIONS[options](**{name: value for name, value in given.items() if name in bounds_of(options)}))


def test_bounds_as_they_are_declared() -> None:
    @dataclass(frozen=True)
    class Options:
        some: Annotated[int, Within(1, 3)] = 2
        above: Annotated[float | None, Within(above=1)] = None

    for good in ({"some": 1}, {"some": 3}, {"above": 1.001}, {"above": None}):
        check_bounds(replace(Options(), **good))
    for bad in ({"some": 0}, {"some": 4}, {"above": 1.0}, {"above": math.inf}):
        with pytest.raises(UsageError):
            check_bounds(replace(Options(), **bad))
