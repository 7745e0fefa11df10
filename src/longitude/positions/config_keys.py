"""Keys of a config.json that are about position: the one table of their names, for everything that reads or writes a config."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from typing import Any

from longitude.errors import UsageError
from longitude.positions.scaling.base import ROPE_TYPES

# ---- names at the top of a config ------------------------------------------------------------------------------------
SCHEMAS = ("rope_parameters", "rope_scaling")
"""Keys of the dict of rope parameters: the first since transformers 5, the second before."""
GLOBAL = "global_rope_theta"
BASES = ("rope_theta", "rotary_emb_base", GLOBAL)
LOCAL_BASES = ("rope_local_base_freq", "local_rope_theta")
"""Keys for the rotary base of layers with a window, before transformers 5."""
SHARES = ("partial_rotary_factor", "rotary_pct")
WIDTH = "rotary_dim"
"""Key for the number of dimensions of a head that rotate, instead of a share (MiniMax)."""
SHARES_BY_LAYER, SCALED = "partial_rotary_factors", "yarn_only_types"
"""Keys beside a base for each layer: their shares, and the layer types that rope_scaling is for (Step 3.5)."""
INSIDE = "attn_config"
"""A dict that older files keep the base in (DBRX)."""
ORIGINAL = "original_max_position_embeddings"
LENGTHS = ("max_position_embeddings", "n_positions", "seq_length", "max_seq_len", "max_sequence_length")
"""Keys for the maximum length of a model, in tokens."""
SIZES = (
    "num_hidden_layers", "hidden_size", "num_attention_heads", "num_key_value_heads", "sliding_window_pattern", "vocab_size",
    *LENGTHS,
)  # fmt: skip
"""Keys with integer values of 1 or more, or null. (head_dim is 0 if nothing rotates: GLM-5-Next.)"""
LAYERS = (
    "num_hidden_layers", "layer_types", "no_rope_layers", "no_rope_layer_interval", "sliding_window", "sliding_window_pattern",
    "attn_temperature_tuning", "attn_scale", "floor_scale",
)  # fmt: skip
"""Keys that describe the positions of individual layers."""
UNDERSTOOD = (
    "model_type", *LAYERS, *SCHEMAS, *BASES, *LOCAL_BASES, *SHARES, SHARES_BY_LAYER, SCALED, ORIGINAL, LENGTHS[0],
)  # fmt: skip
BASE_BY_LAYER = "layer_rope_theta"
OF_CLASSES = (BASE_BY_LAYER, "compress_rope_theta", "position_embedding_type", "alibi")
"""Keys that decide which layers rotate, and with which base; understood only if the model's class is asked."""
NOTHING = ("rope_interleave", "qk_rope_head_dim", "qk_nope_head_dim", "mlp_layer_types", "first_k_dense_replace")
"""Keys that match ABOUT_POSITION but change no frequency: widths, layouts and other kinds of layers."""
ABOUT_POSITION = re.compile(
    r"(^|_)(rope|nope|rotary|theta|llama_4|alibi|logn|log_n)(_|$)|(attn|query|position)_temperature|log_scaling|dual_chunk|"
    r"self_extend|position_embedding_type"
)
BY_LAYER = ("layer_types", "no_rope_layers", BASE_BY_LAYER, BASES[0], SHARES_BY_LAYER)
"""Keys that may have an entry for each layer."""
PLAIN = ("rope", "rotary", "default")
"""Values that mean RoPE and nothing else."""
FULL, WINDOWED = "full_attention", ("sliding_attention", "chunked_attention", "main")  # "main": windows of DeepSeek V4
"""Layer types: attention to all earlier tokens, and to a window of fixed size."""
SUMMARIZED = ("compressed_sparse_attention", "heavily_compressed_attention")
"""Layer types with a window beside summaries of all earlier tokens (DeepSeek V4)."""


