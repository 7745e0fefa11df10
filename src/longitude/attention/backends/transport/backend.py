"""Products of reflections between keys and queries, in chunks of tokens (Yang et al. 2025, arXiv:2505.16381).

Token t reflects all earlier keys by H_t = I - b_t w_t w_t'. The score of query i and key j is q_i . H_i H_(i-1) ... H_(j+1) k_j.
The product over a chunk of tokens has a closed form; the rows of W are the w of the chunk:

    H_last ... H_first = I - W' M W,    M = (I + strictly_lower(b W W'))^-1 diag(b).

M is lower triangular, and its corners give the products that begin or end inside the chunk. The chunk size does not change
the result; b = 0 is no reflection.

Shapes: q [B, H, Lq, D] are the queries of the last Lq tokens, k [B, H, Lk, D] the keys of all, w [B, H, n, D] and b [B, H, n]
the reflections of the last n tokens, Lq <= n <= Lk. Earlier keys are already carried to the first of these n tokens, as a cache
keeps them. All is computed in float32 or wider, and differentiable.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import reduce
from importlib import import_module
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from longitude.attention.backends.base import Backend, wide_item
from longitude.attention.backends.operators import Inputs
from longitude.attention.backends.table.band import Limits, Terms, available
from longitude.attention.request import Request
from longitude.attention.spans import by_spans
from longitude.attention.terms import drift_level, per_query_head
from longitude.native.derivatives import exporting, in_forward_mode, recomputed
from longitude.native.tensors import needs_operator
from longitude.positions.terms import Drift, Transport


def chunk_product(w: Tensor, b: Tensor) -> Tensor:
    """M [..., C, C] of a chunk with w [..., C, D] and b [..., C]."""
    below = (b[..., None] * (w @ w.mT)).tril(-1)
    return torch.linalg.solve_triangular(below, torch.diag_embed(b), upper=False, unitriangular=True)


def transported_scores(q: Tensor, k: Tensor, w: Tensor, b: Tensor, chunk: int = 64) -> Tensor:
    """q_i . H_i ... H_(j+1) k_j -> [B, H, Lq, Lk], not scaled; zero for keys after the query."""
    q, k, w, b = to_first_query(q, k, w, b, chunk)
    scores = []
    for rows, (_, keys, products, directions, m) in zip(q.split(chunk, 2), walk(k, w, b, chunk), strict=True):
        part = rows @ keys.mT - (rows @ directions.mT).tril() @ m @ products.mT
        scores.append(F.pad(part.tril(keys.shape[2] - rows.shape[2]), (0, k.shape[2] - keys.shape[2])))
    return torch.cat(scores, 2)


def carried(k: Tensor, w: Tensor, b: Tensor, chunk: int = 64) -> Tensor:
    """H_last ... H_(j+1) k_j -> [B, H, Lk, D], float32 or wider: what a cache keeps once all n tokens have passed.

    For one new token it is the rank-one update k_j - b (k_j . w) w of every key but the new one.
    """
    k, w, b = _wide(k, w, b)
    moved = k[:, :, : k.shape[2] - w.shape[2]]
    for moved, *_ in walk(k, w, b, chunk):  # noqa: B007 (the last one is wanted)
        pass
    return moved


def walk(k: Tensor, w: Tensor, b: Tensor, chunk: int) -> Iterator[tuple[Tensor, Tensor, Tensor, Tensor, Tensor]]:
    """Yield, for each chunk from the oldest on, the keys so far carried past it, and the factors of that product.

    The factors are the keys before (those of the chunk, and older keys carried to its start) [.., J, D]; their products with
    the chunk's tokens, k_j . w_t for t after j, [.., J, C]; the chunk's W [.., C, D] and M [.., C, C].
    """
    first = k.shape[2] - w.shape[2]
    moved = k[:, :, :first]
    for new, directions, strength in zip(
        k[:, :, first:].split(chunk, 2), w.split(chunk, 2), b.split(chunk, 2), strict=True
    ):
        keys, m = torch.cat([moved, new], 2), chunk_product(directions, strength)
        products = (keys @ directions.mT).triu(1 - moved.shape[2])
        moved = keys - products @ m.mT @ directions
        yield moved, keys, products, directions, m


def to_first_query(q: Tensor, k: Tensor, w: Tensor, b: Tensor, chunk: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Carry keys before the first query to it, and drop their reflections: q, k, w, b with n = Lq."""
    rows, tokens, length = q.shape[2], w.shape[2], k.shape[2]
    assert rows <= tokens <= length, (rows, tokens, length)
    q, k, w, b = _wide(q, k, w, b)
    if rows < tokens:
        early = tokens - rows
        before = carried(k[:, :, : length - rows], w[:, :, :early], b[:, :, :early], chunk)
        k, w, b = torch.cat([before, k[:, :, length - rows :]], 2), w[:, :, early:], b[:, :, early:]
    return q, k, w, b


