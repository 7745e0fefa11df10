"""The law of scalings that follow the length: the published switch at the original length, and a cache that crosses it."""

from __future__ import annotations

import torch

from longitude.check.decoding import CACHE, SOUND
from longitude.check.rotary import deviation, measured, require_tables, ropes, tables_of
from longitude.check.subject import CHECKPOINT_LAWS, EQUAL, Subject
from longitude.checkpoints.config import border_of
from longitude.testing.engine import DoesNotApply, Measurement

LONGEST = 4608
SIDE = 8
"""Tokens on each side of a border that are decoded one at a time."""
LOOP, GENERATE = "a token at a time", "generate()"


@CHECKPOINT_LAWS.law(threshold=EQUAL, rests_on=(*SOUND, *CACHE, "rotary_frequencies"))
def scaling_border(subject: Subject) -> Measurement:
    """Tables around the original length = the published rule; decoding across it = whole passes.

    Tables at L - 1, L, L + 1 and 2 L tokens, then L again; decoding from below L to beyond it, a whole pass of each length. With
    generate() where the model has it, which may begin again at the border (Phi-3's does); else a token at a time.
    """
    read, border = ropes(subject.config), border_of(subject.config)
    if border is None:
        kinds = sorted({rope.scaling.name if rope.scaling else "no scaling" for rope in read.values()})
        raise DoesNotApply(f"its tables are the same for every length ({', '.join(kinds)})")
    if border + SIDE > max(LONGEST, subject.reach):
        raise DoesNotApply(f"its border is at {border} tokens; --length {border + SIDE} measures there")
    off, wrong = rule(subject, border)
    decoded = crossing(subject, border)
    drift, first = decoded.get(GENERATE, decoded[LOOP])
    notes, causes = [f"the border is {border} tokens"], []
    if wrong:
        causes.append(f"tables are not those of the published rule at {', '.join(wrong)}, by {off:.2g} of a frequency")
    if first is not None:
        causes.append(
            f"cached decoding across the original length {border} drifts from position {first} on: cached keys were rotated "
            "by other tables than new ones. The published rule does that; prefill again beyond the border, or take a "
            "scaling whose tables stay (yarn, llama3, linear, a larger base)"
        )
    elif (loop := decoded[LOOP])[1] is not None:
        notes.append(
            f"its generate() prefills again there; a loop over forward that does not drifts from position {loop[1]} on, by "
            f"{loop[0]:.1e}"
        )
    subject.logits(subject.tokens(2))  # a short sequence resets what transformers keeps of a long one
    worst = max(drift, off if wrong else 0.0)
    whose = "" if wrong else "rule"
    return Measurement(worst, subject.threshold, "; ".join(notes), "; ".join(causes), first, whose)


def rule(subject: Subject, border: int) -> tuple[float, list[str]]:
    """(largest relative error of a frequency, the lengths where one is off)."""
    worst, wrong = 0.0, []
    subject.logits(subject.tokens(2))
    lengths = [border - 1, border, border + 1, 2 * border]
    for again, length in [*((False, n) for n in lengths), (True, border)]:
        tables = tables_of(subject, subject.tokens(length))
        require_tables(tables)
        off = max(
            deviation(*measured(tables, layer, rope, subject, length))
            for layer, rope in ropes(subject.config).items()
            if layer in tables
        )
        if off > subject.threshold:
            wrong.append(f"{length} tokens" + (" after a longer sequence" if again else ""))
        worst = max(worst, off)
    return worst, wrong


def crossing(subject: Subject, border: int) -> dict[str, tuple[float, int | None]]:
    """Of each way to decode: (largest error of logits behind a cache, the first position where it exceeds the threshold)."""
    before = min(SIDE, border - 1)
    start, tokens = border - before, subject.tokens(border + SIDE)

    def reset() -> None:
        subject.logits(tokens[:, :2])

    reset()
    ways = {LOOP: subject.in_chunks(tokens, [start, *[1] * (before + SIDE)])[:, start:-1]}
    if hasattr(subject.model, "generate"):
        reset()
        ways[GENERATE] = subject.generated(tokens, start + 1)
    reset()
    wants = [subject.logits(tokens[:, : at + 1])[:, -1:] for at in range(start, tokens.shape[1] - 1)]
    errors = {way: subject.error(got, torch.cat(wants, 1)) for way, got in ways.items()}
    above = {way: subject.first_above(error) for way, error in errors.items()}
    return {way: (float(e.max()), None if (at := above[way]) is None else start + at) for way, e in errors.items()}
