"""Attention of a slice of a sequence: keys and values are passed around the processes, each of which has its own queries."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from longitude.attention.backends.base import BACKENDS, Backend, refuses
from longitude.attention.masks import Mask
from longitude.attention.merge import merge_attention
from longitude.attention.not_finite import nan_where_attended
from longitude.attention.request import Request
from longitude.attention.sequence_slice import SequenceSlice
from longitude.errors import UsageError
from longitude.positions.base import OffsetBias, OffsetVectors, PairBias
from longitude.positions.coordinates import part_of


def ring(name: str) -> Backend:
    """Return the backend of a SequenceSlice; its parts run on the backend `name`, or with "auto" on the cheapest."""
    return Backend(
        "ring", lambda r: attended(r, name)[0], lambda r: 0, lambda r: 1.0, partial=lambda r: attended(r, name)
    )


def attended(r: Request, name: str) -> tuple[Tensor, Tensor]:
    """Output [B, H, Lq, Dv] and logsumexp [B, H, Lq] of this process's queries over the keys of all processes."""
    share = r.pairs.shared
    assert share is not None
    for term in r.terms:
        if not isinstance(term, OffsetBias | PairBias | OffsetVectors):
            raise UsageError(
                "SequenceSlice",
                "an encoding by positions alone",
                f"{type(term).__name__}, for which a query needs all keys at once",
                "use one process",
            )
    if r.weights or r.dropout:
        what = "return_weights" if r.weights else "dropout"
        raise ValueError(
            f"SequenceSlice: expected no {what}, of weights whose keys are on several processes; leave it out"
        )
    call = _Call(r.of_layer(None, None, None), share, share.whole(r.mask), name)
    return _Ring.apply(call, r.q, r.k, r.v, *r.learned)


@dataclass(frozen=True, eq=False)
class _Call:
    """A call: its request without q, k and v, the slice, the mask of the whole sequence, and the backend's name."""

    r: Request
    share: SequenceSlice
    mask: Mask
    name: str

    def parts(self, owner: int, q: Tensor, k: Tensor, v: Tensor) -> Iterator[tuple[slice, slice, Request]]:
        """Yield slices of local queries, slices of keys of process `owner`, and their request, if the mask allows any pair."""
        share, (low, high) = self.share, self.mask.reach
        everything = slice(None)
        for rows, i in _placed(share.parts_of(share.rank)):
            for keys, j in _placed(share.parts_of(owner)):
                nearest, farthest = i.start - (j.stop - 1), i.stop - 1 - j.start  # query order - key order
                if (low is not None and farthest < low) or (high is not None and nearest > high):
                    continue
                places = 0 if share.positions is None else share.positions
                yield rows, keys, replace(
                    self.r, q=q[:, :, rows], k=k[:, :, keys], v=v[:, :, keys], mask=self.mask, lse=True,
                    q_positions=part_of(places, everything, i), k_positions=part_of(places, everything, j),
                    q_order=i.start, k_order=j.start,
                )  # fmt: skip

    def run(self, part: Request) -> tuple[Tensor, Tensor]:
        able = (
            [b for b in BACKENDS.values() if refuses(b, part) is None] if self.name == "auto" else [BACKENDS[self.name]]
        )
        if self.name != "auto" and (why := refuses(able[0], part)):
            raise ValueError(
                f"backend {self.name!r} cannot: {why}; of a SequenceSlice 'auto' takes what can, part by part"
            )
        chosen = min(able, key=lambda backend: backend.price(part))
        partial = chosen.partial
        assert partial is not None
        with torch.autocast(part.q.device.type, enabled=False):
            return nan_where_attended(chosen, part, partial)

    def around(self, k: Tensor, v: Tensor) -> Iterator[tuple[int, Tensor, Tensor]]:
        """Yield the rank of a process and its keys and values: local ones first, then those of each preceding rank."""
        share, packed = self.share, torch.cat([k, v], -1)
        for step in range(share.processes):
            owner = (share.rank - step) % share.processes
            coming = None
            if step + 1 < share.processes:  # on their way while the caller computes
                coming = _Passed(packed, share, share.size((owner - 1) % share.processes))
            yield owner, packed[..., : k.shape[-1]], packed[..., k.shape[-1] :]
            if coming is not None:
                packed = coming.wait()


