"""Every formula of the page against the class that runs, in Chromium, at random parameters."""

import random

import numpy as np
import pytest
import torch

from longitude.positions.bias import ALiBi

pytestmark = [pytest.mark.slow, pytest.mark.browser]
close = {"rtol": 1e-6, "atol": 1e-6}
"""Of a formula and its class, of whichever is wider."""


@pytest.fixture
def draws():
    return random.Random(0)


def test_slopes_and_bias_of_alibi(opened, draws):
    page = opened()
    for heads in range(1, 65):
        offset = draws.randrange(-(2**20), 2**20)
        theirs = -ALiBi(heads).bias_at(offset).numpy()
        ours = page.evaluate("([heads, offset]) => alibiSlopes(heads).map((m) => -alibi(m, offset))", [heads, offset])
        np.testing.assert_allclose(ours, theirs, **close)
    assert torch.equal(torch.tensor(page.evaluate("alibiSlopes(8)")), 2.0 ** -torch.arange(1, 9))
