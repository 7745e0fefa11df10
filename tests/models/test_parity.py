"""Given the weights of another's model, its logits: transformers' Llama and SmolLM3."""

from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, SmolLM3Config, SmolLM3ForCausalLM

from longitude.checkpoints.config import from_hugging_face
from longitude.models import LongitudeConfig, LongitudeForCausalLM
from tests.support import in_pieces

NAMES = {"input_layernorm": "mixer_norm", "post_attention_layernorm": "mlp_norm", "self_attn": "mixer"}
NAMES |= {f"{name}_proj": name for name in ("gate", "up", "down")}
SMALL: dict[str, Any] = {"vocab_size": 61, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3}
SMALL |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128, "initializer_range": 0.3}
BASE: dict[str, Any] = {"rope_theta": 10_000.0}


def llama(rope: dict | None = None, **options) -> LlamaForCausalLM:
    torch.manual_seed(0)
    rope = rope or {"rope_type": "default", **BASE}
    return LlamaForCausalLM(LlamaConfig(**SMALL | {"rope_parameters": rope} | options)).eval()


def ours(theirs) -> LongitudeForCausalLM:
    """Our model with their weights, and the rotation that we read from their config."""
    c = theirs.config
    options = from_hugging_face(c).options(c.hidden_size // c.num_attention_heads)
    rotation = {"name": "rope", "layout": "half", "angle_dtype": "float32", **options}
    rotates = getattr(c, "no_rope_layers", [1] * c.num_hidden_layers)  # SmolLM3: 0 where a layer does not rotate
    config = LongitudeConfig(
        **{name: getattr(c, name) for name in SMALL if name != "initializer_range"},
        tie_word_embeddings=c.tie_word_embeddings, encodings=[rotation if t else "nope" for t in rotates],
        embedding_scale=1.0, rms_norm_eps=c.rms_norm_eps,
    )  # fmt: skip
    model = LongitudeForCausalLM(config).eval()
    weights = {}
    for name, weight in theirs.state_dict().items():
        weights[".".join(NAMES.get(part, part) for part in name.split("."))] = weight
    model.load_state_dict(weights)
    return model


def same(mine: torch.Tensor, theirs: torch.Tensor, within: float = 1e-5) -> None:
    """Up to float32's roundings, measured in standard deviations of the logits."""
    assert theirs.std() > 0.5  # not a comparison of zeros
    torch.testing.assert_close(mine, theirs, atol=within * float(theirs.std()), rtol=within)


@pytest.mark.parametrize(("kv_heads", "base", "tied"), [(4, 10_000.0, True), (1, 500_000.0, False)])
@torch.no_grad()
def test_llama(kv_heads, base, tied, ids):
    rope = {"rope_type": "default", "rope_theta": base}
    theirs, x = llama(rope, num_key_value_heads=kv_heads, tie_word_embeddings=tied), ids(2, 50)
    same(ours(theirs)(x).logits, theirs(x).logits)


ORIGINAL = "original_max_position_embeddings"
ROPES = {
    "default": {"rope_theta": 500.0},
    "yarn": {**BASE, "factor": 8.0, ORIGINAL: 16},
    "llama3": {**BASE, "factor": 8.0, ORIGINAL: 64, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
}


PADDED = (torch.arange(40) >= torch.tensor([[0], [9]])).long()


@torch.no_grad()
def decoded(model, x: torch.Tensor) -> torch.Tensor:
    """Logits of the real tokens of rows padded on the left [2, 40], with a cache, in pieces and token by token."""
    positions, cuts = (PADDED.cumsum(1) - 1).clamp(min=0), (12, *range(13, 21), 33, 40)
    return in_pieces(model, x, cuts, attention_mask=PADDED, position_ids=positions)[PADDED.bool()]


@pytest.mark.parametrize("name", ROPES)
@torch.no_grad()
def test_llama_padded_and_cached(name, ids):
    theirs, x = llama({"rope_type": name} | ROPES[name]), ids(2, 40)
    mine, expected = ours(theirs), decoded(theirs, x)
    same(decoded(mine, x), expected)
    same(mine(x, attention_mask=PADDED).logits[PADDED.bool()], expected)  # positions from the mask


@pytest.mark.parametrize("rotates", [[1, 0, 1], [0, 1, 1], [1, 1, 0]])
@torch.no_grad()
def test_smollm3(rotates, ids):
    """Layers without rotation among layers that rotate."""
    torch.manual_seed(0)
    rope = {"rope_type": "default", "rope_theta": 5_000.0}
    options = {"rope_parameters": rope, "no_rope_layers": rotates, "tie_word_embeddings": False}
    config = SmolLM3Config(**SMALL, **options, pad_token_id=0)
    theirs, x = SmolLM3ForCausalLM(config).eval(), ids(2, 40)
    mine = ours(theirs)
    same(mine(x).logits, theirs(x).logits)
    config.no_rope_layers = [1, 1, 1]
    assert (ours(theirs)(x).logits - mine(x).logits).abs().max() > 0.1
