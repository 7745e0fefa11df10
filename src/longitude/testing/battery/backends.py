"""Laws of backends: one answer on every one that takes a call."""

from __future__ import annotations

import torch

from longitude.attention.backends import BACKENDS
from longitude.attention.masks import Causal, Window
from longitude.positions.composed import compose
from longitude.testing.attend_calls import Call, documents_of, masks
from longitude.testing.engine import LawBroken
from longitude.testing.examples import Example
from longitude.testing.fixtures import close, heads_and_tokens, refused, small_blocks
from longitude.testing.parts import ENCODING_LAWS

PRECISIONS = {torch.float64: 1e-10, torch.float32: 2e-4}
"""How near each backend comes to `reference` in float64."""
LENGTHS = ((1, 1), (7, 7), (63, 63), (5, 12))


@ENCODING_LAWS.law(threshold=PRECISIONS[torch.float64])
def backends(
    build: Example, lengths: tuple[tuple[int, int], ...] = LENGTHS, kinds: tuple[str, ...] | None = None
) -> None:
    """Every backend that accepts equals `reference` in float64, forward and every gradient.

    Of queries, keys, values, of the tokens that context reads, and of each parameter. In float32 too, as near as float32 can be.
    One that refuses raises a ValueError that names those that work. lengths: queries and keys; kinds: of masks; None: all.
    """
    for rows, keys in lengths:
        tensors = heads_and_tokens(rows, keys)
        for kind, mask in masks(2, keys, compose(build()).causal_only).items():
            if kinds is not None and kind not in kinds:
                continue
            documents = documents_of(mask, tensors["x"])
            truth = Call(build().float().double(), tensors, mask, documents).answer("reference")
            # float32 where it can fail otherwise than float64 and no pair is at a kink (relu, floor) by chance.
            for dtype in list(PRECISIONS)[: 2 if 12 <= keys <= 100 else 1]:
                inputs = {name: x.to(dtype).requires_grad_() for name, x in tensors.items()}
                case = Call(build().float().to(dtype), inputs, mask, documents)
                for name in BACKENDS:
                    here = f"backend {name}, {dtype}, {rows} queries, {keys} keys, mask {kind}"
                    if (why := case.refusal(name)) is None:
                        with small_blocks(max(3, keys // 4), 2, keys):
                            close(here, case.answer(name), truth, PRECISIONS[dtype])
                        continue
                    message = refused(here, lambda: case.answer(name), why)  # noqa: B023
                    named, taken = message.rsplit("; ", 1)[1].split(" can, and 'auto' takes ")
                    able = [b for b in BACKENDS if case.refusal(b) is None]
                    if [b for b in BACKENDS if repr(b) in named] != able or taken not in map(repr, able):
                        raise LawBroken(f"{here}: expected a refusal that names {able}, which work, got {message!r}")
                    with torch.no_grad():  # some need no gradients to accept
                        if case.refusal(name) is None:
                            got, want = case.answer(name)["output"], truth["output"]
                            close(f"{here}, without gradients", got, want, PRECISIONS[dtype])


@ENCODING_LAWS.law(threshold=1e-9)
@torch.no_grad()
def queries_are_last(build: Example) -> None:
    """With fewer queries than keys, and no positions of queries given, queries are the last."""
    length = 9
    encoding, tensors = build(), heads_and_tokens(length, length)
    for given in ({}, {"k_positions": 4}, {"k_positions": torch.arange(length) * 2 + 1}):
        for mask in (Causal(), Window(3)):
            case = Call(encoding, tensors, mask, options=given)
            whole = case.forward(tensors, "auto")
            for rows in (1, 4):
                last = case.forward({**tensors, "q": tensors["q"][:, :, -rows:]}, "auto")
                close(f"the last {rows} queries alone, {given}", last, whole[:, :, -rows:])
