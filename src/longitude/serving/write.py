"""Lines to paste: the corrected form of a line, and those that serve a longer context with the original weights."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from longitude.checkpoints.compare import head_dim_of
from longitude.checkpoints.declared import class_of
from longitude.errors import UsageError
from longitude.positions.config_keys import BASES, SCHEMAS, SHARES
from longitude.positions.hugging_face import to_hugging_face
from longitude.positions.scaling import BaseChange
from longitude.positions.scaling.base import method_of, scheme_of
from longitude.serving.config import LENGTH, ROPE, Config, Parameters, Stops, merge
from longitude.serving.effective import ENGINES, Case, Ropes, judged, opened
from longitude.serving.findings import findings, wrong
from longitude.serving.line import FACTS, VARIABLES, Line, lines_in


def written(engine: str, name: str, config: Config, parameters: Parameters, length: int, alone: Ropes) -> str:
    """The line by which an engine serves `length` tokens of the original weights with these rope parameters. Stops: none does."""
    name = name if engine != "llama.cpp" or name.endswith(".gguf") else "MODEL.gguf"
    facts = FACTS[engine]
    start = tuple(f"{facts.start} {facts.model}".split())
    line = joined(Line(engine, start, (name,), {}, None), ENGINES[engine].line(config, parameters, length))
    rows = findings(judged(lines_in(line)[0], config, alone))
    if wrong(rows):
        raise Stops(rows[0].text, rows[0].source)
    return line


def extended(
    engine: str, name: str, to: int, method: str = "yarn", factor: float | None = None, base: float | None = None,
    original: int | None = None,
) -> str:  # fmt: skip
    """The line by which an engine serves a checkpoint at `to` tokens, judged by the engine's own rules.

    Args:
        engine: A key of ENGINES.
        name: A folder, a config.json, a GGUF file or a name in the local cache; no weights are read.
        to: The new length in tokens.
        method: A method of `longitude extend` that needs neither a search nor training.
        factor: Its factor; by default `to` over the original length.
        base: The new base of the method "base".
        original: The training length; by default the declared one.

    Raises:
        ValueError: A checkpoint that is extended already, or an engine that has no line for it; with the reason.
    """
    config, alone, _ = opened(name)
    parameters = _parameters(config, alone, to, method, factor, base, original)
    place = Path(name)
    model = name if place.suffix != ".json" else str(place.parent) if place.name == "config.json" else "MODEL"
    try:
        return written(engine, model, config, parameters, to, alone)
    except Stops as stop:
        raise ValueError(f"{name}: {engine} has no line for {method}: {stop.what} ({stop.source})") from stop


def _parameters(
    config: Config, alone: Ropes, to: int, method: str, factor: float | None, base: float | None, original: int | None
) -> Parameters:  # fmt: skip
    """Rope parameters of config.json for a method."""
    full = config.full
    rotation = alone.get(full, alone.get(None))
    length = original or config.declared
    if rotation is None or length is None:
        raise UsageError("extend", "a checkpoint that rotates, with a declared length", "none", "pass --original")
    if rotation.scaling is not None:
        raise UsageError("extend", "a checkpoint that is not extended yet", f"one with {rotation.scaling.name}")
    if to <= length:
        raise UsageError("--to", f"more than {length}, the training length", to)
    if method_of(method).searched or method == "drope":
        raise UsageError("--for", "a method that neither searches nor trains", method)
    if method == "base" and base is None:
        raise UsageError("--method base", "--base, the new rope_theta", "none")
    scheme = BaseChange(base) if base is not None else scheme_of(method, factor or to / length, length)
    theirs = class_of(config.raw) if config.raw else None
    width = head_dim_of(theirs, full) if theirs is not None else config.text.get("head_dim")
    made = to_hugging_face(rotation._replace(scaling=scheme, rotates=None, unrotated_temperature=None), width)[ROPE]
    return made if full is None else {**config.parameters, full: made}


# ---- the corrected line ------------------------------------------------------------------------------------------------
def corrected(case: Case) -> tuple[str | None, str]:
    """(the line to paste, or None; why there is none)."""
    facts, length, parameters = case.facts, case.meant.length or case.before.declared, case.meant.parameters
    add: dict[str, Any] = {}
    try:
        if parameters != case.before.parameters and length:
            add = ENGINES[case.line.engine].line(case.before, parameters, length)
        elif facts.flag("length") and case.asked.length:
            add = {facts.flag("length"): str(min(case.asked.length, case.before.declared or case.asked.length))}
    except Stops as stop:
        return None, f"{stop.what} ({stop.source})"
    flag = facts.flag("keys")
    if facts.units and (others := _others(case.asked.keys)):
        merge(others, add.get(flag, {}))
        add |= {flag: others}
    line = joined(case.line, add)
    try:
        again = findings(judged(lines_in(line)[0], case.before, case.alone))
    except ValueError as error:  # numbers that no engine could use
        return None, str(error)
    if faults := [finding.text for finding in again if finding.verdict == "wrong"]:
        return None, faults[0]
    return line, ""


def _others(keys: dict[str, Any]) -> dict[str, Any]:
    """Overridden keys that are not about positions."""
    about = (*SCHEMAS, *BASES, *SHARES, LENGTH, "max_model_len")
    kept = {
        key: _others(value) if isinstance(value, dict) else value for key, value in keys.items() if key not in about
    }
    return {key: value for key, value in kept.items() if value != {}}


def joined(line: Line, add: Mapping[str, Any]) -> str:
    """The line with these flags in place of those that change positions, ready to paste."""
    facts = line.facts
    drop = {flag for flag, kind in facts.flags.items() if kind not in ("draft", "model", "switch", "file", "slots")}
    drop |= {alias for alias, flag in facts.aliases.items() if flag in drop}
    kept = [(flag, value) for flag, value in line.flags if flag.partition(".")[0].replace("_", "-") not in drop]
    flags: list[tuple[str, Any]] = [*kept, *add.items()]
    if line.start[0].endswith("("):
        arguments = [repr(value) for flag, value in flags if not flag]
        arguments += [f"{flag[2:].replace('-', '_')}={_argument(value)}" for flag, value in flags if flag]
        return f"{line.start[0]}{', '.join(arguments)})"
    start = [word for word in line.start if not re.fullmatch(VARIABLES, word.partition("=")[0])]
    if re.fullmatch(facts.images or "-", start[0]):
        start = ["docker", "run", "--gpus", "all", *start]
    words = [*start, *(word for item in flags for word in item if word not in ("", None))]
    return " ".join(_quoted(json.dumps(word) if isinstance(word, dict) else word) for word in words)


def _argument(value: Any) -> str:
    is_literal = isinstance(value, str) and re.fullmatch(r"-?\d+(\.\d+)?|True|False", value)
    return value if is_literal else repr(value)


def _quoted(word: str) -> str:
    """A word for a shell, which expands what it expanded before: variables and a home folder."""
    if re.fullmatch(r"~?[\w@%+=:,./-]+|[\w=]*(\$\w+|\$\{\w+(\[@\])?\})", word):
        return word
    return f'"{word}"' if re.search(r"\$[\w{(]", word) and not re.search(r"[\"\\`]", word) else shlex.quote(word)
