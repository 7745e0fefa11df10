"""Blocks with RWKV's channel mix, whose last token stands in the cache; without an MLP; a norm at the input."""

import pytest
import torch

import longitude as lg
from longitude.recurrent import RWKVChannelMix
from longitude.testing import fill
from longitude.testing.battery.models import require_documents_across_calls, require_refused_calls
from tests.support import close, refused

KINDS = {
    "rwkv4": {"mixer": "rwkv4", "mlp": "rwkv", "embedding_norm": True, "norm": "layernorm"},
    "rwkv6, norms behind": {"mixer": "rwkv6", "mlp": "rwkv", "norm_position": "post"},
    "mamba": {"mixer": "mamba", "mlp": "none"},
    "attention": {"encoding": "rope", "mlp": "none", "embedding_norm": True},
}
every_kind = pytest.mark.parametrize("kind", KINDS)
with_channel_mix = pytest.mark.parametrize("kind", [kind for kind in KINDS if "rwkv" in kind])


@pytest.mark.one_in(2)
@with_channel_mix
@torch.no_grad()
def test_documents_and_refused_calls(kind, build):
    model = build(**{"encoding": "auto", **KINDS[kind]}, vocab_size=29)
    require_documents_across_calls(kind, model)
    require_refused_calls(kind, model)


@with_channel_mix
def test_every_parameter_learns_and_checkpointing_changes_nothing(kind, build, ids):
    model, x = fill(build(**{"encoding": "auto", **KINDS[kind]})).train(), ids(2, 9)
    grads = []
    for again in (False, True):
        if again:
            (getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable)()
        model.zero_grad()
        model(x, labels=x).loss.backward()
        grads.append({name: parameter.grad.clone() for name, parameter in model.named_parameters()})
    for name, grad in grads[0].items():
        assert grad.any(), name
        close(grads[1][name], grad)


def test_what_stands_in_a_block():
    sizes = {"hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 61}
    bare = lg.LongitudeForCausalLM(lg.LongitudeConfig(**sizes, mixer="mamba", mlp="none"))
    assert bare.config.intermediate_size is None and bare.model.layers[0].mlp is None
    assert not [name for name, _ in bare.named_parameters() if "mlp" in name or "embed_norm" in name]
    mixed = lg.LongitudeForCausalLM(lg.LongitudeConfig(**sizes, mixer="rwkv4", mlp="rwkv", embedding_norm=True))
    assert mixed.model.layers[0].mlp.key.out_features == mixed.config.intermediate_size == 96
    assert type(mixed.model.embed_norm) is torch.nn.RMSNorm
    close(RWKVChannelMix(16).time_mix_key.flatten(), (torch.arange(16) / 16).sqrt(), atol=1e-7)


def test_an_encoder_has_no_channel_mix():
    with refused("'rwkv'"):
        lg.LongitudeForSeq2SeqLM(lg.LongitudeConfig(mixer="rwkv4", mlp="rwkv", decoder_start_token_id=0))
