"""DeepSeek's models as ours: the same weights under our names, the same logits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from longitude.attention.layers.indexed import IndexedLatentAttention
from longitude.attention.layers.latent import LatentAttention
from longitude.checkpoints.config import from_hugging_face
from longitude.errors import UsageError
from longitude.models.causal import LongitudeForCausalLM
from longitude.models.configuration import LongitudeConfig
from longitude.positions.hugging_face import RopeConfig

KINDS = ("deepseek_v2", "deepseek_v3", "deepseek_v32")
NAMES = {
    "self_attn": "mixer",
    "q_a_proj": "q_down",
    "q_a_layernorm": "q_norm",
    "q_b_proj": "q_up",
    "kv_a_proj_with_mqa": "kv_down",
    "kv_a_layernorm": "kv_norm",
    "kv_b_proj": "kv_up",
    "input_layernorm": "mixer_norm",
    "post_attention_layernorm": "mlp_norm",
    "gate_proj": "gate",
    "up_proj": "up",
    "down_proj": "down",
    "indexer": "",
    "wq_b": "index_q",
    "wk": "index_k",
    "weights_proj": "index_w",
    "k_norm": "index_norm",
}
"""Module names of DeepSeek -> our names, if they differ; those of the indexer are in the layer itself."""


def from_deepseek(model: PreTrainedModel | str | Path) -> LongitudeForCausalLM:
    """A dense DeepSeek-V2, V3 or V3.2 model as a LongitudeForCausalLM with equal logits.

    Args:
        model: A causal model of transformers, or a path to its checkpoint; its weights are copied.

    Returns:
        Our model, in the dtype and on the device of theirs.

    Raises:
        ValueError: For a model of another kind, one with mixtures of experts, and another activation.

    Source:
        DeepSeek-AI 2024, DeepSeek-V2, arXiv 2405.04434, https://arxiv.org/abs/2405.04434.
    """
    if isinstance(model, str | Path):
        config_of(AutoConfig.from_pretrained(model))  # raises before weights are read
        model = AutoModelForCausalLM.from_pretrained(model, dtype="auto")
    if not isinstance(model, PreTrainedModel):
        raise UsageError("from_deepseek", "a model of transformers or a path", type(model).__name__)
    ours = LongitudeForCausalLM(config_of(model.config))
    ours.load_state_dict(renamed(model))
    ours.generation_config = model.generation_config
    nn.Module.to(ours, model.device, model.dtype)
    return ours.train(model.training)


def from_deepseek_attention(attention: nn.Module) -> LatentAttention:
    """Convert an attention layer of a DeepSeek-V2, V3 or V3.2 model, with its encoding.

    Args:
        attention: The layer; the model around it may mix experts.

    Returns:
        The layer with copies of its weights.

    Raises:
        ValueError: For a layer of another kind.
    """
    config: Any = getattr(attention, "config", None)
    if not hasattr(config, "kv_lora_rank") or not hasattr(attention, "kv_b_proj"):
        raise UsageError(
            "from_deepseek_attention", "an attention layer of DeepSeek-V2, V3 or V3.2", type(attention).__name__
        )
    encoding = rope_of(config).encoding(config.qk_rope_head_dim, layout_of(config))
    ours = (LatentAttention if mixer_of(config) == "latent" else IndexedLatentAttention)(
        config.hidden_size,
        config.num_attention_heads,
        encoding,
        **options_of(config),
        bias=config.attention_bias,
        dropout=config.attention_dropout,
    )
    ours.load_state_dict(renamed(attention))
    some = next(attention.parameters())
    return ours.to(device=some.device, dtype=some.dtype).train(attention.training)


def config_of(config: PreTrainedConfig) -> LongitudeConfig:
    """Convert a DeepSeek config to ours."""
    if config.model_type not in KINDS:
        raise UsageError("from_deepseek", f"a model of type {' or '.join(KINDS)}", repr(config.model_type))
    if config.first_k_dense_replace < config.num_hidden_layers:
        raise ValueError(
            f"from_deepseek: layers from {config.first_k_dense_replace} on mix experts, which LongitudeForCausalLM lacks; "
            "expected dense layers only, or use from_deepseek_attention on each layer's attention"
        )
    if config.hidden_act != "silu":
        raise UsageError("from_deepseek", "hidden_act 'silu'", repr(config.hidden_act))
    rope_dim = config.qk_rope_head_dim
    rope = {"name": "rope", "layout": layout_of(config), **rope_of(config).options(rope_dim)}
    same = (
        "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "attention_bias",
        "attention_dropout", "max_position_embeddings", "rms_norm_eps", "initializer_range", "use_cache", "pad_token_id",
        "bos_token_id", "eos_token_id", "tie_word_embeddings",
    )  # fmt: skip
    return LongitudeConfig(
        **{name: getattr(config, name) for name in same},
        mlp_bias=getattr(config, "mlp_bias", False),
        embedding_scale=1.0,
        encoding=rope,
        mixer={"name": mixer_of(config), **options_of(config)},
    )


def mixer_of(config: PreTrainedConfig) -> str:
    return "indexed_latent" if hasattr(config, "index_topk") else "latent"


def options_of(config: PreTrainedConfig) -> dict[str, Any]:
    """The options of the mixer from a DeepSeek config. Its norms of latents have a fixed eps."""
    options = {
        "kv_rank": config.kv_lora_rank,
        "q_rank": config.q_lora_rank,
        "nope_dim": config.qk_nope_head_dim,
        "rope_dim": config.qk_rope_head_dim,
        "value_dim": config.v_head_dim,
        "eps": 1e-6,
    }
    if mixer_of(config) == "latent":
        return options
    names = {"k_top": "index_topk", "index_heads": "index_n_heads", "index_dim": "index_head_dim"}
    options |= {ours: getattr(config, theirs) for ours, theirs in names.items()}
    rope = rope_of(config).options(config.qk_rope_head_dim)
    options |= {f"index_{name}": rope[name] for name in ("base", "scaling") if name in rope}
    return options | {"index_rotary_dim": config.qk_rope_head_dim}


def rope_of(config: PreTrainedConfig) -> RopeConfig:
    rope = from_hugging_face(config)
    assert isinstance(rope, RopeConfig)
    return rope


def layout_of(config: PreTrainedConfig) -> str:
    """Rotary pairs of checkpoints are neighbours, unless a config has rope_interleave false."""
    return "interleaved" if getattr(config, "rope_interleave", True) else "half"


def renamed(module: nn.Module) -> dict[str, Tensor]:
    """Rename tensors: model.layers.3.self_attn.kv_b_proj.weight becomes model.layers.3.mixer.kv_up.weight."""
    state = module.state_dict()
    return {
        ".".join(filter(None, (NAMES.get(part, part) for part in name.split(".")))): tensor
        for name, tensor in state.items()
    }
