"""A line that serves a model, found in text and split into words. Nothing in it is executed or expanded."""

from __future__ import annotations

import ast
import json
import os
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from itertools import accumulate, islice, product
from pathlib import Path, PurePosixPath
from typing import Any

import yaml

from longitude.errors import UsageError, unknown
from longitude.runs.files import read_text

LARGEST = 2**20
"""Maximum bytes of a file that has lines."""
MOST_WORDS = 2000
ENGINES = {
    "vllm": "vLLM",
    "sglang": "SGLang",
    "llama.cpp": "llama.cpp",
    "transformers": "transformers",
    "mlx": "mlx-lm",
}
"""Names for options, and names in sentences."""
PROGRAMS = {
    r"vllm serve": "vllm",
    r"-m (vllm\.entrypoints\.(openai\.)?api_server|dynamo\.vllm)": "vllm",
    r"(docker\.io/)?vllm/vllm-openai(:\S*)?": "vllm",
    r"sglang serve": "sglang",
    r"-m (sglang\.launch_server|dynamo\.sglang)": "sglang",
    r"llama-(server|cli|completion)(\.exe)?": "llama.cpp",
    r"ghcr\.io/[\w-]+/llama\.cpp:server[\w.-]*": "llama.cpp",
    r"transformers serve": "transformers",
    r"(-m )?mlx_lm(\.| )(server|generate|chat)": "mlx",
}
NAMES = "|".join(PROGRAMS)
"""First words of a line, as an expression, and the engine that they start."""
BEFORE = re.compile(r"[A-Za-z_]\w*=.*|sudo|env|exec|nohup|time|run|then|else|do|(ba)?sh|python[\d.]*|\$|-\w?")
CONTAINERS = {*"docker podman kubectl srun apptainer FROM conda uv uvx numactl taskset timeout".split()}
"""Words that may stand before a program; after those of CONTAINERS any words may."""
CALLS = {
    r"(?:vllm\.)?(?:LLM|(?:Async)?EngineArgs)": "vllm",
    r"(?:sglang|sgl)\.Engine": "sglang",
    r"Auto(?:Model|Config)\w*\.from_pretrained": "transformers",
    r"mlx_lm\.load": "mlx",
}
"""Functions of Python, as an expression, and the engine that they start."""
NEAR, MOST_LINES = 20_000, 50
"""Characters of a line that are read, and lines of a text."""
TELLING = {
    "--max-model-len": "vllm", "--hf-overrides": "vllm", "--context-length": "sglang", "--json-model-override-args": "sglang",
    "--rope-scaling": "llama.cpp", "--yarn-orig-ctx": "llama.cpp", "--ctx-size": "llama.cpp",
}  # fmt: skip
"""Flags that tell the engine of arguments without a program."""
DATA = (".yaml", ".yml", ".json")
LISTS = re.compile(r"(?m)^\s*(?:CMD|ENTRYPOINT)\s*(\[.*\])\s*$")
"""Endings of files of data; and the list of words in a line of a Dockerfile."""
PREFIX = r"^\s*(ExecStart=|CMD |RUN |ENTRYPOINT |(- )?\w+: *[|>]?|- |\d+\. |#+ |@)\s*"
"""Signs before a command, of a unit of systemd, a Dockerfile, YAML, Markdown or a Makefile."""
REWRITTEN = (
    (r"(?:\\|[ \t][`^])\r?\n[ \t]*(?:> )?", " "),  # lines continued in sh, PowerShell, cmd, and after a prompt
    (r"(?<=\S)[ \t]+# [^\n]*", ""),  # comments
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
        engine: A key of ENGINES.
        start: The words before the options: programs and variables.
        options: The words after them.
        variables: Variables of the environment with their values.
        release: The release of the engine that the text pins, if it pins one.
    """

    engine: str
    start: tuple[str, ...]
    options: tuple[str, ...]
    variables: Mapping[str, str] = field(default_factory=dict)
    release: str | None = None

    @property
    def name(self) -> str:
        return ENGINES[self.engine]

    @property
    def flags(self) -> list[tuple[str, str | None]]:
        """(flag, value) in their order; None for a flag without a value, and the flag "" for other words."""
        flags: list[tuple[str, str | None]] = []
        words = [*self.options]
        while words:
            word = words.pop(0)
            if not is_flag(word):
                flags.append(("", word))
            elif word.startswith("--") and "=" in word:
                flags.append((word.partition("=")[0], word.partition("=")[2]))
            else:
                flags.append((word, words.pop(0) if words and not is_flag(words[0]) else None))
        return flags

    @property
    def model(self) -> str | None:
        """The model that the line names."""
        named = [value for flag, value in self.flags if flag in MODEL]
        return next(filter(None, [*named, *(value for flag, value in self.flags if flag == "")]), None)

    @property
    def unseen(self) -> list[str]:
        """Words that a shell replaces by flags: arrays, and variables beside the model."""
        plain = [str(value) for flag, value in self.flags if flag == ""]
        plain = plain if any(flag in MODEL for flag, _ in self.flags) else plain[1:]
        pairs = zip(["", *plain], plain, strict=False)
        beside = [word for before, word in pairs if word.startswith(("$", "{{")) and before not in (">", ">>", "<")]
        arrays = [value for _, value in self.flags if value and re.search(r"\$@|\[@\]", value)]
        return [*dict.fromkeys(beside + arrays)]

    def lifts(self, variable: str) -> bool:
        """Whether a variable of the environment is set to yes."""
        return self.variables.get(variable, "0").lower() in ("1", "true")


def is_flag(word: str) -> bool:
    return bool(re.match(r"--?[A-Za-z]", word))


def lines_of(text_or_file: str) -> list[Line]:
    """The lines in a text, or in the file of this name. UsageError if there are none, or one cannot be split."""
    place = Path(text_or_file)
    text, suffix = text_or_file, ""
    if os.path.lexists(text_or_file):
        text, suffix = read_text(place, "give a smaller file", links=True, limit=LARGEST), place.suffix
    elif " " not in text_or_file.strip():
        raise UsageError("--serve", "a line that serves a model, or a file with one", repr(text_or_file))
    return lines_in(text, suffix)


def lines_in(text: str, suffix: str = "") -> list[Line]:
    """`lines_of` for a text. suffix: that of its file."""
    around = dict(ANSWERS.findall(text)), dict(PINNED.findall(text))
    lines = [line for words in _lists(text, suffix) if (line := _line(words, *around, loose=True))]
    if suffix not in DATA or not lines:
        lines += [line for words in _commands(text) if (line := _line(words, *around))]
    lines += _calls(text, *around)
    distinct = {(line.engine, line.options): line for line in lines if line.options}  # a name alone is a mention
    if not distinct:
        expected = f"a line that starts {', '.join(ENGINES.values())}"
        raise UsageError("--serve", expected, repr(text[:60]), "such as `vllm serve MODEL`")
    return [*distinct.values()]


def _line(
    words: Sequence[str], variables: Mapping[str, str], pinned: Mapping[str, str], loose: bool = False
) -> Line | None:
    """The line in these words; None if they start no engine. loose: flags alone are a line, too."""
    if not words:
        return None
    if len(words) > MOST_WORDS:
        raise UsageError("--serve", f"at most {MOST_WORDS} words", len(words))
    plain = [PurePosixPath(word).name if re.match(r"[.~]*/|[\w./-]*bin/", word) else word for word in words]
    for start in range(len(words)):
        for (program, engine), count in product(PROGRAMS.items(), (1, 2, 3)):
            if re.fullmatch(program, " ".join(plain[start : start + count])):
                here = dict(word.split("=", 1) for word in words[:start] if re.match(r"\w+=", word))
                here, end = {**variables, **here}, start + count
                options = (*(_flags_of(here) if engine == "llama.cpp" else ()), *words[end:])
                return Line(engine, tuple(words[:end]), options, here, pinned.get(engine))
        if not CONTAINERS & {*plain[: start + 1]} and not BEFORE.fullmatch(plain[start]):
            break
    engine = next((TELLING[flag] for word in words if (flag := word.partition("=")[0]) in TELLING), None)
    return Line(engine, (), tuple(words), variables, pinned.get(engine)) if loose and engine is not None else None


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
        for words in _split(re.sub(PREFIX, "", text[start.start() : start.start() + NEAR])):
            yield words
            if words and _line(words, {}, {}) is None:
                for word in words:
                    yield from _commands(word) if " " in word else ()


def _split(text: str) -> Iterator[list[str]]:
    """The words of each command in the first line of a text. UsageError for an engine's command with an open quote."""
    lexer = shlex.shlex(text, posix=True, punctuation_chars=";&|\n")
    lexer.whitespace, lexer.whitespace_split, lexer.commenters = " \t\r", True, ""
    words: list[str] = []
    try:
        for word in lexer:
            if not {*word} <= {*";&|\n"}:
                words.append(word)
                continue
            yield words
            if "\n" in word:
                return
            words = []
    except ValueError as error:
        if words and _line(words, {}, {}) is not None:  # else an apostrophe in a sentence
            raise UsageError("--serve", "a line with closed quotes", str(error), "close them") from None
    yield words


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
        yield from _words(value if is_data else {"image": image, "command": value})


def _words(value: Any, depth: int = 0) -> Iterator[list[str]]:
    """Lists of words in data: lists as they are, command with args, a text split, and a dict of arguments as flags."""
    if depth > 32:
        raise UsageError("--serve", "data nested at most 32 deep", "more")
    if isinstance(value, str):
        yield from _commands(value)
    elif isinstance(value, Mapping):
        parts = [_text(value.get(key)) for key in ("command", "args")]
        alone = " ".join(filter(None, parts))
        for text in (
            alone,
            " ".join([str(value.get("image")), *alone.splitlines()]),
        ):  # else options of the image's program
            if lines := [words for words in _commands(text) if _line(words, {}, {})]:
                yield from lines
                value = {**value, "image": None, "command": None, "args": None}
                break
        flags = {
            "--" + re.sub(r"(?<=[a-z])(?=[A-Z])|_", "-", str(key).lstrip("-")).lower(): v for key, v in value.items()
        }
        if flags.keys() & TELLING.keys():
            yield [word for flag, inner in flags.items() for word in _as_flag(flag, inner)]
        else:
            for inner in value.values():
                yield from _words(inner, depth + 1)
    elif isinstance(value, list):
        if all(isinstance(word, str | int | float) for word in value):
            yield [str(word) for word in value]
        for inner in value:  # also the text of sh -c
            yield from _words(inner, depth + 1)


def _text(words: Any) -> str:
    """A command as text: a list with quotes, except about commands of their own, as after sh -c."""
    if isinstance(words, list) and all(isinstance(word, str | int | float) for word in words):
        commands = [len(words) == 1 or (" " in str(word) and re.search(NAMES, str(word))) for word in words]
        texts = zip(map(str, words), commands, strict=True)
        return " ".join(word if is_command else shlex.quote(word) for word, is_command in texts)
    return words if isinstance(words, str) else ""


def _as_flag(flag: str, value: Any) -> list[str]:
    if isinstance(value, bool) or value is None:
        return [flag] * bool(value)
    if flag in ("--extra-args", "--args") and isinstance(value, list):
        return [str(word) for word in value]
    return [flag, json.dumps(value) if isinstance(value, dict | list) else str(value)]


def _calls(text: str, variables: Mapping[str, str], pinned: Mapping[str, str]) -> Iterator[Line]:
    """Lines of calls of Python. A name that has one literal value in the text stands for it; others become variables."""
    values = _assigned(text)
    for start in islice(re.finditer(rf"\b(?:{'|'.join(CALLS)})\(", text), MOST_LINES):
        engine = next(engine for function, engine in CALLS.items() if re.fullmatch(function, start[0][:-1]))
        depths = accumulate({"(": 1, ")": -1}.get(sign, 0) for sign in text[start.end() - 1 : start.end() + NEAR])
        length = next((n for n, depth in enumerate(depths) if depth == 0), 0)
        try:
            call = ast.parse(text[start.start() : start.end() + length], mode="eval").body
            assert isinstance(call, ast.Call)
            words = [str(_value(name, values)) for name in call.args[:1]]
            for word in call.keywords:
                value = _value(word.value, values)
                if word.arg is None and not isinstance(value, dict):
                    words.append(value.replace("}", "[@]}"))
                for key, inner in ({word.arg: value} if word.arg else value if isinstance(value, dict) else {}).items():
                    words += _as_flag(f"--{str(key).replace('_', '-')}", inner)
        except (SyntaxError, ValueError, TypeError, AssertionError, RecursionError, MemoryError):
            continue
        yield Line(engine, (start[0],), tuple(words), variables, pinned.get(engine))


def _assigned(text: str) -> dict[str, Any]:
    """Names with a literal value in a Python text; those with several values have none."""
    try:
        assigned = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Assign)]
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return {}
    names = [(ast.unparse(node.targets[0]), node.value) for node in assigned]
    single = {name: value for name, value in names if [other for other, _ in names].count(name) == 1}
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


