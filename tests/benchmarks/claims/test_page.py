"""docs/claims.md is what the committed results say: every claim has a row."""

import json
from itertools import combinations
from pathlib import Path

import pandas as pd
import pytest

import claims
import make_claims
from claims.base import list_claims
from claims.evidence import KEPT, Evidence
from claims.page import anchor, order
from claims.tables import frame


@pytest.mark.slow
def test_the_page_is_what_the_results_say():
    text = make_claims.index()
    assert make_claims.PAGE.read_text(encoding="utf-8") == text
    assert [anchor(claim) for claim in list_claims() if f'id="{anchor(claim)}"' not in text] == []


@pytest.mark.slow
def test_pairs_that_keep_their_order_are_counted_from_the_rows():
    """By pandas alone: RoPE of each rung has the base of its training length, and other bases have no pair."""
    tables = [pd.read_parquet(KEPT / rung / "documents.parquet") for rung in ("ladder-a", "ladder-b")]
    tables[1]["label"] = tables[1]["label"].replace("rope:base=194", "rope:base=72")
    text = "\n".join(order(Evidence(KEPT)))
    for times in (1, 2, 4, 16):
        a, b = (
            each[(each["length"] == times * trained) & (each["method"] == "non-overlapping")]
            .groupby(["label", "seed"])[["nats", "bytes"]].sum().eval("nats / bytes").groupby("label").mean()
            for each, trained in zip(tables, (128, 256), strict=True)
        )  # fmt: skip
        pairs = [*combinations(sorted(set(a.index) & set(b.index)), 2)]
        kept = sum((a[x] < a[y]) == (b[x] < b[y]) for x, y in pairs)
        assert f"| {times} | {kept} of {len(pairs)} |" in text and len(pairs) == 15


@pytest.mark.slow
def test_another_program_finds_the_same_numbers(monkeypatch):
    """The notebook reads the committed tables with pandas alone; its bootstrap has another seed."""
    notebook = json.loads(Path(claims.__file__).with_name("again.ipynb").read_text(encoding="utf-8"))
    code = "\n".join("".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == "code")
    assert "longitude" not in code and "claims." not in code
    monkeypatch.chdir(KEPT.parents[2])
    exec(code, theirs := {})
    ours = frame(judged(KEPT)[1])
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


# ---- results that were made up ---------------------------------------------------------------------------------------
def judged(root):
    found = Evidence(root)
    return found, [claim.judged(found) for claim in list_claims()]
