"""A config.json as an engine has it in memory, and what a line changes in it: the same data for every engine."""

from __future__ import annotations

import copy
import tomllib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from longitude.checkpoints.declared import class_of, text_part
from longitude.positions.config_keys import BASES, FULL, KEYS, LENGTHS, ORIGINAL, SCHEMAS, SHARES, WINDOWED, value_of
from longitude.positions.hugging_face import RopeConfig, read_ropes, share_of
from longitude.serving.line import EatenQuotes, NotLiteral

ROPE, LENGTH = SCHEMAS[0], LENGTHS[0]
TEXT = "text_config"
RENAMED = {
    "telechat3-yarn": "yarn",
    "deepseek_yarn": "yarn",
    "deepseek_llama_scaling": "yarn",
    "su": "longrope",
    "mrope": "default",
}
"""Names of types that engines accept and transformers does not, and the scheme of which each is a form."""


Parameters = dict[str, Any]


class Facts(NamedTuple):
    """What was read of an engine: its entry in engines.toml."""

    known: str
    sources: dict[str, str]
    version: str = ""
    limit: str = ""
    bases: dict[str, float] = {}
    unscaled: dict[str, str] = {}
    unclear: dict[str, str] = {}

    def follow(self, parameters: Parameters, config: Config) -> Parameters | None:
        """Flat rope parameters with the base that an engine fills in; None for a class that takes no scaling.

        Stops for text in place of numbers, NotKnown for a class that was not followed.
        """
        plain = {BASES[0]: self.bases.get(config.kind, 10_000.0)} | parameters
        if config.kind in self.unscaled:
            return None
        if config.kind in self.unclear and plain.get("rope_type", "default") != "default":
            raise NotKnown(self.unclear[config.kind])
        for key in (BASES[0], "factor", ORIGINAL):
            if isinstance(plain.get(key), str):
                raise Stops(
                    f"TypeError: {key} is text, {plain[key]!r}, and a number is needed", self.sources["get_rope"]
                )
        return plain


FACTS = {
    name: Facts(**entry) for name, entry in tomllib.loads(Path(__file__).with_name("engines.toml").read_text()).items()
}


class Stops(Exception):
    """An engine ends with an error. Args: what it does, and the file that does it."""

    def __init__(self, what: str, source: str):
        super().__init__(what)
        self.what, self.source = what, source


class NotKnown(Exception):
    """What an engine does here is not known. Args: why."""


@dataclass
class Config:
    """Attributes of a config in memory.

    Attributes:
        parent: Those of the whole config; the same dict as `text` if there is no text_config.
        text: Those of the text model, with rope_parameters as transformers completes them.
        share: partial_rotary_factor of the file, for classes that keep it apart from the dict.
        raw: The file.
    """

    parent: dict[str, Any]
    text: dict[str, Any]
    share: float | None = None
    raw: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, raw: Mapping[str, Any]) -> Config:
        """The config that transformers makes of a file; of its keys alone for a class that transformers lacks."""
        written = text_part(raw)
        theirs = class_of(raw)
        text = dict(copy.deepcopy(written)) if theirs is None else theirs.to_dict()
        if theirs is None:
            parameters = dict(text.pop(SCHEMAS[1], None) or text.get(ROPE) or {})
            if "type" in parameters:
                parameters.setdefault("rope_type", parameters["type"])
            parameters.setdefault("rope_type", "default")
            if not any(isinstance(value, Mapping) for value in parameters.values()):
                for key, value in ((BASES[0], value_of(text, BASES)), (SHARES[0], share_of(text))):
                    if value not in (None, 1.0):
                        parameters.setdefault(key, value)
            text[ROPE] = parameters
        share = (text.get(ROPE) or {}).get(SHARES[0])
        return cls(text if written is raw else {**copy.deepcopy(dict(raw)), TEXT: text}, text, share, raw)

    @property
    def nested(self) -> bool:
        return self.text is not self.parent

    @property
    def kind(self) -> str:
        """The model type of the text model, without the ending that transformers gives to text models."""
        return str(self.text.get("model_type") or self.parent.get("model_type")).removesuffix("_text")

    @property
    def parameters(self) -> Parameters:
        """Rope parameters of the text model, flat or by layer type."""
        parameters = self.text.get(ROPE)
        return parameters if isinstance(parameters, dict) else {}

    @property
    def by_type(self) -> dict[str | None, Parameters]:
        """Rope parameters by layer type; those for all layers under None."""
        entries = {key: value for key, value in self.parameters.items() if isinstance(value, dict)}
        return {**entries} if entries else {None: self.parameters}

    @property
    def declared(self) -> int | None:
        length = self.text.get(LENGTH)
        return length if type(length) is int else None

    @property
    def flat(self) -> Parameters:
        """Rope parameters of layers of full attention."""
        return self.by_type.get(self.full, {})

    @property
    def full(self) -> str | None:
        """The label of layers of full attention."""
        return FULL if FULL in self.by_type else next(iter(self.by_type))

    def lengths(self, keys: tuple[str, ...]) -> list[int]:
        """The lengths that it declares. Stops for text in place of a number, NotKnown if it declares none."""
        if isinstance(text := self.text.get(LENGTH), str):
            raise Stops(f"{LENGTH} is text, {text!r}", "transformers: StrictDataclassFieldValidationError")
        if not (lengths := [n for key in keys if type(n := self.text.get(key)) is int]):
            raise NotKnown("the config declares no length")
        return lengths

    def copy(self) -> Config:
        text = copy.deepcopy(self.text)
        rest = {key: value for key, value in self.parent.items() if key != TEXT}
        return Config({**copy.deepcopy(rest), TEXT: text} if self.nested else text, text, self.share, self.raw)

    def window(self, label: str | None) -> int | None:
        """Keys that layers of a type see; None for all."""
        types, size = self.text.get("layer_types") or (), self.text.get("sliding_window")
        off = self.text.get("use_sliding_window") is False
        return size if type(size) is int and not off and (label in WINDOWED or (label is None and not types)) else None


