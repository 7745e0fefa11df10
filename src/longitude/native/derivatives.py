"""Modes in which torch runs a call: autograd, forward-mode derivatives, torch.func transforms, export."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch._C._functorch import TransformType, get_unwrapped, is_batchedtensor, is_functorch_wrapped_tensor
from torch._functorch.pyfunctorch import retrieve_all_functorch_interpreters
from torch._library.autograd import make_autograd_impl
from torch._library.custom_ops import CustomOpDef
from torch.autograd.forward_ad import unpack_dual
from torch.fx.experimental.proxy_tensor import get_proxy_mode
from torch.utils.checkpoint import checkpoint

transforms_active = torch._C._are_functorch_transforms_active
"""Whether any transform of torch.func is active, vmap included: torch's own function."""


def exporting() -> bool:
    """Whether torch.export makes a graph of this call.

    An exported graph runs without Longitude, so it may contain only torch's operators. It runs at every length, so no choice
    may depend on a size: torch records a choice as a condition of the graph.
    """
    return torch.compiler.is_exporting()


Function = TypeVar("Function", bound=Callable[..., Any])


def constant_in_graphs(function: Function) -> Function:
    """Mark a function that a compiler calls while it traces; its result becomes a constant of the graph.

    torch.compiler.assume_constant_result does the same, but loads the compiler, which takes seconds even if nothing is
    compiled.
    """
    function._dynamo_marked_constant = True  # pyright: ignore[reportFunctionMemberAccess]
    return function


@constant_in_graphs
def in_forward_mode() -> bool:
    """Whether forward-mode derivatives are active, which torch's fused kernels and our operators do not support.

    In a graph for torch.func.jvp it is True while a compiler traces, too.
    """
    return torch.autograd.forward_ad._current_level >= 0


@constant_in_graphs
def in_transform() -> bool:
    """Whether torch.func takes gradients: grad, vjp, jacrev; in a graph, too.

    It supports neither custom gradients of operators nor recomputation in backward.
    """
    return _takes_part(TransformType.Grad)


@constant_in_graphs
def in_map() -> bool:
    """Whether torch.func.vmap is active, in a graph, too."""
    return _takes_part(TransformType.Vmap)


def _takes_part(kind: TransformType) -> bool:
    return transforms_active() and any(
        interpreter.key() == kind for interpreter in retrieve_all_functorch_interpreters()
    )


def assert_later(valid: Tensor, message: str) -> None:
    """Assert a bool [] when it is computed: reading it now would stop a compiler, or wait for an accelerator.

    torch cannot map this, so nothing is asserted in a graph of torch.func.vmap.
    """
    if not (torch.compiler.is_compiling() and in_map()):
        torch._assert_async(valid, message)  # pyright: ignore[reportPrivateImportUsage]


def refuse_tangents(operator: CustomOpDef) -> None:
    """Make one of our operators raise NotImplementedError for tangents: torch would treat its output as a constant.

    Backends do not choose it in forward mode, but a graph that was compiled or exported before may contain it.
    """
    run = make_autograd_impl(operator._opoverload, operator)

    def guarded(keyset: Any, *inputs: Any) -> Any:
        if in_forward_mode() and any(isinstance(x, Tensor) and unpack_dual(x).tangent is not None for x in inputs):
            raise NotImplementedError(
                f"{operator._qualname}: expected tensors without tangents, because it has no derivatives in forward mode; call "
                "the function itself under torch.func.jvp, not a graph that was compiled or exported before"
            )
        return run(keyset, *inputs)

    for key in ("AutogradCPU", "AutogradCUDA"):
        operator._lib.impl(operator._name, guarded, key, with_keyset=True)


def tracing() -> bool:
    """Whether a compiler, or make_fx as in torch.func.linearize, records this call: no number of a tensor can be read then."""
    return torch.compiler.is_compiling() or get_proxy_mode() is not None


def readable(*tensors: Tensor) -> bool:
    """Whether a choice may depend on numbers of these tensors: not while the call is traced, and not under vmap."""
    return not tracing() and not any(map(is_mapped, tensors))


def is_mapped(x: Tensor) -> bool:
    """Whether torch.func.vmap batches it over several calls, under other transforms too."""
    while is_functorch_wrapped_tensor(x):
        if is_batchedtensor(x):
            return True
        x = get_unwrapped(x)
    return False


def numbers_of(x: Tensor) -> Tensor:
    """The plain tensor of all calls that torch.func.vmap batches, for checks of every number in it."""
    while not torch.compiler.is_compiling() and is_functorch_wrapped_tensor(x):
        x = get_unwrapped(x)
    return x


def recorded(*tensors: Tensor | None) -> bool:
    """Whether autograd records a call with these tensors."""
    if torch.is_grad_enabled():
        for x in tensors:  # every layer asks
            if x is not None and x.requires_grad:
                return True
    return False


def by_autograd() -> bool:
    """Whether only autograd takes gradients, if any: forward mode and torch.func are not active."""
    return not in_forward_mode() and not in_transform()


def recomputed(part: Callable[..., Any], *inputs: Any) -> Any:
    """Call part(*inputs), recomputed in backward instead of stored if only autograd takes gradients; not while exporting."""
    if torch.is_grad_enabled() and by_autograd() and not exporting():
        return checkpoint(part, *inputs, use_reentrant=False)
    return part(*inputs)


def with_zero_gradients(x: Tensor, tensors: Iterable[Tensor | None]) -> Tensor:
    """Return x with these tensors added to its graph; each gets a gradient of zeros from here, also if it is not finite.

    For parameters that the result does not depend on: distributed training waits for the gradient of every parameter.
    """
    if torch.is_grad_enabled():
        for other in tensors:
            if other is not None and other.requires_grad:
                x = x + other.reshape(-1)[:0].sum().to(x.dtype)  # the sum of no number: 0, even of NaN
    return x
