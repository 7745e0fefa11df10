"""Positions that a config declares, compared layer by layer with those that its class computes.

The class decides: what it computes is what the model does. Keys name the parameters, and a difference between the two is an error
with both numbers.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from itertools import product
from typing import Any, NamedTuple

import torch
from transformers.modeling_rope_utils import RotaryEmbeddingConfigMixin

from longitude.checkpoints.declared import (
    Ropes,
    by_type,
    class_of,
    fault_of,
    has_key,
    require_numbers,
    require_windows,
    text_part,
    type_in,
    unread,
)
from longitude.checkpoints.observed import TOKENS, Layer, RotaryTables, observe
from longitude.errors import UsageError
from longitude.hf.stock import heads_of
from longitude.positions.config_keys import (
    BASE_BY_LAYER,
    BASES,
    FULL,
    LOCAL_BASES,
    OLD_TYPES,
    SCHEMAS,
    SHARES,
    WIDTH,
    WINDOWED,
    as_mapping,
    names_any,
    not_understood,
)
from longitude.positions.hugging_face import NotUnderstood, RopeConfig, names_rotation, read_ropes
from longitude.positions.rotary import MultimodalRotary
from longitude.positions.scaling import Frequencies, rope_frequencies
from longitude.positions.scaling.base import ROPE_TYPES, Follows

EQUAL = 2e-6
"""Relative tolerance between our frequencies and those of transformers, which are computed in float32."""
OTHER_AXES = "gives pairs to axes otherwise than mrope_section says"


def which_layers(layers: list[int], every: int) -> str:
    """Numbers of layers, for a message."""
    return "all layers" if len(layers) == every else f"layers {str(layers)[1:-1]}"


def by_reason(reasons: Mapping[int, str], every: int) -> list[str]:
    """A line for each distinct reason, with the layers that have it. reasons: by layer."""
    layers_of = {why: [layer for layer, other in reasons.items() if other == why] for why in reasons.values()}
    return [f"{why} ({which_layers(layers, every)})" for why, layers in layers_of.items()]


def frequencies_of(rope: RopeConfig, head_dim: int, length: int | None = None) -> Frequencies:
    """Frequencies of the pairs of a rotation, and its factors, in a sequence of this length; pairs of all axes are alike."""
    return rope_frequencies(head_dim, **rope._replace(sections=None).options(head_dim), length=length)


class LayerRope(NamedTuple):
    """The rotation of one layer.

    Attributes:
        rope: Its parameters.
        head_dim: The width of which a partial rotation is a share: of a head, or of its rotary part.
        label: The layer type, or other name, that the config has the parameters under; None if it has them for all layers.
    """

    rope: RopeConfig
    head_dim: int
    label: str | None = None


class Reading(NamedTuple):
    """Positions that a config declares, confirmed by its class.

    Attributes:
        ropes: Rotary parameters, one for all rotating layers or one per layer type; empty if nothing rotates.
        layers: Rotation of each layer, None if it has none; None for a config without a class.
        attends: Whether attention was seen in each layer.
        unexplained: Layer -> position information that reaches its attention and that no key explains.
        notes: Remarks for the user that concern the whole model.
    """

    ropes: Ropes
    layers: Sequence[LayerRope | None] | None = None
    attends: list[bool] | None = None
    unexplained: dict[int, str] = {}
    notes: list[str] = []

    def problems(self) -> list[str]:
        """Unexplained positions, a line for each distinct problem with the layers that have it."""
        return [f"not understood: {problem}" for problem in by_reason(self.unexplained, len(self.layers or []))]


# ---- reading ---------------------------------------------------------------------------------------------------------
def read(config: Mapping[str, Any] | Any) -> Reading:
    """Read the positions of a config, confirmed by its class if transformers has one. ValueError: see from_hugging_face."""
    if isinstance(config, Mapping):
        require_numbers(config)
    theirs, written = class_of(config), text_part(config)
    if theirs is None:
        kind = as_mapping(written).get("model_type")
        alone = f"not understood: model_type {kind!r}, of which no class is here: its keys are read as if all layers rotated"
        return Reading(read_ropes(written), notes=[] if kind is None else [alone])
    keys = as_mapping(theirs)
    require_windows(theirs, keys)
    try:
        seen = observe(theirs).layers
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
    declared = read_ropes(keys)
    if isinstance(config, Mapping):
        require_kept(read_ropes(as_written(as_mapping(written), theirs, declared)), declared)
    return Agreement(theirs, keys, declared, seen).reading(attends)


def head_dim_of(config: Any, layer_type: str | None = None) -> int:
    """Width of a head; for latent attention, the rotary width. All code gets the width here.

    layer_type: the type of layers, if heads differ by type (Gemma 4); ValueError without it.
    """
    try:
        layers = [layer for layer in read(config).layers or [] if layer is not None]
    except ValueError:
        layers = []
    if widths := [layer.head_dim for layer in layers if layer_type in (None, layer.label)]:
        if len({*widths}) > 1:
            raise UsageError("", "layers with the same heads", f"head_dim {widths[0]} and {max(widths)}")
        return widths[0]
    return getattr(config, "qk_rope_head_dim", None) or heads_of(config, layer_type)["head_dim"]


def not_rotary(config: Any) -> str | None:
    """Why positions are not rotary; None if they are, or if that is not understood."""
    if (reason := unread(config)) is not None:
        return reason
    if not names_rotation(as_mapping(config)):
        return "its config has no rope_parameters; if the model rotates, add its base to the config, as in rope_theta=10000.0"
    try:
        return None if read(config).ropes else "no layer of its class rotates queries and keys"
    except ValueError:
        return None


def ropes(config: Any) -> dict[str | None, RopeConfig]:
    """Rotary parameters of a config as its class rotates, by layer type (None: one for all).

    Raises:
        ValueError: if nothing rotates, or the keys contradict each other.
        NotUnderstood: a ValueError, if the class rotates differently from the keys that are read here.
    """
    if (reason := not_rotary(config)) is not None:
        raise ValueError(reason)
    return {layer: rope for layer, rope in by_type(read(config).ropes).items() if rope is not None}


def border_of(config: Any) -> int | None:
    """The original length of a scaling that follows the sequence's length, if the config has one."""
    try:
        scalings = [rope.scaling for rope in ropes(config).values()]
    except ValueError:
        return None
    return min((rule.original_max_length for rule in scalings if isinstance(rule, Follows)), default=None)


