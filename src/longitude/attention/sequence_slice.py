"""Sequence parallelism: a mask that declares which tokens of a long sequence belong to this process."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

import torch
from jaxtyping import Int
from torch import Tensor

from longitude.attention.documents import require_number_per_token, runs_of
from longitude.attention.masks import (
    AllOf,
    Band,
    Causal,
    Documents,
    Mask,
    NoMask,
    Padding,
    Window,
    one_or,
    validate_tokens,
)
from longitude.attention.patterns import Dilated
from longitude.errors import UsageError, check_sizes
from longitude.positions.composed import Composed
from longitude.positions.coordinates import Positions, require_positions


@dataclass(frozen=True, eq=False)
class SequenceSlice(Mask):
    """Ring attention: the tokens of a call are this process's slice of a sequence, and attend to keys of all processes.

    Join it by & to Causal(), NoMask(), Window, Band or Dilated, which then apply by order in the whole sequence. Every process
    must make the same calls. Position biases are those of a single process.

    The sequence is cut into 2n parts for n processes. Process r has the parts r and 2n-1-r, so that all have equal work under
    causality. Keys, values and their gradients are passed around a ring of processes, O(length / n) per process at a time.

    Args:
        length: Tokens of the whole sequence, two for each process or more.
        group: A torch.distributed process group; None for all processes.
        documents: A number per token of the whole sequence, [length] or [B, length]. A run of equal numbers is a document,
            tokens attend within their document only, and a negative number is padding.
        positions: Integers of the whole sequence, [length] or [B, length]; None: 0, 1, 2, ...

    Raises:
        ValueError: For a length below two tokens per process, without torch.distributed.init_process_group, and for documents
            or positions of another shape.

    Source:
        Keys in a ring: Liu et al. 2023, arXiv:2310.01889, https://arxiv.org/abs/2310.01889; equal work under causality:
        Brandon et al. 2023, arXiv:2311.09431, https://arxiv.org/abs/2311.09431, there by stripes, here by two parts.
    """

    length: int
    group: Any = None
    documents: Int[Tensor, "*B L"] | None = None
    positions: Int[Tensor, "*B L"] | None = None

    ndim: ClassVar[int] = 4  # transformers passes masks on unchanged unless they are [B, L]

    def __post_init__(self) -> None:
        check_sizes("SequenceSlice", length=self.length)
        if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
            raise UsageError("SequenceSlice", "torch.distributed.init_process_group() before", "no processes")
        if self.rank < 0:
            raise UsageError("SequenceSlice", "a process of its group", "one outside of it")
        if self.length < 2 * self.processes:
            raise UsageError(
                "SequenceSlice",
                f"{2 * self.processes} tokens or more, two for each of {self.processes} processes",
                self.length,
            )
        if self.documents is not None:
            documents = self.documents if self.documents.dim() == 2 else self.documents[None]
            require_number_per_token(documents, len(documents), self.length)
            object.__setattr__(self, "documents", runs_of(documents))
        if self.positions is not None:
            require_positions(self.positions, who="SequenceSlice(positions)")
            validate_tokens("SequenceSlice(positions)", self.positions, len(self.positions), self.length)

    # ---- who has what ------------------------------------------------------------------------------------------------
    @cached_property
    def rank(self) -> int:
        """Rank of this process in the group."""
        return torch.distributed.get_rank(self.group)

    @cached_property
    def processes(self) -> int:
        return torch.distributed.get_world_size(self.group)

    def parts_of(self, rank: int) -> tuple[slice, ...]:
        """The tokens of a process: the parts r and 2n-1-r, as one slice if they are adjacent."""
        parts = 2 * self.processes
        early, late = (
            slice(i * self.length // parts, (i + 1) * self.length // parts) for i in (rank, parts - 1 - rank)
        )
        return (slice(early.start, late.stop),) if early.stop == late.start else (early, late)

    def size(self, rank: int) -> int:
        """Number of tokens of a process."""
        return sum(part.stop - part.start for part in self.parts_of(rank))

    @property
    def own(self) -> int:
        """Number of tokens of this process."""
        return self.size(self.rank)

    @property
    def shape(self) -> tuple[int, ...]:
        """For transformers, which reads the last number alone; layers that would look for padding fail on the others."""
        return (self.own,) * self.ndim

    def __getitem__(self, *_: Any, **__: Any) -> Any:
        raise UsageError(
            "SequenceSlice",
            'layers of attention alone, with attn_implementation="longitude"',
            "one that reads attention_mask as numbers",
            "set it, or use one process",
        )

    __mul__ = __rmul__ = __add__ = __radd__ = unsqueeze = sum = all = any = bool = __getitem__

    def cut(self, x: Tensor, dim: int = 1) -> Tensor:
        """Cut this process's tokens out of a tensor of the whole sequence, [..., length, ...] -> [..., local length, ...].

        Args:
            x: The whole sequence.
            dim: Its dimension of tokens.

        Returns:
            Its part, in the order in which this process has its tokens.

        Raises:
            ValueError: For another length.
        """
        if x.shape[dim] != self.length:
            raise UsageError("cut", f"{self.length} tokens in dimension {dim}", list(x.shape))
        return torch.cat([x.narrow(dim, p.start, p.stop - p.start) for p in self.parts_of(self.rank)], dim)

    def own_positions(self, device: Any = None) -> Tensor:
        """Positions of this process's tokens, [local length] or [B, local length]."""
        if self.positions is not None:
            return self.cut(self.positions, -1).to(device)
        return self.cut(torch.arange(self.length, device=device), 0)

    # ---- as a mask ---------------------------------------------------------------------------------------------------
    def validate(self, batch: int, rows: int, keys: int) -> None:
        if (rows, keys) != (self.own, self.own):
            raise UsageError(
                "SequenceSlice",
                f"the {self.own} tokens of process {self.rank} as queries and as keys",
                f"{rows} and {keys}",
                "cut(x) gives them, and caches and memories are of whole sequences",
            )
        for tokens in (self.documents, self.positions):
            if tokens is not None and tokens.dim() == 2 and not one_or(len(tokens), batch):
                raise UsageError("SequenceSlice", f"a batch of {len(tokens)}", batch)

    def allowed(self, q_order: Tensor, k_order: Tensor) -> Tensor:
        raise ValueError("SequenceSlice: its keys are on several processes, expected attention that passes them round")

    def whole(self, mask: Mask) -> Mask:
        """The mask of the whole sequence, for a call whose `mask` has this slice in it."""
        others = [part for part in mask.parts() if part is not self]
        for part in others:
            by_order = isinstance(part, Causal | Window) and part.order is None
            if not by_order and not isinstance(part, Band | Dilated | NoMask):
                raise UsageError(
                    "mask",
                    "Causal(), NoMask(), Window, Band or Dilated joined to a SequenceSlice",
                    repr(part),
                    "documents and padding of the whole sequence are its documents=",
                )
        return AllOf((*others, *self.own_masks))

    @cached_property
    def own_masks(self) -> tuple[Mask, ...]:
        """Documents and padding of the whole sequence."""
        if self.documents is None:
            return ()
        padded = bool((self.documents < 0).any())
        return (Documents(self.documents), *([Padding(self.documents >= 0)] if padded else []))


