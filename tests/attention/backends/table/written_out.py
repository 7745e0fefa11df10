"""The Toeplitz kernel with every pair written out, and how tests compare the two."""

import math

import torch
import torch.nn.functional as F

from longitude.attention.backends.table.backend import toeplitz_attention
from longitude.attention.backends.table.band import Limits, Terms
from tests.support import random

CAUSAL = (0, None)
KINDS = ["table", "levels", "key_vectors", "value_vectors"]
EACH = [*((kind,) for kind in KINDS), tuple(KINDS)]
named = {"ids": lambda kinds: "+".join(kinds) or "nothing"}


def dense(x, near, low, high, scale):
    """The specification, pair by pair: what a query may not see is cut out before anything is computed with it.

    x: tensors by name, the table from `near` on -> out [B, H, Lq, Dv] and lse [B, H, Lq].
    """
    (heads, queries), keys = x["q"].shape[1:3], x["k"].shape[2]
    a, b = torch.arange(queries)[:, None], torch.arange(keys)
    n, distance = queries - 1 - a + b, keys - queries + a - b
    allowed = (distance >= (-math.inf if low is None else low)) & (distance <= (math.inf if high is None else high))

    def seen(t):  # [B, H, Lq, Lk, D]
        return torch.where(allowed[..., None], t.expand(-1, -1, queries, keys, -1), 0.0)

    def of_diagonals(t):  # [H, diagonals from `near` on, or fewer, D]
        t = t[:, : queries + keys - 1 - near]
        t = F.pad(t, (0, 0, near, queries + keys - 1 - near - t.shape[1]))
        return seen(t[:, n].expand(1, heads, -1, -1, -1))

    q = seen(x["q"][:, :, :, None])
    k, v = (seen(x[name].repeat_interleave(heads // x[name].shape[1], 1)[:, :, None]) for name in "kv")
    k = k + of_diagonals(x["key_vectors"]) if "key_vectors" in x else k
    v = v + of_diagonals(x["value_vectors"]) if "value_vectors" in x else v
    scores = scale * (q * k).sum(-1)
    if "table" in x:
        scores = scores + of_diagonals(x["table"][..., None])[..., 0]
    if "q_level" in x:
        levels = seen(x["q_level"][:, :, :, None, None]), seen(x["k_level"][:, :, None, :, None])
        scores = scores + (levels[0] - levels[1])[..., 0]
    empty = ~allowed.any(-1, keepdim=True)
    scores = scores.masked_fill(~allowed, -math.inf).masked_fill(empty, 0.0)
    weights = scores.softmax(-1).masked_fill(~allowed, 0.0)
    return (weights[..., None] * v).sum(-2), scores.logsumexp(-1).masked_fill(empty[..., 0], -math.inf)


def ours(x, near, low, high, scale):
    table = F.pad(x["table"], (near, 0)) if "table" in x else None
    terms = Terms(**{name: x.get(name) for name in Terms._fields} | {"table": table})
    return toeplitz_attention(x["q"], x["k"], x["v"], terms, Limits(None, near, low, high), scale)


def tensors(kinds, queries, keys, near=0, batch=2, heads=2, kv_heads=2, dim=4, value_dim=None, shared=False, spare=0):
    """By name, in float64. value_dim: None is dim; shared: vectors for all heads; spare: vectors beyond the last diagonal."""
    of_vectors, value_dim = (1 if shared else heads, queries + keys - 1 - near + spare), value_dim or dim
    shapes = {
        "q": (batch, heads, queries, dim), "k": (batch, kv_heads, keys, dim), "v": (batch, kv_heads, keys, value_dim),
        "table": (heads, queries + keys - 1 - near),
        "q_level": (batch, heads, queries), "k_level": (batch, heads, keys),
        "key_vectors": (*of_vectors, dim), "value_vectors": (*of_vectors, value_dim),
    }  # fmt: skip
    wanted = {*"qkv", *kinds, *(("q_level", "k_level") if "levels" in kinds else ())}
    return {name: random(*shape, seed=n) for n, (name, shape) in enumerate(shapes.items()) if name in wanted}


def answer(attention, x, through=("out", "lse"), **options):
    """out, lse, and the gradients of everything. through: of these."""
    x = {name: t.detach().clone(memory_format=torch.preserve_format).requires_grad_() for name, t in x.items()}
    results = dict(zip(("out", "lse"), attention(x, **options), strict=True))
    grads = {n: random(*t.shape, seed=10 + t.dim()).to(t) for n, t in results.items()}
    roots, grads = [results[name] for name in through], [grads[name] for name in through]
    got = torch.autograd.grad(roots, list(x.values()), grads, allow_unused=True, materialize_grads=True)
    return {n: t.detach() for n, t in results.items()} | {f"d{name}": g for name, g in zip(x, got, strict=True)}


def distance(ours, theirs):
    """The largest difference, relative to the largest number, or absolute where that is below one."""
    assert torch.equal(ours == -math.inf, theirs == -math.inf)
    ours, theirs = (x.double().masked_fill(theirs == -math.inf, 0.0) for x in (ours, theirs))
    return float((ours - theirs).abs().max() / theirs.abs().max().clamp(min=1.0))


def compare(x, tolerance=1e-10, through=("out", "lse"), near=0, low: int | None = 0, high=None, scale=0.4):
    """With the truth in float64, of the same numbers; returns ours."""
    options = {"through": through, "near": near, "low": low, "high": high, "scale": scale}
    exact = answer(dense, {name: t.double() for name, t in x.items()}, **options)
    got = answer(ours, x, **options)
    for name, t in got.items():
        assert t.shape == exact[name].shape and (name[0] != "d" or t.dtype == x[name[1:]].dtype), name
        assert not t.isnan().any(), name
        assert distance(t, exact[name]) <= tolerance, (name, distance(t, exact[name]))
    return got


def narrowed(x, dtype=torch.float32):
    """q, k and v in that dtype, what is added in float32 or wider, levels in float64 as encodings make them."""
    kinds = {"q": dtype, "k": dtype, "v": dtype, "q_level": torch.float64, "k_level": torch.float64}
    return {name: t.to(kinds.get(name, torch.promote_types(dtype, torch.float32))) for name, t in x.items()}
