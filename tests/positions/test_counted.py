"""CoPE's counts in one pass equal the formula, in values and gradients of every order."""

import pytest
import torch
from torch.autograd import gradcheck, gradgradcheck

from longitude.positions.counted import CountedBias, by_formula, functions
from tests.support import close, random

pytestmark = pytest.mark.skipif(functions(torch.float64) is None, reason="no C compiler here")


def problem(columns: int, keys: int = 23) -> tuple[torch.Tensor, ...]:
    scores, logits = random(2, 3, 5, keys), random(2, 3, 5, columns, seed=1)
    allowed = torch.rand(5, keys, generator=torch.Generator().manual_seed(3)) < 0.8
    return scores.requires_grad_(), allowed.expand(scores.shape), logits.requires_grad_()


@pytest.mark.parametrize("columns", [1, 2, 5, 64])
def test_equals_the_formula(columns: int) -> None:
    """Counts that are full at once, somewhere, and never; counts that are whole; NaN."""
    scores, allowed, logits = problem(columns)
    weight = random(*scores.shape, seed=2)
    found = []
    for of in (CountedBias.apply, by_formula):
        bias = of(scores, allowed, logits)
        found.append((bias, *torch.autograd.grad(bias, (scores, logits), weight)))
    for got, want in zip(*found, strict=True):
        close(got, want, 1e-12)
    with torch.no_grad():
        for value in (50.0, -800.0, torch.nan, torch.inf, -torch.inf):
            odd = scores.clone()
            odd[..., 3::7] = value
            got, want = (of(odd, allowed, logits) for of in (CountedBias.apply, by_formula))
            right = want.isfinite()  # a NaN beyond a full count is not met here: the key that has it makes its row NaN
            close(got[right], want[right], 1e-12)


def test_gradients_of_every_order() -> None:
    scores, allowed, logits = problem(3, keys=6)
    of = lambda scores, logits: CountedBias.apply(scores, allowed, logits)  # noqa: E731
    assert gradcheck(of, (scores, logits))
    assert gradgradcheck(of, (scores, logits))
