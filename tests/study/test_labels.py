"""Labels: encodings and mixers by name, with the nearest name of either kind for an unknown one."""

import string
from dataclasses import replace
from functools import partial

import pytest
import torch

from longitude.attention.mixer import list_mixers
from longitude.labels import Label, parse_encoding, parse_label, parse_options, safe
from longitude.measure import read_rows
from longitude.models import LongitudeConfig
from longitude.study.plan import checked
from longitude.study.train import build_model
from tests.study.conftest import TINY, run
from tests.support import refused_calls

tiny = partial(replace, TINY, layers=2, steps=2)
NEEDED = {"window": "window:size=8", "chunks": "chunks:size=8"}
ALONE = [NEEDED.get(name, name) for name in list_mixers()]
"""Every mixer as a label, with the options that it cannot go without."""


def test_parts_are_encodings_or_mixers():
    assert parse_label("rope:base=5e+5+fox+window:size=64") == Label(
        [{"name": "rope", "base": 5e5}, {"name": "fox"}], [{"name": "window", "size": 64}]
    )
    assert parse_label("rope+attention+mamba") == Label([{"name": "rope"}], [{"name": "attention"}, {"name": "mamba"}])
    assert parse_label("mamba") == Label([], [{"name": "mamba"}])
    assert parse_label("rope+fox").encodings == parse_encoding("rope+fox")


@pytest.mark.parametrize("label", [*ALONE, *"attention+mamba mamba+s4d sinusoidal+mamba fox+latent rope+fox".split()])
def test_the_encoding_is_the_one_that_the_model_has(label):
    """A label of mixers alone leaves the encoding to the model."""
    config = build_model(tiny(), label, 0).config
    specs = config.encoding if isinstance(config.encoding, list) else [config.encoding]
    assert parse_label(label).encoding == "+".join(spec["name"] for spec in specs)
    names = [spec["name"] for spec in config.layer_mixers()]
    given = [mixer["name"] for mixer in parse_label(label).mixers] or ["attention"]
    assert names == [given[layer % len(given)] for layer in range(2)]


test_what_is_wrong_in_a_label_is_named = refused_calls(
    [
        (lambda: build_model(tiny(), "rope:base=../../x", 0), "'/'"),
        (lambda: build_model(tiny(), "rope:base=..x", 0), "rope:base=..x"),
        (lambda: build_model(tiny(), "rope..alibi:slope=..nope", 0), "alibi:slope=..nope"),
        (lambda: build_model(tiny(), "t5:num_buckets=1000000000", 0), "num_buckets=1000000000"),
        (partial(parse_label, "mamb"), "mixer", "'mamb'", "'mamba'"),
        (partial(parse_label, "rope+windw:size=64"), "mixer", "'windw'", "'window'"),
        (partial(parse_label, "rope+window:siz=64"), "'window'", "'siz'", "'size'"),
        (partial(parse_label, "qqqq"), "'qqqq'", "abacus", "attention"),
        (partial(parse_label, ""), "mixer", "''"),
        (partial(parse_label, "nope+rope+mamba"), "'nope+rope+mamba'"),
        (partial(parse_encoding, "rope+mamba"), "encoding", "'mamba'"),
        (partial(parse_encoding, "rope:base"), "rope:option=value,option=value", "'rope:base'"),
        (partial(parse_encoding, "rope:base=5=6"), "rope:option=value,option=value", "'rope:base=5=6'"),
        (partial(parse_encoding, "rope:base=5,base=6"), "base", "'rope:base=5,base=6'"),
        (partial(parse_encoding, "rope:layout=half,2"), "layout", "2,1,1"),
        (partial(parse_encoding, "rope:scaling=yarn,facto=2"), "'rope'", "'facto'", "'factor'"),
        (partial(parse_encoding, "alibi:scaling=yarn,factor=2"), "'alibi'", "'scaling'"),
        (partial(parse_encoding, "rope:scaling=base,base=5e5"), "scaling.base=", "'base'"),
        (partial(parse_encoding, "rope:scaling=yarn,factor=2,scaling.factor=3"), "'scaling.factor'", "factor"),
        (partial(parse_label("attention+mamba+mamba").options, 2), "3", "2", "--layers"),
        (partial(parse_label, "mamba+conv"), "'mamba+conv'", "latent"),
        (partial(parse_label, "attention:short_conv=kv+conv"), "short_conv"),
        (lambda: build_model(tiny(), "nope+conv:at=inputs", 0), "'inputs'", "'input'"),
        (partial(parse_label, "rope.."), "'rope..'"),
        (partial(parse_label, "rope..window:size=8+mamba2"), "window", "mamba2"),
        (partial(parse_label, "rope..nope+alibi"), "'nope'"),
    ]
)


