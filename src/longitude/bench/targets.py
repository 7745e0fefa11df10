"""The set of `longitude bench --set`: what this library promises about its price, and how each promise is measured.

To add one, add a Target to TARGETS. Unless it says otherwise: float32, one sequence, 8 heads of 64, causal.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import asdict, replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import longitude as lg
from longitude.bench import memory, networks
from longitude.bench.cases import PLAIN, AttentionShape, Inputs, built, offset_biases, plain
from longitude.bench.rows import Row, sized
from longitude.bench.target import Session, Target, called

BOTH = "forward+backward"
DENSE_BIASES = ("x-transformers ALiBi", "transformers Bloom", "transformers MPT")
LEARNED_BIASES = ("x-transformers T5 bias", "transformers T5")


# ---- attention -------------------------------------------------------------------------------------------------------
def biases(passed: str, learned: bool | None, beside: tuple[str, ...]) -> Callable[[Session], list[Row]]:
    def measure(session: Session) -> list[Row]:
        """Every encoding that is nothing but a bias of the offset, at lengths 1024 to 8192; others at 1024 and 2048."""
        rows, labels = [], offset_biases(learned)
        for length, turns in ((1024, 9), (2048, 7), (4096, 5), (8192, 3)):
            peers = beside if length <= 2048 else ()
            rows += session.attention(labels, session.work(length), passed, turns, peers)
        return rows

    return measure


def learned_in_batches(session: Session) -> list[Row]:
    """Eight sequences of 1024."""
    return session.attention(offset_biases(True), session.work(1024, batch=8), BOTH, 5, LEARNED_BIASES[:1])


def extra_memory(session: Session) -> list[Row]:
    """Beyond plain attention's own growth, over that growth."""
    if not session.memory or not memory.can_measure():
        return []
    work = session.work(8192)
    plain_mib, rows = 0.0, []
    peers = [peer.name for peer in session.peers_of(("x-transformers ALiBi",), work)]
    for name in (PLAIN, *offset_biases(), *peers):
        session.say(f"memory at {work.length}: {name}")
        mib = memory.growth(work, name, "auto", session.threads)
        plain_mib = mib if name == PLAIN else plain_mib
        beyond = mib - plain_mib
        row = memory_row(session, name, "peer" if name in peers else "ours", work, mib)
        score = None if name == PLAIN else beyond / plain_mib
        rows.append(replace(row, kind="plain" if name == PLAIN else row.kind, memory_beyond_mib=beyond, score=score))
    return rows


def memory_row(session: Session, name: str, kind: str, work: AttentionShape, mib: float) -> Row:
    return Row(
        name=name, kind=kind, backend="auto", work="memory", passed=BOTH, memory_mib=mib, threads=session.threads,
        clock="none", turns=1, **sized(work),
    )  # fmt: skip


def encoding_beside_plain(label: str) -> Callable[[Session], list[Row]]:
    def measure(session: Session) -> list[Row]:
        """At lengths 2048 and 4096; columns that it reads off the tokens, and their gradients, included."""
        return [
            row
            for length, turns in ((2048, 5), (4096, 3))
            for row in session.attention([label], session.work(length), BOTH, turns)
        ]

    return measure


def memory_by_length(labels: tuple[str, ...]) -> Callable[[Session], list[Row]]:
    def measure(session: Session) -> list[Row]:
        """Growth of the peak from 1024 to 4096, over that of the length: 1 is linear, 4 is quadratic."""
        if not session.memory or not memory.can_measure():
            return []
        rows = []
        for label in labels:
            short, long = session.work(1024), session.work(4096)
            session.say(f"memory at {short.length} and {long.length}: {label}")
            before, after = (memory.growth(work, label, "auto", session.threads) for work in (short, long))
            rows.append(memory_row(session, label, "ours", short, before))
            score = after / before / (long.length / short.length)
            rows.append(replace(memory_row(session, label, "ours", long, after), score=score))
        return rows

    return measure


# ---- masks -----------------------------------------------------------------------------------------------------------
def masked(inputs: Inputs, label: str | None, mask: lg.Mask, backward: bool) -> Callable[[], object]:
    """lg.attend with an encoding that reads no tokens, or none, under a mask."""
    encoding = None if label is None else built(label, inputs.work)
    learned = [] if encoding is None else list(encoding.parameters())

    def forward() -> Tensor:
        return lg.attend(inputs.q, inputs.k, inputs.v, encoding=encoding, mask=mask)

    return step(forward, [inputs.q, inputs.k, inputs.v, *learned], inputs.gradient, backward)


