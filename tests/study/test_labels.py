"""Labels: encodings and mixers by name, with the nearest name of either kind for one that nobody knows."""

import json
from dataclasses import replace

import pytest
import torch
from transformers import AutoModelForCausalLM

from longitude.attention.mixer import list_mixers
from longitude.measure import read_rows
from longitude.study import runner
from longitude.study.config import StudyConfig
from longitude.study.data import Text
from longitude.study.labels import Label, parse_encoding, parse_label
from longitude.study.plan import plan
from longitude.study.train import build_model

TINY = StudyConfig(
    train_length=16,
    test_lengths=(16, 32),
    steps=2,
    batch_size=2,
    layers=2,
    hidden=16,
    heads=2,
    documents=4,
    device="cpu",
)
NEEDED = {"window": "window:size=8"}
ALONE = [NEEDED.get(name, name) for name in list_mixers()]
"""Every mixer as a label, with the options that it cannot go without."""
DOCUMENTS = [(str(i), " ".join(str(j * j) for j in range(i, i + 200)).encode()) for i in range(30)]


def test_parts_are_encodings_or_mixers():
    assert parse_label("rope:base=5e+5+fox+window:size=64") == Label(
        [{"name": "rope", "base": 5e5}, {"name": "fox"}], [{"name": "window", "size": 64}]
    )
    assert parse_label("rope+attention+mamba") == Label([{"name": "rope"}], [{"name": "attention"}, {"name": "mamba"}])
    assert parse_label("mamba") == Label([], [{"name": "mamba"}])
    assert parse_label("rope+fox").encodings == parse_encoding("rope+fox")


def test_what_a_config_is_told():
    assert parse_label("rope").options(4) == {"encoding": {"name": "rope"}}
    assert parse_label("rope+fox").options(4) == {"encoding": [{"name": "rope"}, {"name": "fox"}]}
    assert parse_label("mamba").options(4) == {"mixer": {"name": "mamba"}}
    options = parse_label("alibi+attention+mamba").options(3)
    assert options["encoding"] == {"name": "alibi"}
    assert [mixer["name"] for mixer in options["mixers"]] == ["attention", "mamba", "attention"]
    with pytest.raises(ValueError, match="a layer for each of the 3 mixers, got 2; name fewer, or raise --layers"):
        parse_label("attention+mamba+mamba").options(2)


@pytest.mark.parametrize(
    "label", [*ALONE, "attention+mamba", "mamba+s4d", "sinusoidal+mamba", "fox+latent", "rope+fox"]
)
def test_the_encoding_is_the_one_that_the_model_has(label):
    """A label of mixers alone leaves the encoding to the model."""
    config = build_model(TINY, label, 0).config
    specs = config.encoding if isinstance(config.encoding, list) else [config.encoding]
    assert parse_label(label).encoding == "+".join(spec["name"] for spec in specs)
    names = [spec["name"] for spec in config.layer_mixers()]
    given = [mixer["name"] for mixer in parse_label(label).mixers] or ["attention"]
    assert names == [given[layer % len(given)] for layer in range(2)]


@pytest.mark.parametrize(
    ("label", "message"),
    [
        ("mamb", "unknown mixer 'mamb': did you mean 'mamba'?"),
        ("rope+windw:size=64", "unknown mixer 'windw': did you mean 'window'?"),
        ("rop+window:size=64", "unknown encoding 'rop': did you mean 'rope'?"),
        ("rope+window:siz=64", "unknown option of 'window' 'siz': did you mean 'size'?"),
        ("window:", "expected window:option=value after the colon, got 'window:'"),
        ("qqqq", "unknown encoding or mixer 'qqqq': there are: alibi, attention,"),
        ("", "unknown encoding or mixer ''"),
        (
            "none+rope+mamba",
            "expected none, or encodings, got 'none+rope+mamba': together with another encoding 'none' means nothing",
        ),
    ],
)
def test_the_nearest_name_of_either_kind(label, message):
    with pytest.raises(ValueError) as error:
        parse_label(label)
    assert message in str(error.value)


def test_a_label_of_encodings_alone_takes_no_mixer():
    with pytest.raises(ValueError, match="unknown encoding 'mamba'"):
        parse_encoding("rope+mamba")


@pytest.mark.parametrize(
    ("label", "message"),
    [
        ("rope+mamba", "--encodings rope.mamba: Rotary rotates queries and keys, and Mamba has none"),
        ("rope+window:size=0", "--encodings rope.window:size=0: .*size"),
        (
            "attention+mamba+mamba",
            "--encodings attention.mamba.mamba: expected a layer for each of the 3 mixers, got 2",
        ),
    ],
)
def test_what_a_mixer_refuses_is_said_before_anything_is_written(label, message, tmp_path, monkeypatch):
    monkeypatch.setattr("longitude.study.data.read_text", lambda data: Text(data, DOCUMENTS))
    with pytest.raises(ValueError, match=message):
        plan(replace(TINY, encodings=(label,)), tmp_path / "run")
    assert not list(tmp_path.iterdir())


def study(labels, path, monkeypatch):
    monkeypatch.setattr("longitude.study.data.read_text", lambda data: Text(data, DOCUMENTS))
    return runner.study(plan(replace(TINY, encodings=labels), path))


def test_mixers_are_trained_saved_loaded_and_measured(tmp_path, monkeypatch):
    labels = ("rope+window:size=8", "mamba", "rope+attention+mamba")
    assert study(labels, tmp_path, monkeypatch).complete
    rows = read_rows(tmp_path / "results.parquet")
    firsts = rows.groupby("label", sort=False)["encoding"].first()
    assert dict(firsts) == {"rope+window:size=8": "rope", "mamba": "none", "rope+attention+mamba": "rope"}
    assert rows["value"].notna().all() and set(rows["length"]) == {16, 32}
    saved = json.loads((tmp_path / "cells" / "rope+window_size=8-0" / "config.json").read_text())
    assert (saved["mixer"]["name"], saved["mixer"]["size"]) == ("window", 8)
    hybrid = AutoModelForCausalLM.from_pretrained(tmp_path / "cells" / "rope+attention+mamba-0")
    generated = hybrid.generate(torch.zeros(1, 3, dtype=torch.long), max_new_tokens=4, do_sample=False, pad_token_id=0)
    assert generated.shape == (1, 7)
    monkeypatch.setattr(runner, "run_trial", None)  # nothing is run again
    assert study((*labels,), tmp_path, monkeypatch).complete


@pytest.mark.slow
@pytest.mark.parametrize("label", ALONE)
def test_every_mixer_goes_through_a_study(label, tmp_path, monkeypatch):
    assert study((label,), tmp_path, monkeypatch).complete
