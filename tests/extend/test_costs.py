"""`longitude extend --plan`: what will be read and trained, before anything is loaded or written."""

import json

import pytest

from longitude.checkpoints.load import open_source
from longitude.extend import short_contexts
from longitude.extend.short_contexts import FEWEST, SHORTEST, TOKENS, sample_within
from longitude.runs.costs import H100, forward_flops
from tests.extend.conftest import LENGTH, files

TUNED = ["--fine-tune", "no such text", "--steps", 5, "--batch", 3]


@pytest.fixture
def planned(checkpoint, command, tmp_path, monkeypatch):
    """planned(*arguments) -> the parts, with a machine of 10^9 FLOP/s."""
    monkeypatch.setattr(short_contexts, "flops_per_second", lambda *_, **__: 1e9)
    monkeypatch.chdir(tmp_path)

    def call(*arguments: object) -> dict[str, dict]:
        before = files(checkpoint("llama"))
        code, printed, error = command(checkpoint("llama"), *arguments, "--plan", "--json")
        assert code == 0 and all(line.startswith("timing ") for line in error.splitlines())
        assert not list(tmp_path.iterdir()) and files(checkpoint("llama")) == before, "nothing is written"
        return {part["part"]: part for part in json.loads(printed)}

    return call


def test_parts(planned, checkpoint) -> None:
    """Two readings of the original length, and three passes of every window that is trained on."""
    parts = planned("--to", 4 * LENGTH, "--method", "yarn", *TUNED)
    flops = forward_flops(open_source(str(checkpoint("llama"))).skeleton)
    assert parts.keys() == {"measuring", "training"}
    assert parts["measuring"]["tokens"] == 2 * TOKENS
    assert parts["measuring"]["flops"] == pytest.approx(2 * TOKENS / LENGTH * flops.of(LENGTH))
    assert parts["training"]["tokens"] == 5 * 3 * 4 * LENGTH
    assert parts["training"]["flops"] == pytest.approx(3 * 5 * 3 * flops.of(4 * LENGTH))
    for part in parts.values():
        assert part["seconds"] == pytest.approx(part["flops"] / 1e9)
        assert part["h100_seconds"] == pytest.approx(part["flops"] / H100)


def test_the_measured_cost_fits_into_its_minutes(checkpoint, monkeypatch) -> None:
    """Fewer windows first, then shorter ones, and never fewer than four; all that is wanted where there is time."""
    source = open_source(str(checkpoint("llama")))
    flops = forward_flops(source.skeleton)
    for rate in (1e6, 1e7, 1e8, 1e9, 1e12):
        monkeypatch.setattr(short_contexts, "flops_per_second", lambda *_, rate=rate, **__: rate)
        sample = sample_within(source, 1024, 1.0)
        windows = sample.tokens // sample.length
        assert sample.seconds == pytest.approx(2 * windows * flops.of(sample.length) / rate)
        assert sample.seconds <= 60 or (sample.length, windows) == (SHORTEST, FEWEST)
        assert windows >= FEWEST and sample.tokens <= TOKENS
        if sample.length < 1024:
            assert 2 * FEWEST * flops.of(2 * sample.length) / rate > 60, "windows are no shorter than they must be"
    assert (sample.length, sample.tokens) == (1024, TOKENS)


def test_a_search_takes_its_budget(planned) -> None:
    parts = planned("--to", 4 * LENGTH, "--method", "longrope", "--budget", 0.5)
    assert parts["searching"]["seconds"] == pytest.approx(30, rel=0.01)
