"""Mamba-2: published numbers, and the layer against transformers'."""

import pytest
import torch
from transformers import Mamba2Config
from transformers.models.mamba2.modeling_mamba2 import Mamba2Mixer

from longitude.recurrent import Mamba2, ssd
from longitude.testing import fill
from tests.checkpoints.recurrent_models import GROUPED
from tests.recurrent.conftest import same_layer

EXACT = torch.float64


@pytest.mark.parametrize("mode", ["chunked", "parallel", "recurrent"])
def test_golden(mode):
    """e^(Delta A) = 1/2, B = C = 1, Delta x = 1, 2, 3."""
    one = torch.ones(1, 1, 3, 1, dtype=EXACT)
    x = torch.tensor([1.0, 2.0, 3.0], dtype=EXACT).view(1, 1, 3, 1)
    out, state = ssd(x, (one[..., 0] / 2).log(), one, one, mode=mode, chunk_size=2)
    torch.testing.assert_close(out.flatten(), torch.tensor([1, 2.5, 4.25], dtype=EXACT))
    assert state.shape == (1, 1, 1, 1) and float(state) == 4.25


@pytest.mark.parametrize("groups", [1, 2] if GROUPED else [1])
def test_mamba2_is_transformers(groups):
    """Weights go over by name."""
    config = Mamba2Config(
        num_heads=8, head_dim=8, hidden_size=32, state_size=6, n_groups=groups, num_hidden_layers=1, chunk_size=16,
        vocab_size=10,
    )  # fmt: skip
    ours = Mamba2(32, head_dim=8, state_size=6, groups=groups)
    same_layer(ours, fill(Mamba2Mixer(config, 0), std=0.2), config)


def test_initial_values():
    torch.manual_seed(0)
    layer = Mamba2(256)
    assert layer.num_heads == 8 and layer.state_size == 128
    step = torch.nn.functional.softplus(layer.dt_bias.detach())
    assert (step > 0.99e-3).all() and (step < 0.101).all() and step.std() > 0.005
    assert (layer.A_log.exp() >= 1).all() and (layer.A_log.exp() <= 16).all()
    assert (layer.D == 1).all()
