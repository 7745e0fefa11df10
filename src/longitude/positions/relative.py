"""Position as a learned vector per offset, read through the query."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from longitude.positions.base import Columns, Encoding, OffsetVectors, Term, register, sizes


@register("shaw")
class Shaw(Encoding):
    """score(i, j) += scale q_i . K[j - i],  output_i += sum_j weight_ij V[j - i]  (Shaw et al. 2018).

    key_table K and value_table V [2 max_distance + 1, head_dim], shared by heads; j - i is clipped to max_distance, and rows
    are in the paper's order: row 0 is the far past. values=False leaves V out: the paper found K sufficient.
    """

    learned = True

    def __init__(self, head_dim: int, max_distance: int = 16, values: bool = True):
        super().__init__()
        sizes("Shaw", head_dim=head_dim, max_distance=max_distance)
        self.head_dim, self.max_distance, self.values = head_dim, max_distance, values
        rows = 2 * max_distance + 1
        self.key_table = nn.Parameter(torch.empty(rows, head_dim))
        self.value_table = nn.Parameter(torch.empty(rows, head_dim)) if values else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        for table in self.parameters():
            nn.init.xavier_uniform_(table)

    def terms(self, context: Columns) -> tuple[Term, ...]:
        def look(table: Tensor) -> Callable[[Tensor], Tensor]:
            return lambda offset: table[(-offset).clamp(-self.max_distance, self.max_distance) + self.max_distance]

        values = None if self.value_table is None else look(self.value_table)
        return (OffsetVectors(look(self.key_table), values),)
