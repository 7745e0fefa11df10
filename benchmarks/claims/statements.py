"""The kinds of statements. Differences are paired by seed and by document; intervals are those of longitude.statistics.estimates.

A statement expects a number within a range. It holds where its interval, over seeds and documents together, lies inside; it
does not hold where that lies on one side outside; else the results cannot tell. They cannot tell either where a label learned
nothing at the training length. Costs are judged by their value: they are counted, or were timed on one machine, and no interval
says what another would take.
"""

import math
from collections.abc import Callable

from claims.base import Outcome, Statement
from claims.evidence import Evidence, Measured, NotRun
from claims.verdicts import Form, Range, in_words, verdict_of, what_decides
from longitude.report.wording import paper, percent, with_base
from longitude.statistics.documents import document_contrast
from longitude.statistics.estimates import HOLDS, LOST, UNCLEAR, Estimate, change, difference, estimated, per_seed
from longitude.study.answers import AnswerCriterion, share
from longitude.study.criterion import Effective
from longitude.study.losses import TOLERANCE, LossCriterion


# ---- losses ----------------------------------------------------------------------------------------------------------
def loss_below(a: Measured, b: Measured) -> Statement:
    """The loss of a is below that of b."""
    one, other, where = _pair(a, b)
    return _ranged(f"{one} has a lower loss than {other}{where}", (a, b), _difference(a, b), (-math.inf, 0.0), bits)


def loss_within(a: Measured, b: Measured, margin: float = TOLERANCE, below: float | None = None) -> Statement:
    """The losses of a and b are alike: their ratio is 1 within a margin, downwards within `below` where it is given."""
    one, other, where = _pair(a, b)
    words = f"{one} has a loss within {margin:.0%} of that of {other}{where}"
    if below is not None:
        words = f"{one} has a loss at most {below:.1%} below and {margin:.0%} above that of {other}{where}"
    return _ranged(words, (a, b), _change(a, b), (-(margin if below is None else below), margin), percent)


def loss_at_most(a: Measured, b: Measured, margin: float = TOLERANCE) -> Statement:
    """The loss of a is below that of b, or above it by less than a margin."""
    one, other, where = _pair(a, b)
    words = f"{one} has a loss less than {margin:.0%} above that of {other}{where}"
    return _ranged(words, (a, b), _change(a, b), (-math.inf, margin), percent)


def lead_grows(a: Measured, b: Measured, at: int) -> Statement:
    """What the loss of a lies below that of b is more at their length than at the length `at`: a difference of differences."""
    if a.length != b.length or a.study != b.study:
        raise ValueError(f"expected two labels of one study at one length, got {a} and {b}")

    def lead(evidence: Evidence) -> Estimate:
        metric = evidence.criterion(a.study).metric
        ends = [evidence.sums(each) for each in (a, b, a._replace(length=at), b._replace(length=at))]
        seeds = [seed for seed in ends[0].seeds if all(seed in each.seeds for each in ends)]
        if not seeds or len({each.of.shape[1] for each in ends}) > 1:
            raise NotRun(f"{a} and {b} have no seed in common, or other documents at {at}")
        ends = [each.only(seeds) for each in ends]
        values = [per_seed(each, metric) for each in ends]
        moved = (values[0] - values[1]) - (values[2] - values[3])
        text = document_contrast([each.pooled for each in ends], (1, -1, -1, 1), metric=metric)
        return estimated(moved, text)

    one, other, where = _pair(a, b)
    words = f"the loss of {one} minus that of {other} is lower{where} than at {at}"
    return _ranged(words, (a, b), lead, (-math.inf, 0.0), bits)


def holds(a: Measured, at: int, margin: float = TOLERANCE) -> Statement:
    """The loss of a is less than a margin above that of the same label at the length `at`, and training used all of it."""
    words = f"{_name(a)} holds{_place(a)}: its loss is less than {margin:.0%} above its loss at {at}"
    start = a._replace(length=at)
    within = _ranged(words, (a, start), _change(a, start), (-math.inf, margin), percent)

    def judge(evidence: Evidence) -> Outcome:
        outcome, criterion = within.judge(evidence), evidence.criterion(a.study)
        why = criterion.run.untrained(a.label)
        if isinstance(criterion, LossCriterion):  # a loss that fell too little cannot rise much
            why = why or criterion.doubt(a.label)
        doubtful = why and a.length > at and outcome.verdict == HOLDS
        return outcome._replace(verdict=UNCLEAR, remark=f"{_name(a)} {why}") if doubtful else outcome

    return Statement(words, (a, start), judge)


