"""Query temperature: the formulas, what n counts, and that every backend is served the same queries."""

import math

import pytest
import torch

import longitude as lg
from longitude.attention import pairs
from tests.support import close, heads, random, refused_calls

Q, K, V = heads(20)
IDS = torch.tensor([[0] * 7 + [1] * 13, [4] * 20])
VALID = torch.arange(20) >= torch.tensor([[3], [0]])
MASKS = {
    "causal": lg.Causal(),
    "window": lg.Window(4),
    "documents": lg.Causal() & lg.Documents(IDS),
    "padding": lg.Causal() & lg.Padding(VALID),
    "prefix": lg.Prefix(torch.tensor([6, 2])),
    "band": lg.Band(2, 3),
    "documents that come back": lg.Causal() & lg.Documents(torch.arange(20) // 4 % 2),
    "global": (lg.Window(3) | lg.Global([1])) & lg.Causal(),
    "both": lg.NoMask(),
}


def by_hand(mask, rate):
    """softmax(s_h ln n_i q_i.k_j / sqrt(D)), one query at a time; zeros for a query without keys."""
    allowed = mask.allowed(torch.arange(20), torch.arange(20)).expand(2, 1, 20, 20)[:, 0]
    out = torch.zeros(2, 4, 20, 8, dtype=torch.float64)
    for b, h, i in ((b, h, i) for b in range(2) for h in range(4) for i in range(20)):
        keys = allowed[b, i].nonzero()[:, 0]
        if len(keys):
            scores = rate[h] * math.log(len(keys)) * (K[b, h // 2, keys] @ Q[b, h, i]) / math.sqrt(8)
            out[b, h, i] = scores.softmax(0) @ V[b, h // 2, keys]
    return out


@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
def test_ssmax_and_log_n_are_their_formulas(mask, monkeypatch):
    """Of all queries and of the last ones, which are counted in several blocks."""
    monkeypatch.setattr(pairs, "BLOCK", 200)
    ssmax = lg.testing.example("ssmax")()
    far = torch.arange(20) * 1000 + 7  # positions are not what is counted
    close(lg.attend(Q, K, V, encoding=ssmax, mask=mask, q_positions=far, k_positions=far), by_hand(mask, ssmax.rate))
    for rows in (20, 6):
        got = lg.attend(Q[:, :, -rows:], K, V, encoding=lg.LogN(), mask=mask)
        close(got, by_hand(mask, [1.0] * 4)[:, :, -rows:])
    close(lg.attend(Q, K, V, encoding=lg.LogN(20), mask=mask), by_hand(mask, [1 / math.log(20)] * 4))


def test_ssmax_begins_at_a_mean_factor_of_one():
    rate = lg.SSMax(4).rate
    assert rate.tolist() == pytest.approx([1 / (math.lgamma(1025) / 1024)] * 4, abs=1e-3)


def test_steps_of_positions():
    """The last position before each step, and the first of it: Llama 4 counts from 1, Ministral 3 from 0."""
    for encoding, first in ((lg.Llama4Temperature(0.1, 8192), 8191), (lg.Ministral3Temperature(0.2, 16384), 16384)):
        [term] = encoding.terms({})
        at = torch.tensor([0, first - 1, first, first + 8192 * 3])
        rate, later = (0.1, 4) if first == 8191 else (0.2, 2)
        want = [1, 1, 1 + rate * math.log(2), 1 + rate * math.log(1 + later)]
        assert term.of == "positions" and term.at(at[None, None]).flatten().tolist() == pytest.approx(want, abs=1e-12)


@pytest.mark.parametrize("others", [[], ["rope"], ["alibi"], ["cope"], ["fox"]], ids=str)
@pytest.mark.parametrize("name", ["ssmax", "llama4_temperature"])
def test_every_backend_gets_the_multiplied_query(name, others):
    """Composed, too: what others add to scores is not multiplied, what they read off queries is."""
    options = {"floor_scale": 3} if name == "llama4_temperature" else {}
    own = lg.testing.example(name, **options)()
    members = [lg.testing.example(other)() for other in others]
    context, _ = lg.Composed(members).context(random(2, 20, 16, seed=5))
    factor = own.terms({})[0].at((torch.arange(20) + (name == "ssmax"))[None, None])[..., None]
    want = lg.attend(Q * factor, K, V, encoding=members, context=context, backend="reference")
    arguments = {"encoding": [*members, own], "context": context}
    able = [each.backend for each in lg.explain(Q, K, V, **arguments) if each.refusal is None]
    assert {"chunked", "reference"} <= {*able}
    for backend in able:
        close(lg.attend(Q, K, V, **arguments, backend=backend), want)


def test_rows_of_a_batch_whose_tables_follow_other_lengths():
    """Each part of the call gets the factors of its own rows and queries."""
    rope = lg.Rotary(8, "half", scaling=lg.scaling.DynamicNTK(4.0, 8, follow="row"))
    ssmax = lg.testing.example("ssmax")()
    places = torch.stack([torch.arange(20), torch.arange(20) * 90])
    mask, one = lg.Causal() & lg.Documents(IDS), {"q_positions": places, "k_positions": places}
    both = lg.attend(Q, K, V, encoding=[rope, ssmax], mask=mask, **one)
    for b in range(2):
        alone = lg.Causal() & lg.Documents(IDS[b])
        row = {"q_positions": places[b], "k_positions": places[b]}
        rest = [x[b : b + 1] for x in (Q, K, V)]
        close(both[b : b + 1], lg.attend(*rest, encoding=[rope, ssmax], mask=alone, **row), 1e-11)


test_wrong_use = refused_calls([
    (lambda: lg.Composed([lg.SSMax(4), lg.Rotary(8, "half"), lg.LogN()]),
     "SSMax", "LogN"),
    (lambda: lg.attend(Q[:, :2], K, V, encoding=lg.SSMax(4)), "SSMax", "num_heads=4", "2"),
    (lambda: lg.attend(Q, K, V, encoding=lg.Llama4Temperature(), q_positions=torch.zeros(20, 2, dtype=torch.long),
                       k_positions=torch.zeros(20, 2, dtype=torch.long)), "q_positions", "[20, 2]"),
])  # fmt: skip


def test_log_affine_is_the_module_of_transformers():
    """Values and gradients, past a length of 2,048; theirs takes the logarithm in float32. At first it multiplies by 1."""
    pytest.importorskip("transformers.models.mistral_large4", reason="transformers is older than the model")
    from transformers.models.mistral_large4.modeling_mistral_large4 import MistralLarge4TextSoftmaxScaling

    ours, theirs = lg.testing.example("log_affine")(), MistralLarge4TextSoftmaxScaling(4).double()
    theirs.load_state_dict({"scale": ours.rate, "bias": ours.offset})
    positions, q = torch.tensor([[0, 1, 2, 2047, 2048, 131_071]]), random(1, 4, 6, 8)
    [term] = ours.terms({})
    got, want = q * term.at(positions[:, None])[..., None], theirs(q, positions, head_dim_first=True)
    close(got, want, 0.0, 1e-6)
    direction = random(*q.shape, seed=3)
    for mine, other in zip(
        torch.autograd.grad(got, [ours.rate, ours.offset], direction),
        torch.autograd.grad(want, [theirs.scale, theirs.bias], direction),
        strict=True,
    ):
        close(mine, other, 1e-6, 1e-6)
    [term] = lg.encoding("log_affine", num_heads=4).terms({})
    close(term.at(positions[:, None]), torch.ones(1, 4, 6).double())


def test_beam_temperature_is_the_function_of_transformers():
    pytest.importorskip("transformers.models.beam", reason="transformers is older than the model")
    from transformers.models.beam.modeling_beam import compute_attention_scaling

    positions = torch.tensor([[0, 1, 2047, 2048, 10**6]])
    [term] = lg.encoding("beam_temperature").terms({})
    close(term.at(positions[:, None]), compute_attention_scaling(positions)[..., 0].double(), 1e-6)
    [term] = lg.encoding("beam_temperature", length=2, exponent=0.5).terms({})
    close(term.at(torch.tensor([[[5]]])), torch.tensor([[[2.0]]]).double())
