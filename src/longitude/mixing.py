"""Every mixer by name: attention in its forms, and recurrences."""

from importlib import import_module
from pkgutil import iter_modules
from typing import Any

import longitude.attention.layers
import longitude.recurrent
from longitude.attention.mixer import Mixer, mixer_resolved, registered

# Every module of the two packages that hold mixers: adding one there is writing one file.
for _package in (longitude.attention.layers, longitude.recurrent):
    for _module in iter_modules(_package.__path__):
        import_module(f"{_package.__name__}.{_module.name}")


def mixers() -> list[str]:
    """The names of all mixers."""
    return sorted(registered())


def mixer(name: str, **options: Any) -> Mixer:
    """Build a mixer by name: lg.mixer("mamba", dim=256). ValueError for an unknown name or option, with the nearest one."""
    options = mixer_resolved(name, options)
    return registered()[name](**options)
