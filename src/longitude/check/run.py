"""Tries the laws of a checkpoint on a model: in its own dtype, then in float64."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from longitude.check.causes import class_of
from longitude.check.quick import require_gpu_of
from longitude.check.subject import CHECKPOINT_LAWS, Subject, Unused, computing_in, widest
from longitude.checkpoints.compare import border_of, not_rotary
from longitude.checkpoints.declared import declared_length, raw_config
from longitude.checkpoints.load import Checkpoint
from longitude.checkpoints.positions import last_position
from longitude.errors import UsageError
from longitude.testing.engine import Law, OnLaw, Result, try_laws

laws = CHECKPOINT_LAWS.laws
laws()  # all at once, so that their order is that of the battery, whichever module is imported first

IN_OWN_DTYPE = (
    "files", "unread_keys", "rotary_frequencies", "given_positions", "far_positions", "served_positions", "meta_device",
)  # fmt: skip
"""Laws tried in the model's own dtype; the others, of equal logits, in float64 where it fits."""
CAP = 256
"""The most tokens that equality laws compare, unless a length is given."""
LEAST = 16
"""The fewest tokens that may be given as length."""
UNKNOWN = 256
"""Length that replaces the training length of a model that declares none, in tokens."""
BEYOND = 16
"""Tokens compared beyond the training length, where positions do not end there."""


def check(
    checkpoint: Checkpoint | Any,
    *,
    length: int | None = None,
    reference: Checkpoint | Any = None,
    laws: Sequence[str] | None = None,
    raw: Mapping[str, Any] | None = None,
    seed: int = 0,
) -> dict[str, Result]:
    """Try every law on one causal model.

    Args:
        checkpoint: From `load`, or a model in memory.
        length: Tokens that equality laws compare, position by position; by default 16 beyond the training length, or up to where
            positions end, and 256 at most.
        reference: A checkpoint or a model that must give the same logits.
        laws: Names of the laws to try; all by default.
        raw: config.json as it is written; by default the checkpoint's file, else the model's config.
        seed: Seed for the random input tokens.

    Returns:
        The Result of each law by its name, in order.

    Raises:
        ValueError: For a length that the model does not have, an unknown law, a reference of another vocabulary.
    """
    return check_subject(subject_of(checkpoint, length=length, reference=reference, raw=raw, seed=seed), laws)


def subject_of(
    checkpoint: Checkpoint | Any,
    *,
    length: int | None = None,
    reference: Checkpoint | Any = None,
    raw: Mapping[str, Any] | None = None,
    seed: int = 0,
    folder: str | Path | None = None,
) -> Subject:
    """Make the subject that laws measure: the model in eval mode, its config, and the tokens to compare.

    Args:
        checkpoint: From `load`, or a model in memory.
        length: Tokens to compare; None: as in `check`.
        reference: A checkpoint or a model that must give the same logits.
        raw: Content of config.json; None: the checkpoint's file, else the model's config.
        seed: Seed for the random input tokens.
        folder: Folder of the model's files; None: the checkpoint's folder, if it has one.

    Returns:
        The subject. Its `kind` is float64 if the model can compute in it, else float32.

    Raises:
        ValueError: For a length that the model does not have, or a reference of another vocabulary.
    """
    path = checkpoint.path if isinstance(checkpoint, Checkpoint) else None
    model = checkpoint.model if isinstance(checkpoint, Checkpoint) else checkpoint
    other = reference.model if isinstance(reference, Checkpoint) else reference
    if getattr(model.config, "is_encoder_decoder", False):
        raise UsageError(
            "check", "a model that predicts the next token", f"{type(model).__name__}, which has an encoder"
        )
    unused = Unused(model)
    as_written: Mapping[str, Any] = raw or (raw_config(path) if path is not None else model.config.to_dict())
    config, reach = model.config.get_text_config(), length_of(model, length)
    border = border_of(config)
    subject = Subject(
        model=model.eval(),
        raw=as_written,
        length=reach if border is None else min(reach, border - 1),  # beyond it logits depend on the whole length
        reach=reach,
        kind=widest(model),
        reference=None if other is None else other.eval(),
        seed=seed,
        checkpoint=checkpoint if isinstance(checkpoint, Checkpoint) else None,
        folder=next((Path(place) for place in (folder, path) if place is not None and Path(place).is_dir()), None),
    )
    subject.unused = unused
    if other is not None and (size := other.config.get_text_config().vocab_size) != config.vocab_size:
        raise ValueError(f"reference: expected a vocabulary of {config.vocab_size}, as the model's, got {size}")
    with torch.no_grad():
        subject.kind = computable(subject)
    return subject