def breaks(a: Measured, at: int, margin: float = TOLERANCE) -> Statement:
    """The loss of a is more than a margin above that of the same label at the length `at`."""
    words = f"{_name(a)} breaks{_place(a)}: its loss is more than {margin:.0%} above its loss at {at}"
    start = a._replace(length=at)
    return _ranged(words, (a, start), _change(a, start), (margin, math.inf), percent)


# ---- answers ---------------------------------------------------------------------------------------------------------
def accuracy_above(a: Measured, least: float) -> Statement:
    """The accuracy of a is above a share, 0 to 1."""
    return _ranged(
        f"{_name(a)} has more than {least:.0%} right{_place(a)}", (a,), _share(a), (least, math.inf), portion
    )


def accuracy_below(a: Measured, most: float) -> Statement:
    """The accuracy of a is below a share, 0 to 1."""
    return _ranged(f"{_name(a)} has less than {most:.0%} right{_place(a)}", (a,), _share(a), (-math.inf, most), portion)


def more_accurate(a: Measured, b: Measured) -> Statement:
    """The accuracy of a is above that of b at the same length; a and b may be of two studies."""
    if a.length != b.length:
        raise ValueError(f"examples of two lengths are no pairs: expected one length, got {a} and {b}")
    one, other, where = _pair(a, b)
    words = f"{one} is right more often than {other}{where}"
    ranged = _ranged(words, (a, b), _difference(a, b), (0.0, math.inf), points)

    def judge(evidence: Evidence) -> Outcome:
        outcome = ranged.judge(evidence)
        lost = [_name(each) for each in (a, b) if not _learned(evidence, each)]
        if lost and outcome.verdict is not None:
            who = " and ".join(dict.fromkeys(lost))
            remark = f"{who} did not learn the task, so longer inputs say nothing about position"
            if a.length == evidence.run(a.study).train_length:
                remark = f"{who} is not above the rule without positions: it learned nothing at this rate and number of steps"
            return outcome._replace(verdict=UNCLEAR, remark=remark)
        return outcome

    return Statement(words, (a, b), judge)


def _learned(evidence: Evidence, of: Measured) -> bool:
    """Whether a label may have learned its task: it solves the training length, past which nothing else says anything.

    At the training length itself it need not solve it, which is the question there, but must be above the rule without
    positions. What is not may have been trained at a wrong rate, or for too few steps.
    """
    criterion = evidence.criterion(of.study)
    if not isinstance(criterion, AnswerCriterion) or of.length < criterion.run.train_length:
        return True
    if of.length > criterion.run.train_length:
        return criterion.learned(of.label, of.method or criterion.run.methods[0])
    floor = criterion.run.guessing.get(of.length)
    return floor is None or share(evidence.sums(of._replace(method=None)).of).above(floor) == HOLDS


# ---- how far -----------------------------------------------------------------------------------------------------------
def reach(length: Effective) -> str:
    """An effective length in words: 1024, or 512 (256 to 1024) if the interval reaches further; none."""
    value, low, high = (str(each or "none") for each in length)
    return value if low == high else f"{value} ({low} to {high})"


def reaches_further(a: Measured, b: Measured) -> Statement:
    """The longest length up to which a's label holds, or solves its task, is above that of b's; their lengths play no part."""

    def judge(evidence: Evidence) -> Outcome:
        ours, theirs = _effective(evidence, a), _effective(evidence, b)
        further = (ours.low or 0) > (theirs.high or 0)
        longest = evidence.run(a.study).lengths[-1]  # up to which both may hold, and further
        never = (ours.high or 0) <= (theirs.low or 0) and ours.high != longest
        return Outcome(
            HOLDS if further else LOST if never else UNCLEAR, f"up to {reach(ours)} and up to {reach(theirs)}"
        )

    words = [_name(each) + ("" if a.study == b.study else f" (study {each.study})") for each in (a, b)]
    return Statement(f"{words[0]} holds up to a longer length than {words[1]}", (a, b), judge)


def _effective(evidence: Evidence, of: Measured) -> Effective:
    criterion, run = evidence.criterion(of.study), evidence.run(of.study)
    evidence.sums(of._replace(length=run.reference))  # NotRun where seeds are missing
    method = of.method or run.methods[0]
    return criterion.effective([criterion.finding(of.label, length, method) for length in run.lengths])


