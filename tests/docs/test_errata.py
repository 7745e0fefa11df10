"""The right values of docs/errata.md, where no other test has them."""

from typing import Any

import pytest
import torch
from torch import Tensor

import longitude as lg
from longitude.models.blocks import MLP
from longitude.positions.rotation import Angles
from longitude.positions.scaling import YaRN
from tests.support import close, random as numbers


def inverse(scaling=None, dim: int = 64, **options) -> Tensor:
    return lg.rope_frequencies(dim, scaling=scaling, **options).inverse


def near(got, want, rel: float = 1e-6) -> None:
    got, want = (torch.as_tensor(each, dtype=torch.float64) for each in (got, want))
    close(got, want, 1e-9, rel)


# ---- rotation and its extension --------------------------------------------------------------------------------------
def test_values_are_not_rotated() -> None:
    q, k, v = numbers(3, 1, 2, 4, 8)
    out, weights = lg.attend(q, k, v, encoding=lg.Rotary(8, "half"), q_positions=7, k_positions=7, return_weights=True)
    near(out, weights @ v)


def test_slow_pairs_of_fope_count_twice() -> None:
    """Cos and sin of 1 are sqrt 2 times a rotation by 45 degrees; with cos 1 and sin 0, frequency zero, the score is q.k."""
    q, k = numbers(2, 1, 1, 1, 8)
    fope = lg.encoding("fope", head_dim=8, num_heads=1, layout="half", max_length=7, deviation=0.0)  # one pair turns
    cos, sin = fope.prepare(torch.tensor([0]), dtype=torch.float64)
    padded = torch.cat([sin[..., :1], torch.ones_like(sin[..., 1:])], -1)
    ours, code = ((fope.queries(q, t) * fope.keys(k, t)).sum() for t in (Angles(cos, sin), Angles(cos, padded)))
    turning = (q * k)[..., [0, 4]].sum()  # at position 0 all the same
    near(ours, (q * k).sum())
    near(code, turning + 2 * ((q * k).sum() - turning))


def test_rotation_blocks_absorption() -> None:
    """q' W_k c = (W_k' q)' c with no key ever built; with a rotation between, the absorbed matrix changes with the offset."""
    q, down, up, rope = numbers(8), numbers(5, 6), numbers(8, 5), lg.Rotary(8, "half")
    latent = down @ numbers(6)
    near(q @ (up @ latent), (up.T @ q) @ latent)
    rotated = [rope.rotate_keys(up.T, torch.full((5,), p)).T for p in (0, 3)]  # W_k rotated to key position p
    assert (rotated[0] - rotated[1]).abs().max() > 0.5


def test_tables_belong_to_a_layout() -> None:
    x, rope = numbers(1, 1, 50, 8), lg.Rotary(8, "interleaved")
    near(rope.rotate(x, 0).norm(dim=-1), x.norm(dim=-1))
    angles = torch.arange(50.0)[:, None] * inverse(dim=8)
    cos, sin = (torch.cat([f(angles)] * 2, -1) for f in (torch.cos, torch.sin))  # as the half layout writes them
    wrong = x * cos + torch.stack([-x[..., 1::2], x[..., ::2]], -1).flatten(-2) * sin
    assert (wrong.norm(dim=-1) / x.norm(dim=-1) - 1).abs().max() > 0.1


def test_yarn_of_other_libraries() -> None:
    ratio = inverse(YaRN(8.0, 4096), 128) / inverse(dim=128)
    near(ratio[[0, 63]], [1.0, 0.125])
    kept = (ratio - 0.125) / 0.875
    near((1 - kept + kept / 8)[[0, 63]], [0.125, 1.0])  # litgpt: the ramp upside down
    near((ratio / 8)[[0, 63]], [0.125, 0.015625])  # levanter: positions divided on top of it, and the factor's root
    near([YaRN(8.0, 4096).factors()[0], 1.2079442**0.5], [1.2079442, 1.0990651])


def test_yarn_upper_border() -> None:
    """Pairs 45 to 70 of 64: what is beyond the last pair still counts."""
    assert YaRN(8.0, 131_072).borders(128, 10_000.0) == (45, 70)
    last = (inverse(YaRN(8.0, 131_072), 128) / inverse(dim=128))[-1]
    near(last, 1 - 18 / 25 * 7 / 8)
    assert last > 0.3 > 1 / 8  # 1/8, were the border clamped to 63


