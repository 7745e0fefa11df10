"""What each layer of a Hugging Face config does with position: read from its keys, and held to what its family's class does.

The keys say what parameters a rotation has, as far as they are understood. The class of transformers says which layers rotate,
and has the last word on frequencies: where the two differ the config is not understood, and the keys that may be why are named.
"""

from __future__ import annotations

import copy
import dataclasses
import warnings
from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from longitude.errors import check_choice
from longitude.positions.config_keys import BASES, FULL, LOCAL_BASES, SCHEMAS, SHARES, WINDOWED, of_layers
from longitude.positions.hugging_face import (
    NotUnderstood,
    RopeConfig,
    as_mapping,
    names_rotation,
    not_understood,
    read_ropes,
    unread_words,
)
from longitude.positions.layers import LayerPositions, layers_of
from longitude.positions.layouts import Layout
from longitude.positions.rotary import MultimodalRotary
from longitude.positions.scaling import Follows, Frequencies, rope_frequencies
from longitude.positions.scaling.base import Follow

if TYPE_CHECKING:
    from longitude.checkpoints.trace import Layer, Tables

EQUAL = 2e-6
"""Relative: between our frequencies and those of transformers, which are computed in float32."""
SHORT = 3
"""Tokens of a sequence in which no table has changed yet."""
Ropes = RopeConfig | dict[str, RopeConfig | None]


# ---- what is read ----------------------------------------------------------------------------------------------------
class LayerRope(NamedTuple):
    """The rotation of one layer.

    Attributes:
        rope: Its parameters.
        head_dim: The width of heads, or of their part, that a partial rotation is a part of.
        label: The layer type, or other name, that the config has the parameters under; None where it has them for all layers.
    """

    rope: RopeConfig
    head_dim: int
    label: str | None = None


class Reading(NamedTuple):
    """What a config says of positions, as its class confirms it.

    Attributes:
        ropes: Its rotary parameters, one for all layers that rotate or one per layer type; empty where nothing rotates.
        layers: For each layer its rotation, None where it has none; None for a config without a class.
        attends: For each layer whether attention of it was seen.
        unexplained: Layer -> what of position reaches its attention otherwise, and no key explains.
        notes: What a user must know that no single layer has.
    """

    ropes: Ropes
    layers: Sequence[LayerRope | None] | None = None
    attends: list[bool] | None = None
    unexplained: dict[int, str] = {}
    notes: list[str] = []

    def problems(self) -> list[str]:
        """What is unexplained, in one line for all layers that share it."""
        each = dict.fromkeys(self.unexplained.values())
        which = {why: [layer for layer, own in self.unexplained.items() if own == why] for why in each}
        every = len(self.layers or [])
        return [
            f"not understood: {why} ({'all layers' if len(layers) == every else f'layers {str(layers)[1:-1]}'})"
            for why, layers in which.items()
        ]


def from_hugging_face(
    config: Mapping[str, Any] | Any, follow: Follow | None = None, max_length: int | None = None
) -> Ropes:
    """The rotary parameters of a config of transformers, read as the model's class there reads them.

    A config without a model_type, or of one that the installed transformers does not have, is read by its keys alone, as of a
    model whose layers all rotate. yarn, longrope and llama3 without an original length take max_position_embeddings for it, and
    a config's own original_max_position_embeddings comes before that of flat parameters; yarn and longrope without a factor take
    max_position_embeddings / original length; dynamic's original length is max_position_embeddings.

    Args:
        config: a mapping, or an object with to_dict().
        follow: the length that dynamic and longrope follow; default: "sequence", as in transformers.
        max_length: the length that they declare, in tokens; with follow="declared", longrope takes max_position_embeddings by
            default.

    Returns:
        RopeConfig, or one per layer type (None: layers without rotation); empty for a model that rotates nothing. Which layers
        of all rotate, and what multiplies queries, is in it, too. A warning says what about position was not understood.

    Raises:
        ValueError: a missing base (never 10000 by default), an unknown type, a misspelt key, a key of another type.
        NotUnderstood: a ValueError, where the class rotates otherwise than the keys say that are read here.
    """
    found = read(config, follow, max_length)
    unread = not_understood(text_part(config), found.layers is not None)
    for words in [*([unread_words(unread)] if unread else []), *found.notes, *found.problems()]:
        warnings.warn(words, stacklevel=2)
    return found.ropes


