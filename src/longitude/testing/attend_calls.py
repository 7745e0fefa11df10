"""Calls of attend that laws try on every backend: one call with its tensors, and every kind of mask."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from longitude.attention.backends import BACKENDS, refusal
from longitude.attention.masks import (
    Causal,
    Chunks,
    Documents,
    Global,
    Mask,
    NoMask,
    Padding,
    Pairs,
    Prefix,
    Window,
)
from longitude.attention.operation import attend, requests
from longitude.positions.base import Encoding
from longitude.positions.composed import compose
from longitude.positions.terms import Term
from longitude.testing.fixtures import Named, differentiable, parameters_of, unchanged, with_gradients


@dataclass(frozen=True)
class Call:
    """One call of attend: an encoding, q, k, v, and x [B, Lk, dim] for the context, a mask and options.

    documents [B, Lk]: the stream of the context starts again at each.
    """

    encoding: Encoding
    tensors: Named
    mask: Mask = Causal()  # noqa: RUF009 (frozen)
    documents: Tensor | None = None
    options: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        shapes = {name: list(x.shape) for name, x in self.tensors.items()}
        options = {name: x.tolist() if isinstance(x, Tensor) else x for name, x in self.options.items()}
        return f"{shapes}, {options}, mask {self.mask}"

    def context(self, x: Tensor) -> dict[str, Tensor]:
        return compose(self.encoding).context(x, None, self.documents)[0]

    def terms(self) -> tuple[Term, ...]:
        return compose(self.encoding).terms(self.context(self.tensors["x"]))

    def parts(self, dropout: float = 0.0) -> list[Any]:
        """The requests that attend makes of this call: one, unless tables follow the length."""
        q, k, v, x = self.tensors.values()
        o = self.options
        positions = o.get("q_positions"), o.get("k_positions"), o.get("scale")
        parts = requests(q, k, v, self.encoding, self.context(x), self.mask, *positions, dropout, False)
        return [r for part in parts for r in (part.with_lse() if o.get("return_lse") else part).requests]

    def refusals(self, dropout: float = 0.0) -> dict[str, str | None]:
        """Why each backend does not support this call; None if it does."""
        parts = self.parts(dropout)
        return {name: refusal(backend, parts) for name, backend in BACKENDS.items()}

    def able(self, dropout: float = 0.0) -> list[str]:
        """The backends that support this call."""
        return [name for name, why in self.refusals(dropout).items() if why is None]

    def forward(self, tensors: Named, backend: str, **more: Any) -> Any:
        """Attend with these tensors instead."""
        q, k, v, x = (tensors[name] for name in "qkvx")
        options = {**self.options, "mask": self.mask, **more}
        return attend(q, k, v, encoding=self.encoding, context=self.context(x), backend=backend, **options)

    def output(self, tensors: Named, backend: str) -> Tensor:
        """The output; if the logsumexp is requested, it is the last column, -9 for a query without keys."""
        if not self.options.get("return_lse"):
            return self.forward(tensors, backend)
        out, lse = self.forward(tensors, backend)
        return torch.cat([out, lse.masked_fill(lse == -math.inf, -9.0)[..., None]], -1)

    def answer(self, backend: str) -> Named:
        """The output and, if gradients are enabled, every gradient."""
        inputs = differentiable(**self.tensors)
        wanted = {**inputs, **parameters_of(self.encoding)} if torch.is_grad_enabled() else {}
        with unchanged(f"backend {backend}", *wanted.values()):
            return with_gradients(lambda: self.output(inputs, backend), wanted)

    def row(self, b: int) -> Call:
        """The b-th sequence alone."""
        part = slice(b, b + 1)

        def copied(x: Any) -> Any:
            several = isinstance(x, Tensor) and x.dim() > 1 and len(x) == len(self.tensors["q"])
            return x[part] if several else x

        return replace(
            self,
            tensors={name: x[part] for name, x in self.tensors.items()},
            mask=self.mask.of(part),
            documents=copied(self.documents),
            options={name: copied(x) for name, x in self.options.items()},
        )


def documents_of(mask: Mask, x: Tensor) -> Tensor | None:
    """The documents [B, Lk] of a mask that joins any by &: a stream starts again at each."""
    for part in mask.parts():
        if isinstance(part, Documents):
            return part.ids.expand(x.shape[:2])
    return None


def masks(batch: int, keys: int, causal_only: bool) -> dict[str, Mask]:
    """Every kind of mask, at a size: spans, free predicates, unions, rows that differ, queries without any key."""
    token = torch.arange(keys)
    third, half = max(1, keys // 3), max(1, keys // 2)
    ids = token // third
    own_ids = torch.stack([ids, token // half, *[ids] * batch][:batch])
    pads = torch.stack([token >= min(2, keys - 1), token >= 0, *[token >= 1] * batch][:batch])
    kinds: dict[str, Mask] = {
        "causal": Causal(),
        "window": Window(3),
        "documents": Causal() & Documents(ids),
        "documents by row": Window(half) & Documents(own_ids),
        "padding": Causal() & Padding(pads),
        "padding on the right": Causal() & Padding(pads.flip(1)),
        "window, padding on the right": Window(half) & Padding(pads.flip(1)),
        "tokens that are padding": Causal() & Documents(pads.flip(1).long()) & Padding(pads.flip(1)),
        "padded documents": Causal() & Documents(own_ids) & Padding(pads),
        "documents that come back": Causal() & Documents(token // third % 2),
        "holes": Causal() & Padding(token % 3 != 0),  # the first query has no key
        "union": Causal() & (Window(2) | Documents(ids)),
    }
    if not causal_only:
        kinds |= {
            "none": NoMask(),
            "documents both ways": Documents(own_ids),
            "padding both ways": Padding(pads),
            "union both ways": Window(2) | Documents(ids) & Padding(pads),
            "another order": Pairs((order := (token * 5 + 2) % 7)[:, None] >= order, 0, 0),
        }
    return kinds


def calls_with_every_mask(encoding: Encoding, tensors: Named, kinds: tuple[str, ...] | None) -> list[tuple[str, Call]]:
    """One call for each mask of these kinds (None: all), with the documents of the mask.

    Kinds are those of `masks`, and more that `split` supports; in some of them queries have no key.
    """
    batch, keys = tensors["x"].shape[:2]
    token = torch.arange(keys)
    every = masks(batch, keys, compose(encoding).causal_only) | {
        "no keys": Causal() & Padding(token < 0),
        "a sequence of padding": Causal() & Padding(token < torch.tensor([keys, 0, 3])[:batch, None]),
        "prefix": Causal() & Prefix(3),
        "global": (Window(2) | Global([1])) & Causal() & Padding(token > 0),
        "chunks that start over": Causal() & Chunks(3, token % max(1, keys // 2)),
    }
    return [
        (kind, Call(encoding, tensors, mask, documents_of(mask, tensors["x"])))
        for kind, mask in every.items()
        if kinds is None or kind in kinds
    ]
