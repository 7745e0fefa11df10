"""A kernel as two operators of torch, forward and backward, which compiled graphs contain whatever the length."""

from __future__ import annotations

from collections.abc import Callable
from itertools import islice
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor

from longitude.errors import UsageError
from longitude.native.derivatives import refuse_tangents

TIED = "an exported graph with its operator would run only where longitude is imported"
LEARNED = ("table", "curves", "rates")
"""Terms whose gradients are computed only if one of them needs its own."""


class Inputs(NamedTuple):
    """What a kernel gets. terms: a NamedTuple of what is added, tensors or None; limits: one of what bounds the pairs."""

    q: Tensor
    k: Tensor
    v: Tensor
    terms: Any
    limits: Any
    scale: float

    @property
    def wide(self) -> torch.dtype:
        """The dtype of all sums."""
        return torch.promote_types(self.q.dtype, torch.float32)

    def require_together(self, kernel: str) -> None:
        """UsageError for a part of what comes together: both levels, and curves with rates and a table."""
        terms, straight = self.terms, self.terms.curves is None
        alone = (terms.q_level is None) != (terms.k_level is None) or (terms.rates is None) != straight
        if alone or (terms.table is None and not straight):
            raise UsageError(kernel, "both levels or none, and curves with rates and a table", "some of them")


class Gradients(NamedTuple):
    """Gradients of the tensors of `Inputs`; None for those that are not there."""

    q: Tensor
    k: Tensor
    v: Tensor
    terms: Any


def present(terms: Any) -> dict[str, Tensor]:
    """The terms that are there, by name."""
    return {name: term for name, term in zip(terms._fields, terms, strict=True) if term is not None}


def heads_last(x: Tensor, width: int | None = None) -> Tensor:
    """Uninitialised, of x's shape [B, H, L, D or width] but laid out [B, L, H, D], so that merging the heads later is free."""
    return x.new_empty(x.shape[0], x.shape[2], x.shape[1], x.shape[3] if width is None else width).transpose(1, 2)


def no_second_derivatives(*_: Any) -> NoReturn:
    """Backward of an operator without second derivatives: RuntimeError that names a backend with them."""
    raise RuntimeError(
        "expected gradients once, got gradients of gradients, which the chosen backend does not have; "
        'backend="reference" has them'
    )


class Operators:
    """The operators of a kernel.

    Args:
        name: Name of the first operator.
        run: Inputs -> the output, the logsumexp of the scores, and more. The last result is what backward reads of each row.
        run_backward: Inputs, gradients of output and logsumexp, output, last result, whether terms of `LEARNED` need gradients
            -> Gradients.
        like: Inputs -> new tensors like the results of `run`, for compilers.
        results: Number of results.
        terms, limits: Classes of those of `Inputs`.
        of_limits: Fields of `limits`, as torch writes schemas.
        device: The type of device that `run` supports; None: any.
    """

    def __init__(
        self,
        name: str,
        run: Callable[[Inputs], tuple[Tensor, ...]],
        run_backward: Callable[..., Gradients],
        like: Callable[[Inputs], tuple[Tensor, ...]],
        results: int,
        terms: Any,
        limits: Any,
        of_limits: str,
        device: str | None,
    ) -> None:
        self.terms, self.limits, self.run_backward = terms, limits, run_backward
        optional = ", ".join(f"Tensor? {term}" for term in terms._fields)
        inputs = f"Tensor q, Tensor k, Tensor v, {optional}, {of_limits}, float scale"
        before = "Tensor grad, Tensor? grad_lse, Tensor out, Tensor last, bool learned"
        options: Any = {"mutates_args": (), "device_types": device}
        self.forward = torch.library.custom_op(
            name,
            lambda *flat: run(self.nested(*flat)),
            schema=f"({inputs}) -> ({', '.join(['Tensor'] * results)})",
            **options,
        )
        self.backward = torch.library.custom_op(
            f"{name}_backward", self._backward, schema=f"({before}, {inputs}) -> Tensor[]", **options
        )
        self.forward.register_fake(lambda *flat: like(self.nested(*flat)))
        self.backward.register_fake(self._like_backward)
        self.forward.register_autograd(self._autograd_backward, setup_context=self._setup_context)
        self.backward.register_autograd(no_second_derivatives)
        refuse_tangents(self.forward)
        refuse_tangents(self.backward)

    def flat(self, x: Inputs) -> tuple[Any, ...]:
        """The arguments of the operators."""
        return x.q, x.k, x.v, *x.terms, *x.limits, x.scale

    def nested(self, q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> Inputs:
        """The reverse of `flat`."""
        values, terms, limits = iter(rest), self.terms, self.limits
        terms, limits = terms(*islice(values, len(terms._fields))), limits(*islice(values, len(limits._fields)))
        return Inputs(q, k, v, terms, limits, next(values))

    def _with_gradient(self, x: Inputs, learned: bool) -> list[Tensor | None]:
        """The tensors of which backward computes gradients; None for others."""
        named = zip(self.terms._fields, x.terms, strict=True)
        return [x.q, x.k, x.v, *[None if name in LEARNED and not learned else term for name, term in named]]

    def _backward(
        self, grad: Tensor, grad_lse: Tensor | None, out: Tensor, last: Tensor, learned: bool, *flat: Any
    ) -> list[Tensor]:
        """Gradients of queries, keys, values and terms; empty ones where there is none."""
        x = self.nested(*flat)
        of = self.run_backward(x, grad, grad_lse, out, last, learned)
        pairs = zip(self._with_gradient(x, learned), (of.q, of.k, of.v, *of.terms), strict=True)
        return [out.new_empty(0) if tensor is None or gradient is None else gradient for tensor, gradient in pairs]

    def _like_backward(
        self, grad: Tensor, grad_lse: Tensor | None, out: Tensor, last: Tensor, learned: bool, *flat: Any
    ) -> list[Tensor]:
        x = self.nested(*flat)
        _, _, _, *terms = self._with_gradient(x, learned)
        like = [
            out.new_empty(0) if t is None else torch.empty_like(t, memory_format=torch.contiguous_format) for t in terms
        ]
        return [heads_last(x.q), heads_last(x.k), heads_last(x.v), *like]

    def _setup_context(self, ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.save_for_backward(*[x if isinstance(x, Tensor) else None for x in inputs], output[0], output[-1])
        ctx.numbers = [None if isinstance(x, Tensor) else x for x in inputs]
        ctx.set_materialize_grads(False)

    def _autograd_backward(self, ctx: Any, grad: Tensor | None, grad_lse: Tensor | None, *_: Any) -> tuple[Any, ...]:
        *tensors, out, last = ctx.saved_tensors
        flat = [number if x is None else x for x, number in zip(tensors, ctx.numbers, strict=True)]
        needed = dict(zip(("q", "k", "v", *self.terms._fields), ctx.needs_input_grad))
        learned = any(map(needed.get, LEARNED))
        grad = torch.zeros_like(out) if grad is None else grad
        gradients = self.backward(grad, grad_lse, out, last, learned, *flat)
        of_tensors = [gradient if gradient.numel() else None for gradient in gradients]
        return *of_tensors, *[None] * (len(flat) - len(of_tensors))
