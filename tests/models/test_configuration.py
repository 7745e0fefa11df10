"""The config: its refusals, its resolved options, and checkpoints that come back as they went."""

import json

import pytest
import torch
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoModelForSeq2SeqLM

import longitude as lg
from longitude.models import LongitudeConfig, LongitudeForCausalLM
from longitude.positions.base import ENCODINGS
from longitude.registry import options_of

SPECS = [
    *lg.list_encodings(),
    ["rope", "fox"],
    {"name": "rope", "layout": "half", "base": 500_000.0, "rotary_dim": 2},
    [{"name": "alibi", "slopes": [1.0, 0.5, 0.25, 0.1]}, "t5"],
]
PER_LAYER = [
    ["learned", "none"],
    ["rope", ["rope", "fox"]],
    [{"name": "alibi", "slopes": [1.0, 1.0, 2.0, 2.0]}, "clipped"],
    ["t5", "t5"],
]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_attention_heads": 3}, "num_attention_heads to divide hidden_size, got 3 and 128"),
        ({"num_attention_heads": 3, "mixer": "rwkv6"}, "num_attention_heads to divide hidden_size, got 3 and 128"),
        (
            {"num_attention_heads": 3, "mixers": ["latent"] * 3 + ["attention"]},
            "num_attention_heads to divide hidden_size",
        ),
        ({"num_key_value_heads": 3}, "num_key_value_heads to divide num_attention_heads, got 3 and 4"),
        ({"hidden_size": 0}, "hidden_size to be an int of 1 or more, got 0"),
        ({"intermediate_size": 0}, "intermediate_size to be an int of 1 or more, got 0"),
        ({"num_encoder_layers": 0}, "num_encoder_layers to be an int of 1 or more, got 0"),
        ({"layer_norm_eps": 0.0}, "layer_norm_eps above 0, got 0.0"),
        ({"initializer_range": -1.0}, "initializer_range above 0, got -1.0"),
        ({"hidden_dropout": 1.5}, "hidden_dropout: expected 0 <= hidden_dropout < 1, got 1.5"),
        ({"attention_dropout": -0.5}, "attention_dropout: expected 0 <= attention_dropout < 1, got -0.5"),
        ({"num_hidden_layers": -1}, "num_hidden_layers to be an int of 1 or more, got -1"),
        ({"encoding": "alibbi"}, r"unknown encoding 'alibbi': did you mean 'alibi'\? lg.list_encodings\(\) lists them"),
        ({"encoding": {"name": "rope", "bse": 1.0}}, "unknown option of 'rope' 'bse': did you mean 'base'"),
        ({"encoding": {"layout": "half"}}, 'expected a name, {"name": name'),
        ({"encoding": ["rope", {"name": "foxx"}]}, "unknown encoding 'foxx': did you mean 'fox'"),
        ({"encodings": ["rope"] * 3}, "encodings: expected 4, one per layer, got 3"),
        ({"encodings": ["rope"] * 3 + ["ropee"]}, "unknown encoding 'ropee'"),
        ({"hidden_act": "swigelu"}, "hidden_act 'swiglu', 'gelu', 'gelu_tanh' or 'relu', got 'swigelu'"),
        ({"hidden_act": "reluu"}, "hidden_act .*, got 'reluu'"),
        ({"norm": "rms"}, "norm 'rmsnorm' or 'layernorm', got 'rms'"),
        ({"norm_position": "after"}, "norm_position 'pre' or 'post', got 'after'"),
        ({"mixer": "atention"}, "unknown mixer 'atention': did you mean 'attention'"),
        ({"mixers": ["attention"]}, "mixers: expected 4, one per layer, got 1"),
        ({"mixers": "mamba"}, "mixers: expected a list of 4, one per layer, got 'mamba'"),
        ({"attention_backend": "tabel"}, "unknown backend 'tabel': did you mean 'table'"),
    ],
)
def test_mistakes(options, message):
    with pytest.raises(ValueError, match=message):
        LongitudeConfig(**options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"encoding": {"name": "rope", "layout": "halves"}}, "expected layout 'half'"),
        ({"encoding": {"name": "alibi", "slopes": [1.0]}}, "expected 4 numbers as slopes"),
        ({"encodings": ["rope", "learned", "rope", "rope"]}, "acts on the model's input must stand in the first layer"),
    ],
)
def test_mistakes_that_the_model_finds(options, message):
    with pytest.raises(ValueError, match=message):
        LongitudeForCausalLM(LongitudeConfig(**options))(torch.ones(1, 3, dtype=torch.long))


