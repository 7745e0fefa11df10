"""What a config declares: its parts, lengths and numbers, and rotary parameters written into its keys."""

from __future__ import annotations

import copy
import math
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from transformers import CONFIG_MAPPING, PreTrainedConfig

from longitude.errors import UsageError, check_positive, check_sizes
from longitude.hf.stock import KEY
from longitude.positions.config_keys import (
    BASES,
    BY_LAYER,
    LENGTHS,
    LOCAL_BASES,
    OF_CLASSES,
    ORIGINAL,
    SIZES,
    UNDERSTOOD,
    WINDOWED,
    as_mapping,
    of_layers,
    rope_dicts,
)
from longitude.positions.hugging_face import RopeConfig, names_rotation, read_ropes
from longitude.runs.quiet import quiet

Ropes = RopeConfig | dict[str, RopeConfig | None]
AS_IT_IS = "leave the rotation as it is, and raise max_position_embeddings in config.json"


def by_type(ropes: Ropes) -> dict[str | None, RopeConfig | None]:
    """Rotary parameters by layer type; one for all layers under None."""
    return {None: ropes} if isinstance(ropes, RopeConfig) else {**ropes}


# ---- the parts of a config -------------------------------------------------------------------------------------------
def raw_config(path: str | Path) -> dict[str, Any]:
    """config.json of a folder or a name of the hub, as it is written."""
    return PreTrainedConfig.get_config_dict(path)[0]


def text_part(config: Mapping[str, Any] | Any) -> Mapping[str, Any] | Any:
    """The part about text of a config of text and images; any other config unchanged."""
    if isinstance(config, Mapping):
        text = config.get("text_config") or config
        if not isinstance(text, Mapping):
            raise UsageError("", "text_config to be a mapping or None", repr(text))
        return text
    if not hasattr(config, "get_text_config"):
        return config
    text = config.get_text_config(decoder=True)
    if type(text) is type(config):  # an encoder-decoder's: a copy, without keys that its class reads
        for key in vars(config).keys() - vars(text).keys():
            setattr(text, key, getattr(config, key))
    return text


