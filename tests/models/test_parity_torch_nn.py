"""Our blocks are torch's: nn.TransformerEncoderLayer, nn.TransformerDecoderLayer and the formulas they are made of."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from longitude.models import LongitudeConfig, LongitudeForMaskedLM, LongitudeForSeq2SeqLM
from tests.support import close

DIM, HEADS, WIDE, LAYERS, VOCABULARY = 24, 4, 40, 3, 31
LENGTHS = [1, 63]


def build(kind, **options):
    """The original's kind of transformer, in float64: LayerNorm, biases everywhere, scaled embeddings and sinusoids."""
    torch.manual_seed(0)
    config = LongitudeConfig(
        vocab_size=VOCABULARY, hidden_size=DIM, num_hidden_layers=LAYERS, num_attention_heads=HEADS,
        intermediate_size=WIDE, norm="layernorm", attention_bias=True, mlp_bias=True, encoding="sinusoidal",
        bos_token_id=0, **options,
    )  # fmt: skip
    model = kind(config).double()
    for name, parameter in model.named_parameters():
        if name.endswith("bias") or "norm" in name:
            nn.init.normal_(parameter, mean=0.0 if name.endswith("bias") else 1.0, std=0.2)
    return model


def attentions_of(ours, theirs):
    """(our attention, torch's, our norm) of a block: of its own tokens and, in a decoder, of the source."""
    parts = [(ours.mixer, theirs.self_attn, ours.mixer_norm)]
    return parts + ([(ours.cross, theirs.multihead_attn, ours.cross_norm)] if ours.cross is not None else [])


def projections(attention, what):
    """Weights or biases of queries, keys and values, as torch packs them."""
    return torch.cat([what(projection) for projection in (attention.q_proj, attention.k_proj, attention.v_proj)])


def torch_stack(model, act, pre):
    """torch's own stack with our weights in it."""
    kind = nn.TransformerDecoderLayer if model.cross else nn.TransformerEncoderLayer
    layer = kind(DIM, HEADS, WIDE, dropout=0.0, activation=act, batch_first=True, norm_first=pre)
    end = nn.LayerNorm(DIM) if pre else None
    if model.cross:
        stack = nn.TransformerDecoder(layer, LAYERS, end).double()
    else:
        stack = nn.TransformerEncoder(layer, LAYERS, end, enable_nested_tensor=False).double()
    with torch.no_grad():
        for ours, theirs in zip(model.layers, stack.layers, strict=True):
            norms = [ours.mlp_norm]
            for attention, their_attention, own_norm in reversed(attentions_of(ours, theirs)):
                their_attention.in_proj_weight.copy_(projections(attention, lambda p: p.weight))
                their_attention.in_proj_bias.copy_(projections(attention, lambda p: p.bias))
                their_attention.out_proj.load_state_dict(attention.o_proj.state_dict())
                norms.insert(0, own_norm)
            for number, own_norm in enumerate(norms, start=1):
                getattr(theirs, f"norm{number}").load_state_dict(own_norm.state_dict())
            theirs.linear1.load_state_dict(ours.mlp.up.state_dict())
            theirs.linear2.load_state_dict(ours.mlp.down.state_dict())
        if pre:
            stack.norm.load_state_dict(model.norm.state_dict())
    return stack


def same_gradients(stack, theirs):
    """Of every kind of weight."""
    for ours, other in zip(stack.layers, theirs.layers, strict=True):
        attentions = attentions_of(ours, other)
        for attention, their_attention, _ in attentions:
            close(projections(attention, lambda p: p.weight.grad), their_attention.in_proj_weight.grad, 1e-9)
            close(projections(attention, lambda p: p.bias.grad), their_attention.in_proj_bias.grad, 1e-9)
            close(attention.o_proj.weight.grad, their_attention.out_proj.weight.grad, 1e-9)
        close(ours.mlp.up.weight.grad, other.linear1.weight.grad, 1e-9)
        close(ours.mlp.down.bias.grad, other.linear2.bias.grad, 1e-9)
        close(ours.mixer_norm.weight.grad, other.norm1.weight.grad, 1e-9)
        close(ours.mlp_norm.bias.grad, getattr(other, f"norm{len(attentions) + 1}").bias.grad, 1e-9)


def sinusoids(length):
    """sin and cos of p / 10000^(2i/dim), interleaved (Vaswani et al. 2017)."""
    angle = torch.arange(length).double()[:, None] / 10_000 ** (torch.arange(0, DIM, 2).double() / DIM)
    return torch.stack([angle.sin(), angle.cos()], -1).flatten(-2)


CASES = [(False, "relu"), (True, "gelu")]


@pytest.mark.one_in(3)
@pytest.mark.parametrize(("pre", "act"), CASES)
@pytest.mark.parametrize("length", LENGTHS)
def test_the_encoder_is_torchs(pre, act, length):
    """Hidden states and the gradients of every kind of weight, of padded batches too."""
    model = build(LongitudeForMaskedLM, norm_position="pre" if pre else "post", hidden_act=act)
    theirs = torch_stack(model.model, act, pre)
    ids = torch.randint(VOCABULARY, (3, length))
    valid = torch.arange(length) < torch.tensor([length, length // 2 + 1, 1])[:, None]
    embed = model.model.embed_tokens.weight.detach().clone().requires_grad_()
    expected = theirs(math.sqrt(DIM) * F.embedding(ids, embed) + sinusoids(length), src_key_padding_mask=~valid)
    out = model.model(ids, attention_mask=valid.long()).last_hidden_state
    close(out[valid], expected[valid], 1e-11)
    direction = torch.randn_like(out) * valid[..., None]
    (out * direction).sum().backward()
    (expected * direction).sum().backward()
    close(model.model.embed_tokens.weight.grad, embed.grad, 1e-9)
    same_gradients(model.model, theirs)


@pytest.mark.one_in(3)
@pytest.mark.parametrize(("pre", "act"), CASES)
@pytest.mark.parametrize(("source", "target"), [(1, 1), (5, 63), (63, 7)])
def test_the_encoder_decoder_is_torchs(pre, act, source, target):
    """Logits, and the gradients of every kind of weight, through cross-attention into the encoder and the one matrix that
    embeds both and predicts."""
    model = build(LongitudeForSeq2SeqLM, norm_position="pre" if pre else "post", hidden_act=act)
    encoder, decoder = torch_stack(model.encoder, act, pre), torch_stack(model.decoder, act, pre)
    x, y = torch.randint(VOCABULARY, (2, source)), torch.randint(VOCABULARY, (2, target))
    valid = torch.arange(source) < torch.tensor([source, source // 2 + 1])[:, None]
    embed = model.encoder.embed_tokens.weight.detach().clone().requires_grad_()
    memory = encoder(math.sqrt(DIM) * F.embedding(x, embed) + sinusoids(source), src_key_padding_mask=~valid)
    masks = {"tgt_mask": torch.ones(target, target).triu(1).bool(), "memory_key_padding_mask": ~valid}
    hidden = decoder(math.sqrt(DIM) * F.embedding(y, embed) + sinusoids(target), memory, **masks)
    expected = hidden @ embed.T
    out = model(x, attention_mask=valid.long(), decoder_input_ids=y).logits
    close(out, expected, 1e-11)
    direction = torch.randn_like(out)
    (out * direction).sum().backward()
    (expected * direction).sum().backward()
    close(model.encoder.embed_tokens.weight.grad, embed.grad, 1e-9)
    same_gradients(model.encoder, encoder)
    same_gradients(model.decoder, decoder)
