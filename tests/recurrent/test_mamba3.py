"""Mamba-3: its recurrence written out, the authors' reference, and Mamba-2's rule as a case."""

import math

import pytest
import torch

from longitude.recurrent import Mamba3, mamba3, ssd
from longitude.recurrent.mamba3 import DECAY_ACTIVATIONS
from tests.recurrent.conftest import every_form_is
from tests.support import close, golden, random, refused_calls

BATCH, HEADS, KEYS, VALUES, PAIRS = 2, 3, 6, 5, 2


def tokens(length):
    q, k = random(2, BATCH, HEADS, length, KEYS)
    step, log_decay, share = (random(BATCH, HEADS, length, seed=seed) for seed in (1, 2, 3))
    v, speed = random(BATCH, HEADS, length, VALUES, seed=4), random(BATCH, HEADS, length, PAIRS, seed=5)
    return q, k, v, -log_decay.abs(), step.abs(), share.sigmoid(), speed


def rotated(x, angle):
    """Neighbouring pairs as complex numbers, the first PAIRS of them turned."""
    z = torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous())
    turn = torch.polar(torch.ones_like(angle), angle)
    return torch.view_as_real(torch.cat([z[..., :PAIRS] * turn, z[..., PAIRS:]], -1)).flatten(-2)


def written_out(q, k, v, log_decay, step, share, speed):
    angle = torch.zeros(BATCH, HEADS, PAIRS, dtype=v.dtype)
    state, before, out = torch.zeros(BATCH, HEADS, KEYS, VALUES, dtype=v.dtype), 0.0, []
    for t in range(v.shape[2]):
        angle = angle + step[:, :, t, None] * speed[:, :, t]
        key = rotated(k[:, :, t], angle)[..., None] * v[:, :, t, None]
        own, rest = ((part * step[:, :, t])[..., None, None] for part in (share[:, :, t], 1 - share[:, :, t]))
        state = log_decay[:, :, t].exp()[..., None, None] * (state + rest * before) + own * key
        before = key
        out.append(rotated(q[:, :, t], angle)[:, :, None] @ state)
    return torch.cat(out, 2), state


@pytest.mark.parametrize("length", [1, 7, 22])
def test_every_mode_is_the_recurrence(length):
    """And cut anywhere, with the state."""

    def with_matrix(*given, **form):
        out, state = mamba3(*given, **form)
        return out, state.matrix

    every_form_is(written_out, with_matrix, tokens(length))
    state, parts = None, []
    for part in zip(*(x.split(5, 2) for x in tokens(length)), strict=True):
        out, state = mamba3(*part, state=state)
        parts.append(out)
    close(torch.cat(parts, 2), written_out(*tokens(length))[0], 1e-11)


def test_golden():
    """The authors' reference, in float32: biases before rotation, speeds of pi tanh, and the state."""
    table = {name: torch.tensor(x, dtype=torch.float64) for name, x in golden("mamba3")["small"].items()}
    first = {name: table[name].transpose(0, 1)[None] for name in ("q", "k", "v", "speed")}
    q, k = (first[name] + bias[:, None] for name, bias in zip(("q", "k"), table["bias"], strict=True))
    numbers = (table[name][None] for name in ("log_decay", "step"))
    out, state = mamba3(q, k, first["v"], *numbers, table["trap"].sigmoid()[None], math.pi * first["speed"].tanh())
    close(out[0].transpose(0, 1), table["out"], 2e-4)
    close(state.matrix[0].mT, table["matrix"], 1e-4)
    apart = (state.angle[0] - table["angle"]).sin()
    close(apart, torch.zeros_like(apart), 1e-5)


def test_without_the_token_before_and_rotation_it_is_mamba2s():
    q, k, v, log_decay, step, share, speed = tokens(13)
    out, _ = mamba3(q, k, v, log_decay, step, torch.ones_like(share), torch.zeros_like(speed))
    close(out, ssd(step[..., None] * v, log_decay, k, q)[0], 1e-12)


def test_decay_activations():
    """Numbers of both, and that a layer decays by its own."""
    a = torch.tensor([-2.0, -0.5, 0.0, 0.5, 2.0], dtype=torch.float64, requires_grad=True)
    found = DECAY_ACTIVATIONS["heavy_tail"](a)
    close(found.detach(), torch.tensor([1 / 3, 2 / 3, 1.0, 1.5, 3.0], dtype=torch.float64), 1e-15)
    [slopes] = torch.autograd.grad(found.sum(), a)
    close(slopes, torch.tensor([1 / 9, 4 / 9, 1.0, 1.0, 1.0], dtype=torch.float64), 1e-15)
    softplus = torch.tensor([0.126928, 0.474077, 0.693147, 0.974077, 2.126928], dtype=torch.float64)
    close(DECAY_ACTIVATIONS["softplus"](a).detach(), softplus, 1e-6)

    x, out = random(1, 4, 16, seed=7), {}
    for name in DECAY_ACTIVATIONS:
        torch.manual_seed(0)
        layer = Mamba3(16, head_dim=8, state_size=8, decay_activation=name).double()
        weight, sizes = layer.in_proj.weight.data, layer.sizes
        rows = slice(sum(sizes[:5]), sum(sizes[:6]))  # of a, at which both give ln 2
        weight[rows], layer.in_proj.bias = 0, torch.nn.Parameter(weight.new_zeros(len(weight)))
        layer.in_proj.bias.data[rows] = 0 if name == "softplus" else 1 - 1 / math.log(2)
        out[name] = layer(x)
    close(out["heavy_tail"], out["softplus"], 1e-12)


def test_initial_values():
    layer = Mamba3(16, head_dim=8, state_size=8)
    assert all((p == 1).all() for p in (layer.B_bias, layer.C_bias, layer.D))
    step = torch.nn.functional.softplus(layer.dt_bias)
    assert ((step > 9e-4) & (step < 0.11)).all()


test_refusals = refused_calls(
    [
        (lambda: mamba3(*tokens(3)[:6], torch.ones(2, 3, 3, 4)), "K=6", "4"),
        (lambda: mamba3(*tokens(3), state=torch.zeros(1)), "state", "mamba3", "[2, 3, 2]", "[2, 1, 33]"),
        (lambda: Mamba3(16, head_dim=8, state_size=6), "multiple", "state_size", "4"),
        (lambda: Mamba3(16, head_dim=8, decay_activation="heavy tail"), "'heavy_tail'"),
    ]
)
