"""The laws of an encoding or a mixer: the public batteries of `longitude.testing`, on a registered name or a class of the user's
own.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

from longitude import testing
from longitude.attention.mixer import MIXERS, Mixer
from longitude.check.base import Verdict, finite
from longitude.errors import unknown
from longitude.positions.base import Encoding, list_encodings
from longitude.testing.fixtures import compared

NUMBER = r"[-+]?(?:\d+\.?\d*(?:e[-+]?\d+)?|inf|nan)"


Part = str | Callable[..., Any]
"""A registered name, a class of an Encoding or a Mixer, or a function that builds one."""


def check_part(
    part: Part,
    options: Mapping[str, Any] | None = None,
    *,
    laws: tuple[str, ...] | None = None,
    watch: Callable[[str, int, int], None] = lambda law, done, all: None,
) -> list[Verdict]:
    """Every law of its battery on one encoding or mixer -> what each said, in order. ValueError where it cannot be built, or for
    a law that there is not.
    """
    battery = battery_of(part, options or {})
    known = battery.laws()
    for name in laws or ():
        if name not in known:
            raise unknown("law", name, known, f"all: {', '.join(known)}.")
    built = battery.example(part, **(options or {}))
    made_of(built)
    verdicts = []
    wanted = [name for name in known if laws is None or name in laws]
    for done, name in enumerate(wanted):
        watch(name, done, len(wanted))
        verdicts.append(verdict_of(battery, name, built))
    return verdicts


def battery_of(part: Part, options: Mapping[str, Any]) -> Any:
    """`longitude.testing` for an encoding, `longitude.testing.mixers` for a mixer; a function is asked what it builds. ValueError
    for neither.
    """
    if isinstance(part, str):
        return testing.mixers if part in MIXERS and part not in list_encodings() else testing
    if isinstance(part, type):
        return testing.mixers if issubclass(part, Mixer) else testing
    return testing.mixers if isinstance(made_of(testing.mixers.example(part, **options)), Mixer) else testing


def kind_of(part: Part, options: Mapping[str, Any]) -> str:
    """In a word."""
    return "mixer" if battery_of(part, options) is testing.mixers else "encoding"


def verdict_of(battery: Any, name: str, built: Any) -> Verdict:
    law = battery.laws()[name]
    compares = stated(law)
    seen: list[tuple[float, float]] = []
    token = compared.set(seen)
    try:
        with silent_profiler() if name == "memory" else nullcontext():
            said = battery.examine(law, built)
    except testing.LawBroken as broken:
        measured, threshold = numbers(str(broken))
        return Verdict(name, compares, "fail", measured, threshold, hint=" ".join(str(broken).split()))
    except Exception as error:
        words = f"it raised {type(error).__name__}: {' '.join(str(error).split())[:300]}"
        return Verdict(name, compares, "fail", hint=words)
    finally:
        compared.reset(token)
    if said == battery.HOLDS:
        measured, threshold = max(seen, key=lambda pair: pair[0] / max(pair[1], 1e-300), default=(None, None))
        return Verdict(name, compares, "pass", finite(measured), finite(threshold))
    return Verdict(name, compares, "not applicable", reason=said)


@contextmanager
def silent_profiler() -> Iterator[None]:
    """Torch's profiler, by which the memory law measures, writes to file descriptor 2 as it starts."""
    kept, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nowhere, 2)
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nowhere)


def made_of(built: Any) -> Encoding | Mixer:
    """What an example of either battery builds; ValueError, in words for users, where the toy sizes do not build it."""
    who = getattr(built.factory, "__name__", repr(built.factory))
    try:
        made = built.factory(**built.resolved())
    except ValueError:
        raise
    except TypeError as error:
        sizes = ", ".join(f"{name}={value}" for name, value in testing.SHAPES.items())
        raise ValueError(
            f"expected what can be built with options of {sizes} and its own defaults, got "
            f"{type(error).__name__}: {error}; give the missing ones after a colon, name=value"
        ) from error
    except Exception as error:
        words = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
        raise ValueError(f"{who} cannot be built: it raised {words}") from error
    if not isinstance(made, Encoding | Mixer):
        raise ValueError(
            f"expected a class or a function of a longitude.Encoding or a longitude.Mixer, and {who} makes a "
            f"{type(made).__name__}"
        )
    return made


def stated(law: testing.Law) -> str:
    """What a law states: the first sentence of its docstring, up to a semicolon."""
    text = " ".join((inspect.getdoc(getattr(law, "func", law)) or "").split())
    return re.split(r"(?<=[.;])\s", re.sub(r"^Law \d+\. ", "", text))[0].rstrip(".;")


def numbers(message: str) -> tuple[float | None, float | None]:
    """(measured, threshold) out of "differs by 1.2e-03, more than 1e-09"; None where a message has no such numbers."""
    found = re.search(rf"differs by ({NUMBER}), more than ({NUMBER})", message)
    if found is None:
        return None, None
    measured, threshold = map(float, found.groups())
    return (measured if abs(measured) < float("inf") else None), threshold


def of_place(place: str, name: str) -> Any:
    """The class or function `name` of a module, or of a file that ends in .py, which is run. ValueError where there is none."""
    if place.endswith(".py"):
        path = Path(place)
        if not path.is_file():
            raise ValueError(f"{place}: there is no such file; expected path/file.py:Class")
        spec = importlib.util.spec_from_file_location(f"longitude_checked_{path.stem}", path)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module
        try:
            spec.loader.exec_module(module)
        except Exception as error:
            raise ValueError(f"{place} cannot be run: {type(error).__name__}: {error}") from error
    else:
        sys.path.insert(0, "")  # modules beside the user, as `python -m` finds them
        try:
            module = importlib.import_module(place)
        except ImportError as error:
            raise ValueError(
                f"{place}: there is no such module ({error}); expected module:Class or path/file.py:Class"
            ) from error
        finally:
            sys.path.remove("")
    if not hasattr(module, name):
        kinds = [
            each for each, kind in vars(module).items() if isinstance(kind, type) and issubclass(kind, Encoding | Mixer)
        ]
        raise unknown("class", name, kinds, f"in {place}.")
    if not callable(factory := getattr(module, name)):
        raise ValueError(
            f"{place}:{name}: expected a class or a function that builds an encoding or a mixer, got {factory!r}"
        )
    return factory
