"""Laws of decoding: the same twice, nothing from the future, and one answer however the tokens come in."""

from __future__ import annotations

import torch
from torch import Tensor

from longitude.check.rotary import SHIFT, ropes
from longitude.check.subject import CHECKPOINT_LAWS, EQUAL, Subject
from longitude.checkpoints.positions import last_position, table_of
from longitude.positions.base import Temperature, encoding
from longitude.positions.scaling import Follows
from longitude.testing.engine import DoesNotApply, Measurement

GIVEN = "a token at a time, mask and positions given"
CHUNKS = (1, 7, 16, 5, 33)
MORE_THAN_ROTATIONS = {
    "recurrent_gemma": "its recurrent layers begin again at position 0",
    "beam": "its layers without rotation multiply queries by a factor of their position, of which its config says nothing",
}
"""Model types whose code reads positions in another way, too, and how."""
SOUND = ("repeatable", "far_positions")
CACHE = ("causality", "cached_decoding")


@CHECKPOINT_LAWS.law(threshold=EQUAL)
def repeatable(subject: Subject) -> Measurement:
    """A pass = the same pass again."""
    tokens = subject.tokens(subject.length)
    first = subject.logits(tokens)
    error = subject.error(subject.logits(tokens), first)
    return subject.measurement(
        error,
        "one and the same pass gives two answers, or numbers that are not finite: dropout that is still on, tables that "
        "one call leaves behind for the next, or an overflow in the model's dtype",
    )


