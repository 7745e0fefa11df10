"""A line that serves a model, found in text and split into words. Nothing in it is executed or expanded."""

from __future__ import annotations

import ast
import json
import os
import re
import shlex
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import accumulate, islice, product
from pathlib import Path, PurePosixPath
from types import SimpleNamespace
from typing import Any

import yaml

from longitude.errors import UsageError
from longitude.runs.files import parsed_json, read_text

LARGEST, NEAR = 2**20, 20_000
"""Maximum bytes of a file that has lines, and characters of a line that are read."""
MOST_LINES, MOST_WORDS = 50, 2000
"""Lines of a text, and words of a line."""


class Facts(SimpleNamespace):
    """What was read of an engine: its entry in engines.toml, which describes the fields."""

    def flag(self, kind: str) -> str:
        """The flag of a kind; empty if there is none."""
        return next((flag for flag, other in self.flags.items() if other == kind), "")


ENTRIES = tomllib.loads(Path(__file__).with_name("engines.toml").read_text())
DEFAULTS, RENAMED = ENTRIES.pop("defaults"), ENTRIES.pop("renamed")
FACTS = {engine: Facts(**DEFAULTS | entry) for engine, entry in ENTRIES.items()}
PROGRAMS = {engine: "|".join(filter(None, [facts.programs, facts.images])) for engine, facts in FACTS.items()}
NAMES = "|".join(PROGRAMS.values())
CALLS = {engine: facts.calls for engine, facts in FACTS.items() if facts.calls}
TELLING = {
    flag: engine
    for engine in ("vllm", "sglang", "llama.cpp")
    for flag, kind in FACTS[engine].flags.items()
    if kind in ("length", "keys", "scheme", "whole")
}
"""Flags that tell the engine of arguments without a program."""
BEFORE = re.compile(r"[A-Za-z_]\w*=.*|sudo|env|exec|nohup|time|run|then|else|do|(ba)?sh|python[\d.]*|\$|-\w?")
CONTAINERS = {*"docker podman kubectl srun apptainer FROM conda uv uvx numactl taskset timeout".split()}
"""Words that may stand before a program; after those of CONTAINERS any words may."""
DATA = (".yaml", ".yml", ".json")
LISTS = re.compile(r"(?m)^\s*(CMD|ENTRYPOINT)\s*(\[.*\])\s*$")
"""Endings of files of data; and the list of words in a line of a Dockerfile."""
PREFIX = r"^\s*(ExecStart=|CMD |RUN |ENTRYPOINT |(- )?\w+: *[|>]?|- |\d+\. |#+ |@)\s*"
"""Signs before a command, of a unit of systemd, a Dockerfile, YAML, Markdown or a Makefile."""
REWRITTEN = (
    (r"(?:\\|[ \t][`^])\r?\n[ \t]*(?:> )?", " "),  # lines continued in sh, PowerShell, cmd, and after a prompt
    (r"(?<=\S)[ \t]+# [^\n]*", ""),  # comments
    (r"(?<=\S)[ \t]+[\d&]?>>?[ \t]*(?:&\d|[^\s'\"]+)(?=\s|$)", ""),  # where the output goes
    (rf"`([^`\n]*(?:{NAMES})[^`\n]*)`", r"\n\1\n"),  # code within a sentence
    (r"[\w .:\\-]{0,200}\\(?=[\w-]+\.exe\b)", ""),  # folders of Windows
)
VARIABLES = (
    "VLLM_ALLOW_LONG_MAX_MODEL_LEN|SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN"
    r"|LLAMA_ARG_(?:CTX_SIZE|ROPE_\w+|YARN_\w+|N_PARALLEL|KV_UNIFIED_PER_SLOT)"
)
"""Variables of the environment that lift an engine's limit of the length, or are flags of llama.cpp (common/arg.cpp)."""
ANSWERS = re.compile(rf"({VARIABLES})[\"']?(?:\s*[:=]\s*|\s+value\s*:\s*|\s+)[\"']?([\w.]+)")
PINNED = re.compile(r"\b(vllm|sglang)(?:-openai)?(?::v|\s*==\s*v?)(\d+(?:\.\d+)+)")
"""The release of an engine that a text pins."""
MODEL = ("--model", "--model-path", "-m", "--hf-repo", "-hf")


