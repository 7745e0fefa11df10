"""Position that depends on content: counted (CoPE), forgotten (FoX), or carried by reflections (PaTH)."""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from longitude.errors import UsageError
from longitude.native.not_finite import lost_after, not_finite
from longitude.positions.base import Columns, Encoding, register
from longitude.positions.composed import Composed
from longitude.positions.coordinates import require_width, wide
from longitude.positions.formulas import Counted
from longitude.positions.terms import Drift, RowBias, Term, Transport


@register("cope")
class CoPE(Encoding):
    """CoPE, positions counted by gates: score(i, j) += scale q_i . E[p_ij], p_ij = sum_{l=j..i} sigmoid(score(i, l)).

    A position counts the tokens that the query's gates let through, so it may be a count of words or of sentences. It is
    clipped to max_position - 1. E [head_dim, max_position] is shared by heads, starts at zero, and is interpolated linearly
    between its columns. scale is head_dim^-1/2, as in the authors' code.

    Args:
        head_dim: width of a head.
        max_position: columns of E.

    Source:
        Golovneva et al. 2024, arXiv 2405.18719, https://arxiv.org/abs/2405.18719
    """

    source = "Golovneva et al. 2024, https://arxiv.org/abs/2405.18719"
    learned = True
    causal_only = True

    def __init__(self, head_dim: int, max_position: int = 64):
        super().__init__()
        self.head_dim, self.max_position = head_dim, max_position
        self.table = nn.Parameter(torch.empty(head_dim, max_position))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.zeros_(self.table)

    def terms(self, context: Columns) -> tuple[Term, ...]:
        return (RowBias(Counted(self.table, self.head_dim**-0.5)),)


@register("fox")
class FoX(Encoding):
    """FoX, a forget gate per head: score(i, j) += G_i - G_j, G_t = sum_{l<=t} ln f_l, f_t = sigmoid(w_h . x_t + b_h).

    Each head decays at a rate computed from the tokens; a constant f is ALiBi with the slope -ln f. The columns have G, in
    float64 if the device has it, because differences of long sums expose rounding. The carry is the last G and the number of
    its document.

    Args:
        dim: width of the tokens.
        num_heads: heads of queries.
        scale_gate: whether the difference is multiplied by the scale of the scores, as q.k is. PaTH-FoX does this, FoX does
            not.

    Source:
        Lin et al. 2025, arXiv 2503.02130, https://arxiv.org/abs/2503.02130
    """

    source = "Lin et al. 2025, https://arxiv.org/abs/2503.02130"
    learned = True
    causal_only = True
    carries = True
    columns = frozenset({"forgotten"})

    def __init__(self, dim: int, num_heads: int, scale_gate: bool = False):
        super().__init__()
        self.num_heads, self.scale_gate = num_heads, scale_gate
        self.forget = nn.Linear(dim, num_heads)

    def context(self, x: Tensor, carry: Any = None, documents: Tensor | None = None) -> tuple[Columns, Any]:
        require_width("FoX", x, self.forget.in_features)
        log_f = F.logsigmoid(self.forget(x).to(torch.promote_types(x.dtype, torch.float32)))
        log_f = log_f.transpose(1, 2).to(wide(x.device))
        if documents is None:
            level = running_sum(log_f)
            level = level if carry is None else level + carry[0]
            return {"forgotten": level}, (level[..., -1:], level.new_zeros(len(level), 1, dtype=torch.long))
        level, last = (log_f.new_zeros(*log_f.shape[:2], 1), documents[:, :1].long()) if carry is None else carry
        # Padding forgets nothing and belongs to the document before it. The carry is put in front, like a token.
        real = F.pad(documents >= 0, (1, 0), value=True)
        order = torch.arange(real.shape[1], device=x.device)
        nearest = torch.where(real, order, 0).cummax(1).values
        ids = torch.cat([last, documents.long()], 1).gather(1, nearest)
        every = torch.cat([level, log_f], 2).masked_fill(~real[:, None], 0.0)
        bad = not_finite([every], 2)
        level = sum_by_doubling(every.masked_fill(bad[:, None], 0.0), ids[:, None])
        level = level.masked_fill(lost_after(bad, ids)[:, None], math.nan)[..., 1:]
        return {"forgotten": level}, (level[..., -1:], ids[:, -1:])

    def terms(self, context: Columns) -> tuple[Term, ...]:
        return (Drift(context["forgotten"], scaled=self.scale_gate),)


MAX_LENGTH = 2**24
"""Longest sequence in a compiled graph, in tokens."""


def running_sum(x: Tensor) -> Tensor:
    """x.cumsum(-1), also on CUDA with deterministic algorithms, for which torch has no cumsum."""
    if not (x.is_cuda and torch.are_deterministic_algorithms_enabled()):
        return x.cumsum(-1)
    return sum_by_doubling(x)


def sum_by_doubling(x: Tensor, documents: Tensor | None = None) -> Tensor:
    """Cumulative sum by doubling, over 2, 4, 8, ... tokens, separately in each document, so that gradients stay separate."""
    length = x.shape[-1]
    if torch.compiler.is_compiling():
        # The steps in a graph must not depend on the length: there are as many as the longest sequence needs.
        torch._check(length <= MAX_LENGTH)
        steps: list[Any] = [torch.sym_min(2**n, length) for n in range(MAX_LENGTH.bit_length() - 1)]
    else:
        steps = [2**n for n in range((length - 1).bit_length())]
    for step in steps:
        before = F.pad(x, (step, 0))[..., :length]
        if documents is not None:
            same = F.pad(documents, (step, 0))[..., :length] == documents
            before = before.where(same, 0.0)
        x = x + before
    return x