def test_labels_with_schemes_and_lists():
    yarn = {"name": "yarn", "factor": 16, "original_max_length": 256}
    label = "rope:scaling=yarn,factor=16,original_max_length=256,base=5e5+fox"
    assert parse_encoding(label) == [{"name": "rope", "scaling": yarn, "base": 5e5}, {"name": "fox"}]
    assert parse_encoding("rope:base=5e5,factor=16,original_max_length=256,scaling=yarn+fox") == parse_encoding(label)
    assert safe(label) == "rope_scaling=yarn,factor=16,original_max_length=256,base=5e5+fox"
    [mrope] = parse_encoding("mrope:sections=2,1,1,arrangement=contiguous")
    assert mrope == {"name": "mrope", "sections": [2, 1, 1], "arrangement": "contiguous"}
    [rope] = parse_encoding("rope:scaling=longrope,short_factor=1,1.5,long_factor=2,4,original_max_length=16,factor=3")
    assert rope["scaling"]["short_factor"] == [1, 1.5] and rope["scaling"]["factor"] == 3
    [rope] = parse_encoding("rope:base=1e4,scaling=base,scaling.base=5e5")
    assert rope == {"name": "rope", "base": 1e4, "scaling": {"name": "base", "base": 5e5}}
    assert parse_encoding("rope:scaling=none") == [{"name": "rope", "scaling": None}]
    assert parse_options("slope=-3,halve=true", "", "") == {"slope": -3, "halve": True}


# ---- characters and folders ---------------------------------------------------------------------------------------------
STRANGE = sorted({*string.printable, *"é∞\0"} - {*string.ascii_letters, *string.digits, *"_.-+:=,"})


@pytest.mark.parametrize("character", STRANGE)
def test_a_character_that_a_shell_or_a_file_system_changes_is_refused(character):
    with pytest.raises(ValueError, match="at its character 10; a label is made of letters, digits and") as refused:
        parse_label(f"rope:base{character}=5")
    assert repr(character) in str(refused.value)


@pytest.mark.slow
@pytest.mark.parametrize("label", [*checked(tiny(encodings=("all",))).encodings, *ALONE])
def test_everything_registered_goes_through_a_study(label, tmp_path, numbers):
    """With skipped positions, the table of learned ones has all that are measured."""
    config = tiny(encodings=(label,), positions="skipped", test_lengths=(16, 48), hidden=32, heads=4)
    [trial] = run(config, tmp_path)[0].trials
    rows = read_rows(tmp_path / "results.parquet").query("method == 'non-overlapping'")
    assert trial.status == "done" and trial.reason is None
    assert list(rows["length"]) == [16, 48] and rows["value"].notna().all()


# ---- convolutions and blocks ---------------------------------------------------------------------------------------------
def test_a_convolution_is_of_the_mixers_that_can_have_one():
    assert parse_label("nope+conv") == parse_label("nope+attention+conv:at=input")
    assert parse_label("nope+conv").options(2) == {
        "encoding": {"name": "nope"}, "mixer": {"name": "attention", "short_conv": ["input"]},
    }  # fmt: skip
    label = parse_label("rope+window:size=8+mamba+conv:at=qkv+conv:at=output")
    assert label.mixers == [{"name": "window", "size": 8, "short_conv": ["qkv", "output"]}, {"name": "mamba"}]
    assert parse_label("rope..nope+conv").options(2)["mixers"] == [
        "attention", {"name": "attention", "short_conv": ["input"]},
    ]  # fmt: skip


@torch.no_grad()
def test_a_convolution_tells_apart_what_nope_does_not():
    """The last token of two orders of those before it: alike without positions, one layer, and no convolution."""
    ids = torch.tensor([[3, 1, 4, 5], [1, 3, 4, 5]])
    gaps = []
    for label in ("nope", "nope+conv"):
        logits = build_model(tiny(layers=1), label, 0).eval()(ids).logits[:, -1]
        gaps.append(float((logits[0] - logits[1]).abs().max()))
    assert gaps[0] < 1e-5 < 1e-3 < gaps[1]


# ---- layers --------------------------------------------------------------------------------------------------------------
def test_layers_of_their_own():
    """Each part is a layer, repeated over the model: without a mixer attention, without an encoding what its mixer takes."""
    label = parse_label("rope:base=1e4+window:size=8..rope+ssmax..mamba2..nope")
    assert label.encoding == "rope..rope+ssmax..nope..nope"
    assert label.options(4) == {
        "encodings": [{"name": "rope", "base": 1e4}, [{"name": "rope"}, {"name": "ssmax"}], "nope", {"name": "nope"}],
        "mixers": [{"name": "window", "size": 8}, "attention", {"name": "mamba2"}, "attention"],
    }
    assert [spec["name"] for spec in label.encodings] == ["rope", "rope", "ssmax", "nope"]
    sizes = {"vocab_size": 9, "hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 2}
    config = LongitudeConfig(**sizes, **parse_label("rope..nope").options(4))
    assert [specs[0]["name"] for specs in config.layer_specs()] == ["rope", "nope", "rope", "nope"]
