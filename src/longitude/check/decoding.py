"""Laws of decoding: rotations by differences of positions alone, and one answer however the tokens come in."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress

import torch
from torch import Tensor

from longitude.check.family import by_its_class
from longitude.check.layers import LAYERS
from longitude.check.passes import SOUND, require_one_way
from longitude.check.recorder import first_apart, inputs_apart, only_with, outputs, recorder, unrotated
from longitude.check.rotary import SHIFT, ropes
from longitude.check.subject import CHECKPOINT_LAWS, EQUAL, Subject
from longitude.checkpoints.positions import last_position, table_of
from longitude.positions.base import Temperature, encoding
from longitude.positions.scaling import Follows
from longitude.testing.engine import DoesNotApply, Measurement

FEW = 4
"""Tokens or chunks with which a repair is tried."""
GIVEN = "a token at a time, mask and positions given"
CHUNKS = (1, 7, 16, 5, 33)
RESTS = (*SOUND, *LAYERS)
CACHE = (*RESTS, "cached_decoding")
MOVED: dict[str, Callable[[int], int]] = {
    "the position of a token behind a cache is 1 too large": lambda cached: -1 if cached else 0,
    "the position of a token behind a cache is 1 too small": lambda cached: 1 if cached else 0,
    "positions behind a cache begin at 0 again": lambda cached: cached,
}
"""Possible errors of positions with a cache, and the shift of position_ids that repairs each."""


@CHECKPOINT_LAWS.law(threshold=EQUAL, rests_on=("rotary_frequencies", *RESTS))
@by_its_class
def relative_positions(subject: Subject) -> Measurement:
    """Logits at positions + 64 = logits.

    It covers rotary models with tables that do not depend on the length: rotated scores then depend only on position
    differences.
    """
    if any(isinstance(rope.scaling, Follows) for rope in ropes(subject.config).values()):
        raise DoesNotApply("its tables follow the length of the sequence")
    if (end := last_position(subject.model)) is not None:
        raise DoesNotApply(f"it has a table of positions, too, that ends at {end}")
    subject.require("position_ids", "they cannot be moved")
    tokens = subject.tokens(min(subject.length, SHIFT))
    positions = torch.arange(tokens.shape[1], device=subject.device)[None]
    for spec in (rope.temperature for rope in ropes(subject.config).values() if rope.temperature is not None):
        [term] = encoding(**spec).terms({})
        assert isinstance(term, Temperature)
        near, away = (term.at(positions + shift) for shift in (0, SHIFT))
        if not torch.equal(near, away):
            raise DoesNotApply(f"it multiplies queries by a factor of their position, {spec}")

    def moved() -> float:
        want, got = (subject.logits(tokens, position_ids=positions + shift) for shift in (0, SHIFT))
        return float(subject.error(got, want).max())

    cause = f"logits change where all positions move by {SHIFT}"
    if not (error := moved()) <= subject.threshold:
        with unrotated(subject.model):
            alone = moved()
        cause += (
            ", without a rotation, too: positions come in by another way"
            if not alone <= subject.threshold
            else ", only by its rotation, which should depend on differences alone"
        )
    return Measurement(error, subject.threshold, cause=cause)


@CHECKPOINT_LAWS.law(threshold=EQUAL, rests_on=RESTS)
def cached_decoding(subject: Subject) -> Measurement:
    """A token at a time = a whole pass.

    With the model's own positions, with mask and positions given, and inside generate().
    """
    require_one_way(subject)
    length, half = subject.length, subject.length // 2
    tokens = subject.tokens(length)
    want = subject.logits(tokens)
    ones = [1] * length
    ways = {
        "a token at a time": subject.error(subject.in_chunks(tokens, ones, report=True), want),
        "a token at a time behind a prompt": subject.error(
            subject.in_chunks(tokens, [half, *[1] * (length - half)]), want
        ),
    }
    if given := subject.attends:  # a recurrent model masks the tokens of a call, and none before them
        ways[GIVEN] = subject.error(subject.in_chunks(tokens, ones, given=True, report=True), want)
    if hasattr(subject.model, "generate"):
        error = torch.zeros_like(want[0, :, 0], dtype=torch.float64)
        error[half - 1 : length - 1] = subject.error(subject.generated(tokens, half), want[:, half - 1 : length - 1])
        ways["generate()"] = error
    broken = [way for way, error in ways.items() if subject.first_above(error) is not None]
    cause = f"decoding with the cache gives other logits than a whole pass ({'; '.join(broken)})"
    if broken and (wrong := repaired(subject, tokens, want, [half, *[1] * FEW])):
        cause += f": positions are off while decoding; {wrong}"
    elif given and GIVEN in broken and (first := begins_at(subject, tokens, want)):
        cause += (
            f": its own positions begin at {first}, those of generate() at 0; give position_ids that begin at {first}"
        )
    elif broken and given and not {GIVEN, "generate()"} & {*broken}:
        cause += ": where mask and position_ids are passed, as generate() does, the logits agree; pass them"
    elif {"a token at a time", "a token at a time behind a prompt"} & {*broken}:
        cause += where_and_why(subject, tokens, want, ways)
    return subject.measurement(torch.stack(list(ways.values())).amax(0), cause)


def where_and_why(subject: Subject, tokens: Tensor, want: Tensor, ways: Mapping[str, Tensor]) -> str:
    """Where decoding first differs from a whole pass, and the part of attention without which it does not; in words."""
    half = tokens.shape[1] // 2
    first = subject.first_above(ways["a token at a time"])
    late = subject.first_above(ways["a token at a time behind a prompt"])
    sizes = [half, *[1] * (max(late, half) + 1 - half)] if late is not None else [1] * ((first or 0) + 1)

    def differs() -> bool:
        return subject.first_above(subject.error(subject.in_chunks(part, sizes), subject.logits(part))) is not None

    part = tokens[:, : sum(sizes)]
    whole = outputs(subject.model, lambda: subject.logits(part), part.shape[1])
    words = [first_apart(subject, outputs(subject.model, lambda: subject.in_chunks(part, sizes), part.shape[1]), whole)]
    with suppress(DoesNotApply):
        words.append("" if subject.recurrent else inputs_apart(subject, tokens, sizes))
    words = [each for each in (*words, only_with(subject, differs)) if each]
    return f": {'; '.join(words)}" if words else ""


def repaired(subject: Subject, tokens: Tensor, want: Tensor, sizes: Sequence[int]) -> str:
    """The error of positions with a cache, if moving positions repairs passes of these sizes; else an empty string."""
    if "position_ids" not in subject.takes:
        return ""
    end = sum(sizes)
    for wrong, shift in MOVED.items():
        try:
            got = subject.in_chunks(tokens[:, :end], sizes, given=True, shift=shift)
        except (IndexError, RuntimeError, ValueError):  # positions that it does not have
            continue
        if subject.first_above(subject.error(got, want[:, :end])) is None:
            return f"with position_ids moved the logits agree, so {wrong}"
    return ""


def begins_at(subject: Subject, tokens: Tensor, want: Tensor) -> int:
    """The model's own position of the first token, if it is not 0, as in RoBERTa, and explains the difference; else 0."""
    table = table_of(subject.model)
    first = 0 if table is None or table[1].padding_idx is None else table[1].padding_idx + 1
    if not first or "position_ids" not in subject.takes:
        return 0
    positions = torch.arange(first, first + tokens.shape[1], device=tokens.device)[None]
    ways = (
        lambda: subject.logits(tokens, position_ids=positions),
        lambda: subject.in_chunks(tokens, [1] * tokens.shape[1], given=True, start=first),
    )
    return first if all(subject.first_above(subject.error(way(), want)) is None for way in ways) else 0


