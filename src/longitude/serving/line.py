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
from typing import Any, NamedTuple

import yaml

from longitude.errors import UsageError
from longitude.runs.files import read_text

LARGEST, NEAR = 2**20, 20_000
"""Maximum bytes of a file that has lines, and characters of a line that are read."""
MOST_LINES, MOST_WORDS = 50, 2000
"""Lines of a text, and words of a line."""


class Facts(NamedTuple):
    """What was read of an engine: its entry in engines.toml, which describes the fields."""

    name: str
    start: str
    programs: str
    known: str
    flags: dict[str, str]
    sources: dict[str, str]
    version: str = ""
    limit: str = ""
    model: str = ""
    images: str = ""
    calls: str = ""
    removed: str = ""
    aliases: dict[str, str] = {}
    units: dict[str, int] = {}
    bases: dict[str, float] = {}
    no_base: dict[str, str] = {}
    unscaled: dict[str, str] = {}
    unclear: dict[str, str] = {}

    def flag(self, kind: str) -> str:
        """The flag of a kind; empty if there is none."""
        return next((flag for flag, other in self.flags.items() if other == kind), "")


FACTS = {
    engine: Facts(**entry)
    for engine, entry in tomllib.loads(Path(__file__).with_name("engines.toml").read_text()).items()
}
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
LISTS = re.compile(r"(?m)^\s*(?:CMD|ENTRYPOINT)\s*(\[.*\])\s*$")
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
    lines = [line for argv in _lists(text, suffix) if (line := _line(argv, *around) or _loose(argv, *around))]
    if suffix not in DATA or not lines:
        lines += [line for argv in _commands(text) if (line := _line(argv, *around))]
    lines += _calls(text, *around)
    distinct = {(line.engine, line.options): line for line in lines if line.options}  # a name alone is a mention
    if not distinct:
        expected = f"a line that starts {', '.join(facts.name for facts in FACTS.values())}"
        raise UsageError("--serve", expected, repr(text[:60]), "such as `vllm serve MODEL`")
    return [*distinct.values()]


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


def _loose(argv: list[str], variables: Mapping[str, str], pinned: Mapping[str, str]) -> Line | None:
    """The line of flags without a program, by those that only one engine has."""
    engine = next((TELLING[flag] for word in argv if (flag := word.partition("=")[0]) in TELLING), None)
    if engine is None:
        return None
    return Line(engine, tuple(FACTS[engine].start.split()), tuple(argv), variables, pinned.get(engine))


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
def _lists(text: str, suffix: str) -> Iterator[list[str]]:
    """Lists of words in a YAML or JSON text, or in a line of a Dockerfile."""
    is_data = suffix in DATA or re.match(r"\s*(\{|\[\s*[\"{\[])", text)
    image = None if is_data else next(iter(re.findall(r"(?m)^FROM\s+(\S+)", text)), None)
    for part in [text] if is_data else LISTS.findall(re.sub(*REWRITTEN[0], text))[:MOST_LINES]:
        try:
            if suffix in DATA[:2] and any(isinstance(token, yaml.AliasToken) for token in yaml.scan(part)):
                raise UsageError("--serve", "YAML without aliases", "an alias", "write the value itself")
            value = yaml.safe_load(part) if suffix in DATA[:2] else json.loads(part)
        except (json.JSONDecodeError, yaml.YAMLError, RecursionError) as error:
            raise UsageError("--serve", "JSON or YAML", " ".join(str(error).split())[:160]) from None
        yield from _lists_in(value if is_data else {"image": image, "command": value})


