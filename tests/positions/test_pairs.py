"""All pairs of encodings: a list is refused when it is composed, or attention runs it, and `relative` is what is computed."""

from itertools import combinations_with_replacement
from typing import Any

import pytest
import torch

import longitude as lg
from longitude import testing
from longitude.positions.composed import compose
from longitude.testing.attend_calls import Call
from longitude.testing.fixtures import heads_and_tokens

OPTIONS: dict[str, list[dict[str, Any]]] = {
    "shaw": [{}, {"values": False}],
    "inkling": [{}, {"log_scaling_n_floor": 2}],
}
EXAMPLES = {f"{name} {options}": (name, options) for name in lg.list_encodings() for options in OPTIONS.get(name, [{}])}
READERS = {"shaw", "transformer_xl", "cope", "path", "path_fox"}
"""Those whose terms multiply a query: quick with rotations."""
ROTATIONS = {"rope", "pope", "xpos", "fope"}
PAIRS = [*combinations_with_replacement(EXAMPLES, 2)]
LENGTH, SHIFT = 6, 1000


def outputs(members: list[lg.Encoding]) -> list[torch.Tensor] | None:
    """The outputs of attention at positions 0 .. 5 and 1000 on; None for a list that is refused when it is composed."""
    try:
        encoding = compose(members)
    except ValueError:
        return None
    x = heads_and_tokens(LENGTH, LENGTH)
    places = [{"q_positions": first, "k_positions": first} for first in (0, SHIFT)]
    return [Call(encoding, x, options=where).forward(x, "auto") for where in places]


@torch.no_grad()
def require_as_declared(a: str, b: str) -> None:
    members = [testing.example(name, **options)() for name, options in (EXAMPLES[a], EXAMPLES[b])]
    for ordered in (members, members[::-1]):
        if (results := outputs(ordered)) is None:
            continue
        home, away = results
        moved = float((home - away).abs().max())
        if compose(ordered).relative:
            assert moved < 1e-8, f"{a}+{b}: declared relative"
        elif all(m.relative for m in ordered):
            assert moved > 1e-6, f"{a}+{b}: declared not relative, though its members are"


def test_readers_with_rotations_are_refused_when_composed_or_run_as_declared() -> None:
    for a, b in PAIRS:
        if (names := {EXAMPLES[a][0], EXAMPLES[b][0]}) & READERS and names & ROTATIONS:
            require_as_declared(a, b)


@pytest.mark.slow
@pytest.mark.parametrize("first", EXAMPLES)
def test_every_pair_is_refused_when_composed_or_runs_as_declared(first: str) -> None:
    for a, b in PAIRS:
        if a == first:
            require_as_declared(a, b)


REFUSED = [("pope", other) for other in sorted({*READERS, "rope", "xpos"})]


@pytest.mark.parametrize(("wider", "reader"), REFUSED)
def test_queries_of_two_widths_are_refused_when_composed(wider: str, reader: str) -> None:
    members = [testing.example(name)() for name in (wider, reader)]
    for ordered in (members, members[::-1]):
        with pytest.raises(ValueError, match=type(members[0]).__name__):
            compose(ordered)


WITH_PARAMETERS = [name for name in lg.list_encodings() if compose(testing.example(name)()).each[0]._parameters]
"""Encodings with parameters of their own, besides those of layers inside of them, which are called."""


@pytest.mark.parametrize("name", WITH_PARAMETERS)
def test_parameters_on_meta_are_refused_by_name(name: str) -> None:
    encoding = testing.example(name)()
    x = heads_and_tokens(5, 5)
    context = compose(encoding).context(x.pop("x"))[0]
    with pytest.raises(ValueError, match="on meta"):
        lg.attend(**x, encoding=encoding.to("meta"), context=context or None)
