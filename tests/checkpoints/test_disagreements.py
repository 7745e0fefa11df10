"""Where a class and the keys of its config disagree, both numbers are said; what the class reads otherwise is read as it does."""

import copy

import pytest
import torch
from transformers import AutoConfig, LlamaForCausalLM
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

import longitude as lg
from longitude.check import check
from longitude.checkpoints.compare import Disagreement, difference, read, require_kept
from longitude.checkpoints.config import positions_of_layers
from longitude.extend.factors import with_ropes
from longitude.positions.hugging_face import NotUnderstood, RopeConfig
from longitude.positions.scaling import Frequencies, Linear, Llama3, YaRN
from tests.checkpoints.published import ORIGINAL, said
from tests.support import refused

SHAPE = {
    "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 4, "num_hidden_layers": 4, "vocab_size": 96,
    "intermediate_size": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "max_position_embeddings": 256,
}  # fmt: skip
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, ORIGINAL: 64}
LLAMA = {"model_type": "llama", **SHAPE, "rope_parameters": YARN}
FULL, WINDOW = "full_attention", "sliding_attention"


# ---- the class computes something else -------------------------------------------------------------------------------
def upside_down(config, *arguments, **named):
    """YaRN with its ramp the wrong way round: fast pairs are divided, slow ones stay."""
    inverse, factor = YARN_OF_CLASS(config, *arguments, **named)
    plain = 1e4 ** -(torch.arange(len(inverse)) / len(inverse))
    return torch.where(inverse.isclose(plain), plain / 4, plain), factor


def another_factor(config, *arguments, **named):
    inverse, factor = YARN_OF_CLASS(config, *arguments, **named)
    return inverse, 1.5 * factor


def half_of_the_pairs(config, *arguments, **named):
    inverse, factor = YARN_OF_CLASS(config, *arguments, **named)
    return inverse[: len(inverse) // 2], factor


YARN_OF_CLASS = ROPE_INIT_FUNCTIONS["yarn"]


@pytest.mark.parametrize(
    ("patch", "numbers"),
    [
        (upside_down, ["pair 6", "0.001", "expected 0.00025"]),
        (another_factor, ["cos and sin", "1.707944", "1.138629"]),
        (half_of_the_pairs, ["pair 4", "expected 0.0025"]),
    ],
)
def test_a_class_that_does_not_follow_its_keys_is_a_finding(patch, numbers, monkeypatch):
    assert said(LLAMA) == ([], [])
    monkeypatch.setitem(ROPE_INIT_FUNCTIONS, "yarn", patch)
    with pytest.raises(Disagreement) as error:
        read(LLAMA)
    faults, _ = said(LLAMA)
    assert faults == [str(error.value)]
    assert all(number in faults[0] for number in numbers), faults
    model = LlamaForCausalLM(AutoConfig.for_model(**copy.deepcopy(LLAMA)))
    [law] = check(model, laws=("files",)).values()
    assert law.status == "failed" and faults[0] in law.reason


def test_a_number_of_dimensions_that_the_class_does_not_read():
    """MiniMax-Text-01 writes rotary_dim, and its class rotates whole heads; MiniMax M2's reads it."""
    shape = SHAPE | {"head_dim": 64, "rotary_dim": 32, "rope_theta": 1e4, "num_local_experts": 2}
    [fault], notes = said({"model_type": "minimax", **shape, "layer_types": [FULL, "linear_attention"] * 2})
    assert "rotary_dim" in fault and "32 pairs" in fault and "expected 16" in fault and notes == []
    assert said({"model_type": "minimax_m2", **shape}) == ([], [])
    assert lg.from_hugging_face({"model_type": "minimax_m2", **shape}) == RopeConfig(1e4, None, 0.5)
    with refused("rotary_dim", "7"):
        lg.from_hugging_face({"model_type": "minimax_m2", **shape, "rotary_dim": 7})


def test_a_base_in_a_dict_that_the_class_does_not_read():
    """DBRX keeps its base in attn_config; transformers rotates by 10,000."""
    raw = {
        "model_type": "dbrx", "d_model": 64, "n_heads": 4, "n_layers": 2, "max_seq_len": 64, "vocab_size": 96,
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 5e5},
        "ffn_config": {"hidden_size": 64, "ffn_hidden_size": 64},
    }  # fmt: skip
    [fault], _ = said(raw)
    assert "500000" in fault and "10000" in fault
    with refused("500000", "10000") as error:
        lg.from_hugging_face(raw)
    assert "partial_rotary_factor" not in str(error.value)  # only what differs
    raw["attn_config"]["rope_theta"] = 1e4
    assert said(raw) == ([], [])


