"""Memory that a call allocates, from torch's profiler, and memory that a cache stores."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile
from torch.utils._pytree import tree_leaves


class Memory(NamedTuple):
    """Bytes on the CPU. largest: largest tensor. peak: most additional memory in use at a time."""

    largest: int
    peak: int


def memory_of(call: Callable[[], Any]) -> Memory:
    """Memory that call() allocates on the CPU, including custom operators and backward."""
    with _silent(), profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as seen:
        call()
    profiler: Any = seen.profiler  # its stubs know no sizes
    events = [event for event in profiler.kineto_results.events() if event.name() == "[memory]"]
    sizes = [event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())]
    assert sizes, "this build of torch does not record memory"
    return Memory(max(sizes), max(accumulate(sizes)))  # what is freed has a negative size


@contextmanager
def _silent() -> Iterator[None]:
    """Context that silences file descriptor 2, to which torch's profiler writes as it starts and ends."""
    kept, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nowhere, 2)
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nowhere)


# ---- caches ----------------------------------------------------------------------------------------------------------
def tensors_held(cache: Any) -> list[Tensor]:
    """Every tensor that a cache layer stores, in attributes, tuples, dicts and objects of our own.

    Args:
        cache: A layer of a cache, or any nest of such layers.

    Returns:
        The tensors.
    """
    tensors: list[Tensor] = []
    seen: set[int] = set()

    def walk(thing: Any) -> None:
        if id(thing) in seen:
            return
        seen.add(id(thing))
        for leaf in tree_leaves(thing):
            if isinstance(leaf, Tensor):
                tensors.append(leaf)
            elif hasattr(leaf, "__dict__") and not isinstance(leaf, type | torch.nn.Module) and not callable(leaf):
                seen.add(id(leaf))
                for value in vars(leaf).values():
                    walk(value)

    walk(cache)
    return tensors


def bytes_held(cache: Any) -> int:
    """Bytes of the storage of a cache, with shared storage counted once: a view of a long tensor keeps all of it.

    Args:
        cache: A layer of a cache, or any nest of such layers.

    Returns:
        The number of bytes.
    """
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors_held(cache)}
    return sum(storages.values())
