"""Each bug is caught by the law that it breaks, and by no other; what single laws measure, and their reasons."""

import copy
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from itertools import zip_longest
from typing import Any

import pytest
import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM, StaticCache, T5ForConditionalGeneration
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

from longitude.check import check, recorder
from longitude.check.laws.images import Piece, published, text
from longitude.check.run import laws, subject_of
from longitude.check.subject import Unused, computing_in
from longitude.checkpoints.config import from_hugging_face
from longitude.checkpoints.lint import contradictions, remarks
from longitude.checkpoints.load import load
from longitude.testing.engine import Result
from tests.check import broken_models as models
from tests.check.broken_unseen import (
    REPLACED,
    UNSEEN,
    Attention,
    OwnTables,
    axes_exchanged,
    copied,
    normed_after,
    vision,
    whole_seconds,
)
from tests.check.building import DYNAMIC, LENGTH, LONGROPE, YARN, bloom, built, changed, gpt2, llama, past_of
from tests.support import edit_config, refused, refused_calls

OTHER_BASE = {"rope_theta": 500_000.0}
ORIGINAL = "original_max_position_embeddings"


every_law = pytest.mark.parametrize("every", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["", "every law"])
"""In the quick tier a model is tried by the law that it breaks, and by those that this law rests on."""


def the_broken(model: Any, law: str, every: bool, beside: Sequence[str] = (), **options: Any) -> Result:
    """The only law that failed; beside: more laws that the quick tier tries."""
    results = check(model, laws=None if every else [*laws()[law].rests_on, law, *beside], **options)
    [broken] = [result for result in results.values() if result.status == "failed"]
    assert broken.law == law, broken
    return broken


@pytest.mark.one_in(11)
@every_law
@pytest.mark.parametrize(
    ("law", "name"),
    [
        pytest.param(law, name, marks=[] if name in models.REASONS or name == next(iter(names)) else pytest.mark.slow)
        for law, names in models.BROKEN.items()
        for name in names
    ],
)
def test_a_bug_is_caught_by_its_law_and_by_no_other(law, name, every):
    """And the part of the law that failed is named, where it has parts."""
    reference = models.REFERENCES.get(name, lambda: None)()
    make = models.BROKEN[law][name]
    law, _, part = law.partition(": ")
    broken = the_broken(make(), law, every, reference=reference)
    assert broken.reason.startswith(f"{part}: " if part else "") and models.REASONS.get(name, "") in broken.reason
    assert broken.measured > 2 * broken.threshold


@pytest.mark.one_in(11)
@pytest.mark.parametrize("name", UNSEEN)
@every_law
def test_a_bug_made_without_looking_at_the_laws_is_found_with_its_cause(name, every):
    """And no other law is broken; LongRoPE drifts at its border whatever the lists."""
    make, law, words = UNSEEN[name]
    assert words in the_broken(make(), law, every).reason


@pytest.mark.one_in(7)
@every_law
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * ("sinks" in name)) for name in REPLACED]
)
def test_a_function_with_a_bug_is_found_with_its_cause(name, every, monkeypatch):
    """In a module of transformers; and no other law is broken."""
    make, module, function, bug, law, words = REPLACED[name]
    model = make()
    monkeypatch.setattr(module, function, bug(getattr(module, function)))
    assert words in the_broken(model, law, every).reason


LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, ORIGINAL: 8192}
NOT_FINITE = {
    "factor": {"rope_type": "linear"},
    "rope_theta": {},
    "partial_rotary_factor": {},
    "attention_factor": YARN,
    "beta_fast": YARN,
    "original_max_position_embeddings": YARN,
    "low_freq_factor": LLAMA3,
    "long_factor": LONGROPE,
}


