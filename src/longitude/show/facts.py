"""The words about an encoding or a mixer: formula, source, properties, backends, cost; read from its class."""

import inspect
import re
from collections.abc import Iterator
from typing import Any

from longitude.catalogue import acts, source_of, takers
from longitude.positions.base import Encoding
from longitude.positions.composed import compose
from longitude.show.build import Built, Part, Shape

Facts = dict[str, Any]
NOTHING = "nothing: order is known from the causal mask alone"


def facts(made: Built, shape: Shape) -> Facts:
    """Plain data about a label: {"label", "encodings": [...], "mixers": [...], "backends"}; backends only of encodings."""
    backends = {} if made.encoding is None else {"backends": _backends(made.encoding, shape)}
    return {
        "label": made.label,
        "encodings": [_of_encoding(part, shape) for part in made.encodings],
        "mixers": [_of_mixer(part, shape) for part in made.mixers],
        **backends,
    }


def words(about: Facts, brief: bool = False) -> Iterator[tuple[str, str]]:
    """(head, text) of each fact, for readers; the formula has no head.

    brief: The facts that come first: without options, further properties and backends that are not the cheapest.
    """
    for part in (*about["encodings"], *about["mixers"]):
        first, *others = part["formula"].split("\n\n")
        shown = [each for each in others[:1] if each.startswith(" ")] if brief else others
        yield "", "\n\n".join([first, *shown])
        yield "source", part["source"] or "none given"
        if "takes" in part:
            cache, takes = f"{part['cache']} for N tokens", ", ".join(part["takes"])
            yield ("cache", cache) if brief else ("takes", f"of an encoding: {takes}; a cache of {cache}")
        else:
            yield "acts as", ", ".join(part["acts"]) or NOTHING
            properties = ", ".join(part["properties"])
            yield ("relative", "yes" if part["relative"] else "no") if brief else ("is", properties)
        if not brief:
            yield "options", " ".join(f"{name}={_value(value)}" for name, value in part["options"].items())
        yield "parameters", f"{part['parameters']:,}"
    if runs := about.get("backends"):
        yield "backends", "; ".join(_taken(when, each, brief) for when, each in runs.items())
        if not brief:
            yield "cost here", "`longitude bench` measures it"


def _of_encoding(part: Part, shape: Shape) -> Facts:
    module = part.module
    yes = {
        "relative": module.relative,
        "absolute": not module.relative,
        "learned": module.learned,
        "without parameters": not module.learned,
        "causal only": module.causal_only,
        f"defined up to {module.max_length} positions": module.max_length is not None,
        f"{module.axes} coordinates per token": module.axes > 1,
        "one module for all layers": module.learned and module.shared,
        "a module for each layer": module.learned and not module.shared,
        "cached keys stay untransformed": not module.stable_keys,
    }
    return {
        **_of_part(part),
        "acts": acts(module, shape.dim),
        "relative": module.relative,
        "properties": [words for words, holds in yes.items() if holds],
    }


def _of_mixer(part: Part, shape: Shape) -> Facts:
    kind = type(part.module)
    takes = ["what is added to the input", *["rotations"] * kind.rotates, *["terms of scores"] * kind.scores]
    return {**_of_part(part), "takes": takes, "cache": kind.growth, "products": part.module.products(shape.length)}


def _of_part(part: Part) -> Facts:
    members = compose(part.module) if isinstance(part.module, Encoding) else [part.module]
    return {
        "name": part.name,
        "class": " + ".join(type(each).__name__ for each in members),
        "formula": formula(part.factory),
        "source": source_of(part.module) or source_of(part.factory),
        "options": {name: value for name, value in part.options.items() if name != "encoding"},
        "parameters": sum(p.numel() for p in part.module.parameters()),
    }


def formula(factory: Any) -> str:
    """A docstring up to its first section."""
    return re.split(r"\n(?=[A-Z][a-z]+:\n)", inspect.getdoc(factory) or "")[0].strip()


def _backends(encoding: Encoding, shape: Shape) -> Facts:
    """{"training", "inference"}: as `takers`."""
    found = {"training": True, "inference": False}
    return {when: takers(compose(encoding), training, shape.length, shape.known) for when, training in found.items()}


def _taken(when: str, prices: dict[str, float], brief: bool) -> str:
    """The cheapest backend with its price, and unless it is brief the others."""
    first, *others = prices
    more = f", also {', '.join(others)}" if others and not brief else ""
    return f"{when}: {first}, about {prices[first]:g}× PyTorch attention{more}"


def _value(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)
