"""The laws of an encoding or a mixer: the public batteries, on a registered name or a class of the user's own.

A function of the user's may also return a model, on which `longitude.check.check` tries the laws of checkpoints.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from torch import nn

from longitude.attention.mixer import MIXERS, Mixer
from longitude.errors import unknown
from longitude.plugins import run_file
from longitude.positions.base import Encoding, list_encodings
from longitude.testing.engine import OnLaw, Result, in_words, try_laws
from longitude.testing.examples import ENCODING_LAWS, MIXER_LAWS, SHAPES, Example, PartBattery

EncodingOrMixer = str | Callable[..., Any]
"""A registered name, a class of an Encoding or a Mixer, or a function that builds one."""


def check_part(
    part: EncodingOrMixer,
    options: Mapping[str, Any] | None = None,
    *,
    laws: Iterable[str] | None = None,
    on_law: OnLaw = lambda name, done, total: None,
) -> dict[str, Result]:
    """Try every law on an encoding or mixer.

    Args:
        part: A registered name, a class, or a function that builds one.
        options: Options to build it with.
        laws: Names of the laws to try; all by default.
        on_law: Called with the name of a law, the number of earlier laws, and the number of all laws.

    Returns:
        The Result of each law by its name, broken ones included.

    Raises:
        ValueError: If it cannot be built, or for an unknown law.
    """
    battery = battery_of(part, options or {})
    chosen = battery.chosen(laws)
    build = battery.example(part, **(options or {}))
    built(build)
    return try_laws(chosen, build, on_law)


def battery_of(part: EncodingOrMixer, options: Mapping[str, Any]) -> PartBattery:
    """The battery of encodings or of mixers; of a function, by what it builds. ValueError for neither."""
    if isinstance(part, str):
        of_mixers = part in MIXERS and part not in list_encodings()
    elif isinstance(part, type):
        of_mixers = issubclass(part, Mixer)
    else:
        of_mixers = isinstance(built(MIXER_LAWS.example(part, **options)), Mixer)
    return MIXER_LAWS if of_mixers else ENCODING_LAWS


def built(build: Example) -> Encoding | Mixer:
    """Build an example. ValueError with a message for users if it cannot be built at the toy sizes."""
    made = _made(build)
    if not isinstance(made, Encoding | Mixer):
        raise ValueError(
            f"expected a class or a function that builds a longitude.Encoding or a longitude.Mixer, or a function that returns a "
            f"model of transformers, got {build.name}, which builds a {type(made).__name__}"
        )
    return made


def _made(build: Example) -> Any:
    """What the factory of an example returns. ValueError with a message for users if it raises."""
    try:
        return build.factory(**build.resolved())
    except ValueError:
        raise
    except TypeError as error:
        sizes = ", ".join(f"{name}={value}" for name, value in SHAPES.items())
        raise ValueError(
            f"expected a class or a function that can be built with {sizes} and its own defaults, got "
            f"{type(error).__name__}: {error}; give missing options after a colon, name=value; of a model, name a function that "
            "returns it"
        ) from error
    except Exception as error:
        raise ValueError(f"{build.name} cannot be built: it raised {in_words(error)}") from error


def model_of(factory: EncodingOrMixer, options: Mapping[str, Any]) -> nn.Module | None:
    """The model that a function of the user's returns; None if the factory is a name or a class, or builds another thing."""
    if isinstance(factory, str | type):
        return None
    made = _made(MIXER_LAWS.example(factory, **options))
    return made if isinstance(made, nn.Module) and hasattr(made, "config") else None


def from_file_or_module(place: str, name: str) -> Any:
    """The class or function `name` of a module, or of a file that ends in .py, which is run. ValueError if there is none."""
    module = _run(place) if place.endswith(".py") else _imported(place)
    if not hasattr(module, name):
        parts = [
            key for key, kind in vars(module).items() if isinstance(kind, type) and issubclass(kind, Encoding | Mixer)
        ]
        raise unknown("class", name, parts, f"in {place}.")
    if not callable(factory := getattr(module, name)):
        raise ValueError(
            f"{place}:{name}: expected a class or a function that builds an encoding or a mixer, got {factory!r}"
        )
    return factory


def _run(place: str) -> ModuleType:
    path = Path(place)
    if not path.is_file():
        raise ValueError(f"{place}: there is no such file; expected path/file.py:Class")
    return run_file(str(path.resolve()), path.read_bytes())


def _imported(place: str) -> ModuleType:
    sys.path.insert(0, "")  # the user's own modules, as `python -m` finds them
    try:
        return importlib.import_module(place)
    except ImportError as error:
        raise ValueError(
            f"{place}: there is no such module ({error}); expected module:Class or path/file.py:Class"
        ) from error
    finally:
        sys.path.remove("")
