"""The rotations and lengths with which an engine serves, beside those of the checkpoint and those that a line means."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedConfig

from longitude.checkpoints import declared
from longitude.checkpoints.compare import read
from longitude.checkpoints.declared import by_type, text_part
from longitude.errors import UsageError, one_line_of
from longitude.positions.config_keys import BASES, BY_LAYER, COMMON, KEYS, ORIGINAL, SHARES, names_any
from longitude.positions.hugging_face import NotUnderstood, RopeConfig
from longitude.positions.scaling import YaRN, rope_frequencies
from longitude.runs.files import read_json
from longitude.runs.quiet import quiet
from longitude.serving import llama_cpp, mlx, sglang, transformers, vllm
from longitude.serving.config import (
    BASE,
    LENGTH,
    Config,
    NotKnown,
    Overrides,
    Parameters,
    Served,
    Stops,
    parse,
    rope,
    unfamiliar,
)
from longitude.serving.line import RENAMED, Facts, Line

ENGINES: dict[str, Any] = {
    "vllm": vllm, "sglang": sglang, "llama.cpp": llama_cpp, "transformers": transformers, "mlx": mlx,
}  # fmt: skip
"""The file of each engine: apply, rotation, served, line, and parse if flags are more than their kinds."""
FEW = 12
UNFOLLOWED = (TypeError, KeyError, AttributeError, ArithmeticError)
"""Errors of our own functions for values of other types than in any config."""
Ropes = dict[str | None, RopeConfig]
SCHEME = {"type", "rope_type", *(key for keys in KEYS.values() for key in keys)} - {*COMMON[1:], "alpha", LENGTH}
"""Keys of rope parameters that belong to a scheme; the others are the model's."""


@dataclass
class Meant:
    """What a line most likely means.

    Attributes:
        length: Tokens of the longest request; None if nothing says it.
        parameters: Rope parameters to write, by which `length` is reached.
        scheme: The flat dict that the line has for layers of full attention, as it is written; empty if it has none.
        original: The training length.
    """

    length: int | None
    parameters: Parameters
    scheme: Parameters
    original: int | None

    @property
    def kind(self) -> str | None:
        """The type of the scaling that the line has."""
        kind = self.scheme.get("rope_type", self.scheme.get("type"))
        return kind if isinstance(kind, str) else None

    @property
    def scales(self) -> bool:
        """Whether the line asks for a scaling."""
        factor = self.scheme.get("factor")
        is_factor = isinstance(factor, int | float) and factor != 1
        return is_factor if self.kind is None else self.kind not in ("default", "none")


@dataclass
class Case:
    """A line, a config and what the engine makes of them.

    Attributes:
        line: The line.
        asked: What it changes.
        before: The config of the checkpoint.
        alone: Rotations of the checkpoint as its class computes them, by layer type.
        after: The config as the engine has it; None if the engine stops before.
        used: Rotations that the engine computes.
        served: Lengths with which it serves.
        stops: Errors with which the engine ends.
        unknown: What cannot be judged, and why.
    """

    line: Line
    asked: Overrides
    before: Config
    alone: Ropes
    after: Config | None = None
    used: Ropes = field(default_factory=dict)
    served: Served = field(default_factory=Served)
    stops: list[Stops] = field(default_factory=list)
    unknown: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.full = self.before.full
        self.meant = meant_of(self)

    @property
    def facts(self) -> Facts:
        return self.line.facts

    @property
    def rope(self) -> RopeConfig | None:
        """The rotation that the engine computes in layers of full attention."""
        return self.used.get(self.full, self.used.get(None))

    @property
    def scaling(self) -> Any:
        """Its scheme; None without one."""
        return self.rope and self.rope.scaling

    @property
    def trained(self) -> Any:
        """The scheme of the checkpoint in these layers; None without one."""
        alone = self.alone.get(self.full, self.alone.get(None))
        return alone and alone.scaling

    @property
    def yarn(self) -> YaRN | None:
        return self.scaling if isinstance(self.scaling, YaRN) else None

    @property
    def saved(self) -> Parameters:
        """Rope parameters of the checkpoint for layers of full attention."""
        return self.before.flat

    @property
    def is_plain(self) -> bool:
        """Whether the checkpoint has no scaling."""
        return self.saved.get("rope_type", "default") == "default"

    @property
    def declared(self) -> int:
        """Tokens that the checkpoint declares; 0 if it does not."""
        return self.before.declared or 0

    @property
    def longer(self) -> bool:
        """Whether requests are longer than what is declared."""
        return self.served.length > 1.001 * self.declared > 0

    @property
    def limit(self) -> float:
        return self.served.limit


