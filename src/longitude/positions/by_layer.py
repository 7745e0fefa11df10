"""What single layers of a Hugging Face config do with position: which of them rotate, and what multiplies their queries."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from difflib import get_close_matches
from typing import Any

from longitude.errors import check_positive, check_sizes

BY_INTERVAL = ("llama4_text", "smollm3", "mistral_large4_text")
"""Kinds of models in which, where their config does not say it, every fourth layer does not rotate."""
WINDOWS_ROTATE = {
    "afmoe": False, "cohere2": False, "cohere2_moe": False, "exaone4": True, "exaone_moe": True, "flint": False, "kolibri1": True,
}  # fmt: skip
"""Kinds of models in which layers with a sliding window rotate and the others do not; whether all do where there is no window."""
LAYER_KEYS = (
    "model_type", "num_hidden_layers", "no_rope_layers", "no_rope_layer_interval", "layer_types", "sliding_window",
    "sliding_window_pattern", "attn_temperature_tuning", "attn_scale", "floor_scale", "mlp_layer_types", "first_k_dense_replace",
    "prefix_dense_sliding_window_pattern",
)  # fmt: skip
"""Keys outside of rope parameters that are read here."""
UNDERSTOOD = (
    *LAYER_KEYS, "rope_parameters", "rope_scaling", "rope_theta", "rotary_emb_base", "global_rope_theta",
    "rope_local_base_freq", "local_rope_theta", "partial_rotary_factor", "rotary_pct", "original_max_position_embeddings",
    "max_position_embeddings", "rope_interleave", "qk_rope_head_dim", "qk_nope_head_dim",
)  # fmt: skip
"""Keys about position at the top of a config."""
ABOUT_POSITION = re.compile(
    r"(^|_)(rope|nope|rotary|theta|llama_4|alibi|logn|log_n)(_|$)|(attn|query|position)_temperature|log_scaling|dual_chunk|"
    r"self_extend|position_embedding_type"
)
ROTARY = ("rope", "rotary", "default")
"""Words that say no more than that a model rotates."""
TYPED = {"granitemoehybrid": "rope"}
"""Kinds that rotate only where position_embedding_type is this."""


# ---- which layers rotate ---------------------------------------------------------------------------------------------
def rotating_layers(config: Mapping[str, Any]) -> tuple[bool, ...] | None:
    """For each layer whether it rotates queries and keys; None where all do.

    As transformers reads it: no_rope_layers has 1 for a layer that rotates.
    """
    kind, layers = config.get("model_type"), config.get("num_hidden_layers")
    given = config.get("no_rope_layers")
    if kind in TYPED and config.get("position_embedding_type") != TYPED[kind]:
        rotates = (False,) * (layers or 1)
    elif given:
        if not isinstance(given, list | tuple) or any(one not in (0, 1) for one in given):
            raise ValueError(f"no_rope_layers: expected a list of 1 (the layer rotates) and 0, got {given!r}")
        if layers is not None and len(given) < layers:
            raise ValueError(f"no_rope_layers: expected one number for each of {layers} layers, got {len(given)}")
        rotates = tuple(map(bool, given[:layers]))
    elif layers is not None and (kind in BY_INTERVAL or "no_rope_layer_interval" in config):
        interval = config.get("no_rope_layer_interval", 4)
        check_sizes("rope", no_rope_layer_interval=interval)
        rotates = tuple((layer + 1) % interval != 0 for layer in range(layers))
    elif layers is not None and kind in WINDOWS_ROTATE:
        window = config.get("sliding_window", 4096)
        rotates = [
            WINDOWS_ROTATE[kind] if window is None else one == "sliding_attention" for one in layer_types(config)
        ]
        if kind == "cohere2_moe" and config.get("prefix_dense_sliding_window_pattern", 1) == 1:  # its dense layers, too
            first = config.get("first_k_dense_replace") or 0
            dense = config.get("mlp_layer_types") or ["dense" if layer < first else "sparse" for layer in range(layers)]
            rotates = [own or one == "dense" for own, one in zip(rotates, dense, strict=False)]
        rotates = tuple(rotates)
    else:
        return None
    return None if all(rotates) else rotates


def layer_types(config: Mapping[str, Any]) -> list[str]:
    """The types of the layers of a kind in WINDOWS_ROTATE, where its config does not say them as it does."""
    layers, pattern = config["num_hidden_layers"], config.get("sliding_window_pattern", 4)
    first = (config.get("first_k_dense_replace") or 0) if config.get("model_type") == "cohere2_moe" else 0
    prefix = _pattern(config.get("prefix_dense_sliding_window_pattern", 1), first)  # counted apart
    return config.get("layer_types") or prefix + _pattern(pattern, layers - first)


def _pattern(pattern: Any, layers: int) -> list[str]:
    every = pattern if isinstance(pattern, int) and pattern > 0 else layers + 1
    return ["sliding_attention" if (layer + 1) % every else "full_attention" for layer in range(layers)]


# ---- what multiplies queries -----------------------------------------------------------------------------------------
def unrotated_temperature(config: Mapping[str, Any]) -> dict[str, Any] | None:
    """The spec of what multiplies the queries of layers that do not rotate (Llama 4); None where nothing does."""
    if not config.get("attn_temperature_tuning", config.get("model_type") == "llama4_text"):
        return None
    options = {"attn_scale": config.get("attn_scale", 0.1), "floor_scale": config.get("floor_scale", 8192)}
    check_positive("attn_temperature_tuning", **options)
    return {"name": "llama4_temperature", **options}


def rotated_temperature(given: Mapping[str, Any], original: str) -> dict[str, Any] | None:
    """The spec of what multiplies the queries of layers that rotate, in their rope parameters (Ministral 3), or None."""
    if (beta := given.get("llama_4_scaling_beta")) is None:
        return None
    if (length := given.get(original)) is None:
        raise ValueError(f"llama_4_scaling_beta: expected {original} among the rope parameters with it, got none")
    check_positive("rope", llama_4_scaling_beta=beta)
    check_sizes("rope", **{original: length})
    return {"name": "ministral3_temperature", "beta": beta, "original_max_length": length}


# ---- writing ---------------------------------------------------------------------------------------------------------
def write(rope: Any, inner: dict[str, Any], outside: dict[str, Any], original: str) -> None:
    """Add to rope parameters and to the entries outside of them what a RopeConfig holds of layers and temperatures."""
    if rope.temperature is not None:
        _require("ministral3_temperature", rope.temperature)
        length = rope.temperature["original_max_length"]
        if inner.setdefault(original, length) != length:
            raise ValueError(
                f"temperature: expected original_max_length={inner[original]}, that of the scaling, because a config has one "
                f"{original} for both, got {length}"
            )
        inner["llama_4_scaling_beta"] = rope.temperature["beta"]
    if rope.rotates is not None:
        outside["no_rope_layers"] = [int(one) for one in rope.rotates]
    if rope.unrotated_temperature is not None:
        _require("llama4_temperature", rope.unrotated_temperature)
        options = {key: value for key, value in rope.unrotated_temperature.items() if key != "name"}
        outside |= {"attn_temperature_tuning": True, **options}


def _require(name: str, spec: Mapping[str, Any]) -> None:
    if spec["name"] != name:
        raise ValueError(f"temperature: expected {name}, for which configs have keys, got {spec['name']}")


# ---- what is not understood ------------------------------------------------------------------------------------------
def not_understood(config: Mapping[str, Any], inside: Mapping[str, tuple[str, ...]]) -> Iterator[str]:
    """Keys about position of which nothing here knows what they mean.

    inside: the keys of each rope_type; a slip of one of them is not among the answers, because it is refused.
    """
    for key, value in config.items():
        plain = value is None or value is False or value in ROTARY or key in UNDERSTOOD  # False: switched off
        if ABOUT_POSITION.search(key) and not plain and not _typed(config, key):
            yield key
    known = {key for keys in inside.values() for key in keys}
    for name in ("rope_parameters", "rope_scaling"):
        given = config.get(name)
        given = given if isinstance(given, Mapping) else {}
        for one in [each for each in given.values() if isinstance(each, Mapping)] or [given]:
            yield from (f"{name}.{key}" for key, value in one.items() if value is not None and is_foreign(key, known))


def _typed(config: Mapping[str, Any], key: str) -> bool:
    return key == "position_embedding_type" and config.get("model_type") in TYPED


def is_foreign(key: str, known: set[str]) -> bool:
    """Whether a key is neither known nor nearly a known one."""
    return key not in known and not get_close_matches(key, known, n=1, cutoff=0.8)
