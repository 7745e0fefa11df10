"""The masks of transformers models as our masks, in O(length) memory instead of [L, L]."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary
from transformers import masking_utils as theirs

from longitude.attention.documents import Packed, documents_of, places_of, runs_of
from longitude.attention.masks import Ago, AllOf, Causal, Chunks, Documents, Mask, NoMask, Padding, Window, from_tensor
from longitude.attention.request import Step
from longitude.errors import UsageError
from longitude.native.derivatives import numbers_of, readable, tracing

INDEXERS = "index_topk", "indexer_budget"
"""Keys of a config whose model has an indexer: its layers change the tensor of a mask before they attend with it."""


class NoTensorError(ValueError, AttributeError):
    """Raised if a model uses a StockMask as a tensor; also an AttributeError, so that hasattr() returns False."""


@dataclass(frozen=True, eq=False)
class StockMask:
    """Attention mask of a call. All layers of a type share the same object.

    mask: the mask over the first `keys` keys; later keys, up to `slots`, are empty slots of a static cache. streams [B, keys]:
    document of each key, -1 for padding; None for a single document. dense: whether it was made from a tensor, which then fully
    decides, windows included. step: what the layers of a decoding step share.
    """

    mask: Mask
    keys: int
    streams: Tensor | None = None
    dense: bool = False
    slots: int = 0
    # dynamo traces a function as the factory, and no class
    step: Step = field(default_factory=lambda: Step(), init=False, repr=False)

    # generate() handles the masks of a static cache as tensors of four dimensions.
    ndim: ClassVar[int] = 4

    def contiguous(self) -> StockMask:
        return self

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self.read_as_tensor()

    def read_as_tensor(self, *_: Any) -> Any:
        raise NoTensorError(
            "attn_implementation='longitude': the model computes with the mask itself instead of leaving it to the attention "
            "that it was given; such a model (Doge, for one) cannot use it: load it with 'eager'"
        )

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __and__ = __or__ = __invert__ = read_as_tensor
    __getitem__ = __lt__ = __gt__ = read_as_tensor


def stock_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] = theirs.causal_mask_function,
    attention_mask: Tensor | StockMask | None = None,
    **building: Any,
) -> StockMask | Tensor:
    """The mask function of attn_implementation="longitude", as transformers calls it.

    attention_mask bool [B, tokens so far]. mask_function decides causality, windows and packed documents; q_offset, kv_offset:
    order of the first query and of the first key that the cache still stores. **building: how to build a tensor, which is not
    done, except for a model with an indexer, whose own code reads the tensor.
    """
    if isinstance(attention_mask, StockMask):  # made ahead by generate()
        return attention_mask
    if any(getattr(building.get("config"), name, None) is not None for name in INDEXERS):
        return theirs.eager_mask(
            batch_size, q_length, kv_length, int(q_offset), kv_offset, mask_function, attention_mask, **building
        )
    order = torch.arange(kv_offset, int(q_offset) + q_length, device=building.get("device"))
    parts = parts_of(mask_function, order)
    causal = any(isinstance(part, Causal) for part in parts)
    if any(isinstance(part, Window) for part in parts) and not causal:
        raise ValueError(
            "attn_implementation='longitude': expected a sliding window of a causal model; use 'sdpa' or 'eager'"
        )
    keys = int(q_offset) + q_length - kv_offset if causal else kv_length  # cross-attention reads other tokens
    streams = next((part.ids for part in parts if isinstance(part, Documents)), None)
    if attention_mask is not None:
        valid = attention_mask[:, kv_offset : kv_offset + keys]
        if valid.shape != (batch_size, keys):
            raise UsageError(
                "attention_mask",
                f"[{batch_size}, {kv_offset + keys}], one per token, cached ones included",
                list(attention_mask.shape),
            )
        if not readable(valid) or not bool(valid.all()):
            streams = torch.zeros_like(valid, dtype=torch.long).masked_fill(~valid, -1)
            parts.append(Padding(valid))
    return StockMask(AllOf(tuple(parts)), keys, streams, slots=kv_length)


_DENSE: WeakIdKeyDictionary = WeakIdKeyDictionary()
"""Masks made from tensors, with the tensor's version and the shape: all layers of a forward pass get the same tensor."""


