"""Options of `longitude measure` and their checks. Importing this loads neither torch nor transformers."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Annotated, Any, Literal

from tyro.conf import arg

from longitude.errors import UsageError, Within, check_bounds, check_sizes
from longitude.runs.machine import Device

SAME_TARGETS = "same-targets"
Method = Literal["non-overlapping", "sliding", "per-position", "same-targets"]
METHODS: tuple[Method, ...] = ("non-overlapping", "sliding", "per-position")
"""The default of --methods."""
TARGETS = 256
"""Default of --targets, but at most half of the shortest window."""
Task = Literal[
    "perplexity", "passkey", "needle-filler", "needle-single", "needle-multi-key", "needle-multi-value",
    "needle-multi-query", "needle-city", "needle-country", "variable-tracking", "common-words", "frequent-words",
]  # fmt: skip
OF_PERPLEXITY = ("text", "documents", "methods", "stride", "targets")
"""Options that only perplexity uses."""
OF_QUESTIONS = ("trials", "depths", "thinking", "chat")
"""Options that only tasks of retrieval use."""
PERPLEXITY = "perplexity"
"""The task of losses."""
BOS = Literal["tokenizer", "always", "never"]
DType = Literal["float32", "bfloat16", "float16", "float64"]


@dataclass(frozen=True, kw_only=True)
class MeasureConfig:
    """The same text and the same questions for every model, at every length."""

    lengths: tuple[int, ...] = (512, 1024, 2048)
    """Lengths in tokens, ascending. The length that a model was trained at is measured too, unless all of these are shorter."""
    trained: Annotated[
        bool,
        arg(help="Leave out the length that a model was trained at, unless --lengths names it.", help_behavior_hint=""),
    ] = True
    """Measure the length that a model was trained at, too."""
    tasks: tuple[Task, ...] = (PERPLEXITY,)
    """perplexity, and tasks of retrieval."""
    text: str = "stdlib"
    """Text for perplexity: "stdlib" (the sources of Python's standard library), a file, a folder, or "datasets:NAME"."""
    documents: Annotated[int, Within(1)] = 20
    """Maximum number of documents to measure perplexity on; each gives as many tokens as the longest length."""
    methods: tuple[Method, ...] = METHODS
    """Ways to measure perplexity."""
    stride: Annotated[int | None, Within(1)] = None
    """Step of sliding windows in tokens, at most the shortest length; by default half of each window."""
    targets: Annotated[int | None, Within(1)] = None
    """With --methods same-targets: tokens scored at the end of each document; by default 256, or half the shortest length."""
    depths: tuple[float, ...] = (0.0, 0.25, 0.5, 0.75, 1.0)
    """Depths of a single needle, 0 (first) to 1 (last), for tasks that have one."""
    trials: Annotated[int, Within(1)] = 10
    """Questions per length and depth."""
    chat: Annotated[
        bool, arg(help="Ask in plain text; do not apply the tokenizer's chat template.", help_behavior_hint="")
    ] = True
    """Ask in the tokenizer's chat template, if it has one; --no-chat asks in plain text."""
    bos: BOS = "tokenizer"
    """Beginning-of-sequence token at the start of each window and prompt: as the tokenizer does, always, or never."""
    dtype: DType | None = None
    """Data type of the weights in memory; by default as they are saved."""
    device: Device = "auto"
    """Device; auto is an accelerator if there is one."""
    batch: Annotated[int, Within(1)] = 1024
    """Tokens of short windows per forward pass."""
    chunk: Annotated[int, Within(1)] = 1024
    """Tokens of a long window per forward pass."""
    seed: Annotated[int, Within(0, 2**32 - 1)] = 0
    """Random seed of the retrieval questions, and of the resampling for intervals."""
    endpoint: str | None = None
    """Address of an OpenAI-compatible server to measure instead of MODEL; OPENAI_API_KEY is sent if it is set."""
    model: str | None = None
    """With --endpoint: the server's name of the model."""
    tokenizer: str | None = None
    """With --endpoint: folder or name of the model's tokenizer, in whose tokens lengths are; perplexity needs it."""
    concurrency: Annotated[int, Within(1)] = 4
    """With --endpoint: number of parallel requests."""
    thinking: Annotated[int, Within(0)] = 0
    """With --endpoint: tokens for thinking before an answer, in addition to the length; only the answer is scored."""


def require_consistent(config: MeasureConfig) -> None:
    """ValueError for options that are wrong for every text and model."""
    check_ascending("--lengths", config.lengths, 2)
    check_ascending("--depths", config.depths, 0, 1)
    check_each_once("--tasks", config.tasks)
    check_bounds(config)
    check_methods("--", config.lengths, config.methods, config.stride, config.targets)
    served = ("model", "tokenizer", "concurrency", "thinking")
    local = ("dtype", "device", "batch", "chunk")
    for name in served if config.endpoint is None else local:
        if (value := getattr(config, name)) != getattr(MeasureConfig, name):
            needed = "a checkpoint, without --endpoint" if config.endpoint else "--endpoint, a server"
            raise UsageError(f"--{name.replace('_', '-')}", f"this option only with {needed}", value, "leave it out")
    if config.endpoint is not None and not config.model:
        raise UsageError("--endpoint", "--model NAME, the server's name of the model", "none")
    if config.endpoint and config.bos != "tokenizer" and config.chat and {*config.tasks} != {PERPLEXITY}:
        raise UsageError("--bos", "tokenizer: in a chat, the server begins the prompt", config.bos, "add --no-chat")
    if config.thinking and not config.chat:
        raise UsageError("--thinking", "questions in a chat", "--no-chat", "leave one of them out")
    require_read(config)


def require_read(config: MeasureConfig) -> None:
    """ValueError for options that no part of the measurement reads."""
    unread: dict[str, str] = {}
    if PERPLEXITY not in config.tasks:
        unread |= dict.fromkeys(OF_PERPLEXITY, "perplexity among --tasks, which reads the text")
    if {*config.tasks} == {PERPLEXITY}:
        unread |= dict.fromkeys(OF_QUESTIONS, "a task with questions among --tasks, such as passkey")
    for name, expected in unread.items():
        if getattr(config, name) != getattr(MeasureConfig, name):
            option = f"--{'no-' * (name == 'chat')}{name.replace('_', '-')}"
            raise UsageError(option, expected, listed(config.tasks), "add it, or leave this out")


def check_ascending(name: str, values: Sequence[float], low: float, high: float = math.inf) -> None:
    """ValueError unless there are values, from low to high, each above the one before."""
    if not values or not low <= min(values) <= max(values) <= high or any(a >= b for a, b in pairwise(values)):
        limits = f"from {low}" if high == math.inf else f"from {low} to {high}"
        raise UsageError(name, f"one or more numbers {limits}, ascending without repeats", listed(values))


def check_methods(
    prefix: str, lengths: Sequence[int], methods: Sequence[str], stride: int | None, targets: int | None
) -> None:
    """UsageError for methods that repeat, and for a stride or targets that no method reads or that exceed the shortest length.

    prefix: "--" for options of the command line.
    """
    check_each_once(f"{prefix}methods", methods)
    for name, number, method in (("stride", stride, "sliding"), ("targets", targets, SAME_TARGETS)):
        if number is not None and method not in methods:
            raise UsageError(f"{prefix}{name}", f"{method!r} among {prefix}methods", listed(methods), "add it")
        if number is not None and number > lengths[0]:
            expected = f"1 to {lengths[0]}, the shortest of {prefix}lengths"
            raise UsageError(f"{prefix}{name}", expected, number, "text between the windows would not be scored")


def check_each_once(name: str, values: Sequence[str]) -> None:
    """ValueError unless there are values, all different."""
    if not values or len({*values}) < len(values):
        raise UsageError(name, "at least one name, and each once", listed(values))


def checked_lengths(lengths: Sequence[int]) -> list[int]:
    """Check lengths for functions that measure. ValueError unless they are ascending integers from 1."""
    lengths = list(lengths)
    check_sizes("measure", **{f"lengths[{i}]": length for i, length in enumerate(lengths)})
    check_ascending("lengths", lengths, 1)
    return lengths


def with_trained(lengths: Iterable[int], trained: Iterable[int | None]) -> list[int]:
    """Lengths in order, with the training lengths that are below the longest of them."""
    longest = max(lengths)
    return sorted({*lengths, *(length for length in trained if length is not None and length < longest)})


def as_json(config: MeasureConfig) -> dict[str, Any]:
    """Option -> value, in the order of the fields, as JSON has them."""
    return {name: list(value) if isinstance(value, tuple) else value for name, value in asdict(config).items()}


def listed(values: Iterable[Any]) -> str:
    """Values as they stand on the command line."""
    return " ".join(map(str, values)) or "none"
