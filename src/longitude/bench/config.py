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
    """Turns; each calls everything once, and medians are of turns."""
    no_memory: bool = False
    """Leave out the memory of forward and backward at the longest length, which takes a process for each (Linux)."""
    no_peers: bool = False
    """Leave out other libraries: what is installed of x-transformers, rotary-embedding-torch and transformers."""

    @property
    def clock(self) -> str:
        return "processor" if self.cpu_time else "wall"


def checked(config: BenchConfig) -> BenchConfig:
    """The configuration with "all" spelled out, after every check that allocates nothing. ValueError for the user."""
    for name in ("batch", "heads", "kv_heads", "head_dim", "threads", "repeats"):
        value = getattr(config, name)
        if value is not None and value < 1:
            raise ValueError(f"{option(name)} must be at least 1, got {value}")
    if config.heads % (config.kv_heads or config.heads):
        raise ValueError(f"--kv-heads must divide --heads, got {config.kv_heads} and {config.heads}")
    if not config.lengths or min(config.lengths) < 1:
        raise ValueError(f"--lengths must be positive numbers, got {_words(config.lengths)}")
    if any(a >= b for a, b in pairwise(config.lengths)):
        raise ValueError(f"--lengths must ascend without repeats, got {_words(config.lengths)}; sort them")
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
        import longitude.positions  # noqa: F401  registers them
        from longitude.positions.base import encodings

        config = replace(config, encodings=tuple(encodings()))
    for label in config.encodings:
        parse_encoding(label)
    from longitude.attention.operation import require_backend

    for name in config.backends:
        require_backend(name)
    return config


def checked_for_set(config: BenchConfig) -> BenchConfig:
    """The same for a set of targets, whose rows say what is timed. ValueError for an option that would do nothing."""
    default = BenchConfig()
    for field in fields(config):
        if field.name not in FIXED and getattr(config, field.name) != getattr(default, field.name):
            raise ValueError(
                f"{option(field.name)} is what the targets of --set say themselves; leave one of the two out"
            )
    return checked(config)


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
