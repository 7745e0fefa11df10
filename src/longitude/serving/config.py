"""A config.json as an engine has it in memory, and what a line changes in it: the same data for every engine."""

from __future__ import annotations

import copy
import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import Any, NamedTuple

from longitude.checkpoints.declared import class_of, text_part
from longitude.errors import UsageError, unknown
from longitude.positions.config_keys import BASES, FULL, KEYS, LENGTHS, ORIGINAL, SCHEMAS, SHARES, WINDOWED, value_of
from longitude.positions.hugging_face import RopeConfig, read_ropes, share_of
from longitude.runs.files import parsed_json
from longitude.serving.line import RENAMED, TELLING, Facts, Line

ROPE, LENGTH, BASE = SCHEMAS[0], LENGTHS[0], BASES[0]
TEXT = "text_config"
Parameters = dict[str, Any]


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
            raise Stops(
                f"{LENGTH} is text, {text!r}",
                "transformers/configuration_utils.py: StrictDataclassFieldValidationError",
            )
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


# ---- how overrides are put in ----------------------------------------------------------------------------------------
def merge(target: dict[str, Any], updates: Mapping[str, Any]) -> None:
    """Dicts into dicts, at any depth; other values replace."""
    for key, value in updates.items():
        if isinstance(value, Mapping) and isinstance(inner := target.get(alias(key)), dict):
            merge(inner, value)
        else:
            target[alias(key)] = copy.deepcopy(value)


def replace(target: dict[str, Any], updates: Mapping[str, Any]) -> None:
    """The dict itself is replaced."""
    target.clear()
    target.update(updates)


def overridden(config: Config, keys: Parameters, of_part: Callable[..., None], of_rope: Callable[..., None]) -> Config:
    """A config with keys set on the parent. of_part, of_rope: how dicts get into configs inside it and into rope parameters."""
    after = config.copy()
    for key, value in copy.deepcopy(keys).items():
        current = after.parent.get(alias(key))
        put = of_part if key.endswith("_config") else of_rope if alias(key) == ROPE else None
        if put is not None and isinstance(value, dict) and isinstance(current, dict):
            put(current, {alias(inner): new for inner, new in value.items()})
        else:
            after.parent[alias(key)] = value
    return after


def followed(parameters: Parameters, config: Config, facts: Facts) -> Parameters | None:
    """Flat rope parameters with the base and share that an engine fills in; None for a class that takes no scaling.

    Stops for types that the engine has not, and for missing keys and values of another type. NotKnown for what was not followed.
    """
    if config.kind in facts.unscaled:
        return None
    kind, where = parameters.get("rope_type", parameters.get("type", "default")), facts.sources["get_rope"]
    if BASE not in parameters and config.kind in facts.no_base:
        raise Stops("KeyError 'rope_theta': the dict has no base", facts.no_base[config.kind])
    share = {SHARES[0]: facts.shares[config.kind]} if config.kind in facts.shares else {}
    plain = {BASE: facts.bases.get(config.kind, 10_000.0)} | share | parameters
    if config.kind in facts.unclear and kind != "default":
        raise NotKnown(facts.unclear[config.kind])
    for key in (BASE, "factor", ORIGINAL):
        if isinstance(plain.get(key), str):
            raise Stops(f"TypeError: {key} is text, {plain[key]!r}, and a number is needed", where)
    needed = (*facts.needed.get(kind, ()), *facts.needed.get(config.kind, ()))
    if missing := [key for key in needed if plain.get(key) is None]:
        raise Stops(f"KeyError {missing[0]!r}: the dict has no {' and no '.join(missing)}", where)
    if kind == "linear" and isinstance(factor := plain.get("factor"), int) and "linear" in facts.sources:
        raise Stops(f"TypeError: factor {factor} must be {factor}.0", facts.sources["linear"])
    if kind in facts.others:
        raise NotKnown(f"its class for {kind} was not followed ({where})")
    if kind not in facts.types:
        raise Stops(f"ValueError: unknown rope_type {kind!r}", where)
    return plain


