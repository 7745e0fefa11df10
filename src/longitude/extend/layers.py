"""The proof that a family's own class rotates each layer as meant: its tables before an extension and after it, compared."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoModelForMaskedLM, PreTrainedConfig

from longitude.checkpoints.keys import Ropes
from longitude.checkpoints.quiet import quiet
from longitude.checkpoints.source import Source
from longitude.extend.recorded import Call, NotShown, Recorded, Table, recorded
from longitude.positions.hugging_face import RopeConfig
from longitude.positions.scaling import rope_frequencies

CLOSE = 2e-5
"""Relative: float32 tables of the same formula, in another order of operations, stay below."""


@dataclass
class Layers:
    """The layers of a checkpoint as its class rotates them, recorded before anything is changed.

    Attributes:
        source: The checkpoint.
        ropes: What its configuration declares.
        original: The trained length in tokens.
        recorded: What its class does.
    """

    source: Source
    ropes: Ropes
    original: int
    recorded: Recorded

    @classmethod
    def of(cls, source: Source, config: PreTrainedConfig, ropes: Ropes, original: int) -> Layers:
        """ValueError where the class shows no tables, or no layer has a use for another rotation."""
        kind = source.config.model_type
        try:
            found = recorded(auto_class(source), config)
        except NotShown as error:
            raise ValueError(
                f"{source.name}: {error}, so that nobody sees how it rotates; it is not extended"
            ) from error
        if not found.calls:
            raise ValueError(
                f"{source.name}: no layer of a {kind} model multiplies by rotary tables; it is not extended"
            )
        layers = cls(source, ropes, original, found)
        if not layers.growing:
            raise ValueError(
                f"{source.name}: every layer that rotates attends to {max(found.windows.values())} tokens at most, and "
                f"training had {original}: no distance grows with the text, and another rotation only costs; raise the window "
                f"in config.json first, or leave the rotation as it is"
            )
        return layers

    @property
    def growing(self) -> list[int]:
        """Layers that rotate and whose distances grow with the text."""
        return [layer for layer in self.recorded.calls if self.recorded.windows.get(layer, math.inf) > self.original]

    @property
    def sharing(self) -> list[int]:
        """Layers with a window that share the one table of the others, and so are rotated as they are."""
        labels = {call.label for calls in self.recorded.calls.values() for call in calls}
        return sorted({*self.recorded.calls} - {*self.growing}) if labels == {None} else []

    @property
    def rotary_dim(self) -> int:
        """Dimensions that rotate where distances grow."""
        return 2 * len(self.recorded.calls[self.growing[0]][0].at(self.original).inverse)

    def notes(self) -> Iterator[str]:
        """A sentence on layers whose distances do not grow, and on those that do not rotate."""
        kept = sorted({*self.recorded.calls} - {*self.growing} - {*self.sharing})
        for layers, what in (
            (kept, "They keep their rotation."),
            (self.sharing, "Their rotation changes with that of the others, since config.json has one for all layers."),
        ):
            if layers:
                sizes = sorted({self.recorded.windows[layer] for layer in layers})
                yield f"Layers with a window of {' or '.join(map(str, sizes))} tokens: {listed(layers)}. {what}"
        if still := sorted({*range(self.source.config.num_hidden_layers)} - {*self.recorded.calls}):
            yield f"Layers without rotation, which stay as they are: {listed(still)}."

    def require(self, config: PreTrainedConfig, meant: Ropes, method: str, length: int) -> float:
        """ValueError unless the class makes of a new configuration the tables that are meant, in every layer.

        At the original length and at the new one: where distances grow, frequencies and factor are those of `meant`, and
        everywhere else those of before. Nothing else that multiplies scores may change. Returns the attention factor.
        """
        try:
            after = recorded(auto_class(self.source), config)
            if after.places != self.recorded.places:
                raise NotShown("other layers rotate than before")
            if after.windows != self.recorded.windows:
                raise NotShown("other layers have a window than before")
            self.require_same_scales(config)
            lengths = (self.original, length)
            factors = [
                self.require_layer(layer, after.calls[layer], meant, at) for layer in after.calls for at in lengths
            ]
        except NotShown as error:
            raise ValueError(
                f"{self.source.name}: transformers does not rotate as {method} defines: {error}; "
                f"{self.source.config.model_type} models cannot be extended by --method {method}"
            ) from error
        return next(factor for factor in factors if factor is not None)

    def require_same_scales(self, config: PreTrainedConfig) -> None:
        """The scores of every layer are multiplied by what they were."""
        with quiet(), torch.device("meta"):
            after = scales_of(auto_class(self.source).from_config(config))
        for name, scale in scales_of(self.source.skeleton).items():
            if not math.isclose(after.get(name, math.nan), scale, rel_tol=1e-6):
                raise NotShown(f"{name} would multiply scores by {after.get(name):.6g} instead of {scale:.6g}")

    def require_layer(self, layer: int, after: list[Call], meant: Ropes, length: int) -> float | None:
        """The tables of one layer; the attention factor that is meant, where distances grow."""
        factor = None
        for old, new in zip(self.recorded.calls[layer], after, strict=True):
            was, got = old.at(length), new.at(length)
            declared, wanted = (of_formula(each, old.label, len(was.inverse), length) for each in (self.ropes, meant))
            if layer in self.growing:
                if problem := difference(was, declared):
                    raise NotShown(f"layer {layer}, as it is, {problem} by its config.json")
                if problem := difference(got, wanted):
                    raise NotShown(f"layer {layer} {problem}, at {length} tokens")
                factor = wanted.factor
            elif (problem := difference(got, was)) and (layer not in self.sharing or difference(got, wanted)):
                raise NotShown(f"layer {layer}, whose window does not grow, {problem} as it was trained")
        return factor


def auto_class(source: Source) -> Any:
    """The Auto class of transformers that makes the model of a checkpoint."""
    return AutoModelForCausalLM if source.causal else AutoModelForMaskedLM


# ---- what layers have ---------------------------------------------------------------------------------------------------
def scales_of(model: nn.Module) -> dict[str, float]:
    """What multiplies scores, by the name of each module that has it."""
    named = ((name, getattr(module, "scaling", None)) for name, module in model.named_modules())
    return {name: scale for name, scale in named if isinstance(scale, float)}


def listed(layers: list[int]) -> str:
    """Numbers of layers, few of many."""
    shown = layers if len(layers) <= 8 else [*layers[:6], "...", layers[-1]]
    return ", ".join(map(str, shown))


def of_formula(ropes: Ropes, label: str | None, pairs: int, length: int) -> Table:
    """The table that a configuration declares for a type of layers, by our formulas."""
    rope = ropes if isinstance(ropes, RopeConfig) else ropes.get(str(label))
    if rope is None:
        raise NotShown(f"its configuration declares no rotation of {label}, and its class rotates by one")
    options = rope._replace(sections=None, partial_rotary_factor=1.0).options(2 * pairs)
    found = rope_frequencies(2 * pairs, **options, length=length)
    return Table(found.inverse, found.attention_factor)


def difference(got: Table, want: Table) -> str:
    """What is another in a table, for a message; empty where nothing is."""
    if got.inverse.shape != want.inverse.shape:
        return f"rotates {len(got.inverse)} pairs, expected {len(want.inverse)}"
    if abs(got.factor - want.factor) > CLOSE:
        return f"multiplies cos and sin by {got.factor:.6g}, expected {want.factor:.6g}"
    off = relative(got.inverse.abs(), want.inverse)
    if float(off.max()) <= CLOSE:
        return ""
    pair = int(off.argmax())
    return f"rotates pair {pair} by {float(got.inverse[pair]):.6g} rad a position, expected {float(want.inverse[pair]):.6g}"


def relative(got: Tensor, want: Tensor) -> Tensor:
    """Per pair; of a pair that should not rotate, how far it does."""
    return (got - want).abs() / want.where(want > 0, 1.0)
