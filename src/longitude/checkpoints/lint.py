"""Contradictions between the keys of a config.json, and between these and its class: a table of rules, each with its remedy."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from difflib import get_close_matches
from functools import cached_property
from typing import Any, NamedTuple

from transformers import PreTrainedConfig

from longitude.checkpoints.compare import Disagreement, as_written, not_rotary, read, require_kept
from longitude.checkpoints.declared import (
    Ropes,
    by_default,
    by_type,
    class_of,
    has_key,
    heads_apart,
    keys_of,
    parameters_of,
    rotary_fault,
    text_part,
    type_in,
    unread,
)
from longitude.checkpoints.unread import ROTARY, is_read
from longitude.hf.stock import KEY
from longitude.positions.config_keys import (
    BASES,
    INSIDE,
    LENGTHS,
    LOCAL_BASES,
    OLD_TYPES,
    ORIGINAL,
    SCHEMAS,
    SHARES,
    names_any,
    of_layers,
    rope_dicts,
    value_of,
)
from longitude.positions.hugging_face import NotUnderstood, read_ropes
from longitude.positions.scaling import DynamicNTK, Llama3, LongRoPE
from longitude.positions.scaling.base import ROPE_TYPES

OLD = (*BASES, *LOCAL_BASES, *SCHEMAS, *SHARES, ORIGINAL)
"""Keys of earlier releases that transformers still reads."""
WORDS = (*ROTARY, "alibi", "window", "n_ctx", "seq_len", "max_len", "scaling")
"""Parts of the names of keys about positions. Published configs contain keys with WORDS that nothing reads, and flags and
names with ROTARY."""
COVERAGE = 0.99
"""Share of the declared length that factor times original length must cover; factors in files are rounded."""
LAYER_RULES = {"layer_types": "sliding_window_pattern", "no_rope_layers": "no_rope_layer_interval"}
"""Lists with an entry per layer, and the keys from which classes make them if they are not given."""


class Facts:
    """A config.json and the config that transformers makes of it.

    Args:
        whole: Content of the file.
        config: The config of its class.
    """

    def __init__(self, whole: Mapping[str, Any], config: Any):
        self.whole, self.config, self.raw = whole, text_part(config), text_part(whole)

    @cached_property
    def theirs(self) -> Ropes:
        """What the class's own keys declare. ValueError if they cannot be read."""
        return read_ropes(self.config)

    @cached_property
    def ours(self) -> Ropes:
        """What the file's keys declare. ValueError if they cannot be read."""
        try:
            return read_ropes(as_written(self.raw, self.config, self.theirs))
        except ValueError:
            return read_ropes(self.raw)


class Rule(NamedTuple):
    """A rule of config files.

    Attributes:
        broken: Yields a sentence for each contradiction.
        remedy: What to do, if each sentence does not say it.
        last: Whether the rules after it say nothing about a file that breaks it.
    """

    broken: Callable[[Facts], Iterable[str]]
    remedy: str = ""
    last: bool = False


def contradictions(raw: Mapping[str, Any], config: Any) -> Iterator[str]:
    """Contradictions of a config.json, each with what to do. raw: the file's content; config: as transformers reads it."""
    facts = Facts(raw, config)
    for rule in RULES:
        sentences = [*rule.broken(facts)]
        yield from (f"{sentence}; {rule.remedy}" if rule.remedy else sentence for sentence in sentences)
        if rule.last and sentences or rule is NONE_ROTATES and rotates_nothing(facts):
            return


# ---- rules for every config ------------------------------------------------------------------------------------------
def outside_text(facts: Facts) -> Iterator[str]:
    """A base or a scaling outside text_config, where no class reads it, that differs from the one inside."""
    raw = facts.whole
    if facts.raw is raw or not_rotary(text := facts.config):
        return
    inside = of_layers(getattr(text, SCHEMAS[0], None))
    for key in BASES:
        if raw.get(key) is not None and raw[key] not in [parameters.get(BASES[0]) for parameters in inside]:
            bases = ", ".join(f"{parameters.get(BASES[0]):g}" for parameters in inside)
            yield f"{key} = {raw[key]} is outside text_config, where nothing reads it: the text model has {bases}"
    for name, parameters in rope_dicts({name: raw.get(name) for name in SCHEMAS}):
        off = {
            key
            for key, value in parameters.items()
            if key != "type" and all(entry.get(key) != value for entry in inside)
        }
        if off:
            yield f"{name} is outside text_config, where nothing reads it: {', '.join(sorted(off))}"


