"""FIRE's network is piecewise linear: its pieces equal the network itself."""

import torch

import longitude as lg
from longitude.positions.formulas import NormalizedOffset
from tests.support import close


def fire() -> lg.Fire:
    """With units that rise, fall, bend at 0, and do not bend at all."""
    torch.manual_seed(0)
    made = lg.Fire(3, width=11, threshold=9.0).double()
    first = made.mlp[0]
    with torch.no_grad():
        first.weight[:4, 0] = torch.tensor([0.0, 0.0, 1.0, -1.0])
        first.bias[:4] = torch.tensor([0.5, -0.5, 0.0, 0.0])
    return made


def test_pieces_are_the_network_with_its_gradients() -> None:
    made, t = fire(), torch.linspace(-0.5, 1.5, 400, dtype=torch.float64)
    (term,) = made.terms({})
    assert isinstance(term.at, NormalizedOffset)
    slope, level, ends = term.at.curves().unbind(1)
    assert torch.equal(ends, ends.sort(-1).values) and ends[:, -1].isposinf().all()
    piece = torch.searchsorted(ends[0].detach(), t)
    by_piece, network = (slope[:, piece] * t + level[:, piece]).mT, made.mlp(t[:, None])
    close(by_piece, network)
    weights = [*made.mlp.parameters()]
    for got, want in zip(*(torch.autograd.grad((x * x).sum(), weights) for x in (by_piece, network)), strict=True):
        close(got, want)


def test_a_bend_has_the_gradient_of_relu() -> None:
    """At t = 0 the rising and the falling unit that bend there are both inactive."""
    made = fire()
    (term,) = made.terms({})
    slope, _, ends = term.at.curves().unbind(1)
    t = torch.zeros(1, 1, dtype=torch.float64, requires_grad=True)
    (by_network,) = torch.autograd.grad(made.mlp(t).sum(), t)
    close(slope[:, torch.searchsorted(ends[0].detach(), t[0].detach())].sum(), by_network.sum())


def test_transforms_take_the_formula() -> None:
    made = fire()
    (term,) = made.terms({})
    rows = torch.func.vmap(lambda i: term.at(i[:, None], torch.arange(3)[None]))(torch.arange(8).view(4, 2))
    i, j = torch.arange(2, 4)[:, None], torch.arange(3)[None]
    floor = (made.multiplier * made.threshold).abs()
    share = ((made.c * (i - j)).abs() + 1).log() / (((made.c * i.clamp(min=floor)).abs() + 1).log() + made.eps)
    close(rows[1], made.mlp(share[..., None]).movedim(-1, 0))
