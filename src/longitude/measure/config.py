"""What `longitude measure` measures: its options and their checks. Importing this loads neither torch nor transformers."""

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any, Literal, get_args

from longitude.runs.device import Device

Method = Literal["non-overlapping", "sliding", "per-position"]
METHODS: tuple[Method, ...] = get_args(Method)
Task = Literal[
    "perplexity", "passkey", "needle-filler", "needle-single", "needle-multi-key", "needle-multi-value",
    "needle-multi-query", "variable-tracking", "common-words", "frequent-words",
]  # fmt: skip
PERPLEXITY = "perplexity"
DType = Literal["float32", "bfloat16", "float16", "float64"]


@dataclass(frozen=True, kw_only=True)
class MeasureConfig:
    """The same text and the same questions for every model, at every length."""

    lengths: tuple[int, ...] = (512, 1024, 2048)
    """Lengths in tokens, ascending. The length that a model was trained at is measured too, unless all of these are shorter."""
    tasks: tuple[Task, ...] = (PERPLEXITY,)
    """perplexity, and tasks of retrieval."""
    text: str = "stdlib"
    """Text for perplexity: "stdlib" (the sources of Python's standard library), a file, a folder, or "datasets:NAME"."""
    documents: int = 20
    """Documents to measure perplexity on, at most; each gives as many tokens as the longest length."""
    tokens: int | None = None
    """Tokens of text to measure perplexity on, at most: fewer documents, never shorter ones."""
    methods: tuple[Method, ...] = METHODS
    """Ways to measure perplexity."""
    stride: int | None = None
    """Step of sliding windows in tokens, at most the shortest length; by default half of each window."""
    depths: tuple[float, ...] = (0.0, 0.25, 0.5, 0.75, 1.0)
    """Where a single needle is, 0 (first) to 1 (last), for tasks that have one."""
    trials: int = 10
    """Questions per length and depth."""
    dtype: DType | None = None
    """Of the weights in memory; by default as they are saved."""
    device: Device = "auto"
    """auto is an accelerator where there is one."""
    batch: int = 8192
    """Tokens of short windows that are read together."""
    chunk: int = 1024
    """Tokens of a long window that are read at once, before the model continues with its cache."""
    seed: int = 0
    """Of the questions of retrieval; of the resampling behind intervals."""
    allow_pickle: bool = False
    """Load weights that are saved as a pickle, from a source you trust."""


def require_consistent(config: MeasureConfig) -> None:
    """ValueError for options that are wrong whatever text and model are."""
    for name in ("documents", "tokens", "trials", "batch", "chunk"):
        value = getattr(config, name)
        if value is not None and value < 1:
            raise ValueError(f"--{name} must be at least 1, got {value}")
    for name in ("methods", "tasks"):
        given = getattr(config, name)
        if not given or len({*given}) < len(given):
            raise ValueError(f"--{name} must name at least one, and each once, got {words(given) or 'none'}")
    if not config.lengths or min(config.lengths) < 2:
        raise ValueError(f"--lengths must be numbers of tokens from 2, got {words(config.lengths) or 'none'}")
    if any(a >= b for a, b in pairwise(config.lengths)):
        raise ValueError(f"--lengths must ascend without repeats, got {words(config.lengths)}; sort them")
    if config.tokens is not None and config.tokens < config.lengths[-1]:
        raise ValueError(f"--tokens must be at least the longest length {config.lengths[-1]}, got {config.tokens}")
    if config.stride is not None and not 1 <= config.stride <= config.lengths[0]:
        raise ValueError(f"--stride must be 1 to the shortest length {config.lengths[0]}, got {config.stride}")
    if not 0 <= config.seed < 2**32:
        raise ValueError(f"--seed must be from 0 to 2^32 - 1, got {config.seed}")
    if list(config.depths) != sorted(set(config.depths)) or not all(0 <= depth <= 1 for depth in config.depths):
        raise ValueError(f"--depths must ascend from 0 to 1 without repeats, got {words(config.depths)}")


def with_trained(lengths: Iterable[int], trained: Iterable[int | None]) -> list[int]:
    """Lengths in order, and those of training among them, as long as a longer one is measured."""
    longest = max(lengths)
    return sorted({*lengths, *(length for length in trained if length is not None and length < longest)})


def as_json(config: MeasureConfig) -> dict[str, Any]:
    """Option -> value, in the order of the fields, as JSON has them."""
    return {name: list(value) if isinstance(value, tuple) else value for name, value in asdict(config).items()}


def words(values: Any) -> str:
    return " ".join(map(str, values)) if isinstance(values, list | tuple) else str(values)
