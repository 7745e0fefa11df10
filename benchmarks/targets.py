"""What this library promises about the cost of encodings, and how each promise is measured: `make bench`.

To add one, add a Target to TARGETS. Unless it says otherwise: float32, one sequence, 8 heads of 64, causal.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

import longitude as lg
import networks
import peers
import rotation
from kinds import offset_biases, temperatures_and_sinks
from longitude.bench import measurement
from longitude.bench.cases import PLAIN, AttentionShape, Case, Inputs, Kind, built, plain
from longitude.bench.measurement import Row
from longitude.runs.machine import can_measure_peak
from target import Call, Session, Target, calls_of, main

BOTH = "forward+backward"
PASSES = ("forward", BOTH)
DENSE_BIASES = ("x-transformers ALiBi", "transformers MPT")
LEARNED_BIASES = ("x-transformers T5 bias", "transformers T5")
LONG = {1024: 9, 2048: 7, 4096: 5, 8192: 3}
SHORT = {2048: 5, 4096: 5}
"""Turns by length."""


# ---- attention -------------------------------------------------------------------------------------------------------
def over_plain(
    labels: Sequence[str], turns: dict[int, int], passed: str = BOTH, rivals: tuple[str, ...] = (), batch: int = 1
) -> Callable[[Session], list[Row]]:
    """Encodings over attention without one, and peers up to 2048 tokens; turns: by length. What an encoding reads is included."""

    def measure(session: Session) -> list[Row]:
        return [
            row
            for length, count in turns.items()
            for row in session.attention(
                [*labels], session.shape(length, batch), passed, count, rivals if length <= 2048 else ()
            )
        ]

    return measure


def extra_memory(session: Session) -> list[Row]:
    """Beyond plain attention's own growth, over that growth."""
    if not session.memory or not can_measure_peak():
        return []
    shape = session.shape(8192)
    rivals = [peer.name for peer in session.peers_of(("x-transformers ALiBi",), shape)]
    base, *rows = [_memory_row(session, name, shape) for name in (PLAIN, *offset_biases(), *rivals)]
    plain_mib = base.memory_mib or 0.0
    for row in rows:
        beyond = (row.memory_mib or 0.0) - plain_mib
        kind = "peer" if row.name in rivals else "ours"
        rows[rows.index(row)] = replace(row, kind=kind, memory_beyond_mib=beyond, score=beyond / plain_mib)
    return [replace(base, kind="plain", memory_beyond_mib=0.0), *rows]


def _memory_row(session: Session, name: str, shape: AttentionShape) -> Row:
    session.on_progress(f"memory at {shape.length}: {name}")
    program = (peers.__file__,) if name in peers.installed() else ("-m", "longitude.bench.measurement")
    mib = measurement.growth(shape, name, "auto", session.threads, program)
    return session.row(name, "ours", shape, "memory", BOTH, memory_mib=mib, clock="none")


def memory_by_length(labels: tuple[str, ...]) -> Callable[[Session], list[Row]]:
    def measure(session: Session) -> list[Row]:
        """Growth of the peak from 1024 to 4096, over that of the length: 1 is linear, 4 is quadratic."""
        if not session.memory or not can_measure_peak():
            return []
        rows, (short, long) = [], (session.shape(1024), session.shape(4096))
        for label in labels:
            before, after = (_memory_row(session, label, shape) for shape in (short, long))
            score = (after.memory_mib or 0.0) / (before.memory_mib or 1.0) / (long.length / short.length)
            rows += [before, replace(after, score=score)]
        return rows

    return measure


# ---- without a bias -------------------------------------------------------------------------------------------------
def unbiased(session: Session) -> list[Row]:
    """No encoding over torch's function, forward and training, at lengths 512 to 8192, causal, and all pairs to 2048."""
    rows = []
    for length, turns in ((512, 9), (2048, 7), (8192, 3)):
        shape = session.shape(length)
        inputs = Inputs.of(shape)
        three = [inputs.q, inputs.k, inputs.v]
        masks = {"causal": lg.Causal(), **({"all pairs": lg.NoMask()} if length <= 2048 else {})}
        for passed in PASSES:
            for name, mask in masks.items():
                function = partial(F.scaled_dot_product_attention, *three, is_causal=name == "causal")
                cases = [Case("torch", "plain", "torch", lambda function=function: [function()], three)]
                cases.append(masked(f"no encoding, {name}", inputs, None, mask))
                rows += session.compare(calls_of(cases, passed == BOTH), "torch", shape, passed, turns)
    return rows


def rotary(session: Session) -> list[Row]:
    """Attention of q and k that are rotated, rotation included, over the same with torch's function."""
    rows = []
    for length, turns in ((512, 9), (2048, 7), (4096, 5)):
        shape = session.shape(length)
        inputs, encoding = Inputs.of(shape), lg.Rotary(shape.head_dim, "half")
        three = [inputs.q, inputs.k, inputs.v]
        cases = []
        for name, kind, backend in (("rotary, torch", "plain", "sdpa"), ("rotary", "ours", "auto")):
            run = partial(lg.attend, *three, encoding=encoding, backend=backend)
            cases.append(Case(name, kind, backend, lambda run=run: [run()], three))
        for passed in PASSES:
            rows += session.compare(calls_of(cases, passed == BOTH), "rotary, torch", shape, passed, turns)
    return rows


