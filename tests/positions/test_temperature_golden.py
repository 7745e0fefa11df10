"""Temperatures and sinks as transformers' own layers compute them, outputs and gradients, and as their configs say them."""

import pytest
import torch
from transformers import GptOssConfig, GraniteMoeHybridConfig, Llama4TextConfig, Ministral3Config, SmolLM3Config
from transformers.models.llama4.modeling_llama4 import Llama4TextAttention

import longitude as lg
from longitude.positions.hugging_face import RopeConfig
from tests.support import close, golden, refused_calls

GOLDEN = golden("temperature")
ORIGINAL = "original_max_position_embeddings"
SHAPE = {"num_hidden_layers": 4, "max_position_embeddings": 64}
PLAIN = {"rope_type": "default", "rope_theta": 50.0}
CONFIGS = {
    "llama4": Llama4TextConfig(**SHAPE, attn_temperature_tuning=True, floor_scale=3, attn_scale=0.5),
    "ministral3": Ministral3Config(**SHAPE, rope_parameters=PLAIN | {ORIGINAL: 4, "llama_4_scaling_beta": 0.3}),
    "gpt_oss": GptOssConfig(**SHAPE, rope_parameters=PLAIN),
}


@pytest.mark.parametrize("kind", CONFIGS)
def test_a_layer_of_transformers(kind):
    """Made of its config alone; positions further on, where the window of order is the same, give other numbers."""
    table = {name: torch.tensor(numbers, dtype=torch.float64) for name, numbers in GOLDEN[kind].items()}
    rope = lg.from_hugging_face(CONFIGS[kind])
    assert isinstance(rope, RopeConfig)
    encodings = [rope.encoding(4, "half", layer=3)]
    if kind == "gpt_oss":
        encodings.append(lg.LearnedSink(2).double())
        encodings[1].logits.data.copy_(table["sinks"])
    layer = lg.MultiHeadAttention(6, 2, 1, encodings, head_dim=4).double()
    for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
        getattr(layer, name).weight.data.copy_(table[f"{name}.weight"])
    x = table["x"][None].requires_grad_()
    out = layer(x)
    out.sum().backward()
    close(out[0], table["out"], 1e-5)
    assert x.grad is not None
    close(x.grad[0], table["gradient"], 2e-5)
    if kind == "gpt_oss":
        close(encodings[1].logits.grad, table["gradient of sinks"], 2e-5)
    else:
        further = layer(x, positions=4)
        assert (further - out).abs().max() > 1e-3
        close(layer(x.expand(2, -1, -1), positions=torch.stack([torch.arange(11), torch.arange(4, 15)]))[1], further[0])


def test_llama4_counts_tokens_in_transformers():
    """Moved positions change nothing there; here they do."""
    config = Llama4TextConfig(**SHAPE, hidden_size=8, head_dim=4, num_attention_heads=2, num_key_value_heads=2,
                              floor_scale=3, attn_scale=0.5, attn_implementation="eager")  # fmt: skip
    torch.manual_seed(0)
    theirs, x = Llama4TextAttention(config, 3), torch.randn(1, 9, 8)
    rope = lg.from_hugging_face(config)
    assert isinstance(rope, RopeConfig)
    ours = lg.MultiHeadAttention(8, 2, encoding=rope.encoding(4, "half", layer=3))
    ours.load_state_dict(theirs.state_dict())
    future = torch.full((9, 9), -torch.inf).triu(1)[None, None]
    for first in (0, 4):
        at = torch.arange(first, first + 9)[None]
        want = theirs(x, position_embeddings=None, attention_mask=future, position_ids=at)[0]
        assert torch.allclose(ours(x, positions=at), want, atol=1e-6) == (first == 0)


# ---- configs -----------------------------------------------------------------------------------------------------------
def test_llama4_in_its_layers_without_rotation():
    rope = lg.from_hugging_face(CONFIGS["llama4"])
    assert isinstance(rope, RopeConfig)
    assert rope.rotates == (True, True, True, False) and rope.temperature is None
    assert rope.unrotated_temperature == {"name": "llama4_temperature", "attn_scale": 0.5, "floor_scale": 3}
    assert isinstance(rope.encoding(4, "half", 3), lg.Llama4Temperature) and isinstance(
        rope.encoding(4, "half", 0), lg.Rotary
    )
    off = lg.from_hugging_face(Llama4TextConfig(**SHAPE, attn_temperature_tuning=False))
    assert isinstance(off, RopeConfig) and isinstance(off.encoding(4, "half", 3), lg.NoPosition)