def layers_from_hugging_face(config: Mapping[str, Any] | Any, layout: Layout) -> list[LayerPositions]:
    """What each layer of a config of transformers does with position.

    Example: LongitudeConfig(encodings=[one.encoding for one in layers], mixers=[one.mixer for one in layers], ...).

    Args:
        config: a mapping, or an object with to_dict().
        layout: which numbers of a head make a rotary pair, "half" or "interleaved"; no config has it.

    Returns:
        LayerPositions, one per layer.

    Raises:
        ValueError: what from_hugging_face refuses, no number of layers, or parameters by layer type without layer_types.
        NotUnderstood: a ValueError, where positions reach attention in a way that no key of the config explains.
    """
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


def read(config: Mapping[str, Any] | Any, follow: Follow | None = None, max_length: int | None = None) -> Reading:
    """What a config says of positions, confirmed by its class where transformers has one. ValueError: see from_hugging_face."""
    theirs, written = class_of(config), text_part(config)
    if theirs is None:
        kind = as_mapping(written).get("model_type")
        alone = f"not understood: model_type {kind!r}, of which no class is here: its keys are read as if all layers rotated"
        return Reading(read_ropes(written, follow, max_length), notes=[] if kind is None else [alone])
    from longitude.checkpoints.trace import traced

    seen, keys = traced(theirs), as_mapping(theirs)
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
        if lost(own, declared):
            raise ValueError(f"its keys mean {own}, but transformers reads {declared}; correct the names of its keys")
    return Confirmation(theirs, keys, declared, seen).reading(attends)


def class_of(config: Mapping[str, Any] | Any) -> Any:
    """A config's part about text as an object of transformers' class; None where transformers has none."""
    if not isinstance(config, Mapping):
        text = text_part(config)
        return text if type(text).__module__.startswith("transformers.") else None
    if not isinstance(kind := config.get("model_type"), str):
        return None
    try:
        from transformers.models.auto.configuration_auto import CONFIG_MAPPING

        from longitude.checkpoints.quiet import quiet
    except ImportError:
        return None
    if kind not in CONFIG_MAPPING:
        return None
    try:
        with quiet():
            made = CONFIG_MAPPING[kind](
                **copy.deepcopy({key: each for key, each in config.items() if key != "model_type"})
            )
    except Exception as error:
        reason = " ".join(str(error).split())[:200]
        raise ValueError(f"model_type {kind!r}: its class in transformers refuses this config ({reason})") from error
    return class_of(made)


def text_part(config: Mapping[str, Any] | Any) -> Mapping[str, Any] | Any:
    """The part about text of a config of text and images, any other config as it is."""
    if isinstance(config, Mapping):
        return config.get("text_config") or config
    return config.get_text_config(decoder=True) if hasattr(config, "get_text_config") else config


def with_own_base(written: Mapping[str, Any], theirs: Any, declared: Ropes) -> dict[str, Any]:
    """A config's keys, with its class's base where they name none and the class has one of its own (Gemma 3)."""
    from transformers.modeling_rope_utils import RotaryEmbeddingConfigMixin

    inside = (one for name in SCHEMAS for one in of_layers(written.get(name)))
    named = any(each.get(key) is not None for each in (written, *inside) for key in BASES)
    if named or type(theirs).default_theta == RotaryEmbeddingConfigMixin.default_theta:
        return dict(written)
    if isinstance(declared, RopeConfig):
        return dict(written) | {BASES[0]: declared.base}
    full, local = (declared.get(kind) for kind in (FULL, WINDOWED[0]))
    own = {} if full is None else {BASES[0]: full.base}
    return (
        dict(written) | own | ({} if local is None or local.base == own.get(BASES[0]) else {LOCAL_BASES[0]: local.base})
    )


