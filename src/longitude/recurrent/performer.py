"""Performer: softmax attention through random features, so that a state of constant size replaces all keys."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any, Unpack

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes

from longitude.attention.heads import head_sizes, join_heads, split_heads
from longitude.attention.mixer import register_mixer
from longitude.attention.state_mixer import StateInputs
from longitude.errors import Positive, Seed, UsageError, check_declared, check_sizes
from longitude.native.derivatives import constant_in_graphs
from longitude.native.not_finite import nan_in_its_document
from longitude.positions.base import Encoding
from longitude.recurrent.base import RecurrentMixer
from longitude.recurrent.ops.checks import Form, Running, require_running, require_state, require_tokens, state_dtype
from longitude.recurrent.ops.decayed import decayed

LOWEST = -1e30
"""The largest exponent before the first key."""

State = tuple[Float[Tensor, "B H m V"], Float[Tensor, "B H m"], Float[Tensor, "B H"]]


def performer(
    q: Float[Tensor, "B H L D"],
    k: Float[Tensor, "B H L D"],
    v: Float[Tensor, "B H L V"],
    projection: Float[Tensor, "m D"] | Float[Tensor, "H m D"],
    *,
    epsilon: Positive = 1e-4,
    state: State | None = None,
    **run: Unpack[Running],
) -> tuple[Float[Tensor, "B H L V"], State]:
    """Causal attention with positive random features (FAVOR+).

        o_t = phi(q_t) S_t / (phi(q_t) . z_t),    S_t = sum over s <= t of phi(k_s)^T v_s,    z_t = sum of phi(k_s)
        phi(x) = m^-1/2 (exp(W x' - |x'|^2/2 - c) + epsilon),    x' = D^-1/4 x

    phi(q) . phi(k) is exp(q . k / sqrt(D)) in the mean over W: attention of scale D^-1/2. The number c keeps exp in range, and
    cancels except in epsilon. For a query, c is its largest exponent.

    For keys the published code uses the largest exponent of all, which depends on later tokens. Here c is the largest up to
    token t, kept in the state. As it grows, S and z shrink by the same factor. The output is therefore causal, and equal in all
    modes.

    Args:
        q: [B, H, L, D].
        k: [B, H, L, D].
        v: [B, H, L, V].
        projection: W, rows of N(0, I), [m, D] for all heads or [H, m, D]; see `orthogonal_features`.
        epsilon: added to each feature.
        state: the state returned by an earlier call; None at the beginning.
        run: mode, chunk_size, reset and valid, as in `retention`.

    Returns:
        The outputs [B, H, L, V] in v's dtype, and the state: S [B, H, m, V], z [B, H, m] and the largest exponent [B, H].

    Raises:
        ValueError: for shapes that do not fit, an unknown mode, or a chunk without tokens.

    Source:
        Choromanski et al. 2021, arXiv 2009.14794, https://arxiv.org/abs/2009.14794
    """
    require_tokens("performer", q=(q, "B H L D"), k=(k, "B H L D"), v=(v, "B H L V"))
    batch, heads, length, dim = q.shape
    if projection.dim() not in (2, 3) or projection.shape[-1] != dim or projection.shape[:-2] not in ((), (heads,)):
        raise UsageError("projection: performer", f"[m, {dim}] or [{heads}, m, {dim}]", list(projection.shape))
    m = projection.shape[-2]
    shapes = {"S": (batch, heads, m, v.shape[-1]), "z": (batch, heads, m), "largest": (batch, heads)}
    require_state("performer", state, shapes)
    *_, reset, valid = require_running("performer", batch, length, **run)
    dtype = state_dtype(v)
    (q, k, v), states, back = nan_in_its_document(2, (q, k, v), state or (), reset, valid)
    state = tuple(states) or None  # type: ignore[assignment]
    with torch.autocast(v.device.type, enabled=False):
        to_q, to_k = (exponents(x.to(dtype), projection.to(dtype)) for x in (q, k))
        to_k = to_k if valid is None else to_k.masked_fill(~valid[:, None, :, None], LOWEST)
        before = to_k.new_full((batch, heads), LOWEST) if state is None else state[2].to(dtype)
        largest = running_max(to_k.amax(-1), before, reset)
        earlier = torch.cat([before[..., None], largest], -1)[..., :-1]
        log_decay = earlier - largest
        log_decay = log_decay if reset is None else log_decay.masked_fill(reset[:, None], 0)
        phi_q = m**-0.5 * ((to_q - to_q.amax(-1, keepdim=True)).exp() + epsilon)
        phi_k = m**-0.5 * ((to_k - largest[..., None]).exp() + epsilon)
        # A column of ones after the values: its sum is the normalizer.
        values = torch.cat([v.to(dtype), v.new_ones(*v.shape[:-1], 1, dtype=dtype)], -1)
        joined = None if state is None else torch.cat([state[0].to(dtype), state[1].to(dtype)[..., None]], -1)
        decay = log_decay[..., None]
        out, joined = decayed("performer", phi_q, phi_k, values, decay, state=joined, finite=True, **run)
        out, total = out[..., :-1], out[..., -1:]
        out = out / total.masked_fill(total == 0, 1)  # padding before the first key
    out, after = back(out.to(v.dtype), (joined[..., :-1], joined[..., -1], largest[..., -1].clone()))
    return out, tuple(after)  # type: ignore[return-value]


def exponents(x: Float[Tensor, "B H L D"], projection: Float[Tensor, "*H m D"]) -> Float[Tensor, "B H L m"]:
    """The exponents W x' - |x'|^2/2."""
    x = x * x.shape[-1] ** -0.25
    return x @ projection.mT - x.square().sum(-1, keepdim=True) / 2


def running_max(
    x: Float[Tensor, "B H L"], before: Float[Tensor, "B H"], reset: Bool[Tensor, "B L"] | None
) -> Float[Tensor, "B H L"]:
    """Running maximum [B, H, L] within each token's document; `before` [B, H] is the maximum over earlier tokens."""
    if reset is None:
        return torch.maximum(x.cummax(-1).values, before[..., None])
    document = torch.nn.functional.pad(reset.cumsum(-1), (1, 0))[:, None]
    x, step = torch.cat([before[..., None], x], -1), 1
    while step < x.shape[-1]:  # of the last 2, 4, 8, ... tokens
        same = document[..., step:] == document[..., :-step]
        x = torch.cat([x[..., :step], torch.maximum(x[..., step:], x[..., :-step].where(same, LOWEST))], -1)
        step *= 2
    return x[..., 1:]


