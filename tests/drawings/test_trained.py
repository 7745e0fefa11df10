"""What `longitude show RUN` draws of trained models, against the weights that they have."""

import pytest
import torch

from longitude.drawings.trained import biases, opened
from longitude.positions.bias import T5Bias
from longitude.study.results import read_run
from longitude.study.train import build_model, save
from tests.study.conftest import sealed_again, units_in, write_run

LENGTH = 16


@pytest.fixture(scope="module")
def study(tmp_path_factory):
    """The folder of a study of three labels, with models whose biases have been trained, in a way."""
    path = tmp_path_factory.mktemp("study")
    labels = {"t5": (2.5,), "rope": (2.5,), "mamba": (2.5,), "nope": (2.5,)}
    written = write_run(path, labels, test_lengths=(64,), layers=2, hidden=16, heads=2, train_length=LENGTH)
    config = read_run(written).config
    for label in ("t5", "rope", "mamba"):
        model = build_model(config, label, 0)
        for module in model.modules():
            if isinstance(module, T5Bias):
                torch.nn.init.ones_(module.table)
        folder = units_in(path, label, 0)["train"]
        save(model, folder)
        sealed_again(folder)
    return path


def test_biases_before_and_after(study):
    run, trials = opened(study, ["t5", "rope"])
    [found] = biases(run, trials["t5"])
    before = next(m for m in build_model(run.config, "t5", 0).modules() if isinstance(m, T5Bias))
    assert [*found.lines] == ["every head", "head 1, before", "head 2, before"]
    offsets, after = found.lines["every head"]
    assert after.tolist() == [1.0] * len(offsets)
    for head in (1, 2):
        offsets, bias = found.lines[f"head {head}, before"]
        assert bias == pytest.approx(before.bias_at(torch.from_numpy(offsets))[head - 1].tolist(), abs=1e-4)
    assert [*biases(run, trials["rope"])] == []  # no bias that positions alone decide


def test_runs_that_lack_what_is_asked_for(study, command):
    code, out, err = command("show", study, "--encoding", "nope")
    assert code == 2 and out == "" and "there is no config.json" in err
    _, _, err = command("show", study, "--encoding", "ropee")
    assert "unknown label of --encoding 'ropee': did you mean 'rope'?" in err
    _, _, err = command("show", "alibi", "--encoding", "rope")
    assert "--encoding" in err and "alibi" in err
    _, _, err = command("show", study, "--heads", 2)
    assert "--heads" in err and str(study) in err
