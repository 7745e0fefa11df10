"""The config: its refusals, its resolved options, its mixers, and checkpoints that come back as they went."""

import json

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

import longitude as lg
from longitude.attention.mixer import MIXERS
from longitude.models import LongitudeConfig, LongitudeForCausalLM
from longitude.positions.base import ENCODINGS
from longitude.registry import options_of
from longitude.testing import fill
from tests.models.conftest import OF_DECODERS, mixer_spec
from tests.support import close, refused_calls

SPECS = [
    *OF_DECODERS,
    ["rope", "fox"],
    {"name": "rope", "layout": "half", "base": 500_000.0, "rotary_dim": 2},
    [{"name": "alibi", "slopes": [1.0, 0.5, 0.25, 0.1]}, "t5"],
]
PER_LAYER = [["learned", ["rope", "fox"]], [{"name": "alibi", "slopes": [1.0, 1.0, 2.0, 2.0]}, "clipped"], ["t5", "t5"]]


def config(*message, **options):
    return lambda: LongitudeConfig(**options), *message


def called(*message, **options):
    return lambda: LongitudeForCausalLM(LongitudeConfig(**options))(torch.ones(1, 3, dtype=torch.long)), *message


LAYERS = {"num_hidden_layers": 2}
WITHOUT_SCORES = [name for name, kind in MIXERS.items() if not kind.scores]
HEADS = ("num_attention_heads", "hidden_size", "3 and 128")
test_mistakes = refused_calls(
    [
        config(*HEADS, num_attention_heads=3),
        config("num_key_value_heads", "num_attention_heads", "3 and 4", num_key_value_heads=3),
        config("hidden_dropout", "1.5", hidden_dropout=1.5),
        config("intermediate_size", "mlp='none'", mlp="none", intermediate_size=8),
        config("qk_norm", "latent", "attention", qk_norm=True, mixer="latent"),
        config("short_conv", "mamba", "attention", short_conv=["input"], mixer="mamba"),
        called("'kv'", "'input'", short_conv="kv", mixer="latent"),
        (lambda: lg.LongitudeForMaskedLM(LongitudeConfig(short_conv=["kv"])), "short_conv", "'kv'", "encoder"),
        config("softcap", softcap=3),
        config("'encoding'", encodng="alibi"),
        config("encoding", "{'layout': 'half'}", encoding={"layout": "half"}),
        config("encoding", "encodings", "'alibi'", encoding="alibi", encodings=["rope"] * 4),
        config("encoding", "'rope+ssmax'", encoding="rope+ssmax"),
        config("mixer", "'window:size=64'", mixer="window:size=64"),
        config("mixers", "4", "got 'mamba'", mixers="mamba"),
        called("encodings", "first", encodings=["rope", "learned"], **LAYERS),
        called("Rotary", "Mamba", mixer="mamba", encoding="rope"),
        called("ALiBi", "Mamba", mixers=["mamba", "attention"], encodings=["alibi"] * 2, **LAYERS),
        *(called("ALiBi", MIXERS[name].__name__, "attention", encoding="alibi", mixer=name) for name in WITHOUT_SCORES),
    ]
)


@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_every_option_is_written_out(spec, tmp_path):
    """A checkpoint never depends on a default: config.json holds each option, the layout of rope among them."""
    LongitudeConfig(encoding=spec).save_pretrained(tmp_path)
    saved = json.loads((tmp_path / "config.json").read_text())["encoding"]
    asked = spec if isinstance(spec, list) else [spec]
    for encoding, written in zip(saved if isinstance(saved, list) else [saved], asked, strict=True):
        written = {"name": written} if isinstance(written, str) else written
        assert encoding.keys() == {"name", *options_of(ENCODINGS[encoding["name"]])}
        assert written.items() <= encoding.items()
        for option, value in {"num_heads": 4, "head_dim": 32, "dim": 128, "max_length": 2048}.items():
            assert encoding.get(option, value) == value
    if spec == "rope":
        assert saved == {
            "name": "rope", "head_dim": 32, "layout": "interleaved", "base": 10_000.0, "rotary_dim": None,
            "scaling": None, "proportion": 1.0, "angle_dtype": "float64", "learned_frequencies": False,
            "rotate_values": False,
        }  # fmt: skip
    loaded = AutoConfig.from_pretrained(tmp_path)
    assert type(loaded) is LongitudeConfig
    unnamed = {"_name_or_path": None}
    assert loaded.to_dict() | unnamed == LongitudeConfig(encoding=spec).to_dict() | unnamed


