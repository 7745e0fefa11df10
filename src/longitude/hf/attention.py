"""The attention function of attn_implementation="longitude"."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from longitude.attention.masks import AllOf, Causal, Mask, NoMask, Window
from longitude.attention.operation import attend
from longitude.hf.layer import CALL, LayerCall, encoding_of
from longitude.hf.masks import StockMask, not_a_mask, with_packed

REFUSED = {
    "softcap": "it bends the scores",
    "position_bias": "it adds to the scores",
    "s_aux": "sinks stand in the denominator",
    "sinks": "sinks stand in the denominator",
    "head_mask": "it mutes heads",
    "indices": "it chooses keys",
    "block_indices": "it chooses keys",
    "cache": "the keys are in pages",
}
"""Arguments by which a model changes its attention and that are not done here. Any other that is not in the signature is not
attention's business: models hand on all they were called with, labels of a loss among it."""


def stock_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """Query [B, H, L, D], key [B, Hkv, Lk, D], value [B, Hkv, Lk, Dv], as the model's layer made them -> [B, L, H, Dv] and, if
    asked for, the weights [B, H, L, Lk]. Without set_positions, queries and keys are rotated already.

    ValueError for a mask or an argument that it cannot honour.
    """
    call: LayerCall | None = kwargs.pop(CALL, None)
    if call is None and encoding_of(module) is not None:
        raise ValueError(
            f"set_positions: {type(module).__name__} does not hand on what it is called with, so its encoding would be lost"
        )
    causal = kwargs.get("is_causal")
    looks = with_packed(looked(module, attention_mask, key.shape[2], causal), kwargs, len(query), query.shape[2])
    require_known(kwargs)
    mask = looks.mask if sliding_window is None else AllOf((*looks.mask.parts(), Window(sliding_window)))
    key, value = key[:, :, : looks.keys], value[:, :, : looks.keys]
    weights = kwargs.get("output_attentions")
    if weights is None:
        weights = bool(getattr(getattr(module, "config", None), "output_attentions", False))
    if call is None:
        out = attend(query, key, value, mask=mask, scale=scaling, dropout=dropout, return_weights=weights)
        out, weights = out if weights else (out, None)
    else:
        out, weights = call.attend(query, key, value, mask, scaling, dropout, weights)
    return out.transpose(1, 2).contiguous(), weights


def looked(module: nn.Module, attention_mask: Any, keys: int, causal: bool | None) -> StockMask:
    """What the layer was handed as a mask; where its model makes none, causality as the layer itself declares it."""
    if isinstance(attention_mask, StockMask):
        if keys < attention_mask.keys:
            raise ValueError(f"attn_implementation='longitude': the mask is of {attention_mask.keys} keys, got {keys}")
        return attention_mask
    if attention_mask is not None:
        raise not_a_mask(attention_mask)
    causal = getattr(module, "is_causal", True) if causal is None else causal
    mask: Mask = Causal() if causal else NoMask()
    return StockMask(mask, keys)


def require_known(arguments: dict[str, Any]) -> None:
    """ValueError for what would change the attention and is not done here."""
    for name, reason in REFUSED.items():
        if arguments.get(name) is not None:
            raise ValueError(f"attn_implementation='longitude' cannot honour {name}: {reason}; use 'eager' or 'sdpa'")
