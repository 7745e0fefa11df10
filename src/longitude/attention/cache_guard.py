"""Guarantees of cache layers: a refused call or crop leaves them unchanged, and every mode of torch may read them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor


class unchanged_if_refused:
    """Context manager that restores the contents of cache layers (or None) if its body raises.

    Most layers replace their tensors or write after their end, so the old ones need no copy. Layers written in place are copied
    if `copied` is set: a later layer may raise after an earlier one has changed its state.
    """

    def __init__(self, *layers: Any, copied: bool = False):
        self.layers, self.copied = layers, copied

    def __enter__(self) -> None:
        self.held: list[tuple[Any, dict[str, Any]]] = []
        if not torch.compiler.is_compiling():
            self.held = [(layer, dict(layer.__dict__)) for layer in self.layers if hasattr(layer, "__dict__")]
            if self.copied and not torch.is_grad_enabled():
                for layer, held in self.held:
                    if getattr(layer, "in_place", False):
                        held["state"] = _cloned(held["state"])

    def __exit__(self, raised: Any, *_: Any) -> None:
        if raised is not None:
            for layer, before in self.held:
                layer.__dict__.update(before)


def of_this_mode(held: Any) -> Any:
    """Return held tensors, copied if made in inference_mode and read outside it: backward cannot save such tensors."""
    if torch.compiler.is_compiling() or torch.is_inference_mode_enabled() or not _made_in_inference(held):
        return held  # dynamo supports neither question
    return _cloned(held)


def _cloned(held: Any) -> Any:
    """A copy of all tensors. For each token, torch's tree_map would take longer than the copies."""
    if isinstance(held, Tensor):
        return held.clone()
    if isinstance(held, dict):
        return {name: _cloned(part) for name, part in held.items()}
    if isinstance(held, tuple | list):
        parts = map(_cloned, held)
        return type(held)(*parts) if hasattr(held, "_fields") else type(held)(parts)
    return held


def _made_in_inference(held: Any) -> bool:
    if isinstance(held, Tensor):
        return held.is_inference()
    parts = held.values() if isinstance(held, dict) else held if isinstance(held, tuple | list) else ()
    return any(_made_in_inference(part) for part in parts)


class CropsTogether:
    """A cache layer that is cropped only if all layers of its cache can be."""

    peers: Sequence[Any] = ()
    """The layers of the cache, in its order."""
    ids: Tensor | None = None
    """Token ids so far [B, L], held by the first layer of a cache if an encoding reads them."""

    def change_ids(self, change: Callable[[Tensor], Tensor]) -> None:
        if self.ids is not None:
            self.ids = change(self.ids)

    def require_crop(self, tokens_to_remove: int) -> None:
        """Raise ValueError if this layer cannot be cropped; by default it can."""

    def crop(self, tokens_to_remove: int) -> None:
        # A cache crops its layers in order: the first one checks all.
        for layer in self.peers if self.peers and self.peers[0] is self else (self,):
            if isinstance(layer, CropsTogether):
                layer.require_crop(tokens_to_remove)
        self._crop(tokens_to_remove)

    def _crop(self, tokens_to_remove: int) -> None:
        raise NotImplementedError


def together(layers: list[Any]) -> None:
    """Make these the layers of one cache."""
    for layer in layers:
        if isinstance(layer, CropsTogether):
            layer.peers = layers