@CHECKPOINT_LAWS.law(threshold=EQUAL, rests_on=CACHE)
def chunked_prefill(subject: Subject) -> Measurement:
    """Chunks of 1 to 33 tokens = a whole pass.

    Without more, and with mask and positions given.
    """
    require_one_way(subject)
    tokens = subject.tokens(subject.length)
    want = subject.logits(tokens)
    sizes, left = [], subject.length
    while left:
        sizes.append(min(left, CHUNKS[len(sizes) % len(CHUNKS)]))
        left -= sizes[-1]
    ways = (False, True) if subject.attends else (False,)
    errors = [subject.error(subject.in_chunks(tokens, sizes, given), want) for given in ways]
    error = torch.stack(errors).amax(0)
    cause = "a prompt that continues behind a cache gives other logits than a whole pass"
    if subject.first_above(error) is not None:
        cause += why_not_continued(subject, tokens, want, sizes)
    return subject.measurement(error, cause)


def why_not_continued(subject: Subject, tokens: Tensor, want: Tensor, sizes: Sequence[int]) -> str:
    """Cause of a wrong second chunk: positions, recurrent state or dependence on tokens; empty if no experiment shows it."""
    if wrong := repaired(subject, tokens, want, sizes):
        return f": positions of a second chunk are off; {wrong}"
    if subject.recurrent and not subject.attends or differs_without_attention(subject, tokens, sizes):
        return (
            ": its recurrent layers do not take up their state where several tokens follow, though they do for one at a time; "
            "prefill in one piece"
        )
    sizes, words = sizes[:FEW], []  # several: with a mask aligned to the wrong corner, the first may agree
    tokens = tokens[:, : sum(sizes)]
    chunks = dependence(subject, tokens, lambda each: subject.in_chunks(each, sizes))
    whole = dependence(subject, tokens, subject.logits)
    if bool((chunks & ~whole).any()):
        words.append("depend on later ones")
    if bool((whole & ~chunks).any()):
        words.append("do not depend on all before them")
    return f": tokens of a later chunk {' and '.join(words)}" if words else ""