@torch.no_grad()
def test_the_scale_of_scores(build, ids):
    """T5's is 1: with heads of 4, queries twice as long."""
    unscaled, other = build("t5", attention_scale=1.0), build("t5")
    for block in other.model.layers:
        block.mixer.q_proj.weight *= 2
    close(unscaled(ids()).logits, other(ids()).logits, 1e-10)


PARTS = {"qk_norm": True, "output_gate": True, "score_softcap": 2.0, "short_conv": ["input", "qkv", "output"]}
PARTS |= {"norm_position": "both", "hidden_act": "geglu_tanh"}
SAVED = [
    *({"encoding": spec} for spec in SPECS),
    {"encoding": {"name": "rope", "scaling": lg.scaling.DynamicNTK(2.0, 8, follow="row")}},
    *({"encoding": None, "encodings": specs} for specs in PER_LAYER),
    *({"encoding": "auto", "mixer": mixer_spec(name)} for name in lg.list_mixers()),
    {"encoding": "auto", "mixers": ["mamba", "attention"]},
    {"encoding": "auto", "mixers": [mixer_spec("hierarchical"), "retention"]},
    *({"tie_word_embeddings": tied, "hidden_act": "gelu", "attention_bias": True} for tied in (True, False)),
    PARTS,
]


@pytest.mark.one_in(12)
@pytest.mark.parametrize("options", SAVED, ids=str)
def test_round_trip(options, build, ids, tmp_path):
    """Saved and loaded through the Auto classes: the same keys, all found, the same weights to the bit. Not so the
    outputs: weights mapped from a file may lie where products round another way. What is learned is saved, and nothing else."""
    model, x = fill(build(**options), 3), ids()
    model.save_pretrained(tmp_path)
    loaded, report = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True, dtype=torch.float64)
    assert type(loaded) is LongitudeForCausalLM
    assert load_file(tmp_path / "model.safetensors").keys() == {name for name, _ in model.named_parameters()}
    assert not any(report[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys")), report
    for name, ours in model.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], ours), name
    with torch.no_grad():
        close(loaded(x).logits, model(x).logits)
        close(AutoModel.from_pretrained(tmp_path, dtype=torch.float64)(x)[0], model.model(x)[0])
    assert {name for name, _ in model.named_parameters(remove_duplicate=False)} == set(model.state_dict())
    assert "mixer" in options or "mixers" in options or not list(model.buffers())
    for either in (model, loaded):
        assert (either.lm_head.weight is either.model.embed_tokens.weight) == options.get("tie_word_embeddings", True)
        for option in ("encoding", "encodings", "mixer", "mixers", "hidden_act", "tie_word_embeddings", *PARTS):
            assert getattr(either.config, option) == getattr(model.config, option)


def test_a_pickle_is_not_read(build, tmp_path):
    model = build("t5")
    model.save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
    for kind in (type(model), AutoModelForCausalLM):
        with pytest.raises(OSError, match=r"no file named model\.safetensors"):
            kind.from_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path, use_safetensors=False)  # by choice: torch.load(weights_only=True)
    assert torch.equal(loaded.lm_head.weight, model.lm_head.weight)


# ---- mixers -----------------------------------------------------------------------------------------------------------


def test_rotation_goes_where_it_can(build, ids):
    """And a mixer that takes no encoding holds no parameters of one."""
    assert LongitudeConfig().encoding["name"] == "rope" and LongitudeConfig(mixer="mamba").encoding["name"] == "nope"
    hybrid = build("auto", mixers=["mamba", "attention"])
    assert hybrid.config.encoding["name"] == "rope"
    assert [len(composed.members) for composed in hybrid.model.encoding_of_layer] == [0, 1]
    model, x = build("fox", mixers=["mamba", "attention"]).train(), ids()
    fill(model)(x, labels=x).loss.backward()
    assert len(model.model.encodings) == 1 and all(p.grad is not None for p in model.parameters())
    assert build("sinusoidal", mixer="mamba")(x).logits.isfinite().all()


def test_a_learned_table_is_scaled_as_the_embeddings_it_is_added_to():
    """Adam moves each number by the learning rate: a table beside embeddings that are multiplied by s must be as well."""
    sizes = {"vocab_size": 11, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = LongitudeConfig(**sizes, encoding="learned")
    assert config.encoding["embedding_scale"] == config.embedding_scale == 4.0
    model = LongitudeForCausalLM(config).double()
    [table] = [p for name, p in model.named_parameters() if name.endswith("table")]
    ids = torch.tensor([[3, 7, 7, 1, 0]])
    first = model.model(ids, output_hidden_states=True).hidden_states[0]
    torch.testing.assert_close(first, 4 * (model.model.embed_tokens(ids) + table[:5]))
    assert lg.Learned(max_length=4, dim=16).embedding_scale == 1  # as in the paper
