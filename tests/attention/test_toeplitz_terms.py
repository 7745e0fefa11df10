"""Everything the Toeplitz kernel adds to scores and outputs, against every pair written out: out, lse and all gradients."""

import math
from importlib import import_module
from itertools import combinations

import pytest
import torch
import torch.nn.functional as F

from longitude.attention.toeplitz import toeplitz_attention

backward = import_module("longitude.attention.toeplitz.backward")
ROOM = {"causal": (0, None), "all": (None, None), "window": (0, 39), "own": (0, 0), "sides": (-3, 70), "past": (5, 90)}
KINDS = ["table", "levels", "key_vectors", "value_vectors"]
SETS = [kinds for count in range(5) for kinds in combinations(KINDS, count)]


def dense(x, queries, keys, near, low, high, scale):
    """The specification. x: tensors by name, the table from `near` on -> out [B, H, Lq, D] and lse [B, H, Lq]."""
    q = x["q"]
    k, v = (x[name].repeat_interleave(q.shape[1] // x[name].shape[1], 1) for name in ("k", "v"))
    a, b = torch.arange(queries)[:, None], torch.arange(keys)
    n, distance = queries - 1 - a + b, keys - queries + a - b
    allowed = (distance >= (-math.inf if low is None else low)) & (distance <= (math.inf if high is None else high))

    def everywhere(vectors):  # [H, diagonals, D]
        vectors = vectors[:, : queries + keys - 1 - near]
        return F.pad(vectors, (0, 0, near, queries + keys - 1 - near - vectors.shape[1])).expand(q.shape[1], -1, -1)

    scores = scale * q @ k.mT
    if "table" in x:
        scores = scores + F.pad(x["table"], (near, 0))[:, n]
    if "q_level" in x:
        scores = scores + x["q_level"][..., None] - x["k_level"][:, :, None]
    if "key_vectors" in x:
        met = scale * q @ everywhere(x["key_vectors"]).mT
        scores = scores + met.gather(-1, n.expand_as(scores))
    scores = scores.masked_fill(~allowed, torch.finfo(scores.dtype).min)
    weights = scores.softmax(-1).masked_fill(~allowed, 0.0)
    out = weights @ v
    if "value_vectors" in x:
        by_diagonal = weights.new_zeros(*weights.shape[:3], queries + keys - 1)
        out = out + by_diagonal.scatter(-1, n.expand_as(weights), weights) @ everywhere(x["value_vectors"])
    return out, scores.logsumexp(-1).masked_fill(~allowed.any(-1), -math.inf)


def ours(x, queries, keys, near, low, high, scale):
    return toeplitz_attention(
        x["q"], x["k"], x["v"],
        F.pad(x["table"], (near, 0)) if "table" in x else None,
        levels=(x["q_level"], x["k_level"]) if "q_level" in x else None,
        key_vectors=x.get("key_vectors"), value_vectors=x.get("value_vectors"),
        near=near, low=low, high=high, scale=scale,
    )  # fmt: skip


def tensors(kinds, queries, keys, near=0, batch=2, heads=2, kv_heads=2, dim=4, shared=False, spare=0, seed=0):
    """By name, in float64. shared: vectors for all heads; spare: so many vectors more than there are diagonals."""
    generator = torch.Generator().manual_seed(seed)
    of_vectors = 1 if shared else heads, queries + keys - 1 - near + spare, dim
    shapes = {
        "q": (batch, heads, queries, dim),
        "k": (batch, kv_heads, keys, dim),
        "v": (batch, kv_heads, keys, dim),
        "table": (heads, queries + keys - 1 - near),
        "q_level": (batch, heads, queries),
        "k_level": (batch, heads, keys),
        "key_vectors": of_vectors,
        "value_vectors": of_vectors,
    }
    wanted = ["q", "k", "v", *("q_level k_level".split() if "levels" in kinds else ()), *set(KINDS) & set(kinds)]
    return {n: torch.randn(s, generator=generator).double() for n, s in shapes.items() if n in wanted}


def answer(attention, x, lse_counts=True, **options):
    """out, lse, and the gradients of everything through both; x: leaves, or what was made of leaves."""
    x = {name: t.detach().requires_grad_() for name, t in x.items()}
    out, lse = attention(x, x["q"].shape[2], x["k"].shape[2], **options)
    generator = torch.Generator().manual_seed(1)
    grads = [torch.randn(t.shape, generator=generator, dtype=torch.float64).to(t.dtype) for t in (out, lse)]
    if lse_counts:
        got = torch.autograd.grad((out, lse), list(x.values()), grads)
    else:
        got = torch.autograd.grad(out, list(x.values()), grads[0], allow_unused=True, materialize_grads=True)
    return {"out": out.detach(), "lse": lse.detach()} | {f"d{name}": g for name, g in zip(x, got, strict=True)}


def distance(ours, theirs):
    """The largest difference, relative to the largest number, or absolute where that is below one."""
    assert torch.equal(ours == -math.inf, theirs == -math.inf)
    ours, theirs = (x.double().masked_fill(theirs == -math.inf, 0.0) for x in (ours, theirs))
    return float((ours - theirs).abs().max() / theirs.abs().max().clamp(min=1.0))


def compare(x, tolerance=1e-10, truth=None, lse_counts=True, near=0, low=0, high=None, scale=0.4):
    """truth: the tensors to compare with, where they are not these in float64."""
    options = {"lse_counts": lse_counts, "near": near, "low": low, "high": high, "scale": scale}
    got = answer(ours, x, **options)
    exact = answer(dense, {name: t.double() for name, t in (truth or x).items()}, **options)
    for name, t in got.items():
        assert t.dtype == (x[name[1:]].dtype if name[0] == "d" else t.dtype) and t.shape == exact[name].shape
        assert not t.isnan().any(), name
        assert distance(t, exact[name]) <= tolerance, (name, distance(t, exact[name]))
    return got


# ---- in float64: all kinds, shapes and bands ---------------------------------------------------------------------------
SHAPES = [(1, 1, 0), (9, 9, 4), (131, 131, 0), (131, 131, 90), (65, 200, 150), (200, 65, 20), (1, 300, 280)]
LONG = [(333, 333, 250), (700, 431, 330), (431, 699, 600), (697, 697, 681)]


@pytest.mark.parametrize("band", ROOM)
@pytest.mark.parametrize("kinds", SETS, ids=lambda kinds: "+".join(kinds) or "nothing")
def test_equals_every_pair_written_out(kinds, band):
    for queries, keys, near in SHAPES:
        compare(tensors(kinds, queries, keys, near), near=near, low=ROOM[band][0], high=ROOM[band][1])


@pytest.mark.parametrize("kinds", [*((kind,) for kind in KINDS), tuple(KINDS)], ids="+".join)
def test_far_keys_many_tiles_and_the_edges_of_windows(kinds):
    for queries, keys, near in LONG:
        for low, high in (ROOM["causal"], (0, 299), (-20, 129)):
            compare(tensors(kinds, queries, keys, near, batch=1, dim=3), near=near, low=low, high=high)


@pytest.mark.parametrize("heads", [(4, 2), (4, 1), (6, 3)], ids=str)
@pytest.mark.parametrize("shared", [True, False], ids=["vectors for all heads", "vectors per head"])
def test_grouped_heads(heads, shared):
    for batch in (1, 3):
        x = tensors(KINDS, 131, 150, 100, batch=batch, heads=heads[0], kv_heads=heads[1], shared=shared, spare=7)
        compare(x, near=100)
        compare(x, near=100, low=0, high=60)


@pytest.mark.parametrize("shared", [True, False], ids=["vectors for all heads", "vectors per head"])
def test_a_batch_taken_in_several_steps(shared, monkeypatch):
    monkeypatch.setattr(backward, "TILE_ELEMENTS", 2 * 2 * 64 * 64)  # two sequences of two heads at a time
    compare(tensors(KINDS, 90, 90, 50, batch=5, shared=shared), near=50)


def test_each_result_alone_has_gradients():
    x = tensors(KINDS, 70, 90, 40)
    got = compare(x, near=40, lse_counts=False)
    assert (got["dq_level"] == 0).all()  # the weights of a row sum to one
    leaves = {name: t.requires_grad_() for name, t in x.items()}
    for attention in (ours, dense):
        _, lse = attention(leaves, 70, 90, 40, 0, None, 0.4)
        grads = torch.autograd.grad(lse.sum(), list(leaves.values()), allow_unused=True, materialize_grads=True)
        first = grads if attention is ours else first  # noqa: F821 (ours came first)
    for name, a, b in zip(leaves, first, grads, strict=True):
        torch.testing.assert_close(a, b, atol=1e-10, rtol=1e-10, msg=name)


EMPTY = [
    (90, 30, (0, None), slice(0, 60)),
    (200, 65, (0, 9), slice(0, 135)),
    (30, 30, (5, 9), slice(0, 5)),
    (200, 200, (None, -100), slice(100, 200)),
    (70, 70, (3, 2), slice(0, 70)),
    (70, 70, (500, None), slice(0, 70)),
    (70, 70, (None, -500), slice(0, 70)),
]


@pytest.mark.parametrize("kinds", [*((kind,) for kind in KINDS), tuple(KINDS)], ids="+".join)
def test_rows_with_nothing_to_look_at(kinds):
    for queries, keys, (low, high), empty in EMPTY:
        near = min(20, keys - 1)
        got = compare(tensors(kinds, queries, keys, near), near=near, low=low, high=high)
        assert (got["out"][:, :, empty] == 0).all() and (got["lse"][:, :, empty] == -math.inf).all()
        assert all((got[name][:, :, empty] == 0).all() for name in ("dq", "dq_level") if name in got)
        assert all(t.isfinite().all() for name, t in got.items() if name != "lse")


def test_layouts_do_not_matter():
    """Slices of a projection [B, L, 3, H, D], of levels for more tokens, [B, tokens, H], of wider vectors and tables."""
    x = tensors(KINDS, 131, 131, 60)
    expected = compare(x, near=60)
    fused = torch.stack([x[name].transpose(1, 2) for name in "qkv"], 2)
    strided = {name: fused[:, :, i].transpose(1, 2) for i, name in enumerate("qkv")}
    for name in ("q_level", "k_level"):
        strided[name] = F.pad(x[name], (3, 4)).transpose(1, 2).contiguous().transpose(1, 2)[:, :, 3:-4]
    for name in ("key_vectors", "value_vectors"):
        strided[name] = F.pad(x[name], (1, 2, 5, 0)).transpose(0, 1).contiguous().transpose(0, 1)[:, 5:, 1:-2]
    strided["table"] = F.pad(x["table"], (2, 2)).T.contiguous().T[:, 2:-2]
    assert strided.keys() == x.keys() and not any(t.is_contiguous() for t in strided.values())
    with torch.no_grad():
        out, lse = ours(strided, 131, 131, 60, 0, None, 0.4)
    torch.testing.assert_close((out, lse), (expected["out"], expected["lse"]), atol=1e-12, rtol=1e-12)
    leaves = {name: t.requires_grad_() for name, t in strided.items()}
    out, lse = ours(leaves, 131, 131, 60, 0, None, 0.4)
    generator = torch.Generator().manual_seed(1)
    grads = [torch.randn(t.shape, generator=generator, dtype=torch.float64) for t in (out, lse)]
    for name, g in zip(leaves, torch.autograd.grad((out, lse), list(leaves.values()), grads), strict=True):
        torch.testing.assert_close(g, expected[f"d{name}"], atol=1e-12, rtol=1e-12, msg=name)


# ---- other dtypes ------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("kinds", SETS, ids=lambda kinds: "+".join(kinds) or "nothing")
def test_float32_is_as_near_as_float32_can_be(kinds):
    for queries, keys, near in [(131, 131, 90), (65, 300, 200), (700, 431, 330)]:
        x = {name: t.float() for name, t in tensors(kinds, queries, keys, near, batch=1).items()}
        compare(x, near=near, tolerance=1e-5)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.bfloat16, 2**-7), (torch.float16, 2**-10)], ids=str)
@pytest.mark.parametrize("kinds", SETS, ids=lambda kinds: "+".join(kinds) or "nothing")
def test_halves_stay_within_their_rounding(kinds, dtype, tolerance):
    """Against float64 on the same rounded q, k, v; what is added is in float32."""
    for queries, keys, near in [(131, 131, 90), (65, 300, 200), (300, 150, 100)]:
        x = tensors(kinds, queries, keys, near, batch=1, kv_heads=1)
        x = {name: t.to(dtype if name in "qkv" else torch.float32) for name, t in x.items()}
        compare(x, near=near, tolerance=tolerance)