def as_written(written: Mapping[str, Any], theirs: Any, declared: Ropes) -> dict[str, Any]:
    """A file's keys, with what its class decides: names of types that it maps, and a base that the file need not have.

    The class has a special default (Gemma 3), or the keys contain the base of each layer, and the class follows them (Granite).
    """
    written = dict(written) | {name: as_named_here(written.get(name), theirs) for name in SCHEMAS if written.get(name)}
    special = type(theirs).default_theta != RotaryEmbeddingConfigMixin.default_theta
    if not names_any(written, BASES) and (special or (written.get(BASE_BY_LAYER) and has_key(theirs, BASE_BY_LAYER))):
        kept = by_type(declared)
        bases = {
            BASES[0]: kept.get(FULL, kept.get(None)),
            LOCAL_BASES[0]: kept.get(WINDOWED[0]),
        }
        written |= {key: rope.base for key, rope in bases.items() if rope is not None}
    return written


def as_named_here(parameters: Any, theirs: Any) -> Any:
    """Rope parameters of a file, with the type that its class makes of a name that is unknown here (deepseek_yarn: yarn)."""
    kind = type_in(parameters)
    made = type_in(getattr(theirs, SCHEMAS[0], None))
    if not isinstance(kind, str) or kind in ROPE_TYPES or kind in OLD_TYPES or made not in ROPE_TYPES:
        return parameters
    return {key: value for key, value in parameters.items() if key != "type"} | {"rope_type": made}