def alias(key: str) -> str:
    """rope_scaling is a property of rope_parameters in every class of transformers 5."""
    return ROPE if key == SCHEMAS[1] else key


def merge(target: dict[str, Any], updates: Mapping[str, Any]) -> None:
    """Dicts into dicts, at any depth; other values replace."""
    for key, value in updates.items():
        if isinstance(value, Mapping) and isinstance(inner := target.get(alias(key)), dict):
            merge(inner, value)
        else:
            target[alias(key)] = copy.deepcopy(value)


def rope(parameters: Mapping[str, Any], declared: int | None, **changes: Any) -> RopeConfig:
    """Flat rope parameters, as positions/hugging_face.py reads them; keys of other types are left out, as engines do.

    declared: max_position_embeddings. changes: values that an engine takes instead. Stops for values that are no numbers.
    """
    parameters = {**parameters, **changes}
    kind = parameters.get("rope_type", parameters.get("type", "default"))
    kind = RENAMED.get(kind, kind) if isinstance(kind, str) else kind
    keys = {*KEYS.get(kind, ())} - {"type", LENGTH} if isinstance(kind, str) else set()
    known = {key: value for key, value in parameters.items() if key in keys and value is not None}
    config = {ROPE: {**known, "rope_type": kind}, LENGTH: declared}
    try:
        read = read_ropes({key: value for key, value in config.items() if value is not None})
    except (ValueError, TypeError) as error:
        raise Stops(str(error), "") from error
    assert isinstance(read, RopeConfig)
    return read


@dataclass
class Overrides:
    """What a line changes.

    Attributes:
        keys: Keys of config.json that it overrides, as they are written; for llama.cpp those that its flags stand for.
        length: The length in tokens that it asks for; None for the engine's default.
        lifted: Whether a variable of the environment lifts the engine's limit.
        flags: Other values, by flag.
        draft: The draft model, if there is one: its options.
        stops: Errors with which the engine ends before it reads a config.
        unknown: Reasons why something cannot be judged.
    """

    keys: dict[str, Any] = field(default_factory=dict)
    length: int | None = None
    lifted: bool = False
    flags: dict[str, Any] = field(default_factory=dict)
    draft: dict[str, Any] | None = None
    stops: list[Stops] = field(default_factory=list)
    unknown: list[str] = field(default_factory=list)

    @contextmanager
    def noting(self, facts: Facts) -> Iterator[None]:
        """Context in which quotes that a shell took stop the engine, and a variable cannot be judged."""
        try:
            yield
        except EatenQuotes as error:
            self.stops.append(Stops(str(error), facts.sources.get("parse", "")))
        except NotLiteral as error:
            self.unknown.append(str(error))

    @property
    def schemes(self) -> list[tuple[tuple[str, ...], Parameters]]:
        """(path, dict) of every flat dict of rope parameters among the keys; those by layer type have its name in the path."""
        return [*_schemes(self.keys, ())]


def _schemes(keys: Mapping[str, Any], path: tuple[str, ...]) -> Any:
    for key, value in keys.items():
        if not isinstance(value, dict):
            continue
        if key in SCHEMAS:
            typed = {label: inner for label, inner in value.items() if isinstance(inner, dict)}
            flat = {label: inner for label, inner in value.items() if label not in typed}
            yield from (((*path, key, label), inner) for label, inner in typed.items())
            if flat or not typed:
                yield (*path, key), flat
        elif len(path) < 4:
            yield from _schemes(value, (*path, key))


class Served(NamedTuple):
    """Lengths with which an engine serves.

    Attributes:
        length: Tokens of the longest request; None if that is not known.
        rows: Positions of the tables of cos and sin; None for no table.
        limit: The length that the config allows, before flags.
        refused: The error for a length that is too long.
        wanted: Tokens of a request that flags ask for, if they differ from the length asked for.
    """

    length: int | None
    rows: float | None = None
    limit: float | None = None
    refused: Stops | None = None
    wanted: int | None = None
