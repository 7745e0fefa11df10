"""Labels: names of models, "rope:base=5e5+window:size=64": encodings and mixers joined by "+", layers by "..".

They are made of characters that no shell and no file system changes.
"""

import re
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NamedTuple

from longitude.errors import UsageError, nearest, unknown

Spec = dict[str, Any]
"""{"name": name, **options}"""
SCHEME = "scaling"
"""The option of an encoding that takes a scaling scheme with options."""
FOREIGN = re.compile(r"[^A-Za-z0-9_.+:=,-]")
"""Characters that labels must not contain."""
CONV = "conv"
"""Part of a label that gives its mixers a short causal convolution: nope+conv, rope+conv:at=qkv."""
ATTENTION = "attention"
"""The mixer of layers that name none."""
LAYERS = ".."
"""Separator of the labels of successive layers."""
PARTS = re.compile(r"\+(?=[A-Za-z_])")
"""Separator of the parts of a layer; a "+" before a digit belongs to a number: 5e+5."""


class Part(NamedTuple):
    """A part of a label as it is written, whether its name is registered or not.

    Attributes:
        name: Name of an encoding or a mixer.
        options: Each option with its value, such as "sections=2,1,1".
    """

    name: str
    options: tuple[str, ...] = ()

    def __str__(self) -> str:
        return self.name + (f":{','.join(self.options)}" if self.options else "")


def layers_in(label: str) -> list[list[Part]]:
    """The parts of each layer of a label; of one layer, if the label names none."""

    def part(text: str) -> Part:
        name, _, options = text.partition(":")
        return Part(name, tuple(re.split(r",(?=[\w.]+=)", options)) if options else ())  # a value may be a list

    return [[*map(part, PARTS.split(layer))] for layer in label.split(LAYERS)]


@dataclass(frozen=True)
class Label:
    """A label, read.

    Attributes:
        encodings: Encodings, which are composed; if empty, the model chooses.
        mixers: Mixers of the layers, alternating; attention if empty.
        layers: One entry per layer, a pattern that is repeated; `encodings` and `mixers` are then all that they name.
    """

    encodings: list[Spec]
    mixers: list[Spec]
    layers: tuple["Label", ...] = ()

    @property
    def encoding(self) -> str:
        """The names of the encodings, without options: those given, else what the models choose for the mixers."""
        from longitude.attention.mixer import MIXERS

        if self.layers:
            return LAYERS.join(layer.encoding for layer in self.layers)
        rotates = any(MIXERS[mixer["name"]].rotates for mixer in self.mixers)
        return "+".join(spec["name"] for spec in self.encodings) or ("rope" if rotates else "nope")

    def options(self, layers: int) -> dict[str, Any]:
        """Arguments of LongitudeConfig for a model of this many layers. ValueError if they are too few for the mixers."""
        if self.layers:
            by_layer = [layer.options(1) for layer in self.layers]
            encodings = [options.get("encoding", layer.encoding) for options, layer in zip(by_layer, self.layers)]
            return {"encodings": encodings, "mixers": [options.get("mixer", ATTENTION) for options in by_layer]}
        arguments: dict[str, Any] = {}
        if self.encodings:
            arguments["encoding"] = self.encodings if len(self.encodings) > 1 else self.encodings[0]
        if len(self.mixers) > layers:
            raise UsageError(
                "", f"a layer for each of the {len(self.mixers)} mixers", layers, "name fewer, or raise --layers"
            )
        if len(self.mixers) == 1:
            arguments["mixer"] = self.mixers[0]
        elif self.mixers:
            arguments["mixers"] = [self.mixers[layer % len(self.mixers)] for layer in range(layers)]
        return arguments


def conv(at: str = "input") -> None:
    """The options of `CONV`, which is no encoding and no mixer."""


