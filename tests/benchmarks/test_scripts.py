"""Scripts of benchmarks/, tiny: steps of `make bench-decode`, the table of properties, means of retrieval. Nothing is timed."""

import json
import sys
from dataclasses import replace

import pytest
import torch

import properties
from decode import Decoder
from longitude.runs.machine import threads
from retrieval import mean_score


@pytest.mark.parametrize("label", ["nope+attention", "window:size=4", "retention"])
def test_a_step_is_the_whole_pass_one_token_further(label):
    decoder = Decoder(label, 40)
    caches = {n: cache for n, (cache, _) in zip((16, 33), decoder.filled((16, 33)), strict=True)}
    for n in (33, 16):
        assert caches[n].get_seq_length() == n
        tokens = torch.cat([decoder.ids[:, :n], decoder.ids[:, :1]], 1)
        with torch.no_grad():
            want = decoder.model(tokens, use_cache=False).logits[:, -1:]
        torch.testing.assert_close(decoder.step(caches[n])(), want, atol=1e-4, rtol=1e-4)


def test_the_table_of_properties_is_made_by_the_whole_command(tmp_path, monkeypatch, capsys):
    out = tmp_path / "2026-01-01-properties.json"
    command = ["properties.py", "--encodings", "nope", "alibi", "learned", "--repeats", "1", "--threads", "1"]
    monkeypatch.setattr(sys, "argv", [*command, "--out", str(out)])
    monkeypatch.setattr(properties, "SHAPE", replace(properties.SHAPE, length=64))
    with threads(None):  # as many as before, afterwards
        assert properties.main() == 0
    rows = {row["encoding"]: row for row in json.loads(out.read_text())["rows"]}
    assert {label: row["relative"] for label, row in rows.items()} == {"nope": True, "alibi": True, "learned": False}
    assert all(row["cost"] > 0 for row in rows.values()) and "| ALiBi (`alibi`) | yes |" in capsys.readouterr().out


def test_a_mean_counts_every_question():
    """As near as Wilson's interval of all 20 of a length, 10 right: 0.299 to 0.701."""
    rows = [{"length": n, "value": value, "count": 10} for n, value in ((512, 0.2), (512, 0.8), (1024, 0.0))]
    assert list(mean_score(rows, 512).values()) == pytest.approx([0.5, 0.2993, 0.7007], abs=1e-4)
