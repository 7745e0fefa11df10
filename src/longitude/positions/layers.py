"""What each layer of a Hugging Face config does with position: its rotation, its temperature, its window."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from longitude.errors import UsageError
from longitude.positions.hugging_face import RopeConfig
from longitude.positions.layouts import Layout

WINDOWS_ON_FULL = ("minimax",)
"""Model types whose layers of "full_attention" take the sliding_window: the others are linear."""


class LayerPositions(NamedTuple):
    """What one layer does with position.

    Args:
        encoding: its encodings, {"name": name, **options} each, as LongitudeConfig(encodings=[...]) and set_positions take them.
        window: keys that a query attends to, itself included; None: all before it.
        chunk: tokens of the chunks that attention does not leave (Llama 4), or None.
        attends: whether it has attention; other layers have a recurrence or a convolution in its place.
    """

    encoding: list[dict[str, Any]]
    window: int | None = None
    chunk: int | None = None
    attends: bool = True

    @property
    def mixer(self) -> dict[str, Any]:
        """As LongitudeConfig(mixers=[...]) takes it. ValueError for a layer without attention."""
        if not self.attends:
            raise UsageError("", "a layer with attention", "one without, whose mixer no config here describes")
        if self.chunk is not None:
            return {"name": "chunks", "size": self.chunk}
        return {"name": "attention"} if self.window is None else {"name": "window", "size": self.window}


def layers_of(
    config: Mapping[str, Any],
    layout: Layout,
    ropes: RopeConfig | Mapping[str, RopeConfig | None],
    of_layer: Sequence[tuple[RopeConfig, int] | None] | None = None,
    attends: Sequence[bool] | None = None,
) -> list[LayerPositions]:
    """What each layer of a config does with position.

    Args:
        config: its keys.
        layout: which numbers of a head make a rotary pair.
        ropes: its rotary parameters, of all layers or by layer type.
        of_layer: for each layer its own of them and head_dim, None where it does not rotate; default: by layer type.
        attends: for each layer whether it has attention; default: all have.

    Returns:
        LayerPositions, one per layer.

    Raises:
        ValueError: no number of layers, or parameters by layer type without layer_types.
    """
    types = config.get("layer_types")
    if of_layer is None:
        layers = config.get("num_hidden_layers")
        if not isinstance(layers, int):
            raise UsageError(
                "", "num_hidden_layers", repr(layers), "a config of text and images has it in its text_config"
            )
        if types is None and isinstance(ropes, Mapping):
            raise ValueError(
                f"expected layer_types, one per layer, because rotations differ by type ({', '.join(ropes)})"
            )
        width = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
        of_layer = []
        for layer in range(layers):
            rope = ropes if isinstance(ropes, RopeConfig) else ropes.get(str((types or [])[layer]))
            of_layer.append(None if rope is None or (rope.rotates and not rope.rotates[layer]) else (rope, width))
    temperature = ropes.unrotated_temperature if isinstance(ropes, RopeConfig) else None
    windowed = config.get("sliding_window") if config.get("use_sliding_window", True) else None
    found = []
    for layer, rope in enumerate(of_layer):
        kind = None if types is None else types[layer]
        attends_all = kind == "full_attention" and config.get("model_type") not in WINDOWS_ON_FULL
        window = windowed if kind in (None, "sliding_attention", "full_attention") and not attends_all else None
        chunk = config.get("attention_chunk_size") if kind == "chunked_attention" else None
        attending = attends is None or attends[layer]
        still = temperature if attending and temperature is not None else {"name": "none"}
        found.append(LayerPositions([still] if rope is None else _specs(*rope, layout), window, chunk, attending))
    return found


def _specs(rope: RopeConfig, head_dim: int, layout: Layout) -> list[dict[str, Any]]:
    """The encodings of a layer that rotates."""
    name = "rope" if rope.sections is None else "mrope"
    rotary = {"name": name, "head_dim": head_dim, "layout": layout, **rope.options(head_dim)}
    return [rotary, *([] if rope.temperature is None else [rope.temperature])]