@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_every_option_is_written_out(spec, tmp_path):
    """A checkpoint never depends on a default: config.json holds each option, the layout of rope among them."""
    LongitudeConfig(encoding=spec).save_pretrained(tmp_path)
    saved = json.loads((tmp_path / "config.json").read_text())["encoding"]
    asked = spec if isinstance(spec, list) else [spec]
    for one, written in zip(saved if isinstance(saved, list) else [saved], asked, strict=True):
        written = {"name": written} if isinstance(written, str) else written
        assert one.keys() == {"name", *options_of(ENCODINGS[one["name"]])}
        assert written.items() <= one.items()
        for option, value in {"num_heads": 4, "head_dim": 32, "dim": 128, "max_length": 2048}.items():
            assert one.get(option, value) == value
    if spec == "rope":
        assert saved == {
            "name": "rope", "head_dim": 32, "layout": "interleaved", "base": 10_000.0, "rotary_dim": None,
            "scaling": None, "proportion": 1.0, "angle_dtype": "float64",
        }  # fmt: skip
    loaded = AutoConfig.from_pretrained(tmp_path)
    assert type(loaded) is LongitudeConfig
    unnamed = {"_name_or_path": None}
    assert loaded.to_dict() | unnamed == LongitudeConfig(encoding=spec).to_dict() | unnamed


def test_a_preset_keeps_what_a_model_knows():
    """Grouped heads reach the encodings that follow the heads of keys."""
    config = LongitudeConfig(encoding=["path"], num_key_value_heads=2)
    assert config.encoding[0]["num_kv_heads"] == 2


@pytest.mark.parametrize("mixer", ["latent", "mamba", "rwkv4", {"name": "mamba2", "head_dim": 12}], ids=str)
def test_heads_need_not_divide_a_width_of_which_no_mixer_makes_heads(mixer):
    config = LongitudeConfig(hidden_size=42, num_attention_heads=4, num_hidden_layers=1, mixer=mixer)
    assert LongitudeForCausalLM(config)(torch.zeros(1, 3, dtype=torch.long)).logits.isfinite().all()


def test_sizes_that_are_not_said():
    for act, wide in (("swiglu", 344), ("gelu", 512)):
        config = LongitudeConfig(hidden_act=act)
        assert (config.intermediate_size, config.num_key_value_heads, config.head_dim) == (wide, 4, 32)
    assert LongitudeConfig().embedding_scale == 128**0.5
    assert LongitudeConfig(embedding_scale=1.0).embedding_scale == 1.0


def same_model(model, path, ids):
    """Saved and loaded through the Auto classes: the same keys, all found, the same weights to the bit. Not so the
    outputs: weights mapped from a file may lie where products round another way."""
    model.save_pretrained(path)
    loaded, report = AutoModelForCausalLM.from_pretrained(path, output_loading_info=True, dtype=torch.float64)
    assert type(loaded) is LongitudeForCausalLM
    assert not any(report[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys")), report
    for name, ours in model.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], ours), name
    x = ids()
    with torch.no_grad():
        torch.testing.assert_close(loaded(x).logits, model(x).logits, rtol=0, atol=1e-12)
    assert {name for name, _ in model.named_parameters(remove_duplicate=False)} == set(model.state_dict())
    return loaded


@pytest.mark.one_in(3)
@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_round_trip(spec, build, ids, tmp_path):
    same_model(build(spec), tmp_path, ids)


