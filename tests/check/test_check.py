"""What single laws say, in numbers and words: the config key by key, layouts compared with a reference, borders, lengths."""

import copy
import json
from typing import Any

import pytest
import torch
from transformers import (
    AutoConfig,
    BloomConfig,
    BloomForCausalLM,
    FalconConfig,
    FalconForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
)

from longitude.check import check, laws, subject_of
from longitude.check.subject import computing_in
from longitude.checkpoints.config import contradictions
from longitude.checkpoints.load import load
from tests.check.broken_models import LENGTH, SHAPE, built, interleaved_weights, llama as sound_llama

YARN = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4, "original_max_position_embeddings": 8}


def llama(rope: dict[str, Any] | None = None, **options: Any) -> Any:
    shape: dict[str, Any] = {**SHAPE, "intermediate_size": 64, "max_position_embeddings": LENGTH}
    shape["rope_parameters"] = {"rope_type": "default", "rope_theta": 500_000.0} if rope is None else rope
    return built(LlamaForCausalLM, LlamaConfig(**shape | options))


def result(law: str, model: Any, **options: Any) -> Any:
    return check(model, laws=[law], **options)[law]


# ---- the config ---------------------------------------------------------------------------------------------------------
def saved(folder, change=lambda raw: None, **options: Any):
    """A checkpoint whose config.json is edited by hand."""
    llama(**options).save_pretrained(folder)
    file = folder / "config.json"
    raw = json.loads(file.read_text())
    change(raw)
    file.write_text(json.dumps(raw))
    return load(folder, tokenizer=False)


def old_schema(raw, **changes):
    """The file as transformers 4 wrote it."""
    given = raw.pop("rope_parameters")
    raw["rope_theta"] = given.pop("rope_theta")
    raw["rope_scaling"] = None if given == {"rope_type": "default"} else given
    raw.update(changes)


def rename(raw):
    raw["rope_tetha"] = raw.pop("rope_theta")


def top(**changes):
    return lambda raw: raw.update(changes)


def rope(**changes):
    return lambda raw: raw["rope_parameters"].update(changes)


def no(name):
    return lambda raw: raw["rope_parameters"].pop(name)


LINEAR = {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e4}
ORIGINAL = "original_max_position_embeddings"
EDITS = {
    "nothing": (top(), None, ""),
    "the old schema": (old_schema, None, ""),
    "the old schema, yarn": (old_schema, YARN, ""),
    "both schemas, agreeing": (top(rope_theta=500_000.0), None, ""),
    "theta lost": (no("rope_theta"), None, "expected rope_theta"),
    "no rope parameters": (lambda raw: raw.pop("rope_parameters"), None, "transformers takes 10000 without a warning"),
    "theta misspelt": (lambda raw: rename(raw["rope_parameters"]), None, "'rope_tetha' in rope_parameters, which"),
    "theta misspelt, in the old schema": (
        lambda raw: (old_schema(raw), rename(raw)),
        None,
        "unknown key 'rope_tetha', which transformers ignores: did you mean 'rope_theta'?",
    ),
    "two thetas": (top(rope_theta=10_000.0), None, "10000.0 at the top and 500000.0 in rope_parameters"),
    "a key misspelt": (rope(beta_fst=16), YARN, "did you mean 'beta_fast'?"),
    "a key of nobody": (top(rope_base=1e6), None, "unknown key 'rope_base', which transformers ignores"),
    "lengths misspelt": (top(max_position_embedding=64), None, "did you mean 'max_position_embeddings'?"),
    "two schemas": (
        top(rope_scaling={"rope_type": "linear", "factor": 2.0, "rope_theta": 500_000.0}),
        None,
        "rope_parameters and rope_scaling disagree",
    ),
    "factor too small": (rope(factor=2.0), YARN, "factor 2.0 times"),
    "original longer": (rope(**{ORIGINAL: 64}), YARN, "longer than max_position_embeddings = 32"),
    "original of another type": (rope(**{ORIGINAL: 16}), LINEAR, "a 'linear' one has none; remove it"),
    "two types": (rope(type="linear"), YARN, "type is 'linear' and rope_type 'yarn' in rope_parameters"),
    "two originals": (top(**{ORIGINAL: 16}), YARN, f"{ORIGINAL} is 16 at the top and 8 in rope_parameters"),
    "original missing": (no(ORIGINAL), YARN, f"{ORIGINAL} is missing"),
}


