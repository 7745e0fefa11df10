"""Attention layers of transformers' rotary models, from their projections and our encodings, each read from its config."""

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    CohereConfig,
    CohereForCausalLM,
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GlmConfig,
    GlmForCausalLM,
    GPTJConfig,
    GPTJForCausalLM,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
)

import longitude as lg
from longitude.positions.hugging_face import from_hugging_face
from tests.support import by_head, random_model, recorded

ORIGINAL = "original_max_position_embeddings"
SMALL: dict[str, Any] = {"vocab_size": 61, "hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
SMALL |= {"initializer_range": 0.2, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}


def layers_of(model: type, config, outputs: str, last: str, *args, **kwargs) -> list[dict[str, Tensor]]:
    """What one pass of a random model in float64 shows of each attention layer."""
    theirs = random_model(model, config).double()
    seen = recorded(theirs, outputs, last)
    with torch.no_grad():
        theirs(*args, **kwargs)
    return [{name: x for name, (x,) in layer.items()} for layer in seen.values()]


def same(q: Tensor, k: Tensor, v: Tensor, theirs: Tensor, encoding, far: float = 0.01, **options) -> None:
    """attend(q, k, v) is what their layer hands to its last projection, up to the float32 of their angles and softmax; and
    the encoding is not idle."""
    mine = lg.attend(q, k, v, encoding=encoding, **options).transpose(1, 2).flatten(2)
    size = float(theirs.std())
    torch.testing.assert_close(mine, theirs, atol=1e-5 * size, rtol=0)
    without = lg.attend(q, k, v, **options).transpose(1, 2).flatten(2)
    assert (without - theirs).abs().max() > far * size


@pytest.mark.parametrize("share", [0.25, 0.5, 1.0])
def test_gpt_neox_partial_rotation(share, ids):
    rope = {"rope_type": "default", "rope_theta": 2_000.0, "partial_rotary_factor": share}
    config = GPTNeoXConfig(**SMALL | {"hidden_size": 64}, intermediate_size=64, rope_parameters=rope)
    encoding = lg.Rotary(16, "half", **from_hugging_face(config).options(16))
    assert encoding.rotary_dim == 16 * share
    for layer in layers_of(GPTNeoXForCausalLM, config, "query_key_value", "dense", ids(2, 40)):
        q, k, v = layer["query_key_value"].unflatten(-1, (4, 48)).transpose(1, 2).chunk(3, -1)
        same(q, k, v, layer["mixed"], encoding)


@pytest.mark.parametrize("rotary_dim", [4, 8, 12])
def test_gptj_interleaved(rotary_dim, ids):
    """Its base is always 10000, which its config does not say."""
    config = GPTJConfig(
        vocab_size=61, n_embd=48, n_layer=2, n_head=4, rotary_dim=rotary_dim, n_positions=64, initializer_range=0.2
    )
    encoding = lg.Rotary(12, "interleaved", rotary_dim=rotary_dim)
    mask = torch.arange(30) >= torch.tensor([[0], [7]])
    positions = (mask.long().cumsum(1) - 1).clamp(min=0)
    seen = layers_of(GPTJForCausalLM, config, "q_proj k_proj v_proj", "out_proj", ids(2, 30),
        attention_mask=mask.long(), position_ids=positions,
    )  # fmt: skip
    for layer in seen:
        q, k, v = (by_head(layer[f"{name}_proj"], 4) for name in "qkv")
        unpadded = layer["mixed"].masked_fill(~mask[..., None], 0)
        mine = lg.attend(
            q,
            k,
            v,
            encoding=encoding,
            mask=lg.Causal() & lg.Padding(mask),
            q_positions=positions,
            k_positions=positions,
        )
        mine = mine.transpose(1, 2).flatten(2).masked_fill(~mask[..., None], 0)
        torch.testing.assert_close(mine, unpadded, atol=1e-5 * float(unpadded.std()), rtol=0)
        same(q[:1], k[:1], v[:1], layer["mixed"][:1], encoding)


FAMILIES = {"cohere": (CohereConfig, CohereForCausalLM, 1.0), "glm": (GlmConfig, GlmForCausalLM, 0.5)}


@pytest.mark.parametrize("kind", ["default", "yarn"])
@pytest.mark.parametrize("family", FAMILIES)
def test_interleaved_with_grouped_heads(family, kind, ids):
    """Cohere rotates all of each head, GLM the first half of it."""
    config_class, model, share = FAMILIES[family]
    rope = {"rope_type": kind, "rope_theta": 4_000.0, "partial_rotary_factor": share}
    rope |= {"factor": 6.0, ORIGINAL: 16} if kind == "yarn" else {}
    config = config_class(
        **SMALL | {"hidden_size": 64}, num_key_value_heads=2, head_dim=16, intermediate_size=64, rope_parameters=rope
    )
    encoding = lg.Rotary(16, "interleaved", **from_hugging_face(config).options(16))
    for layer in layers_of(model, config, "q_proj k_proj v_proj", "o_proj", ids(2, 40)):
        q, k, v = by_head(layer["q_proj"], 4), by_head(layer["k_proj"], 2), by_head(layer["v_proj"], 2)
        same(q, k, v, layer["mixed"], encoding)


LISTS = {"short_factor": [1.0, 1.05, 1.2, 1.5], "long_factor": [1.0, 3.0, 4.0, 7.5]}


@pytest.mark.parametrize("length", [32, 33, 60])
@pytest.mark.parametrize("share", [1.0, 0.5])
def test_phi3_longrope(length, share, ids):
    """The short list up to the original length, the long one beyond, and one factor for both."""
    head_dim = 8 if share == 1 else 16
    rope = {"rope_type": "longrope", "rope_theta": 10_000.0, "partial_rotary_factor": share, **LISTS}
    config = Phi3Config(
        **SMALL | {"hidden_size": 4 * head_dim}, num_key_value_heads=2, intermediate_size=64, rope_parameters=rope,
        max_position_embeddings=128, original_max_position_embeddings=32,
    )  # fmt: skip
    encoding = lg.Rotary(head_dim, "half", **from_hugging_face(config).options(head_dim))
    factor = (1 + torch.tensor(4.0).log() / torch.tensor(32.0).log()).sqrt()
    assert encoding.frequencies().attention_factor == pytest.approx(float(factor))
    for layer in layers_of(Phi3ForCausalLM, config, "qkv_proj", "o_proj", ids(2, length)):
        q, k, v = by_head(layer["qkv_proj"], 8).split([4, 2, 2], 1)
        same(q, k, v, layer["mixed"], encoding)
        lists = {"short_factor": LISTS["short_factor"], "long_factor": LISTS["short_factor"]}
        short = lg.Rotary(
            head_dim, "half", rotary_dim=8,
            scaling={"name": "longrope", **lists, "original_max_length": 32, "factor": 4.0},
        )  # fmt: skip
        gap = (lg.attend(q, k, v, encoding=short) - lg.attend(q, k, v, encoding=encoding)).abs().max()
        assert (gap > 1e-4) == (length > 32)


MSCALES = [(1.0, 1.0), (0.707, 0.707), (0.7, 1.3), (None, None), (1.0, None), (None, 1.0)]


@pytest.mark.parametrize(("mscale", "all_dim"), MSCALES)
def test_deepseek_v3_rotary_part(mscale, all_dim, ids):
    """8 of 24 dimensions rotate, neighbour with neighbour; yarn, its factor on cos and sin, and its square on all scores."""
    mscales = {"mscale": mscale, "mscale_all_dim": all_dim}
    rope = {"rope_type": "yarn", "rope_theta": 10_000.0, "factor": 40.0, ORIGINAL: 16, "beta_fast": 8, "beta_slow": 1}
    rope |= {name: value for name, value in mscales.items() if value is not None}
    config = DeepseekV3Config(
        **SMALL, intermediate_size=64, num_key_value_heads=4, q_lora_rank=20, kv_lora_rank=24, qk_rope_head_dim=8,
        qk_nope_head_dim=16, v_head_dim=12, first_k_dense_replace=2, max_position_embeddings=640, rope_parameters=rope,
    )  # fmt: skip
    read = from_hugging_face(config)
    encoding = lg.Rotary(24, "interleaved", **read.options(24) | {"rotary_dim": 8})
    g = 0.1 * (all_dim or 0.0) * torch.tensor(40.0, dtype=torch.float64).log() + 1
    assert encoding.softmax_factor == pytest.approx(float(g) ** 2)
    seen = layers_of(DeepseekV3ForCausalLM, config, "q_b_proj kv_a_proj_with_mqa kv_b_proj", "o_proj", ids(2, 50))
    for layer in seen:
        q_still, q_turning = by_head(layer["q_b_proj"], 4).split([16, 8], -1)
        k_still, v = by_head(layer["kv_b_proj"][:, 0], 4).split([16, 12], -1)
        k_turning = layer["kv_a_proj_with_mqa"][:, None, :, -8:].expand(-1, 4, -1, -1)  # one for all heads
        q, k = (
            torch.cat([q_turning, q_still], -1),
            torch.cat([k_turning, k_still], -1),
        )  # ours rotates the first dimensions
        same(q, k, v, layer["mixed"], encoding, scale=24**-0.5 * encoding.softmax_factor)


def test_gemma3_bases_per_layer_type(ids):
    """Local layers rotate by a small base within a window; global ones by a large one, slowed down."""
    ropes = {
        "full_attention": {"rope_type": "linear", "rope_theta": 1_000_000.0, "factor": 8.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
    }
    types = ["sliding_attention", "full_attention", "sliding_attention"]
    config = Gemma3TextConfig(
        **SMALL | {"num_hidden_layers": 3}, num_key_value_heads=2, head_dim=16, intermediate_size=64, layer_types=types,
        sliding_window=9, query_pre_attn_scalar=20, rope_parameters=ropes, attn_implementation="eager",
    )  # fmt: skip
    read = from_hugging_face(config)
    assert isinstance(read, dict)
    encodings = {layer: lg.Rotary(16, "half", **rope.options(16)) for layer, rope in read.items() if rope}
    windows = {"full_attention": lg.Causal(), "sliding_attention": lg.Window(9)}
    seen = layers_of(Gemma3ForCausalLM, config, "q_norm k_norm v_proj", "o_proj", ids(2, 40))
    for layer, kind in zip(seen, types, strict=True):
        q, k, v = layer["q_norm"], layer["k_norm"], by_head(layer["v_proj"], 2)
        same(q, k, v, layer["mixed"], encodings[kind], scale=20**-0.5, mask=windows[kind])


def test_gemma3_before_transformers_5(ids):
    """rope_theta, rope_local_base_freq and rope_scaling say the same as rope_parameters per layer type."""
    old = {"rope_theta": 1_000_000.0, "rope_local_base_freq": 100.0, "rope_scaling": {"type": "linear", "factor": 8.0}}
    ropes = {
        "full_attention": {"rope_type": "linear", "rope_theta": 1_000_000.0, "factor": 8.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
    }
    assert from_hugging_face(old) == from_hugging_face({"rope_parameters": ropes})
