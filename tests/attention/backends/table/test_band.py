"""The loop in C, where it could differ from the tiles: processors, threads, what is left out, what must not be read as memory."""

import math
import platform

import pytest
import torch
import torch.autograd.forward_ad as forward_ad
from torch.testing._internal.two_tensor import TwoTensor

import longitude as lg
from longitude.attention.backends.table import band
from longitude.attention.backends.table.backend import toeplitz_attention
from tests.support import close, random

pytestmark = pytest.mark.skipif(band.functions(torch.float64) is None, reason="no C compiler here")
WIDTHS = [(), *([("-mno-avx512f",), ("-mno-avx",)] if platform.machine() == "x86_64" else [])]


def problem(length: int, dtype: torch.dtype, heads: int = 2, kv_heads: int = 1, dim: int = 24, slopes=(0.1, 0.3)):
    """q, k, v, a table and gradients of out and lse."""
    counts = heads, kv_heads, kv_heads, heads
    q, k, v, grad = (random(1, h, length, dim, seed=n, dtype=dtype) for n, h in enumerate(counts))
    steps = (length - 1 - torch.arange(2 * length - 1)).clamp(min=0)
    table = (-torch.tensor(slopes, dtype=torch.float64)[:, None] * steps).to(dtype)
    return [x.requires_grad_() for x in (q, k, v, table)], (grad, random(1, heads, length, seed=9, dtype=dtype))


def answer(inputs, grads, **options) -> list[torch.Tensor]:
    both = toeplitz_attention(*inputs, **{"low": 0, "scale": 0.3, **options})
    return [x.detach() for x in both] + list(torch.autograd.grad(both, inputs, grads))


@pytest.fixture
def tiles(monkeypatch: pytest.MonkeyPatch):
    """The same by torch's operators."""

    def run(*arguments, **options):
        with monkeypatch.context() as context:
            context.setattr(band, "functions", lambda dtype: None)
            return answer(*arguments, **options)

    return run


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("options", WIDTHS, ids=" ".join)
@pytest.mark.parametrize(("length", "dim"), [(5, 3), (67, 24), (130, 80)])
def test_every_width_of_vectors(options, dtype, length, dim, tiles, monkeypatch):
    inputs, grads = problem(length, dtype, dim=dim)
    exact, exact_grads = problem(length, torch.float64, dim=dim)
    few = band.functions(dtype, *options)
    assert few is not None
    monkeypatch.setattr(band, "functions", lambda dtype: few)
    ours, tolerance = answer(inputs, grads), 1e-10 if dtype == torch.float64 else 2e-4
    for x, y in zip(ours, tiles(exact, exact_grads), strict=True):
        close(x.double(), y, tolerance, tolerance)
    with torch.no_grad():
        q, *others = (x.detach() for x in inputs)
        last = toeplitz_attention(q[:, :, -2:], *others[:2], others[2][:, : length + 1], low=0, scale=0.3)
    for x, y in zip(last, ours):
        close(x, y[:, :, -2:], tolerance, tolerance)


@pytest.mark.parametrize("spans", [None, [(0, 0, 50, 0, 60), (0, 60, 130, 60, 130)]], ids=["whole", "spans"])
@pytest.mark.parametrize("threads", [1, 3, 8])
def test_more_threads_than_heads(threads, spans, tiles):
    """Blocks of queries and spans are then shared out, and what they add up is added in the same order every time, whichever
    thread took it: the same bits."""
    inputs, grads = problem(130, torch.float64, heads=2, kv_heads=1)
    options = {} if spans is None else {"spans": torch.tensor(spans)}
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        ours, again = answer(inputs, grads, **options), answer(inputs, grads, **options)
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(x, y) for x, y in zip(ours, again, strict=True))
    if spans is None:
        theirs = tiles(inputs, grads)
    else:
        theirs = [torch.zeros_like(x) for x in ours]
        theirs[1].fill_(-math.inf)
        q, k, v, table = (x.detach() for x in inputs)
        for _, a, z, b, e in spans:
            part = [q[:, :, a:z], k[:, :, b:e], v[:, :, b:e], table[:, 130 - z + b : 130 - a + e - 1]]
            low = e - b - (z - a) - (b - a)  # causality by order in the whole
            own = tiles([x.clone().requires_grad_() for x in part], [g[:, :, a:z] for g in grads], low=low)
            places = (slice(a, z), slice(a, z), slice(a, z), slice(b, e), slice(b, e))
            for whole, one, place in zip(theirs, own, places):
                whole[:, :, place] = one
            theirs[5][:, 130 - z + b : 130 - a + e - 1] += own[5]
    for x, y in zip(ours, theirs, strict=True):
        close(x, y, 1e-10, 1e-10)


