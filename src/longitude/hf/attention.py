"""The attention function of attn_implementation="longitude"."""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial, wraps
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from longitude.attention.masks import AllOf, Causal, Mask, NoMask, Pairs, Window
from longitude.attention.operation import answer, choose_once, requests, run_parts
from longitude.attention.request import Request
from longitude.errors import UsageError
from longitude.hf.layer import CALL, LayerCall, encoding_of
from longitude.hf.masks import StockMask, dense_mask, with_packed
from longitude.native.derivatives import in_forward_mode, tracing, transforms_active
from longitude.positions.terms import PairBias

REFUSED = {
    "head_mask": "it mutes heads",
    "sinks": "each query has its own",
    "block_indices": "it chooses keys",
    "read_index": "the keys are in pages",
    "block_table": "the keys are in pages",
}
"""Arguments by which a model changes its attention and that are not supported here. Any other that is not in the signature does
not concern attention: models pass on all they were called with, such as the labels of a loss."""

ROWS = 128
"""Rows of a block of `position_bias`."""


def stock_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    s_aux: Tensor | None = None,
    softcap: float | None = None,
    position_bias: Tensor | None = None,
    indices: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """The attention function of transformers' interface.

    Args:
        module: the model's attention layer.
        query: [B, H, L, D]; q, k and v as the layer computed them: already rotated, unless set_positions replaced the rotation.
        key: [B, Hkv, Lk, D].
        value: [B, Hkv, Lk, Dv].
        attention_mask: a StockMask, a tensor [B, 1, L, Lk] as `dense_mask` reads it, or None.
        dropout: dropout probability of the weights.
        scaling: factor of the scores; default: D**-0.5.
        sliding_window: number of keys visible to a query, itself included.
        s_aux: learned sinks, a logit for each head of queries [H].
        softcap: cap of the products, as in `lg.attend`.
        position_bias: added to the scores, [B or 1, H, L, Lk].
        indices: the keys that an indexer chose for each query, [B, L, n]; keys that the mask hides stay hidden.
        **kwargs: other arguments of the layer's call.

    Returns:
        [B, L, H, Dv] and, if wanted, the weights [B, H, L, Lk].

    Raises:
        ValueError: a mask or an argument that is not supported.
    """
    call: LayerCall | None = kwargs.pop(CALL, None)
    if call is None and encoding_of(module) is not None:
        raise ValueError(
            f"set_positions: {type(module).__name__} does not pass its arguments to attention, so the encoding would be lost"
        )
    causal = kwargs.get("is_causal")
    mask_of_call = with_packed(
        stock_mask_of(module, attention_mask, query, key.shape[2], causal), kwargs, len(query), query.shape[2]
    )
    for name, reason in REFUSED.items():
        if kwargs.get(name) is not None:
            raise ValueError(
                f"attn_implementation='longitude' does not support {name}: {reason}; use 'eager' or 'sdpa'"
            )
    window = None if mask_of_call.dense else sliding_window
    mask = windowed(mask_of_call.mask, window)
    key, value = key[:, :, : mask_of_call.keys], value[:, :, : mask_of_call.keys]
    weights = kwargs.get("output_attentions")
    if weights is None:
        weights = bool(getattr(getattr(module, "config", None), "output_attentions", False))
    require_shapes(query, s_aux, indices)
    if indices is not None and indices.shape[-1] < key.shape[2]:
        mask = AllOf((*mask.parts(), chosen_keys(indices, key.shape[2])))
    if call is not None:
        if position_bias is not None:
            raise ValueError(
                f"set_positions: {type(module).__name__} adds its own position_bias to the scores; expected a layer without it, "
                "or no set_positions"
            )
        options = scaling, dropout, weights, s_aux, softcap
        out, weights = call.encoding(partial(call.attend, query, key, value, mask, *options))
        return out.transpose(1, 2).contiguous(), weights

    plain = s_aux is None and position_bias is None and indices is None and not weights and not dropout
    if plain and mask_of_call is attention_mask and query.shape[2] == 1 and by_shapes(query, key, value):
        reads = mask_of_call.mask, window, scaling, softcap
        r = mask_of_call.step.request(request_of, query, key, value, *reads)
        out, _ = answer(choose_once(r, "auto"), r)
        return out.transpose(1, 2).contiguous(), None

    options = {"mask": mask, "scale": scaling, "dropout": dropout, "return_weights": weights}
    (part,) = requests(query, key, value, **options, sinks=s_aux, softcap=softcap)
    out, weights = run_parts([replace(part, request=with_bias(part.request, position_bias))])
    return out.transpose(1, 2).contiguous(), weights


def by_shapes(*qkv: Tensor) -> bool:
    """Whether layers of one shape may share a choice: no gradients, transforms, tracers or autocast."""
    if torch.is_grad_enabled() or tracing() or transforms_active() or in_forward_mode():
        return False
    return all(type(x) is Tensor for x in qkv) and not torch.is_autocast_enabled(qkv[0].device.type)


def request_of(
    q: Tensor, k: Tensor, v: Tensor, mask: Mask, window: int | None, scale: float | None, softcap: float | None
) -> Request:
    """The request of a layer without terms of its own. window: see stock_attention's sliding_window; None: none."""
    (part,) = requests(q, k, v, mask=windowed(mask, window), scale=scale, softcap=softcap)
    return part.request


def windowed(mask: Mask, window: int | None) -> Mask:
    return mask if window is None else AllOf((*mask.parts(), Window(window)))


