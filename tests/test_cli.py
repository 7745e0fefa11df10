"""The command line: one result or one line of reason, and the exit code that says which."""

import json
import re

import pytest

import longitude
from longitude.cli import verbs
from longitude.positions.samplers import SAMPLERS
from longitude.positions.scaling import SCHEMES
from longitude.study import runner, train
from tests.support import printed, require_words

TINY = "--layers 1 --hidden 16 --heads 2 --train-length 16 --test-lengths 16 32 --steps 3 --batch-size 2".split()


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text(" ".join(str(i * i) for i in range(2000)))
    return str(path)


@pytest.mark.slow
def test_study_ends_with_table_conclusion_and_report(text, tmp_path, command):
    run = str(tmp_path / "run")
    code, out, err = command("study", *TINY, "--encodings", "rope", "alibi", "--data", text, "--out", run)
    assert code == 0
    assert re.search(r"rope.*\d\.\d\d", out) and re.search(r"alibi.*\d\.\d\d", out)
    assert re.search(rf"^Report +{re.escape(run)}/report\.html$", out, re.MULTILINE)
    assert (tmp_path / "run" / "report.html").stat().st_size > 10_000
    assert "rope seed 0 lr 0.005: done" in err and "alibi seed 0 lr 0.005: done" in err

    (tmp_path / "run" / "report.html").unlink()
    code, again, _ = command("report", run)
    assert code == 0 and again == out  # from saved results alone
    code, out, _ = command("report", run, "--json")
    rows = json.loads(out)
    assert code == 0 and {row["label"] for row in rows} == {"rope", "alibi"}
    assert all(row["metric"] == "bits_per_byte" and row["schema"] == 2 for row in rows)

    code, other, _ = command("study", *TINY, "--data", text, "--out", run, "--steps", "4")
    assert code == 0 and other != again  # to another question, in the same folder


@pytest.mark.slow
def test_a_trial_that_diverges_makes_the_exit_code_1(text, tmp_path, command):
    arguments = ["study", *TINY, "--data", text, "--out", str(tmp_path / "run"), "--encodings", "nope", "rope"]
    arguments += ["--workers", "1"]  # in this process, where the loss is poisoned
    plain = train.Steps.keep_loss

    def poisoned(self, module, inputs, output):
        plain(self, module, inputs, output)
        if module.config.encoding["name"] == "rope":
            self.loss = self.loss * float("nan")

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(train.Steps, "keep_loss", poisoned)
        code, out, err = command(*arguments)
    assert code == 1
    assert "rope seed 0 lr 0.005: diverged, the loss was not finite at step 1" in err
    assert re.search(r"nope.*\d\.\d\d", out) and "diverged" in out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("stdy", ["'stdy'", "'study'"]),
        ("study --encoding rope", ["'--encoding'", "'--encodings'"]),
        ("study --steps many", ["--steps", "'many'"]),
        ("study --data no/such/text", ["--data", "no/such/text"]),
        ("study --preset mine.toml", ["--preset", "mine.toml"]),
        ("study --preset clasic", ["'clasic'", "'classic'"]),
        ("study --preset classic --task recall", ["--preset", "--task", "recall"]),
        (f"study --test-lengths 64 65536 --data {__file__}", ["--test-lengths", "65536"]),
        (f"study --out {__file__}", ["--out", "test_cli.py"]),
        ("report no/such/run", ["no/such/run"]),
        ("bench --backends tabel", ["'tabel'", "'table'"]),
        ("bench --lengths 64 32", ["--lengths", "64 32"]),
        ("bench --kv-heads 3", ["--kv-heads", "3 and 8"]),
        ("bench --encodings axial_rope --head-dim 10", ["--encodings", "axial_rope", "head_dim"]),
        ("bench --lengths 1000000000 --encodings none", ["30517.6", "GiB"]),
        ("bench --out there.txt", ["there.txt", ".json"]),
        ("show", ["alibi"]),
        ("show alibbi", ["'alibbi'", "'alibi'"]),
        ("show alibi --length 1", ["--length", "2", "1"]),
        ("show alibi --out alibi.pdf", ["alibi.pdf", ".svg"]),
        ("show alibi --out no/alibi.svg", ["no/alibi.svg"]),
        ("show config.json --heads 2", ["--heads", "config.json"]),
        (f"show learned:max_length={10**14}", ["GiB"]),
    ],
)
def test_wrong_use_is_one_line_and_exit_code_2(arguments, words, tmp_path, monkeypatch, command):
    monkeypatch.chdir(tmp_path)
    code, out, err = command(*arguments.split())
    assert code == 2 and out == ""
    assert err.startswith("longitude: ") and err.count("\n") == 1
    require_words(err, *words)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("verb", verbs())
