"""Heads in groups: which head of keys a query head reads, everywhere, and heads pooled by groups."""

from functools import partial

import pytest
import torch
from torch import nn
from torch.testing import assert_close
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM

import longitude as lg
from longitude.attention.grouped_heads import pool_heads
from longitude.attention.layers.cross import CrossAttention
from tests.support import random, refused, refused_calls

DIM, HEADS, SIZE = 32, 8, 4


def make(**options) -> lg.MultiHeadAttention:
    torch.manual_seed(3)
    return lg.MultiHeadAttention(DIM, HEADS, HEADS, lg.Rotary(SIZE, "half"), **options).double()


def test_cross_attention_groups_heads_alike():
    torch.manual_seed(0)
    grouped, wide = CrossAttention(DIM, HEADS, 2), CrossAttention(DIM, HEADS)
    for name, x in grouped.state_dict().items():
        each = x.unflatten(0, (2, SIZE)).repeat_interleave(4, 0).flatten(0, 1) if name[:2] in ("k_", "v_") else x
        wide.get_parameter(name).data.copy_(each)
    x, source = (random(2, length, DIM, dtype=torch.float32) for length in (5, 9))
    assert_close(grouped(x, source), wide(x, source))


# ---- pooling ---------------------------------------------------------------------------------------------------------
def test_a_head_is_the_mean_of_its_group():
    layer = make(bias=True)
    new = pool_heads(layer, 2)
    assert (new.num_kv_heads, new.k_proj.out_features, layer.num_kv_heads) == (2, 2 * SIZE, HEADS)
    before, after = layer.state_dict(), new.state_dict()
    for name, tensor in before.items():
        pooled = name.startswith(("k_proj", "v_proj"))
        assert_close(after[name], tensor.unflatten(0, (2, 4, SIZE)).mean(1).flatten(0, 1) if pooled else tensor)


def test_a_layer_that_is_more_than_its_weight_is_not_averaged():
    layer = make()
    layer.v_proj.register_forward_hook(lambda *given: None)
    with refused("v_proj"):
        pool_heads(layer, 2)


SHAPE = {"vocab_size": 40, "hidden_size": DIM, "num_hidden_layers": 2, "num_attention_heads": HEADS}


def ours(**options):
    return lg.LongitudeForCausalLM(lg.LongitudeConfig(**SHAPE, **options))


def stock(config, model):
    return model(config(**SHAPE, num_key_value_heads=HEADS, intermediate_size=48))


MODELS = {
    "longitude": lambda: ours(attention_bias=True),
    "hybrid": lambda: ours(mixers=["attention", {"name": "window", "size": 5}]),
    "llama": lambda: stock(LlamaConfig, LlamaForCausalLM),
    "qwen2": lambda: stock(Qwen2Config, Qwen2ForCausalLM),
}


@pytest.mark.parametrize("name", MODELS)
def test_a_model_of_equal_heads_pooled_is_the_same_model(name, tmp_path):
    torch.manual_seed(0)
    model = MODELS[name]().eval()
    with torch.no_grad():
        for key, tensor in model.state_dict().items():
            if "k_proj" in key or "v_proj" in key:
                heads = tensor.unflatten(0, (2, 4, SIZE))
                tensor.copy_(heads[:, :1].expand_as(heads).flatten(0, 2))
    pooled = pool_heads(model, 2)
    assert pooled.config.num_key_value_heads == 2 and model.config.num_key_value_heads == HEADS
    assert pooled.num_parameters() < model.num_parameters() and not pooled.training
    ids = torch.randint(3, 40, (2, 11))
    assert_close(pooled(ids).logits, model(ids).logits)
    assert_close(*(m.generate(ids, max_new_tokens=6, do_sample=False, pad_token_id=0) for m in (model, pooled)))
    pooled.save_pretrained(tmp_path)
    assert_close(type(pooled).from_pretrained(tmp_path)(ids).logits, pooled(ids).logits)


# ---- what does not fit -----------------------------------------------------------------------------------------------
test_what_does_not_fit = refused_calls(
    [
        *((partial(pool_heads, trained, n), "num_kv_heads") for n in (0, 3, 16, 2.0) for trained in (make(), ours())),
        (partial(pool_heads, nn.Linear(4, 4), 2), "pool_heads", "MultiHeadAttention"),
        (partial(pool_heads, "llama", 2), "pool_heads", "str"),
        (
            lambda: pool_heads(GPT2LMHeadModel(GPT2Config(vocab_size=40, n_embd=32, n_layer=1, n_head=4)), 2),
            "GPT2LMHeadModel",
        ),
        (lambda: pool_heads(ours(mixer="latent"), 2), "k_proj", "v_proj"),
        (lambda: pool_heads(ours(encoding="path"), 2), "PaTH"),
        (lambda: pool_heads(make(short_conv="kv"), 2), "MultiHeadAttention", "short_conv"),
    ]
)


def test_a_mixer_with_its_own_number_of_heads() -> None:
    """Means are of the heads that a layer has, whatever the config has for the others."""
    model = ours(mixer={"name": "attention", "num_kv_heads": 4})
    before, after = (m.model.layers[0].mixer.k_proj.weight for m in (model, lg.attention.pool_heads(model, 2)))
    assert_close(after, before.unflatten(0, (2, 2, 4)).mean(1).flatten(0, 1))
