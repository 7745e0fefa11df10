"""Fixtures of laws: random tensors, the smallest model that exposes errors of a cache, and comparisons."""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from itertools import accumulate, pairwise
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile
from torch.utils._pytree import tree_leaves

from longitude.attention.backends import chunked
from longitude.attention.documents import runs_of
from longitude.attention.masks import Causal, Mask, NoMask
from longitude.attention.mixer import Mixer
from longitude.positions.base import Encoding
from longitude.positions.composed import Composed, compose
from longitude.positions.coordinates import Positions, explicit
from longitude.testing.engine import DoesNotApply, LawBroken, measure
from longitude.testing.examples import DIM, SHAPES, MixerExample

Named = dict[str, Tensor]


# ---- tensors ---------------------------------------------------------------------------------------------------------
def numbers(*shape: int, seed: int = 0) -> Tensor:
    """Random numbers that float32 represents exactly, as float64."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).double()


def heads_and_tokens(rows: int, keys: int, batch: int = 2) -> Named:
    """Random q [B, H, rows, D], k and v [B, Hkv, keys, D], and x [B, keys, dim], the tokens that context reads."""
    sizes = ("num_heads", rows), ("num_kv_heads", keys), ("num_kv_heads", keys)
    tensors = [numbers(batch, SHAPES[h], n, SHAPES["head_dim"], seed=1 + s) for s, (h, n) in enumerate(sizes)]
    return dict(zip("qkvx", (*tensors, numbers(batch, keys, DIM, seed=4)), strict=True))


def tensors_in(tables: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tables) if isinstance(leaf, Tensor)]


def learned_of(module: nn.Module) -> Named:
    return dict(module.named_parameters())


def parameters_of(encoding: nn.Module) -> Named:
    """Parameters of an encoding, by names that differ from those of inputs."""
    return {f"encoding.{name}": p for name, p in learned_of(encoding).items()}


def differentiable(**tensors: Tensor) -> Named:
    """Copies that require gradients."""
    return {name: x.detach().clone().requires_grad_() for name, x in tensors.items()}


def random_cuts(length: int, seed: int, most: int = 6) -> tuple[int, ...]:
    """Random cuts of a sequence: 0, at most `most` positions in between, length."""
    draw = random.Random(seed)
    inner = draw.sample(range(1, length), min(length - 1, draw.randint(1, most))) if length > 1 else []
    return (0, *sorted(inner), length)


# ---- the model -------------------------------------------------------------------------------------------------------
class LayerStack(nn.Module):
    """x -> x + mixer(x), twice or in as many layers as given, with the encodings that a model would bring.

    Upper layers read the outputs of lower ones: an error of a cache that one layer hides shows in two.
    """

    def __init__(self, build: MixerExample, layers: int = 2, encoding: Encoding | None = None, **options: Any):
        super().__init__()
        self.layers = nn.ModuleList(build(seed, **options) for seed in range(layers))
        self.encoding: Composed = build.encodings(self.mixer) if encoding is None else compose(encoding)
        if not self.mixer.bidirectional:
            self.require_order()
        self.mask: Mask = NoMask() if self.encoding.reads_neighbors else Causal()

    @property
    def mixer(self) -> Mixer:
        first = self.layers[0]
        assert isinstance(first, Mixer)
        return first

    def require_order(self) -> None:
        """DoesNotApply for an encoding of encoders, which reads tokens on both sides."""
        if self.encoding.reads_neighbors:
            raise DoesNotApply("it reads tokens on both sides")

    def caches(self) -> list[Any]:
        self.require_order()
        return [layer.cache_layer() for layer in self.layers]  # type: ignore[operator]  (a Mixer)

    def forward(
        self,
        x: Tensor,
        positions: Positions | None = None,
        documents: Tensor | None = None,
        caches: Sequence[Any] | None = None,
        mask: Mask | None = None,
    ) -> Tensor:
        """Run x [B, L, dim]. documents [B, Lk], cached tokens included, -1 for padding. positions None: after cached tokens.

        mask: None for that of the stack, causal unless its encoding reads tokens on both sides.
        """
        mask = self.mask if mask is None else mask
        if self.encoding.axes > 1 and isinstance(positions, Tensor) and positions.dim() == 2:
            positions = positions[..., None]  # [B, L] might be [L, axes]
        if self.encoding.at_input:
            places = explicit(0 if positions is None else positions, x.shape[1], x.device)
            x = self.encoding.embed(x, places, documents=None if documents is None else runs_of(documents))
        for n, layer in enumerate(self.layers):
            cache = None if caches is None else caches[n]
            x = x + layer(x, mask=mask, positions=positions, documents=documents, cache=cache, encoding=self.encoding)
        return x

    def in_chunks(
        self,
        x: Tensor,
        cuts: Sequence[int],
        positions: Callable[[int, int], Positions | None] = lambda a, b: a,
        documents: Tensor | None = None,
        caches: Sequence[Any] | None = None,
    ) -> Tensor:
        """Run x in chunks with a cache, cut at `cuts`, which include 0 and L."""
        caches = self.caches() if caches is None else caches
        parts = [
            self(x[:, a:b], positions(a, b), None if documents is None else documents[:, :b], caches)
            for a, b in pairwise(cuts)
        ]
        return torch.cat(parts, 1)

    def answer(
        self,
        x: Tensor,
        *rest: Any,
        forward: Callable[..., Tensor] | None = None,
        seen: Tensor | None = None,
        direction: Tensor | None = None,
    ) -> Named:
        """The output for x and the rest, and the gradients of x and every parameter; forward: another function for it."""
        x = x.detach().clone().requires_grad_()
        forward = self if forward is None else forward
        return with_gradients(lambda: forward(x, *rest), {"x": x, **learned_of(self)}, seen, direction)


# ---- comparing -------------------------------------------------------------------------------------------------------
def with_gradients(
    forward: Callable[[], Tensor],
    wanted: Mapping[str, Tensor],
    seen: Tensor | None = None,
    direction: Tensor | None = None,
) -> Named:
    """The output of forward(), and the gradient of each wanted tensor (zeros if it has none) along one direction.

    seen, such as [B, L, 1]: factor of the output, 0 where it is not compared, as at padding. direction: of the output's shape;
    by default the same random numbers for each row of a batch.
    """
    out = forward()
    if seen is not None:
        out = out * seen
    if direction is None:
        direction = numbers(*out.shape[1:], seed=9).expand(out.shape)
        direction = direction if seen is None else direction * seen
    grads: Sequence[Tensor | None] = [None] * len(wanted)
    if wanted and out.requires_grad:  # else no query has a key: a constant
        grads = torch.autograd.grad((out.double() * direction).sum(), list(wanted.values()), allow_unused=True)
    named = {
        f"gradient of {name}": torch.zeros_like(x) if g is None else g
        for (name, x), g in zip(wanted.items(), grads, strict=True)
    }
    return {"output": out.detach(), **named}


def error(got: Tensor, want: Tensor) -> float:
    """Max |got - want| / max(1, max |want|) of equal shapes; infinite if a number is not finite."""
    if not want.numel():
        return 0.0
    got, want = got.detach().double(), want.detach().double()
    gap = (got - want).abs().max() / max(1.0, float(want.abs().max()))
    return float(gap) if bool(torch.isfinite(got).all() & torch.isfinite(want).all()) else float("inf")


def close(what: str, got: Tensor | Named, want: Tensor | Named, threshold: float | None = None) -> None:
    """Measure the error of tensors, or of each of named tensors, relative to the largest number (at least 1).

    Args:
        what: Name of the compared quantity, for the message.
        got: A tensor, or tensors by name.
        want: The expected tensor or tensors.
        threshold: Threshold, if it differs from the running law's.

    Raises:
        LawBroken: For another shape, or an error above the threshold.
    """
    if isinstance(got, Tensor) and isinstance(want, Tensor):
        if got.shape != want.shape:
            raise LawBroken(f"{what}: expected a shape of {list(want.shape)}, got {list(got.shape)}")
        measure(what, error(got, want), threshold)
        return
    assert isinstance(got, dict) and isinstance(want, dict) and got.keys() == want.keys(), (got, want)
    for name in want:
        close(f"{what}, {name}", got[name], want[name], threshold)


def without_loops() -> AbstractContextManager[Any]:
    """Run recurrences in torch's operators, as if there were no C compiler."""
    from longitude.recurrent.ops import c_loops

    return patch.object(c_loops, "loops", lambda name, dtype: None)


