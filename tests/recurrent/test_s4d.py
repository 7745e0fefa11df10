"""S4D: published numbers, the convolution that it is, and initial values."""

import math

import pytest
import torch

import longitude as lg
from longitude.recurrent import S4D
from tests.support import random, refused_calls

s4d = lg.recurrent.s4d
MODES = ["recurrent", "parallel", "chunked"]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    ("n", "kernel"), [(0, [0.1950823, 0.1855680, 0.1765178]), (1, [0.1919289, 0.1647732, 0.1244672])]
)
def test_published_kernel(form, mode, n, kernel):
    """Delta 0.1, C 1, A = -1/2 + i pi n."""
    u, A = torch.tensor([[[1.0, 0, 0]]]).double(), torch.tensor([[-0.5 + 1j * math.pi * n]], dtype=torch.complex128)
    y, _ = s4d(u, torch.tensor([math.log(0.1)]).double(), A, torch.ones_like(A), mode=mode, chunk_size=2)
    assert y.flatten().tolist() == pytest.approx(kernel, abs=5e-8)


@pytest.mark.one_in(5)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("A", [0, 1e-9j, 1e-6, -1e-6 + 1e-6j, 3j, -0.5], ids=str)
def test_states_that_hardly_decay(form, mode, A):
    """No real part, dt A next to nothing, and nothing at all: a sum of dt u. Float32 as exact as float64."""
    u = torch.randn(1, 1, 40)
    log_dt = torch.tensor([math.log(1e-3)])
    given = [u, log_dt, torch.full((1, 1), A, dtype=torch.complex64), torch.ones(1, 1, dtype=torch.complex64)]
    given = [x.requires_grad_() for x in given]
    wide = [x.detach().to(torch.promote_types(x.dtype, torch.float64)).requires_grad_() for x in given]
    y, _ = s4d(*given, mode=mode)
    want, _ = s4d(*wide, mode="recurrent")
    torch.testing.assert_close(y, want.float(), rtol=1e-4, atol=1e-6)
    if A == 0:
        torch.testing.assert_close(want, 2 * 1e-3 * wide[0].cumsum(2), rtol=1e-6, atol=1e-9)
    for a, b in zip(torch.autograd.grad(y.sum(), given), torch.autograd.grad(want.sum(), wide), strict=True):
        torch.testing.assert_close(a, b.to(a.dtype), rtol=1e-3, atol=1e-6)


def changed(**change):
    complexes = torch.complex(*random(2, 3, 4))
    names = {"u": random(2, 3, 9), "log_dt": random(3), "A": complexes, "C": complexes}
    return lambda: s4d(**{**names, **change})


test_refusals = refused_calls(
    [
        (changed(log_dt=torch.zeros(4)), "log_dt", "[H]", "[2, 3, 9]", "[4]"),
        (changed(A=torch.zeros(3, 4)), "s4d", "[3, N/2]"),
        (changed(D=torch.zeros(3, 1)), "[H]", "[2, 3, 9]", "log_dt", "[3]"),
    ]
)


def test_initial_values_are_the_published():
    lin = S4D(4, state_size=8)
    assert lin.A_imag[0].tolist() == pytest.approx([0, math.pi, 2 * math.pi, 3 * math.pi])
    assert lin.log_A_real.exp().eq(0.5).all() and lin.log_dt.exp().min() >= 1e-3 and lin.log_dt.exp().max() <= 0.1
