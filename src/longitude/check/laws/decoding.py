"""Laws of decoding: rotations by differences of positions alone, and one answer however the tokens come in."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers.generation.utils import GenerationMixin

from longitude.check.causes import RULE, first_apart, in_parts, require_not_of_norms
from longitude.check.laws.layers import LAYERS, require_one_key_each
from longitude.check.laws.passes import SOUND, require_one_way
from longitude.check.laws.rotation import SHIFT, reachable, ropes, same, tables_in
from longitude.check.recorder import outputs, recorded
from longitude.check.subject import CHECKPOINT_LAWS, EQUAL, Subject
from longitude.checkpoints.compare import border_of, read
from longitude.checkpoints.positions import last_position
from longitude.models.stock_caches import OF_KEYS
from longitude.positions.base import encoding
from longitude.positions.scaling.base import Follows
from longitude.positions.terms import Temperature
from longitude.testing.engine import DoesNotApply, Measurement, Unknown

CURRENT, FORMER = OF_KEYS
FEW = 4
"""Tokens or chunks with which a repair is tried."""
STEPS = 64
"""Tokens at the beginning, and at the end, that come one by one."""
BEGUN, BEHIND = "a token at a time", "a token at a time behind a prompt"
GIVEN, CHOSEN = "a token at a time, mask and positions given", "keys chosen by top-k"
PREPARES = "prepare_inputs_for_generation"
"""The method in which a class may restart after a border."""
SIDE = 8
"""Tokens on each side of a border that are decoded one at a time."""
CHUNKS = (1, 7, 16, 5, 33)
RESTS = (*SOUND, *LAYERS)
CACHE = (*RESTS, "cached_decoding")


@CHECKPOINT_LAWS.law(threshold=EQUAL, rests_on=("rotary_frequencies", *RESTS))
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

    def moved(before: int = 0) -> float:
        """Error of logits at positions that begin `SHIFT` behind `before`, against those that begin there."""
        want, got = (subject.logits(tokens, position_ids=positions + shift) for shift in (before, before + SHIFT))
        return float(subject.error(got, want).max())

    if not (error := moved()) <= subject.threshold:
        if problems := read(subject.config).problems():
            raise Unknown("; ".join(problems))
        with suppress(DoesNotApply):  # its attention is its own
            require_one_key_each(recorded(subject, tokens), tokens.shape[1])
        if subject.recurrent and moved(SHIFT) <= subject.threshold:
            raise DoesNotApply("its recurrent layers start again at position 0")
        require_not_of_norms(subject, moved)
    return Measurement(error, subject.threshold, cause=f"logits change where all positions move by {SHIFT}")


@CHECKPOINT_LAWS.law(threshold=EQUAL, rests_on=RESTS)
def cached_decoding(subject: Subject) -> Measurement:
    """A token at a time = a whole pass.

    With the model's own positions, with mask and positions given, in inference_mode, and inside generate(); of a sparse attention
    with all keys chosen, and with as many as its config says. The first 64 tokens and the last 64 come one by one.
    """
    require_one_way(subject)
    tokens = subject.tokens(subject.length)
    want = subject.logits(tokens)
    ways = one_by_one(subject, tokens, want)
    measurement = subject.measurement(ways, "decoding with the cache gives other logits than a whole pass")
    shown = any(subject.first_above(ways[way]) is not None for way in (BEGUN, BEHIND))
    cause = measurement.cause + (where_apart(subject, tokens, ways) if shown else "")
    if subject.cache_name == FORMER:
        cause += f"; generate() passes the cache as `{CURRENT}`: rename the argument {FORMER}"
    equal = "with as many keys as its config says, too, where the first of equal scores are taken"
    return replace(measurement, cause=cause, note=equal if CHOSEN in ways else "")


def one_by_one(subject: Subject, tokens: Tensor, want: Tensor) -> dict[str, Tensor]:
    """Way to decode -> error by position [L]."""
    length = tokens.shape[1]
    prompt = max(length // 2, length - STEPS)
    parts = {BEGUN: [1] * min(length, STEPS), BEHIND: [prompt, *[1] * (length - prompt)]}

    def error(sizes: Sequence[int], whole: Tensor, passed: bool = False) -> Tensor:
        end = sum(sizes)
        off = subject.error(subject.in_chunks(tokens[:, :end], sizes, passed), whole[:, :end])
        return pad(off, (0, length - end))

    ways = {way: error(sizes, want) for way, sizes in parts.items()}
    subject.on_progress(0.3)
    if subject.attends:  # a recurrent model masks the tokens of a call, and none before them
        ways[GIVEN] = torch.maximum(*(error(sizes, want, passed=True) for sizes in parts.values()))
        subject.on_progress(0.6)
    with torch.inference_mode():  # its tensors have no version, and code that asks for one raises
        ways["in inference_mode"] = error([length - FEW, *[1] * FEW], want, passed=subject.attends)
    if hasattr(subject.model, "generate"):
        off = subject.error(subject.generated(tokens, prompt), want[:, prompt - 1 : length - 1])
        ways["generate()"] = pad(off, (prompt - 1, 1))
    if subject.selection:
        with subject.selection.as_configured():
            whole = subject.logits(tokens)
            ways[CHOSEN] = torch.maximum(*(error(sizes, whole) for sizes in parts.values()))
    return ways


def where_apart(subject: Subject, tokens: Tensor, ways: Mapping[str, Tensor]) -> str:
    """Where decoding first differs from a whole pass, in words."""
    half = tokens.shape[1] // 2
    first, late = (subject.first_above(ways[way]) for way in (BEGUN, BEHIND))
    sizes = [half, *[1] * (max(late, half) + 1 - half)] if late is not None else [1] * ((first or 0) + 1)
    part = tokens[:, : sum(sizes)]
    whole = outputs(subject.model, lambda: subject.logits(part), part.shape[1])
    return first_apart(subject, outputs(subject.model, lambda: subject.in_chunks(part, sizes), part.shape[1]), whole)


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
    ways = {"": False} | ({"mask and positions given": True} if subject.attends else {})
    errors = {way: subject.error(subject.in_chunks(tokens, sizes, given), want) for way, given in ways.items()}
    return subject.measurement(errors, "a prompt that continues behind a cache gives other logits than a whole pass")


# ---- scalings that follow the length ---------------------------------------------------------------------------------------
def original_length(subject: Subject) -> int:
    """The original length of a scaling that follows the length. DoesNotApply if there is none."""
    read, border = ropes(subject.config), border_of(subject.config)
    if border is None:
        kinds = sorted({rope.scaling.name if rope.scaling else "no scaling" for rope in read.values()})
        raise DoesNotApply(f"its tables are the same for every length ({', '.join(kinds)})")
    return border


@CHECKPOINT_LAWS.law(threshold=EQUAL, rests_on=(*CACHE, "rotary_frequencies", "given_positions", "far_positions"))
def scaling_border(subject: Subject) -> Measurement:
    """Across the original length of a scaling: decoding = whole passes, and tables after a longer sequence = those before it.

    It decodes 8 tokens before and after the border token by token with a cache, at their positions. A model's own generate()
    may restart at the border (Phi-3's does), which shows only with as many tokens.
    """
    original_length(subject)
    return in_parts(subject, {"tables": tables_reset, "decoding": decoded_across})


def tables_reset(subject: Subject) -> Measurement:
    """Of the lengths L and L + 1, how many have other tables after a sequence of 2 L tokens."""
    original = original_length(subject)
    subject.require("position_ids", "few tokens cannot be at the border")
    lengths = [original, original + 1]
    before = [tables_in(subject, length) for length in lengths]
    after = [tables_in(subject, length, behind=2 * original) for length in lengths]
    wrong = [n for n, tables, other in zip(lengths, before, after, strict=True) if not same(tables, other)]
    cause = (
        f"tables of {' and '.join(map(str, wrong))} tokens after a sequence of {2 * original} are others than before it, so the "
        "same tokens get two answers"
    )
    return Measurement(len(wrong), 0, cause=cause)


def decoded_across(subject: Subject) -> Measurement:
    """Error of logits decoded across the border; that of its own generate(), if it prefills again there."""
    original = original_length(subject)
    worst, first = crossing(subject, original)
    if first is None:
        return Measurement(worst, subject.threshold, f"the border is {original} tokens")
    drift = (  # decoding and tables hold on both sides of it: this law rests on theirs
        f"cached decoding across the original length {original} drifts from position {first} on: cached keys were rotated by "
        "other tables than new ones. The published rule does that; prefill again beyond the border, or take a scaling whose "
        "tables stay (yarn, llama3, linear, a larger base)"
    )
    prepares = [vars(kind)[PREPARES] for kind in type(subject.model).__mro__ if PREPARES in vars(kind)]
    if prepares and prepares[0] is not vars(GenerationMixin)[PREPARES]:
        loop = f"a loop over forward drifts from position {first} on, by {worst:.1e}"
        if not reachable(subject, original + SIDE):
            raise DoesNotApply(
                f"{loop}; whether its own generate() prefills again there is measured by --length {original + SIDE}"
            )
        if (generated := error_of_generate(subject, original)) <= subject.threshold:
            return Measurement(generated, subject.threshold, f"its generate() prefills again there; {loop}")
    return Measurement(worst, subject.threshold, cause=drift, position=first, whose=RULE)


def crossing(subject: Subject, original: int) -> tuple[float, int | None]:
    """(largest error of logits with a cache, the first position where it exceeds the threshold)."""
    subject.require("position_ids", "few tokens cannot be at the border")
    start = max(0, original - SIDE)
    tokens = subject.tokens(original - start + SIDE)
    at = torch.arange(start, original + SIDE, device=subject.device)[None]
    subject.logits(tokens[:, :2])  # a short sequence resets what transformers keeps of a long one
    got = subject.in_chunks(tokens, [1] * tokens.shape[1], given=True, start=start)
    subject.logits(tokens[:, :2])
    ends = range(1, tokens.shape[1] + 1)
    wants = [subject.logits(tokens[:, :end], position_ids=at[:, :end])[:, -1:] for end in ends]
    subject.logits(tokens[:, :2])
    error = subject.error(got, torch.cat(wants, 1))
    first = subject.first_above(error)
    return float(error.max()), None if first is None else start + first


def error_of_generate(subject: Subject, original: int) -> float:
    """The largest error of generate() across the border."""
    before = min(SIDE, original - 1)
    start, tokens = original - before, subject.tokens(original + SIDE)
    subject.logits(tokens[:, :2])
    got = subject.generated(tokens, start + 1)
    subject.logits(tokens[:, :2])
    wants = [subject.logits(tokens[:, : at + 1])[:, -1:] for at in range(start, tokens.shape[1] - 1)]
    subject.logits(tokens[:, :2])
    return float(subject.error(got, torch.cat(wants, 1)).max())