# ---- names inside rope parameters ------------------------------------------------------------------------------------
OLD_TYPES = {"su": "longrope", "mrope": "default"}  # names that early checkpoints use
COMMON = (
    "rope_type", "rope_theta", "partial_rotary_factor", "mrope_section", "mrope_interleaved", "llama_4_scaling_beta",
)  # fmt: skip
EXTRA = {"longrope": ("short_mscale", "long_mscale"), "dynamic": ("alpha",), "default": ("interleaved",)}
"""Keys that one family adds to a type: Phi-MoE's factor of cos and sin, the factor by which HunYuan stretches the base, and
Qwen3-Omni's second name of mrope_interleaved."""
KEYS = {
    kind: (*must, *may, *EXTRA.get(kind, ()), *COMMON, "type", LENGTHS[0])
    for kind, (_, must, may) in ROPE_TYPES.items()
}
"""The keys that a type has inside rope parameters."""
ALL_KEYS = frozenset(key for keys in KEYS.values() for key in keys)
ZERO_IS_NONE = ("beta_fast", "beta_slow", "mscale", "mscale_all_dim", "alpha")
"""Keys for which transformers treats 0 as absent."""


def as_mapping(config: Mapping[str, Any] | Any) -> dict[str, Any]:
    """A config's entries that are not None, and sliding_window, for which None means no windows.

    Attributes with another name in a class (RecurrentGemma's attention_window_size) are included under the usual name, too.
    """
    if not isinstance(config, Mapping):
        if not hasattr(config, "to_dict"):
            raise UsageError("", "a config as a mapping or an object with to_dict()", repr(config))
        usual = {name: getattr(config, name, None) for name in getattr(config, "attribute_map", {})}
        by_layer = {key: value for key in BY_LAYER if isinstance(value := getattr(config, key, None), list | tuple)}
        config = usual | config.to_dict() | by_layer  # Dory's to_dict() has other entries than its layers
    return {key: value for key, value in config.items() if value is not None or key == "sliding_window"}


def is_foreign(key: str) -> bool:
    """Whether a key of rope parameters is neither known nor nearly a known one."""
    return key not in ALL_KEYS and not get_close_matches(key, ALL_KEYS, n=1, cutoff=0.8)


def of_layers(parameters: Any) -> list[Mapping[str, Any]]:
    """The dicts of rope parameters of a config: one per layer type, or one for all layers, empty if there are none."""
    parameters = parameters if isinstance(parameters, Mapping) else {}
    return [value for value in parameters.values() if isinstance(value, Mapping)] or [parameters]


def rope_dicts(config: Mapping[str, Any]) -> list[tuple[str, Mapping[str, Any]]]:
    """(schema, parameters) of each dict of rope parameters; one for each layer type."""
    return [(name, rope) for name in SCHEMAS for rope in of_layers(config.get(name))]


def value_of(config: Mapping[str, Any], keys: Iterable[str]) -> Any:
    """The first value of these keys, at the top or in the dict that older files keep a base in; None if there is none."""
    inside = config.get(INSIDE)
    places = (config, inside) if isinstance(inside, Mapping) else (config,)
    return next((place[key] for place in places for key in keys if place.get(key) is not None), None)


def names_any(config: Mapping[str, Any], keys: Iterable[str]) -> bool:
    """Whether a config has a value for one of these keys, at the top or among its rope parameters."""
    keys = [*keys]
    return any(value_of(place, keys) is not None for place in (config, *(rope for _, rope in rope_dicts(config))))


def not_understood(config: Mapping[str, Any] | Any, by_class: bool = False) -> list[str]:
    """Keys of a config about position that are unknown here.

    Misspelt keys of rope parameters are not among them: reading them raises ValueError.

    by_class: whether the config's class was asked which layers rotate.
    """
    config = as_mapping(config)
    known = {*UNDERSTOOD, *NOTHING, *(OF_CLASSES if by_class else ())}
    known |= {WIDTH} if config.get(SCHEMAS[0]) else set()  # a share of a rotation that is read
    at_top = [
        key
        for key, value in config.items()
        if ABOUT_POSITION.search(key) and key not in known and value is not False and value not in PLAIN
    ]
    ropes = rope_dicts(config)
    return at_top + [
        f"{name}.{key}" for name, rope in ropes for key, v in rope.items() if v is not None and is_foreign(key)
    ]
