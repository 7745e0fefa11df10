"""How much text the measured cost reads in its minutes."""

import pytest

from longitude.checkpoints.load import open_source
from longitude.extend import short_contexts
from longitude.extend.short_contexts import FEWEST, SHORTEST, TOKENS, sample_within
from longitude.runs.costs import forward_flops


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
