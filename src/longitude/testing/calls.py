"""Laws of calls that follow one another: in another mode, refused, taken back, and of one token alone."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from longitude.attention.cache import LongitudeCacheLayer
from longitude.positions.composed import compose
from longitude.testing.fixtures import SHAPES, Example, LawBroken, Stack, close, learned_of, numbers, tensors_in
from longitude.testing.mixers.fixtures import MixerExample, mixer_example
from longitude.testing.mixers.models import language_model, looked_up
from longitude.testing.mixers.refused import in_model

MODES_OF_TORCH: dict[str, Any] = {
    "gradients": torch.enable_grad,
    "no_grad": torch.no_grad,
    "inference_mode": torch.inference_mode,
}


def law_modes_of_torch(build: Example) -> str | None:
    """A cache filled with gradients, under no_grad or in inference_mode is read in every other mode, by one token and by several,
    with a backward where there are gradients, and continues in the first.
    """
    stack, x = Stack(build()), numbers(2, 11, SHAPES["dim"])
    want = stack(x).detach()
    for before, one in MODES_OF_TORCH.items():
        for after, other in MODES_OF_TORCH.items():
            if before == after:
                continue
            here = f"prefill in {before}, the rest in {after}"
            caches = [LongitudeCacheLayer() for _ in stack.layers]
            parts: list[Tensor] = []
            for mode, a, b in ((one, 0, 5), (other, 5, 6), (other, 6, 9), (one, 9, 11)):
                with mode():
                    parts.append(stack(x[:, a:b], a, caches=caches).clone())
            if after == "gradients":
                (parts[1].sum() + parts[2].sum()).backward()
            with torch.no_grad():
                close(here, torch.cat([part.clone() for part in parts], 1), want)
    return None


def law_takes_part(build: Example) -> str | None:
    """Every parameter that requires a gradient gets one, of zeros where it had no say, from one token on, on every backend that
    gives gradients. Trainers that split a model over machines wait for each of them.
    """
    encoding = build()
    for backend in ("auto", "reference"):
        stack = Stack(encoding, backend)
        learned = learned_of(stack)
        for length in (1, 2, 5):
            out = stack(numbers(2, length, SHAPES["dim"]))
            grads = torch.autograd.grad(out.sum(), [*learned.values()], allow_unused=True)
            if missing := [name for name, g in zip(learned, grads, strict=True) if g is None]:
                raise LawBroken(f"backend {backend}, {length} tokens: no gradient, not even of zeros, for {missing}")
    return None


def law_refused_calls(build: Example) -> str | None:
    """In a model of two layers, a refused call leaves a filled cache as it was: wrong documents, positions, masks and batches,
    and a crop that cannot be. One that is not refused is a crop or weights, and a cropped cache continues, too.
    """
    with torch.no_grad():
        in_model("two layers", language_model(*_attention(), encoding=compose(build())))
    return None


def law_prompt_lookup(build: Example) -> str | None:
    """In a model, greedy generation with prompt lookup writes what it writes without, or is refused before the first call. An
    encoding that hands something from token to token, which could not be taken back, declares `carries`.
    """
    encoding = compose(build())
    carried = bool(tensors_in(encoding.context(numbers(1, 3, SHAPES["dim"]))[1]))
    if carried != encoding.carries:
        raise LawBroken(
            f"declared carries = {encoding.carries}, and its context hands on {'a state' if carried else 'none'}"
        )
    looked_up("two layers", language_model(*_attention(), encoding=encoding))
    return None


def _attention() -> tuple[MixerExample, MixerExample]:
    return mixer_example("attention"), mixer_example("attention")