def test_help_has_each_option_once_and_examples_that_parse(verb, command, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    code, out, _ = command(verb, "--help")
    assert code == 0
    named = re.findall(r"^[│ ] (--[a-z-]+)", out, re.MULTILINE)  # of a box, or of a table in ASCII
    assert len({*named}) == len(named) >= 2 and not re.search(r"default: (None|False)?\)", out)
    _, all_of_it, _ = command(verb, "--help-all") if verb == "study" else (0, out, "")
    named_in_all = re.findall(r"^[│ ] (--[a-z-]+)", all_of_it, re.MULTILINE)
    examples = out[out.index("examples:") :].splitlines()[1:]
    assert len(examples) == 2
    for example in examples:
        program, used, *words = example.split()
        assert (program, used) == ("longitude", verb)
        assert {word for word in words if word.startswith("--")} <= {*named, *named_in_all}


def test_list_describes_everything(command, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    code, out, _ = command("list", "--json")
    found = json.loads(out)
    assert code == 0 and list(found) == ["encodings", "mixers", "scaling", "samplers", "plugins", "machine"]
    assert [entry["name"] for entry in found["mixers"]] == longitude.list_mixers()
    assert [entry["name"] for entry in found["encodings"]] == longitude.list_encodings()
    assert [entry["name"] for entry in found["scaling"]] == [*SCHEMES]
    assert [entry["name"] for entry in found["samplers"]] == [*SAMPLERS]
    assert all(entry["is"] for part in ("encodings", "mixers", "scaling", "samplers") for entry in found[part])
    rope = next(entry for entry in found["encodings"] if entry["name"] == "rope")
    assert "base" in rope["options"] and rope["class"] == "Rotary"
    assert rope["source"].startswith("Su et al. 2021, https://")

    monkeypatch.setattr("longitude.report.table.width", lambda: 80)
    code, out, _ = command("list")
    lines = out.splitlines()
    assert code == 0 and max(len(line) for line in lines if line.startswith("  ")) <= 80
    for entry in (*found["encodings"], *found["mixers"]):
        assert any(line.startswith(f"  {entry['name']} ") for line in lines), entry["name"]
    assert {*SCHEMES, *SAMPLERS} <= {*out.replace(",", " ").split()}
    assert f"torch {found['machine']['torch']}" in out
    _, out, _ = command("list", "t5")
    assert "T5Bias" in out and "num_buckets" in out and "Raffel et al. 2020" in out and "(sdpa)" not in out


def test_interrupted_a_study_continues(text, monkeypatch, command):
    def interrupted(*arguments, **named):
        raise KeyboardInterrupt

    monkeypatch.setattr(runner, "study", interrupted)
    code, _, err = command("study", *TINY, "--data", text)
    assert code == 130 and "is kept" in err and err.count("\n") == 1


def test_help_and_wrong_options_do_not_load_torch():
    code = "import sys; from longitude.cli import main; print(main(['study', '--hlep']), 'torch' in sys.modules)"
    assert printed(code).split() == ["2", "False"]
