"""One measurement with its protocol."""

from dataclasses import dataclass
from typing import Any

from longitude.bench.clock import Timing

FAILED = "failed"
"""Prefix of a row's note if a measurement raised an error."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """A row of results; numbers that were not measured are None, and note gives the reason.

    group: the target it belongs to, "" for none. kind: "plain", "ours" or "peer". asked: the requested backend. backend: the
    backend that ran. work: description of the work.
    passed: "forward", "forward+backward", or another pass of this work. seconds: median of one call. ratio: to `against`,
    the median over turns, with its quartiles. memory_mib: increase of the peak of a fresh process by forward and backward.
    memory_beyond_mib: memory_mib minus that of attention without bias.
    """

    group: str = ""
    name: str
    kind: str
    asked: str = ""
    backend: str
    work: str = "attention"
    passed: str
    batch: int
    heads: int
    kv_heads: int
    head_dim: int
    length: int
    dtype: str
    seconds: float | None = None
    seconds_low: float | None = None
    seconds_high: float | None = None
    ratio: float | None = None
    ratio_low: float | None = None
    ratio_high: float | None = None
    against: str | None = None
    score: float | None = None
    memory_mib: float | None = None
    memory_beyond_mib: float | None = None
    threads: int
    clock: str
    turns: int
    note: str = ""


def timed(timing: Timing, against: str) -> dict[str, Any]:
    """The fields of a row that a timing gives."""
    seconds, ratio = timing.seconds, timing.ratio
    fields: dict[str, Any] = {"seconds": seconds.median, "seconds_low": seconds.low, "seconds_high": seconds.high}
    if ratio is not None:
        fields |= {"ratio": ratio.median, "ratio_low": ratio.low, "ratio_high": ratio.high, "against": against}
    return fields


def reason(error: Exception) -> str:
    """The note of a row whose measurement raised an error."""
    return f"{FAILED}: {type(error).__name__}: {(str(error).splitlines() or ['no message'])[0]}"
