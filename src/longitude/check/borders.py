"""The law of scalings that follow the length: the published switch at the original length, and a cache that crosses it."""

from __future__ import annotations

from longitude.check.decoding import CACHE, SOUND
from longitude.check.rotary import deviation, measured, require_tables, ropes, tables_of
from longitude.check.subject import CHECKPOINT_LAWS, EQUAL, Subject
from longitude.checkpoints.config import border_of
from longitude.testing.engine import DoesNotApply, Measurement

LONGEST = 4608
SIDE = 8
"""Tokens on each side of a border that are decoded one at a time."""


@CHECKPOINT_LAWS.law(threshold=EQUAL, rests_on=(*SOUND, *CACHE, "rotary_frequencies"))
def scaling_border(subject: Subject) -> Measurement:
    """Tables around the original length = the published rule; decoding across it = whole passes.

    Tables at L - 1, L, L + 1 and 2 L tokens, then L again; decoding from below L to beyond it, a whole pass of each length.
    """
    read, border = ropes(subject.config), border_of(subject.config)
    if border is None:
        kinds = sorted({rope.scaling.name if rope.scaling else "no scaling" for rope in read.values()})
        raise DoesNotApply(f"its tables are the same for every length ({', '.join(kinds)})")
    if border + SIDE > max(LONGEST, subject.reach):
        raise DoesNotApply(f"its border is at {border} tokens; --length {border + SIDE} measures there")
    off, wrong = rule(subject, border)
    drift, first = crossing(subject, border)
    causes = []
    if wrong:
        causes.append(f"tables are not those of the published rule at {', '.join(wrong)}, by {off:.2g} of a frequency")
    if first is not None:
        causes.append(
            f"cached decoding across the original length {border} drifts from position {first} on: cached keys were rotated "
            "by other tables than new ones. The published rule does that; prefill again beyond the border, or take a "
            "scaling whose tables stay (yarn, llama3, linear, a larger base)"
        )
    subject.logits(subject.tokens(2))  # a short sequence resets what transformers keeps of a long one
    worst = max(drift, off if wrong else 0.0)
    whose = "" if wrong else "rule"
    return Measurement(worst, subject.threshold, f"the border is {border} tokens", "; ".join(causes), first, whose)


def rule(subject: Subject, border: int) -> tuple[float, list[str]]:
    """(largest relative error of a frequency, the lengths where one is off)."""
    worst, wrong = 0.0, []
    subject.logits(subject.tokens(2))
    lengths = [border - 1, border, border + 1, 2 * border]
    for again, length in [*((False, n) for n in lengths), (True, border)]:
        tables = tables_of(subject, subject.tokens(length))
        require_tables(tables)
        off = max(
            deviation(*measured(tables[layer], rope, subject, length))
            for layer, rope in ropes(subject.config).items()
            if layer in tables
        )
        if off > subject.threshold:
            wrong.append(f"{length} tokens" + (" after a longer sequence" if again else ""))
        worst = max(worst, off)
    return worst, wrong


def crossing(subject: Subject, border: int) -> tuple[float, int | None]:
    """(largest error of logits decoded with a cache, the first position where it exceeds the threshold)."""
    before = min(SIDE, border - 1)
    tokens = subject.tokens(border + SIDE)
    subject.logits(tokens[:, :2])
    sizes = [border - before, *[1] * (before + SIDE)]
    decoded = subject.in_chunks(tokens, sizes)
    subject.logits(tokens[:, :2])
    worst, first = 0.0, None
    for position in range(border - before, border + SIDE):
        want = subject.logits(tokens[:, : position + 1])[:, -1:]
        error = float(subject.error(decoded[:, position : position + 1], want)[0])
        worst = max(worst, error)
        if first is None and error > subject.threshold:
            first = position
    return worst, first
