"""The law of rotary layout: the logits of a reference, and whether reordering queries and keys reproduces them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor

from longitude.check.decoding import CACHE, SOUND
from longitude.check.rotary import ropes
from longitude.check.subject import CHECKPOINT_LAWS, EQUAL, Subject
from longitude.checkpoints.config import head_dim_of, not_rotary
from longitude.checkpoints.layout import layout_changes
from longitude.positions.hugging_face import RopeConfig
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
        tensors = dict(subject.model.named_parameters())
        for name, change in layout_changes(tensors, subject.config, dim, rotated.pop(), to).items():
            before.append((tensors[name], tensors[name].data))
            tensors[name].data = change(tensors[name].data)
    try:
        yield len(before)
    finally:
        for weight, data in before:
            weight.data = data
