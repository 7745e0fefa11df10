"""The Toeplitz kernel against every pair written out: out, lse and all gradients, by torch's operators and by the loop in C."""

import math
from contextlib import contextmanager, nullcontext
from itertools import combinations

import pytest
import torch
import torch.nn.functional as F

from longitude.attention.backends.table import band, tiles
from longitude.attention.backends.table.backend import toeplitz_attention
from tests.support import close, random

CAUSAL = (0, None)
BANDS = {"causal": CAUSAL, "all": (None, None), "window": (0, 39), "own": (0, 0), "sides": (-3, 70), "past": (5, 90)}
KINDS = ["table", "levels", "key_vectors", "value_vectors"]
SETS = [kinds for count in range(5) for kinds in combinations(KINDS, count)]
EACH = [*((kind,) for kind in KINDS), tuple(KINDS)]
VALUES = [math.nan, math.inf, -math.inf]
named = {"ids": lambda kinds: "+".join(kinds) or "nothing"}


@contextmanager
def by_tiles():
    """Without the loop in C, which takes tables alone."""
    with pytest.MonkeyPatch.context() as context:
        context.setattr(band, "functions", lambda dtype: None)
        yield


def dense(x, near, low, high, scale):
    """The specification, pair by pair: what a query may not see is cut out before anything is computed with it.

    x: tensors by name, the table from `near` on -> out [B, H, Lq, D] and lse [B, H, Lq].
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
    return toeplitz_attention(
        x["q"], x["k"], x["v"],
        F.pad(x["table"], (near, 0)) if "table" in x else None,
        levels=(x["q_level"], x["k_level"]) if "q_level" in x else None,
        key_vectors=x.get("key_vectors"), value_vectors=x.get("value_vectors"),
        near=near, low=low, high=high, scale=scale,
    )  # fmt: skip


def tensors(kinds, queries, keys, near=0, batch=2, heads=2, kv_heads=2, dim=4, shared=False, spare=0):
    """By name, in float64. shared: vectors for all heads; spare: vectors beyond the last diagonal."""
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
    return {name: random(*shape, seed=n) for n, (name, shape) in enumerate(shapes.items()) if name in wanted}


def answer(attention, x, through=("out", "lse"), spoil=None, **options):
    """out, lse, and the gradients of everything. through: of these; spoil: changes the gradients of out and lse."""
    x = {name: t.detach().clone(memory_format=torch.preserve_format).requires_grad_() for name, t in x.items()}
    results = dict(zip(("out", "lse"), attention(x, **options), strict=True))
    grads = {n: random(*t.shape, seed=10 + t.dim()).to(t) for n, t in results.items()}
    if spoil is not None:
        grads = spoil(grads, results)
    roots, grads = [results[name] for name in through], [grads[name] for name in through]
    got = torch.autograd.grad(roots, list(x.values()), grads, allow_unused=True, materialize_grads=True)
    return {n: t.detach() for n, t in results.items()} | {f"d{name}": g for name, g in zip(x, got, strict=True)}


def distance(ours, theirs):
    """The largest difference, relative to the largest number, or absolute where that is below one."""
    assert torch.equal(ours == -math.inf, theirs == -math.inf)
    ours, theirs = (x.double().masked_fill(theirs == -math.inf, 0.0) for x in (ours, theirs))
    return float((ours - theirs).abs().max() / theirs.abs().max().clamp(min=1.0))


def compare(x, tolerance=1e-10, through=("out", "lse"), near=0, low: int | None = 0, high=None, scale=0.4):
    """With the truth in float64, of the same numbers; -> the answer of tiles."""
    options = {"through": through, "near": near, "low": low, "high": high, "scale": scale}
    exact, got = answer(dense, {name: t.double() for name, t in x.items()}, **options), {}
    for route in (nullcontext, by_tiles)[0 if {*x} <= {*"qkv", "table"} else 1 :]:
        with route():
            got = answer(ours, x, **options)
        for name, t in got.items():
            assert t.shape == exact[name].shape and (name[0] != "d" or t.dtype == x[name[1:]].dtype), name
            assert not t.isnan().any(), name
            assert distance(t, exact[name]) <= tolerance, (route, name, distance(t, exact[name]))
    return got


# ---- in float64: all kinds, shapes and bands ---------------------------------------------------------------------------
SHAPES = [
    (1, 1, 0),
    (9, 9, 4),
    (131, 131, 0),
    (131, 131, 90),
    (65, 200, 150),
    (200, 65, 20),
    (1, 300, 280),
    (3, 131, 0),
]
LONG = [(333, 333, 250), (700, 431, 330), (431, 699, 600), (697, 697, 681)]


@pytest.mark.one_in(7)
@pytest.mark.parametrize("band", BANDS)
@pytest.mark.parametrize("kinds", SETS, **named)
def test_equals_every_pair_written_out(kinds, band):
    for queries, keys, near in SHAPES:
        compare(tensors(kinds, queries, keys, near), near=near, low=BANDS[band][0], high=BANDS[band][1])


@pytest.mark.one_in(4)
@pytest.mark.parametrize("kinds", EACH, **named)
def test_far_keys_many_tiles_and_the_edges_of_windows(kinds):
    for queries, keys, near in LONG:
        for low, high in (CAUSAL, (-20, 299)):
            x = tensors(kinds, queries, keys, near, batch=1, heads=1, kv_heads=1, dim=3)
            compare(x, near=near, low=low, high=high)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("heads", [(4, 2), (4, 1), (6, 3)], ids=str)
@pytest.mark.parametrize("kinds", [("table",), tuple(KINDS)], **named)
def test_grouped_heads(heads, kinds):
    for batch, shared in ((1, True), (3, False)):
        x = tensors(kinds, 131, 150, 100, batch=batch, heads=heads[0], kv_heads=heads[1], shared=shared, spare=7)
        compare(x, near=100)
        compare(x, near=100, low=0, high=60)


@pytest.mark.parametrize("shared", [True, False], ids=["vectors for all heads", "vectors per head"])
def test_a_batch_taken_in_several_steps(shared, monkeypatch):
    monkeypatch.setattr(tiles, "TILE_ELEMENTS", 2 * 2 * 64 * 64)  # two sequences of two heads at a time
    compare(tensors(KINDS, 90, 90, 50, batch=5, shared=shared), near=50)


def test_each_result_alone_has_gradients():
    x = tensors(KINDS, 70, 90, 40)
    assert compare(x, near=40, through=["out"])["dq_level"].abs().max() < 1e-12  # the weights of a row sum to one
    got = compare(x, near=40, through=["lse"])
    assert (got["dv"] == 0).all() and (got["dvalue_vectors"] == 0).all() and (got["dk"] != 0).all()


EMPTY = [
    (90, 30, (0, None), slice(0, 60)),
    (200, 65, (0, 9), slice(0, 135)),
    (30, 30, (5, 9), slice(0, 5)),
    (200, 200, (None, -100), slice(100, 200)),
    (70, 70, (3, 2), slice(0, 70)),
    (70, 70, (500, None), slice(0, 70)),
    (70, 70, (None, -500), slice(0, 70)),
]


@pytest.mark.parametrize("kinds", EACH, **named)
def test_rows_without_keys(kinds):
    for queries, keys, (low, high), empty in EMPTY:
        near = min(20, keys - 1)
        got = compare(tensors(kinds, queries, keys, near), near=near, low=low, high=high)
        assert (got["out"][:, :, empty] == 0).all() and (got["lse"][:, :, empty] == -math.inf).all()
        assert all((got[name][:, :, empty] == 0).all() for name in ("dq", "dq_level") if name in got)
        assert all(t.isfinite().all() for name, t in got.items() if name != "lse")


@pytest.mark.parametrize("kinds", [("table",), tuple(KINDS)], **named)
def test_layouts_do_not_matter(kinds):
    """Slices of a projection [B, L, 3, H, D], of levels for more tokens, [B, tokens, H], of wider vectors and tables."""
    x = tensors(kinds, 131, 131, 60)
    expected = compare(x, near=60)
    fused = torch.stack([x[name].transpose(1, 2) for name in "qkv"], 2)
    strided = {name: fused[:, :, i].transpose(1, 2) for i, name in enumerate("qkv")}
    strided["table"] = F.pad(x["table"], (2, 2)).T.contiguous().T[:, 2:-2]
    for name in x.keys() - strided.keys():
        if "level" in name:
            strided[name] = F.pad(x[name], (3, 4)).transpose(1, 2).contiguous().transpose(1, 2)[:, :, 3:-4]
        else:
            strided[name] = F.pad(x[name], (1, 2, 5, 0)).transpose(0, 1).contiguous().transpose(0, 1)[:, 5:, 1:-2]
    assert not any(t.is_contiguous() for t in strided.values())
    for name, t in answer(ours, strided, near=60, low=0, high=None, scale=0.4).items():
        close(t, expected[name], rtol=1e-12)


def test_gradients_of_those_that_want_them():
    """A fixed table; and the table alone."""
    x = tensors(["table"], 150, 150)
    options = {"low": 0, "scale": 0.4}
    for wanted in ("qkv", ["table"]):
        mine = {name: t.clone().requires_grad_(name in wanted) for name, t in x.items()}
        got = torch.autograd.grad(toeplitz_attention(*mine.values(), **options)[0].sum(), [mine[n] for n in wanted])
        exact = {name: t.clone().requires_grad_(name in wanted) for name, t in x.items()}
        out, _ = dense(exact, near=0, high=None, **options)
        close(got, torch.autograd.grad(out.sum(), [exact[n] for n in wanted]), atol=1e-10)


@pytest.mark.parametrize("band", [CAUSAL, (-1, 2)], ids=str)
def test_gradcheck(band):
    def both(*x):
        out, lse = toeplitz_attention(*x, low=band[0], high=band[1], scale=0.7)
        return out, lse.masked_fill(lse == -math.inf, 0.0)  # where a row sees nothing: differences of infinities

    x = tensors(["table"], 5, 4, batch=1, kv_heads=1, dim=3)
    for route in (nullcontext, by_tiles):
        with route():
            torch.autograd.gradcheck(both, [t.requires_grad_() for t in x.values()])


def test_double_backward_raises():
    inputs = [t.requires_grad_() for t in tensors(["table"], 9, 9).values()]
    out, _ = toeplitz_attention(*inputs, low=0, scale=0.3)
    (dq,) = torch.autograd.grad(out.sum(), inputs[0], create_graph=True)
    with pytest.raises(RuntimeError, match="toeplitz_attention_backward"):
        dq.sum().backward()


def test_other_and_mixed_dtypes_are_refused():
    """Tables are as wide as the sums they enter."""
    q, k, v, table = tensors(["table"], 5, 5).values()
    for inputs in ((q, k, v, table.float()), (q, k.float(), v, table), [x.bfloat16() for x in (q, k, v, table)]):
        with pytest.raises(AssertionError):
            toeplitz_attention(*inputs, scale=0.3)


# ---- other dtypes ------------------------------------------------------------------------------------------------------
def narrowed(x, dtype=torch.float32):
    """q, k and v in that dtype, what is added in float32, levels in float64 as encodings make them."""
    kinds = {"q": dtype, "k": dtype, "v": dtype, "q_level": torch.float64, "k_level": torch.float64}
    return {name: t.to(kinds.get(name, torch.float32)) for name, t in x.items()}


@pytest.mark.one_in(7)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("kinds", SETS, **named)
def test_narrow_numbers_stay_within_their_rounding(kinds, dtype):
    """Against float64 on the same rounded numbers."""
    tolerance = max(1e-5, 3 * torch.finfo(dtype).eps)
    for queries, keys, near in [(131, 131, 90), (65, 300, 200), (300, 150, 100)]:
        compare(narrowed(tensors(kinds, queries, keys, near, batch=1, kv_heads=1), dtype), tolerance, near=near)


def test_large_levels_of_small_differences_are_precise():
    """100000 has steps of 0.008 in float32: differences are taken before levels are narrowed."""
    x = tensors(["levels"], 300, 300, batch=1)
    x["k_level"] = 1e5 - (x["k_level"].abs() * 1e-3).cumsum(-1)
    x["q_level"] = x["k_level"] + 1e-3
    x = narrowed(x)
    bare = compare({name: x[name] for name in "qkv"}, 1e-5)
    assert distance(compare(x, 1e-5)["out"], bare["out"].double()) > 1e-3  # the differences do count


# ---- keys that cannot count are left out, and no other -----------------------------------------------------------------
def steep(kind, queries, keys, times):
    """Eight heads that forget at the rates times 2^-1 .. 2^-8: ALiBi's slopes for a table, gates for levels."""
    x = tensors([kind], queries, keys, batch=1, heads=8, kv_heads=4, dim=3)
    rates = times * 2.0 ** -torch.arange(1, 9).double()[:, None]
    if kind == "table":
        x["table"] = -rates * (keys - 1 - torch.arange(queries + keys - 1)).abs()
    else:
        x["k_level"] = -(2 * rates * torch.rand(1, 8, keys, dtype=torch.float64)).cumsum(-1)
        x["q_level"] = x["k_level"][:, :, keys - queries :]
    return x


