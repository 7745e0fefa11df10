"""docs/errata.md, lines on biases, relative encodings and the transformer itself: each has one test of the right value here,
through this library or plain arithmetic. The other lines: test_errata.py, which also sees to it that no line is without."""

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import longitude as lg
from longitude.models.blocks import MLP
from longitude.positions.buckets import t5_bucket
from tests.docs.test_errata import near
from tests.support import random as numbers


# ---- biases ----------------------------------------------------------------------------------------------------------
def test_clipped_rows() -> None:
    bias = lg.ClippedBias(1, max_distance=2)  # r_max = 3
    assert bias.table.shape == (1, 5)
    bias.table.data = torch.arange(5.0)[None]
    assert bias.bias(torch.arange(2), torch.arange(4))[0].tolist() == [[2, 1, 0, 0], [3, 2, 1, 0]]
    assert bias.bias_at(torch.tensor([-9, 9]))[0].tolist() == [0, 4]


def test_queries_are_the_last() -> None:
    q, k, v = numbers(3, 1, 2, 9, 8)
    for encoding in (lg.ALiBi(2), lg.Rotary(8, "half")):
        near(lg.attend(q[:, :, 6:], k, v, encoding=encoding), lg.attend(q, k, v, encoding=encoding)[:, :, 6:])


def test_alibi_sign() -> None:
    bias = lg.ALiBi(8).bias_at(torch.arange(10))
    assert bool((bias.diff() < 0).all()) and bias[0, 3] == -1.5


def test_t5_bias() -> None:
    t5 = lg.T5Bias(8)
    assert t5.table.shape == (32, 8) and t5.shared
    assert t5_bucket(torch.arange(5000)).unique().numel() == 32
    q, k, v = numbers(3, 1, 8, 6, 4)
    scores = q @ k.mT + t5.bias(torch.arange(6), torch.arange(6)).double()
    mixed = scores.masked_fill(torch.ones(6, 6).triu(1) > 0, -torch.inf).softmax(-1) @ v
    near(lg.attend(q, k, v, encoding=t5, scale=1.0), mixed)


def test_alibi_slopes_of_twelve_heads() -> None:
    near(lg.ALiBi(12).slopes[:3], [0.5, 0.25, 0.125])
    near(lg.ALiBi(12).slopes[8:], [0.70710678, 0.35355339, 0.17677670, 0.088388348])
    near([2 ** (-8 * h / 12) for h in (1, 2, 3)], [0.6299605, 0.3968503, 0.25])


def test_one_slope_per_head() -> None:
    bias = lg.ALiBi(8).bias_at(torch.arange(20)).double()
    near(bias, -torch.tensor([2.0**-h for h in range(1, 9)])[:, None] * torch.arange(20))


def test_alibi_exponent() -> None:
    near([lg.ALiBi(8).slopes[h] for h in (0, 7)], [0.5, 0.00390625])
    near([2 ** (-1 / 8), 2 ** (-8 / 8)], [0.9170040, 0.5])


def test_alibi_is_not_a_mask() -> None:
    q, k, v = torch.zeros(3, 1, 1, 4, 4)
    weights = [
        lg.attend(q, k, v, encoding=lg.ALiBi(1, slopes=[1.0]), mask=m, return_weights=True)[1][0, 0]
        for m in (lg.NoMask(), lg.Causal())
    ]
    assert bool((weights[0] > 0).all()) and bool((weights[1].triu(1) == 0).all())
    offsets = torch.arange(4)[:, None] - torch.arange(4)
    assert (-offsets.clamp(min=0)).double().softmax(-1)[0, 3] == 0.25  # future clamped to 0: as good as itself


def test_alibi_of_a_late_query() -> None:
    alibi = lg.ALiBi(1, slopes=[0.5])
    assert alibi.bias(torch.tensor([4]), torch.arange(5))[0].tolist() == [[-2, -1.5, -1, -0.5, 0]]
    assert alibi.bias(torch.arange(8), torch.arange(8))[0, :1, :5].tolist() == [[0, -0.5, -1, -1.5, -2]]


def test_fixed_biases_have_no_state() -> None:
    for encoding in (lg.ALiBi(8), lg.Sandwich(8), lg.Rotary(8, "half"), lg.Sinusoidal(8)):
        lg.attend(*torch.zeros(3, 1, 8, 4, 8), encoding=encoding)
        assert not encoding.state_dict() and not list(encoding.buffers())


def test_sandwich_ratio_per_head() -> None:
    bias = lg.Sandwich(8).bias_at(torch.tensor([0, 1, 10, 100, 1000]))
    near(bias[0], [0, -1.446619, -19.34091, -33.31891, -53.38965])
    near(bias[7, 1:], bias[0, 1:] / 8)