def decoded(config: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of the keys of a config.json with its infinities, which transformers writes as {"__float__": "Infinity"}."""
    return PreTrainedConfig._decode_special_floats(copy.deepcopy(dict(config)))


def class_of(config: Mapping[str, Any] | Any) -> Any:
    """A config's part about text as an object of transformers' class; None if transformers has none."""
    if not isinstance(config, Mapping):
        text = text_part(config)
        return text if type(text).__module__.startswith("transformers.") else None
    if not isinstance(kind := config.get("model_type"), str) or kind not in CONFIG_MAPPING:
        return None
    try:
        with quiet():
            keys = {key: value for key, value in decoded(config).items() if key != "model_type"}
            made = CONFIG_MAPPING[kind](**keys)
    except Exception as error:
        reason = "; ".join(filter(None, [" ".join(str(error).split())[:200], rotary_fault(config)]))
        raise ValueError(f"model_type {kind!r}: its class in transformers refuses this config ({reason})") from error
    return class_of(made)


# ---- lengths and types -----------------------------------------------------------------------------------------------
def declared_length(config: Any) -> int | None:
    """The length that a configuration declares, under any of LENGTHS."""
    lengths = (getattr(config, key, None) for key in LENGTHS)
    return next((length for length in lengths if isinstance(length, int) and length > 0), None)


def trained_length(config: Any) -> int | None:
    """The training length: that before an extension, if the configuration has it; else the declared length."""
    config = config.get_text_config()
    lengths = [parameters.get(ORIGINAL) for parameters in of_layers(getattr(config, "rope_parameters", None))]
    lengths.append(getattr(config, ORIGINAL, None))
    return next((length for length in lengths if isinstance(length, int) and length > 1), declared_length(config))


def rope_types(config: Any) -> list[str]:
    """The rotary types that a configuration names, one or one per layer type."""
    parameters = getattr(config.get_text_config(), "rope_parameters", None)
    return [kind for entry in of_layers(parameters) if (kind := entry.get("rope_type"))]


def unread(config: Any) -> str | None:
    """Why the model does not follow rope_parameters, by another key of its config; None if no key says so."""
    if getattr(config, KEY, None) is not None:
        return "its positions are those that set_positions of longitude.hf gave it"
    if getattr(config, "alibi", None) is True and has_key(config, "alibi"):  # Falcon keeps rope_parameters as well
        return "its positions are ALiBi's"
    return None


# ---- numbers that no model has ---------------------------------------------------------------------------------------
ALL_BASES = (*BASES, *LOCAL_BASES)
COUNTED = re.compile(r"(^|_)(layers?|heads?|experts|depth)(_|$)")
"""Keys whose numbers are modules to build one by one, but for Gemma 4's `vocab_size_per_layer_input`."""
MOST, LARGEST, DEEPEST = 10**4, 2**53, 32
"""Most layers, heads or experts, the largest int, and the deepest nesting of lists and dicts of any config."""


def require_numbers(raw: Mapping[str, Any]) -> None:
    """ValueError for a number that is not finite or beyond any model, a size, a base or a bias of 0 or less, or too short a list.

    Transformers may build a model from these nevertheless, or try to for hours.
    """
    require_counts(raw)
    raw = text_part(raw)
    for key in {*UNDERSTOOD, *OF_CLASSES, *LENGTHS, "attn_config"} & {*raw}:
        for name, number in numbers_in(key, raw[key]):
            if not math.isfinite(number):
                raise UsageError("config", f"{name} to be a finite number", repr(number))
    # Without a window EXAONE 4 writes a pattern of 0. Transformers itself refuses other types.
    unread = "sliding_window_pattern" if raw.get("sliding_window", 0) is None else ""
    check_sizes("config", **{key: raw[key] for key in SIZES if type(raw.get(key)) is int and key != unread})
    layers = raw.get("num_hidden_layers")
    for key in BY_LAYER:
        if isinstance(entries := raw.get(key), list) and entries and type(layers) is int and len(entries) < layers:
            raise UsageError("config", f"{key} to have one entry for each of {layers} layers", len(entries))
    for where in (raw, *(parameters for _, parameters in rope_dicts(raw))):
        for key in ALL_BASES:
            for base in where[key] if isinstance(where.get(key), list) else [where.get(key, 1.0)]:
                check_positive("config", **{key: 1.0 if base is None else base})
    if isinstance(inner := raw.get("attn_config"), Mapping) and inner.get("alibi_bias_max") is not None:
        check_positive("attn_config", alibi_bias_max=inner["alibi_bias_max"])


def require_counts(raw: Mapping[str, Any]) -> None:
    """ValueError for more layers, heads or experts than any model has, and for numbers beyond LARGEST."""
    for name, number in numbers_in("", raw):
        most = MOST if COUNTED.search(name) and "vocab" not in name else LARGEST
        if isinstance(number, int) and number > most:
            raise UsageError("config", f"{name} to be at most {most}", number)


def require_windows(config: Any, keys: Mapping[str, Any]) -> None:
    """ValueError for a window or a chunk of no tokens that a class reads; others may have 0 for none."""
    kinds = keys.get("layer_types") or ()  # Mistral has none, and its window is that of all layers
    windows = {*kinds} & {*WINDOWED} if kinds else hasattr(type(config), "sliding_window")
    if windows and keys.get("sliding_window") is not None:
        check_sizes("config", sliding_window=keys["sliding_window"])
    if WINDOWED[1] in kinds and keys.get("attention_chunk_size") is not None:
        check_sizes("config", attention_chunk_size=keys["attention_chunk_size"])


def type_in(parameters: Any) -> Any:
    """The name of the type in flat rope parameters; None if they have none."""
    return parameters.get("rope_type", parameters.get("type")) if isinstance(parameters, Mapping) else None


def numbers_in(key: str, value: Any, depth: int = 0) -> Iterator[tuple[str, int | float]]:
    """(key, number) of every number in a value, those in mappings by their own keys. ValueError if it is nested too deeply."""
    if depth > DEEPEST:
        raise UsageError(
            "config", f"lists and dicts nested at most {DEEPEST} deep", f"more at {key!r}", "restore the file"
        )
    if isinstance(value, Mapping):
        for inner, entry in value.items():
            yield from numbers_in(inner, entry, depth + 1)
    elif isinstance(value, list | tuple):
        for entry in value:
            yield from numbers_in(key, entry, depth + 1)
    elif isinstance(value, int | float) and not isinstance(value, bool):
        yield key, value


def rotary_fault(config: Mapping[str, Any] | Any) -> str | None:
    """The fault in the rotary keys of a config, for classes that fail with an error that does not name the key.

    A missing base is no fault: the class may have a default.
    """
    text = text_part(config)
    keys = as_mapping({BASES[0]: 10_000.0} | dict(text) if isinstance(text, Mapping) else text)
    if not names_rotation(as_mapping(text)):
        return None
    size, heads = keys.get("hidden_size"), keys.get("num_attention_heads")
    width = keys.get("qk_rope_head_dim") or keys.get("head_dim")
    if width is None and isinstance(size, int) and isinstance(heads, int):
        width = size // heads
    try:
        for rope in by_type(read_ropes(keys)).values():
            if rope is not None and isinstance(width, int):
                if rope.sections is not None and 2 * sum(rope.sections) != (rotated := rope.rotary_dim(width)):
                    return f"mrope_section has {sum(rope.sections)} pairs, and heads rotate {rotated // 2}"
                rope.encoding(width, "half")
    except ValueError as error:
        return str(error)
    return None


def fault_of(config: Mapping[str, Any] | Any) -> str | None:
    """`rotary_fault`, or a fault of windows, heads or padding with which no class can be built or run."""
    if (fault := rotary_fault(config)) is not None:
        return fault
    keys = as_mapping(text_part(config))
    window, pad, size = (keys.get(key) for key in ("sliding_window", "pad_token_id", "vocab_size"))
    if type(window) is int and window < 1:
        return f"expected sliding_window to be an int of 1 or more, got {window}"
    if "sliding_window" in keys and window is None and WINDOWED[0] in (keys.get("layer_types") or ()):
        off = " (use_sliding_window is false)" if keys.get("use_sliding_window") is False else ""
        return f"layer_types has {WINDOWED[0]!r}, and sliding_window is null{off}"
    fault = heads_apart(keys)
    if fault is None and type(pad) is int and type(size) is int and pad >= size:
        return f"expected pad_token_id to be one of {size} tokens, got {pad}"
    return fault


def heads_apart(keys: Mapping[str, Any]) -> str | None:
    """The fault of heads of queries that cannot share the heads of keys evenly; None if they can."""
    heads, shared = keys.get("num_attention_heads"), keys.get("num_key_value_heads")
    if type(heads) is int and type(shared) is int and shared > 0 and heads % shared:
        return f"expected num_attention_heads to be a multiple of num_key_value_heads, got {heads} and {shared}"
    return None


def by_default(config: Any) -> Any:
    """The config that a class makes without arguments; None for a class with required arguments."""
    with suppress(Exception):
        return type(config)()
    return None


def keys_of(config: Any) -> set[str]:
    """The keys that a kind of config has."""
    fresh = by_default(config) or config
    return {key.lstrip("_") for key in (*fresh.to_dict(), *type(config).attribute_map, *vars(fresh))}


def has_key(config: Any, key: str) -> bool:
    """Whether a config's class has a key; True for every key of a class that is not transformers'."""
    return key in keys_of(config) or not type(config).__module__.startswith("transformers.")


def parameters_of(raw: Mapping[str, Any], layer: str | None) -> Mapping[str, Any]:
    """The dict of rope parameters of a layer type."""
    parameters = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    inner = parameters.get(layer) if layer is not None else None
    return inner if isinstance(inner, Mapping) else parameters


def of_full_attention(ropes: RopeConfig | Mapping[str, RopeConfig | None]) -> RopeConfig:
    """The rotation of layers with full attention. ValueError if none rotates, or if they have different schemes."""
    if isinstance(ropes, RopeConfig):
        return ropes
    full = {layer: rope for layer, rope in ropes.items() if rope is not None and layer not in WINDOWED}
    if not full:
        raise UsageError(
            "rope_parameters",
            "layers of full attention that rotate their keys",
            f"rotations of {' and '.join(layer for layer, rope in ropes.items() if rope is not None) or 'none'} alone",
            f"distances within a window do not grow with the text: {AS_IT_IS}",
        )
    if len({rope.scaling for rope in full.values()}) > 1:
        raise UsageError("", "one scheme for the layers of full attention", f"several: {', '.join(full)}")
    return next(iter(full.values()))
