"""Code of a user's own: files and installed distributions that register, and what a run writes down of them."""

import hashlib
import json
import os
import sys
from dataclasses import replace
from pathlib import Path

import pytest

import longitude as lg
from longitude import plugins
from longitude.attention.mixer import MIXERS
from longitude.catalogue import catalogue
from longitude.check.parts import check_part
from longitude.cli import main
from longitude.positions.base import ENCODINGS
from longitude.study.analysis import analyse
from longitude.study.plan import plan
from longitude.study.runner import study
from longitude.study.tasks.base import TASKS, of_task
from tests.support import printed

MINE = '''"""Position as the root of the distance."""

import longitude as lg
from longitude.positions.base import Encoding
from longitude.positions.terms import OffsetBias
from longitude.study.tasks.base import register_task
from longitude.study.tasks.written import CopyDecoder


@lg.register("{name}")
class Mine(Encoding):
    """score += -sqrt(|i - j|)"""

    relative = shared = True

    def __init__(self, num_heads: int):
        super().__init__()
        self.num_heads = num_heads

    def terms(self, context):
        def at(offset):
            return -offset.abs().double().sqrt().expand(self.num_heads, *offset.shape)

        return (OffsetBias(at),)


@register_task("{name}_again")
class Again(CopyDecoder):
    """A word, written again."""
'''


@pytest.fixture(autouse=True)
def as_before(monkeypatch):
    """No plugin of a test is left in the process."""
    monkeypatch.setenv(plugins.VARIABLE, "")
    for registry in (ENCODINGS, MIXERS, TASKS):
        registry.load()
        monkeypatch.setattr(registry, "factories", dict(registry.factories))
    monkeypatch.setattr(plugins, "_loaded", {})
    monkeypatch.setattr(plugins, "_outside", {})
    modules = set(sys.modules)
    yield
    for name in set(sys.modules) - modules:
        if name.startswith(("longitude_plugin", "installed_")):
            del sys.modules[name]


def file(folder: Path, name: str = "mine", more: str = "") -> Path:
    path = folder / f"{name}.py"
    path.write_text(MINE.format(name=name) + more)
    return path


def installed(folder: Path, monkeypatch, code: str, value: str = "installed_mine", version: str = "1.2") -> None:
    """A distribution, as pip leaves it, whose entry point is named own."""
    about = folder / f"installed_mine-{version}.dist-info"
    about.mkdir(parents=True)
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: installed-mine\nVersion: {version}\n")
    (about / "entry_points.txt").write_text(f"[longitude.plugins]\nown = {value}\n")
    (folder / "installed_mine.py").write_text(code)
    monkeypatch.syspath_prepend(folder)
    monkeypatch.setattr(plugins, "looked_for_installed", False)


def test_a_file_is_seen_by_everything(tmp_path):
    plugin = plugins.load(file(tmp_path))
    assert plugin.registered == {"mine": "encoding", "mine_again": "task"}
    assert "mine" in lg.list_encodings() and lg.encoding("mine", num_heads=2).bias_at(4).tolist() == [-2.0, -2.0]
    assert check_part("mine", laws=["causality", "shift"])["causality"].status == "passed"
    config = lg.LongitudeConfig(hidden_size=16, num_hidden_layers=1, num_attention_heads=2, encoding="mine")
    assert lg.LongitudeForCausalLM(config).config.encoding
    assert of_task("mine_again").train_length == 16
    facts = catalogue()
    assert [each["registers"] for each in facts["plugins"]] == [plugin.registered]
    assert next(each for each in facts["encodings"] if each["name"] == "mine")["acts"] == ["bias"]


def test_a_name_is_recorded_however_it_is_hyphened(tmp_path, monkeypatch):
    """Schemes of positions are read both ways, and a hash that is not recorded would let old results pass for new."""
    installed(tmp_path, monkeypatch, MINE.format(name="by_parts"))
    [plugin] = plugins.loaded()
    assert plugins.records("by-parts") == plugins.records("rope:scaling=by_parts") == [plugin.record]
    assert plugins.records("parts") == []


def test_an_installed_distribution_is_seen_at_the_first_look(tmp_path, monkeypatch):
    code = MINE.format(name="mine")
    installed(tmp_path, monkeypatch, code)
    assert "mine" in lg.list_encodings()
    [plugin] = plugins.loaded()
    assert plugin.record == {
        "name": "own", "distribution": "installed-mine 1.2", "sha256": hashlib.sha256(code.encode()).hexdigest(),
    }  # fmt: skip
    assert plugins.records("text", "rope", "alibi") == []  # nothing of it is used
    assert plugins.records("text", "rope", "fox+mine:num_heads=2") == [plugin.record]
    assert plugins.records("mine_again") == [plugin.record]
    plugins.restore([plugin])
    with pytest.raises(ValueError, match=r"the plugin 'own' \(installed-mine 1.2\) has changed"):
        plugins.restore([replace(plugin, sha256="0" * 64)])


def test_a_file_that_was_edited_since_is_not_taken_for_the_first(tmp_path):
    before = plugins.load(file(tmp_path))
    plugins.restore([before])
    file(tmp_path, more="# edited\n")
    with pytest.raises(ValueError, match=r"mine\.py"):
        plugins.restore([before])


@pytest.mark.slow
def test_processes_started_from_here_have_the_same_files(tmp_path):
    plugins.load(file(tmp_path))
    plugins.load(file(tmp_path, "other"))
    code = "import longitude as lg; print(*{'mine', 'other'} & {*lg.list_encodings()})"
    assert set(printed(code).split()) == {"mine", "other"}


