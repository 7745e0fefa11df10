"""The positions that a config.json declares: rotary parameters, head_dim, lengths, and contradictions between its keys."""

from __future__ import annotations

import dataclasses
import math
import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from transformers import PreTrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as CAUSAL

from longitude.checkpoints.agreement import Ropes, frequencies_of, which_layers
from longitude.checkpoints.reading import (
    class_of,
    heads_apart,
    read,
    require_kept,
    rotary_fault,
    text_part,
    with_own_base,
)
from longitude.checkpoints.trace import MANY, TOKENS, traced
from longitude.errors import UsageError, check_choice, nearest
from longitude.hf.stock import KEY, heads_of
from longitude.positions.config_keys import (
    ALL_KEYS,
    BASES,
    FULL as FULL,
    KEYS,
    LENGTHS as LENGTH_KEYS,
    LOCAL_BASES,
    OLD_TYPES,
    ORIGINAL,
    SCHEMAS,
    SHARES,
    is_foreign,
    names_any,
    of_layers,
    rope_dicts,
)
from longitude.positions.hugging_face import (
    NotUnderstood,
    RopeConfig,
    as_mapping,
    not_understood,
    read_ropes,
    unread_words,
)
from longitude.positions.layers import LayerPositions, layers_of
from longitude.positions.layouts import Layout
from longitude.positions.scaling import DynamicNTK, Follows, Llama3, LongRoPE
from longitude.positions.scaling.base import ROPE_TYPES, Follow

OLD = (*BASES, *LOCAL_BASES, *SCHEMAS, *SHARES, ORIGINAL)
"""Keys of earlier releases that transformers still reads."""
ROTARY = ("rope", "rotary", "theta", "position")
WORDS = (*ROTARY, "alibi", "window", "n_ctx", "seq_len", "max_len", "scaling")
"""Parts of the names of keys about positions. Published configs contain keys with WORDS that nothing reads, and flags and
names with ROTARY."""
LONGEST = 2**20
"""Tokens of the longest sequence in which visible keys are compared."""
COVERAGE = 0.99
"""Share of the declared length that factor times original length must cover; factors in files are rounded."""


# ---- for users -------------------------------------------------------------------------------------------------------
def from_hugging_face(
    config: Mapping[str, Any] | Any, follow: Follow | None = None, max_length: int | None = None
) -> Ropes:
    """Read the rotary parameters of a Transformers config as the model's class reads them.

    A config without a model_type, or with one that the installed transformers does not have, is read only by its keys, and all
    its layers count as rotating. Defaults: the original length of yarn, longrope and llama3 is max_position_embeddings; the
    config's top-level original_max_position_embeddings takes precedence over the one in flat parameters. The factor of yarn and
    longrope is max_position_embeddings / original length. The original length of dynamic is max_position_embeddings.

    Args:
        config: a mapping, or an object with to_dict().
        follow: the length on which dynamic and longrope depend; default: "sequence", as in transformers.
        max_length: the length that they declare, in tokens; with follow="declared", longrope takes max_position_embeddings by
            default.

    Returns:
        RopeConfig, or one per layer type (None: layers without rotation); empty for a model that rotates nothing. It includes
        the rotating layers, and the temperature of queries. Warnings name keys about positions that were not understood, and
        keys that contradict each other.

    Raises:
        ValueError: a missing base (never 10000 by default), an unknown type, a misspelt key, a key of another type.
        NotUnderstood: a ValueError, if the class rotates differently from the keys that are read here.
    """
    found = read(config, follow, max_length)
    unread = not_understood(text_part(config), found.layers is not None)
    doubtful: Iterable[str] = ()
    if isinstance(config, Mapping):
        doubtful = two_values(text_part(config)) if found.layers is None else contradictions(config, class_of(config))
    for words in [*doubtful, *([unread_words(unread)] if unread else []), *found.notes, *found.problems()]:
        warnings.warn(words, stacklevel=2)
    return found.ropes


