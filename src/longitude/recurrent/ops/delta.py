"""The delta rule with decay: a state that decays, is read with one key and updated with others; in three forms.

    S_t = W_t S_{t-1} + k_t^T v_t - b_t^T x_t,    W_t = diag(w_t),    o_t = q_t S_t
    x_t = r_t W_t S_{t-1},  or r_t S_{t-1} if the state is read before it decays

with rows q, k, r, b [1, K] and v [1, V]. If b = k, a single difference is written: k^T (v - x).
In a chunk all reads X are solved together, from the state S_0 before the chunk and from pairs of its tokens:

    (I + pairs(r, b)) X = (r decayed) S_0 + pairs(r, k) V       pairs: of a token and earlier tokens, without itself
    O = (q decayed) S_0 + pairs(q, k) V - pairs(q, b) X

The triangular system is solved for the coefficients of S_0 and of V, without S_0 (Yang et al. 2024, arXiv 2406.06484,
section 3), so that only states pass from chunk to chunk. Decays are products of w between two tokens, as in `decayed`:
nothing overflows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from longitude.recurrent.ops.c_loops import REPLAYED, Loop, usable
from longitude.recurrent.ops.checks import state_dtype
from longitude.recurrent.ops.decayed import before_decay, by_halves, channel_decays, decays_by_channel, decays_by_head
from longitude.recurrent.ops.matrix_state import Result, run


def delta(
    who: str,
    q: Float[Tensor, "B G L K"],
    r: Float[Tensor, "B G L K"],
    k: Float[Tensor, "B H L K"],
    v: Float[Tensor, "B H L V"],
    log_decay: Float[Tensor, "B H L K|1"],
    *,
    b: Float[Tensor, "B H L K"] | None = None,
    early: bool = False,
    **options: Any,
) -> Result:
    """Return outputs and the state after the last token; see `matrix_state.run` for the arguments.

    b: None: b = k. early: whether r reads the state before it decays; then G = H.
    """
    dtype = state_dtype(v)
    in_c = options.get("mode", "chunked") == "chunked" and early == (b is not None)
    in_c = in_c and usable("delta.c", v if v.dtype == dtype else v.new_empty(0, dtype=dtype))

    def loop(
        queries: Sequence[Tensor], keys: Sequence[Tensor], v: Tensor, log_decay: Tensor, state: Tensor | None
    ) -> Result:
        (batch, heads, length, width), reset = v.shape, options.get("reset")
        first = v.new_zeros(batch, heads, k.shape[-1], width, dtype=dtype) if state is None else state.to(dtype)
        keep = None if reset is None else reset.logical_not().to(torch.uint8)
        written, removed = keys[0], None if b is None else keys[1]
        tokens = (None if x is None else x.to(dtype) for x in (*queries, written, removed, v, log_decay))
        sizes = {"early": b is not None, "chunk": min(REPLAYED, length)}
        out, last = Loop.apply("delta.c", sizes, *tokens, keep, first)
        return out.to(v.dtype), last

    keys = [k] if b is None else [k, b]
    return run(who, _Delta(early), [q, r], keys, v, log_decay, loop=loop if in_c else None, **options)


@dataclass(frozen=True)
class _Delta:
    early: bool

    def steps(self, *tokens: Tensor, reset: Tensor | None, state: Tensor) -> tuple[Tensor, Tensor]:
        q, r, k, *b, v, log_w = tokens
        w, out = log_w.exp()[..., None], []
        for t in range(v.shape[3]):
            if reset is not None:
                state = state.masked_fill(reset[..., t, None, None], 0)
            before, state = state, w[:, :, :, t] * state
            read = r[:, :, :, t, None, :] @ (before if self.early else state)
            value = v[:, :, :, t, None, :]
            if b:
                state = state + k[:, :, :, t, :, None] * value - b[0][:, :, :, t, :, None] * read
            else:
                state = state + k[:, :, :, t, :, None] * (value - read)
            out.append(q[:, :, :, t, None, :] @ state)
        return torch.cat(out, 3), state

    def chunks(self, size: int, *tokens: Tensor, reset: Tensor | None, state: Tensor) -> tuple[Tensor, Tensor]:
        q, r, k, *b, v, log_w = (x.unflatten(3, (-1, size)) for x in tokens)  # [B, G, R, n, C, dim]
        reset = None if reset is None else reset.unflatten(3, (-1, size))

        # Rows are r and q; columns k, and b where it differs.
        reads, writes = torch.stack([r, q])[:, None], torch.stack([k, *b])
        if self.early:
            w = channel_decays(log_w, q, reset)
            ready = torch.stack([before_decay(r, reset), q * w])[:, None]
            chunk = by_halves(ready, writes, w, (reads * writes).sum(-1))
        elif log_w.shape[-1] == 1:
            chunk = decays_by_head(reads, writes, log_w, reset)
        else:
            chunk = decays_by_channel(reads, writes, log_w, None, reset)
        (of_r, of_q), written, removed = chunk.pairs, chunk.keys[0], chunk.keys[-1]
        of_state, of_q_state = chunk.queries[:, 0].expand(2, *v.shape[:-1], -1)
        of_values = of_r[0].tril(-1) @ v if b else -v  # without b, the system is solved for x - v
        # With ones on the diagonal, which the solver does not read.
        known = torch.cat([of_values, of_state], -1)
        solved = torch.linalg.solve_triangular(of_r[-1].tril(-1), known, upper=False, unitriangular=True)
        of_values, of_state = solved.split([v.shape[-1], q.shape[-1]], -1)
        added = written.mT @ v if b else None
        states, read = [], []
        for n in range(v.shape[3]):
            states.append(state)
            read.append(of_values[:, :, :, n] + of_state[:, :, :, n] @ state)
            state = chunk.decay[:, :, :, n] * state - removed[:, :, :, n].mT @ read[-1]
            state = state if added is None else state + added[:, :, :, n]
        out = of_q_state @ torch.stack(states, 3) - of_q[-1] @ torch.stack(read, 3)
        out = out + of_q[0] @ v if b else out
        return out.flatten(3, 4), state