@dataclass(frozen=True)
class Line:
    """A line in words.

    Attributes:
        engine: A key of FACTS.
        start: The words before the options: programs and variables.
        options: The words after them.
        variables: Variables of the environment with their values.
        release: The release of the engine that the text pins, if it pins one.
    """

    engine: str
    start: tuple[str, ...]
    options: tuple[str, ...]
    variables: Mapping[str, str]
    release: str | None

    @property
    def facts(self) -> Facts:
        return FACTS[self.engine]

    @property
    def name(self) -> str:
        return self.facts.name

    @property
    def flags(self) -> list[tuple[str, str | None]]:
        """(flag, value) in their order; None for a flag without a value, and the flag "" for other words."""
        flags: list[tuple[str, str | None]] = []
        rest = [*self.options]
        while rest:
            word = rest.pop(0)
            if not is_flag(word):
                flags.append(("", word))
            elif word.startswith("--") and "=" in word:
                flags.append((word.partition("=")[0], word.partition("=")[2]))
            else:
                flags.append((word, rest.pop(0) if rest and not is_flag(rest[0]) else None))
        return flags

    @property
    def model(self) -> str | None:
        """The model that the line names."""
        return next((value for names in (MODEL, ("",)) for flag, value in self.flags if flag in names and value), None)

    @property
    def unseen(self) -> list[str]:
        """Words that a shell replaces by flags: arrays, and variables beside the model."""
        plain = [str(value) for flag, value in self.flags if flag == ""]
        beside = plain if any(flag in MODEL for flag, _ in self.flags) else plain[1:]
        arrays = [value for _, value in self.flags if value and re.search(r"\$@|\[@\]", value)]
        return [*dict.fromkeys([word for word in beside if word.startswith(("$", "{{"))] + arrays)]

    def lifts(self, variable: str) -> bool:
        """Whether a variable of the environment is set to yes."""
        return self.variables.get(variable, "0").lower() in ("1", "true")


def is_flag(word: str) -> bool:
    return bool(re.match(r"--?[A-Za-z]", word))


def lines_of(text_or_file: str) -> list[Line]:
    """The lines in a text, or in the file of this name. UsageError if there are none, or one cannot be split."""
    if os.path.lexists(text_or_file):
        place = Path(text_or_file)
        return lines_in(read_text(place, "give a smaller file", links=True, limit=LARGEST), place.suffix)
    if " " not in text_or_file.strip():
        raise UsageError("--serve", "a line that serves a model, or a file with one", repr(text_or_file))
    return lines_in(text_or_file)


def lines_in(text: str, suffix: str = "") -> list[Line]:
    """`lines_of` for a text. suffix: that of its file."""
    around = dict(ANSWERS.findall(text)), dict(PINNED.findall(text))
    stored = [*_data(text, suffix)]
    texts = stored if suffix in DATA and any(map(_has_line, stored)) else [*stored, text]
    lines = [line for part in texts for argv in _commands(part) if (line := _line(argv, *around))]
    lines += _calls(text, *around)
    distinct = {
        (line.engine, line.options): line for line in reversed(lines) if line.options
    }  # a name alone is a mention
    if not distinct:
        expected = f"a line that starts {', '.join(facts.name for facts in FACTS.values())}"
        raise UsageError("--serve", expected, repr(text[:60]), "such as `vllm serve MODEL`")
    return [*reversed(distinct.values())]


