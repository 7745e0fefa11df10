"""The table of properties: distances of codes against closed forms, and the whole command, tiny."""

import json
import math
import sys
from dataclasses import replace

import pytest
import torch

import longitude as lg
import properties
from longitude.bench.sweep import threads

N, DIM, HEAD_DIM = 600, 16, 8


@pytest.mark.parametrize(
    ("encoding", "frequencies"),
    [
        (lg.Sinusoidal(DIM), [10_000 ** (-2 * i / DIM) for i in range(DIM // 2)]),
        (lg.Rotary(HEAD_DIM, "interleaved", base=100.0), [100 ** (-2 * k / HEAD_DIM) for k in range(HEAD_DIM // 2)]),
    ],
    ids=["sinusoidal", "rope"],
)
def test_waves(encoding, frequencies):
    """min over offsets of sqrt(sum of |1 - e^(i offset w)|^2 / number of waves)"""
    gaps = [sum(2 - 2 * math.cos(offset * w) for w in frequencies) / len(frequencies) for offset in range(1, N)]
    codes = properties.codes(encoding, N, DIM, HEAD_DIM)
    assert properties.separation(codes) == pytest.approx(math.sqrt(min(gaps)), rel=1e-9)


def test_the_smallest_distance_is_found_wherever_it_is():
    smallest, norm = properties.smallest_distance(properties.codes(lg.ALiBi(num_heads=1), N, DIM, HEAD_DIM))
    assert smallest == 2.0**-8
    assert norm == pytest.approx(2.0**-8 * math.sqrt(sum(p * p for p in range(N)) / N), rel=1e-12)

    random = torch.randn(700, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    for i, j in ((0, 1), (255, 256), (3, 699)):  # within and across blocks
        near = random.clone()
        near[j] = near[i] + torch.tensor([0, 0, 1e-9, 0, 0])
        assert properties.smallest_distance(near)[0] == pytest.approx(1e-9, rel=1e-6)


@pytest.mark.slow
def test_the_whole_command(tmp_path, monkeypatch, capsys):
    text, out = tmp_path / "text.txt", tmp_path / "2026-01-01-properties.json"
    text.write_text(" ".join(str(i * i) for i in range(20_000)))
    tiny = "--train-length 16 --steps 2 --hidden 16 --heads 2 --layers 1 --batch-size 2 --documents 4 --repeats 1 --threads 1"
    places = ["--data", str(text), "--run", str(tmp_path / "run"), "--out", str(out)]
    monkeypatch.setattr(
        sys, "argv", ["properties.py", *tiny.split(), "--encodings", "nope", "alibi", "learned", *places]
    )
    monkeypatch.setattr(properties, "SHAPE", replace(properties.SHAPE, length=64))
    with threads(None):  # as many as before, afterwards
        assert properties.main() == 0
    none, alibi, learned = json.loads(out.read_text())["rows"]
    assert [row["relative"] for row in (none, alibi, learned)] == [True, True, False]
    assert none["codes"] == 0 and alibi["codes"] > 0 and all(row["cost"] > 0 for row in (none, alibi, learned))
    assert "learned has no positions from 16 on" in capsys.readouterr().out
