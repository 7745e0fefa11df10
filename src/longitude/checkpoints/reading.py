"""Positions of each layer of a Hugging Face config: read from its keys, and compared with the behavior of its class.

The keys define the parameters of a rotation, as far as they are understood. The Transformers class decides which layers rotate,
and its frequencies take precedence. If keys and class differ, the config is not understood, and the possible keys are named.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Mapping
from typing import Any

from transformers import CONFIG_MAPPING
from transformers.modeling_rope_utils import RotaryEmbeddingConfigMixin

from longitude.checkpoints.agreement import Agreement, Reading, Ropes, refusal
from longitude.checkpoints.quiet import quiet
from longitude.checkpoints.trace import traced
from longitude.errors import UsageError, check_positive, check_sizes
from longitude.positions.config_keys import (
    BASES,
    BY_LAYER,
    FULL,
    LENGTHS,
    LOCAL_BASES,
    OF_CLASSES,
    SIZES,
    UNDERSTOOD,
    WINDOWED,
    names_any,
    rope_dicts,
)
from longitude.positions.hugging_face import (
    NotUnderstood,
    RopeConfig,
    as_mapping,
    names_rotation,
    not_understood,
    read_ropes,
)
from longitude.positions.scaling.base import Follow

ALL_BASES = (*BASES, *LOCAL_BASES)


def read(config: Mapping[str, Any] | Any, follow: Follow | None = None, max_length: int | None = None) -> Reading:
    """Read the positions of a config, confirmed by its class if transformers has one. ValueError: see from_hugging_face."""
    if isinstance(config, Mapping):
        require_numbers(config)
    theirs, written = class_of(config), text_part(config)
    if theirs is None:
        kind = as_mapping(written).get("model_type")
        alone = f"not understood: model_type {kind!r}, of which no class is here: its keys are read as if all layers rotated"
        notes = [*([] if kind is None else [alone]), *turning_alike(written)]
        return Reading(read_ropes(written, follow, max_length), notes=notes)
    keys = as_mapping(theirs)
    kinds = keys.get("layer_types")  # Mistral has none, and its window is that of all layers
    windows = {*kinds} & {*WINDOWED} if kinds else hasattr(type(theirs), "sliding_window")
    if windows and keys.get("sliding_window") is not None:
        check_sizes("config", sliding_window=keys["sliding_window"])
    if WINDOWED[1] in (kinds or ()) and keys.get("attention_chunk_size") is not None:
        check_sizes("config", attention_chunk_size=keys["attention_chunk_size"])
    try:
        seen = traced(theirs)
    except NotUnderstood as error:
        if (fault := fault_of(theirs)) is not None:
            raise ValueError(fault) from error
        if unread := not_understood(keys, by_class=True):
            raise NotUnderstood(f"not understood: {', '.join(unread)}: {error}", unread) from error
        raise
    attends = [layer.attends or bool(layer.tables) for layer in seen]
    if not any(layer.tables for layer in seen):
        unexplained = {n: why for n, layer in enumerate(seen) if (why := layer.unexplained(None))}
        return Reading({}, [None] * len(seen), attends, unexplained)
    if not names_rotation(keys):
        table = next(layer.tables[0] for layer in seen if layer.tables)
        raise refusal(keys, table, "rotates by keys that are not read here")
    declared = read_ropes(keys, follow, max_length)
    if isinstance(config, Mapping):
        own = read_ropes(with_own_base(as_mapping(written), theirs, declared), follow, max_length)
        require_kept(own, declared)
    found = Agreement(theirs, keys, declared, seen).reading(attends)
    return found._replace(notes=[*found.notes, *turning_alike(keys)])


def turning_alike(config: Mapping[str, Any] | Any) -> list[str]:
    """A note for each base of 1 or less: at 1 all pairs turn by one radian a token, below it the later ones turn faster."""
    keys = as_mapping(text_part(config))
    found = [
        (key, where[key])
        for where in (keys, *(one for _, one in rope_dicts(keys)))
        for key in ALL_BASES
        if key in where
    ]
    return [
        f"{key} = {base:g}: {'all pairs turn by the same angle' if base == 1 else 'later pairs turn faster than the first'}"
        for key, base in dict.fromkeys(found)
        if type(base) in (int, float) and base <= 1
    ]


def class_of(config: Mapping[str, Any] | Any) -> Any:
    """A config's part about text as an object of transformers' class; None if transformers has none."""
    if not isinstance(config, Mapping):
        text = text_part(config)
        return text if type(text).__module__.startswith("transformers.") else None
    if not isinstance(kind := config.get("model_type"), str) or kind not in CONFIG_MAPPING:
        return None
    try:
        with quiet():
            made = CONFIG_MAPPING[kind](
                **copy.deepcopy({key: each for key, each in config.items() if key != "model_type"})
            )
    except Exception as error:
        reason = "; ".join(filter(None, [" ".join(str(error).split())[:200], rotary_fault(config)]))
        raise ValueError(f"model_type {kind!r}: its class in transformers refuses this config ({reason})") from error
    return class_of(made)


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
        ropes = read_ropes(keys)
        for rope in ropes.values() if isinstance(ropes, dict) else [ropes]:
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
    window = keys.get("sliding_window")
    if type(window) is int and window < 1:
        return f"expected sliding_window to be an int of 1 or more, got {window}"
    if "sliding_window" in keys and window is None and WINDOWED[0] in (keys.get("layer_types") or ()):
        off = " (use_sliding_window is false)" if keys.get("use_sliding_window") is False else ""
        return f"layer_types has {WINDOWED[0]!r}, and sliding_window is null{off}"
    pad, size = keys.get("pad_token_id"), keys.get("vocab_size")
    if type(pad) is int and type(size) is int and pad >= size:
        return heads_apart(keys) or f"expected pad_token_id to be one of {size} tokens, got {pad}"
    return heads_apart(keys)


def heads_apart(keys: Mapping[str, Any]) -> str | None:
    """The fault of heads of queries that cannot share the heads of keys evenly; None if they can."""
    heads, shared = keys.get("num_attention_heads"), keys.get("num_key_value_heads")
    if type(heads) is int and type(shared) is int and shared > 0 and heads % shared:
        return f"expected num_attention_heads to be a multiple of num_key_value_heads, got {heads} and {shared}"
    return None


def require_numbers(raw: Mapping[str, Any]) -> None:
    """ValueError for a number that is not finite, a size, a base or a largest bias that is 0 or less, or too short a list.

    Transformers may build a model from these nevertheless.
    """
    raw = text_part(raw)
    for key in {*UNDERSTOOD, *OF_CLASSES, *LENGTHS, "attn_config"} & {*raw}:
        for name, number in numbers_in(key, raw[key]):
            if not math.isfinite(number):
                raise UsageError("config", f"{name} to be a finite number", repr(number))
    for key in SIZES:
        if type(raw.get(key)) is int:  # transformers itself refuses other types
            check_sizes("config", **{key: raw[key]})
    layers = raw.get("num_hidden_layers")
    for key in BY_LAYER:
        if isinstance(given := raw.get(key), list) and given and type(layers) is int and len(given) < layers:
            raise UsageError("config", f"{key} to have one entry for each of {layers} layers", len(given))
    for where in (raw, *(one for _, one in rope_dicts(raw))):
        check_positive("config", **{key: where[key] for key in ALL_BASES if where.get(key) is not None})
    if isinstance(inner := raw.get("attn_config"), Mapping) and inner.get("alibi_bias_max") is not None:
        check_positive("attn_config", alibi_bias_max=inner["alibi_bias_max"])


def numbers_in(key: str, value: Any) -> Iterator[tuple[str, float]]:
    """(key, number) of every number in a value, those in mappings by their own keys."""
    if isinstance(value, Mapping):
        for inner, each in value.items():
            yield from numbers_in(inner, each)
    elif isinstance(value, list | tuple):
        for each in value:
            yield from numbers_in(key, each)
    elif isinstance(value, float):
        yield key, value


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


def with_own_base(written: Mapping[str, Any], theirs: Any, declared: Ropes) -> dict[str, Any]:
    """A config's keys, with the base of its class if they have none and need none.

    The class has a special default (Gemma 3), or the keys contain the base of each layer, and the class follows them (Granite).
    """
    special = type(theirs).default_theta != RotaryEmbeddingConfigMixin.default_theta
    if names_any(written, BASES) or not (special or follows_bases_of_layers(written, theirs)):
        return dict(written)
    if isinstance(declared, RopeConfig):
        return dict(written) | {BASES[0]: declared.base}
    full, local = (declared.get(kind) for kind in (FULL, WINDOWED[0]))
    own = {} if full is None else {BASES[0]: full.base}
    return (
        dict(written) | own | ({} if local is None or local.base == own.get(BASES[0]) else {LOCAL_BASES[0]: local.base})
    )


def follows_bases_of_layers(written: Mapping[str, Any], theirs: Any) -> bool:
    """Whether the keys contain a base for each layer, and its class rotates by these."""
    if not written.get("layer_rope_theta"):
        return False
    try:
        return bool(read(theirs).layers)
    except ValueError:
        return False


def require_kept(written: Ropes, declared: Ropes, shares: bool = False) -> None:
    """ValueError if transformers lost a base or a scheme that is in a file. shares: also the share of heads that rotates.

    A class that makes parameters by layer type of flat ones (OLMo 3, DeepSeek V4) may have the base in one and the scheme in
    another.
    """

    def facts(ropes: Ropes) -> list[tuple[Any, ...]]:
        each = [one for one in (ropes.values() if isinstance(ropes, dict) else [ropes]) if one is not None]
        if isinstance(written, dict) or isinstance(declared, RopeConfig):
            return [
                (one.base, one.scaling, (one.partial_rotary_factor, one.proportion) if shares else ()) for one in each
            ]
        return [fact for one in each for fact in (("base", one.base), ("scheme", type(one.scaling)))]

    kept = facts(declared)
    if any(one not in kept for one in facts(written)):
        raise ValueError(f"its keys mean {written}, but transformers reads {declared}; correct the names of its keys")
