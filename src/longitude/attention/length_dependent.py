"""Where tables follow a length, queries of different lengths see the same key differently: the call is cut into runs of one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from longitude.attention.request import Request, part_of
from longitude.positions.base import Positions, explicit
from longitude.positions.composed import Composed


@dataclass(frozen=True)
class Part:
    """Rows of the batch and queries of a call, and what is asked for them: of queries and keys as they are, which `ready`
    transforms. They are transformed one part at a time, because every part has its own keys. The only part of a call has
    slices without bounds: compilers would take a bound for a constant.
    """

    batch: slice
    rows: slice
    request: Request
    ready: Callable[[Request], Request] = lambda r: r


def whole(r: Request) -> list[Part]:
    """A request whose queries and keys are transformed already."""
    return [Part(slice(None), slice(None), r)]


def parted(r: Request, encoding: Composed, q_positions: Positions, k_positions: Positions) -> list[Part]:
    """A part for each length that tables follow; one, where they follow none."""
    runs = list(_runs(encoding, q_positions, k_positions, r))
    if len(runs) == 1:
        ready = partial(_transformed, encoding, q_positions, k_positions, runs[0][2])
        return [Part(slice(None), slice(None), r, ready)]
    parts = []
    for batch, rows, length in runs:
        keys = slice(0, r.length) if r.weights else r.reachable(rows.start, rows.stop)
        places = part_of(q_positions, batch, rows), part_of(k_positions, batch, keys)
        parts.append(Part(batch, rows, r.piece(rows, keys, batch), partial(_transformed, encoding, *places, length)))
    return parts


def _transformed(
    encoding: Composed, q_positions: Positions, k_positions: Positions, length: int | None, r: Request
) -> Request:
    """The request with queries and keys as the tables of `length` make them."""
    if not (encoding.prepares or encoding.transforms):
        return r
    device, dtype = r.q.device, r.q.dtype
    q_tables = k_tables = encoding.prepare(explicit(q_positions, r.rows, device), length, dtype)
    if r.rows != r.length or not _same(q_positions, k_positions):
        k_tables = encoding.prepare(explicit(k_positions, r.length, device), length, dtype)
    made = replace(r, q=encoding.queries(r.q, q_tables), k=encoding.keys(r.k, k_tables))
    made.__dict__.update(
        {name: found for name, found in r.__dict__.items() if name == "spans"}
    )  # the mask's, found once
    return made


def joined(parts: list[Part], run: Callable[[Request], tuple[Tensor, Tensor | None]]) -> tuple[Tensor, Tensor | None]:
    """Output, and weights or logsumexp, of all parts, in their places. Of several, backward transforms each again."""

    def one(part: Part) -> tuple[Tensor, Tensor | None]:
        return run(part.ready(part.request))

    if len(parts) == 1:
        return one(parts[0])
    batch, rows = max(part.batch.stop for part in parts), max(part.rows.stop for part in parts)
    r = parts[0].request
    out = r.q.new_zeros(batch, r.heads, rows, r.v.shape[3])
    second = None
    for part in parts:
        own, own_second = checkpoint(one, part, use_reentrant=False) if torch.is_grad_enabled() else one(part)
        out[part.batch, :, part.rows] = own
        if own_second is not None:
            if second is None:
                second = own_second.new_zeros(batch, r.heads, rows, *own_second.shape[3:])
            second[part.batch, :, part.rows] = own_second
    return out, second


def require_same_past(encoding: Composed, reached: int | Tensor, now: int | Tensor) -> None:
    """ValueError where the tables that cached tokens were made with are not those that a whole pass would use now: upper
    layers have seen what lower ones made of them, so no rotation of raw keys could mend it.

    reached: the newest position when they were made; now: the newest position with this call's tokens.
    """
    if isinstance(reached, Tensor) or isinstance(now, Tensor):
        reached, now = torch.broadcast_tensors(*both(reached, now))
    then, since = encoding.length_at(reached, reached), encoding.length_at(reached, now)
    changed = then != since
    if bool(changed.any()) if isinstance(changed, Tensor) else changed:
        raise ValueError(
            "cache: the sequence left the length that its rotation followed, and cached tokens were made with another; "
            "expected a sequence that stays within it: prefill again from the start, or say follow='row' or 'declared'"
        )


def later(a: int | Tensor, b: int | Tensor) -> int | Tensor:
    """The greater position, row by row."""
    return torch.maximum(*both(a, b)) if isinstance(a, Tensor) or isinstance(b, Tensor) else max(a, b)


def both(a: int | Tensor, b: int | Tensor) -> tuple[Tensor, Tensor]:
    device = a.device if isinstance(a, Tensor) else b.device if isinstance(b, Tensor) else None
    return torch.as_tensor(a, device=device), torch.as_tensor(b, device=device)


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


def _same(a: Positions, b: Positions) -> bool:
    return a == b if isinstance(a, int) and isinstance(b, int) else a is b
