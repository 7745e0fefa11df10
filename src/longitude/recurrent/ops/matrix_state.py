"""Recurrences with a matrix state per head, in three modes: common code of `decayed` and `delta`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from longitude.native.not_finite import all_finite, nan_in_its_document
from longitude.native.tensors import in_memory
from longitude.recurrent.ops.checks import require_running, require_state, state_dtype
from longitude.recurrent.ops.scan import chunk_slices

Result = tuple[Float[Tensor, "B H L V"], Float[Tensor, "B H K V"]]


class Formula(Protocol):
    """Tokens [B, G, R, L, ...] in the order of `run`'s queries, keys, v, log_decay -> outputs [B, G, R, L, V], and the state."""

    def steps(self, *tokens: Tensor, reset: Tensor | None, state: Tensor) -> tuple[Tensor, Tensor]:
        """Run token by token: the formula itself."""
        ...

    def chunks(self, size: int, *tokens: Tensor, reset: Tensor | None, state: Tensor) -> tuple[Tensor, Tensor]:
        """Run in whole chunks of `size` tokens: all pairs within a chunk, and a state between chunks."""
        ...


def run(
    who: str,
    formula: Formula,
    queries: Sequence[Float[Tensor, "B G L K"]],
    keys: Sequence[Float[Tensor, "B G|H L K"]],
    v: Float[Tensor, "B H L V"],
    log_decay: Float[Tensor, "B|1 H L|1 K|1"],
    *,
    mode: str = "chunked",
    chunk_size: int = 64,
    state: Float[Tensor, "B H K V"] | None = None,
    reset: Bool[Tensor, "B L"] | None = None,
    valid: Bool[Tensor, "B L"] | None = None,
    finite: bool = False,
    loop: Callable[..., Result] | None = None,
) -> Result:
    """Return outputs in v's dtype, and the state after the last token, float32 or wider: the dtype of all computations here.

    queries read the state, keys write into it; each of their G heads serves H / G heads of values. log_decay: log w <= 0, by head
    (last dimension 1) or by channel of the keys. reset: True for tokens that begin a document. valid: False for padding, which
    leaves the state unchanged. finite: whether the caller has removed NaN and infinity. loop: a function that computes the
    result of queries, keys, v, log_decay and state in C, with zeros as padding.
    """
    (batch, heads, length, width), groups, key_dim = v.shape, queries[0].shape[1], queries[0].shape[-1]
    require_state(who, state, {"state": (batch, heads, key_dim, width)})
    require_running(who, batch, length, mode, chunk_size, reset, valid)
    if valid is not None:
        log_decay = log_decay.where(valid[:, None, :, None], 0)
    sequences, states = [*queries, *keys, v], [] if state is None else [state]
    if log_decay.shape[2] == length and len(log_decay) == batch:  # else one decay for all tokens
        sequences.append(log_decay)
    sequences, states, back = nan_in_its_document(2, sequences, states, None if finite else reset, valid)
    n, m = len(queries), len(queries) + len(keys)
    queries, keys, (v, *decays) = sequences[:n], sequences[n:m], sequences[m:]
    log_decay = decays[0] if decays else log_decay
    state = states[0] if states else None
    if loop is not None:
        out, after = loop(queries, keys, v, log_decay, state)
        out, (after,) = back(out, [after])
        return out, after
    dtype = state_dtype(v)
    with torch.autocast(v.device.type, enabled=False):
        # Heads as [G, R]: R heads of values share what one head of queries computes.
        tokens = [x.to(dtype).unflatten(1, (groups, -1)) for x in (*queries, *keys, v, log_decay)]
        s = v.new_zeros(batch, heads, key_dim, width, dtype=dtype) if state is None else state.to(dtype)
        s = s.unflatten(1, (groups, -1))
        reset = None if reset is None else reset[:, None, None]
        size = 1 if mode == "recurrent" else length if mode == "parallel" else min(chunk_size, length)
        out, after = (
            _in_chunks(formula, size, tokens, reset, s) if size > 1 else formula.steps(*tokens, reset=reset, state=s)
        )
        if size > 1 and reset is not None and in_memory(out) and not all_finite(out, after):
            # Sums that overflow in a document make others NaN: chunks end a document by a factor of 0, and 0 * inf is NaN.
            out, after = formula.steps(*tokens, reset=reset, state=s)
    out, (after,) = back(out.flatten(1, 2).to(v.dtype), [after.flatten(1, 2)])
    return out, after


def _in_chunks(
    formula: Formula, most: int, tokens: Sequence[Tensor], reset: Tensor | None, state: Tensor
) -> tuple[Tensor, Tensor]:
    parts = []
    for here, size in chunk_slices(tokens[0].shape[3], most):
        part = [x if x.shape[3] == 1 else x[:, :, :, here] for x in tokens]  # one decay for all tokens
        out, state = formula.chunks(size, *part, reset=None if reset is None else reset[..., here], state=state)
        parts.append(out)
    return parts[0] if len(parts) == 1 else torch.cat(parts, 3), state
