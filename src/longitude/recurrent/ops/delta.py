"""The delta rule with decay: a state that forgets, reads what it holds under a key, and writes the difference; in three forms.

    S_t = W_t S_{t-1} + k_t^T (v_t - r_t W_t S_{t-1}),    W_t = diag(w_t),    o_t = q_t S_t

with rows q, k, r [1, K] and v [1, V]. In a chunk all differences D = v - r W S are found at once. The state before it, S_0, gives
each token what it reads of it, and its own tokens add pairs:

    (I + pairs(r, k)) D = V - (r decayed) S_0       pairs: of a token and those before it, a lower triangle without its diagonal
    O = (q decayed) S_0 + pairs(q, k) D

The triangle is solved for V and for r alike, without S_0 (Yang et al. 2024, arXiv 2406.06484, section 3), so that only states go
from chunk to chunk. Decays are products of w between two tokens, as in `decayed`: nothing overflows.
"""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from longitude.recurrent.ops.checks import require_flags, require_mode, require_state, state_dtype
from longitude.recurrent.ops.decayed import decays_by_channel, decays_by_head
from longitude.recurrent.ops.scan import chunk_slices


def delta(
    who: str,
    q: Float[Tensor, "B G L K"],
    r: Float[Tensor, "B G L K"],
    k: Float[Tensor, "B H L K"],
    v: Float[Tensor, "B H L V"],
    log_decay: Float[Tensor, "B H L K|1"],
    *,
    mode: str = "chunked",
    chunk_size: int = 64,
    state: Float[Tensor, "B H K V"] | None = None,
    reset: Bool[Tensor, "B L"] | None = None,
    valid: Bool[Tensor, "B L"] | None = None,
) -> tuple[Float[Tensor, "B H L V"], Float[Tensor, "B H K V"]]:
    """-> outputs in v's dtype, and the state after the last token, float32 or wider: the dtype of all computations here.

    log_decay: log w <= 0. Each of G heads of q and r serves H / G heads of values. reset: True for tokens that begin a document.
    valid: False for padding, which leaves the state unchanged.
    """
    require_mode(who, mode, chunk_size)
    (batch, heads, length, width), groups, key_dim = v.shape, q.shape[1], q.shape[-1]
    require_state(who, state, {"state": (batch, heads, key_dim, width)})
    require_flags(who, batch, length, reset=reset, valid=valid)
    if valid is not None:
        k, log_decay = (x.where(valid[:, None, :, None], 0) for x in (k, log_decay))
    dtype = state_dtype(v)
    with torch.autocast(v.device.type, enabled=False):
        # Heads as [G, R]: R heads of values share what one head of queries computes.
        q, r = (x.to(dtype).unsqueeze(2) for x in (q, r))
        k, v_, log_w = (x.to(dtype).unflatten(1, (groups, -1)) for x in (k, v, log_decay))
        s = v_.new_zeros(batch, heads, key_dim, width) if state is None else state.to(dtype)
        s = s.unflatten(1, (groups, -1))
        reset = None if reset is None else reset[:, None, None]
        if mode == "recurrent" or length == 1:
            out, s = steps(q, r, k, v_, log_w, reset, s)
        else:
            parts = []
            for here, size in chunk_slices(length, length if mode == "parallel" else min(chunk_size, length)):
                reset_here = None if reset is None else reset[..., here]
                part, s = chunks(size, *(x[:, :, :, here] for x in (q, r, k, v_, log_w)), reset=reset_here, state=s)
                parts.append(part)
            out = parts[0] if len(parts) == 1 else torch.cat(parts, 3)
    return out.flatten(1, 2).to(v.dtype), s.flatten(1, 2)


def steps(
    q: Tensor, r: Tensor, k: Tensor, v: Tensor, log_w: Tensor, reset: Tensor | None, state: Tensor
) -> tuple[Tensor, Tensor]:
    """One token after the other: the formula itself."""
    w, out = log_w.exp()[..., None], []
    for t in range(v.shape[3]):
        if reset is not None:
            state = state.masked_fill(reset[..., t, None, None], 0)
        state = w[:, :, :, t] * state
        difference = v[:, :, :, t, None, :] - r[:, :, :, t, None, :] @ state
        state = state + k[:, :, :, t, :, None] * difference
        out.append(q[:, :, :, t, None, :] @ state)
    return torch.cat(out, 3), state


def chunks(
    size: int, q: Tensor, r: Tensor, k: Tensor, v: Tensor, log_w: Tensor, *, reset: Tensor | None, state: Tensor
) -> tuple[Tensor, Tensor]:
    """Tokens of whole chunks: all differences in each, and a state from one to the next."""
    q, r, k, v, log_w = (x.unflatten(3, (-1, size)) for x in (q, r, k, v, log_w))  # [B, G, R, n, C, dim]
    reset = None if reset is None else reset.unflatten(3, (-1, size))
    if log_w.shape[-1] == 1:
        reading, writing = (decays_by_head(x, k, log_w, reset) for x in (r, q))
    else:
        reading, writing = (decays_by_channel(x, k, log_w, None, reset) for x in (r, q))
    known = torch.cat([v, reading.queries.expand(*v.shape[:-1], -1)], -1)
    # With ones on the diagonal, which the solver does not read.
    solved = torch.linalg.solve_triangular(reading.pairs.tril(-1), known, upper=False, unitriangular=True)
    of_values, of_state = solved.split([v.shape[-1], q.shape[-1]], -1)
    states, differences = [], []
    for n in range(v.shape[3]):
        states.append(state)
        differences.append(of_values[:, :, :, n] - of_state[:, :, :, n] @ state)
        state = writing.decay[:, :, :, n] * state + writing.keys[:, :, :, n].mT @ differences[-1]
    out = writing.queries @ torch.stack(states, 3) + writing.pairs @ torch.stack(differences, 3)
    return out.flatten(3, 4), state