def refused(what: str, call: Callable[[], Any], *parts: str) -> str:
    """The message of the ValueError that call() must raise: it has all of `words` in it."""
    try:
        call()
    except ValueError as e:
        message = str(e)
    except Exception as e:
        raise LawBroken(f"{what}: expected a ValueError, got {type(e).__name__}: {e}") from e
    else:
        raise LawBroken(f"{what}: was accepted, expected a ValueError")
    for word in parts:
        if word not in message:
            raise LawBroken(f"{what}: expected the message to name {word!r}, got {message!r}")
    return message


@contextmanager
def unchanged(what: str, *tensors: Tensor) -> Iterator[None]:
    """LawBroken if the block writes to one of these tensors, or changes a setting of torch."""

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


def small_blocks(rows: int, batch: int, keys: int, heads: int = SHAPES["num_heads"]) -> AbstractContextManager[Any]:
    """Context in which backends that work in blocks take about `rows` queries at a time, so that a toy has several blocks."""
    return patch.object(chunked, "BLOCK_BYTES", rows * 4 * batch * heads * keys * 8)


# ---- memory ----------------------------------------------------------------------------------------------------------
class Memory(NamedTuple):
    """Bytes on the CPU. largest: largest tensor. peak: most additional memory in use at a time."""

    largest: int
    peak: int


