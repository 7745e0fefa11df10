"""Mamba: the selective scan (S6), a diagonal state with a decay computed from each token, in its published block."""

from __future__ import annotations

from typing import Any, Unpack

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F

from longitude.attention.mixer import register_mixer
from longitude.attention.short_conv import convolved
from longitude.attention.state_mixer import StateInputs
from longitude.errors import Positive, UsageError
from longitude.native.not_finite import nan_in_its_document
from longitude.positions.linear import WideLinear
from longitude.recurrent.base import RecurrentMixer, fill, fill_step_bias, softplus
from longitude.recurrent.ops.c_loops import Loop, usable
from longitude.recurrent.ops.checks import Running, require_running, require_state, require_tokens, state_dtype
from longitude.recurrent.ops.scan import linear_scan, scan_chunks


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
    state: Float[Tensor, "B C N"] | None = None,
    **run: Unpack[Running],
) -> tuple[Float[Tensor, "B C L"], Float[Tensor, "B C N"]]:
    """The selective scan of Mamba: a diagonal state that each token decays by its own step.

        h_t = exp(d_t A) h_{t-1} + d_t u_t B_t,    y_t = (C_t h_t + D u_t) * silu(z_t)

    Args:
        u: tokens, [B, C, L].
        delta: steps d before bias and softplus, [B, C, L].
        A: [C, N].
        B: [B, N, L], or [B, G, N, L]: each of the G groups serves C / G adjacent channels.
        C: as B.
        D: weight of the token itself, by channel, [C].
        z: gate, [B, C, L].
        delta_bias: added to delta, [C].
        delta_softplus: whether d = softplus(delta + delta_bias).
        state: the state returned by an earlier call, [B, C, N]; None at the beginning.
        run: as in `retention`, with chunks of 32 tokens. mode: "recurrent" runs token by token; "chunked" keeps the states of
            chunk_size tokens at a time, in training too, in a C kernel if there is a compiler; "parallel" takes log2(L)
            rounds over all states, [L, B, C, N] (Hillis and Steele 1986). The results are equal.

    Returns:
        y [B, C, L] in u's dtype, and the state after the last token [B, C, N], float32 or wider.

    Raises:
        ValueError: for shapes that do not fit, an unknown mode, or a chunk without tokens.

    Source:
        Gu and Dao 2023, algorithm 2, arXiv 2312.00752, https://arxiv.org/abs/2312.00752
    """
    of_groups = "B G N L" if isinstance(B, Tensor) and B.dim() == 4 else "B N L"
    require_tokens(
        "selective_scan", u=(u, "B C L"), delta=(delta, "B C L"), A=(A, "C N"), B=(B, of_groups), C=(C, of_groups),
        D=(D, "C"), z=(z, "B C L"), delta_bias=(delta_bias, "C"),
    )  # fmt: skip
    batch, channels, length = u.shape
    groups = B.shape[1] if B.dim() == 4 else 1
    if channels % groups:
        expected = "the groups of B and C to divide the channels of u"
        raise UsageError("selective_scan", expected, f"{groups} and {channels}")
    mode, chunk_size, reset, valid = require_running("selective_scan", batch, length, **run)
    require_state("selective_scan", state, {"state": (batch, channels, A.shape[1])})
    dtype = state_dtype(u)
    inputs = [u, delta, B, C] if z is None else [u, delta, B, C, z]
    (u, delta, B, C, *gate), states, back = nan_in_its_document(
        -1, inputs, [] if state is None else [state], reset, valid
    )
    z = gate[0] if gate else None
    with torch.autocast(u.device.type, enabled=False):
        # Channels last, [B, L, C], as in scan.c.
        tokens, dt = (x.mT.to(dtype).contiguous() for x in (u, delta))
        if delta_bias is not None:
            dt = dt + delta_bias.to(dtype)
        if delta_softplus:
            dt = softplus(dt)
        if valid is not None:
            dt = dt * valid[..., None]
        B, C = ((x if x.dim() == 4 else x[:, None]).to(dtype).permute(0, 3, 1, 2) for x in (B, C))  # [B, L, G, N]
        A = A.to(dtype).unflatten(0, (groups, -1)).mT  # [G, N, P], P = C / G
        h = states[0].to(dtype).unflatten(1, (groups, -1)).mT if states else A.new_zeros(batch, *A.shape)
        dt, dtx = (x.unflatten(2, (groups, -1)) for x in (dt, dt * tokens))
        keep = None if reset is None else reset.logical_not()
        if mode == "recurrent":
            y, h = _steps(dt, dtx, A, B, C, h, keep)
        elif mode == "chunked" and usable("scan.c", dt):
            keep = None if keep is None else keep.to(torch.uint8)
            y, h = Loop.apply("scan.c", {"chunk": min(chunk_size, length)}, dt, dtx, A, B, C, keep, h)
        else:
            y, h = _scanned(dt, dtx, A, B, C, h, keep, length if mode == "parallel" else chunk_size)
        y = y.flatten(2)
        if D is not None:
            y = y + tokens * D.to(dtype)
        if z is not None:
            y = y * F.silu(z.mT.to(dtype))
    y, [h] = back(y.mT.to(u.dtype), [h.mT.flatten(1, 2)])
    return y, h


