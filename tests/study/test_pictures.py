"""The figures of a study hold its numbers: seeds, changes with their own intervals, biases of checkpoints, distances, times."""

import pandas as pd
import pytest
import torch

from longitude.positions.bias import ALiBi
from longitude.positions.buckets import T5Bias
from longitude.study.analysis import analyse
from longitude.study.pictures import PICTURES
from longitude.study.train import build_model, save
from tests.study.conftest import trial_at, write_answers, write_run


def drawn(name, analysis):
    """The figures of one picture."""
    return list(PICTURES[name](analysis))


def values(chart, mark):
    """The data of the layer with this mark."""
    return next(layer["data"]["values"] for layer in chart["layer"] if layer["mark"]["type"] == mark)


def test_a_change_is_drawn_with_its_own_interval(tmp_path):
    analysis = analyse(write_run(tmp_path, {"rope": (2.6, 2.9), "alibi": (2.5, 2.5)}, test_lengths=(256, 512)))
    [figure] = drawn("change", analysis)
    points = values(figure.spec(), "line")
    found = [each for each in analysis.main if each.change is not None]
    assert [(p["label"], p["value"], p["from"], p["to"]) for p in points] == [
        (each.label, each.change, each.change_low, each.change_high) for each in found
    ]
    assert figure.spec()["description"] == figure.alt  # what a screen reader is given
    [levels] = drawn("by-length", analysis)
    assert all(point["from"] is None for point in values(levels.spec(), "line"))  # one seed: no band


def test_a_bias_is_drawn_before_and_after_training(tmp_path):
    labels = {"alibi": (2.5,), "rope": (2.5,), "t5": (2.5,), "fox": (2.5,)}
    shape = {"layers": 2, "hidden": 16, "heads": 2, "train_length": 16}
    analysis = analyse(write_run(tmp_path, labels, test_lengths=(64,), **shape))
    for label in labels:
        model = build_model(analysis.run.config, label, 0)
        for module in model.modules():
            if isinstance(module, T5Bias):
                torch.nn.init.ones_(module.table)
        save(model, trial_at(tmp_path, label, 0).folder)
    [figure] = drawn("biases", analysis)
    alibi, t5 = figure.chart.to_dict()["concat"]  # the others have no bias that positions alone decide
    assert alibi["title"] == "alibi, fixed" and t5["title"] == "t5"
    for line in values(alibi, "line"):
        slope = ALiBi(2).slopes[line["head"] - 1]
        assert line["bias"] == pytest.approx([-slope * offset for offset in line["offset"]], abs=1e-4)
        assert line["offset"][0] == 0 and line["offset"][-1] == 63
    before = next(m for m in build_model(analysis.run.config, "t5", 0).modules() if isinstance(m, T5Bias))
    for line in values(t5, "line"):
        drawn_bias = before.bias_at(torch.tensor(line["offset"]))[line["head"] - 1].tolist()
        expected = [1.0] * len(line["offset"]) if line["state"] == "after" else drawn_bias
        assert line["bias"] == pytest.approx(expected, abs=1e-4)
    assert {(line["state"], line["head"]) for line in values(t5, "line")} == {
        ("before", 1),
        ("before", 2),
        ("after", 1),
        ("after", 2),
    }


def test_without_checkpoints_there_are_no_biases(tmp_path):
    assert drawn("biases", analyse(write_run(tmp_path, {"alibi": (2.5,)}, test_lengths=(256,)))) == []


def test_answers_by_length_and_distance(tmp_path):
    write_answers(tmp_path, {"rope": (1.0,), "t5": (1.0,)}, test_lengths=(8,), documents=4)
    path = analyse(tmp_path).run.of("rope")[0].folder / "documents.parquet"
    frame = pd.read_parquet(path)
    assert drawn("by-distance", analyse(tmp_path)) == []
    frame["distance"], frame["exact"] = [1, 4, 7, 8], [1, 1, 0, 0]
    frame.to_parquet(path, index=False)
    [figure] = drawn("by-distance", analyse(tmp_path))
    squares = figure.chart.to_dict()["data"]["values"]
    assert {(each["distance"], each["mean"], each["size"]) for each in squares} == {
        ("1", 1, 1),
        ("4 to 7", 0.5, 2),
        ("8 to 15", 0, 1),
    }


def test_quality_by_throughput(tmp_path):
    states = {("rope", 0): {"training_seconds": 100.0}, ("alibi", 0): {"training_seconds": None}}
    analysis = analyse(
        write_run(
            tmp_path, {"rope": (2.6, 3.0), "t5": (2.6, 2.7), "alibi": (2.5, 2.5)}, states, test_lengths=(256, 512)
        )
    )
    [figure] = drawn("throughput", analysis)
    points = values(figure.spec(), "point")
    tokens = analysis.run.config.training_tokens
    assert {(p["label"], p["length"], p["tokens"]) for p in points} == {
        (label, length, tokens / seconds) for label, seconds in (("rope", 100), ("t5", 43.2)) for length in (256, 512)
    }  # alibi was interrupted, so its time is not known
