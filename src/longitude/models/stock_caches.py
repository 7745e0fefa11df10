"""All that this package knows of the cache classes of transformers: a new class of theirs is entered here."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

from torch import Tensor
from transformers import Cache, DynamicCache, EncoderDecoderCache, QuantizedCache, StaticCache
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer, Fp8QuantizedLayer
from transformers.utils.deprecation import deprecate_kwarg

from longitude.attention.cache import together
from longitude.errors import UsageError

PLAIN_LAYERS = (DynamicLayer, DynamicSlidingWindowLayer)
"""Layers of a cache that have keys and values alone."""
renames_cache = deprecate_kwarg("past_key_values", "5.40.0", new_name="cache", raise_if_both_names=True)
"""Decorator: accepts `past_key_values` as `cache`, as long as models of transformers do."""


def adopt(cache: Cache, make: Sequence[Callable[[], Any]], mark: str = "last_positions") -> Cache:
    """Replace the layers of an empty cache, as generate() makes it, by ours, in place; a filled cache must have ours.

    Args:
        cache: A cache.
        make: For each layer of the model, a function that builds its empty cache layer.
        mark: Attribute of the cache layers that the model can continue.

    Raises:
        ValueError: For a cache with other layers.
    """
    if not hasattr(cache, "layers"):  # tuples of tensors, as older models return; a cache of source and target
        raise UsageError("cache", "a LongitudeCache or a DynamicCache", type(cache).__name__)
    if len(cache.layers) == len(make):
        if getattr(cache.layers[0], "peers", None) is cache.layers:  # as after the first step
            return cache
        if all(hasattr(layer, mark) for layer in cache.layers):
            together(cache.layers)
            return cache
    if cache.layers and cache.get_seq_length():
        raise UsageError("cache", "an empty cache or a LongitudeCache", f"a filled {type(cache).__name__}")
    if foreign := [layer for layer in cache.layers if type(layer) not in PLAIN_LAYERS]:
        raise UsageError(
            "cache",
            "a LongitudeCache or a DynamicCache of plain layers",
            f"{type(cache).__name__} of {type(foreign[0]).__name__}",
            "static and quantized layers cannot store what encodings keep: leave cache_implementation out",
        )
    cache.layers[:] = [empty() for empty in make]
    together(cache.layers)
    return cache


OF_KEYS = ("cache", "past_key_values")
"""Names of a cache of keys: that of transformers, and its former one, which users' own models still have."""


def arguments_of(model: Any) -> set[str]:
    """Names of the arguments of a model's forward; if it has **kwargs, also those of the forwards that it overrides."""
    forwards = [model.forward, *(kind.forward for kind in type(model).__mro__ if "forward" in vars(kind))]
    names: set[str] = set()
    for forward in forwards:
        parameters = inspect.signature(forward).parameters
        names |= set(parameters)
        if all(parameter.kind is not parameter.VAR_KEYWORD for parameter in parameters.values()):
            break
    return names


def cache_name(model: Any) -> str | None:
    """Name of the cache in a model's forward and outputs, "state" in RWKV; None for a model without a cache."""
    arguments = arguments_of(model)
    return next((name for name in (*OF_KEYS, "state") if name in arguments), None)


def kinds_of(config: Any, places: int, accelerated: bool) -> dict[str, Callable[[], Any]]:
    """Cache classes that transformers can construct from a config; static ones with this many slots.

    Offloaded ones are made only on an accelerator: on the CPU there is nothing to move.
    """
    kinds = {
        "dynamic": lambda: DynamicCache(config=config),
        "dynamic without a config": DynamicCache,
        "offloaded": lambda: DynamicCache(config=config, offloading=True),
        "static": lambda: StaticCache(config=config, max_cache_len=places),
        "static offloaded": lambda: StaticCache(config=config, max_cache_len=places, offloading=True),
        "quantized": lambda: QuantizedCache("fp8", config=config),
        "encoder-decoder": lambda: EncoderDecoderCache(DynamicCache(config=config), DynamicCache(config=config)),
    }
    return {name: make for name, make in kinds.items() if accelerated or "offloaded" not in name}


@contextmanager
def without_rounding() -> Iterator[None]:
    """Context in which quantized caches keep full precision, so that errors show wrong slots instead of rounding."""

    def kept(layer: Any, x: Tensor, scale: Any = None) -> tuple[Tensor, Any]:
        return x, scale

    layer = Fp8QuantizedLayer
    with patch.object(layer, "_quantize", kept), patch.object(layer, "_dequantize", lambda layer, kept: kept[0]):
        yield
