"""The token shift and the short causal convolution: a token and the few before it in its document."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.nn import functional as F

from longitude.errors import UsageError, unknown
from longitude.positions.linear import is_plain

PLACES = ("input", "qkv", "kv", "output")
"""Where an attention layer may have short convolutions: its input; queries, keys and values; the last two; its output."""


def conv_places(places: str | Sequence[str]) -> tuple[str, ...]:
    """The places of a layer's short convolutions, in order. UsageError for an unknown one, and for "kv" beside "qkv"."""
    if not isinstance(places, str | list | tuple):
        raise UsageError("short_conv", f"a list of {', '.join(PLACES)}", repr(places))
    named = [places] if isinstance(places, str) else [*places]
    for place in named:
        if place not in PLACES:
            raise unknown("place of short_conv", place, PLACES, "docs/models.md has what each is for.")
    if {"qkv", "kv"} <= {*named} or len({*named}) < len(named):
        raise UsageError("short_conv", "each place once, and 'qkv' or 'kv'", repr(named))
    return tuple(place for place in PLACES if place in named)


def previous(
    x: Float[Tensor, "B L C"],
    tail: Float[Tensor, "B 1 C"] | None = None,
    reset: Bool[Tensor, "B L"] | None = None,
    valid: Bool[Tensor, "B L"] | None = None,
) -> tuple[Float[Tensor, "B L C"], Float[Tensor, "B 1 C"]]:
    """Previous token of each token, zeros at the start of a document; and the tail for the next call.

    tail: the tail returned by an earlier call; None at the beginning. reset: True for tokens that begin a document. valid:
    False for padding, which is skipped; its output is undefined.
    """
    row = _Row(x, 2, tail, reset, valid)
    return row.restore(row.shifted(1)), row.tail()


def convolved(
    layer: nn.Conv1d,
    x: Float[Tensor, "B L C"],
    tail: Float[Tensor, "B K-1 C"] | None = None,
    reset: Bool[Tensor, "B L"] | None = None,
    valid: Bool[Tensor, "B L"] | None = None,
) -> tuple[Float[Tensor, "B L C"], Float[Tensor, "B K-1 C"]]:
    """Depthwise causal convolution out_t = bias + sum_j weight[:, K-1-j] x_{t-j}, j = 0 .. K-1; and the tail for the next call.

    layer: it is called itself if hooks or adapters may change its result. tail, reset, valid: as in `previous`.
    """
    (kernel,) = layer.kernel_size
    row, windows = _Row(x, kernel, tail, reset, valid), None
    if row.segment is not None:  # each token with those before it in its document, as a sequence of its own
        windows = torch.stack([row.shifted(j) for j in reversed(range(kernel))], -1)
    if not is_plain(layer):
        out = layer(row.tokens.mT).mT if windows is None else layer(windows.flatten(0, 1)).view(x.shape)
        return row.restore(out), row.tail()
    weight, bias = layer.weight.to(x.dtype), None if layer.bias is None else layer.bias.to(x.dtype)
    if windows is None:
        out = F.conv1d(row.tokens.mT, weight, bias, groups=x.shape[-1]).mT
    else:
        out = (windows * weight.squeeze(1)).sum(-1)
        out = out if bias is None else out + bias
    return row.restore(out), row.tail()


class _Row:
    """Input of the convolution: the tail of earlier tokens, then this call's tokens, with padding moved to the end."""

    def __init__(self, x: Tensor, kernel: int, tail: Tensor | None, reset: Tensor | None, valid: Tensor | None):
        batch, self.length, channels = x.shape
        self.before = kernel - 1
        if tail is not None and tail.shape != (batch, self.before, channels):
            raise UsageError("the tail of earlier tokens", f"[{batch}, {self.before}, {channels}]", list(tail.shape))
        self.order: Int[Tensor, "B L"] | None = None
        self.count: Int[Tensor, "B 1"] | None = None
        if valid is not None:
            self.order = valid.logical_not().to(torch.uint8).argsort(dim=1, stable=True)
            self.count = valid.sum(1, keepdim=True)
            x = _gather(x, self.order)
            reset = None if reset is None else reset.gather(1, self.order)
        tail = x.new_zeros(batch, self.before, channels) if tail is None else tail.to(x.dtype)
        self.tokens = torch.cat([tail, x], 1) if self.before else x
        # The number of each token's document; what is in a tail belongs to the document of the last token before.
        self.segment = None if reset is None else F.pad(reset.cumsum(1), (self.before, 0))

    def shifted(self, j: int) -> Tensor:
        """For each token the one j before it, or zeros if that is of another document."""
        start = self.before - j
        tokens = self.tokens[:, start : start + self.length]
        if self.segment is None or j == 0:
            return tokens
        same = self.segment[:, start : start + self.length] == self.segment[:, self.before :]
        return torch.where(same[..., None], tokens, 0)

    def restore(self, out: Tensor) -> Tensor:
        """Restore the original order of tokens."""
        return out if self.order is None else _gather(out, self.order.argsort(1))

    def tail(self) -> Tensor:
        """The last tokens that are no padding, zeros for those that are not of the last one's document."""
        start = self.tokens.new_full((1, 1), self.length, dtype=torch.long) if self.count is None else self.count
        places = (start + torch.arange(self.before, device=start.device)).expand(len(self.tokens), -1)
        tail = _gather(self.tokens, places)  # a copy: a view would keep all tokens in a cache
        if self.segment is not None and self.before:
            segments = self.segment.gather(1, places)
            tail = torch.where((segments == segments[:, -1:])[..., None], tail, 0)
        return tail.to(torch.promote_types(tail.dtype, torch.float32))


def _gather(x: Tensor, places: Int[Tensor, "B n"]) -> Tensor:
    return x.gather(1, places[..., None].expand(-1, -1, x.shape[-1]))