def test_every_verb_takes_files(tmp_path, capsys):
    first, second = (str(file(tmp_path, name)) for name in ("first", "second"))
    assert main(["list", "--json", "--plugin", first, f"--plugin={second}"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert {"first", "second"} < {each["name"] for each in facts["encodings"]}
    assert main(["check", f"{first}:Mine", "--laws", "causality", "--plugin", first]) == 0  # one file, run twice
    assert "--plugin FILE" in (capsys.readouterr().out, main(["study", "--help"]), capsys.readouterr().out)[2]


def test_the_record_of_a_file(tmp_path):
    path = file(tmp_path)
    plugins.load(path)
    saved = plugins.records("text", "rope")
    assert saved == [{"name": "mine", "path": str(path), "sha256": hashlib.sha256(path.read_bytes()).hexdigest()}]
    plugins.require_loaded(saved, "runs/study")
    with pytest.raises(ValueError, match=r"the plugin 'other' \(.*mine.py\), which is not loaded; add --plugin"):
        plugins.require_loaded([saved[0] | {"name": "other"}], "runs/study")
    after = plugins.load(file(tmp_path, more="\nMine.source = 'Author 2026'\n"))  # in the place of the other
    assert plugins.loaded() == [after] and lg.encoding("mine", num_heads=1).source == "Author 2026"
    assert plugins.records("text", "rope") != saved


@pytest.mark.slow
def test_a_study_records_its_plugins_and_trains_again_with_another_hash(tmp_path):
    plugins.load(file(tmp_path))
    small = {"steps": 2, "batch_size": 2, "documents": 4, "layers": 1, "hidden": 16, "heads": 2, "device": "cpu"}
    config = of_task("mine_again", encodings=("mine",), train_length=3, test_lengths=(3,), **small)
    assert study(plan(config, tmp_path / "run")).complete
    saved = json.loads((tmp_path / "run" / "question.json").read_text())
    assert saved["plugins"] == plugins.records()
    plugins.load(file(tmp_path, more="# edited\n"))
    before = {path.name for path in (tmp_path / "run" / "units").glob("train-*")}
    again = plan(config, tmp_path / "run")
    assert not before & {units.training.name for units in again.trials}
    assert analyse(tmp_path / "run").run.task.name == "mine_again"  # results are there to be read
    plugins._loaded.clear()
    with pytest.raises(ValueError, match=r"which is not loaded; add --plugin .*/mine.py"):
        analyse(tmp_path / "run")


def test_an_encoding_that_cannot_be_built_does_not_stop_a_list(tmp_path, capsys):
    more = "\n\n@lg.register('needy')\nclass Needy(Mine):\n    def __init__(self, slope: float): ..."
    assert main(["list", "--plugin", str(file(tmp_path, more=more))]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "encoding mine, task mine_again, encoding needy needy cannot be built at toy size: TypeError: " in shown


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        ("x = (", r"bad.py, line 1, cannot be run: SyntaxError"),
        ("import longitude\nraise OSError('no disk')", r"bad.py, line 2, cannot be run: OSError: no disk"),
        ("raise SystemExit(3)", "line 1, cannot be run: SystemExit: 3"),
        ("x = 1", "it registers nothing; put @lg.register"),
        (MINE.format(name="alibi"), "ValueError: the encoding 'alibi' is registered already"),
        ("\0", "cannot be run"),
    ],
)
def test_a_broken_file(tmp_path, code, reason):
    path = tmp_path / "bad.py"
    path.write_text(code)
    with pytest.raises(ValueError, match=f"--plugin .*{reason}"):
        plugins.load(path)
    assert plugins.loaded() == [] and plugins.VARIABLE not in {k for k, v in os.environ.items() if v}


def test_files_that_are_none(tmp_path, capsys):
    (tmp_path / "mine.txt").write_text(MINE)
    (tmp_path / "b").mkdir()
    plugins.load(file(tmp_path))
    for path, reason in (
        (tmp_path / "nope.py", r"--plugin .*nope.py: it cannot be read \(No such file"),
        (tmp_path / "mine.txt", r"expected a file that ends in .py"),
        (file(tmp_path / "b"), r"there is a plugin 'mine' already, from .*/mine.py; rename one"),
    ):
        with pytest.raises(ValueError, match=reason):
            plugins.load(path)
    assert main(["list", "--plugin", str(tmp_path / "nope.py")]) == 2
    assert capsys.readouterr().err.startswith("longitude: --plugin")
    assert main(["list", "--plugin"]) == 2


@pytest.mark.parametrize(
    ("code", "value", "reason"),
    [
        ("import no_such_module", "installed_mine", "cannot be imported: ModuleNotFoundError: No module named"),
        ("x = 1", "installed_mine:x", "expected the name of a module that registers, got installed_mine:x"),
        (MINE.format(name="rope"), "installed_mine", "the encoding 'rope' is registered already"),
    ],
)
def test_a_broken_installation_says_whose_it_is(tmp_path, monkeypatch, code, value, reason):
    installed(tmp_path, monkeypatch, code, value)
    reason = rf"the plugin 'own' of installed-mine 1.2 \(longitude.plugins: .*\).*{reason}"
    for _ in range(2):  # at every look, not at the first alone
        with pytest.raises(ValueError, match=reason):
            lg.list_encodings()
    monkeypatch.setattr(plugins, "looked_for_installed", True)
