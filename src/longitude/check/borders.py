"""Laws of scalings that follow the length: the published switch at the original length, and a cache that crosses it.

Tables follow the largest position, so a pass of three tokens shows those of any length.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from unittest.mock import patch

import torch
from torch import nn
from transformers.generation.utils import GenerationMixin

from longitude.check.decoding import CACHE
from longitude.check.family import by_its_class
from longitude.check.rotary import Tables, deviation, measured, require_tables, ropes, tables_of
from longitude.check.subject import CHECKPOINT_LAWS, EQUAL, Subject
from longitude.checkpoints.compare import border_of
from longitude.positions.scaling import Follows
from longitude.testing.engine import DoesNotApply, Measurement

TABLES = ("config", "rotary_frequencies", "given_positions", "far_positions")
LONGEST = 608
"""Tokens of a full pass, if only a full pass can show a border, unless a length is given."""
PREPARES = "prepare_inputs_for_generation"
"""The method in which a class may restart after a border."""
SIDE = 8
"""Tokens on each side of a border that are decoded one at a time."""


def border(subject: Subject) -> int:
    """The original length of a scaling that follows the length. DoesNotApply if there is none."""
    read, found = ropes(subject.config), border_of(subject.config)
    if found is None:
        kinds = sorted({rope.scaling.name if rope.scaling else "no scaling" for rope in read.values()})
        raise DoesNotApply(f"its tables are the same for every length ({', '.join(kinds)})")
    return found


def reachable(subject: Subject, length: int) -> bool:
    """Whether a full forward pass of this length is tried."""
    return length <= max(LONGEST, subject.reach)


@contextmanager
def frozen(model: nn.Module) -> Iterator[int]:
    """Context in which sequences of every length have the tables of short ones; yields the number of modules changed."""
    named = [(each, getattr(each, "rope_type", None)) for each in model.modules()]
    found = [(module, kind) for module, kind in named if isinstance(kind, str | dict)]
    with ExitStack() as stack:
        for module, kind in found:
            plain = "default" if isinstance(kind, str) else dict.fromkeys(kind, "default")
            stack.enter_context(patch.object(module, "rope_type", plain))
        yield len(found)


# ---- tables --------------------------------------------------------------------------------------------------------------
@CHECKPOINT_LAWS.law(threshold=EQUAL, rests_on=TABLES)
@by_its_class
def scaling_tables(subject: Subject) -> Measurement:
    """Tables around the original length = those of the published rule.

    At L - 1, L, L + 1 and 2 L tokens, of scalings that follow the length, each after a short sequence.
    """
    original = border(subject)
    lengths = [original - 1, original, original + 1, 2 * original]
    found = {length: tables_at(subject, length, "position_ids" in subject.takes) for length in lengths}
    if all(same(found[lengths[0]], each) for each in found.values()):  # they may follow the number of tokens
        if not reachable(subject, lengths[-1]):
            raise DoesNotApply(f"its tables do not follow the largest position; --length {lengths[-1]} measures passes")
        found = {length: tables_at(subject, length, by_position=False) for length in lengths}
    errors = {
        length: max(
            deviation(*measured(tables, layer, rope, subject, length))
            for layer, rope in ropes(subject.config).items()
            if layer in tables and isinstance(rope.scaling, Follows)
        )
        for length, tables in found.items()
    }
    wrong = [f"{length}" for length, off in errors.items() if not off <= EQUAL]
    worst = max(errors.values())
    cause = f"tables are not those of the published rule at {', '.join(wrong)} tokens, by {worst:.2g} of a frequency"
    return Measurement(worst, EQUAL, f"the border is {original} tokens", cause)


@CHECKPOINT_LAWS.law(threshold=0, rests_on=(*TABLES, "scaling_tables"))
def scaling_reset(subject: Subject) -> Measurement:
    """Tables after a longer sequence = tables before it.

    Of scalings that follow the length: at L and L + 1 tokens, before and after 2 L. The number counts lengths.
    """
    original = border(subject)
    subject.require("position_ids", "few tokens cannot be at the border")
    lengths = [original, original + 1]
    before = [tables_at(subject, length) for length in lengths]
    after = [tables_at(subject, length, behind=2 * original) for length in lengths]
    wrong = [n for n, one, other in zip(lengths, before, after, strict=True) if not same(one, other)]
    longer = tables_at(subject, 2 * original) if wrong else {}
    kept = all(same(after[lengths.index(n)], longer) for n in wrong)
    return Measurement(
        len(wrong),
        0,
        cause=f"tables of {' and '.join(map(str, wrong))} tokens after a sequence of {2 * original} are "
        + ("those of the longer one" if kept else "others than before it")
        + ", so the same tokens get two answers"
        + ("; call the model with a short sequence in between" if kept else ""),
    )


def tables_at(
    subject: Subject, length: int, by_position: bool = True, behind: int | None = None
) -> dict[str | None, Tables]:
    """Tables of the first two positions in a sequence of this length, after a short one, then one of `behind` tokens."""
    subject.logits(subject.tokens(2))  # a short sequence resets what transformers keeps of a long one

    def tables(length: int) -> dict[str | None, Tables]:
        if not by_position:
            return tables_of(subject, subject.tokens(length))
        at = torch.tensor([[0, 1, length - 1]], device=subject.device)
        return tables_of(subject, subject.tokens(3), position_ids=at)

    if behind is not None:
        tables(behind)
    found = tables(length)
    subject.logits(subject.tokens(2))
    require_tables(found)
    return found


def same(one: Mapping[str | None, Tables], other: Mapping[str | None, Tables]) -> bool:
    """Whether the first two positions have the same tables."""
    return all(torch.equal(one[layer].sin[:2], other[layer].sin[:2]) for layer in one)


# ---- decoding ------------------------------------------------------------------------------------------------------------
@CHECKPOINT_LAWS.law(threshold=EQUAL, rests_on=(*CACHE, *TABLES, "scaling_tables"))
def scaling_border(subject: Subject) -> Measurement:
    """Decoding across the original length = whole passes.

    It decodes 8 tokens before and after the border token by token with a cache, at their positions. A model's own generate()
    may restart at the border (Phi-3's does), which shows only with as many tokens.
    """
    original = border(subject)
    worst, first = crossing(subject, original)
    if first is None:
        return Measurement(worst, subject.threshold, f"the border is {original} tokens")
    drift, whose = f"cached decoding across the original length {original} drifts from position {first} on", ""
    with frozen(subject.model) as modules:
        by_tables = modules and crossing(subject, original)[1] is None
    if by_tables:  # with the tables of short sequences, logits do not drift
        drift += (
            ": cached keys were rotated by other tables than new ones. The published rule does that; prefill again beyond the "
            "border, or take a scaling whose tables stay (yarn, llama3, linear, a larger base)"
        )
        whose = "rule"
    elif not modules:
        drift, whose = f"{drift}; whether by the published rule, whose tables change there, was not tried", "not known"
    prepares = [vars(kind)[PREPARES] for kind in type(subject.model).__mro__ if PREPARES in vars(kind)]
    if prepares and prepares[0] is not vars(GenerationMixin)[PREPARES]:
        loop = f"a loop over forward drifts from position {first} on, by {worst:.1e}"
        if not reachable(subject, original + SIDE):
            raise DoesNotApply(
                f"{loop}; whether its own generate() prefills again there is measured by --length {original + SIDE}"
            )
        if (generated := generating(subject, original)) <= subject.threshold:
            return Measurement(generated, subject.threshold, f"its generate() prefills again there; {loop}")
    return Measurement(worst, subject.threshold, cause=drift, position=first, whose=whose)


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


def generating(subject: Subject, original: int) -> float:
    """The largest error of generate() across the border."""
    before = min(SIDE, original - 1)
    start, tokens = original - before, subject.tokens(original + SIDE)
    subject.logits(tokens[:, :2])
    got = subject.generated(tokens, start + 1)
    subject.logits(tokens[:, :2])
    wants = [subject.logits(tokens[:, : at + 1])[:, -1:] for at in range(start, tokens.shape[1] - 1)]
    subject.logits(tokens[:, :2])
    return float(subject.error(got, torch.cat(wants, 1)).max())
