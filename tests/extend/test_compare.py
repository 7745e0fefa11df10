"""`longitude extend --method all`: every method on one model in memory, by position, as measuring its checkpoint gives it."""

import json
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from transformers import AutoTokenizer

from longitude.extend import compare as module, short_contexts
from longitude.extend.compare import UNCHANGED, Candidates, Comparison
from longitude.extend.short_contexts import FEWEST, Sums
from longitude.measure.documents import documents_of
from longitude.measure.sources import read_text
from longitude.measure.text import losses_by_length
from longitude.statistics.documents import interval
from tests.extend.conftest import LENGTH, loaded

TO = 4 * LENGTH
EDGES = [0, LENGTH // 4, LENGTH // 2, LENGTH, 2 * LENGTH, TO]
ALL = ["--to", TO, "--method", "all"]
WINDOWS = 5


@pytest.fixture
def fast(monkeypatch, tmp_path):
    """A machine on which all windows that are wanted fit into a minute, and that wants five."""
    monkeypatch.setattr(short_contexts, "flops_per_second", lambda *_, **__: 1e12)
    monkeypatch.setattr(short_contexts, "TOKENS", WINDOWS * TO)
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def compared(fast, command, text, tmp_path):
    """compared(folder, *arguments) -> the comparison of `longitude extend --method all --json`; nothing is left on the disk."""

    def call(folder: Path, *arguments: object) -> dict:
        before = sorted(tmp_path.rglob("*"))
        code, printed, error = command(folder, *ALL, "--text", text, *arguments, "--json")
        assert code == 0, error
        assert sorted(tmp_path.rglob("*")) == before
        return json.loads(printed)

    return call


def perplexities(folder: Path, text: Path) -> list[float]:
    """By position, of a checkpoint as plain transformers loads it, on the same windows."""
    documents = documents_of(read_text(str(text)), AutoTokenizer.from_pretrained(folder), TO, WINDOWS)
    options = {"lengths": [TO], "methods": ["per-position"], "bins": EDGES}
    return [
        np.exp(bucket.nats.sum() / bucket.tokens.sum())
        for bucket in losses_by_length(loaded(folder), documents.ids, **options)
    ]


def row(comparison: dict, name: str) -> list[float]:
    [of_method] = [entry for entry in comparison["rows"] if entry["method"] == name]
    assert of_method["reason"] is None
    assert [(entry["position_from"], entry["position_to"]) for entry in of_method["losses"]] == list(pairwise(EDGES))
    return [entry["perplexity"] for entry in of_method["losses"]]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["llama", "gpt_neox", "gemma3_text"])
def test_losses_are_those_of_the_checkpoint_that_a_method_writes(kind, checkpoint, longer, compared, text) -> None:
    """Loaded by plain transformers; and the methods differ from each other by far more than that."""
    comparison = compared(checkpoint(kind))
    assert (comparison["windows"], comparison["tokens"]) == (WINDOWS, WINDOWS * TO)
    assert row(comparison, UNCHANGED) == pytest.approx(perplexities(checkpoint(kind), text), rel=1e-5)
    for name in module.compared():
        written = longer(kind, "--to", TO, "--method", name, "--no-measure")
        assert row(comparison, name) == pytest.approx(perplexities(written, text), rel=1e-5)
        assert (
            max(abs(a / b - 1) for a, b in zip(row(comparison, name), row(comparison, UNCHANGED), strict=True)) > 1e-3
        )


def made_up(nats: dict[str, list[float]]) -> Comparison:
    """A comparison of methods with these nats per token beyond 4 of 8 tokens, one for each window."""
    chosen = Candidates(None, 4, 8, (), dict.fromkeys(nats, ""))  # pyright: ignore[reportArgumentType]

    def bucket(first: int, last: int, losses: list[float]) -> Sums:
        sizes = [last - first] * len(losses)
        return Sums([(last - first) * (1.0 if first < 4 else x) for x in losses], sizes, sizes)

    pairs = [*pairwise(chosen.edges)]
    return Comparison(chosen, {name: [bucket(*pair, losses) for pair in pairs] for name, losses in nats.items()}, "")