# ---- flags -----------------------------------------------------------------------------------------------------------
def named(line: Line, known: Sequence[str], aliases: Mapping[str, str] | None = None) -> list[tuple[str, str | None]]:
    """The (flag, value) among the known ones, by their whole names; others are not about positions.

    UsageError for a flag that is nearly a known one, or is one of another engine.
    """
    flags, others = [], {flag for flag, engine in TELLING.items() if engine != line.engine} - {*known}
    for flag, value in line.flags:
        name, _, inside = (aliases or {}).get(flag, flag).partition(".")
        name = name.replace("_", "-")
        whole = next((full for full in known if full == name or (len(name) > 8 and full.startswith(name))), None)
        if whole is not None:
            flags.append((f"{whole}.{inside}" if inside else whole, value))
        elif name in others or (name.startswith("--") and get_close_matches(name, known, n=1, cutoff=0.88)):
            raise unknown(f"flag of {line.name}", flag, known, f"its flags about positions: {', '.join(known)}.")
    return flags


def literal(value: str | None, flag: str) -> str:
    """The value of a flag. UsageError if it has none; NotLiteral if a shell would put another in its place."""
    if value is None:
        raise UsageError(flag, "a value", "none")
    if re.search(r"\$[\w({]|\{\{|`", value):
        raise NotLiteral(f"{flag} has a variable, {value[:60]!r}, and nothing is expanded here: write its value")
    return value


