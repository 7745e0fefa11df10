"""Subjects of `longitude show`: labels and checkpoints, with their text and drawings."""

import inspect
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from longitude.attention.mixer import MIXERS
from longitude.drawings.build import Built, Part, Shape
from longitude.drawings.drawing import Drawing
from longitude.errors import UsageError
from longitude.positions.base import ENCODINGS

Facts = dict[str, Any]
Words = list[tuple[str, str]]
"""(head, text) of each fact, for readers; a formula or a table has an empty head."""


@dataclass(frozen=True)
class Subject:
    """A subject of `longitude show`, with its facts and drawings.

    Attributes:
        label: Name of the subject.
        about: Facts as plain data.
        words: The facts for readers.
        drawings: Drawings with distinct names.
        brief: The facts that a terminal shows with the first drawing unless all are asked for; None: it shows everything.
    """

    label: str
    about: Facts
    words: Words
    drawings: Sequence[Drawing]
    brief: Words | None = None


def subjects(names: Sequence[str], sizes: dict[str, int]) -> Iterator[Subject]:
    """Make the subject of each name.

    Args:
        names: Labels, checkpoints (folders, names of the hub, config.json).
        sizes: length, heads and head_dim as far as they are given.

    Raises:
        ValueError: For an unknown name, the folder of a study, and sizes of a checkpoint, which has its own.
    """
    from longitude.study.results import is_study

    for name in dict.fromkeys(names):
        if not is_checkpoint(name):
            yield _of_label(name, Shape(**sizes))
            continue
        if is_study(Path(name).expanduser()):
            remedy = f"`longitude report {name}` shows its results"
            raise UsageError("show", "an encoding, a mixer or a checkpoint", f"the study {name}", remedy)
        if sizes:
            option = next(iter(sizes)).replace("_", "-")
            raise UsageError(
                f"--{option}", "the name of an encoding or a mixer", f"the checkpoint {name}", "leave it out"
            )
        yield _of_checkpoint(name)


def is_checkpoint(name: str) -> bool:
    """Whether a name is that of a checkpoint: a path, a config.json or a name of the hub."""
    path = Path(name).expanduser()
    labels = {*ENCODINGS, *MIXERS}
    return name.partition(":")[0] not in labels and (path.exists() or path.suffix == ".json" or "/" in name)


def _of_checkpoint(name: str) -> Subject:
    from longitude.checkpoints.declared import raw_config
    from longitude.drawings import checkpoint

    config = checkpoint.read(name)
    about = checkpoint.facts(name, config, raw_config(name))
    return Subject(name, about, [*checkpoint.words(about)], checkpoint.drawings(config))


# ---- labels ----------------------------------------------------------------------------------------------------------
def _of_label(label: str, shape: Shape) -> Subject:
    from longitude.drawings import encodings, mixers
    from longitude.drawings.build import built

    made = built(label, shape)
    about = facts(made)
    drawings = [] if made.encoding is None else encodings.drawings(made.encoding, made.shape)
    drawings += [drawing for part in made.mixers for drawing in mixers.drawings(part.module, made.shape)]
    return Subject(label, about, [*in_words(about)], drawings, [*in_words(about, brief=True)])


def facts(made: Built) -> Facts:
    """Plain data about a label: {"label", "encodings": [...], "mixers": [...], "backends"}; backends only of encodings."""
    from longitude.catalogue import of_mixer, properties, takers

    shape, whole, backends = made.shape, made.encoding, Facts()
    if whole is not None:
        for when, training in (("training", True), ("inference", False)):
            backends[when] = takers(whole, training, shape.length, shape.known)
    return {
        "label": made.label,
        "encodings": [properties(p.module, p.factory, shape.dim) | _of_part(p) for p in made.encodings],
        "mixers": [of_mixer(p.name, p.factory) | _of_part(p) for p in made.mixers],
        "backends": backends,
    }


def _of_part(part: Part) -> Facts:
    return {
        "name": part.name,
        "formula": re.split(r"\n(?=[A-Z][a-z]+:\n)", inspect.getdoc(part.factory) or "")[0].strip(),
        "options": {name: value for name, value in part.options.items() if name != "encoding"},
        "parameters": sum(p.numel() for p in part.module.parameters()),
    }


def in_words(about: Facts, brief: bool = False) -> Iterator[tuple[str, str]]:
    """(head, text) of each fact of a label, for readers; the formula has no head.

    brief: The facts that come first: without options, further properties and backends that are not the cheapest.
    """
    for part in (*about["encodings"], *about["mixers"]):
        first, *others = part["formula"].split("\n\n")
        shown = [paragraph for paragraph in others[:1] if paragraph.startswith(" ")] if brief else others
        yield "", "\n\n".join([first, *shown])
        yield "source", part["source"] or "none given"
        if "takes" in part:
            cache, takes = f"{part['cache']} for N tokens", ", ".join(part["takes"])
            yield ("cache", cache) if brief else ("takes", f"of an encoding: {takes}; a cache of {cache}")
        else:
            yield "acts as", ", ".join(part["acts"]) or "nothing: order is known from the causal mask alone"
            relative = "yes" if part["relative"] else "no"
            yield ("relative", relative) if brief else ("is", ", ".join(_properties(part)))
        if not brief:
            yield "options", " ".join(f"{name}={_value(value)}" for name, value in part["options"].items())
        yield "parameters", f"{part['parameters']:,}"
    if about["backends"]:
        yield "backends", "; ".join(_taken(when, prices, brief) for when, prices in about["backends"].items())
        if not brief:
            yield "cost here", "`longitude bench` measures it"


def _properties(part: Facts) -> Iterator[str]:
    yield "relative" if part["relative"] else "absolute"
    yield "learned" if part["learned"] else "without parameters"
    if part["causal_only"]:
        yield "causal only"
    if part["max_length"] is not None:
        yield f"defined up to {part['max_length']} positions"
    if part["axes"] > 1:
        yield f"{part['axes']} coordinates per token"
    if part["learned"]:
        yield "one module for all layers" if part["shared"] else "a module for each layer"
    if not part["stable_keys"]:
        yield "cached keys stay untransformed"


def _taken(when: str, prices: dict[str, float], brief: bool) -> str:
    """The cheapest backend with its price, and unless it is brief the others."""
    first, *others = prices
    more = f", also {', '.join(others)}" if others and not brief else ""
    return f"{when}: {first}, about {prices[first]:g}× PyTorch attention{more}"


def _value(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)