def step(forward: Callable[[], Tensor], wanted: list[Tensor], gradient: Tensor, backward: bool) -> Callable[[], object]:
    """What is timed: without gradients, or with them."""
    if not backward:
        return torch.no_grad()(forward)
    return lambda: torch.autograd.grad(forward(), wanted, gradient)


def dense(inputs: Inputs, allowed: Tensor, backward: bool) -> Callable[[], object]:
    """scaled_dot_product_attention with a mask of all pairs, [..., L, L]."""
    q, k, v = inputs.q, inputs.k, inputs.v
    return step(
        lambda: F.scaled_dot_product_attention(q, k, v, attn_mask=allowed), [q, k, v], inputs.gradient, backward
    )


def first_biases() -> list[str]:
    """One fixed and one learned bias of the offset."""
    return [offset_biases(False)[0], offset_biases(True)[-1]]


def share_of(size: int, length: int) -> float:
    """Pairs that a window of so many keys lets through, over those that causality does."""
    return (size * length - size * (size - 1) / 2) / (length * (length + 1) / 2)


def window(session: Session) -> list[Row]:
    """The ratio to plain attention over the share of its pairs that the window lets through."""
    rows = []
    for length, turns in ((4096, 5), (8192, 3)):
        work = session.work(length)
        inputs, size = Inputs.of(work), max(2, work.length // 16)
        share = share_of(size, work.length)
        for passed in ("forward", BOTH):
            backward = passed == BOTH
            cases: dict[str, Any] = called([plain(inputs)], backward)
            for label in (None, *first_biases()):
                name = f"{label or 'no encoding'}, window {size}"
                cases[name] = ("ours", "auto", masked(inputs, label, lg.Window(size), backward))
            if session.peers and length == 4096:
                near = torch.ones(work.length, work.length, dtype=torch.bool).tril().triu(1 - size)
                cases["dense mask"] = ("peer", "torch", dense(inputs, near, backward))
            scored = lambda name, ratio, share=share: ratio / share  # noqa: E731
            rows += session.compare(cases, PLAIN, work, passed, turns, "window", scored)
    return rows


def documents(session: Session) -> list[Row]:
    """64 documents of 128 tokens in one row, against the mask of all pairs."""
    work = session.work(8192)
    ids = torch.arange(work.length) // max(1, work.length // 64)
    allowed = (ids[:, None] == ids) & torch.ones(work.length, work.length, dtype=torch.bool).tril()
    return against_dense(session, work, lg.Causal() & lg.Documents(ids), allowed, "documents", 2)


def padding(session: Session) -> list[Row]:
    """Eight sequences of 128, 256, ... 1024 tokens, padded on the left, as for generation, and on the right, as for training
    (there, queries that are padding see all tokens before them), against the mask of all pairs.
    """
    rows, work = [], session.work(1024, batch=8)
    lengths, order = torch.arange(1, 9) * work.length // 8, torch.arange(work.length)
    sides = {"left": order >= work.length - lengths[:, None], "right": order < lengths[:, None]}
    for side, valid in sides.items():
        allowed = valid[:, None, None, :] & torch.ones(work.length, work.length, dtype=torch.bool).tril()
        rows += against_dense(session, work, lg.Causal() & lg.Padding(valid), allowed, f"padding on the {side}", 5)
    return rows


def against_dense(
    session: Session, work: AttentionShape, mask: lg.Mask, allowed: Tensor, what: str, turns: int
) -> list[Row]:
    rows, inputs = [], Inputs.of(work)
    for passed in ("forward", BOTH):
        backward = passed == BOTH
        cases: dict[str, Any] = {"dense mask": ("plain", "torch", dense(inputs, allowed, backward))}
        for label in (None, *first_biases()):
            cases[label or "no encoding"] = ("ours", "auto", masked(inputs, label, mask, backward))
        rows += session.compare(cases, "dense mask", work, passed, turns, what)
    return rows


def decoding(session: Session) -> list[Row]:
    """One query against 8192 keys, with each bias of the offset; the unbiased step is scaled_dot_product_attention."""
    work = session.work(8192)
    inputs = Inputs.of(work)
    q, k, v = inputs.q[:, :, -1:], inputs.k, inputs.v
    cases: dict[str, Any] = {"unbiased": ("plain", "torch", lambda: F.scaled_dot_product_attention(q, k, v))}
    for label in offset_biases():
        encoding = built(label, work)
        cases[label] = ("ours", "auto", lambda encoding=encoding: lg.attend(q, k, v, encoding=encoding))
    cases = {name: (kind, backend, torch.no_grad()(call)) for name, (kind, backend, call) in cases.items()}
    return session.compare(cases, "unbiased", work, "one token", 60, "decoding")


# ---- rotation --------------------------------------------------------------------------------------------------------
PINNED = {"MALLOC_MMAP_THRESHOLD_": str(2**30), "MALLOC_TRIM_THRESHOLD_": str(2**30)}
"""So that the allocator keeps its memory: else pages that the system zeroes cost more than what is measured."""


def turned(rope: lg.Encoding, tables: Any, q: Tensor, k: Tensor) -> list[Tensor]:
    return [rope.queries(q, tables), rope.keys(k, tables)]


def forward_and_back(turn: Callable[[], Any], inputs: Inputs) -> object:
    return torch.autograd.grad(turn(), [inputs.q, inputs.k], [inputs.gradient, inputs.gradient])


@torch.no_grad()
def cloned_twice(inputs: Inputs) -> object:
    """Q and k, and the gradients that come back: autograd itself would hand those on as they are."""
    return [x.clone() for x in (inputs.q, inputs.k, inputs.gradient, inputs.gradient)]


def rotation(session: Session) -> list[Row]:
    """Turning q and k by prepared tables, over cloning both; with the backward pass, over cloning their gradients too."""
    rows = []
    for length, turns in ((2048, 30), (8192, 15)):
        work = session.work(length)
        inputs = Inputs.of(work)
        q, k = inputs.q, inputs.k
        ways: dict[str, tuple[str, str, Any]] = {"clone": ("plain", "torch", lambda q=q, k=k: [q.clone(), k.clone()])}
        for layout in ("half", "interleaved"):
            rope = lg.Rotary(head_dim=work.head_dim, layout=layout)
            tables = rope.prepare(torch.arange(work.length))
            ways[f"longitude, {layout}"] = (
                "ours", "longitude",
                partial(turned, rope, tables, q, k),
            )  # fmt: skip
        for peer in session.peers_of(("transformers Llama", "rotary-embedding-torch", "x-transformers rotary"), work):
            if peer.turn is not None:
                ways[peer.name] = ("peer", peer.package, peer.turn(inputs))
        for passed in ("forward", BOTH):
            cases: dict[str, Any] = {}
            for name, (kind, backend, call) in ways.items():
                both = partial(forward_and_back, call, inputs) if name != "clone" else partial(cloned_twice, inputs)
                cases[name] = (kind, backend, both if passed == BOTH else torch.no_grad()(call))
            rows += session.compare(cases, "clone", work, passed, turns, "rotation")
    return rows


# ---- the set ---------------------------------------------------------------------------------------------------------
ATTENTION = "plain causal attention"
TARGETS = (
    Target("bias of the offset, forward", 1.10, ATTENTION, biases("forward", None, DENSE_BIASES)),
    Target("fixed bias, forward + backward", 1.15, ATTENTION, biases(BOTH, False, DENSE_BIASES)),
    Target("learned bias, forward + backward", 1.30, ATTENTION, biases(BOTH, True, LEARNED_BIASES)),
    Target("learned bias, batch 8 of 1024, forward + backward", 1.80, ATTENTION, learned_in_batches),
    Target("extra memory of a bias at 8192", 1.0, "plain attention's own memory", extra_memory),
    Target("rotating q and k, tables prepared", 1.30, "cloning q and k", rotation, PINNED),
    Target("training step of a decoder, any bias or rotation", 1.15, "the same without", networks.training),
    Target("Shaw, forward + backward", 2.0, ATTENTION, encoding_beside_plain("shaw")),
    Target("Transformer-XL, forward + backward", 3.5, ATTENTION, encoding_beside_plain("transformer_xl")),
    Target("PaTH, forward + backward", 5.0, ATTENTION, encoding_beside_plain("path")),
    Target("FoX, forward + backward", 1.2, ATTENTION, encoding_beside_plain("fox")),
    Target(
        "memory of these four, 1024 to 4096", 1.1, "growth of the length",
        memory_by_length(("shaw", "transformer_xl", "path", "fox")),
    ),
    Target("sliding window", 1.3, "its share of the pairs", window),
    Target("packed documents, 64 of 128", 0.3, "a dense mask", documents),
    Target("padded batch", 0.3, "a dense mask", padding),
    Target("decoding one token at 8192, any bias of the offset", 1.10, "the unbiased step", decoding),
    Target("generation", 1.0, "transformers' Llama", networks.generation),
    Target("graphs compiled over 20 lengths", 2.0, "one graph", networks.graphs),
)  # fmt: skip


def main(question: str) -> None:
    """One target, in this process, by a question as Target.elsewhere asks it; prints rows."""
    asked: dict[str, Any] = json.loads(question)
    session = Session(**asked["session"])
    torch.set_num_threads(session.threads)
    target = next(target for target in TARGETS if target.name == asked["target"])
    print(json.dumps([asdict(row) for row in target.measure(session)]))


if __name__ == "__main__":
    main(sys.argv[1])
