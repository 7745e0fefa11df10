"""The findings of a study, computed once: tables, figures and the one sentence about it read them."""

from dataclasses import dataclass
from pathlib import Path

import pandas as pd

from longitude.report.wording import and_, named
from longitude.study.answers import AnswerCriterion
from longitude.study.comparisons import Comparison
from longitude.study.criterion import Criterion, Finding
from longitude.study.estimates import HOLDS, UNCLEAR
from longitude.study.losses import LossCriterion
from longitude.study.rates import words
from longitude.study.results import Run, TrialResult, read_run

CRITERIA: dict[str, type[Criterion]] = {"losses": LossCriterion, "answers": AnswerCriterion}


@dataclass(frozen=True, eq=False)
class Analysis:
    """A run with what was found in it.

    Attributes:
        findings: Method -> a finding for each label and length, in the order of the study.
        comparisons: Likewise a comparison for each pair of labels and length, adjusted by Holm within a length.
    """

    run: Run
    criterion: Criterion
    findings: dict[str, list[Finding]]
    comparisons: dict[str, list[Comparison]]

    @property
    def main(self) -> list[Finding]:
        """The findings of the first method, from which the study concludes; none where it was measured by position only."""
        return next(iter(self.findings.values()), [])

    def compared(self, length: int, method: str | None = None) -> list[Comparison]:
        """The comparisons at a length; by default of the first method."""
        every = self.comparisons[method] if method else next(iter(self.comparisons.values()), [])
        return [each for each in every if each.length == length]

    def of(self, label: str, method: str | None = None) -> list[Finding]:
        """The findings of a label, in the order of lengths; by default of the first method."""
        return [each for each in (self.findings[method] if method else self.main) if each.label == label]


def analyse(run: Run | Path | str) -> Analysis:
    """Compute every finding of a run, with its intervals. ValueError as `read_run`."""
    run = read_run(run)
    criterion = CRITERIA[run.task.kind](run)

    def found(label: str, length: int, method: str) -> Finding:
        """Beyond the training length nothing holds of which training never used a part."""
        finding = criterion.finding(label, length, method)
        beyond = finding.verdict == HOLDS and length > run.train_length
        return finding._replace(holding=UNCLEAR, verdict=UNCLEAR) if beyond and run.untrained(label) else finding

    findings = {
        method: [found(label, length, method) for label in run.labels for length in run.lengths]
        for method in run.methods
    }
    comparisons = {
        method: [each for length in run.lengths for each in criterion.compared(length, method)]
        for method in run.methods
    }
    return Analysis(run, criterion, findings, comparisons)


def summary(analysis: Analysis, method: str | None = None) -> pd.DataFrame:
    """Findings as a table: a column for each field of `Finding`, a row for each label and length.

    Args:
        analysis: Of `analyse`.
        method: By default the first that the study measured.

    Raises:
        ValueError: The study was not measured by this method.
    """
    if not analysis.findings:
        raise ValueError(
            f"{analysis.run.path} was measured by position only; add non-overlapping or sliding to --methods"
        )
    if method is not None and method not in analysis.findings:
        measured = " and ".join(analysis.findings)
        raise ValueError(f"{analysis.run.path} was not measured by {method!r}, but by {measured}")
    found = analysis.main if method is None else analysis.findings[method]
    return pd.DataFrame(found, columns=pd.Index(Finding._fields), dtype=object)


# ---- the sentence ----------------------------------------------------------------------------------------------------
def verdict(analysis: Analysis) -> str:
    """One short sentence: which encodings hold at the longest length, which do not, which learned nothing; often empty."""
    found = [each for each in analysis.main if each.value is not None]
    last = [each for each in found if each.length == analysis.run.lengths[-1]]
    return _sentence(analysis.criterion.verdict(found, last)) if last else ""


def conclusion(analysis: Analysis) -> str:
    """`clauses` as one sentence."""
    return _sentence("; ".join(clauses(analysis)))


def _sentence(words: str) -> str:
    return words[0].upper() + words[1:] + "."


def clauses(analysis: Analysis) -> list[str]:
    """Which encodings hold at the longest length, which do not, for which the data cannot tell, with the numbers.

    They claim nothing that the intervals do not carry: see the `Criterion` of the task.
    """
    run, criterion = analysis.run, analysis.criterion
    if not analysis.findings:
        return ["losses were measured by position only, so nothing is concluded about longer windows"]
    found = [each for each in analysis.main if each.value is not None]
    last = [each for each in found if each.length == run.lengths[-1]]
    if not found:
        parts = ["no encoding was measured"]
    elif not last:
        parts = [f"no encoding was measured at {run.lengths[-1]} {run.task.unit}"]
    else:
        parts = criterion.clauses(found, last)
        parts += winner(analysis, last)
        here = {each.label for each in last}
        if absent := [named(label) for label in dict.fromkeys(each.label for each in found) if label not in here]:
            parts.append(f"{and_(absent)} {'was' if len(absent) == 1 else 'were'} not measured at that length")
    parts += remarks(run)
    if run.sampled_positions:
        parts.append(f"training windows had {run.sampled_positions}")
    if found:
        parts.append(_scope(criterion, found))
    return parts


def winner(analysis: Analysis, last: list[Finding]) -> list[str]:
    """By how much the best label at the longest length beats the next, or that they cannot be distinguished."""
    ranked = sorted(last, key=lambda each: each.value or 0, reverse=not analysis.criterion.less_is_better)
    first = {each.label for each in ranked[:2]}
    pairs = [each for each in analysis.compared(last[0].length) if {each.better, each.worse} == first]
    return [analysis.criterion.beats(each) for each in pairs]


def remarks(run: Run) -> list[str]:
    """Of which labels training never used a part, which trials are not done, and what of training differs between labels."""
    by_state: dict[str, list[str]] = {}
    for trial in run.undone:
        name = named(trial.label) + (f" (seed {trial.seed})" if len(run.of(trial.label)) > 1 else "")
        by_state.setdefault(state(trial), []).append(name)
    untrained = [f"{named(label)} {never}" for label in run.labels if (never := run.untrained(label))]
    undone = [f"{and_(names)} {state}" for state, names in by_state.items()]
    steps = [f"{named(label)} {run.steps(label):,}" for label in run.labels if run.config.match == "compute"]
    matched = [f"steps, matched by compute: {', '.join(steps)}"] if steps else []
    return [*untrained, *undone, *matched, *words(run.choices)]


def _scope(criterion: Criterion, found: list[Finding]) -> str:
    """What the intervals cover, and what they do not."""
    things, seeds = found[0].documents, sorted({each.seeds for each in found})
    if things < 2:
        return f"there is one {criterion.things.removesuffix('s')} only, so no interval could be computed"
    if seeds == [1]:
        return f"intervals are over {things} {criterion.things} with one seed, so they do not cover training again"
    several = sorted({seeds[-1], next(each for each in seeds if each > 1)})
    alone = [named(label) for label in dict.fromkeys(each.label for each in found if each.seeds == 1)]
    rest = f", those of {and_(alone)}, with one seed, over {criterion.things}" if alone else ""
    number = " to ".join(map(str, several))
    return f"intervals are over {number} seeds, which were measured on the same {things} {criterion.things}{rest}"


def state(trial: TrialResult) -> str:
    """How a trial ended, in words after its name."""
    if trial.status == "diverged":
        return f"diverged at step {trial.step}"
    return {"done": "is done", "trained": "was not measured", "failed": "failed", "not run": "was not run"}.get(
        trial.status, "did not finish"
    )
