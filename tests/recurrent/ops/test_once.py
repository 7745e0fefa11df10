"""Gradients of gradients, and torch.func: where a loop in C has no rule, torch's operators or a refusal, never another number."""

import pytest
import torch

from longitude.recurrent import gated_delta_rule, rwkv4, rwkv7, s4d, selective_scan
from tests.support import close, random


def _formulas():
    """Name -> (function of one float64 tensor and a mode, that tensor): every function that may run in C."""
    q, k, v, kappa, a = (random(1, 2, 9, 4, seed=n) for n in range(5))
    g, beta = -random(1, 2, 9, 4, seed=5).abs(), random(1, 2, 9, seed=6).sigmoid()
    u, delta, A = random(1, 3, 9, seed=7), random(1, 3, 9, seed=8), -random(3, 2, seed=9).abs()
    B, C = random(1, 2, 9, seed=10), random(1, 2, 9, seed=11)
    decay, first = random(3, seed=12), random(3, seed=13)
    rows = random(1, 9, 3, seed=14)
    A_, C_ = (torch.complex(-random(3, 2, seed=n).abs(), random(3, 2, seed=n + 1)) for n in (15, 17))
    return {
        "gated_delta_rule": (
            lambda x, mode: gated_delta_rule(q, x, v, g, beta * x.mean().sigmoid(), mode=mode)[0],
            k / 2,
        ),
        "rwkv7": (lambda x, mode: rwkv7(q, g, x, v, kappa, x * a, mode=mode)[0], k / 4),
        "selective_scan": (lambda x, mode: selective_scan(x, delta * x, A, B, C, mode=mode)[0], u),
        "rwkv4": (lambda x, mode: rwkv4(decay, first, x, x.sin(), mode=mode)[0], rows),
        "s4d": (lambda x, mode: s4d(x * x.sum(), decay, A_, C_, mode=mode)[0], u),
    }


def refuses(first: torch.Tensor, leaf: torch.Tensor) -> bool:
    """Whether the loop ran, and says that it has no more."""
    try:
        torch.autograd.grad(first.sum(), leaf, retain_graph=True)
    except RuntimeError as error:
        return "no derivatives of second order" in str(error)
    return False


@pytest.mark.parametrize("name", _formulas())
def test_derivatives_of_second_order_are_right_or_refused(name, form):
    """Never another number: the loop's gradients are only a part of what leads from the result to an input."""
    function, x = _formulas()[name]
    found = {}
    for mode in ("recurrent", "chunked"):
        leaf = x.clone().requires_grad_()
        [first] = torch.autograd.grad(function(leaf, mode).square().sum(), leaf, create_graph=True)
        if mode == "chunked" and refuses(first, leaf):
            continue
        [found[mode]] = torch.autograd.grad(first.sin().sum(), leaf)
    assert "recurrent" in found
    if "chunked" in found:
        close(found["chunked"], found["recurrent"], 1e-7, rtol=1e-10)
