"""docs/claims.md is what the committed results say: every claim has a row."""

import json
from pathlib import Path

import pytest

import claims
import make_claims
from claims.base import list_claims
from claims.evidence import KEPT, Evidence
from claims.page import anchor
from claims.tables import frame


@pytest.mark.slow
def test_the_page_is_what_the_results_say():
    text = make_claims.index()
    assert make_claims.PAGE.read_text(encoding="utf-8") == text
    assert [anchor(claim) for claim in list_claims() if f'id="{anchor(claim)}"' not in text] == []


@pytest.mark.slow
def test_another_program_finds_the_same_numbers(monkeypatch):
    """The notebook reads the committed tables with pandas alone; its bootstrap has another seed."""
    notebook = json.loads(Path(claims.__file__).with_name("again.ipynb").read_text(encoding="utf-8"))
    code = "\n".join("".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == "code")
    assert "longitude" not in code and "claims." not in code
    monkeypatch.chdir(KEPT.parents[2])
    exec(code, theirs := {})
    evidence = Evidence(KEPT)
    ours = frame([claim.judged(evidence) for claim in list_claims()])
    words = {
        "1a": "sinusoidal has", "8a": "KERPLE-log holds at 2048", "3b": "lower loss than RoPE (base=10000) at 1024",
        "8b": "loss of Sandwich minus", "5": "beta_fast=5) has a lower loss than RoPE (base=72,scaling=linear",
    }  # fmt: skip
    for number, row in theirs["table"].iterrows():
        [own] = [each for _, each in ours.iterrows() if words[number] in each["statement"] and not each["part"]]
        for name in ("value", "seed_low", "seed_high"):
            assert own[name] == pytest.approx(row[name], rel=1e-9)
        for name in ("text_low", "text_high", "low", "high"):
            assert own[name] == pytest.approx(row[name], abs=0.003)
        assert own["statement_verdict"] == row["verdict"]