def parse_label(label: str) -> Label:
    """Split "rope:base=500000+fox+attention+mamba:state_dim=8" into its encodings and its mixers, each in order.

    Values are int, float, true, false, none or text; several numbers make a list: sections=2,1,1. Options of a scheme
    follow those of its encoding: scaling=yarn,factor=16,original_max_length=256; if both have an option, the scheme's is
    written scaling.base=5e5. Options of a mixer within another have its name in front:
    parallel:attention=window,attention.size=8. Labels of single layers, each with one mixer or none, are joined by "..", and
    repeated over a model's: rope..rope..rope..nope. "conv" is a short convolution of each mixer that can have one, of
    attention if the label names none. Raises ValueError for any other character, and for an unknown name or option, with the
    nearest one.
    """
    from longitude.attention.mixer import MIXERS

    require_characters(label)  # before it is taken apart, as the dots of a path stand between layers, too
    if LAYERS in label:
        layers = tuple(_of_layer(part, label) for part in label.split(LAYERS))
        named = [[*layer.encodings, *layer.mixers] for layer in layers]
        every = [
            spec for n, specs in enumerate(named) for spec in specs if not any(spec in before for before in named[:n])
        ]
        encodings = [spec for spec in every if spec["name"] not in MIXERS]
        return Label(encodings, [spec for spec in every if spec["name"] in MIXERS], layers)
    specs = _specs(label, MIXERS, {CONV: conv})
    places = [spec.get("at", "input") for spec in specs if spec["name"] == CONV]
    specs = [spec for spec in specs if spec["name"] != CONV]
    mixers = [spec for spec in specs if spec["name"] in MIXERS]
    encodings = [spec for spec in specs if spec not in mixers]
    if len(encodings) > 1 and any(spec["name"] == "nope" for spec in encodings):
        raise UsageError("", "nope, or encodings", f"{label!r}: together with another encoding 'nope' means nothing")
    return Label(encodings, _convolved(mixers or [{"name": ATTENTION}], places, label) if places else mixers)


def _convolved(mixers: list[Spec], places: list[str], label: str) -> list[Spec]:
    """The mixers with short convolutions at these places, if they have the option."""
    from longitude.attention.mixer import MIXERS
    from longitude.registry import options_of

    able = [name for name, kind in MIXERS.items() if "short_conv" in options_of(kind)]
    if not any(spec["name"] in able for spec in mixers) or any("short_conv" in spec for spec in mixers):
        raise UsageError("", f"{CONV} beside a mixer of {', '.join(able)}, without its own short_conv", repr(label))
    return [spec | {"short_conv": places} if spec["name"] in able else spec for spec in mixers]


def _of_layer(part: str, label: str) -> Label:
    if not part:
        raise UsageError("", f"a label on both sides of {LAYERS}, such as rope..nope", repr(label))
    try:
        layer = parse_label(part)
    except ValueError as error:
        raise ValueError(f"{error}, in {label!r}, whose {LAYERS} stand between labels of layers") from None
    if len(layer.mixers) > 1:
        names = " and ".join(mixer["name"] for mixer in layer.mixers)
        raise UsageError("", "one mixer for each layer", f"{names} in {part!r} of {label!r}")
    return layer


def parse_encoding(label: str) -> list[Spec]:
    """Read "rope:base=500000+fox" as [{"name": "rope", "base": 500000}, {"name": "fox"}]: a label of encodings alone.

    Values and errors as `parse_label`.
    """
    return _specs(label)


def require_characters(label: str) -> None:
    """ValueError for a label with a character that labels must not contain."""
    if (foreign := FOREIGN.search(label)) is not None:
        raise ValueError(
            f"{label!r} has {foreign[0]!r} at its character {foreign.start() + 1}; a label is made of letters, digits and "
            f"_ . - + : = , which no shell changes: leave it out"
        )