@pytest.mark.one_in(7)
@pytest.mark.parametrize("number", [float("inf"), float("nan")])
@pytest.mark.parametrize("key", NOT_FINITE)
def test_a_number_that_is_not_finite_is_the_configs_fault_alone(key, number):
    """Named by its key, whether it is read from a dict or found in a model that was built of it."""
    value = [1.0, 2.0, 3.0, number] if key == "long_factor" else number
    model = llama(rope=NOT_FINITE[key] if key in NOT_FINITE[key] else {**NOT_FINITE[key], "factor": 2.0})
    raw = model.config.to_dict()
    raw["rope_parameters"] = raw["rope_parameters"] | {key: value}
    with refused(key, str(number)):
        from_hugging_face(raw)
    model.config.rope_parameters[key] = value
    with suppress(OverflowError, ValueError):  # tables of such a number
        model.model.rotary_emb = type(model.model.rotary_emb)(model.config)
    broken = the_broken(model, "files", False, beside=["rotary_frequencies", "far_positions"])
    assert key in broken.reason and str(number) in broken.reason and broken.whose == "the file"


def test_dynamic_scaling_is_broken_by_its_rule_at_any_length():
    """Tables around the border are the published ones, a longer sequence is remembered, and cached keys are not rotated again."""
    for length in (LENGTH, 512):
        found = check(
            llama(rope=DYNAMIC, max_position_embeddings=length), laws=["rotary_frequencies", "scaling_border"]
        )
        assert [one.status for one in found.values()] == ["passed", "failed"]
        reason = found["scaling_border"].reason
        assert f"tables: tables of {length} and {length + 1} tokens after a sequence of {2 * length}" in reason
        assert f"decoding: cached decoding across the original length {length} drifts from position {length}" in reason


@pytest.mark.one_in(17)
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * ("long" in name)) for name in models.HEALTHY]
)
def test_a_healthy_model_breaks_no_law(name):
    for result in check(models.HEALTHY[name]()).values():
        assert result.status != "failed", result
        assert (result.status == "not applicable") == (result.measured is None), result
        assert result.reason or result.status == "passed", result


@pytest.mark.slow
@pytest.mark.parametrize("make", [models.falcon, models.replaced])
def test_positions_that_are_not_the_configs_break_no_law(make):
    found = check(make())
    assert [result for result in found.values() if result.status == "failed"] == []
    for law in ("rotary_frequencies", "relative_positions", "scaling_border"):
        assert found[law].status == "not applicable" and found[law].reason.startswith("its positions are")
    assert found["cached_decoding"].status == "passed"


def result(law: str, model: Any, **options: Any) -> Any:
    return check(model, laws=[law], **options)[law]


# ---- the config ---------------------------------------------------------------------------------------------------------
TINY = {"vocab_size": 96, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
SMALL = {"hidden_size": 32, "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 16, "intermediate_size": 32}


def of_kind(kind: str, **options: Any) -> Any:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **TINY | options)).eval()


def test_keys_of_nobody_are_unknown(tmp_path):
    """At the top and among the rope parameters; the config is called neither wrong nor right."""
    (model := llama(rope=YARN)).save_pretrained(tmp_path)
    edit_config(tmp_path, rope_base=1e6, rope_parameters=model.config.rope_parameters | {"warmth": 0.3})
    found = result("unread_keys", load(tmp_path, tokenizer=False))
    assert found.status == "unknown"
    assert "rope_parameters.warmth" in found.reason and "rope_base" in found.reason


@pytest.mark.slow
def test_a_window_longer_than_what_is_tried_is_tried_as_a_short_one():
    """A class that follows it, and one that does not."""
    shape = {"sliding_window": 4096, "max_position_embeddings": 8192}
    found = result("layer_masks", of_kind("mistral", **SMALL, **shape))
    assert found.status == "passed" and "4096 were tried" in found.reason
    found = result("layer_masks", llama(**shape))
    assert found.status == "failed" and found.reason.startswith("windows of 4096, tried as windows of 16"), found


TEXT = {"model_type": "qwen3_vl_text", "head_dim": 16, "hidden_size": 64, "num_attention_heads": 4}
BY_LAYER = {"num_hidden_layers": 3, "rope_theta": 1e4, "sliding_window": 8}
SMOLLM, ALIBI = BY_LAYER | {"model_type": "smollm3"}, {"model_type": "falcon", "alibi": True}
PLAIN, SCALED = {"rope_type": "default", "rope_theta": 1e4}, {"rope_scaling": {"type": "linear", "factor": 4.0}}
LINEAR = PLAIN | {"rope_type": "linear", "factor": 4.0}


