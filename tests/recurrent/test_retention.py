"""Retention: its published numbers, its parallel formula, and positions."""

import pytest
import torch

from longitude.recurrent import Retention, retention
from longitude.recurrent.retention import log_gamma
from tests.support import refused

EXACT = torch.float64


@pytest.mark.parametrize("mode", ["chunked", "parallel", "recurrent"])
def test_golden(mode):
    """q = k = v = 1 in the first head, gamma = 0.96875: the sums of its powers, up to 32."""
    out, state = retention(*torch.ones(3, 1, 1, 4, 1, dtype=EXACT), mode=mode)
    wanted = torch.tensor([1, 1.96875, 2.907227, 3.816376], dtype=EXACT)
    torch.testing.assert_close(out.flatten(), wanted, rtol=0, atol=5e-7)
    assert float(state) == float(out[..., -1, 0])
    far, _ = retention(*torch.ones(3, 1, 1, 1000, 1, dtype=EXACT), mode=mode)
    torch.testing.assert_close(far[0, 0, -1, 0], torch.tensor(32.0, dtype=EXACT))


def test_decays_by_head():
    wanted = torch.tensor([0.96875, 0.984375, 0.9921875, 0.99609375], dtype=EXACT)
    torch.testing.assert_close(log_gamma(4, torch.device("cpu")).exp(), wanted)


def test_positions_count_by_their_distance_and_far_ones_stay_exact():
    torch.manual_seed(0)
    layer = Retention(16, 2, expand_v=1)
    x = torch.randn(1, 9, 16)
    assert layer.v_proj.out_features == 16
    near = layer(x)
    torch.testing.assert_close(near, layer(x, positions=131_072), rtol=1e-4, atol=1e-5)
    assert (near - layer(x, positions=torch.arange(0, 27, 3))).abs().max() > 1e-3
    with refused("[1, 9, 3]"):
        layer(x, positions=torch.zeros(1, 9, 3, dtype=torch.long))
