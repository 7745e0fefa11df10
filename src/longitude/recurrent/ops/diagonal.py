"""The diagonal state space of S4D: the same for all tokens, so one long convolution as well as a recurrence."""

from __future__ import annotations

import torch
from jaxtyping import Bool, Complex, Float
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from longitude.recurrent.base import require_flags, require_mode, require_state, require_tokens, state_dtype
from longitude.recurrent.ops.c_loops import DiagonalLoop, flags_of, usable
from longitude.recurrent.ops.linear_scan import linear_scan


def s4d(
    u: Float[Tensor, "B H L"],
    log_dt: Float[Tensor, " H"],
    A: Complex[Tensor, "H N/2"],
    C: Complex[Tensor, "H N/2"],
    *,
    D: Float[Tensor, " H"] | None = None,
    mode: str = "chunked",
    chunk_size: int = 32,
    state: Complex[Tensor, "B H N/2"] | None = None,
    reset: Bool[Tensor, "B L"] | None = None,
    valid: Bool[Tensor, "B L"] | None = None,
) -> tuple[Float[Tensor, "B H L"], Complex[Tensor, "B H N/2"]]:
    """h_t = e^{dt A} h_{t-1} + (e^{dt A} - 1)/A u_t,   y_t = 2 Re(C h_t) + D u_t,   dt = exp(log_dt)   (Gu et al. 2022, S4D).

    The same as y = K * u + D u with K_l = 2 Re sum_n C_n (e^{dt A_n} - 1)/A_n e^{l dt A_n}; n counts pairs of conjugates. A state
    that neither decays nor moves, A = 0, sums dt u.

    mode: "parallel", or "convolution", is the product of Fourier transforms of length 2L; "chunked" convolves pieces of
    chunk_size tokens and carries the state between them; "recurrent" takes one token after the other. All give the same numbers.
    state: what an earlier call returned, complex64, or complex128 where u is float64. reset: tokens that hear nothing before
    them; valid: False for tokens that leave the state as it is. No convolution knows of them: with one of the two, chunked and
    parallel go through all states. ValueError where shapes do not fit.
    """
    mode = "parallel" if mode == "convolution" else mode
    require_mode("s4d", mode, chunk_size)
    require_tokens("s4d", u=(u, "B H L"), log_dt=(log_dt, "H"), D=(D, "H"))
    batch, channels, length = u.shape
    if A.dim() != 2 or len(A) != channels or C.shape != A.shape or not (A.is_complex() and C.is_complex()):
        raise ValueError(
            f"s4d: expected complex A and C [{channels}, N/2], got {A.dtype} {list(A.shape)} and {C.dtype} {list(C.shape)}"
        )
    require_flags("s4d", batch, length, reset=reset, valid=valid)
    require_state("s4d", state, {"state": (batch, *A.shape)})
    dtype = state_dtype(u)
    with torch.autocast(u.device.type, enabled=False):
        x = u.to(dtype)
        A, C = (v.to(torch.promote_types(dtype, torch.complex32)) for v in (A, C))
        z = A * log_dt.to(dtype).exp()[:, None]
        B = _phi(z) * log_dt.to(dtype).exp()[:, None]
        r = z.exp()
        h = A.new_zeros(batch, *A.shape) if state is None else state.to(A.dtype)
        if mode == "recurrent":
            y, h = _steps(x, r, B, C, h, reset, valid)
        elif mode == "chunked" and usable("diagonal.c", x):
            planes = (torch.stack([v.real.mT, v.imag.mT], -3) for v in (r, B, C, h))  # [..., 2, n, H]
            *of, first = planes
            out, last = DiagonalLoop.apply(x.mT, *of, flags_of(reset, valid), first, chunk_size)
            y, h = out.mT, torch.complex(*last.mT.unbind(1))
        elif reset is not None or valid is not None:
            y, h = _scanned(x, r, B, C, h, reset, valid, chunk_size if mode == "chunked" else None)
        elif mode == "parallel":
            y, h = _convolved(x, r, B, C, h)
        else:
            y, h = _pieces(x, r, B, C, h, chunk_size)
        if D is not None:
            y = y + x * D.to(dtype)[:, None]
    return y.to(u.dtype), h


def _phi(z: Tensor) -> Tensor:
    """(e^z - 1) / z, 1 at 0: as its series where the difference, or that of its derivative, would cancel."""
    small = z.abs() < 0.25
    series = torch.ones_like(z)
    near = torch.where(small, z, 0)
    for n in range(13, 1, -1):
        series = 1 + series * near / n
    far = torch.where(small, 1, z)
    return torch.where(small, series, (far.exp() - 1) / far)


def _powers(r: Tensor, count: int) -> Tensor:
    """r^0 .. r^(count-1), in front: [count, ...]."""
    powers, step = torch.ones_like(r)[None], r
    while len(powers) < count:
        powers, step = torch.cat([powers, powers * step]), step * step
    return powers[:count]


def _twice_real(x: Tensor) -> Tensor:
    """[..., n] -> [..., 2n], so that a plain product with (real, imaginary) is 2 Re of the complex one."""
    return torch.cat([2 * x.real, -2 * x.imag], -1)


def _split(x: Tensor) -> Tensor:
    return torch.cat([x.real, x.imag], -1)


