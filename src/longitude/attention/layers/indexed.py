"""Attention to the keys that a small indexer scores highest: DeepSeek's sparse attention."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from longitude.attention.heads import split_heads
from longitude.attention.layers.base import AttentionLayer, Call, Narrowed, checked_call, normed
from longitude.attention.layers.latent import LatentAttention
from longitude.attention.layers.multihead import MultiHeadAttention
from longitude.attention.masks import Causal, Mask, Pairs
from longitude.attention.mixer import MixerInputs, register_mixer, require_alone
from longitude.attention.request import Step
from longitude.errors import UsageError, check_choice
from longitude.native.derivatives import with_zero_gradients
from longitude.native.not_finite import filled
from longitude.positions.base import Columns, Encoding
from longitude.positions.composed import Composed, compose
from longitude.positions.coordinates import Positions, by_axis, explicit, wide
from longitude.positions.rotation import Layout, apply_rotary, table_of
from longitude.positions.scaling import Frequencies, from_dict, rope_frequencies

ROWS = 256
"""Queries in a block, for which the index scores of all heads are held in memory at a time."""


def highest(scores: Float[Tensor, "B L N"], allowed: Bool[Tensor, "#B L N"], k_top: int) -> Bool[Tensor, "B L N"]:
    """The k_top allowed keys of the highest scores, or all if there are fewer; among equal scores the lowest index is first."""
    ranked = scores.masked_fill(~allowed, -torch.inf).argsort(dim=-1, descending=True, stable=True)
    return torch.zeros_like(scores, dtype=torch.bool).scatter(-1, ranked[..., :k_top], True) & allowed


def indexer_loss(scores: Float[Tensor, "B L N"], weights: Float[Tensor, "B H L N"]) -> Float[Tensor, "B L"]:
    """How far index scores are from the weights of attention: the loss that trains an indexer.

        p_tj = sum_h a_htj / sum_jh a_htj,   loss_t = sum_j p_tj ln(p_tj / softmax_j(I_tj)),   the Kullback-Leibler divergence

    Args:
        scores: Index scores I, -inf at keys that a query does not attend to.
        weights: Weights a of attention over the same keys, which get no gradient.

    Returns:
        The loss of each query [B, L], in float32 or wider; 0 for a query without keys.

    Raises:
        ValueError: For weights of other tokens, or without heads.

    Source:
        DeepSeek-AI 2025, arXiv:2512.02556, https://arxiv.org/abs/2512.02556
    """
    if scores.dim() != 3 or weights.dim() != 4 or weights[:, 0].shape != scores.shape:
        got = f"scores {list(scores.shape)}, weights {list(weights.shape)}"
        raise UsageError("indexer_loss", "scores [B, L, N] and weights [B, H, L, N]", got)
    dtype, seen = torch.promote_types(scores.dtype, torch.float32), scores > -torch.inf
    p = weights.detach().to(dtype).sum(1).masked_fill(~seen, 0.0)
    p = p / p.sum(-1, keepdim=True).clamp(min=torch.finfo(dtype).tiny)
    alone = ~seen.any(-1, keepdim=True)  # -inf alone has no softmax
    log_q = scores.to(dtype).masked_fill(alone, 0.0).log_softmax(-1).masked_fill(~seen, 0.0)
    return (torch.special.xlogy(p, p) - p * log_q).sum(-1)


class Indexer(AttentionLayer):
    """Base class of layers that attend to the k_top keys of the highest index score; the class after it has keys and values."""

    source = "DeepSeek-AI 2025, https://arxiv.org/abs/2512.02556"
    bidirectional = False
    choosing = ("index_q", "index_k", "index_w", "index_norm")
    num_heads: int

    def __init__(
        self,
        *sizes: Any,
        k_top: int = 2048,
        index_heads: int | None = None,
        index_dim: int | None = None,
        index_rotation: Layout | None = "half",
        index_base: float | None = None,
        index_rotary_dim: int | None = None,
        index_scaling: Any = None,
        **options: Any,
    ):
        super().__init__(*sizes, **options)
        name, (source_dim, head_dim) = type(self).__name__, self.index_widths
        self.k_top, self.index_heads = k_top, self.num_heads if index_heads is None else index_heads
        self.index_dim = head_dim if index_dim is None else index_dim
        self.index_q = nn.Linear(source_dim, self.index_heads * self.index_dim, bias=False)
        self.index_k, self.index_w = (nn.Linear(self.dim, n, bias=False) for n in (self.index_dim, self.index_heads))
        self.index_norm = nn.LayerNorm(self.index_dim, eps=1e-6)
        if index_rotation is None and not index_base is index_rotary_dim is index_scaling is None:
            raise UsageError(name, "no index_base, index_rotary_dim or index_scaling", "index_rotation=None")
        self.index_scaling = from_dict(index_scaling)
        if self.index_scaling is not None and self.index_scaling.length_at(0, 0) is not None:
            raise UsageError(name, "an index_scaling that does not follow the length", repr(index_scaling))
        self.index_rotation, self.index_base = index_rotation, 10_000.0 if index_base is None else index_base
        self.index_rotary_dim = self.index_dim if index_rotary_dim is None else index_rotary_dim
        if index_rotation is not None:
            self._frequencies(None)  # validates

    @property
    def index_widths(self) -> tuple[int, int]:
        """Width of what the indexer's queries are made of, and the default of index_dim."""
        raise NotImplementedError

    def products(self, keys: float) -> float:
        return super().products(min(keys, self.k_top)) + keys * self.index_heads * self.index_dim

    def columns_of(self, x: Tensor, call: Call, encoding: Composed, cache: Any) -> tuple[Columns, Any]:
        columns, carry = super().columns_of(x, call, encoding, cache)
        keys = self.index_keys(x.detach(), call).detach()  # x first: torch compiles no tangents of a LayerNorm
        return {**columns, "index_keys": keys}, carry

    def narrowed(self, x: Tensor, source: Tensor, call: Call, columns: Columns) -> Narrowed:
        columns, rows = dict(columns), call.length
        keys, lost = columns.pop("index_keys"), None
        if keys.shape[2] > self.k_top:
            seen, lost = self.chosen(x, source, keys, call, rows)
            chosen = call.mask & Pairs(seen[:, None], keys.shape[2] - rows, 0)
            call = replace(call, mask=chosen, alike=False)  # no other layer chooses these

        def finish(out: Tensor) -> Tensor:
            indexer = [p for name in self.choosing for p in self.get_submodule(name).parameters()]
            return with_zero_gradients(out if lost is None else filled(out, lost, 2, math.nan), indexer)

        return call, columns, finish

    @torch.no_grad()
    def chosen(
        self, x: Tensor, source: Tensor, keys: Tensor, call: Call, rows: int
    ) -> tuple[Bool[Tensor, "B rows N"], Bool[Tensor, "B rows"]]:
        """The keys that each of the last `rows` tokens attends to, and which tokens have a score that is NaN."""
        selections, lost = [], []
        for scores, allowed in self.index_scores(x, source, keys, call, rows):
            selections.append(highest(scores, allowed, self.k_top))
            lost.append((scores.isnan() & allowed).any(-1))
        return torch.cat(selections, 1), torch.cat(lost, 1)

    def index_keys(self, x: Tensor, call: Call) -> Float[Tensor, "B 1 L index_dim"]:
        return self._rotated(normed(self.index_norm, self.index_k(x).to(x.dtype))[:, None], call)

    def index_scores(
        self, x: Tensor, source: Tensor, keys: Tensor, call: Call, rows: int
    ) -> Iterator[tuple[Float[Tensor, "B block N"], Bool[Tensor, "#B block N"]]]:
        """Scores of the last `rows` tokens, and the keys they may attend to, some queries at a time."""
        dtype, count = torch.promote_types(x.dtype, torch.float32), keys.shape[2]
        q = self._rotated(split_heads(self.index_q(source), self.index_heads), call)[:, :, -rows:].to(dtype)
        w = self.index_w(x)[:, -rows:].to(dtype) * self.index_heads**-0.5
        order = torch.arange(count, device=x.device)
        with torch.autocast(x.device.type, enabled=False):
            for first in range(0, rows, ROWS):
                block = slice(first, min(first + ROWS, rows))
                scores = (q[:, :, block] @ keys.to(dtype).mT * self.index_dim**-0.5).relu()
                scores = torch.einsum("bhrk,brh->brk", scores, w[:, block])
                allowed = call.mask.allowed(order[count - rows :][block], order)
                yield scores, allowed[:, 0] if allowed.dim() == 4 else allowed[None]

    def indexer_loss(
        self,
        x: Float[Tensor, "B L dim"],
        inputs: MixerInputs | None = None,
        *,
        mask: Mask = Causal(),  # noqa: B008 (frozen)
        positions: Positions | None = None,
        documents: Tensor | None = None,
        encoding: Encoding | None = None,
        dense: bool = True,
    ) -> Float[Tensor, ""]:
        """The mean of `indexer_loss` over tokens. Its gradient reaches the indexer alone; train the rest by another loss.

        Args:
            x: Tokens [B, L, dim].
            inputs: As in `forward`; a forward pre-hook of the layer gets x and inputs. Its cache is not read.
            mask: As in `forward`.
            positions: As in `forward`.
            documents: As in `forward`.
            encoding: As in `forward`.
            dense: Whether attention and scores are over all visible keys, as in the authors' warm-up; otherwise over those that
                the indexer chooses, as in their training after it.

        Returns:
            A number, in float32 or wider.
        """
        x = x.detach()
        if inputs is None:
            inputs = MixerInputs(mask, positions, documents, encoding=None if encoding is None else compose(encoding))
        else:
            require_alone(self, mask, positions, documents, encoding)
        inputs = replace(inputs, cache=None, return_weights=True, step=Step())
        check_choice(type(self).__name__, bool, dense=dense)
        k_top, modes = self.k_top, {module: module.training for module in self.modules()}
        try:
            self.k_top = x.shape[1] if dense else k_top
            with torch.no_grad():
                weights = self.eval().forward(x, inputs)[1]  # without its hooks, which may ask for this loss
        finally:
            self.k_top = k_top
            for module, mode in modes.items():
                module.training = mode
        x, call, _ = checked_call(self, x, inputs)
        with torch.no_grad():
            x = self.convolve("input", x, call, inputs)
        keys, source, scores = self.index_keys(x, call), self.query_source(x).detach(), []
        for block, allowed in self.index_scores(x, source, keys, call, call.length):
            scores.append(
                block.masked_fill(~(allowed if dense else highest(block.detach(), allowed, k_top)), -torch.inf)
            )
        losses = indexer_loss(torch.cat(scores, 1), weights)
        if call.padding is None:
            return losses.mean()
        real = ~call.padding[..., 0]
        return (losses * real).sum() / real.sum().clamp(min=1)

    def _rotated(self, x: Float[Tensor, "B H L D"], call: Call) -> Tensor:
        if self.index_rotation is None:
            return x
        positions = by_axis(explicit(call.positions, call.length, x.device), 1, type(self).__name__)
        theta, factor, _ = self._frequencies(x.device)
        angles = positions * theta.to(wide(x.device))
        angles = angles[:, None] if angles.dim() == 3 else angles
        return apply_rotary(x, table_of(angles, x.dtype, factor), self.index_rotation)

    def _frequencies(self, device: torch.device | None) -> Frequencies:
        sizes = self.index_dim, self.index_base, self.index_scaling, self.index_rotary_dim
        return rope_frequencies(*sizes, None, 1.0, device)


