"""What each layer of a Hugging Face config does with position: its rotation, its temperature, its window."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from longitude.errors import check_choice
from longitude.positions.by_layer import WINDOWS_ROTATE, layer_types
from longitude.positions.hugging_face import RopeConfig, as_mapping, from_hugging_face
from longitude.positions.layouts import Layout

WINDOWS_ON_FULL = ("minimax",)
"""Model types whose layers of "full_attention" take the sliding_window: the others are linear."""


class LayerPositions(NamedTuple):
    """What one layer does with position.

    Args:
        encoding: its encodings, {"name": name, **options} each, as LongitudeConfig(encodings=[...]) and set_positions take them.
        window: keys that a query attends to, itself included; None: all before it.
        chunk: tokens of the chunks that attention does not leave (Llama 4), or None.
    """

    encoding: list[dict[str, Any]]
    window: int | None = None
    chunk: int | None = None

    @property
    def mixer(self) -> dict[str, Any]:
        """As LongitudeConfig(mixers=[...]) takes it."""
        if self.chunk is not None:
            return {"name": "chunks", "size": self.chunk}
        return {"name": "attention"} if self.window is None else {"name": "window", "size": self.window}


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
    """
    check_choice("layers_from_hugging_face", Layout, layout=layout)
    read, given = from_hugging_face(config), as_mapping(config)
    layers = given.get("num_hidden_layers")
    if not isinstance(layers, int):
        raise ValueError(
            f"expected num_hidden_layers, got {layers!r}; a config of text and images has it in its text_config"
        )
    width = given.get("head_dim") or given["hidden_size"] // given["num_attention_heads"]
    own = {int(layer): each for layer, each in (given.get("per_layer_config") or {}).items()}
    types = given.get("layer_types")
    if types is None and given.get("model_type") in WINDOWS_ROTATE:
        types = layer_types(given)
    if types is None and isinstance(read, Mapping):
        raise ValueError(f"expected layer_types, one per layer, because rotations differ by type ({', '.join(read)})")
    windowed = given.get("sliding_window") if given.get("use_sliding_window", True) else None
    found = []
    for layer in range(layers):
        kind = None if types is None else types[layer]
        rope = read if isinstance(read, RopeConfig) else read.get(str(kind))
        attends_all = kind == "full_attention" and given.get("model_type") not in WINDOWS_ON_FULL
        window = windowed if kind in (None, "sliding_attention", "full_attention") and not attends_all else None
        chunk = given.get("attention_chunk_size") if kind == "chunked_attention" else None
        head_dim = own.get(layer, {}).get("head_dim", width)
        found.append(LayerPositions(_specs(rope, layer, head_dim, layout), window, chunk))
    return found


def _specs(rope: RopeConfig | None, layer: int, head_dim: int, layout: Layout) -> list[dict[str, Any]]:
    """The encodings of a layer."""
    if rope is None:
        return [{"name": "none"}]
    if rope.rotates is not None and not rope.rotates[layer]:
        return [rope.unrotated_temperature or {"name": "none"}]
    name = "rope" if rope.sections is None else "mrope"
    rotary = {"name": name, "head_dim": head_dim, "layout": layout, **rope.options(head_dim)}
    return [rotary, *([] if rope.temperature is None else [rope.temperature])]
