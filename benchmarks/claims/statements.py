"""The kinds of statements. Differences are paired by seed and by document; intervals are those of longitude.statistics.estimates.

A statement expects a number within a range. It is supported where the interval, over seeds and packages of documents together,
lies inside; contradicted where that lies on one side outside; else the results cannot tell. They cannot tell either where a
label learned too little at the training length; and there is no word before the planned seeds were run. Costs are judged by
their value: they are counted, or were timed on one machine, and no interval says what another would take.
"""

import json
import math

from claims.base import Outcome, Statement
from claims.evidence import Evidence, Measured, NotRun
from claims.verdicts import Form, Range, in_words, verdict_of, what_decides
from longitude.report.wording import paper, percent, with_base
from longitude.statistics.estimates import HOLDS, LOST, UNCLEAR, Estimate, change, difference
from longitude.study.answers import AnswerCriterion, share
from longitude.study.blind import control_of
from longitude.study.losses import CONTROL, FLOOR, TOLERANCE, LossCriterion
from longitude.study.results import LAST


# ---- losses ----------------------------------------------------------------------------------------------------------
def loss_below(a: Measured, b: Measured) -> Statement:
    """The loss of a is below that of b."""
    first, second, where = _pair(a, b)
    return _ranged(f"{first} has a lower loss than {second}{where}", (a, b), "difference", (-math.inf, 0.0), bits)


def loss_within(a: Measured, b: Measured, margin: float = TOLERANCE, below: float | None = None) -> Statement:
    """The losses of a and b are alike: their ratio is 1 within a margin, downwards within `below` where it is given."""
    first, second, where = _pair(a, b)
    words = f"{first} has a loss within {margin:.0%} of that of {second}{where}"
    if below is not None:
        words = f"{first} has a loss at most {below:.1%} below and {margin:.0%} above that of {second}{where}"
    return _ranged(words, (a, b), "change", (-(margin if below is None else below), margin), percent)


def loss_at_most(a: Measured, b: Measured, margin: float = TOLERANCE) -> Statement:
    """The loss of a is below that of b, or above it by less than a margin."""
    first, second, where = _pair(a, b)
    words = f"{first} has a loss less than {margin:.0%} above that of {second}{where}"
    return _ranged(words, (a, b), "change", (-math.inf, margin), percent)


def level(a: Measured, at: int) -> Statement:
    """The loss of a is less than `TOLERANCE` above that of its label at the end of training windows of `at` tokens."""
    words = f"the loss of {_name(a)}{_place(a)} is less than {TOLERANCE:.0%} above that at the end of {at}"
    reads = a, a._replace(length=at, method=LAST)
    ranged = _ranged(words, reads, "change", (-math.inf, TOLERANCE), percent, guarded=False)

    def judge(evidence: Evidence) -> Outcome:
        outcome = ranged.judge(evidence)
        if outcome.verdict != HOLDS:
            return outcome
        if why := evidence.run(a.study).untrained(a.label) or doubt(evidence, a):
            return outcome._replace(verdict=UNCLEAR, remark=f"{_name(a)} {why}")
        method = a.method or evidence.run(a.study).methods[0]
        return outcome._replace(remark=evidence.criterion(a.study).no_better(a.label, a.length, method) or "")

    return Statement(ranged.words, ranged.reads, judge, ranged.kind, ranged.expected)


def rises(a: Measured, at: int, method: str | None = LAST) -> Statement:
    """The loss of a is more than `TOLERANCE` above that of its label at the end of training windows of `at` tokens.

    With the method None it is compared with all of these windows, which is a higher loss: for studies without that of quarters.
    A rise is one whatever was learned.
    """
    words = f"the loss of {_name(a)}{_place(a)} is more than {TOLERANCE:.0%} above that at {'the end of ' * bool(method)}{at}"
    reads = a, a._replace(length=at, method=method)
    return _ranged(words, reads, "change", (TOLERANCE, math.inf), percent, guarded=False)


# ---- answers ---------------------------------------------------------------------------------------------------------
def accuracy_above(a: Measured, least: float) -> Statement:
    """The accuracy of a is above a share, 0 to 1."""
    words = f"{_name(a)} has more than {least:.0%} right{_place(a)}"
    return _ranged(words, (a,), "share", (least, math.inf), portion, guarded=False)


def accuracy_below(a: Measured, most: float) -> Statement:
    """The accuracy of a is below a share, 0 to 1."""
    words = f"{_name(a)} has less than {most:.0%} right{_place(a)}"
    return _ranged(words, (a,), "share", (-math.inf, most), portion, guarded=False)


def more_accurate(a: Measured, b: Measured) -> Statement:
    """The accuracy of a is above that of b at the same length; a and b may be of two studies."""
    if a.length != b.length:
        raise ValueError(f"examples of two lengths are no pairs: expected one length, got {a} and {b}")
    first, second, where = _pair(a, b)
    words = f"{first} is right more often than {second}{where}"
    return _ranged(words, (a, b), "difference", (0.0, math.inf), points)