@register_mixer("indexed")
class IndexedAttention(Indexer, MultiHeadAttention):
    """Lightning indexer (DSA): attention to the k_top visible keys of the highest index score.

        I_ij = sum_h w_ih relu(q_ih . k_j / sqrt(index_dim)),   w = W_w x / sqrt(index_heads),   q = W_q x,   k = norm(W_k x)

    Use it to study what attention to few keys loses, as in DeepSeek V3.2, GLM-5 or Mistral Large 4. Their q is W_q times
    another vector. It is the latent of the queries in the first two, as in `indexed_latent`. It is a norm of x in the last, which
    also scales q by the position.

    The indexer has one key per token and its own rotation. The choice is exact, and the same for all heads. Among equal scores,
    and many are exactly 0, the earlier key is chosen. With k_top keys or fewer it is full attention. Without a rotation equal
    tokens have scores that differ by rounding alone, so a full forward pass and decoding may choose different ones of them.

    The choice has no gradient, so a loss of the output trains everything except the indexer. Add `indexer_loss`, by which the
    authors train it, or the indexer keeps its initial weights. It is exact but not fast: index scores of all keys are sorted,
    and a mask hides the keys that are not chosen. Its cache also keeps the indexer's keys.

    Args:
        dim, num_heads, num_kv_heads, head_dim, bias, dropout, scale, backend: As in MultiHeadAttention.
        qk_norm, qk_norm_eps, xsa, output_gate, softcap, short_conv, conv_kernel: As in MultiHeadAttention.
        encoding: As in MultiHeadAttention; the indexer does not use it.
        k_top: Keys of a query.
        index_heads: Heads of the indexer; None: num_heads.
        index_dim: Width of a head of the indexer; None: head_dim.
        index_rotation: Layout of its rotation: "half" as in DeepSeek V3.2, "interleaved" as in GLM-5; None: it has no rotation.
        index_base: Base of that rotation; None: 10000.
        index_rotary_dim: Only the first index_rotary_dim numbers rotate; None: all.
        index_scaling: A scheme of lg.scaling or its dict for that rotation, which must not follow the length; None: none.

    Raises:
        ValueError: As MultiHeadAttention, and for options of the indexer's rotation with index_rotation=None.

    Source:
        DeepSeek-AI 2025, arXiv:2512.02556, https://arxiv.org/abs/2512.02556
    """

    cache_class, cache_kinds = "IndexedCacheLayer", ("indexed",)

    @property
    def index_widths(self) -> tuple[int, int]:
        return self.dim, self.head_dim


