"""`extend --method longrope` and `longrope2`: factors found by trying them. After a kill, the same call continues the search."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from random import Random
from statistics import median
from typing import Any

from torch import nn

from longitude.extend.criteria import Criterion
from longitude.extend.evolution import PUBLISHED, evolve
from longitude.extend.factors import Candidate, RotaryPairs, rotating_with
from longitude.extend.spaces import Space
from longitude.extend.unfinished import digest_of_weights, folder_of
from longitude.positions.scaling import LongRoPE
from longitude.runs import journal
from longitude.runs.files import held, read_json, remove_unfinished, write_json

SCHEMA = 1
FEWEST = 32
"""Candidates that are tried, however small the budget."""
SHARE = 0.85
"""Of the budget, for candidates; the rest is for starting up and for what is measured before and after."""

Progress = Callable[[int, int | None, float], None]
"""on_progress(candidates tried, candidates in all or None while that is being measured, lowest loss so far)."""


@dataclass(frozen=True)
class SearchResult:
    """What a search found.

    Attributes:
        scheme: The factors, for the configuration.
        loss: Nats per token at the new length, the mean over the tokens that count.
        starts: The same of every start, by name.
        history: (candidates tried, loss) whenever the lowest loss became lower.
        tried: How many candidates in all.
        record: The file that holds all of this.
        note: On the result, for the user; a sentence or nothing.
    """

    scheme: LongRoPE
    loss: float
    starts: dict[str, float]
    history: list[tuple[int, float]]
    tried: int
    record: Path | None = field(default=None, compare=False)
    note: str = ""


def search(
    model: Any,
    space: Space,
    criterion: Criterion,
    *,
    state: Path,
    budget: float = 4.0,
    evaluations: int | None = None,
    seed: int = 0,
    on_progress: Progress | None = None,
    on_note: Callable[[str], None] = lambda _: None,
) -> SearchResult:
    """The factors of a space with which a model has the lowest loss by a criterion.

    The loss of the result is never above that of a start; those of `longrope`: unchanged, linear, ntk, yarn, ntk-by-parts,
    llama3. The attention factor, of which a configuration has one for short texts as well, stays 1, and up to the original
    length the model's answers are unchanged, bit for bit: the short factors are all 1. Only where a start with an attention
    factor of its own (YaRN) stays the best, that start is the result. What the first paper also searches, how many first tokens
    are left alone, no configuration of transformers can hold, and is not searched.

    Args:
        model: A stock causal model of transformers in eval mode, on its device; unchanged afterwards.
        space: What may be tried, for the model's rotary pairs: `longrope` or `longrope2` of spaces.py.
        criterion: Every candidate is tried on its windows: of `running_text` or `needles` of criteria.py.
        state: A folder for what was tried, made where there is none, with a folder in it for each model, method, length and
            criterion.
            The same call continues after a kill, and ends with the result of one that was never killed, bit for bit on the
            same machine; search.json holds the factors.
        budget: Minutes. They become a number of candidates once, by timing the starts, 32 or more, which is kept in `state`.
        evaluations: That number instead. The same number and seed give the same result.
        seed: Of the evolution.
        on_progress: Called after every candidate.
        on_note: Called with a sentence where 32 candidates take longer than the budget.

    Returns:
        The scheme with its loss and its history.

    Raises:
        ValueError: For a model of which no start gives a finite loss, a `state` that is damaged, or being written.

    Source:
        Ding et al. 2024, LongRoPE, arXiv 2402.13753, https://arxiv.org/abs/2402.13753. Shang et al. 2025, LongRoPE2, arXiv
        2502.20082, https://arxiv.org/abs/2502.20082.
    """
    pairs, starts = space.pairs, space.starts
    if state.exists() and not state.is_dir():
        raise ValueError(f"{state} is no folder; remove it to search again")
    question = _question(model, space, criterion)
    folder = folder_of(question, state)
    folder.mkdir(parents=True, exist_ok=True)
    with held(folder, folder):
        remove_unfinished(folder)
        record = folder / "search.json"
        saved = _opened(record, question, budget, evaluations)
        tries = Tries(folder / "tried.jsonl", lambda candidate: _loss(model, pairs, candidate, criterion))

        def evaluate(candidate: Candidate) -> float:
            loss = tries(candidate)
            if on_progress is not None:
                on_progress(len(tries.used), saved["evaluations"], tries.lowest)
            return loss

        named = {name: evaluate(start) for name, start in starts.items()}
        if not math.isfinite(min(named.values())):
            weights = "before anything is extended; look for NaN or overflow in its weights"
            raise ValueError(f"{space.method}: no loss of the model is finite, {weights}")
        if saved["evaluations"] is None:
            seconds = tries.seconds_each(next(iter(starts.values())))
            most = len(named) + affordable(budget, sum(tries.seconds), seconds)
            if most < FEWEST:
                minutes = (FEWEST - len(named)) * seconds / 60
                on_note(
                    f"{space.method}: {FEWEST} candidates are tried at least, which takes {minutes:.2g} minutes more."
                )
            saved["evaluations"] = max(FEWEST, min(PUBLISHED, most))
            write_json(record, saved)
        losses = evolve([*starts.values()], space.bounds, evaluate, saved["evaluations"], Random(seed))
        result = replace(_best(pairs, losses, named), record=record)
        write_json(record, saved | {"seed": seed, "found": _as_json(result)})
        return result


def affordable(budget: float, spent: float, seconds: float) -> int:
    """Candidates of `seconds` each that fit into `budget` minutes after `spent` seconds."""
    return max(0, int((60 * SHARE * budget - spent) / seconds))


def _loss(model: nn.Module, pairs: RotaryPairs, candidate: Candidate, criterion: Criterion) -> float:
    """Nats per token; infinite where the model gave no number."""
    scheme = pairs.longrope(candidate, short=candidate.factors)  # both, so that they hold however a window is read
    with rotating_with(model, scheme):
        return criterion.loss(model)


def _best(pairs: RotaryPairs, losses: dict[Candidate, float], starts: dict[str, float]) -> SearchResult:
    """The best candidate; one that leaves short texts alone comes first, unless a start beats it."""
    best = min(losses, key=losses.__getitem__)
    note = ""
    plain = min((each for each in losses if each.attention_factor == 1), key=losses.__getitem__)
    if losses[plain] <= min(starts.values()):
        best = plain
    else:
        start = f"A start with an attention factor of its own, {best.attention_factor:.4g}, stayed the best"
        note = f"{start}; it holds for short texts as well. A larger budget may find factors that do without."
    history: list[tuple[int, float]] = []
    for i, loss in enumerate(losses.values(), 1):
        if not history or loss < history[-1][1]:
            history.append((i, loss))
    return SearchResult(pairs.longrope(best), losses[best], starts, history, len(losses), note=note)


# ---- what a kill leaves ----------------------------------------------------------------------------------------------
class Tries:
    """A loss for each candidate, computed once: tried.jsonl has a line for each, on the disk before the next is tried."""

    def __init__(self, path: Path, loss: Callable[[Candidate], float]):
        self.path, self.loss = path, loss
        self.losses = dict(_entry(line, path) for line in journal.lines(path))
        journal.cut(path)
        self.used: set[Candidate] = set()
        self.lowest = math.inf
        self.seconds: list[float] = []

    def __call__(self, candidate: Candidate) -> float:
        if candidate not in self.losses:
            loss = self._timed(candidate)
            journal.append(self.path, asdict(candidate) | {"loss": _finite(loss)})
            self.losses[candidate] = loss
        self.used.add(candidate)
        self.lowest = min(self.lowest, self.losses[candidate])
        return self.losses[candidate]

    def seconds_each(self, candidate: Candidate) -> float:
        """The median; the first one is left out, because it had to warm up."""
        while len(self.seconds) < 2:
            self._timed(candidate)
        return median(self.seconds[1:])

    def _timed(self, candidate: Candidate) -> float:
        begun = time.perf_counter()
        loss = self.loss(candidate)
        self.seconds.append(time.perf_counter() - begun)
        return loss


def _entry(line: bytes, path: Path) -> tuple[Candidate, float]:
    """A line of tried.jsonl. ValueError where it is none."""
    try:
        entry = json.loads(line)
        candidate = Candidate(tuple(map(float, entry["factors"])), float(entry["attention_factor"]))
        return candidate, math.inf if entry["loss"] is None else float(entry["loss"])
    except (ValueError, TypeError, KeyError):
        raise _damaged(path) from None


def _damaged(path: Path) -> ValueError:
    return ValueError(f"{path} is damaged; remove {path.parent} to search again")


def _question(model: nn.Module, space: Space, criterion: Criterion) -> dict[str, Any]:
    """What the losses depend on, and where the search may go."""
    pairs = space.pairs
    lengths = {"original_length": pairs.original_length, "length": pairs.length}
    digests = {"model": digest_of_weights(model), "text": criterion.digest()}
    return {"schema": SCHEMA, "method": space.method, **lengths, "base": pairs.base, **digests}


def _opened(record: Path, of: dict[str, Any], budget: float, evaluations: int | None) -> dict[str, Any]:
    """search.json of this search, old or new. ValueError where the file is damaged.

    The number of candidates is as saved for the same budget.
    """
    own = of | {"budget": budget, "evaluations": evaluations}
    saved = read_json(record, f"remove {record.parent} to search again")
    if saved is None:
        (record.parent / "tried.jsonl").unlink(missing_ok=True)  # without a record of what was tried
        saved = own
    elif (
        not isinstance(saved, dict)
        or not own.keys() <= saved.keys()
        or not isinstance(saved["evaluations"], int | None)
        or any(saved[key] != value for key, value in of.items())
    ):
        raise _damaged(record)
    if evaluations is not None or saved["budget"] != budget:
        saved |= own
    write_json(record, saved)
    return saved


def _as_json(result: SearchResult) -> dict[str, Any]:
    """The factors first; None for a loss that is not finite."""
    scheme = result.scheme.as_dict()
    return {name: scheme[name] for name in ("short_factor", "long_factor", "attention_factor", "factor")} | {
        "nats_per_token": _finite(result.loss),
        "starts": {name: _finite(loss) for name, loss in result.starts.items()},
        "history": [each for each in result.history if math.isfinite(each[1])],
        "tried": result.tried,
        "note": result.note,
    }


def _finite(loss: float) -> float | None:
    return loss if math.isfinite(loss) else None