def lost(written: Ropes, declared: Ropes, shares: bool = False) -> bool:
    """Whether transformers lost a base or a scheme that is written in a file. shares: or the part of heads that rotates.

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
    return any(one not in kept for one in facts(written))


# ---- held to the class -----------------------------------------------------------------------------------------------
def refusal(keys: Mapping[str, Any], table: Tables, why: str) -> NotUnderstood:
    """The error for tables that the keys do not explain, with the keys that may."""
    unread = not_understood(keys, by_class=True)
    if not unread:
        inside = of_layers(keys.get(SCHEMAS[0]))
        named = [key for key in SHARES if any(each.get(key) is not None for each in (keys, *inside))]
        unread = named if "numbers" in why and named else [SCHEMAS[0] if keys.get(SCHEMAS[0]) else "model_type"]
    return NotUnderstood(f"not understood: {', '.join(unread)}: {type(table.module).__name__} {why}", unread)


class Confirmation:
    """Parameters that the keys of a config declare, held to the tables that its class makes."""

    def __init__(self, config: Any, keys: Mapping[str, Any], declared: Ropes, seen: list[Layer]):
        self.config, self.keys, self.declared, self.seen = config, keys, declared, seen
        types = keys.get("layer_types") or []
        self.types: list[str | None] = [*types] if len(types) == len(seen) else [None] * len(seen)
        self.notes: dict[str, None] = {}

    def reading(self, attends: list[bool]) -> Reading:
        layers = [self.rotation(n) if layer.tables else None for n, layer in enumerate(self.seen)]
        unrotated = None if isinstance(self.declared, dict) else self.declared.unrotated_temperature
        unexplained = {
            n: why
            for n, (layer, own) in enumerate(zip(self.seen, layers, strict=True))
            if (why := layer.unexplained(unrotated if own is None else own.rope.temperature))
        }
        return Reading(self.summed_up(layers), layers, attends, unexplained, [*self.notes])

    def rotation(self, n: int) -> LayerRope:
        """The parameters that the tables of a layer are made of. NotUnderstood where they are of none that is declared."""
        table, *others = self.seen[n].tables
        if any((one.module, one.label) != (table.module, table.label) for one in others):
            raise refusal(self.keys, table, f"rotates layer {n} by several tables")
        if table.learned:
            raise refusal(self.keys, table, "has frequencies among its weights, which no key decides")
        reasons: list[str] = []
        for (label, rope), width in product(self.candidates(n), self.widths(n)):
            for one in self.variants(rope, table, width):
                differs, notes = difference(table, one, width)
                if differs is None:
                    self.notes |= dict.fromkeys(notes)
                    warm = one.temperature if self.seen[n].warm else None
                    return LayerRope(one._replace(rotates=None, temperature=warm), width, label)
                reasons.append(differs)
        reasons = reasons or [f"rotates layer {n}, for which no parameters are declared"]
        raise refusal(self.keys, table, next((why for why in reasons if "numbers" not in why), reasons[0]))

    def candidates(self, n: int) -> list[tuple[str | None, RopeConfig]]:
        """(label, parameters) that may be those of a layer: of its type, else any."""
        declared = self.declared
        own: dict[str | None, RopeConfig | None] = {**declared} if isinstance(declared, dict) else {None: declared}
        if self.types[n] in own:
            own = {self.types[n]: own[self.types[n]]}
        ropes = [(label, rope) for label, rope in own.items() if rope is not None]
        bases = self.keys.get("layer_rope_theta")
        if isinstance(bases, list | tuple) and len(bases) == len(self.seen) and bases[n]:
            ropes = [(label, rope._replace(base=bases[n])) for label, rope in ropes]
        return ropes

    def widths(self, n: int) -> list[int]:
        """Dimensions that a share may be a part of: those of a head, or of its part that rotates."""
        found = [self.keys.get("qk_rope_head_dim"), self.seen[n].width, self.keys.get("head_dim")]
        if self.seen[n].width is None and (heads := getattr(self.config, "num_attention_heads", None)):
            found.append(self.config.hidden_size // heads)
        return list(dict.fromkeys(each for each in found if isinstance(each, int) and each > 0))

    def variants(self, rope: RopeConfig, table: Tables, width: int) -> Iterator[RopeConfig]:
        """Parameters with what a class has by default where no key says it: a share, and how pairs of several axes lie."""
        inside = of_layers(self.keys.get(SCHEMAS[0]))
        named = any(each.get(key) is not None for key in SHARES for each in (self.keys, *inside))
        shares = [] if named else [rotated / width for rotated in (table.width, 2 * table.width) if rotated < width]
        for one in (rope, *(rope._replace(partial_rotary_factor=share) for share in shares)):
            if not table.axes:
                yield one._replace(sections=None, interleaved=False)
            elif one.sections is not None:
                yield from (one, one._replace(interleaved=not one.interleaved))
            else:
                pairs = one.rotary_dim(width) // 2 if not int(width * one.partial_rotary_factor) % 2 else 0
                axes = table.axis_of_pair(pairs) if pairs else None
                if axes is None or not any(axes):
                    yield one
                elif -1 not in axes:
                    counts = tuple(axes.count(axis) for axis in range(table.axes))
                    yield from (one._replace(sections=counts, interleaved=each) for each in (False, True))

    def summed_up(self, layers: list[LayerRope | None]) -> Ropes:
        """One RopeConfig where all layers that rotate have the same, else one for each layer type or label of the config."""
        if isinstance(self.declared, dict):
            found: dict[str, RopeConfig | None] = {}
            for label, rope in self.declared.items():
                own = [n for n, one in enumerate(layers) if one is not None and one.label == label]
                typed = [n for n, kind in enumerate(self.types) if kind == label]
                found[label] = self.of(own, layers, typed) if own else None if typed else rope
            return found
        rotating = [n for n, one in enumerate(layers) if one is not None]
        if self.alike(rotating, layers):
            rope = self.of(rotating, layers, [*range(len(layers))])
            assert rope is not None
            return rope._replace(unrotated_temperature=self.declared.unrotated_temperature)
        found = {}
        for kind in dict.fromkeys(self.types):
            typed = [n for n, own in enumerate(self.types) if own == kind]
            own = [n for n in typed if layers[n] is not None]
            if kind is None or not self.alike(own, layers):
                raise NotUnderstood(
                    "not understood: layer_rope_theta: layers of one type have several bases; layers_from_hugging_face has each",
                    ["layer_rope_theta"],
                )
            found[kind] = self.of(own, layers, typed) if own else None
        return found

    @staticmethod
    def alike(own: list[int], layers: list[LayerRope | None]) -> bool:
        return all(layers[n] == layers[own[0]] for n in own)

    @staticmethod
    def of(own: list[int], layers: list[LayerRope | None], typed: list[int]) -> RopeConfig | None:
        """The parameters that layers share, and which of all layers they are where not all of their type rotate."""
        first = layers[own[0]]
        assert first is not None
        some = None if {*typed} <= {*own} else tuple(n in own for n in range(len(layers)))
        return first.rope._replace(rotates=some)


def difference(table: Tables, rope: RopeConfig, width: int) -> tuple[str | None, list[str]]:
    """(what differs between a table and parameters or None, what differs in long sequences alone)."""
    lengths, scaling, notes = [SHORT], rope.scaling, list[str]()
    if isinstance(scaling, Follows):
        scaling = dataclasses.replace(
            scaling, follow="sequence", **({"step": None} if hasattr(scaling, "step") else {})
        )
        lengths += [scaling.original_max_length + 1, 4 * scaling.original_max_length]
    try:
        options = rope._replace(scaling=scaling).options(width)
        plain = {name: one for name, one in options.items() if name not in ("sections", "arrangement")}
        wanted = {length: rope_frequencies(width, **plain, length=length) for length in lengths}
        axes = None if rope.sections is None else MultimodalRotary(width, "half", **options).axis_of_pair
    except ValueError as error:
        return f"has numbers that are not read here ({error})", []
    for length, want in wanted.items():
        if (got := table.rotation(len(want.inverse), length)) is None:
            return (
                f"makes tables of {table.width} numbers, and the keys that are read ask for {len(want.inverse)} pairs",
                [],
            )
        if words := _apart(*got, want):
            if length == SHORT:
                return words, []
            notes.append(f"in sequences of {length} tokens {type(table.module).__name__} {words}")
    if axes is not None and table.axis_of_pair(len(axes)) not in (None, axes):
        return "gives pairs to axes otherwise than mrope_section says", []
    return None, notes[:1]


def _apart(frequencies: Tensor, factor: float, want: Frequencies) -> str | None:
    """How a class differs from what is wanted."""
    if abs(factor / want.attention_factor - 1) > EQUAL:
        return f"multiplies cos and sin by {factor:.7g}, and the keys that are read say {want.attention_factor:.7g}"
    off = torch.where(want.inverse > 0, frequencies / want.inverse - 1, frequencies).abs()
    if float(off.max()) <= EQUAL:
        return None
    pair = int(off.argmax())
    of_keys = f"and the keys that are read say {float(want.inverse[pair]):.6g}"
    return f"rotates pair {pair} by {float(frequencies[pair]):.6g} rad a position, {of_keys}"