class _Passed:
    """A tensor [B, H, L, D] on its way to the next process, and another from the one before, of `count` tokens."""

    def __init__(self, x: Tensor, share: SequenceSlice, count: int):
        def peer(rank: int) -> int:
            rank %= share.processes
            return rank if share.group is None else dist.get_global_rank(share.group, rank)

        self.sent, self.received = x.contiguous(), x.new_empty(*x.shape[:2], count, x.shape[3])
        to, back = peer(share.rank + 1), peer(share.rank - 1)
        self.works: list[Any] = dist.batch_isend_irecv(
            [
                dist.P2POp(dist.isend, self.sent, to, share.group),
                dist.P2POp(dist.irecv, self.received, back, share.group),
            ]
        )

    def wait(self) -> Tensor:
        for work in self.works:
            work.wait()
        return self.received


class _Ring(torch.autograd.Function):
    """out = sum_p e^(lse_p - lse) out_p over all parts p. Backward recomputes the outputs of parts.

    With w_p = e^(lse_p - lse), gradients of a part are  w_p dout  for out_p,  w_p (dout.out_p - dout.out + dlse)  for lse_p.
    """

    @staticmethod
    def forward(ctx: Any, call: _Call, q: Tensor, k: Tensor, v: Tensor, *learned: Tensor) -> tuple[Tensor, Tensor]:
        wide = torch.promote_types(q.dtype, torch.float32)
        out = q.new_zeros(*q.shape[:3], v.shape[3], dtype=wide)
        lse = q.new_full(q.shape[:3], -math.inf, dtype=wide)
        for owner, keys, values in call.around(k, v):
            for rows, _, part in call.parts(owner, q, keys, values):
                own, own_lse = call.run(part)
                outs, lses = [out[:, :, rows], own.to(wide)], [lse[:, :, rows], own_lse.to(wide)]
                out[:, :, rows], lse[:, :, rows] = merge_attention(outs, lses)
        ctx.call = call
        ctx.save_for_backward(q, k, v, out, lse)
        return out.to(q.dtype), lse.clone()

    @staticmethod
    def backward(ctx: Any, d_out: Tensor, d_lse: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        if torch.is_grad_enabled():
            raise RuntimeError("a SequenceSlice has no second derivatives; attention on one process has them")
        call: _Call = ctx.call
        q, k, v, out, lse = ctx.saved_tensors
        share, wide, learned = call.share, lse.dtype, call.r.learned
        d_out = d_out.to(wide)
        common = (d_out * out).sum(-1) - d_lse
        d_q, d_learned = torch.zeros_like(q, dtype=wide), [torch.zeros_like(x) for x in learned]
        d_kv = k.new_zeros(*k.shape[:3], k.shape[3] + v.shape[3], dtype=wide)
        for owner, keys, values in call.around(k, v):
            for rows, cols, part in call.parts(owner, q, keys, values):
                with torch.enable_grad():
                    leaves = [x.detach().requires_grad_() for x in (part.q, part.k, part.v)]
                    part = part.of_layer(*leaves)
                    own, own_lse = call.run(part)
                top = lse[:, :, rows]
                weight = (own_lse.detach() - top.masked_fill(top == -math.inf, 0.0)).exp()  # 0 where no part has a key
                d_own = weight[..., None] * d_out[:, :, rows]
                d_own_lse = (d_own * own.detach()).sum(-1) - weight * common[:, :, rows]
                ends = [
                    (x, gradient.to(x.dtype))
                    for x, gradient in ((own, d_own), (own_lse, d_own_lse))
                    if x.requires_grad  # False if no query attends to a key
                ]
                if len(ends) == 0:
                    continue
                found = torch.autograd.grad(
                    [x for x, _ in ends],
                    (*leaves, *learned),
                    [gradient for _, gradient in ends],
                    retain_graph=len(learned) > 0,  # all parts share the graph from parameters to terms
                    allow_unused=True,
                    materialize_grads=True,
                )
                d_q[:, :, rows] += found[0]
                d_kv[:, :, cols] += torch.cat(found[1:3], -1)
                for total, gradient in zip(d_learned, found[3:], strict=True):
                    total += gradient
            if share.processes > 1:  # gradients follow their keys, and after n steps are back at their process
                d_kv = _Passed(d_kv, share, share.size((owner - 1) % share.processes)).wait()
        d_k, d_v = d_kv.to(k.dtype).split([k.shape[3], v.shape[3]], -1)
        return None, d_q.to(q.dtype), d_k, d_v, *d_learned


def _placed(parts: tuple[slice, ...]) -> Iterator[tuple[slice, slice]]:
    """Each part of a process's tokens, as two slices: of its own tokens, and of the sequence."""
    start = 0
    for part in parts:
        yield slice(start, start + part.stop - part.start), part
        start += part.stop - part.start
