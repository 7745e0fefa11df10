"""Laws of one whole pass: the same twice, and nothing from the future."""

from __future__ import annotations

from typing import Any

import torch

from longitude.check.subject import CHECKPOINT_LAWS, EQUAL, Subject
from longitude.testing.engine import DoesNotApply, Measurement

FIRST = ("config", "given_positions", "far_positions")
SOUND = (*FIRST, "repeatable", "causality")
"""Laws on which all others of equal logits rest."""
BOTH_WAYS = {
    "cpmant": "its tokens attend in both directions within a prompt, all of which its forward takes behind a cache",
    "reformer": "its LSH layers choose keys by the hashes of all tokens, later ones among them",
}
"""Model types whose own code is not causal, and how."""


SWITCHES = ("causal", "is_decoder")
"""Keys by which models that can attend in both directions do not."""


def switched_off(config: Any) -> str | None:
    """The key that makes a model attend in both directions."""
    return next((key for key in SWITCHES if getattr(config, key, None) is False), None)


def require_one_way(subject: Subject) -> None:
    """DoesNotApply for a model that is not causal by itself."""
    if (reason := BOTH_WAYS.get(subject.config.model_type)) is not None:
        raise DoesNotApply(reason)


@CHECKPOINT_LAWS.law(threshold=EQUAL, rests_on=FIRST)
def repeatable(subject: Subject) -> Measurement:
    """A pass = the same pass again."""
    tokens = subject.tokens(subject.length)
    first = subject.logits(tokens)
    error = subject.error(subject.logits(tokens), first)
    if not bool(first.isfinite().all()):
        cause = "logits are not finite: an overflow in the model's dtype, or a number in its config or weights that makes one"
    elif getattr(subject.config, "hash_seed", 0) is None:  # Reformer's
        cause = "one and the same pass gives two answers: hash_seed is None, so each pass draws other hashes; give one"
    else:
        cause = "one and the same pass gives two answers: dropout that is still on, or tables that one call leaves for the next"
    return subject.measurement(error, cause)


@CHECKPOINT_LAWS.law(threshold=EQUAL, rests_on=SOUND[:-1])
def causality(subject: Subject) -> Measurement:
    """Logits before a position = those with other tokens from it on."""
    if "perm_mask" in subject.takes:
        raise DoesNotApply(
            "its tokens attend in both directions, unless perm_mask says in which order, as generate() does (XLNet)"
        )
    require_one_way(subject)
    tokens = subject.tokens(subject.length)
    want = subject.logits(tokens)
    worst = torch.zeros(subject.length, dtype=torch.float64, device=tokens.device)
    for start in sorted({1, subject.length // 2, subject.length - 1}):
        changed = torch.cat([tokens[:, :start], subject.tokens(subject.length - start, seed=1)], 1)
        worst[:start] = worst[:start].maximum(subject.error(subject.logits(changed), want)[:start])
    if subject.first_above(worst) is not None and (switch := switched_off(subject.config)):
        raise DoesNotApply(f"its tokens attend in both directions: {switch} = False in its config")
    return subject.measurement(
        worst,
        "logits depend on tokens that come later: the causal mask is dropped in a whole pass, as by an attention function "
        "that gets no mask and does not apply one itself",
    )
