"""Timed cases: attention with an encoding, and causal attention without position bias, on the same tensors."""

import io
from collections.abc import Callable, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass, field
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

import longitude as lg
from longitude.labels import parse_encoding
from longitude.models import LongitudeConfig
from longitude.positions.composed import Composed, compose
from longitude.testing import fill

PLAIN = "plain"
Kind = Literal["plain", "ours", "peer"]


@dataclass(frozen=True)
class AttentionShape:
    """The size of an attention: q [batch, heads, length, head_dim], k and v [batch, kv_heads, length, head_dim]."""

    batch: int
    heads: int
    kv_heads: int
    head_dim: int
    length: int
    dtype: str = "float32"

    @property
    def dim(self) -> int:
        return self.heads * self.head_dim

    @property
    def torch_dtype(self) -> torch.dtype:
        return getattr(torch, self.dtype)

    @property
    def tensor_bytes(self) -> int:
        """Bytes of a tensor [batch, heads, length, head_dim]."""
        return self.batch * self.dim * self.length * self.torch_dtype.itemsize


@dataclass(frozen=True)
class Inputs:
    """q, k, v, the tokens x [batch, length, dim], and a gradient for the output; all cases of a shape share them."""

    shape: AttentionShape
    q: Tensor
    k: Tensor
    v: Tensor
    x: Tensor
    gradient: Tensor

    @classmethod
    def of(cls, shape: AttentionShape, empty: bool = False) -> "Inputs":
        """Random numbers; empty: one number expanded, which takes no memory, to find out what the shape would need."""
        generator = torch.Generator().manual_seed(0)

        def numbers(*sizes: int) -> Tensor:
            if empty:
                return torch.zeros((), dtype=shape.torch_dtype).expand(sizes)
            return torch.randn(sizes, generator=generator, dtype=torch.float32).to(shape.torch_dtype)

        q, gradient = (numbers(shape.batch, shape.heads, shape.length, shape.head_dim) for _ in range(2))
        k, v = (numbers(shape.batch, shape.kv_heads, shape.length, shape.head_dim) for _ in range(2))
        x = numbers(shape.batch, shape.length, shape.dim)
        for tensor in (q, k, v, x):
            tensor.requires_grad_()
        return cls(shape, q, k, v, x, gradient)


@dataclass(frozen=True)
class Case:
    """An implementation to time: forward() -> outputs, with the shapes of inputs or of the output of attention.

    wanted: tensors that need gradients in a training step. backend: the backend that runs it.
    """

    name: str
    kind: Kind
    backend: str
    forward: Callable[[], Sequence[Tensor]]
    wanted: Sequence[Tensor]
    _gradients: list[Tensor] = field(default_factory=list)

    def step(self, backward: bool) -> Callable[[], object]:
        """The timed call: forward without gradients, or forward and gradients of `wanted`."""
        if not backward:
            return torch.no_grad()(self.forward)

        def both() -> object:
            outputs = self.forward()
            if not self._gradients:  # made in the warm-up turn
                self._gradients.extend(torch.randn_like(out) for out in outputs)
            return torch.autograd.grad(outputs, self.wanted, self._gradients, allow_unused=True)

        return both


def causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal scaled_dot_product_attention without position information."""
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=k.shape[1] != q.shape[1])


def plain(inputs: Inputs) -> Case:
    three = [inputs.q, inputs.k, inputs.v]
    return Case(PLAIN, "plain", "torch", lambda: [causal(*three)], three)


def built(label: str, shape: AttentionShape) -> Composed:
    """The encodings of a label of the command line at this size, with random learned numbers."""
    config = LongitudeConfig(
        hidden_size=shape.dim,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        num_hidden_layers=1,
        max_position_embeddings=shape.length,
        encoding=parse_encoding(label),
    )
    return fill(compose([lg.encoding(**spec) for spec in config.layer_specs()[0]])).to(shape.torch_dtype)


def ours(label: str, backend: str, inputs: Inputs, gradients: bool = True) -> Case:
    """lg.attend with an encoding, including what it does at the input and the columns that it reads off the tokens.

    gradients: whether a step computes them, because the choice of a backend may depend on it. ValueError if none runs it.
    """
    q, k, v, x = inputs.q, inputs.k, inputs.v, inputs.x
    encoding = built(label, inputs.shape)
    positions = torch.arange(inputs.shape.length)

    def forward() -> list[Tensor]:
        outputs = [encoding.embed(x, positions)] if encoding.at_input else []
        columns = encoding.context(x)[0] if encoding.reads_tokens else None
        return [*outputs, lg.attend(q, k, v, encoding=encoding, context=columns, backend=backend)]

    reads = encoding.at_input or encoding.reads_tokens
    wanted = [q, k, v, *([x] if reads else []), *encoding.parameters()]
    return Case(label, "ours", verdict(encoding, backend, inputs, gradients)[0], forward, wanted)


def verdict(encoding: Composed, backend: str, inputs: Inputs, gradients: bool) -> tuple[str, int]:
    """The backend that runs it, and the bytes that it needs beyond inputs and output. ValueError if there is none."""
    with torch.set_grad_enabled(gradients), redirect_stdout(io.StringIO()):
        columns = encoding.context(inputs.x)[0] if encoding.reads_tokens else None
        verdicts = lg.explain(inputs.q, inputs.k, inputs.v, encoding=encoding, context=columns, backend=backend)
    if chosen := next((candidate for candidate in verdicts if candidate.chosen), None):
        return chosen.backend, chosen.memory
    refusal = next((candidate.refusal for candidate in verdicts if candidate.backend == backend), "no backend takes it")
    raise ValueError(f"{backend} refuses: {refusal}")
