"""Mamba, Falcon-Mamba and Mamba-2 as ours: blocks of a norm and a mixer, without an MLP."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from transformers import PreTrainedConfig

from longitude.checkpoints.families.names import require_known_keys, require_value
from longitude.models.configuration import LongitudeConfig

NAMES = {
    "backbone.embeddings.": "model.embed_tokens.",
    "backbone.layers.{n}.norm.": "model.layers.{n}.mixer_norm.",
    "backbone.layers.{n}.mixer.": "model.layers.{n}.mixer.",
    "backbone.norm_f.": "model.norm.",
    "lm_head.": "lm_head.",
}
"""Prefixes of names in Transformers checkpoints -> our prefixes."""
OLD_NAMES = {"backbone.embedding.": "backbone.embeddings."}
"""Prefixes of names in mamba_ssm and older checkpoints -> prefixes in Transformers."""
SHAPE = {
    "vocab_size", "hidden_size", "num_hidden_layers", "layer_norm_epsilon", "state_size", "conv_kernel", "use_bias",
    "use_conv_bias", "hidden_act", "tie_word_embeddings", "expand", "time_step_rank",
}  # fmt: skip
INITIAL = {
    "rescale_prenorm_residual", "time_step_scale", "time_step_min", "time_step_max", "time_step_floor",
    "time_step_init_scheme",
}  # fmt: skip
"""Keys about initial weights."""
COMPUTED = {
    "residual_in_fp32",
    "use_mambapy",
    "use_falcon_mambapy",
    "use_associative_scan",
    "chunk_size",
    "fused_add_norm",
}
"""Keys about how, not what, is computed. Our residual stream has the dtype of the weights."""
TWINS = {"d_model": "hidden_size", "n_layer": "num_hidden_layers", "d_inner": "intermediate_size"}
"""Keys that converted checkpoints keep from mamba_ssm -> those with the same content."""
ALWAYS = {"rms_norm": True, "ssm_cfg": {}}
"""Further keys that they keep -> the values that transformers computes, whatever is in the file."""
KEPT = {"pad_vocab_size_multiple", *TWINS, *ALWAYS}
SILU = ("silu", "swish")


def config_of(where: str, config: PreTrainedConfig, plain: Mapping[str, Any]) -> LongitudeConfig:
    """Convert a config to ours. plain: content of config.json; unknown keys raise an error."""
    kind, theirs = config.model_type, config.to_dict()
    own = {
        "mamba": {"intermediate_size"},
        "falcon_mamba": {"intermediate_size", "mixer_rms_eps"},
        # transformers gates before the norm whatever norm_before_gate says
        "mamba2": {"num_heads", "head_dim", "n_groups", "time_step_limit", "norm_before_gate", "intermediate_size"},
    }
    require_known_keys(where, plain, SHAPE | INITIAL | COMPUTED | KEPT | own[kind])
    require_value(where, "hidden_act", theirs["hidden_act"], SILU)
    for key, value in ALWAYS.items():
        require_value(where, key, plain.get(key, value), [value])
    expand = theirs["expand"] if kind == "mamba2" else theirs["intermediate_size"] / theirs["hidden_size"]
    if expand != int(expand):
        raise ValueError(
            f"{where}: intermediate_size = {theirs['intermediate_size']} is not understood; expected a multiple of hidden_size = "
            f"{theirs['hidden_size']}"
        )
    inner = int(expand) * theirs["hidden_size"]
    if kind == "mamba2":
        require_value(where, "intermediate_size", plain.get("intermediate_size", inner), [inner])
    for key, twin in TWINS.items():
        value = inner if twin == "intermediate_size" else theirs[twin]
        require_value(where, key, plain.get(key, value), [value], f", which is {twin}")
    mixer = {
        "name": "mamba2" if kind == "mamba2" else "mamba", "expand": int(expand), "state_size": theirs["state_size"],
        "conv_kernel": theirs["conv_kernel"], "conv_bias": theirs["use_conv_bias"], "bias": theirs["use_bias"],
    }  # fmt: skip
    if kind == "mamba2":
        limit = [float(each) for each in theirs["time_step_limit"]]
        require_value(where, "time_step_limit", limit, [[0.0, math.inf]])
        mixer |= {"head_dim": theirs["head_dim"], "groups": theirs["n_groups"]}
        mixer |= {"norm_eps": theirs["layer_norm_epsilon"]}
    else:
        mixer |= {"dt_rank": int(theirs["time_step_rank"]), "norm_eps": theirs.get("mixer_rms_eps")}
    ids: Any = {name: theirs.get(name) for name in ("pad_token_id", "bos_token_id", "eos_token_id")}
    return LongitudeConfig(
        vocab_size=theirs["vocab_size"],
        hidden_size=theirs["hidden_size"],
        num_hidden_layers=theirs["num_hidden_layers"],
        num_attention_heads=1,
        max_position_embeddings=None,  # no config of them has a training length
        mixer=mixer,
        mlp="none",
        rms_norm_eps=theirs["layer_norm_epsilon"],
        embedding_scale=1.0,
        tie_word_embeddings=theirs["tie_word_embeddings"],
        **ids,
    )


def options_of(config: LongitudeConfig, kind: str) -> dict[str, Any]:
    """Our config -> the keys of theirs."""
    mixer = config.mixer_options(config.layer_mixers()[0])
    keys = {
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "num_hidden_layers": config.num_hidden_layers,
        "layer_norm_epsilon": config.rms_norm_eps,
        "state_size": mixer["state_size"],
        "expand": mixer["expand"],
        "conv_kernel": mixer["conv_kernel"],
        "use_conv_bias": mixer["conv_bias"],
        "use_bias": mixer["bias"],
        "tie_word_embeddings": config.tie_word_embeddings,
    }
    if kind == "mamba2":
        head_dim = mixer["head_dim"] or 64
        heads = mixer["expand"] * config.hidden_size // head_dim
        return keys | {"head_dim": head_dim, "num_heads": heads, "n_groups": mixer["groups"]}
    keys["time_step_rank"] = "auto" if mixer["dt_rank"] is None else mixer["dt_rank"]
    return keys | ({"mixer_rms_eps": mixer["norm_eps"]} if kind == "falcon_mamba" else {})


def of_mamba_ssm(where: str, plain: Mapping[str, Any]) -> dict[str, Any]:
    """A config.json of the authors' package mamba_ssm -> the keys of transformers, model_type included.

    Missing keys have the defaults of mamba_ssm 2, among them an epsilon of 1e-5 in every norm.
    """
    known = {"d_intermediate", "attn_layer_idx", "attn_cfg", "rms_norm", "tie_embeddings", "pad_vocab_size_multiple"}
    known |= {"d_model", "n_layer", "vocab_size", "ssm_cfg", "residual_in_fp32", "fused_add_norm"}
    require_known_keys(where, plain, known)
    for key, value in {"d_intermediate": 0, "attn_layer_idx": [], "attn_cfg": {}, "rms_norm": True}.items():
        require_value(where, key, plain.get(key, value), [value])
    ssm = {"layer": "Mamba1", **plain["ssm_cfg"]}
    require_value(where, "ssm_cfg.layer", ssm["layer"], ["Mamba1", "Mamba2"])
    second = ssm["layer"] == "Mamba2"
    defaults = {"d_state": 128 if second else 16, "d_conv": 4, "expand": 2, "conv_bias": True, "bias": False}
    defaults |= {"headdim": 64, "ngroups": 1} if second else {"dt_rank": "auto"}
    fixed = (
        {"rmsnorm": True, "norm_before_gate": False, "D_has_hdim": False, "dt_limit": [0.0, math.inf]} if second else {}
    )
    free = {
        "layer",
        "chunk_size",
        "use_mem_eff_path",
        "use_fast_path",
        "A_init_range",
        "dt_min",
        "dt_max",
        "dt_init_floor",
    }
    for key, value in ssm.items():
        require_value(where, "ssm_cfg", key, [*defaults, *fixed, *free])
        if key in fixed:
            require_value(where, f"ssm_cfg.{key}", list(value) if key == "dt_limit" else value, [fixed[key]])
    ssm = {**defaults, **ssm}
    multiple = plain.get("pad_vocab_size_multiple", 8)
    keys = {
        "vocab_size": -(-plain["vocab_size"] // multiple) * multiple,
        "hidden_size": plain["d_model"],
        "num_hidden_layers": plain["n_layer"],
        "state_size": ssm["d_state"],
        "conv_kernel": ssm["d_conv"],
        "expand": ssm["expand"],
        "use_conv_bias": ssm["conv_bias"],
        "use_bias": ssm["bias"],
        "layer_norm_epsilon": 1e-5,
        "tie_word_embeddings": plain.get("tie_embeddings", True),
        **dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id")),
    }
    if not second:
        return {"model_type": "mamba", **keys, "time_step_rank": ssm["dt_rank"]}
    heads = ssm["expand"] * plain["d_model"] // ssm["headdim"]
    return {"model_type": "mamba2", **keys, "head_dim": ssm["headdim"], "num_heads": heads, "n_groups": ssm["ngroups"]}
