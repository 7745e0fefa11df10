"""The findings of a study, computed once: tables, figures and the three lines about it read them."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from longitude.report.wording import capital, named
from longitude.statistics.estimates import HOLDS, UNCLEAR, Comparison
from longitude.study.answers import AnswerCriterion
from longitude.study.criterion import Criterion, Effective, Finding
from longitude.study.data import WINDOWS
from longitude.study.losses import LossCriterion
from longitude.study.rates import chosen_rates, edges
from longitude.study.results import Run, TrialResult, read_run

CRITERIA: dict[str, type[Criterion]] = {"losses": LossCriterion, "answers": AnswerCriterion}


@dataclass(frozen=True, eq=False)
class Analysis:
    """A run with its findings and comparisons.

    Attributes:
        findings: Method -> a finding for each label and length, in the order of the study.
        comparisons: Method -> a comparison for each pair of labels and length, adjusted by Holm within a length.
    """

    run: Run
    criterion: Criterion
    findings: dict[str, list[Finding]]
    comparisons: dict[str, list[Comparison]]

    @property
    def main(self) -> list[Finding]:
        """The findings of the first method, from which the study concludes; empty if losses were measured by position only."""
        return next(iter(self.findings.values()), [])

    def compared(self, length: int, method: str | None = None) -> list[Comparison]:
        """The comparisons at a length; by default of the first method."""
        every = self.comparisons[method] if method else next(iter(self.comparisons.values()), [])
        return [comparison for comparison in every if comparison.length == length]

    def of(self, label: str, method: str | None = None) -> list[Finding]:
        """The findings of a label, in the order of lengths; by default of the first method."""
        return [finding for finding in (self.findings[method] if method else self.main) if finding.label == label]

    def effective(self, label: str, method: str | None = None) -> Effective:
        """The effective length of a label; by default by the first method."""
        return self.criterion.effective(self.of(label, method))


def analyse(run: Run | Path | str, numbers_only: bool = False) -> Analysis:
    """Compute every finding of a run, with its intervals. numbers_only, and ValueError: as `read_run`."""
    run = read_run(run, numbers_only)
    criterion = CRITERIA[run.task.kind](run)

    reasons = {label: "; ".join(dict.fromkeys(_reasons(run, label))) or None for label in run.labels}

    def finding_of(label: str, length: int, method: str) -> Finding:
        """The finding. Nothing is certain beyond the training length of a part that training never used."""
        finding = criterion.finding(label, length, method)._replace(reason=reasons[label])
        if finding.within == HOLDS and length > run.train_length and run.untrained(label):
            finding = finding._replace(within=UNCLEAR, verdict=finding.verdict and UNCLEAR, remark=None)
        few = finding.verdict and criterion.seeds_missing(finding)
        return finding._replace(verdict=None, remark=few) if few else finding

    findings, comparisons = {}, {}
    for method in run.methods:
        findings[method] = [finding_of(label, length, method) for label in run.labels for length in run.lengths]
        comparisons[method] = [
            comparison for length in run.lengths for comparison in criterion.compared(length, method)
        ]
    return Analysis(run, criterion, findings, comparisons)


# ---- the three lines -------------------------------------------------------------------------------------------------
class Conclusion(NamedTuple):
    """Conclusion of a study, in lines of fixed form, which may be empty.

    Attributes:
        result: The labels of each verdict at the longest length.
        best: Difference between the best label and the next.
        caution: Limits of the conclusion.
    """

    result: str
    best: str = ""
    caution: str = ""

    @property
    def lines(self) -> dict[str, str]:
        """Head -> line, without empty lines."""
        return {head.capitalize(): line for head, line in self._asdict().items() if line}


def conclude(analysis: Analysis) -> Conclusion:
    """The three lines of a study. They claim only what the intervals support: see the `Criterion` of its task."""
    run, criterion = analysis.run, analysis.criterion
    last = [finding for finding in ranked(analysis) if finding.value is not None] if analysis.findings else []
    if not last:
        some = any(finding.value is not None for finding in analysis.main)
        where = f" at {run.lengths[-1]} {run.task.unit}" if some else ""
        nothing = f"No encoding was measured{where}" if analysis.findings else "Losses were measured by position only"
        return Conclusion(nothing, "", "; ".join(undone(run, criterion.called)))
    sign = 1 if criterion.less_is_better else -1
    rivals = [finding for finding in last if not run.is_blind(finding.label)]
    first = {finding.label for finding in sorted(rivals, key=lambda finding: sign * (finding.value or 0.0))[:2]}
    pairs = [
        comparison for comparison in analysis.compared(last[0].length) if {comparison.better, comparison.worse} == first
    ]
    if all(map(criterion.learned_too_little, first)):  # neither may be called best
        pairs = []
    absent = [criterion.called(label) for label in run.labels if label not in {finding.label for finding in last}]
    cautions = [
        *criterion.cautions(last),
        *([f"no value at {last[0].length}: {', '.join(absent)}"] if absent else []),
        *undone(run, criterion.called),
        *(f"{criterion.called(label)} {never}" for label in run.labels if (never := run.untrained(label))),
        *edges(run.choices),
        *_scope(criterion, last),
    ]
    best = "".join(map(criterion.best, pairs[:1]))
    names = [criterion.called(label) for label in run.labels]
    return Conclusion(criterion.result(last), capital(best, names), capital("; ".join(cautions), names))


def ranked(analysis: Analysis, method: str | None = None) -> list[Finding]:
    """Findings at the longest length, the best label first; labels that learned too little come last."""
    criterion, sign = analysis.criterion, 1 if analysis.criterion.less_is_better else -1
    longest = analysis.run.lengths[-1]
    last = [
        finding for label in analysis.run.labels for finding in analysis.of(label, method) if finding.length == longest
    ]

    def place(finding: Finding) -> tuple[bool, bool, float]:
        return finding.value is None, criterion.learned_too_little(finding.label), sign * (finding.value or 0.0)

    return sorted(last, key=place)


def notes(analysis: Analysis) -> list[str]:
    """Notes on training that differs between labels or from the default, and on little text."""
    run = analysis.run
    sampled = run.sampled_positions
    notes = [
        *([f"training windows had {sampled}"] if sampled else []),
        *chosen_rates(run.choices),
        *little_text(run, analysis.criterion.things),
    ]
    return [capital(note) for note in notes]


def little_text(run: Run, things: str) -> list[str]:
    """How much held-out text there is, if it is less than asked."""
    data, asked = run.study["data"], run.config.documents
    documents, windows = data.get("validation_documents", asked), data.get("validation_windows", WINDOWS * asked)
    if documents >= asked and windows >= WINDOWS * asked:
        return []
    has = f"the held-out text has {documents} {things} with {windows} windows of {run.config.longest} {run.task.unit}"
    return [f"{has}; {asked} {things} with {WINDOWS * asked} were asked for"]


def undone(run: Run, called: Callable[[str], str] = named) -> list[str]:
    """Models that are not done, grouped by how they ended."""
    by_state: dict[str, list[str]] = {}
    for trial in run.undone:
        seed = f" (seed {trial.seed})" if len(run.of(trial.label)) > 1 else ""
        by_state.setdefault(state(trial), []).append(called(trial.label) + seed)
    return [f"{state}: {', '.join(names)}" for state, names in by_state.items()]


def _scope(criterion: Criterion, last: list[Finding]) -> list[str]:
    """Sources of variation that the intervals do not cover."""
    if last[0].documents < 2:
        return [f"one {criterion.things.removesuffix('s')}, so no interval"]
    alone = [criterion.called(finding.label) for finding in last if finding.seeds == 1]
    if len(alone) == len(last):
        return ["one seed: intervals are over " + criterion.things + ", and do not cover training again"]
    return [f"one seed, interval over {criterion.things}: {', '.join(alone)}"] if alone else []


def _reasons(run: Run, label: str) -> list[str]:
    """How the unfinished trials of a label ended, and its parts that training never used."""
    ended = [state(trial) for trial in run.of(label) if trial.status != "done"]
    return [*ended, *([never] if (never := run.untrained(label)) else [])]


def state(trial: TrialResult) -> str:
    """How a trial ended."""
    if trial.status == "diverged":
        return f"diverged at step {trial.step}"
    return {"trained": "not measured", "failed": "failed", "not run": "not run"}.get(trial.status, "not finished")