@pytest.mark.parametrize("encoding", [lg.ALiBi(2), lg.Sandwich(2), lg.T5Bias(2)])
def test_fused_attention_takes_biases(encoding) -> None:
    q, k, v = numbers(3, 1, 2, 33, 8)
    places = torch.arange(33)
    bias = encoding.bias(places, places).double().masked_fill(torch.ones(33, 33).triu(1) > 0, -torch.inf)
    want = lg.attend(q, k, v, encoding=encoding, backend="reference")
    near(F.scaled_dot_product_attention(q, k, v, attn_mask=bias[None]), want)
    near(lg.attend(q, k, v, encoding=encoding, backend="table"), want)


def test_falcon_adds_its_bias_twice() -> None:
    from transformers import FalconConfig, FalconForCausalLM

    size: dict[str, Any] = {"vocab_size": 61, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4}
    theirs, x = {}, torch.arange(1, 40)[None]
    for kind in ("sdpa", "eager"):
        torch.manual_seed(0)
        config = FalconConfig(**size, alibi=True, attn_implementation=kind, initializer_range=0.3)
        theirs[kind] = FalconForCausalLM(config).eval()
    with torch.no_grad():
        gap = theirs["sdpa"](x).logits - theirs["eager"](x).logits
    assert gap.abs().max() > 0.1


def test_column_form_in_bfloat16() -> None:
    j = torch.arange(4096 - 256, 4096)
    assert (0.5 * j).bfloat16().unique().numel() == 17
    assert lg.ALiBi(1, slopes=[0.5]).bias_at(4095 - j).bfloat16().unique().numel() == 256


# ---- full relative ---------------------------------------------------------------------------------------------------
TOY = {"q": [1.0, 2.0], "k": [0.5, -1.0], "v": [1.0, 3.0]}


def shaw(keys: list[float], values: list[float]) -> Tensor:
    encoding: Any = lg.Shaw(1, max_distance=1).double()
    encoding.key_table.data, encoding.value_table.data = (torch.tensor(t)[:, None].double() for t in (keys, values))
    q, k, v = (torch.tensor(TOY[name]).double().view(1, 1, 2, 1) for name in "qkv")
    return lg.attend(q, k, v, encoding=encoding, mask=lg.NoMask()).flatten().detach()


def test_shaw_rows() -> None:
    assert lg.Shaw(8, max_distance=3).key_table.shape == (7, 8)


def test_offset_of_ten_and_six() -> None:
    bias = lg.ClippedBias(1, max_distance=4)
    bias.table.data = torch.arange(9.0)[None]
    assert bias.bias(torch.tensor([10]), torch.tensor([6])).item() == bias.bias_at(4).item() == 8


def test_shaw_index() -> None:
    near(shaw([0.1, 0.2, 0.3], [0.0, 0.5, 1.0]), [1.994540, 1.143310])


def test_shaw_index_mirrored() -> None:
    near(shaw([0.3, 0.2, 0.1], [1.0, 0.5, 0.0]), [1.751972, 2.058749])


def test_shaw_reach() -> None:
    assert lg.Shaw(8).max_distance == 16 and lg.T5Bias(8).max_distance == 128


def test_shaw_depends_on_the_query() -> None:
    encoding, k = lg.Shaw(4).double(), torch.zeros(1, 1, 3, 4, dtype=torch.float64)
    q = numbers(1, 1, 3, 4)
    logs = [lg.attend(s * q, k, k, encoding=encoding, return_weights=True)[1].log()[0, 0, 2] for s in (1, 2)]
    near((logs[1] - logs[1][2]).detach(), 2 * (logs[0] - logs[0][2]).detach())
    assert (logs[0] - logs[1]).abs().max() > 0.01


# ---- dependent on content --------------------------------------------------------------------------------------------
def test_path_is_dense() -> None:
    w = torch.tensor([[1.0, 0.0], [0.6, 0.8], [1.0, 0.0]]).double()[None, None]
    columns = {"reflection": w, "strength": torch.tensor([0.0, 1.5, 0.5]).double()[None, None]}
    q = torch.tensor([[0.0, 0.0], [0.0, 0.0], [1.0, 2.0]]).double()[None, None]
    k = torch.tensor([[0.5, -1.0], [1.0, -1.0], [0.25, 0.5]]).double()[None, None]
    _, weights = lg.attend(q, k, k, encoding=lg.PaTH(4, 1, 2).double(), context=columns, return_weights=True)
    near(weights[0, 0, 2].detach(), [0.2231513, 0.0972222, 0.6796264])
    near((torch.tensor([-0.325, -1.5, 1.25]).double() / math.sqrt(2)).softmax(0), weights[0, 0, 2].detach())