def _line(argv: list[str], variables: Mapping[str, str] = {}, pinned: Mapping[str, str] = {}) -> Line | None:
    """The line in these words; None if they start no engine."""
    if len(argv) > MOST_WORDS:
        raise UsageError("--serve", f"at most {MOST_WORDS} words", len(argv))
    plain = [PurePosixPath(word).name if re.match(r"[.~]*/|[\w./-]*bin/", word) else word for word in argv]
    for start in range(len(argv)):
        for (engine, programs), count in product(PROGRAMS.items(), (1, 2, 3)):
            if re.fullmatch(programs, " ".join(plain[start : start + count])):
                here = {**variables, **dict(word.split("=", 1) for word in argv[:start] if re.match(r"\w+=", word))}
                options = (*(_flags_of(here) if engine == "llama.cpp" else ()), *argv[start + count :])
                return Line(engine, tuple(argv[: start + count]), options, here, pinned.get(engine))
        if not CONTAINERS & {*plain[: start + 1]} and not BEFORE.fullmatch(plain[start]):
            break
    return None


def _has_line(text: str) -> bool:
    return any(line.options for argv in _commands(text) if (line := _line(argv)))


def _flags_of(variables: Mapping[str, str]) -> Iterator[str]:
    for name, value in variables.items():
        if name.startswith("LLAMA_ARG_") and re.fullmatch(VARIABLES, name):
            yield "--" + re.sub("^N_|_TYPE$", "", name.removeprefix("LLAMA_ARG_")).lower().replace("_", "-")
            yield value


def _commands(text: str) -> Iterator[list[str]]:
    """The words of each shell command in a text that names an engine; also of those in quotes, as after bash -c."""
    for pattern, replacement in REWRITTEN:
        text = re.sub(pattern, replacement, text)
    starts = re.finditer(rf"(?m)^.*?(?:{NAMES})\b", text)
    for start in islice(starts, MOST_LINES):
        for argv in _split(re.sub(PREFIX, "", text[start.start() : start.start() + NEAR])):
            yield argv
            if _line(argv) is None:
                for word in argv:
                    yield from _commands(word) if " " in word else ()


def _split(text: str) -> Iterator[list[str]]:
    """The words of each command in the first line of a text. UsageError for an engine's command with an open quote."""
    lexer = shlex.shlex(text, posix=True, punctuation_chars=";&|\n")
    lexer.whitespace, lexer.whitespace_split, lexer.commenters = " \t\r", True, ""
    argv: list[str] = []
    try:
        for word in lexer:
            if not {*word} <= {*";&|\n"}:
                argv.append(word)
                continue
            yield argv
            if "\n" in word:
                return
            argv = []
    except ValueError as error:
        if _line(argv) is not None:  # else an apostrophe in a sentence
            raise UsageError("--serve", "a line with closed quotes", str(error), "close them") from None
    yield argv


# ---- data ------------------------------------------------------------------------------------------------------------
def _data(text: str, suffix: str) -> Iterator[str]:
    """The commands in a YAML or JSON text, or of a Dockerfile with lists of words: its last ENTRYPOINT with its last CMD."""
    if suffix in DATA or re.match(r"\s*(\{|\[\s*[\"{\[])", text):
        yield from _texts(_stored(text, suffix))
    elif lists := dict(LISTS.findall(re.sub(*REWRITTEN[0], text))):
        entry, words = (_stored(lists.get(key, "[]"), suffix) for key in ("ENTRYPOINT", "CMD"))
        image = next(iter(re.findall(r"(?m)^FROM\s+(\S+)", text)), None)
        yield from _texts({"image": image, "command": entry, "args": words})


def _stored(text: str, suffix: str) -> Any:
    """The value of a YAML or JSON text."""
    try:
        if suffix not in DATA[:2]:
            return parsed_json(text)
        if any(isinstance(token, yaml.AliasToken) for token in yaml.scan(text)):
            raise UsageError("--serve", "YAML without aliases", "an alias", "write the value itself")
        return yaml.safe_load(text)
    except UsageError:
        raise
    except (ValueError, yaml.YAMLError, RecursionError) as error:
        raise UsageError("--serve", "JSON or YAML", " ".join(str(error).split())[:160]) from None