def require_shapes(query: Tensor, s_aux: Tensor | None, indices: Tensor | None) -> None:
    """UsageError unless s_aux is [H] and indices are [B, L, n]: models may mean other things by them."""
    batch, heads, length = query.shape[:3]
    if s_aux is not None and s_aux.shape != (heads,):
        raise UsageError("s_aux", f"a logit for each head of queries, [{heads}]", list(s_aux.shape))
    if indices is not None and (indices.dim() != 3 or indices.shape[:2] != (batch, length)):
        raise UsageError("indices", f"keys of each query, [{batch}, {length}, n]", list(indices.shape))


def chosen_keys(indices: Tensor, keys: int) -> Mask:
    """The mask of the keys that an indexer chose, [B, L, n]."""
    chosen = torch.zeros(*indices.shape[:2], keys, dtype=torch.bool, device=indices.device)
    return Pairs(chosen.scatter(-1, indices.long(), True)[:, None], keys - indices.shape[1], 0)


def with_bias(r: Request, bias: Tensor | None) -> Request:
    """The request with a bias [B or 1, H, Lq, Lk or more] added to its scores; the bias has gradients."""
    if bias is None:
        return r
    if (
        bias.dim() != 4
        or bias.shape[0] not in (1, len(r.q))
        or bias.shape[1:3] != r.q.shape[1:3]
        or bias.shape[3] < r.length
    ):
        raise UsageError("position_bias", f"[{len(r.q)}, {r.heads}, {r.rows}, {r.length}]", list(bias.shape))
    size = r.rows if torch.compiler.is_compiling() else ROWS
    blocks = bias.split(size, 2)  # so that backward makes gradients of a few rows, not of all for each part of the call

    def at(rows: Tensor, columns: Tensor) -> Tensor:
        rows, columns, batch = rows[..., 0], columns[0], None
        if len(bias) > 1:
            batch, rows = rows[:, 0] // r.rows, rows[0] % r.rows
        first, last = (0, 0) if len(blocks) == 1 else (int(rows[0]) // size, int(rows[-1]) // size)
        values = blocks[first] if first == last else torch.cat(blocks[first : last + 1], 2)
        values = at_places(at_places(values, 2, rows - first * size), 3, columns)
        return values[0] if batch is None else values.index_select(0, batch)

    # No other term reads positions here, so they can be indices of the bias: rows of all sequences, and columns.
    numbers = torch.arange(len(bias) * r.rows, device=bias.device).view(len(bias), -1)
    places = {"q_positions": numbers[0] if len(bias) == 1 else numbers, "k_positions": 0}
    learned = (*r.learned, bias) if torch.is_grad_enabled() and bias.requires_grad else r.learned
    return replace(r, terms=(*r.terms, PairBias(at, numbers=1)), learned=learned, **places)


def at_places(x: Tensor, dim: int, places: Tensor) -> Tensor:
    """The entries of these places, in ascending order; a view if they are consecutive."""
    if torch.compiler.is_compiling() or int(places[-1] - places[0]) != len(places) - 1:
        return x.index_select(dim, places)
    return x.narrow(dim, int(places[0]), len(places))


def stock_mask_of(module: nn.Module, attention_mask: Any, query: Tensor, keys: int, causal: bool | None) -> StockMask:
    """The mask that the layer was called with; if its model makes none, causality as the layer itself declares it."""
    causal = getattr(module, "is_causal", True) if causal is None else causal
    mask: Mask = Causal() if causal else NoMask()
    if isinstance(attention_mask, StockMask):
        # More keys than the cache has room for are the model's own, such as summaries of those before them.
        if not attention_mask.keys <= keys <= max(attention_mask.keys, attention_mask.slots):
            raise ValueError(
                f"attn_implementation='longitude': the mask is of {attention_mask.keys} keys, and {type(module).__name__} "
                f"attends to {keys}; load such a model with 'eager'"
            )
        return attention_mask
    if attention_mask is not None:
        return dense_mask(attention_mask, len(query), query.shape[2], keys)
    return StockMask(mask, keys)


INTERFACE = "ALL_ATTENTION_FUNCTIONS.get_interface("
"""How a layer of transformers asks for the attention function that attn_implementation names."""
BY_CLASS = re.compile(r"_ATTENTION_CLASSES\[")
"""How a layer instead chooses among attention classes of its own."""
LAYER = re.compile(r"^class \w*Attention\w*\(nn\.Module\):", re.MULTILINE)


@cache
def why_not(kind: type[PreTrainedModel]) -> str | None:
    """Why a class of models cannot run a registered attention function; None if no reason is known."""
    module = next(
        (base.__module__ for base in kind.__mro__ if base.__module__.startswith("transformers.models.")), None
    )
    if module is None:  # not a class of transformers
        return None
    try:
        code = inspect.getsource(sys.modules[module])
    except (OSError, TypeError, KeyError):
        return None
    if BY_CLASS.search(code):
        return "it chooses among attention classes of its own"
    if LAYER.search(code) and INTERFACE not in code:
        return "it computes attention itself, and asks for no other"
    return None


def refusing(method: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a method of PreTrainedModel that sets attn_implementation, to raise ValueError for models that cannot run ours."""

    @wraps(method)
    def checked(self: PreTrainedModel, *arguments: Any, **named: Any) -> Any:
        asked = arguments[0] if arguments else next(iter(named.values()), None)
        if asked == "longitude" and (why := why_not(type(self))) is not None:
            who = type(self).__name__
            raise ValueError(f"attn_implementation='longitude': {who} cannot use it, {why}; load it with 'eager'")
        return method(self, *arguments, **named)

    return checked


def refusing_pages(method: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap the method that starts continuous batching: an error in its thread would reach no caller."""

    @wraps(method)
    def checked(self: Any, *arguments: Any, **named: Any) -> Any:
        if self.config._attn_implementation == "longitude":
            raise UsageError("generate_batch", "'paged|sdpa' or 'paged|eager', whose keys are in pages", "'longitude'")
        return method(self, *arguments, **named)

    return checked
