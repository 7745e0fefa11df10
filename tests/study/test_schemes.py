"""Trained models measured past their training length with scaled positions: the laws of that, and what is refused."""

import math
from dataclasses import dataclass, replace

import pytest
import torch

import longitude as lg
from longitude.extend.search import windows_of
from longitude.measure import losses_by_length, read_rows
from longitude.models import LongitudeForCausalLM
from longitude.positions.absolute import Sinusoidal
from longitude.positions.scaling import SCHEMES as SCALINGS, Linear, base as rows, register_scheme
from longitude.study import schemes
from longitude.study.plan import checked
from longitude.study.results import read_run
from longitude.study.schemes import extended, extends, list_schemes, searched
from longitude.study.tasks.base import task_of
from longitude.study.train import build_model, model_config
from tests.study.conftest import NUMBERS, TINY, run
from tests.support import refused

SCHEMES = list_schemes()
TOKENS = torch.randint(0, 256, (2, 48), generator=torch.Generator().manual_seed(0))
BY_ALL = replace(TINY, encodings=("rope", "sinusoidal", "learned", "alibi"), methods=("non-overlapping", *SCHEMES))


def logits(model, length=48):
    with torch.no_grad():
        return model.eval()(input_ids=TOKENS[:, :length]).logits


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    """A search of few candidates on little text."""
    monkeypatch.setattr(schemes, "CANDIDATES", 12)
    monkeypatch.setattr(schemes, "TOKENS", 64)


def test_a_model_that_was_trained_with_resonance_is_extended_by_yarn_alone():
    model = build_model(TINY, "rope:scaling=resonance", 0)
    assert extends(model.config, "yarn", 16) and not extends(model.config, "linear", 16)
    [rope] = extended(model, "yarn", 16, 48).model.encodings
    assert rope.scaling == lg.scaling.Resonance(3.0, 16, beta_fast=schemes.ramp_start(16))


@pytest.mark.parametrize("label", ["rope", "rope:base=500", "rope+alibi", "mrope:sections=2,1,1"])
@pytest.mark.parametrize("scheme", ["linear", "ntk", "ntk-by-parts", "yarn"])
def test_a_scheme_as_a_method_is_the_model_of_the_scheme_s_label(label, scheme):
    trained = build_model(TINY, label, 0)
    ramp = f",original_max_length=16,beta_fast={schemes.ramp_start(16)}" * (scheme in ("ntk-by-parts", "yarn"))
    first, plus, rest = label.partition("+")
    options = f"{first}{',' if ':' in first else ':'}scaling={scheme},factor=3{ramp}{plus}{rest}"
    built = build_model(TINY, options, 1)
    assert not torch.equal(logits(built), logits(trained))
    built.load_state_dict(trained.state_dict())
    torch.testing.assert_close(logits(extended(trained, scheme, 16, 48)), logits(built), rtol=0, atol=0)
    assert (logits(built) - logits(trained)).abs().max() > 1e-3


def test_a_method_has_one_name_in_labels_and_commands_and_both_spellings():
    for name, row in rows.METHODS.items():
        for spelled in rows.spellings(name):
            assert not row.extends or rows.method_of(spelled) is row
            if name in SCALINGS:
                assert SCALINGS[spelled] is SCALINGS[name] and SCALINGS[name].name == name
    methods = checked(replace(TINY, methods=("non_overlapping", "ntk_by_parts"))).methods
    assert methods == ("non-overlapping", "ntk-by-parts")


def test_a_registered_scheme_is_a_method_of_a_study(monkeypatch):
    monkeypatch.setattr(SCALINGS, "factories", {**SCALINGS.factories})
    monkeypatch.setattr(rows, "METHODS", {**rows.METHODS})

    @register_scheme("third")
    @dataclass(frozen=True)
    class Third(Linear):
        """Positions over the cube of the factor."""

    assert "third" in list_schemes() and "third" in task_of("text").valid_methods()
    [own] = extended(build_model(TINY, "rope", 0), "third", 16, 48).model.encodings
    assert own.scaling == Third(3.0)


@pytest.mark.parametrize("length", [64, 128, 256, 1024, 4096])
def test_yarn_keeps_the_share_of_pairs_that_it_keeps_of_llama_2(length):
    """Where the base has as many pairs turn once within the length as in Llama 2, of any number of pairs."""
    fastest, published = length / (2 * math.pi), 4096 / (2 * math.pi)
    base = 10_000.0 ** (math.log(fastest) / math.log(published))
    llama, rotations = (turns * b ** -(torch.arange(4096) / 4096) for turns, b in ((published, 1e4), (fastest, base)))
    kept = (llama >= 32, rotations >= schemes.ramp_start(length))
    assert kept[0].double().mean().item() == pytest.approx(kept[1].double().mean().item(), abs=1e-3)
    assert schemes.ramp_start(8192) == 32


@pytest.mark.parametrize("label", ["rope", "sinusoidal", "learned"])
@pytest.mark.parametrize("scheme", ["linear", "ntk", "yarn"])
def test_up_to_the_training_length_it_is_the_model_itself(label, scheme):
    model = build_model(TINY, label, 0)
    assert extended(model, scheme, 16, 16) is extended(model, scheme, 16, 8) is model


def test_the_model_stays_as_it_was():
    model = build_model(TINY, "learned", 0)
    before, state = logits(model, 16), torch.get_rng_state()
    extended(model, "linear", 16, 48)
    assert torch.equal(logits(model, 16), before) and torch.equal(torch.get_rng_state(), state)


