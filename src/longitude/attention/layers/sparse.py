"""Native sparse attention: to summaries of all blocks, to the tokens of the blocks that these choose, and to a window."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from longitude.attention.documents import begins_of, runs_of
from longitude.attention.heads import head_sizes, join_heads, split_heads
from longitude.attention.layers.base import attended, checked_call
from longitude.attention.layers.hierarchical.blocks import weighted
from longitude.attention.masks import Mask, Window
from longitude.attention.mixer import (
    Mixer,
    MixerInputs,
    register_mixer,
    require_cache,
    require_no_weights,
    require_plain,
)
from longitude.attention.operation import require_backend
from longitude.attention.request import require_options
from longitude.derivatives import with_zero_gradients
from longitude.errors import UsageError, check_sizes
from longitude.not_finite import all_finite, filled, gradients_apart, lost_after, not_finite
from longitude.positions.base import Encoding
from longitude.positions.composed import compose
from longitude.positions.coordinates import explicit

if TYPE_CHECKING:
    from longitude.attention.cache import SparseCacheLayer

ROWS = 256
"""Queries in a block, for which scores over all tokens are held in memory at a time."""


@dataclass(frozen=True)
class Rule:
    """The options of one call, as in `NativeSparseAttention`; dropout is 0 outside of training."""

    block: int
    stride: int
    select_block: int
    select_count: int
    scale: float
    dropout: float = 0.0


class Tokens(NamedTuple):
    """Document of each token so far, -1 for padding, and its index in the document, where padding does not count."""

    document: Int[Tensor, "#B N"]
    number: Int[Tensor, "#B N"]

    @classmethod
    def of(cls, documents: Int[Tensor, "B N"] | None, count: int, device: torch.device) -> Tokens:
        if documents is None:
            number = torch.arange(count, device=device)[None]
            return cls(torch.zeros_like(number), number)
        runs, before = runs_of(documents), (documents >= 0).cumsum(1) - 1
        first = torch.where(begins_of(runs), before, 0).cummax(1).values
        return cls(runs, before - first)

    def ends(self, rule: Rule) -> Bool[Tensor, "#B N"]:
        """Tokens at the end of a summarized block: `block` tokens of a document, every `stride` tokens."""
        beyond = self.number - (rule.block - 1)
        return (self.document >= 0) & (beyond >= 0) & (beyond % rule.stride == 0)


def first_where(flags: Bool[Tensor, "#B N"], count: int) -> Int[Tensor, "#B count"]:
    """Indices of the first True entries in order, then of other entries: a fixed `count` per row, as compilers need."""
    return flags.logical_not().to(torch.uint8).argsort(dim=1, stable=True)[:, :count]


def at_tokens(x: Float[Tensor, "B H N D"], at: Int[Tensor, "#B ..."]) -> Float[Tensor, "B H ... D"]:
    """Gather the tokens with these indices in each row."""
    flat = at.flatten(1).expand(len(x), -1)[:, None, :, None].expand(-1, x.shape[1], -1, x.shape[3])
    return x.gather(2, flat).unflatten(2, at.shape[1:])


def summaries(
    rule: Rule, tokens: Tokens, past: int, every: Sequence[Float[Tensor, "B H N D"]], summarise: Sequence[nn.Module]
) -> list[Float[Tensor, "B H L D"]]:
    """Summaries of keys and of values at the tokens from `past` on that end a block; zeros at other tokens."""
    ends = tokens.ends(rule)[:, past:]
    length = ends.shape[1]
    here = first_where(ends, (length - 1) // rule.stride + 1)  # ends are `stride` tokens apart, or more
    real = tokens.document >= 0
    in_order = first_where(real, real.shape[1])
    last = (real.cumsum(1) - 1).gather(1, here + past)  # how many real tokens come before
    back = torch.arange(1 - rule.block, 1, device=here.device)
    of_block = in_order.gather(1, (last[..., None] + back).clamp(min=0).flatten(1)).unflatten(1, (*here.shape[1:], -1))
    fits, found = ends.gather(1, here)[:, None, :, None], []
    for x, module in zip(every, summarise, strict=True):
        each = torch.where(fits, module(at_tokens(x, of_block)), 0)
        index = here.expand(len(x), -1)[:, None, :, None].expand_as(each)
        found.append(each.new_zeros(*x.shape[:2], length, x.shape[3]).scatter(2, index, each))
    return found


def over_blocks(
    rule: Rule,
    tokens: Tokens,
    q: Float[Tensor, "B H L D"],
    keys: Float[Tensor, "B Hkv N D"],
    values: Float[Tensor, "B Hkv N D"],
) -> tuple[Float[Tensor, "B H L D"], Float[Tensor, "B Hkv L J"]]:
    """Attention to the summaries of blocks that have ended, and its weight for each selectable block.

    A selected block j is the tokens j select_block .. (j + 1) select_block - 1 of a document. Its weight is the sum of the
    weights of overlapping summaries, times the strides they share, over the query heads that share keys (equations 9 and 10).
    """
    total, length = tokens.number.shape[1], q.shape[2]
    ends, size = tokens.ends(rule), rule.select_block
    at = first_where(ends, total // rule.stride)
    (document, number), order = (
        (x.gather(1, at) for x in tokens),
        torch.arange(total, device=q.device)[total - length :],
    )
    seen = (document[:, None] == tokens.document[:, total - length :, None]) & (at[:, None] <= order[:, None])
    seen = seen & ends.gather(1, at)[:, None]
    keys, values = at_tokens(keys, at), at_tokens(values, at)
    rows = q.unflatten(1, (keys.shape[1], -1))  # [B, Hkv, R, L, D]
    scores = rule.scale * (rows @ keys[:, :, None].mT)
    weights, _ = weighted(scores, seen[:, None, None].expand_as(scores), 0.0)
    first = size * torch.arange(-(-total // size), device=q.device)
    begin, end = number[..., None] + 1 - rule.block, number[..., None] + 1
    shared = (torch.minimum(end, first + size) - torch.maximum(begin, first)).clamp(min=0) / rule.stride  # [B, M, J]
    chances = weights.detach().sum(2) @ shared.to(weights.dtype)[:, None]
    out = F.dropout(weights, rule.dropout, training=rule.dropout > 0) @ values[:, :, None]
    return out.flatten(1, 2), chances


def chosen(rule: Rule, tokens: Tokens, chances: Float[Tensor, "B Hkv L J"]) -> Bool[Tensor, "B Hkv L J"]:
    """Blocks that each query attends to: the first, its current and previous block, and those with the highest weights.

    Ties go to the earlier block.
    """
    own = (tokens.number[:, -chances.shape[2] :] // rule.select_block)[:, None, :, None]
    block = torch.arange(chances.shape[3], device=chances.device)
    always = (block == 0) | (block == own) | (block == own - 1)
    wanted = chances.masked_fill(always, torch.inf).masked_fill(block > own, -torch.inf)
    best = wanted.argsort(dim=-1, descending=True, stable=True)[..., : rule.select_count]
    return torch.zeros_like(wanted, dtype=torch.bool).scatter(-1, best, True) & (block <= own)


def over_chosen(
    rule: Rule,
    tokens: Tokens,
    q: Float[Tensor, "B H L D"],
    keys: Float[Tensor, "B Hkv N D"],
    values: Float[Tensor, "B Hkv N D"],
    blocks: Bool[Tensor, "B Hkv L J"],
) -> Float[Tensor, "B H L D"]:
    """Attention to the tokens of chosen blocks: scores of all tokens are computed, and a mask hides the others."""
    total, length, out = keys.shape[2], q.shape[2], []
    rows, order = q.unflatten(1, (keys.shape[1], -1)), torch.arange(total, device=q.device)
    number = tokens.number.clamp(min=0) // rule.select_block
    for first in range(total - length, total, ROWS):
        at = slice(first, min(first + ROWS, total))
        past, here = slice(0, at.stop), slice(at.start + length - total, at.stop + length - total)
        allowed = (tokens.document[:, at, None] == tokens.document[:, None, past]) & (order[past] <= order[at, None])
        allowed = allowed & (tokens.document[:, None, past] >= 0)
        picked = blocks[:, :, here]
        seen = picked.gather(-1, number[:, None, None, past].expand(*picked.shape[:3], -1)) & allowed[:, None]
        scores = rule.scale * (rows[:, :, :, here] @ keys[:, :, None, past].mT)
        weights, _ = weighted(scores, seen[:, :, None].expand_as(scores), rule.dropout)
        out.append((weights @ values[:, :, None, past]).flatten(1, 2))
    return torch.cat(out, 2)


def finite(
    tokens: Tokens, q: Tensor, rotated: Tensor, k: Tensor, v: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor, Bool[Tensor, "B L"] | None]:
    """Zero queries [B, H, L, D], keys and values [B, h, N, D] of tokens that are not finite: a weight of 0 hides no NaN.

    Also return which queries are such tokens, or come after one in their document; None: all are finite.
    """
    if all_finite(q, k, v):
        return q, rotated, k, v, None
    length, bad = q.shape[2], not_finite([k, v], 2)
    of_queries = bad[:, -length:] | not_finite([q, rotated], 2)
    bad = torch.cat([bad[:, :-length], of_queries], 1)
    lost = lost_after(bad & (tokens.document >= 0), tokens.document.expand_as(bad))[:, -length:]
    q, rotated = (filled(x, of_queries, 2, 0.0) for x in (q, rotated))
    k, v = (filled(x, bad, 2, 0.0) for x in (k, v))
    return q, rotated, k, v, lost


class Summary(nn.Module):
    """relu((x + places) flattened, A + a) B: block tokens [..., block, D] -> [..., D], the same for all heads."""

    def __init__(self, block: int, head_dim: int, hidden: int):
        super().__init__()
        self.places = nn.Parameter(torch.empty(block, head_dim))
        self.up = nn.Parameter(torch.empty(block * head_dim, hidden))
        self.down = nn.Parameter(torch.empty(hidden, head_dim))

    def reset_parameters(self) -> None:
        """Initialize the matrices as in Linear layers, and the learned positions with zeros."""
        nn.init.zeros_(self.places)
        for matrix in (self.up, self.down):
            nn.init.uniform_(matrix, -(matrix.shape[0] ** -0.5), matrix.shape[0] ** -0.5)

    def forward(self, x: Float[Tensor, "... block D"]) -> Float[Tensor, "... D"]:
        up, down, places = (p.to(x.dtype) for p in (self.up, self.down, self.places))
        return ((x + places).flatten(-2) @ up).relu() @ down


@register_mixer("nsa")
class NativeSparseAttention(Mixer):
    """Native sparse attention (NSA): queries attend to summaries of blocks, to the tokens of selected blocks, and to a window.

        out = W_o (g_c attention(q, summaries of blocks) + g_s attention(q, tokens of chosen blocks) + g_w attention(q, window))
        g = sigmoid(x W_g) for each head;   a summary = relu(flatten(k + places) A) B, of `block` tokens, every `stride` tokens

    Each branch has separate keys and values, and a separate softmax. A query attends to the summaries of blocks that have
    ended. Their weights, summed over the heads that share keys, select `select_count` blocks of `select_block` tokens. The
    first, the current and the previous block are always selected. The selection has no gradient.

    Queries and keys of selected blocks and of the window are rotated. Summaries have learned positions instead. Blocks are
    counted from the start of a document, without padding.

    The result is exact but not fast: for selected blocks the scores of all tokens are computed and masked. Its cache keeps all
    keys and values, and the summaries.

    Args:
        dim: width of x and of the output.
        num_heads: heads of queries.
        num_kv_heads: heads of keys and values; None: num_heads.
        encoding: rotations.
        block: tokens of a summary, a multiple of stride.
        stride: tokens between the starts of consecutive summaries.
        select_block: tokens of a selected block, a multiple of stride, and at least `block`.
        select_count: number of selected blocks, 3 or more.
        window: tokens of the window, the query's token included.
        hidden: columns of A; None: 4 head_dim.
        head_dim: width of a head; None: dim / num_heads.
        bias: whether the projections have biases.
        dropout: dropout probability of the weights, in training.
        scale: factor of the scores; None: head_dim^-1/2.
        backend: backend of the window branch, as in attend.

    Raises:
        ValueError: for sizes that do not fit, or an encoding that is no rotation.

    Source:
        Yuan et al. 2025, arXiv 2502.11089, https://arxiv.org/abs/2502.11089
    """

    source = "Yuan et al. 2025, https://arxiv.org/abs/2502.11089"
    rotates = True
    growth = "O(N)"
    softcap = None

    def __init__(
        self,
        dim: int,
        num_heads: int,
        num_kv_heads: int | None = None,
        encoding: Encoding | Sequence[Encoding] | None = None,
        *,
        block: int = 32,
        stride: int = 16,
        select_block: int = 64,
        select_count: int = 16,
        window: int = 512,
        hidden: int | None = None,
        head_dim: int | None = None,
        bias: bool = False,
        dropout: float = 0.0,
        scale: float | None = None,
        backend: str = "auto",
    ):
        super().__init__()
        name = "NativeSparseAttention"
        num_kv_heads, head_dim = head_sizes(name, dim, num_heads, num_kv_heads, head_dim)
        hidden = 4 * head_dim if hidden is None else hidden
        check_sizes(name, block=block, stride=stride, select_block=select_block, window=window, hidden=hidden)
        check_sizes(name, select_count=select_count)
        sizes = f"block={block}, stride={stride}, select_block={select_block}, select_count={select_count}"
        if block % stride or select_block % stride or select_block < block or select_count < 3:
            raise UsageError(
                name,
                "stride to divide block and select_block, block of at most select_block tokens, and select_count "
                "of 3 or more",
                sizes,
            )
        require_backend(backend)
        require_options(scale, dropout)
        self.dim, self.num_heads, self.num_kv_heads, self.head_dim = dim, num_heads, num_kv_heads, head_dim
        self.block, self.stride, self.window = block, stride, window
        self.select_block, self.select_count = select_block, select_count
        self.dropout, self.scale, self.backend = dropout, scale, backend
        self.q_proj = nn.Linear(dim, num_heads * head_dim, bias=bias)
        self.k_proj, self.v_proj = (nn.Linear(dim, 3 * num_kv_heads * head_dim, bias=bias) for _ in range(2))
        self.g_proj = nn.Linear(dim, 3 * num_heads, bias=False)
        self.o_proj = nn.Linear(num_heads * head_dim, dim, bias=bias)
        self.key_summary, self.value_summary = (Summary(block, head_dim, hidden) for _ in range(2))
        self.encoding = compose(encoding)
        self.require(self.encoding)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        for summary in (self.key_summary, self.value_summary):
            summary.reset_parameters()

    def products(self, keys: float) -> float:
        seen = keys / self.stride + min(keys, self.select_count * self.select_block) + min(keys, self.window)
        summaries = sum(x.numel() for s in (self.key_summary, self.value_summary) for x in (s.up, s.down))
        return 2 * seen * self.num_heads * self.head_dim + self.num_kv_heads * summaries / self.stride

    def cache_layer(self) -> SparseCacheLayer:
        from longitude.attention.cache import SparseCacheLayer

        return SparseCacheLayer()

    @property
    def far_from(self) -> int:
        return self.block - 1

    def refuses(self, encoding: Encoding) -> str | None:
        if (why := super().refuses(encoding)) is None and not encoding.stable_keys:
            how = "moves a token by pairs" if compose(encoding).regions() else "follows the length of the sequence"
            why = f"{type(encoding).__name__} {how}, and sparse attention keeps rotated keys"
        return why

    def mask_of(self, inputs: MixerInputs) -> Mask:
        """Mask of the window branch: the mask of the call and the window."""
        require_plain(self, inputs.mask, "chooses among all tokens before each in its document")
        return inputs.once(("window", self.window, 1), lambda: inputs.mask & Window(self.window))

    def mix_tokens(self, x: Float[Tensor, "B L dim"], inputs: MixerInputs) -> Any:
        """Project, rotate, cache, summarise; attend in three branches; project."""
        cache = inputs.cache
        if inputs.encoding is not None:
            self.require(inputs.encoding)
        encoding = self.encoding if inputs.encoding is None else inputs.encoding
        require_no_weights(self, inputs.return_weights, inputs.memory)
        require_cache(self, cache, ("sparse",))
        x, call = checked_call(x, self.dim, encoding, self.mask_of(inputs), inputs)
        q = split_heads(self.q_proj(x), self.num_heads)
        k, v = (split_heads(project(x), 3 * self.num_kv_heads) for project in (self.k_proj, self.v_proj))
        rotated = q
        if encoding.transforms:
            tables = inputs.tables
            if tables is None:
                tables = encoding.prepare(explicit(call.positions, call.length, x.device), None, q.dtype)
            plain, *rest = k.chunk(3, 1)
            rotated, k = encoding.queries(q, tables), torch.cat([plain, *(encoding.keys(y, tables) for y in rest)], 1)
        k_positions, past, summarised = call.positions, 0, {}
        if cache is not None:
            past, summarised = call.past, cache.columns
            k, v, _ = cache.extend(k, v, call.positions, {}, None, encoding)
            k_positions = cache.positions
        wide = torch.promote_types(k.dtype, torch.float32)
        tokens = inputs.once(("sparse", call.keys), lambda: Tokens.of(inputs.documents, call.keys, x.device))
        lost = None
        if inputs.documents is not None:
            q, rotated, k, v, lost = finite(tokens, q, rotated, k, v)
        of_blocks, (fine_k, fine_v), of_window = zip(k.chunk(3, 1), v.chunk(3, 1), strict=True)
        rule, modules = self.rule(), (self.key_summary, self.value_summary)
        with torch.autocast(x.device.type, enabled=False):
            new = summaries(rule, tokens, past, [y.to(wide) for y in of_blocks], modules)
            columns = dict(zip(("block_keys", "block_values"), new, strict=True))
            if summarised:
                columns = {name: torch.cat([summarised[name], each], 2) for name, each in columns.items()}
            if cache is not None:
                cache.columns = columns
            coarse, chances = over_blocks(rule, tokens, q.to(wide), columns["block_keys"], columns["block_values"])
            blocks = chosen(rule, tokens, chances)
            fine = over_chosen(rule, tokens, rotated.to(wide), fine_k.to(wide), fine_v.to(wide), blocks)
        qkv = rotated.to(k.dtype), *of_window
        near, _ = attended(self, qkv, call, encoding, {}, k_positions, self.scale, False)
        gates = self.g_proj(x).to(wide).sigmoid().unflatten(-1, (self.num_heads, 3)).transpose(1, 2)
        gates = gates if lost is None else filled(gates, lost, 2, 0.0)
        to_coarse, to_fine, to_near = gates[..., None].unbind(-2)
        out = to_coarse * coarse + to_fine * fine + to_near * near.to(wide)
        if inputs.documents is not None:
            [out] = gradients_apart((out,), q, 2)
        out = out if lost is None else filled(out, lost, 2, math.nan)
        out = with_zero_gradients(
            out, [p for module in modules for p in module.parameters()]
        )  # few tokens fill no block
        return self.o_proj(join_heads(out.to(x.dtype)))

    def rule(self) -> Rule:
        scale = self.head_dim**-0.5 if self.scale is None else self.scale
        dropout = self.dropout if self.training else 0.0
        return Rule(self.block, self.stride, self.select_block, self.select_count, scale, dropout)
