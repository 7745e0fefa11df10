"""Laws of order: the same twice, nothing from the future, and one answer however the tokens come in."""

from __future__ import annotations

import torch
from torch import Tensor

from longitude.check.base import Finding
from longitude.check.subject import Subject

CHUNKS = (1, 7, 16, 5, 33)
GENERATED = 64
"""Tokens that generate() is made to write, at most."""


def repeatable(subject: Subject) -> Finding:
    """Two equal passes give the same finite logits."""
    tokens = subject.tokens(subject.length)
    first = subject.logits(tokens)
    error = subject.error(subject.logits(tokens), first)
    return found(
        subject,
        error,
        "one and the same pass gives two answers, or numbers that are not finite: dropout that is still on, tables that "
        "one call leaves behind for the next, or an overflow in the model's dtype",
    )


def causality(subject: Subject) -> Finding:
    """Tokens that change from some place on change no logits before it."""
    tokens = subject.tokens(subject.length)
    want = subject.logits(tokens)
    worst = torch.zeros(subject.length, dtype=torch.float64, device=tokens.device)
    for place in sorted({1, subject.length // 2, subject.length - 1}):
        changed = torch.cat([tokens[:, :place], subject.tokens(subject.length - place, seed=1)], 1)
        worst[:place] = worst[:place].maximum(subject.error(subject.logits(changed), want)[:place])
    return found(
        subject,
        worst,
        "logits depend on tokens that come later: the causal mask is dropped in a whole pass, as by an attention function "
        "that gets no mask and does not apply one itself",
    )


def cached(subject: Subject) -> Finding:
    """One token at a time: as the model places them itself, with mask and positions given, and inside generate()."""
    length, half = subject.length, subject.length // 2
    tokens = subject.tokens(length)
    want = subject.logits(tokens)
    ones = [1] * length
    ways = {
        "a token at a time": subject.error(subject.in_pieces(tokens, ones, tell=True), want),
        "a token at a time, mask and positions given": subject.error(
            subject.in_pieces(tokens, ones, said=True, tell=True), want
        ),
        "a token at a time behind a prompt": subject.error(
            subject.in_pieces(tokens, [half, *[1] * (length - half)]), want
        ),
    }
    if hasattr(subject.model, "generate"):
        error = torch.zeros_like(want[0, :, 0], dtype=torch.float64)
        error[half - 1 : length - 1] = subject.error(subject.generated(tokens, half), want[:, half - 1 : length - 1])
        ways["generate()"] = error
    broken = [way for way, error in ways.items() if over(subject, error) is not None]
    hint = f"decoding with the cache gives other logits than a whole pass ({'; '.join(broken)})"
    if broken and (shift := shifted(subject, tokens, want)):
        hint += (
            f": positions are off while decoding; with position_ids moved by {shift:+d} the logits agree, so the position of "
            f"a new token is {abs(shift)} too {'small' if shift > 0 else 'large'}"
        )
    elif broken:
        hint += (
            ": with a cache, new tokens get other positions, another bias or another mask than in a whole pass, or cached "
            "keys are not what they were"
        )
    return found(subject, torch.stack(list(ways.values())).amax(0), hint)


def shifted(subject: Subject, tokens: Tensor, want: Tensor) -> int:
    """The shift of position_ids that repairs decoding; 0: none does."""
    if "position_ids" not in subject.takes:
        return 0
    half, few = subject.length // 2, 4
    for shift in (-1, 1):
        sizes = [half, *[1] * few]
        got = subject.in_pieces(tokens[:, : half + few], sizes, said=True, shift=shift)
        if over(subject, subject.error(got, want[:, : half + few])) is None:
            return shift
    return 0


def chunked(subject: Subject) -> Finding:
    """Prompts of many tokens behind a cache: plain, and with mask and positions given."""
    tokens = subject.tokens(subject.length)
    want = subject.logits(tokens)
    sizes, left = [], subject.length
    while left:
        sizes.append(min(left, CHUNKS[len(sizes) % len(CHUNKS)]))
        left -= sizes[-1]
    errors = [subject.error(subject.in_pieces(tokens, sizes, said), want) for said in (False, True)]
    return found(
        subject,
        torch.stack(errors).amax(0),
        "a prompt that goes on behind a cache gives other logits than a whole pass: tokens of one chunk see each other's "
        "future, as where the causal mask is dropped or aligned to the wrong corner as soon as keys outnumber queries",
    )


# ---- what a measurement says ---------------------------------------------------------------------------------------------
def over(subject: Subject, error: Tensor) -> int | None:
    """The first position at which error [L] exceeds the threshold."""
    places = (error > subject.threshold).nonzero()
    return int(places[0]) if len(places) else None


def found(subject: Subject, error: Tensor, hint: str, said: str = "") -> Finding:
    """The finding of an error by position [L]."""
    first = over(subject, error)
    where = "" if first is None else f" (from position {first} on)"
    return Finding(float(error.max()), subject.threshold, said, hint + where, first)
