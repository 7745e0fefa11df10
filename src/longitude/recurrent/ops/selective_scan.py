"""The selective scan of Mamba (S6): a diagonal state whose decay each token chooses."""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from longitude.recurrent.base import require_flags, require_mode, require_state, require_tokens, softplus, state_dtype
from longitude.recurrent.ops.c_loops import ScanLoop, usable
from longitude.recurrent.ops.linear_scan import linear_scan


def selective_scan(
    u: Float[Tensor, "B C L"],
    delta: Float[Tensor, "B C L"],
    A: Float[Tensor, "C N"],
    B: Float[Tensor, "B *G N L"],
    C: Float[Tensor, "B *G N L"],
    D: Float[Tensor, " C"] | None = None,
    z: Float[Tensor, "B C L"] | None = None,
    delta_bias: Float[Tensor, " C"] | None = None,
    *,
    delta_softplus: bool = False,
    mode: str = "chunked",
    chunk_size: int = 32,
    state: Float[Tensor, "B C N"] | None = None,
    reset: Bool[Tensor, "B L"] | None = None,
    valid: Bool[Tensor, "B L"] | None = None,
) -> tuple[Float[Tensor, "B C L"], Float[Tensor, "B C N"]]:
    """h_t = exp(d_t A) h_{t-1} + d_t u_t B_t,   y_t = (C_t h_t + D u_t) * silu(z_t)   (Gu and Dao 2023, algorithm 2).

    d = delta, + delta_bias, softplus of that with delta_softplus. B, C [B, G, N, L]: each serves C / G channels side by side.
    -> y, of u's dtype, and the state after the last token, float32 or float64. No decay is divided by another, so none is too
    strong.

    mode: "recurrent" takes one token after the other; "chunked" keeps the states of chunk_size tokens at a time, in training
    too, in one loop in C where c_compile.py can compile it; "parallel" takes log2(L) rounds over all states, [L, B, C, N] of them
    (Hillis and Steele 1986). All give the same numbers. state: what an earlier call returned. reset: tokens that hear nothing
    before them; valid: False for tokens that leave the state as it is. ValueError where shapes do not fit.
    """
    require_mode("selective_scan", mode, chunk_size)
    _require_shapes(u, delta, A, B, C, D, z, delta_bias)
    batch, channels, length = u.shape
    require_flags("selective_scan", batch, length, reset=reset, valid=valid)
    require_state("selective_scan", state, {"state": (batch, channels, A.shape[1])})
    dtype = state_dtype(u)
    with torch.autocast(u.device.type, enabled=False):
        # Tokens in front and channels behind, [B, L, C], as matrices of tokens have them.
        tokens, dt = (x.mT.to(dtype).contiguous() for x in (u, delta))
        if delta_bias is not None:
            dt = dt + delta_bias.to(dtype)
        if delta_softplus:
            dt = softplus(dt)
        if valid is not None:
            dt = dt * valid[..., None]
        groups = B.shape[1] if B.dim() == 4 else 1
        B, C = ((x if x.dim() == 4 else x[:, None]).to(dtype).permute(0, 3, 1, 2) for x in (B, C))  # [B, L, G, N]
        A = A.to(dtype).unflatten(0, (groups, -1)).mT  # [G, N, P], P = C / G
        h = A.new_zeros(batch, *A.shape) if state is None else state.to(dtype).unflatten(1, (groups, -1)).mT
        ways = {"recurrent": _steps, "chunked": _pieces, "parallel": _at_once}
        dt, dtx = (x.unflatten(2, (groups, -1)) for x in (dt, dt * tokens))
        y, h = ways[mode](dt, dtx, A, B, C, h, reset, chunk_size)
        y = y.flatten(2)
        if D is not None:
            y = y + tokens * D.to(dtype)
        if z is not None:
            y = y * F.silu(z.mT.to(dtype))
    return y.mT.to(u.dtype), h.mT.flatten(1, 2)