def test_yarn_truncate_per_layer_type() -> None:
    from transformers import Gemma3TextConfig
    from transformers.models.gemma3.modeling_gemma3 import Gemma3RotaryEmbedding

    yarn = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 8.0, "original_max_position_embeddings": 64}
    ropes = {"full_attention": yarn | {"truncate": False}, "sliding_attention": yarn | {"truncate": True}}
    size: dict[str, Any] = {"hidden_size": 64, "num_attention_heads": 2, "head_dim": 32, "num_hidden_layers": 2}
    config = Gemma3TextConfig(**size, layer_types=["full_attention", "sliding_attention"], rope_parameters=ropes)
    with pytest.raises(ValueError, match="Gemma3RotaryEmbedding"):  # what is there is not what is written
        lg.from_hugging_face(config)
    read = lg.from_hugging_face({"rope_parameters": ropes})
    assert isinstance(read, dict) and read["full_attention"] is not None
    full = lg.rope_frequencies(32, **read["full_attention"].options(32)).inverse
    theirs: Any = Gemma3RotaryEmbedding(config)
    near(full, inverse(YaRN(8.0, 64, truncate=False), 32))
    assert (theirs.full_attention_inv_freq / full - 1).abs().max() > 0.1
    near(theirs.full_attention_inv_freq, inverse(YaRN(8.0, 64), 32))


def test_text_after_a_video() -> None:
    published = lg.positions.multimodal_positions([3, (10, 2, 2), 1])
    assert published[-2].tolist() == [12, 4, 4] and published[-1].tolist() == [13, 13, 13]
    assert lg.positions.multimodal_positions([3, (10, 2, 2), 1], next_text="extent")[-1].tolist() == [5, 5, 5]


def test_positions_in_bfloat16() -> None:
    p = torch.arange(65_536)
    assert p.bfloat16().unique().numel() == 1281
    x = torch.ones(1, 1, 1, 8)
    rotated = [lg.Rotary(8, "half").rotate(x, torch.tensor([place])) for place in (40_000, 40_001)]
    assert torch.tensor([40_000]).bfloat16() == torch.tensor([40_001]).bfloat16()
    assert (rotated[0] - rotated[1]).abs().max() > 0.5


# ---- terms of the scores ---------------------------------------------------------------------------------------------
def test_alibi_is_not_a_mask() -> None:
    q, k, v = torch.zeros(3, 1, 1, 4, 4)
    options = {"encoding": lg.ALiBi(1, slopes=[1.0]), "return_weights": True}
    weights = [lg.attend(q, k, v, mask=mask, **options)[1][0, 0] for mask in (lg.NoMask(), lg.Causal())]
    assert bool((weights[0] > 0).all()) and bool((weights[1].triu(1) == 0).all())
    offsets = torch.arange(4)[:, None] - torch.arange(4)
    assert (-offsets.clamp(min=0)).double().softmax(-1)[0, 3] == 0.25  # future clamped to 0: as good as itself


def test_alibi_of_a_late_query() -> None:
    alibi = lg.ALiBi(1, slopes=[0.5])
    assert alibi.bias(torch.tensor([4]), torch.arange(5))[0].tolist() == [[-2, -1.5, -1, -0.5, 0]]
    assert alibi.bias(torch.arange(8), torch.arange(8))[0, :1, :5].tolist() == [[0, -0.5, -1, -1.5, -2]]


def test_column_form_in_bfloat16() -> None:
    j = torch.arange(4096 - 256, 4096)
    assert (0.5 * j).bfloat16().unique().numel() == 17
    assert lg.ALiBi(1, slopes=[0.5]).bias_at(4095 - j).bfloat16().unique().numel() == 256


def test_offset_of_ten_and_six() -> None:
    bias = lg.ClippedBias(1, max_distance=4)
    bias.table.data = torch.arange(9.0)[None]
    assert bias.bias(torch.tensor([10]), torch.tensor([6])).item() == bias.bias_at(4).item() == 8


# ---- the transformer itself ------------------------------------------------------------------------------------------
def test_scores_are_not_symmetric() -> None:
    q, k, v = numbers(3, 1, 1, 5, 8)
    scores, order = (q @ k.mT)[0, 0], torch.tensor([3, 1, 4, 0, 2])
    assert (scores - scores.T).abs().max() > 1
    reordered = (x[:, :, order] for x in (q, k, v))
    near(lg.attend(*reordered, mask=lg.NoMask()), lg.attend(q, k, v, mask=lg.NoMask())[:, :, order])
    differs = lg.attend(*(x[:, :, order] for x in (q, k, v))) - lg.attend(q, k, v)[:, :, order]
    assert differs.abs().max() > 0.1


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