# ---- costs -----------------------------------------------------------------------------------------------------------
def token_time(mixer: str, below: float) -> Statement:
    """The time of a token at the longest context of `make bench-decode`, over that at a short one, is below a bound.

    It is judged by its value alone: one machine says nothing of another.
    """

    def judge(evidence: Evidence) -> Outcome:
        found = evidence.bench("decode")
        rows = [row for row in found["rows"] if row["label"] == mixer]
        if not rows:
            raise NotRun(f"{mixer} is not in the results of `make bench-decode`")
        last = max(rows, key=lambda row: row["context"])
        number = f"{last['ratio']:.2f} ({last['ratio_low']:.2f} to {last['ratio_high']:.2f})"
        cpu, made = found["machine"]["cpu"], found["made"][:10]
        remark = f"context length {last['context']} against {last['against']}, median and quartiles over turns, {cpu}, {made}; "
        verdict = HOLDS if last["ratio"] < below else LOST
        return Outcome(verdict, number, Estimate(last["ratio"]), remark + "one machine: not tested")

    words = f"a token of {paper(mixer)} takes less than {below:g} times as long at a long context as at a short one"
    return Statement(words, (), judge)


# ---- several of them ---------------------------------------------------------------------------------------------------
def any_of(words: str, *parts: Statement) -> Statement:
    """One of several statements holds; it does not where none does."""

    def judge(evidence: Evidence) -> Outcome:
        outcomes = [part.judge(evidence) for part in parts]
        verdicts = [outcome.verdict for outcome in outcomes]
        verdict = HOLDS if HOLDS in verdicts else LOST if {*verdicts} == {LOST} else UNCLEAR
        numbers = (f"{part.words}: {outcome.number}" for part, outcome in zip(parts, outcomes, strict=True))
        return Outcome(verdict, "; ".join(numbers))

    return Statement(words, tuple(each for part in parts for each in part.reads), judge)


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
    for each in (a, b):
        own = [each.method or ""] * (a.method != b.method) + [f"study {each.study}"] * (a.study != b.study)
        own = [word for word in own if word]
        length = f" at {each.length}" * (a.length != b.length)
        names.append(_name(each) + length + (f" ({', '.join(own)})" if own else ""))
    both = f" ({a.method})" if a.method and a.method == b.method else ""
    return names[0], names[1], (f" at {a.length}" if a.length == b.length else "") + both


# ---- estimates -------------------------------------------------------------------------------------------------------
def _difference(a: Measured, b: Measured) -> Callable[[Evidence], Estimate]:
    return lambda evidence: _paired(difference, evidence, a, b)


def _change(a: Measured, b: Measured) -> Callable[[Evidence], Estimate]:
    return lambda evidence: _paired(change, evidence, a, b)


def _share(a: Measured) -> Callable[[Evidence], Estimate]:
    return lambda evidence: share(evidence.sums(a).of)


def _paired(compare: Callable, evidence: Evidence, a: Measured, b: Measured) -> Estimate:
    runs = [evidence.run(each.study) for each in (a, b)]
    if len({run.study["data"]["sha256"] for run in runs}) > 1:
        raise NotRun(f"studies {a.study} and {b.study} were measured on other documents, which are no pairs")
    found = compare(evidence.sums(a), evidence.sums(b), evidence.criterion(a.study).metric)
    if found is None:
        raise NotRun(f"{a} and {b} have no seed in common, or other documents")
    return found


# ---- verdicts --------------------------------------------------------------------------------------------------------
def _learned_nothing(evidence: Evidence, reads: tuple[Measured, ...]) -> str:
    """Labels whose loss is above that of n-grams or of their blind control, in words; empty if there are none."""
    found: dict[str, str] = {}
    for each in reads:
        criterion = evidence.criterion(each.study)
        if isinstance(criterion, LossCriterion) and criterion.learned_too_little(each.label):
            found[_name(each)] = criterion.doubt(each.label)
    return "; ".join(f"{name} {why}" for name, why in found.items())


def _ranged(
    words: str, reads: tuple[Measured, ...], estimate: Callable[[Evidence], Estimate], expected: Range, form: Form
) -> Statement:
    """A statement that a number lies within a range."""

    def judge(evidence: Evidence) -> Outcome:
        found = estimate(evidence)
        verdict, remark = verdict_of(found, expected), ""
        if nothing := _learned_nothing(evidence, reads):
            verdict, remark = UNCLEAR, nothing
        elif verdict == UNCLEAR:
            remark = what_decides(found, expected)
        return Outcome(verdict, in_words(found, form), found, remark)

    return Statement(words, reads, judge)