@CHECKPOINT_LAWS.law(threshold=EQUAL, rests_on=SOUND)
def causality(subject: Subject) -> Measurement:
    """Logits before a position = those with other tokens from it on."""
    if "perm_mask" in subject.takes:
        raise DoesNotApply(
            "its tokens attend in both directions, unless perm_mask says in which order, as generate() does (XLNet)"
        )
    tokens = subject.tokens(subject.length)
    want = subject.logits(tokens)
    worst = torch.zeros(subject.length, dtype=torch.float64, device=tokens.device)
    for start in sorted({1, subject.length // 2, subject.length - 1}):
        changed = torch.cat([tokens[:, :start], subject.tokens(subject.length - start, seed=1)], 1)
        worst[:start] = worst[:start].maximum(subject.error(subject.logits(changed), want)[:start])
    return subject.measurement(
        worst,
        "logits depend on tokens that come later: the causal mask is dropped in a whole pass, as by an attention function "
        "that gets no mask and does not apply one itself",
    )


@CHECKPOINT_LAWS.law(threshold=EQUAL, rests_on=(*SOUND, "causality"))
def relative_positions(subject: Subject) -> Measurement:
    """Logits at positions + 64 = logits.

    Of rotary models whose tables do not follow the length: a rotation of queries and keys alike depends on differences alone.
    """
    if any(isinstance(rope.scaling, Follows) for rope in ropes(subject.config).values()):
        raise DoesNotApply("its tables follow the length of the sequence")
    if (end := last_position(subject.model)) is not None:
        raise DoesNotApply(f"it has a table of positions, too, that ends at {end}")
    if "position_ids" not in subject.takes:
        raise DoesNotApply("forward takes no position_ids, so they cannot be moved")
    if (reason := MORE_THAN_ROTATIONS.get(subject.config.model_type)) is not None:
        raise DoesNotApply(f"{reason}, so positions are more than rotations")
    tokens = subject.tokens(min(subject.length, SHIFT))
    positions = torch.arange(tokens.shape[1], device=subject.device)[None]
    for spec in (rope.temperature for rope in ropes(subject.config).values() if rope.temperature is not None):
        [term] = encoding(**spec).terms({})
        assert isinstance(term, Temperature)
        near, away = (term.at(positions + shift) for shift in (0, SHIFT))
        if not torch.equal(near, away):
            raise DoesNotApply(f"it multiplies queries by a factor of their position, {spec}")
    want, got = (subject.logits(tokens, position_ids=positions + shift) for shift in (0, SHIFT))
    return Measurement(
        float(subject.error(got, want).max()),
        subject.threshold,
        cause=f"logits change where all positions move by {SHIFT}, though rotations depend on differences alone: queries or keys "
        "are not rotated, or not by the same angles, or tables and rotation have two layouts (halves, interleaved)",
    )


@CHECKPOINT_LAWS.law(threshold=EQUAL, rests_on=(*SOUND, "causality"))
def cached_decoding(subject: Subject) -> Measurement:
    """A token at a time = a whole pass.

    With the model's own positions, with mask and positions given, and inside generate().
    """
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
    if broken and (shift := shifted(subject, tokens, want)):
        cause += (
            f": positions are off while decoding; with position_ids moved by {shift:+d} the logits agree, so the position of "
            f"a new token is {abs(shift)} too {'small' if shift > 0 else 'large'}"
        )
    elif given and GIVEN in broken and (first := begins_at(subject, tokens, want)):
        cause += (
            f": its own positions begin at {first}, those of generate() at 0; give position_ids that begin at {first}"
        )
    elif broken and given and not {GIVEN, "generate()"} & {*broken}:
        cause += (
            ": positions that the model counts itself are wrong behind a cache, and where position_ids are passed, as "
            "generate() does, the logits agree; pass them"
        )
    elif broken:
        cause += (
            ": with a cache, new tokens get other positions, another bias or another mask than in a whole pass, or cached "
            "keys are not what they were"
        )
    return subject.measurement(torch.stack(list(ways.values())).amax(0), cause)


def shifted(subject: Subject, tokens: Tensor, want: Tensor) -> int:
    """The shift of position_ids that repairs decoding; 0: none does."""
    if "position_ids" not in subject.takes:
        return 0
    half, few = subject.length // 2, 4
    for shift in (-1, 1):
        sizes = [half, *[1] * few]
        got = subject.in_chunks(tokens[:, : half + few], sizes, given=True, shift=shift)
        if subject.first_above(subject.error(got, want[:, : half + few])) is None:
            return shift
    return 0


def begins_at(subject: Subject, tokens: Tensor, want: Tensor) -> int:
    """The position that the model itself gives to the first token, where that is not 0, as RoBERTa's."""
    table = table_of(subject.model)
    first = 0 if table is None or table[1].padding_idx is None else table[1].padding_idx + 1
    if not first or "position_ids" not in subject.takes:
        return 0
    positions = torch.arange(first, first + tokens.shape[1], device=tokens.device)[None]
    return (
        first if subject.first_above(subject.error(subject.logits(tokens, position_ids=positions), want)) is None else 0
    )


@CHECKPOINT_LAWS.law(threshold=EQUAL, rests_on=(*SOUND, *CACHE))
def chunked_prefill(subject: Subject) -> Measurement:
    """Chunks of 1 to 33 tokens = a whole pass.

    Without more, and with mask and positions given.
    """
    tokens = subject.tokens(subject.length)
    want = subject.logits(tokens)
    sizes, left = [], subject.length
    while left:
        sizes.append(min(left, CHUNKS[len(sizes) % len(CHUNKS)]))
        left -= sizes[-1]
    ways = (False, True) if subject.attends else (False,)
    errors = [subject.error(subject.in_chunks(tokens, sizes, given), want) for given in ways]
    cause = "a prompt that continues behind a cache gives other logits than a whole pass: "
    if subject.recurrent:
        cause += (
            "its recurrent layers do not take up their state where several tokens follow, though they do for one at a time; "
            "prefill in one piece"
        )
    else:
        cause += (
            "tokens of one chunk attend to each other's future, as where the causal mask is dropped or aligned to the wrong "
            "corner as soon as keys outnumber queries"
        )
    return subject.measurement(torch.stack(errors).amax(0), cause)
