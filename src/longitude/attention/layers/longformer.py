"""Longformer attention: a window on both sides, and global tokens with separate projections."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Unpack

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from longitude.attention.documents import require_number_per_token, require_tokens, runs_of
from longitude.attention.heads import Headed, HeadedOptions, join_heads, split_heads
from longitude.attention.masks import Band, Documents, Global, Mask, NoMask, Padding, Pairs
from longitude.errors import check_sizes
from longitude.positions.base import Encoding
from longitude.positions.composed import compose
from longitude.positions.coordinates import Positions, canonical, explicit


class LongformerAttention(Headed):
    """Longformer attention: tokens attend to `window` tokens on either side and to global tokens, global tokens to all.

        out_i = softmax over { j : |i-j| <= window or j global } of scale q_i.k_j, of v_j        where i is not global
        out_i = softmax over all j of scale q'_i.k'_j, of v'_j                                  where i is global

    A token also attends to itself. q, k, v and q', k', v' are six projections; a global key counts once.
    O(L (window + globals)) time and memory.

    Args:
        dim: width of x and of the output.
        num_heads: heads.
        encoding: an encoding that reads only positions.
        window: tokens on either side: transformers' attention_window is 2 window.
        bias: whether the projections have biases.
        head_dim, dropout, scale, backend: as in MultiHeadAttention.

    Raises:
        ValueError: for sizes that do not fit, or an encoding that reads tokens.

    Source:
        Beltagy et al. 2020, section 3, arXiv 2004.05150, https://arxiv.org/abs/2004.05150
    """

    def __init__(
        self,
        dim: int,
        num_heads: int,
        encoding: Encoding | Sequence[Encoding] | None = None,
        *,
        window: int,
        bias: bool = True,
        **options: Unpack[HeadedOptions],
    ):
        super().__init__(dim, num_heads, bias=bias, **options)
        check_sizes("LongformerAttention", window=window)
        self.window = window
        self.global_q_proj, self.global_k_proj, self.global_v_proj = (
            nn.Linear(dim, num_heads * self.head_dim, bias=bias) for _ in range(3)
        )
        self.encoding = compose(encoding)
        if self.encoding.reads_tokens:
            raise ValueError(
                "LongformerAttention: the encoding reads the tokens in order, and global tokens are not part of that order; "
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
        """Attend within windows, and to and from global tokens.

        Args:
            x: [B, L, dim].
            tokens: global tokens in the format of lg.Global: bool [L] or [B, L], or indices.
            documents: a number per token [B, L]; a run of equal numbers is a document, and tokens attend within their document
                only. A negative number is padding, which attends to no token and to which none attends.
            positions: an int to count from, [L] or [B, L]; None: 0.

        Returns:
            [B, L, dim].

        Raises:
            ValueError: for shapes that do not fit.
        """
        require_tokens(x, self.dim)
        batch, length = x.shape[:2]
        several = Global(tokens)
        several.validate(batch, length, length)
        mask: Mask = NoMask()
        if documents is not None:
            require_number_per_token(documents, batch, length)
            documents = runs_of(documents)
            mask = mask & Documents(documents) & Padding(documents >= 0)
        positions = canonical("positions", 0 if positions is None else positions, batch, length, self.encoding.axes)

        seen = (Band(self.window, self.window) | several) & mask
        order = torch.arange(length, device=x.device)
        chosen = several.chosen(order)
        to = {"encoding": self.encoding, "k_positions": positions}
        out = self.attend(self.queries(x), *self.keys_and_values(x), mask=seen, q_positions=positions, **to)
        (rows,) = torch.nonzero(chosen if chosen.dim() == 1 else chosen.any(0), as_tuple=True)
        if len(rows):
            projected = self.global_q_proj(x[:, rows]), self.global_k_proj(x), self.global_v_proj(x)
            q_positions = explicit(positions, length, x.device)
            q_positions = q_positions[rows] if q_positions.dim() == 1 else q_positions[:, rows]
            every = Pairs(mask.allowed(rows, order), length - len(rows), 0)  # attend has queries as the last tokens
            q, k, v = (split_heads(y, self.num_heads) for y in projected)
            full = self.attend(q, k, v, mask=every, q_positions=q_positions, **to)
            where = chosen[..., rows, None] if chosen.dim() == 1 else chosen[:, None, rows, None]
            out = out.index_copy(2, rows, torch.where(where, full, out[:, :, rows]))
        if documents is not None:
            out = out.masked_fill((documents < 0)[:, None, :, None], 0.0)
        return self.o_proj(join_heads(out))

    def extra_repr(self) -> str:
        return f"window={self.window}"
