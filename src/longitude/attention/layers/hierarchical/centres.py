"""Where a block stands: half way between its first and its last token, which may be between two tokens.

Encodings speak of whole positions and offsets. Half way between two neighbours a rotation turns by the mean of their angles,
and a bias of the offset is the mean of both.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

from longitude.positions.base import Encoding, OffsetBias, wide
from longitude.positions.composed import Composed
from longitude.positions.rotation import RotaryTable


def refusal(encoding: Encoding) -> str | None:
    """Why an encoding has nothing to say of a block, in words; None where it has."""
    name = type(encoding).__name__
    if encoding.reads_tokens:
        return f"{name} reads each token, and a block of hierarchical attention is none"
    for term in encoding.terms({}):
        if not isinstance(term, OffsetBias):
            return f"{name} adds {type(term).__name__} to scores, and a block of hierarchical attention has a distance alone"
    if not encoding.stable_keys:
        return f"{name} follows the length of the sequence, and hierarchical attention keeps summaries of one length"
    turns = type(encoding).queries is not Encoding.queries or type(encoding).keys is not Encoding.keys
    if turns and not isinstance(encoding.prepare(torch.zeros(1, dtype=torch.long)), RotaryTable):
        return f"{name} turns by tables that are no Turn, so hierarchical attention cannot turn between two positions"
    return None


def tables_at(encoding: Composed, twice: Int[Tensor, "B n"], dtype: torch.dtype) -> Any:
    """What encoding.prepare would give for the positions twice / 2."""
    twice = twice[0] if len(twice) == 1 else twice  # one table for the batch
    neighbours = torch.cat([twice // 2, (twice + 1) // 2], -1)
    if encoding.axes > 1:  # the same number on all axes
        neighbours = neighbours.view(-1, neighbours.shape[-1], 1)
    tables = encoding.prepare(neighbours, None, wide(twice.device))
    dtype = torch.promote_types(dtype, torch.float32)
    return tuple(midway(one, dtype) if isinstance(one, RotaryTable) else one for one in tables)


def midway(turns: RotaryTable, dtype: torch.dtype) -> RotaryTable:
    """The turn by the mean of two angles less than pi apart, the first in the first half of the table and the second in the
    second: the sum of both arrows, as long as one.
    """
    (cos, cos_above), (sin, sin_above) = (x.chunk(2, -2) for x in turns)
    sum_of = cos + cos_above, sin + sin_above
    length = torch.hypot(cos, sin) / torch.hypot(*sum_of)
    return RotaryTable(*((x * length).to(dtype) for x in sum_of))


def bias_at(terms: Sequence[OffsetBias], twice: Int[Tensor, ...], dtype: torch.dtype) -> Tensor:
    """The sum of biases at the offsets twice / 2 -> [heads, ...]."""
    below, above = twice // 2, (twice + 1) // 2
    return sum((term.at(below) + term.at(above)) / 2 for term in terms).to(dtype)  # type: ignore[union-attr]


def offset_terms(encoding: Composed) -> list[OffsetBias]:
    return [term for term in encoding.terms({}) if isinstance(term, OffsetBias)]