@register("path")
class PaTH(Encoding):
    """PaTH, accumulated reflections: q_i . H_i ... H_(j+1) k_j instead of q_i . k_j, H_t = I - b_t w_t w_t'.

    w = l2norm(silu(conv(up(down(x))))) per key head, l2norm(y) = y / sqrt(|y|^2 + 1e-6) as in the authors' code. The depthwise
    convolution is causal; its last weight multiplies the token itself. b = 2 sigmoid(.) in (0, 2): 0 leaves a key unchanged,
    1 projects, 2 reflects. The carry is the convolution's tail. Tokens of another document, and padding, count as zeros for the
    convolution.

    Args:
        dim: width of the tokens.
        num_heads: heads of queries.
        head_dim: width of a head.
        num_kv_heads: heads of keys; None: num_heads.
        rank: width between down and up; None: a single full matrix, as the authors use with shared key heads.
        kernel: size of the convolution in tokens.
        chunk_size: tokens of a block of reflections; every size gives the same result.

    Source:
        Yang et al. 2025, arXiv 2505.16381, https://arxiv.org/abs/2505.16381
    """

    source = "Yang et al. 2025, https://arxiv.org/abs/2505.16381"
    learned = True
    causal_only = True
    carries = True
    columns = passing_columns = frozenset({"reflection", "strength"})  # a cache applies them to its keys and drops them

    def __init__(
        self,
        dim: int,
        num_heads: int,
        head_dim: int,
        num_kv_heads: int | None = None,
        rank: int | None = 32,
        kernel: int = 3,
        chunk_size: int = 128,
    ):
        super().__init__()
        num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        if num_heads % num_kv_heads:
            raise UsageError("PaTH", f"num_kv_heads to divide num_heads={num_heads}", num_kv_heads)
        self.dim, self.num_heads, self.heads, self.head_dim = dim, num_heads, num_kv_heads, head_dim
        self.rank, self.kernel, self.chunk_size = rank, kernel, chunk_size
        self.down = nn.Identity() if rank is None else nn.Linear(dim, rank, bias=False)
        self.up = nn.Linear(dim if rank is None else rank, self.heads * head_dim, bias=False)
        self.taps = nn.Parameter(torch.empty(kernel, self.heads * head_dim))  # the newest token last
        self.strength = nn.Linear(dim, self.heads)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialize as a depthwise nn.Conv1d."""
        nn.init.uniform_(self.taps, -(self.kernel**-0.5), self.kernel**-0.5)

    def context(self, x: Tensor, carry: Any = None, documents: Tensor | None = None) -> tuple[Columns, Any]:
        require_width("PaTH", x, self.dim)
        wider = torch.promote_types(x.dtype, torch.float32)
        if documents is None:
            documents = torch.zeros(x.shape[:2], dtype=torch.long, device=x.device)
        documents = documents.long()
        new, tail = self.up(self.down(x)), self.kernel - 1
        if carry is None:  # before the first token: zeros, with an id that no document has
            carry = new.new_zeros(new.shape[0], tail, new.shape[-1]), documents.new_full((new.shape[0], tail), -(2**62))
        stream, ids = torch.cat([carry[0], new], 1), torch.cat([carry[1], documents], 1)
        length = x.shape[1]
        mixed = torch.zeros_like(new)
        for t in range(self.kernel):
            same_document = (ids[:, t : t + length] == documents)[..., None]
            mixed = mixed + self.taps[t] * stream[:, t : t + length].where(same_document, 0)
        w = F.silu(mixed).to(wider).unflatten(-1, (self.heads, -1)).transpose(1, 2)
        w = w * torch.rsqrt(w.square().sum(-1, keepdim=True) + 1e-6)
        b = 2 * torch.sigmoid(self.strength(x).to(wider)).transpose(1, 2)
        carry = stream[:, stream.shape[1] - tail :], ids[:, ids.shape[1] - tail :]
        return {"reflection": w, "strength": b}, carry

    def terms(self, context: Columns) -> tuple[Term, ...]:
        return (Transport(context["reflection"], context["strength"], self.chunk_size),)


@register("path_fox")
def path_fox(
    dim: int,
    num_heads: int,
    head_dim: int,
    num_kv_heads: int | None = None,
    rank: int | None = 32,
    kernel: int = 3,
    chunk_size: int = 128,
    scale_gate: bool = True,
) -> Composed:
    """PaTH with FoX's forget gate: scale (q_i . H_i ... H_(j+1) k_j + G_i - G_j).

    Args:
        dim: see PaTH.
        num_heads: see PaTH.
        head_dim: see PaTH.
        num_kv_heads: see PaTH.
        rank: see PaTH.
        kernel: see PaTH.
        chunk_size: see PaTH.
        scale_gate: the gate is scaled with the scores, as in the authors' code; False: it is not, as in FoX.

    Source:
        Yang et al. 2025, arXiv 2505.16381, https://arxiv.org/abs/2505.16381
    """
    path = PaTH(dim, num_heads, head_dim, num_kv_heads, rank, kernel, chunk_size)
    return Composed([path, FoX(dim, num_heads, scale_gate)])
