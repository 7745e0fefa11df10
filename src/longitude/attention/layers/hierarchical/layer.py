"""Hierarchical attention as a layer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from longitude.attention.layers.hierarchical.blocks import Merge
from longitude.attention.layers.hierarchical.centres import refusal
from longitude.attention.layers.hierarchical.function import MERGES, attended, require_rule
from longitude.attention.layers.hierarchical.rule import Rule
from longitude.attention.layers.hierarchical.state import State
from longitude.attention.masks import Causal, require_mask
from longitude.attention.mixer import Mixer, MixerInputs, register_mixer, require_no_weights
from longitude.attention.operation import require_backend
from longitude.attention.request import following, require_options
from longitude.attention.zero_gradients import with_zero_gradients
from longitude.positions.base import Encoding, Positions, canonical, check_sizes, explicit
from longitude.positions.composed import Composed, compose

if TYPE_CHECKING:
    from longitude.attention.state_cache import StateLayer


class LearnedMerge(nn.Module):
    """A_l [left; right], l = 1 .. levels: one matrix for each level, for all blocks and heads. Higher levels average.

    What is learned is the difference from the average, and starts at 0: so does weight decay pull back to the average.
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
class HierarchicalAttention(Mixer):
    """Attention over the last `window` tokens one by one, and over blocks of everything before them: see
    hierarchical_attention for the formula.

    x [B, L, dim] -> [B, L, dim]. combine "gate": g = sigmoid(W_g x + b_g) for each head, b_g starting at 2. merge "learned":
    a block is A_l [left; right] of its halves, starting as their average, with a matrix of its own for each of the levels 1
    .. merge_levels (blocks of up to 2^merge_levels tokens), of keys and of values. Higher levels average; so do, but for
    what other levels learned, those that training was too short to reach. The other options are those of
    MultiHeadAttention. Its cache is a state of the window and about log2 L blocks.
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
        num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        check_sizes(
            "HierarchicalAttention", dim=dim, num_heads=num_heads, num_kv_heads=num_kv_heads, merge_levels=merge_levels
        )
        if num_heads % num_kv_heads:
            raise ValueError(f"expected num_kv_heads to divide num_heads, got {num_kv_heads} and {num_heads}")
        if head_dim is not None:
            check_sizes("HierarchicalAttention", head_dim=head_dim)
        if head_dim is None and dim % num_heads:
            raise ValueError(f"expected num_heads to divide dim, got {num_heads} and {dim}; or say head_dim")
        require_rule("HierarchicalAttention", window, combine, size_term, merge)
        require_backend(backend)
        require_options(scale, dropout)
        self.dim, self.num_heads, self.num_kv_heads, self.head_dim = (
            dim,
            num_heads,
            num_kv_heads,
            head_dim or dim // num_heads,
        )
        self.window, self.combine, self.size_term = window, combine, size_term
        self.dropout, self.scale, self.backend = dropout, scale, backend
        self.q_proj = nn.Linear(dim, num_heads * self.head_dim, bias=bias)
        self.k_proj = nn.Linear(dim, num_kv_heads * self.head_dim, bias=bias)
        self.v_proj = nn.Linear(dim, num_kv_heads * self.head_dim, bias=bias)
        self.o_proj = nn.Linear(num_heads * self.head_dim, dim, bias=bias)
        self.gate_proj = nn.Linear(dim, num_heads, bias=False) if combine == "gate" else None
        self.gate_bias = nn.Parameter(torch.empty(num_heads)) if combine == "gate" else None
        learned = merge == "learned"
        self.merge_keys = LearnedMerge(merge_levels, self.head_dim) if learned else None
        self.merge_values = LearnedMerge(merge_levels, self.head_dim) if learned else None
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

    def mix_tokens(self, x: Float[Tensor, "B L dim"], inputs: MixerInputs) -> Tensor:
        """As Mixer.forward; each document has a window and blocks of its own."""
        mask, positions, documents, cache = inputs.mask, inputs.positions, inputs.documents, inputs.cache
        encoding, tables = inputs.encoding, inputs.tables
        if x.dim() != 3 or x.shape[-1] != self.dim or x.numel() == 0:
            raise ValueError(f"x: expected [B, L, {self.dim}] with no empty dimension, got {list(x.shape)}")
        require_no_weights(self, inputs.return_weights, inputs.memory)
        require_mask(mask)
        if not (isinstance(mask, Causal) and mask.order is None):
            raise ValueError(
                f"mask: HierarchicalAttention sees its window and the blocks before it, and nothing else: expected lg.Causal(), "
                f"with documents and padding as documents=, got {mask!r}"
            )
        batch, length, _ = x.shape
        if encoding is not None:
            self.require(encoding)
        else:
            encoding = self.encoding
        state = None if cache is None else self.state_in(cache, batch, encoding)
        past = 0 if cache is None else cache.seen
        if documents is not None and documents.shape != (batch, past + length):
            raise ValueError(
                f"documents: expected {[batch, past + length]}, cached tokens included, got {list(documents.shape)}"
            )
        places = self.places(positions, encoding, cache, batch, length)

        heads = batch, length, -1, self.head_dim
        q, k, v = (project(x).view(heads).transpose(1, 2) for project in (self.q_proj, self.k_proj, self.v_proj))
        if tables is None:
            tables = encoding.prepare(explicit(places, length, x.device), None, q.dtype)
        gate = None
        if self.gate_proj is not None and self.gate_bias is not None:
            opening = self.gate_proj(x) + self.gate_bias
            gate = opening.to(torch.promote_types(opening.dtype, torch.float32)).sigmoid().transpose(1, 2)
        out, state = attended(
            self.rule(), q, k, v, gate, places, encoding, tables, documents, state, keep=cache is not None
        )
        if cache is not None:
            # Positions that are not given count padding, too.
            cache.write(type(self).__name__, state, length, places, None if positions is None else documents)
        out = with_zero_gradients(out, self.far_parameters())  # sequences inside the window see no block
        return self.o_proj(out.to(q.dtype).transpose(1, 2).flatten(2))

    @property
    def far_from(self) -> int:
        return self.window

    def far_parameters(self) -> list[nn.Parameter]:
        """What only sequences beyond the window use: the gate's and the merges' parameters."""
        gate = [self.gate_proj.weight, self.gate_bias] if self.gate_proj is not None else []
        merges = [merge.change for merge in (self.merge_keys, self.merge_values) if merge is not None]
        return [p for p in (*gate, *merges) if p is not None]

    def state_in(self, cache: Any, batch: int, encoding: Composed) -> State | None:
        """The state in a cache; ValueError for another cache, or a state of another batch, window or size."""
        from longitude.attention.state_cache import StateLayer

        if not isinstance(cache, StateLayer):
            raise ValueError(
                f"cache: HierarchicalAttention expected the StateLayer that its cache_layer() makes, got {type(cache).__name__}"
            )
        state = cache.read(type(self).__name__)
        expected = [batch, self.num_kv_heads, self.window, self.head_dim]
        if state is not None and list(state.keys.shape) != expected:
            raise ValueError(
                f"cache: HierarchicalAttention expected a state with keys [B, Hkv, window, head_dim] = {expected}, got "
                f"{list(state.keys.shape)}"
            )
        if state is not None and (state.turned is not None) != encoding.transforms:
            raise ValueError(
                "cache: expected the encoding that its tokens were turned by; one encoding goes with a cache"
            )
        return state

    def places(
        self, positions: Positions | None, encoding: Composed, cache: StateLayer | None, batch: int, length: int
    ) -> Positions:
        """Positions as said, else following those in the cache: an int, [L] or [B, L]."""
        if positions is None:
            positions = 0 if cache is None else cache.next_positions()
            return following(positions, length) if isinstance(positions, Tensor) else positions
        axes = 2 if isinstance(positions, Tensor) and positions.dim() == 3 else encoding.axes
        positions = canonical("positions", positions, batch, length, axes)
        if isinstance(positions, Tensor) and positions.dim() == 3:
            if positions.shape[-1] > 1:
                raise ValueError(
                    f"positions: expected [L] or [B, L], because a block has its centre on one axis, got {list(positions.shape)}"
                )
            positions = positions[..., 0]
        return positions