def test_undecided_is_what_pairs_do_not_tell_apart() -> None:
    """Windows differ by more than methods, and pairs tell: a method that is better in each window is recommended."""
    hard = np.linspace(1, 5, 12)
    wave = 0.2 * np.cos(np.arange(12) * 2.4)
    better = {UNCHANGED: (hard + 0.1).tolist(), "yarn": hard.tolist(), "linear": (hard + 0.5).tolist()}
    sure = made_up(better)
    assert sure.undecided == [] and sure.recommendation.startswith("Recommended: yarn")
    assert sure.against_best[UNCHANGED].value == pytest.approx(np.exp(0.1))
    yarn, linear = (interval(*sure.beyond[name], metric="mean") for name in ("yarn", "linear"))
    assert (yarn.high or 0) > (linear.low or 0), "windows differ by more"
    unsure = made_up(better | {"ntk": (hard + wave - wave.mean() + 0.01).tolist()})
    assert unsure.undecided == ["yarn", "ntk"] and unsure.recommendation.startswith("Undecided between yarn and ntk")
    for comparison in (sure, unsure):
        assert "12 windows with 48 tokens" in comparison.recommendation
    none = made_up(dict.fromkeys(better, [np.nan] * 12))
    assert none.undecided == [] and none.command is None and none.recommendation.startswith("No method")
    lost = made_up(better | {"ntk": [np.nan] * 12})
    assert "ntk" not in lost.beyond and lost.perplexities["ntk"][-1].value is None and lost.best[-1] == "yarn"


def test_few_windows_have_values_and_no_interval() -> None:
    """However alike they are: what windows differ by is not known of two."""
    for windows in (1, FEWEST - 1, FEWEST):
        comparison = made_up({UNCHANGED: [2.0] * windows, "yarn": [1.0] * windows, "linear": [3.0] * windows})
        assert [*comparison.beyond] == ["yarn", UNCHANGED, "linear"] and comparison.perplexities["yarn"][
            -1
        ].value == pytest.approx(np.e)
        lows = [comparison.perplexities["yarn"][-1].low, comparison.against_best["linear"].low]
        assert [low is None for low in lows] == [windows < FEWEST] * 2
        assert comparison.undecided == ([*comparison.beyond] if windows < FEWEST else [])


@pytest.mark.slow
def test_a_method_that_does_not_fit_is_a_row(checkpoint, longer, compared, text) -> None:
    """Phi-3 reads every yarn as longrope; a model that was extended already has its own row alone."""
    comparison = {entry["method"]: entry for entry in compared(checkpoint("phi3"))["rows"]}
    assert comparison["yarn"]["losses"] == [] and "longrope" in comparison["yarn"]["reason"]
    assert comparison["ntk"]["losses"] and comparison[UNCHANGED]["losses"]
    extended = longer("llama", "--to", 2 * LENGTH, "--method", "yarn", "--no-measure")
    comparison = compared(extended)
    assert comparison["original_length"] == 2 * LENGTH and comparison["command"] is comparison["recommended"] is None
    for entry in comparison["rows"]:
        assert (entry["reason"] is None) == bool(entry["losses"]) == (entry["method"] == UNCHANGED)
    again = compared(extended, "--original", LENGTH)
    assert row(again, "llama3") == row(compared(checkpoint("llama")), "llama3")


def test_buckets_are_few() -> None:
    for times in (1.01, 1.5, 2, 3, 4, 8, 10, 64, 1000):
        edges = Candidates(None, 4096, int(4096 * times), (), {}).edges  # pyright: ignore[reportArgumentType]
        assert edges[0] == 0 and 4096 in edges and edges[-1] == int(4096 * times) and edges == sorted({*edges})
        assert 2 <= len(edges) - 1 - edges.index(4096) <= 3
