"""What `longitude measure` measures: its options and their checks. Importing this loads neither torch nor transformers."""

from collections.abc import Iterable
from dataclasses import dataclass, fields
from itertools import pairwise
from typing import Any

from longitude.errors import unknown

METHODS = ("non-overlapping", "sliding", "per-position")
DTYPES = ("float32", "bfloat16", "float16", "float64")
DEVICES = ("auto", "cpu", "cuda", "mps")
PERPLEXITY = "perplexity"


@dataclass(frozen=True, kw_only=True)
class MeasureConfig:
    """The same text and the same questions for every model, at every length."""

    lengths: tuple[int, ...] = (512, 1024, 2048)
    """Lengths in tokens, ascending. The length that a model was trained at is measured too, unless all of these are shorter."""
    tasks: tuple[str, ...] = (PERPLEXITY,)
    """perplexity, and tasks of retrieval: passkey, needle-filler, needle-single, needle-multi-key, needle-multi-value,
    needle-multi-query, variable-tracking, common-words, frequent-words."""
    text: str = "stdlib"
    """Text for perplexity: "stdlib" (the sources of Python's standard library), a file, a folder, or "datasets:NAME"."""
    documents: int = 20
    """Documents to measure perplexity on, at most; each gives as many tokens as the longest length."""
    tokens: int | None = None
    """Tokens of text to measure perplexity on, at most: fewer documents, never shorter ones."""
    methods: tuple[str, ...] = METHODS
    """Ways to measure perplexity: non-overlapping, sliding, per-position."""
    stride: int | None = None
    """Step of sliding windows in tokens, at most the shortest length; by default half of each window."""
    depths: tuple[float, ...] = (0.0, 0.25, 0.5, 0.75, 1.0)
    """Where a single needle stands, 0 (first) to 1 (last), for tasks that have one."""
    trials: int = 10
    """Questions per length and depth."""
    dtype: str | None = None
    """float32, bfloat16, float16 or float64; by default as the weights are saved."""
    device: str = "auto"
    """auto, cpu, cuda or mps; auto is an accelerator where there is one."""
    batch: int = 8192
    """Tokens of short windows that are read together."""
    piece: int = 1024
    """Tokens of a long window that are read at once, before the model goes on with its cache."""
    seed: int = 0
    """Of the questions of retrieval; of the resampling behind intervals."""
    allow_pickle: bool = False
    """Load weights that are saved as a pickle, from a source you trust."""


def checked(config: MeasureConfig) -> MeasureConfig:
    """The configuration after every check that needs neither text nor model. ValueError for the user."""
    for name in ("documents", "tokens", "trials", "batch", "piece"):
        value = getattr(config, name)
        if value is not None and value < 1:
            raise ValueError(f"--{name} must be at least 1, got {value}")
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
    from longitude.measure.retrieval import TASKS

    for name, given, valid in (("methods", config.methods, METHODS), ("tasks", config.tasks, (PERPLEXITY, *TASKS))):
        if not given or len({*given}) < len(given):
            raise ValueError(f"--{name} must name at least one, and each once, got {words(given) or 'none'}")
        for one in given:
            if one not in valid:
                raise unknown(name[:-1], one, valid, f"--{name} takes any of: {words(valid)}.")
    if config.dtype is not None and config.dtype not in DTYPES:
        raise unknown("dtype", config.dtype, DTYPES, "--dtype takes one of them.")
    if config.device not in DEVICES:
        raise unknown("device", config.device, DEVICES, "--device takes one of them.")
    return config


def with_trained(lengths: Iterable[int], trained: Iterable[int | None]) -> list[int]:
    """Lengths in order, and those of training among them, as long as a longer one is asked for."""
    longest = max(lengths)
    return sorted({*lengths, *(length for length in trained if length is not None and length < longest)})


def as_dict(config: MeasureConfig) -> dict[str, Any]:
    """Option -> value, in the order of the fields."""
    return {field.name: getattr(config, field.name) for field in fields(config)}


def words(values: Any) -> str:
    return " ".join(str(value) for value in values)