def flags_of_others(facts: Facts) -> Iterator[str]:
    """Flags for positions that the class does not have."""
    for key, value in strangers(facts.raw, facts.config).items():
        if value is True and (key == "alibi" or ("." in key and any(word in key for word in (*ROTARY, "alibi")))):
            yield f"{key} is true, and transformers' class does not read it: it has no such positions"


def misspelt(facts: Facts) -> Iterator[str]:
    """Unknown keys that look like misspelt keys about positions, and ask for something else than these have."""
    valid = keys_of(facts.config)
    about = sorted({key for key in (*valid, *_legacy(valid)) if any(word in key for word in WORDS)})
    for key, value in strangers(facts.raw, facts.config).items():
        near = get_close_matches(key, about, n=1, cutoff=0.8)
        if not near or near[0] in facts.raw or value in (None, False, getattr(facts.config, near[0], None)):
            continue
        if key not in LENGTHS and not is_read(facts.raw, key, facts.config):
            yield f"unknown key {key!r}: did you mean {near[0]!r}?"


def other_types(facts: Facts) -> Iterator[str]:
    """Layer types of rope parameters that no layer has, and those without, for which transformers uses a default."""
    config = facts.config
    if (fresh := by_default(config)) is None:
        return
    usual = getattr(fresh, SCHEMAS[0], None) or {}
    types = getattr(config, "layer_types", None) or []
    for name in SCHEMAS:
        parameters = facts.raw.get(name)
        if not isinstance(parameters, Mapping) or not any(isinstance(entry, Mapping) for entry in parameters.values()):
            continue
        if not types and not any(isinstance(entry, Mapping) for entry in usual.values()):
            yield f"{name} has parameters by layer type, and transformers reads one set for all layers here: write one set"
            continue
        for label in parameters.keys() - {*usual, *types}:
            yield f"unknown layer type {label!r} in {name}: its class has {', '.join(sorted({*usual, *types}))}"
        for label in usual.keys() & {*(getattr(config, SCHEMAS[0], None) or {})} - parameters.keys():
            yield f"{name} has nothing for {label!r}, and transformers takes its default without a warning: write it"


def lists_twice(facts: Facts, defaults: bool = False) -> Iterator[str]:
    """Lists by layer that differ from those which the class makes by their rules, if both are given.

    defaults: check rules for which its class has a default, which transformers writes beside a list; else the other rules.
    """
    raw = facts.raw
    if (usual := by_default(facts.config)) is None:
        return
    for key, rule in LAYER_RULES.items():
        if not isinstance(kinds := raw.get(key), list) or raw.get(rule) is None or (rule in vars(usual)) != defaults:
            continue
        with suppress(ValueError):  # its class rejects the config, which is reported elsewhere
            made = getattr(class_of({name: value for name, value in raw.items() if name != key}), key, None) or []
            if off := [layer for layer, (a, b) in enumerate(zip(kinds, made, strict=False)) if a != b]:
                yield (
                    f"{key} has {kinds[off[0]]!r} for layer {off[0]}, and {rule} = {raw[rule]!r} makes it {made[off[0]]!r} "
                    f"({len(off)} layers differ); transformers takes the former"
                )


def scalings_of_none(facts: Facts) -> Iterator[str]:
    """Scalings without effect, since positions are not rotary: with ALiBi, or in a class without rotary parameters."""
    reason = unread(facts.config)
    if reason is None and not has_key(facts.config, SCHEMAS[0]):
        reason = f"{type(facts.config).__name__} has no rotary parameters"
    if reason is None or getattr(facts.config, KEY, None) is not None:  # what set_positions replaced may stay
        return
    for name, parameters in rope_dicts(facts.raw):
        if (kind := type_in(parameters)) not in (None, "default"):
            yield f"{name} of type {kind!r} has no effect: {reason}"


