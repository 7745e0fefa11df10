"""Hierarchical attention as a layer."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from longitude.attention.heads import head_sizes, join_heads, split_heads
from longitude.attention.layers.hierarchical.blocks import Merge, Rule, refusal
from longitude.attention.layers.hierarchical.function import MERGES, attend_tokens, require_rule
from longitude.attention.layers.hierarchical.state import State
from longitude.attention.mixer import register_mixer
from longitude.attention.operation import require_backend
from longitude.attention.request import require_options
from longitude.attention.state_mixer import StateInputs, StateMixer
from longitude.errors import UsageError, check_sizes
from longitude.native.derivatives import with_zero_gradients
from longitude.positions.base import Encoding
from longitude.positions.composed import Composed, compose

if TYPE_CHECKING:
    from longitude.attention.state_cache import StateLayer


class LearnedMerge(nn.Module):
    """A_l [left; right], l = 1 .. levels: one matrix for each level, for all blocks and heads. Higher levels average.

    The parameter is the difference from the average, 0 at the start: weight decay pulls back to the average.
    """

    def __init__(self, levels: int, head_dim: int):
        super().__init__()
        self.change = nn.Parameter(torch.zeros(levels, head_dim, 2 * head_dim))

    def reset_parameters(self) -> None:
        nn.init.zeros_(self.change)

    def forward(self, level: int, left: Tensor, right: Tensor) -> Tensor:
        average = (left + right) * 0.5
        if level > len(self.change):
            return average
        return average + torch.cat([left, right], -1) @ self.change[level - 1].to(left.dtype).T


@register_mixer("hierarchical")
class HierarchicalAttention(StateMixer):
    """Attention to blocks of growing size: the last `window` tokens individually, earlier tokens in blocks of sizes 2^l.

        near = attention over the last tokens,   far = softmax over the blocks (scale q.K + bias + ln size) V
        out  = g near + (1 - g) far,   g = sigmoid(W_g x + b_g);   or one softmax over both

    Each binary digit 1 of the number of tokens before the window is a block of that power of two tokens, the merge of its
    halves. `hierarchical_attention` has the definition. Its cache is a state of the window and about log2 L blocks.

    Args:
        dim: width of x and of the output.
        num_heads: heads of queries.
        num_kv_heads: heads of keys and values; None: num_heads.
        encoding: rotations and relative position biases.
        window: tokens attended individually, the query's token included.
        combine: "gate": g = sigmoid(W_g x + b_g) for each head, b_g = 2 at the start; or "softmax".
        size_term: whether a block counts as its number of tokens.
        merge: "mean", or "learned": a block is A_l [left; right] of its halves, the average at the start, with one matrix per
            level for keys and one for values.
        merge_levels: number of levels with learned matrices, for blocks of up to 2^merge_levels tokens. Higher levels average.
            Levels that no training sequence was long enough to use average, too, over what lower levels learned to merge.
        head_dim: width of a head; None: dim / num_heads.
        bias: whether the projections have biases.
        dropout: dropout probability of the weights, in training.
        scale: factor of the scores; None: head_dim^-1/2.
        backend: backend of the near part, as in attend.

    Raises:
        ValueError: for sizes that do not fit, unknown options, or an encoding that cannot be applied to blocks.

    Source:
        defined here, in docs/hierarchical.md; not a published method
    """

    scores = True
    rotates = True
    growth = "O(log N)"

    def __init__(
        self,
        dim: int,
        num_heads: int,
        num_kv_heads: int | None = None,
        encoding: Encoding | Sequence[Encoding] | None = None,
        *,
        window: int = 256,
        combine: str = "gate",
        size_term: bool = True,
        merge: str = "mean",
        merge_levels: int = 12,
        head_dim: int | None = None,
        bias: bool = False,
        dropout: float = 0.0,
        scale: float | None = None,
        backend: str = "auto",
    ):
        super().__init__()
        num_kv_heads, head_dim = head_sizes("HierarchicalAttention", dim, num_heads, num_kv_heads, head_dim)
        check_sizes("HierarchicalAttention", merge_levels=merge_levels)
        require_rule("HierarchicalAttention", window, combine, size_term, merge)
        require_backend(backend)
        require_options(scale, dropout)
        self.dim, self.num_heads, self.num_kv_heads, self.head_dim = dim, num_heads, num_kv_heads, head_dim
        self.window, self.combine, self.size_term = window, combine, size_term
        self.dropout, self.scale, self.backend = dropout, scale, backend
        self.q_proj = nn.Linear(dim, num_heads * head_dim, bias=bias)
        self.k_proj, self.v_proj = (nn.Linear(dim, num_kv_heads * head_dim, bias=bias) for _ in range(2))
        self.o_proj = nn.Linear(num_heads * head_dim, dim, bias=bias)
        self.gate_proj = nn.Linear(dim, num_heads, bias=False) if combine == "gate" else None
        self.gate_bias = nn.Parameter(torch.empty(num_heads)) if combine == "gate" else None
        learned = merge == "learned"
        self.merge_keys = LearnedMerge(merge_levels, head_dim) if learned else None
        self.merge_values = LearnedMerge(merge_levels, head_dim) if learned else None
        self.encoding = compose(encoding)
        self.require(self.encoding)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """The gate opens to the window, sigmoid(2) = 0.88, and blocks are averages."""
        if self.gate_bias is not None:
            nn.init.constant_(self.gate_bias, 2.0)
        for merge in (self.merge_keys, self.merge_values):
            if merge is not None:
                merge.reset_parameters()

    def products(self, keys: float) -> float:
        seen = min(keys, self.window + math.log2(max(1, keys)))  # the near tokens, and about a block for each doubling
        return 2 * seen * self.num_heads * self.head_dim

    def cache_layer(self) -> StateLayer:
        from longitude.attention.state_cache import StateLayer

        return StateLayer(in_place=True)

    def refuses(self, encoding: Encoding) -> str | None:
        return super().refuses(encoding) or refusal(encoding)

    def rule(self) -> Rule:
        learned = self.merge_keys is not None and self.merge_values is not None
        merges: tuple[Merge, Merge] = (self.merge_keys, self.merge_values) if learned else MERGES["mean"]  # type: ignore[assignment]
        scale = self.head_dim**-0.5 if self.scale is None else self.scale
        dropout = self.dropout if self.training else 0.0
        return Rule(self.window, self.combine, self.size_term, scale, merges, dropout, self.backend)

    def mix(self, x: Tensor, state: State | None, inputs: StateInputs) -> tuple[Tensor, State | None]:
        self.require_state(state, len(x), inputs.encoding)
        counts = self.num_heads, self.num_kv_heads, self.num_kv_heads
        projections = zip((self.q_proj, self.k_proj, self.v_proj), counts, strict=True)
        q, k, v = (split_heads(project(x), count) for project, count in projections)
        gate = None
        if self.gate_proj is not None and self.gate_bias is not None:
            opening = self.gate_proj(x) + self.gate_bias
            gate = opening.to(torch.promote_types(opening.dtype, torch.float32)).sigmoid().transpose(1, 2)
        out, state = attend_tokens(self.rule(), q, k, v, gate, inputs, state)
        out = with_zero_gradients(out, self.far_parameters())  # sequences within the window use no block
        return self.o_proj(join_heads(out.to(q.dtype))), state

    @property
    def far_from(self) -> int:
        return self.window

    def far_parameters(self) -> list[nn.Parameter]:
        """Parameters that only sequences longer than the window use: those of the gate and the merges."""
        gate = [*self.gate_proj.parameters(), self.gate_bias] if self.gate_proj is not None else []
        merges = [merge.change for merge in (self.merge_keys, self.merge_values) if merge is not None]
        return [p for p in (*gate, *merges) if p is not None]

    def require_state(self, state: State | None, batch: int, encoding: Composed) -> None:
        """ValueError for a state of another batch, window, size or encoding."""
        expected = [batch, self.num_kv_heads, self.window, self.head_dim]
        if state is not None and list(state.keys.shape) != expected:
            raise UsageError(
                "cache: HierarchicalAttention",
                f"a state with keys [B, Hkv, window, head_dim] = {expected}",
                list(state.keys.shape),
            )
        if state is not None and (state.rotated is not None) != encoding.transforms:
            got = "one that rotates" if encoding.transforms else "one that does not rotate"
            raise UsageError("cache: HierarchicalAttention", "the encoding of cached tokens", got, "make a new cache")
