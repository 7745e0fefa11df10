"""`longitude check`: exit codes, the table, JSON, and encodings and mixers of the user's own."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from longitude.check.parts import check_part
from longitude.check.quick import QUICK
from longitude.check.subject import CHECKPOINT_LAWS
from longitude.cli import check as verb
from longitude.cli.check import CheckOptions, part_of
from longitude.testing.engine import Measurement
from tests.check.building import llama
from tests.support import edit_config

ENCODINGS, MIXERS = (Path("tests/testing") / f"broken_{kind}.py" for kind in ("encodings", "mixers"))
"""Files as a user's own, where Broken and Decay are right."""


SHORT = 16
"""The fewest tokens that laws of models take."""


def check(name: str, json: bool = False, all: bool = False, **options) -> int:
    return verb.check(name, CheckOptions(**options), all, json)


@pytest.fixture
def folder(tmp_path):
    llama().save_pretrained(tmp_path)
    return tmp_path


def test_what_holds_is_counted_and_named_on_request(folder, capsys):
    options = {"laws": ("files",), "length": SHORT}
    assert check(str(folder), **options) == 0
    assert len(capsys.readouterr().out.splitlines()) == 1, "nothing but the counts"
    assert check(str(folder), **options, all=True) == 0 and "files" in capsys.readouterr().out


def test_a_broken_checkpoint_is_explained_in_the_table_and_as_json(folder, capsys):
    edit_config(folder, rope_parameters=None)
    assert check(str(folder), laws=("files", "causality"), length=SHORT) == 1
    printed = capsys.readouterr().out
    assert "files failed: config.json: expected rope_theta" in printed and "1 failed" in printed
    assert check(str(folder), laws=("files",), length=SHORT, json=True) == 1
    found = json.loads(capsys.readouterr().out)
    broken = [one for one in found["laws"] if one["status"] == "failed"]
    assert found["failed"] == 1 and found["tokens"] == SHORT and found["equality laws in"] == "float64"
    assert [(one["law"], one["measured"], one["threshold"]) for one in broken] == [("files", 1, 0)]


@pytest.mark.parametrize(("failing", "code"), [((), 3), (("chunked_prefill",), 1)])
def test_a_law_that_this_machine_stops_is_no_success(failing, code, folder, capsys, monkeypatch):
    """Nor is it a failure of the model; one that fails says more."""

    def stopped(subject):
        raise MemoryError

    def fails(subject):
        return Measurement(1.0, 0.0)

    tests = {"left_padding": stopped} | dict.fromkeys(failing, fails)
    known = CHECKPOINT_LAWS.laws()
    for name, test in tests.items():
        monkeypatch.setitem(CHECKPOINT_LAWS.added, name, replace(known[name], test=test))
    assert check(str(folder), laws=("files", *tests), length=SHORT, json=True) == code
    found = json.loads(capsys.readouterr().out)
    assert (found["failed"], found["unknown"]) == (len(failing), 1)


def test_quick_needs_no_weights(folder, capsys):
    (folder / "model.safetensors").unlink()
    assert check(str(folder / "config.json"), quick=True, json=True) == 0
    found = json.loads(capsys.readouterr().out)
    assert [one["law"] for one in found["laws"]] == list(QUICK) and found["weights"] == "random, few heads"
    edit_config(folder, rope_parameters=None)
    assert check(str(folder), quick=True, laws=("files",)) == 1
    assert "files failed: config.json: expected rope_theta" in capsys.readouterr().out


OWN = """
from tests.check.building import llama
from transformers import LlamaForCausalLM


class Mine(LlamaForCausalLM):
    off = 0

    def forward(self, input_ids, cache=None, position_ids=None, **options):
        past = 0 if cache is None else cache.get_seq_length()
        if position_ids is None:
            position_ids = past + self.off * (past > 0) + torch.arange(input_ids.shape[1], device=input_ids.device)[None]
        return super().forward(input_ids, cache=cache, position_ids=position_ids, **options)


def build(off=0):
    model = llama()
    model.__class__, model.off = Mine, off
    return model
"""


def test_own_modeling_code_is_run_if_the_user_names_it(tmp_path, capsys):
    (file := tmp_path / "my.py").write_text("import torch\n" + OWN)
    laws = ("causality", "cached_decoding", "chunked_prefill")
    assert check(f"{file}:build", laws=laws, length=SHORT) == 0 and "3 laws: 3 passed" in capsys.readouterr().out
    assert check(f"{file}:build:off=1", laws=laws, length=SHORT) == 1
    printed = capsys.readouterr().out
    assert printed.startswith("cached_decoding failed: ") and "the class Mine" in printed
    assert "; 1 test waits for this one" in printed
    with pytest.raises(ValueError, match="--quick is for saved models"):
        check(f"{file}:build", quick=True)
    with pytest.raises(ValueError, match="of a model, name a function that returns it"):
        check(f"{file}:Mine")


class Raising:
    def __init__(self):
        raise RuntimeError("no room")


WRONG = (
    ("{model}/nowhere", {}, "there is no such folder"),
    ("alibi", {"length": 64}, "--length is for models"),
    ("{model}", {"quick": True, "dtype": "bfloat16"}, "--dtype is for weights, and --quick reads none"),
    ("{model}", {"against": "{model}", "seed": 1}, "--seed is for laws"),
    ("alibi+rope", {}, "expected one encoding or mixer"),
    ("mamba", {"laws": ("far_positions",)}, "unknown law 'far_positions'"),
    ("no.such.module:Class", {}, "there is no such module"),
    (f"{ENCODINGS}:Brken", {}, "did you mean 'Broken'"),
    ("torch.nn:ReLU", {}, "a model of transformers, got ReLU"),
    ("tests.check.test_cli:Raising", {}, "Raising cannot be built: it raised RuntimeError: no room"),
    ("./alibbi", {}, "no such folder"),
)


@pytest.mark.parametrize(("name", "options", "words"), WRONG)
def test_wrong_use_is_a_value_error(name, options, words, folder):
    with pytest.raises(ValueError, match=words):
        check(name.format(model=folder), **options)


PARTS = (  # law, of what is right, and of what breaks it
    ("far_positions", "encoding", f"{ENCODINGS}:Broken:rate=0.25", f"{ENCODINGS}:InTheModelsDtype"),
    ("memory", "mixer", f"{MIXERS}:Decay", f"{MIXERS}:KeepsEverything"),
    ("causality", "mixer", "window:size=8", None),
)


@pytest.mark.parametrize(("law", "kind", "right", "broken"), PARTS)
def test_encodings_and_mixers_by_name_and_of_ones_own(law, kind, right, broken, capsys):
    assert check(right, laws=(law,), json=True) == 0
    found = json.loads(capsys.readouterr().out)
    [result] = found["laws"]
    assert (found["kind"], found["failed"]) == (kind, 0)
    assert (result["law"], result["status"], result["reason"]) == (law, "passed", "")
    assert result["claim"]
    if broken is not None:
        assert check(broken, laws=(law,)) == 1
        assert "1 failed" in capsys.readouterr().out
        build = part_of(broken)[0]
        result = check_part(build if kind == "encoding" else lambda dim: build(dim), laws=(law,))[law]
        assert result.status == "failed" and result.measured > result.threshold
