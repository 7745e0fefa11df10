"""Log-linear attention: its sum written out, an implementation of others, Mamba-2 as a case, and what its state holds."""

import pytest
import torch

from longitude.recurrent import LogLinearMamba2, Mamba2, log_linear, ssd
from longitude.testing import fill
from tests.recurrent.conftest import every_form_is
from tests.support import close, golden, random, refused

BATCH, GROUPS, HEADS, KEYS, VALUES, LEVELS = 2, 2, 4, 3, 5, 4


def tokens(length):
    q, k = random(2, BATCH, GROUPS, length, KEYS)
    v, log_decay = random(BATCH, HEADS, length, VALUES, seed=1), -random(BATCH, HEADS, length, seed=2).abs()
    return q, k, v, log_decay, random(BATCH, HEADS, length, LEVELS, seed=3)


def written_out(q, k, v, log_decay, scales):
    """Pair by pair, the level from the blocks of the binary digits of t, largest first."""
    out = torch.zeros_like(v)
    for t in range(v.shape[2]):
        level, first = {t: 0}, 0
        for digit in reversed(range(t.bit_length())):
            if t >> digit & 1:
                level |= dict.fromkeys(range(first, first + (1 << digit)), digit + 1)
                first += 1 << digit
        assert first == t
        for s in range(t + 1):
            weight = scales[:, :, t, min(level[s], LEVELS - 1)] * log_decay[:, :, s + 1 : t + 1].sum(-1).exp()
            score = (q[:, :, t] * k[:, :, s]).sum(-1).repeat_interleave(HEADS // GROUPS, 1)
            out[:, :, t] += (weight * score)[..., None] * v[:, :, s]
    return out


@pytest.mark.parametrize("length", [1, 7, 22])
def test_every_mode_is_the_sum(length):
    """Levels beyond the last one too; and cut anywhere, with the state."""
    every_form_is(lambda *x: [written_out(*x)], lambda *x, **form: log_linear(*x, **form)[:1], tokens(length))
    state, parts = None, []
    for part in zip(*(x.split(5, 2) for x in tokens(length)), strict=True):
        out, state = log_linear(*part, state=state)
        parts.append(out)
    close(torch.cat(parts, 2), written_out(*tokens(length)), 1e-12)


def test_golden():
    """flash-linear-attention, in float32."""
    table = {name: torch.tensor(x, dtype=torch.float64) for name, x in golden("log_linear")["small"].items()}
    heads_first = [table[name].transpose(0, 1)[None] for name in ("q", "k", "v", "log_decay", "scales")]
    close(log_linear(*heads_first, chunk_size=4)[0][0].transpose(0, 1), table["out"], 1e-5)


def test_scales_of_one_are_mamba2():
    """The function is the state space dual; the layer Mamba-2 with the same weights, where softplus(L dl) is 1."""
    q, k, v, log_decay, scales = tokens(13)
    close(log_linear(q, k, v, log_decay, torch.ones_like(scales))[0], ssd(v, log_decay, k, q)[0], 1e-12)
    sizes = {"head_dim": 8, "state_size": 4}
    ours, theirs = (
        fill(LogLinearMamba2(16, **sizes, levels=3, bias=True).double()),
        Mamba2(16, **sizes, bias=True).double(),
    )
    weights = {name: x.clone() for name, x in ours.state_dict().items() if name != "L"}
    rows = weights["in_proj.weight"].shape[0] - 3 * ours.num_heads
    with torch.no_grad():
        ours.L.fill_(1.0)
        ours.in_proj.weight[rows:] = 0
        ours.in_proj.bias[rows:] = torch.tensor(1.0).expm1().log()
    theirs.load_state_dict(weights | {name: weights[name][:rows] for name in ("in_proj.weight", "in_proj.bias")})
    close(ours(x := random(2, 11, 16)), theirs(x), 1e-7)


def test_the_state_is_a_block_for_each_digit():
    """After 13 = 1101 tokens: sums of 1, 4 and 8 of them, of which the digit 2 has none."""
    one = torch.ones(1, 1, 13, 1, dtype=torch.float64)
    _, state = log_linear(one, one, one, 0 * one[..., 0], one.expand(-1, -1, -1, 4))
    assert state.seen.tolist() == [13] and state.states.flatten().tolist() == [1.0, 0.0, 4.0, 8.0]


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (
            lambda: log_linear(*tokens(3)[:4], torch.ones(2, 3, 3, 4)),
            ("[2, 2, 3, 3]", "[2, 4, 3, 5]", "log_decay", "[2, 4, 3]"),
        ),
        (lambda: log_linear(*tokens(3), mode="chunk"), ("'chunked'",)),
        (lambda: log_linear(*tokens(3), state=torch.zeros(1)), ("state",)),
        (lambda: LogLinearMamba2(16, levels=0), ("levels",)),
    ],
)
def test_refused(call, words):
    with refused(*words):
        call()
