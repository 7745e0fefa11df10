"""Longformer's attention: a window to both sides, and global tokens with projections of their own."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from longitude.attention.documents import runs_of
from longitude.attention.masks import Band, Causal, Documents, Mask, NoMask, Padding
from longitude.attention.operation import attend, require_backend
from longitude.attention.patterns import Global, Pairs
from longitude.attention.request import require_options
from longitude.positions.base import Encoding, Positions, canonical, check_sizes, explicit
from longitude.positions.composed import compose


class LongformerAttention(nn.Module):
    """Self-attention in which a token sees the `window` tokens on either side of it, itself, and all global tokens; a global
    token sees all. Beltagy et al. 2020, section 3.

        out_i = softmax over { j : |i-j| <= window or j global } of scale q_i.k_j, of v_j        where i is not global
        out_i = softmax over all j of scale q'_i.k'_j, of v'_j                                  where i is global

    q, k, v and q', k', v' are six projections; a global key counts once. causal: both sets lose j > i.
    x [B, L, dim] -> [B, L, dim], any L, in O(L (window + globals)) time and memory. `window` is of one side:
    transformers' attention_window is 2 window.
    """

    def __init__(
        self,
        dim: int,
        num_heads: int,
        encoding: Encoding | Sequence[Encoding] | None = None,
        *,
        window: int,
        causal: bool = False,
        head_dim: int | None = None,
        bias: bool = True,
        dropout: float = 0.0,
        scale: float | None = None,
        backend: str = "auto",
    ):
        super().__init__()
        check_sizes("LongformerAttention", dim=dim, num_heads=num_heads, window=window)
        if head_dim is None and dim % num_heads:
            raise ValueError(f"expected num_heads to divide dim, got {num_heads} and {dim}; or say head_dim")
        if head_dim is not None:
            check_sizes("LongformerAttention", head_dim=head_dim)
        require_backend(backend)
        require_options(scale, dropout)
        self.window, self.causal = window, causal
        self.num_heads, self.head_dim = num_heads, head_dim or dim // num_heads
        self.dropout, self.scale, self.backend = dropout, scale, backend
        inner = num_heads * self.head_dim
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(dim, inner, bias=bias) for _ in range(3))
        self.global_q_proj, self.global_k_proj, self.global_v_proj = (
            nn.Linear(dim, inner, bias=bias) for _ in range(3)
        )
        self.o_proj = nn.Linear(inner, dim, bias=bias)
        self.encoding = compose(encoding)
        if self.encoding.reads_tokens:
            raise ValueError(
                "LongformerAttention: the encoding reads the tokens in order, and global tokens have no place in that order; "
                "expected one that reads positions alone"
            )

    def forward(
        self,
        x: Float[Tensor, "B L dim"],
        *,
        tokens: Bool[Tensor, ...] | Int[Tensor, " n"] | Sequence[int] = (),
        documents: Int[Tensor, "B L"] | None = None,
        positions: Positions | None = None,
    ) -> Float[Tensor, "B L dim"]:
        """tokens: the global ones, as lg.Global takes them: bool [L] or [B, L], or places. documents: a number per token;
        a run of one number is a document, tokens see their own document only, and a negative number is padding, which sees
        and is seen by nobody. positions: an int to count from, [L] or [B, L].
        """
        if x.dim() != 3 or x.shape[-1] != self.q_proj.in_features or x.numel() == 0:
            raise ValueError(f"x: expected [B, L, {self.q_proj.in_features}], none of them 0, got {list(x.shape)}")
        batch, length = x.shape[:2]
        several = Global(tokens)
        several.validate(batch, length, length)
        mask: Mask = Causal() if self.causal else NoMask()
        if documents is not None:
            if documents.shape != (batch, length):
                raise ValueError(f"documents: expected [{batch}, {length}], one per token, got {list(documents.shape)}")
            documents = runs_of(documents)
            mask = mask & Documents(documents) & Padding(documents >= 0)
        positions = canonical("positions", 0 if positions is None else positions, batch, length, self.encoding.axes)

        q, k, v = (self.heads(project(x)) for project in (self.q_proj, self.k_proj, self.v_proj))
        seen = (Band(self.window, self.window) | several) & mask
        order = torch.arange(length, device=x.device)
        chosen = several.chosen(order)
        out = self.attend(q, k, v, seen, positions, positions)
        (found,) = torch.nonzero(chosen if chosen.dim() == 1 else chosen.any(0), as_tuple=True)
        if len(found):
            q = self.heads(self.global_q_proj(x[:, found]))
            k, v = (self.heads(project(x)) for project in (self.global_k_proj, self.global_v_proj))
            own = explicit(positions, length, x.device)
            own = own[found] if own.dim() == 1 else own[:, found]
            every = Pairs(mask.allowed(found, order), length - len(found), 0)  # attend takes queries for the last
            full = self.attend(q, k, v, every, own, positions)
            where = chosen[..., found, None] if chosen.dim() == 1 else chosen[:, None, found, None]
            out = out.index_copy(2, found, torch.where(where, full, out[:, :, found]))
        if documents is not None:
            out = out.masked_fill((documents < 0)[:, None, :, None], 0.0)
        return self.o_proj(out.transpose(1, 2).flatten(2))

    def heads(self, x: Tensor) -> Float[Tensor, "B H L D"]:
        return x.unflatten(-1, (self.num_heads, self.head_dim)).transpose(1, 2)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Mask, own: Positions, positions: Positions) -> Tensor:
        return attend(
            q,
            k,
            v,
            encoding=self.encoding,
            mask=mask,
            q_positions=own,
            k_positions=positions,
            scale=self.scale,
            dropout=self.dropout if self.training else 0.0,
            backend=self.backend,
        )

    def extra_repr(self) -> str:
        return f"window={self.window}" + (", causal=True" if self.causal else "")
