"""Options of `longitude bench` and their checks. Importing this loads neither torch nor transformers."""

from dataclasses import dataclass, replace
from typing import Annotated, Literal

from longitude.errors import Within, check_bounds
from longitude.labels import parse_encoding
from longitude.measure.config import DType, check_ascending, check_each_once
from longitude.study.config import option, with_all

Pass = Literal["forward", "forward+backward"]


@dataclass(frozen=True, kw_only=True)
class BenchConfig:
    """Every encoding, backend and length on the same tensors, compared with plain causal attention in the same process."""

    encodings: tuple[str, ...] = ("all",)
    """Encodings to time: names (see `longitude list`), variants such as "rope:base=500000", compositions such as rope+fox,
    or "all"."""
    lengths: tuple[int, ...] = (1024, 2048)
    """Lengths of queries and keys, ascending."""
    backends: tuple[str, ...] = ("auto",)
    """Backends to time each encoding on; auto is the cheapest that supports it."""
    batch: Annotated[int, Within(1)] = 1
    """Number of sequences."""
    heads: Annotated[int, Within(1)] = 8
    """Number of query heads."""
    kv_heads: Annotated[int | None, Within(1)] = None
    """Number of key and value heads, which must divide --heads; by default as many."""
    head_dim: Annotated[int, Within(1)] = 64
    """Width of a head."""
    dtype: DType = "float32"
    """Data type of all tensors."""
    passes: tuple[Pass, ...] = ("forward", "forward+backward")
    """forward, forward+backward, or both."""
    threads: Annotated[int | None, Within(1)] = None
    """Threads of torch; by default torch's own number, one per core."""
    cpu_time: bool = False
    """Count processor seconds instead of wall-clock seconds: for a busy machine, with --threads 1."""
    repeats: Annotated[int, Within(1)] = 7
    """Number of turns; each calls every case once, and medians are over turns."""
    no_memory: bool = False
    """Do not measure the memory of forward and backward at the longest length, in a process for each case (Linux)."""

    @property
    def clock(self) -> str:
        return "processor" if self.cpu_time else "wall"


def checked(config: BenchConfig) -> BenchConfig:
    """The configuration with "all" resolved, after every check that allocates nothing. ValueError for the user."""
    check_bounds(config)
    if config.heads % (config.kv_heads or config.heads):
        raise ValueError(f"--kv-heads must divide --heads, got {config.kv_heads} and {config.heads}")
    check_ascending("--lengths", config.lengths, 1)
    for name in ("encodings", "backends", "passes"):
        check_each_once(option(name), getattr(config, name))
    from longitude.attention.operation import require_backend
    from longitude.positions.base import list_encodings

    for name in config.backends:
        require_backend(name)
    config = replace(config, encodings=with_all(config.encodings, list_encodings))
    for label in config.encodings:
        parse_encoding(label)
    return config
