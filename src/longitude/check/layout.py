"""The law of rotary layout: the logits of a reference, and whether reordering queries and keys reproduces them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from longitude.check.decoding import CACHE, SOUND
from longitude.check.rotary import ropes
from longitude.check.subject import CHECKPOINT_LAWS, EQUAL, Subject
from longitude.checkpoints.config import head_dim_of, not_rotary
from longitude.positions.hugging_face import RopeConfig
from longitude.positions.layouts import convert_layout
from longitude.testing.engine import DoesNotApply, Measurement

OTHER = {"half": "interleaved", "interleaved": "half"}


RESTS_ON = (
    *(*SOUND, *CACHE, "config", "rotary_frequencies"),
    *("relative_positions", "chunked_prefill", "batch_invariance", "left_padding"),
)


@CHECKPOINT_LAWS.law(threshold=EQUAL, rests_on=RESTS_ON)
def rotary_layout(subject: Subject) -> Measurement:
    """Logits = the reference's.

    On the same tokens; where they differ, with queries and keys reordered.
    """
    if subject.reference is None:
        raise DoesNotApply("it needs the logits of a reference; name one with --reference MODEL")
    tokens = subject.tokens(min(subject.length, 128))
    want = subject.some(subject.reference(input_ids=tokens, use_cache=False).logits)
    got = subject.logits(tokens)
    error = float(subject.error(got, want).max())
    if error <= subject.threshold:
        return Measurement(error, subject.threshold, "the same logits as the reference")
    cause = f"logits differ from the reference's, and no rotary layout explains it{differences(subject)}"
    if not_rotary(subject.config) is None:
        for to in ("half", "interleaved"):
            with reordered(subject, to) as done:
                agrees = done and float(subject.error(subject.logits(tokens), want).max()) <= subject.threshold
            if agrees:
                cause = (
                    f"the weights are {OTHER[to]} in a {to} model: with the rows of queries and keys reordered the logits are "
                    f"the reference's; longitude extend --convert-layout {to} writes that"
                )
    return Measurement(error, subject.threshold, cause=cause)


def differences(subject: Subject) -> str:
    """In which parameters of rotation the two configs differ."""
    try:
        here, there = ropes(subject.config), ropes(subject.reference.config.get_text_config())
    except DoesNotApply:
        return ""
    pairs = [(here[k], there[k]) for k in here if k in there and here[k] != there[k]]
    words = [
        f"{field} is {a} here and {b} there"
        for one, two in pairs
        for field, a, b in zip(RopeConfig._fields, one, two)
        if a != b
    ]
    return f"; {', '.join(words)}" if words else ""


@contextmanager
def reordered(subject: Subject, to: str) -> Iterator[int]:
    """Queries and keys of every layer in another layout, for a while; the number of tensors that were reordered."""
    dim = head_dim_of(subject.config)
    try:
        rotated = {rope.rotary_dim(dim) for rope in ropes(subject.config).values()}
    except (DoesNotApply, ValueError):
        rotated = {dim}
    before: list[tuple[Tensor, Tensor]] = []
    if len(rotated) == 1:
        for name, module in subject.model.named_modules():
            kind = name.rsplit(".", 1)[-1]
            for weight in (getattr(module, "weight", None), getattr(module, "bias", None)):
                if (
                    isinstance(weight, Tensor)
                    and (new := of_kind(kind, weight.data, dim, rotated.copy().pop(), to, subject)) is not None
                ):
                    before.append((weight, weight.data))
                    weight.data = new
    try:
        yield len(before)
    finally:
        for weight, data in before:
            weight.data = data


def of_kind(kind: str, weight: Tensor, dim: int, rotated: int, to: str, subject: Subject) -> Tensor | None:
    """The weight of a projection, reordered; None for one that makes neither queries nor keys."""
    config: Any = subject.config
    if kind in ("q_proj", "k_proj", "q_norm", "k_norm"):
        return convert_layout(weight, dim, to, rotated)
    if kind == "query_key_value":  # GPT-NeoX: for each head its query, key and value
        parts = weight.unflatten(0, (-1, 3, dim))
        query, key = (convert_layout(parts[:, i].flatten(0, 1), dim, to, rotated) for i in (0, 1))
        return torch.stack([x.unflatten(0, (-1, dim)) for x in (query, key)] + [parts[:, 2]], 1).flatten(0, 2)
    if kind == "qkv_proj":  # Phi-3: all queries, all keys, all values
        heads, groups = config.num_attention_heads * dim, config.num_key_value_heads * dim
        query, key, value = weight.split([heads, groups, groups])
        return torch.cat([convert_layout(x, dim, to, rotated) for x in (query, key)] + [value])
    return None
