"""Conversion of RWKV-4 and RWKV-6: a norm after the embedding, and in each block a time mix and a channel mix."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor
from transformers import PreTrainedConfig

from longitude.checkpoints.families.names import require_known_keys, require_value
from longitude.models.configuration import LongitudeConfig

NAMES = {
    "rwkv.embeddings.": "model.embed_tokens.",
    "rwkv.blocks.0.pre_ln.": "model.embed_norm.",
    "rwkv.blocks.{n}.ln1.": "model.layers.{n}.mixer_norm.",
    "rwkv.blocks.{n}.ln2.": "model.layers.{n}.mlp_norm.",
    "rwkv.blocks.{n}.attention.": "model.layers.{n}.mixer.",
    "rwkv.blocks.{n}.feed_forward.": "model.layers.{n}.mlp.",
    "rwkv.ln_out.": "model.norm.",
    "head.": "lm_head.",
}
"""Prefixes of names in checkpoints of transformers -> ours."""
AUTHORS = {
    "emb.": "rwkv.embeddings.",
    "blocks.0.ln0.": "rwkv.blocks.0.pre_ln.",
    "blocks.{n}.att.time_mix_k": "rwkv.blocks.{n}.attention.time_mix_key",
    "blocks.{n}.att.time_mix_v": "rwkv.blocks.{n}.attention.time_mix_value",
    "blocks.{n}.att.time_mix_r": "rwkv.blocks.{n}.attention.time_mix_receptance",
    "blocks.{n}.ffn.time_mix_k": "rwkv.blocks.{n}.feed_forward.time_mix_key",
    "blocks.{n}.ffn.time_mix_r": "rwkv.blocks.{n}.feed_forward.time_mix_receptance",
    "blocks.{n}.att.": "rwkv.blocks.{n}.attention.",
    "blocks.{n}.ffn.": "rwkv.blocks.{n}.feed_forward.",
    "blocks.{n}.": "rwkv.blocks.{n}.",
    "ln_out.": "rwkv.ln_out.",
}
"""Prefixes of names in the authors' files -> prefixes in Transformers."""
EPS = 1e-5
"""Epsilon of the authors' LayerNorms; the last norm in transformers has it regardless of layer_norm_epsilon."""
SIZES = {
    "vocab_size", "context_length", "max_position_embeddings", "hidden_size", "num_hidden_layers", "attention_hidden_size",
    "intermediate_size", "layer_norm_epsilon", "tie_word_embeddings",
}  # fmt: skip
COMPUTED = {"rescale_every"}
"""It halves the residual stream every few layers, weights too, so that float16 does not overflow; ours is not halved."""


def config_of(where: str, config: PreTrainedConfig, plain: Mapping[str, Any]) -> LongitudeConfig:
    """Convert a config of RWKV-4 to ours. plain: content of config.json; unknown keys raise an error."""
    require_known_keys(where, plain, SIZES | COMPUTED)
    theirs = config.to_dict()
    require_value(where, "layer_norm_epsilon", theirs["layer_norm_epsilon"], [EPS])
    return shaped(
        {"name": "rwkv4", "inner": theirs["attention_hidden_size"]},
        num_attention_heads=1,
        max_position_embeddings=theirs["context_length"],
        **{name: theirs[name] for name in (*SHARED, "tie_word_embeddings", "bos_token_id", "eos_token_id")},
        pad_token_id=theirs.get("pad_token_id"),
    )


SHARED = ("vocab_size", "hidden_size", "num_hidden_layers", "intermediate_size")


def shaped(mixer: dict[str, Any], **options: Any) -> LongitudeConfig:
    """Configuration with the options common to all RWKV models."""
    return LongitudeConfig(
        mixer=mixer,
        mlp="rwkv",
        norm="layernorm",
        layer_norm_eps=EPS,
        embedding_norm=True,
        embedding_scale=1.0,
        **options,
    )