def orthogonal_features(head_dim: int, m: int, seed: int = 0) -> Float[Tensor, "m head_dim"]:
    """Random features W: directions orthogonal within each head_dim rows, lengths of Gaussian vectors, each row alone N(0, I).

    Args:
        head_dim: width of a head.
        m: rows.
        seed: decides all random numbers.

    Returns:
        W [m, head_dim], float64.

    Raises:
        ValueError: for sizes that are not positive.

    Source:
        Choromanski et al. 2021, section 2.4, arXiv 2009.14794, https://arxiv.org/abs/2009.14794
    """
    check_sizes("orthogonal_features", head_dim=head_dim, m=m)
    check_declared("orthogonal_features", {"seed": Seed}, {"seed": seed})
    options: Any = {"generator": torch.Generator().manual_seed(seed), "dtype": torch.float64, "device": "cpu"}
    q, r = torch.linalg.qr(torch.randn(math.ceil(m / head_dim), head_dim, head_dim, **options))
    q = q * r.diagonal(dim1=-2, dim2=-1).sign()[:, None]  # else not uniform over all rotations
    lengths = torch.randn(m, head_dim, **options).norm(dim=1, keepdim=True)
    return q.mT.flatten(0, 1)[:m] * lengths


@lru_cache(maxsize=32)
def _cached_features(head_dim: int, m: int, seed: int, device: torch.device, dtype: torch.dtype) -> Tensor:
    # Later calls could not train with inference tensors, nor use the fake tensors of torch.export.
    with torch.inference_mode(False), _disable_current_modes():
        return orthogonal_features(head_dim, m, seed).to(device, dtype)


@constant_in_graphs
def _features(head_dim: int, m: int, seed: int, device: torch.device, dtype: torch.dtype) -> Tensor:
    return _cached_features(head_dim, m, seed, device, dtype)


@register_mixer("performer")
class Performer(RecurrentMixer):
    """Performer, random features: heads and projections as in MultiHeadAttention, `performer` between them.

    The features depend only on the seed, are shared by all heads, are never trained, and are not in state_dict. Rotations act
    before the features; encodings that add to scores raise ValueError.

    Args:
        dim: width of x and of the output.
        num_heads: heads of queries.
        num_kv_heads: heads of keys and values; None: num_heads.
        head_dim: width of a head; None: dim / num_heads.
        features: number m of features per head; None: int(head_dim ln head_dim), as published.
        seed: seed of the features.
        epsilon, mode, chunk_size: as in `performer`.
        bias: whether the projections have biases.

    Raises:
        ValueError: for sizes that do not fit.

    Source:
        Choromanski et al. 2021, arXiv 2009.14794, https://arxiv.org/abs/2009.14794
    """

    source = "Choromanski et al. 2021"
    any_length = True
    rotates = True

    def __init__(
        self,
        dim: int,
        num_heads: int,
        num_kv_heads: int | None = None,
        *,
        head_dim: int | None = None,
        features: int | None = None,
        seed: Seed = 0,
        epsilon: Positive = 1e-4,
        bias: bool = False,
        **form: Unpack[Form],
    ):
        super().__init__(**form)
        num_kv_heads, head_dim = head_sizes("Performer", dim, num_heads, num_kv_heads, head_dim)
        features = max(1, int(head_dim * math.log(head_dim))) if features is None else features
        self.dim, self.num_heads, self.num_kv_heads, self.head_dim = dim, num_heads, num_kv_heads, head_dim
        self.features, self.seed, self.epsilon = features, seed, epsilon
        self.q_proj = nn.Linear(dim, num_heads * head_dim, bias=bias)
        self.k_proj, self.v_proj = (nn.Linear(dim, num_kv_heads * head_dim, bias=bias) for _ in range(2))
        self.o_proj = nn.Linear(num_heads * head_dim, dim, bias=bias)

    def refuses(self, encoding: Encoding) -> str | None:
        if not encoding.stable_keys:
            return f"{type(encoding).__name__} rotates a key again for later queries, and Performer keeps no keys"
        return super().refuses(encoding)

    def products(self, keys: float) -> float:
        return 4 * self.num_heads * self.features * self.head_dim  # features of q and k, update and read of the state

    def mix(self, x: Tensor, state: State | None, inputs: StateInputs) -> tuple[Tensor, State]:
        counts = self.num_heads, self.num_kv_heads, self.num_kv_heads
        projections = zip((self.q_proj, self.k_proj, self.v_proj), counts, strict=True)
        q, k, v = (split_heads(project(x), count) for project, count in projections)
        q, k = inputs.encoding.queries_and_keys(q, k, inputs.tables or ())
        k, v = (y.repeat_interleave(self.num_heads // self.num_kv_heads, 1) for y in (k, v))
        projection = _features(self.head_dim, self.features, self.seed, x.device, state_dtype(v))
        out, state = performer(q, k, v, projection, epsilon=self.epsilon, state=state, **self.options(inputs))
        return self.o_proj(join_heads(out)), state
