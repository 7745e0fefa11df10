"""Training positions from a sampler: of the seed and the window alone, recorded everywhere, and none where contiguous."""

import json
from dataclasses import replace
from typing import get_args

import pytest
import torch

from longitude.measure import Row, from_frame, read_rows, to_frame
from longitude.positions.samplers import SAMPLERS, Randomized
from longitude.study import runner
from longitude.study.analysis import analyse, conclusion
from longitude.study.config import Positions, StudyConfig
from longitude.study.data import Text, Windows, split
from longitude.study.labels import parse_encoding, safe
from longitude.study.plan import checked, plan
from longitude.study.runner import run_trial
from longitude.study.train import build_model
from longitude.study.trial import Trial

TINY = StudyConfig(
    encodings=("rope", "learned"), train_length=16, test_lengths=(16, 32, 48), steps=8, batch_size=4, layers=1, hidden=16,
    heads=2, documents=4, device="cpu", positions="randomized",
)  # fmt: skip
DOCUMENTS = [(str(i), " ".join(str(j * j) for j in range(i, i + 200)).encode()) for i in range(30)]


@pytest.fixture(scope="module")
def data():
    return split(Text("numbers", DOCUMENTS), 48, 16, 4)


def positions(windows: Windows) -> torch.Tensor:
    return torch.stack([windows[i]["position_ids"] for i in range(len(windows))])


def test_positions_belong_to_the_seed_and_the_window(data):
    windows = Windows(data.training, 16, 40, 1, Randomized(48))
    found = positions(windows)
    assert found.shape == (40, 16) and found.min() >= 0 and 40 < found.max() < 48
    assert (found.diff() > 0).all()
    assert len({tuple(row.tolist()) for row in found}) == 40
    torch.testing.assert_close(windows[17]["position_ids"], found[17])  # whatever was drawn before
    more = Windows(data.training, 16, 90, 1, Randomized(48))
    assert torch.equal(positions(more)[:40], found)  # or will be drawn after
    other = positions(Windows(data.training, 16, 40, 2, Randomized(48)))
    assert not (other == found).all(1).any()
    plain = Windows(data.training, 16, 40, 1)
    assert plain[3].keys() == {"input_ids", "shift_labels"}  # contiguous: the model counts, as ever
    assert all(torch.equal(plain[3][name], windows[3][name]) for name in plain[3])


def test_the_model_reads_them(data, tmp_path):
    config = checked(replace(TINY, encodings=("rope",), steps=1))
    cell = Trial(tmp_path, "rope", 1)
    run_trial(config, cell, data)
    windows = Windows(data.training, 16, 4, 1, Randomized(48))
    batch = {name: torch.stack([windows[i][name] for i in range(4)]) for name in windows[0]}
    model = build_model(config, "rope", 1)
    first = json.loads((cell.folder / "losses.jsonl").read_text())["loss"]
    assert first == pytest.approx(model(**batch).loss.item(), rel=1e-5)
    del batch["position_ids"]
    assert abs(first - model(**batch).loss.item()) > 1e-4


@pytest.mark.slow
def test_a_study_records_its_sampler_everywhere(tmp_path, monkeypatch):
    monkeypatch.setattr("longitude.study.data.read_text", lambda data: Text(data, DOCUMENTS))
    outcome = runner.study(plan(TINY, tmp_path))
    assert outcome.complete and [status.reason for _, status in outcome.trials] == [None, None]
    study = json.loads((tmp_path / "study.json").read_text())
    assert (study["configuration"]["positions"], study["configuration"]["position_range"]) == ("randomized", 48)
    model = json.loads((tmp_path / "cells" / "learned-0" / "config.json").read_text())
    assert model["encoding"]["max_length"] == model["max_position_embeddings"] == 48
    rows = from_frame(read_rows(tmp_path / "results.parquet"))
    assert {row.train_positions for row in rows} == {"randomized(max_length=48)"}
    assert {(row.label, row.length) for row in rows} >= {("learned", 48), ("rope", 48)}  # a table as long as the range
    assert "; training windows had randomized positions out of 48;" in conclusion(analyse(tmp_path))
    with pytest.raises(ValueError, match="holds a study with --positions randomized, not skipped"):
        runner.study(plan(replace(TINY, positions="skipped"), tmp_path))
    with pytest.raises(ValueError, match="holds a study with --position-range 48, not 40"):
        runner.study(plan(replace(TINY, position_range=40), tmp_path))


