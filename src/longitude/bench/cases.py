"""What is timed: attention with an encoding, and plain causal attention, on the same tensors."""

import io
from collections.abc import Callable, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

import longitude as lg
from longitude.models import LongitudeConfig
from longitude.positions.base import Encoding, OffsetBias
from longitude.positions.composed import Composed, compose
from longitude.study.config import parse_encoding
from longitude.testing import fill


@dataclass(frozen=True)
class AttentionShape:
    """The size of a piece of attention: q [batch, heads, length, head_dim], k and v [batch, kv_heads, length, head_dim]."""

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
        """Of one [batch, heads, length, head_dim]."""
        return self.batch * self.dim * self.length * self.torch_dtype.itemsize

    @property
    def score_bytes(self) -> int:
        """Of one [batch, heads, length, length]."""
        return self.batch * self.heads * self.length**2 * self.torch_dtype.itemsize


@dataclass(frozen=True)
class Inputs:
    """q, k, v, the tokens x [batch, length, dim], and a gradient for the output; all cases of a work share them."""

    work: AttentionShape
    q: Tensor
    k: Tensor
    v: Tensor
    x: Tensor
    gradient: Tensor

    @classmethod
    def of(cls, work: AttentionShape, empty: bool = False) -> "Inputs":
        """Random numbers; empty: one number seen everywhere, which takes no memory, to ask what they would need."""
        generator = torch.Generator().manual_seed(0)

        def numbers(*shape: int) -> Tensor:
            if empty:
                return torch.zeros((), dtype=work.torch_dtype).expand(shape)
            return torch.randn(shape, generator=generator, dtype=torch.float32).to(work.torch_dtype)

        q, gradient = (numbers(work.batch, work.heads, work.length, work.head_dim) for _ in range(2))
        k, v = (numbers(work.batch, work.kv_heads, work.length, work.head_dim) for _ in range(2))
        x = numbers(work.batch, work.length, work.dim)
        for each in (q, k, v, x):
            each.requires_grad_()
        return cls(work, q, k, v, x, gradient)


@dataclass(frozen=True)
class Case:
    """One way to do the work: forward() -> outputs, each of the shape of an input or of the output of attention.

    wanted: what a training step would want gradients of. backend: what runs it, in words.
    """

    name: str
    forward: Callable[[], Sequence[Tensor]]
    wanted: Sequence[Tensor]
    backend: str
    peer: bool = False
    _gradients: list[Tensor] = field(default_factory=list)

    def step(self, backward: bool) -> Callable[[], object]:
        """What is timed: without gradients, or with those of everything wanted."""
        if not backward:
            return torch.no_grad()(self.forward)

        def both() -> object:
            outputs = self.forward()
            if not self._gradients:  # made in the turn that warms up
                self._gradients.extend(torch.randn_like(out) for out in outputs)
            return torch.autograd.grad(outputs, self.wanted, self._gradients, allow_unused=True)

        return both


PLAIN = "plain"


def plain(inputs: Inputs) -> Case:
    """Causal scaled_dot_product_attention and nothing else."""
    q, k, v = inputs.q, inputs.k, inputs.v
    grouped = k.shape[1] != q.shape[1]
    return Case(
        PLAIN,
        lambda: [F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped)],
        [q, k, v],
        "torch",
    )


def built(label: str, work: AttentionShape) -> Composed:
    """A label as the command line knows it, at this size, with random learned numbers."""
    shape = LongitudeConfig(
        hidden_size=work.dim,
        num_attention_heads=work.heads,
        num_key_value_heads=work.kv_heads,
        num_hidden_layers=1,
        max_position_embeddings=work.length,
        encoding=parse_encoding(label),
    )
    encoding = compose([lg.encoding(**spec) for spec in shape.layer_specs()[0]])
    return fill(encoding).to(work.torch_dtype)


def ours(label: str, backend: str, inputs: Inputs, gradients: bool = True) -> Case:
    """lg.attend with an encoding; what it does at the input, and the columns that it reads off the tokens, included.

    ValueError in the words of attend where the backend refuses. gradients: whether they will be asked for, because a
    backend may be chosen by that.
    """
    q, k, v, x = inputs.q, inputs.k, inputs.v, inputs.x
    encoding = built(label, inputs.work)
    positions = torch.arange(inputs.work.length)

    def forward() -> list[Tensor]:
        outputs = [encoding.embed(x, positions)] if encoding.at_input else []
        columns = encoding.context(x)[0] if encoding.reads_tokens else None
        return [*outputs, lg.attend(q, k, v, encoding=encoding, context=columns, backend=backend)]

    reads = encoding.at_input or encoding.reads_tokens
    wanted = [q, k, v, *([x] if reads else []), *encoding.parameters()]
    chosen, _ = verdict(encoding, backend, inputs, gradients)
    return Case(label, forward, wanted, chosen)


def verdict(encoding: Composed, backend: str, inputs: Inputs, gradients: bool) -> tuple[str, int]:
    """The backend that takes it, and the bytes that it says it needs beyond inputs and output. ValueError: none does."""
    with torch.set_grad_enabled(gradients), redirect_stdout(io.StringIO()):
        columns = encoding.context(inputs.x)[0] if encoding.reads_tokens else None
        said = lg.explain(inputs.q, inputs.k, inputs.v, encoding=encoding, context=columns, backend=backend)
    for one in said:
        if one.chosen:
            return one.backend, one.memory
    refusal = next((one.refusal for one in said if one.backend == backend), "no backend takes it")
    raise ValueError(f"{backend} refuses: {refusal}")


# ---- which encodings do nothing but one thing ------------------------------------------------------------------------
TINY = AttentionShape(1, 8, 8, 64, 16)


def offset_biases(learned: bool | None = None) -> list[str]:
    """Those that only add a bias of the offset; learned: of these, those that learn it, or that do not."""
    found = {name: built(name, TINY) for name in lg.list_encodings()}
    return [
        name
        for name, encoding in found.items()
        if not _at_tokens(encoding)
        and not _turns(encoding)
        and (terms := encoding.terms({}))
        and all(isinstance(term, OffsetBias) for term in terms)
        and learned in (None, encoding.learned)
    ]


def rotations() -> list[str]:
    """Those that only transform queries and keys."""
    found = {name: built(name, TINY) for name in lg.list_encodings()}
    return [name for name, each in found.items() if _turns(each) and not _at_tokens(each) and not each.terms({})]


def _at_tokens(encoding: Composed) -> bool:
    return encoding.at_input or encoding.reads_tokens


def _turns(encoding: Composed) -> bool:
    return any(type(member).keys is not Encoding.keys for member in encoding)


def find(name: str, backend: str, inputs: Inputs) -> Case:
    """A case by its name: plain, a peer, or an encoding of ours."""
    from longitude.bench.peers import PEERS  # made of cases

    if name == PLAIN:
        return plain(inputs)
    for peer in PEERS:
        if peer.name == name:
            return peer.case(inputs)
    return ours(name, backend, inputs)