def layers_from_hugging_face(config: Mapping[str, Any] | Any, layout: Layout) -> list[LayerPositions]:
    """Positions of each layer of a Transformers config.

    Example: LongitudeConfig(encodings=[one.encoding for one in layers], mixers=[one.mixer for one in layers], ...).

    Args:
        config: a mapping, or an object with to_dict().
        layout: which numbers of a head make a rotary pair, "half" or "interleaved"; no config has it.

    Returns:
        LayerPositions, one per layer. Scales, caps and sinks of scores are not in it.

    Raises:
        ValueError: as from_hugging_face; no number of layers, or parameters by layer type without layer_types.
        NotUnderstood: a ValueError, if positions reach attention in a way that no key of the config explains.
        UsageError: a ValueError, if a forward pass of the class does not confirm the visible keys: keys are selected by
            content, compressed or added, or no attention is seen.
    """
    layers = positions_of_layers(config, layout)
    if (theirs := class_of(config)) is not None and (apart := attention_apart(theirs, layers)):
        raise UsageError(
            "layers_from_hugging_face",
            "layers whose queries attend to all earlier tokens, or to those of a window or a chunk",
            f"a config of model_type {theirs.model_type!r}: {'; '.join(apart)}",
            "from_hugging_face reads its rotation alone",
        )
    return layers


def attention_apart(config: Any, layers: list[LayerPositions]) -> list[str]:
    """Differences between these layers and attention in a pass of the config's class, a line for each distinct difference."""
    declared = declared_length(config) or MANY
    seen = traced(config, max(TOKENS + 1, min(MANY, declared)))
    longest = [min(LONGEST, max(declared, 2 * (one.window or one.chunk or 0))) for one in layers]
    each = [own.not_as(one, length) for own, one, length in zip(seen, layers, longest, strict=True)]
    return [
        f"{why} ({which_layers([n for n, own in enumerate(each) if own == why], len(each))})"
        for why in dict.fromkeys(each)
        if why
    ]


def positions_of_layers(config: Mapping[str, Any] | Any, layout: Layout) -> list[LayerPositions]:
    """`layers_from_hugging_face` without its check of visible keys: attention may select among them, or add some."""
    check_choice("layers_from_hugging_face", Layout, layout=layout)
    found = read(config)
    keys = as_mapping(text_part(config) if found.layers is None else class_of(config))
    if problems := found.problems():
        raise NotUnderstood("; ".join(problems), not_understood(keys) or ["model_type"])
    for words in found.notes:
        warnings.warn(words, stacklevel=2)
    if found.layers is None:
        return layers_of(keys, layout, found.ropes)
    return layers_of(
        keys, layout, found.ropes, [None if one is None else one[:2] for one in found.layers], found.attends
    )


# ---- reading ---------------------------------------------------------------------------------------------------------
def raw_config(path: str | Path) -> dict[str, Any]:
    """config.json of a folder or a name of the hub, as it is written."""
    return PreTrainedConfig.get_config_dict(path)[0]


def head_dim_of(config: Any, layer_type: str | None = None) -> int:
    """Width of a head; for latent attention, the rotary width. All code gets the width here.

    layer_type: the type of layers, if heads differ by type (Gemma 4); ValueError without it.
    """
    try:
        layers = [one for one in read(config).layers or [] if one is not None]
    except ValueError:
        layers = []
    if own := [one.head_dim for one in layers if layer_type in (None, one.label)]:
        if len({*own}) > 1:
            raise UsageError("", "layers with the same heads", f"head_dim {own[0]} and {max(own)}")
        return own[0]
    return getattr(config, "qk_rope_head_dim", None) or heads_of(config, layer_type)["head_dim"]


def declared_length(config: Any) -> int | None:
    """The length that a configuration declares, under any of LENGTH_KEYS."""
    lengths = (getattr(config, key, None) for key in LENGTH_KEYS)
    return next((length for length in lengths if isinstance(length, int) and length > 0), None)


def trained_length(config: Any) -> int | None:
    """The training length: that before an extension, if the configuration has it; else the declared length."""
    config = config.get_text_config()
    lengths = [each.get(ORIGINAL) for each in of_layers(getattr(config, "rope_parameters", None))]
    lengths.append(getattr(config, ORIGINAL, None))
    return next((length for length in lengths if isinstance(length, int) and length > 1), declared_length(config))


