"""What a cache layer owes its callers: a refused call or crop leaves it as it was, and every mode of torch may read it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only


@contextmanager
def unchanged_if_refused(*layers: Any, written: bool = False) -> Iterator[None]:
    """Give cache layers (or None) back what they held when the body raises.

    Tensors in a layer are replaced, or written behind their end, so that the old ones need no copy. written: copy states: without
    gradients a mixer may write its own in place before a later layer refuses."""
    if torch.compiler.is_compiling():
        yield
        return
    held = [(layer, _held(layer, written)) for layer in layers if layer is not None]
    try:
        yield
    except BaseException:
        for layer, before in held:
            vars(layer).update(before)
        raise


def _held(layer: Any, written: bool) -> dict[str, Any]:
    found = {name: x for name, x in vars(layer).items() if name != "peers"}
    if written and "state" in found and not torch.is_grad_enabled():
        found["state"] = tree_map_only(Tensor, torch.clone, found["state"])
    return found


def of_this_mode(held: Any) -> Any:
    """What is held, copied where it was made in inference_mode and is now read outside: no backward could save it."""
    if torch.is_inference_mode_enabled() or not _made_in_inference(held):
        return held
    return tree_map_only(Tensor, torch.clone, held)


def _made_in_inference(held: Any) -> bool:
    if isinstance(held, Tensor):
        return held.is_inference()
    parts = held.values() if isinstance(held, dict) else held if isinstance(held, tuple | list) else ()
    return any(_made_in_inference(part) for part in parts)


class CropsTogether:
    """A layer of a cache that is cropped where all layers of the cache can be, and none where one cannot."""

    peers: Sequence[Any] = ()
    """The layers of the cache, in its order."""

    def require_crop(self, tokens_to_remove: int) -> None:
        """ValueError where `crop` would be refused."""

    def crop(self, tokens_to_remove: int) -> None:
        # A cache crops its layers in order: the first one asks for all.
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
