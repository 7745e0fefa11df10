"""Check that a family's own class rotates each layer as meant: compare its tables before an extension and after it."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from warnings import catch_warnings

from torch import nn
from transformers import PreTrainedConfig

from longitude.checkpoints.compare import difference, frequencies_of
from longitude.checkpoints.config import positions_of_layers
from longitude.checkpoints.declared import AS_IT_IS, Ropes
from longitude.checkpoints.load import Source, built_without_weights
from longitude.checkpoints.observed import RotaryTables, observe
from longitude.positions.config_keys import SUMMARIZED
from longitude.positions.hugging_face import NotUnderstood, RopeConfig
from longitude.positions.scaling.base import Frequencies

CLOSE = 2e-5
"""Tolerance: float32 tables of the same formula, in another order of operations, differ by less."""


class NotAsMeant(ValueError):
    """Raised if a class does something else than what was asked, or does not show what it does."""


@dataclass
class Layers:
    """The layers of a checkpoint as its class rotates them, before anything is changed.

    Attributes:
        source: The checkpoint.
        ropes: Rotary parameters that its configuration declares.
        original: The training length in tokens.
        tables: The tables that each rotating layer rotates by, by the layer's number.
        windows: Tokens in the window or chunk of each layer that sees nothing beyond it.
    """

    source: Source
    ropes: Ropes
    original: int
    tables: dict[int, list[RotaryTables]]
    windows: dict[int, int]

    @classmethod
    def of(cls, source: Source, ropes: Ropes, original: int) -> Layers:
        """ValueError if the class does not show its tables, or if no layer's distances grow with the context."""
        try:
            with catch_warnings(action="ignore"):  # of keys that are not understood, as notes say
                positions = positions_of_layers(source.config, "half")
            seen, tables = observe(source.config).layers, tables_of(source.config)
        except NotUnderstood as error:
            raise NotUnderstood(f"{source.name}: {error}; it is not extended", error.keys) from error
        kinds = dict(enumerate(getattr(source.config, "layer_types", None) or ()))
        windows = {
            layer: size
            for layer, at in enumerate(positions)
            if (size := at.window or at.chunk)
            and kinds.get(layer) not in SUMMARIZED
            and seen[layer].not_as(at._replace(window=None, chunk=None), size + 1)  # Moshi's class applies none
        }
        layers = cls(source, ropes, original, tables, windows)
        if not layers.growing:
            remedy = "raise the window in config.json first, or leave the rotation as it is"
            if still := [n for n, layer in enumerate(seen) if layer.attends and not layer.tables]:
                remedy = f"{seen[still[0]].kind} rotates nothing in layers that see more ({listed(still)}): {AS_IT_IS}"
            raise ValueError(
                f"{source.name}: every layer that rotates attends to {max(windows.values())} tokens at most, and training had "
                f"{original}: no distance grows with the text, and another rotation only costs; {remedy}"
            )
        return layers

    @property
    def growing(self) -> list[int]:
        """Layers that rotate and have no window below the context length, so that their distances grow."""
        return [layer for layer in self.tables if self.windows.get(layer, math.inf) > self.original]

    @property
    def sharing(self) -> list[int]:
        """Layers with a window that share one table with the others, so that their rotation changes, too."""
        labels = {table.label for tables in self.tables.values() for table in tables}
        return [layer for layer in self.tables if layer not in self.growing] if labels == {None} else []

    @property
    def rotary_dim(self) -> int:
        """Dimensions that rotate, in layers whose distances grow."""
        return 2 * len(self.tables[self.growing[0]][0].frequencies(self.original).inverse)

    def label(self, layer: int) -> str:
        """The layer type, or other name, that the parameters of a layer are under."""
        types = getattr(self.source.config, "layer_types", None)
        names = (self.tables[layer][0].label, None if types is None else types[layer])
        return next((name for name in names if isinstance(self.ropes, dict) and name in self.ropes), "")

    def notes(self) -> Iterator[str]:
        """Sentences on layers with distances that do not grow, and on layers without rotation."""
        kept = [layer for layer in self.tables if layer not in (*self.growing, *self.sharing)]
        for layers, what in (
            (kept, "They keep their rotation."),
            (self.sharing, "Their rotation changes with that of the others, since config.json has one for all layers."),
        ):
            if layers:
                sizes = sorted({self.windows[layer] for layer in layers})
                yield f"Layers with a window of {' or '.join(map(str, sizes))} tokens: {listed(layers)}. {what}"
        if still := sorted({*range(self.source.config.num_hidden_layers)} - {*self.tables}):
            yield f"Layers without rotation, which stay as they are: {listed(still)}."

    def require(self, config: PreTrainedConfig, meant: Ropes, length: int) -> float:
        """Raise NotAsMeant unless the class builds the intended tables from a new configuration, in every layer.

        Checked at the original and at the new length. Layers with growing distances must have the frequencies and factor of
        `meant`, other layers the previous ones. No other scale of scores may change. Returns the attention factor.
        """
        try:
            after = tables_of(config.get_text_config(decoder=True))
        except NotUnderstood as error:
            raise NotAsMeant(str(error)) from error
        if places_of(after) != places_of(self.tables):
            raise NotAsMeant("other layers rotate than before, or pairs follow other axes of positions")
        self.require_same_scales(config)
        lengths = (self.original, length)
        factors = [self.require_layer(layer, after[layer], meant, at) for layer in after for at in lengths]
        return next(factor for factor in factors if factor is not None)

    def require_same_scales(self, config: PreTrainedConfig) -> None:
        """Raise NotAsMeant unless the scores of every layer are multiplied by the same scale as before."""
        after = scales_of(built_without_weights(self.source.name, config))
        for name, scale in scales_of(self.source.skeleton).items():
            if not math.isclose(after.get(name, math.nan), scale, rel_tol=1e-6):
                raise NotAsMeant(f"{name} would multiply scores by {after.get(name)} instead of {scale:.6g}")

    def require_layer(self, layer: int, after: list[RotaryTables], meant: Ropes, length: int) -> float | None:
        """Check the tables of one layer; returns the attention factor that is meant, if its distances grow."""
        factor = None
        for old, new in zip(self.tables[layer], after, strict=True):
            was, got = old.frequencies(length), new.frequencies(length)
            wanted = of_formula(meant, self.label(layer), len(was.inverse), length)
            if layer in self.growing:
                if problem := difference(got, wanted, CLOSE).text:
                    raise NotAsMeant(f"layer {layer} {problem}, at {length} tokens")
                factor = wanted.attention_factor
            elif (problem := difference(got, was, CLOSE).text) and (
                layer not in self.sharing or difference(got, wanted, CLOSE).text
            ):
                raise NotAsMeant(f"layer {layer}, whose window does not grow, {problem} as it was trained")
        return factor


