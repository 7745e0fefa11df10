"""What the laws are tried on: encodings at toy size, the smallest model a cache can go wrong in, and how to compare."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from longitude.attention.backends import chunked
from longitude.attention.layers.multihead import MultiHeadAttention
from longitude.attention.masks import Causal, Mask
from longitude.errors import unknown
from longitude.positions.base import ENCODINGS, Encoding, Positions, explicit
from longitude.positions.composed import compose
from longitude.registry import options_of

SHAPES = {"dim": 16, "num_heads": 4, "num_kv_heads": 2, "head_dim": 8, "max_length": 600}
"""The toy size: options of these names are filled in; an encoding built otherwise must fit them."""

OTHER_SHAPES = {"dim": 12, "num_heads": 2, "num_kv_heads": 1, "head_dim": 4, "max_length": 500}


compared: ContextVar[list[tuple[float, float]] | None] = ContextVar("compared", default=None)
"""Where a list stands, `close` adds the error and the tolerance of everything that it compares."""


class LawBroken(AssertionError):
    """A law does not hold: which, where, by how much."""


@dataclass(frozen=True)
class Example:
    """Makes one kind of encoding at toy size: fresh, in float64, learned parameters filled with random numbers.

    factory: a class, or a function of any of the options in SHAPES (or of none) that returns an Encoding; its options are
    `options`, else SHAPES and the factory's own `model_defaults` where it has no default, else its default.
    """

    factory: Callable[..., Encoding]
    options: Mapping[str, Any] = field(default_factory=dict)

    def __call__(self, seed: int = 0, filled: bool = True, **shapes: Any) -> Encoding:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            encoding = self.factory(**self.resolved(**shapes)).double().eval()
        if not isinstance(encoding, Encoding):
            raise ValueError(f"expected a function that returns an Encoding, got {encoding!r}")
        return fill(encoding, seed) if filled else encoding

    def resolved(self, **shapes: Any) -> dict[str, Any]:
        """The options it is built with; `shapes` go before everything else."""
        parameters = options_of(self.factory)
        for name in self.options:
            if name not in parameters:
                raise unknown("option", name, parameters, f"of {self.factory!r}")
        known = {**SHAPES, **getattr(self.factory, "model_defaults", {}), **self.options, **shapes}
        asked = {*self.options, *(shapes.keys() - SHAPES.keys())}
        return {
            name: known[name]
            for name, p in parameters.items()
            if name in known and (name in asked or p.default in (None, inspect.Parameter.empty))
        }


def example(encoding: str | Callable[..., Encoding] | Example, **options: Any) -> Example:
    """An Example of a registered name, a class, or a function that builds; with the options said."""
    if isinstance(encoding, Example):
        return Example(encoding.factory, {**encoding.options, **options})
    if isinstance(encoding, Encoding):
        raise ValueError("expected a name, a class or a function that builds a fresh encoding, got an encoding")
    return Example(ENCODINGS[encoding] if isinstance(encoding, str) else encoding, options)


@torch.no_grad()
def fill(module: nn.Module, seed: int = 0, std: float = 0.5) -> Any:
    """Random numbers in every parameter: what is zero at first shows no error. What starts above zero stays above."""
    generator = torch.Generator().manual_seed(seed)
    for _, p in sorted(module.named_parameters()):
        above = bool((p > 0).all())
        noise = std * torch.randn(p.shape, generator=generator, dtype=torch.float64)
        p.copy_(noise.abs() + 0.1 if above else noise)
    return module


class Stack(nn.Module):
    """x -> x + attention(x), twice, with grouped heads and one encoding.

    Upper layers see what lower ones made of the past: an error of a cache that one layer hides shows in two.
    """

    def __init__(self, encoding: Encoding, backend: str = "auto", layers: int = 2, **shapes: Any):
        super().__init__()
        sizes = {**SHAPES, **shapes}
        dim, heads, kv_heads, head_dim = (sizes[n] for n in ("dim", "num_heads", "num_kv_heads", "head_dim"))
        self.layers = fill(
            nn.ModuleList(
                MultiHeadAttention(dim, heads, kv_heads, head_dim=head_dim, backend=backend) for _ in range(layers)
            ).double(),
            std=dim**-0.5,
        )
        self.encoding = compose(encoding)

    def forward(
        self,
        x: Tensor,
        positions: Positions = 0,
        mask: Mask = Causal(),  # noqa: B008 (frozen)
        documents: Tensor | None = None,
        caches: Sequence[Any] | None = None,
    ) -> Tensor:
        """X [B, L, dim]; positions of x; documents [B, Lk], cached tokens included, -1 for padding."""
        x = self.encoding.embed(x, explicit(positions, x.shape[1], x.device))
        for n, layer in enumerate(self.layers):
            cache = None if caches is None else caches[n]
            x = x + layer(x, mask=mask, positions=positions, documents=documents, cache=cache, encoding=self.encoding)
        return x


def numbers(*shape: int, seed: int = 0) -> Tensor:
    """Random numbers that float32 holds exactly, as float64."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).double()