def _lists_in(value: Any, depth: int = 0) -> Iterator[list[str]]:
    """Lists of words in data: lists as they are, a text split, command with args, and arguments by name as flags."""
    if depth > 32:
        raise UsageError("--serve", "data nested at most 32 deep", "more")
    if isinstance(value, str):
        yield from _commands(value)
    elif isinstance(value, list):
        if value and all(isinstance(word, str | int | float) for word in value):
            yield [str(word) for word in value]
        for inner in value:  # also the text of sh -c
            yield from _lists_in(inner, depth + 1)
    elif isinstance(value, Mapping):
        command = " ".join(filter(None, [_text(value.get(key)) for key in ("command", "args")]))
        of_image = " ".join([str(value.get("image")), *command.splitlines()])  # options of the image's program
        lists = ([argv for argv in _commands(text) if _line(argv)] for text in (command, of_image))
        yield from (lines := next(filter(None, lists), []))
        rest = {key: inner for key, inner in value.items() if not lines or key not in ("image", "command", "args")}
        flags = {"--" + re.sub(r"(?<=[a-z])(?=[A-Z])|_", "-", str(key).lstrip("-")).lower(): key for key in rest}
        if flags.keys() & TELLING.keys():
            yield [word for flag, key in flags.items() for word in _as_flag(flag, rest[key])]
        else:
            for inner in rest.values():
                yield from _lists_in(inner, depth + 1)


def _text(command: Any) -> str:
    """A command as text: a list with quotes, except about a script of its own, as after sh -c."""
    if not isinstance(command, list):
        return command if isinstance(command, str) else ""
    texts = [str(word) for word in command]
    scripts = [text for text in texts if len(texts) == 1 or (" " in text and re.search(NAMES, text))]
    return scripts[0] if scripts else shlex.join(texts)


def _as_flag(flag: str, value: Any) -> list[str]:
    if isinstance(value, bool) or value is None:
        return [flag] * bool(value)
    if flag in ("--extra-args", "--args") and isinstance(value, list):
        return [str(word) for word in value]
    return [flag, json.dumps(value) if isinstance(value, dict | list) else str(value)]


# ---- calls of Python ---------------------------------------------------------------------------------------------------
def _calls(text: str, variables: Mapping[str, str], pinned: Mapping[str, str]) -> Iterator[Line]:
    """Lines of calls of Python. A name that has one literal value in the text stands for it; others become variables."""
    values = _assigned(text)
    for start in islice(re.finditer(rf"\b(?:{'|'.join(CALLS.values())})\(", text), MOST_LINES):
        engine = next(engine for engine, calls in CALLS.items() if re.fullmatch(calls, start[0][:-1]))
        depths = accumulate({"(": 1, ")": -1}.get(sign, 0) for sign in text[start.end() - 1 : start.end() + NEAR])
        length = next((n for n, depth in enumerate(depths) if depth == 0), 0)
        try:
            call = ast.parse(text[start.start() : start.end() + length], mode="eval").body
            assert isinstance(call, ast.Call)
            options = [str(_value(name, values)) for name in call.args[:1]]
            for argument in call.keywords:
                value = _value(argument.value, values)
                if argument.arg is None and not isinstance(value, dict):
                    options.append(value.replace("}", "[@]}"))
                    continue
                for key, inner in ({argument.arg: value} if argument.arg else value).items():
                    options += _as_flag(f"--{str(key).replace('_', '-')}", inner)
        except (SyntaxError, ValueError, TypeError, AttributeError, AssertionError, RecursionError, MemoryError):
            continue
        yield Line(engine, (start[0],), tuple(options), variables, pinned.get(engine))


def _assigned(text: str) -> dict[str, Any]:
    """Names with a literal value in a Python text; those with several values have none."""
    try:
        assigned = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Assign)]
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return {}
    names = [ast.unparse(node.targets[0]) for node in assigned]
    single = {name: node.value for name, node in zip(names, assigned, strict=True) if names.count(name) == 1}
    return {name: value for name, node in single.items() if not str(value := _value(node, {})).startswith("$")}


def _value(node: ast.expr, values: Mapping[str, Any]) -> Any:
    """A literal, also within json.dumps; else "${...}", as the shell writes a variable."""
    if isinstance(node, ast.Call) and ast.unparse(node.func) == "json.dumps" and len(node.args) == 1:
        return _value(node.args[0], values)
    try:
        return ast.literal_eval(node)
    except ValueError:
        source = ast.unparse(node)
        return values.get(source, f"${{{source}}}")
