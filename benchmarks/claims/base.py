"""What a claim is: a sentence of clauses, each with the statements that judge it on studies, at one or two sizes of models."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from importlib import import_module
from pkgutil import iter_modules
from typing import NamedTuple

from claims.evidence import Evidence, Measured, NotRun
from longitude.errors import unknown
from longitude.statistics.estimates import HOLDS, LOST, UNCLEAR, Estimate

CONFIRMED, REFUTED, UNDECIDED, NOT_RUN = "confirmed", "refuted", "undecided", "no verdict yet"
WORDS = {HOLDS: "supported", LOST: "contradicted", UNCLEAR: UNCLEAR, None: "no word"}
"""A statement's verdict in words."""
RUNGS = {"a": "0.1 million parameters", "b": "0.4 million parameters and more"}
"""Sizes of models that claims are judged at."""
CLAIMS: "dict[str, Claim]" = {}


class Outcome(NamedTuple):
    """A statement on the evidence.

    Attributes:
        verdict: `HOLDS`, `LOST` or `UNCLEAR` of longitude.statistics.estimates; None before the planned seeds were run.
        number: What it is drawn from, with its interval, in words.
        estimate: Likewise, as a number; None where there is none.
        remark: Why there is no verdict, or what would decide it.
    """

    verdict: str | None
    number: str = ""
    estimate: Estimate | None = None
    remark: str = ""

    @property
    def word(self) -> str:
        """The verdict, as tables print it."""
        return WORDS[self.verdict]


@dataclass(frozen=True)
class Statement:
    """A sentence about models that were measured, and how it is judged; claims.statements has the kinds.

    Attributes:
        words: The statement, without numbers.
        reads: Where its numbers are from.
        judge: Its outcome. Raises NotRun.
        kind: Which number of `reads` it asks for: "difference", "change" or "share". Of a bench, JSON of what it asks for.
        expected: The range that the number must lie in.
    """

    words: str
    reads: tuple[Measured, ...]
    judge: Callable[[Evidence], Outcome]
    kind: str
    expected: tuple[float, float]

    def outcome(self, evidence: Evidence) -> Outcome:
        """As the evidence has it."""
        try:
            return self.judge(evidence)
        except NotRun as missing:
            return Outcome(None, remark=str(missing))


