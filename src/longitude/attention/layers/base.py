"""Base code of attention layers: arguments of a call, checked once for all layers, and the modules around attention."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from longitude.attention.documents import padding_of, require_number_per_token, require_tokens, runs_of
from longitude.attention.length_dependent import later, newest, parted, require_same_past
from longitude.attention.masks import Documents, Mask, Padding, is_causal, require_causal, require_mask
from longitude.attention.mixer import Mixer, MixerInputs, of_this_mode, require_cache
from longitude.attention.operation import answer, choose_once, chosen_in_step, raw_request, require_backend, run_parts
from longitude.attention.pairs import AllowedPairs
from longitude.attention.request import Request, Step, require_options
from longitude.attention.short_conv import conv_places, convolved
from longitude.attention.state_mixer import document_flags
from longitude.errors import UsageError
from longitude.positions.base import Columns
from longitude.positions.composed import Composed
from longitude.positions.coordinates import Positions, canonical, explicit, following

if TYPE_CHECKING:
    from longitude.attention.cache import LongitudeCacheLayer


@dataclass(frozen=True, eq=False)  # a key of each layer: the same object is the same call
class Call:
    """Checked arguments of `Mixer.forward`, with defaults filled in.

    Attributes:
        mask: The mask, with documents and padding joined.
        positions: Positions of x.
        past: Tokens in the cache.
        keys: Tokens in the cache, and those of x.
        length: Tokens of x.
        documents: Document numbers of x [B, L].
        padding: Padding of x [B, L, 1]; None: no padding.
        alike: Whether the requests of layers differ only in q, k and v. Without gradients the first layer's then serves all.
    """

    mask: Mask
    positions: Positions
    past: int
    keys: int
    length: int
    documents: Tensor | None
    padding: Tensor | None
    alike: bool

    def pairs(self, batch: int, rows: int, keys: int, step: Step) -> AllowedPairs:
        """Pairs that the mask allows between the last `rows` tokens and `keys` keys, fewer than all if a cache dropped some."""
        return step.once(pairs_of, self.mask, self.keys, batch, rows, keys)


def pairs_of(mask: Mask, tokens: int, batch: int, rows: int, keys: int) -> AllowedPairs:
    """Pairs that a mask of `tokens` tokens allows between the last rows and the last keys."""
    if keys < tokens:
        mask = mask.since(tokens - keys)
    return AllowedPairs(mask, batch, rows, keys, keys - rows)


Narrowed = tuple[Call, Columns, Callable[[Tensor], Tensor]]


class AttentionLayer(Mixer):
    """A mixer with keys and values, and what may stand around them: short convolutions, a gate of the output, a softcap.

    It makes the modules of the options that are on; subclasses call its other methods where they apply.

    Args:
        dim: Width of x.
        inner: Input width of o_proj.
        channels: Width of the short convolution at each place where the layer can have one.
        dropout, scale, backend, output_gate, softcap, short_conv, conv_kernel: As in MultiHeadAttention.
    """

    scores = True
    rotates = True
    bidirectional = True
    has_weights = True
    o_proj: nn.Linear
    encoding: Composed
    cache_class = "LongitudeCacheLayer"
    """Class of its cache layer in `longitude.attention.cache`: a name, because caches need transformers, and layers do not."""
    cache_kinds: tuple[str, ...] = ("full",)
    """Kinds of cache layers that it reads."""
    narrowed: Callable[[Tensor, Tensor, Call, Columns], Narrowed]
    """In layers with `choosing`: call and columns for the keys that are chosen, and a function to apply to the output."""

    def __init__(
        self,
        dim: int,
        inner: int,
        channels: Mapping[str, int],
        *,
        dropout: float = 0.0,
        scale: float | None = None,
        backend: str = "auto",
        output_gate: bool = False,
        softcap: float | None = None,
        short_conv: str | Sequence[str] = (),
        conv_kernel: int | None = None,
    ):
        super().__init__()
        require_backend(backend)
        require_options(scale, dropout, softcap)
        self.dim, self.dropout, self.scale, self.backend, self.softcap = dim, dropout, scale, backend, softcap
        self.gate_proj = nn.Linear(dim, inner, bias=False) if output_gate else None
        self.short_conv = conv_places(short_conv)
        if foreign := [place for place in self.short_conv if place not in channels]:
            able = " or ".join(map(repr, channels))
            raise UsageError(f"short_conv: {type(self).__name__}", able, repr(foreign[0]))
        if conv_kernel is not None and not self.short_conv:
            raise UsageError("conv_kernel", "None without short_conv", conv_kernel)
        kernel = 4 if conv_kernel is None else conv_kernel
        for place in self.short_conv:
            n = channels[place]
            setattr(self, f"{place}_conv", nn.Conv1d(n, n, kernel, groups=n, bias=False))
            self.bidirectional = False

    def cache_layer(self) -> LongitudeCacheLayer:
        from longitude.attention import cache

        return getattr(cache, self.cache_class)()

    def mask_of(self, inputs: MixerInputs) -> Mask:
        """The mask of a call, with what the layer itself adds; ValueError if it is not causal and the class is."""
        if not type(self).bidirectional:  # with short_conv `convolve` raises, and its error names the option
            require_past(type(self).__name__, inputs.mask)
        return inputs.mask

    def columns_of(self, x: Tensor, call: Call, encoding: Composed, cache: Any) -> tuple[Columns, Any]:
        """Columns of the call's tokens that a cache keeps beside their keys, and the carry after them."""
        if not encoding.reads_tokens:
            return {}, None
        return encoding.context(x, None if cache is None else of_this_mode(cache.carry), call.documents)

    def query_source(self, x: Tensor) -> Tensor:
        """Input of the query projection: the tokens, or their latents."""
        return x

    def reset_parameters(self) -> None:
        for place in self.short_conv:
            getattr(self, f"{place}_conv").reset_parameters()

    @property
    def carries(self) -> bool:
        return len(self.short_conv) > 0

    def convolve(self, place: str, x: Tensor, call: Call, inputs: MixerInputs) -> Tensor:
        """Add to x [B, L, channels] its convolution, if the layer has one at this place; the cache keeps its last inputs."""
        if place not in self.short_conv:
            return x
        self.require_in_order(inputs)
        cache, tail, flags = inputs.cache, None, (None, None)
        if cache is not None:
            tail = of_this_mode(cache.tails.get(place))
            if call.past and tail is None:
                raise UsageError("cache", f"one that a layer with short_conv={self.short_conv} filled", "another")
        if (documents := inputs.documents) is not None:
            flags = inputs.step.once(document_flags, documents, call.past)
        y, tail = convolved(getattr(self, f"{place}_conv"), x, tail, *flags)
        if cache is not None:
            cache.tails = {**cache.tails, place: tail}
        y = (x + y).contiguous()
        return y if call.padding is None else torch.where(call.padding, 0.0, y)

    def require_in_order(self, inputs: MixerInputs) -> None:
        """ValueError unless the mask is causal; documents and padding must be in documents=."""
        if any(isinstance(m, Documents | Padding) for m in inputs.mask.parts()) or not is_causal(inputs.mask):
            what = f"mask: {type(self).__name__} with short_conv, which reads the tokens before each"
            expected = "lg.Causal() and windows, with documents and padding as documents="
            raise UsageError(what, expected, repr(inputs.mask))

    def result(self, out: Tensor, weights: Tensor | None, x: Tensor, call: Call, inputs: MixerInputs) -> Any:
        """Project the output of attention [B, H, L, D] -> [B, L, dim], with the weights if requested. x: input of the layer."""
        out = out if out.dtype == x.dtype else out.to(x.dtype)
        out = out.transpose(1, 2).flatten(2)
        if self.gate_proj is not None:
            out = out * self.gate_proj(x).sigmoid()
        out = self.o_proj(out)
        out = self.convolve("output", out, call, inputs) if self.short_conv else out
        if inputs.cache is not None:
            inputs.cache.roll()
        return (out, weights) if inputs.return_weights else out


