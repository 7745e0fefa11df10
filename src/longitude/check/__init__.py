"""The laws of a checkpoint: whether a causal model knows where its tokens are, measured and said with a threshold.

    from longitude.checkpoints.load import load
    from longitude.check import check

    for verdict in check(load("my-model", tokenizer=False)):
        print(verdict.law, verdict.outcome, verdict.measured, verdict.threshold, verdict.hint)

`check` takes a checkpoint or a model in memory, tries every law and says pass, fail or not applicable, with the reason. A law
may rest on others: where one of those fails, its own failure is no finding of its own, so one bug gives one diagnosis.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import torch

from longitude.check import batching, borders, decoding, rotary
from longitude.check.base import Finding, Law, NotApplicable, Verdict, chosen, try_all
from longitude.check.layout import layout
from longitude.check.subject import Subject, computing_in, widest
from longitude.checkpoints.config import border_of, contradictions, declared_length, not_rotary, raw_config
from longitude.checkpoints.load import Checkpoint
from longitude.checkpoints.positions import last_position


def config(subject: Subject) -> Finding:
    """Contradictions, unknown keys and silent defaults, counted."""
    found = list(contradictions(subject.raw, subject.config))
    return Finding(len(found), 0, hint="; ".join(found))


OWN: tuple[Law, ...] = (
    Law("config", "config.json: contradictions, unknown keys, silent defaults", config),
    Law("rotary frequencies", "turning of the tables = what the config says (relative)", rotary.frequencies),
    Law("far positions", "tables, biases or logits = those of float32", rotary.far, ("rotary frequencies",)),
)
"""Laws tried in the model's own dtype."""

_SOUND = ("repeatable", "far positions")
_CACHE = ("causality", "cached decoding")
EQUAL: tuple[Law, ...] = (
    Law("repeatable", "a pass = the same pass again", decoding.repeatable),
    Law("causality", "logits before a place = those with other tokens behind it", decoding.causality, _SOUND),
    Law(
        "relative positions", f"logits at positions + {rotary.SHIFT} = logits", rotary.relative, (*_SOUND, "causality")
    ),
    Law("cached decoding", "a token at a time = a whole pass", decoding.cached, (*_SOUND, "causality")),
    Law("chunked prefill", "pieces of 1 to 33 tokens = a whole pass", decoding.chunked, (*_SOUND, *_CACHE)),
    Law("batch invariance", "a row in a batch = the row alone", batching.rows, _SOUND),
    Law(
        "left padding",
        "rows padded on the left = each alone",
        batching.left_padding,
        (*_SOUND, *_CACHE, "chunked prefill", "batch invariance"),
    ),
    Law(
        "packed documents",
        "documents in one row = each alone",
        batching.packed,
        (*_SOUND, *_CACHE, "chunked prefill", "left padding"),
    ),
    Law(
        "scaling border",
        "tables around the original length = the published rule; decoding across it = whole passes",
        borders.scaling,
        (*_SOUND, *_CACHE, "rotary frequencies"),
    ),
    Law(
        "rotary layout",
        "logits = the reference's",
        layout,
        (
            *_SOUND,
            *_CACHE,
            "config",
            "rotary frequencies",
            "relative positions",
            "chunked prefill",
            "batch invariance",
            "left padding",
        ),
    ),
)
"""Laws of equal logits, tried in float64 where it fits."""

LAWS = (*OWN, *EQUAL)
CAP = 512
"""Tokens that equality laws look at, at most, unless a length is asked for."""
LEAST = 16
UNKNOWN = 256
"""What stands for the trained length of a model that declares none."""
BEYOND = 16
"""Tokens beyond the trained length that they look at where positions do not end there."""


def check(
    checkpoint: Checkpoint | Any,
    *,
    length: int | None = None,
    reference: Checkpoint | Any = None,
    laws: Sequence[str] | None = None,
    raw: Mapping[str, Any] | None = None,
    seed: int = 0,
) -> list[Verdict]:
    """Every law on one causal model -> what each said, in order.

    checkpoint, reference: from `load`, or models in memory. length: tokens that equality laws look at, each position
    compared; default: 16 beyond the trained length, or up to where positions end, and 512 at most. laws: names of the ones
    to try (all). raw: config.json as it stands; default: the checkpoint's file, else the model's config.

    Errors: ValueError for a length that the model does not have, an unknown law, a reference of another vocabulary.
    """
    return try_laws(subject_of(checkpoint, length=length, reference=reference, raw=raw, seed=seed), laws)


