"""Presets: data files, each a study that can be planned, and what is wrong in one's own."""

import math
from dataclasses import replace

import pytest

from longitude.cli import main
from longitude.study.blind import is_blind
from longitude.study.criterion import SEEDS
from longitude.study.plan import checked, plan
from longitude.study.presets import FOLDER, list_presets, of_preset
from longitude.study.tasks.base import TASKS, of_task
from tests.support import refused


def test_presets_and_tasks_have_seeds_enough_for_intervals_over_them():
    for name in list_presets():
        assert len(checked(of_preset(name)).seeds) >= SEEDS or name == "quick"
        assert "about = " in (FOLDER / f"{name}.toml").read_text()
    assert all(len(of_task(name).seeds) >= SEEDS for name in TASKS)


@pytest.mark.parametrize("name", ["quick", "classic", *(name for name in list_presets() if name.startswith("ladder-"))])
def test_rope_turns_as_in_published_models(name):
    """Llama 2 (heads of 128, base 10,000, 4,096 tokens): 18 of 64 pairs, 28 %, never turn once; heads are 32 wide or more."""

    def never(base, width, length):
        return sum(2 * math.pi * base ** (2 * i / width) > length for i in range(width // 2)) / (width // 2)

    assert never(10_000, 128, 4096) == 18 / 64
    config = of_preset(name)
    width = config.hidden // config.heads
    label = next(each for each in config.encodings if each.startswith("rope:base="))
    assert width >= 32 and config.documents >= (24 if name == "quick" else 100)
    share = never(int(label.partition("=")[2]), width, config.train_length)
    assert share == pytest.approx(18 / 64, abs=0.5 / (width // 2))


def test_every_preset_of_text_has_a_blind_control():
    """Without one nothing is known of what its labels learned."""
    for name in list_presets():
        config = of_preset(name)
        if config.task == "text":
            assert any(is_blind(label, config.train_length) for label in config.encodings), name


def test_a_file_of_ones_own(tmp_path):
    """Options of its task that it leaves out are the task's."""
    path = tmp_path / "mine.toml"
    path.write_text("""
        about = "mine"
        task = "copy-decoder"
        encodings = ["rope"]
        train_length = 4
        test_lengths = [4, 6]
        learning_rates = [1]
        positions = "randomized"
        position_range = 9
        seeds = [3]
        documents = 5
    """)
    config = of_preset(str(path))
    assert (config.task, config.methods, config.encodings) == ("copy-decoder", ("forward",), ("rope",))
    assert (config.learning_rates, config.position_range, config.seeds) == ((1.0,), 9, (3,))
    assert plan(replace(config, hidden=16, heads=2), tmp_path / "run").config.test_lengths == (4, 6)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("train_lenght = 4", ["my.toml", "'train_lenght'", "'train_length'"]),
        ("positions = 'random'", ["my.toml", "positions", "'random'"]),
        ("steps 4", ["my.toml", "TOML"]),
    ],
)
def test_what_is_wrong_in_a_file(tmp_path, content, words):
    (tmp_path / "my.toml").write_text(content)
    with refused(*words):
        of_preset(str(tmp_path / "my.toml"))


def test_help_has_the_defaults_of_a_preset(capsys):
    assert main(["study", "--preset=classic", "--help"]) == 0
    assert "2048" in capsys.readouterr().out


def test_a_study_is_refused_under_a_launcher(monkeypatch, tmp_path, capsys):
    """Two processes would write one folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert main(["study"]) == 2
    assert "torchrun" in capsys.readouterr().err and not list(tmp_path.iterdir())
