"""Position as a bias of the scores, given by a formula of the offset or of both positions."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from longitude.positions.base import Columns, Encoding, OffsetBias, PairBias, Term, positive, register, sizes, wide


def alibi_slopes(num_heads: int) -> list[float]:
    """The published slopes: 2^(-8h/H), h = 1 .. H, where H is a power of two.

    Otherwise those of the power of two below, followed by every second slope of the power of two above; so not sorted."""

    def geometric(n: int) -> list[float]:
        return [2.0 ** (-8 * h / n) for h in range(1, n + 1)]

    sizes("ALiBi", num_heads=num_heads)
    power = 1 << (num_heads.bit_length() - 1)
    return geometric(power) + geometric(2 * power)[::2][: num_heads - power]


@register("alibi")
class ALiBi(Encoding):
    """score_h(i, j) += -m_h |i - j|: each head prefers the near past, at its own slope  (Press et al. 2022).

    The bias is added after the 1/sqrt(head_dim) scaling and is not a mask: the future needs one. For keys in the future it
    is symmetric, for encoders. slopes: one positive number per head instead of the published ones.
    """

    shared = True

    def __init__(self, num_heads: int, slopes: Sequence[float] | None = None):
        super().__init__()
        sizes("ALiBi", num_heads=num_heads)
        self.num_heads = num_heads
        self.slopes = alibi_slopes(num_heads) if slopes is None else [float(m) for m in slopes]
        if len(self.slopes) != num_heads:
            raise ValueError(f"ALiBi: expected num_heads={num_heads} slopes, one per head, got {len(self.slopes)}")
        positive("ALiBi", **{f"slopes[{h}]": m for h, m in enumerate(self.slopes)})

    def terms(self, context: Columns) -> tuple[Term, ...]:
        def at(offset: Tensor) -> Tensor:
            slopes = torch.tensor(self.slopes, dtype=wide(offset.device), device=offset.device)
            return -slopes.view(-1, *[1] * offset.dim()) * offset.abs()

        return (OffsetBias(at),)


@register("fire")
class Fire(Encoding):
    """score_h(i, j) += mlp( psi(i - j) / (psi(max(i, L)) + eps) )_h,   psi(x) = ln(|c x| + 1)  (Li et al. 2024).

    The argument of the mlp stays in [0, 1] however long the sequence (progressive interpolation): for i below the threshold
    L the denominator is constant, beyond it the offset is measured against the query's own position, which must therefore be
    absolute. c and the multiplier of L are learned; mlp is Linear(1, width), ReLU, Linear(width, num_heads).
    """

    relative = False
    learned = True

    def __init__(self, num_heads: int, width: int = 32, c: float = 0.1, threshold: float = 512.0, eps: float = 1e-6):
        super().__init__()
        sizes("FIRE", num_heads=num_heads, width=width)
        positive("FIRE", c=c, threshold=threshold, eps=eps)
        self.num_heads, self.initial_c, self.threshold, self.eps = num_heads, c, threshold, eps
        self.mlp = nn.Sequential(nn.Linear(1, width), nn.ReLU(), nn.Linear(width, num_heads))
        self.c, self.multiplier = nn.Parameter(torch.empty(())), nn.Parameter(torch.empty(()))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.constant_(self.c, self.initial_c)
        nn.init.ones_(self.multiplier)
        for layer in self.mlp:
            if isinstance(layer, nn.Linear):
                layer.reset_parameters()

    def terms(self, context: Columns) -> tuple[Term, ...]:
        dtype = torch.promote_types(self.c.dtype, torch.float32)  # never the model's bfloat16
        c, multiplier, w1, b1, w2, b2 = (p.to(dtype) for p in (self.c, self.multiplier, *self.mlp.parameters()))

        def psi(x: Tensor) -> Tensor:
            return torch.log1p((c * x).abs())

        def at(i: Tensor, j: Tensor) -> Tensor:
            with torch.autocast(i.device.type, enabled=False):
                floor = (multiplier * self.threshold).abs()
                share = psi((i - j).to(dtype)) / (psi(torch.maximum(i.to(dtype), floor)) + self.eps)
                hidden = F.linear(share[..., None], w1, b1).relu()
                return F.linear(hidden, w2, b2).movedim(-1, -3)

        return (PairBias(at),)
