"""Labels: encodings and mixers by name, with the nearest name of either kind for an unknown one."""

import json
from dataclasses import replace
from functools import partial

import pytest
import torch
from transformers import AutoModelForCausalLM

from longitude.attention.mixer import list_mixers
from longitude.measure import read_rows
from longitude.positions.base import list_encodings
from longitude.study.labels import Label, parse_encoding, parse_label, safe
from longitude.study.train import build_model
from longitude.study.trial import Trial
from tests.study.conftest import TINY, run
from tests.support import refused_calls

tiny = partial(replace, TINY, layers=2, steps=2)
NEEDED = {"window": "window:size=8"}
ALONE = [NEEDED.get(name, name) for name in list_mixers()]
"""Every mixer as a label, with the options that it cannot go without."""


def test_parts_are_encodings_or_mixers():
    assert parse_label("rope:base=5e+5+fox+window:size=64") == Label(
        [{"name": "rope", "base": 5e5}, {"name": "fox"}], [{"name": "window", "size": 64}]
    )
    assert parse_label("rope+attention+mamba") == Label([{"name": "rope"}], [{"name": "attention"}, {"name": "mamba"}])
    assert parse_label("mamba") == Label([], [{"name": "mamba"}])
    assert parse_label("rope+fox").encodings == parse_encoding("rope+fox")


def test_options_of_a_config():
    assert parse_label("rope").options(4) == {"encoding": {"name": "rope"}}
    assert parse_label("rope+fox").options(4) == {"encoding": [{"name": "rope"}, {"name": "fox"}]}
    assert parse_label("mamba").options(4) == {"mixer": {"name": "mamba"}}
    options = parse_label("alibi+attention+mamba").options(3)
    assert options["encoding"] == {"name": "alibi"}
    assert [mixer["name"] for mixer in options["mixers"]] == ["attention", "mamba", "attention"]


@pytest.mark.parametrize(
    "label", [*ALONE, "attention+mamba", "mamba+s4d", "sinusoidal+mamba", "fox+latent", "rope+fox"]
)
def test_the_encoding_is_the_one_that_the_model_has(label):
    """A label of mixers alone leaves the encoding to the model."""
    config = build_model(tiny(), label, 0).config
    specs = config.encoding if isinstance(config.encoding, list) else [config.encoding]
    assert parse_label(label).encoding == "+".join(spec["name"] for spec in specs)
    names = [spec["name"] for spec in config.layer_mixers()]
    given = [mixer["name"] for mixer in parse_label(label).mixers] or ["attention"]
    assert names == [given[layer % len(given)] for layer in range(2)]


test_the_nearest_name_of_either_kind = refused_calls(
    [
        (partial(parse_label, "mamb"), "unknown mixer 'mamb': did you mean 'mamba'?"),
        (partial(parse_label, "rope+windw:size=64"), "unknown mixer 'windw': did you mean 'window'?"),
        (partial(parse_label, "rop+window:size=64"), "unknown encoding 'rop': did you mean 'rope'?"),
        (partial(parse_label, "rope+window:siz=64"), "unknown option of 'window' 'siz': did you mean 'size'?"),
        (partial(parse_label, "window:"), "expected window:option=value after the colon, got 'window:'"),
        (partial(parse_label, "qqqq"), "unknown encoding or mixer 'qqqq': there are: alibi, attention,"),
        (partial(parse_label, ""), "unknown encoding or mixer ''"),
        (partial(parse_label, "none+rope+mamba"), "expected none, or encodings, got 'none.rope.mamba': together with"),
        (partial(parse_encoding, "rope+mamba"), "unknown encoding 'mamba'"),
        (partial(parse_encoding, "qqqq"), "unknown encoding 'qqqq': there are: alibi,"),
        (partial(parse_encoding, "rope:scaling=yarn(factor)"), r"expected yarn\(option=value,option=value\), got"),
        (partial(parse_encoding, "rope:scaling=yarn(factor=,x=2)"), r"expected yarn\(option=value,option=value\), got"),
        (
            partial(parse_label("attention+mamba+mamba").options, 2),
            "a layer for each of the 3 mixers, got 2; name fewer",
        ),
    ]
)


def test_labels_with_schemes_and_lists():
    yarn = {"name": "yarn", "factor": 16, "original_max_length": 256}
    label = "rope:scaling=yarn(factor=16,original_max_length=256),base=5e5+fox"
    assert parse_encoding(label) == [{"name": "rope", "scaling": yarn, "base": 5e5}, {"name": "fox"}]
    assert safe(label) == "rope_scaling=yarn_factor=16,original_max_length=256_,base=5e5+fox"
    [mrope] = parse_encoding("mrope:sections=2/1/1,arrangement=contiguous")
    assert mrope == {"name": "mrope", "sections": [2, 1, 1], "arrangement": "contiguous"}
    lists = "rope:scaling=longrope(short_factor=1/1.5,long_factor=2/4,original_max_length=16,factor=3)"
    [rope] = parse_encoding(lists)
    assert rope["scaling"]["short_factor"] == [1, 1.5] and rope["scaling"]["factor"] == 3


def test_labels_are_trained_saved_loaded_and_measured(tmp_path, numbers):
    scheme = "rope:scaling=yarn(factor=3,original_max_length=16)"
    config = tiny(
        encodings=("rope+window:size=8", "mamba", "rope+attention+mamba", scheme, "rope:layout=half,base=5e5")
    )
    assert run(config, tmp_path)[0].complete
    rows = read_rows(tmp_path / "results.parquet")
    assert list(rows.groupby("label", sort=False)["encoding"].first()) == ["rope", "none", "rope", "rope", "rope"]
    assert rows["value"].notna().all() and set(rows["length"]) == {16, 32, 48}
    saved = [json.loads((Trial(tmp_path, label, 0).folder / "config.json").read_text()) for label in config.encodings]
    assert (saved[0]["mixer"]["name"], saved[0]["mixer"]["size"], saved[4]["encoding"]["base"]) == (
        "window",
        8,
        500_000,
    )
    yarn = {"name": "yarn", "factor": 3, "original_max_length": 16}
    assert saved[3]["encoding"]["scaling"].items() >= yarn.items()
    hybrid = AutoModelForCausalLM.from_pretrained(Trial(tmp_path, "rope+attention+mamba", 0).folder)
    generated = hybrid.generate(torch.zeros(1, 3, dtype=torch.long), max_new_tokens=4, do_sample=False, pad_token_id=0)
    assert generated.shape == (1, 7)


@pytest.mark.slow
@pytest.mark.parametrize("positions", ["contiguous", "skipped"])
@pytest.mark.parametrize("label", [*list_encodings(), *ALONE])
def test_everything_registered_goes_through_a_study(label, positions, tmp_path, numbers):
    config = tiny(encodings=(label,), positions=positions, test_lengths=(16, 48), hidden=32, heads=4)
    [(_, status)] = run(config, tmp_path)[0].trials
    rows = read_rows(tmp_path / "results.parquet").query("method == 'non-overlapping'")
    bounded = label == "learned" and positions == "contiguous"
    assert status.status == "done" and ("no positions from 16 on" in (status.reason or "")) == bounded
    assert list(rows["length"]) == ([16] if bounded else [16, 48]) and rows["value"].notna().all()