def heads_and_tokens(rows: int, keys: int, batch: int = 2, **shapes: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Q [B, H, rows, D], k and v [B, Hkv, keys, D], x [B, keys, dim], the tokens that context reads."""
    s = {**SHAPES, **shapes}
    return (
        numbers(batch, s["num_heads"], rows, s["head_dim"], seed=1),
        numbers(batch, s["num_kv_heads"], keys, s["head_dim"], seed=2),
        numbers(batch, s["num_kv_heads"], keys, s["head_dim"], seed=3),
        numbers(batch, keys, s["dim"], seed=4),
    )


Named = dict[str, Tensor]


def with_gradients(forward: Callable[[], Tensor], wanted: Mapping[str, Tensor], seen: Tensor | None = None) -> Named:
    """The output of forward(), and the gradient of each wanted tensor (zeros where none) for one fixed direction.

    seen [B, L, 1] or so: multiplies the output; 0 where it means nothing, as for padding.
    """
    out = forward()
    if seen is not None:
        out = out * seen
    if not wanted:
        return {"output": out.detach()}
    direction = numbers(*out.shape[1:], seed=9).expand(out.shape)  # the same for each row of a batch
    direction = direction if seen is None else direction * seen
    grads: Sequence[Tensor | None] = [None] * len(wanted)
    if out.requires_grad:  # nobody sees anything: a constant
        grads = torch.autograd.grad((out.double() * direction).sum(), list(wanted.values()), allow_unused=True)
    named = {
        f"gradient of {name}": torch.zeros_like(x) if g is None else g
        for (name, x), g in zip(wanted.items(), grads, strict=True)
    }
    return {"output": out.detach(), **named}


def tensors_in(tables: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tables) if isinstance(leaf, Tensor)]


def learned_of(module: nn.Module) -> Named:
    return dict(module.named_parameters())


def parameters_of(encoding: nn.Module) -> Named:
    """The same, by names that no input has."""
    return {f"encoding.{name}": p for name, p in learned_of(encoding).items()}


def differentiable(**tensors: Tensor) -> Named:
    """Copies that take a gradient."""
    return {name: x.detach().clone().requires_grad_() for name, x in tensors.items()}


def error(got: Tensor, want: Tensor) -> float:
    """Max |got - want| / max(1, max |want|); infinite where something is not finite."""
    if got.shape != want.shape:
        raise LawBroken(f"expected a shape of {list(want.shape)}, got {list(got.shape)}")
    if not want.numel():
        return 0.0
    got, want = got.detach().double(), want.detach().double()
    gap = (got - want).abs().max() / max(1.0, float(want.abs().max()))
    return float(gap) if bool(torch.isfinite(got).all() & torch.isfinite(want).all()) else float("inf")


def close(what: str, got: Tensor | Named, want: Tensor | Named, tolerance: float = 1e-9) -> None:
    """LawBroken with the measured error, unless within the tolerance."""
    if isinstance(got, Tensor) and isinstance(want, Tensor):
        if got.shape != want.shape:
            raise LawBroken(f"{what}: expected a shape of {list(want.shape)}, got {list(got.shape)}")
        gap = error(got, want)
        if (seen := compared.get()) is not None:
            seen.append((gap, tolerance))
        if gap > tolerance:
            raise LawBroken(f"{what}: differs by {gap:.2e}, more than {tolerance:.0e}")
        return
    assert isinstance(got, dict) and isinstance(want, dict) and got.keys() == want.keys(), (got, want)
    for name in want:
        close(f"{what}, {name}", got[name], want[name], tolerance)


def refused(what: str, call: Callable[[], Any], *said: str) -> str:
    """The message of the ValueError that call() must raise: it says what it expected, and all of `said`."""
    try:
        call()
    except ValueError as e:
        message = str(e)
    except Exception as e:
        raise LawBroken(f"{what}: expected a ValueError, got {type(e).__name__}: {e}") from e
    else:
        raise LawBroken(f"{what}: was accepted, expected a ValueError")
    for words in said:
        if words not in message:
            raise LawBroken(f"{what}: expected the message to say {words!r}, got {message!r}")
    return message


@contextmanager
def unchanged(what: str, *tensors: Tensor) -> Iterator[None]:
    """LawBroken where what happens inside writes to one of these tensors, or leaves another state of torch's: its random
    numbers, gradient mode, dtype, threads, determinism.
    """

    def settings() -> dict[str, Any]:
        return {
            "random numbers": torch.get_rng_state().numpy().tobytes(),
            "the gradient mode": (torch.is_grad_enabled(), torch.is_inference_mode_enabled()),
            "autocast": torch.is_autocast_enabled("cpu"),
            "the default dtype": torch.get_default_dtype(),
            "the number of threads": torch.get_num_threads(),
            "determinism": torch.are_deterministic_algorithms_enabled(),
            "a tensor that was given": [x._version for x in tensors],
        }

    before = settings()
    yield
    after = settings()
    for name in before:
        if before[name] != after[name]:
            raise LawBroken(f"{what}: changed {name}")


@contextmanager
def small_blocks(rows: int, batch: int, keys: int, heads: int = SHAPES["num_heads"]) -> Iterator[None]:
    """Lets the backends that work in blocks take about so many queries at a time, so that a toy has several blocks."""
    before = chunked.BLOCK_BYTES
    chunked.BLOCK_BYTES = rows * 4 * batch * heads * keys * 8
    try:
        yield
    finally:
        chunked.BLOCK_BYTES = before
