"""Longitude: where a transformer's tokens are, and whether that knowledge holds past the length it was trained on.

Everything public is one name away, `import longitude as lg`, and is loaded on first use: the import itself costs nothing
beyond torch's, and `lg.attend` with all encodings never loads transformers.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # the same names for type checkers and editors; tests/test_house.py compares the two lists
    from longitude import attention, measure, models, positions, study, testing
    from longitude.attention.cache import LongitudeCache, LongitudeCacheLayer
    from longitude.attention.layers import MultiHeadAttention
    from longitude.attention.masks import Causal, Documents, Mask, NoMask, Padding, Window
    from longitude.attention.operation import attend, explain
    from longitude.models import LongitudeConfig, LongitudeForCausalLM
    from longitude.positions.absolute import Learned, NoPosition, Sinusoidal
    from longitude.positions.base import (
        Composed,
        Drift,
        Encoding,
        OffsetBias,
        OffsetVectors,
        PairBias,
        RowBias,
        Transport,
        encoding,
        encodings,
        register,
    )
    from longitude.positions.bias import ALiBi, Fire
    from longitude.positions.buckets import ClippedBias, T5Bias
    from longitude.positions.contextual import CoPE, FoX, PaTH
    from longitude.positions.relative import Shaw
    from longitude.positions.rotary import Rotary, rope_frequencies

__version__ = "0.1.0"

_ROOMS = ("positions", "attention", "models", "measure", "study", "testing")
_NAMES = {
    "positions.base": (
        "Encoding Composed OffsetBias PairBias Drift OffsetVectors RowBias Transport encoding encodings register"
    ),
    "positions.absolute": "NoPosition Sinusoidal Learned",
    "positions.rotary": "Rotary rope_frequencies",
    "positions.bias": "ALiBi Fire",
    "positions.buckets": "T5Bias ClippedBias",
    "positions.relative": "Shaw",
    "positions.contextual": "CoPE FoX PaTH",
    "attention.operation": "attend explain",
    "attention.masks": "Mask Causal Window Documents Padding NoMask",
    "attention.layers": "MultiHeadAttention",
    "attention.cache": "LongitudeCache LongitudeCacheLayer",
    "models": "LongitudeConfig LongitudeForCausalLM",
}
_MODULE_OF = {name: module for module, names in _NAMES.items() for name in names.split()}

__all__ = ["__version__", *_ROOMS, *_MODULE_OF]  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> Any:
    if name in _ROOMS:
        return import_module(f"longitude.{name}")
    if name in _MODULE_OF:
        value = getattr(import_module(f"longitude.{_MODULE_OF[name]}"), name)
        globals()[name] = value  # the next access is an ordinary one
        return value
    raise AttributeError(f"module 'longitude' has no attribute {name!r}; dir(longitude) lists its names")


def __dir__() -> list[str]:
    return sorted(__all__)
