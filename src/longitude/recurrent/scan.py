"""The selective scan of Mamba (S6): a diagonal state whose decay each token chooses."""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from longitude.recurrent.base import require_mode, require_state, state_dtype
from longitude.recurrent.linear_recurrence import linear_scan


def selective_scan(
    u: Float[Tensor, "B C L"],
    delta: Float[Tensor, "B C L"],
    A: Float[Tensor, "C N"],
    B: Float[Tensor, "B *G N L"],
    C: Float[Tensor, "B *G N L"],
    D: Float[Tensor, "C"] | None = None,
    z: Float[Tensor, "B C L"] | None = None,
    delta_bias: Float[Tensor, "C"] | None = None,
    *,
    delta_softplus: bool = False,
    mode: str = "chunked",
    chunk_size: int = 32,
    state: Float[Tensor, "B C N"] | None = None,
    reset: Bool[Tensor, "B L"] | None = None,
    valid: Bool[Tensor, "B L"] | None = None,
) -> tuple[Float[Tensor, "B C L"], Float[Tensor, "B C N"]]:
    """h_t = exp(d_t A) h_{t-1} + d_t u_t B_t,   y_t = C_t h_t + D u_t, times silu(z_t)   (Gu and Dao 2023).
    """
    dtype = state_dtype(u)
    batch, channels, length = u.shape
    size = A.shape[-1]
    with torch.autocast(u.device.type, enabled=False):
        dt = delta.to(dtype)
        if delta_bias is not None:
            dt = dt + delta_bias.to(dtype)[:, None]
        if delta_softplus:
            dt = F.softplus(dt)
        if valid is not None:
            dt = dt * valid[:, None]
        x = u.to(dtype)
        h = x.new_zeros(batch, channels, size) if state is None else state.to(dtype)
        if mode == "recurrent":
            y, h = _steps(x, dt, A.to(dtype), B.to(dtype), C.to(dtype), h, reset)
        else:
            y, h = _pieces(x, dt, A.to(dtype), B.to(dtype), C.to(dtype), h, reset, chunk_size if mode == "chunked" else length, mode == "parallel")
        if D is not None:
            y = y + x * D.to(dtype)[:, None]
        if z is not None:
            y = y * F.silu(z.to(dtype))
    return y.to(u.dtype), h


def _steps(x, dt, A, B, C, h, reset):
    out = []
    for t in range(x.shape[-1]):
        if reset is not None:
            h = torch.where(reset[:, t, None, None], 0, h)
        d = dt[:, :, t, None]
        h = torch.exp(d * A) * h + (d * x[:, :, t, None]) * B[:, None, :, t]
        out.append((h @ C[:, :, t, None])[..., 0])
    return torch.stack(out, -1), h


def _pieces(x, dt, A, B, C, h, reset, chunk, doubling):
    groups = 1
    if B.dim() == 3: B, C = B[:, None], C[:, None]
    groups = B.shape[1]
    batch, channels, length = x.shape
    split = lambda v: v.unflatten(1, (groups, -1)).permute(3, 0, 1, 2)[..., None, :]
    dtx, dt = split(dt * x), split(dt)
    B, C = B.permute(3, 0, 1, 2)[..., None], C.permute(3, 0, 1, 2)[..., None, :]
    A = A.unflatten(0, (groups, -1)).transpose(1, 2)
    h = h.unflatten(1, (groups, -1)).transpose(2, 3)
    keep = None if reset is None else reset.logical_not().t()[..., None, None, None].to(x.dtype)
    out = []
    for start in range(0, length, chunk):
        here = slice(start, start + chunk)
        args = dt[here], dtx[here], A, B[here], C[here], h, None if keep is None else keep[here], doubling
        if torch.is_grad_enabled() and chunk < length:
            y, h = checkpoint(_piece, *args, use_reentrant=False, preserve_rng_state=False)
        else:
            y, h = _piece(*args)
        out.append(y)
    y = torch.cat(out).permute(1, 2, 3, 0).flatten(1, 2)
    return y, h.transpose(2, 3).flatten(1, 2)


def _piece(dt, dtx, A, B, C, h, keep, doubling):
    a = torch.exp(dt * A)
    if keep is not None: a = a * keep
    hs = linear_scan(a, dtx * B, h, doubling)
    return (C @ hs)[..., 0, :], hs[-1].clone()