def rope_types(config: Any) -> list[str]:
    """The rotary types that a configuration names, one or one per layer type."""
    parameters = getattr(config.get_text_config(), "rope_parameters", None)
    return [kind for each in of_layers(parameters) if (kind := each.get("rope_type"))]


def not_rotary(config: Any) -> str | None:
    """Why positions are not rotary; None if they are, or if that is not understood."""
    if (reason := unread(config)) is not None:
        return reason
    if not getattr(config, "rope_parameters", None):
        return "its config has no rope_parameters"
    try:
        return None if read(config).ropes else "no layer of its class rotates queries and keys"
    except ValueError:
        return None


def unread(config: Any) -> str | None:
    """Why the model does not follow rope_parameters, by another key of its config; None if no key says so."""
    if getattr(config, KEY, None) is not None:
        return "its positions are those that set_positions of longitude.hf gave it"
    if getattr(config, "alibi", None) is True and has_key(config, "alibi"):  # Falcon keeps rope_parameters as well
        return "its positions are ALiBi's"
    return None


def ropes(config: Any) -> dict[str | None, RopeConfig]:
    """Rotary parameters of a config as its class rotates, by layer type (None: one for all).

    Raises:
        ValueError: if nothing rotates, or the keys contradict each other.
        NotUnderstood: a ValueError, if the class rotates differently from the keys that are read here.
    """
    if (reason := not_rotary(config)) is not None:
        raise ValueError(reason)
    try:
        found = read(config).ropes
    except NotUnderstood:
        raise
    except ValueError as error:
        raise ValueError(f"the rotary parameters cannot be read ({error})") from error
    if isinstance(found, RopeConfig):
        return {None: found}
    return {layer: rope for layer, rope in found.items() if rope is not None}


def border_of(config: Any) -> int | None:
    """The original length of a scaling that follows the sequence's length, if the config has one."""
    try:
        scalings = [rope.scaling for rope in ropes(config).values()]
    except ValueError:
        return None
    lengths = [one.original_max_length for one in scalings if isinstance(one, Follows) and one.follow == "sequence"]
    return min(lengths, default=None)


# ---- contradictions --------------------------------------------------------------------------------------------------
def contradictions(raw: Mapping[str, Any], config: Any) -> Iterator[str]:
    """Contradictions of a config.json, each with what to do. raw: the file's content; config: as transformers reads it."""
    yield from outside_text(raw, config)
    raw = text_part(raw)
    yield from unknown_keys(raw, config)
    yield from other_types(raw, config)
    yield from layers_twice(raw, config, defaults=False)
    if (apart := heads_apart(raw)) is not None:
        yield apart
    if idle_ones := list(scalings_of_none(raw, config)):
        yield from idle_ones
        return
    if unread(config) or (not_rotary(config) and not any(raw.get(name) for name in SCHEMAS)):
        return
    if inside := list(unknown_inside(raw)):
        yield from (*two_values(raw), *inside)
        return
    try:
        theirs, broken = read_ropes(config), None
    except ValueError as error:
        theirs, broken = None, error
    try:
        ours = read_ropes(raw if theirs is None else with_own_base(raw, config, theirs))
    except NotUnderstood:
        return  # reported with the keys that nothing reads
    except ValueError as error:
        default = "; transformers takes a default of its class without a warning: write the one of training"
        yield f"{error}{default if 'expected rope_theta' in str(error) else ''}"
        return
    yield from two_values(raw)
    if theirs is None:
        yield f"transformers keeps what cannot be read: {broken}"
        return
    try:
        require_kept(ours, theirs, shares=names_any(raw, SHARES))
    except ValueError as error:
        yield str(error)
    yield from _of_class(raw, config, ours)


