"""A label as the encoding and the mixer that it names, built for a shape."""

from typing import Any

import torch

from longitude.attention.mixer import MIXERS
from longitude.positions.base import ENCODINGS, Encoding, encoding, resolved
from longitude.positions.composed import Composed
from longitude.registry import options_of
from longitude.show.shape import Shape
from longitude.study.labels import parse_label


def built(label: str, shape: Shape) -> tuple[Encoding | None, list[Any]]:
    """The encoding of a label in float64 with the first values of seed 0, or None; and its mixers.

    Raises:
        ValueError: As the label, the encoding or the mixer itself.
    """
    parsed = parse_label(label)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        members = [encoding(**_whole(spec, shape)).double().eval() for spec in parsed.encodings]
        mixers = [_mixer(spec, shape) for spec in parsed.mixers]
    if not members:
        return None, mixers
    return (members[0] if len(members) == 1 else Composed(members)), mixers


def _whole(spec: dict[str, Any], shape: Shape) -> dict[str, Any]:
    """With what a model of the shape passes to it."""
    name, options = spec["name"], {key: value for key, value in spec.items() if key != "name"}
    defaults = getattr(ENCODINGS[name], "model_defaults", {})
    return {"name": name, **resolved(name, {**defaults, **options}, **shape.known)}


def _mixer(spec: dict[str, Any], shape: Shape) -> Any:
    kind: Any = MIXERS[spec["name"]]
    options = {key: value for key, value in spec.items() if key != "name"}
    taken = options_of(kind)
    return kind(**{key: value for key, value in shape.known.items() if key in taken} | options)
