"""Retention (RetNet): a matrix state that each head decays at a fixed rate."""

from __future__ import annotations

from typing import Any, Unpack

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional as F

from longitude.attention.heads import head_sizes, join_heads, split_heads
from longitude.attention.mixer import register_mixer
from longitude.attention.state_mixer import StateInputs
from longitude.errors import Positive, UsageError
from longitude.positions.coordinates import single_axis, wide
from longitude.positions.rotation import RotaryTable, apply_rotary, table_of
from longitude.recurrent.base import RecurrentMixer
from longitude.recurrent.ops.checks import Form, Running, require_tokens, state_dtype
from longitude.recurrent.ops.decayed import decayed


def retention(
    q: Float[Tensor, "B H L K"],
    k: Float[Tensor, "B H L K"],
    v: Float[Tensor, "B H L V"],
    *,
    state: Float[Tensor, "B H K V"] | None = None,
    **run: Unpack[Running],
) -> tuple[Float[Tensor, "B H L V"], Float[Tensor, "B H K V"]]:
    """Retention: linear attention with a fixed decay per head, gamma_h = 1 - 2^(-5-h), h = 0 .. H-1.

        S_n = gamma_h S_{n-1} + k_n^T v_n,    o_n = q_n S_n = sum over m <= n of gamma_h^(n-m) (q_n . k_m) v_m

    Nothing is scaled, rotated or normalized here; the layer does that. `ssd` has other decays.

    Args:
        q: [B, H, L, K].
        k: [B, H, L, K].
        v: [B, H, L, V].
        state: the state returned by an earlier call, [B, H, K, V]; None at the beginning.
        run: mode: "parallel" computes all pairs at once, "chunked" pairs within chunk_size tokens (64) and a state between
            chunks, "recurrent" token by token; the results are equal. reset: True for tokens that begin a document: the state
            before them counts as zero, [B, L]. valid: False for padding, which leaves the state unchanged, [B, L].

    Returns:
        The outputs [B, H, L, V] in v's dtype, and the state after the last token [B, H, K, V], float32 or wider.

    Raises:
        ValueError: for shapes that do not fit, an unknown mode, or a chunk without tokens.

    Source:
        Sun et al. 2023, equations 5 to 7, arXiv 2307.08621, https://arxiv.org/abs/2307.08621
    """
    require_tokens("retention", q=(q, "B H L K"), k=(k, "B H L K"), v=(v, "B H L V"))
    log_decay = log_gamma(q.shape[1], q.device)[None, :, None, None]
    return decayed("retention", q, k, v, log_decay, state=state, **run)


def log_gamma(num_heads: int, device: torch.device) -> Float[Tensor, " H"]:
    """Logarithms of the published decays, log(1 - 2^(-5-h))."""
    return torch.log1p(-(2.0 ** -(5.0 + torch.arange(num_heads, device=device, dtype=wide(device)))))


@register_mixer("retention")
class Retention(RecurrentMixer):
    """Multi-scale retention: out = (swish(x W_G) * norm(retention(q, k, v))) W_O.

    Queries and keys are rotated by their position n, as in the authors' code: interleaved pairs i, angles
    n 10000^(-i/(pairs - 1)), no magnitudes; keys are scaled by head_dim^-1/2. Each head's output is divided by its root mean
    square, without weights. gamma_h = 1 - 2^(-5-h).

    Args:
        dim: width of x and of the output.
        num_heads: heads.
        head_dim: width of a head of queries and keys, even; None: dim / num_heads.
        expand_v: a head of values has expand_v * head_dim dimensions.
        norm_eps: epsilon of the norm.
        bias: whether the projections have biases.
        mode, chunk_size: as in `retention`.

    Raises:
        ValueError: for sizes that do not fit.

    Source:
        Sun et al. 2023, section 2.4, arXiv 2307.08621, https://arxiv.org/abs/2307.08621
    """

    source = "Sun et al. 2023"
    any_length = True

    def __init__(
        self,
        dim: int,
        num_heads: int,
        *,
        head_dim: int | None = None,
        expand_v: int = 2,
        norm_eps: Positive = 1e-6,
        bias: bool = False,
        **form: Unpack[Form],
    ):
        super().__init__(**form)
        _, head_dim = head_sizes("Retention", dim, num_heads, head_dim=head_dim)
        if head_dim % 2:
            raise UsageError("Retention", "an even head_dim, whose pairs are rotated", head_dim)
        self.dim, self.num_heads, self.head_dim, self.value_dim = dim, num_heads, head_dim, expand_v * head_dim
        self.norm_eps = norm_eps
        self.q_proj, self.k_proj = (nn.Linear(dim, num_heads * head_dim, bias=bias) for _ in range(2))
        self.v_proj, self.g_proj = (nn.Linear(dim, num_heads * self.value_dim, bias=bias) for _ in range(2))
        self.o_proj = nn.Linear(num_heads * self.value_dim, dim, bias=bias)

    def products(self, keys: float) -> float:
        return 2 * self.num_heads * self.head_dim * self.value_dim

    def mix(self, x: Tensor, state: Any, inputs: StateInputs) -> tuple[Tensor, tuple[Tensor]]:
        q, k, v = (split_heads(project(x), self.num_heads) for project in (self.q_proj, self.k_proj, self.v_proj))
        table = rotary_table(single_axis("Retention", inputs.positions), self.head_dim, state_dtype(x))
        q, k = apply_rotary(q, table, "interleaved"), apply_rotary(k * self.head_dim**-0.5, table, "interleaved")
        out, after = retention(q, k, v, state=None if state is None else state[0], **self.options(inputs))
        out = F.rms_norm(out.to(state_dtype(out)), (self.value_dim,), eps=self.norm_eps).to(out.dtype)
        return self.o_proj(F.silu(self.g_proj(x)) * join_heads(out)), (after,)


def rotary_table(positions: Int[Tensor, "*B L"], head_dim: int, dtype: torch.dtype) -> RotaryTable:
    """Angles n 10000^(-linspace(0, 1, pairs)): unlike RoPE's, the slowest pair reaches 1/10000 itself."""
    exact = wide(positions.device)
    slow = torch.linspace(0, 1, head_dim // 2, dtype=exact, device=positions.device)
    angles = positions.to(exact)[..., None] * 10_000.0**-slow
    angles = angles[:, None] if angles.dim() == 3 else angles
    return table_of(angles, dtype)