def _of_class(raw: Mapping[str, Any], config: Any, ours: Any) -> Iterator[str]:
    """Contradictions between a config's keys and its class, or between its lengths."""
    try:
        read(config)
    except NotUnderstood as error:
        if (fault := rotary_fault(config)) is not None:
            yield fault
            return
        if {*error.keys} & {*SHARES}:  # its class does not read a key that others do
            yield str(error)
            return
    except ValueError as error:
        yield str(error)
        return
    for layer, rope in ({None: ours} if isinstance(ours, RopeConfig) else ours).items():
        if rope is not None:
            with suppress(ValueError):  # the width of heads is unknown, so lists of factors cannot be checked
                yield from lengths(raw, rope, head_dim_of(config, layer), parameters_of(raw, layer))


def unknown_keys(raw: Mapping[str, Any], config: Any) -> Iterator[str]:
    """Unknown keys that look like misspelt keys about positions, and flags for positions that its class does not have."""
    flags = [] if has_key(config, "alibi") else [("alibi", raw.get("alibi"))]
    for key, value in (*strangers_inside(raw, config), *flags):
        if value is True and any(word in key for word in (*ROTARY, "alibi")):
            yield f"{key} is true, and transformers' class does not read it: it has no such positions"
    for key in _strangers(raw, keys_of(config)):
        if key not in LENGTH_KEYS and (near := _slip_of(key, config)):
            yield f"unknown key {key!r}: did you mean {near!r}?"


def scalings_of_none(raw: Mapping[str, Any], config: Any) -> Iterator[str]:
    """Scalings without effect, since positions are not rotary: with ALiBi, or in a class without rotary parameters."""
    reason = unread(config)
    if reason is None and not has_key(config, SCHEMAS[0]):
        reason = f"{type(config).__name__} has no rotary parameters"
    if reason is None or getattr(config, KEY, None) is not None:  # what set_positions replaced may stay
        return
    for name, given in rope_dicts(raw):
        if (kind := given.get("rope_type", given.get("type"))) not in (None, "default"):
            yield f"{name} of type {kind!r} has no effect: {reason}; remove it"


def outside_text(raw: Mapping[str, Any], config: Any) -> Iterator[str]:
    """A base or a scaling outside text_config, where no class reads it, that differs from the one inside."""
    if text_part(raw) is raw or not_rotary(text := config.get_text_config()):
        return
    inside = of_layers(getattr(text, SCHEMAS[0], None))
    for key in BASES:
        if raw.get(key) is not None and raw[key] not in [one.get(BASES[0]) for one in inside]:
            bases = ", ".join(f"{one.get(BASES[0]):g}" for one in inside)
            where = "is outside text_config, where nothing reads it"
            yield f"{key} = {raw[key]:g} {where}: the text model has {bases}; move it there"
    for name, given in rope_dicts({name: raw.get(name) for name in SCHEMAS}):
        off = {key for key, one in given.items() if key != "type" and all(each.get(key) != one for each in inside)}
        if off:
            yield f"{name} is outside text_config, where nothing reads it: {', '.join(sorted(off))}; move it there"


LAYER_RULES = {"layer_types": "sliding_window_pattern", "no_rope_layers": "no_rope_layer_interval"}
"""Lists with an entry per layer, and the keys from which classes make them if they are not given."""


def layers_twice(raw: Mapping[str, Any], config: Any, defaults: bool) -> Iterator[str]:
    """Lists by layer that differ from those which the class makes by their rules, if both are given.

    defaults: check rules for which its class has a default, which transformers writes beside a list; else the other rules.
    """
    raw = text_part(raw)
    if (usual := by_default(config)) is None:
        return
    for key, rule in LAYER_RULES.items():
        if not isinstance(given := raw.get(key), list) or raw.get(rule) is None or (rule in vars(usual)) != defaults:
            continue
        with suppress(ValueError):  # its class rejects the config, which is reported elsewhere
            made = getattr(class_of({name: one for name, one in raw.items() if name != key}), key, None) or []
            if off := [layer for layer, (a, b) in enumerate(zip(given, made, strict=False)) if a != b]:
                yield (
                    f"{key} has {given[off[0]]!r} for layer {off[0]}, and {rule} = {raw[rule]!r} makes it {made[off[0]]!r} "
                    f"({len(off)} layers differ); transformers takes the former; remove the wrong one"
                )


