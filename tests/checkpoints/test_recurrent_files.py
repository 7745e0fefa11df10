"""Folders of recurrent models: those of mamba_ssm, keys that nobody understands, damaged weights, models that are not theirs."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import Mamba2ForCausalLM, MambaForCausalLM

import longitude as lg
from longitude.checkpoints.families.recurrent import from_recurrent, to_transformers
from longitude.checkpoints.quiet import quiet
from tests.checkpoints.recurrent_models import CASES, logits, some_ids, theirs
from tests.measure.conftest import build
from tests.support import close, refused, refused_calls


@pytest.fixture
def ids():
    return some_ids()


OF_MAMBA_SSM = {
    "d_model": 24, "n_layer": 3, "vocab_size": 37, "rms_norm": True, "residual_in_fp32": True, "fused_add_norm": True,
    "pad_vocab_size_multiple": 8,
}  # fmt: skip


@pytest.mark.parametrize("case", ["mamba", "mamba2"])
def test_folders_of_mamba_ssm(case, tmp_path, ids):
    more = {"use_bias": False, "layer_norm_epsilon": 1e-5, "tie_word_embeddings": True}
    ssm = (
        {"d_state": 5, "d_conv": 3}
        if case == "mamba"
        else {"layer": "Mamba2", "d_state": 5, "headdim": 8, "ngroups": CASES["mamba2"][1]["n_groups"]}
    )
    model = theirs(case, **more)
    state = {name.replace("embeddings", "embedding"): tensor for name, tensor in model.state_dict().items()}
    torch.save(state, tmp_path / "pytorch_model.bin")
    (tmp_path / "config.json").write_text(json.dumps(OF_MAMBA_SSM | {"ssm_cfg": ssm}))
    close(logits(from_recurrent(tmp_path, allow_pickle=True), ids), logits(model, ids), atol=1e-5)
    with refused("pytorch_model", "allow_pickle=True"):
        from_recurrent(tmp_path)
    for key, value in {
        "attn_layer_idx": [1],
        "ssm_cfg": {"layer": "Mamba3"},
        "d_intermediate": 8,
        "rms_norm": False,
    }.items():
        (tmp_path / "config.json").write_text(json.dumps({**OF_MAMBA_SSM, "ssm_cfg": ssm, key: value}))
        with refused(key):
            from_recurrent(tmp_path, allow_pickle=True)


def test_dtype_and_generation_options(tmp_path, ids):
    model = theirs("rwkv").bfloat16()
    model.generation_config.max_new_tokens = 3
    model.config.initializer_range = 0.1  # decides no logits, in whichever config it is
    model.save_pretrained(tmp_path)
    ours = from_recurrent(tmp_path)
    assert {parameter.dtype for parameter in ours.parameters()} == {torch.bfloat16}
    assert ours.generate(ids, eos_token_id=None, pad_token_id=0).shape == (2, 16)
    assert from_recurrent(tmp_path, dtype=torch.float32).dtype == torch.float32


BAD_KEYS = [
    ("mamba", {"hidden_act": "gelu"}, ("hidden_act", "'gelu'", "'silu'", "'swish'")),
    ("mamba", {"sliding_window": 8}, ("sliding_window", "8")),
    ("mamba", {"quantization_config": {"quant_method": "gptq"}}, ("quantization_config", "'quant_method'", "'gptq'")),
    ("mamba", {"rms_norm": False}, ("rms_norm", "False")),
    ("mamba", {"d_model": 25}, ("d_model", "25", "24", "hidden_size")),
    ("mamba", {"intermediate_size": 40}, ("intermediate_size", "40", "hidden_size", "24")),
    ("mamba", {"state_size": 6}, ("backbone.layers.0.mixer.A_log", "[48, 5]", "[48, 6]")),
    ("mamba", {"num_hidden_layers": 4}, ("12", "backbone.layers.3.mixer.A_log")),
    ("mamba", {"num_hidden_layers": 2}, ("12", "backbone.layers.2.mixer.A_log")),
    ("mamba", {"vocab_size": "many"}, ("mamba", "'vocab_size'")),
    ("mamba2", {"time_step_limit": [0.01, 1.0]}, ("time_step_limit", "[0.01, 1.0]")),
    ("mamba2", {"num_heads": 5}, ("mamba2",)),
    ("rwkv", {"layer_norm_epsilon": 1e-6}, ("layer_norm_epsilon", "1e-06", "1e-05")),
    ("rwkv", {"model_type": "llama"}, ("falcon_mamba", "'llama'")),
]  # fmt: skip


@pytest.mark.parametrize(("case", "keys", "words"), BAD_KEYS)
def test_keys_that_are_not_understood(case, keys, words, tmp_path):
    theirs(case).save_pretrained(tmp_path)
    file = tmp_path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | keys))
    with refused(*words) as caught:
        from_recurrent(tmp_path)
    assert "\n" not in str(caught.value)


def test_weights_that_are_not_whole(tmp_path):
    model = theirs("mamba, untied")
    model.save_pretrained(tmp_path)
    shard = tmp_path / "model.safetensors"
    whole = load_file(shard)
    for change, words in (
        (lambda w: w.pop("lm_head.weight"), ["1", "lm_head.weight"]),
        (
            lambda w: w.update({"backbone.more": torch.ones(1)}),
            ["1", "backbone.more"],
        ),
        (lambda w: w["backbone.norm_f.weight"].fill_(torch.nan), ["finite"]),
    ):
        state = {name: tensor.clone() for name, tensor in whole.items()}
        change(state)
        save_file(state, shard)
        with refused(*words):
            from_recurrent(tmp_path)
    shard.write_bytes(shard.read_bytes()[:-9])
    with refused("safetensors"):
        from_recurrent(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text()) | {"tie_word_embeddings": True}
    (tmp_path / "config.json").write_text(json.dumps(config))
    save_file(whole, shard)
    with refused("tie_word_embeddings", "True"):
        from_recurrent(tmp_path)
    (tmp_path / "config.json").unlink()
    with refused("config.json"):
        from_recurrent(tmp_path)


def ours(**options):
    options = {"num_hidden_layers": 2, "embedding_scale": 1.0, "mlp": "none", "mixer": "mamba"} | options
    return lg.LongitudeForCausalLM(lg.LongitudeConfig(hidden_size=24, num_attention_heads=1, **options))


test_mistakes = refused_calls(
    [
        (lambda: from_recurrent("no/such/folder"), "folder"),
        (lambda: from_recurrent(3), "from_recurrent", "int"),
        (lambda: from_recurrent(build("llama")), "falcon_mamba", "'llama'"),
        (lambda: from_recurrent(theirs("mamba"), dtype="int8"), "'int8'"),
        (
            lambda: to_transformers(build("llama")),
            "to_transformers",
            "LlamaForCausalLM",
        ),
        (lambda: to_transformers(ours(mixer="mamba3")), "to_transformers"),
        (lambda: to_transformers(ours(mixer=None, mixers=["mamba", "attention"])), "to_transformers"),
        (lambda: to_transformers(ours(mlp="dense")), "intermediate_size", "None", "64"),
        (lambda: to_transformers(ours(embedding_scale=2.0)), "embedding_scale", "1.0", "2.0"),
        (
            lambda: to_transformers(ours(mixer="mamba2")),
            "norm_eps",
            "1e-06",
            "1e-05",
        ),
        (lambda: to_transformers(ours(encoding="sinusoidal")), "'nope'"),
        (
            lambda: to_transformers(ours(mixer="rwkv4", mlp="rwkv")),
            "'layernorm'",
        ),
    ]
)


def test_a_model_of_ours_becomes_one_of_theirs(ids):
    """Trained by us, with sizes that our defaults decide."""
    with quiet():
        model = to_transformers(ours().eval())
        options = {"rms_norm_eps": 1e-5, "tie_word_embeddings": False}
        other = to_transformers(ours(mixer={"name": "mamba2", "head_dim": 12}, **options).eval())
    assert type(model) is MambaForCausalLM and type(other) is Mamba2ForCausalLM
    close(logits(from_recurrent(model), ids), logits(model, ids), atol=1e-5)