def opened(name: str) -> tuple[Config, Ropes, str | None]:
    """`alone_of` with the config of a folder, a config.json, a GGUF file or a name in the local cache."""
    place = Path(name).expanduser()
    if place.suffix == ".gguf":
        config = llama_cpp.config_of(place)
        return config, *alone_of({}, config)
    file = place if place.suffix == ".json" else place / "config.json"
    raw = read_json(file, links=True)
    if raw is None and place.suffix != ".json" and not place.exists():
        try:
            with quiet():
                raw = PreTrainedConfig.get_config_dict(name, local_files_only=True)[0]
        except (OSError, ValueError) as error:
            expected = "a folder with a config.json, or a name in the local cache"
            raise UsageError(name, expected, one_line_of(error)[:80]) from None
    if not raw:
        raise UsageError(str(file), "a config.json", "none")
    declared.require_numbers(raw)  # before a class makes lists of them
    config = Config.of(raw)
    return config, *alone_of(raw, config)


def alone_of(raw: Mapping[str, Any], config: Config) -> tuple[Ropes, str | None]:
    """Rotations of a checkpoint as its class computes them; by its keys, with the reason, if its class cannot be tried."""
    try:
        if raw:
            raw, note = _with_base(raw, config)
            by_label = by_type(read(_of_few_layers(raw)).ropes)
            return {label: rotation for label, rotation in by_label.items() if rotation is not None}, note
        why = None  # a GGUF file, of which the keys are all there is
    except NotUnderstood as error:
        why = f"read by its keys alone: {error}"
    if not any(BASE in parameters for parameters in config.by_type.values()):
        return {}, why  # nothing rotates
    try:
        return {label: rope(parameters, config.declared) for label, parameters in config.by_type.items()}, why
    except NotKnown as error:
        raise ValueError(f"its rope parameters cannot be read: {error}") from error


def _with_base(raw: Mapping[str, Any], config: Config) -> tuple[Mapping[str, Any], str | None]:
    """A config with the base of its class, and a note, if the file has none (Llama 2): engines take that of the class, too."""
    text, base = text_part(raw), config.by_type.get(None, {}).get(BASE)
    if base is None or names_any(text, BASES):
        return raw, None
    text = {**text, BASE: base}
    note = f"config.json has no {BASE}: its class takes {base:,.0f}"
    return {**raw, "text_config": text} if config.nested else text, note