def require_kept(written: Ropes, declared: Ropes, shares: bool = False) -> None:
    """ValueError if transformers lost a base or a scheme that is in a file. shares: also the share of heads that rotates.

    A class that makes parameters by layer type of flat ones (OLMo 3, DeepSeek V4) may have the base in one and the scheme in
    another.
    """

    def facts(ropes: Ropes) -> list[tuple[Any, ...]]:
        rotations = [rope for rope in by_type(ropes).values() if rope is not None]
        if isinstance(written, dict) or isinstance(declared, RopeConfig):
            return [
                (rope.base, rope.scaling, (rope.partial_rotary_factor, rope.proportion) if shares else ())
                for rope in rotations
            ]
        return [fact for rope in rotations for fact in (("base", rope.base), ("scheme", type(rope.scaling)))]

    kept = facts(declared)
    if any(fact not in kept for fact in facts(written)):
        meant, read_as = in_words(written, declared), in_words(declared, written)
        raise ValueError(
            f"its keys mean {meant}, but transformers reads {read_as}; write them where its class reads them"
        )


def in_words(ropes: Ropes, others: Ropes) -> str:
    """The numbers of rotary parameters that differ from those of others, by layer type; all of a type that others lack."""
    parts, theirs = [], by_type(others)
    for layer, rope in by_type(ropes).items():
        other = theirs.get(layer, theirs.get(None))
        same = {} if other is None else other._asdict()
        apart = {} if rope is None else {k: v for k, v in rope._asdict().items() if k not in same or same[k] != v}
        numbers = ", ".join(f"{k} {v:g}" if isinstance(v, float | int) else f"{k} {v}" for k, v in apart.items())
        parts += [f"{layer}: {numbers}" if layer else numbers] if numbers else []
    return ", ".join(parts) or "no more than that"


# ---- declared against observed ---------------------------------------------------------------------------------------
class Disagreement(NotUnderstood):
    """The class of a config computes another rotation than its keys declare; the message has both numbers."""


def refusal(keys: Mapping[str, Any], table: RotaryTables, why: str) -> NotUnderstood:
    """The error for tables that the keys do not explain, with the keys that may."""
    unread = not_understood(keys, by_class=True) or [SCHEMAS[0] if keys.get(SCHEMAS[0]) else "model_type"]
    return NotUnderstood(f"not understood: {', '.join(unread)}: {type(table.module).__name__} {why}", unread)