def other_types(raw: Mapping[str, Any], config: Any) -> Iterator[str]:
    """Layer types of rope parameters that no layer has, and those without, for which transformers uses a default."""
    config = text_part(config)
    if (fresh := by_default(config)) is None:
        return
    usual = getattr(fresh, SCHEMAS[0], None) or {}
    types = getattr(config, "layer_types", None) or []
    for name in SCHEMAS:
        given = raw.get(name)
        if not isinstance(given, Mapping) or not any(isinstance(one, Mapping) for one in given.values()):
            continue
        if not types and not any(isinstance(one, Mapping) for one in usual.values()):
            yield f"{name} has parameters by layer type, and transformers reads one set for all layers here: write one set"
            continue
        for label in given.keys() - {*usual, *types}:
            yield f"unknown layer type {label!r} in {name}: its class has {', '.join(sorted({*usual, *types}))}"
        for label in usual.keys() & {*(getattr(config, SCHEMAS[0], None) or {})} - given.keys():
            yield f"{name} has nothing for {label!r}, and transformers takes its default without a warning: write it"


def remarks(raw: Mapping[str, Any], config: Any) -> list[str]:
    """Remarks that are no faults: keys that nothing reads, a factor beyond the length, a class of another family."""
    found = [unread_words(keys)] if (keys := unread_keys(raw, config)) else []
    found += _other_classes(raw)
    raw = text_part(raw)
    found += layers_twice(raw, config, defaults=True)
    if unread(config):
        return found
    if (reason := not_rotary(config)) is not None:
        idle_ones = names_any(raw, BASES) or any(one for _, one in rope_dicts(raw))
        return [*found, f"{reason}: its rotary parameters have no effect"] if idle_ones else found
    declared: Any = raw.get(LENGTH_KEYS[0])
    for name, given in rope_dicts(raw):
        factor, original = given.get("factor"), given.get(ORIGINAL, raw.get(ORIGINAL))
        kind = given.get("rope_type", given.get("type"))
        if None in (factor, original, declared) or not (
            kind in ("yarn", "longrope") or (kind == "llama3" and original == declared)
        ):
            continue  # llama3's published factors reach beyond, too
        if isinstance(factor, int | float) and (reach := factor * original) > 1.01 * declared:
            found.append(
                f"{name}: factor {factor} times {ORIGINAL} = {original} is {reach:g}, more than {LENGTH_KEYS[0]} = {declared}; "
                "the frequencies follow the factor"
            )
    try:
        found += read(config).notes
        found += idle(raw, config)
    except NotUnderstood as error:
        found.append(str(error))
    except ValueError:
        pass  # reported among the contradictions
    return list(dict.fromkeys(found))


def idle(raw: Mapping[str, Any], config: Any) -> Iterator[str]:
    """Keys of a scaling, or of a window, that change nothing up to the declared length: a fourth and four times of each."""
    if (declared := declared_length(config)) is None:
        return
    for layer, rope in ropes(config).items():
        given, scaling = parameters_of(raw, layer), rope.scaling
        kind = OLD_TYPES.get(kind := given.get("rope_type", given.get("type", "default")), kind)
        if scaling is None or isinstance(scaling, DynamicNTK) or kind not in ROPE_TYPES:
            continue  # dynamic changes nothing up to there by its rule
        if not (own := _rotations(config, layer, rope, declared)):
            continue
        where = next((name for name in SCHEMAS if raw.get(name)), "") + (f".{layer}" if layer else "")
        if own == _rotations(config, layer, rope._replace(scaling=None), declared):
            yield f"{where}: {kind!r} changes no frequency and no factor up to the declared length {declared}"
            continue
        _, must, may = ROPE_TYPES[kind]
        for key, ours in (must | may).items():
            value = getattr(scaling, ours, None)
            if key == ORIGINAL or given.get(key) is None or isinstance(value, bool) or not value:
                continue
            scaled = [
                [one * by for one in value] if isinstance(value, list | tuple) else value * by for by in (0.25, 4)
            ]
            others = [rope._replace(scaling=_changed(scaling, ours, each)) for each in scaled]
            if all(_rotations(config, layer, each, declared) == own for each in others):
                alone = " without mscale_all_dim" if key == "mscale" and not given.get("mscale_all_dim") else ""
                yield f"{where}: {key} changes no frequency and no factor up to the declared length {declared}{alone}"
    types = {*(getattr(config, "layer_types", None) or ())}
    if raw.get("use_sliding_window") is True and raw.get("sliding_window") and types == {FULL}:
        yield f"sliding_window = {raw['sliding_window']} with use_sliding_window = True: no layer has a window"


