"""Latent attention: keys and values are computed from one small latent per token, and the cache stores the latent only."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Unpack

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from longitude.attention.heads import ScoreOptions
from longitude.attention.layers.base import AttentionLayer, Call, attended, checked_call, normed, tables_of
from longitude.attention.mixer import MixerInputs, register_mixer
from longitude.errors import Count, Positive, UsageError, check_sizes, unknown
from longitude.positions.base import Columns, Encoding
from longitude.positions.composed import Composed, compose
from longitude.positions.linear import is_plain
from longitude.positions.terms import OffsetVectors, Term

ROUTES = ("auto", "expanded", "absorbed")


@register_mixer("latent")
class LatentAttention(AttentionLayer):
    """Multi-head latent attention (MLA): keys and values are projected from a latent of kv_rank numbers per token.

        c_t = norm(W_DKV x_t),  r_t = rotate_t(W_KR x_t);   [k_th; v_th] = W_UKV,h c_t
        [q_th; s_th] = W_UQ,h norm(W_DQ x_t),  s rotated;  score_h(t, j) = scale (q_th . k_jh + s_th . r_j)

    norm is RMSNorm. Heads share the rotary key r, which is not normalized; only s and r, rope_dim numbers each,
    depend on positions. A cache stores c_t and r_t, kv_rank + rope_dim numbers per token, whatever the number of heads.

    Two routes give the same result. "expanded": keys and values of all heads are computed from the latents. "absorbed": since
    q . W_UK c = (W_UK^T q) . c, queries are projected into the latent space. All heads then share one key [c; r], and W_UV acts
    on the sum of latents.

    Args:
        dim, num_heads: As in MultiHeadAttention.
        encoding: Rotation of the rope_dim rotary numbers of queries and of the single rotary key; biases are added to scores.
        head_dim: Default of nope_dim, value_dim and rope_dim.
        kv_rank: Width of the latent; None for dim/4, at most 512.
        q_rank: Width of the queries' latent; None for one full matrix W_Q without norm.
        nope_dim, value_dim: Width of a head's key without rotation, and of its value; None: head_dim.
        rope_dim: Width of the rotary part; None for half of head_dim, made even; 0 for layers without rotation.
        eps: Epsilon of the norms.
        bias: Whether W_DQ, W_DKV, W_KR and W_O have a bias.
        dropout, backend: As in MultiHeadAttention.
        scale: Factor of scores; None: (nope_dim + rope_dim)**-0.5 times the encoding's softmax_factor, the square of DeepSeek's
            second mscale.
        output_gate, softcap, conv_kernel: As in MultiHeadAttention.
        short_conv: Places of short convolutions: "input", "output".
        route: "auto" is "absorbed" if a call has few queries for its keys, as in decoding (see `cheaper_absorbed`).

    Raises:
        ValueError: For sizes below 1, an odd or negative rope_dim, an unknown route, or an encoding that has other sizes,
            rotates with rope_dim 0, adds to values, or reflects keys with the route "expanded".

    Source:
        DeepSeek-AI 2024, DeepSeek-V2, arXiv:2405.04434, https://arxiv.org/abs/2405.04434.
    """

    cache_class, cache_kinds = "LatentCacheLayer", ("latent",)

    def __init__(
        self,
        dim: int,
        num_heads: int,
        encoding: Encoding | Sequence[Encoding] | None = None,
        *,
        head_dim: int | None = None,
        kv_rank: int | None = None,
        q_rank: int | None = None,
        nope_dim: int | None = None,
        rope_dim: Count | None = None,
        value_dim: int | None = None,
        eps: Positive = 1e-6,
        bias: bool = False,
        route: str = "auto",
        **options: Unpack[ScoreOptions],
    ):
        sizes = sized(dim, num_heads, head_dim, kv_rank, nope_dim, rope_dim, value_dim)
        super().__init__(dim, num_heads * sizes[-1], {"input": dim, "output": dim}, **options)
        self.sizes = self.kv_rank, self.nope_dim, self.rope_dim, self.value_dim = sizes
        if route not in ROUTES:
            raise unknown("route", route, ROUTES, "")
        self.num_heads, self.q_rank, self.route = num_heads, q_rank, route
        to_queries = num_heads * (self.nope_dim + self.rope_dim)
        if q_rank is None:
            self.q_proj = nn.Linear(dim, to_queries, bias=False)
        else:
            self.q_down = nn.Linear(dim, q_rank, bias=bias)
            self.q_norm = nn.RMSNorm(q_rank, eps=eps)
            self.q_up = nn.Linear(q_rank, to_queries, bias=False)
        self.kv_down = nn.Linear(dim, self.kv_rank + self.rope_dim, bias=bias)  # W_DKV, then W_KR
        self.kv_norm = nn.RMSNorm(self.kv_rank, eps=eps)
        to_heads = num_heads * (self.nope_dim + self.value_dim)  # [k; v] of each
        self.kv_up = nn.Linear(self.kv_rank, to_heads, bias=False)
        self.o_proj = nn.Linear(num_heads * self.value_dim, dim, bias=bias)
        self.encoding = compose(encoding)

    def products(self, keys: float) -> float:
        return keys * self.num_heads * (self.nope_dim + self.rope_dim + self.value_dim)

    @classmethod
    def encoding_shapes(cls, options: Mapping[str, Any]) -> dict[str, int]:
        names = ("dim", "num_heads", "head_dim", "kv_rank", "nope_dim", "rope_dim", "value_dim")
        rope_dim = sized(*(options.get(name) for name in names))[2]  # pyright: ignore[reportArgumentType]
        return {"head_dim": rope_dim, "num_kv_heads": 1}

    def refuses(self, encoding: Encoding) -> str | None:
        terms = () if encoding.reads_tokens else encoding.terms({})
        if any(isinstance(term, OffsetVectors) and term.values is not None for term in terms):
            return f"{type(encoding).__name__} adds vectors to values, and those of LatentAttention have no positions"
        if self.rope_dim == 0 and encoding.overrides("queries", "keys"):
            return f"{type(encoding).__name__} rotates, and this LatentAttention has no rotary part (rope_dim=0)"
        return super().refuses(encoding)

    def mix_tokens(self, x: Float[Tensor, "B L dim"], inputs: MixerInputs) -> Any:
        cache = inputs.cache
        x, call, encoding = checked_call(self, x, inputs)
        self.require_sizes(encoding)
        absorbed = self.absorbs(call, encoding)
        x = self.convolve("input", x, call, inputs)

        source = self.query_source(x)
        q = self.queries(source)  # [B, H, L, nope | rotary]
        key = self.kv_down(x)[:, None]  # [B, 1, L, rank | rotary]
        latent, rotary = key.split([self.kv_rank, self.rope_dim], -1)
        latent = normed(self.kv_norm, latent)
        if encoding.stable_keys and encoding.transforms:
            tables = tables_of(encoding, call, inputs, q)
            content, positional = q.split([self.nope_dim, self.rope_dim], -1)
            q = torch.cat([content, encoding.queries(positional, tables)], -1)
            rotary = encoding.keys(rotary, tables)
        key = torch.cat([latent, rotary], -1)
        columns, carry = self.columns_of(x, call, encoding, cache)
        for name in encoding.passing_columns:
            if columns[name].shape[1] != 1:
                raise ValueError(
                    f"the encoding carries {columns[name].shape[1]} heads of keys from token to token, and latent attention has "
                    "one; expected an encoding built with num_kv_heads=1"
                )
        k_positions = call.positions
        if cache is not None:
            suffix: Any = SuffixEncoding(encoding, self.kv_rank)
            key, _, columns = cache.extend(key, key[..., :0], call.positions, columns, carry, suffix)
            k_positions = cache.positions
        scale = self.scale
        if scale is None:
            scale = (self.nope_dim + self.rope_dim) ** -0.5 * encoding.softmax_factor

        def over_keys(q: Tensor, k: Tensor, v: Tensor, before: int) -> tuple[Tensor, Tensor | None]:
            """Attention with what the encoding does to the part of queries and keys after the first `before` numbers."""
            suffix: Any = SuffixEncoding(encoding, before) if adds(encoding) else compose(None)
            return attended(
                self, (q, k, v), call, suffix, columns, k_positions, scale, inputs.return_weights, inputs.step
            )

        finish = None
        if self.choosing:
            call, columns, finish = self.narrowed(x, source, call, columns)
        attend = self.absorbed if absorbed else self.expanded
        out, weights = attend(q, key, over_keys)
        out = out if finish is None else finish(out)
        return self.result(out, weights, x, call, inputs)

    def query_source(self, x: Tensor) -> Tensor:
        return x if self.q_rank is None else normed(self.q_norm, self.q_down(x))

    def queries(self, source: Tensor) -> Float[Tensor, "B H L nope+rotary"]:
        q = self.q_proj(source) if self.q_rank is None else self.q_up(source)
        return q.unflatten(-1, (self.num_heads, -1)).transpose(1, 2)

    def expanded(
        self, q: Float[Tensor, "B H Lq nope+rotary"], key: Float[Tensor, "B 1 Lk rank+rotary"], over_keys: OverKeys
    ) -> tuple[Float[Tensor, "B H Lq value"], Tensor | None]:
        """Attend with keys and values of every head, computed from the latents."""
        latent, rotary = key.to(q.dtype).transpose(1, 2).split([self.kv_rank, self.rope_dim], -1)  # [B, Lk, 1, ...]
        both = self.kv_up(latent[:, :, 0]).unflatten(-1, (self.num_heads, -1))
        content, v = both.split([self.nope_dim, self.value_dim], -1)
        k = torch.cat([content, rotary.expand(-1, -1, self.num_heads, -1)], -1).transpose(1, 2)
        # Fused kernels, those of CPUs and some of GPUs, need keys no narrower than values; zeros change nothing.
        more = max(0, self.value_dim - self.nope_dim - self.rope_dim)
        q, k = (F.pad(x, (more, 0)) if more else x for x in (q, k))
        return over_keys(q, k, v.transpose(1, 2), self.nope_dim + more)

    def absorbed(
        self, q: Float[Tensor, "B H Lq nope+rotary"], key: Float[Tensor, "B 1 Lk rank+rotary"], over_keys: OverKeys
    ) -> tuple[Float[Tensor, "B H Lq value"], Tensor | None]:
        """Attend in the space of the latents: every head attends to the same keys, and sums latents."""
        # An adapter changes the layer's output, not its weight: the outputs for unit vectors are then the matrix.
        plain = is_plain(self.kv_up)
        matrix = self.kv_up.weight if plain else self.kv_up(torch.eye(self.kv_rank, dtype=q.dtype, device=q.device)).mT
        to_keys, to_values = matrix.unflatten(0, (self.num_heads, -1)).split([self.nope_dim, self.value_dim], 1)
        content, positional = q.split([self.nope_dim, self.rope_dim], -1)
        content = torch.einsum("bhln,hnr->bhlr", content, to_keys)
        wide = torch.cat([content.to(q.dtype), positional], -1).to(key.dtype)  # a cache may store keys in a wider dtype
        # The key itself as value, so that both are equally wide and nothing is copied; its rotary part is not read.
        out, weights = over_keys(wide, key, key, self.kv_rank)
        return torch.einsum("bhlr,hvr->bhlv", out[..., : self.kv_rank].to(q.dtype), to_values), weights

    # ---- which route ----
    def absorbs(self, call: Call, encoding: Composed) -> bool:
        if encoding.passing_columns:  # keys are carried from token to token, as the cache stores them
            if self.route == "expanded":
                raise ValueError(
                    "the encoding carries keys from token to token, and expanded keys are made again for each call; expected "
                    "route 'absorbed' or 'auto'"
                )
            return True
        if self.route != "auto":
            return self.route == "absorbed"
        # If the layer has hooks or adapters, it is called on the latents themselves, as hooks expect.
        return is_plain(self.kv_up) and self.cheaper_absorbed(call.length, call.keys)

    def cheaper_absorbed(self, rows: int, keys: int) -> bool:
        """Whether the absorbed route needs fewer products, for `rows` queries that are the last of `keys` keys."""
        heads = self.nope_dim + self.value_dim
        expanded = keys * self.kv_rank * heads + rows * keys * 2 * max(self.nope_dim + self.rope_dim, self.value_dim)
        absorbed = rows * self.kv_rank * heads + rows * keys * 2 * (self.kv_rank + self.rope_dim)
        return rows < keys and absorbed < expanded

    # ---- what does not fit ----
    def require_sizes(self, encoding: Composed) -> None:
        if encoding.rotate_values:
            self.require(encoding)
        for member in encoding:
            for name, expected in (("num_heads", self.num_heads), ("head_dim", self.rope_dim)):
                got = getattr(member, name, expected)
                if got != expected:
                    size = f"{name}={expected} for latent attention, which rotates rope_dim numbers of each head"
                    raise UsageError(type(member).__name__, size, got)


def adds(encoding: Composed) -> bool:
    """Whether anything is left to do once stable queries and keys are rotated."""
    return not encoding.stable_keys or any(type(member).terms is not Encoding.terms for member in encoding)


Size = int | None
OverKeys = Callable[[Tensor, Tensor, Tensor, int], tuple[Tensor, Tensor | None]]


def sized(
    dim: int, num_heads: int, head_dim: Size, kv_rank: Size, nope_dim: Size, rope_dim: Size, value_dim: Size
) -> tuple[int, int, int, int]:
    """kv_rank, nope_dim, rope_dim and value_dim, with their defaults."""
    check_sizes("LatentAttention", dim=dim, num_heads=num_heads)
    head_dim = max(1, dim // num_heads) if head_dim is None else head_dim
    check_sizes("LatentAttention", head_dim=head_dim)
    kv_rank = max(1, min(512, dim // 4)) if kv_rank is None else kv_rank
    nope_dim = head_dim if nope_dim is None else nope_dim
    rope_dim = 2 * max(1, head_dim // 4) if rope_dim is None else rope_dim
    value_dim = head_dim if value_dim is None else value_dim
    check_sizes("LatentAttention", kv_rank=kv_rank, nope_dim=nope_dim, value_dim=value_dim)
    if isinstance(rope_dim, bool) or not isinstance(rope_dim, int) or rope_dim < 0 or rope_dim % 2:
        raise UsageError("LatentAttention", "an even rope_dim, whose numbers rotate in pairs, or 0", repr(rope_dim))
    return kv_rank, nope_dim, rope_dim, value_dim


class SuffixEncoding:
    """`encoding` for queries and keys that have `before` more numbers in front of those that it rotates or multiplies.

    Terms that do not read queries are unchanged. Attention uses it like a Composed. It is a plain object, because torch.compile
    does not support modules that a forward builds.
    """

    prepares = transforms = adds_terms = True
    widens = 1
    sizes = ()  # those of its members are narrower than queries
    rotate_values = False

    def __init__(self, encoding: Composed, before: int):
        self.encoding, self.before = encoding, before
        self.stable_keys = encoding.stable_keys
        self.learned, self.causal_only = encoding.learned, encoding.causal_only
        self.passing_columns, self.query_columns = encoding.passing_columns, encoding.query_columns
        self.reads_tokens, self.each = encoding.reads_tokens, encoding.each
        self.length_at, self.regions = encoding.length_at, encoding.regions
        self.prepare, self.center = encoding.prepare, encoding.center

    def queries(self, q: Tensor, prepared: Any) -> Tensor:
        return torch.cat([q[..., : self.before], self.encoding.queries(q[..., self.before :], prepared)], -1)

    def keys(self, k: Tensor, prepared: Any) -> Tensor:
        return torch.cat([k[..., : self.before], self.encoding.keys(k[..., self.before :], prepared)], -1)

    def queries_and_keys(self, q: Tensor, k: Tensor, prepared: Any) -> tuple[Tensor, Tensor]:
        return self.queries(q, prepared), self.keys(k, prepared)

    def terms(self, context: Columns) -> tuple[Term, ...]:
        return tuple(self.placed(term) for term in self.encoding.terms(context))

    def placed(self, term: Term) -> Term:
        """The term, its vectors with zeros in front."""
        if isinstance(term, OffsetVectors) and term.values is not None:
            raise ValueError(
                "the encoding adds vectors to values, and those of latent attention have no part with positions; "
                "expected an encoding without them, such as with values=False"
            )
        return term.behind_zeros(self.before)
