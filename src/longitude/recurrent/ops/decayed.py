"""The recurrence of retention, RWKV-6, Mamba-2 and Performer: a matrix state with decay, in three forms.

    S_t = diag(w_t) S_{t-1} + k_t^T v_t,    o_t = q_t S_t,    or  o_t = q_t (S_{t-1} + diag(u) k_t^T v_t)  with a bonus u

A chunk of tokens reads the state before it and what its own tokens add, as pairs (Sun et al. 2023, section 2.3; Dao and Gu
2024, section 6; Yang et al. 2024, section 4). Every decay is a product of the w between two tokens, never a quotient of longer
products, so strong decays fall to zero and nothing overflows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional as F

from longitude.recurrent.ops.checks import state_dtype
from longitude.recurrent.ops.matrix_state import Result, run


class Chunks(NamedTuple):
    """Contributions of the tokens of n chunks to each other and to the state, [B, G, R, n, ...]."""

    pairs: Tensor  # [.., C, C] the weight of one token's value in another token's output
    queries: Tensor  # [.., C, K] decayed since the chunk began: they read the state before it
    keys: Tensor  # [.., C, K] decayed until the chunk ends: they are in the state after it
    decay: Tensor  # [.., K | 1, 1] of the state, over the whole chunk


def decayed(
    who: str,
    q: Float[Tensor, "B G L K"],
    k: Float[Tensor, "B G L K"],
    v: Float[Tensor, "B H L V"],
    log_decay: Float[Tensor, "B|1 H L|1 K|1"],
    *,
    bonus: Float[Tensor, "H K"] | None = None,
    **options: Any,
) -> Result:
    """Return outputs and the state after the last token; see `matrix_state.run` for the arguments."""
    u = None if bonus is None else bonus.to(state_dtype(v)).unflatten(0, (q.shape[1], -1))[..., None, :]
    return run(who, _Decayed(u), [q], [k], v, log_decay, **options)


@dataclass(frozen=True)
class _Decayed:
    """The formula, with a bonus u [G, R, 1, K] or without."""

    u: Tensor | None

    def steps(self, *tokens: Tensor, reset: Tensor | None, state: Tensor) -> tuple[Tensor, Tensor]:
        q, k, v, log_w = tokens
        w, out = log_w.exp().expand(*log_w.shape[:3], q.shape[3], -1)[..., None], []
        for t in range(q.shape[3]):
            if reset is not None:
                state = state.masked_fill(reset[..., t, None, None], 0)
            new = k[:, :, :, t, :, None] * v[:, :, :, t, None, :]
            before, state = state, torch.addcmul(new, w[:, :, :, t], state)
            read = state if self.u is None else before + self.u.mT * new
            out.append(q[:, :, :, t, None, :] @ read)
        return torch.cat(out, 3), state

    def chunks(self, size: int, *tokens: Tensor, reset: Tensor | None, state: Tensor) -> tuple[Tensor, Tensor]:
        *qkv, log_w = tokens
        # [B, G, R, n, C, dim]; contiguous, because every product would copy them otherwise
        q, k, v = (x.contiguous().unflatten(3, (-1, size)) for x in qkv)
        log_w = log_w[:, :, :, None] if log_w.shape[3] == 1 else log_w.unflatten(3, (-1, size))
        reset = None if reset is None else reset.unflatten(3, (-1, size))
        by_head = self.u is None and log_w.shape[-1] == 1
        chunk = decays_by_head(q, k, log_w, reset) if by_head else decays_by_channel(q, k, log_w, self.u, reset)
        added = chunk.keys.mT @ v
        decays = chunk.decay.expand(*chunk.decay.shape[:3], added.shape[3], -1, -1)
        states = []
        for decay, new in zip(decays.unbind(3), added.unbind(3), strict=True):
            states.append(state)
            state = torch.addcmul(new, decay, state)
        out = (chunk.queries @ torch.stack(states, 3)).add_(chunk.pairs @ v)
        return out.flatten(3, 4), state


def decays_by_head(q: Tensor, k: Tensor, log_w: Tensor, reset: Tensor | None) -> Chunks:
    """Chunks for a decay per head: scores are multiplied by exp of the sum of log w between the tokens (Dao and Gu 2024)."""
    size = q.shape[-2]
    log_w = log_w.squeeze(-1).expand(*log_w.shape[:-2], size)
    # Each sum from its own terms: a difference of two long sums would lose the digits of a short one. In place if no
    # backward needs the old values: passes over memory take most of the time.
    decay = log_w[..., :, None].expand(*log_w.shape, size).tril(-1).cumsum_(-2).exp_()  # over s+1 .. t
    start = log_w.cumsum(-1).exp()
    if reset is not None:
        document = reset.cumsum(-1)  # in the chunk; 0: it began before the chunk
        decay = decay.where(document[..., :, None] == document[..., None, :], 0)
        start = start.where(document == 0, 0)
    pairs = (q @ k.mT).tril_() * decay
    return Chunks(pairs, q * start[..., None], k * decay[..., -1, :, None], start[..., -1, None, None])


def decays_by_channel(q: Tensor, k: Tensor, log_w: Tensor, u: Tensor | None, reset: Tensor | None) -> Chunks:
    """Chunks for a decay per channel, which is inside the sum over channels of each score."""
    w = channel_decays(log_w, q, reset)
    if u is None:
        return by_halves(q * w, k, w, (q * k).sum(-1))
    return by_halves(before_decay(q, reset), k, w, (u[..., None, :, :] * q * k).sum(-1))


def channel_decays(log_w: Tensor, q: Tensor, reset: Tensor | None) -> Tensor:
    """Decays exp(log_w) of each channel [.., C, K], 0 at a document's first token, which drops the state."""
    w = log_w.expand(*log_w.shape[:-2], *q.shape[-2:]).contiguous().exp()
    return w if reset is None else w.masked_fill(reset[..., None], 0)