@pytest.mark.parametrize("edit", EDITS)
def test_the_config_is_read_as_it_stands(edit, tmp_path):
    change, given, words = EDITS[edit]
    found = result("config", saved(tmp_path, change, rope=given))
    assert found.status == ("broken" if words else "holds"), found
    assert words in found.reason
    assert found.measured == (2 if "old schema" in edit and words else 1 if words else 0)  # there unknown, and missing


def test_a_lost_theta_is_the_configs_matter_alone(tmp_path):
    """transformers takes 10000 for it, so the model does as its config says: wrong, and without another symptom."""
    broken = saved(tmp_path, lambda raw: raw["rope_parameters"].pop("rope_theta"))
    assert broken.model.config.rope_parameters["rope_theta"] == 10_000
    assert [found.law for found in check(broken).values() if found.status == "broken"] == ["config"]


def test_longrope_needs_a_factor_for_each_pair():
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
    rope |= {"original_max_position_embeddings": 16}

    raw = llama(rope).config.to_dict()
    raw["rope_parameters"]["long_factor"] = [2.0] * 3
    assert "long_factor of 4 numbers" in result("config", llama(rope), raw=raw).reason


LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, ORIGINAL: 8192}
OSS = {"rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False, ORIGINAL: 4096}
QWEN = {"type": "yarn", "factor": 4.0, ORIGINAL: 32768}
PUBLISHED = {
    "llama": {"max_position_embeddings": 131072, "rope_theta": 500000.0, "rope_scaling": LLAMA3},
    "qwen2": {"max_position_embeddings": 32768, "use_mrope": False, "rope_theta": 1e6, "rope_scaling": QWEN},
    "gpt_neox": {"max_position_embeddings": 2048, "rotary_pct": 0.25, "rotary_emb_base": 10000},
    "gpt_oss": {
        "initial_context_length": 4096,
        "max_position_embeddings": 131072,
        "rope_theta": 150000,
        "rope_scaling": OSS,
    },
}


@pytest.mark.parametrize("kind", PUBLISHED)
def test_configs_as_published_are_consistent(kind):
    raw = {"model_type": kind, **PUBLISHED[kind]}
    config = AutoConfig.for_model(kind, **copy.deepcopy(PUBLISHED[kind]))
    assert list(contradictions(raw, config)) == []


def test_configs_without_rotary_parameters_pass():
    model = BloomForCausalLM(BloomConfig(vocab_size=96, hidden_size=32, n_layer=2, n_head=4))
    raw = model.config.to_dict() | {"seq_length": 2048, "n_embed": 32}  # as published, and read by nobody
    assert result("config", model, raw=raw).status == "holds"


# ---- the layout ---------------------------------------------------------------------------------------------------------
def test_interleaved_weights_in_a_half_model_are_named():
    found = result("rotary_layout", interleaved_weights(), reference=sound_llama())
    assert found.status == "broken" and "the weights are interleaved in a half model" in found.reason
    assert result("rotary_layout", llama(), reference=llama()).status == "holds"


def test_another_model_is_no_matter_of_layout():
    found = result("rotary_layout", llama(), reference=sound_llama())
    assert found.status == "broken"
    assert "no rotary layout explains it; base is 500000.0 here and 10000.0 there" in found.reason


def test_a_reference_of_another_vocabulary_is_refused():
    with pytest.raises(ValueError, match="expected a vocabulary of 96"):
        check(llama(), reference=llama(vocab_size=97))


# ---- scalings that follow the length ----------------------------------------------------------------------------------------
def test_the_border_names_where_the_cache_drifts():
    found = result("scaling_border", llama({"rope_type": "dynamic", "factor": 4.0, "rope_theta": 1e4}))
    assert found.status == "broken" and found.position == LENGTH
    assert f"cached decoding across the original length {LENGTH} drifts from position {LENGTH} on" in found.reason


def test_static_scalings_have_no_border():
    found = result("scaling_border", llama(YARN))
    assert found.status == "does not apply" and "yarn" in found.reason


# ---- numbers ----------------------------------------------------------------------------------------------------------------
def test_the_first_position_beyond_the_threshold_is_told():
    class Late(LlamaForCausalLM):
        def forward(self, input_ids=None, past_key_values=None, **options):
            past = past_key_values.get_seq_length() if past_key_values is not None else 0
            answer = super().forward(input_ids, past_key_values=past_key_values, **options)
            if past >= 20:
                answer.logits = answer.logits * 1.01
            return answer

    model = llama()
    model.__class__ = Late
    found = result("cached_decoding", model)
    assert found.status == "broken" and found.position == 20 and "from position 20 on" in found.reason
    assert 0.005 < found.measured < 0.05


def test_far_positions_keep_float32_where_transformers_does(tmp_path):
    llama().save_pretrained(tmp_path)
    for dtype in ("float32", "bfloat16", "float16"):
        assert result("far_positions", load(tmp_path, dtype=dtype, tokenizer=False)).status == "holds"
    rounded = result("far_positions", llama().bfloat16())
    assert rounded.status == "broken" and "inv_freq itself is rounded" in rounded.reason


def test_relative_positions_need_a_rotation_that_stays():
    for model, words in (
        (llama({"rope_type": "dynamic", "factor": 4.0, "rope_theta": 1e4}), "follow the length"),
        (BloomForCausalLM(BloomConfig(vocab_size=96, hidden_size=32, n_layer=2, n_head=4)), "no rope_parameters"),
    ):
        found = result("relative_positions", model)
        assert found.status == "does not apply" and words in found.reason


def test_positions_that_are_not_rotary_are_told():
    model = FalconForCausalLM(
        FalconConfig(vocab_size=96, hidden_size=32, num_hidden_layers=1, num_attention_heads=4, alibi=True)
    )
    found = result("rotary_frequencies", model.eval())
    assert found.status == "does not apply" and "ALiBi's" in found.reason


def test_numbers_that_json_has_not(tmp_path):
    """A base of zero: tables are not finite."""
    broken = saved(tmp_path, lambda raw: raw["rope_parameters"].update(rope_theta=0))
    found = check(broken, laws=["config", "far_positions", "repeatable"])
    assert [one.status for one in found.values()] == ["broken"] * 3
    json.dumps([one.as_dict() for one in found.values()], allow_nan=False)


def test_a_model_is_left_as_it_was():
    model = llama().bfloat16()
    before = {name: tensor.clone() for name, tensor in [*model.named_parameters(), *model.named_buffers()]}
    with computing_in(model, torch.float64):
        assert {p.dtype for p in model.parameters()} == {torch.float64}
    check(model)
    after = dict([*model.named_parameters(), *model.named_buffers()])
    for name, tensor in before.items():
        assert tensor.dtype == after[name].dtype and torch.equal(tensor, after[name])


def test_lengths():
    table = GPT2LMHeadModel(GPT2Config(vocab_size=96, n_embd=32, n_layer=1, n_head=4, n_positions=LENGTH))
    assert subject_of(table).length == LENGTH  # its positions end there
    assert subject_of(llama()).length == LENGTH + 16
    assert subject_of(llama(max_position_embeddings=4096)).length == 512
    dynamic = subject_of(llama({"rope_type": "dynamic", "factor": 4.0, "rope_theta": 1e4}), length=40)
    assert (dynamic.length, dynamic.reach) == (LENGTH - 1, 40)
    with pytest.raises(ValueError, match="at most 32, where the model's table of positions ends, got 40"):
        subject_of(table, length=40)
    with pytest.raises(ValueError, match="expected 16 tokens or more, got 3"):
        subject_of(llama(), length=3)


def test_laws_are_chosen_by_name():
    names = list(laws())
    assert list(check(llama(), laws=["left_padding", "config"])) == ["config", "left_padding"]
    assert all(set(law.rests_on) <= set(names[: names.index(law.name)]) for law in laws().values())
    with pytest.raises(ValueError, match="did you mean 'left_padding'"):
        check(llama(), laws=["left_paddin"])