def _wide(*xs: Tensor) -> tuple[Tensor, ...]:
    """Convert tensors to a common dtype, float32 or wider."""
    dtype = reduce(torch.promote_types, (x.dtype for x in xs), torch.float32)
    return tuple(x.to(dtype) for x in xs)


# ---- pairs of queries and keys that are computed together, in blocks of tokens -----------------------------------------
class Cut(NamedTuple):
    """Cut of a call into blocks: keys before the first block, tokens, tokens of a first block, longest distance (None: any).

    Keys from `visible` to `padded` - 1 are left out; from `padded` on the last block has zeros.
    """

    first: int
    tokens: int
    chunk: int
    high: int | None
    visible: int
    padded: int

    @property
    def sizes(self) -> list[int]:
        """Sizes of adjacent blocks in tokens, the smallest first."""
        if self.high == 0:
            return []
        return [self.chunk << n for n in range((-(-self.tokens // self.chunk) - 1).bit_length())]

    @property
    def has_past(self) -> bool:
        """Whether a query attends to keys before the first block."""
        keys = self.past_keys
        return keys.start < keys.stop

    @property
    def past_keys(self) -> slice:
        """Keys before the first block that queries attend to."""
        far = self.first if self.high is None else min(self.first, self.high)
        return slice(self.first - far, self.first + min(0, self.visible))

    def carries(self, size: int) -> bool:
        """Whether carrying over blocks of this size is needed."""
        needed = 2 * size < self.tokens or self.has_past
        return needed and (self.high is None or size < self.high)

    def parts(self, size: int) -> Iterator[Part]:
        """Pairs of adjacent blocks of this size: all whole pairs at once, then a shorter one."""
        both = 2 * size
        whole = min(self.tokens // both, max(0, self.visible + size) // both)
        near = size if self.high is None else min(size, self.high)
        if whole:

            def halves(x: Tensor) -> Tensor:
                return x[:, : whole * both].unflatten(1, (whole, both))

            yield Part(
                lambda x: halves(x)[:, :, size : size + near], lambda x: halves(x)[:, :, size - near : size], near
            )
        edge = whole * both + size
        rows, keys = slice(edge, min(edge + near, self.tokens)), slice(edge - near, min(edge, self.visible))
        if rows.start < rows.stop and keys.start < keys.stop:
            yield Part(lambda x: x[:, None, rows], lambda x: x[:, None, keys], near)

    def past(self) -> Part:
        """The keys before the first block."""
        keys, rows = self.past_keys, slice(0, self.tokens if self.high is None else min(self.tokens, self.high))
        return Part(lambda x: x[:, None, rows], lambda x: x[:, None, keys], self.first - keys.start)

    # ---- the same, by chunks of queries -------------------------------------------------------------------------------
    def reach(self, n: int) -> tuple[range, int]:
        """For the n-th chunk of queries: the chunks before it that it attends to, nearest first, and its first key."""
        oldest = 0 if self.high is None else max(0, self.first + n * self.chunk - self.high)
        earliest = max(0, oldest - self.first) // self.chunk
        return range(n - 1, earliest - 1, -1), oldest if oldest < self.first else self.first + earliest * self.chunk

    def mask(self, n: int, scores: Tensor, begin: int) -> None:
        """Set scores to -inf, in place, where the n-th chunk of queries may not attend to these keys, from `begin` on."""
        start, stop = self.first + n * self.chunk, begin + scores.shape[2]
        if self.high is not None and start + self.chunk - 1 - begin > self.high:
            i, j = (torch.arange(a, b, device=scores.device) for a, b in ((start, start + self.chunk), (begin, stop)))
            scores.masked_fill_(i[:, None] - j > self.high, -math.inf)
        left_out = (max(0, self.first + edge - begin) for edge in (self.visible, self.padded))
        scores[:, :, slice(*left_out)] = -math.inf


class Part(NamedTuple):
    """Selectors of queries and of keys, [N, L, ...] -> [N, n, rows, ...]; apart: first query's index minus first key's."""

    rows: Callable[[Tensor], Tensor]
    keys: Callable[[Tensor], Tensor]
    apart: int

    def inputs(
        self, q: Tensor, k: Tensor, v: Tensor, row_level: Tensor | None, key_level: Tensor | None, high: int | None
    ) -> Inputs:
        """Inputs of `band.forward`; blocks are its heads."""
        q, k, v = self.rows(q), self.keys(k), self.keys(v)
        terms = Terms()
        if row_level is not None and key_level is not None:
            terms = Terms(q_level=self.rows(row_level).double(), k_level=self.keys(key_level).double())
        if high is not None:
            high += k.shape[2] - q.shape[2] - self.apart  # it counts from the last query and the last key
        return Inputs(q, k, v, terms, Limits(high=high), scale=1.0)


# ---- attention in memory linear in the length ------------------------------------------------------------------------
BLOCK = 32
"""Tokens of a first block on the CPU. Smaller blocks need more matrices [D, D], larger blocks inverses of larger chunks."""
AT_ONCE = 1024
"""Tokens for which first blocks are computed at a time, and recomputed in backward."""


def transport_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    w: Tensor,
    b: Tensor,
    scale: float,
    level: Tensor | None = None,
    high: int | None = None,
    chunk: int = 128,
    hidden: int = 0,
) -> Tensor:
    """softmax_j(scale q_i . H_i ... H_(j+1) k_j + level_i - level_j) v_j over the keys 0 <= i - j <= high.

    The last `hidden` keys are left out; every query must attend to one key. v [B, H, Lk, Dv]; level [B, H, Lk], per token ->
    [B, H, Lq, Dv] in the dtype of q. In C blocks of tokens double (`halves`); elsewhere, and in graphs, queries are taken a chunk
    at a time and carried backward over the chunks before them (`by_formula`).
    """
    dtype, (batch, heads, rows, _) = q.dtype, q.shape
    plain = q.device.type == "cpu" and not needs_operator(q, k, v, w, b, level) and not in_forward_mode()
    plain = plain and available(torch.promote_types(dtype, torch.float32))
    q, k, w, b = to_first_query(q, k, w, b, chunk)
    first, chunk = k.shape[2] - rows, min(chunk, rows, BLOCK if plain else chunk)
    pad = -rows % chunk  # zeros that only queries beyond the last attend to
    q, k, w, v = (x.flatten(0, 1) for x in (q * scale, k, w, v.to(q.dtype)))
    b, level = b.flatten(0, 1), level if level is None else level.expand(batch, heads, -1).flatten(0, 1)
    q, k, w, v = (F.pad(x, (0, 0, 0, pad)) for x in (q, k, w, v))
    b, level = F.pad(b, (0, pad)), level if level is None else F.pad(level, (0, pad))
    step = max(1, AT_ONCE // chunk) * chunk if plain else chunk
    tokens = (split(x, step) for x in (q, k[:, first:], w, b))
    steps = (recomputed(of_chunks, chunk, *x) for x in zip(*tokens, strict=True))
    parts: Any = [torch.cat(x, 1) for x in zip(*steps, strict=True)]
    cut = Cut(first, rows + pad, chunk, high, rows - hidden, rows)
    inputs: Any = *parts, k[:, :first], v, level
    if plain:
        halves = import_module("longitude.attention.backends.transport.halves")  # loaded where it is needed
        out: Any = halves.ByHalves.apply(cut, by_formula, *inputs)
    else:
        out = by_formula(cut, *inputs)
    return out[:, :rows].unflatten(0, (batch, heads)).to(dtype)


def split(x: Tensor, size: int) -> tuple[Tensor, ...]:
    """Chunks of x [N, L, ...]; a single one in an exported graph, because their number depends on the length."""
    return (x,) if exporting() else x.split(size, 1)


def of_chunks(chunk: int, q: Tensor, k: Tensor, w: Tensor, b: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Chunk-local factors of queries and keys [N, L, D], in chunks of C tokens.

    Returns queries carried back to the start of their chunk [N, L, D]; scores within chunks [N, n, C, C]; keys carried to the
    end of their chunk [N, L, D]; and matrices X [N, n, D, D]: carrying a query over a chunk multiplies it by I - X.
    """
    q, k, w, b = (x.unflatten(1, (-1, chunk)) for x in (q, k, w, b))
    m, of_keys = chunk_product(w, b), (k @ w.mT).triu(1)
    of_rows = (q @ w.mT).tril() @ m
    ahead = torch.ones(chunk, chunk, dtype=torch.bool, device=q.device).triu(1)
    scores = (q @ k.mT - of_rows @ of_keys.mT).masked_fill(ahead, -math.inf)
    m_w = m.mT @ w
    return (q - of_rows @ w).flatten(1, 2), scores, (k - of_keys @ m_w).flatten(1, 2), m_w.mT @ w


def by_formula(
    cut: Cut, q: Tensor, within: Tensor, ends: Tensor, over: Tensor, past: Tensor, v: Tensor, level: Tensor | None
) -> Tensor:
    """The output [N, L, Dv] of the chunks by operators that have derivatives of every order."""
    chunks_of_q, chunks_of_ends = split(q, cut.chunk), split(ends, cut.chunk)

    def attend(n: int) -> Tensor:
        before, begin = cut.reach(n)
        rows, parts, stop = chunks_of_q[n], [within[:, n]], cut.first + (n + 1) * cut.chunk
        for m in before:
            parts.append(rows @ chunks_of_ends[m].mT)
            rows = rows - rows @ over[:, m]
        scores = torch.cat([rows @ past[:, begin:].mT, *parts[::-1]], 2)
        if level is not None:
            levels = level[:, stop - cut.chunk : stop, None] - level[:, None, begin:stop]
            scores = scores + levels.to(scores.dtype)
        cut.mask(n, scores, begin)
        return scores.softmax(-1) @ v[:, begin:stop]

    return torch.cat([recomputed(attend, n) for n in range(len(chunks_of_q))], 1)


# ---- the backend -------------------------------------------------------------------------------------------------------
def transport_window(term: Transport, k: Tensor, r: Request) -> tuple[Tensor, Tensor, Tensor]:
    """Keys up to the last query, and w and b of the tokens past which they are not carried yet.

    If queries come after the last key that they may attend to, as with padding, the keys between are zeros.
    """
    tokens = slice(max(0, r.k_order - term.first), r.q_order + r.rows - term.first)
    w, b = (per_query_head(x[:, :, tokens], r.heads) for x in (term.w, term.b))
    return F.pad(k, (0, 0, 0, r.order_gap + r.rows - r.length)), w, b


def transport(r: Request) -> Tensor:
    """The backend's run."""

    def run(r: Request) -> Tensor:
        (term,) = (term for term in r.terms if isinstance(term, Transport))
        k, v = (per_query_head(x, r.heads) for x in (r.k, r.v))
        hidden = max(0, r.order_gap + r.rows - r.length)
        k, w, b = transport_window(term, k, r)
        v = F.pad(v[:, :, : k.shape[2]], (0, 0, 0, hidden))
        level = drift_level(r)
        level = level if level is None else level[:, :, r.k_order : r.k_order + k.shape[2]]
        chunk = w.shape[2] if exporting() else term.chunk
        return transport_attention(r.q, k, v, w, b, r.scale, level, r.pairs.band[1], chunk, hidden)

    return by_spans(r, run)


def transport_limits(r: Request) -> str | None:
    """It computes reflections under causality and windows."""
    if not any(isinstance(term, Transport) for term in r.terms):
        return "the encoding has no transport"
    if r.pairs.band[0] != 0:
        return "it supports no masks but Causal() and Window(size) in token order"
    return None


def transport_memory(r: Request) -> int:
    """Wide copies of queries, keys, values, w and b, and what blocks make of them; their scores and reflections [D, D].

    Counted on the CPU. Elsewhere the scores of one chunk of queries with all keys come to that.
    """
    chunk = max((term.chunk for term in r.terms if isinstance(term, Transport)), default=1)
    dim = max(r.q.shape[3], r.v.shape[3])
    on_cpu = r.q.device.type == "cpu"
    block = min(chunk, BLOCK) if on_cpu else chunk
    per_token = 11 * dim + 2 * block + 3 * dim * dim // block + (0 if on_cpu else 4 * min(chunk, r.rows))
    return r.q.shape[0] * r.heads * r.length * per_token * wide_item(r)


TRANSPORT = Backend(
    "transport",
    run=transport,
    terms=(Transport, Drift),
    limits=transport_limits,
    memory=transport_memory,
    price=lambda r: 4.0,
)
