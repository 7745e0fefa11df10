"""`python -m claims --run`: small studies in place of its own, one after the other."""

import pytest

from claims import base, series
from claims.__main__ import main
from claims.base import Claim
from claims.evidence import Measured
from claims.series import list_studies
from claims.statements import holds
from longitude.study import presets
from tests.study.conftest import NUMBERS

PRESET = """
about = "A study of a few seconds."
encodings = [{labels}]
train_length = 8
test_lengths = [8, 16]
methods = ["non-overlapping"]
steps = 3
batch_size = 2
seeds = [0, 1]
documents = 2
layers = 1
hidden = 8
heads = 2
device = "cpu"
"""


def claim(name, number, study, *labels):
    parts = tuple(holds(Measured(study, label, 16), at=8) for label in labels)
    return Claim(
        name=name, title=name, number=number, claimed=f"{name}.", source="", link="", protocol="", statements=parts
    )


@pytest.fixture(autouse=True)
def small(tmp_path, monkeypatch):
    """Three studies, of which the second has a learned table, and three claims; the third reads nothing."""
    folder = tmp_path / "presets" / "claims"
    folder.mkdir(parents=True)
    for name, labels in (("first", '"nope"'), ("second", '"alibi", "learned"'), ("unread", '"nope"')):
        (folder / f"{name}.toml").write_text(PRESET.format(labels=labels))
    claims = [claim("one", "1", "second", "alibi"), claim("two", "2", "first", "nope"), claim("three", "3", "nope")]
    monkeypatch.setattr(presets, "FOLDER", tmp_path / "presets")
    monkeypatch.setattr(base, "CLAIMS", {each.name: each for each in claims})
    monkeypatch.setattr(series, "KEPT", tmp_path / "kept")
    for module in (base, series):
        monkeypatch.setattr(module, "list_claims", lambda: claims)
    monkeypatch.setattr(series, "write_report", lambda analysis: analysis.run.path / "report.html")  # seconds each
    monkeypatch.setattr("longitude.study.data.read_texts", lambda data: NUMBERS)
    monkeypatch.chdir(tmp_path)
    return folder


def run(*options):
    return main(["runs/claims", "--run", "--workers", "1", *options])


def test_studies_come_in_the_order_of_the_claims_that_read_them():
    assert list_studies() == ["second", "first", "unread"]


def test_a_study_comes_after_the_one_whose_models_it_trains_on(tmp_path, small):
    (small / "second.toml").write_text(PRESET.format(labels='"alibi"') + 'start = "unread:none"')
    names = [member.name for member in series.members(tmp_path / "runs", ["one"], {})]
    assert names == ["unread", "second"]


@pytest.mark.slow
def test_every_study_has_a_folder_and_the_verdicts_end_it(tmp_path, capsys):
    assert run() == 0
    found = capsys.readouterr()
    root = tmp_path / "runs" / "claims"
    assert all(f"report: runs/claims/{name}/report.html" in found.err for name in ("first", "second", "unread"))
    assert "one." in found.out and "not run" in found.out  # three reads nothing
    assert "about" in found.err and "study second, 1 of 3" in found.err and "from a few steps here" in found.err
    before = {path: path.stat().st_mtime_ns for path in root.rglob("model.safetensors")}
    assert run("--only", "two") == 0
    found = capsys.readouterr()
    assert "two." in found.out and "one." not in found.out and "study first, 1 of 1" in found.err
    assert {path: path.stat().st_mtime_ns for path in root.rglob("model.safetensors")} == before