def _steps(
    dt: Tensor, dtx: Tensor, A: Tensor, B: Tensor, C: Tensor, h: Tensor, reset: Tensor | None, _: int
) -> tuple[Tensor, Tensor]:
    """One token after the other. dt, dtx [B, L, G, P], A [G, N, P], B, C [B, L, G, N], h [B, G, N, P] -> y [B, L, G, P], h."""
    out = []
    tokens = zip(dt[:, :, :, None].unbind(1), dtx[:, :, :, None].unbind(1), B.unbind(1), C.unbind(1), strict=True)
    for t, (dt_t, dtx_t, B_t, C_t) in enumerate(tokens):
        if reset is not None:
            h = torch.where(reset[:, t, None, None, None], 0, h)
        h = torch.exp(dt_t * A) * h + B_t[..., None] * dtx_t
        out.append((C_t[:, :, None] @ h)[:, :, 0])
    return torch.stack(out, 1), h


def _pieces(
    dt: Tensor, dtx: Tensor, A: Tensor, B: Tensor, C: Tensor, h: Tensor, reset: Tensor | None, size: int
) -> tuple[Tensor, Tensor]:
    """The states of `size` tokens at a time."""
    if usable("scan.c", dt):
        return ScanLoop.apply(
            dt, dtx, A, B, C, None if reset is None else (~reset).to(torch.uint8).contiguous(), h, size
        )
    return _torch_pieces(dt, dtx, A, B, C, h, reset, size)


def _at_once(
    dt: Tensor, dtx: Tensor, A: Tensor, B: Tensor, C: Tensor, h: Tensor, reset: Tensor | None, _: int
) -> tuple[Tensor, Tensor]:
    """All states, in rounds of doubling."""
    return _torch_pieces(dt, dtx, A, B, C, h, reset, dt.shape[1], doubling=True)


def _torch_pieces(
    dt: Tensor, dtx: Tensor, A: Tensor, B: Tensor, C: Tensor, h: Tensor, reset: Tensor | None, size: int, doubling=False
) -> tuple[Tensor, Tensor]:
    """In torch's operators; a backward makes the states of each piece anew."""
    keep = None if reset is None else reset.logical_not().t()[..., None, None, None].to(dt.dtype)
    dt, dtx, B, C = (x.transpose(0, 1).contiguous() for x in (dt, dtx, B, C))  # tokens in front: memory in their order
    dt, dtx, B, C = dt[:, :, :, None], dtx[:, :, :, None], B[..., None], C[:, :, :, None]
    A, length, out = A.contiguous(), len(dt), []
    doubling = doubling or dt.device.type != "cpu"
    for start in range(0, length, size):
        here = slice(start, start + size)
        given = dt[here], dtx[here], A, B[here], C[here], h, None if keep is None else keep[here], doubling
        if torch.is_grad_enabled() and size < length:
            y, h = checkpoint(_piece, *given, use_reentrant=False, preserve_rng_state=False)
        else:
            y, h = _piece(*given)
        out.append(y)
    return torch.cat(out).transpose(0, 1), h


def _piece(
    dt: Tensor, dtx: Tensor, A: Tensor, B: Tensor, C: Tensor, h: Tensor, keep: Tensor | None, doubling: bool
) -> tuple[Tensor, Tensor]:
    decay = torch.exp(dt * A)
    states = linear_scan(decay if keep is None else decay * keep, B * dtx, h, doubling)
    return (C @ states)[:, :, :, 0], states[-1].clone()  # a view would keep all of them


def _require_shapes(
    u: Tensor, delta: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor | None, z: Tensor | None, bias: Tensor | None
) -> None:
    """ValueError unless they fit each other."""
    of_groups = "B G N L" if isinstance(B, Tensor) and B.dim() == 4 else "B N L"
    require_tokens(
        "selective_scan",
        u=(u, "B C L"),
        delta=(delta, "B C L"),
        A=(A, "C N"),
        B=(B, of_groups),
        C=(C, of_groups),
        D=(D, "C"),
        z=(z, "B C L"),
        delta_bias=(bias, "C"),
    )
    if B.dim() == 4 and len(A) % B.shape[1]:
        raise ValueError(
            f"selective_scan: expected the groups of B and C to divide the channels of u, got {B.shape[1]} and {len(A)}"
        )