def _specs(label: str, *mixers: Mapping[str, Any]) -> list[Spec]:
    """The parts of a label; mixers: those that it may name beside encodings."""
    from longitude.positions.base import ENCODINGS

    require_characters(label)
    registers = (*mixers, ENCODINGS)
    parts = PARTS.split(label)
    parts = [re.sub(r"^[^:]+", lambda name: ENCODINGS.canonical(name[0]), part) for part in parts]
    specs = []
    for part in parts:
        name = part.partition(":")[0]
        factory = next(filter(None, (register.get(name) for register in registers)), None)
        if factory is None:
            valid = [name for register in registers for name in register]
            near = nearest(name, valid)
            kind = "encoding" if near in ENCODINGS or not mixers else "mixer" if near else "encoding or mixer"
            raise unknown(kind, name, valid, "`longitude list` lists them.")
        specs.append(_spec(part, factory))
    return specs


def _spec(part: str, factory: Callable[..., Any]) -> Spec:
    """rope:base=5e5 -> {"name": "rope", "base": 5e5}; factory: the function or class with its options."""
    from longitude.registry import options_of

    name, colon, rest = part.partition(":")
    if colon and not rest:
        raise UsageError("", f"{name}:option=value after the colon", repr(part))
    options = parse_options(rest, f"{name}:option=value,option=value", part)
    known = [option for option in options_of(factory) if option != "encoding"]  # which a label names itself
    if SCHEME in known and options.get(SCHEME) is not None:
        known += _take_scheme(name, options, known)
    for mixer in getattr(factory, "parts", ()):
        of_mixer = {key: options.pop(key) for key in [*options] if key.startswith(f"{mixer}.")}
        if of_mixer:
            spec = {"name": options.get(mixer, options_of(factory)[mixer].default)}
            options[mixer] = spec | {key.removeprefix(f"{mixer}."): value for key, value in of_mixer.items()}
    for key in options:
        if key not in known:
            raise unknown(f"option of {name!r}", key, known, f"its options: {', '.join(known)}.")
    return {"name": name} | options


def _take_scheme(encoding: str, options: dict[str, Any], known: Collection[str]) -> list[str]:
    """Put the scheme's own options into it. known: options of the encoding. Returns those that the scheme has."""
    from longitude.positions.scaling import SCHEMES
    from longitude.registry import options_of

    name = options[SCHEME]
    scheme, theirs = {"name": name}, [*options_of(SCHEMES[name])]
    for option in theirs:
        key = f"{SCHEME}.{option}" if option in known else option
        if key in options:
            scheme[option] = options.pop(key)
        elif option in options:
            raise UsageError("", f"{key}= for the option of the scheme {name!r}", f"{option}=, which {encoding!r} has")
    options[SCHEME] = scheme
    return theirs


def parse_options(text: str, expected: str, got: str) -> dict[str, Any]:
    """Read "base=5e5,sections=2,1,1" as {"base": 5e5, "sections": [2, 1, 1]}."""
    options: dict[str, list[Any]] = {}
    for item in text.split(",") if text else ():
        key, equals, value = item.rpartition("=")
        if equals and key in options:
            raise UsageError("", "each option once", f"{key} twice in {got!r}")
        if not value or "=" in key or not (key if equals else options):
            raise UsageError("", expected, repr(got))
        if equals:
            options[key] = []
        options[[*options][-1]].append(_value(value))
    for key, values in options.items():
        if len(values) > 1 and any(type(value) not in (int, float) for value in values):
            written = f"{key} {values[0]} followed by {', '.join(map(str, values[1:]))}"
            raise UsageError("", f"{expected}, or a list of numbers 2,1,1", f"{written} in {got!r}")
    return {key: values if len(values) > 1 else values[0] for key, values in options.items()}


def safe(label: str) -> str:
    """A label as part of a file name."""
    return re.sub(r"[^\w.,=+-]", "_", label)


def _value(text: str) -> Any:
    constants = {"true": True, "false": False, "none": None}
    if text.lower() in constants:
        return constants[text.lower()]
    for kind in (int, float):
        with suppress(ValueError):
            return kind(text)
    return text