def test_what_is_not_understood_is_no_disagreement():
    with pytest.raises(NotUnderstood) as error:
        read(AutoConfig.for_model("gptj", n_embd=64, n_head=4, n_layer=2, rotary_dim=8, vocab_size=96))
    assert not isinstance(error.value, Disagreement)


# ---- the class reads keys that others do not -------------------------------------------------------------------------
STEP = {
    "model_type": "step3p5", **SHAPE, "head_dim": 16, "rope_theta": [5e6, 1e4, 1e4, 1e4], "sliding_window": 8,
    "partial_rotary_factors": [0.5, 1.0, 1.0, 1.0], "yarn_only_types": [FULL], "layer_types": [FULL, *[WINDOW] * 3],
    "rope_scaling": {
        "rope_type": "llama3", "factor": 2.0, "low_freq_factor": 1.0, "high_freq_factor": 32.0, ORIGINAL: 128,
    },
}  # fmt: skip
LLAMA3 = Llama3(2.0, 128, 1.0, 32.0)


def test_lists_with_a_number_for_each_layer():
    raw = {"model_type": "step3p7", "text_config": STEP}
    assert said(raw) == ([], [])
    wanted = {FULL: RopeConfig(5e6, LLAMA3, 0.5), WINDOW: RopeConfig(1e4)}
    assert lg.from_hugging_face(raw) == wanted
    bases = [layer.encoding[0]["base"] for layer in lg.checkpoints.layers_from_hugging_face(raw, "half")]
    assert bases == [5e6, 1e4, 1e4, 1e4]
    for key, wrong in {"rope_theta": [5e6, 1e4], "partial_rotary_factors": [0.5, 1.0, 0.5, 1.0]}.items():
        with refused("rope_theta" if key != "rope_theta" else key):
            lg.from_hugging_face({"model_type": "step3p7", "text_config": STEP | {key: wrong}})


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    ("raw", "before"),
    [
        (STEP, {FULL: RopeConfig(5e6, LLAMA3, 0.5), WINDOW: RopeConfig(1e4)}),
        (
            {
                "model_type": "modernbert-decoder", **SHAPE, "global_rope_theta": 160000.0, "local_rope_theta": 10000.0,
                "local_attention": 8, "global_attn_every_n_layers": 2,
            },
            {FULL: RopeConfig(160000.0), WINDOW: RopeConfig(10000.0)},
        ),
        (
            {
                "model_type": "gemma3_text", **SHAPE, "head_dim": 16, "rope_theta": 1e6, "rope_local_base_freq": 1e4,
                "sliding_window": 8, "sliding_window_pattern": 2, "rope_scaling": None,
            },
            {FULL: RopeConfig(1e6), WINDOW: RopeConfig(1e4)},
        ),
    ],
)  # fmt: skip
def test_a_scheme_for_full_attention_is_written_where_its_class_reads_it(raw, before):
    whole = {"model_type": "step3p7", "text_config": raw} if raw is STEP else raw
    config = AutoConfig.for_model(**copy.deepcopy(whole)).get_text_config()
    assert lg.from_hugging_face(whole) == before
    after = before | {FULL: before[FULL]._replace(base=2 * before[FULL].base, scaling=YaRN(4.0, 64))}
    written = with_ropes(raw, config, after, 16)
    whole = {"model_type": "step3p7", "text_config": written} if raw is STEP else written
    assert read(AutoConfig.for_model(**copy.deepcopy(whole))).ropes == after
    assert said(whole)[0] == [] and lg.from_hugging_face(whole) == after


