"""Mamba and Mamba-2: their scans against recurrences and published numbers, and the layers against transformers'."""

import pytest
import torch
from transformers import Mamba2Config, MambaConfig
from transformers.models.mamba.modeling_mamba import MambaMixer
from transformers.models.mamba2.modeling_mamba2 import Mamba2Mixer

import longitude as lg
from longitude.recurrent import Mamba, Mamba2, ssd
from longitude.testing import fill
from tests.checkpoints.recurrent_models import GROUPED
from tests.recurrent.conftest import same_layer
from tests.support import close

scan = lg.recurrent.selective_scan
EXACT = torch.float64


def numbers(length, batch=2, channels=6, size=4, dtype=torch.float64, groups=None):
    """u, delta, A, B, C with gradients."""
    shape = (batch, size, length) if groups is None else (batch, groups, size, length)
    u, delta, B, C = (torch.randn(s, dtype=dtype) for s in ((batch, channels, length),) * 2 + (shape, shape))
    A = -torch.rand(channels, size, dtype=dtype) * 8
    return [x.requires_grad_() for x in (u, delta.sigmoid().detach(), A, B, C)]


def test_discretisation_is_eulers():
    """Delta 0.5, A -1: the state keeps 0.6065307 of itself, and takes 0.5 of the input, not 0.3934693 (section 3.6)."""
    one = torch.ones(1, 1, 2)
    y, h = scan(one * torch.tensor([1.0, 0]), 0.5 * one, -torch.ones(1, 1), one, one)
    assert y.flatten().tolist() == pytest.approx([0.5, 0.5 * 0.6065307])
    assert h.item() == pytest.approx(0.5 * 0.6065307)


def test_groups_serve_channels_side_by_side(form):
    u, delta, A, B, C = numbers(9, groups=3)
    of_groups = [
        scan(u[:, c], delta[:, c], A[c], B[:, g], C[:, g], mode="recurrent")
        for g, c in enumerate(torch.arange(6).split(2))
    ]
    want = [torch.cat(parts, 1) for parts in zip(*of_groups, strict=True)]
    got = scan(u, delta, A, B, C)
    close(list(got), want, atol=1e-10, rtol=1e-10)
    of_all, of_parts = (torch.autograd.grad(y.sin().sum() + h.sum(), (u, delta, A, B, C)) for y, h in (got, want))
    close(of_all, of_parts, atol=1e-10, rtol=1e-10)


def test_chunks_bound_what_training_keeps(form):
    """What backward keeps grows with the inputs, and with a state per chunk: not with all states."""
    u, delta, A, B, C = numbers(512, batch=1, channels=64, size=16, dtype=torch.float32)
    kept = {}

    def note(x):
        kept[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(note, lambda x: x):
        y, _ = scan(u, delta, A, B, C, chunk_size=32)
    assert sum(kept.values()) < 512 * 64 * 16 * 4 / 2
    y.sum().backward()
    assert u.grad is not None


@pytest.mark.parametrize(
    "options", [{}, {"use_bias": True, "use_conv_bias": False, "conv_kernel": 3, "expand": 1}], ids=str
)
def test_mamba_is_transformers(options):
    config = MambaConfig(hidden_size=32, state_size=4, num_hidden_layers=1, **options)
    names = {"use_bias": "bias", "use_conv_bias": "conv_bias"}
    ours = Mamba(32, state_size=4, **{"bias": False, **{names.get(k, k): v for k, v in options.items()}})
    same_layer(ours, fill(MambaMixer(config, 0), std=0.2), config)


def test_initial_values_are_the_published():
    mamba = Mamba(32)
    torch.testing.assert_close(mamba.A_log.exp(), torch.arange(1.0, 17).expand(64, 16))
    step = torch.nn.functional.softplus(mamba.dt_proj.bias)
    assert step.min() > 1e-3 * 0.999 and step.max() < 0.1 * 1.001 and mamba.D.eq(1).all() and mamba.dt_rank == 2
    assert mamba.dt_proj.weight.abs().max() <= 2**-0.5


# ---- Mamba-2 ---------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("mode", ["chunked", "parallel", "recurrent"])
def test_golden_of_mamba2(mode):
    """e^(Delta A) = 1/2, B = C = 1, Delta x = 1, 2, 3."""
    one = torch.ones(1, 1, 3, 1, dtype=EXACT)
    x = torch.tensor([1.0, 2.0, 3.0], dtype=EXACT).view(1, 1, 3, 1)
    out, state = ssd(x, (one[..., 0] / 2).log(), one, one, mode=mode, chunk_size=2)
    torch.testing.assert_close(out.flatten(), torch.tensor([1, 2.5, 4.25], dtype=EXACT))
    assert state.shape == (1, 1, 1, 1) and float(state) == 4.25


@pytest.mark.parametrize("groups", [1, 2] if GROUPED else [1])
def test_mamba2_is_transformers(groups):
    config = Mamba2Config(
        num_heads=8, head_dim=8, hidden_size=32, state_size=6, n_groups=groups, num_hidden_layers=1, chunk_size=16,
        vocab_size=10,
    )  # fmt: skip
    ours = Mamba2(32, head_dim=8, state_size=6, groups=groups)
    same_layer(ours, fill(Mamba2Mixer(config, 0), std=0.2), config)


def test_initial_values_of_mamba2():
    torch.manual_seed(0)
    layer = Mamba2(256)
    assert layer.num_heads == 8 and layer.state_size == 128
    step = torch.nn.functional.softplus(layer.dt_bias.detach())
    assert (step > 0.99e-3).all() and (step < 0.101).all() and step.std() > 0.005
    assert (layer.A_log.exp() >= 1).all() and (layer.A_log.exp() <= 16).all()
    assert (layer.D == 1).all()