def _changed(scaling: Any, name: str, value: Any) -> Any:
    """A scaling with another number; None if it rejects the number, which therefore has an effect."""
    try:
        return dataclasses.replace(scaling, **{name: value})
    except ValueError:
        return None


def _rotations(config: Any, layer: str | None, rope: RopeConfig, declared: int) -> list[Any]:
    """Frequencies and factor, in short sequences and in those of the declared length; empty for what cannot be computed."""
    width = head_dim_of(config, layer)
    try:
        found = [frequencies_of(rope, width, length) for length in (1, declared)]
    except ValueError:
        return []
    return [(one.inverse.tolist(), one.attention_factor) for one in found]


def _other_classes(raw: Mapping[str, Any]) -> Iterator[str]:
    """Causal classes of other families in architectures."""
    own = CAUSAL.get(kind := raw.get("model_type"))
    for name in raw.get("architectures") or () if own is not None else ():
        if name != own and name in CAUSAL.values():
            yield (
                f"architectures has {name}, and {own} is the class of model_type {kind!r}: transformers takes the latter, other "
                "readers the former"
            )


def unread_keys(raw: Mapping[str, Any], config: Any) -> list[str]:
    """Keys about positions that neither transformers' class of this config has nor Longitude reads."""
    raw = text_part(raw)
    strangers = _strangers(raw, keys_of(config))
    about = [key for key in strangers if any(word in key for word in ROTARY)]
    about = [key for key in about if not isinstance(raw[key], bool | str | None)]
    about += [
        key
        for key, value in strangers_inside(raw, config)
        if any(word in key for word in ROTARY) and not isinstance(value, bool | str | None)
    ]
    return list(dict.fromkeys([*about, *not_understood(raw, by_class=True)]))


def strangers_inside(raw: Mapping[str, Any], config: Any) -> Iterator[tuple[str, Any]]:
    """Unknown keys, with their place, of dicts for which a class has a separate config (MPT's attn_config)."""
    for name, given in raw.items():
        if isinstance(given, Mapping) and isinstance(own := getattr(config, name, None), PreTrainedConfig):
            valid = keys_of(own)
            yield from ((f"{name}.{key}", value) for key, value in given.items() if key not in valid)


def _slip_of(key: str, config: Any) -> str | None:
    """The key about positions that a key is probably a misspelling of; None if there is none."""
    valid = keys_of(config)
    about = sorted({key for key in (*valid, *_legacy(valid)) if any(word in key for word in WORDS)})
    return next(iter(get_close_matches(key, about, n=1, cutoff=0.8)), None)


def by_default(config: Any) -> Any:
    """The config that a class makes without arguments; None for a class with required arguments."""
    try:
        return type(config)()
    except Exception:
        return None


def keys_of(config: Any) -> set[str]:
    """The keys that a kind of config has."""
    fresh = by_default(config) or config
    return {key.lstrip("_") for key in (*fresh.to_dict(), *type(config).attribute_map, *vars(fresh))}


def has_key(config: Any, key: str) -> bool:
    """Whether a config's class has a key; True for every key of a class that is not transformers'."""
    return key in keys_of(config) or not type(config).__module__.startswith("transformers.")


def _legacy(valid: set[str]) -> tuple[str, ...]:
    return OLD if "rope_parameters" in valid else ()


def _strangers(raw: Mapping[str, Any], valid: set[str]) -> list[str]:
    return [key for key in raw if key.lstrip("_") not in valid and key not in _legacy(valid) and key != KEY]