def test_whole_summaries_leak() -> None:
    x = numbers(12, 4)
    late = x.clone()
    late[-1] += 1
    whole, changed = (
        x.view(3, 4, 4).mean(1),
        late.view(3, 4, 4).mean(1),
    )  # summaries of all blocks, given to every token
    assert (whole - changed).abs().max() > 0.1
    prefix = [t.cumsum(0) / torch.arange(1, 13)[:, None] for t in (x, late)]
    assert torch.equal(prefix[0][:-1], prefix[1][:-1])


def test_gate_scale() -> None:
    """A gate's difference of 1 under head_dim 16: 1 in FoX, 1/4 in PaTH-FoX."""
    q, columns = torch.zeros(1, 1, 2, 16), {"forgotten": torch.tensor([[[0.0, -1.0]]])}
    for scaled, want in ((False, 1.0), (True, 0.25)):
        fox = lg.FoX(16, 1, scale_gate=scaled)
        weights = lg.attend(q, q, q, encoding=fox, context=columns, return_weights=True)[1][0, 0, 1]
        near((weights[1] / weights[0]).log().detach(), want, 1e-5)


# ---- the transformer itself ------------------------------------------------------------------------------------------
def test_scores_are_not_symmetric() -> None:
    q, k, v = numbers(3, 1, 1, 5, 8)
    scores, order = (q @ k.mT)[0, 0], torch.tensor([3, 1, 4, 0, 2])
    assert (scores - scores.T).abs().max() > 1
    reordered = (x[:, :, order] for x in (q, k, v))
    near(lg.attend(*reordered, mask=lg.NoMask()), lg.attend(q, k, v, mask=lg.NoMask())[:, :, order])
    differs = lg.attend(*(x[:, :, order] for x in (q, k, v))) - lg.attend(q, k, v)[:, :, order]
    assert differs.abs().max() > 0.1


def test_odd_sinusoid() -> None:
    assert lg.Sinusoidal(5).table(torch.arange(3)).shape == (3, 5)
    table, angles = torch.zeros(3, 5), torch.zeros(3, 3)
    with pytest.raises(RuntimeError):
        table[:, 1::2] = angles.cos()


def test_masked_scores_are_infinite() -> None:
    near(torch.tensor([1.0, 0.0, 0.0]).softmax(0), [0.5761169, 0.2119416, 0.2119416], 1e-5)
    q, k = torch.tensor([[1.0], [0.0], [0.0]])[None, None], torch.tensor([[1.0], [2.0], [3.0]])[None, None]
    assert lg.attend(q, k, k, return_weights=True)[1][0, 0, 0].tolist() == [1, 0, 0]


def test_heads_split_what_is_projected() -> None:
    layer, x = lg.MultiHeadAttention(8, 2).double(), numbers(1, 3, 8).requires_grad_()
    layer.q_proj(x)[..., :4].sum().backward()  # the first head's queries
    assert x.grad is not None and bool((x.grad != 0).all())


def test_attention_without_biases() -> None:
    assert lg.MultiHeadAttention(8, 2).q_proj.bias is None
    assert lg.MultiHeadAttention(8, 2, bias=True).q_proj.bias is not None


def test_rows_count_from_zero() -> None:
    x, learned = torch.zeros(1, 4, 2), lg.Learned(4, 2)
    assert torch.equal(learned.embed(x, torch.arange(4))[0], learned.table)
    with pytest.raises(ValueError, match=r"0 \.\. 3"):
        learned.embed(x, torch.arange(1, 5))
    bart = lg.Learned(4, 2, row_offset=2)
    assert len(bart.table) == 6 and torch.equal(bart.embed(x, torch.arange(4))[0], bart.table[2:])


def test_sinusoids_leave_what_was_seen() -> None:
    table = lg.Sinusoidal(512).table(torch.arange(4096))
    seen, later = table[:512], table[512:]
    assert later.shape == (3584, 512) and bool(later.isfinite().all())
    outside = (later > seen.amax(0) + 0.01) | (later < seen.amin(0) - 0.01)
    assert int(outside.any(0).sum()) > 200


def test_swiglu_has_three_matrices() -> None:
    def mlp(kind: str) -> MLP:
        return MLP(lg.LongitudeConfig(vocab_size=8, hidden_size=96, num_attention_heads=2, hidden_act=kind))

    sizes = {kind: [tuple(w.shape) for w in mlp(kind).parameters()] for kind in ("swiglu", "gelu")}
    assert sizes["swiglu"] == [(256, 96), (256, 96), (96, 256)] and sizes["gelu"] == [(384, 96), (96, 384)]
    counts = {kind: sum(w.numel() for w in mlp(kind).parameters()) for kind in sizes}
    assert counts["swiglu"] == counts["gelu"]