def _texts(value: Any, depth: int = 0) -> Iterator[str]:
    """Commands in data: texts, lists of words, command with args, options of an image, and arguments by name as flags."""
    if depth > 32:
        raise UsageError("--serve", "data nested at most 32 deep", "more")
    if isinstance(value, str):
        yield value
    elif isinstance(value, list):
        yield _started(_command(value))
    elif isinstance(value, Mapping):
        command = " ".join(_command(value.get(key)) for key in ("command", "args"))
        yield command if re.search(NAMES, command) else " ".join([str(value.get("image")), *command.split("\n")])
        flags = {"--" + re.sub(r"(?<=[a-z])(?=[A-Z])|_", "-", str(key).lstrip("-")).lower(): key for key in value}
        if flags.keys() & TELLING.keys():
            value = [word for flag, key in flags.items() for word in _as_flag(flag, value[key])]
            yield _started(_command(value))
        elif _has_line(command):  # one line, of which a part alone is none
            value = {key: inner for key, inner in value.items() if key not in ("command", "args")}
    for inner in value.values() if isinstance(value, Mapping) else value if isinstance(value, list) else ():
        yield from _texts(inner, depth + 1)


def _command(argv: Any) -> str:
    """Words as text; empty about a script of its own, as after sh -c."""
    if not isinstance(argv, list):
        return argv if isinstance(argv, str) else ""
    texts = [str(word) for word in argv]
    if len(texts) == 1:
        return texts[0]
    return "" if any(" " in text and re.search(NAMES, text) for text in texts) else shlex.join(texts)


def _started(flags: str) -> str:
    """Flags behind the program that they tell, if they have none."""
    engine = next((TELLING[flag] for word in flags.split() if (flag := re.split("[=.]", word)[0]) in TELLING), None)
    return flags if engine is None or re.search(NAMES, flags) else f"{FACTS[engine].start} {flags}"


def _as_flag(flag: str, value: Any) -> list[str]:
    if isinstance(value, bool) or value is None:
        return [flag] * bool(value)
    if flag in ("--extra-args", "--args") and isinstance(value, list):
        return [str(word) for word in value]
    return [flag, json.dumps(value) if isinstance(value, dict | list) else str(value)]


# ---- calls of Python ---------------------------------------------------------------------------------------------------
def _calls(text: str, variables: Mapping[str, str], pinned: Mapping[str, str]) -> Iterator[Line]:
    """Lines of calls of Python. What is no literal becomes a variable."""
    for start in islice(re.finditer(rf"\b(?:{'|'.join(CALLS.values())})\(", text), MOST_LINES):
        engine = next(engine for engine, calls in CALLS.items() if re.fullmatch(calls, start[0][:-1]))
        depths = accumulate({"(": 1, ")": -1}.get(sign, 0) for sign in text[start.end() - 1 : start.end() + NEAR])
        length = next((n for n, depth in enumerate(depths) if depth == 0), 0)
        try:
            call = ast.parse(text[start.start() : start.end() + length], mode="eval").body
            assert isinstance(call, ast.Call)
            options = [str(_value(name)) for name in call.args[:1]]
            for argument in call.keywords:
                value = _value(argument.value)
                if argument.arg is None and not isinstance(value, dict):
                    options.append(value.replace("}", "[@]}"))
                    continue
                for key, inner in ({argument.arg: value} if argument.arg else value).items():
                    options += _as_flag(f"--{str(key).replace('_', '-')}", inner)
        except (SyntaxError, ValueError, TypeError, AttributeError, AssertionError, RecursionError, MemoryError):
            continue
        yield Line(engine, (start[0],), tuple(options), variables, pinned.get(engine))


def _value(node: ast.expr) -> Any:
    """A literal, also within json.dumps; else "${...}", as the shell writes a variable."""
    if isinstance(node, ast.Call) and ast.unparse(node.func) == "json.dumps" and len(node.args) == 1:
        return _value(node.args[0])
    try:
        return ast.literal_eval(node)
    except ValueError:
        return f"${{{ast.unparse(node)}}}"