class Clause(NamedTuple):
    """A part of a printed sentence, and the statements that must hold for it.

    Attributes:
        text: The part, with its punctuation; the parts of a claim, joined by spaces, are its sentence.
        a: About models of the smaller size of `RUNGS`.
        b: About those of the larger.
    """

    text: str
    a: tuple[Statement, ...] = ()
    b: tuple[Statement, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Claim:
    """What a paper says, and how we test it.

    Attributes:
        name: Letters, digits and hyphens.
        title: What is tested, in a few words without a finding.
        number: Its place on the page: a number, or one with a letter where a source says several things ("2a", "2b").
        clauses: Its sentence. Every clause has statements at each rung that one of them has any at.
        source: Authors, year and title, or several.
        link: Of the source.
        protocol: What was done here, in words; what differs from the paper, and what was varied where the verdict differs.
        costs: What would decide it, with processor minutes; empty if it is decided.
        published: Whether a paper has a measurement of it. Else it is a mistake of one text, or a statement without one, and
            stands apart on the page.
        varied: Statements on studies of other options, which were run to find a mistake of ours; no part of the verdict.
    """

    name: str
    title: str
    number: str
    clauses: tuple[Clause, ...]
    source: str
    link: str
    protocol: str
    costs: str = ""
    published: bool = True
    varied: tuple[Statement, ...] = ()

    def __post_init__(self) -> None:
        for rung in RUNGS:
            bare = [clause.text for clause in self.clauses if not getattr(clause, rung)]
            if bare and self.statements(rung):
                raise ValueError(f"claim {self.number} has clauses without a statement at rung {rung}: {bare}")
        if not any(self.statements(rung) for rung in RUNGS):
            raise ValueError(f"claim {self.number} has no statements: expected some for every clause")

    @property
    def claimed(self) -> str:
        """The sentence."""
        return " ".join(clause.text for clause in self.clauses)

    def statements(self, rung: str) -> tuple[Statement, ...]:
        """Those of all clauses at a rung."""
        return tuple(statement for clause in self.clauses for statement in getattr(clause, rung))

    def clause_of(self, statement: Statement) -> str:
        """The part of the sentence that a statement judges; empty for one that was varied."""
        return next((clause.text for clause in self.clauses if statement in (*clause.a, *clause.b)), "")

    @property
    def every(self) -> tuple[tuple[str, Statement], ...]:
        """("a", statement), ... of both rungs, and ("varied", statement), ..."""
        of_rungs = [(rung, statement) for rung in RUNGS for statement in self.statements(rung)]
        return (*of_rungs, *(("varied", statement) for statement in self.varied))

    @property
    def studies(self) -> list[str]:
        """Names of the studies that it reads, each once."""
        return list(dict.fromkeys(place.study for _, statement in self.every for place in statement.reads))

    def judged(self, evidence: Evidence) -> "Judged":
        """With the outcome of every statement."""
        return Judged(self, tuple((part, each, each.outcome(evidence)) for part, each in self.every))


class Judged(NamedTuple):
    """A claim on the evidence.

    Attributes:
        claim: The claim.
        lines: (rung or "varied", statement, outcome) for every statement.
    """

    claim: Claim
    lines: tuple[tuple[str, Statement, Outcome], ...]

    def outcomes(self, rung: str) -> list[Outcome]:
        """Outcomes at a rung."""
        return [outcome for part, _, outcome in self.lines if part == rung]

    def verdict_at(self, rung: str) -> str | None:
        """Verdict on all statements of a rung together; None if it has none."""
        verdicts = {outcome.verdict for outcome in self.outcomes(rung)}
        if not verdicts:
            return None
        if LOST in verdicts:
            return REFUTED
        return NOT_RUN if None in verdicts else CONFIRMED if verdicts == {HOLDS} else UNDECIDED

    @property
    def rung(self) -> str:
        """The largest rung that has a verdict, which is the claim's; else the largest that has statements."""
        verdicts = {rung: self.verdict_at(rung) for rung in reversed(RUNGS)}
        known = [rung for rung, verdict in verdicts.items() if verdict not in (None, NOT_RUN)]
        return next(iter([*known, *(rung for rung, verdict in verdicts.items() if verdict)]))

    @property
    def verdict(self) -> str:
        """Verdict of the claim."""
        return self.verdict_at(self.rung) or NOT_RUN


def register(claim: Claim) -> Claim:
    """Add a claim to those of `list_claims`. ValueError where its name or number is taken."""
    for other in CLAIMS.values():
        if claim.name == other.name or claim.number == other.number:
            raise ValueError(f"the claim {claim.name!r}, number {claim.number}, is there already: {other.name!r}")
    CLAIMS[claim.name] = claim
    return claim


def list_claims() -> list[Claim]:
    """Every claim, by number: those of the files of this package."""
    package = import_module("claims")
    for module in iter_modules(package.__path__):
        if module.name != "__main__":
            import_module(f"claims.{module.name}")
    return sorted(CLAIMS.values(), key=lambda claim: (int(claim.number.rstrip("abcdefg")), claim.number))


def claims_of(names: Iterable[str]) -> list[Claim]:
    """The claims of these names or numbers; of none, all. ValueError with the nearest name for an unknown one."""
    every = list_claims()
    names = list(names)
    for name in names:
        if not any(name in (claim.name, claim.number) for claim in every):
            raise unknown("claim", name, CLAIMS, "docs/claims.md has them all.")
    return [claim for claim in every if not names or {claim.name, claim.number} & {*names}]
