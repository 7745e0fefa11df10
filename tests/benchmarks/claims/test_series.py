"""`python -m claims --run`: small studies in place of its own, one after the other."""

import json

import pytest

from claims import base, series
from claims.__main__ import main
from claims.base import Claim
from claims.evidence import Measured
from claims.protocol import given_options
from claims.series import list_studies
from claims.statements import holds
from longitude.study import presets
from longitude.study.results import keep, read_run
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


@pytest.mark.slow
def test_options_apply_to_all_and_stay(tmp_path, capsys):
    assert run("--only", "one", "two", "--steps", "2", "--seeds", "0") == 0
    root = tmp_path / "runs" / "claims"
    for name in ("first", "second"):
        options = json.loads((root / name / "question.json").read_text())["configuration"]
        assert (options["steps"], options["seeds"]) == (2, [0])
    assert not (root / "unread").exists()
    capsys.readouterr()
    assert main(["runs/claims"]) == 0
    assert "cannot tell" in capsys.readouterr().out  # one seed
    assert run("--steps", "4") == 2
    assert "was begun with --steps 2, not 4" in capsys.readouterr().err
    assert run() == 2
    assert "--steps 2, not as in the presets" in capsys.readouterr().err


@pytest.mark.slow
def test_a_preset_that_was_edited_asks_another_question(tmp_path, small, capsys):
    """Results of the preset as it was are no evidence; run again it trains other models beside those that are there."""
    assert run("--only", "two") == 0
    models = {*(tmp_path / "runs" / "claims" / "first" / "units").glob("train-*")}
    (small / "first.toml").write_text(PRESET.format(labels='"nope"').replace("hidden = 8", "hidden = 16"))
    capsys.readouterr()
    assert main(["runs/claims"]) == 2
    assert "another protocol: they were run with --hidden 8, not 16" in capsys.readouterr().err
    assert run("--only", "two") == 0
    assert models < {*(tmp_path / "runs" / "claims" / "first" / "units").glob("train-*")}


@pytest.mark.slow
def test_a_study_that_fails_does_not_stop_the_next(tmp_path, monkeypatch, capsys):
    def plan(config, path):
        if path.name == "second":
            raise ValueError("there is no such text")
        return planned(config, path)

    planned = series.plan
    monkeypatch.setattr(series, "plan", plan)
    monkeypatch.setattr(series, "time_of", lambda member, fresh, on_progress: series.Time(member.name, 1, 1.0, ""))
    assert run() == 1
    assert "study second did not end: there is no such text" in capsys.readouterr().err
    assert (tmp_path / "runs" / "claims" / "first" / "results.parquet").exists()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--only", "on"), "unknown claim 'on': did you mean 'one'?"),
        (("--only", "three"), "no study is read"),
        (("--encodings", "rope"), "--encodings is each study's own"),
        (("--test-lengths", "8"), "--test-lengths is each study's own"),
        (("--steps", "0"), "--steps"),
    ],
)
def test_what_is_refused(options, words, tmp_path, capsys):
    assert run(*options) == 2
    assert words in capsys.readouterr().err and not (tmp_path / "runs").exists()


def test_committed_results_are_never_run_over(capsys):
    assert main(["--run"]) == 2 and "committed results" in capsys.readouterr().err


def test_a_plan_says_how_long_each_takes_and_runs_nothing(tmp_path, capsys):
    assert run("--plan", "--json") == 0
    times = {each["study"]: each for each in json.loads(capsys.readouterr().out)}
    assert {name: time["models"] for name, time in times.items()} == {"second": 4, "first": 2, "unread": 2}
    assert all(time["seconds"] > 0 and time["source"] == "from a few steps here" for time in times.values())
    assert not (tmp_path / "runs").exists()


def test_committed_seconds_are_scaled_by_steps_and_by_what_is_left(tmp_path, capsys):
    assert run("--only", "two") == 0
    root, kept = tmp_path / "runs" / "claims", tmp_path / "kept"
    keep(read_run(root / "first"), kept / "first")
    study = json.loads((kept / "first" / "study.json").read_text())
    for trial in study["trials"]:
        trial |= {"training_seconds": 30.0, "measuring_seconds": 4.0}
    (kept / "first" / "study.json").write_text(json.dumps(study))
    capsys.readouterr()

    def seconds(*options):
        assert run("--only", "two", "--plan", "--json", *options) == 0
        [time] = json.loads(capsys.readouterr().out)
        return time["models"], time["seconds"], time["source"]

    assert seconds() == (0, 0, "done")
    assert seconds("--fresh", "--steps", "6") == (2, 2 * 64, "as committed")
    assert seconds("--seeds", "0", "1", "2") == (1, 34, "as committed")


def test_a_study_whose_start_is_not_there_yet_is_planned(small, tmp_path):
    (small / "second.toml").write_text(PRESET.format(labels='"alibi"') + 'start = "unread:none"')
    [_, member] = series.members(tmp_path / "runs", ["one"], {})
    time = series.time_of(member, False, lambda *now: None)
    assert (time.models, time.study) == (2, "second") and time.seconds > 0


@pytest.mark.parametrize(
    "text",
    ['{"schema": 2, "options": {}}', '{"schema": 1, "options": {"stepz": 3}}', '{"schema": 1}', "[]"],
)
def test_another_series_file_is_refused_by_name(tmp_path, text):
    (tmp_path / "series.json").write_text(text)
    with pytest.raises(ValueError, match=r"series\.json: expected schema 1 and options among seeds, .*restore it"):
        given_options(tmp_path)