@pytest.mark.parametrize("specs", PER_LAYER, ids=str)
def test_round_trip_per_layer(specs, build, ids, tmp_path):
    model = build(None, encodings=specs)
    loaded = same_model(model, tmp_path, ids)
    assert loaded.config.encodings == model.config.encodings and loaded.config.encoding is None


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("act", ["swiglu", "gelu"])
def test_tied_and_gated_by_choice(tied, act, build, ids, tmp_path):
    model = build("rope", tie_word_embeddings=tied, hidden_act=act, attention_bias=True)
    loaded = same_model(model, tmp_path, ids)
    for one in (model, loaded):
        assert (one.lm_head.weight is one.model.embed_tokens.weight) == tied
        assert ("model.layers.0.mlp.gate.weight" in one.state_dict()) == (act == "swiglu")
    assert (loaded.config.tie_word_embeddings, loaded.config.hidden_act) == (tied, act)


def test_the_bare_decoder_comes_back_too(build, ids, tmp_path):
    model = build("t5")
    model.save_pretrained(tmp_path)
    bare = AutoModel.from_pretrained(tmp_path, dtype=torch.float64)
    with torch.no_grad():
        found, want = bare(ids()).last_hidden_state, model.model(ids()).last_hidden_state
        torch.testing.assert_close(found, want, rtol=0, atol=1e-12)


@pytest.mark.parametrize("kind", [AutoModel, AutoModelForCausalLM, AutoModelForSeq2SeqLM])
def test_a_checkpoint_of_another_kind_is_refused(kind, build, tmp_path):
    """An encoder's weights fit a decoder, which would make nonsense of them without a word."""
    lg.LongitudeForMaskedLM(build().config).save_pretrained(tmp_path)
    with pytest.raises(
        ValueError, match=r"expected a checkpoint of .* got one of LongitudeForMaskedLM; load it with lg\."
    ):
        kind.from_pretrained(tmp_path)
    kind.from_config(AutoConfig.from_pretrained(tmp_path))  # a new one of its shape is no checkpoint


@pytest.mark.parametrize("name", lg.list_encodings())
def test_nothing_fixed_is_saved(name, build):
    """state_dict holds what is learned and nothing else: no buffer, no table."""
    model = build(name)
    assert not list(model.buffers())
    held = [key for key in model.state_dict() if "encodings." in key]
    assert bool(held) == any(member.learned for member in model.model.encodings)
    assert all(model.get_parameter(key).requires_grad for key in held)


def test_shared_encodings_are_one_module(build):
    """T5's table serves all layers, as published; clipped's is per layer; equal specs share, others do not."""
    assert len(build("t5").model.encodings) == 1
    assert len(build("clipped").model.encodings) == 2
    assert len(build(None, encodings=["t5", {"name": "t5", "num_buckets": 16}]).model.encodings) == 2


@pytest.mark.parametrize("name", ["rope", "t5", "fire", "path", "sinusoidal", "learned"])
def test_made_on_the_meta_device(name, ids):
    """No number is needed to build a model; filled afterwards, it is the model."""
    config = LongitudeConfig(vocab_size=61, hidden_size=16, num_hidden_layers=2, encoding=name)
    with torch.device("meta"):
        hollow = LongitudeForCausalLM(config)
    torch.manual_seed(0)
    model = LongitudeForCausalLM(config).eval()
    hollow.load_state_dict(model.state_dict(), assign=True)
    hollow.tie_weights()
    with torch.no_grad():
        torch.testing.assert_close(hollow.eval()(ids()).logits, model(ids()).logits)


def test_the_initial_state_is_the_seed(ids):
    """Two models of one seed are equal, and start near knowing nothing: a loss not far above ln(vocabulary)."""
    losses = []
    for _ in range(2):
        torch.manual_seed(5)
        model = LongitudeForCausalLM(LongitudeConfig(encoding="alibi")).eval()
        with torch.no_grad():
            losses.append(model(ids(4, 60), labels=ids(4, 60, seed=8)).loss)
    assert losses[0] == losses[1]
    assert 0 < losses[0] - torch.tensor(256.0).log() < 1.5


def test_one_encoding_or_one_per_layer():
    with pytest.raises(ValueError, match="expected encoding or encodings, got both"):
        LongitudeConfig(num_hidden_layers=2, encoding="alibi", encodings=["rope", "none"])
