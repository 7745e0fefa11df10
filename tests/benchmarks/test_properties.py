"""The table of properties: the whole command, tiny."""

import json
import sys
from dataclasses import replace

import properties
from longitude.runs.machine import threads


def test_the_whole_command(tmp_path, monkeypatch, capsys):
    out = tmp_path / "2026-01-01-properties.json"
    command = ["properties.py", "--encodings", "nope", "alibi", "learned", "--repeats", "1", "--threads", "1"]
    monkeypatch.setattr(sys, "argv", [*command, "--out", str(out)])
    monkeypatch.setattr(properties, "SHAPE", replace(properties.SHAPE, length=64))
    with threads(None):  # as many as before, afterwards
        assert properties.main() == 0
    rows = {row["encoding"]: row for row in json.loads(out.read_text())["rows"]}
    assert {label: row["relative"] for label, row in rows.items()} == {"nope": True, "alibi": True, "learned": False}
    assert all(row["cost"] > 0 for row in rows.values()) and "| ALiBi (`alibi`) | yes |" in capsys.readouterr().out
