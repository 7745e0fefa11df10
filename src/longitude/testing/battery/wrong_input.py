"""Laws of wrong input: a ValueError with what was expected, and no side effect of the call."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from longitude.attention.masks import NoMask, Window
from longitude.attention.operation import attend
from longitude.errors import bound_of, excluded
from longitude.positions.bias import ALiBi
from longitude.positions.composed import compose
from longitude.positions.rotary import Rotary
from longitude.recurrent.base import RecurrentMixer
from longitude.registry import annotations_of
from longitude.testing.battery.decoding import CACHES
from longitude.testing.examples import DIM, ENCODING_LAWS, MIXER_LAWS, OTHER_SHAPES, SHAPES, Example, MixerExample
from longitude.testing.fixtures import heads_and_tokens, numbers, refused, tensors_in, unchanged

WRONG_NUMBERS = (0, -1, 1.5, "8", True)
Wrong = dict[str, tuple[Callable[[], Any], *tuple[str, ...]]]
"""Description of a mistake -> the call, and words that its error message must contain."""


@ENCODING_LAWS.law(name="wrong_input")
def wrong_input_of_encodings(build: Example) -> None:
    """Wrong shapes, heads, dtypes, devices, options and positions: a ValueError with what was expected.

    Positions that are negative, no integers or beyond max_length. What is refused has no side effect: no argument, random number
    or setting changes.
    """
    encoding = build()
    q, k, v, x = heads_and_tokens(7, 7).values()
    context = compose(encoding).context(x)[0]

    def calling(q: Tensor = q, k: Tensor = k, v: Tensor = v, **options: Any) -> Callable[[], Any]:
        return partial(attend, q, k, v, **{"encoding": encoding, "context": context, **options})

    wide = OTHER_SHAPES["head_dim"] + SHAPES["head_dim"]
    tried: Wrong = {
        "positions that are no integers": (calling(q_positions=torch.arange(7) * 1.0), "expected"),
        "negative positions": (calling(q_positions=torch.arange(7) - 1), "expected"),
        "a negative position": (calling(q_positions=-1), "expected"),
        "positions of another length": (calling(q_positions=torch.arange(8)), "expected"),
    }
    for name, column in context.items():
        tried[f"no column {name!r}"] = calling(context=None), "context"
        tried[f"column {name!r} of another length"] = calling(context={**context, name: column[:, :, 1:]}), "expected"
        tried[f"column {name!r} of another batch"] = calling(context={**context, name: column[:1]}), "expected"
    if "head_dim" in build.resolved() or hasattr(encoding, "head_dim"):
        tried["another head_dim"] = calling(numbers(2, 4, 7, wide), numbers(2, 2, 7, wide)), str(wide)
    if "num_heads" in build.resolved() or hasattr(encoding, "num_heads"):
        tried["another number of heads"] = calling(numbers(2, 6, 7, SHAPES["head_dim"])), "heads"

    prepares = bool(tensors_in(encoding.prepare(torch.arange(7))))
    bad_positions = {"no integers": torch.arange(7) * 1.0, "negative": torch.arange(7) - 1}
    if encoding.max_length is not None:
        bad_positions["beyond max_length"] = torch.arange(7) + encoding.max_length - 6
    for kind, positions in bad_positions.items():
        if encoding.at_input:
            tried[f"embed, positions {kind}"] = partial(encoding.embed, x, positions), "expected"
        if prepares:
            tried[f"prepare, positions {kind}"] = partial(encoding.prepare, positions), "expected"
    if encoding.at_input:
        tried["embed, another width"] = partial(encoding.embed, x[..., 1:], torch.arange(7)), "expected"
    if context:
        tried["context, another width"] = partial(compose(encoding).context, x[..., 1:]), "expected"
    tried |= wrong_options(build)
    arguments = [q, k, v, x, *context.values(), *encoding.parameters()]
    for what, (call, *parts) in tried.items():
        with unchanged(what, *arguments):
            refused(what, call, *parts)


def wrong_values(annotation: Any) -> Iterator[Any]:
    """Values that an annotation excludes: outside of its bounds, or of another type."""
    _, bound, _ = bound_of(annotation)
    numbers = () if bound is None else (bound.low - 1, bound.above, bound.high + 1)
    for value in (*(n for n in numbers if math.isfinite(n)), *WRONG_NUMBERS, math.nan, math.inf, "none of them"):
        if excluded(annotation, value) is not None:
            yield value


def wrong_options(build: Example | MixerExample) -> Wrong:
    """Options with values that their annotations exclude."""
    tried: Wrong = {}
    if isinstance(build.factory, type):  # a function builds classes, which are others' examples
        for option, annotation in annotations_of(build.factory).items():
            for wrong in wrong_values(annotation):
                tried[f"{option}={wrong!r}"] = partial(build.factory, **{option: wrong}), option
    return tried


@MIXER_LAWS.law(name="wrong_input", needs=CACHES)
def wrong_input_of_mixers(build: MixerExample) -> None:
    """Wrong shapes and options, caches, masks and encodings that a mixer cannot honour: a ValueError that names both.

    The state of another mixer or of another batch; an encoding with terms or rotations where there are no scores.
    """
    from longitude.attention.cache import LongitudeCacheLayer, StateLayer

    mixer = build()
    name = type(mixer).__name__
    encoding, x = build.encodings(mixer), numbers(2, 7, DIM)
    foreign = StateLayer()
    foreign.write("Another", (torch.zeros(2, 3, 4),), 5, 0)

    def calling(x: Tensor = x, **options: Any) -> Callable[[], Any]:
        return partial(mixer, x, **{"encoding": encoding, "positions": 0, **options})

    tried: Wrong = {
        "x of another width": (calling(x[..., 1:]), "expected", str(DIM)),
        "x without a batch": (calling(x[0]), "expected"),
        "no tokens": (calling(x[:, :0]), "expected"),
        "documents that are no integers": (calling(documents=torch.rand(2, 7)), "documents", "integers", "float32"),
        "documents of another length": (calling(documents=torch.zeros(2, 6).long()), "documents", "expected"),
        "a mask by name": (calling(mask="causal"), "mask", "expected"),
        "a cache filled by another mixer": (calling(cache=foreign, positions=None), "cache", "expected"),
    }
    if isinstance(mixer, RecurrentMixer):
        keys = LongitudeCacheLayer()
        tried |= {
            "a window": (calling(mask=Window(3)), "mask", name),
            "a memory": (calling(memory=x), "memory", name),
            "a cache of keys": (calling(cache=keys, positions=None), "cache", name, "LongitudeCacheLayer"),
        }
    if not mixer.bidirectional:
        tried["a bidirectional mask"] = calling(mask=NoMask()), "mask", name, "NoMask"
    for able, kind in ((mixer.scores, ALiBi(4)), (mixer.rotates, Rotary(8, "half"))):
        if not able:
            parts = type(kind).__name__, name, "expected"
            tried[f"an encoding {parts[0]}"] = calling(encoding=compose(kind)), *parts
    tried |= wrong_options(build)
    if build.has("mode"):
        tried["mode='fast'"] = (lambda: build(mode="fast")(numbers(1, 3, DIM))), "mode"
    for what, (call, *parts) in tried.items():
        refused(what, call, *parts)