def outside(inner: dict[str, Any], **outer: Any) -> dict[str, Any]:
    """Keys beside the text_config of a model of text and images, and in it."""
    return {"model_type": "qwen3_vl", "text_config": TEXT | {"num_hidden_layers": 2} | inner, **outer}


def by_pattern(kind: str, layers: str) -> dict[str, Any]:
    types = ["sliding_attention" if layer == "s" else "full_attention" for layer in layers]
    pattern = {"sliding_window_pattern": 3} if "s" in layers else {}
    return BY_LAYER | {"model_type": kind, "layer_types": types} | pattern


def mpt(**attention: Any) -> dict[str, Any]:
    return {"model_type": "mpt", "d_model": 32, "n_heads": 4, "n_layers": 1, "attn_config": attention}


CONFIGS = {  # keys, what is broken, and what is noted
    "a base elsewhere": (outside({}, rope_theta=5e6), "is outside text_config"),
    "two bases": (outside({"rope_theta": 1e4}, rope_theta=5e6), "the text model has 10000"),
    "a base twice": (outside({"rope_theta": 1e4}, rope_theta=1e4), ""),
    "sections of too many pairs": (
        outside({"rope_parameters": {"rope_theta": 1e4, "mrope_section": [4, 4, 4]}}),
        "mrope_section has 12 pairs, and heads rotate 8",
    ),
    "as the pattern makes it": (by_pattern("gemma3_text", "ssf"), ""),
    "one layer early": (by_pattern("gemma3_text", "fss"), "2 layers differ"),
    "a pattern that is a default": (by_pattern("exaone4", "fss"), "", "2 layers differ"),
    "rotation inverted": (SMOLLM | {"no_rope_layers": [0, 0, 1], "no_rope_layer_interval": 3}, "", "3 layers differ"),
    "no layer rotates": (by_pattern("cohere2", "fff"), "", "rotary parameters have no effect"),
    "a rotation that MPT's class has not": (mpt(alibi=False, rope=True), "attn_config.rope is true"),
    "a base of no rotation": (mpt(alibi=True, rope=False, rope_theta=1e4), "", "no effect"),
    "ALiBi, scaled": (ALIBI | SCALED, "no effect"),
    "ALiBi, as transformers writes it": (ALIBI | {"rope_parameters": PLAIN}, ""),
    "a rotation": ({"model_type": "falcon", "rope_theta": 1e4} | SCALED, ""),
    "a learned table, scaled": ({"model_type": "gpt2", "rope_parameters": LINEAR}, "no effect", "no effect"),
    "a learned table": ({"model_type": "gpt2", "rope_parameters": None}, ""),
    "a rotation taken away after training": (SMOLLM | {"no_rope_layers": [0, 0, 0]} | SCALED, "", "no effect"),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_keys_that_contradict_each_other_or_have_no_effect(name):
    raw, *judged = CONFIGS[name]
    config = AutoConfig.for_model(**copy.deepcopy(raw)).get_text_config()
    found = [*contradictions(raw, config)], [one for one in remarks(raw, config) if "layer" in one]
    for words, sentences in zip_longest(judged, found, fillvalue=""):
        assert len(sentences) == bool(words) and all(words in one for one in sentences), found


def test_a_scaling_of_the_declared_length_is_noted():
    """Llama 3's original length raised to the declared one; the published one of Llama 3.2 reaches beyond, and is not."""
    for length, noted in ((131072, True), (8192, False)):
        model = llama(LLAMA3 | {"factor": 32.0, ORIGINAL: length}, max_position_embeddings=131072)
        found = remarks(model.config.to_dict(), model.config)
        assert any("times" in one for one in found) == noted, found


def test_alibi_of_a_class_that_rotates_is_named():
    model = llama()
    model.config.alibi = True
    found = check(model, laws=["files", "relative_positions"])
    assert [one.status for one in found.values()] == ["failed", "passed"] and "alibi is true" in found["files"].reason


def test_what_a_config_breaks_is_not_said_of_the_code():
    """Pairs of an odd number of dimensions: no pass runs, and no law but that of the config is broken."""
    rope = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.45}
    found = check(of_kind("phi", **SMALL, rope_parameters=rope))
    assert [one.law for one in found.values() if one.status == "failed"] == ["files"]