def slice_of(mask: Mask) -> SequenceSlice | None:
    """The slice of a sequence that a mask has in it."""
    return next((part for part in mask.parts() if isinstance(part, SequenceSlice)), None)


def slice_positions(
    mask: Mask, device: Any, q_positions: Positions | None, k_positions: Positions | None
) -> tuple[Positions | None, Positions | None]:
    """Positions of a call: its arguments, or those of the slice in its mask; ValueError if both exist."""
    if (share := slice_of(mask)) is None:
        return q_positions, k_positions
    if q_positions is not None or k_positions is not None:
        raise ValueError(
            "q_positions, k_positions: a SequenceSlice in the mask has them; pass it positions of the sequence"
        )
    own = share.own_positions(device)
    return own, own


def require_sliceable(encoding: Composed) -> None:
    """ValueError for an encoding that needs more of the sequence than positions."""
    if encoding.reads_tokens:
        why = "runs along the tokens of the whole sequence"
    elif not encoding.stable_keys:
        why = "moves keys by the query's position, or with the length of the sequence"
    elif encoding.reads_ids:
        why = "makes places of the ids of the whole sequence"
    elif encoding.axes > 1:
        why = "takes positions of several axes"
    else:
        return
    names = "+".join(type(member).__name__ for member in encoding)
    raise ValueError(f"SequenceSlice: expected an encoding by positions alone, and {names} {why}; use one process")
