"""Every mixer by name: attention in its forms, and recurrences."""

from importlib import import_module
from pkgutil import iter_modules
from typing import Any

import longitude.attention
import longitude.recurrent
from longitude.attention.mixer import Mixer, mixer_resolved, registered

# Attention's own, and every module of the room of recurrences: adding one there is writing one file.
import_module("longitude.attention.layers")
for _module in iter_modules(longitude.recurrent.__path__):
    import_module(f"longitude.recurrent.{_module.name}")


def mixers() -> list[str]:
    """The names of all mixers."""
    return sorted(registered())


def mixer(name: str, **options: Any) -> Mixer:
    """Build a mixer by name: lg.mixer("mamba", dim=256)."""
    return registered()[name](**mixer_resolved(name, options)) if name in registered() else _unknown(name)


def _unknown(name: str) -> Mixer:
    mixer_resolved(name, {})
    raise AssertionError(name)
