"""The laws every mixer must obey, attention in its forms and recurrences, for yours too.

    from longitude.testing import mixers

    mixers.check("mamba")                       # a registered name,
    mixers.check(MyMixer, chunk_size=8)         # a class, with options,
    mixers.check(lambda dim: MyMixer(dim))      # or anything that builds a fresh one for the toy size

`check` runs every law and returns what each said: that it holds, or the declared property that makes it not apply. The first
broken one raises LawBroken, an AssertionError with the law and the measured number. In a test file:

    @pytest.mark.parametrize(("name", "law"), mixers.cases())
    def test_law(name, law):
        mixers.examine(law, name)

Laws are functions of a MixerExample, `law_xxx(build)`: they return None where they hold, a reason where they do not apply. What
a mixer declares is what they hold it to: `scores`, `rotates`, `has_weights`, `growth`. The laws need transformers, as
caches do. The one law that cannot be here is the first: the numbers equal the published ones.
"""

from collections.abc import Callable
from typing import Any

from longitude.attention.mixer import Mixer, list_mixers as names
from longitude.testing.fixtures import LawBroken
from longitude.testing.mixers.equal import (
    law_causality,
    law_forms,
    law_gradients,
    law_modes_of_torch,
    law_pieces,
    law_rows,
    law_takes_part,
)
from longitude.testing.mixers.fixtures import MixerExample, Network, mixer_example as example
from longitude.testing.mixers.limits import law_compile, law_finite, law_weights, law_wrong_input
from longitude.testing.mixers.models import law_documents_go_on, law_prompt_lookup
from longitude.testing.mixers.refused import law_refused_calls
from longitude.testing.mixers.state import (
    bytes_held,
    law_begins_alive,
    law_memory,
    law_precision,
    law_saved,
    law_surgery,
    tensors_held,
)
from longitude.testing.mixers.streams import law_dropout, law_packing, law_padding, law_restarts, law_runs
from longitude.testing.mixers.values import law_decay, law_dtypes, law_nonfinite

Law = Callable[[MixerExample], str | None]

HOLDS = "holds"

_LAWS: tuple[Law, ...] = (
    law_pieces,
    law_forms,
    law_gradients,
    law_takes_part,
    law_packing,
    law_runs,
    law_padding,
    law_restarts,
    law_documents_go_on,
    law_dropout,
    law_rows,
    law_causality,
    law_modes_of_torch,
    law_memory,
    law_precision,
    law_surgery,
    law_saved,
    law_begins_alive,
    law_finite,
    law_nonfinite,
    law_dtypes,
    law_decay,
    law_wrong_input,
    law_refused_calls,
    law_prompt_lookup,
    law_weights,
    law_compile,
)


def laws() -> dict[str, Law]:
    """All laws by name; the docstring of each says what it states."""
    return {_name(law): law for law in _LAWS}


def _name(law: Law) -> str:
    return getattr(law, "func", law).__name__.removeprefix("law_")


def examine(law: str | Law, mixer: str | Callable[..., Mixer] | MixerExample, **options: Any) -> str:
    """Try one law on one mixer -> "holds", or why it does not apply. LawBroken where it is broken, or where the mixer raises
    something that no law asks for.
    """
    law = laws()[law] if isinstance(law, str) else law
    build = example(mixer, **options)
    build()
    kind = build.factory if not isinstance(mixer, str) else mixer
    who = kind if isinstance(kind, str) else getattr(kind, "__name__", repr(kind))
    try:
        return law(build) or HOLDS
    except LawBroken as broken:
        raise LawBroken(f"{who} breaks the law {_name(law)!r}: {broken}") from broken
    except Exception as raised:
        raise LawBroken(f"{who} breaks the law {_name(law)!r}: it raised {type(raised).__name__}: {raised}") from raised


def check(
    mixer: str | Callable[..., Mixer] | MixerExample, *, without: tuple[str, ...] = (), **options: Any
) -> dict[str, str]:
    """Try every law on one mixer -> what each said. without: names of laws to leave out, such as "compile"."""
    for name in without:
        if name not in laws():
            raise ValueError(f"without: expected names of laws, {', '.join(laws())}; got {name!r}")
    return {name: examine(law, mixer, **options) for name, law in laws().items() if name not in without}


def cases() -> list[tuple[str, str]]:
    """(mixer, law) for everything registered, to parametrize a test with."""
    return [(name, law) for name in names() for law in laws()]


__all__ = [
    "HOLDS",
    "Law",
    "LawBroken",
    "MixerExample",
    "Network",
    "bytes_held",
    "cases",
    "check",
    "examine",
    "example",
    "laws",
    "tensors_held",
]
