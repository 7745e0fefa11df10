"""Mistakes of texts as methods of a study, which are nowhere in the package."""

from dataclasses import replace

import pytest
import torch

from claims.protocol import MISTAKES
from longitude import plugins
from longitude.study.schemes import extended, reader_of
from longitude.study.train import build_model
from tests.study.conftest import TINY

plugins.load(MISTAKES)
TOKENS = torch.randint(0, 256, (2, 48), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("label", ["rope", "sinusoidal", "learned"])
def test_rounded_positions_are_those_of_training(label):
    """Neighbours share one: at twice the length tokens 2i and 2i + 1 stand at position i."""
    model = build_model(TINY, label, 0).eval()
    losses = reader_of(model, "linear-floor", 16, 32).losses(TOKENS[:, :33], 0)
    positions = torch.arange(32) // 2
    with torch.no_grad():
        expected = model(TOKENS[:, :32], position_ids=positions.expand(2, -1)).logits.log_softmax(-1)
    torch.testing.assert_close(losses, -expected.gather(-1, TOKENS[:, 1:33, None])[..., 0])
    if label != "learned":
        interpolated = extended(model, "linear", 16, 32)
        assert (losses - reader_of(interpolated, "linear", 16, 32).losses(TOKENS[:, :33], 0)).abs().max() > 1e-3


def test_the_exponent_of_the_book():
    """Appendix on relative positions: base s^(2/(d-2)); d = 64, s = 5000/4096 gives 10,064.5 where 12,285.8 is right."""
    config = replace(TINY, hidden=128)
    model = build_model(config, "rope", 0)
    [of_book] = extended(model, "ntk-book", 4096, 5000).model.encodings
    assert of_book.scaling.base == pytest.approx(10_064.54, abs=0.01)
