"""Laws of scalings that follow the length: the published switch at the original length, and a cache that crosses it.

Tables follow the largest position, so a pass of three tokens shows those of any length.
"""

from __future__ import annotations

import torch
from transformers.generation import GenerationMixin

from longitude.check.decoding import CACHE
from longitude.check.family import by_its_class
from longitude.check.rotary import deviation, measured, require_tables, ropes, tables_of
from longitude.check.subject import CHECKPOINT_LAWS, EQUAL, Subject
from longitude.checkpoints.config import border_of
from longitude.positions.scaling import Follows
from longitude.testing.engine import DoesNotApply, Measurement

LONGEST = 608
"""Tokens of a whole pass that are tried where only that shows something, unless a length is given."""
SIDE = 8
"""Tokens on each side of a border that are decoded one at a time."""


def border(subject: Subject) -> int:
    """The original length of a scaling that follows the length. DoesNotApply where there is none."""
    read, found = ropes(subject.config), border_of(subject.config)
    if found is None:
        kinds = sorted({rope.scaling.name if rope.scaling else "no scaling" for rope in read.values()})
        raise DoesNotApply(f"its tables are the same for every length ({', '.join(kinds)})")
    return found


def reachable(subject: Subject, length: int) -> bool:
    """Whether a pass of so many tokens is tried."""
    return length <= max(LONGEST, subject.reach)


# ---- tables --------------------------------------------------------------------------------------------------------------
@CHECKPOINT_LAWS.law(threshold=EQUAL, rests_on=("config", "rotary_frequencies", "given_positions"))
@by_its_class
def scaling_tables(subject: Subject) -> Measurement:
    """Tables around the original length = those of the published rule.

    At L - 1, L, L + 1 and 2 L tokens, then at L again, of scalings that follow the length.
    """
    original = border(subject)
    if "position_ids" in subject.takes:
        worst, wrong = rule(subject, original, by_position=True)
        if wrong and not follows(subject, original):
            wrong = None  # they may follow the number of tokens
    else:
        worst, wrong = 0.0, None
    if wrong is None:
        if not reachable(subject, 2 * original):
            raise DoesNotApply(f"its tables do not follow the largest position; --length {2 * original} measures passes")
        worst, wrong = rule(subject, original, by_position=False)
    cause = f"tables are not those of the published rule at {', '.join(wrong)}, by {worst:.2g} of a frequency"
    if wrong and all("after" in one for one in wrong):
        cause += ": those of the longer one are kept"
    return Measurement(worst if wrong else min(worst, EQUAL), EQUAL, f"the border is {original} tokens", cause)


def follows(subject: Subject, original: int) -> bool:
    """Whether tables change with the largest position at all."""
    near, far = (
        tables_of(subject, subject.tokens(3), position_ids=positions(subject, n)) for n in (original - 1, 2 * original)
    )
    return any(not torch.equal(near[layer].sin[:2], far[layer].sin[:2]) for layer in near)


def positions(subject: Subject, length: int) -> torch.Tensor:
    """[1, 3]: 0, 1, and the last of a sequence of this length."""
    return torch.tensor([[0, 1, length - 1]], device=subject.device)


def rule(subject: Subject, original: int, by_position: bool) -> tuple[float, list[str]]:
    """(largest relative error of a frequency, the lengths where one is off)."""
    worst, wrong = 0.0, []
    subject.logits(subject.tokens(2))
    lengths = [original - 1, original, original + 1, 2 * original]
    for again, length in [*((False, n) for n in lengths), (True, original)]:
        if by_position:
            tables = tables_of(subject, subject.tokens(3), position_ids=positions(subject, length))
        else:
            tables = tables_of(subject, subject.tokens(length))
        require_tables(tables)
        off = max(
            deviation(*measured(tables, layer, rope, subject, length))
            for layer, rope in ropes(subject.config).items()
            if layer in tables and isinstance(rope.scaling, Follows)
        )
        if not off <= EQUAL:
            wrong.append(f"{length} tokens" + (" after a longer sequence" if again else ""))
        worst = max(worst, off)
    subject.logits(subject.tokens(2))  # a short sequence resets what transformers keeps of a long one
    return worst, wrong


# ---- decoding ------------------------------------------------------------------------------------------------------------
@CHECKPOINT_LAWS.law(threshold=EQUAL, rests_on=(*CACHE, "scaling_tables"))
def scaling_border(subject: Subject) -> Measurement:
    """Decoding across the original length = whole passes.

    Of 8 tokens before and behind it, at their positions, a token at a time behind a cache. A generate() of the model's own may
    begin again at the border (Phi-3's does), which shows with as many tokens only.
    """
    original = border(subject)
    worst, first = crossing(subject, original)
    if first is None:
        return Measurement(worst, subject.threshold, f"the border is {original} tokens")
    drift = (
        f"cached decoding across the original length {original} drifts from position {first} on: cached keys were rotated by "
        "other tables than new ones. The published rule does that; prefill again beyond the border, or take a scaling whose "
        "tables stay (yarn, llama3, linear, a larger base)"
    )
    if type(subject.model).prepare_inputs_for_generation is not GenerationMixin.prepare_inputs_for_generation:
        loop = f"a loop over forward drifts from position {first} on, by {worst:.1e}"
        if not reachable(subject, original + SIDE):
            raise DoesNotApply(
                f"{loop}; whether its own generate() prefills again there is measured by --length {original + SIDE}"
            )
        if (generated := generating(subject, original)) <= subject.threshold:
            return Measurement(generated, subject.threshold, f"its generate() prefills again there; {loop}")
    return Measurement(worst, subject.threshold, cause=drift, position=first, whose="rule")


def crossing(subject: Subject, original: int) -> tuple[float, int | None]:
    """(largest error of logits behind a cache, the first position where it exceeds the threshold)."""
    if "position_ids" not in subject.takes:
        raise DoesNotApply("forward takes no position_ids, so the border cannot be reached with few tokens")
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
