"""Rotations by remapped offsets: distant offsets are clipped, slowed down, grouped, or folded into chunks."""

from __future__ import annotations

from typing import Literal, Unpack

import torch
from torch import Tensor

from longitude.errors import Positive, UsageError
from longitude.positions.base import Region, register
from longitude.positions.coordinates import floor_divide, wide
from longitude.positions.rotary import Rotary, RotaryOptions
from longitude.positions.rotation import Layout

Variant = Literal["paper", "code"]


class Remapped(Rotary):
    """RoPE that rotates a query at i and a key at j by a remapped offset m(i, j): the score is q . R(m theta) k.

    Subclasses define `regions`, in which query and key are rotated to positions with difference m. Attention runs in each
    region and merges, so that no tensor of Lq x Lk is needed. A cache keeps raw keys. `prepare` and `rotate` without a region
    rotate a vector to its unmapped position.
    """

    causal_only = True

    def __init__(self, head_dim: int, layout: Layout, **options: Unpack[RotaryOptions]):
        super().__init__(head_dim, layout, **options)
        if not self.stable_keys:
            who, remedy = type(self).__name__, "declare its length with follow='declared'"
            raise UsageError(who, "a scaling that does not follow the length", repr(self.scaling), remedy)
        self.stable_keys = False


def _same(positions: Tensor) -> Tensor:
    return positions


def _exact(positions: Tensor) -> Tensor:
    return positions.to(wide(positions.device))


@register("rerope")
class ReRoPE(Remapped):
    """ReRoPE, offsets clipped to a window: RoPE at m(o) = min(o, window).

    A pair at least `window` apart is rotated by `window`: the query as if at position `window`, the key as at 0. No offset then
    exceeds those of training. The authors also multiply queries by max(1, ln(i + 1) / ln N): compose log_n for that.

    Args:
        head_dim: width of a head.
        layout: see Rotary.
        window: offsets below it are exact; at most the training length.
        base: see Rotary.
        rotary_dim: see Rotary.
        scaling: see Rotary; a scheme that does not follow the length.

    Raises:
        ValueError: as Rotary; a window below 1, a scaling that follows the length.

    Source:
        Su 2023, https://kexue.fm/archives/9708; code: https://github.com/bojone/rerope
    """

    source = "Su 2023, https://kexue.fm/archives/9708"
    model_defaults = {**Rotary.model_defaults, "window": 32}

    def __init__(self, head_dim: int, layout: Layout, window: int, **options: Unpack[RotaryOptions]):
        super().__init__(head_dim, layout, **options)
        self.window = window

    def regions(self) -> tuple[Region, ...]:
        far = Region(lambda i: torch.full_like(i, self.window), torch.zeros_like, first=self.window)
        return Region(_same, _same, last=self.window - 1), far


@register("leaky_rerope")
class LeakyReRoPE(Remapped):
    """Leaky ReRoPE, RoPE slowed past a window: offsets grow more slowly from the window on.

        m(o) = o  if  o < window,    window + (o - window) / slowdown  beyond

    Args:
        head_dim: width of a head.
        layout: see Rotary.
        window: offsets below it are exact.
        slowdown: how many times more slowly far offsets grow, above 0; 16 in the authors' code.
        base: see Rotary.
        rotary_dim: see Rotary.
        scaling: see Rotary; a scheme that does not follow the length.

    Raises:
        ValueError: as Rotary; a window below 1, a slowdown that is not above 0, a scaling that follows the length.

    Source:
        Su 2023, https://kexue.fm/archives/9708; code: https://github.com/bojone/rerope
    """

    source = "Su 2023, https://kexue.fm/archives/9708"
    model_defaults = {**Rotary.model_defaults, "window": 32}

    def __init__(
        self, head_dim: int, layout: Layout, window: int, slowdown: Positive = 16.0, **options: Unpack[RotaryOptions]
    ):
        super().__init__(head_dim, layout, **options)
        self.window, self.slowdown = window, slowdown

    def regions(self) -> tuple[Region, ...]:
        behind = self.window * (self.slowdown - 1)
        far = Region(lambda i: (_exact(i) + behind) / self.slowdown, lambda j: _exact(j) / self.slowdown, self.window)
        return Region(_same, _same, last=self.window - 1), far