def memory_of(call: Callable[[], Any]) -> Memory:
    """Memory that call() allocates on the CPU, including custom operators and backward."""
    with _silent(), profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as seen:
        call()
    profiler: Any = seen.profiler  # its stubs know no sizes
    events = [event for event in profiler.kineto_results.events() if event.name() == "[memory]"]
    sizes = [event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())]
    assert sizes, "this build of torch does not record memory"
    return Memory(max(sizes), max(accumulate(sizes)))  # what is freed has a negative size


@contextmanager
def _silent() -> Iterator[None]:
    """Context that silences file descriptor 2, to which torch's profiler writes as it starts and ends."""
    kept, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nowhere, 2)
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nowhere)


# ---- caches ----------------------------------------------------------------------------------------------------------
def tensors_held(cache: Any) -> list[Tensor]:
    """Every tensor that a cache layer stores, in attributes, tuples, dicts and objects of our own.

    Args:
        cache: A layer of a cache, or any nest of such layers.

    Returns:
        The tensors.
    """
    tensors: list[Tensor] = []
    seen: set[int] = set()

    def walk(thing: Any) -> None:
        if id(thing) in seen:
            return
        seen.add(id(thing))
        for leaf in tree_leaves(thing):
            if isinstance(leaf, Tensor):
                tensors.append(leaf)
            elif hasattr(leaf, "__dict__") and not isinstance(leaf, type | torch.nn.Module) and not callable(leaf):
                seen.add(id(leaf))
                for value in vars(leaf).values():
                    walk(value)

    walk(cache)
    return tensors


def bytes_held(cache: Any) -> int:
    """Bytes of the storage of a cache, with shared storage counted once: a view of a long tensor keeps all of it.

    Args:
        cache: A layer of a cache, or any nest of such layers.

    Returns:
        The number of bytes.
    """
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors_held(cache)}
    return sum(storages.values())
