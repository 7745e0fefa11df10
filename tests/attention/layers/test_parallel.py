"""Attention and a recurrent mixer side by side: the equation, the whole logits of Falcon-H1, and what is refused."""

from typing import Any

import pytest
import torch
import transformers
from packaging.version import Version

import longitude as lg
from longitude import testing
from longitude.attention.state_mixer import StateMixer
from longitude.labels import parse_label
from longitude.models import LongitudeConfig, LongitudeForCausalLM
from tests.models.test_parity import NAMES, SMALL, decoded, same
from tests.support import close, random, refused_calls

SIZES: dict[str, Any] = {"dim": 16, "num_heads": 4, "num_kv_heads": 2}
MULTIPLIERS = {
    "attention_in_multiplier": 0.7, "attention_out_multiplier": 1.3, "key_multiplier": 0.4, "ssm_in_multiplier": 1.2,
    "ssm_out_multiplier": 0.6, "ssm_multipliers": [0.5, 1.5, 0.8, 1.1, 0.9], "mlp_multipliers": [0.9, 1.4],
    "embedding_multiplier": 3.0, "lm_head_multiplier": 0.5,
}  # fmt: skip


@pytest.mark.parametrize("normalize", [True, False])
def test_outputs_of_both_are_averaged_or_added(normalize):
    """Each as the mixer gives it alone, on rows of two documents with padding before them."""
    own = {"attention": {"name": "window", "size": 3}, "state": {"name": "gated_deltanet", "num_key_heads": 2}}
    layer = testing.fill(lg.mixer("parallel", **SIZES, **own, normalize=normalize).double())
    x, documents = random(2, 11, 16), torch.tensor([[-1] * 2 + [0] * 4 + [1] * 5, [0] * 11])
    given = {"documents": documents, "encoding": lg.Rotary(4, "half")}
    a, s = layer.attention(x, **given), layer.state(x, documents=documents)
    if normalize:
        a, s = ((y * (y.square().mean(-1, keepdim=True) + 1e-6).rsqrt()) / 2 for y in (a, s))
        a, s = a * layer.attention_norm.weight, s * layer.state_norm.weight
    close(layer(x, **given), a + s)


