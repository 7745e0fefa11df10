"""Attention without a bias: where C is faster than torch's function.

Measured with torch 2.13 on one thread of an AMD EPYC with AVX2, one with AVX-512, and an Intel Xeon with AMX: 8 heads of 16 to
128, batches of 1 and 8, from 2026-11-23 to 2026-11-26. From `SHORTEST` on, C took at most 0.9 of torch's time on all three.
Without causality torch's function is as fast; with shorter sequences the processors differ. Nothing is timed while a program
runs: two runs of one study would round differently.
"""

from __future__ import annotations

import torch

from longitude.attention.backends.table import band
from longitude.attention.backends.table.decoding import describes
from longitude.attention.request import Request
from longitude.native.tensors import in_memory

SHORTEST = 512
"""Queries and keys, causal; 256 in float32 with heads of 32 or wider. In bfloat16 only with gradients."""


def is_faster_in_c(r: Request) -> bool:
    """Whether C runs a request that torch's function also supports; compiled and transformed calls are left to torch."""
    if not in_memory(r.q, r.k, r.v):  # first: what a comparison of symbolic lengths decides, a graph is bound to
        return False
    wide_heads = r.q.dtype == torch.float32 and r.q.shape[3] >= 32
    if min(r.rows, r.length) < (SHORTEST // 2 if wide_heads else SHORTEST) or r.sees_all:
        return False
    learns = torch.is_grad_enabled() and (r.q.requires_grad or r.k.requires_grad or r.v.requires_grad)
    supported = r.q.dtype == torch.float32 or (r.q.dtype == torch.bfloat16 and learns)
    return supported and band.available(r.q.dtype)


def is_step(r: Request) -> bool:
    """Whether C runs a decoding step whose request is shared by layers."""
    return r.once(describes)