class Agreement:
    """Parameters that the keys of a config declare, compared with the tables that its class makes."""

    def __init__(self, config: Any, keys: Mapping[str, Any], declared: Ropes, seen: list[Layer]):
        self.config, self.keys, self.declared, self.seen = config, keys, declared, seen
        types = keys.get("layer_types") or []
        self.types: list[str | None] = [*types] if len(types) == len(seen) else [None] * len(seen)
        bases = keys.get(BASE_BY_LAYER) or []
        self.bases = [*bases] if len(bases) == len(seen) else [None] * len(seen)
        self.notes: dict[str, None] = {}

    def reading(self, attends: list[bool]) -> Reading:
        rotation = cache(self.rotation)  # layers share tables
        layers = [
            rotation(tuple(layer.tables), layer.width, layer.warm, kind, base) if layer.tables else None
            for layer, kind, base in zip(self.seen, self.types, self.bases, strict=True)
        ]
        unrotated = None if isinstance(self.declared, dict) else self.declared.unrotated_temperature
        unexplained = {
            n: why
            for n, (layer, rotation) in enumerate(zip(self.seen, layers, strict=True))
            if (why := layer.unexplained(unrotated if rotation is None else rotation.rope.temperature))
        }
        return Reading(self.summed_up(layers), layers, attends, unexplained, [*self.notes])

    def rotation(
        self, tables: Sequence[RotaryTables], width_of_queries: int | None, warm: bool, kind: str | None, base: Any
    ) -> LayerRope:
        """The declared parameters that the tables of a layer are made of. NotUnderstood if there are none."""
        table, *others = tables
        if any((other.module, other.label) != (table.module, table.label) for other in others):
            raise refusal(self.keys, table, "rotates a layer by several tables")
        if table.learned:
            raise refusal(self.keys, table, "has frequencies among its weights, which no key decides")
        differences: list[str] = []
        unreadable = ""
        for (label, rope), width in product(self.candidates(kind, base), self.widths(width_of_queries)):
            for variant in self.variants(rope, table, width):
                try:
                    differs, notes = apart(table, variant, width)
                except ValueError as error:
                    unreadable = f"has numbers that are not read here ({error})"
                    continue
                if differs is None:
                    self.notes |= dict.fromkeys(notes)
                    temperature = variant.temperature if warm else None
                    return LayerRope(variant._replace(rotates=None, temperature=temperature), width, label)
                differences.append(differs)
        if OTHER_AXES in differences:  # the frequencies are as declared
            raise refusal(self.keys, table, OTHER_AXES)
        if not differences:
            raise refusal(self.keys, table, unreadable or "rotates a layer for which no parameters are declared")
        if any(key in observe(self.config).read for key in not_understood(self.keys, by_class=True)):
            raise refusal(self.keys, table, differences[0])
        named = [key for key in (*SHARES, WIDTH) if "pairs," in differences[0] and names_any(self.keys, [key])]
        named = named or [SCHEMAS[0] if self.keys.get(SCHEMAS[0]) else "model_type"]
        raise Disagreement(f"{', '.join(named)}: {type(table.module).__name__} {differences[0]}", named)

    def candidates(self, kind: str | None, base: float | None) -> list[tuple[str | None, RopeConfig]]:
        """(label, parameters) that a layer may have: those of its type, else all. base: of the layer alone, if it has one."""
        declared = by_type(self.declared)
        return [
            (label, rope._replace(base=base or rope.base))
            for label, rope in declared.items()
            if rope is not None and (kind not in declared or label == kind)
        ]

    def widths(self, of_queries: int | None) -> list[int]:
        """Widths that a partial rotary factor may refer to: of a head, or of its rotary part."""
        widths = [self.keys.get("qk_rope_head_dim"), of_queries, self.keys.get("head_dim")]
        if of_queries is None and (heads := getattr(self.config, "num_attention_heads", None)):
            widths.append(self.config.hidden_size // heads)
        return list(dict.fromkeys(width for width in widths if isinstance(width, int) and width > 0))

    def variants(self, rope: RopeConfig, table: RotaryTables, width: int) -> Iterator[RopeConfig]:
        """Parameters with defaults of the class that no key gives: a share, and the arrangement of pairs of several axes."""
        shares = [rotated / width for rotated in (table.width, 2 * table.width) if rotated < width]
        if names_any(self.keys, (*SHARES, WIDTH)):
            shares = []
        for variant in (rope, *(rope._replace(partial_rotary_factor=share) for share in shares)):
            if not table.axes:
                yield variant._replace(sections=None, interleaved=False)
            elif variant.sections is not None:
                yield from (variant, variant._replace(interleaved=not variant.interleaved))
            else:
                pairs = variant.rotary_dim(width) // 2 if not int(width * variant.partial_rotary_factor) % 2 else 0
                axes = table.axis_of_pair(pairs) if pairs else None
                if axes is None or not any(axes):
                    yield variant
                elif -1 not in axes:
                    counts = tuple(axes.count(axis) for axis in range(table.axes))
                    yield from (
                        variant._replace(sections=counts, interleaved=interleaved) for interleaved in (False, True)
                    )

    def summed_up(self, layers: list[LayerRope | None]) -> Ropes:
        """A single RopeConfig if all rotating layers agree, else one for each layer type or label of the config."""
        labels = by_type(self.declared) if isinstance(self.declared, dict) else None
        rotating = {n: layer for n, layer in enumerate(layers) if layer is not None}
        if isinstance(self.declared, RopeConfig) and alike(rotating):
            return self.shared(rotating, [*range(len(layers))])._replace(
                unrotated_temperature=self.declared.unrotated_temperature
            )
        by_label: dict[str, RopeConfig | None] = {}
        for label in dict.fromkeys(self.types) if labels is None else labels:
            typed = [n for n, kind in enumerate(self.types) if kind == label]
            members = {
                n: layer for n, layer in rotating.items() if (n in typed if labels is None else layer.label == label)
            }
            if labels is None and (label is None or not alike(members)):
                raise NotUnderstood(
                    f"not understood: {BASE_BY_LAYER}: layers of one type have several bases; layers_from_hugging_face has each",
                    [BASE_BY_LAYER],
                )
            idle = None if typed or labels is None else labels[label]
            by_label[str(label)] = self.shared(members, typed) if members else idle
        return by_label

    def shared(self, members: Mapping[int, LayerRope], typed: list[int]) -> RopeConfig:
        """Rotary parameters shared by the layers `members`, with `rotates` set if not all layers of their type rotate."""
        first = next(iter(members.values()))
        some = None if {*typed} <= {*members} else tuple(n in members for n in range(len(self.seen)))
        return first.rope._replace(rotates=some)


def alike(members: Mapping[int, LayerRope]) -> bool:
    """Whether all layers rotate in the same way."""
    rotations = [*members.values()]
    return all(rotation == rotations[0] for rotation in rotations)


def apart(table: RotaryTables, rope: RopeConfig, width: int) -> tuple[str | None, list[str]]:
    """(difference between a class's tables and parameters, or None; differences in long sequences only).

    ValueError for parameters of which no rotation can be computed.
    """
    lengths, scaling, notes = [TOKENS], rope.scaling, list[str]()  # too few tokens to change a table
    if isinstance(scaling, Follows):
        scaling = dataclasses.replace(scaling, follow="sequence")
        lengths += [scaling.original_max_length + 1, 4 * scaling.original_max_length]
    read = rope._replace(scaling=scaling)
    wanted = {length: frequencies_of(read, width, length) for length in lengths}
    axes = None if read.sections is None else MultimodalRotary(width, "half", **read.options(width)).axis_of_pair
    for length, want in wanted.items():
        if problem := difference(table.frequencies(length, len(want.inverse)), want, EQUAL).text:
            if length == TOKENS:
                return problem, []
            notes.append(f"in sequences of {length} tokens {type(table.module).__name__} {problem}")
    if axes is not None and table.axis_of_pair(len(axes)) not in (None, axes):
        return OTHER_AXES, []
    return None, notes[:1]


class Difference(NamedTuple):
    """The largest relative difference between two rotations; `text` has both numbers, and is empty within the tolerance."""

    relative: float
    text: str = ""


def difference(got: Frequencies, wanted: Frequencies, tolerance: float) -> Difference:
    """Compare frequencies [pairs] and the factor of cos and sin.

    Args:
        got: What a class or a model computes.
        wanted: What is declared.
        tolerance: Largest relative difference that is none.

    Returns:
        The difference, as a verb phrase: "rotates pair 3 by 0.001 rad a position, expected 0.00025".
    """
    if got.inverse.shape != wanted.inverse.shape:
        return Difference(float("inf"), f"rotates {len(got.inverse)} pairs, expected {len(wanted.inverse)}")
    of_factor = abs(got.attention_factor / wanted.attention_factor - 1)
    off = torch.where(wanted.inverse > 0, got.inverse / wanted.inverse - 1, got.inverse).abs()
    pair = int(off.argmax())  # of NaN, too
    if not of_factor <= tolerance:
        text = f"multiplies cos and sin by {got.attention_factor:.7g}, expected {wanted.attention_factor:.7g}"
    elif not float(off[pair]) <= tolerance:
        numbers = float(got.inverse[pair]), float(wanted.inverse[pair])
        text = f"rotates pair {pair} by {numbers[0]:.6g} rad a position, expected {numbers[1]:.6g}"
    else:
        text = ""
    return Difference(max(of_factor, float(off[pair])), text)