@register("self_extend")
class SelfExtend(Remapped):
    """Self-Extend, RoPE with grouped offsets: RoPE at exact offsets within the window, and between groups of positions beyond it.

        m(i, j) = i - j  where  i - j < window,    floor(i / group) - floor(j / group) + window - floor(window / group)  beyond

    A model trained at length N reaches about (N - window) group + window without training. Groups depend on absolute positions,
    so a shift of all positions changes scores of distant tokens.

    Args:
        head_dim: width of a head.
        layout: see Rotary.
        window: offsets below it are exact.
        group: positions of a group; 8 in the authors' code.
        variant: "paper" rounds window / group down; "code" does not, as the authors' LlamaAttention (LongLM,
            self_extend_patch/Llama.py).
        base: see Rotary.
        rotary_dim: see Rotary.
        scaling: see Rotary; a scheme that does not follow the length.

    Raises:
        ValueError: as Rotary; a window or group below 1, an unknown variant, a scaling that follows the length.

    Source:
        Jin et al. 2024, arXiv 2401.01325, https://arxiv.org/abs/2401.01325; code: https://github.com/datamllab/LongLM
    """

    source = "Jin et al. 2024, https://arxiv.org/abs/2401.01325"
    model_defaults = {**Rotary.model_defaults, "window": 32}

    def __init__(
        self,
        head_dim: int,
        layout: Layout,
        window: int,
        group: int = 8,
        variant: Variant = "paper",
        **options: Unpack[RotaryOptions],
    ):
        super().__init__(head_dim, layout, **options)
        self.relative = group == 1
        self.window, self.group, self.variant = window, group, variant

    def regions(self) -> tuple[Region, ...]:
        def grouped(positions: Tensor) -> Tensor:
            return floor_divide(positions, self.group)

        def moved(i: Tensor) -> Tensor:
            if self.variant == "paper":
                return grouped(i) + (self.window - self.window // self.group)
            return _exact(grouped(i)) + (self.window - self.window / self.group)

        return Region(_same, _same, last=self.window - 1), Region(moved, grouped, first=self.window)


@register("dual_chunk")
class DualChunk(Remapped):
    """Dual chunk attention (Qwen-1M): positions start again in each chunk, and offsets between chunks end at chunk_size - 1.

    With C = chunk_size - local_size, a key at j is rotated to j mod C, and a query at i

        to i mod C  for keys of the query's chunk,  to min(i mod C + C, chunk_size - 1)  for keys of the chunk before,
        to chunk_size - 1  for keys of earlier chunks

    so keys of the chunk before that are at most local_size away have their exact offset, too. Its gradients take
    memory of L² / C for L tokens.

    Args:
        head_dim: width of a head.
        layout: see Rotary.
        chunk_size: offsets stay below it; at most the training length.
        local_size: offsets across the border of two chunks that are exact, below chunk_size.
        variant: "paper" ends offsets at chunk_size - 1; "code" at chunk_size, and at min(2 C - 1, chunk_size) for earlier chunks,
            as the authors' ChunkLlama and vLLM's Qwen-1M. (Both also sharpen attention at long contexts; compose a temperature
            for that.)
        base: see Rotary.
        rotary_dim: see Rotary.
        scaling: see Rotary; a scheme that does not follow the length.

    Raises:
        ValueError: as Rotary; a local_size that is not below chunk_size, an unknown variant, a scaling that follows the length.

    Source:
        An et al. 2024, arXiv 2402.17463, https://arxiv.org/abs/2402.17463; Qwen2.5-1M: Yang et al. 2025, arXiv 2501.15383,
        https://arxiv.org/abs/2501.15383; code: https://github.com/HKUNLP/ChunkLlama
    """

    source = "An et al. 2024, https://arxiv.org/abs/2402.17463"
    model_defaults = {**Rotary.model_defaults, "chunk_size": 32, "local_size": 8}

    def __init__(
        self,
        head_dim: int,
        layout: Layout,
        chunk_size: int,
        local_size: int,
        variant: Variant = "paper",
        **options: Unpack[RotaryOptions],
    ):
        if local_size >= chunk_size:
            raise UsageError("DualChunk", "local_size below chunk_size", f"{local_size} and {chunk_size}")
        super().__init__(head_dim, layout, **options)
        self.relative = False
        self.chunk_size, self.local_size, self.variant = chunk_size, local_size, variant

    def regions(self) -> tuple[Region, ...]:
        chunk = self.chunk_size - self.local_size
        largest = self.chunk_size - (self.variant == "paper")
        farthest = largest if self.variant == "paper" else min(2 * chunk - 1, largest)

        def within(positions: Tensor) -> Tensor:
            return positions % chunk

        return (
            Region(within, within, 0, 0, chunk),
            Region(lambda i: (within(i) + chunk).clamp(max=largest), within, 1, 1, chunk),
            Region(lambda i: torch.full_like(i, farthest), within, 2, None, chunk),
        )