def bfloat16(session: Session) -> list[Row]:
    """Attention in bfloat16 over the same in float32: no encoding, a fixed bias, a window."""
    rows = []
    for length, turns in ((1024, 9), (4096, 5)):
        wide = session.shape(length)
        both = {dtype: Inputs.of(replace(wide, dtype=dtype)) for dtype in ("float32", "bfloat16")}
        for passed in PASSES:
            for label, mask in ((None, lg.Causal()), (offset_biases(False)[0], lg.Causal()), (None, lg.Window(256))):
                title = f"{label or 'no encoding'}, {'causal' if isinstance(mask, lg.Causal) else 'window 256'}"
                cases = [masked(f"{title}, {dtype}", inputs, label, mask) for dtype, inputs in both.items()]
                cases[0] = replace(cases[0], kind="plain")
                rows += session.compare(calls_of(cases, passed == BOTH), f"{title}, float32", wide, passed, turns)
    return rows


# ---- masks -----------------------------------------------------------------------------------------------------------
def masked(name: str, inputs: Inputs, label: str | None, mask: lg.Mask) -> Case:
    """lg.attend with an encoding that reads no tokens, or none, under a mask."""
    encoding = None if label is None else built(label, inputs.shape)
    three = [inputs.q, inputs.k, inputs.v]
    wanted = [*three, *(() if encoding is None else encoding.parameters())]
    return Case(name, "ours", "auto", lambda: [lg.attend(*three, encoding=encoding, mask=mask)], wanted)


def dense(inputs: Inputs, allowed: Tensor, kind: Kind) -> Case:
    """scaled_dot_product_attention with a mask of all pairs, [..., L, L]."""
    three = [inputs.q, inputs.k, inputs.v]
    return Case("dense mask", kind, "torch", lambda: [F.scaled_dot_product_attention(*three, attn_mask=allowed)], three)


def first_biases() -> list[str]:
    """One fixed and one learned bias of the offset."""
    return [offset_biases(False)[0], offset_biases(True)[-1]]


def share_of(size: int, length: int) -> float:
    """Pairs that a window of `size` keys lets through, over those that causality does."""
    return (size * length - size * (size - 1) / 2) / (length * (length + 1) / 2)


