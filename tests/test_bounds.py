"""Bounds of options: declared in the annotation, and true of every option of everything that is registered."""

import math
from collections.abc import Iterator
from dataclasses import MISSING, fields
from inspect import Parameter, signature
from typing import Annotated, Any, Literal, get_origin

import pytest

from longitude.attention.mixer import MIXERS
from longitude.cli.extend import ExtendOptions
from longitude.errors import Count, Positive, Share, Within, bound_of, bounds_of, excluded
from longitude.extend.plan import Target
from longitude.measure.config import MeasureConfig, require_consistent
from longitude.positions.base import ENCODINGS
from longitude.positions.bias import Kerple
from longitude.positions.samplers import SAMPLERS
from longitude.positions.scaling import SCHEMES
from longitude.registry import Checked, annotations_of
from tests.support import refused

REGISTERED = {
    f"{kind.__module__.rpartition('.')[2]}.{kind.__name__}": kind
    for register in (ENCODINGS, SCHEMES, MIXERS, SAMPLERS)
    for kind in (*register.values(), Kerple)  # which registered functions make
    if isinstance(kind, type) and issubclass(kind, Checked)
}
WRONG_NUMBERS = (0, -1, 1.5, "8", True)
Size = Literal["small", "large"]
TINY = 1e-9
BOUNDS = {
    "FoPE.max_length": ([6], [7]),
    "LogN.trained_length": ([1], [2]),
    "rope_dim": ([-1], [0]),
    "seed": ([1.5], [-1, 0]),
    # the last one is Devstral 2's
    **dict.fromkeys(("deviation", "mscale", "mscale_all_dim", "Ministral3Temperature.beta"), ([-TINY], [0])),
    "proportion": ([-TINY, 1 + TINY], [0, 1]),
    "factor": ([1 - TINY], [1]),
    "Sinusoidal.factor": ([0], [TINY]),
    **dict.fromkeys(("RePoAttention.base", "index_base"), ([math.inf], [10_000])),  # the rest: with their frequencies
    "lower_bound": ([math.inf], [-5]),
    **dict.fromkeys(("LearnedSink.initial", "scale"), ([math.inf], [-1, 0])),
    "dropout": ([math.inf], [0]),  # `require_options` has the bounds of this one, of `scale` and `softcap`
    "softcap": ([math.inf], [30]),
}
"""(values that are refused, others that are allowed) of options that are neither sizes of 1 or more nor numbers above 0."""
BY_CONSTRUCTORS = {"backend", "mode", "route", "combine", "merge", "decay_activation", "init"}
"""Options whose words no Literal lists."""
USUAL = {int: ([0], [1]), float: ([0], [TINY])}


def wrong_values(annotation: Any) -> Iterator[Any]:
    """Values that an annotation excludes: outside of its bounds, or of another type."""
    _, bound, _ = bound_of(annotation)
    numbers = () if bound is None else (bound.low - 1, bound.above, bound.high + 1)
    for value in (*(n for n in numbers if math.isfinite(n)), *WRONG_NUMBERS, math.nan, math.inf, "none of them"):
        if excluded(annotation, value) is not None:
            yield value


@pytest.mark.parametrize(
    ("annotation", "allowed", "wrong"),
    [
        (int, (1, 7), (0, -1, 1.0, True, "2", None)),
        (int | None, (1, None), (0, "none")),
        (Count, (0, 7), (-1, 1.0, False, None)),
        (float, (-1, 0.5), (math.nan, math.inf, "1", True, None)),
        (Positive, (1, 1e-9), (0, -0.5, math.inf, math.nan, True, "2", None)),
        (Positive | None, (1, None), (0.0,)),
        (Annotated[int | None, Within(2)], (2, None), (1,)),
        (Share, (0, 0.5, 1), (-0.1, 1.1, True)),
        (bool, (True, False), ("no", 0, 1, None)),
        (Size, ("small", "large"), ("big", None, 1, ["small"])),
        (str | list[float] | None, ("any", [1.0], None, 0), ()),
        (Any, (0, None), ()),
    ],
    ids=str,
)
def test_what_an_annotation_excludes(annotation, allowed, wrong) -> None:
    assert [excluded(annotation, value) for value in allowed] == [None] * len(allowed)
    assert all(excluded(annotation, value) for value in wrong)


@pytest.mark.parametrize("name", REGISTERED)
def test_values_outside_of_bounds_are_refused(name) -> None:
    kind = REGISTERED[name]
    for option, annotation in annotations_of(kind).items():
        for value in wrong_values(annotation):
            with refused(what=kind.__name__, got=repr(value)) as error:
                kind(**{option: value})
            assert str(error.value.expected).startswith(f"{option} to be ")


@pytest.mark.parametrize("name", REGISTERED)
def test_bounds_are_those_of_the_formulas(name) -> None:
    """As written here: an annotation that allows more, such as float in place of Positive, is not what it is compared with."""
    for option, annotation in annotations_of(REGISTERED[name]).items():
        number = bound_of(annotation)[0]
        if number in USUAL:
            known = BOUNDS.get(f"{REGISTERED[name].__name__}.{option}") or BOUNDS.get(option) or USUAL[number]
            for values, allowed in zip(known, (False, True), strict=True):
                for value in values:
                    assert (excluded(annotation, value) is None) is allowed, (option, value)


@pytest.mark.parametrize("name", REGISTERED)
def test_numbers_and_flags_are_declared_and_defaults_are_within(name) -> None:
    annotations = annotations_of(REGISTERED[name])
    for option, parameter in signature(REGISTERED[name]).parameters.items():
        if parameter.default is not Parameter.empty:
            assert excluded(annotations[option], parameter.default) is None, option
        if isinstance(parameter.default, int | float) or get_origin(annotations.get(option)) is Literal:
            assert [*wrong_values(annotations[option])], option
        assert annotations.get(option) is not str or option in BY_CONSTRUCTORS, option


def test_a_name_that_only_a_type_checker_knows_leaves_other_options_checked() -> None:
    class Mine(Checked):
        def __init__(self, dim: int, table: Any = None) -> None:
            self.dim, self.table = dim, table

    Mine.__init__.__annotations__["table"] = "NotImported | None"
    assert Mine(1, table=2).table == 2
    with refused():
        Mine(0)


OPTIONS = {
    MeasureConfig: lambda **given: require_consistent(MeasureConfig(lengths=(64, 128), **given)),
    ExtendOptions: lambda **given: ExtendOptions(to=64, method="yarn", **given).check(),
    Target: lambda **given: Target(**{"to": 64, "method": "yarn"} | given),
}


@pytest.mark.parametrize(("options", "name"), [(options, name) for options in OPTIONS for name in bounds_of(options)])
def test_values_outside_are_refused_by_the_name_of_the_option(options, name) -> None:
    for value in wrong_values(bounds_of(options)[name]):
        if isinstance(value, bool | str) or value == 1.5:
            continue  # the command line makes numbers of the type
        with refused(what=f"--{name.replace('_', '-')}", got=str(value)):
            OPTIONS[options](**{name: value})


@pytest.mark.parametrize("options", OPTIONS)
def test_defaults_of_options_are_within(options) -> None:
    bounds = bounds_of(options)
    for field in fields(options):
        if field.name in bounds and field.default is not MISSING:
            assert field.default is None or excluded(bounds[field.name], field.default) is None
