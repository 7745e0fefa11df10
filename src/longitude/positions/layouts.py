"""Convert weights between the two rotary layouts: the model is the same, its pairs are at other dimensions.

Rotation pairs dimensions (2k, 2k+1) in the interleaved layout and (k, k + rotary_dim/2) in the half layout. Reordering the
rows of the query and key projections, inside the rotary block of each head, converts a checkpoint without changing a score.
Leave values and outputs unless they rotate too (rotate_values): then reorder v_proj, and the columns of o_proj.
"""

from typing import Literal

import torch
from torch import Tensor

from longitude.errors import UsageError, check_choice, check_sizes

Layout = Literal["half", "interleaved"]


def pair_order(rotary_dim: int, to: str) -> Tensor:
    """The permutation of a rotary block [rotary_dim]: dimension d of layout `to` is dimension pair_order[d] of the other.

    to="half": 0, 2, 4, ..., 1, 3, 5, ...    to="interleaved", its inverse: 0, n, 1, n+1, ..., where n = rotary_dim/2.
    """
    check_sizes("pair_order", rotary_dim=rotary_dim)
    check_choice("pair_order", Layout, to=to)
    if rotary_dim % 2:
        raise UsageError("pair_order", "an even rotary_dim", rotary_dim, "dimensions rotate in pairs")
    return torch.arange(rotary_dim).view((-1, 2) if to == "half" else (2, -1)).T.flatten()


def convert_layout(weight: Tensor, head_dim: int, to: str, rotary_dim: int | None = None) -> Tensor:
    """Convert a projection weight of queries or keys to the other rotary layout. Exactly a permutation of rows.

    Args:
        weight: a projection [heads * head_dim, in], its bias [heads * head_dim], or a norm inside heads [head_dim]; any number
            of heads, as grouped keys have fewer.
        head_dim: width of a head.
        to: the wanted layout, "half" or "interleaved".
        rotary_dim: only the first rotary_dim dimensions of each head rotate, the others stay in place; default: all.

    Returns:
        The weight with its rows permuted inside each head, of the same shape and dtype.

    Raises:
        ValueError: rows that are no multiple of head_dim, an odd or too large rotary_dim, an unknown layout.
    """
    rotary_dim = head_dim if rotary_dim is None else rotary_dim
    check_sizes("convert_layout", head_dim=head_dim, rotary_dim=rotary_dim)
    if rotary_dim > head_dim:
        raise UsageError("convert_layout", f"a rotary_dim of at most head_dim={head_dim}", rotary_dim)
    if not isinstance(weight, Tensor):
        raise UsageError("convert_layout", f"a tensor [heads * {head_dim}, ...]", repr(weight))
    if weight.dim() < 1 or not len(weight) or len(weight) % head_dim:
        raise UsageError(
            "convert_layout",
            f"[heads * {head_dim}, ...], a multiple of head_dim={head_dim} rows",
            list(weight.shape),
            "split fused projections into queries, keys and values first",
        )
    order = torch.cat([pair_order(rotary_dim, to), torch.arange(rotary_dim, head_dim)]).to(weight.device)
    return weight.unflatten(0, (-1, head_dim))[:, order].flatten(0, 1)