@every_law
@pytest.mark.parametrize("attention", [Attention, OwnTables])
def test_a_copy_of_a_class_that_is_right_breaks_no_law(attention, every):
    """Llama's attention written anew: its logits are those of transformers' class."""
    quick = ["layer_rotations", "layer_masks", "attention_outputs", "transformers_class"]
    found = check(copied(attention), laws=None if every else quick)
    assert [one for one in found.values() if one.status == "failed"] == []
    assert found["transformers_class"].status == "passed" and found["transformers_class"].measured < 1e-6


@pytest.mark.slow
def test_axes_that_text_does_not_show():
    """Pairs of the height that turn by the width: only the class of transformers tells."""
    found = check(axes_exchanged(), laws=["layer_rotations", "cached_decoding", "transformers_class"])
    assert [one.status for one in found.values()] == ["passed", "passed", "failed"]
    assert (
        "at positions of several axes; the first output that differs is that of" in found["transformers_class"].reason
    )


def pairs_exchanged() -> Any:
    model = llama()
    model.model.rotary_emb.inv_freq[[1, 2]] = model.model.rotary_emb.inv_freq[[2, 1]]
    return model


# ---- single laws ----------------------------------------------------------------------------------------------------------
def test_another_model_is_no_matter_of_layout():
    found = result("rotary_layout", llama(rope=OTHER_BASE), reference=llama())
    assert found.status == "failed" and "no rotary layout explains it" in found.reason


test_wrong_use = refused_calls([
    (lambda: check(llama(), reference=llama(vocab_size=97)), "reference", "96", "97"),
    (lambda: subject_of(gpt2(), length=40), "--length", "32", "40"),
    (lambda: subject_of(llama(), length=3), "--length", "16", "3"),
    (lambda: check(llama(), laws=["left_paddin"]), "'left_padding'"),
    (lambda: check(built(T5ForConditionalGeneration, d_model=16, num_layers=1)), "check", "T5ForConditionalGeneration"),
])  # fmt: skip


def test_the_first_position_beyond_the_threshold_is_named():
    def late(answer, named):
        if past_of(named.get("cache")) > 20:
            answer.logits = answer.logits * 1.01

    found = result("cached_decoding", changed(llama(), after=late))
    assert found.status == "failed" and found.position == 20 and "from position 20 on" in found.reason
    assert 0.005 < found.measured < 0.05


def test_far_positions_keep_float32_where_transformers_does(tmp_path):
    llama().save_pretrained(tmp_path)
    for dtype in ("bfloat16", "float16"):
        assert result("far_positions", load(tmp_path, dtype=dtype, tokenizer=False)).status == "passed"


NONE, PAIRS = "not applicable", {"short_factor": [1.0, 2.0, 4.0, 8.0], "long_factor": [1.0, 1.0, 1.0, 2.0]}


@pytest.mark.parametrize(
    ("law", "make", "status", "words"),
    [
        ("scaling_border", partial(llama, rope=YARN), NONE, "yarn"),
        ("relative_positions", partial(llama, rope=DYNAMIC), NONE, "follow the length"),
        ("relative_positions", bloom, NONE, "no rope_parameters"),
        ("relative_positions", partial(models.ministral, 8), NONE, "ministral3_temperature"),
        # the positions that are compared have one temperature
        ("relative_positions", partial(models.ministral, 256), "passed", ""),
        ("rotary_frequencies", models.falcon, NONE, "ALiBi's"),
        ("causality", partial(of_kind, "xlnet", d_model=32, n_layer=1, n_head=2, d_inner=32), NONE, "perm_mask"),
        # a norm with weights of 1 commutes with the rotation
        ("attention_outputs", partial(normed_after, ""), "passed", ""),
        ("rotary_frequencies", pairs_exchanged, "failed", "pair 2 by 0.1 rad a position, expected 0.01"),
        ("files", partial(llama, rope=LONGROPE | PAIRS), "failed", "swapped"),
    ],
)
def test_what_a_law_says_of_a_model(law, make, status, words):
    found = result(law, make())
    assert found.status == status and words in found.reason