# ---- rules for configs whose class rotates ---------------------------------------------------------------------------
def rotates_nothing(facts: Facts) -> bool:
    """Whether no layer of the class rotates, so that no key of a rotation can be wrong or missing."""
    if unread(facts.config):
        return True
    with suppress(ValueError):
        return not read(facts.config).ropes
    return bool(not_rotary(facts.config)) and not any(facts.raw.get(name) for name in SCHEMAS)


def two_values(raw: Mapping[str, Any]) -> Iterator[str]:
    """Keys given twice, with two values: base and share at the top and inside; the type, or the original length."""
    for name in SCHEMAS:
        for keys in (BASES, SHARES):
            inside = [parameters.get(keys[0]) for parameters in of_layers(raw.get(name))]
            top = value_of(raw, keys)
            if top is not None and not isinstance(top, list) and None not in inside and top not in inside:
                place = f"in {INSIDE}" if value_of({**raw, INSIDE: None}, keys) is None else "at the top"
                key = next(key for key in keys if value_of(raw, [key]) is not None)
                yield f"{key} is {top} {place} and {inside[0]} in {name}; transformers takes the latter"
    for name, parameters in rope_dicts(raw):
        old, new = (OLD_TYPES.get(str(kind), kind) for kind in (parameters.get("type"), parameters.get("rope_type")))
        if None not in (old, new) and old != new:
            yield f"type is {old!r} and rope_type {new!r} in {name}; transformers takes the latter"
        top, inside = raw.get(ORIGINAL), parameters.get(ORIGINAL)
        if parameters is raw.get(name) and None not in (top, inside) and top != inside:
            yield f"{ORIGINAL} is {top} at the top and {inside} in {name}; transformers takes the former"


def turning_alike(facts: Facts) -> Iterator[str]:
    """Bases of 1 or less, by which later pairs turn as fast as the first, or faster."""
    for where in (facts.raw, *(parameters for _, parameters in rope_dicts(facts.raw))):
        for key in (*BASES, *LOCAL_BASES):
            if isinstance(base := where.get(key), int | float) and base <= 1:
                yield f"{key} = {base}, by which no pair turns slower than the first"


def misread(facts: Facts) -> Iterator[str]:
    """Keys that cannot be read, that the class loses, or by which it computes another rotation: the first of these."""
    try:
        with suppress(NotUnderstood):  # reported with the keys that nothing reads
            require_kept(facts.ours, facts.theirs, shares=names_any(facts.raw, SHARES))
        read(facts.config)
    except Disagreement as error:
        yield str(error)
    except NotUnderstood:
        if (fault := rotary_fault(facts.config)) is not None:
            yield fault
    except ValueError as error:
        default = "; transformers takes a default of its class without a warning: write the one of training"
        yield f"{error}{default if 'expected rope_theta' in str(error) else ''}"


def lengths(facts: Facts) -> Iterator[str]:
    """Contradictions of a scaling's factor, original length, declared length and lists."""
    raw, declared = facts.raw, facts.raw.get(LENGTHS[0])
    try:
        ropes_by_type = by_type(facts.ours)
    except NotUnderstood:
        return
    for layer, rope in ropes_by_type.items():
        parameters, scaling = parameters_of(raw, layer), rope and rope.scaling
        original = getattr(scaling, "original_max_length", None)
        if original is None or declared is None or isinstance(scaling, DynamicNTK):
            continue
        if ORIGINAL not in parameters and ORIGINAL not in raw:
            for_it = f"{LENGTHS[0]} = {declared} for the length that the model was trained at"
            yield f"{ORIGINAL} is missing, and transformers takes {for_it}; write it"
        elif isinstance(scaling, LongRoPE) and math.prod(scaling.short_factor) > math.prod(scaling.long_factor):
            yield "short_factor slows its pairs more than long_factor does: the two lists are swapped"
        elif original > declared:
            yield f"{ORIGINAL} = {original} is longer than {LENGTHS[0]} = {declared}"
        elif isinstance(scaling, Llama3):
            continue  # its own factor reaches half of what it declares
        elif (longest := (parameters.get("factor") or declared) * original) < COVERAGE * declared:
            factor = f"factor {parameters['factor']} times {ORIGINAL} = {original}"
            yield f"{factor} is {longest:g}, less than {LENGTHS[0]} = {declared}"


