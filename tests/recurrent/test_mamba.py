"""Mamba: the selective scan against its recurrence and transformers', and the published block."""

import pytest
import torch

import longitude as lg
from longitude.models.stock_caches import cache_name
from longitude.recurrent import Mamba
from longitude.testing import fill
from tests.support import close

scan = lg.recurrent.selective_scan


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


# ---- the layer -------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "options", [{}, {"use_bias": True, "use_conv_bias": False, "conv_kernel": 3, "expand": 1}], ids=str
)
def test_mamba_is_transformers(options):
    """Outputs, gradients, and decoding with a cache; weights go over by name."""
    from transformers import DynamicCache, MambaConfig
    from transformers.models.mamba.modeling_mamba import MambaMixer

    config = MambaConfig(hidden_size=16, state_size=4, num_hidden_layers=1, **options)
    theirs = fill(MambaMixer(config, 0))
    names = {"use_bias": "bias", "use_conv_bias": "conv_bias"}
    ours = Mamba(16, state_size=4, **{"bias": False, **{names.get(k, k): v for k, v in options.items()}})
    ours.load_state_dict({**theirs.state_dict()})
    x = torch.randn(2, 13, 16, requires_grad=True)
    want = theirs(x)
    got = ours(x)
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
    by = torch.randn_like(want)
    torch.testing.assert_close(*(torch.autograd.grad(out, x, by)[0] for out in (got, want)), rtol=1e-3, atol=1e-3)
    with torch.no_grad():
        cache, mine = DynamicCache(config=config), ours.cache_layer()
        for part in x.split([5, *[1] * 8], 1):
            torch.testing.assert_close(
                ours(part, cache=mine), theirs(part, **{cache_name(theirs): cache}), rtol=1e-4, atol=1e-4
            )


def test_initial_values_are_the_published():
    mamba = Mamba(32)
    torch.testing.assert_close(mamba.A_log.exp(), torch.arange(1.0, 17).expand(64, 16))
    step = torch.nn.functional.softplus(mamba.dt_proj.bias)
    assert step.min() > 1e-3 * 0.999 and step.max() < 0.1 * 1.001 and mamba.D.eq(1).all() and mamba.dt_rank == 2
    assert mamba.dt_proj.weight.abs().max() <= 2**-0.5