@pytest.mark.slow
def test_a_model_is_left_as_it_was():
    model = llama().bfloat16()
    before = {name: tensor.clone() for name, tensor in [*model.named_parameters(), *model.named_buffers()]}
    with computing_in(model, torch.float64):
        assert {p.dtype for p in model.parameters()} == {torch.float64}
    check(model)
    after = dict([*model.named_parameters(), *model.named_buffers()])
    for name, tensor in before.items():
        assert tensor.dtype == after[name].dtype and torch.equal(tensor, after[name])


def test_what_a_pass_leaves_is_found_and_undone():
    """A slot that is filled in place, too, which changes neither the list nor its length."""
    module = torch.nn.Identity()
    module.slots, module.table, module.seen = [None, None], {"key": None}, {1}
    unused = Unused(module)
    assert unused.left() == []
    module.slots[1], module.table["key"], module.new = torch.ones(2), torch.ones(2), 3
    module.seen |= {2}
    assert unused.left() == [f"Identity.{name}" for name in ("new", "seen", "slots", "table")]
    unused.restore()
    assert (module.slots, module.table, module.seen) == ([None, None], {"key": None}, {1}) and unused.left() == []


def test_lengths():
    assert subject_of(gpt2()).length == LENGTH  # its positions end there
    assert subject_of(llama()).length == LENGTH + 16
    assert subject_of(llama(max_position_embeddings=4096)).length == 256
    dynamic = subject_of(llama(rope=DYNAMIC), length=40)
    assert (dynamic.length, dynamic.reach) == (LENGTH - 1, 40)


def test_roberta_as_a_decoder_begins_behind_its_padding():
    shape = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    model = of_kind("roberta", **shape, max_position_embeddings=34, is_decoder=True)
    assert subject_of(model).length == 33  # position 0 is that of padding
    assert (result("cached_decoding", model).position, result("chunked_prefill", model).position) == (0, 0)