def before_decay(q: Tensor, reset: Tensor | None) -> Tensor:
    """Queries that read the state before their own token decays it."""
    return q if reset is None else q.masked_fill(reset[..., None], 0)


def by_halves(q: Tensor, k: Tensor, w: Tensor, diagonal: Tensor) -> Chunks:
    """Chunks built by merging adjacent blocks, from single tokens up.

        pairs = [[pairs_1, 0], [queries_2 keys_1^T, pairs_2]]

    with queries_2 decayed since the start of the second block and keys_1 until the end of the first. diagonal [.., C]: score of a
    token with itself.
    """
    size = q.shape[-2]
    blocks = 1 << (size - 1).bit_length()
    if blocks > size:
        q, k = (F.pad(x, (0, 0, 0, blocks - size)) for x in (q, k))
        w, diagonal = F.pad(w, (0, 0, 0, blocks - size), value=1.0), F.pad(diagonal, (0, blocks - size))
    pairs = diagonal[..., None, None]  # [.., blocks, size of a block, the same]
    q, k = q.unsqueeze(-2), k.unsqueeze(-2)  # [.., blocks, size of a block, K]
    in_place = not torch.is_grad_enabled()  # half the memory traffic, if no backward needs the old values
    if in_place:
        q, k = q.clone(), k.clone()
    while blocks > 1:
        (q_1, q_2), (k_1, k_2) = (x.unflatten(-3, (-1, 2)).unbind(-3) for x in (q, k))
        first, second = w.unflatten(-2, (-1, 2)).unbind(-2)
        upper, lower = pairs.unflatten(-3, (-1, 2)).unbind(-3)
        pairs = torch.cat([torch.cat([upper, torch.zeros_like(upper)], -1), torch.cat([q_2 @ k_1.mT, lower], -1)], -2)
        first, second = first[..., None, :], second[..., None, :]
        if in_place:
            q_2 *= first
            k_1 *= second
            q, k = (x.unflatten(-3, (-1, 2)).flatten(-3, -2) for x in (q, k))
        else:
            q, k = torch.cat([q_1, q_2 * first], -2), torch.cat([k_1 * second, k_2], -2)
        w, blocks = (first * second).squeeze(-2), blocks // 2
    pairs, q, k = pairs.squeeze(-3), q.squeeze(-3), k.squeeze(-3)
    return Chunks(pairs[..., :size, :size], q[..., :size, :], k[..., :size, :], w.mT)