def test_ministral3_in_all_layers():
    rope = lg.from_hugging_face(CONFIGS["ministral3"])
    assert isinstance(rope, RopeConfig) and rope.rotates is None and rope.unrotated_temperature is None
    assert rope.temperature == {"name": "ministral3_temperature", "beta": 0.3, "original_max_length": 4}
    published = lg.from_hugging_face(Ministral3Config())
    assert isinstance(published, RopeConfig) and published.scaling == lg.scaling.YaRN(
        16.0, 16384, mscale=1.0, mscale_all_dim=1.0
    )
    assert published.temperature == {"name": "ministral3_temperature", "beta": 0.1, "original_max_length": 16384}


@pytest.mark.parametrize("config", [*CONFIGS.values(), SmolLM3Config(num_hidden_layers=6)])
def test_written_and_read_again(config):
    """With the keys of the file alone, too: what transformers' class would fill in is filled in."""
    rope = lg.from_hugging_face(config)
    written = lg.to_hugging_face(rope)
    assert lg.from_hugging_face(config.to_dict() | written) == rope
    bare = {"max_position_embeddings": config.max_position_embeddings, "num_hidden_layers": config.num_hidden_layers}
    assert lg.from_hugging_face(bare | written) == rope
    given = {key: value for key, value in config.to_dict().items() if "no_rope" not in key and "attn_" not in key}
    if config is not CONFIGS["llama4"]:  # its scale is not the default
        assert lg.from_hugging_face(given) == rope


@pytest.mark.parametrize(
    "more",
    [
        {"query_temperature": 0.3}, {"nope_layers": [3]}, {"use_logn_attn": True}, {"position_embedding_type": "other"},
    ],
    ids=lambda more: next(iter(more)),
)  # fmt: skip
def test_words_and_switches_about_position_are_said_too(more):
    """Whatever their value; what is switched off says nothing."""
    [key] = more
    with pytest.warns(UserWarning, match=f"^not understood: {key}; understood are "):
        lg.from_hugging_face({"rope_parameters": PLAIN, **more})
    off = {"use_logn_attn": False, "alibi": False, "nope_layers": None, "position_embedding_type": "rope"}
    assert lg.from_hugging_face({"rope_parameters": PLAIN, **off}).rotates is None


def test_granites_hybrid_rotates_only_where_its_type_says_so():
    """Its attention rotates only if position_embedding_type is "rope", which is None by default; Mamba never does."""
    config = GraniteMoeHybridConfig(num_hidden_layers=2, layer_types=["mamba", "attention"])
    assert lg.from_hugging_face(config.to_dict()) == {}
    config.position_embedding_type = "rope"
    assert lg.from_hugging_face(config.to_dict()).rotates == (False, True)


def reading(**keys):
    return lambda: lg.from_hugging_face(keys)


WARM = {"name": "ministral3_temperature", "beta": 0.1, "original_max_length": 4}
test_what_is_understood_and_wrong = refused_calls([
    (reading(rope_parameters=PLAIN | {"llama_4_scaling_beta": 0.1}), ORIGINAL),
    (reading(rope_parameters=PLAIN | {"llama_4_scaling_beta": -1, ORIGINAL: 4}), "llama_4_scaling_beta", "-1"),
    (reading(rope_theta=1e4, no_rope_layers=[1, 0], num_hidden_layers=4), "no_rope_layers", "4", "2"),
    (reading(rope_theta=1e4, no_rope_layers=[1, 2]), "no_rope_layers", "[1, 2]"),
    (reading(rope_theta=1e4, attn_temperature_tuning=True, floor_scale=0), "floor_scale", "0"),
    (reading(rope_theta=1e4, no_rope_layer_interval=0, num_hidden_layers=4), "no_rope_layer_interval", "0"),
    (lambda: lg.to_hugging_face(RopeConfig(1e4, temperature={"name": "log_n"})), "ministral3_temperature"),
    (lambda: lg.to_hugging_face(RopeConfig(1e4, lg.scaling.YaRN(4.0, 8), temperature=WARM)), "original_max_length=8"),
])  # fmt: skip
