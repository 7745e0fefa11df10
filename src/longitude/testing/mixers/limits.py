"""Laws of the limits: what is refused and in what words, what remains finite, and that a compiler can follow."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from longitude.attention.masks import Causal, NoMask
from longitude.positions.bias import ALiBi
from longitude.positions.composed import compose
from longitude.positions.rotary import Rotary
from longitude.recurrent.base import RecurrentMixer
from longitude.testing.fixtures import LawBroken, close, differentiable, learned_of, numbers, refused, with_gradients
from longitude.testing.mixers.fixtures import DIM, MixerExample, Network

WHOLE_NUMBERS = ("dim", "num_heads", "num_kv_heads", "head_dim", "chunk_size", "size", "window")


def law_wrong_input(build: MixerExample) -> str | None:
    """Wrong shapes and options, the state of another mixer or of another batch, a mask that a mixer cannot honour, an encoding
    with terms or turns where there are no scores: a ValueError that names both.
    """
    mixer = build()
    name = type(mixer).__name__
    encoding = build.encodings(mixer)
    x = numbers(2, 7, DIM)

    def asks(x: Tensor = x, **options: Any) -> Callable[[], Any]:
        return partial(mixer, x, **{"encoding": encoding, "positions": 0, **options})

    tried: dict[str, tuple[Callable[[], Any], tuple[str, ...]]] = {
        "x of another width": (asks(x[..., 1:]), ("expected", str(DIM))),
        "x without a batch": (asks(x[0]), ("expected",)),
        "no tokens": (asks(x[:, :0]), ("expected",)),
        "documents that are no integers": (
            asks(documents=torch.rand(2, 7)),
            ("documents", "expected integers", "float32"),
        ),
        "documents of another length": (asks(documents=torch.zeros(2, 6, dtype=torch.long)), ("documents", "expected")),
        "a mask by name": (asks(mask="causal"), ("mask", "expected")),
        "a cache filled by another mixer": (asks(cache=_foreign(), positions=None), ("cache", "expected")),
    }
    if isinstance(mixer, RecurrentMixer):
        tried |= {
            "a mask in another order": (asks(mask=Causal(order=torch.arange(7))), ("mask", name)),
            "a memory": (asks(memory=x), ("memory", name)),
            "a cache of keys": (asks(cache=_keys(), positions=None), ("cache", name, "LongitudeCacheLayer")),
            "a cache of another batch": (_continued(mixer, x, numbers(3, 2, DIM)), ("expected",)),
            "documents of this call alone": (
                _continued(mixer, x, x[:, :2], documents=torch.zeros(2, 2, dtype=torch.long)),
                ("documents", "expected", "9"),
            ),
        }
    if not mixer.bidirectional:
        tried["a mask both ways"] = asks(mask=NoMask()), ("mask", name, "NoMask")
    for able, kind in ((mixer.scores, ALiBi(4)), (mixer.rotates, Rotary(8, "half"))):
        if not able:
            here = f"an encoding {type(kind).__name__}"
            tried[here] = asks(encoding=compose(kind)), (type(kind).__name__, name, "expected")
    for option in WHOLE_NUMBERS:
        for wrong in (0, -1, 1.5, "8", True) if build.has(option) else ():
            tried[f"{option}={wrong!r}"] = partial(build, filled=False, **{option: wrong}), ("expected",)
    if build.has("mode"):
        tried["mode='fast'"] = _first_use(build, mode="fast"), ("mode",)
    for what, (call, said) in tried.items():
        refused(what, call, *said)
    return None


def law_weights(build: MixerExample) -> str | None:
    """has_weights: return_weights gives, with the same output, weights [B, H, L, Lk] whose rows sum to 1, with nothing on
    later keys, whole and with a cache; elsewhere it is a ValueError that names it and the mixer.
    """
    mixer, x = build(), numbers(2, 9, DIM)
    call = torch.no_grad()(partial(mixer, encoding=build.encodings(mixer)))
    if not mixer.has_weights:
        asked = partial(call, x, positions=0, return_weights=True)
        refused("return_weights", asked, "return_weights", type(mixer).__name__)
        return None
    whole, cache = call(x, positions=0), mixer.cache_layer()
    ways = (
        ("", 0, 9, {"positions": 0}),
        (", an empty cache", 0, 6, {"cache": cache}),
        (", 6 cached", 6, 9, {"cache": cache}),
    )
    for where, start, stop, options in ways:
        answer = call(x[:, start:stop], **options, return_weights=True)
        if not isinstance(answer, tuple):
            raise LawBroken(f"return_weights{where}: expected the output and the weights, got {type(answer).__name__}")
        out, weights = answer
        close(f"output{where}", out, whole[:, start:stop])
        close(f"sum of weights{where}", weights.sum(-1), torch.ones_like(weights[..., 0]))
        keys = torch.arange(weights.shape[3]) + stop - weights.shape[3]
        later = keys > torch.arange(start, stop)[:, None]
        close(f"weights of later keys{where}", weights * later, torch.zeros_like(weights))
    return None


def _first_use(build: MixerExample, **options: Any) -> Callable[[], Any]:
    return lambda: build(**options)(numbers(1, 3, DIM))


def _foreign() -> Any:
    from longitude.attention.state_cache import StateLayer

    layer = StateLayer()
    layer.write("Another", (torch.zeros(2, 3, 4),), 5, 0)
    return layer


def _keys() -> Any:
    from longitude.attention.cache import LongitudeCacheLayer

    return LongitudeCacheLayer()


def _continued(mixer: RecurrentMixer, x: Tensor, more: Tensor, **options: Any) -> Callable[[], Any]:
    def call() -> Any:
        cache = mixer.cache_layer()
        mixer(x, cache=cache)
        return mixer(more, cache=cache, **options)

    return torch.no_grad()(call)


def law_finite(build: MixerExample) -> str | None:
    """Zeros, one token over and over, and inputs a thousand times as large, in float32: finite outputs, states and gradients,
    with and without a cache.
    """
    inputs = {
        "zeros": torch.zeros(2, 63, DIM),
        "one token": numbers(2, 1, DIM).float().expand(2, 300, DIM),
        "large": 1e3 * numbers(2, 63, DIM).float(),
        "huge, then small": torch.cat([1e4 * numbers(2, 9, DIM), 1e-3 * numbers(2, 54, DIM)], 1).float(),
    }
    for name, options in build.forms((16,)).items():
        net = Network(
            build, layers=1, **options
        ).float()  # a product of inputs in each would be beyond float32 after two
        where = f", {name}" if name else ""
        for what, x in inputs.items():
            given = differentiable(x=x)
            answer = with_gradients(lambda given=given: net(given["x"], 0), {**given, **learned_of(net)})  # noqa: B023
            for part, found in answer.items():
                if not bool(found.isfinite().all()):
                    raise LawBroken(f"{what}{where}: {part} is not finite")
            with torch.no_grad():
                if not bool(net.in_pieces(x, (0, 9, 10, x.shape[1])).isfinite().all()):
                    raise LawBroken(f"{what}{where}: outputs in pieces are not finite")
    return None


def law_compile(build: MixerExample) -> str | None:
    """torch.compile(fullgraph=True) follows it, forward and backward, alone and with documents: same output, gradients of tokens
    and of parameters. No compiler is needed: the graphs run as they are.
    """
    from torch._dynamo import reset

    net = Network(build).float()
    inputs = differentiable(x=numbers(2, 21, DIM).float())
    x, wanted = inputs["x"], {**inputs, **learned_of(net)}
    documents = torch.tensor([[0] * 9 + [1] * 12, [-1] * 4 + [0] * 17])
    positions = torch.arange(21).expand(2, 21)
    reset()
    try:
        compiled = torch.compile(net, backend="aot_eager", fullgraph=True)
        for what, ids in (("", None), (" with documents", documents)):
            seen = None if ids is None else (ids >= 0)[..., None].float()
            got, want = (
                with_gradients(lambda f=f: f(x, positions, ids), wanted, seen)  # noqa: B023
                for f in (compiled, net)
            )
            close(f"compiled{what}", got, want, 1e-4)
    finally:
        reset()
    return None
