"""Labels: how a study names its models, "rope:base=5e5+window:size=64": encodings and mixers joined by "+"."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from longitude.errors import nearest, unknown

Spec = dict[str, Any]
"""{"name": name, **options}"""


@dataclass(frozen=True)
class Label:
    """A label, read.

    Attributes:
        encodings: Composed; where there are none, the model chooses.
        mixers: Of the layers, one after the other; where there are none, attention.
    """

    encodings: list[Spec]
    mixers: list[Spec]

    @property
    def encoding(self) -> str:
        """The names of the encodings, without options: those given, else what the models choose for the mixers."""
        from longitude.attention.mixer import MIXERS

        rotates = any(MIXERS[mixer["name"]].rotates for mixer in self.mixers)
        return "+".join(each["name"] for each in self.encodings) or ("rope" if rotates else "none")

    def options(self, layers: int) -> dict[str, Any]:
        """Arguments of LongitudeConfig for a model of this many layers. ValueError where they are too few for the mixers."""
        given: dict[str, Any] = {}
        if self.encodings:
            given["encoding"] = self.encodings if len(self.encodings) > 1 else self.encodings[0]
        if len(self.mixers) > layers:
            raise ValueError(
                f"expected a layer for each of the {len(self.mixers)} mixers, got {layers}; name fewer, or raise --layers"
            )
        if len(self.mixers) == 1:
            given["mixer"] = self.mixers[0]
        elif self.mixers:
            given["mixers"] = [self.mixers[layer % len(self.mixers)] for layer in range(layers)]
        return given


def parse_label(label: str) -> Label:
    """Split "rope:base=500000+fox+attention+mamba:state_dim=8" into its encodings and its mixers, each in order.

    Values are int, float, true, false, text, numbers 2/1/1 -> [2, 1, 1], or a scheme with its options:
    scaling=yarn(factor=16,original_max_length=256) -> {"name": "yarn", "factor": 16, "original_max_length": 256}. Raises
    ValueError for an unknown name or option, with the nearest one.
    """
    from longitude.attention.mixer import MIXERS
    from longitude.registry import options_of

    mixers = {name: options_of(kind).keys() - {"encoding"} for name, kind in MIXERS.items()}
    specs = _specs(label, mixers)
    found = Label(*([spec for spec in specs if (spec["name"] in mixers) == is_mixer] for is_mixer in (False, True)))
    if len(found.encodings) > 1 and any(each["name"] == "none" for each in found.encodings):
        raise ValueError(
            f"expected none, or encodings, got {label!r}: together with another encoding 'none' means nothing"
        )
    return found


def parse_encoding(label: str) -> list[Spec]:
    """Read "rope:base=500000+fox" as [{"name": "rope", "base": 500000}, {"name": "fox"}]: a label of encodings alone.

    Values and errors as `parse_label`.
    """
    return _specs(label, {})


def _specs(label: str, mixers: Mapping[str, Any]) -> list[Spec]:
    """The parts of a label; mixers: those that it may name, with their options."""
    from longitude.positions.base import ENCODINGS, list_encodings
    from longitude.registry import options_of

    valid = {**{name: options_of(ENCODINGS[name]).keys() for name in list_encodings()}, **mixers}
    for name in (part.partition(":")[0] for part in _parts(label)):
        if name not in valid:
            near = nearest(name, valid)
            kind = "mixer" if near in mixers else "encoding" if near or not mixers else "encoding or mixer"
            raise unknown(kind, name, valid, "`longitude list` lists them.")
    return [_spec(part, valid) for part in _parts(label)]


def _parts(label: str) -> list[str]:
    """A "+" before a digit belongs to a number: 5e+5."""
    return re.split(r"\+(?=[A-Za-z_])", label)


def _spec(part: str, valid: Mapping[str, Any]) -> Spec:
    """rope:base=5e5 -> {"name": "rope", "base": 5e5}; valid: name -> its options."""
    name, colon, rest = part.partition(":")
    if colon and not rest:
        raise ValueError(f"expected {name}:option=value after the colon, got {part!r}")
    options = parse_options(rest, f"{name}:option=value,option=value", part)
    for key in options:
        if key not in valid[name]:
            raise unknown(f"option of {name!r}", key, valid[name], f"its options: {', '.join(valid[name])}.")
    return {"name": name} | options


def parse_options(text: str, expected: str, got: str) -> dict[str, Any]:
    """Read "base=5e5,layout=half" as {"base": 5e5, "layout": "half"}; a comma inside parentheses belongs to a value."""
    options = {}
    for item in re.split(r",(?![^(]*\))", text) if text else ():
        key, equals, value = item.partition("=")
        if not equals or not key or not value:
            raise ValueError(f"expected {expected}, got {got!r}")
        options[key] = _value(value)
    return options


def safe(label: str) -> str:
    """A label as part of a file name."""
    return re.sub(r"[^\w.,=+-]", "_", label)


def _value(text: str) -> Any:
    if text.lower() in (words := {"true": True, "false": False, "none": None}):
        return words[text.lower()]
    if scheme := re.fullmatch(r"(\w+)\((.*)\)", text):
        return {"name": scheme[1]} | parse_options(scheme[2], f"{scheme[1]}(option=value,option=value)", text)
    numbers = [_number(part) for part in text.split("/")]
    if any(number is None for number in numbers):
        return text
    return numbers if len(numbers) > 1 else numbers[0]


def _number(text: str) -> int | float | None:
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            pass
    return None