def normed(norm: nn.RMSNorm | nn.LayerNorm, x: Tensor) -> Tensor:
    """Apply a norm in the dtype of its weight and return the dtype of x: torch warns of narrower inputs, as under autocast."""
    return norm(x.to(norm.weight.dtype)).to(x.dtype)


def checked_call(layer: AttentionLayer, x: Tensor, inputs: MixerInputs) -> tuple[Tensor, Call, Composed]:
    """Tokens, with zeros at padding, the checked call, and its encoding; ValueError before the cache changes."""
    cache, encoding = inputs.cache, layer.encoding if inputs.encoding is None else inputs.encoding
    require_cache(layer, cache, layer.cache_kinds)
    mask = layer.mask_of(inputs)
    past = cache.get_seq_length() if cache is not None else 0
    if cache is not None and past and cache.keys is not None and cache.keys.shape[0] != x.shape[0]:
        raise UsageError("x", f"a batch of {len(cache.keys)}, as the cache stores", len(x))
    if x.dim() != 3 or x.shape[2] != layer.dim or x.numel() == 0:
        require_tokens(x, layer.dim)
    positions = inputs.positions
    if positions is None:
        positions = 0 if cache is None else cache.next_positions()
        positions = following(positions, x.shape[1]) if isinstance(positions, Tensor) else positions
    autocast = torch.is_autocast_enabled(x.device.type)
    reads = x.shape, x.device, encoding, mask, positions, inputs.documents, past, autocast
    call = inputs.step.once(valid_call, *reads)
    if call.padding is not None:  # zeros, whatever it held
        x = torch.where(call.padding, 0.0, x)
    if cache is not None and past and not encoding.stable_keys:
        now = later(newest(cache.positions, cache.held), newest(call.positions, call.length))
        require_same_past(encoding, cache.max_position, now)
    return x, call, encoding


