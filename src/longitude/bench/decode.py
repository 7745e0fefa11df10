"""What a generated token costs behind a long context: time of a step and bytes of the cache, for each mixer in a small decoder.

Mixers are named by labels as a study names its models. Every cache is filled by a chunked prefill, the way a prompt fills it.
"""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch

import longitude as lg
from longitude.attention.cache import LongitudeCache
from longitude.attention.mixer import list_mixers
from longitude.bench.clock import CLOCKS, Clock, interleaved
from longitude.bench.config import TURNS_OF_DECODING, BenchConfig
from longitude.bench.rows import timed
from longitude.bench.sweep import Watcher, threads
from longitude.study.labels import parse_label
from longitude.testing.mixers import bytes_held

VOCABULARY, WIDTH, LAYERS, HEADS = 256, 256, 4, 4
PIECE = 512
"""Tokens of one call of the prefill."""
GROWTHS = ("O(1)", "O(log N)", "O(N)")
TAIL = 8
"""Exponents are of the contexts from the longest over this on: before, what costs the same at every length shows most."""


@dataclass(frozen=True, kw_only=True)
class Step:
    """A token behind `context` tokens. seconds: the median of a step, with its quartiles; ratio: to the step of the same label
    behind `against` tokens in the same turn. cache_bytes: of the memory that the cache holds. prefill: seconds that it took
    from the context before.
    """

    label: str
    context: int
    seconds: float
    seconds_low: float
    seconds_high: float
    ratio: float | None = None
    ratio_low: float | None = None
    ratio_high: float | None = None
    against: str
    cache_bytes: int
    prefill: float
    threads: int
    clock: str
    turns: int

    @property
    def bytes_per_token(self) -> float:
        return self.cache_bytes / self.context

    def as_dict(self) -> dict[str, Any]:
        return asdict(self) | {"bytes_per_token": self.bytes_per_token}


@dataclass(frozen=True, kw_only=True)
class Line:
    """All steps of a label. mixers, encoding: resolved. growth: of the cache with the tokens N, as the mixers declare it, the
    steepest of a hybrid. time_exponent, memory_exponent: p of N^p, fitted to the longest contexts; None for fewer than two.
    """

    label: str
    mixers: list[dict[str, Any]]
    growth: str
    time_exponent: float | None
    memory_exponent: float | None


def configuration(label: str, longest: int) -> lg.LongitudeConfig:
    """Of a decoder of 4 layers, 256 wide. ValueError for a label that means none."""
    return lg.LongitudeConfig(
        vocab_size=VOCABULARY, hidden_size=WIDTH, num_hidden_layers=LAYERS, num_attention_heads=HEADS,
        max_position_embeddings=longest, **parse_label(label).options(LAYERS),
    )  # fmt: skip


class Decoder:
    """Such a decoder with random weights, and tokens for it."""

    def __init__(self, label: str, longest: int):
        torch.manual_seed(0)
        self.label, config = label, configuration(label, longest)
        self.model: Any = lg.LongitudeForCausalLM(config).eval()
        self.mixers = [block.mixer for block in self.model.model.layers]
        self.specs = config.layer_mixers()
        self.ids = torch.randint(VOCABULARY, (1, longest), generator=torch.Generator().manual_seed(0))

    @property
    def growth(self) -> str:
        return max((mixer.growth for mixer in self.mixers), key=GROWTHS.index)

    @torch.no_grad()
    def filled(
        self, contexts: tuple[int, ...], clock: Clock = time.perf_counter
    ) -> Iterator[tuple[LongitudeCache, float]]:
        """For each context, ascending: a cache of its own that holds it, and the seconds since the one before."""
        cache, past = LongitudeCache([mixer.cache_layer() for mixer in self.mixers]), 0
        for context in contexts:
            start = clock()
            for a in range(past, context, PIECE):
                piece = self.ids[:, a : min(a + PIECE, context)]
                self.model.model(piece, past_key_values=cache, use_cache=True)
            spent, past = clock() - start, context
            yield copy.deepcopy(cache), spent

    def step(self, cache: LongitudeCache) -> Callable[[], object]:
        """One more token, and the logits of the next."""
        token = self.ids[:, :1]
        return torch.no_grad()(lambda: self.model(token, past_key_values=cache, use_cache=True).logits)


SAID = {"attention": "rope+attention", "window": "window:size=512"}
"""Labels of mixers that need more than their name."""


def all_labels() -> tuple[str, ...]:
    """Every mixer, with what positions it takes by itself."""
    return tuple(SAID.get(name, name) for name in list_mixers())


def decode(config: BenchConfig, progress: Watcher) -> tuple[list[Line], list[Step]]:
    """Measure a checked configuration. Every turn takes one step with each label behind each context."""
    clock, turns = CLOCKS[config.clock], TURNS_OF_DECODING * config.repeats
    against = 1024 if 1024 in config.contexts else config.contexts[0]
    cases = [(label, context) for label in config.mixers for context in config.contexts]
    names = {case: f"{case[0]} behind {case[1]}" for case in cases}
    progress.expect(len(cases) * (turns + 2))
    with threads(config.threads) as count:
        decoders = {label: Decoder(label, config.contexts[-1] + turns + 1) for label in config.mixers}
        taken, held, spent = {}, {}, {}
        for label, decoder in decoders.items():
            for context, (cache, seconds) in zip(config.contexts, decoder.filled(config.contexts, clock), strict=True):
                case = label, context
                held[case], spent[case], taken[case] = bytes_held(cache.layers), seconds, decoder.step(cache)
                progress.did(f"prefill: {names[case]}")
        # Every step follows one of another model, so that none finds its weights in the processor's caches and others do not.
        calls = {names[label, n]: taken[label, n] for n in config.contexts for label in config.mixers}
        baselines = {names[label, context]: names[label, against] for label, context in cases}
        timings = interleaved(calls, baselines, turns, clock, progress.did)
    steps = []
    for case in cases:
        measured = {"cache_bytes": held[case], "prefill": spent[case], **timed(timings[names[case]], str(against))}
        protocol = {"threads": count, "clock": config.clock, "turns": turns}
        steps.append(Step(**({"label": case[0], "context": case[1], "against": str(against)} | measured | protocol)))
    return [
        _line(decoder, [step for step in steps if step.label == label]) for label, decoder in decoders.items()
    ], steps


def _line(decoder: Decoder, steps: list[Step]) -> Line:
    late = [step for step in steps if step.context >= steps[-1].context / TAIL]
    contexts = [step.context for step in late]
    return Line(
        label=decoder.label,
        mixers=decoder.specs if len({str(spec) for spec in decoder.specs}) > 1 else decoder.specs[:1],
        growth=decoder.growth,
        time_exponent=exponent(contexts, [step.seconds for step in late]),
        memory_exponent=exponent(contexts, [step.cache_bytes for step in late]),
    )


def exponent(contexts: list[int], values: list[float] | list[int]) -> float | None:
    """P of value ~ context^p: the slope of a line through the logarithms, by least squares."""
    if len(contexts) < 2:
        return None
    x, y = [math.log(context) for context in contexts], [math.log(value) for value in values]
    mean_x, mean_y = sum(x) / len(x), sum(y) / len(y)
    across = sum((a - mean_x) ** 2 for a in x)
    return sum((a - mean_x) * (b - mean_y) for a, b in zip(x, y, strict=True)) / across