def rope(parameters: Mapping[str, Any], declared: int | None, **changes: Any) -> RopeConfig:
    """Flat rope parameters, as positions/hugging_face.py reads them; keys of other types are left out, as engines do.

    declared: max_position_embeddings. changes: values that an engine takes instead. NotKnown for numbers that no scheme allows.
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
        raise NotKnown(f"what it does with these numbers: {error}") from error
    assert isinstance(read, RopeConfig)
    return read


def flags_of(config: Config, parameters: Parameters, length: int, facts: Facts, multiplies: bool) -> dict[str, Any]:
    """Flags of vLLM and SGLang for `length` tokens. multiplies: whether the engine multiplies the declared length itself."""
    keys = {ROPE: _with_floats(parameters)} | ({} if multiplies else {LENGTH: length})
    return {facts.flag("keys"): {TEXT: keys} if config.nested else keys, facts.flag("length"): str(length)}


def _with_floats(parameters: Parameters) -> Parameters:
    """Rope parameters with every factor a float, which linear scaling needs in vLLM and SGLang."""
    inner = {key: _with_floats(value) for key, value in parameters.items() if isinstance(value, dict)}
    whole: Parameters = parameters | inner
    return whole | ({"factor": float(whole["factor"])} if whole.get("factor") is not None else {})


# ---- what a line changes -----------------------------------------------------------------------------------------------
@dataclass
class Overrides:
    """What a line changes.

    Attributes:
        keys: Keys of config.json that it overrides, as they are written; for llama.cpp those that its flags stand for.
        length: The length in tokens that it asks for; None for the engine's default.
        lifted: Whether a variable of the environment lifts the engine's limit.
        flags: Other values, by flag.
        file: Keys of a GGUF file that it overrides, without the architecture's name.
        draft: The draft model, if there is one: its options.
        stops: Errors with which the engine ends before it reads a config.
        unknown: Reasons why something cannot be judged.
    """

    keys: dict[str, Any] = field(default_factory=dict)
    length: int | None = None
    lifted: bool = False
    flags: dict[str, Any] = field(default_factory=dict)
    file: dict[str, Any] = field(default_factory=dict)
    draft: dict[str, Any] | None = None
    stops: list[Stops] = field(default_factory=list)
    unknown: list[str] = field(default_factory=list)

    @property
    def schemes(self) -> list[tuple[tuple[str, ...], Parameters]]:
        """(path, dict) of every flat dict of rope parameters among the keys; those by layer type have its name in the path."""
        return [*_schemes(self.keys, ())]


def _schemes(keys: Mapping[str, Any], path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Parameters]]:
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
        length: Tokens of the longest request; 0 if that is not known.
        rows: Positions of the tables of cos and sin.
        limit: The length that the config allows, before flags; 0 for an engine without a limit.
        refused: The error for a length that is too long.
        wanted: Tokens of a request that flags ask for, if they differ from the length asked for.
    """

    length: int = 0
    rows: float = math.inf
    limit: float = 0
    refused: Stops | None = None
    wanted: int = 0


def too_long(facts: Facts, asked: Overrides, limit: float) -> Stops:
    """The error of vLLM and SGLang for a length beyond what the config allows."""
    what = f"{facts.flag('length')} {asked.length} is greater than the derived length {limit:g}: ValueError"
    return Stops(f"{what}, unless {facts.limit}=1 or {LENGTH} is raised beside the scaling", facts.sources["length"])


def parse(line: Line) -> Overrides:
    """What the flags of a line change, by their kinds in engines.toml."""
    facts, dotted = line.facts, dict[str, Any]()
    asked = Overrides(lifted=line.lifts(facts.limit))
    for flag, value in named(line):
        name, _, path = flag.partition(".")
        try:
            if path:
                put(dotted, path, literal(value, flag), facts)
            else:
                _read(asked, facts, name, value)
        except Stops as stop:
            asked.stops.append(Stops(stop.what, facts.sources["parse"]))
        except NotKnown as reason:
            asked.unknown.append(str(reason))
    if dotted:  # they are put together at the end, and the last JSON wins whole (vllm/utils/argparse_utils.py:396-505)
        asked.keys = dotted
    return asked


def _read(asked: Overrides, facts: Facts, flag: str, value: str | None) -> None:
    kind, key = facts.flags[flag], flag.strip("-").replace("-", "_")
    if kind == "removed":
        asked.stops.append(Stops(f"{flag} {facts.removed}", facts.sources["removed"]))
        if value and value.startswith("{"):
            asked.keys |= {key: json_of(value, flag)}  # what is meant
    elif kind == "switch":
        asked.flags[flag] = True
    elif kind == "file":
        asked.unknown.append(f"flags in {value} are not read here")
    elif kind == "length":
        fits = facts.limit and literal(value, flag) in ("auto", "-1")  # the memory, later
        asked.length = None if fits else tokens(literal(value, flag), flag, facts.units) or None
    elif kind == "keys":
        text = literal(value, flag)
        asked.keys = _with_quotes(text)  # what was meant, if the next line stops
        asked.keys = json_of(text, flag)
    elif kind == "draft":
        asked.draft = json_of(literal(value, flag), flag)
    elif kind == "model":
        asked.draft = {"model": value}
    elif kind == "key":
        asked.keys[key] = _json_or_text(literal(value, flag))
    else:
        asked.flags.pop(flag, None)  # the last one comes last
        text = literal(value, flag)
        asked.flags[flag] = text if kind in ("scheme", "metadata") else number(text, flag, kind)


