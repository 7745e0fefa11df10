"""Laws of what a call leaves behind: a graph for anything that needs a gradient, and nothing else changed."""

from __future__ import annotations

import torch

from longitude.attention.backends import BACKENDS
from longitude.positions.composed import compose
from longitude.testing.draws import SLOW, Draw
from longitude.testing.dropout import every_mask
from longitude.testing.equal import documents_of
from longitude.testing.fixtures import Example, LawBroken, differentiable, heads_and_tokens, parameters_of

QUICK = ("nobody",)


def law_graph(build: Example, kinds: tuple[str, ...] | None = QUICK) -> str | None:
    """Law 8. Whatever the mask, also where no query sees a key: the output of every backend has a graph wherever that of
    `reference` has one, whichever input or parameter alone wants a gradient, and reaches the same ones. kinds: of masks;
    None: all.
    """
    encoding = build()
    one, length = compose(encoding), 6
    q, k, v, x = heads_and_tokens(length, length)
    for kind, mask in every_mask(2, length, one.causal_only).items():
        if kinds is not None and kind not in kinds:
            continue
        case = Draw(encoding, {"q": q, "k": k, "v": v, "x": x}, mask, documents_of(mask, x))
        truth = _graphs(case, "reference")
        for name in ("auto", *BACKENDS):
            if name in ("reference", *SLOW) or (name != "auto" and case.refusal(name) is not None):
                continue
            for wanted, found in _graphs(case, name).items():
                if found != truth[wanted]:
                    raise LawBroken(
                        f"backend {name}, mask {kind}: wanting a gradient for {wanted}, expected {truth[wanted]}, as `reference` "
                        f"has, got {found}"
                    )
    return None


def _graphs(case: Draw, backend: str) -> dict[str, str]:
    """For each tensor that alone wants a gradient: whether the output has a graph. And where all do: whether it reaches it."""
    learned = parameters_of(case.encoding)
    before = {name: p.requires_grad for name, p in learned.items()}
    found = {}
    try:
        for name in (*case.tensors, *learned):
            for other, p in learned.items():
                p.requires_grad_(other == name)
            tensors = {n: t.detach().requires_grad_(n == name) for n, t in case.tensors.items()}
            found[f"{name} alone"] = "a graph" if case.forward(tensors, backend).requires_grad else "no graph"
        for p in learned.values():
            p.requires_grad_()
        wanted = differentiable(**case.tensors) | learned
        out = case.forward(wanted, backend)
        gradients = [None] * len(wanted)
        if out.requires_grad:
            gradients = torch.autograd.grad(out.sum(), list(wanted.values()), allow_unused=True)
        for name, gradient in zip(wanted, gradients, strict=True):
            found[f"{name} among all"] = "no gradient" if gradient is None else "a gradient"
    finally:
        for name, p in learned.items():
            p.requires_grad_(before[name])
    return found
