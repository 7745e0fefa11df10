"""Heads in groups: which head of keys a query head reads, everywhere, and heads pooled by groups."""

import pytest
import torch
from torch import nn
from torch.testing import assert_close
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM

import longitude as lg
from longitude.attention.grouped_heads import pool_heads
from longitude.attention.layers.cross import CrossAttention
from tests.support import close, random

DIM, HEADS, SIZE = 32, 8, 4


def make(num_kv_heads=HEADS, **options) -> lg.MultiHeadAttention:
    torch.manual_seed(3)
    return lg.MultiHeadAttention(DIM, HEADS, num_kv_heads, lg.Rotary(SIZE, "half"), **options).double()


def tokens(batch: int, length: int, seed: int = 0) -> torch.Tensor:
    return random(batch, length, DIM, seed=seed)


def spread(grouped: lg.MultiHeadAttention) -> lg.MultiHeadAttention:
    """The multi-head layer in which query head h has a copy of head h // (H / Hkv) of keys and values."""
    wide, each = make(bias=grouped.k_proj.bias is not None), HEADS // grouped.num_kv_heads
    state = grouped.state_dict()
    for name in state:
        if name.startswith(("k_proj", "v_proj")):
            heads = state[name].unflatten(0, (grouped.num_kv_heads, SIZE))
            state[name] = torch.stack([heads[h // each] for h in range(HEADS)]).flatten(0, 1)
    wide.load_state_dict(state)
    return wide


# ---- the published order ---------------------------------------------------------------------------------------------
@pytest.mark.parametrize("num_kv_heads", [1, 2, 4, 8])
def test_query_head_h_reads_head_h_over_group_size(num_kv_heads):
    """In the layer, whole and through its cache (Ainslie et al. 2023; repeat_interleave, not tiling)."""
    grouped, x = make(num_kv_heads, bias=True), tokens(2, 17)
    wide = spread(grouped)
    close(grouped(x), wide(x))
    with torch.no_grad():
        cache = grouped.cache_layer()
        chunks = [grouped(x[:, :9], cache=cache), *(grouped(x[:, t : t + 1], cache=cache) for t in range(9, 17))]
    assert cache.keys.shape[1] == num_kv_heads
    close(torch.cat(chunks, 1), wide(x))


def test_cross_attention_groups_heads_alike():
    torch.manual_seed(0)
    grouped, wide = CrossAttention(DIM, HEADS, 2), CrossAttention(DIM, HEADS)
    state = grouped.state_dict()
    for name in ("k_proj.weight", "v_proj.weight"):
        state[name] = state[name].unflatten(0, (2, SIZE)).repeat_interleave(4, 0).flatten(0, 1)
    wide.load_state_dict(state)
    x, source = tokens(2, 5).float(), tokens(2, 9, 1).float()
    assert_close(grouped(x, source), wide(x, source))


# ---- pooling a layer -------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("num_kv_heads", [1, 2, 4, 8])
def test_equal_heads_pooled_are_the_same_function(num_kv_heads, bias):
    grouped, x = make(num_kv_heads, bias=bias), tokens(2, 17)
    pooled = pool_heads(spread(grouped), num_kv_heads)
    assert pooled.num_kv_heads == num_kv_heads and pooled.k_proj.out_features == num_kv_heads * SIZE
    for name, tensor in pooled.state_dict().items():
        assert_close(tensor, grouped.state_dict()[name])
    assert_close(pooled(x), grouped(x))


def test_a_head_is_the_mean_of_its_group():
    layer = make(bias=True)
    pooled = pool_heads(layer, 2)
    for name in ("k_proj", "v_proj"):
        before, after = getattr(layer, name), getattr(pooled, name)
        for group in range(2):
            heads = [slice(h * SIZE, (h + 1) * SIZE) for h in range(4 * group, 4 * group + 4)]
            own = slice(group * SIZE, (group + 1) * SIZE)
            assert_close(after.weight[own], sum(before.weight[h] for h in heads) / 4)
            assert_close(after.bias[own], sum(before.bias[h] for h in heads) / 4)
    assert_close(pooled.q_proj.weight, layer.q_proj.weight)
    assert_close(pooled.o_proj.weight, layer.o_proj.weight)


def test_as_many_heads_as_there_are_is_the_identity_and_a_copy():
    layer, x = make(), tokens(2, 9)
    pooled = pool_heads(layer, HEADS)
    assert_close(pooled(x), layer(x))
    with torch.no_grad():
        pooled.k_proj.weight.zero_()
        pooled.q_proj.weight.zero_()
    assert layer.k_proj.weight.any() and layer.q_proj.weight.any()


# ---- pooling a model -------------------------------------------------------------------------------------------------
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
@pytest.mark.parametrize("num_kv_heads", [0, 3, 16, 2.0])
def test_a_number_that_does_not_divide(num_kv_heads):
    for trained in (make(), ours()):
        with pytest.raises(ValueError, match="num_kv_heads"):
            pool_heads(trained, num_kv_heads)


def test_what_has_no_heads_of_keys():
    for trained, message in (
        (nn.Linear(4, 4), "expected a MultiHeadAttention, or a model whose config"),
        ("llama", "got str"),
        (GPT2LMHeadModel(GPT2Config(vocab_size=40, n_embd=32, n_layer=1, n_head=4)), "got GPT2LMHeadModel"),
        (ours(mixer="latent"), "LongitudeForCausalLM has no projections called k_proj and v_proj"),
        (ours(encoding="path"), "PaTH is built for each head of keys"),
    ):
        with pytest.raises(ValueError, match=message):
            pool_heads(trained, 2)


def test_a_mixer_with_its_own_number_of_heads() -> None:
    """Means are of the heads that a layer has, whatever the config has for the others."""
    model = ours(mixer={"name": "attention", "num_kv_heads": 4})
    before, after = (m.model.layers[0].mixer.k_proj.weight for m in (model, lg.pool_heads(model, 2)))
    assert_close(after, before.unflatten(0, (2, 2, 4)).mean(1).flatten(0, 1))
