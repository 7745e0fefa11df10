"""Sparse attention that chooses its keys by top-k: laws run with all keys chosen, except `cached_decoding`, which does both.

Scores of the choice are often equal (a relu makes many exactly 0). Which of equal ones torch takes depends on how many keys there
are, so a model may choose otherwise while it decodes, and be right in everything else.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

ALL = 4096
"""Number of keys that selects all: at least as many as any law compares by default. Some modules build a table of this size."""
COUNTS = ("topk", "budget")
"""Attribute names for the number of keys, blocks or tokens that a module selects."""
EQUAL = 1e-6
"""Scores are compared in steps of this size, so that rounding does not decide between equal ones."""


class Selection:
    """Numbers of keys that the modules of a model select."""

    def __init__(self, model: nn.Module):
        self.numbers = [
            (module, name, number)
            for module in model.modules()
            if any("indexer" in kind.__name__.lower() for kind in type(module).__mro__)
            for name, number in vars(module).items()
            if any(word in name for word in COUNTS) and type(number) is int
        ]

    def __bool__(self) -> bool:
        return bool(self.numbers)

    @contextmanager
    def of_all(self, length: int) -> Iterator[None]:
        """Context in which every visible key of a sequence of this length is selected."""
        with ExitStack() as stack:
            for module, name, _ in self.numbers:
                stack.enter_context(patch.object(module, name, max(ALL, 2 * length)))
            yield

    @contextmanager
    def as_configured(self) -> Iterator[None]:
        """Context with the model's original numbers, in which the first of equal scores are taken, however many there are."""
        with ExitStack() as stack:
            choice = stack.enter_context(FirstOfEqual())
            for module, name, number in self.numbers:
                stack.enter_context(patch.object(module, name, number))
                stack.enter_context(module.register_forward_pre_hook(choice.enter))
                stack.enter_context(module.register_forward_hook(choice.leave))
            yield


class FirstOfEqual(TorchFunctionMode):
    """Within these modules, top-k takes the first of equal scores."""

    def __init__(self) -> None:
        super().__init__()
        self.inside = 0

    def enter(self, *_: Any) -> None:
        self.inside += 1

    def leave(self, *_: Any) -> None:
        self.inside -= 1

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self.inside and func in (torch.topk, Tensor.topk):
            return first_of_equal(args[0], kwargs["k"] if "k" in kwargs else args[1], kwargs.get("dim", -1))
        return func(*args, **kwargs)


def first_of_equal(scores: Tensor, k: int, dim: int) -> Any:
    """(values, indices) of the k largest scores, as torch.topk gives them."""
    order = (scores.double() / EQUAL).round().argsort(dim=dim, descending=True, stable=True)
    indices = order.narrow(dim, 0, k)
    return torch.return_types.topk((scores.gather(dim, indices), indices))
