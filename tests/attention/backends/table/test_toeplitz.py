"""The Toeplitz kernel against every pair written out: out, lse and all gradients; what it holds."""

import math
from itertools import combinations

import pytest
import torch
import torch.nn.functional as F

import longitude as lg
from longitude.attention.backends.operators import Inputs
from longitude.attention.backends.table import backend as toeplitz
from longitude.attention.backends.table.band import Limits, Terms
from tests.attention.backends.table.written_out import (
    CAUSAL,
    EACH,
    KINDS,
    compare,
    distance,
    named,
    narrowed,
    ours,
    tensors,
)
from tests.support import close, needs_c, random

pytestmark = needs_c
BANDS = {"causal": CAUSAL, "all": (None, None), "window": (0, 39), "own": (0, 0), "sides": (-3, 70), "past": (5, 90)}
SETS = [kinds for count in range(5) for kinds in combinations(KINDS, count)]


SHAPES = [
    (1, 1, 0), (9, 9, 4), (70, 65, 20), (131, 131, 90), (65, 120, 70), (1, 300, 280), (3, 131, 0)
]  # fmt: skip
HEADS = [(2, 2), (4, 2), (4, 1), (6, 3)]
LONG = [(333, 333, 250), (700, 431, 330), (431, 699, 600), (697, 697, 681)]


@pytest.mark.one_in(27)
@pytest.mark.parametrize("band", BANDS)
@pytest.mark.parametrize("kinds", SETS, **named)
def test_equals_every_pair_written_out(kinds, band):
    for n, (queries, keys, near) in enumerate(SHAPES):
        heads, kv_heads = HEADS[n % 4]
        sizes = {"batch": 1 + n % 3, "heads": heads, "kv_heads": kv_heads, "shared": n % 2 == 1, "spare": n % 5}
        sizes["value_dim"] = (4, 3, 21)[n % 3]
        compare(tensors(kinds, queries, keys, near, **sizes), near=near, low=BANDS[band][0], high=BANDS[band][1])


@pytest.mark.slow
@pytest.mark.parametrize("kinds", EACH, **named)
def test_far_keys_many_tiles_and_the_edges_of_windows(kinds):
    for queries, keys, near in LONG:
        for low, high in (CAUSAL, (-20, 299)):
            x = tensors(kinds, queries, keys, near, batch=1, heads=1, kv_heads=1, dim=3)
            compare(x, near=near, low=low, high=high)
            compare(narrowed(x), 1e-5, near=near, low=low, high=high)


@pytest.mark.parametrize("near", [0, 280], ids="vectors from {} on".format)
def test_weights_by_diagonal_follow_a_highest_score_that_rises(near):
    """Keys come nearest first, and the far ones have the highest scores: sums that began with the near ones are scaled again."""
    x = tensors(["value_vectors"], 170, 170, near, value_dim=7)
    x["k"] = x["k"] + torch.linspace(600, 0, 170)[:, None] * torch.tensor([0.25, 0, 0, 0])
    x["q"][..., 0] = x["q"][..., 0].abs()
    compare(x, near=near, low=None)
    compare(x, near=near)


@pytest.mark.parametrize("kind", ["key_vectors", "table"])
def test_what_only_its_bias_makes_high_is_not_left_out(kind):
    """A query's own key scores 2250, the farthest 3000: by queries and keys alone, near 0, none but the own would count."""
    x = tensors([kind], 170, 170)
    high = torch.linspace(3000, 1500, 339, dtype=torch.float64)
    x["k"] *= 1e-3
    x["q"][..., 0] = 2.0
    own = torch.tensor([1 / (0.4 * 2.0), 0, 0, 0], dtype=torch.float64)
    x[kind] = (high if kind == "table" else high[:, None] * own).expand_as(x[kind]).clone()
    compare(x, scale=0.4)


def test_each_result_alone_has_gradients():
    x = tensors(KINDS, 70, 90, 40)
    assert compare(x, near=40, through=["out"])["dq_level"].abs().max() < 1e-12  # the weights of a row sum to one
    got = compare(x, near=40, through=["lse"])
    assert (got["dv"] == 0).all() and (got["dvalue_vectors"] == 0).all() and (got["dk"] != 0).all()


EMPTY = [
    (90, 30, CAUSAL, slice(0, 60)), (200, 65, (0, 9), slice(0, 135)), (30, 30, (5, 9), slice(0, 5)),
    (200, 200, (None, -100), slice(100, 200)), (70, 70, (3, 2), slice(0, 70)), (70, 70, (500, None), slice(0, 70)),
]  # fmt: skip
"""Queries, keys, the band, and the queries that it leaves without keys."""


@pytest.mark.parametrize("kinds", EACH, **named)
def test_rows_without_keys(kinds):
    for queries, keys, (low, high), empty in EMPTY:
        near = min(20, keys - 1)
        got = compare(tensors(kinds, queries, keys, near), near=near, low=low, high=high)
        assert (got["out"][:, :, empty] == 0).all() and (got["lse"][:, :, empty] == -math.inf).all()
        assert all((got[name][:, :, empty] == 0).all() for name in ("dq", "dq_level") if name in got)
        assert all(t.isfinite().all() for name, t in got.items() if name != "lse")


