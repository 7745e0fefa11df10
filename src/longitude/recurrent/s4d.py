"""S4D as a layer."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from longitude.attention.mixer import register_mixer
from longitude.errors import unknown
from longitude.positions.base import Encoding, check_sizes
from longitude.recurrent.base import RecurrentMixer, fill, require_mode, state_dtype
from longitude.recurrent.ops.diagonal import s4d

INITS = ("lin", "inv")


@register_mixer("s4d")
class S4D(RecurrentMixer):
    """The block of S4D (Gu et al. 2022): out = glu(W gelu(s4d(x) + D x)), each channel of x a sequence of its own.

    state_size N: the real numbers that each channel carries, as N/2 complex ones, A = -exp(log_A_real) + i A_imag. init: of
    A_imag, "lin", pi n, or "inv", N/pi (N/(2n+1) - 1), n = 0 .. N/2 - 1. mode, chunk_size: as s4d has them. The
    state is [B, dim, N/2, 2], real and imaginary part.
    """

    undecayed = ("log_dt", "log_A_real", "A_imag", "D")
    # Frequencies reach 97 radians a token: rounded to bfloat16, they would be others.
    full_precision = ("log_dt", "log_A_real", "A_imag")

    def __init__(
        self,
        dim: int,
        *,
        state_size: int = 64,
        init: str = "lin",
        bias: bool = True,
        mode: str = "chunked",
        chunk_size: int = 32,
    ):
        super().__init__()
        check_sizes("S4D", dim=dim, state_size=state_size)
        require_mode("S4D", mode, chunk_size)
        if state_size % 2:
            raise ValueError(f"S4D: expected an even state_size, pairs of conjugates, got {state_size}")
        if init not in INITS:
            raise unknown("init", init, INITS, "S4D begins with one of the two.")
        self.dim, self.state_size, self.init = dim, state_size, init
        self.mode, self.chunk_size = mode, chunk_size
        self.log_dt = nn.Parameter(torch.empty(dim))
        self.log_A_real = nn.Parameter(torch.empty(dim, state_size // 2))
        self.A_imag = nn.Parameter(torch.empty(dim, state_size // 2))
        self.C = nn.Parameter(torch.empty(dim, state_size // 2, 2))  # real and imaginary part
        self.D = nn.Parameter(torch.empty(dim))
        self.output = nn.Linear(dim, 2 * dim, bias=bias)
        self.mark_undecayed()
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """As published: A by `init` with real part -1/2, dt log-uniform in [0.001, 0.1], C complex normal, D normal."""
        nn.init.uniform_(self.log_dt, math.log(1e-3), math.log(0.1))
        nn.init.constant_(self.log_A_real, math.log(0.5))
        N = self.state_size
        n = torch.arange(N // 2, dtype=torch.float32, device=self.A_imag.device)
        fill(
            self.A_imag,
            (math.pi * n if self.init == "lin" else N / math.pi * (N / (2 * n + 1) - 1)).expand_as(self.A_imag),
        )
        nn.init.normal_(self.C, std=0.5**0.5)
        nn.init.normal_(self.D)

    def mix(
        self,
        x: Tensor,
        state: Any,
        reset: Tensor | None,
        valid: Tensor | None,
        positions: Tensor,
        encoding: Encoding,
        tables: Any,
    ) -> tuple[Tensor, tuple[Tensor]]:
        exact = state_dtype(x)
        real, imaginary, C = (p.to(exact) for p in (self.log_A_real, self.A_imag, self.C))
        y, h = s4d(
            x.mT,
            self.log_dt,
            torch.complex(-real.exp(), imaginary),
            torch.view_as_complex(C),
            D=self.D,
            mode=self.mode,
            chunk_size=self.chunk_size,
            state=None if state is None else torch.view_as_complex(state[0]),
            reset=reset,
            valid=valid,
        )
        return F.glu(self.output(F.gelu(y.mT)), -1), (torch.view_as_real(h),)
