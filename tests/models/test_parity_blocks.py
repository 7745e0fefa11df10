"""Given the weights of another's model, its logits and gradients: QK-norm, gates, softcaps, convolutions, norms on both sides."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AfmoeConfig, AutoModelForCausalLM, Gemma2Config, Gemma3TextConfig, Qwen3Config, Qwen3NextConfig

from longitude.models import LongitudeConfig, LongitudeForCausalLM
from tests.models.test_parity import NAMES, SMALL, decoded, same
from tests.support import parameter_gradients

try:
    from transformers.models.inkling.configuration_inkling import InklingTextConfig
    from transformers.models.inkling.modeling_inkling import InklingForCausalLM
except ImportError:  # older ones
    InklingTextConfig = InklingForCausalLM = None

TRAINED = 24
"""Positions of their configs; sequences are longer."""
SHAPE: dict[str, Any] = SMALL | {"num_hidden_layers": 2, "max_position_embeddings": TRAINED, "head_dim": 8}
ROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0}, "pad_token_id": 0}
GEMMA: dict[str, Any] = SHAPE | ROPE | {"sliding_window": 5, "layer_types": ["sliding_attention", "full_attention"]}
BOTH = {"post_attention_layernorm": "after.mixer_norm"}
for part in ("feedforward", "mlp"):
    BOTH |= {f"pre_{part}_layernorm": "mlp_norm", f"post_{part}_layernorm": "after.mlp_norm"}
LOCAL = {"mixers": [{"name": "window", "size": 5}, "attention"]}
SANDWICH = LOCAL | {"norm_position": "both", "embedding_scale": 32**0.5, "hidden_act": "geglu_tanh"}
GLOBALS = {"rope_parameters": dict.fromkeys(("full_attention", "sliding_attention"), ROPE["rope_parameters"])}
INKLING = {
    "head_dim": 8, "swa_head_dim": 8, "swa_num_attention_heads": 4, "swa_num_key_value_heads": 2, "sliding_window_size": 5,
    "layer_types": ["hybrid_sliding", "hybrid"], "mlp_layer_types": ["dense"] * 2, "logits_mup_width_multiplier": 1.0,
    "rel_extent": 8, "d_rel": 2, "pad_token_id": 0,
}  # fmt: skip
ROTATION = {"name": "rope", "layout": "half", "angle_dtype": "float32"}
FAMILIES: dict[str, tuple[Any, dict[str, Any]]] = {
    "qwen3": (Qwen3Config(**SHAPE, **ROPE), {"qk_norm": True, "encoding": ROTATION}),
    "qwen3_next": (
        Qwen3NextConfig(
            **SHAPE, num_experts=0, layer_types=["full_attention"] * 2, pad_token_id=0,
            rope_parameters={**ROPE["rope_parameters"], "partial_rotary_factor": 0.5},
        ),
        {"qk_norm": True, "output_gate": True, "encoding": ROTATION | {"rotary_dim": 4}},
    ),
    "afmoe": (
        AfmoeConfig(**GEMMA, num_dense_layers=2),
        LOCAL | {"norm_position": "both", "qk_norm": True, "output_gate": True, "encodings": [ROTATION, "nope"]},
    ),
    "gemma2": (
        Gemma2Config(**GEMMA, attn_logit_softcapping=2.0, final_logit_softcapping=None, query_pre_attn_scalar=8),
        SANDWICH | {"score_softcap": 2.0, "encoding": ROTATION},
    ),
    "gemma3_text": (
        Gemma3TextConfig(**GEMMA | GLOBALS, query_pre_attn_scalar=8, final_logit_softcapping=None),
        SANDWICH | {"qk_norm": True, "encoding": ROTATION},
    ),
    "inkling": (
        InklingTextConfig(**SHAPE | INKLING) if InklingTextConfig else None,
        LOCAL | {"qk_norm": True, "attention_scale": 1 / 8, "short_conv": ["kv", "output"], "encoding": "nope"}
        | {"embedding_norm": True},
    ),
}  # fmt: skip


def pair(family: str) -> tuple[Any, LongitudeForCausalLM]:
    """Their model with random weights, its norms and convolutions included, and ours with the same."""
    config, options = FAMILIES[family]
    if config is None:
        pytest.skip(f"this transformers has no {family}")
    torch.manual_seed(0)
    theirs = (InklingForCausalLM(config) if family == "inkling" else AutoModelForCausalLM.from_config(config)).eval()
    for name, parameter in theirs.named_parameters():
        if "norm" in name:
            parameter.data += 0.3 * torch.randn_like(parameter)
        if "conv1d" in name:
            parameter.data = 0.5 * torch.randn_like(parameter)
        if "rel_logits" in name or "mlp_sconv" in name:  # a bias of its own, and a convolution outside of attention
            parameter.data.zero_()
    shape = {name: getattr(config, name) for name in SHAPE if name not in ("initializer_range", "head_dim")}
    mine = LongitudeForCausalLM(
        LongitudeConfig(**{
            **shape, "embedding_scale": 1.0, "rms_norm_eps": config.rms_norm_eps,
            "tie_word_embeddings": getattr(config, "tie_word_embeddings", False), **options,
        })
    ).eval()  # fmt: skip
    mine.load_state_dict(as_ours(family, theirs.state_dict(), 1.0))
    return theirs, mine


def as_ours(family: str, theirs: dict[str, Tensor], added: float) -> dict[str, Tensor]:
    """Their weights by our names. added: what norms of 1 + weight add, 0 for gradients."""
    weights: dict[str, Tensor] = {}
    for name, x in theirs.items():
        if any(part in name for part in ("rel_logits", "mlp_sconv", "r_proj", "global_scale")):
            continue
        names = NAMES | BOTH if "afmoe" in family or "gemma" in family else NAMES
        ours_name = ".".join(names.get(part, part) for part in name.split("."))
        ours_name = ours_name.replace("mixer.gate", "mixer.gate_proj").replace("embed_tokens.embed_norm", "embed_norm")
        ours_name = ours_name.replace("attn_sconv.conv1d", "mixer.output_conv").replace("_sconv.conv1d", "_conv")
        if "norm" in ours_name and family in ("qwen3_next", "gemma2", "gemma3_text"):
            x = x + added
        if family == "qwen3_next" and "q_proj" in ours_name:
            x, gate = (part.flatten(0, 1) for part in x.unflatten(0, (4, 16)).chunk(2, 1))
            weights[ours_name.replace("q_proj", "gate_proj")] = gate
        weights[ours_name] = x
    for ours_name in [ours_name for ours_name in weights if ".k_conv." in ours_name]:
        kv = weights.pop(ours_name), weights.pop(ours_name.replace("k_conv", "v_conv"))
        weights[ours_name.replace("k_conv", "kv_conv")] = torch.cat(kv)
    return weights


def gradients(model: nn.Module, logits: Tensor) -> dict[str, Tensor]:
    direction = torch.randn(logits.shape, generator=torch.Generator().manual_seed(3))
    names = [name for name, _ in model.named_parameters()]
    return dict(zip(names, parameter_gradients((logits * direction).mean(), model), strict=True))


@pytest.mark.parametrize("family", FAMILIES)
def test_whole_logits_and_gradients(family, ids):
    """Past the positions that their config names."""
    theirs, mine = pair(family)
    x = ids(2, TRAINED + 16)
    want, got = theirs(x, use_cache=False).logits, mine(x, use_cache=False).logits
    same(got.detach(), want.detach())
    expected = as_ours(family, gradients(theirs, want), 0.0)
    for name, gradient in gradients(mine, got).items():
        torch.testing.assert_close(gradient, expected[name], atol=3e-5 * float(expected[name].abs().max()), rtol=0)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("family", FAMILIES)
def test_padded_and_cached(family, ids):
    theirs, mine = pair(family)
    x = ids(2, 40)
    same(decoded(mine, x), decoded(theirs, x))
