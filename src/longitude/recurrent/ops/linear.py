"""Retention, RWKV-6 and Mamba-2's SSD as functions: one recurrence with a constant, a vector and a scalar decay."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from longitude.positions.base import wide
from longitude.recurrent.base import require_tokens
from longitude.recurrent.ops.decayed import decayed


def retention(
    q: Float[Tensor, "B H L K"],
    k: Float[Tensor, "B H L K"],
    v: Float[Tensor, "B H L V"],
    *,
    decay: Float[Tensor, " H"] | Sequence[float] | None = None,
    mode: str = "chunked",
    chunk_size: int = 64,
    state: Float[Tensor, "B H K V"] | None = None,
    reset: Bool[Tensor, "B L"] | None = None,
    valid: Bool[Tensor, "B L"] | None = None,
) -> tuple[Float[Tensor, "B H L V"], Float[Tensor, "B H K V"]]:
    """Retention (RetNet, Sun et al. 2023, equations 5 to 7):

        S_n = gamma_h S_{n-1} + k_n^T v_n,    o_n = q_n S_n = sum over m <= n of gamma_h^(n-m) (q_n . k_m) v_m

    -> the outputs, in v's dtype, and the state after the last token, float32 or wider. Nothing is scaled, rotated or
    normalised here; the layer does that. decay: gamma of each head, above 0 and at most 1; None: 1 - 2^(-5-h), h = 0 .. H-1.

    mode: "parallel", all pairs at once; "chunked", pairs within chunk_size tokens and a state between; "recurrent", one token
    after the other. They give the same numbers. state: what an earlier call returned. reset: tokens that begin a document and
    hear nothing before it. valid: False for tokens that leave the state as it is, padding.

    Errors: ValueError for shapes that do not fit, a decay beyond its bounds, an unknown mode, a chunk of no token.
    """
    require_tokens("retention", q=(q, "B H L K"), k=(k, "B H L K"), v=(v, "B H L V"))
    log_decay = log_gamma(q.shape[1], decay, q.device)[None, :, None, None]
    return decayed(
        "retention",
        q,
        k,
        v,
        log_decay,
        mode=mode,
        chunk_size=chunk_size,
        state=state,
        reset=reset,
        valid=valid,
    )


def rwkv6(
    r: Float[Tensor, "B H L K"],
    k: Float[Tensor, "B H L K"],
    v: Float[Tensor, "B H L V"],
    log_w: Float[Tensor, "B H L K"],
    u: Float[Tensor, "H K"],
    *,
    mode: str = "chunked",
    chunk_size: int = 64,
    state: Float[Tensor, "B H K V"] | None = None,
    reset: Bool[Tensor, "B L"] | None = None,
    valid: Bool[Tensor, "B L"] | None = None,
) -> tuple[Float[Tensor, "B H L V"], Float[Tensor, "B H K V"]]:
    """The time mixing of RWKV-6 (Finch, Peng et al. 2024, arXiv 2404.05892, section 4):

        y_t = r_t (S_{t-1} + diag(u) k_t^T v_t),    S_t = diag(exp(log_w_t)) S_{t-1} + k_t^T v_t

    -> the outputs and the state. log_w: the logarithm of each channel's decay at each token, at most 0. u: what a token hears
    of itself. The other options and errors are those of `retention`.
    """
    require_tokens(
        "rwkv6",
        r=(r, "B H L K"),
        k=(k, "B H L K"),
        v=(v, "B H L V"),
        log_w=(log_w, "B H L K"),
        u=(u, "H K"),
    )
    return decayed(
        "rwkv6",
        r,
        k,
        v,
        log_w,
        bonus=u,
        mode=mode,
        chunk_size=chunk_size,
        state=state,
        reset=reset,
        valid=valid,
    )


def ssd(
    x: Float[Tensor, "B H L P"],
    log_decay: Float[Tensor, "B H L"],
    B: Float[Tensor, "B G L N"],
    C: Float[Tensor, "B G L N"],
    *,
    mode: str = "chunked",
    chunk_size: int = 64,
    state: Float[Tensor, "B H N P"] | None = None,
    reset: Bool[Tensor, "B L"] | None = None,
    valid: Bool[Tensor, "B L"] | None = None,
) -> tuple[Float[Tensor, "B H L P"], Float[Tensor, "B H N P"]]:
    """The state space dual of Mamba-2 (Dao and Gu 2024, arXiv 2405.21060, sections 3 and 6):

        h_t = exp(log_decay_t) h_{t-1} + B_t^T x_t,    y_t = C_t h_t

    -> the outputs and the state. x: the tokens times their step Delta. log_decay: Delta A, at most 0. Each of the G groups of
    B and C serves H/G heads, one after the other. The other options and errors are those of `retention`.
    """
    require_tokens(
        "ssd",
        x=(x, "B H L P"),
        log_decay=(log_decay, "B H L"),
        B=(B, "B G L N"),
        C=(C, "B G L N"),
    )
    if x.shape[1] % B.shape[1]:
        raise ValueError(
            f"ssd: expected the groups of B and C to divide the heads of x, got {B.shape[1]} and {x.shape[1]}"
        )
    return decayed(
        "ssd",
        C,
        B,
        x,
        log_decay[..., None],
        mode=mode,
        chunk_size=chunk_size,
        state=state,
        reset=reset,
        valid=valid,
    )


def log_gamma(
    num_heads: int, decay: Tensor | Sequence[float] | None = None, device: torch.device | None = None
) -> Float[Tensor, " H"]:
    """Log gamma_h: of 1 - 2^(-5-h), as published, or of the decays given."""
    exact = wide(torch.device("cpu") if device is None else device)
    if decay is None:
        return torch.log1p(-(2.0 ** -(5.0 + torch.arange(num_heads, device=device, dtype=exact))))
    decay = torch.as_tensor(decay, device=device).to(exact)
    if decay.shape != (num_heads,):
        raise ValueError(f"decay: retention expected [{num_heads}], one for each head, got {list(decay.shape)}")
    if not torch.compiler.is_compiling() and not bool(((decay > 0) & (decay <= 1)).all()):
        raise ValueError(f"decay: retention expected numbers above 0 and at most 1, got {decay.tolist()}")
    return decay.log()
