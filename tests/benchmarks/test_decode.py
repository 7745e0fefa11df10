"""`make bench-decode`: what is timed is a step of the model, and every row has its cache. Nothing here is timed in earnest."""

import json
import re
import sys

import pytest
import torch

import decode
from decode import Decoder, exponent
from longitude.testing.mixers import bytes_held
from target import Session

LABELS = ("nope+attention", "window:size=4", "retention")


@pytest.fixture(scope="module")
def measured():
    return decode.decode(LABELS, (20, 130), Session(threads=1, repeats=1))


def test_exponents_are_slopes():
    contexts = [64, 256, 1024]
    for p in (0.0, 0.5, 1.0, 2.0):
        assert exponent(contexts, [3 * n**p for n in contexts]) == pytest.approx(p)
    assert exponent([64], [1.0]) is None


@pytest.mark.parametrize("label", LABELS)
def test_a_step_is_the_whole_pass_one_token_further(label):
    """Behind each context; and a step behind one leaves the caches of the others alone."""
    decoder = Decoder(label, 40)
    caches = {n: cache for n, (cache, _) in zip((16, 33), decoder.filled((16, 33)), strict=True)}
    for n in (33, 16):
        assert caches[n].get_seq_length() == n
        tokens = torch.cat([decoder.ids[:, :n], decoder.ids[:, :1]], 1)
        with torch.no_grad():
            want = decoder.model(tokens, use_cache=False).logits[:, -1:]
        torch.testing.assert_close(decoder.step(caches[n])(), want, atol=1e-4, rtol=1e-4)


def test_growth_and_bytes_are_those_of_the_cache(measured):
    """Attention holds two vectors of 256 float32 numbers per token in each of 4 layers, and grows ahead; a window no more than
    3 tokens and what grows; retention a state."""
    lines, rows = measured["lines"], measured["rows"]
    assert [line["growth"] for line in lines] == ["O(N)", "O(1)", "O(1)"]
    held = {(row["label"], row["context"]): row["cache_bytes"] for row in rows}
    assert [*held] == [(label, n) for label in LABELS for n in (20, 130)]
    for n in (20, 130):
        assert held["nope+attention", n] >= 4 * n * 2 * 256 * 4
    assert held["retention", 20] == held["retention", 130] >= 4 * 4 * 64 * 128 * 4
    assert lines[2]["memory_exponent"] == pytest.approx(0) and lines[0]["memory_exponent"] > 0.05
    ((cache, _),) = Decoder("retention", 40).filled((20,))
    assert held["retention", 20] == bytes_held(cache.layers)
    for row in rows:
        assert row["seconds"] > 0 and row["prefill"] > 0 and row["turns"] == 5 and row["threads"] == 1
        assert (row["ratio"] is None) == (row["context"] == 20) and row["against"] == "20"


@pytest.mark.slow
def test_decode_ends_with_table_json_and_chart(tmp_path, monkeypatch, capsys):
    out = tmp_path / "deep" / "one.json"
    asked = "--contexts 16 33 --mixers rope+attention retention --repeats 1 --threads 1 --out".split()
    monkeypatch.setattr(sys, "argv", ["decode.py", *asked, str(out)])
    assert decode.main() == 0
    shown = capsys.readouterr().out
    assert re.search(r"`rope\+attention` \| O\(N\) \| \d+\.\d\d", shown) and "`retention` | O(1) | " in shown
    assert sorted(path.name for path in out.parent.iterdir()) == ["one.html", "one.json", "one.svg"]
    svg = out.with_suffix(".svg").read_text()
    assert "Milliseconds per token" in svg and "Megabytes of cache" in svg and "O(log N)" in svg and "retention" in svg
    found = json.loads(out.read_text())
    assert {row["threads"] for row in found["rows"]} == {torch.get_num_threads()}
    assert found["configuration"]["contexts"] == [16, 33] and "prefill" in found["protocol"]
    assert all(row["bytes_per_token"] * row["context"] == row["cache_bytes"] for row in found["rows"])
    assert found["lines"][0]["mixers"][0]["name"] == "attention" and found["lines"][0]["growth"] == "O(N)"
