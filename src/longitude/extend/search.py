"""`extend --method longrope`: factors for each pair, found by trying them. Every candidate is a unit of a store."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from random import Random
from statistics import median
from typing import Any

from torch import Tensor, nn

from longitude.errors import UsageError
from longitude.extend.evolution import PUBLISHED, Bounds, evolve
from longitude.extend.factors import Candidate, RotaryPairs, rotating_with
from longitude.extend.short_contexts import BATCH
from longitude.extend.units import digest_of_tokens, digest_of_weights
from longitude.measure.text import losses_by_length
from longitude.measure.windows import Bounded
from longitude.positions.scaling import LongRoPE
from longitude.runs.store import Store, Unit

TOKENS, FEWEST_WINDOWS = 16_384, 4
"""Approximate number of tokens by which candidates are scored, and minimum number of windows."""
FEWEST = 32
"""Minimum number of candidates, regardless of the budget."""
SHARE = 0.85
"""Share of the budget for candidates; the rest is for start-up and for measurements before and after."""

Progress = Callable[[int, int | None, float], None]
"""on_progress(candidates tried, candidates in all or None while that is being measured, lowest loss so far)."""


@dataclass(frozen=True)
class SearchResult:
    """Result of a search.

    Attributes:
        scheme: The scheme with the factors.
        loss: Mean loss at the new length, in nats per token.
        starts: Loss of every start, by name.
        tried: Number of candidates.
        note: Remark on the result for the user; a sentence or empty.
    """

    scheme: LongRoPE
    loss: float
    starts: dict[str, float]
    tried: int
    note: str = ""


@dataclass(frozen=True)
class Tried:
    """The result of a unit: nats per token, None if they are not finite, and the seconds that it took."""

    nats: float | None
    seconds: float

    @property
    def loss(self) -> float:
        return math.inf if self.nats is None else self.nats


def windows_of(documents: Sequence[Tensor], length: int, tokens: int | None = None) -> list[Tensor]:
    """Windows [length + 1] of about `tokens` tokens, evenly spread over documents [n] each. UsageError if there is none."""
    places = [(document, i) for document in documents for i in range((len(document) - 1) // length)]
    if not places:
        expected, longest = f"text of {length + 1} tokens in a document", max(map(len, documents), default=0)
        raise UsageError(
            "longrope", expected, longest, "give a longer text (a study takes a tenth), or leave longrope out"
        )
    count = min(len(places), max(FEWEST_WINDOWS, (tokens or TOKENS) // length))
    chosen = [places[i * len(places) // count] for i in range(count)]
    return [document[i * length : (i + 1) * length + 1] for document, i in chosen]


def search(
    model: Any,
    pairs: RotaryPairs,
    windows: Sequence[Tensor],
    *,
    store: Store,
    budget: float = 4.0,
    evaluations: int | None = None,
    seed: int = 0,
    on_progress: Progress = lambda tried, total, lowest: None,
    on_note: Callable[[str], None] = lambda _: None,
) -> SearchResult:
    """Search the factors of rotary pairs that minimize a model's loss.

    The loss of the result is never above that of a start: unchanged, linear, ntk, yarn, ntk-by-parts, llama3. The attention
    factor stays 1, because it applies to short sequences as well, and the short factors are all 1. Up to the original length
    the model's outputs are therefore bitwise unchanged. The exception is a start with another attention factor (YaRN): if it
    stays the best, it is the result. The paper also searches the number of first tokens that are not scaled. This is not
    searched here, because no transformers configuration can express it.

    Args:
        model: An unmodified causal Transformers model in eval mode, on its device; unchanged afterwards.
        pairs: The model's rotary pairs, and the lengths.
        windows: Tokens [length + 1] on which candidates are scored: `windows_of`.
        store: Keeps the loss of every candidate. The same call continues after a kill, or beside another process. Its result is
            bitwise that of an uninterrupted call on the same machine.
        budget: Minutes of the search, converted to 32 or more candidates by the times of the starts.
        evaluations: Number of candidates, instead of a budget. Equal numbers and seeds give equal results.
        seed: Random seed of the evolution.
        on_progress: Called after every candidate.
        on_note: Called with a sentence if 32 candidates take longer than the budget.

    Returns:
        The scheme with its loss.

    Raises:
        ValueError: If no start gives a finite loss, or if a unit is damaged.

    Source:
        Ding et al. 2024, LongRoPE, arXiv 2402.13753, https://arxiv.org/abs/2402.13753.
    """
    starts = pairs.starts()
    lengths = {"original_length": pairs.original_length, "length": pairs.length, "base": pairs.base}
    device = next(model.parameters()).device.type
    question = {"model": digest_of_weights(model), "device": device, "text": digest_of_tokens(*windows), **lengths}
    tried: dict[Candidate, Tried] = {}

    def evaluate(candidates: Sequence[Candidate]) -> list[float]:
        new = [candidate for candidate in candidates if candidate not in tried]

        def attempt(i: int, _: Path) -> Tried:
            begun = time.perf_counter()
            loss = _loss(model, pairs, new[i], windows)
            return Tried(loss if math.isfinite(loss) else None, time.perf_counter() - begun)

        def known(i: int, result: Tried) -> None:
            tried[new[i]] = result
            on_progress(len(tried), evaluations, min(result.loss for result in tried.values()))

        units = [Unit("candidate", f"longrope-{pairs.length}", question | asdict(candidate)) for candidate in new]
        store.results(units, attempt, Tried, known)
        return [tried[candidate].loss for candidate in candidates]

    evaluate([*dict.fromkeys(starts.values())])
    named = {name: tried[start].loss for name, start in starts.items()}
    if not math.isfinite(min(named.values())):
        weights = "before anything is extended; look for NaN or overflow in its weights"
        raise ValueError(f"longrope: no loss of the model is finite, {weights}")
    if evaluations is None:
        times = [result.seconds for result in tried.values()]
        seconds = median(times)  # the first one had to warm up
        most = len(named) + affordable(budget, sum(times), seconds)
        if most < FEWEST:
            minutes = (FEWEST - len(named)) * seconds / 60
            on_note(f"longrope: {FEWEST} candidates are tried at least, which takes {minutes:.2g} minutes more.")
        evaluations = max(FEWEST, min(PUBLISHED, most))
    losses = evolve([*starts.values()], Bounds.of(pairs), evaluate, evaluations, Random(seed))
    return _best(pairs, losses, named)


def affordable(budget: float, spent: float, seconds: float) -> int:
    """Candidates of `seconds` each that fit into `budget` minutes after `spent` seconds."""
    return max(0, int((60 * SHARE * budget - spent) / seconds))


def _loss(model: nn.Module, pairs: RotaryPairs, candidate: Candidate, windows: Sequence[Tensor]) -> float:
    """Nats per token; inf if they are not finite."""
    scheme = pairs.longrope(candidate, short=candidate.factors)  # as short factors, too: they apply at every length
    with rotating_with(model, scheme):
        [losses] = losses_by_length(
            model,
            windows,
            lengths=[pairs.length],
            methods=["non-overlapping"],
            batch_tokens=max(BATCH, pairs.length),
            reader=Bounded(model, None),
        )
    loss = float(losses.nats.sum() / losses.tokens.sum())
    return loss if math.isfinite(loss) else math.inf


def _best(pairs: RotaryPairs, losses: dict[Candidate, float], starts: dict[str, float]) -> SearchResult:
    """The best candidate with an attention factor of 1, which leaves short texts unchanged, unless a start is better."""
    best = min(losses, key=losses.__getitem__)
    note = ""
    plain = min((candidate for candidate in losses if candidate.attention_factor == 1), key=losses.__getitem__)
    if losses[plain] <= min(starts.values()):
        best = plain
    else:
        start = f"A start with an attention factor of its own, {best.attention_factor:.4g}, stayed the best"
        note = f"{start}; it applies to short texts as well. A larger budget may find factors that do without."
    return SearchResult(pairs.longrope(best), losses[best], starts, len(losses), note)
