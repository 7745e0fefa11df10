"""An encoding of only the last numbers of each query and key, for heads that have a part without position."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from longitude.positions.base import Columns, OffsetVectors, RowBias, Term, Transport
from longitude.positions.composed import Composed


class SuffixEncoding:
    """`encoding`, where queries and keys have `before` more numbers in front of those that it rotates or multiplies.

    What it adds to scores without reading queries stays as it is.
    It is to attention what a Composed is. A plain object, because compilers follow no module that a forward makes.
    """

    prepares = transforms = adds_terms = True
    widens = 1
    sizes = ()  # of its members they are narrower than queries

    def __init__(self, encoding: Composed, before: int):
        self.encoding, self.before = encoding, before
        self.stable_keys = encoding.stable_keys
        self.causal_only, self.passing_columns = encoding.causal_only, encoding.passing_columns
        self.reads_tokens, self.each = encoding.reads_tokens, encoding.each
        self.length_at, self.prepare, self.regions = encoding.length_at, encoding.prepare, encoding.regions

    def queries(self, q: Tensor, prepared: Any) -> Tensor:
        return torch.cat([q[..., : self.before], self.encoding.queries(q[..., self.before :], prepared)], -1)

    def keys(self, k: Tensor, prepared: Any) -> Tensor:
        return torch.cat([k[..., : self.before], self.encoding.keys(k[..., self.before :], prepared)], -1)

    def queries_and_keys(self, q: Tensor, k: Tensor, prepared: Any) -> tuple[Tensor, Tensor]:
        return self.queries(q, prepared), self.keys(k, prepared)

    def terms(self, context: Columns) -> tuple[Term, ...]:
        return tuple(self.placed(term) for term in self.encoding.terms(context))

    def placed(self, term: Term) -> Term:
        """The term, its vectors with zeros in front."""
        match term:
            case OffsetVectors(keys, None, shift):
                shift = self.behind_zeros(shift) if isinstance(shift, Tensor) else shift
                return replace(term, keys=lambda offset: self.behind_zeros(keys(offset)), shift=shift)
            case OffsetVectors():
                raise ValueError(
                    "the encoding adds vectors to values, and those of latent attention have no part with positions; "
                    "expected an encoding without them, such as with values=False"
                )
            case RowBias(of):
                return RowBias(self.of_tail(of))
            case Transport(w):
                return replace(term, w=self.behind_zeros(w))
        return term

    def of_tail(self, of: Callable[[Tensor, Tensor, Tensor], Tensor]) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
        return lambda q, scores, allowed: of(q[..., self.before :], scores, allowed)

    def behind_zeros(self, x: Tensor) -> Tensor:
        return F.pad(x, (self.before, 0))
