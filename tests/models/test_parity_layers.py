"""Attention layers of transformers' models, from their projections and our encodings; rotary ones read from their configs."""

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    BloomConfig,
    BloomForCausalLM,
    FalconConfig,
    FalconForCausalLM,
    GPTJConfig,
    GPTJForCausalLM,
    MptConfig,
    MptForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)

import longitude as lg
from tests.support import by_head, random_model, recorded

MASK = torch.arange(40) >= torch.tensor([[0], [13]])  # the second row is padded on the left
POSITIONS = (MASK.long().cumsum(1) - 1).clamp(min=0)
PADDED: dict[str, Any] = {"mask": lg.Causal() & lg.Padding(MASK), "q_positions": POSITIONS, "k_positions": POSITIONS}
STEPS = [slice(0, 25), *(slice(i, i + 1) for i in range(25, 33)), slice(33, 40)]
SPECIAL: dict[str, Any] = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
SMALL: dict[str, Any] = {"vocab_size": 61, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
SMALL |= {"initializer_range": 0.2, "intermediate_size": 64, **SPECIAL}


def layers_of(
    model: type, config: Any, outputs: str, last: str, x: Tensor, count: int = 2, dtype=torch.float64, **inputs
) -> list[dict[str, Tensor]]:
    """What one pass of a random model shows of each attention layer."""
    theirs = random_model(model, config, 0.2).to(dtype)
    seen = recorded(theirs, outputs, last)
    with torch.no_grad():
        theirs(x, **inputs)
    assert len(seen) == count
    return list(seen.values())


def same(q, k, v, theirs: Tensor, encoding, real: Tensor | None = None, far: float = 0.01, **options) -> None:
    """attend(q, k, v) is what their layer hands to its last projection at real tokens, up to the float32 of their angles and
    softmax; and the encoding is not idle."""
    real = torch.ones(theirs.shape[:2], dtype=torch.bool) if real is None else real
    mine, without = (
        lg.attend(q, k, v, encoding=either, **options).transpose(1, 2).flatten(2)[real] for either in (encoding, None)
    )
    theirs, size = theirs[real], float(theirs[real].std())
    torch.testing.assert_close(mine, theirs, atol=1e-5 * size, rtol=0)
    assert encoding is None or (without - theirs).abs().max() > far * size


# ---- biases ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("num_heads", [4, 6, 12])
@torch.no_grad()
def test_bloom_padded_and_cached(num_heads, ids):
    """Its bias m_h j, of the tokens that are not padding, is ours under a causal softmax: token by token."""
    config = BloomConfig(vocab_size=61, hidden_size=48, n_layer=2, n_head=num_heads, **SPECIAL)
    theirs, x, cache = random_model(BloomForCausalLM, config, 0.2), ids(2, 40), None
    seen = recorded(theirs, "query_key_value", "dense")
    for step in STEPS:
        cache = theirs(x[:, step], attention_mask=MASK[:, : step.stop].long(), cache=cache).cache
    assert len(seen) == 2
    for layer in seen.values():
        q, k, v = layer["query_key_value"].unflatten(-1, (num_heads, 3, -1)).permute(3, 0, 2, 1, 4)
        same(q, k, v, layer["mixed"], lg.ALiBi(num_heads), MASK, **PADDED)


@pytest.mark.parametrize("num_heads", [4, 6, 12])
def test_mpt(num_heads, ids):
    config = MptConfig(d_model=48, n_heads=num_heads, n_layers=2, vocab_size=61, max_seq_len=64, **SPECIAL)
    inputs = {"attention_mask": MASK.long(), "dtype": torch.float32}  # in float64 theirs makes NaN of padding
    for layer in layers_of(MptForCausalLM, config, "Wqkv", "out_proj", ids(2, 40), **inputs):
        q, k, v = (by_head(x, num_heads) for x in layer["Wqkv"].chunk(3, -1))
        same(q, k, v, layer["mixed"], lg.ALiBi(num_heads), MASK, **PADDED)


@pytest.mark.parametrize(("attention", "times"), [("sdpa", 1), ("eager", 2)])
@pytest.mark.parametrize("kv_heads", ["one", "all"])
@pytest.mark.parametrize("num_heads", [4, 6])
def test_falcon_scales_its_bias(num_heads, kv_heads, attention, times, ids):
    """Scores and bias are multiplied by 1/sqrt(head_dim) together: slopes so much smaller. transformers' eager code adds that
    bias twice, once inside its mask. (It is made in bfloat16, exact here: slopes are powers of two, positions below 256.)"""
    config = FalconConfig(
        vocab_size=61, hidden_size=48, num_hidden_layers=2, num_attention_heads=num_heads, alibi=True, **SPECIAL,
        multi_query=kv_heads == "one", new_decoder_architecture=False, parallel_attn=False, attn_implementation=attention,
    )  # fmt: skip
    slopes = [times * m * (48 // num_heads) ** -0.5 for m in lg.ALiBi(num_heads).slopes]
    inputs = {"attention_mask": MASK.long()}
    for layer in layers_of(FalconForCausalLM, config, "query_key_value", "dense", ids(2, 40), **inputs):
        fused = layer["query_key_value"]
        if kv_heads == "one":
            q, k, v = by_head(fused, num_heads + 2).split([num_heads, 1, 1], 1)
        else:
            q, k, v = fused.unflatten(-1, (num_heads, 3, -1)).permute(3, 0, 2, 1, 4)
        same(q, k, v, layer["mixed"], lg.ALiBi(num_heads, slopes=slopes), MASK, **PADDED)


@pytest.mark.parametrize(("buckets", "distance"), [(32, 128), (8, 20), (10, 24)])
@torch.no_grad()
def test_t5(buckets, distance, ids):
    """One table per stack, shared by its layers; scores are not scaled; the encoder looks both ways; cross-attention has none.
    The decoder runs with its cache."""
    config = T5Config(
        vocab_size=61, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4, relative_attention_num_buckets=buckets,
        relative_attention_max_distance=distance, decoder_start_token_id=0, pad_token_id=0, initializer_factor=0.5,
    )  # fmt: skip
    theirs = random_model(T5ForConditionalGeneration, config, 0.2).double()
    tables = {}
    for name, stack in (("encoder", theirs.encoder), ("decoder", theirs.decoder)):
        tables[name] = stack.block[0].layer[0].SelfAttention.relative_attention_bias.weight
        tables[name].data.normal_()
    seen, target, cache = recorded(theirs, "q k v", "o"), ids(2, 40, seed=2), None
    memory = theirs.encoder(ids(2, 40), attention_mask=MASK.long())
    for step in STEPS:
        inputs = {"encoder_outputs": memory, "attention_mask": MASK.long(), "decoder_input_ids": target[:, step]}
        cache = theirs(**inputs, cache=cache).cache
    assert len(seen) == 6
    for name, layer in seen.items():
        q, k, v = (by_head(layer[part], 4) for part in "qkv")
        stack, kind = name.split(".")[0], name.rsplit(".")[-1]
        encoding = None
        if kind == "SelfAttention":
            encoding = lg.T5Bias(4, buckets, distance, bidirectional=stack == "encoder").double()
            encoding.table.data = tables[stack].data
        of_source = stack == "encoder" or kind == "EncDecAttention"
        mask = lg.NoMask() & lg.Padding(MASK) if of_source else lg.Causal()
        same(q, k, v, layer["mixed"], encoding, MASK if stack == "encoder" else None, scale=1.0, mask=mask)


# ---- rotations -------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("rotary_dim", [4, 8, 12])
def test_gptj_interleaved(rotary_dim, ids):
    """Its base is always 10000, which its config does not hold."""
    sizes = {"vocab_size": 61, "n_embd": 48, "n_layer": 2, "n_head": 4, "n_positions": 64, "initializer_range": 0.2}
    config, encoding = GPTJConfig(**sizes, rotary_dim=rotary_dim), lg.Rotary(12, "interleaved", rotary_dim=rotary_dim)
    inputs = {"attention_mask": MASK.long(), "position_ids": POSITIONS}
    for layer in layers_of(GPTJForCausalLM, config, "q_proj k_proj v_proj", "out_proj", ids(2, 40), **inputs):
        q, k, v = (by_head(layer[f"{name}_proj"], 4) for name in "qkv")
        same(q, k, v, layer["mixed"], encoding, MASK, **PADDED)
