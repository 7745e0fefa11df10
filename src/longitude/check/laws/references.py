"""Laws that compare with another model: the class of transformers with the same weights, and a reference in another layout."""

from __future__ import annotations

import copy
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import cache, partial
from importlib.util import module_from_spec, spec_from_file_location
from typing import Any

import torch
from torch.nn.functional import cross_entropy

from longitude.check.against import layout_changes
from longitude.check.causes import FILE, first_apart
from longitude.check.laws.decoding import CACHE
from longitude.check.laws.rotation import ropes
from longitude.check.recorder import outputs
from longitude.check.subject import CHECKPOINT_LAWS, EQUAL, Subject, computing_in, patched, with_attributes
from longitude.checkpoints.compare import head_dim_of, not_rotary
from longitude.checkpoints.observed import auto_class_of
from longitude.hf.stock import KEY
from longitude.runs.quiet import quiet
from longitude.testing.engine import DoesNotApply, Measurement, Unknown

OTHER = {"half": "interleaved", "interleaved": "half"}
REPEATED = 64
"""Random tokens that are given twice: a trained model copies them the second time, unless its rotation is wrong."""
CLEARLY = 2.0
"""Least ratio of the losses in two layouts at which the lower one is reported as right."""


RESTS_ON = (*CACHE, "rotary_frequencies", "relative_positions", "chunked_prefill", "batch_invariance", "left_padding")


def of_transformers(subject: Subject) -> tuple[Any, str]:
    """The model that transformers makes of the config, with the same weights, and a function replaced in its file, or "".

    DoesNotApply if there is none.
    """
    config, state = subject.model.config, subject.model.state_dict()
    if getattr(config.get_text_config(), KEY, None) is not None:
        raise DoesNotApply("its positions are those that set_positions of longitude.hf gave it")
    if subject.stock:
        raise DoesNotApply("it is transformers' own class")
    if replaced := patched(type(subject.model)):
        kind: Any = as_published(type(subject.model))
    elif type(config) in (mapping := auto_class_of(config)._model_mapping):
        kind = mapping[type(config)]
    else:
        raise DoesNotApply("transformers has no class of its config")
    with quiet(), torch.device("meta"):
        theirs = {name: tensor.shape for name, tensor in kind._from_config(copy.deepcopy(config)).state_dict().items()}
    if theirs != {name: tensor.shape for name, tensor in state.items()}:
        raise DoesNotApply(f"{kind.__name__} of transformers has other weights")
    other = subject.rebuilt(kind, dtype=subject.kind)
    other.set_attn_implementation(config._attn_implementation)
    return other.eval(), replaced


@cache
def as_published(kind: type) -> type:
    """A class of transformers, loaded again from its file, without functions that were replaced in its module."""
    module = sys.modules[kind.__module__]
    spec = spec_from_file_location(f"{module.__name__}_as_published", module.__file__)
    assert spec is not None and spec.loader is not None
    fresh = sys.modules[spec.name] = module_from_spec(spec)
    spec.loader.exec_module(fresh)
    return getattr(fresh, kind.__name__)


