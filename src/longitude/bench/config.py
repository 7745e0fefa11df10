"""What is measured: the options of `longitude bench` and their checks. Importing this loads neither torch nor transformers."""

import os
from dataclasses import dataclass, fields, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from longitude.errors import unknown
from longitude.study.config import option, parse_encoding

DTYPES = ("float32", "bfloat16", "float16", "float64")
PASSES = ("forward", "forward+backward")
FIXED = ("threads", "cpu_time", "repeats", "no_memory", "no_peers")
"""Options that a set of targets leaves open; its rows say everything else."""
OF_DECODING = ("contexts", "mixers")
TURNS_OF_DECODING = 5
"""A step of decoding is short: so many turns for each of --repeats."""


@dataclass(frozen=True, kw_only=True)
class BenchConfig:
    """Every encoding, backend and length on the same work, with plain causal attention beside it in the same process."""

    encodings: tuple[str, ...] = ("all",)
    """Encodings to time: names (see `longitude list`), variants such as "rope:base=500000", compositions such as rope+fox,
    or "all"."""
    lengths: tuple[int, ...] = (1024, 2048)
    """Lengths of queries and keys, ascending."""
    backends: tuple[str, ...] = ("auto",)
    """Backends to time each encoding on; auto is the cheapest that takes it."""
    batch: int = 1
    """Sequences."""
    heads: int = 8
    """Heads of queries."""
    kv_heads: int | None = None
    """Heads of keys and values, which divide the heads of queries; by default as many."""
    head_dim: int = 64
    """Width of a head."""
    dtype: str = "float32"
    """float32, bfloat16, float16 or float64."""
    passes: tuple[str, ...] = PASSES
    """forward, forward+backward, or both."""
    threads: int | None = None
    """Threads of torch; by default as many as it takes by itself, one per core."""
    cpu_time: bool = False
    """Count processor seconds instead of wall-clock seconds: for a busy machine, with --threads 1."""
    repeats: int = 7
    """Turns; each calls everything once, and medians are of turns. --decode takes five times as many."""
    no_memory: bool = False
    """Leave out the memory of forward and backward at the longest length, which takes a process for each (Linux)."""
    no_peers: bool = False
    """Leave out other libraries: what is installed of x-transformers, rotary-embedding-torch and transformers."""
    contexts: tuple[int, ...] = (512, 1024, 2048, 4096, 8192, 16384, 32768)
    """Of --decode: tokens in the cache, ascending."""
    mixers: tuple[str, ...] = ("all",)
    """Of --decode: mixers as a study names its models (rope+window, mamba, mamba+attention), or "all"."""

    @property
    def clock(self) -> str:
        return "processor" if self.cpu_time else "wall"


def checked(config: BenchConfig) -> BenchConfig:
    """The configuration with "all" spelled out, after every check that allocates nothing. ValueError for the user."""
    _only(
        config,
        {field.name for field in fields(config)} - {*OF_DECODING},
        "is of decoding: add --decode, or leave it out",
    )
    return _checked(config)


def _checked(config: BenchConfig) -> BenchConfig:
    for name in ("batch", "heads", "kv_heads", "head_dim", "threads", "repeats"):
        value = getattr(config, name)
        if value is not None and value < 1:
            raise ValueError(f"{option(name)} must be at least 1, got {value}")
    if config.heads % (config.kv_heads or config.heads):
        raise ValueError(f"--kv-heads must divide --heads, got {config.kv_heads} and {config.heads}")
    _ascending("lengths", config.lengths)
    if config.dtype not in DTYPES:
        raise unknown("dtype", config.dtype, DTYPES, "--dtype takes one of them.")
    for name in ("encodings", "backends", "passes"):
        given = getattr(config, name)
        if not given or len({*given}) < len(given):
            raise ValueError(f"{option(name)} must name at least one, and each once, got {_words(given) or 'none'}")
    for one in config.passes:
        if one not in PASSES:
            raise unknown("pass", one, PASSES, "--passes takes one or both.")
    if "all" in config.encodings:
        if len(config.encodings) > 1:
            raise ValueError(f"--encodings is either all or a list of names, got {_words(config.encodings)}")
        from longitude.positions.base import list_encodings

        config = replace(config, encodings=tuple(list_encodings()))
    for label in config.encodings:
        parse_encoding(label)
    from longitude.attention.operation import require_backend

    for name in config.backends:
        require_backend(name)
    return config


def checked_for_set(config: BenchConfig, asked: str = "--set") -> BenchConfig:
    """The same for a set of targets, whose rows say what is timed. ValueError for an option that would do nothing."""
    _only(config, {*FIXED}, f"is what the targets of {asked} say themselves; leave one of the two out")
    return _checked(config)


def checked_for_decoding(config: BenchConfig) -> BenchConfig:
    """The same for --decode. ValueError for an option that would do nothing, and for a label that names no model."""
    own = (*OF_DECODING, "threads", "cpu_time", "repeats")
    _only(config, {*own}, f"is not of decoding: --decode takes {', '.join(map(option, own))}")
    _checked(config)
    _ascending("contexts", config.contexts)
    if not config.mixers or len({*config.mixers}) < len(config.mixers):
        raise ValueError(f"--mixers must name at least one, and each once, got {_words(config.mixers) or 'none'}")
    if "all" in config.mixers:
        if len(config.mixers) > 1:
            raise ValueError(f"--mixers is either all or a list of labels, got {_words(config.mixers)}")
        from longitude.bench.decode import all_labels

        return replace(config, mixers=all_labels())
    from longitude.bench.decode import configuration

    for label in config.mixers:
        try:
            configuration(label, config.contexts[-1])
        except ValueError as error:
            raise ValueError(f"--mixers {label}: {error}") from error
    return config


def _only(config: BenchConfig, allowed: set[str], why: str) -> None:
    """ValueError where an option outside `allowed` was given."""
    default = BenchConfig()
    for field in fields(config):
        if field.name not in allowed and getattr(config, field.name) != getattr(default, field.name):
            raise ValueError(f"{option(field.name)} {why}")


def _ascending(name: str, values: tuple[int, ...]) -> None:
    if not values or min(values) < 1:
        raise ValueError(f"{option(name)} must be positive numbers, got {_words(values) or 'none'}")
    if any(a >= b for a, b in pairwise(values)):
        raise ValueError(f"{option(name)} must ascend without repeats, got {_words(values)}; sort them")


def require_place(out: Path) -> None:
    """ValueError unless a JSON can be written there: better now than after minutes of measuring."""
    if out.suffix != ".json" or out.is_dir():
        raise ValueError(f"--out: expected a file that ends in .json, got {out}")
    parent = out.absolute().parent
    while not parent.exists():
        parent = parent.parent
    if not parent.is_dir() or not os.access(parent, os.W_OK):
        raise ValueError(f"--out {out}: {parent} is not a directory that can be written to; choose another --out")


def as_dict(config: BenchConfig) -> dict[str, Any]:
    """Option -> value, in the order of the fields."""
    return {field.name: getattr(config, field.name) for field in fields(config)}


def _words(values: Any) -> str:
    return " ".join(str(value) for value in values)