def test_phi3_begins_again_at_the_border():
    """Its generate() prefills with the long factors there; a loop over forward does not, and only that is said."""
    shape = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 32}
    lengths = {"original_max_position_embeddings": LENGTH // 2, "max_position_embeddings": LENGTH}
    found = result(
        "scaling_border", of_kind("phi3", **shape, **lengths, rope_parameters=LONGROPE | {"rope_theta": 1e4})
    )
    assert found.status == "passed" and found.whose == ""
    assert "its generate() prefills again there" in found.reason and "drifts from position 16 on" in found.reason


def test_a_key_that_its_class_does_not_read_is_named():
    """Windows and partial rotation in a Llama: the class has neither, and says nothing."""
    found = result("layer_masks", llama(sliding_window=8))
    assert found.status == "failed" and "LlamaForCausalLM" in found.whose
    assert "9 keys, expected 8 with a window of 8" in found.reason
    found = check(llama({"partial_rotary_factor": 0.5}), laws=["files", "rotary_frequencies"])
    assert found["files"].status == "failed" and found["rotary_frequencies"].status != "passed"
    assert all("partial_rotary_factor" in one.reason for one in found.values())


@pytest.mark.parametrize("right", [True, False])
def test_what_is_not_understood_is_unknown_and_two_numbers_that_disagree_fail(right):
    """A key inside the rope parameters that nothing reads, and tables of the declared base or of another."""
    model = llama(rope={"rope_theta": 5e5} if right else {})
    model.model.rotary_emb = llama(rope={"rope_theta": 5e5}).model.rotary_emb
    model.config.rope_parameters["warmth"] = 0.3
    model.__class__ = type("Warm", (type(model),), {})
    found = check(model, laws=["unread_keys", "rotary_frequencies", "far_positions"])
    assert found["unread_keys"].status == "unknown" and "rope_parameters.warmth" in found["unread_keys"].reason
    assert found["rotary_frequencies"].status == ("passed" if right else "failed")
    assert right or "by 5.3183e-05 rad a position, expected 0.001" in found["rotary_frequencies"].reason


@pytest.mark.slow
def test_a_choice_between_equal_scores_is_no_fault():
    """DeepSeek V3.2 with one head that chooses: many scores are exactly 0, and torch takes others of them while it decodes."""
    model = models.broken_layers.indexed(index_n_heads=1, index_topk=12)
    subject = subject_of(model)
    tokens = subject.tokens(subject.length)
    with torch.no_grad(), computing_in(model, torch.float64):
        error = subject.error(subject.in_chunks(tokens, [1] * subject.length), subject.logits(tokens))
    assert float(error.max()) > 100 * subject.threshold
    found = result("cached_decoding", model)
    assert found.status == "passed" and found.measured < 1e-6 and "the first of equal scores" in found.reason


def test_a_known_defect_of_a_class_hides_no_other():
    """Text after a video begins too early in Qwen2.5-VL of transformers; each axis of the patches is judged beside that."""
    reason = result("image_positions", vision(whole_seconds)).reason
    assert "beginnings: " in reason and "time: " in reason and "height: " not in reason and "width: " not in reason
    reason = result("image_positions", vision(lambda given: None, lambda at: at[2].add_(at[1] - at[1].min()))).reason
    assert "width: by 2" in reason and "time: " not in reason and "height: " not in reason


def test_coordinates_of_a_video_are_the_published_ones():
    """By hand: text 0 1, a video of 3 frames, 1 x 2 each, at 2, text from 5 on; with 4 numbers a frame from 11 on."""
    pieces = [text(2), Piece(2, (3, 1, 2)), text(2)]
    want = [[0, 1, 2, 2, 3, 3, 4, 4, 5, 6], [0, 1, 2, 2, 2, 2, 2, 2, 5, 6], [0, 1, 2, 3, 2, 3, 2, 3, 5, 6]]
    assert published(pieces, 1.0).tolist() == want
    assert published(pieces, 4.0)[0].tolist() == [0, 1, 2, 2, 6, 6, 10, 10, 11, 12]


def test_a_finding_has_one_of_three_causes():
    """The class, with its version, for code; the rule for a published method; tests/check/test_files.py has the file."""
    theirs = f"the class SmolLM3ForCausalLM of transformers {transformers.__version__}"
    assert result("layer_rotations", models.broken_layers.smollm3_inverted()).whose == theirs
    assert result("scaling_border", llama(rope=LONGROPE)).whose == "the rule"


def test_what_shows_nothing_is_not_called_right(monkeypatch):
    """No mask to read, no static cache to take, no projection of latent attention: said, and neither a yes nor an error."""
    monkeypatch.setitem(ALL_MASK_ATTENTION_FUNCTIONS._global_mapping, recorder.NAME, lambda *_, **__: None)
    assert "given no mask" in result("layer_masks", llama()).reason
    monkeypatch.undo()

    def refused(named):
        if isinstance(named.get("cache"), StaticCache):
            raise TypeError("no such cache")

    found = result("layer_masks", changed(llama(), refused))
    assert found.status == "passed" and "a static cache (TypeError)" in found.reason
    model = llama()
    model.config.rope_interleave = True
    assert result("layer_rotations", model).status == "passed"


def test_laws_are_chosen_by_name():
    names = list(laws())
    assert list(check(llama(), laws=["left_padding", "files"])) == ["files", "left_padding"]
    assert all(set(law.rests_on) <= set(names[: names.index(law.name)]) for law in laws().values())
