"""Renaming of published tensors and keys by tables, and detection of unknown keys in a config.json."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor
from transformers import GenerationConfig, PreTrainedConfig

LAYER = "{n}"
"""Stands for a layer's number in a table of names."""
NEVER_READ = {
    *PreTrainedConfig().to_dict(), *GenerationConfig().to_dict(),
    "architectures", "model_type", "auto_map", "torch_dtype", "dtype", "use_cache", "initializer_range",
} - {"quantization_config"}  # fmt: skip
"""Keys of any config.json that decide no logits: names, initial values, defaults of generate(), what is returned."""


def renamed(state: Mapping[str, Tensor], names: Mapping[str, str]) -> dict[str, Tensor]:
    """Tensors under other names.

    names: prefixes -> new prefixes, each with at most one {n} for a layer's number. A name without a matching prefix is kept,
    and loading it raises an error.
    """
    rules = [(re.compile(re.escape(old).replace(re.escape(LAYER), r"(\d+)")), new) for old, new in names.items()]
    out = {}
    for name, tensor in state.items():
        for rule, new in rules:
            if found := rule.match(name):
                out[new.replace(LAYER, "".join(found.groups())) + name[found.end() :]] = tensor
                break
        else:
            out[name] = tensor
    return out


def inverse(names: Mapping[str, str]) -> dict[str, str]:
    """The table that undoes `names`."""
    return {new: old for old, new in names.items()}


def require_value(where: str, key: str, value: Any, expected: Iterable[Any], why: str = "") -> None:
    """ValueError unless a key has one of the values that our model computes."""
    expected = list(expected)
    if not any(value == each and isinstance(value, bool) == isinstance(each, bool) for each in expected):
        raise ValueError(
            f"{where}: {key} = {value!r} is not understood; expected {' or '.join(map(repr, expected))}{why}"
        )


def require_known_keys(where: str, plain: Mapping[str, Any], known: Iterable[str]) -> None:
    """ValueError for the first key of a config.json that may change the model and that is not read."""
    known = NEVER_READ | set(known)
    for key in plain:
        if key not in known and not key.startswith("_"):
            raise ValueError(
                f"{where}: {key} = {plain[key]!r} is not understood, and might change the model; remove the key if it does not"
            )
