"""Laws of one whole pass: the same twice, and nothing from the future."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from longitude.check.causes import FILE
from longitude.check.subject import CHECKPOINT_LAWS, EQUAL, Subject
from longitude.testing.engine import DoesNotApply, Measurement

SHORT = 3
"""Tokens of a short pass."""
FIRST = ("files", "given_positions", "far_positions", "served_positions")
SOUND = (*FIRST, "repeatable", "causality")
"""Laws that all other laws of equal logits presuppose."""
BOTH_WAYS = {
    "cpmant": "its tokens attend in both directions within a prompt, all of which its forward takes behind a cache",
    "reformer": "its LSH layers choose keys by the hashes of all tokens, later ones among them",
}
"""Model types with code that is not causal -> the reason."""


SWITCHES = ("causal", "is_decoder")
"""Config keys that make some models causal; False lets them attend in both directions."""


def switched_off(config: Any) -> str | None:
    """The key that makes a model attend in both directions."""
    return next((key for key in SWITCHES if getattr(config, key, None) is False), None)


def require_one_way(subject: Subject) -> None:
    """DoesNotApply for a model that is not causal by itself."""
    if (reason := BOTH_WAYS.get(subject.config.model_type)) is not None:
        raise DoesNotApply(reason)


@CHECKPOINT_LAWS.law(threshold=EQUAL, rests_on=FIRST)
def repeatable(subject: Subject) -> Measurement:
    """A pass = the same pass again.

    And the same as the first of all passes that follow a short one.
    """
    tokens = subject.tokens(subject.length)
    first = subject.logits(tokens)
    error = subject.error(subject.logits(tokens), first)
    if subject.first_above(error) is None:
        return behind_a_short_one(subject, tokens, error)
    if not bool(first.isfinite().all()):
        tensors = (*subject.model.named_parameters(), *subject.model.named_buffers())
        bad = next(
            (name for name, tensor in tensors if tensor.is_floating_point() and not bool(tensor.isfinite().all())), ""
        )
        cause = "logits are not finite" + (f", and neither is {bad}" if bad else "")
        return replace(subject.measurement(error, cause), whose=FILE if bad else "")
    return subject.measurement(error, "one and the same pass gives two answers")


def behind_a_short_one(subject: Subject, tokens: Tensor, error: Tensor) -> Measurement:
    """Compare a model's first pass with the same pass after a short first one, whose tables may be kept and be too short."""
    if subject.unused is None or not subject.unused.left():
        return subject.measurement(error, "")
    subject.unused.restore()
    want = subject.logits(tokens)
    subject.unused.restore()
    subject.logits(tokens[:, :SHORT])
    left = ", ".join(subject.unused.left()[:3])
    try:
        error = error.maximum(subject.error(subject.logits(tokens), want))
        outcome = "gives other logits"
    except (IndexError, RuntimeError, ValueError) as raised:
        error = torch.full_like(error, math.inf)
        outcome = f"raises {type(raised).__name__}"
    subject.unused.restore()
    subject.logits(tokens)
    return subject.measurement(
        error, f"behind a pass of {SHORT} tokens that is the first, it {outcome}: that one leaves {left}"
    )


@CHECKPOINT_LAWS.law(threshold=EQUAL, rests_on=SOUND[:-1])
def causality(subject: Subject) -> Measurement:
    """Logits before a position = those with other tokens from it on."""
    if "perm_mask" in subject.takes:
        raise DoesNotApply(
            "its tokens attend in both directions, unless perm_mask says in which order, as generate() does (XLNet)"
        )
    require_one_way(subject)
    tokens = subject.tokens(subject.length)
    worst = leak(subject, tokens)
    if subject.first_above(worst) is not None and (switch := switched_off(subject.config)):
        raise DoesNotApply(f"its tokens attend in both directions: {switch} = False in its config")
    return subject.measurement(worst, "logits depend on tokens that come later")


def leak(subject: Subject, tokens: Tensor) -> Tensor:
    """Change of the logits at each position [L] if later tokens change."""
    want, length = subject.logits(tokens), tokens.shape[1]
    worst = torch.zeros(length, dtype=torch.float64, device=tokens.device)
    for start in sorted({1, length // 2, length - 1}):
        changed = torch.cat([tokens[:, :start], subject.tokens(length - start, seed=1)], 1)
        worst[:start] = worst[:start].maximum(subject.error(subject.logits(changed), want)[:start])
    return worst
