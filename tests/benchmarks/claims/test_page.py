"""docs/claims.md and what repeats it are what the committed results say; another program finds the same numbers and words."""

import json
import re
from pathlib import Path

import pytest

import calibration
import claims
import make_claims
from claims.base import Claim, Clause, list_claims
from claims.evidence import KEPT, Evidence
from claims.page import anchor, charts, counted
from claims.protocol import preset_of
from claims.tables import definitions, frame
from longitude.report.wording import paper
from longitude.statistics.estimates import HOLDS, LOST

ROOT = KEPT.parents[2]
SCREEN = 1200
"""Words of the page, at most."""


@pytest.fixture(scope="module")
def judged():
    evidence = Evidence(KEPT)
    return [claim.judged(evidence) for claim in list_claims()]


@pytest.mark.slow
def test_the_page_is_one_screen_of_what_the_results_say(judged):
    text = make_claims.PAGE.read_text(encoding="utf-8")
    assert text == make_claims.index()
    assert [anchor(claim) for claim in list_claims() if f'id="{anchor(claim)}"' not in text] == []
    prose = re.sub(r"\]\([^)]*\)", "]", re.sub(r"<a [^>]*></a>", "", text))
    assert len(re.findall(r"[^\s|]*\w[^\s|]*", prose)) <= SCREEN
    counts = counted("published claims", [claim for claim in judged if claim.claim.published])
    number, verdicts = counts.rstrip(".").split(": ")
    readme = " ".join((ROOT / "README.md").read_text(encoding="utf-8").split())
    [agree, decided] = re.findall(r"\d+%", calibration.rate(pair.a for pair in calibration.pairs()))
    assert f"[{number}](docs/claims.md): {verdicts}" in readme
    assert f"{agree} of our signs [as published](benchmarks/published.csv) ({decided} of the decided)" in readme
    assert f"[{number}, tested](claims.md)" in (ROOT / "docs" / "index.md").read_text(encoding="utf-8")


def test_every_statement_is_of_a_clause_that_names_its_encodings():
    """The sentence is built of the clauses, so no statement decides outside of it; and it names every encoding that they read."""
    assert make_claims.STATEMENTS.read_text(encoding="utf-8") == definitions(list_claims()).to_csv(index=False)
    for claim in list_claims():
        assert claim.claimed == " ".join(clause.text for clause in claim.clauses) and claim.claimed.endswith(".")
        read = {place.label for clause in claim.clauses for part in (*clause.a, *clause.b) for place in part.reads}
        names = {paper(label.partition(":")[0].partition("+")[0]).partition(" ")[0].partition("-")[0] for label in read}
        assert [name for name in names if name.lower()[:8] not in claim.claimed.lower()] == [], claim.number


def test_a_clause_without_a_statement_is_refused():
    [claim] = [claim for claim in list_claims() if claim.name == "kerple"]
    fields = {name: getattr(claim, name) for name in ("name", "title", "number", "source", "link", "protocol")}
    for rungs in ({}, {"a": claim.statements("a")}):
        with pytest.raises(ValueError, match="statement"):
            Claim(**fields, clauses=(Clause("It is small,", **rungs), Clause("and cheap.")))


@pytest.mark.slow
def test_every_label_that_a_statement_reads_has_the_planned_seeds(judged):
    run = Evidence(KEPT).run
    places = {place for claim in judged for _, statement, _ in claim.lines for place in statement.reads}
    for place in places:
        assert {trial.seed for trial in run(place.study).of(place.label)} >= {*preset_of(place.study).seeds}, place


@pytest.mark.slow
def test_a_blind_model_makes_no_claim_true(judged):
    """In ladder-a ALiBi is no better than with windows of 32 bytes: neither it nor a comparison with it is decided."""
    lines = [
        line
        for claim in judged
        for line in claim.lines
        if ("ladder-a", "alibi") in {place[:2] for place in line[1].reads}
    ]
    assert len(lines) > 8 and not any(outcome.verdict == HOLDS for *_, outcome in lines)
    [fox] = [claim for claim in judged if claim.claim.name == "fox-holds"]
    assert all(outcome.remark == "no better than a model that sees 63 bytes" for outcome in fox.outcomes("a"))


@pytest.mark.slow
def test_another_program_finds_the_same_numbers_and_words(judged, monkeypatch):
    """The notebook reads the committed tables with pandas alone; its bootstrap has another seed."""
    notebook = json.loads(Path(claims.__file__).with_name("again.ipynb").read_text(encoding="utf-8"))
    code = "\n".join("".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == "code")
    assert "import longitude" not in code and "from longitude" not in code and "claims." not in code
    monkeypatch.chdir(ROOT)
    exec(code, theirs := {})
    table, ours = theirs["table"], frame(judged)
    assert table["statement"].tolist() == ours["statement"].tolist()
    for (_, row), (_, own) in zip(table.iterrows(), ours.iterrows(), strict=True):
        assert row["word"] == own["statement_verdict"], own["statement"]
        if own["value"] == own["value"] and own["value"] is not None:
            assert row["value"] == pytest.approx(own["value"], rel=1e-9), own["statement"]
        if own["low"] == own["low"] and own["low"] is not None:
            slack = 0.1 * (own["high"] - own["low"])
            assert row["low"] == pytest.approx(own["low"], abs=slack), own["statement"]
            assert row["high"] == pytest.approx(own["high"], abs=slack), own["statement"]


def test_a_chart_is_drawn_of_every_study_with_three_lengths(judged):
    """Also of a study in which later seeds have losses of quarters, and earlier ones have none."""
    drawn = charts(judged, Evidence(KEPT))
    assert {"2a-ladder-a", "2a-ladder-b", "2a-early", "2b-early"} <= drawn.keys() and len(drawn) > 20


def test_the_planned_statement_of_2a_is_on_its_page_and_contradicted(judged):
    """Protocol and changelog say so."""
    [claim] = [claim for claim in judged if claim.claim.number == "2a"]
    planned, whole = [outcome for part, _, outcome in claim.lines if part == "varied"]
    assert planned.verdict == LOST and whole.verdict == HOLDS and claim.verdict == "confirmed"
