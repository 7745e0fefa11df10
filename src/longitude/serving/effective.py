"""The rotations and lengths with which an engine serves, beside those of the checkpoint and those that a line means."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import torch

from longitude.checkpoints.compare import read
from longitude.checkpoints.declared import by_type, text_part
from longitude.errors import UsageError
from longitude.positions.config_keys import BASES, BY_LAYER, SHARES
from longitude.positions.hugging_face import NotUnderstood, RopeConfig
from longitude.positions.scaling import YaRN, rope_frequencies
from longitude.serving import llama_cpp, mlx, sglang, transformers, vllm
from longitude.serving.config import (
    FACTS,
    LENGTH,
    ORIGINAL,
    RENAMED,
    Config,
    NotKnown,
    Overrides,
    Parameters,
    Served,
    Stops,
    rope,
)
from longitude.serving.line import Line

ENGINES: dict[str, Any] = {
    "vllm": vllm, "sglang": sglang, "llama.cpp": llama_cpp, "transformers": transformers, "mlx": mlx,
}  # fmt: skip
"""The file of each engine: parse, apply, rotation, served, line, and its sources."""
FEW = 12
Ropes = dict[str | None, RopeConfig]
SCHEME = ("rope_type", "type", "factor", ORIGINAL, "attention_factor", "attn_factor", "beta_fast", "beta_slow", "mscale",
          "mscale_all_dim", "truncate", "low_freq_factor", "high_freq_factor", "short_factor", "long_factor")  # fmt: skip
"""Keys of rope parameters that belong to a scheme; the others are the model's."""
NUMBERS = {*SCHEME, BASES[0]} - {
    "rope_type",
    "type",
    "truncate",
    "short_factor",
    "long_factor",
    "mscale",
    "mscale_all_dim",
}


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
    def scales(self) -> bool:
        """Whether the line asks for a scaling."""
        kind = self.scheme.get("rope_type", self.scheme.get("type"))
        factor = self.scheme.get("factor")
        return kind not in (None, "default", "none") or (
            kind is None and isinstance(factor, int | float) and factor != 1
        )


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
        served: Lengths with which it serves; None if it stops, or they are not known.
        stops: Errors with which the engine ends.
        unknown: What cannot be judged, and why.
    """

    line: Line
    asked: Overrides
    before: Config
    alone: Ropes
    after: Config | None = None
    used: Ropes = field(default_factory=dict)
    served: Served | None = None
    stops: list[Stops] = field(default_factory=list)
    unknown: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.engine: ModuleType = ENGINES[self.line.engine]
        self.facts = FACTS[self.line.engine]
        self.full = self.before.full
        self.meant = meant_of(self)

    @property
    def rope(self) -> RopeConfig | None:
        """The rotation that the engine computes in layers of full attention."""
        return self.used.get(self.full, self.used.get(None))

    @property
    def scaling(self) -> Any:
        """Its scheme; None without one."""
        return self.rope and self.rope.scaling

    @property
    def yarn(self) -> YaRN | None:
        return self.scaling if isinstance(self.scaling, YaRN) else None

    @property
    def own(self) -> Parameters:
        """Rope parameters of the checkpoint for layers of full attention."""
        return self.before.flat

    @property
    def is_plain(self) -> bool:
        """Whether the checkpoint has no scaling."""
        return self.own.get("rope_type", "default") == "default"

    @property
    def declared(self) -> int:
        """Tokens that the checkpoint declares; 0 if it does not."""
        return self.before.declared or 0

    @property
    def tokens(self) -> int:
        """Tokens of the longest request; 0 if that is not known."""
        return (self.served.length if self.served else None) or 0

    @property
    def longer(self) -> bool:
        """Whether requests are longer than what is declared."""
        return self.tokens > 1.001 * self.declared > 0

    @property
    def limit(self) -> float:
        """The length that the config allows the engine; 0 if it has no limit."""
        return (self.served.limit if self.served else None) or 0


def alone_of(raw: Mapping[str, Any], config: Config) -> tuple[Ropes, str | None]:
    """Rotations of a checkpoint as its class computes them; by its keys, with the reason, if its class cannot be tried."""
    try:
        if raw:
            by_label = by_type(read(_of_few_layers(raw)).ropes)
            return {label: rotation for label, rotation in by_label.items() if rotation is not None}, None
        why = None  # a GGUF file, of which the keys are all there is
    except NotUnderstood as error:
        why = f"read by its keys alone: {error}"
    if not any(BASES[0] in parameters for parameters in config.by_type.values()):
        return {}, why  # nothing rotates
    try:
        return {label: rope(parameters, config.declared) for label, parameters in config.by_type.items()}, why
    except Stops as error:
        raise ValueError(f"its rope parameters cannot be read: {error.what}") from error


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
    engine = ENGINES[line.engine]
    asked = engine.parse(line)
    require_numbers(asked)
    case = Case(line, asked, config, alone, stops=[*asked.stops], unknown=[*asked.unknown])
    case.unknown += [f"{word} stands for flags that are not seen here: write them" for word in line.unseen]
    if asked.stops:
        return case

    def rotations() -> None:
        case.after = after = engine.apply(config, asked)
        for label, parameters in after.by_type.items() if alone else ():
            case.used[label] = _displayed(engine.rotation(parameters, after, asked.length), config, alone, label)

    def lengths() -> None:
        if case.after is not None:
            case.served = served = engine.served(case.after, asked)
            case.stops += [served.refused] if served.refused else []

    for part in (rotations, lengths):
        try:
            part()
        except Stops as stop:
            case.stops.append(stop)
        except NotKnown as reason:
            case.unknown.append(str(reason))
        except (
            TypeError,
            KeyError,
            AttributeError,
            ArithmeticError,
        ) as error:  # values of other types than in any config
            case.unknown.append(f"its overrides have values that cannot be followed ({error!r:.80})")
    return case


def _displayed(used: RopeConfig, config: Config, alone: Ropes, label: str | None) -> RopeConfig:
    """With what a class takes from elsewhere than rope parameters: a share, a temperature, layers without rotation."""
    if getattr(used.scaling, "factor", None) == 1:
        used = used._replace(scaling=None)
    other = alone.get(label, next(iter(alone.values()), None))
    if other is None:
        return used
    keys = config.by_type.get(label, {})
    used = used._replace(
        rotates=other.rotates, temperature=other.temperature, unrotated_temperature=other.unrotated_temperature
    )
    return used if SHARES[0] in keys else used._replace(partial_rotary_factor=other.partial_rotary_factor)


# ---- what is meant ---------------------------------------------------------------------------------------------------
def meant_of(case: Case) -> Meant:
    """The most likely meaning: the scheme and the length that the line has, with what the checkpoint has for all else."""
    asked, own, declared = case.asked, case.own, case.before.declared
    dicts = [scheme for path, scheme in asked.schemes if path[-1] not in case.before.by_type or path[-1] == case.full]
    scheme = {key: value for key, value in (dicts[0] if dicts else {}).items() if value is not None}
    own_kind = own.get("rope_type", "default")
    trained = own.get(ORIGINAL) if own_kind != "default" else declared
    of_line = scheme.get(ORIGINAL) if own_kind == "default" else None
    original = of_line if isinstance(of_line, int) and of_line <= (declared or of_line) else trained
    length = asked.length or longest(asked.keys, declared)
    kind = scheme.get("rope_type", scheme.get("type"))
    kind = RENAMED.get(kind, kind) if isinstance(kind, str) else None
    factor = scheme.get("factor")
    factor = float(factor) if isinstance(factor, int | float | str) and _is_number(factor) else None
    if factor is not None and 0 < factor < 1:
        factor = 1 / factor
    meant = Meant(length, dict(case.before.parameters), scheme, original)
    base = scheme.get("rope_theta", asked.keys.get(BASES[0]))
    if not meant.scales:
        if base is not None and (not scheme.get("factor")):
            meant.parameters = _with(case, {**own, BASES[0]: base})
        elif length and declared and length > declared and own_kind == "default":
            meant.parameters = _with(case, {**own, **_yarn(length / declared, declared)})
        return meant
    if original is None:
        return meant
    if length is None and factor and own_kind == "default":
        length = round(factor * original)
    if length is None or length <= (declared or 0):
        return meant  # nothing needs to be scaled, or not otherwise than it was in training
    meant.length = length
    if own_kind != "default":  # nothing is scaled twice: the scheme of training, as far as is asked for
        scheme = {"rope_type": own_kind}
        kind, factor = own_kind, length / original
    if length is not None and (factor is None or factor * original < 0.99 * length):
        factor = math.ceil(1000 * length / original) / 1000
    if factor is None or factor <= 1:
        return meant
    known = {key: value for key, value in scheme.items() if key in SCHEME and key not in ("type", "attn_factor")}
    extended = {key: value for key, value in own.items() if key not in SCHEME} | known
    extended |= {"rope_type": kind or "yarn", "factor": factor}
    if extended["rope_type"] in ("yarn", "llama3", "longrope"):
        extended[ORIGINAL] = original
    else:
        extended.pop(ORIGINAL, None)
    meant.parameters = _with(case, extended)
    return meant


def _yarn(factor: float, original: int) -> Parameters:
    return {"rope_type": "yarn", "factor": math.ceil(1000 * factor) / 1000, ORIGINAL: original}


def _with(case: Case, parameters: Parameters) -> Parameters:
    """All rope parameters of the checkpoint, with others for layers of full attention."""
    return parameters if case.full is None else {**case.before.parameters, case.full: parameters}


def _is_number(value: Any) -> bool:
    try:
        return 0 < float(value) < 1e32  # the method drope writes 1e30
    except (TypeError, ValueError, OverflowError):
        return False


def require_numbers(asked: Overrides) -> None:
    """UsageError for overridden numbers that no engine could use; text is left to the engine."""
    lengths = [
        (key, part[LENGTH])
        for key, part in [("", asked.keys), *asked.keys.items()]
        if isinstance(part, dict) and LENGTH in part
    ]
    numbers = [(LENGTH, length) for _, length in lengths]
    numbers += [(key, value) for _, scheme in asked.schemes for key, value in scheme.items() if key in NUMBERS]
    for key, value in numbers:
        if value is not None and not isinstance(value, str) and (isinstance(value, bool) or not _is_number(value)):
            raise UsageError(
                "an override", f"{key} to be a number above 0, and none beyond any model", repr(value)[:40]
            )


def longest(keys: Mapping[str, Any], declared: int | None) -> int | None:
    """A length beyond the declared one among overridden keys, at any depth."""
    found = [value for key, value in keys.items() if key in (LENGTH, "max_model_len") and _is_number(value or "-")]
    found += [inner for value in keys.values() if isinstance(value, dict) and (inner := longest(value, declared))]
    longer = [int(float(length)) for length in found if float(length) > (declared or 0)]
    return max(longer, default=None)


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
