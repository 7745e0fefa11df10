"""What a claim is: statements, each judged on the results of studies, and the verdict of them all."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from importlib import import_module
from pkgutil import iter_modules
from typing import NamedTuple

from claims.evidence import Evidence, Measured, NotRun
from longitude.errors import unknown
from longitude.statistics.estimates import HOLDS, LOST, UNCLEAR, Estimate

CONFIRMED, REFUTED, UNDECIDED, NOT_RUN = "confirmed", "refuted", "undecided at this size", "not run"
WORDS = {HOLDS: "supported", LOST: "contradicted", UNCLEAR: UNCLEAR, None: NOT_RUN}
"""A statement's verdict in words: "holds" means a loss within 2% only."""
CLAIMS: "dict[str, Claim]" = {}


class Outcome(NamedTuple):
    """A statement on the evidence.

    Attributes:
        verdict: `HOLDS`, `LOST` or `UNCLEAR` of longitude.statistics.estimates; None where it was not run.
        number: What it is drawn from, with its interval, in words.
        estimate: Likewise, as a number; None where there is none.
        remark: Why it was not run, or what would decide it.
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
    """

    words: str
    reads: tuple[Measured, ...]
    judge: Callable[[Evidence], Outcome]

    def outcome(self, evidence: Evidence) -> Outcome:
        """As the evidence has it."""
        try:
            return self.judge(evidence)
        except NotRun as missing:
            return Outcome(None, remark=str(missing))


@dataclass(frozen=True, kw_only=True)
class Claim:
    """What a paper says, and how we test it.

    Attributes:
        name: Letters, digits and hyphens.
        title: What is tested, in a few words without a finding.
        number: Its place on the page: a number, or one with a letter where a source says several things ("2a", "2b").
        claimed: In one sentence.
        source: Authors, year and title, or several.
        link: Of the source.
        protocol: What was done here, in words; what differs from the paper, and what was varied where the verdict differs.
        statements: All of them must hold. None: the claim was not run, and `protocol` says what it would take.
        erratum: It is a mistake of one text, which nobody else claims: it stands apart on the page.
        varied: Statements on studies of other options, which were run to find a mistake of ours; no part of the verdict.
        larger: The same statements on models of the next size, as far as a study has them; no part of the verdict.
    """

    name: str
    title: str
    number: str
    claimed: str
    source: str
    link: str
    protocol: str
    statements: tuple[Statement, ...] = ()
    varied: tuple[Statement, ...] = ()
    larger: tuple[Statement, ...] = ()
    erratum: bool = False

    @property
    def studies(self) -> list[str]:
        """Names of the studies that it reads, each once."""
        read = (each.study for statement in (*self.statements, *self.varied, *self.larger) for each in statement.reads)
        return list(dict.fromkeys(read))

    def judged(self, evidence: Evidence) -> "Judged":
        """With the outcome of every statement."""
        outcomes, varied, larger = (
            tuple(statement.outcome(evidence) for statement in part)
            for part in (self.statements, self.varied, self.larger)
        )
        return Judged(self, outcomes, varied, larger)


class Judged(NamedTuple):
    """A claim on the evidence; outcomes: of its statements; varied, larger: of those that are no part of the verdict."""

    claim: Claim
    outcomes: tuple[Outcome, ...]
    varied: tuple[Outcome, ...] = ()
    larger: tuple[Outcome, ...] = ()

    @property
    def verdict(self) -> str:
        """Verdict on all statements together."""
        return self._verdict(self.outcomes)

    @property
    def verdict_larger(self) -> str:
        """Verdict on the statements about models of the next size."""
        return self._verdict(self.larger)

    @staticmethod
    def _verdict(outcomes: tuple[Outcome, ...]) -> str:
        verdicts = {outcome.verdict for outcome in outcomes}
        if LOST in verdicts:
            return REFUTED
        if not verdicts or None in verdicts:
            return NOT_RUN
        return CONFIRMED if verdicts == {HOLDS} else UNDECIDED


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