def dependence(subject: Subject, tokens: Tensor, logits: Callable[[Tensor], Tensor]) -> Tensor:
    """[L, L]: whether the logits at position i depend on the token at j, found by changing one token at a time."""
    want, others, columns = logits(tokens), subject.tokens(tokens.shape[1], seed=1), []
    for at in range(tokens.shape[1]):
        changed = tokens.clone()
        changed[:, at] = others[:, at]
        columns.append(subject.error(logits(changed), want) > subject.threshold)
    return torch.stack(columns, 1)


def differs_without_attention(subject: Subject, tokens: Tensor, sizes: Sequence[int]) -> bool:
    """Whether chunks give other logits than a whole pass if attention outputs zeros."""
    if not subject.recurrent:
        return False
    try:
        with recorder(subject.model):
            error = subject.error(subject.in_chunks(tokens, sizes), subject.logits(tokens))
    except DoesNotApply:
        return False
    return subject.first_above(error) is not None


@CHECKPOINT_LAWS.law(threshold=EQUAL, rests_on=(*CACHE, "chunked_prefill"))
def key_selection(subject: Subject) -> Measurement:
    """Keys that sparse attention chooses while decoding = those of a whole pass.

    With as many as its config says. Every other law of equal logits is tried with all keys chosen.
    """
    if not subject.selection:
        raise DoesNotApply("nothing in it chooses keys by top-k")
    tokens = subject.tokens(subject.length)
    with subject.selection.as_configured() as ties:
        want = subject.logits(tokens)
        share = ties.share
        error = subject.error(subject.in_chunks(tokens, [1] * subject.length), want)
    first = subject.first_above(error)
    if first is not None and ties.undecided:
        raise DoesNotApply(
            f"the choice of keys differs between decoding and a whole pass from position {first} on, by {float(error.max()):.1e} "
            f"of logits; {share:.0%} of the visible scores of the choice equal another one of their query, and the number of "
            "keys decides which of equal ones are taken. The other laws compare with all keys chosen"
        )
    return subject.measurement(
        error,
        "while decoding other keys are chosen than in a whole pass, and no equal scores explain it: with all keys chosen the "
        "logits are those of a whole pass",
    )