def valid_call(
    shape: torch.Size,
    device: torch.device,
    encoding: Composed,
    mask: Mask,
    positions: Positions,
    documents: Tensor | None,
    past: int,
    autocast: bool,
) -> Call:
    """Validate the arguments of a call and build the `Call` that layers of a forward share. shape: that of x [B, L, dim]."""
    batch, length = shape[:2]
    keys = past + length
    require_mask(mask)
    encoding.require_loaded(device)
    if documents is None and encoding.reads_tokens and any(isinstance(m, Documents | Padding) for m in mask.parts()):
        raise ValueError("mask: the encoding reads the tokens too; pass documents and padding as documents= instead")
    if documents is not None:
        require_number_per_token(documents, batch, keys)
        documents = runs_of(documents)
        mask = mask & Documents(documents) & Padding(documents >= 0)
    # A model passes positions with axes to all its layers, those of one axis included.
    axes = encoding.axes
    if isinstance(positions, Tensor) and positions.dim() == 3:
        axes = max(2, positions.shape[-1])
    positions = canonical("positions", positions, batch, length, axes)
    mask.validate(batch, length, keys)
    require_causal(encoding.causal_only, mask)
    if past:
        mask.require_past(past)
    own_documents = None if documents is None else documents[:, past:]
    alike = encoding.stable_keys and not encoding.reads_tokens and not autocast and not torch.compiler.is_compiling()
    padding = None if documents is None else padding_of(documents, length)
    return Call(mask, positions, past, keys, length, own_documents, padding, alike)


def tables_of(encoding: Composed, call: Call, inputs: MixerInputs, x: Tensor) -> Any:
    """Tables of the call's tokens for activations like x: those that the model made for all its layers, or its own."""
    if inputs.tables is not None:
        return inputs.tables
    place = call.positions, call.length, x.device
    center = encoding.center(*place) if inputs.cache is None else inputs.cache.center_of(encoding, *place)
    return encoding.prepare(explicit(call.positions, call.length, x.device), None, x.dtype, center=center)


def require_past(who: str, mask: Mask) -> None:
    """ValueError unless the mask leaves no key after the query."""
    require_mask(mask)
    if not is_causal(mask):
        what, expected = f"mask: {who} attends to the past only", "Causal() with what else is joined to it by &"
        remedy = "MultiHeadAttention takes any mask, lg.Band(before, after) among them"
        raise UsageError(what, expected, type(mask).__name__, remedy)


def attended(
    layer: Any,
    qkv: tuple[Tensor, Tensor, Tensor],
    call: Call,
    encoding: Any,
    columns: Columns,
    k_positions: Positions,
    scale: float | None,
    weights: bool,
    step: Step,
) -> tuple[Tensor, Tensor | None]:
    """Attend from a layer's queries to the keys of cache and call: [B, H, L, Dv], and the weights if requested."""
    q, k, v = qkv
    dropout = layer.dropout if layer.training else 0.0
    reads = call, encoding, columns or None, k_positions, scale, dropout, weights, layer.softcap
    if call.alike and not weights and not torch.is_grad_enabled():
        r = step.request(layer_request, q, k, v, *reads)
        return answer(r.once(chosen_in_step, layer.backend), r)
    r = layer_request(q, k, v, *reads, call.pairs(q.shape[0], q.shape[2], k.shape[2], step))
    if not encoding.stable_keys:
        parts = parted(r, encoding, call.positions, k_positions)
        if len(parts) > 1 or parts[0].regions:
            return run_parts(parts, layer.backend)
        r = parts[0].request
    return answer(choose_once(r, layer.backend, step), r)


def layer_request(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    call: Call,
    encoding: Any,
    columns: Columns | None,
    k_positions: Positions,
    scale: float | None,
    dropout: float,
    weights: bool,
    softcap: float | None,
    pairs: AllowedPairs | None = None,
) -> Request:
    """The request of a layer; pairs: those that its mask allows, if an earlier layer knows them."""
    pairs = pairs or pairs_of(call.mask, call.keys, q.shape[0], q.shape[2], k.shape[2])
    places, already = (call.positions, k_positions), encoding.widens if encoding.stable_keys else 1
    return raw_request(
        q, k, v, encoding, columns, pairs.mask, *places, scale, dropout, weights, pairs, None, already, softcap
    )