def test_large_levels_of_small_differences_are_precise():
    """100000 has steps of 0.008 in float32: differences are taken before levels are narrowed."""
    x = tensors(["levels"], 300, 300, batch=1)
    x["k_level"] = 1e5 - (x["k_level"].abs() * 1e-3).cumsum(-1)
    x["q_level"] = x["k_level"] + 1e-3
    x = narrowed(x)
    bare = compare({name: x[name] for name in "qkv"}, 1e-5)
    assert distance(compare(x, 1e-5)["out"], bare["out"].double()) > 1e-3  # the differences do count


# ---- as operators of torch: signatures, and how much they compute and hold -------------------------------------------------
@pytest.mark.slow
@pytest.mark.parametrize(("kinds", "learned"), [(KINDS, True), (["table"], False)], ids=["all", "a fixed table"])
def test_opcheck(kinds, learned):
    near = 3 if learned else 0
    x = tensors(kinds, 9, 12, near)
    terms = Terms(**{name: x.get(name) for name in Terms._fields} | {"table": F.pad(x["table"], (near, 0))})
    x = Inputs(x["q"], x["k"], x["v"], terms, Limits(None, near, None, 5), 0.3)
    leaves = [
        t.clone().requires_grad_(learned or n != 3) if isinstance(t, torch.Tensor) else t
        for n, t in enumerate(toeplitz.OPERATORS.flat(x))
    ]
    torch.library.opcheck(toeplitz.OPERATORS.forward, leaves)
    out, lse, ends = toeplitz.OPERATORS.forward(*toeplitz.OPERATORS.flat(x))
    grad_lse = torch.ones_like(lse) if learned else None
    arguments = torch.ones_like(out), grad_lse, out, ends, learned, *toeplitz.OPERATORS.flat(x)
    torch.library.opcheck(toeplitz.OPERATORS.backward, arguments)


# ---- keys that cannot count are left out, and no other; what is not finite is never hidden by that -------------------
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


@pytest.mark.slow
@pytest.mark.parametrize("size", [1, 30], ids=["", "queries and keys 30 times as long"])
@pytest.mark.parametrize("times", [1, 20, 300])
@pytest.mark.parametrize("kind", ["table", "levels"])
def test_steep_tables_and_strong_forgetting(kind, times, size):
    """Far keys count where queries and keys are long, or where the band does not show a query its own key."""
    for queries, keys in ((300, 300), (131, 400)):
        x = steep(kind, queries, keys, times)
        x = x | {name: size * x[name] for name in "qk"}
        for low, high in (CAUSAL, (0, 99), (20, None), (None, None)):
            compare(x, low=low, high=high)
        largest = 0.4 * x["q"].norm(dim=-1).max() * x["k"].norm(dim=-1).max()
        if kind == "levels":
            largest += (x["k_level"][:, :, :-128] - x["k_level"][:, :, 128:]).max()
        compare(narrowed(x), tolerance=1e-5 + 2.0**-22 * float(largest))


def test_denormal_weights_change_nothing():
    x = tensors(["table"], 70, 70, batch=1, dim=3)
    for low, high in (CAUSAL, (None, None)):
        for exponent in (86.0, 92.0, 100.0):  # 1e-37 .. 1e-44; float32 has full precision down to 1e-38
            x["table"] = torch.where((torch.arange(139) - 69).abs() < 20, 0.0, -exponent).expand(2, -1).double()
            compare(narrowed(x), 1e-5, low=low, high=high)


@pytest.mark.parametrize("value", [1e6, 1e20, math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("name", ["k", "v"])
def test_keys_that_no_query_may_see(name, value):
    """On both sides of a window, whatever they are: not a bit of another row, whose loops never read those keys."""
    x = tensors(["table"], 300, 300, batch=1, kv_heads=1, dim=24)
    x = narrowed(x | {"table": torch.tensor([[-0.1], [-0.3]]) * (299 - torch.arange(599)).clamp(min=0)})
    spoiled = x | {name: x[name].clone()}
    spoiled[name][:, :, :50] = spoiled[name][:, :, 200:] = value
    found = (ours(y, near=0, low=0, high=39, scale=0.3) for y in (x, spoiled))
    close(
        *([out[:, :, 96:192] for out in outs] for outs in found), atol=0
    )  # blocks that end before the first one spoiled


class SharedBias(lg.Encoding):
    """One learned slope for all heads, as a bias [1, ...]."""

    def __init__(self) -> None:
        super().__init__()
        self.slope = torch.nn.Parameter(torch.tensor(-0.3, dtype=torch.float64))

    def terms(self, context):
        return (lg.terms.OffsetBias(lambda offset: self.slope * offset.abs()[None]),)


@pytest.mark.parametrize("queries", [1, 7])
def test_a_bias_that_heads_share(queries):
    encoding, (q, k, v) = SharedBias(), (random(2, heads, 9, 5) for heads in (4, 2, 2))
    inputs = [q[:, :, -queries:].requires_grad_(), k.requires_grad_(), v.requires_grad_()]
    outs = [lg.attend(*inputs, encoding=encoding, backend=backend) for backend in ("table", "reference")]
    grads = [torch.autograd.grad(out.square().sum(), [*inputs, encoding.slope]) for out in outs]
    close((outs[0], *grads[0]), (outs[1], *grads[1]))
    with torch.no_grad():
        close(lg.attend(*inputs, encoding=encoding, backend="table"), outs[1])