def test_a_model_of_falcon_h1():
    """Whole logits, decoding with padding, and the multipliers of its config, which are factors of weights."""
    falcon = pytest.importorskip("transformers.models.falcon_h1", reason="transformers is older than the model")
    state = {"mamba_d_ssm": 64, "mamba_n_heads": 8, "mamba_d_head": 8, "mamba_n_groups": 2, "mamba_d_state": 8}
    norm = {"mamba_rms_norm": True, "mamba_norm_before_gate": False, "mamba_chunk_size": 16}
    shape = {name: size for name, size in SMALL.items() if name != "initializer_range"}
    torch.manual_seed(0)
    config = falcon.FalconH1Config(**SMALL, **state, **norm, **MULTIPLIERS, pad_token_id=0)
    theirs = falcon.FalconH1ForCausalLM(config).eval()
    for name, parameter in theirs.named_parameters():
        if "norm" in name or name.endswith(("conv1d.weight", "conv1d.bias", "dt_bias", ".D")):
            parameter.data += 0.3 * torch.randn_like(parameter)
    beside = {"name": "mamba2", "head_dim": 8, "state_size": 8, "groups": 2, "norm_eps": config.rms_norm_eps}
    mixer = {"name": "parallel", "state": beside, "normalize": False}
    rope = {"name": "rope", "layout": "half", "angle_dtype": "float32", "base": config.rope_parameters["rope_theta"]}
    ours = LongitudeForCausalLM(
        LongitudeConfig(
            **shape, mixer=mixer, encoding=rope, embedding_scale=config.embedding_multiplier,
            rms_norm_eps=config.rms_norm_eps, tie_word_embeddings=False,
        )
    ).eval()  # fmt: skip
    ours.load_state_dict({named(name): folded(name, x, config) for name, x in theirs.state_dict().items()})
    ids = torch.randint(1, 61, (2, 40), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        same(ours(ids).logits, theirs(ids, use_cache=False).logits, within=3e-5)  # float32 in both, by its class
    if Version(transformers.__version__) >= Version("5.23"):  # older ones mask one key too many in steps of decoding
        same(decoded(ours, ids), decoded(theirs, ids), within=3e-5)


def named(name: str) -> str:
    parts = NAMES | {"self_attn": "mixer.attention", "mamba": "mixer.state", "feed_forward": "mlp"}
    parts |= {"pre_ff_layernorm": "mlp_norm", "final_layernorm": "norm"}
    return ".".join(parts.get(part, part) for part in name.split("."))


def folded(name: str, x: torch.Tensor, config: Any) -> torch.Tensor:
    """A weight with the multipliers of what it reads and gives."""
    factors = {
        "q_proj": config.attention_in_multiplier,
        "k_proj": config.attention_in_multiplier * config.key_multiplier,
        "v_proj": config.attention_in_multiplier,
        "o_proj": config.attention_out_multiplier,
        "out_proj": config.ssm_out_multiplier,
        "gate_proj": config.mlp_multipliers[0],
        "down_proj": config.mlp_multipliers[1],
        "lm_head": config.lm_head_multiplier,
    }
    if "in_proj" in name:
        widths = [config.mamba_d_ssm] * 2 + [config.mamba_n_groups * config.mamba_d_state] * 2 + [config.mamba_n_heads]
        rows = torch.tensor(config.ssm_multipliers).repeat_interleave(torch.tensor(widths))
        return x * rows[:, None] * config.ssm_in_multiplier
    return x * next((factor for part, factor in factors.items() if part in name.split(".")), 1.0)


def test_a_state_that_reads_positions_continues_after_the_cache():
    """No registered one reads them beside attention; one of a user may."""
    read = []

    class Places(StateMixer):
        dim = 16

        def mix(self, x, state, inputs):
            read.append(inputs.positions.tolist())
            return torch.zeros_like(x), (x[:, -1:],)

    layer = lg.mixer("parallel", **SIZES).double()
    layer.state, cache = Places(), layer.cache_layer()
    for count in (3, 1, 2):
        layer(random(1, count, 16), cache=cache)
    assert read == [[0, 1, 2], [3], [4, 5]]


def model(**mixer: Any) -> LongitudeForCausalLM:
    shape = {"vocab_size": 11, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 4}
    config: dict[str, Any] = {name: mixer.pop(name) for name in ("qk_norm", "short_conv") if name in mixer}
    return LongitudeForCausalLM(LongitudeConfig(**shape, **config, mixer={"name": "parallel", **mixer}))


def test_options_of_a_config_reach_its_attention():
    made = model(qk_norm=True, attention={"name": "window", "size": 3}, state="retention").model.layers[0].mixer
    assert made.attention.q_norm is not None and made.attention.size == 3 and type(made.state) is lg.recurrent.Retention
    encoded = lg.LongitudeConfig(
        hidden_size=64, encoding="rope", mixer={"name": "parallel", "attention": "latent"}
    ).encoding
    assert encoded["head_dim"] == lg.attention.LatentAttention(64, 4).rope_dim != 16


def test_a_label_gives_options_to_both():
    label = "rope+parallel:attention=window,attention.size=3,state.state_size=8,normalize=false"
    mixer = LongitudeConfig(hidden_size=64, **parse_label(label).options(4)).mixer
    assert (mixer["attention"]["name"], mixer["attention"]["size"]) == ("window", 3)
    assert (mixer["state"]["name"], mixer["state"]["state_size"], mixer["normalize"]) == ("mamba2", 8, False)


def other_cache() -> None:
    layer, other = lg.mixer("parallel", **SIZES), lg.MultiHeadAttention(16, 4, 2)
    cache = other.cache_layer()
    other(random(1, 3, 16, dtype=torch.float32), cache=cache)
    layer(random(1, 1, 16, dtype=torch.float32), cache=cache)


test_wrong_options = refused_calls(
    [
        (lambda: lg.mixer("parallel", **SIZES, attention="parallel"), "attention", "'parallel'"),
        (lambda: lg.mixer("parallel", **SIZES, state="performer"), "state", "'performer'"),
        (lambda: lg.mixer("parallel", **SIZES, state={"name": "mamba2", "expnd": 2}), "'expand'"),
        (lambda: model(short_conv="kv", attention={"name": "attention", "short_conv": ["input"]}), "short_conv"),
        (lambda: model(qk_norm=True, attention="performer"), "qk_norm"),
        (other_cache, "cache"),
        (
            lambda: LongitudeConfig(**parse_label("parallel:attention.siz=3,attention=window").options(4)),
            "'siz'",
            "'size'",
        ),
    ]
)
