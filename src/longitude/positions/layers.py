"""Positions of each layer of a Hugging Face config: its rotation, its temperature, its window."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from longitude.errors import UsageError
from longitude.positions.hugging_face import RopeConfig
from longitude.positions.rotation import Layout

WINDOWS_ON_FULL = ("minimax",)
"""Model types with sliding_window in their "full_attention" layers, because their other layers are linear attention."""


class LayerPositions(NamedTuple):
    """Positions of a layer: its encodings, and its window or chunks.

    Args:
        encoding: list of encodings {"name": name, **options}, in the format of LongitudeConfig(encodings=[...]) and
            set_positions.
        window: keys visible to a query, itself included; None: all earlier keys.
        chunk: chunk size in tokens for chunked attention (Llama 4), or None.
        attends: whether the layer has attention; other layers have a recurrence or a convolution instead.
    """

    encoding: list[dict[str, Any]]
    window: int | None = None
    chunk: int | None = None
    attends: bool = True

    @property
    def mixer(self) -> dict[str, Any]:
        """The layer's mixer in the format of LongitudeConfig(mixers=[...]). ValueError for a layer without attention."""
        if not self.attends:
            raise UsageError("", "a layer with attention", "one with a recurrence or a convolution instead")
        if self.chunk is not None:
            return {"name": "chunks", "size": self.chunk}
        return {"name": "attention"} if self.window is None else {"name": "window", "size": self.window}

    def allowed(self, queries: Tensor, keys: Tensor) -> Tensor:
        """Whether queries at positions [Lq] attend to keys at positions [Lk]: [Lq, Lk]."""
        offsets = queries[:, None] - keys
        seen = offsets >= 0
        if self.window is not None:
            seen &= offsets < self.window
        if self.chunk is not None:
            seen &= queries[:, None] // self.chunk == keys // self.chunk
        return seen


def layers_of(
    config: Mapping[str, Any],
    layout: Layout,
    ropes: RopeConfig | Mapping[str, RopeConfig | None],
    of_layer: Sequence[tuple[RopeConfig, int] | None] | None = None,
    attends: Sequence[bool] | None = None,
) -> list[LayerPositions]:
    """Positions of each layer of a config.

    Args:
        config: keys of the config.
        layout: which numbers of a head make a rotary pair.
        ropes: rotary parameters of all layers, or by layer type.
        of_layer: rotary parameters and head_dim of each layer, None if it does not rotate; default: by layer type.
        attends: whether each layer has attention; default: all do.

    Returns:
        LayerPositions, one per layer.

    Raises:
        ValueError: no number of layers, or parameters by layer type without layer_types.
    """
    types = config.get("layer_types")
    if of_layer is None:
        layers = config.get("num_hidden_layers")
        if not isinstance(layers, int):
            remedy = "a config of text and images has it in its text_config"
            raise UsageError("", "num_hidden_layers", repr(layers), remedy)
        if types is None and isinstance(ropes, Mapping):
            by_type = ", ".join(ropes)
            raise ValueError(f"expected layer_types, one per layer, because rotations differ by type ({by_type})")
        width = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
        of_layer = []
        for layer in range(layers):
            rope = ropes if isinstance(ropes, RopeConfig) else ropes.get(str((types or [])[layer]))
            of_layer.append(None if rope is None or (rope.rotates and not rope.rotates[layer]) else (rope, width))
    temperature = ropes.unrotated_temperature if isinstance(ropes, RopeConfig) else None
    windowed = config.get("sliding_window") if config.get("use_sliding_window", True) else None
    layers = []
    for layer, rope in enumerate(of_layer):
        kind = None if types is None else types[layer]
        attends_all = kind == "full_attention" and config.get("model_type") not in WINDOWS_ON_FULL
        window = windowed if kind in (None, "sliding_attention", "full_attention") and not attends_all else None
        chunk = config.get("attention_chunk_size") if kind == "chunked_attention" else None
        attending = attends is None or attends[layer]
        unrotated = temperature if attending and temperature is not None else {"name": "nope"}
        encodings = [unrotated] if rope is None else _specs(*rope, layout)
        layers.append(LayerPositions(encodings, window, chunk, attending))
    return layers


def _specs(rope: RopeConfig, head_dim: int, layout: Layout) -> list[dict[str, Any]]:
    """The encodings of a layer that rotates."""
    name = "rope" if rope.sections is None else "mrope"
    rotary = {"name": name, "head_dim": head_dim, "layout": layout, **rope.options(head_dim)}
    return [rotary, *([] if rope.temperature is None else [rope.temperature])]
