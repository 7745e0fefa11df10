"""Where tables follow a length, queries of different lengths see the same key differently: the call is cut into runs of one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import torch
from torch import Tensor

from longitude.attention.request import Request
from longitude.positions.base import Positions, explicit
from longitude.positions.composed import Composed

Part = tuple[slice, slice, Request]
"""Rows of the batch, queries, and the request that answers them, its queries and keys transformed."""


def whole(r: Request) -> list[Part]:
    """A request that needs no cutting."""
    return [(slice(0, r.q.shape[0]), slice(0, r.rows), r)]


def transformed(r: Request, encoding: Composed, q_positions: Positions, k_positions: Positions) -> list[Part]:
    """The request with queries and keys as their tables make them; one part for each length that tables follow."""
    parts = list(_runs(encoding, q_positions, k_positions, r))
    parted = []
    for batch, rows, length in parts:
        keys = slice(0, r.length)
        piece = r
        if len(parts) > 1:
            keys = keys if r.weights else r.reachable(rows.start, rows.stop)
            piece = r.piece(rows, keys, batch)
        q_places, k_places = part_of(q_positions, batch, rows), part_of(k_positions, batch, keys)
        q_tables = encoding.prepare(explicit(q_places, piece.rows, r.q.device), length, r.q.dtype)
        alike = piece.rows == piece.length and _same(q_places, k_places)
        k_tables = (
            q_tables if alike else encoding.prepare(explicit(k_places, piece.length, r.q.device), length, r.q.dtype)
        )
        piece = replace(piece, q=encoding.queries(piece.q, q_tables), k=encoding.keys(piece.k, k_tables))
        parted.append((batch, rows, piece))
    return parted


def joined(parts: list[Part], run: Callable[[Request], tuple[Tensor, Tensor | None]]) -> tuple[Tensor, Tensor | None]:
    """Output and weights of all parts, in their places."""
    if len(parts) == 1:
        return run(parts[0][2])
    answers = [run(piece) for _, _, piece in parts]
    size = max(batch.stop for batch, _, _ in parts), max(rows.stop for _, rows, _ in parts)
    together: list[Tensor | None] = []
    for own in zip(*answers, strict=True):
        whole = None if own[0] is None else own[0].new_zeros(size[0], own[0].shape[1], size[1], own[0].shape[3])
        for (batch, rows, _), part in zip(parts, own, strict=True):
            if whole is not None:
                whole[batch, :, rows] = part
        together.append(whole)
    return together[0], together[1]  # type: ignore[return-value]


def require_same_past(encoding: Composed, past: Positions, keys: int, now: Positions, all_keys: int) -> None:
    """ValueError where the tables that cached tokens were made with are not those that a whole pass would use now: upper
    layers have seen what lower ones made of them, so no rotation of raw keys could mend it."""
    before, after = newest(past, keys), newest(now, all_keys)
    if isinstance(before, Tensor) != isinstance(after, Tensor):
        before, after = torch.as_tensor(before), torch.as_tensor(after)
    if isinstance(before, Tensor):
        before, after = torch.broadcast_tensors(before, after)
    then, since = encoding.length_at(before, before), encoding.length_at(before, after)
    changed = then != since
    if bool(changed.any()) if isinstance(changed, Tensor) else changed:
        raise ValueError(
            "cache: the sequence grew out of the length that its rotation followed, and cached tokens were made with another; "
            "expected a sequence that stays within it: prefill again from the start, or say follow='row' or 'declared'"
        )


def newest(positions: Positions, count: int) -> int | Tensor:
    """The largest position: an int, or [1] or [B, 1]."""
    if isinstance(positions, int):
        return positions + count - 1
    return positions.amax(tuple(range(1, positions.dim())))[:, None] if positions.dim() > 1 else positions.amax(0, True)


def _runs(
    encoding: Composed, q_positions: Positions, k_positions: Positions, r: Request
) -> Iterator[tuple[slice, slice, int | None]]:
    everything = slice(0, r.q.shape[0]), slice(0, r.rows)
    last = newest(k_positions, r.length)
    if not isinstance(q_positions, Tensor) and not isinstance(last, Tensor):
        length = encoding.length_at(q_positions, last)
        if length is None or length == encoding.length_at(q_positions + r.rows - 1, last):  # it never falls
            yield *everything, length
            return
    elif encoding.length_at(0, 0) is None:
        yield *everything, None
        return
    places = explicit(q_positions, r.rows, r.q.device)
    places = places.amax(-1) if places.dim() == 3 else places
    lengths = encoding.length_at(*torch.broadcast_tensors(places, torch.as_tensor(last, device=places.device)))
    lengths = lengths if lengths.dim() == 2 else lengths[None]
    alike = bool((lengths == lengths[:1]).all())
    for b, own in enumerate(lengths[:1] if alike else lengths):
        values, counts = own.unique_consecutive(return_counts=True)
        start = 0
        for length, count in zip(values.tolist(), counts.tolist(), strict=True):
            yield everything[0] if alike else slice(b, b + 1), slice(start, start + count), length
            start += count


def part_of(positions: Positions, batch: slice, part: slice) -> Positions:
    """Positions of some rows of the batch and some tokens."""
    if isinstance(positions, int):
        return positions + part.start
    if positions.dim() == 1:
        return positions[part]
    return (positions if positions.shape[0] == 1 else positions[batch])[:, part]


def _same(a: Positions, b: Positions) -> bool:
    return a == b if isinstance(a, int) and isinstance(b, int) else a is b