def tokens(text: str, flag: str, units: Mapping[str, int], fractional: str) -> int:
    """A number of tokens with a unit, before which those in `fractional` allow a point. UsageError for other text."""
    parts = re.fullmatch(r"(\d+(\.\d+)?)([A-Za-z]*)", text)
    if parts is None or parts[3] not in ("", *units) or (parts[2] and (parts[3] or "?") not in fractional):
        raise UsageError(flag, f"a number of tokens, such as 131072 or 128k (units: {', '.join(units)})", text[:40])
    return int(float(parts[1]) * units.get(parts[3], 1))


class NotLiteral(ValueError):
    """A value is a variable, which cannot be judged."""


def json_of(value: str, flag: str) -> dict[str, Any]:
    """The object of a flag. EatenQuotes if a shell took its quotes; UsageError for other text that is no JSON object."""
    try:
        keys = json.loads(value)
    except RecursionError:
        raise UsageError(flag, "a JSON object", "one that is nested too deeply") from None
    except ValueError as error:
        if value.lstrip().startswith("{") and '"' not in value and "'" not in value and ":" in value:
            raise EatenQuotes(f"{flag} has JSON without quotes, {value[:50]!r}: the shell took them") from None
        raise UsageError(flag, "a JSON object", f"{value[:40]!r} ({error})", "put it in single quotes") from None
    if not isinstance(keys, dict):
        raise UsageError(flag, "a JSON object", value[:40])
    return keys


