"""Recurrences with a loop in C, and the same without it; what forms and layers are compared by."""

import sys

import pytest
import torch
from transformers import DynamicCache

from longitude.models.stock_caches import cache_name
from tests.support import close, random


@pytest.fixture
def in_torch(monkeypatch):
    """in_torch() -> torch's operators in place of the loops in C."""

    def change() -> None:
        for module in ("mamba", "rwkv4", "s4d", "ops.delta"):
            monkeypatch.setattr(sys.modules[f"longitude.recurrent.{module}"], "usable", lambda *_: False)

    return change


@pytest.fixture(params=["C", "torch"])
def form(request, in_torch) -> str:
    """The loop in C where it can be compiled, and torch's operators."""
    if request.param == "torch":
        in_torch()
    return request.param


def every_form_is(written_out, function, given) -> None:
    """In float64: what `function` gives in each form and chunk, and the gradients of all that is given."""
    given = [x.detach().requires_grad_() for x in given]
    want = written_out(*given)
    directions = [random(*x.shape, seed=9) for x in want]

    def gradients(outs):
        return torch.autograd.grad(outs, given, directions, allow_unused=True, materialize_grads=True)

    wanted = gradients(want)
    for mode, size in (("recurrent", 1), ("parallel", 1), ("chunked", 1), ("chunked", 5), ("chunked", 64)):
        got = function(*given, mode=mode, chunk_size=size)
        close([*got, *gradients(got)], [*want, *wanted], 1e-11)


def same_layer(ours, theirs, config, weights=dict) -> None:
    """Outputs, gradients, and decoding with a cache; `weights`: ours by name, of theirs."""
    ours.load_state_dict(weights(theirs.state_dict()))
    x = torch.randn(2, 37, 32, requires_grad=True)
    got, want = ours(x), theirs(x)
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
    of_x = []
    for out in (got, want):
        out.square().mean().backward()
        of_x, x.grad = [*of_x, x.grad], None
    torch.testing.assert_close(*of_x, rtol=1e-3, atol=1e-5)
    wanted = weights({name: parameter.grad for name, parameter in theirs.named_parameters()})
    for name, parameter in ours.named_parameters():
        near = 1e-5 * float(wanted[name].abs().max() + 1)
        torch.testing.assert_close(parameter.grad, wanted[name], rtol=1e-3, atol=near)
    with torch.no_grad():
        cache, mine = DynamicCache(config=config), ours.cache_layer()
        for part in (x[:, :20], *x[:, 20:30].split(1, 1)):
            out = theirs(part, **{cache_name(theirs): cache})
            torch.testing.assert_close(ours(part, cache=mine), out, rtol=1e-4, atol=1e-5)
