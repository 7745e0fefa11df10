"""Parameters that the keys of a config declare, compared layer by layer with the tables that its class makes."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from typing import Any, NamedTuple

import torch
from torch import Tensor

from longitude.checkpoints.trace import Layer, Tables
from longitude.positions.config_keys import SCHEMAS, SHARES, names_any
from longitude.positions.hugging_face import NotUnderstood, RopeConfig, not_understood
from longitude.positions.rotary import MultimodalRotary
from longitude.positions.scaling import Follows, Frequencies, rope_frequencies

EQUAL = 2e-6
"""Relative tolerance between our frequencies and those of transformers, which are computed in float32."""
SHORT = 3
"""Tokens of a sequence that is too short to change a table."""
Ropes = RopeConfig | dict[str, RopeConfig | None]


# ---- what is read ----------------------------------------------------------------------------------------------------
def which_layers(layers: list[int], every: int) -> str:
    """Numbers of layers, for a message."""
    return "all layers" if len(layers) == every else f"layers {str(layers)[1:-1]}"


def frequencies_of(rope: RopeConfig, head_dim: int, length: int | None = None) -> Frequencies:
    """Frequencies of the pairs of a rotation, and its factors, in a sequence of this length; pairs of all axes are alike."""
    options = {name: one for name, one in rope.options(head_dim).items() if name not in ("sections", "arrangement")}
    return rope_frequencies(head_dim, **options, length=length)


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
        each = dict.fromkeys(self.unexplained.values())
        which = {why: [layer for layer, own in self.unexplained.items() if own == why] for why in each}
        return [f"not understood: {why} ({which_layers(own, len(self.layers or []))})" for why, own in which.items()]


# ---- held to the class -----------------------------------------------------------------------------------------------
def refusal(keys: Mapping[str, Any], table: Tables, why: str) -> NotUnderstood:
    """The error for tables that the keys do not explain, with the keys that may."""
    unread = not_understood(keys, by_class=True)
    if not unread:
        named = [key for key in SHARES if names_any(keys, [key])]
        unread = named if "numbers" in why and named else [SCHEMAS[0] if keys.get(SCHEMAS[0]) else "model_type"]
    return NotUnderstood(f"not understood: {', '.join(unread)}: {type(table.module).__name__} {why}", unread)


class Agreement:
    """Parameters that the keys of a config declare, compared with the tables that its class makes."""

    def __init__(self, config: Any, keys: Mapping[str, Any], declared: Ropes, seen: list[Layer]):
        self.config, self.keys, self.declared, self.seen = config, keys, declared, seen
        types = keys.get("layer_types") or []
        self.types: list[str | None] = [*types] if len(types) == len(seen) else [None] * len(seen)
        self.notes: dict[str, None] = {}
        self.known: dict[Any, LayerRope] = {}

    def reading(self, attends: list[bool]) -> Reading:
        layers = [self.known_rotation(n) if layer.tables else None for n, layer in enumerate(self.seen)]
        unrotated = None if isinstance(self.declared, dict) else self.declared.unrotated_temperature
        unexplained = {
            n: why
            for n, (layer, own) in enumerate(zip(self.seen, layers, strict=True))
            if (why := layer.unexplained(unrotated if own is None else own.rope.temperature))
        }
        return Reading(self.summed_up(layers), layers, attends, unexplained, [*self.notes])

    def known_rotation(self, n: int) -> LayerRope:
        """`rotation`, once for layers that share tables, type and base."""
        bases = self.keys.get("layer_rope_theta") or [None] * len(self.seen)
        layer = self.seen[n]
        key = (*map(id, layer.tables), layer.width, layer.warm, self.types[n], bases[n] if n < len(bases) else None)
        if key not in self.known:
            self.known[key] = self.rotation(n)
        return self.known[key]

    def rotation(self, n: int) -> LayerRope:
        """The declared parameters that the tables of a layer are made of. NotUnderstood if there are none."""
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
        """(label, parameters) that a layer may have: those of its type, else all."""
        own: dict[Any, RopeConfig | None] = (
            {None: self.declared} if isinstance(self.declared, RopeConfig) else {**self.declared}
        )
        kind = self.types[n]
        ropes = [
            (label, rope) for label, rope in own.items() if rope is not None and (kind not in own or label == kind)
        ]
        bases = self.keys.get("layer_rope_theta")
        if isinstance(bases, list | tuple) and len(bases) == len(self.seen) and bases[n]:
            ropes = [(label, rope._replace(base=bases[n])) for label, rope in ropes]
        return ropes

    def widths(self, n: int) -> list[int]:
        """Widths that a partial rotary factor may refer to: of a head, or of its rotary part."""
        found = [self.keys.get("qk_rope_head_dim"), self.seen[n].width, self.keys.get("head_dim")]
        if self.seen[n].width is None and (heads := getattr(self.config, "num_attention_heads", None)):
            found.append(self.config.hidden_size // heads)
        return list(dict.fromkeys(each for each in found if isinstance(each, int) and each > 0))

    def variants(self, rope: RopeConfig, table: Tables, width: int) -> Iterator[RopeConfig]:
        """Parameters with defaults of the class that no key gives: a share, and the arrangement of pairs of several axes."""
        shares = [rotated / width for rotated in (table.width, 2 * table.width) if rotated < width]
        if names_any(self.keys, SHARES):
            shares = []
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
        """A single RopeConfig if all rotating layers agree, else one for each layer type or label of the config."""
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
        """Rotary parameters shared by the layers `own`, with `rotates` set if not all layers of their type rotate."""
        first = layers[own[0]]
        assert first is not None
        some = None if {*typed} <= {*own} else tuple(n in own for n in range(len(layers)))
        return first.rope._replace(rotates=some)


def difference(table: Tables, rope: RopeConfig, width: int) -> tuple[str | None, list[str]]:
    """(difference between a table and parameters, or None; differences in long sequences only)."""
    lengths, scaling, notes = [SHORT], rope.scaling, list[str]()
    if isinstance(scaling, Follows):
        scaling = dataclasses.replace(
            scaling, follow="sequence", **({"step": None} if hasattr(scaling, "step") else {})
        )
        lengths += [scaling.original_max_length + 1, 4 * scaling.original_max_length]
    try:
        own = rope._replace(scaling=scaling)
        wanted = {length: frequencies_of(own, width, length) for length in lengths}
        axes = None if own.sections is None else MultimodalRotary(width, "half", **own.options(width)).axis_of_pair
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
    """Description of the difference between a class and the expected rotation."""
    if abs(factor / want.attention_factor - 1) > EQUAL:
        return f"multiplies cos and sin by {factor:.7g}, and the keys that are read say {want.attention_factor:.7g}"
    off = torch.where(want.inverse > 0, frequencies / want.inverse - 1, frequencies).abs()
    if float(off.max()) <= EQUAL:
        return None
    pair = int(off.argmax())
    of_keys = f"and the keys that are read say {float(want.inverse[pair]):.6g}"
    return f"rotates pair {pair} by {float(frequencies[pair]):.6g} rad a position, {of_keys}"
