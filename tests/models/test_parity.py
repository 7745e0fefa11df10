"""Given the weights of another's model, its logits: transformers' Llama, and T5's scale by hand."""

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

import longitude as lg
from longitude.models import LongitudeConfig, LongitudeForCausalLM

NAMES = {
    "input_layernorm": "attention_norm",
    "post_attention_layernorm": "mlp_norm",
    "self_attn": "attention",
    "gate_proj": "gate",
    "up_proj": "up",
    "down_proj": "down",
}


def llama(kv_heads: int, base: float, tied: bool) -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=61, hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=kv_heads, max_position_embeddings=128, tie_word_embeddings=tied, initializer_range=0.3,
        rope_parameters={"rope_type": "default", "rope_theta": base}, attn_implementation="sdpa",
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


def ours(theirs: LlamaForCausalLM, layout: str = "half", angle_dtype: str = "float32") -> LongitudeForCausalLM:
    c = theirs.config
    rope = {"name": "rope", "layout": layout, "base": c.rope_parameters["rope_theta"], "angle_dtype": angle_dtype}
    config = LongitudeConfig(
        vocab_size=c.vocab_size, hidden_size=c.hidden_size, intermediate_size=c.intermediate_size,
        num_hidden_layers=c.num_hidden_layers, num_attention_heads=c.num_attention_heads,
        num_key_value_heads=c.num_key_value_heads, max_position_embeddings=c.max_position_embeddings,
        tie_word_embeddings=c.tie_word_embeddings, encoding=rope, embedding_scale=1.0, rms_norm_eps=c.rms_norm_eps,
    )  # fmt: skip
    model = LongitudeForCausalLM(config).eval()
    weights = {}
    for name, weight in theirs.state_dict().items():
        weights[".".join(NAMES.get(part, part) for part in name.split("."))] = weight
    model.load_state_dict(weights)
    return model


@pytest.mark.parametrize("kv_heads", [4, 2, 1])
@pytest.mark.parametrize(("base", "tied"), [(10_000.0, False), (500_000.0, True)])
@torch.no_grad()
def test_llama(kv_heads, base, tied, ids):
    theirs, x = llama(kv_heads, base, tied), ids(2, 50)
    expected = theirs(x).logits
    assert expected.std() > 0.5  # not a comparison of zeros
    torch.testing.assert_close(ours(theirs)(x).logits, expected, atol=1e-5 * float(expected.std()), rtol=1e-5)

    exact, theirs = ours(theirs, angle_dtype="float64").double(), in_float64(theirs)
    torch.testing.assert_close(exact(x).logits, theirs(x).logits, atol=1e-10, rtol=0)


def in_float64(theirs: LlamaForCausalLM) -> LlamaForCausalLM:
    """Throughout: its norms and angles would go through float32 in a model of any dtype."""

    class Angles(nn.Module):
        inverse = theirs.config.rope_parameters["rope_theta"] ** -(torch.arange(0, 8, 2, dtype=torch.float64) / 8)

        def forward(self, x, position_ids):
            angles = position_ids[..., None] * self.inverse
            angles = torch.cat([angles, angles], -1)
            return angles.cos(), angles.sin()

    def norm(old):
        new = nn.RMSNorm(32, eps=theirs.config.rms_norm_eps)
        new.weight.data = old.weight.data
        return new

    theirs.model.norm, theirs.model.rotary_emb = norm(theirs.model.norm), Angles()
    for layer in theirs.model.layers:
        layer.input_layernorm = norm(layer.input_layernorm)
        layer.post_attention_layernorm = norm(layer.post_attention_layernorm)
    return theirs.double()


@torch.no_grad()
def test_llama_padded_and_generating(ids):
    theirs, x = llama(2, 10_000.0, False), ids(2, 12)
    model, mask = ours(theirs), torch.arange(12) >= torch.tensor([[0], [5]])
    for options in ({}, {"num_beams": 3}):
        out = [
            m.generate(x, attention_mask=mask.long(), max_new_tokens=10, do_sample=False, pad_token_id=0, **options)
            for m in (model, theirs)
        ]
        assert torch.equal(*out)


@torch.no_grad()
def test_both_layouts_are_one_model(ids):
    """Pairs (2k, 2k+1) instead of (k, k + half): the same logits once the rows of q_proj and k_proj are reordered."""
    theirs, x = llama(2, 10_000.0, False), ids(2, 30)
    half, inter = (ours(theirs, layout, "float64").double() for layout in ("half", "interleaved"))
    assert not torch.allclose(half(x).logits, inter(x).logits, atol=1e-3)
    for layer in inter.model.layers:
        for projection in (layer.attention.q_proj, layer.attention.k_proj):
            rows = projection.weight.data.unflatten(0, (-1, 2, 4))  # heads, halves, pairs
            projection.weight.data = rows.transpose(1, 2).flatten(0, 2).contiguous()
    torch.testing.assert_close(inter(x).logits, half(x).logits, atol=1e-10, rtol=0)


@torch.no_grad()
def test_a_layer_by_hand(build, ids):
    """One layer with a learned bias and T5's scale of 1, from its weights alone, in float64."""
    model, x = build("t5", num_hidden_layers=1, attention_scale=1.0, hidden_act="gelu"), ids(1, 10)
    weights = model.state_dict()
    layer = {name.removeprefix("model.layers.0."): w for name, w in weights.items()}

    def norm(h, weight):
        return h * (h.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * weight

    h = weights["model.embed_tokens.weight"][x[0]] * 4.0
    y = norm(h, layer["attention_norm.weight"])
    q, k, v = ((y @ layer[f"attention.{n}_proj.weight"].T).unflatten(-1, (-1, 4)).transpose(0, 1) for n in "qkv")
    bias = lg.T5Bias(4).double()
    bias.table.data = weights["model.encodings.0.table"]
    scores = q @ k.repeat_interleave(2, 0).mT + bias.bias(torch.arange(10), torch.arange(10))
    future = torch.ones(10, 10, dtype=torch.bool).triu(1)
    mixed = scores.masked_fill(future, -torch.inf).softmax(-1) @ v.repeat_interleave(2, 0)
    h = h + mixed.transpose(0, 1).flatten(1) @ layer["attention.o_proj.weight"].T
    y = norm(h, layer["mlp_norm.weight"]) @ layer["mlp.up.weight"].T
    h = h + (y * 0.5 * (1 + torch.erf(y / 2**0.5))) @ layer["mlp.down.weight"].T
    logits = norm(h, weights["model.norm.weight"]) @ weights["lm_head.weight"].T
    torch.testing.assert_close(model(x).logits[0], logits, atol=1e-11, rtol=0)