# ---- what layers have ---------------------------------------------------------------------------------------------------
def tables_of(config: PreTrainedConfig) -> dict[int, list[RotaryTables]]:
    """Tables of rotating layers, by layer number. NotUnderstood for a class that does not show them."""
    return {number: layer.tables for number, layer in enumerate(observe(config).layers) if layer.tables}


def places_of(tables: dict[int, list[RotaryTables]]) -> list[tuple[int, str | None, list[int] | None]]:
    """(layer, label, axis of positions that each pair follows) of every table."""
    every = [(layer, table) for layer, of_layer in tables.items() for table in of_layer]
    return [(layer, table.label, table.axis_of_pair(table.width // 2)) for layer, table in every]


def scales_of(model: nn.Module) -> dict[str, float]:
    """Scales of scores by module name."""
    named = ((name, getattr(module, "scaling", None)) for name, module in model.named_modules())
    return {name: scale for name, scale in named if isinstance(scale, float)}


def listed(layers: list[int]) -> str:
    """Numbers of layers in words, shortened if there are more than 8."""
    shown = layers if len(layers) <= 8 else [*layers[:6], "...", layers[-1]]
    return ", ".join(map(str, shown))


def of_formula(ropes: Ropes, label: str, pairs: int, length: int) -> Frequencies:
    """The rotation that a configuration declares for a type of layers, by our formulas."""
    rope = ropes if isinstance(ropes, RopeConfig) else ropes.get(label)
    if rope is None:
        raise NotAsMeant("its configuration declares no rotation of layers that its class rotates")
    return frequencies_of(rope._replace(partial_rotary_factor=1.0), 2 * pairs, length)