def test_a_contiguous_study_is_what_it_was(tmp_path, monkeypatch):
    monkeypatch.setattr("longitude.study.data.read_text", lambda data: Text(data, DOCUMENTS))
    config = replace(TINY, positions="contiguous", encodings=("learned",), steps=2)
    runner.study(plan(config, tmp_path))
    assert "train_positions" not in read_rows(tmp_path / "results.parquet")
    assert json.loads((tmp_path / "cells" / "learned-0" / "config.json").read_text())["max_position_embeddings"] == 16
    assert "positions out of" not in conclusion(analyse(tmp_path))
    study = json.loads((tmp_path / "study.json").read_text())
    for name in ("positions", "position_range"):  # as the first release wrote it
        del study["configuration"][name]
    (tmp_path / "study.json").write_text(json.dumps(study))
    assert "positions out of" not in conclusion(analyse(tmp_path))
    assert runner.study(plan(config, tmp_path)).complete
    with pytest.raises(ValueError, match="holds a study with --positions contiguous, not skipped"):
        runner.study(plan(replace(config, positions="skipped"), tmp_path))


def test_rows_gain_the_column_only_where_it_says_something():
    plain, sampled = Row(task="text", metric="perplexity"), Row(task="text", metric="x", train_positions="skipped")
    assert "train_positions" not in to_frame([plain, plain])
    assert list(to_frame([plain, sampled]).columns) == [*to_frame([plain]).columns, "train_positions"]
    assert from_frame(to_frame([plain, sampled])) == [plain, sampled]


def test_names_and_defaults():
    assert tuple(SAMPLERS) == get_args(Positions)
    assert checked(TINY).position_range == 48  # the longest length
    assert checked(replace(TINY, test_lengths=(8,))).position_range == 16
    assert checked(replace(TINY, position_range=16)).train_positions == "randomized(max_length=16)"
    assert checked(StudyConfig()).train_positions == "contiguous"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"positions": "random"}, "unknown sampler 'random': did you mean 'randomized'"),
        (
            {"positions": "contiguous", "position_range": 48},
            "--position-range .* --positions is contiguous; leave it out",
        ),
        ({"position_range": 15}, "--position-range must be at least the training length 16, got 15"),
        ({"encodings": ("learned:max_length=40",)}, "--encodings learned:max_length=40: .*expected positions 0 .. 39"),
    ],
)
def test_wrong_use(change, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        plan(replace(TINY, **change), tmp_path / "run")
    assert not list(tmp_path.iterdir())


# ---- labels ------------------------------------------------------------------------------------------------------------


def test_labels_with_schemes_and_lists():
    yarn = {"name": "yarn", "factor": 16, "original_max_length": 256}
    label = "rope:scaling=yarn(factor=16,original_max_length=256),base=5e5+fox"
    assert parse_encoding(label) == [{"name": "rope", "scaling": yarn, "base": 5e5}, {"name": "fox"}]
    assert safe(label) == "rope_scaling=yarn_factor=16,original_max_length=256_,base=5e5+fox"
    [mrope] = parse_encoding("mrope:sections=2/1/1,arrangement=contiguous")
    assert mrope == {"name": "mrope", "sections": [2, 1, 1], "arrangement": "contiguous"}
    lists = "rope:scaling=longrope(short_factor=1/1.5,long_factor=2/4,original_max_length=16,factor=3)"
    [rope] = parse_encoding(lists)
    assert rope["scaling"]["short_factor"] == [1, 1.5] and rope["scaling"]["factor"] == 3
    for wrong in ("rope:scaling=yarn(factor)", "rope:scaling=yarn(factor=,x=2)"):
        with pytest.raises(ValueError, match=r"expected yarn\(option=value,option=value\), got"):
            parse_encoding(wrong)


def test_a_scheme_is_trained_and_its_errors_name_the_label(tmp_path, monkeypatch):
    monkeypatch.setattr("longitude.study.data.read_text", lambda data: Text(data, DOCUMENTS))
    label = "rope:scaling=yarn(factor=3,original_max_length=16)"
    config = replace(TINY, positions="contiguous", encodings=(label,), steps=2)
    assert runner.study(plan(config, tmp_path)).complete
    saved = json.loads((tmp_path / "cells" / f"{safe(label)}-0" / "config.json").read_text())
    assert saved["encoding"]["scaling"].items() >= {"name": "yarn", "factor": 3, "original_max_length": 16}.items()
    for wrong, message in (
        ("rope:scaling=yarm(factor=2)", "unknown scaling 'yarm': did you mean 'yarn'"),
        ("rope:scaling=yarn(facto=2)", "unknown option of 'yarn' 'facto': did you mean 'factor'"),
    ):
        with pytest.raises(ValueError, match=message):
            plan(replace(config, encodings=(wrong,)), tmp_path)