def check_subject(
    subject: Subject, laws: Sequence[str] | None = None, on_law: OnLaw = lambda name, done, total: None
) -> dict[str, Result]:
    """Try laws on a subject.

    Args:
        subject: From `subject_of`.
        laws: Names of the laws to try; None: all.
        on_law: Called as on_law(name, done, total) before each law.

    Returns:
        The Result of each law by its name, in order.

    Raises:
        ValueError: For an unknown law, and for a model with kernels that need a GPU on a machine without one.
    """
    chosen = CHECKPOINT_LAWS.chosen(laws)
    require_kernels(subject)
    in_own_dtype: list[Law] = [law for law in chosen if law.name in IN_OWN_DTYPE]
    with torch.no_grad(), ExitStack() as stack:
        results = try_laws(in_own_dtype, subject, on_law, total=len(chosen))
        stack.enter_context(subject.selection.of_all(subject.reach))
        for model in (subject.model, subject.reference):
            if model is not None:
                stack.enter_context(computing_in(model, subject.kind))
        results = try_laws([law for law in chosen if law not in in_own_dtype], subject, on_law, results, len(chosen))
    return {name: attributed(result, subject) for name, result in results.items()}


@torch.no_grad()
def require_kernels(subject: Subject) -> None:
    """ValueError if Triton finds no GPU for the kernels that transformers uses: no law would show anything about the model."""
    try:
        subject.logits(subject.tokens(1))
    except Exception as error:  # laws report any other error
        require_gpu_of(type(subject.model).__name__, error)


def attributed(result: Result, subject: Subject) -> Result:
    """A result whose failure has a cause: the class, unless the law gave another."""
    if result.status != "failed" or result.whose:
        return result
    return replace(result, whose=class_of(subject))


def length_of(model: Any, length: int | None) -> int:
    """The number of tokens that equality laws compare."""
    config, end = model.config.get_text_config(), last_position(model)
    if length is None:
        declared = declared_length(config) or UNKNOWN
        trained = min(border_of(config) or declared, end or declared)
        length = min(trained + BEYOND, CAP, end or CAP)
        # A table may end one or two positions earlier: of those behind its padding, or of the token that comes next.
        return next((n for n in (length, trained, trained - 1) if takes_length(model, n)), trained - 2)
    if length < LEAST:
        raise ValueError(f"--length: expected {LEAST} tokens or more, got {length}")
    if end is not None and length > end:
        raise ValueError(f"--length: expected at most {end}, where the model's table of positions ends, got {length}")
    return length


def takes_length(model: Any, length: int) -> bool:
    """Whether a model supports this many tokens: unnamed tables may end before."""
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
    """The dtype of equality laws: float32 if a model cannot compute in float64.

    Bloom cannot: its softmax is in float32, in which the float64 mask of padding overflows.
    """
    if subject.kind == torch.float64:
        tokens = subject.tokens(4)
        mask = torch.tensor([[0, 1, 1, 1]], device=tokens.device)
        options = {"attention_mask": mask} if "attention_mask" in subject.takes else {}
        try:
            with computing_in(subject.model, torch.float64):
                finite = bool(subject.logits(tokens, **options).isfinite().all())
        except (RuntimeError, TypeError):
            return torch.float32
        return torch.float64 if finite else torch.float32
    return subject.kind