@pytest.mark.one_in(5)
@pytest.mark.parametrize("size", [1, 30], ids=["", "queries and keys 30 times as long"])
@pytest.mark.parametrize("times", [1, 20, 300])
@pytest.mark.parametrize("kind", ["table", "levels"])
def test_steep_tables_and_strong_forgetting(kind, times, size):
    """Far keys count where queries and keys are long, or where the band does not show a query its own key.

    In float32 weights are as precise as scores are, and levels as their differences inside a tile of queries.
    """
    for queries, keys in ((300, 300), (131, 400)):
        x = steep(kind, queries, keys, times)
        x = x | {name: size * x[name] for name in "qk"}
        for low, high in (CAUSAL, (0, 99), (20, None), (None, None)):
            compare(x, low=low, high=high)
        largest = 0.4 * x["q"].norm(dim=-1).max() * x["k"].norm(dim=-1).max()
        if kind == "levels":
            largest += (x["k_level"][:, :, :-128] - x["k_level"][:, :, 128:]).max()
        compare(narrowed(x), tolerance=1e-5 + 2.0**-22 * float(largest))


@pytest.mark.parametrize(("dtype", "negligible"), [(torch.float32, 2.0**-60), (torch.float64, 2.0**-120)], ids=str)
@pytest.mark.parametrize("kind", ["table", "levels"])
def test_a_key_is_kept_while_its_weight_may_count(kind, dtype, negligible):
    """The worst case of the bound |scale q.k| <= m: m for the far key, -m for the query's own. The far key alone has a value,
    so that the output is its weight."""
    for m in (0.0, 3.0, 40.0):
        for factor in (2.0, 0.25):
            fall = -2 * m + math.log(negligible * factor)  # of the far key, so that its weight is negligible * factor
            x = {
                "q": torch.tensor([[[[m**0.5, 0.0]]]]).double(),
                "k": torch.tensor([[[[m**0.5, 1.0], [-(m**0.5), 1.0]]]]).double(),
                "v": torch.tensor([[[[1.0, 1.0], [0.0, 0.0]]]]).double(),
            }
            if kind == "table":
                x["table"] = torch.tensor([[fall, 0.0]]).double()
            else:
                x |= {"q_level": torch.zeros(1, 1, 1), "k_level": torch.tensor([[[-fall, 0]]])}
            x = narrowed(x, dtype) | ({"table": x["table"].to(dtype)} if kind == "table" else {})
            with by_tiles():
                got = answer(ours, x, near=0, low=0, high=None, scale=1.0, through=["out"])
            if factor > 1:
                weight = torch.full_like(got["out"], negligible * factor)
                close(got["out"], weight, atol=0, rtol=1e-4)
                assert (got["dv"][:, :, 0] != 0).all()
            else:
                assert (got["out"] <= negligible).all()