def test_interpolated_sinusoids_are_those_of_positions_over_the_factor():
    plain, positions = Sinusoidal(8), torch.arange(12)
    codes = Sinusoidal(8, factor=3).table(positions)
    torch.testing.assert_close(codes[::3], plain.table(positions[:4]), rtol=0, atol=1e-12)
    torch.testing.assert_close(codes, plain.table(positions / 3), rtol=0, atol=1e-6)
    model = build_model(TINY, "sinusoidal", 0)
    [own] = extended(model, "linear", 16, 48).model.encodings
    got, want = (each.embed(torch.zeros(1, 48, 16), torch.arange(48))[0] for each in (own, Sinusoidal(16)))
    torch.testing.assert_close(got[::3], want[:16])


def test_each_layer_that_rotates_is_scaled():
    model = build_model(replace(TINY, layers=2), "rope+attention+mamba", 0)
    assert extends(model.config, "yarn", 16)
    assert extended(model, "yarn", 16, 48).model.encodings[0].scaling.factor == 3


BY = dict.fromkeys(("rope", "rope+alibi"), SCHEMES) | dict.fromkeys(("sinusoidal", "learned"), ("linear",))
BY["sinusoidal+rope"] = ("linear",)
BY |= dict.fromkeys(("alibi", "mamba", "xpos", "sinusoidal:factor=2", "rope:scaling=linear,factor=2"), ())
BY |= dict.fromkeys(("learned:max_length=16,length=32", "learned:max_length=32"), ())
BY["nope+attention:qk_norm=true"] = ()  # a factor before a norm does nothing


@pytest.mark.parametrize("label", BY)
def test_what_is_extended_by_which(label):
    config = model_config(TINY, label)
    assert [scheme for scheme in SCHEMES if extends(config, scheme, 16)] == [*BY[label]]


# ---- searched factors ------------------------------------------------------------------------------------------------
def test_searched_factors_are_no_worse_than_any_start_and_repeat(data):
    model = build_model(TINY, "rope", 0)
    found = searched(model, data.apart, 16, 48)
    assert found == searched(model, data.apart, 16, 48)
    windows = windows_of(data.apart, 48, schemes.TOKENS)

    def nats(scheme):
        [of] = losses_by_length(extended(model, scheme, 16, 48), windows, lengths=[48], methods=["non-overlapping"])
        return of.nats.sum()

    assert nats(found) <= min(map(nats, ("linear", "ntk", "yarn"))) * (1 + 1e-6)


def test_the_search_reads_selection_text_alone(data, monkeypatch):
    selection = b"|".join(bytes(document.tolist()) for document in data.apart)
    read = []
    monkeypatch.setattr(schemes, "losses_by_length", lambda model, windows, **_: read.extend(windows) or 1 / 0)
    with pytest.raises(ZeroDivisionError):
        searched(build_model(TINY, "rope", 0), data.apart, 16, 48)
    assert read and all(bytes(window[:-1].tolist()) in selection for window in read)


# ---- in a study ------------------------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def study(tmp_path_factory):
    """A study measured plainly first; the schemes are added when its models are there."""
    with pytest.MonkeyPatch.context() as patches:
        patches.setattr(schemes, "CANDIDATES", 12)
        patches.setattr(schemes, "TOKENS", 64)
        patches.setattr("longitude.study.data.read_texts", lambda data: NUMBERS)
        path = tmp_path_factory.mktemp("study") / "run"
        run(replace(BY_ALL, methods=("non-overlapping",)), path)
        trained = {each: each.stat().st_mtime_ns for each in path.glob("units/train-*/model.safetensors")}
        outcome, _ = run(BY_ALL, path)
        assert outcome.complete and trained == {each: each.stat().st_mtime_ns for each in trained}
    return path


@pytest.mark.slow
def test_rows_of_a_study_that_was_given_schemes(study):
    rows = read_rows(study / "results.parquet")
    measured = {label: {*of["method"]} for label, of in rows.groupby("label")}
    assert measured == {
        "rope": {"non-overlapping", *SCHEMES},
        "sinusoidal": {"non-overlapping", "linear"},
        "learned": {"non-overlapping", "linear"},
        "alibi": {"non-overlapping"},
    }
    assert len({*rows["count"]}) == len({*rows["tokens"]}) == 1  # the same tokens everywhere
    at = rows.set_index(["label", "method", "length"])["value"]
    for scheme in SCHEMES:
        assert at["rope", scheme, 16] == at["rope", "non-overlapping", 16]
    assert len({at["rope", scheme, 48] for scheme in ("non-overlapping", "linear", "ntk", "yarn")}) == 4
    assert ("learned", "non-overlapping", 48) not in at.index and ("learned", "linear", 48) in at.index


@pytest.mark.slow
def test_a_value_is_that_of_the_extended_model(study, data):
    [trial] = read_run(study).of("rope")
    model = LongitudeForCausalLM.from_pretrained(trial.folder)
    options = {"lengths": [32], "methods": ["non-overlapping"], "span": 48, "token_bytes": 1}
    [of] = losses_by_length(extended(model, "yarn", 16, 32), data.validation, **options)
    rows = read_rows(study / "results.parquet").set_index(["label", "method", "length"])["value"]
    assert rows["rope", "yarn", 32] == pytest.approx(of.row().value, rel=1e-6)


def test_a_selection_text_without_a_window_is_refused():
    with refused("49", "48"):
        windows_of([torch.arange(48)], 48)