WRONG_ONE = "remove the wrong one"
NONE_ROTATES = Rule(scalings_of_none, "remove it", last=True)
RULES = (
    Rule(outside_text, "move it there"),
    Rule(flags_of_others),
    Rule(misspelt),
    Rule(other_types),
    Rule(lists_twice, WRONG_ONE),
    Rule(lambda facts: filter(None, [heads_apart(facts.raw)])),
    NONE_ROTATES,
    Rule(lambda facts: two_values(facts.raw), WRONG_ONE),
    Rule(turning_alike, "write the base of training"),
    Rule(misread, last=True),
    Rule(lengths),
)
"""Rules in their order."""


# ---- remarks ---------------------------------------------------------------------------------------------------------
def remarks(raw: Mapping[str, Any], config: Any) -> list[str]:
    """Remarks that are no faults: a factor beyond the length, keys without effect, a class of another family."""
    facts = Facts(raw, config)
    raw, config = facts.raw, facts.config
    notes = [f"{sentence}; {WRONG_ONE}" for sentence in lists_twice(facts, defaults=True)]
    if unread(config):
        return notes
    if (reason := not_rotary(config)) is not None:
        idle_ones = names_any(raw, BASES) or any(parameters for _, parameters in rope_dicts(raw))
        return [*notes, f"{reason}: its rotary parameters have no effect"] if idle_ones else notes
    declared: Any = raw.get(LENGTHS[0])
    for name, parameters in rope_dicts(raw):
        factor, original = parameters.get("factor"), parameters.get(ORIGINAL, raw.get(ORIGINAL))
        kind = type_in(parameters)
        if isinstance(kind, str) and kind not in ROPE_TYPES and kind not in OLD_TYPES:
            theirs = dict.fromkeys(str(type_in(entry)) for entry in of_layers(getattr(config, SCHEMAS[0], None)))
            notes.append(f"{name}: type {kind!r} is unknown here, and its class rotates as {' and '.join(theirs)}")
        if None in (factor, original, declared) or not (
            kind in ("yarn", "longrope") or (kind == "llama3" and original == declared)
        ):
            continue  # llama3's published factors reach beyond, too
        if isinstance(factor, int | float) and (reach := factor * original) > 1.01 * declared:
            notes.append(
                f"{name}: factor {factor} times {ORIGINAL} = {original} is {reach:g}, more than {LENGTHS[0]} = {declared}; "
                "the frequencies follow the factor"
            )
    try:
        notes += read(config).notes
    except ValueError as error:  # a Disagreement and others are among the contradictions
        notes += [str(error)] if type(error) is NotUnderstood else []
    return list(dict.fromkeys(notes))


def strangers(raw: Mapping[str, Any], config: Any) -> dict[str, Any]:
    """Keys that a class does not have; in dicts with a config of their own (MPT's attn_config) by their place."""
    valid = keys_of(config)
    known = {*valid, *_legacy(valid), KEY}
    unknown = {key: value for key, value in raw.items() if key.lstrip("_") not in valid and key not in known}
    for name, inner in raw.items():
        if isinstance(inner, Mapping) and isinstance(part := getattr(config, name, None), PreTrainedConfig):
            valid = keys_of(part)
            unknown |= {f"{name}.{key}": value for key, value in inner.items() if key not in valid}
    return unknown


def _legacy(valid: set[str]) -> tuple[str, ...]:
    return OLD if SCHEMAS[0] in valid else ()
