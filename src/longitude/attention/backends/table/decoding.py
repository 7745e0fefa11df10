"""One query for each head: the first layer of a model describes the call of decode.c, and all layers use it."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from longitude.attention.backends.operators import Inputs
from longitude.attention.backends.table import band
from longitude.attention.bias_tables import bias_of
from longitude.attention.request import Request
from longitude.errors import UsageError
from longitude.native.tensors import in_memory
from longitude.positions.base import OffsetBias

SMALL = 2**17  # elements of keys up to which one thread ends before a second would begin


def describes(r: Request) -> bool:
    """Whether a description can express a request: one query for each head, and biases of the offset, by plain order."""
    plain = r.q.shape[2] == 1 and r.dropout == 0 and r.contiguous and len(r.pairs.beyond_band) == len(r.learned) == 0
    if not plain or r.q.dtype not in band.OPTIONS or not {*map(type, r.terms)} <= {OffsetBias}:
        return False
    return not torch.is_grad_enabled() and in_memory(r.q, r.k, r.v) and band.available(r.q.dtype)


def decoding(r: Request) -> DecodingStep | None:
    """The description of a request; None if none can express it.

    Its table [H or 1, Lk] has the bias at the offsets of the query from each key, the first of which is the largest.
    """
    if not r.once(describes):
        return None
    first, wide = r.position_gap, torch.promote_types(r.q.dtype, torch.float32)
    biases = [bias_of(term, first, first - r.length + 1, r.q, wide) for term in r.terms]  # type: ignore[arg-type]
    table = sum(biases[1:], biases[0]) if biases else None
    return DecodingStep(Inputs(r.q, r.k, r.v, band.Terms(table), band.limits_of(r), r.scale))


class DecodingStep:
    """Attention of a single query, shared by the layers of a model, which differ only in q, k and v.

    It computes softmax(scale q.k + table) v [B, H, 1, Dv] for q [B, H, 1, D], k [B, Hkv, Lk, D] and v [B, Hkv, Lk, Dv].
    Describing a call to C takes longer than a short call. Measured with 192 keys of 4 heads of 64 (Zen 3, one thread, processor
    time): 20 us for a layer, 28 us for torch's function, 88 us for `band.forward`.
    """

    def __init__(self, x: Inputs):
        run = band.functions(x.q.dtype)
        assert run is not None
        (batch, heads, _, dim), (shared, keys), width, table = x.q.shape, x.k.shape[1:3], x.v.shape[3], x.terms.table
        self.shapes, self.dtype = (
            ((batch, heads, 1, dim), (batch, shared, keys, dim), (batch, shared, keys, width)),
            x.q.dtype,
        )
        alone = table is None or (table.shape in ((heads, keys), (1, keys)) and table.dtype == x.wide and table.is_cpu)
        if heads % shared or not alone:
            band.require(
                x
            )  # its message tells what does not fit; each call holds the layer's q, k and v against the shapes
        threads = torch.get_num_threads() if x.k.numel() > SMALL else 1
        shape, (self.table, step) = band.shape_of(x, threads), band.table_of(table)
        self.space = x.q.new_empty(threads * run.decode_space(shape), dtype=x.wide)
        self.size = batch, heads, 1, width
        self.inputs, self.out = (band.In(), band.In(), band.In()), band.Out(None, heads * width, width, width, 0)
        self.run = partial(
            run.decode, shape, *self.inputs, band.at(self.table), step, self.out, None, None, self.space.data_ptr()
        )

    def __call__(self, r: Request) -> Tensor:
        out, kept = r.q.new_empty(self.size), []
        for argument, x, shape in zip(self.inputs, (r.q, r.k, r.v), self.shapes, strict=True):
            if x.shape != shape or x.dtype != self.dtype or not x.is_cpu:  # another layer's, which C would read past
                raise UsageError("decoding in C", f"{list(shape)} of {self.dtype}", f"{list(x.shape)} of {x.dtype}")
            if x.stride(3) != 1:
                kept.append(x := x.contiguous())  # alive until the loop has read it
            argument.at = x.data_ptr()
            argument.batch, argument.head, argument.row, _ = x.stride()
        self.out.at = out.data_ptr()
        self.run()
        return out
