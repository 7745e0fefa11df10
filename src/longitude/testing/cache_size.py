"""What a cache holds: its tensors, and the bytes behind them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves


def tensors_held(cache: Any) -> list[Tensor]:
    """Every tensor that a cache layer holds, in attributes, tuples, dicts and objects of our own.

    Args:
        cache: A layer of a cache, or any nest of such layers.

    Returns:
        The tensors.
    """
    found: list[Tensor] = []
    seen: set[int] = set()

    def walk(thing: Any) -> None:
        if id(thing) in seen:
            return
        seen.add(id(thing))
        for leaf in tree_leaves(thing):
            if isinstance(leaf, Tensor):
                found.append(leaf)
            elif hasattr(leaf, "__dict__") and not isinstance(leaf, type | torch.nn.Module) and not callable(leaf):
                seen.add(id(leaf))
                for value in vars(leaf).values():
                    walk(value)

    walk(cache)
    return found


def bytes_held(cache: Any) -> int:
    """Bytes of the memory behind a cache, shared memory once: a view of a long tensor holds all of it.

    Args:
        cache: A layer of a cache, or any nest of such layers.

    Returns:
        The number of bytes.
    """
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors_held(cache)}
    return sum(storages.values())