# ---- ways to the same numbers; r = e^{dt A}, B, C [H, n], h [B, H, n] ----
def _steps(
    x: Tensor, r: Tensor, B: Tensor, C: Tensor, h: Tensor, reset: Tensor | None, valid: Tensor | None
) -> tuple[Tensor, Tensor]:
    """One token after the other."""
    out = []
    for t, x_t in enumerate(x[..., None].unbind(2)):
        if reset is not None:
            h = torch.where(reset[:, t, None, None], 0, h)
        after = r * h + B * x_t
        h = after if valid is None else torch.where(valid[:, t, None, None], after, h)
        out.append(2 * (C * h).sum(-1).real)
    return torch.stack(out, 2), h


def _scanned(
    x: Tensor, r: Tensor, B: Tensor, C: Tensor, h: Tensor, reset: Tensor | None, valid: Tensor | None, chunk: int | None
) -> tuple[Tensor, Tensor]:
    """All states, chunk by chunk; None: at once, in rounds of doubling."""
    x = x.permute(2, 0, 1)[..., None]
    one = x.new_ones(1, 1, 1, 1)
    holds = one if valid is None else valid.t()[..., None, None]
    keeps = one if reset is None else reset.logical_not().t()[..., None, None]

    def piece(x: Tensor, keeps: Tensor, holds: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        a = torch.where(holds > 0, r, 1) * keeps
        hs = linear_scan(a.expand(len(x), *a.shape[1:]), torch.where(holds > 0, B * x, 0), h, doubling=chunk is None)
        return 2 * (C * hs).sum(-1).real, hs[-1].clone()

    out = []
    size = chunk or len(x)
    for start in range(0, len(x), size):
        here = slice(start, start + size)
        args = x[here], keeps if keeps is one else keeps[here], holds if holds is one else holds[here], h
        if torch.is_grad_enabled() and size < len(x):
            y, h = checkpoint(piece, *args, use_reentrant=False, preserve_rng_state=False)
        else:
            y, h = piece(*args)
        out.append(y)
    return torch.cat(out).permute(1, 2, 0), h


def _convolved(x: Tensor, r: Tensor, B: Tensor, C: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
    """By Fourier transforms of twice the length."""
    length = x.shape[-1]
    size = max(1, int(length**0.5))  # r^(size i + j): two short lists of powers instead of a long one
    near = _powers(r, size)
    far = _powers(near[-1] * r, -(-length // size))

    def answers(c: Tensor) -> Tensor:
        """2 Re sum_n c_n r_n^l, l = 0 .. length-1: [..., H, n] -> [..., H, length]."""
        rows = _twice_real(far.transpose(0, 1) * c[..., None, :])  # [..., H, M, 2n]
        return (rows @ _split(near.transpose(0, 1)).mT).flatten(-2)[..., :length]

    kernel = answers(C * B)
    y = torch.fft.irfft(torch.fft.rfft(x, n=2 * length) * torch.fft.rfft(kernel, n=2 * length), n=2 * length)[
        ..., :length
    ]
    y = y + answers(C * r * h)
    pieces = F.pad(x, (len(far) * size - length, 0)).unflatten(-1, (-1, size))  # [B, H, M, size]
    sums = torch.view_as_complex(
        (pieces @ _split(near.flip(0).transpose(0, 1))).unflatten(-1, (2, -1)).transpose(-1, -2).contiguous()
    )
    sums = (sums * far.flip(0).transpose(0, 1)).sum(-2)  # [B, H, n]
    last = far[length // size - (length % size == 0)] * near[(length - 1) % size] * r  # r^length
    return y, B * sums + last * h


def _pieces(x: Tensor, r: Tensor, B: Tensor, C: Tensor, h: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """Pieces of one size as matrix products, with the state from each to the next; then what is left."""
    length = x.shape[-1]
    whole = length // size * size
    out = []
    for start, stop, piece in ((0, whole, size), (whole, length, length - whole)):
        if start < stop:
            y, h = _side_by_side(x[..., start:stop], r, B, C, h, piece)
            out.append(y)
    return torch.cat(out, -1), h


def _side_by_side(x: Tensor, r: Tensor, B: Tensor, C: Tensor, h: Tensor, size: int) -> tuple[Tensor, Tensor]:
    batch = len(x)
    powers = _powers(r, size + 1).transpose(0, 1)  # [H, size+1, n]
    tokens = x.unflatten(2, (-1, size)).permute(1, 3, 2, 0).flatten(2)  # [H, size, pieces B]
    kernel = (_twice_real(powers[:, :size]) @ _split(C * B)[..., None])[..., 0]  # [H, size]
    toeplitz = F.pad(kernel, (size - 1, 0)).unfold(1, size, 1).flip(2)  # K_{t-j}, zero for j > t
    y = toeplitz @ tokens
    heard = _split(powers[:, :size].flip(1) * B[:, None]).mT @ tokens  # [H, 2n, pieces B]
    heard = torch.complex(*heard.chunk(2, 1)).unflatten(2, (-1, batch)).permute(2, 3, 0, 1)
    states = linear_scan(powers[:, size].expand(len(heard), 1, -1, -1), heard, h)
    before = torch.cat([h[None], states[:-1]])  # [pieces, B, H, n]
    rows = _twice_real(powers[:, 1:] * C[:, None])  # [H, size, 2n]
    y = y + rows @ _split(before).permute(2, 3, 0, 1).flatten(2)
    return y.unflatten(2, (-1, batch)).permute(3, 0, 2, 1).flatten(2), states[-1].clone()
