"""Retention: its published numbers, its parallel formula, and the layer around it."""

import pytest
import torch

from longitude.recurrent import Retention, retention
from longitude.recurrent.retention import log_gamma

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
    torch.testing.assert_close(log_gamma(4).exp(), wanted)
    q, k, v = torch.ones(3, 1, 2, 2, 1, dtype=EXACT)
    for decay in (torch.tensor([0.5, 1.0]), [0.5, 1.0]):
        out, _ = retention(q, k, v, decay=decay)
        torch.testing.assert_close(out[0, :, 1, 0], torch.tensor([1.5, 2.0], dtype=EXACT))


def test_the_published_parallel_form():
    """((Q K^T) * D) V, D_nm = gamma^(n-m) for n >= m."""
    torch.manual_seed(0)
    q, k = torch.randn(2, 2, 3, 130, 4, dtype=EXACT)
    v = torch.randn(2, 3, 130, 8, dtype=EXACT)
    n = torch.arange(130)
    gamma = torch.tensor([0.96875, 0.984375, 0.9921875], dtype=EXACT)
    d = (gamma[:, None, None] ** (n[:, None] - n).clamp(min=0)).tril()
    torch.testing.assert_close(retention(q, k, v)[0], (q @ k.mT * d) @ v)


@pytest.mark.parametrize("decay", [[0.5], [0.5, 1.5], [0.0, 0.5], [-0.1, 0.5]])
def test_bad_decays(decay):
    with pytest.raises(ValueError, match=r"decay: retention expected .*got"):
        retention(*torch.ones(3, 1, 2, 2, 1), decay=decay)


def test_the_layer_is_its_formula():
    """Rotation as complex numbers, every pair of tokens, norm and gate written out."""
    torch.manual_seed(0)
    layer = Retention(24, 3).double()
    x = torch.randn(2, 11, 24, dtype=EXACT)
    place = torch.arange(5, 16, dtype=EXACT)
    angles = place[:, None] * torch.tensor([1.0, 10_000 ** (-1 / 3), 10_000 ** (-2 / 3), 1e-4], dtype=EXACT)

    def heads(project):
        return project(x).view(2, 11, 3, -1).transpose(1, 2)

    def rotated(project):
        pairs = torch.view_as_complex(heads(project).unflatten(-1, (-1, 2)).contiguous())
        return pairs * torch.polar(torch.ones_like(angles), angles)

    scores = (rotated(layer.q_proj) @ rotated(layer.k_proj).mH).real / 8**0.5
    n = torch.arange(11)
    gamma = 1 - 2.0 ** (-5 - torch.arange(3, dtype=EXACT))
    out = (scores * (gamma[:, None, None] ** (n[:, None] - n).clamp(min=0)).tril()) @ heads(layer.v_proj)
    assert out.shape[-1] == 16  # twice the keys'
    out = out / (out.square().mean(-1, keepdim=True) + 1e-6).sqrt()
    gate = layer.g_proj(x)
    wanted = layer.o_proj(gate * gate.sigmoid() * out.transpose(1, 2).flatten(2))
    torch.testing.assert_close(layer(x, positions=5), wanted)


def test_positions_count_by_their_distance_and_far_ones_stay_exact():
    torch.manual_seed(0)
    layer = Retention(16, 2, expand_v=1)
    x = torch.randn(1, 9, 16)
    assert layer.v_proj.out_features == 16
    near = layer(x)
    torch.testing.assert_close(near, layer(x, positions=131_072), rtol=1e-4, atol=1e-5)
    assert (near - layer(x, positions=torch.arange(0, 27, 3))).abs().max() > 1e-3
    with pytest.raises(ValueError, match="Retention measures one axis"):
        layer(x, positions=torch.zeros(1, 9, 3, dtype=torch.long))
