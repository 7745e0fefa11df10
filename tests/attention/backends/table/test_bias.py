"""Keys that cannot count are left out of the Toeplitz kernel, and no other; what is not finite is never hidden by that."""

import math

import pytest
import torch

import longitude as lg
from tests.attention.backends.table.written_out import CAUSAL, compare, narrowed, ours, tensors
from tests.support import close, needs_c, random

pytestmark = needs_c
VALUES = [math.nan, math.inf, -math.inf]


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


def sloped(length, slopes, dtype=torch.float32):
    """Two heads of a causal bias with these slopes, by name."""
    x = tensors(["table"], length, length, batch=1, kv_heads=1, dim=24)
    steps = (length - 1 - torch.arange(2 * length - 1)).clamp(min=0)
    return narrowed(x | {"table": -torch.tensor(slopes).double()[:, None] * steps}, dtype)


@pytest.mark.parametrize("value", [1e6, 1e20, *VALUES])
@pytest.mark.parametrize("name", ["k", "v"])
def test_keys_that_no_query_may_see(name, value):
    """On both sides of a window, whatever they are: not a bit of another row, whose loops never read those keys."""
    x = sloped(300, (0.1, 0.3), torch.float32)
    spoiled = x | {name: x[name].clone()}
    spoiled[name][:, :, :50] = spoiled[name][:, :, 200:] = value
    clean, other = (ours(y, near=0, low=0, high=39, scale=0.3) for y in (x, spoiled))
    for one, two in zip(clean, other, strict=True):  # rows: blocks of queries that end before the first
        close(one[:, :, 96:192], two[:, :, 96:192], atol=0)


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
    for got, exact in zip((outs[0], *grads[0]), (outs[1], *grads[1]), strict=True):
        close(got, exact)
    with torch.no_grad():
        close(lg.attend(*inputs, encoding=encoding, backend="table"), outs[1])