class EatenQuotes(ValueError):
    """JSON whose quotes a shell has taken."""


def joined(line: Line, drop: Sequence[str], add: Mapping[str, Any]) -> str:
    """The line with other flags about positions: those in `drop` go, those in `add` come, ready to paste."""
    kept: list[tuple[str, Any]] = [
        (flag, value) for flag, value in line.flags if flag.partition(".")[0].replace("_", "-") not in drop
    ]
    if line.start and line.start[0].endswith("("):
        options = {flag[2:].replace("-", "_"): value for flag, value in [*kept, *add.items()] if flag}
        arguments = [repr(value) for flag, value in kept if not flag]
        arguments += [f"{name}={value if _is_literal(value) else repr(value)}" for name, value in options.items()]
        return f"{line.start[0]}{', '.join(arguments)})"
    start = [word for word in line.start if not re.fullmatch(VARIABLES, word.partition("=")[0])]
    words = [word for item in [*kept, *add.items()] for word in item if word not in ("", None)]
    texts = [json.dumps(word) if isinstance(word, dict) else str(word) for word in words]
    return " ".join(map(shlex.quote, [*start, *texts]))


def _is_literal(value: Any) -> bool:
    return isinstance(value, str) and bool(re.fullmatch(r"-?\d+(\.\d+)?|True|False", value))