def _of_few_layers(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    """A config with its first layers alone, if every type of layers is among these: some classes take a minute for all."""
    text = text_part(raw)
    layers, types = text.get("num_hidden_layers"), text.get("layer_types") or []
    lists = {key: value[:FEW] for key in BY_LAYER if isinstance(value := text.get(key), list)}
    if type(layers) is not int or layers <= FEW or {*types} != {*types[:FEW]} or {*lists} - {"layer_types"}:
        return raw
    fewer = {**text, **lists, "num_hidden_layers": FEW}
    return fewer if text is raw else {**raw, "text_config": fewer}


def judged(line: Line, config: Config, alone: Ropes) -> Case:
    """What the engine of a line makes of a config."""
    asked = getattr(ENGINES[line.engine], "parse", parse)(line)
    case = Case(line, asked, config, alone, stops=[*asked.stops], unknown=[*asked.unknown])
    case.unknown += [f"{flag} is not known here, and {line.name} may not have it" for flag in unfamiliar(line)]
    case.unknown += [f"{word} stands for flags that are not seen here: write them" for word in line.unseen]
    for step in () if asked.stops else (_rotate, _serve):
        try:
            step(case)
        except Stops as stop:
            case.stops.append(stop)
        except NotKnown as reason:
            case.unknown.append(str(reason))
        except UNFOLLOWED as error:
            case.unknown.append(f"its overrides have values that cannot be followed ({error!r:.80})")
    return case


def _rotate(case: Case) -> None:
    engine = ENGINES[case.line.engine]
    case.after = after = engine.apply(case.before, case.asked)
    for label, parameters in after.by_type.items() if case.alone else ():
        case.used[label] = _displayed(engine.rotation(parameters, after, case.asked.length), case, label)


def _serve(case: Case) -> None:
    if case.after is not None:
        case.served = served = ENGINES[case.line.engine].served(case.after, case.asked)
        case.stops += [served.refused] if served.refused else []


def _displayed(used: RopeConfig, case: Case, label: str | None) -> RopeConfig:
    """With what a class takes from elsewhere than rope parameters: a share, a temperature, layers without rotation."""
    if getattr(used.scaling, "factor", None) == 1:
        used = used._replace(scaling=None)
    alone = case.alone.get(label, next(iter(case.alone.values())))
    fields = ["rotates", "temperature", "unrotated_temperature"]
    fields += ["partial_rotary_factor"] * (SHARES[0] not in case.before.by_type.get(label, {}))
    return used._replace(**{name: getattr(alone, name) for name in fields})


# ---- what is meant ---------------------------------------------------------------------------------------------------
def meant_of(case: Case) -> Meant:
    """The most likely meaning: the scheme and the length that the line has, with what the checkpoint has for all else."""
    asked, saved, declared = case.asked, case.saved, case.before.declared
    dicts = [scheme for path, scheme in asked.schemes if path[-1] not in case.before.by_type or path[-1] == case.full]
    scheme = {key: value for key, value in (dicts[0] if dicts else {}).items() if value is not None}
    original, of_line = declared if case.is_plain else saved.get(ORIGINAL), scheme.get(ORIGINAL)
    if case.is_plain and isinstance(of_line, int) and of_line <= (declared or of_line):
        original = of_line
    meant = Meant(asked.length or longest(asked.keys, declared), dict(case.before.parameters), scheme, original)
    base, factor = scheme.get(BASE, asked.keys.get(BASE)), scheme.get("factor")
    if not meant.scales and base is not None and not factor:
        meant.parameters = _with(case, {**saved, BASE: base})
        return meant
    kind = RENAMED.get(meant.kind, meant.kind) if meant.kind and meant.scales else "yarn"
    factor = float(factor or 0) if meant.scales and _is_number(factor) else 0.0
    if 0 < factor < 1:
        factor = 1 / factor
    length = meant.length or (round(factor * original) if factor and original and case.is_plain else None)
    if original is None or length is None or length <= (declared or 0) or not (case.is_plain or meant.scales):
        return meant  # nothing needs to be scaled, or not otherwise than it was in training
    meant.length = length
    if not case.is_plain:  # nothing is scaled twice: the scheme of training, as far as is asked for
        scheme, kind, factor = saved, saved["rope_type"], length / original
    if factor * original < 0.99 * length:
        factor = length / original
    if factor > 1:
        kept = {key: value for key, value in saved.items() if key not in SCHEME}
        kept |= {key: value for key, value in scheme.items() if key in SCHEME - {"type", ORIGINAL}}
        meant.parameters = _with(case, kept | _scaled(kind, factor, original))
    return meant


def _scaled(kind: str, factor: float, original: int) -> Parameters:
    """A scheme with a factor of few digits that is not below the one that is needed."""
    needs_original = {ORIGINAL: original} if kind in ("yarn", "llama3", "longrope") else {}
    return {"rope_type": kind, "factor": math.ceil(1000 * factor - 1e-6) / 1000, **needs_original}


def _with(case: Case, parameters: Parameters) -> Parameters:
    """All rope parameters of the checkpoint, with others for layers of full attention."""
    return parameters if case.full is None else {**case.before.parameters, case.full: parameters}


def _is_number(value: Any) -> bool:
    try:
        return 0 < float(value) < 1e32  # the method drope writes 1e30
    except (TypeError, ValueError, OverflowError):
        return False


def longest(keys: Mapping[str, Any], declared: int | None) -> int | None:
    """A length beyond the declared one among overridden keys, at any depth."""
    lengths = [value for key, value in keys.items() if key in (LENGTH, "max_model_len") and _is_number(value)]
    lengths += [inner for value in keys.values() if isinstance(value, dict) and (inner := longest(value, declared))]
    return max((int(float(length)) for length in lengths if float(length) > (declared or 0)), default=None)


# ---- what a rotation can carry -----------------------------------------------------------------------------------------
def new_angles(case: Case) -> str:
    """How many pairs meet angles beyond the declared length that they never met up to it; empty if heads have no known width."""
    text, rotation = case.before.text, case.rope
    width = text.get("head_dim") or (text.get("hidden_size") or 0) // (text.get("num_attention_heads") or 1)
    if rotation is None or not width:
        return ""
    inverse = rope_frequencies(width, rotation.base, rotation.scaling, rotation.rotary_dim(width)).inverse
    slow = int((inverse * case.declared < 2 * torch.pi).sum())
    return f": {slow} of {len(inverse)} pairs meet angles that training never showed"
