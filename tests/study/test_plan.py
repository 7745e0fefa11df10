"""What a study refuses before anything is written: wrong options, texts, labels and directories, and one model named twice."""

from dataclasses import asdict, replace
from functools import partial
from typing import get_args

import pytest

from longitude.positions.base import list_encodings
from longitude.positions.samplers import SAMPLERS
from longitude.runs import files
from longitude.study.config import Positions, StudyConfig
from longitude.study.plan import checked, plan
from longitude.study.tasks.base import TASKS, of_task
from tests.study.conftest import COPY, TINY
from tests.support import refused

pytestmark = pytest.mark.usefixtures("numbers")
tiny, copying = partial(replace, TINY), partial(replace, COPY)
sampled = partial(tiny, positions="randomized")


@pytest.mark.parametrize(
    ("words", "config"),
    [
        (["--encodings", "rotary_dim", "3"], tiny(encodings=("rope:rotary_dim=3",))),
        (["--encodings", "rope"], tiny(encodings=("all", "rope"))),
        (["rope+mamba", "Rotary", "Mamba"], tiny(encodings=("rope+mamba",))),
        (["abacus", "--task", "abacus:digits=48,49"], tiny(encodings=("abacus",))),
        (["digits", "256", "--task"], tiny(encodings=("abacus:digits=255,256",))),
        (["rope:base=5e5", "rope:base=5E5"], tiny(encodings=("rope:base=5e5", "rope:base=5E5"))),
        (["--heads", "--hidden", "3"], tiny(heads=3)),
        (["--precision", "float32", "bfloat16"], tiny(precision="bfloat16")),
        (["copies", "non-overlapping"], tiny(methods=("copies",))),
        (["--learning-rates", "nan"], tiny(learning_rates=(1e-3, float("nan")))),
        (["--warmup", "1.0"], tiny(warmup=1.0)),
        (["--stride", "16", "17"], tiny(stride=17, methods=("sliding",))),
        (["--test-lengths", "10000"], tiny(test_lengths=(16, 10_000))),
        (["--position-range", "--positions"], tiny(position_range=48)),
        (["--positions", "mixed", "copy"], copying(positions="mixed")),
        (["--position-range", "16", "15"], sampled(position_range=15)),
        (["max_length=40", "0 .. 39"], sampled(encodings=("learned:max_length=40",))),
        (["--position-range", "4", "9"], copying(positions="skipped", position_range=4)),
        (["--data", "--task", "copy-decoder"], copying(data=("stdlib",))),
        (["--data", "--task", "text"], copying(task="text", methods=("sliding",))),
        (["'sliding'", "forward"], copying(methods=("sliding",))),
        (["--tokenizer", "--task", "recall"], of_task("recall", tokenizer="gpt2")),
        (["--encodings", "alibi", "nope", "rope"], tiny(encodings=("alibi", "nope"), methods=("linear",))),
        (["--methods", "yarn", "self_extend"], tiny(encodings=("sinusoidal",), methods=("non-overlapping", "yarn"))),
        (["--positions", "randomized"], sampled(encodings=("rope",), methods=("yarn",))),
        (["yarn"], tiny(encodings=("rope",), methods=("yarm",))),
        (["'drope'"], tiny(encodings=("rope",), methods=("drope",))),  # which needs training
    ],
)
def test_wrong_use_is_refused_before_anything_is_written(words, config, tmp_path):
    with refused(*words):
        plan(config, tmp_path / "run")
    assert not list(tmp_path.iterdir())


def test_directories_and_disks_that_do_not_fit_stay_untouched(tmp_path, monkeypatch):
    (tmp_path / "thesis.tex").touch()
    with refused(str(tmp_path)):
        plan(TINY, tmp_path)
    with refused("thesis.tex"):
        plan(TINY, tmp_path / "thesis.tex")
    usage = files.shutil.disk_usage(tmp_path)
    monkeypatch.setattr(files.shutil, "disk_usage", lambda path: usage._replace(free=1000))
    with refused("17", "0", "MB"):
        plan(TINY, tmp_path / "elsewhere" / "run")
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]


def test_names_and_defaults():
    assert tuple(SAMPLERS) == get_args(Positions)
    assert checked(sampled()).position_range == 48  # the longest length
    assert checked(sampled(test_lengths=(8,))).position_range == 16
    assert checked(sampled(position_range=16)).train_positions == "randomized(max_length=16)"
    assert checked(StudyConfig()).train_positions == "contiguous"
    for name, task in TASKS.items():
        config = checked(of_task(name))
        assert config.task == name and set(config.methods) <= set(task.methods)
        assert len(config.encodings) >= 3 and max(config.test_lengths) > config.train_length
    assert of_task("recall", steps=3).steps == 3


def test_all_is_every_encoding_with_a_meaning_for_the_model():
    of_digits, of_encoders = {"abacus", "coupled"}, {"convolutional"}
    every = tuple(name for name in list_encodings() if name not in of_digits | of_encoders)
    assert checked(tiny(encodings=("all",))).encodings == every
    assert of_digits < {*checked(of_task("addition-reversed", encodings=("all",))).encodings}


SAME = [
    ("rope+performer", "performer"),
    ("rope", "nope", "rope:base=10000"),
    ("mamba", "nope+mamba"),
    ("mamba", "mamba+mamba"),
    ("attention", "attention:dropout=0.0"),
    ("path_fox", "path_fox:kernel=3"),
    ("alibi+mamba+attention", "mamba+alibi+attention"),
]


@pytest.mark.parametrize("labels", SAME)
def test_labels_of_one_model_are_refused(labels, tmp_path):
    with pytest.raises(ValueError, match=f"--encodings .*: it names the same model as {labels[0].replace('+', '.')}"):
        plan(tiny(layers=2, encodings=labels), tmp_path / "run")


def test_labels_of_different_models_are_not(tmp_path):
    """Where queries and keys are changed, the order matters: (q + u) rotated is not q rotated + u."""
    labels = (
        "nope", "rope", "rope:base=5000", "rope+alibi", "transformer_xl+rope", "rope+transformer_xl", "mamba",
        "mamba:state_size=8", "mamba+attention", "attention+mamba", "nope+attention+mamba", "attention:dropout=0.1", "path_fox",
        "path_fox:kernel=4", "path+fox",
    )  # fmt: skip
    assert len(plan(tiny(layers=2, encodings=labels), tmp_path / "run").trials) == len(labels)


@pytest.mark.parametrize(("option", "kept", "gone"), [("block", "default", "qwen3"), ("match", "steps", "compute")])
def test_a_kept_study_of_an_option_that_is_gone_is_not_read_as_another(option, kept, gone):
    config = tiny()
    assert StudyConfig.of(asdict(config) | {option: kept}) == config
    with refused(option, gone):
        StudyConfig.of(asdict(config) | {option: gone})