@register_mixer("indexed_latent")
class IndexedLatentAttention(Indexer, LatentAttention):
    """Lightning indexer (DSA) over MLA: latent attention to the k_top visible keys of the highest index score.

    Use it to study DeepSeek V3.2, which has this attention. With q_rank, the indexer's queries are computed from the latents of
    queries. The indexer and its loss are those of `indexed`. Its cache keeps latents and the indexer's keys.

    Args:
        dim, num_heads, encoding, head_dim, kv_rank, q_rank, nope_dim, rope_dim, value_dim, eps: As in LatentAttention.
        bias, dropout, scale, backend, output_gate, softcap, short_conv, conv_kernel, route: As in LatentAttention.
        k_top, index_heads, index_rotation, index_base, index_scaling: As in IndexedAttention.
        index_dim: Width of a head of the indexer; None: nope_dim + rope_dim.
        index_rotary_dim: Only the first index_rotary_dim numbers rotate, rope_dim in DeepSeek V3.2; None: all.

    Raises:
        ValueError: As LatentAttention, and for options of the indexer's rotation with index_rotation=None.

    Source:
        DeepSeek-AI 2025, arXiv:2512.02556, https://arxiv.org/abs/2512.02556
    """

    cache_class, cache_kinds = "IndexedLatentCacheLayer", ("indexed_latent",)

    @property
    def index_widths(self) -> tuple[int, int]:
        return self.dim if self.q_rank is None else self.q_rank, self.nope_dim + self.rope_dim
