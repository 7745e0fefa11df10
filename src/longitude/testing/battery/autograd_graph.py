"""The law of what a call leaves behind: a graph for anything that needs a gradient."""

from __future__ import annotations

import torch

from longitude.testing.attend_calls import Call, calls_with_every_mask
from longitude.testing.engine import LawBroken
from longitude.testing.examples import Example
from longitude.testing.fixtures import differentiable, heads_and_tokens, parameters_of
from longitude.testing.parts import ENCODING_LAWS

QUICK = ("no keys",)


@ENCODING_LAWS.law()
def autograd_graph(build: Example, kinds: tuple[str, ...] | None = QUICK) -> None:
    """The output of every backend has a graph wherever that of `reference` has one, and reaches the same inputs.

    Whatever the mask, also where no query has a key; whichever input or parameter alone requires a gradient. kinds: of masks;
    None: all.
    """
    for kind, case in calls_with_every_mask(build(), heads_and_tokens(6, 6), kinds):
        want = _graphs(case, "reference")
        for name in ("auto", *case.able()):
            for wanted, found in _graphs(case, name).items():
                if found != want[wanted]:
                    raise LawBroken(
                        f"backend {name}, mask {kind}: wanting a gradient for {wanted}, expected {want[wanted]}, as `reference` "
                        f"has, got {found}"
                    )


def _graphs(case: Call, backend: str) -> dict[str, str]:
    """For each tensor that alone requires a gradient: whether the output has a graph. Where all do: whether it gets one."""
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