def window(session: Session) -> list[Row]:
    """The ratio to plain attention over the share of its pairs that the window lets through."""
    rows = []
    for length, turns in ((4096, 5), (8192, 3)):
        shape = session.shape(length)
        inputs, size = Inputs.of(shape), max(2, shape.length // 16)
        share = share_of(size, shape.length)
        cases = [plain(inputs)]
        for label in (None, *first_biases()):
            cases.append(masked(f"{label or 'no encoding'}, window {size}", inputs, label, lg.Window(size)))
        if session.peers and length == 4096:
            near = torch.ones(shape.length, shape.length, dtype=torch.bool).tril().triu(1 - size)
            cases.append(dense(inputs, near, "peer"))
        for passed in PASSES:
            calls = calls_of(cases, passed == BOTH)
            rows += session.compare(
                calls, PLAIN, shape, passed, turns, "window", lambda ratio, share=share: ratio / share
            )
    return rows


def documents(session: Session) -> list[Row]:
    """64 documents of 128 tokens in one row, against the mask of all pairs."""
    shape = session.shape(8192)
    ids = torch.arange(shape.length) // max(1, shape.length // 64)
    allowed = (ids[:, None] == ids) & torch.ones(shape.length, shape.length, dtype=torch.bool).tril()
    return against_dense(session, shape, lg.Causal() & lg.Documents(ids), allowed, "documents", 2)


def padding(side: str, leave_out: bool) -> Callable[[Session], list[Row]]:
    """Eight sequences of 128, 256, ... 1024 tokens, against the mask of all pairs.

    side: left, as for generation, or right, as for training. leave_out: queries that are padding are left out, too, as layers and
    models do with documents=; else on the right they attend to all tokens before them.
    """

    def measure(session: Session) -> list[Row]:
        shape = session.shape(1024, batch=8)
        lengths, order = torch.arange(1, 9) * shape.length // 8, torch.arange(shape.length)
        valid = order >= shape.length - lengths[:, None] if side == "left" else order < lengths[:, None]
        allowed = valid[:, None, None, :] & torch.ones(shape.length, shape.length, dtype=torch.bool).tril()
        mask = lg.Causal() & lg.Documents(valid.long()) if leave_out else lg.Causal()
        return against_dense(session, shape, mask & lg.Padding(valid), allowed, f"padding on the {side}", 5)

    return measure


def both_sides(session: Session) -> list[Row]:
    return [row for side in ("left", "right") for row in padding(side, leave_out=False)(session)]


def against_dense(
    session: Session, shape: AttentionShape, mask: lg.Mask, allowed: Tensor, work: str, turns: int
) -> list[Row]:
    rows, inputs = [], Inputs.of(shape)
    cases = [dense(inputs, allowed, "plain")]
    cases += [masked(label or "no encoding", inputs, label, mask) for label in (None, *first_biases())]
    for passed in PASSES:
        rows += session.compare(calls_of(cases, passed == BOTH), "dense mask", shape, passed, turns, work)
    return rows


@torch.no_grad()
def decoding(session: Session) -> list[Row]:
    """One query against 8192 keys, with each bias of the offset; the unbiased step is scaled_dot_product_attention."""
    shape = session.shape(8192)
    inputs = Inputs.of(shape)
    q, k, v = inputs.q[:, :, -1:], inputs.k, inputs.v
    calls: dict[str, Call] = {"unbiased": ("plain", "torch", lambda: F.scaled_dot_product_attention(q, k, v))}
    for label in offset_biases():
        calls[label] = ("ours", "auto", partial(lg.attend, q, k, v, encoding=built(label, shape)))
    return session.compare(calls, "unbiased", shape, "one token", 60, "decoding")


# ---- the set ---------------------------------------------------------------------------------------------------------
ATTENTION = "PyTorch causal attention without an encoding"
TARGETS = (
    Target("relative position bias, forward", 1.10, ATTENTION, over_plain(offset_biases(), LONG, "forward", DENSE_BIASES)),
    Target("fixed bias, forward + backward", 1.15, ATTENTION, over_plain(offset_biases(False), LONG, BOTH, DENSE_BIASES)),
    Target("no encoding", 1.05, "PyTorch attention", unbiased),
    Target("rotary attention, rotation included", 0.8, "the same with PyTorch attention", rotary),
    Target("bfloat16 inputs", 1.0, "float32 inputs", bfloat16),
    Target("learned bias, forward + backward", 1.30, ATTENTION, over_plain(offset_biases(True), LONG, BOTH, LEARNED_BIASES)),
    Target(
        "learned bias, batch 8 of 1024, forward + backward", 1.80, ATTENTION,
        over_plain(offset_biases(True), {1024: 5}, BOTH, LEARNED_BIASES[:1], batch=8),
    ),
    Target("extra memory of a bias at 8192", 1.0, "memory of PyTorch attention", extra_memory),
    Target("rotating q and k, tables prepared", 1.45, "cloning q and k", rotation.rotation, rotation.PINNED),
    Target(
        "rotating q and k without a compiler", 3.0, "cloning q and k", rotation.rotation,
        {**rotation.PINNED, "LONGITUDE_COMPILE": "0"},
    ),
    Target("training step of a decoder, any bias or rotation", 1.25, "no encoding in torch", networks.training),
    Target("Shaw, forward + backward", 1.3, ATTENTION, over_plain(["shaw"], SHORT)),
    Target("Transformer-XL, forward + backward", 2.0, ATTENTION, over_plain(["transformer_xl"], SHORT)),
    Target("PaTH, forward + backward", 3.0, ATTENTION, over_plain(["path"], SHORT)),
    Target("FoX, forward + backward", 1.2, ATTENTION, over_plain(["fox"], SHORT)),
    Target("temperature or sink, forward + backward", 1.15, ATTENTION, over_plain(temperatures_and_sinks(), SHORT)),
    Target("FIRE and CoPE, forward", 1.5, ATTENTION, over_plain(["fire", "cope"], {2048: 5}, "forward")),
    Target("FIRE and CoPE, forward + backward", 3.0, ATTENTION, over_plain(["fire", "cope"], {2048: 5})),
    Target("memory of FIRE and CoPE, 1024 to 4096", 1.1, "growth of the length", memory_by_length(("fire", "cope"))),
    Target(
        "memory of Shaw, Transformer-XL, PaTH and FoX, 1024 to 4096", 1.1, "growth of the length",
        memory_by_length(("shaw", "transformer_xl", "path", "fox")),
    ),
    Target("sliding window", 1.15, "its share of the pairs", window),
    Target("packed documents, 64 of 128", 0.3, "a dense mask", documents),
    Target("padded batch", 0.36, "a dense mask", both_sides),
    Target("padded batch, no queries that are padding", 0.22, "a dense mask", padding("right", leave_out=True)),
    Target("decoding one token at 8192, any relative position bias", 1.10, "the unbiased step", decoding),
    Target("generation", 1.1, "the Llama of transformers", networks.generation("rope")),
    Target("generation with a bias", 1.05, "the Llama of transformers", networks.generation("alibi", "t5")),
    Target("unmodified Llama of 135M, prompt of 2048 and 64 tokens", 1.0, "the same with sdpa", networks.unmodified),
)  # fmt: skip


if __name__ == "__main__":
    sys.exit(main(TARGETS, __doc__, ""))