@CHECKPOINT_LAWS.law(threshold=EQUAL, rests_on=(*RESTS_ON, "alibi_slopes", "scaling_border", "packing"))
def transformers_class(subject: Subject) -> Measurement:
    """Logits of other code than transformers' = those of its class, with the same config and weights.

    A function that was replaced in transformers' own file is other code. With positions of several axes, too, if the config has
    sections for them.
    """
    other, replaced = of_transformers(subject)
    length = min(subject.length, 128)
    tokens, ways = subject.tokens(length), [dict[str, Any]()]
    with suppress(DoesNotApply, Unknown):  # keys of a rotation that are not read
        if any(rope.sections for rope in ropes(subject.config).values()):
            steps = torch.arange(length, device=subject.device)
            ways.append({"position_ids": torch.stack([steps, steps // 2, steps // 3])[:, None]})
    with subject.selection.__class__(other).of_all(length), computing_in(other, subject.kind):
        theirs = replace(subject, model=other)
        errors = [subject.error(subject.logits(tokens, **way), theirs.logits(tokens, **way)) for way in ways]
        far = [way for way, error in zip(ways, errors, strict=True) if subject.first_above(error) is not None]
        cause = f"logits differ from those of {type(other).__name__} of transformers with the same config and weights"
        cause += f", in whose file {replaced} was replaced" if replaced else ""
        if far:
            cause += ", at positions of several axes" if far[0] else ""
            got, want = (
                outputs(side.model, partial(side.logits, tokens, **far[0]), length) for side in (subject, theirs)
            )
            cause += first_apart(subject, got, want)
    return subject.measurement(torch.stack(errors).amax(0), cause)


@CHECKPOINT_LAWS.law(threshold=EQUAL, rests_on=RESTS_ON)
def rotary_layout(subject: Subject) -> Measurement:
    """Rows of queries and keys are in the layout that the model rotates.

    With a reference: logits of the same tokens; where they differ, with queries and keys reordered. Without: nats of 64 random
    tokens that are read a second time, over those with queries and keys reordered; where neither is twice the other, nothing is
    claimed.
    """
    if subject.reference is None:
        return repeated_tokens(subject)
    tokens = subject.tokens(min(subject.length, 128))
    want = subject.some(subject.reference(input_ids=tokens, use_cache=False).logits)
    got = subject.logits(tokens)
    error = float(subject.error(got, want).max())
    if error <= subject.threshold:
        return Measurement(error, subject.threshold, "the same logits as the reference")
    cause = "logits differ from the reference's, and no rotary layout explains it"
    if not_rotary(subject.config) is None:
        for to in ("half", "interleaved"):
            with reordered(subject, to) as done:
                agrees = done and float(subject.error(subject.logits(tokens), want).max()) <= subject.threshold
            if agrees:
                cause = (
                    f"the weights are {OTHER[to]} in a {to} model: with the rows of queries and keys reordered the logits are "
                    f"the reference's; lg.positions.convert_layout(..., to='{to}') makes that"
                )
    return Measurement(error, subject.threshold, cause=cause, whose=FILE)


def repeated_tokens(subject: Subject) -> Measurement:
    """Whether the model copies better with queries and keys reordered."""
    ropes(subject.config)
    nats, others = nats_of_copying(subject), {}
    for to in OTHER:
        with reordered(subject, to) as done:
            if done:
                others[to] = nats_of_copying(subject)
    best = min(others, key=lambda to: others[to], default=None)
    if best is None or nats <= CLEARLY * others[best] and others[best] <= CLEARLY * nats:
        raise DoesNotApply("random tokens read twice do not tell its layout; a reference does, --reference MODEL")
    cause = (
        f"the weights are {OTHER[best]} in a {best} model: random tokens that are read a second time cost {nats:.2g} nats, and "
        f"{others[best]:.2g} with the rows of queries and keys reordered; lg.positions.convert_layout(..., to='{best}')"
    )
    return Measurement(nats / others[best], CLEARLY, "by random tokens read twice", cause, whose=FILE)


def nats_of_copying(subject: Subject) -> float:
    """Loss in nats per token on the second copy of a repeated sequence, without its first, unpredictable token."""
    size = min(REPEATED, subject.length // 2)
    tokens = subject.tokens(size).repeat(1, 2)
    logits = subject.model(input_ids=tokens, use_cache=False).logits[0, size:-1]
    return float(cross_entropy(logits.double(), tokens[0, size + 1 :]))


@contextmanager
def reordered(subject: Subject, to: str) -> Iterator[int]:
    """Context in which queries and keys of every layer are in another layout; yields the number of tensors reordered."""
    try:
        dim = head_dim_of(subject.config)
    except ValueError:  # heads of layers differ
        yield 0
        return
    try:
        rotated = {rope.rotary_dim(dim) for rope in ropes(subject.config).values()}
    except (DoesNotApply, Unknown, ValueError):
        rotated = {dim}
    tensors = dict(subject.model.named_parameters())
    changes = layout_changes(tensors, subject.config, dim, rotated.pop(), to) if len(rotated) == 1 else {}
    with with_attributes([(tensors[name], "data", change(tensors[name].data)) for name, change in changes.items()]):
        yield len(changes)
