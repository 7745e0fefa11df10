"""Training that begins from the models of another study: what it begins with, what is recorded, what is refused."""

import hashlib
import json
import shutil
from dataclasses import replace

import pytest
import torch

from longitude.models import LongitudeForCausalLM
from longitude.study.plan import plan
from longitude.study.results import read_run
from longitude.study.schemes import extended
from longitude.study.train import build_model, first_model
from tests.study.conftest import NUMBERS, TINY, reading_numbers, run, sealed_again, trial_of, units_in
from tests.support import refused

pytestmark = pytest.mark.usefixtures("numbers")
YARN = "rope:scaling=yarn,factor=3,original_max_length=16"
TINY = replace(TINY, test_lengths=(16, 48))
TUNED = replace(TINY, encodings=("rope", YARN), start="first:rope", train_length=48, steps=8)


@pytest.fixture(scope="module")
def first(tmp_path_factory):
    """A study with two seeds of rope and learned; others stand next to it."""
    with reading_numbers():
        path = tmp_path_factory.mktemp("studies") / "first"
        run(replace(TINY, encodings=("rope", "learned"), seeds=(0, 1)), path)
    return path


@pytest.fixture(scope="module")
def tuned(first):
    with reading_numbers():
        assert run(TUNED, first.parent / "tuned")[0].complete
    return first.parent / "tuned"


def model_of(run, label, seed=0):
    [trial] = [trial for trial in read_run(run).of(label) if trial.seed == seed]
    return LongitudeForCausalLM.from_pretrained(trial.folder)


def same(one, other):
    one, other = one.state_dict(), other.state_dict()
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("seed", [0, 1])
def test_training_begins_with_the_model_of_its_seed(seed, first, tmp_path):
    data = plan(replace(TUNED, seeds=(0, 1)), first.parent / "new").data
    model = first_model(TUNED, trial_of(YARN, seed, TUNED), data)
    assert same(model, model_of(first, "rope", seed)) and not same(model, build_model(TUNED, YARN, seed))
    tokens = torch.arange(48)[None]
    expected = extended(model_of(first, "rope", seed), "yarn", 16, 48)
    torch.testing.assert_close(model.eval()(tokens).logits, expected(tokens).logits, rtol=0, atol=0)


@pytest.mark.slow
def test_where_it_began_is_recorded(tuned, first):
    study = read_run(tuned).study
    [trial] = read_run(tuned).of(YARN)
    own = json.loads((trial.folder / "unit.json").read_text())["inputs"]
    [began] = [each for each in read_run(first).of("rope") if each.seed == 0]
    sha256 = hashlib.sha256((began.folder / "model.safetensors").read_bytes()).hexdigest()
    assert study["data"]["start"] == "rope" and study["data"]["start_sha256"] == {"0": sha256}
    assert own["start"] == sha256


@pytest.mark.one_in(7)
@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"start": "nothing"}, ["--start", "nothing"]),
        ({"start": "first:ropes"}, ["first:rope", "first:learned", "ropes"]),
        ({"seeds": (0, 2)}, ["first:rope", "2"]),
        ({"heads": 1}, ["first:rope", "--heads 2", "got 1"]),
        ({"hidden": 32}, ["rope", "[256, 32]", "[256, 16]"]),
        ({"start": "first:learned"}, ["rope", "model.encodings.0.table", "none", "[16, 16]"]),
        ({"task": "copy-decoder", "methods": ("forward",), "data": ("generated",)}, ["--start", "first:rope"]),
    ],
)
def test_refusals(options, words, first):
    with refused(*words):
        plan(replace(TUNED, **options), first.parent / "new")


@pytest.mark.slow
def test_a_start_of_another_text_is_refused(first, monkeypatch):
    """It may hold what is measured; other lengths and documents of the same text are none."""
    assert plan(replace(TUNED, test_lengths=(16, 64), documents=3), first.parent / "new").data.start
    monkeypatch.setattr("longitude.study.data.read_texts", lambda data: type(NUMBERS)("", NUMBERS.documents[1:]))
    with refused("--start", "first:rope"):
        plan(TUNED, first.parent / "new")


@pytest.mark.slow
def test_a_start_that_is_not_done_is_refused(first, tmp_path):
    shutil.copytree(first, tmp_path / "first")
    [trial] = [trial for trial in read_run(first).of("rope") if trial.seed == 0]
    shutil.rmtree(units_in(tmp_path / "first", "rope")["measure"])
    path = tmp_path / "first" / "units" / trial.folder.name / "status.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"status": "diverged", "reason": "x7"}))
    sealed_again(path.parent)
    with refused("rope", "x7"):
        plan(TUNED, tmp_path / "new")
