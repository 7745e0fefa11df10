"""What a study refuses before anything is written: wrong options, texts, labels and directories, and one model named twice."""

from dataclasses import replace
from functools import partial
from typing import get_args

import pytest

from longitude.positions.base import list_encodings
from longitude.positions.samplers import SAMPLERS
from longitude.runs import files
from longitude.study.config import Positions, StudyConfig
from longitude.study.plan import checked, plan
from longitude.study.tasks.base import TASKS, of_task
from tests.study.conftest import REVERSE, TINY

pytestmark = pytest.mark.usefixtures("numbers")
tiny, reverse = partial(replace, TINY), partial(replace, REVERSE)
sampled = partial(tiny, positions="randomized")


@pytest.mark.parametrize(
    ("message", "config"),
    [
        ("unknown encoding 'rop': did you mean 'rope'.*longitude list", tiny(encodings=("rop",))),
        ("unknown option of 'rope' 'bas': did you mean 'base'", tiny(encodings=("rope:bas=3",))),
        ("--encodings rope:rotary_dim=3: .*even rotary_dim", tiny(encodings=("rope:rotary_dim=3",))),
        ("unknown scaling 'yarm': did you mean 'yarn'", tiny(encodings=("rope:scaling=yarm,factor=2",))),
        ("unknown option of 'rope' 'facto': did you mean 'factor'", tiny(encodings=("rope:scaling=yarn,facto=2",))),
        ("after the colon", tiny(encodings=("rope:",))),
        ("option=value", tiny(encodings=("rope:base",))),
        ("--encodings must name at least one, and each once, got rope rope", tiny(encodings=("rope", "rope"))),
        ("--encodings must name at least one, and each once, got none", tiny(encodings=())),
        ("either all or a list", tiny(encodings=("all", "rope"))),
        ("rope.mamba: Rotary rotates queries and keys, and Mamba has none", tiny(encodings=("rope+mamba",))),
        ("--encodings rope.window:size=0: .*size", tiny(encodings=("rope+window:size=0",))),
        ("a layer for each of the 3 mixers, got 2", tiny(encodings=("attention+mamba+mamba",), layers=2)),
        (
            "abacus: .abacus. counts digits .* --task text writes none of its ids; use .* abacus:digits=48,49,",
            tiny(encodings=("abacus",)),
        ),
        (
            "expected digits below 256, the vocabulary of --task text, got 256",
            tiny(encodings=("abacus:digits=255,256",)),
        ),
        ("--encodings abacus:digits=a: Abacus: expected digits to be token ids", tiny(encodings=("abacus:digits=a",))),
        ("it names the same model as rope:base=5e5", tiny(encodings=("rope:base=5e5", "rope:base=5E5"))),
        ("must ascend without repeats, got 16 16", tiny(test_lengths=(16, 16))),
        ("must ascend without repeats, got 32 16", tiny(test_lengths=(32, 16))),
        ("must be positive numbers, got 0 16", tiny(test_lengths=(0, 16))),
        ("got none", tiny(test_lengths=())),
        ("--heads must divide --hidden 16, got 3", tiny(heads=3)),
        ("--steps must be at least 1, got 0", tiny(steps=0)),
        ("--train-length must be at least 2, got 1", tiny(train_length=1)),
        ("--seeds must be numbers from 0", tiny(seeds=(-1,))),
        ("and each once, got 0 0", tiny(seeds=(0, 0))),
        ("--learning-rates must be above 0", tiny(learning_rates=(1e-3, float("nan")))),
        ("--warmup must be a share of the steps", tiny(warmup=1.0)),
        ("--weight-decay must be 0 or more", tiny(weight_decay=-1.0)),
        ("did you mean 'sliding'", tiny(methods=("slidng",))),
        ("--methods must name at least one", tiny(methods=())),
        ("--stride is of sliding windows", tiny(stride=4)),
        ("--stride must be 1 to the shortest length 16, got 17", tiny(stride=17, methods=("sliding",))),
        ("--device tpu: this machine has none", tiny(device="tpu")),
        ("bytes long and must be at least 120000", tiny(test_lengths=(16, 10_000))),
        ("unknown sampler 'random': did you mean 'randomized'", tiny(positions="random")),
        ("--position-range .* --positions is contiguous; leave it out", tiny(position_range=48)),
        ("--position-range must be at least the training length 16, got 15", sampled(position_range=15)),
        ("learned:max_length=40: .*expected positions 0 .. 39", sampled(encodings=("learned:max_length=40",))),
        ("at least the training length 4 with its 5 positions, got 4", reverse(positions="skipped", position_range=4)),
        ("unknown task of --task 'revers': did you mean 'reverse'", reverse(task="revers")),
        ("--data of --task reverse must be generated, got stdlib; leave it out", reverse(data=("stdlib",))),
        ("--data of --task text must be a text, got generated", reverse(task="text", methods=("sliding",))),
        ("unknown method 'sliding': .*greedy", reverse(methods=("sliding",))),
        ("--stride is of sliding windows", reverse(stride=2)),
        ("--encodings fox: encoding: FoX has no meaning for tokens in the future", reverse(encodings=("fox",))),
        ("--encodings mamba: mixer: 'mamba' is causal", of_task("masked", encodings=("mamba",))),
    ],
)
def test_wrong_use_is_refused_before_anything_is_written(message, config, tmp_path):
    with pytest.raises(ValueError, match=message):
        plan(config, tmp_path / "run")
    assert not list(tmp_path.iterdir())


