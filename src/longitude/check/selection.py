"""Sparse attention that chooses its keys by top-k: laws run with all keys chosen, except one, which runs as configured.

Scores of the choice are often equal (a relu makes many exactly 0). Which of equal ones are taken depends on how many keys there
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
"""Largest difference of scores that are equal up to rounding, relative to the smallest |score| if that exceeds 1."""
INVISIBLE = -1e30
"""Scores below are those of keys that a mask hides."""


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
    def as_configured(self) -> Iterator[Ties]:
        """Context with the model's original numbers; the yielded object counts equal scores."""
        with ExitStack() as stack, Ties() as ties:
            for module, name, number in self.numbers:
                stack.enter_context(patch.object(module, name, number))
                stack.enter_context(module.register_forward_pre_hook(ties.begins))
                stack.enter_context(module.register_forward_hook(ties.ends))
            yield ties


class Ties(TorchFunctionMode):
    """Counts equal scores that top-k gets within these modules, and choices that depend on the order of equal ones."""

    def __init__(self) -> None:
        super().__init__()
        self.inside, self.equal, self.visible, self.undecided = 0, 0, 0, 0

    def begins(self, *_: Any) -> None:
        self.inside += 1

    def ends(self, *_: Any) -> None:
        self.inside -= 1

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self.inside and func in (torch.topk, Tensor.topk) and args[0].numel():
            self.look(args[0], kwargs["k"] if "k" in kwargs else args[1], kwargs.get("dim", -1))
        return func(*args, **kwargs)

    def look(self, scores: Tensor, k: int, dim: int) -> None:
        """Count equal scores, and equal ones at the border of the k largest."""
        ordered = scores.detach().double().movedim(dim, -1).sort(dim=-1, descending=True).values
        seen, same = (
            ordered > INVISIBLE,
            ordered.diff(dim=-1).abs() <= EQUAL * ordered.abs().amin(-1, keepdim=True).clamp(min=1),
        )
        nothing = torch.zeros_like(ordered[..., :1], dtype=torch.bool)
        tied = torch.cat([nothing, same], -1) | torch.cat([same, nothing], -1)
        self.visible += int(seen.sum())
        self.equal += int((tied & seen).sum())
        if 0 < k < ordered.shape[-1]:  # the last one taken and the first one left
            self.undecided += int((same[..., k - 1] & seen[..., k]).sum())

    @property
    def share(self) -> float:
        return self.equal / max(1, self.visible)