def subject_of(
    checkpoint: Checkpoint | Any,
    *,
    length: int | None = None,
    reference: Checkpoint | Any = None,
    raw: Mapping[str, Any] | None = None,
    seed: int = 0,
) -> Subject:
    """What laws look at, with the arguments of `check`."""
    path = checkpoint.path if isinstance(checkpoint, Checkpoint) else None
    model = checkpoint.model if isinstance(checkpoint, Checkpoint) else checkpoint
    other = reference.model if isinstance(reference, Checkpoint) else reference
    said = raw if raw is not None else raw_config(path) if path is not None else model.config.to_dict()
    config, reach = model.config.get_text_config(), length_of(model, length)
    border = border_of(config)
    subject = Subject(
        model=model.eval(),
        raw=said,
        length=reach if border is None else min(reach, border - 1),  # beyond it logits depend on the whole length
        reach=reach,
        kind=widest(model),
        reference=None if other is None else other.eval(),
        seed=seed,
    )
    if other is not None and other.config.get_text_config().vocab_size != config.vocab_size:
        theirs = other.config.get_text_config().vocab_size
        raise ValueError(f"reference: expected a vocabulary of {config.vocab_size}, as the model's, got {theirs}")
    with torch.no_grad():
        subject.kind = computable(subject)
    return subject


def try_laws(
    subject: Subject,
    laws: Sequence[str] | None = None,
    watch: Callable[[str, int, int], None] = lambda law, done, all: None,
) -> list[Verdict]:
    """The laws of these names, or all. watch(law, done, all) is told of each before it is tried."""
    wanted = chosen(LAWS, laws)
    with torch.no_grad(), ExitStack() as stack:
        own = try_all([law for law in wanted if law in OWN], wanted, subject, watch)
        for model in (subject.model, subject.reference):
            if model is not None:
                stack.enter_context(computing_in(model, subject.kind))
        return try_all([law for law in wanted if law not in OWN], wanted, subject, watch, own)


def length_of(model: Any, length: int | None) -> int:
    """The tokens that equality laws look at."""
    config, end = model.config.get_text_config(), last_position(model)
    if length is None:
        declared = declared_length(config) or UNKNOWN
        trained = min(border_of(config) or declared, end or declared)
        length = min(trained + BEYOND, CAP, end or CAP)
        return length if length <= trained or goes_on(model, length) else trained
    if length < LEAST:
        raise ValueError(f"--length: expected {LEAST} tokens or more, got {length}")
    if end is not None and length > end:
        raise ValueError(f"--length: expected at most {end}, where the model's table of positions ends, got {length}")
    return length


def goes_on(model: Any, length: int) -> bool:
    """Whether a model takes so many tokens: tables that have no name of their own may end before."""
    if not_rotary(model.config.get_text_config()) is None:
        return True
    device = next(model.parameters()).device
    if device.type != "cpu":  # an accelerator does not survive an index beyond a table
        return False
    try:
        with torch.no_grad():
            model(input_ids=torch.zeros(1, length, dtype=torch.long), use_cache=False)
    except (IndexError, RuntimeError, ValueError):
        return False
    return True


def computable(subject: Subject) -> torch.dtype:
    """The dtype of equality laws: float32 where a model cannot compute in float64, as Bloom cannot: its softmax is one of
    float32, in which the float64 mask of padding overflows.
    """
    if subject.kind == torch.float64:
        tokens = subject.tokens(4)
        mask = torch.tensor([[0, 1, 1, 1]], device=tokens.device)
        said = {"attention_mask": mask} if "attention_mask" in subject.takes else {}
        try:
            with computing_in(subject.model, torch.float64):
                finite = bool(subject.logits(tokens, **said).isfinite().all())
        except (RuntimeError, TypeError):
            return torch.float32
        return torch.float64 if finite else torch.float32
    return subject.kind


__all__ = ["LAWS", "Law", "NotApplicable", "Subject", "Verdict", "check", "subject_of", "try_laws"]
