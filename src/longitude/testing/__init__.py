"""The laws every encoding must obey, for yours too.

    from longitude import testing

    testing.check("alibi")                          # a registered name,
    testing.check(MyEncoding, slope=3.0)            # a class, with options,
    testing.check(lambda: MyEncoding(num_heads=4))  # or anything that builds a fresh one for the toy size, SHAPES

`check` runs every law and returns what each said: that it holds, or the declared property that makes it not apply. The first
broken one raises LawBroken, an AssertionError with the law and the measured number. In a test file:

    @pytest.mark.parametrize(("name", "law"), testing.cases())
    def test_law(name, law):
        testing.examine(law, name)

Laws are functions of an Example, `law_xxx(build)`: they return None where they hold, a reason where they do not apply. The
one law that cannot be here is the first: the table equals the published one, numbers typed from the paper.

Mixers have laws of their own, with the same verbs: testing.mixers.check("mamba").
"""

from collections.abc import Callable
from typing import Any

from longitude.positions.base import Encoding, list_encodings
from longitude.testing import mixers
from longitude.testing.bounds import law_memory
from longitude.testing.calls import law_modes_of_torch, law_prompt_lookup, law_refused_calls, law_takes_part
from longitude.testing.draws import law_draws
from longitude.testing.dropout import law_dropout
from longitude.testing.equal import (
    law_backends,
    law_packing,
    law_padding,
    law_pieces,
    law_queries_are_last,
    law_rows,
)
from longitude.testing.fixtures import SHAPES, Example, LawBroken, Stack, example, fill
from longitude.testing.graph import law_graph
from longitude.testing.nonfinite import law_nonfinite
from longitude.testing.position_laws import law_causality, law_far_positions, law_order, law_permutation, law_shift
from longitude.testing.state import (
    law_compile,
    law_compiled_training,
    law_export,
    law_gradients,
    law_state,
    law_tables,
    law_wrong_input,
)
from longitude.testing.values import law_decay, law_dtypes

Law = Callable[[Example], str | None]

HOLDS = "holds"

_LAWS: tuple[Law, ...] = (
    law_backends,
    law_draws,
    law_dropout,
    law_nonfinite,
    law_queries_are_last,
    law_pieces,
    law_padding,
    law_packing,
    law_rows,
    law_shift,
    law_permutation,
    law_order,
    law_causality,
    law_far_positions,
    law_tables,
    law_state,
    law_gradients,
    law_graph,
    law_dtypes,
    law_decay,
    law_takes_part,
    law_modes_of_torch,
    law_wrong_input,
    law_refused_calls,
    law_prompt_lookup,
    law_compile,
    law_compiled_training,
    law_export,
    law_memory,
)


def laws() -> dict[str, Law]:
    """All laws by name; the docstring of each says what it states."""
    return {_name(law): law for law in _LAWS}


def _name(law: Law) -> str:
    return getattr(law, "func", law).__name__.removeprefix("law_")


def examine(law: str | Law, encoding: str | Callable[..., Encoding] | Example, **options: Any) -> str:
    """Try one law on one encoding -> "holds", or why it does not apply. LawBroken where it is broken, or where the encoding
    raises something that no law asks for.
    """
    law = laws()[law] if isinstance(law, str) else law
    build = example(encoding, **options)
    build()
    kind = encoding.factory if isinstance(encoding, Example) else encoding
    kind = kind if isinstance(kind, str) else getattr(kind, "__name__", repr(kind))
    try:
        return law(build) or HOLDS
    except LawBroken as broken:
        raise LawBroken(f"{kind} breaks the law {_name(law)!r}: {broken}") from broken
    except Exception as raised:
        raise LawBroken(
            f"{kind} breaks the law {_name(law)!r}: it raised {type(raised).__name__}: {raised}"
        ) from raised


def check(
    encoding: str | Callable[..., Encoding] | Example, *, without: tuple[str, ...] = (), **options: Any
) -> dict[str, str]:
    """Try every law on one encoding -> what each said. without: names of laws to leave out, such as "compile"."""
    for name in without:
        if name not in laws():
            raise ValueError(f"without: expected names of laws, {', '.join(laws())}; got {name!r}")
    return {name: examine(law, encoding, **options) for name, law in laws().items() if name not in without}


def cases() -> list[tuple[str, str]]:
    """(encoding, law) for everything registered, to parametrize a test with."""
    return [(name, law) for name in list_encodings() for law in laws()]


__all__ = [
    "SHAPES",
    "HOLDS",
    "Example",
    "Law",
    "LawBroken",
    "Stack",
    "cases",
    "check",
    "examine",
    "example",
    "fill",
    "laws",
    "mixers",
]