# ---- costs -----------------------------------------------------------------------------------------------------------
def token_time(mixer: str, below: float) -> Statement:
    """The time of a token at the longest context of `make bench-decode`, over that at a short one, is below a bound.

    It is judged by its value alone: one machine says nothing of another.
    """

    def judge(evidence: Evidence) -> Outcome:
        bench = evidence.bench("decode")
        rows = [row for row in bench["rows"] if row["label"] == mixer]
        if not rows:
            raise NotRun(f"{mixer} is not in the results of `make bench-decode`")
        last = max(rows, key=lambda row: row["context"])
        number = f"{last['ratio']:.2f} ({last['ratio_low']:.2f} to {last['ratio_high']:.2f})"
        cpu, made = bench["machine"]["cpu"], bench["made"][:10]
        remark = f"context length {last['context']} against {last['against']}, median and quartiles over turns, {cpu}, {made}; "
        verdict = HOLDS if last["ratio"] < below else LOST
        return Outcome(verdict, number, Estimate(last["ratio"]), remark + "one machine: not tested")

    words = f"a token of {paper(mixer)} takes less than {below:g} times as long at a long context as at a short one"
    return Statement(words, (), judge, json.dumps(["token time", mixer]), (-math.inf, below))


# ---- what was learned ------------------------------------------------------------------------------------------------
def doubt(evidence: Evidence, of: Measured) -> str:
    """Why a label may not have learned enough at the training length, to follow its name; empty if it has.

    A loss must be below that of n-grams, and of a model that sees a few bytes. Past the training length a task must have been
    solved at it; at that length, which is the question there, answers must be above the rule without positions.

    Args:
        of: A label, at the length that is judged.
    """
    criterion, run = evidence.criterion(of.study), evidence.run(of.study)
    if isinstance(criterion, LossCriterion):
        start = of._replace(length=run.train_length, method=None)
        blind = control_of(of.label, run.labels, run.train_length)
        lower = blind and _estimate(evidence, "difference", (start, start._replace(label=blind))).below(0)
        checks = criterion.learned[of.label].checks | {CONTROL: (lower or UNCLEAR, "")}
        failed = " and ".join(name for name in (FLOOR, CONTROL) if checks.get(name, [""])[0] != HOLDS)
        return f"may have learned too little at {run.train_length}: not known to be below {failed}" * bool(failed)
    assert isinstance(criterion, AnswerCriterion)
    if of.length > run.train_length and not criterion.learned(of.label, of.method or run.methods[0]):
        return "did not learn the task, so longer inputs say nothing about position"
    floor = run.guessing.get(of.length) if of.length == run.train_length else None
    if floor is None or share(evidence.sums(of._replace(method=None)).of).above(floor) == HOLDS:
        return ""
    return "is not above the rule without positions: it learned nothing at this rate and number of steps"


# ---- numbers in words ------------------------------------------------------------------------------------------------
def bits(number: float) -> str:
    """-0.123 -> −0.123 bits."""
    return f"{number:+.3f} bits".replace("-", "−")


def portion(number: float) -> str:
    """0.943 -> 94.3%."""
    return f"{number:.1%}"


def points(number: float) -> str:
    """0.051 -> +5.1 points."""
    return f"{100 * number:+.1f} points".replace("-", "−")


def _name(a: Measured) -> str:
    """The paper's name of what was measured; RoPE says its base."""
    return paper(with_base(a.label))


def _place(a: Measured) -> str:
    return f" at {a.length}" + (f" ({a.method})" if a.method else "")


def _pair(a: Measured, b: Measured) -> tuple[str, str, str]:
    """Both names, each with what only it has of study, length and method; and the length, where it is that of both."""
    names = []
    for place in (a, b):
        apart = [place.method or ""] * (a.method != b.method) + [f"study {place.study}"] * (a.study != b.study)
        apart = [word for word in apart if word]
        length = f" at {place.length}" * (a.length != b.length)
        names.append(_name(place) + length + (f" ({', '.join(apart)})" if apart else ""))
    both = f" ({a.method})" if a.method and a.method == b.method else ""
    return names[0], names[1], (f" at {a.length}" if a.length == b.length else "") + both


# ---- estimates -------------------------------------------------------------------------------------------------------
def _estimate(evidence: Evidence, kind: str, reads: tuple[Measured, ...]) -> Estimate:
    """The number of a kind: a share, or a difference or change of two places that are paired by seed and document."""
    a, b = reads[0], reads[-1]
    if kind == "share":
        return share(evidence.sums(a).of)
    if len({evidence.run(place.study).study["data"]["sha256"] for place in reads}) > 1:
        raise NotRun(f"studies {a.study} and {b.study} were measured on other documents, which are no pairs")
    compare = {"difference": difference, "change": change}[kind]
    estimate = compare(evidence.sums(a), evidence.sums(b), evidence.criterion(a.study).metric)
    if estimate is None:
        raise NotRun(f"{a} and {b} have no seed in common, or other documents")
    return estimate


def _ranged(
    words: str, reads: tuple[Measured, ...], kind: str, expected: Range, form: Form, guarded: bool = True
) -> Statement:
    """A statement that a number lies within a range; guarded: only if every label that it reads has learned enough."""

    def judge(evidence: Evidence) -> Outcome:
        estimate = _estimate(evidence, kind, reads)
        number, verdict, remark = in_words(estimate, form), verdict_of(estimate, expected), ""
        if missing := {words: None for place in reads if (words := evidence.missing(place))}:
            return Outcome(None, number, estimate, "; ".join(missing))
        doubts = {f"{_name(place)} {why}": None for place in reads * guarded if (why := doubt(evidence, place))}
        if doubts:
            verdict, remark = UNCLEAR, "; ".join(doubts)
        elif verdict == UNCLEAR:
            remark = what_decides(estimate, expected)
        return Outcome(verdict, number, estimate, remark)

    return Statement(words, reads, judge, kind, expected)
