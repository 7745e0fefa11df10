"""Position as a bias of the offsets along several axes: the learned table of Swin, and the network of Swin v2."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from longitude.errors import UsageError
from longitude.native.derivatives import readable
from longitude.positions.base import Columns, Encoding, register
from longitude.positions.coordinates import require_positions
from longitude.positions.linear import WideLinear
from longitude.positions.terms import Scored, Term


@dataclass(frozen=True)
class AxesBias(Term):
    """A bias that depends on the offsets along all axes: score += at(offsets).

    Args:
        at: maps offsets [..., axes] to [heads, ...], in float32 or wider.
        axes: coordinates per token.
        hidden: numbers of an offset before its bias. If positions cannot be read, as in a compiled graph, they are of each pair.
    """

    reads_positions = reads_axes = True
    at: Callable[[Tensor], Tensor]
    axes: int
    hidden: int = 0

    def numbers_of(self, r: Scored, pairs: int) -> int:
        # Offsets and their row in a table are int64.
        return (2 * (self.axes + 4) + self.hidden * (not readable(*r.places()))) * pairs

    def dense(self, r: Scored, q: Tensor, scores: Tensor, allowed: Tensor) -> Tensor:
        # [L], [B, L] and [.., L, 1] are the same number on every axis
        places = (p if p.dim() == 3 else p[..., None] for p in r.places())
        i, j = (p.expand(*p.shape[:-1], self.axes) for p in places)
        bias = self.at(i[..., :, None, :] - j[..., None, :, :])
        return bias if bias.dim() == 3 else bias.movedim(0, 1)


def checked_sides(who: str, sides: Sequence[int]) -> tuple[int, ...]:
    """Sides of a window; ValueError for other than two sides or more, of two tokens or more."""
    if not isinstance(sides, list | tuple) or len(sides) < 2 or any(type(n) is not int or n < 2 for n in sides):
        raise UsageError(who, "2 tokens or more along two axes or more, such as (7, 7)", repr(sides))
    return tuple(sides)


@register("swin")
class SwinTable(Encoding):
    """Swin, a number for each offset along all axes: score_h(i, j) += table[h, y_i - y_j, x_i - x_j].

    Positions are [L, axes] or [B, L, axes]. Swin attends within windows of the same sides: all pairs of a call must lie within
    them, also those that a mask hides. table [num_heads, offsets] starts as N(0, 0.02^2); offsets are in rows, from the most
    negative.

    Args:
        num_heads: heads of queries.
        sides: tokens of the window along each axis, such as (7, 7).

    Source:
        Liu et al. 2021, arXiv 2103.14030, https://arxiv.org/abs/2103.14030
    """

    source = "Liu et al. 2021, https://arxiv.org/abs/2103.14030"
    learned = True
    score_tables = ("table",)
    model_defaults = {"sides": (300, 300)}  # for tests with text, whose tokens have the same number on all axes

    def __init__(self, num_heads: int, sides: Sequence[int]):
        super().__init__()
        self.num_heads, self.sides = num_heads, checked_sides("SwinTable", sides)
        self.axes, self.max_length = len(sides), min(sides)
        self.table = nn.Parameter(torch.empty(num_heads, math.prod(2 * side - 1 for side in sides)))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.table, std=0.02)

    def terms(self, context: Columns) -> tuple[Term, ...]:
        def at(offset: Tensor) -> Tensor:
            row = torch.zeros_like(offset[..., 0])
            for axis, side in enumerate(self.sides):
                distance = offset[..., axis]
                what, remedy = f"distances along axis {axis} of", "attend within windows, or use swin_v2"
                require_positions(distance.abs(), side, f"SwinTable, sides={self.sides}", what, remedy)
                row = row * (2 * side - 1) + distance + side - 1
            return self.table[:, row]

        return (AxesBias(at, self.axes),)


@register("swin_v2")
class ContinuousBias(Encoding):
    """Swin v2, a small network of logarithms of the offsets: score_h(i, j) += 16 sigmoid(mlp(u_y, u_x)_h).

    u = sign(d) log2(1 + 8 |d| / (W - 1)) / 3 for the offset d along an axis. Positions are [L, axes] or [B, L, axes], and a
    larger window evaluates the same curve. mlp is Linear(axes, width), ReLU, Linear(width, num_heads) without a bias. The model
    itself also has cosine attention.

    Args:
        num_heads: heads of queries.
        sides: W, tokens of the window in training along each axis.
        width: width of the mlp's hidden layer.

    Source:
        Liu et al. 2022, arXiv 2111.09883, https://arxiv.org/abs/2111.09883
    """

    source = "Liu et al. 2022, https://arxiv.org/abs/2111.09883"
    learned = True
    model_defaults = SwinTable.model_defaults

    def __init__(self, num_heads: int, sides: Sequence[int], width: int = 512):
        super().__init__()
        self.num_heads, self.sides, self.width = num_heads, checked_sides("ContinuousBias", sides), width
        self.axes = len(sides)
        self.mlp = nn.Sequential(WideLinear(self.axes, width), nn.ReLU(), WideLinear(width, num_heads, bias=False))

    def logarithms(self, offset: Tensor) -> Tensor:
        """What the network reads of offsets [..., axes]: u, float32 or wider."""
        dtype = torch.promote_types(next(self.mlp.parameters()).dtype, torch.float32)
        scale = torch.tensor([8 / (side - 1) for side in self.sides], dtype=dtype, device=offset.device)
        return offset.sign() * (1 + scale * offset.abs()).log2() / 3

    def bias_of(self, offset: Tensor) -> Tensor:
        """The bias of offsets [..., axes]: [heads, ...]."""
        with torch.autocast(offset.device.type, enabled=False):
            u = self.logarithms(offset)
            return 16 * self.mlp(u).to(u.dtype).sigmoid().movedim(-1, 0)

    def terms(self, context: Columns) -> tuple[Term, ...]:
        def at(offset: Tensor) -> Tensor:
            """The bias of offsets; those that many pairs of tokens share are computed once."""
            if not readable(offset):
                return self.bias_of(offset)
            low, high = offset.flatten(0, -2).aminmax(dim=0)
            counts, row = (high - low + 1).tolist(), torch.zeros_like(offset[..., 0])
            for axis, count in enumerate(counts):
                row = row * count + offset[..., axis] - low[axis]
            rows, place = row.unique(return_inverse=True)
            return self.bias_of(torch.stack(torch.unravel_index(rows, counts), -1) + low)[:, place]

        return (AxesBias(at, self.axes, hidden=2 * self.width),)