# dt, dtx [B, L, G, P], A [G, N, P], B, C [B, L, G, N], h [B, G, N, P], keep [B, L] -> y [B, L, G, P], h
def _steps(
    dt: Tensor, dtx: Tensor, A: Tensor, B: Tensor, C: Tensor, h: Tensor, keep: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Run the scan token by token."""
    out = []
    tokens = zip(dt[:, :, :, None].unbind(1), dtx[:, :, :, None].unbind(1), B.unbind(1), C.unbind(1), strict=True)
    for t, (dt_t, dtx_t, B_t, C_t) in enumerate(tokens):
        if keep is not None:
            h = torch.where(keep[:, t, None, None, None], h, 0)
        h = torch.exp(dt_t * A) * h + B_t[..., None] * dtx_t
        out.append((C_t[:, :, None] @ h)[:, :, 0])
    return torch.stack(out, 1), h


def _scanned(
    dt: Tensor, dtx: Tensor, A: Tensor, B: Tensor, C: Tensor, h: Tensor, keep: Tensor | None, size: int
) -> tuple[Tensor, Tensor]:
    """Run the scan in torch's operators with the states of `size` tokens at a time; by doubling if size is the length."""
    keep = None if keep is None else keep.t()[..., None, None, None].to(dt.dtype)
    dt, dtx, B, C = (x.transpose(0, 1).contiguous() for x in (dt, dtx, B, C))  # tokens first, also in memory
    A, length = A.contiguous(), len(dt)

    def chunk(h: Tensor, dt: Tensor, dtx: Tensor, B: Tensor, C: Tensor, keep: Tensor | None) -> tuple[Tensor, Tensor]:
        decay = torch.exp(dt * A)
        states = linear_scan(decay if keep is None else decay * keep, B * dtx, h, doubling=size == length)
        return (C @ states)[:, :, :, 0], states[-1].clone()  # a view would keep all of them

    y, h = scan_chunks(chunk, size, h, dt[:, :, :, None], dtx[:, :, :, None], B[..., None], C[:, :, :, None], keep)
    return y.transpose(0, 1), h


@register_mixer("mamba")
class Mamba(RecurrentMixer):
    """Mamba, a selective state-space model: the block, with the parameter names of its checkpoints.

        x, z = x W_in;   x = silu(conv(x));   dt, B, C = x W_x;   Delta = softplus(dt W_dt + b_dt)
        out = (selective_scan(x, Delta, -exp(A_log), B, C) + D x) * silu(z) W_out

    The state is the last inputs of the convolution, [B, conv_kernel - 1, expand dim], and h, [B, expand dim, N].

    Args:
        dim: width of x and of the output.
        expand: the inner width is expand * dim.
        state_size: size N of each channel's state.
        conv_kernel: size of the depthwise causal convolution in tokens.
        dt_rank: width of dt; None: dim / 16 rounded up.
        conv_bias: whether the convolution has a bias.
        bias: whether the projections have biases.
        norm_eps: dt, B and C are each divided by the root of their mean square + norm_eps, as in Falcon-Mamba
            (Zuo et al. 2024, arXiv 2410.05355); None: they are not.
        mode, chunk_size: as in `selective_scan`.

    Raises:
        ValueError: for sizes that are not positive.

    Source:
        Gu and Dao 2023, section 3.4, arXiv 2312.00752, https://arxiv.org/abs/2312.00752
    """

    source = "Gu and Dao 2023"
    undecayed = ("A_log", "D", "dt_proj.bias")

    def __init__(
        self,
        dim: int,
        *,
        expand: int = 2,
        state_size: int = 16,
        conv_kernel: int = 4,
        dt_rank: int | None = None,
        conv_bias: bool = True,
        bias: bool = False,
        norm_eps: Positive | None = None,
        mode: str = "chunked",
        chunk_size: int = 32,
    ):
        super().__init__(mode=mode, chunk_size=chunk_size)
        dt_rank = -(-dim // 16) if dt_rank is None else dt_rank
        self.dim, self.inner, self.state_size, self.dt_rank = dim, expand * dim, state_size, dt_rank
        self.norm_eps = norm_eps
        self.in_proj = nn.Linear(dim, 2 * self.inner, bias=bias)
        self.conv1d = nn.Conv1d(self.inner, self.inner, conv_kernel, groups=self.inner, bias=conv_bias)
        self.x_proj = nn.Linear(self.inner, dt_rank + 2 * state_size, bias=False)
        self.dt_proj = WideLinear(dt_rank, self.inner)
        self.A_log = nn.Parameter(torch.empty(self.inner, state_size))
        self.D = nn.Parameter(torch.empty(self.inner))
        self.out_proj = nn.Linear(self.inner, dim, bias=bias)
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Initialize as published: A_n = -n, softplus(b_dt) log-uniform in [0.001, 0.1], D = 1."""
        self.conv1d.reset_parameters()
        nn.init.uniform_(self.dt_proj.weight, -(self.dt_rank**-0.5), self.dt_rank**-0.5)
        fill_step_bias(self.dt_proj.bias)
        n = torch.arange(1, self.state_size + 1, dtype=torch.float32, device=self.A_log.device)
        fill(self.A_log, n.log().expand_as(self.A_log))
        nn.init.ones_(self.D)

    def products(self, keys: float) -> float:
        return 2 * self.inner * self.state_size

    def mix(self, x: Tensor, state: Any, inputs: StateInputs) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        tail, h = (None, None) if state is None else state
        tokens, z = self.in_proj(x).chunk(2, -1)
        tokens, tail = convolved(self.conv1d, tokens, tail, inputs.reset, inputs.valid)
        tokens = F.silu(tokens)
        dt, B, C = self.x_proj(tokens).split([self.dt_rank, self.state_size, self.state_size], -1)
        if self.norm_eps is not None:
            dt, B, C = (F.rms_norm(y, y.shape[-1:], eps=self.norm_eps) for y in (dt, B, C))
        exact = state_dtype(x)
        with torch.autocast(x.device.type, enabled=False):
            delta = self.dt_proj(dt.to(exact))  # wide: its bias is small, and softplus follows
        y, h = selective_scan(
            tokens.mT, delta.mT, -self.A_log.to(exact).exp(), B.mT, C.mT, self.D, z.mT,
            delta_softplus=True, state=h, **self.options(inputs),
        )  # fmt: skip
        return self.out_proj(y.mT), (tail, h)