def options_of(config: LongitudeConfig, kind: str) -> dict[str, Any]:
    """Our config of an RWKV-4 -> the keys of theirs."""
    mixer = config.mixer_options(config.layer_mixers()[0])
    length = config.max_position_embeddings
    return {
        **{name: getattr(config, name) for name in (*SHARED, "tie_word_embeddings")},
        "attention_hidden_size": mixer["inner"] or config.hidden_size,
        "layer_norm_epsilon": config.layer_norm_eps,
        **({} if length is None else {"context_length": length}),
    }


# ---- without a class in transformers: sizes are those of the tensors, under transformers' names --------------------------
KEYS = SIZES | COMPUTED | {"head_size", "head_size_divisor", "num_attention_heads", "model_version"}
"""Keys of the config.json that comes with RWKV-6. num_attention_heads has the size of a head; its code does not read it."""


def config_of_tensors(where: str, state: Mapping[str, Tensor], plain: Mapping[str, Any]) -> LongitudeConfig:
    """The config of an RWKV-4 or RWKV-6 by its tensors; plain: its config.json, which must agree; empty if there is none."""
    require_known_keys(where, plain, KEYS)
    require_value(where, "layer_norm_epsilon", plain.get("layer_norm_epsilon", EPS), [EPS])
    first = "rwkv.blocks.0."
    embeddings, key = state.get("rwkv.embeddings.weight"), state.get(f"{first}feed_forward.key.weight")
    bonus, own = state.get(f"{first}attention.time_faaaa"), state.get(f"{first}attention.time_first")
    six = bonus is not None and f"{first}attention.time_maa_w1" in state
    if embeddings is None or key is None or not (six or own is not None and own.dim() == 1):
        raise ValueError(
            f"{where}: its tensors are not those of RWKV-4 or RWKV-6 in the authors' names; expected, among others, "
            "emb.weight, blocks.0.ffn.key.weight and blocks.0.att.time_maa_w1 or blocks.0.att.time_first"
        )
    layers = 1 + max(int(name.split(".")[2]) for name in state if name.startswith("rwkv.blocks."))
    sizes = dict(zip(SHARED, (*embeddings.shape, layers, len(key)), strict=True))
    if six:
        assert bonus is not None
        heads, head_dim = bonus.shape
        attention = {"attention_hidden_size": heads * head_dim, "head_size": head_dim}
        mixer = {
            "name": "rwkv6", "head_dim": head_dim,
            "mix_rank": state[f"{first}attention.time_maa_w1"].shape[1] // 5,
            "decay_rank": state[f"{first}attention.time_decay_w1"].shape[1],
            "norm_eps": 1e-5 * plain.get("head_size_divisor", 8) ** 2,
        }  # fmt: skip
    else:
        assert own is not None
        heads, attention = 1, {"attention_hidden_size": len(own)}
        mixer = {"name": "rwkv4", "inner": len(own)}
    for name, size in {**sizes, **attention}.items():
        if (given := plain.get(name)) is not None:
            require_value(where, name, given, [size], ", which its tensors have")
    require_value(where, "model_version", plain.get("model_version", "6_0"), ["6_0"])
    return shaped(
        mixer,
        **sizes,
        num_attention_heads=heads,
        max_position_embeddings=plain.get("context_length"),
        tie_word_embeddings=plain.get("tie_word_embeddings", False),
        **{name: plain.get(name) for name in ("pad_token_id", "bos_token_id", "eos_token_id")},
    )


def of_rwkv6(state: dict[str, Tensor], layers: int) -> dict[str, Tensor]:
    """Convert the mixes of the channel mix of RWKV-6; all other tensors have our names already.

    Theirs move the token towards the one before, x + mu (x_{t-1} - x); our channel mix weighs the token itself, so its mu is
    one minus theirs.
    """
    out = dict(state)
    for layer in range(layers):
        mlp = f"model.layers.{layer}.mlp."
        for theirs, ours in {"time_maa_k": "time_mix_key", "time_maa_r": "time_mix_receptance"}.items():
            if (tensor := out.pop(mlp + theirs, None)) is not None:
                out[mlp + ours] = (1 - tensor.double()).to(tensor.dtype)
    return out
