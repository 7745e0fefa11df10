"""What was found of a label at a length, and how a kind of task judges it and speaks of it."""

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, ClassVar, NamedTuple

if TYPE_CHECKING:
    from longitude.study.results import Run
    from longitude.study.tasks import Task

HOLDS, LOST, UNCLEAR = "holds", "does not hold", "cannot tell"
LISTED = 6
"""Encodings that the sentence lists with their numbers; beyond that it gives ranges."""


class Finding(NamedTuple):
    """One label at one length. What is missing is None.

    value, low, high: the task's metric, mean over seeds, with its 95 % interval. Of losses also change, change_low,
    change_high: value / value at the reference length - 1, paired. verdict: `HOLDS`, `LOST` or `UNCLEAR`, by the criterion of
    the `Judge`; None where it says nothing.
    """

    label: str
    length: int
    seeds: int = 0
    documents: int = 0
    value: float | None = None
    low: float | None = None
    high: float | None = None
    change: float | None = None
    change_low: float | None = None
    change_high: float | None = None
    verdict: str | None = None


class Judge(ABC):
    """One kind of task: what its numbers mean, and the words for them.

    things: what intervals are over. verdicts: verdict -> the word for it on the page. terse: the same in the terminal.
    """

    things: ClassVar[str]
    verdicts: ClassVar[dict[str, str]]

    def __init__(self, task: "Task"):
        self.task = task

    @abstractmethod
    def finding(self, run: "Run", label: str, length: int, method: str) -> Finding:
        """What was found of a label at a length."""

    @abstractmethod
    def clauses(self, run: "Run", found: list[Finding], last: list[Finding]) -> list[str]:
        """The conclusion, in parts. found: all that was measured; last: at the longest length."""

    # ---- in tables ----

    @abstractmethod
    def number(self, found: Finding) -> str:
        """The value, for the page."""

    @abstractmethod
    def bounds(self, found: Finding) -> str:
        """Its interval; empty where there is none."""

    @abstractmethod
    def short(self, found: Finding) -> str:
        """The value with half its interval, for the terminal."""

    @abstractmethod
    def title(self, run: "Run") -> str:
        """Of the table in the terminal."""

    @abstractmethod
    def last_column(self, run: "Run") -> tuple[str, str] | None:
        """The head of the table's last column in the terminal, and a note that explains it; None: there is no such column."""

    @abstractmethod
    def last_cell(self, run: "Run", lines: list[Finding]) -> str:
        """The last column of a label, whose findings are given in the order of lengths."""