def test_a_type_that_the_class_maps_is_a_remark():
    scheme = {"type": "deepseek_yarn", "factor": 4.0, ORIGINAL: 64, "beta_fast": 32, "beta_slow": 1}
    latent = {"q_lora_rank": 24, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 16}
    raw = {"model_type": "sarvam_mla", **SHAPE, "head_dim": 8, **latent, "rope_theta": 1e4, "rope_scaling": scheme}
    faults, [note] = said(raw)
    assert faults == [] and "deepseek_yarn" in note and "yarn" in note
    assert read(raw).ropes == RopeConfig(1e4, YaRN(4.0, 64))
    with refused("deepseek_yarn"):  # Llama's class maps nothing
        lg.from_hugging_face({"model_type": "llama", **SHAPE, "rope_theta": 1e4, "rope_scaling": scheme})


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    "keys", [{"rope_theta": None}, {"rope_parameters": {"rope_type": "default", "rope_theta": None}}]
)
def test_a_model_without_rotation_is_not_told_to_write_a_base(keys):
    """A base would switch the rotation of OLMo Hybrid on."""
    raw = {"model_type": "olmo_hybrid", **SHAPE, **keys, "layer_types": ["linear_attention", FULL] * 2}
    faults, notes = said(raw)
    assert faults == [] and not any("write" in note for note in notes)
    assert lg.from_hugging_face(raw) == {}


@pytest.mark.parametrize("declared", [{FULL: RopeConfig(1e4), WINDOW: None}, {FULL: RopeConfig(1e4)}])
def test_a_layer_type_that_the_class_loses_is_said_with_its_numbers(declared):
    with refused(WINDOW, "20000", "Linear") as error:
        require_kept({FULL: RopeConfig(1e4), WINDOW: RopeConfig(2e4, Linear(2.0))}, declared)
    assert "10000" not in str(error.value) and FULL not in str(error.value)  # which both have


# ---- one comparison --------------------------------------------------------------------------------------------------
def test_a_difference_has_both_numbers():
    wanted = Frequencies(torch.tensor([1.0, 0.1, 0.0]).double(), 1.0)
    assert difference(wanted, wanted, 0.0) == (0.0, "")
    for inverse, factor, size, numbers in (
        ([1.0, 0.2, 0.0], 1.0, 1.0, ("pair 1", "0.2", "0.1")),
        ([1.0, 0.1, 0.5], 1.0, 0.5, ("pair 2", "0.5", "expected 0")),
        ([1.0, 0.1, 0.0], 1.5, 0.5, ("1.5", "expected 1")),
        ([-1.0, 0.1, 0.0], 1.0, 2.0, ("pair 0", "-1", "expected 1")),
    ):
        got = difference(Frequencies(torch.tensor(inverse).double(), factor), wanted, 0.99 * size)
        assert got.relative == pytest.approx(size) and all(word in got.text for word in numbers), got
        assert difference(Frequencies(torch.tensor(inverse).double(), factor), wanted, 1.01 * size).text == ""
    assert difference(Frequencies(torch.tensor([1.0, float("nan"), 0.0]).double(), 1.0), wanted, 1e9).text
    assert "2 pairs" in difference(Frequencies(torch.ones(2).double(), 1.0), wanted, 1e9).text


WIDTHS = {"head_dim": 16, "qk_rope_head_dim": 8, "q_lora_rank": 24, "o_lora_rank": 16}


@pytest.mark.parametrize(
    ("kind", "more", "windows"),
    [
        ("dory", {"n_input_layers": 1, "n_recurrent_layers": 1, "n_output_layers": 2}, [8, 8, 8, None]),
        pytest.param("deepseek_v4", WIDTHS, [8, 8, 8, 8], marks=pytest.mark.slow),
    ],
)
def test_windows_of_classes_with_other_types_of_layers(kind, more, windows):
    """Dory's to_dict() has other layer types than its layers; every layer of DeepSeek V4 has a window, beside keys it adds."""
    config = AutoConfig.for_model(kind, **{**SHAPE, "num_key_value_heads": 1, "sliding_window": 8, **more})
    assert [layer.window for layer in positions_of_layers(config, "half")] == windows
