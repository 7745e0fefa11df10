"""docs/claims.md and its charts are what the committed results say; results are kept small, and what was changed is seen."""

import json
import shutil
from itertools import combinations
from pathlib import Path

import pandas as pd
import pytest

import claims
import make_claims
from claims import protocol
from claims.base import list_claims
from claims.evidence import KEPT, Evidence
from claims.page import anchor, charts, heading, order, page
from claims.tables import frame
from longitude.study.results import keep, read_run
from tests.study.conftest import write_run

"""Bytes of a committed study."""


@pytest.mark.slow
def test_the_page_and_its_charts_are_what_the_results_say():
    assert make_claims.differing(*make_claims.made()) == []


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
@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """The study `base`, run with 20 steps, where some labels hold."""
    root = tmp_path_factory.mktemp("claims")
    options = {"steps": 20, "documents": 5, "learning_rates": (0.005,)}
    (root / "series.json").write_text(json.dumps({"schema": 1, "options": options}))
    config = protocol.preset_of("base", options)
    fields = (
        "learning_rates",
        "encodings",
        "seeds",
        "train_length",
        "test_lengths",
        "methods",
        "documents",
        "layers",
        "hidden",
        "heads",
        "steps",
    )
    longer = range(len(config.test_lengths) - 1)
    bits = {label: (2.5, *(2.4 + 0.05 * (i % 3) * j for j in longer)) for i, label in enumerate(config.encodings)}
    write_run(root / "base", bits, **{name: getattr(config, name) for name in fields})
    return root


@pytest.fixture(scope="module")
def small(root, tmp_path_factory):
    """The same without models."""
    small = tmp_path_factory.mktemp("small")
    shutil.copy(root / "series.json", small)
    keep(read_run(root / "base"), small / "base")
    return small


@pytest.fixture
def kept(small, tmp_path):
    """A copy of it, to be spoiled."""
    return shutil.copytree(small, tmp_path, dirs_exist_ok=True)


def judged(root):
    found = Evidence(root)
    return found, [claim.judged(found) for claim in list_claims()]


@pytest.mark.slow
def test_a_page_lists_every_claim_and_study_once_and_its_charts_hold_their_numbers(kept, tmp_path):
    found, verdicts = judged(kept)
    drawn = charts(verdicts, found)
    text = page(verdicts, found, drawn)
    for claim in list_claims():
        assert text.count(f'\n<a id="{anchor(claim)}"></a>\n\n## {heading(claim)}\n') == 1
    assert text.count("### Study base\n") == text.count("### Study copy\n") == 1 and "20" in text
    assert "3-base" in drawn and all(f"claims/{name}.svg" in text for name in drawn)
    path = tmp_path / "page.md"
    make_claims.write(text, drawn, path)
    assert make_claims.differing(text, drawn, path) == []
    svg = tmp_path / "page" / "3-base.svg"
    assert svg.stat().st_size < 100_000
    svg.write_text(svg.read_text().replace("2.5", "2.6"))
    assert make_claims.differing(text + " ", drawn, path) == ["page.md", "3-base.svg"]


# ---- what is wrong ---------------------------------------------------------------------------------------------------
