"""Lines to paste: for rope parameters, and the corrected form of a line."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Callable, Mapping
from typing import Any

from longitude.positions.config_keys import BASES, SCHEMAS, SHARES
from longitude.positions.scaling import YaRN
from longitude.serving.config import LENGTH, Config, Parameters, Stops, merge
from longitude.serving.effective import ENGINES, Case, Ropes, judged
from longitude.serving.findings import findings, wrong
from longitude.serving.line import FACTS, VARIABLES, Line, lines_in


def started(engine: str, model: str, flags: Mapping[str, Any]) -> str:
    """The line that serves a model with these flags."""
    start = f"{FACTS[engine].start} {FACTS[engine].model}".split()
    return joined(Line(engine, tuple(start), (model,), {}, None), flags, quoted=shlex.quote)


def written(engine: str, name: str, config: Config, parameters: Parameters, length: int, alone: Ropes) -> str:
    """The line by which an engine serves `length` tokens of the original weights with these rope parameters. Stops: none does."""
    name = name if engine != "llama.cpp" or name.endswith(".gguf") else "MODEL.gguf"
    return right(started(engine, name, ENGINES[engine].line(config, parameters, length)), config, alone)


def right(line: str, config: Config, alone: Ropes) -> str:
    """The line, which its engine's rules find right. Stops: they find it wrong."""
    rows = findings(judged(lines_in(line)[0], config, alone))
    if wrong(rows):
        raise Stops(rows[0].text, rows[0].source)
    return line


# ---- the corrected line ------------------------------------------------------------------------------------------------
def corrected(case: Case) -> tuple[str | None, str]:
    """(the line to paste, or None; why there is none)."""
    facts, length, parameters = case.facts, case.meant.length or case.before.declared, case.meant.parameters
    add: dict[str, Any] = {}
    reach, trained = 0.0, case.trained
    if isinstance(trained, YaRN) and facts.flag("keys"):  # config.json may declare less than its own scaling carries
        reach = trained.factor * trained.original_max_length
    try:
        if length and (parameters != case.before.parameters or case.declared < length <= reach):
            add = ENGINES[case.line.engine].line(case.before, parameters, length)
        elif facts.flag("length") and case.asked.length:
            add = {facts.flag("length"): str(min(case.asked.length, case.before.declared or case.asked.length))}
        flag = facts.flag("keys")
        if facts.units and (others := _others(case.asked.keys)):
            merge(others, add.get(flag, {}))
            add |= {flag: others}
        return right(joined(case.line, add), case.before, case.alone), ""
    except Stops as stop:
        return None, f"{stop.what} ({stop.source})"
    except ValueError as error:  # numbers that no engine could use
        return None, str(error)


def _others(keys: dict[str, Any]) -> dict[str, Any]:
    """Overridden keys that are not about positions."""
    about = (*SCHEMAS, *BASES, *SHARES, LENGTH, "max_model_len")
    kept = {key: value for key, value in keys.items() if key not in about}
    kept |= {key: _others(value) for key, value in kept.items() if isinstance(value, dict)}
    return {key: value for key, value in kept.items() if value != {}}


def _quoted(word: str) -> str:
    """A word of a line, which may have variables and a home folder. No command in it is run, whatever it was quoted by."""
    if re.fullmatch(r"~?[\w@%+=:,./-]+|[\w=]*(\$\w+|\$\{\w+(\[@\])?\})", word):
        return word
    has_variables = "$" in word and re.fullmatch(r"([^$!\"\\`]|\$\w+|\$\{\w+\})*", word)
    return f'"{word}"' if has_variables else shlex.quote(word)


def joined(line: Line, add: Mapping[str, Any], quoted: Callable[[str], str] = _quoted) -> str:
    """The line with these flags in place of those that change positions, ready to paste. quoted: how a shell gets a word."""
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
    argv = [*start, *(word for item in flags for word in item if word not in ("", None))]
    return " ".join(quoted(json.dumps(word) if isinstance(word, dict) else word) for word in argv)


def _argument(value: Any) -> str:
    is_literal = isinstance(value, str) and re.fullmatch(r"-?\d+(\.\d+)?|True|False", value)
    return value if is_literal else repr(value)