def test_directories_and_disks_that_do_not_fit_stay_untouched(tmp_path, monkeypatch):
    (tmp_path / "thesis.tex").touch()
    with pytest.raises(ValueError, match="holds other files and no results"):
        plan(TINY, tmp_path)
    with pytest.raises(ValueError, match="there is a file of this name"):
        plan(TINY, tmp_path / "thesis.tex")
    usage = files.shutil.disk_usage(tmp_path)
    monkeypatch.setattr(files.shutil, "disk_usage", lambda path: usage._replace(free=1000))
    with pytest.raises(ValueError, match=r"needs about 17 MB of disk, .* has 0 MB free"):
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
    assert of_task("reverse", steps=3).steps == 3


def test_all_is_every_encoding_with_a_meaning_for_the_model():
    of_digits = {"abacus", "coupled"}
    assert checked(tiny(encodings=("all",))).encodings == tuple(n for n in list_encodings() if n not in of_digits)
    assert of_digits < {*checked(of_task("addition-reversed", encodings=("all",))).encodings}
    everything = checked(reverse(encodings=("all",))).encodings
    assert "fox" not in everything and {"rope", "t5", "shaw", "none"} <= set(everything)


SAME = [
    ("rope+performer", "performer"),
    ("rope", "none", "rope:base=10000"),
    ("mamba", "none+mamba"),
    ("mamba", "mamba+mamba"),
    ("rope:base=10000+alibi", "alibi+rope"),
    ("learned+rope", "rope+learned"),
    ("attention", "attention:dropout=0.0"),
    ("path_fox", "path_fox:kernel=3"),
    ("transformer_xl+alibi+rope", "transformer_xl+rope+alibi"),
    ("alibi+mamba+attention", "mamba+alibi+attention"),
]


@pytest.mark.parametrize("labels", SAME)
def test_labels_of_one_model_are_refused(labels, tmp_path):
    with pytest.raises(ValueError, match=f"--encodings .*: it names the same model as {labels[0].replace('+', '.')}"):
        plan(tiny(layers=2, encodings=labels), tmp_path / "run")


def test_labels_of_different_models_are_not(tmp_path):
    """Where queries and keys are changed, the order matters: (q + u) rotated is not q rotated + u."""
    labels = (
        "none", "rope", "rope:base=5000", "rope+alibi", "rope+fox", "alibi", "transformer_xl+rope", "rope+transformer_xl",
        "mamba", "mamba:state_size=8", "mamba+attention", "attention+mamba", "none+attention+mamba", "alibi+attention+mamba",
        "learned+mamba", "sinusoidal+mamba", "attention:dropout=0.1", "path_fox", "path_fox:kernel=4", "path+fox",
    )  # fmt: skip
    assert len(plan(tiny(layers=2, encodings=labels), tmp_path / "run").trials) == len(labels)
