"""S4D: a diagonal state space, the same for all tokens, so it is one long convolution as well as a recurrence."""

from __future__ import annotations

import math
from typing import Any, Unpack

import torch
from jaxtyping import Complex, Float
from torch import Tensor, nn
from torch.nn import functional as F

from longitude.attention.mixer import register_mixer
from longitude.attention.state_mixer import StateInputs
from longitude.errors import UsageError
from longitude.native.not_finite import nan_in_its_document
from longitude.recurrent.base import RecurrentMixer, fill
from longitude.recurrent.ops.c_loops import Loop, flags_of, usable
from longitude.recurrent.ops.checks import Running, require_running, require_state, require_tokens, state_dtype
from longitude.recurrent.ops.scan import linear_scan, scan_chunks


def s4d(
    u: Float[Tensor, "B H L"],
    log_dt: Float[Tensor, " H"],
    A: Complex[Tensor, "H N/2"],
    C: Complex[Tensor, "H N/2"],
    *,
    D: Float[Tensor, " H"] | None = None,
    state: Complex[Tensor, "B H N/2"] | None = None,
    **run: Unpack[Running],
) -> tuple[Float[Tensor, "B H L"], Complex[Tensor, "B H N/2"]]:
    """The diagonal state space of S4D, applied to each channel independently.

        h_t = e^{dt A} h_{t-1} + (e^{dt A} - 1)/A u_t,    y_t = 2 Re(C h_t) + D u_t,    dt = exp(log_dt)

    This is the convolution y = K * u + D u, with a sum over the pairs n of conjugates:

        K_l = 2 Re sum_n C_n (e^{dt A_n} - 1)/A_n e^{l dt A_n}

    A state with A = 0 sums dt u.

    Args:
        u: tokens, [B, H, L].
        log_dt: logarithm of each channel's step, [H].
        A: complex, [H, N/2].
        C: complex, [H, N/2].
        D: weight of the token itself, by channel, [H].
        state: the state returned by an earlier call, [B, H, N/2]; None at the beginning.
        run: as in `retention`, with chunks of 32 tokens. mode: "parallel" is the product of Fourier transforms of
            length 2L; "chunked" runs in a C kernel if there is one, else as "parallel", with documents chunk_size tokens at a
            time; "recurrent" runs token by token. The results are equal.

    Returns:
        y [B, H, L] in u's dtype, and the state after the last token [B, H, N/2], complex64, or complex128 where u is float64.

    Raises:
        ValueError: for shapes that do not fit, an unknown mode, or a chunk without tokens.

    Source:
        Gu et al. 2022, arXiv 2206.11893, https://arxiv.org/abs/2206.11893
    """
    require_tokens("s4d", u=(u, "B H L"), log_dt=(log_dt, "H"), D=(D, "H"))
    batch, channels, length = u.shape
    if A.dim() != 2 or len(A) != channels or C.shape != A.shape or not (A.is_complex() and C.is_complex()):
        got = f"{A.dtype} {list(A.shape)} and {C.dtype} {list(C.shape)}"
        raise UsageError("s4d", f"complex A and C [{channels}, N/2]", got)
    mode, chunk_size, reset, valid = require_running("s4d", batch, length, **run)
    require_state("s4d", state, {"state": (batch, *A.shape)})
    dtype = state_dtype(u)
    [u], states, back = nan_in_its_document(2, [u], [] if state is None else [state], reset, valid)
    with torch.autocast(u.device.type, enabled=False):
        x = u.to(dtype)
        A, C = (v.to(torch.promote_types(dtype, torch.complex32)) for v in (A, C))
        z = A * log_dt.to(dtype).exp()[:, None]
        B = _phi(z) * log_dt.to(dtype).exp()[:, None]
        r = z.exp()
        h = states[0].to(A.dtype) if states else A.new_zeros(batch, *A.shape)
        if mode == "recurrent":
            y, h = _steps(x, r, B, C, h, reset, valid)
        elif mode == "chunked" and usable("diagonal.c", x):
            *of, first = (torch.stack([v.real.mT, v.imag.mT], -3) for v in (r, B, C, h))  # [..., 2, n, H]
            chunk = {"chunk": min(chunk_size, length)}
            out, last = Loop.apply("diagonal.c", chunk, x.mT, *of, flags_of(reset, valid), first)
            y, h = out.mT, torch.complex(*last.mT.unbind(1))
        elif reset is not None or valid is not None:
            y, h = _scanned(x, r, B, C, h, reset, valid, chunk_size if mode == "chunked" else length)
        else:
            y, h = _convolved(x, r, B, C, h)
        if D is not None:
            y = y + x * D.to(dtype)[:, None]
    y, [h] = back(y.to(u.dtype), [h])
    return y, h


def _phi(z: Tensor) -> Tensor:
    """(e^z - 1) / z, 1 at 0; near 0 by its series, because e^z - 1 loses digits there, in the derivative too."""
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


