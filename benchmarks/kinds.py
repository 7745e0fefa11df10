"""Which encodings do nothing but one thing: those that targets are about."""

from functools import cache

import longitude as lg
from longitude.bench.cases import AttentionShape, built
from longitude.positions.base import Encoding
from longitude.positions.composed import Composed
from longitude.positions.terms import OffsetBias, SinkLogits, Temperature

TINY = AttentionShape(1, 8, 8, 64, 16)


@cache
def _without_tokens() -> dict[str, Composed]:
    """Every encoding that neither acts on the tokens nor reads them."""
    every = {name: built(name, TINY) for name in lg.list_encodings()}
    return {name: each for name, each in every.items() if not each.at_input and not each.reads_tokens}


def _rotates(encoding: Composed) -> bool:
    return any(type(member).keys is not Encoding.keys for member in encoding)


def offset_biases(learned: bool | None = None) -> list[str]:
    """Those that only add a bias of the offset; learned: of these, those that learn it, or that do not."""
    return [
        name
        for name, encoding in _without_tokens().items()
        if not _rotates(encoding)
        and (terms := encoding.terms({}))
        and all(isinstance(term, OffsetBias) for term in terms)
        and learned in (None, encoding.learned)
    ]


def temperatures_and_sinks() -> list[str]:
    """Those that scale queries, or add a logit to each row."""
    scales = (Temperature, SinkLogits)
    return [
        name
        for name, each in _without_tokens().items()
        if (terms := each.terms({})) and all(isinstance(term, scales) for term in terms)
    ]


def rotations() -> list[str]:
    """Those that only transform queries and keys, once; in regions of pairs attention runs several times."""
    return [
        name for name, each in _without_tokens().items() if _rotates(each) and not each.terms({}) and not each.regions()
    ]
