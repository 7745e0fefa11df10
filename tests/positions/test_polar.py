"""PoPE: its formula, an independent implementation, and the width that it doubles."""

import math

import pytest
import torch
import torch.nn.functional as F

import longitude as lg
from tests.support import close, golden, heads, random, refused_calls

POPE = lg.encoding("pope", num_heads=4, head_dim=8).double()


def pope(phase=None, **options):
    encoding = lg.encoding("pope", **{"num_heads": 4, "head_dim": 8, **options}).double()
    with torch.no_grad():
        encoding.phase.copy_(8 * random(*encoding.phase.shape) - 3 if phase is None else phase)
    return encoding


@pytest.mark.parametrize("base", [100.0, 10_000.0])
def test_it_is_the_formula(base):
    """Values and gradients: scale sum_c softplus(q_c) softplus(k_c) cos((i - j) theta_c - b_c), the phase within [-2 pi, 0]."""
    encoding = pope(base=base)
    q, k, v = (x.requires_grad_() for x in heads(9))
    i = torch.arange(9.0, dtype=torch.float64)
    theta = torch.tensor([base ** (-c / 8) for c in range(8)], dtype=torch.float64)
    angle = (i[:, None] - i)[..., None] * theta - encoding.phase.clamp(-2 * math.pi, 0)[:, None, None]
    sizes = F.softplus(q)[:, :, :, None] * F.softplus(k.repeat_interleave(2, 1))[:, :, None]
    scores = 8**-0.5 * (sizes * angle.cos()).sum(-1)
    scores = scores.masked_fill(torch.ones(9, 9, dtype=torch.bool).triu(1), -math.inf)
    want, got = scores.softmax(-1) @ v.repeat_interleave(2, 1), lg.attend(q, k, v, encoding=encoding)
    close(got, want, 1e-12)
    wanted = q, k, v, encoding.phase
    for ours, theirs in zip(*(torch.autograd.grad(x.square().sum(), wanted) for x in (got, want)), strict=True):
        close(ours, theirs, 1e-11)


@pytest.mark.parametrize("case", ["small", "usual"])
def test_golden(case):
    """As PoPE-pytorch has it, in float32."""
    table = golden("polar")[case]
    q, k, phase, want = (torch.tensor(table[name], dtype=torch.float64) for name in ("q", "k", "phase", "scores"))
    encoding = pope(phase, num_heads=len(q), head_dim=q.shape[-1], base=table["base"])
    tables = encoding.prepare(torch.arange(q.shape[1]), dtype=torch.float64)
    close(encoding.queries(q[None], tables)[0] @ encoding.keys(k[None], tables)[0].mT, want, 2e-6)


def test_width_and_scale():
    """Queries and keys leave twice as wide; the scale is that of the head; a model's cache holds such keys."""
    q, k, _ = heads(5)
    tables = POPE.prepare(torch.arange(5))
    assert POPE.queries(q, tables).shape == (2, 4, 5, 16) and POPE.keys(k, tables).shape == (2, 2, 5, 16)
    assert lg.positions.composed.compose([POPE, lg.ALiBi(4)]).widens == 2
    config = {"vocab_size": 9, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "encoding": "pope"}
    model = lg.LongitudeForCausalLM(lg.LongitudeConfig(**config))
    out = model(torch.zeros(1, 6, dtype=torch.long), use_cache=True)
    assert out.cache.layers[0].keys.shape == (1, 4, 6, 16)
    assert out.cache.layers[0].values.shape == (1, 4, 6, 8)


test_refused = refused_calls(
    [
        (lambda: POPE.queries(torch.zeros(1, 3, 2, 8), POPE.prepare(torch.arange(2))), "pope", "4"),
        (lambda: POPE.keys(torch.zeros(1, 4, 2, 6), POPE.prepare(torch.arange(2))), "pope", "[B, H, L, 8]"),
        (lambda: POPE.prepare(torch.tensor([-1])), "pope"),
        (lambda: lg.attend(*heads(3), encoding=[POPE, lg.Rotary(8, "half")]), "PoPE", "Rotary"),
    ]
)