def unknown_inside(raw: Mapping[str, Any]) -> Iterator[str]:
    """Unknown keys of the rope dicts: those of another type, and misspelt ones."""
    for name, one in rope_dicts(raw):
        kind = one.get("rope_type", one.get("type", "default"))
        kind = OLD_TYPES.get(kind, kind) if isinstance(kind, str) else None
        if kind not in KEYS:
            continue  # reading it raises an error
        valid = {*KEYS[kind], *((ORIGINAL,) if "llama_4_scaling_beta" in one else ())}
        for key in one.keys() - valid:
            if is_foreign(key) or (kind == "dynamic" and one.get("alpha") and key in ALL_KEYS):
                continue
            near = nearest(key, valid)
            meant = f"did you mean {near!r}?" if near else f"a {kind!r} one has: {', '.join(sorted(valid))}"
            meant = f"a {kind!r} one has none; remove it" if key == ORIGINAL else meant
            yield f"unknown key {key!r} in {name}: {meant}"


def two_values(raw: Mapping[str, Any]) -> Iterator[str]:
    """Keys given twice, with two values: base and share at the top and inside; the type, or the original length."""
    for name in SCHEMAS:
        for keys in (BASES, SHARES):
            key = next((key for key in keys if raw.get(key) is not None), None)
            inside = [given.get(keys[0]) for given in of_layers(raw.get(name))]
            if key is not None and None not in inside and raw[key] not in inside:  # the top is for other layer types
                both = f"{key} is {raw[key]} at the top and {inside[0]} in {name}"
                yield f"{both}; transformers takes the latter; remove the wrong one"
    for name, given in rope_dicts(raw):
        old, new = (OLD_TYPES.get(str(kind), kind) for kind in (given.get("type"), given.get("rope_type")))
        if None not in (old, new) and old != new:
            yield f"type is {old!r} and rope_type {new!r} in {name}; transformers takes the latter; remove the wrong one"
        top, inside = raw.get(ORIGINAL), given.get(ORIGINAL)
        if given is raw.get(name) and None not in (top, inside) and top != inside:
            yield f"{ORIGINAL} is {top} at the top and {inside} in {name}; transformers takes the former; remove the wrong one"


def lengths(raw: Mapping[str, Any], rope: RopeConfig, head_dim: int, given: Mapping[str, Any]) -> Iterator[str]:
    """Contradictions of a scaling's factor, original length, declared length and lists."""
    scaling, declared = rope.scaling, raw.get("max_position_embeddings")
    if scaling is None:
        return
    try:
        frequencies_of(rope, head_dim)
    except ValueError as error:
        yield str(error)
    original = getattr(scaling, "original_max_length", None)
    if original is None or declared is None or isinstance(scaling, DynamicNTK):
        return
    if ORIGINAL not in given and ORIGINAL not in raw:
        for_it = f"max_position_embeddings = {declared} for the length that the model was trained at"
        yield f"{ORIGINAL} is missing, and transformers takes {for_it}; write it"
    elif isinstance(scaling, LongRoPE) and math.prod(scaling.short_factor) > math.prod(scaling.long_factor):
        yield "short_factor slows its pairs more than long_factor does: the two lists are swapped"
    elif original > declared:
        yield f"{ORIGINAL} = {original} is longer than max_position_embeddings = {declared}"
    elif isinstance(scaling, Llama3):
        return  # its own factor reaches half of what it declares
    elif (longest := (given.get("factor") or declared) * original) < COVERAGE * declared:
        factor = f"factor {given['factor']} times {ORIGINAL} = {original}"
        yield f"{factor} is {longest:g}, less than max_position_embeddings = {declared}"


def parameters_of(raw: Mapping[str, Any], layer: str | None) -> Mapping[str, Any]:
    """The dict of rope parameters of a layer type."""
    given = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    inner = given.get(layer) if layer is not None else None
    return inner if isinstance(inner, Mapping) else given


def unrotated(rope: RopeConfig) -> list[int]:
    """The layers that do not rotate, counted from 0."""
    return [layer for layer, rotates in enumerate(rope.rotates or ()) if not rotates]
