"""The cache layer for all encodings, and those of other forms of attention. They need transformers (the `models` extra)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only
from transformers import Cache
from transformers.cache_utils import CacheLayerMixin, DynamicLayer

from longitude.attention.backends.transport.backend import carried
from longitude.attention.documents import last_position
from longitude.attention.length_dependent import later, newest
from longitude.attention.mixer import of_this_mode
from longitude.errors import UsageError
from longitude.positions.base import Columns, Encoding
from longitude.positions.composed import Composed
from longitude.positions.coordinates import Positions, explicit
from longitude.positions.terms import Transport, require_shape


class CropsTogether:
    """A cache layer that is cropped only if all layers of its cache can be. Subclasses say what a change of all rows changes."""

    peers: Sequence[Any] = ()
    """The layers of the cache, in its order."""
    ids: Tensor | None = None
    """Token ids so far [B, L], held by the first layer of a cache if an encoding reads them."""
    device: torch.device | None = None
    """Where its tensors belong, also once they were moved away."""

    def _map(self, change: Callable[[Tensor], Tensor]) -> None:
        """Apply a change of the batch, or of the device, to all tensors."""
        if self.ids is not None:
            self.ids = change(self.ids)

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        self._map(lambda x: x.index_select(0, beam_idx.to(x.device)))

    def batch_repeat_interleave(self, repeats: int) -> None:
        self._map(lambda x: x.repeat_interleave(repeats, 0))

    def batch_select_indices(self, indices: Tensor) -> None:
        self._map(lambda x: x[indices])

    def offload(self) -> None:
        """Move its numbers to the CPU's memory; `prefetch` moves them back."""

        def away(x: Tensor) -> str:
            self.device = self.device if x.is_cpu else x.device
            return "cpu"

        self._move(away)

    def prefetch(self) -> None:
        self._move(lambda x: self.device or x.device)

    def _move(self, device_of: Callable[[Tensor], Any]) -> None:
        # Integers stay: the next call reads positions and ids of a layer before it is back.
        self._map(lambda x: x.to(device_of(x)) if x.is_floating_point() or x.is_complex() else x)

    def require_crop(self, tokens_to_remove: int) -> None:
        """Raise ValueError if this layer cannot be cropped; by default it can."""

    def crop(self, tokens_to_remove: int) -> None:
        # A cache crops its layers in order: the first one checks all.
        for layer in self.peers if self.peers and self.peers[0] is self else (self,):
            if isinstance(layer, CropsTogether):
                layer.require_crop(tokens_to_remove)
        self._crop(tokens_to_remove)

    def _crop(self, tokens_to_remove: int) -> None:
        raise NotImplementedError