def dense_mask(attention_mask: Any, batch: int, rows: int, keys: int) -> StockMask:
    """Convert a user's mask tensor [B, 1, L, keys]: True or 0 if a query attends, else False or the dtype's lowest number.

    ValueError for another shape, a mask per head, or other numbers than these.
    """
    if not isinstance(attention_mask, Tensor) or attention_mask.dim() != 4:
        got = (
            f"{attention_mask.dtype} {list(attention_mask.shape)}"
            if isinstance(attention_mask, Tensor)
            else type(attention_mask).__name__
        )
        raise UsageError(
            "attn_implementation='longitude'",
            "attention_mask [B, tokens] of 0 and 1, or a mask [B, 1, L, keys]",
            got,
            "use 'sdpa' for another mask",
        )
    # Tensors of inference_mode have no version, so a change would not be seen; dynamo does not know the question.
    versioned = not torch.compiler.is_compiling() and not attention_mask.is_inference()
    read_of = attention_mask._version if versioned else None, batch, rows, keys
    known, made = _DENSE.get(attention_mask, (None, None)) if versioned else (None, None)  # pyright: ignore[reportGeneralTypeIssues]
    if known != read_of or made is None:
        try:
            made = StockMask(from_tensor(attention_mask, batch, rows, keys), keys, dense=True)
        except ValueError as error:
            raise ValueError(f"attn_implementation='longitude': attention_{error}") from None
        if versioned:
            _DENSE[attention_mask] = read_of, made
    return made


def with_packed(stock_mask: StockMask, arguments: Mapping[str, Any], batch: int, length: int) -> StockMask:
    """The mask with documents that arguments mark, as `longitude.attention.documents.documents_of` reads them.

    These are cu_seq_lens_q, cu_seq_lens_k, max_length_q, max_length_k and seq_idx. `length` new tokens, none cached before them.
    ValueError for documents other than those that position_ids showed.
    """
    packed = {name: arguments[name] for name in Packed.__annotations__ if arguments.get(name) is not None}
    ids = documents_of(batch, length, None, None, None, stock_mask.keys == length, **packed)
    if ids is None:
        return stock_mask
    if stock_mask.dense:
        raise ValueError(
            f"{next(iter(packed))}: a mask [B, 1, L, keys] has the documents in it; expected only one of them"
        )
    ids = ids.expand(batch, -1)
    if stock_mask.streams is None:
        return replace(stock_mask, mask=within(stock_mask.mask, ids), streams=ids)
    padded = runs_of(ids.masked_fill(stock_mask.streams < 0, -1))
    if bool(numbers_of(stock_mask.streams < 0).any()) and not any(
        isinstance(part, Documents) for part in stock_mask.mask.parts()
    ):
        return replace(stock_mask, mask=within(stock_mask.mask, ids, padded), streams=padded)
    if not tracing() and bool(numbers_of(padded != runs_of(stock_mask.streams)).any()):
        raise ValueError(f"{next(iter(packed))}: it marks other documents than position_ids; expected the same")
    return stock_mask


def within(mask: Mask, ids: Tensor, padded: Tensor | None = None) -> Mask:
    """Restrict a mask to documents, and count its chunks within each document; padded: document numbers with padding as -1."""
    places = places_of(ids if padded is None else padded)
    parts = (Chunks(part.size, places) if isinstance(part, Chunks) else part for part in mask.parts())
    return AllOf((*parts, Documents(ids)))


def parts_of(function: Callable[..., Any], places: Tensor) -> list[Mask]:
    """The masks that a mask function of transformers joins; ValueError for an unknown one.

    places: index of each key in its document, [keys] or [B, keys].
    """
    if function is theirs.causal_mask_function:
        return [Causal()]
    if function is theirs.bidirectional_mask_function:
        return [NoMask()]
    name = function.__qualname__.partition(".")[0] if function.__module__ == theirs.__name__ else None
    cells = function.__closure__ or ()
    held = dict(zip(function.__code__.co_freevars, (cell.cell_contents for cell in cells), strict=True))
    match name:
        case "and_masks":
            return [part for joined in held["mask_functions"] for part in parts_of(joined, places)]
        case "sliding_window_overlay":
            # A window of 0 is for layers that the model does not have (Qwen2-MoE without windows makes their mask anyway).
            return [Window(size) if (size := held["sliding_window"]) else Ago(1, 0)]
        case "packed_sequence_mask_function":
            return [Documents(held["packed_sequence_mask"])]
        case "chunked_overlay":
            padding = held["left_padding"].to(places.device)
            some = not readable(padding) or bool(padding.any())
            return [Chunks(held["chunk_size"], places - padding[:, None] if some else places)]
        case "remap_positions_for_packed_sequence":  # for windows it is the same as by order
            return parts_of(held["mask_function"], held["position_ids"])
    raise ValueError(
        "attn_implementation='longitude': expected causality, sliding windows, chunks, padding or packed documents, got a "
        f"mask of {name or function.__qualname__!r}; use 'sdpa' or 'eager'"
    )
