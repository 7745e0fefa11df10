"""Weights from one rotary layout to the other: the same model, its pairs in other places.

Rotation pairs dimensions (2k, 2k+1) in the interleaved layout and (k, k + rotary_dim/2) in the half layout. Reordering the
rows that make queries and keys, inside the rotary block of each head, moves a checkpoint between the two without changing
a score. Values and outputs do not turn and stay as they are.
"""

import torch
from torch import Tensor

from longitude.positions.base import check_sizes


def pair_order(rotary_dim: int, to: str) -> Tensor:
    """The permutation of a rotary block [rotary_dim]: dimension d of layout `to` is dimension pair_order[d] of the other.

    to="half": 0, 2, 4, ..., 1, 3, 5, ...    to="interleaved", its inverse: 0, n, 1, n+1, ..., where n = rotary_dim/2.
    """
    check_sizes("pair_order", rotary_dim=rotary_dim)
    if rotary_dim % 2:
        raise ValueError(f"pair_order: expected an even rotary_dim, got {rotary_dim}; dimensions turn in pairs")
    dimensions = torch.arange(rotary_dim)
    if to == "half":
        return dimensions.view(-1, 2).T.flatten()
    if to == "interleaved":
        return dimensions.view(2, -1).T.flatten()
    raise ValueError(f"pair_order: expected to='half' or 'interleaved', got {to!r}; say the layout that you want")


def convert_layout(weight: Tensor, head_dim: int, to: str, rotary_dim: int | None = None) -> Tensor:
    """What makes queries or keys in one rotary layout -> the same for layout `to`: "half" or "interleaved".

    weight: a projection [heads * head_dim, in], its bias [heads * head_dim], or a norm inside heads [head_dim]; any number
    of heads, as grouped keys have fewer. rotary_dim: only the first rotary_dim dimensions of each head turn (default: all);
    the others stay. Exactly a permutation, so converting there and back gives the same bits.

    Errors: ValueError for rows that are no multiple of head_dim, an odd or too large rotary_dim, an unknown layout.
    """
    rotary_dim = head_dim if rotary_dim is None else rotary_dim
    check_sizes("convert_layout", head_dim=head_dim, rotary_dim=rotary_dim)
    if rotary_dim > head_dim:
        raise ValueError(f"convert_layout: expected a rotary_dim of at most head_dim={head_dim}, got {rotary_dim}")
    if not isinstance(weight, Tensor):
        raise ValueError(f"convert_layout: expected a tensor [heads * {head_dim}, ...], got {weight!r}")
    if weight.dim() < 1 or not len(weight) or len(weight) % head_dim:
        raise ValueError(
            f"convert_layout: expected [heads * {head_dim}, ...], a multiple of head_dim={head_dim} rows, got "
            f"{list(weight.shape)}; split fused projections into queries, keys and values first"
        )
    order = torch.cat([pair_order(rotary_dim, to), torch.arange(rotary_dim, head_dim)]).to(weight.device)
    return weight.unflatten(0, (-1, head_dim))[:, order].flatten(0, 1)
