"""Attention layers of transformers' models with biases, from their projections and our encodings: Bloom, MPT, Falcon, T5."""

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    BloomConfig,
    BloomForCausalLM,
    FalconConfig,
    FalconForCausalLM,
    MptConfig,
    MptForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)

import longitude as lg
from tests.support import by_head, random_model, recorded

MASK = torch.arange(40) >= torch.tensor([[0], [13]])  # the second row is padded on the left
POSITIONS = (MASK.long().cumsum(1) - 1).clamp(min=0)
SPECIAL: dict[str, Any] = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}


def same(mine: Tensor, theirs: Tensor, real: Tensor = MASK, within: float = 5e-6) -> None:
    """[B, H, L, D] against [B, L, H * D] at real tokens, up to float32."""
    mine, theirs = mine.transpose(1, 2).flatten(2)[real], theirs[real]
    torch.testing.assert_close(mine, theirs, atol=within * float(theirs.std()), rtol=0)


def padded(encoding, q, k, v, rows: slice = slice(0, 40), **options) -> Tensor:
    """Queries of `rows`, keys up to their last."""
    mask = lg.Causal() & lg.Padding(MASK[:, : rows.stop])
    places = {"q_positions": POSITIONS[:, rows], "k_positions": POSITIONS[:, : rows.stop]}
    k, v = k[:, :, : rows.stop], v[:, :, : rows.stop]
    return lg.attend(q[:, :, rows], k, v, encoding=encoding, mask=mask, **places, **options)


@pytest.mark.parametrize("num_heads", [4, 6, 12])
@torch.no_grad()
def test_bloom_padded_and_cached(num_heads, ids):
    """Its bias m_h j, of the tokens that are not padding, is ours under a causal softmax: whole, and token by token."""
    config = BloomConfig(vocab_size=61, hidden_size=48, n_layer=2, n_head=num_heads, **SPECIAL)
    theirs, x, encoding = random_model(BloomForCausalLM, config, 0.2), ids(2, 40), lg.ALiBi(num_heads)
    seen = recorded(theirs, "query_key_value", "dense")
    theirs(x, attention_mask=MASK.long())
    steps = [slice(0, 25), *(slice(i, i + 1) for i in range(25, 33)), slice(33, 40)]
    cache = None
    for step in steps:
        cache = theirs(x[:, step], attention_mask=MASK[:, : step.stop].long(), past_key_values=cache).past_key_values

    assert len(seen) == 2
    for layer in seen.values():
        q, k, v = layer["query_key_value"][0].unflatten(-1, (num_heads, 3, -1)).permute(3, 0, 2, 1, 4)
        whole, *chunks = layer["mixed"]
        same(padded(encoding, q, k, v), whole)
        for step, piece in zip(steps, chunks, strict=True):
            same(padded(encoding, q, k, v, step), piece, MASK[:, step])
        wrong = lg.ALiBi(num_heads, slopes=[2 ** (-8.01 * h / num_heads) for h in range(1, num_heads + 1)])
        assert (padded(wrong, q, k, v) - padded(encoding, q, k, v)).abs().max() > 1e-4


@pytest.mark.parametrize("recipe", ["paper", "mpt"])
@pytest.mark.parametrize("num_heads", [4, 6, 12])
@torch.no_grad()
def test_mpt(num_heads, recipe, ids):
    config = MptConfig(d_model=48, n_heads=num_heads, n_layers=2, vocab_size=61, max_seq_len=64, **SPECIAL)
    theirs, encoding = random_model(MptForCausalLM, config, 0.2), lg.ALiBi(num_heads, slopes=recipe)
    seen = recorded(theirs, "Wqkv", "out_proj")
    theirs(ids(2, 40), attention_mask=MASK.long())
    assert len(seen) == 2
    for layer in seen.values():
        q, k, v = (by_head(x, num_heads) for x in layer["Wqkv"][0].chunk(3, -1))
        same(padded(encoding, q, k, v), layer["mixed"][0])
        assert (padded(None, q, k, v) - padded(encoding, q, k, v)).abs().max() > 0.01


