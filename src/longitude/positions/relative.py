"""Position as a vector per offset, read through the query."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from longitude.errors import Positive, UsageError
from longitude.native.derivatives import readable
from longitude.positions.base import Columns, Encoding, register
from longitude.positions.coordinates import require_width, wide
from longitude.positions.linear import WideLinear
from longitude.positions.terms import OffsetVectors, Temperature, Term


@register("shaw")
class Shaw(Encoding):
    """Shaw's relative position vectors: score(i, j) += scale q_i . K[j - i], output_i += sum_j weight_ij V[j - i].

    key_table K and value_table V [2 max_distance + 1, head_dim] are shared by heads, and j - i is clipped to max_distance. Rows
    are in the paper's order: row 0 is the most distant past.

    Args:
        head_dim: width of a head.
        max_distance: offsets beyond it share the outermost rows.
        values: False leaves V out; the paper found K sufficient.
        shared: one module serves all layers; in the paper each layer has separate tables.

    Source:
        Shaw et al. 2018, arXiv 1803.02155, https://arxiv.org/abs/1803.02155
    """

    source = "Shaw et al. 2018, https://arxiv.org/abs/1803.02155"
    learned = True
    score_tables = ("key_table", "value_table")

    def __init__(self, head_dim: int, max_distance: int = 16, values: bool = True, shared: bool = False):
        super().__init__()
        self.head_dim, self.max_distance, self.values, self.shared = head_dim, max_distance, values, shared
        rows = 2 * max_distance + 1
        self.key_table = nn.Parameter(torch.empty(rows, head_dim))
        self.value_table = nn.Parameter(torch.empty(rows, head_dim)) if values else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        for table in self.parameters():
            nn.init.xavier_uniform_(table)

    def terms(self, context: Columns) -> tuple[Term, ...]:
        def rows_of(table: Tensor) -> Callable[[Tensor], Tensor]:
            return lambda offset: table[(-offset).clamp(-self.max_distance, self.max_distance) + self.max_distance]

        values = None if self.value_table is None else rows_of(self.value_table)
        return (OffsetVectors(rows_of(self.key_table), values, reach=self.max_distance),)


@register("transformer_xl")
class TransformerXL(Encoding):
    """Transformer-XL, sinusoids of the offset: score(i, j) = scale [(q_i + u) . k_j + (q_i + v) . W R(i - j)].

    R(d) = [sin(d f) | cos(d f)], f_k = 10000^(-2k/dim), k = 0 .. dim/2 - 1. Learned: u and v [num_heads, head_dim], N(0, 0.02^2)
    at first, and W = project, from dim to head_dim for each head, without bias. Keys in the future have negative offsets (XLNet).

    Args:
        num_heads: heads of queries.
        head_dim: width of a head.
        dim: width of R, even.
        clamp_length: offsets are clipped to it; None: they are not.
        shared: one module serves all layers; in the authors' code all layers share u and v, and each has a separate W.

    Source:
        Dai et al. 2019, arXiv 1901.02860, https://arxiv.org/abs/1901.02860
    """

    source = "Dai et al. 2019, https://arxiv.org/abs/1901.02860"
    learned = True
    score_tables = ("u", "v")

    def __init__(self, num_heads: int, head_dim: int, dim: int, clamp_length: int | None = None, shared: bool = False):
        super().__init__()
        if dim % 2:
            raise UsageError("TransformerXL", "an even dim, for as many sines as cosines", dim)
        self.num_heads, self.head_dim, self.dim = num_heads, head_dim, dim
        self.clamp_length, self.shared = clamp_length, shared
        self.u, self.v = (nn.Parameter(torch.empty(num_heads, head_dim)) for _ in range(2))
        self.project = WideLinear(dim, num_heads * head_dim, bias=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.u, std=0.02)
        nn.init.normal_(self.v, std=0.02)

    def queries(self, q: Tensor, prepared: None) -> Tensor:
        if q.shape[1:2] != (self.num_heads,):
            raise UsageError("TransformerXL", f"q [B, {self.num_heads}, L, {self.head_dim}]", list(q.shape))
        return (q + self.u[:, None]).to(q.dtype)

    def sinusoid(self, offset: Tensor) -> Tensor:
        """R at offsets [...] -> [..., dim], float64 where the device has it."""
        k = torch.arange(self.dim // 2, dtype=wide(offset.device), device=offset.device)
        if self.clamp_length is not None:
            offset = offset.clamp(-self.clamp_length, self.clamp_length)
        angles = offset[..., None] * 10_000.0 ** (-2 * k / self.dim)
        return torch.cat([angles.sin(), angles.cos()], -1)

    def terms(self, context: Columns) -> tuple[Term, ...]:
        dtype = torch.promote_types(self.u.dtype, torch.float32)

        def vectors(offset: Tensor) -> Tensor:
            with torch.autocast(offset.device.type, enabled=False):
                projected = self.project(self.sinusoid(offset).to(dtype)).to(dtype)
            return projected.unflatten(-1, (self.num_heads, self.head_dim)).movedim(-2, 0)

        def at(offset: Tensor) -> Tensor:
            """Vectors [heads, ..., head_dim] of offsets [...]; one that many pairs of tokens share is computed once."""
            if not readable(offset):
                return vectors(offset)
            low, high = (int(end) for end in offset.aminmax())
            if high - low >= offset.numel():
                return vectors(offset)
            return vectors(torch.arange(low, high + 1, device=offset.device))[:, offset - low]

        return (OffsetVectors(at, shift=(self.v.to(dtype) - self.u.to(dtype))[:, None], reach=self.clamp_length),)


@register("inkling")
class Inkling(Encoding):
    """Inkling's relative bias: score_h(i, j) += r_ih . P[:, i - j] for 0 <= i - j < extent, and nothing beyond; r_i = W_r x_i.

    Use it if tokens should decide which distances they look at, without any rotation. Each token mixes d_rel learned profiles
    over the distance, P [d_rel, extent], shared by heads; the bias is not scaled. The model also has QK-norm and a scale of
    1 / head_dim; the extent is 1024 in layers of full attention, and the window in others. Offsets follow positions; the model
    counts tokens in its cache, which is the same if positions count up.

    With log_scaling_n_floor = N, queries and bias are also multiplied by 1 + log_scaling_alpha ln max((i + 1) / N, 1), as in
    the model's layers of full attention. These two options are named as in its config.

    Args:
        dim: width of the tokens.
        num_heads: heads of queries.
        d_rel: number of profiles.
        extent: distances with a bias.
        log_scaling_n_floor: N, the number of positions with a factor of 1; None: all have it.
        log_scaling_alpha: rate of the factor's growth; None: 0.1.

    Raises:
        ValueError: log_scaling_alpha without log_scaling_n_floor.

    Source:
        Thinking Machines Lab 2026, https://huggingface.co/thinkingmachines/Inkling; transformers' InklingAttention.
    """

    source = "Thinking Machines Lab 2026, https://huggingface.co/thinkingmachines/Inkling"
    learned = True
    score_tables = ("profiles",)
    columns = query_columns = frozenset({"mix"})

    def __init__(
        self,
        dim: int,
        num_heads: int,
        d_rel: int = 16,
        extent: int = 1024,
        log_scaling_n_floor: int | None = None,
        log_scaling_alpha: Positive | None = None,
    ):
        super().__init__()
        if log_scaling_n_floor is None and log_scaling_alpha is not None:
            raise UsageError("Inkling", "no log_scaling_alpha without log_scaling_n_floor", log_scaling_alpha)
        self.dim, self.num_heads, self.d_rel, self.extent = dim, num_heads, d_rel, extent
        self.log_scaling_n_floor, self.log_scaling_alpha = log_scaling_n_floor, log_scaling_alpha
        self.relative = log_scaling_n_floor is None
        self.project = nn.Linear(dim, num_heads * d_rel, bias=False)
        self.profiles = nn.Parameter(torch.empty(d_rel, extent))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.profiles, std=0.02)

    def context(self, x: Tensor, carry: Any = None, documents: Tensor | None = None) -> tuple[Columns, Any]:
        require_width("Inkling", x, self.dim)
        return {"mix": self.project(x).unflatten(-1, (self.num_heads, -1)).transpose(1, 2)}, None

    def terms(self, context: Columns) -> tuple[Term, ...]:
        def at(offset: Tensor) -> Tensor:
            outside = (offset < 0) | (offset >= self.extent)
            return self.profiles.T[offset.clamp(0, self.extent - 1)].masked_fill(outside[..., None], 0.0)

        vectors = OffsetVectors(at, reach=self.extent, mix=context["mix"])
        floor, rate = self.log_scaling_n_floor, 0.1 if self.log_scaling_alpha is None else self.log_scaling_alpha
        if floor is None:
            return (vectors,)

        def factor(positions: Tensor) -> Tensor:
            count = positions.to(wide(positions.device)) + 1
            return 1 + rate * (count / floor).clamp(min=1).log()

        return vectors, Temperature(factor, "positions")