# ---- algorithms with equal results; r = e^{dt A}, B, C [H, n], h [B, H, n] ----
def _steps(
    x: Tensor, r: Tensor, B: Tensor, C: Tensor, h: Tensor, reset: Tensor | None, valid: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Run token by token."""
    out = []
    for t, x_t in enumerate(x[..., None].unbind(2)):
        if reset is not None:
            h = torch.where(reset[:, t, None, None], 0, h)
        after = r * h + B * x_t
        h = after if valid is None else torch.where(valid[:, t, None, None], after, h)
        out.append(2 * (C * h).sum(-1).real)
    return torch.stack(out, 2), h


def _scanned(
    x: Tensor, r: Tensor, B: Tensor, C: Tensor, h: Tensor, reset: Tensor | None, valid: Tensor | None, size: int
) -> tuple[Tensor, Tensor]:
    """Run by all states, of `size` tokens at a time; by doubling if size is the length. reset or valid is not None."""
    valid, keep = (None if y is None else y.t()[..., None, None] for y in (valid, None if reset is None else ~reset))

    def chunk(h: Tensor, x: Tensor, keep: Tensor | None, valid: Tensor | None) -> tuple[Tensor, Tensor]:
        a, b = (r, B * x) if valid is None else (torch.where(valid, r, 1), torch.where(valid, B * x, 0))
        states = linear_scan(a if keep is None else a * keep, b, h, doubling=size == length)
        return 2 * (C * states).sum(-1).real, states[-1].clone()

    length = x.shape[-1]
    y, h = scan_chunks(chunk, size, h, x.permute(2, 0, 1)[..., None], keep, valid)
    return y.permute(1, 2, 0), h


def _convolved(x: Tensor, r: Tensor, B: Tensor, C: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
    """Run as a convolution by Fourier transforms of twice the length."""
    length = x.shape[-1]
    size = max(1, int(length**0.5))  # r^(size i + j): two short lists of powers instead of a long one
    near = _powers(r, size)
    far = _powers(near[-1] * r, -(-length // size))

    def responses(c: Tensor) -> Tensor:
        """2 Re sum_n c_n r_n^l, l = 0 .. length-1: [..., H, n] -> [..., H, length]."""
        rows = _twice_real(far.transpose(0, 1) * c[..., None, :])  # [..., H, M, 2n]
        return (rows @ _split(near.transpose(0, 1)).mT).flatten(-2)[..., :length]

    spectrum = torch.fft.rfft(x, n=2 * length) * torch.fft.rfft(responses(C * B), n=2 * length)
    y = torch.fft.irfft(spectrum, n=2 * length)[..., :length] + responses(C * r * h)
    rows = F.pad(x, (len(far) * size - length, 0)).unflatten(-1, (-1, size))  # [B, H, M, size]
    sums = torch.complex(*(rows @ _split(near.flip(0).transpose(0, 1))).unflatten(-1, (2, -1)).unbind(-2))
    sums = (sums * far.flip(0).transpose(0, 1)).sum(-2)  # [B, H, n]
    last = far[length // size - (length % size == 0)] * near[(length - 1) % size] * r  # r^length
    return y, B * sums + last * h


@register_mixer("s4d")
class S4D(RecurrentMixer):
    """S4D, a diagonal state-space model: out = glu(W gelu(s4d(x) + D x)), with independent channels of x in s4d.

    A = -exp(log_A_real) + i A_imag. The state is [B, dim, N/2, 2], real and imaginary part.

    Args:
        dim: width of x and of the output.
        state_size: size N of each channel's state, N/2 complex numbers.
        bias: whether the projection has a bias.
        mode, chunk_size: as in `s4d`.

    Raises:
        ValueError: for an odd state_size, or sizes that are not positive.

    Source:
        Gu et al. 2022, arXiv 2206.11893, https://arxiv.org/abs/2206.11893
    """

    source = "Gu et al. 2022"
    undecayed = ("log_dt", "log_A_real", "A_imag", "D")
    # Frequencies are up to 97 radians per token: rounding to bfloat16 would change them.
    full_precision = ("log_dt", "log_A_real", "A_imag")

    def __init__(
        self,
        dim: int,
        *,
        state_size: int = 64,
        bias: bool = True,
        mode: str = "chunked",
        chunk_size: int = 32,
    ):
        super().__init__(mode=mode, chunk_size=chunk_size)
        if state_size % 2:
            raise UsageError("S4D", "an even state_size, pairs of conjugates", state_size)
        self.dim, self.state_size = dim, state_size
        self.log_dt = nn.Parameter(torch.empty(dim))
        self.log_A_real, self.A_imag = (nn.Parameter(torch.empty(dim, state_size // 2)) for _ in range(2))
        self.C = nn.Parameter(torch.empty(dim, state_size // 2, 2))  # real and imaginary part
        self.D = nn.Parameter(torch.empty(dim))
        self.output = nn.Linear(dim, 2 * dim, bias=bias)
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Initialize as published: A_n = -1/2 + i pi n (S4D-Lin); dt log-uniform in [0.001, 0.1]; C complex normal; D normal."""
        nn.init.uniform_(self.log_dt, math.log(1e-3), math.log(0.1))
        nn.init.constant_(self.log_A_real, math.log(0.5))
        n = torch.arange(self.state_size // 2, dtype=torch.float32, device=self.A_imag.device)
        fill(self.A_imag, (math.pi * n).expand_as(self.A_imag))
        nn.init.normal_(self.C, std=0.5**0.5)
        nn.init.normal_(self.D)

    def products(self, keys: float) -> float:
        return 2 * self.dim * self.state_size

    def mix(self, x: Tensor, state: Any, inputs: StateInputs) -> tuple[Tensor, tuple[Tensor]]:
        exact = state_dtype(x)
        real, imaginary, C = (p.to(exact) for p in (self.log_A_real, self.A_imag, self.C))
        A, h = torch.complex(-real.exp(), imaginary), None if state is None else torch.view_as_complex(state[0])
        y, h = s4d(x.mT, self.log_dt, A, torch.view_as_complex(C), D=self.D, state=h, **self.options(inputs))
        return F.glu(self.output(F.gelu(y.mT)), -1), (torch.view_as_real(h),)