class GrowingBuffer:
    """Space in which a tensor [B, heads, L, head_dim] grows along L.

    New tokens are written into spare space after the last token, because copying all keys for each token costs as much as
    attending to them. Tensors below `FEW` numbers are copied, which is a single call. Measured with 64 keys of 4 heads of 16:
    1.3 us copied, 3.5 us written in place; equal at 200 KiB.
    """

    FEW = 2**15
    """Numbers below which a tensor is copied as a whole instead of written in place."""

    def __init__(self) -> None:
        self.space: Tensor | None = None
        self.returned: Tensor | None = None  # the last result; any other tensor was made elsewhere and is copied

    def append(self, held: Tensor, new: Tensor) -> Tensor:
        """Append the new tokens to the held ones along L: [B, heads, held + new, head_dim]."""
        if held.dim() < 4:  # nothing yet
            held = new[:, :, :0]
        if held.numel() < self.FEW:
            return torch.cat([held, new], 2)
        past, added, space = held.shape[2], new.shape[2], self.space
        length = past + added
        fits = held is self.returned and space is not None and length <= space.shape[2] and space.dtype == new.dtype
        if fits and held.shape[0] == new.shape[0] and (torch.is_inference_mode_enabled() or not held.is_inference()):
            space.narrow(2, past, added).copy_(new)  # type: ignore[union-attr]
        else:
            spare = new.new_empty(*new.shape[:2], length // 8 + 64, new.shape[3])
            self.space = space = torch.cat([held, new, spare], 2)
        self.returned = space.narrow(2, 0, length)  # type: ignore[union-attr]
        return self.returned


class LongitudeCacheLayer(CropsTogether, DynamicLayer):
    """Cache of a layer: keys, values, and the columns that an encoding needs for the cached tokens.

    Attributes:
        keys: [B, Hkv, L, head_dim], rotated unless a longer sequence changes the rotation, and rewritten if later tokens
            reflect them.
        values: [B, Hkv, L, head_dim].
        positions: Positions of the keys: an int if they count up from it, else [L], [B, L] or, with several axes, [B, L, axes].
        columns: Tensors with an entry per token, each [B, heads, L, ...], by name.
        carry: The O(1) state of the encoding's context (the end of a convolution, a last sum), batch first.
        tails: The last tokens before each short convolution of the layer, [B, kernel - 1, channels] by place; and the state of
            a mixer beside the attention, "state".
        max_position: The largest position so far, cropped tokens included.
        center: The center of its keys' learned angles (Composed.center), which later calls must share; None: 0.
        kind: The kind of cache, for mixers that support only some kinds.
    """

    kind: str = "full"

    def __init__(self, **kwargs: Any):
        super().__init__(**kwargs)
        self.forget()

    def forget(self) -> None:
        self.positions: Positions = 0
        self.columns: Columns = {}
        self.carry: Any = None
        self.tails: dict[str, Tensor] = {}
        self.max_position: int | Tensor = 0
        self.center: Tensor | None = None
        self.ids = None
        self.buffers = GrowingBuffer(), GrowingBuffer()  # of keys and of values

    def get_seq_length(self) -> int:
        keys = self.keys
        return 0 if keys is None or keys.dim() < 4 else keys.shape[2]

    held = property(get_seq_length)
    """Number of cached keys: one per token, unless this kind of layer drops some."""

    def next_positions(self) -> Positions:
        """Default position of the first token after the cached ones: an int, or [1], [B, 1] or [B, 1, 1]."""
        if isinstance(self.positions, int):
            return self.positions + self.held
        if self.positions.dim() == 3:  # several axes: text continues after the largest of all
            return self.positions.amax((1, 2), keepdim=True) + 1
        return self.positions[..., -1:] + 1

    def last_positions(self) -> Tensor:
        """Position of the last cached token, [1] or [B, 1]; on several axes those of all, [B, L, axes]."""
        if isinstance(self.positions, int):
            return torch.tensor([self.positions + self.held - 1])
        return self.positions if self.positions.dim() == 3 else self.positions[..., -1:]

    def center_of(self, encoding: Composed, positions: Positions, count: int, device: torch.device) -> Tensor | None:
        """The center of a call's learned angles: its own if the cache is empty, else that of the cached keys."""
        if not self.held:
            self.center = encoding.center(positions, count, device)
        return self.center

    def extend(
        self, k: Tensor, v: Tensor, positions: Positions, columns: Columns, carry: Any, encoding: Composed | None = None
    ) -> tuple[Tensor, Tensor, Columns]:
        """Append the tokens of one call -> keys, values and columns of all; self.positions then covers all, too.

        Columns in encoding.passing_columns are those of this call alone: earlier tokens have changed the keys already.
        """
        passing = frozenset() if encoding is None else encoding.passing_columns
        if encoding is not None and passing:
            # Every new token rewrites the keys: narrow ones would drift.
            k = k.to(torch.promote_types(k.dtype, torch.float32))
            self.apply_pending_reflections(encoding)
        held, new = self.keys, k.shape[2]
        if held is not None and held.dim() == 4 and held.shape[1::2] != k.shape[1::2]:
            expected = f"keys of {k.shape[1]} heads of width {k.shape[3]}, as this layer makes"
            raise UsageError("cache", expected, list(held.shape))
        k, v = self.update(k, v)
        past = k.shape[2] - new
        if isinstance(positions, int) and isinstance(self.positions, int) and isinstance(self.max_position, int):
            self.max_position = max(self.max_position, positions + new - 1)
            counting = positions == self.positions + past
        else:
            self.max_position, counting = later(self.max_position, newest(positions, new)), False
        if not past:
            self.positions = positions
        elif not counting:
            before, after = explicit(self.positions, past, k.device), explicit(positions, new, k.device)
            self.positions = appended(before, after, k.shape[0])
        if past and columns:
            new_only = passing if encoding is None else passing | encoding.query_columns
            columns = {
                name: column if name in new_only else torch.cat([self.columns[name], column], 2)
                for name, column in columns.items()
            }
        self.columns, self.carry = columns, carry
        return k, v, columns

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        if torch.is_grad_enabled() or torch.compiler.is_compiling():  # backward or a graph may read the old tensors
            return super().update(key_states, value_states, *args, **kwargs)
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        assert self.keys is not None and self.values is not None
        keys, values = self.buffers
        self.keys, self.values = keys.append(self.keys, key_states), values.append(self.values, value_states)
        return self.keys, self.values

    def roll(self) -> None:
        """Drop the first keys after a call, if this kind of layer drops any; `get_seq_length` counts all tokens."""

    def apply_pending_reflections(self, encoding: Encoding) -> None:
        """Rewrite the keys by the reflections of the last call's tokens, which the next tokens need."""
        for term in encoding.terms(self.columns) if self.columns else ():
            if isinstance(term, Transport):
                assert self.keys is not None
                shape = *self.keys.shape[:2], *term.w.shape[2:]
                require_shape("cache: reflections of other heads than the keys", term.w, self.keys, shape)
                self.keys = carried(self.keys, term.w, term.b, term.chunk)

    def _map(self, change: Callable[[Tensor], Tensor]) -> None:
        super()._map(change)
        if self.held and self.keys is not None and self.values is not None:
            self.keys, self.values = change(self.keys), change(self.values)
            self.buffers = GrowingBuffer(), GrowingBuffer()  # their space has other rows, or is elsewhere
        self.columns = {name: change(column) for name, column in self.columns.items()}
        self.carry, self.tails = tree_map_only(Tensor, change, (self.carry, self.tails))
        if isinstance(self.max_position, Tensor) and len(self.max_position) > 1:
            self.max_position = change(self.max_position)
        if isinstance(self.positions, Tensor) and self.positions.dim() > 1 and len(self.positions) > 1:
            self.positions = change(self.positions)

    def reset(self) -> None:
        super().reset()
        self.forget()

    def require_crop(self, tokens_to_remove: int) -> None:
        if tokens_to_remove and any(isinstance(leaf, Tensor) for leaf in tree_leaves((self.carry, self.tails))):
            what = "a convolution or a recurrent mixer" if self.tails else "the encoding"
            raise UsageError("crop", "a cache used forward only", f"a state of {what}, which cannot be cropped")

    def _crop(self, tokens_to_remove: int) -> None:
        DynamicLayer.crop(self, tokens_to_remove)
        keep = self.held
        self.ids = None if self.ids is None else self.ids[:, : self.get_seq_length()]
        self.columns = {name: column[:, :, :keep] for name, column in self.columns.items()}
        if isinstance(self.positions, Tensor):
            self.positions = self.positions[:keep] if self.positions.dim() == 1 else self.positions[:, :keep]


class RollingCacheLayer(LongitudeCacheLayer):
    """Keys, values, positions and columns of the last `keep` tokens; get_seq_length() counts all that passed.

    A call may have more tokens than it keeps: they are all keys of each other, and `roll` drops them afterwards. Memory is
    O(keep + tokens of one call) while a call runs, and O(keep) between calls.

    Args:
        keep: Number of tokens to keep.
    """

    kind = "rolling"

    def __init__(self, keep: int, **kwargs: Any):
        self.keep = max(1, keep)  # positions continue from the last one
        super().__init__(**kwargs)

    def forget(self) -> None:
        super().forget()
        self.dropped = 0

    def get_seq_length(self) -> int:
        return self.dropped + self.held

    def next_positions(self) -> Positions:
        if self.dropped and isinstance(self.positions, Tensor) and self.positions.dim() == 3:
            return (
                torch.as_tensor(self.max_position).view(-1, 1, 1) + 1
            )  # after the largest of all, dropped ones included
        return super().next_positions()

    def roll(self) -> None:
        """Drop tokens that no later token attends to."""
        held, keep = self.held, self.keep
        if held <= keep:
            return
        drop = held - keep
        assert self.keys is not None and self.values is not None
        self.keys, self.values = (
            self._last(buffer, x, drop) for buffer, x in zip(self.buffers, (self.keys, self.values), strict=True)
        )
        self.columns = {name: column[:, :, -keep:].clone() for name, column in self.columns.items()}
        if isinstance(self.positions, int):
            self.positions += drop
        else:
            last = self.positions[-keep:] if self.positions.dim() == 1 else self.positions[:, -keep:]
            self.positions = last.clone()
        self.dropped += drop

    def _last(self, buffer: GrowingBuffer, held: Tensor, drop: int) -> Tensor:
        """The newest of the held tokens. In a buffer the window moves on; it is copied only if much is dropped."""
        if held is buffer.returned and buffer.space is not None and drop < held.shape[2] - drop:
            buffer.space = buffer.space[:, :, drop:]
            buffer.returned = held[:, :, drop:]
            return buffer.returned
        buffer.space = buffer.returned = None  # dropped keys are freed with their buffer
        return held[:, :, drop:].clone()

    def require_crop(self, tokens_to_remove: int) -> None:
        if tokens_to_remove and self.dropped:
            raise ValueError(
                f"crop: tokens before the last {self.keep} are dropped and would be keys again; expected a cache used "
                "forward only"
            )
        super().require_crop(tokens_to_remove)


class LatentCacheLayer(LongitudeCacheLayer):
    """Latent attention: keys [B, 1, L, kv_rank + rope_dim] are each token's latent, then its shared rotary key.

    values [B, 1, L, 0] are a view of them, because values are made of latents. Everything else is LongitudeCacheLayer's.
    """

    kind = "latent"

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        self.keys, _ = super().update(key_states, value_states, *args, **kwargs)
        self.values = self.keys[..., :0]
        return self.keys, self.values


class IndexedCacheLayer(LongitudeCacheLayer):
    """Keys and values as in LongitudeCacheLayer; the column "index_keys" [B, 1, L, index_dim] has the indexer's keys."""

    kind = "indexed"


class IndexedLatentCacheLayer(LatentCacheLayer):
    """Latents as in LatentCacheLayer; the column "index_keys" [B, 1, L, index_dim] has the indexer's keys."""

    kind = "indexed_latent"


def appended(before: Tensor, after: Tensor, batch: int) -> Tensor:
    """Positions of cached and new tokens in one tensor: [L], [B, L] or [B, L, axes], whichever both fit in."""
    if before.dim() == after.dim() == 1:
        return torch.cat([before, after])
    before, after = (p[None] if p.dim() == 1 else p for p in (before, after))
    if before.dim() != after.dim():
        before, after = (p if p.dim() == 3 else p[..., None] for p in (before, after))
    shape = batch, -1, *(max(a, b) for a, b in zip(before.shape[2:], after.shape[2:], strict=True))
    return torch.cat([before.expand(shape), after.expand(shape)], 1)


class StateLayer(CropsTogether, CacheLayerMixin):
    """Cache of a recurrent mixer: its state after the last token.

    Attributes:
        state: None before the first token, then the mixer's tuple (or dict) of tensors, batch first.
        seen: Tokens so far, the same for every row.
        newest: Position of the last token that is no padding, on several axes the largest of its document: int, [1] or [B, 1].
        owner: Name of the class that made the state; reading it from another class raises ValueError.
    """

    kind: str = "state"
    is_sliding = False
    is_compileable = False

    def __init__(self) -> None:
        super().__init__()
        self.forget()

    def forget(self) -> None:
        self.state: Any = None
        self.seen = 0
        self.newest: int | Tensor = -1
        self.owner: str | None = None
        self.ids = None

    def read(self, owner: str) -> Any:
        """The state, for the mixer class of that name."""
        if self.owner not in (None, owner):
            raise UsageError("cache", f"a state of {owner}", f"one of {self.owner}", "a cache serves one model only")
        self.state = of_this_mode(self.state)
        return self.state

    def write(self, owner: str, state: Any, tokens: int, positions: Positions, documents: Tensor | None = None) -> None:
        """Replace the state by the one after `tokens` more tokens at `positions`.

        documents [B, Lk]: of all tokens so far, with a negative number for padding; None: one document without padding.
        """
        self.read(owner)
        self.newest = last_position(positions, tokens, documents, self.newest)
        self.state, self.owner, self.seen = state, owner, self.seen + tokens

    def next_positions(self) -> Positions:
        """Default positions of the tokens after these."""
        return self.newest + 1

    def last_positions(self) -> Tensor:
        """Position of the last token: [1] or [B, 1]."""
        return self.newest if isinstance(self.newest, Tensor) else torch.tensor([self.newest])

    # ---- what transformers requires of a layer ----
    def get_seq_length(self) -> int:
        return self.seen

    def get_max_length(self) -> int:
        return -1

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.seen + query_length, 0

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        raise ValueError("cache: a state is written by its mixer; it takes no keys and values")

    lazy_initialization = update

    def _map(self, change: Callable[[Tensor], Tensor]) -> None:
        super()._map(change)
        self.state = tree_map_only(Tensor, change, self.state)
        if isinstance(self.newest, Tensor) and self.newest.dim() == 2:
            self.newest = change(self.newest)

    def reset(self) -> None:
        self.forget()

    def require_crop(self, tokens_to_remove: int) -> None:
        if tokens_to_remove and self.seen:
            raise ValueError(f"crop: a state of {self.owner} cannot be cropped; expected a cache used forward only")

    def _crop(self, tokens_to_remove: int) -> None:
        """Do nothing: `require_crop` raises if there is anything to remove."""


class LongitudeCache(Cache):
    """A cache of LongitudeCacheLayer, one for each layer of a model.

    Args:
        layers: Their number, or the layers themselves, as each mixer's `cache_layer()` makes them.
    """

    def __init__(self, layers: int | Sequence[Any]):
        super().__init__(
            layers=[LongitudeCacheLayer() for _ in range(layers)] if isinstance(layers, int) else [*layers]
        )
        together(self.layers)


def together(layers: list[Any]) -> None:
    """Make these the layers of one cache."""
    for layer in layers:
        if isinstance(layer, CropsTogether):
            layer.peers = layers