def named(line: Line) -> Iterator[tuple[str, str | None]]:
    """The (flag, value) of flags about positions, by their whole names.

    UsageError for a flag that is nearly one of them, or is one of another engine.
    """
    known, aliases = line.facts.flags, line.facts.aliases
    valid = [flag for flag, kind in known.items() if kind != "removed"]
    for flag, value in line.flags:
        name, _, path = aliases.get(flag, flag).partition(".")
        name = name.replace("_", "-")
        if known.get(f"--{name.removeprefix('--no-')}") == "switch":
            continue  # off, as without it
        begun = [full for full in known if len(name) > 8 and full.startswith(name)]
        if whole := name if name in known else next(iter(begun), None):
            yield f"{whole}.{path}" if path else whole, value
        elif name in TELLING or (name.startswith("--") and get_close_matches(name, known, n=1, cutoff=0.88)):
            raise unknown(f"flag of {line.name}", flag, valid, f"its flags about positions: {', '.join(valid)}.")


def unfamiliar(line: Line) -> list[str]:
    """Flags that sound as if they were about positions, and are none of those that were read."""
    flags = [line.facts.aliases.get(flag, flag).partition(".")[0].replace("_", "-") for flag, _ in line.flags]
    known = [*line.facts.flags, *line.facts.beside]
    sound = [
        flag
        for flag in flags
        if re.search(r"-(context(?!-parallel)|ctx|length|len|rope|yarn|positions?|window)\b", flag)
    ]
    return [flag for flag in sound if not any(full.startswith(flag.replace("--no-", "--")) for full in known)]


def put(target: dict[str, Any], path: str, value: str, facts: Facts) -> None:
    """A dotted flag: JSON, else a number with a unit, else text (vllm/utils/argparse_utils.py:464-490)."""
    *outer, last = path.split(".")
    for key in outer:
        target = target.setdefault(key, {})
        if not isinstance(target, dict):
            raise UsageError(facts.flag("keys"), f"one value or more keys for {key!r}", "both")
    is_number = re.fullmatch(r"\d+[kmgKMG]", value)
    target[last] = tokens(value, path, facts.units) if is_number else _json_or_text(value)


def literal(value: str | None, flag: str) -> str:
    """The value of a flag. UsageError if it has none; NotKnown if a shell would put another in its place."""
    if value is None:
        raise UsageError(flag, "a value", "none")
    if re.search(r"\$[\w({]|\{\{|`", value):
        raise NotKnown(f"{flag} has a variable, {value[:60]!r}, and nothing is expanded here: write its value")
    return value


def tokens(text: str, flag: str, units: Mapping[str, int]) -> int:
    """A number of tokens with a unit; before decimal ones it may have a point. UsageError for other text."""
    parts = re.fullmatch(r"(\d+(\.\d+)?)([A-Za-z]*)", text)
    unit = units.get(parts[3], 0 if parts[3] else 1) if parts else 0
    if parts is None or unit == 0 or (parts[2] and (unit == 1 or unit % 10)):
        known = f", such as 131072 or 128k (units: {', '.join(units)})" if units else ", such as 131072"
        raise UsageError(flag, f"a number of tokens{known}", text[:40])
    return int(float(parts[1]) * unit)


def number(text: str, flag: str, kind: str) -> float:
    """A number. UsageError for other text."""
    pattern, expected = r"-?\d+", "a whole number, such as 131072"
    if kind == "number":
        pattern, expected = r"-?\d*\.?\d+(e[+-]?\d\d?)?", "a number"
    if not re.fullmatch(pattern, text):
        raise UsageError(flag, expected, text[:40])
    return float(text) if kind == "number" else int(text)


def json_of(value: str, flag: str) -> dict[str, Any]:
    """The object of a flag. Stops if a shell took its quotes; UsageError for other text that is no JSON object."""
    try:
        keys = parsed_json(value)
    except ValueError as error:
        if value.lstrip().startswith("{") and '"' not in value and "'" not in value and ":" in value:
            raise Stops(f"{flag} has JSON without quotes, {value[:50]!r}: the shell took them", "") from None
        raise UsageError(flag, "a JSON object", f"{value[:40]!r} ({error})", "put it in single quotes") from None
    if not isinstance(keys, dict):
        raise UsageError(flag, "a JSON object", value[:40])
    return keys


def _with_quotes(value: str) -> dict[str, Any]:
    """The object of JSON whose quotes a shell took; empty for any other text."""
    quoted = re.sub(r"\b(?!(?:true|false|null)\b)[A-Za-z_]\w*", r'"\g<0>"', value)
    keys = {} if '"' in value else _json_or_text(quoted)
    return keys if isinstance(keys, dict) else {}


def _json_or_text(value: str) -> Any:
    try:
        return parsed_json(value)
    except ValueError:
        return value
