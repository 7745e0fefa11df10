"""FIRE's network as a piecewise linear function: equal to the network itself, in values and in gradients of every order."""

import pytest
import torch
from torch.autograd import gradcheck, gradgradcheck

import longitude as lg
from longitude.positions import bias, piecewise
from longitude.positions.piecewise import PiecewiseBias, by_formula, functions, pieces_of
from tests.support import close

needs_compiler = pytest.mark.skipif(functions(torch.float64) is None, reason="no C compiler here")
AT = torch.arange
PLACES = {
    "a block of queries": (AT(5, 42)[:, None], AT(37)[None]),
    "keys in the future": (AT(3)[:, None], AT(61)[None]),
    "several rows": (
        torch.tensor([[0, 9, 31], [2, 2, 50]])[:, :, None],
        torch.tensor([[4, 4, 1], [7, 0, 60]])[:, None],
    ),
    "one row of keys": (torch.tensor([[0, 9], [2, 50]])[:, :, None], torch.tensor([[4, 1, 1, 70]])[:, None]),
    "below zero": (torch.tensor([-7, 3])[:, None], torch.tensor([-20, -3, 5])[None]),
}


def fire(dtype: torch.dtype) -> lg.Fire:
    """With units that rise, fall, bend at 0, and do not bend at all."""
    torch.manual_seed(0)
    made = lg.Fire(3, width=11, threshold=9.0).to(dtype)
    first = made.mlp[0]
    with torch.no_grad():
        first.weight[:4, 0] = torch.tensor([0.0, 0.0, 1.0, -1.0])
        first.bias[:4] = torch.tensor([0.5, -0.5, 0.0, 0.0])
    return made


@needs_compiler
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("name", PLACES)
def test_equals_the_network(name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    made, (i, j) = fire(dtype), PLACES[name]
    found = []
    for of in (bias.tabulated, lambda *_: None):
        monkeypatch.setattr(bias, "tabulated", of)
        (term,) = made.terms({})
        scores = term.at(i, j)
        weight = torch.randn(scores.shape, generator=torch.Generator().manual_seed(1), dtype=dtype)
        found.append((scores, *torch.autograd.grad(scores, [*made.parameters()], weight)))
    last = found[0][0].grad_fn
    assert "PiecewiseBiasBackward" in (f.name() for f in (last, *(f for f, _ in last.next_functions)) if f)
    for got, want in zip(*found, strict=True):
        torch.testing.assert_close(got, want, atol=1e-12 if dtype == torch.float64 else 2e-5, rtol=1e-5)


def test_pieces_are_the_network() -> None:
    made, t = fire(torch.float64), torch.linspace(-0.5, 1.5, 400, dtype=torch.float64)
    ends, slope, level = pieces_of(*made.mlp.parameters())
    piece = torch.searchsorted(ends, t)
    close((slope[:, piece] * t + level[:, piece]).mT, made.mlp(t[:, None]))


@needs_compiler
def test_gradients_of_every_order() -> None:
    i, j = PLACES["several rows"]
    ends = torch.tensor([0.2, 0.6], dtype=torch.float64)
    psi, under = torch.rand(61, dtype=torch.float64), 1 + torch.rand(2, 3, dtype=torch.float64)
    slope, level = torch.randn(2, 2, 3, dtype=torch.float64)
    inputs = [x.requires_grad_() for x in (psi, under, slope, level)]

    def of(psi: torch.Tensor, under: torch.Tensor, slope: torch.Tensor, level: torch.Tensor) -> torch.Tensor:
        return PiecewiseBias.apply(i[..., 0], j[:, 0], psi, under, ends, slope, level)

    close(of(*inputs), by_formula(i[..., 0], j[:, 0], psi, under, ends, slope, level))
    assert gradcheck(of, inputs)
    assert gradgradcheck(of, inputs)


def shares(made: lg.Fire, i: torch.Tensor, j: torch.Tensor) -> torch.Tensor:
    """The network's argument, by the paper."""
    floor = (made.multiplier * made.threshold).abs()
    return ((made.c * (i - j)).abs() + 1).log() / (((made.c * i.clamp(min=floor)).abs() + 1).log() + made.eps)


@needs_compiler
def test_what_goes_through_the_network(monkeypatch: pytest.MonkeyPatch) -> None:
    """Distances without a table of their size, tracers, transforms: as before."""
    made = fire(torch.float64)
    monkeypatch.setattr(piecewise, "SPARE_DISTANCES", 10)
    monkeypatch.setattr(piecewise.PiecewiseBias, "apply", None)
    (term,) = made.terms({})
    far = term.at(torch.tensor([[10**6]]), torch.tensor([[0, 5]]))
    assert far.shape == (3, 1, 2)
    rows = torch.func.vmap(lambda i: term.at(i[:, None], AT(3)[None]))(AT(8).view(4, 2))
    close(rows[1], made.mlp(shares(made, AT(2, 4)[:, None], AT(3)[None])[..., None]).movedim(-1, 0))