@pytest.mark.parametrize("times", [1, 8])
@pytest.mark.parametrize("slopes", [(0.25, 0.3), (0.5, 3.0), (100.0, 0.01)], ids=str)
def test_what_is_left_out_is_zero_to_the_last_bit(slopes, times, monkeypatch):
    """Values and gradients of very different lengths among them. The same bits, because the same loops add exact zeros or
    nothing; the two builds differ in one constant."""
    inputs, grads = problem(640, torch.float32, slopes=slopes)
    with torch.no_grad():
        for x in inputs[:2]:
            x.mul_(times**0.5)
        inputs[2][:, :, 64:] *= 1e-15
        inputs[2][:, :, 300:] *= 1e25
        grads[0][:, :, :320] *= 1e-20
    ours = answer(inputs, grads)
    everything = band.functions(torch.float32, "-DNEGLIGIBLE=1e30f")
    assert everything is not None
    monkeypatch.setattr(band, "functions", lambda dtype: everything)
    assert all(torch.equal(x, y) for x, y in zip(ours, answer(inputs, grads), strict=True))


@pytest.mark.parametrize(
    ("value", "compiler"), [(x, True) for x in (1e20, math.inf, -math.inf, math.nan)] + [(1e6, False)]
)
@pytest.mark.parametrize("name", ["k", "v"])
def test_keys_that_no_query_may_see(name, value, compiler, monkeypatch):
    """On both sides of a window, whatever they are: not a bit of another row, whose loops never read those keys.

    Tiles decide by the longest key of all what they may leave out.
    """
    if not compiler:
        monkeypatch.setattr(band, "functions", lambda dtype: None)
    inputs, _ = problem(300, torch.float32 if compiler else torch.float64)
    q, k, v, table = (x.detach() for x in inputs)
    spoiled = {"k": k.clone(), "v": v.clone()}
    spoiled[name][:, :, 200:] = value
    spoiled[name][:, :, :50] = value
    pairs = ((k, v), spoiled.values())
    clean, other = (toeplitz_attention(q, *pair, table, low=0, high=39, scale=0.3) for pair in pairs)
    for x, y in zip(clean, other, strict=True):  # rows: blocks of queries that end before the first
        close(x[:, :, 96:192], y[:, :, 96:192], atol=0 if compiler else 1e-12)


def test_a_nan_of_a_table_reaches_its_rows():
    inputs, _ = problem(640, torch.float32, slopes=(0.25, 0.3))
    q, k, v, table = (x.detach().clone() for x in inputs)
    table[0, 20] = math.nan
    out, lse = toeplitz_attention(q, k, v, table, low=0, scale=0.3)
    meets = torch.zeros(2, 640, dtype=torch.bool)
    meets[0, 619:] = True
    assert torch.equal(out[0].isnan().any(-1), meets) and torch.equal(lse[0].isnan(), meets)


def test_rows_whose_scores_are_all_minus_infinity():
    q, k, v = torch.ones(1, 1, 9, 4), torch.ones(1, 1, 9, 4), torch.randn(1, 1, 9, 4)
    k[..., 0] = -math.inf
    for some in (q, q[:, :, -1:]):
        out, lse = toeplitz_attention(some, k, v, low=0, scale=1.0)
        assert out.isnan().all() and lse.isnan().all()


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")  # torch's own
def test_memory_that_is_not_plain():
    """Views that negate, subclasses, transforms: the operator handles them, with and without gradients."""
    q, k, v = (random(1, 2, 9, 8, seed=n) for n in range(3))
    alibi = lg.ALiBi(2)
    want = lg.attend(-q, k, v, encoding=alibi)
    with torch.no_grad():
        close(lg.attend(torch._neg_view(q), k, v, encoding=alibi, backend="table"), want)
        twice = lg.attend(*(TwoTensor(x, x.clone()) for x in (-q, k, v)), encoding=alibi, backend="table")
        close(twice.a, want)
        rows = torch.func.vmap(lambda x: lg.attend(x[None], k, v, encoding=alibi, backend="reference")[0])(-q)
        close(rows, want)


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")  # torch's own
def test_forward_mode_takes_another_backend():
    q, k, v, tangent = (torch.randn(1, 2, 5, 8, dtype=torch.float64) for _ in range(4))
    alibi = lg.ALiBi(2)
    want = torch.func.jvp(lambda x: lg.attend(x, k, v, encoding=alibi, backend="reference"), (q,), (tangent,))[1]
    close(torch.func.jvp(lambda x: lg.attend(x, k, v, encoding=alibi), (q,), (tangent,))[1], want)
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(q, tangent)
        got = forward_ad.unpack_dual(lg.attend(dual, k, v, encoding=alibi)).tangent
        close(got, want)
        with pytest.raises(ValueError, match="forward mode"):
            lg.attend(dual, k, v, encoding=alibi, backend="table")