@pytest.mark.parametrize(("attention", "times"), [("sdpa", 1), ("eager", 2)])
@pytest.mark.parametrize("kv_heads", ["one", "all"])
@pytest.mark.parametrize("num_heads", [4, 6])
@torch.no_grad()
def test_falcon_scales_its_bias(num_heads, kv_heads, attention, times, ids):
    """Scores and bias are multiplied by 1/sqrt(head_dim) together: slopes so much smaller. transformers' eager code adds that
    bias twice, once inside its mask. (It is made in bfloat16, exact here: slopes are powers of two, positions below 256.)"""
    config = FalconConfig(
        vocab_size=61, hidden_size=48, num_hidden_layers=2, num_attention_heads=num_heads, alibi=True, **SPECIAL,
        multi_query=kv_heads == "one", new_decoder_architecture=False, parallel_attn=False, attn_implementation=attention,
    )  # fmt: skip
    theirs, count = random_model(FalconForCausalLM, config, 0.2), 1 if kv_heads == "one" else num_heads
    slopes = [times * m * (48 // num_heads) ** -0.5 for m in lg.ALiBi(num_heads).slopes]
    seen = recorded(theirs, "query_key_value", "dense")
    theirs(ids(2, 40), attention_mask=MASK.long())
    assert len(seen) == 2
    for layer in seen.values():
        fused = layer["query_key_value"][0]
        if count == 1:
            q, k, v = by_head(fused, num_heads + 2).split([num_heads, 1, 1], 1)
        else:
            q, k, v = fused.unflatten(-1, (num_heads, 3, -1)).permute(3, 0, 2, 1, 4)
        same(padded(lg.ALiBi(num_heads, slopes=slopes), q, k, v), layer["mixed"][0])
        assert (padded(lg.ALiBi(num_heads), q, k, v) - padded(None, q, k, v)).abs().max() > 0.01


@pytest.mark.parametrize(("buckets", "distance"), [(32, 128), (8, 20), (10, 24)])
@torch.no_grad()
def test_t5(buckets, distance, ids):
    """One table per stack, shared by its layers; scores are not scaled; the encoder looks both ways; cross-attention has none."""
    config = T5Config(
        vocab_size=61, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4, relative_attention_num_buckets=buckets,
        relative_attention_max_distance=distance, decoder_start_token_id=0, pad_token_id=0, initializer_factor=0.5,
    )  # fmt: skip
    theirs = random_model(T5ForConditionalGeneration, config, 0.2)
    for stack in (theirs.encoder, theirs.decoder):
        stack.block[0].layer[0].SelfAttention.relative_attention_bias.weight.data.normal_()
    seen = recorded(theirs, "q k v", "o")
    source, target = ids(2, 40), ids(2, 25, seed=2)
    theirs(source, attention_mask=MASK.long(), decoder_input_ids=target)
    assert len(seen) == 6
    for name, layer in seen.items():
        q, k, v = (by_head(layer[part][0], 4) for part in "qkv")
        stack, own = name.split(".")[0], name.rsplit(".")[-1]
        options: dict = {"scale": 1.0}
        real = MASK if stack == "encoder" else torch.ones(2, 25, dtype=torch.bool)
        if stack == "encoder" or own == "EncDecAttention":
            options["mask"] = lg.NoMask() & lg.Padding(MASK)
        if own == "SelfAttention":
            encoding = lg.T5Bias(4, buckets, distance, bidirectional=stack == "encoder")
            encoding.table.data = theirs.get_submodule(f"{stack}.block.0.layer.0.{own}.relative_attention_bias").weight
            options["encoding"] = encoding
        same(lg.attend(q, k, v, **options), layer["mixed"][0], real)
        differs = lg.attend(q, k, v, **options | {"scale": 8**-0.5}) - lg.attend(q, k, v, **options)
        assert differs.abs().max() > 0.01


@torch.no_grad()
def test_t5_cached(ids):
    """Its decoder, token by token: queries are the last."""
    config = T5Config(
        vocab_size=61, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4, relative_attention_num_buckets=8,
        relative_attention_max_distance=20, decoder_start_token_id=0, pad_token_id=0, initializer_factor=0.5,
    )  # fmt: skip
    theirs, source, target = random_model(T5ForConditionalGeneration, config, 0.2), ids(2, 12), ids(2, 30, seed=2)
    table = theirs.decoder.block[0].layer[0].SelfAttention.relative_attention_bias.weight
    table.data.normal_()
    encoding = lg.T5Bias(4, 8, 20)
    encoding.table.data = table.data
    memory, cache = theirs.encoder(source), None
    seen = recorded(theirs.decoder, "q k v", "o")
    steps = [slice(0, 11), *(slice(i, i + 1) for i in range(11, 26)), slice(26, 30)]
    for step in steps:
        out = theirs(encoder_outputs=memory, decoder_input_ids=target[:, step], past_key_values=cache)
        cache = out.past_key_values
    layers = [layer for name, layer in seen.items() if name.endswith("SelfAttention")]
    assert len(layers) == 2
    for layer in layers:
        q, k, v = (by_head(torch.cat(layer[part], 1), 4) for part in "qkv")
        for step, mixed in zip(steps, layer["mixed"], strict=True):
            call = {"k": k[:, :, : step.stop], "v": v[:, :, : step.stop], "scale": 1.0}
            same(
                lg.attend(q[:, :, step], encoding=encoding, **call),
                mixed,
                torch.ones(mixed.shape[:2], dtype=torch.bool),
            )