def test_denormal_weights_change_nothing():
    x = tensors(["table"], 200, 200, batch=1, dim=3)
    for low, high in (CAUSAL, (None, None)):
        for exponent in (86.0, 92.0, 100.0):  # 1e-37 .. 1e-44; float32 has full precision down to 1e-38
            x["table"] = torch.where((torch.arange(399) - 199).abs() < 30, 0.0, -exponent).expand(2, -1).double()
            compare(narrowed(x), 1e-5, low=low, high=high)


# ---- what is not finite ------------------------------------------------------------------------------------------------
def right_where_finite(x, name, value, tolerance, **options):
    """With `value` in the middle of the tensor of that name: what is finite is what the written pairs say."""
    x = {other: t.clone() for other, t in x.items()}
    if name in x:
        axis = 1 if name in KINDS else 2  # of diagonals or tokens
        x[name][(0,) * axis + (x[name].shape[axis] // 2,)] = value

    def spoil(grads, results):  # of a loss that reads what is not finite
        grads = {n: g * results[n].detach() for n, g in grads.items()}
        if name in grads:
            grads[name][0, 0, grads[name].shape[2] - 9] = value
        return grads

    got = answer(ours, x, spoil=spoil, **options)
    want = answer(dense, {other: t.double() for other, t in x.items()}, spoil=spoil, **options)
    for n, t in got.items():
        finite, where = t.isfinite(), f"{n}, with {value} in {name}"
        assert want[n][finite].isfinite().all(), f"{where}, is finite: {t[finite & ~want[n].isfinite()][0]}"
        largest = want[n][finite].abs().max().clamp(min=1) if finite.any() else 1.0
        assert (t[finite] - want[n][finite]).abs().le(tolerance * largest).all(), where


@pytest.mark.one_in(4)
@pytest.mark.parametrize("value", VALUES)
@pytest.mark.parametrize("kinds", EACH, **named)
def test_where_an_answer_is_finite_it_is_right(kinds, value):
    x = tensors(kinds, 75, 75, 50, batch=1, dim=2)
    for route in (nullcontext, by_tiles):
        for name in [*x, "out", "lse"]:
            with route():
                right_where_finite(x, name, value, 1e-10, near=50, low=0, high=None, scale=0.4)
                right_where_finite(narrowed(x), name, value, 1e-4, near=50, low=0, high=20, scale=0.4)


@pytest.mark.one_in(5)
@pytest.mark.parametrize("value", VALUES)
@pytest.mark.parametrize("kind", ["table", "levels"])
def test_far_keys_left_out_hide_nothing(kind, value):
    for queries, keys in ((300, 300), (131, 400)):
        x = steep(kind, queries, keys, 2000)
        x = {name: t[-1:] if name == "table" else t[:, -1:] for name, t in x.items()}  # the last head
        for name in [*x, "out", "lse"]:
            if (name, value) != ("table", -math.inf):  # tables are finite; -inf is how the kernel itself forbids
                with by_tiles():
                    right_where_finite(x, name, value, 1e-10, near=0, low=0, high=None, scale=0.4)
