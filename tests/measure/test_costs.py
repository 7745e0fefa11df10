"""`longitude measure --plan`: a Llama 3 8B at 131,072 tokens, planned from its config.json."""

import json

import pytest
from transformers import GPT2Config

from longitude.measure import plan as module
from longitude.measure.config import MeasureConfig
from longitude.measure.plan import costs
from longitude.models import LongitudeConfig
from longitude.runs.costs import H100

LLAMA3 = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 128256, "hidden_size": 4096}
LLAMA3 |= {"intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8}
LLAMA3 |= {"max_position_embeddings": 131072, "rope_theta": 500000.0, "torch_dtype": "bfloat16"}
MATRICES = 32 * (2 * 4096**2 + 2 * 4096 * 1024 + 3 * 4096 * 14336) + 128256 * 4096


@pytest.fixture
def llama3(tmp_path, monkeypatch):
    """A folder with a config.json and nothing else, on a machine of 10^12 FLOP/s."""
    monkeypatch.setattr(module, "flops_per_second", lambda *_: 1e12)
    (tmp_path / "llama3").mkdir()
    (tmp_path / "llama3" / "config.json").write_text(json.dumps(LLAMA3))
    return str(tmp_path / "llama3")


@pytest.mark.slow
def test_8b_at_128k(llama3) -> None:
    options = {"lengths": (8192, 131072), "documents": 2, "methods": ("non-overlapping",)}
    short, long = costs(MeasureConfig(**options), (llama3,))
    for cost, length in ((short, 8192), (long, 131072)):
        window = 2 * MATRICES * length + 32 * 4 * 4096 * length * (length + 1) / 2
        assert cost.tokens == 2 * 131072
        assert cost.flops == pytest.approx(2 * 131072 / length * window, rel=1e-3)
        assert cost.seconds == pytest.approx(cost.flops / 1e12) and cost.h100_seconds == cost.flops / H100
    assert long.memory.weights == pytest.approx(16.06e9, rel=1e-3)
    assert long.memory.cache == 2 * 2 * 32 * 8 * 128 * 131072  # keys and values, two bytes each


SHAPE = {"vocab_size": 100, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}


@pytest.mark.parametrize(
    "config",
    [
        GPT2Config(**SHAPE, n_positions=16, bos_token_id=1, eos_token_id=2),
        LongitudeConfig(**SHAPE, encoding={"name": "learned", "max_length": 16}),
    ],
    ids=lambda config: config.model_type,
)
def test_no_window_is_timed_beyond_a_table_of_positions(config, tmp_path) -> None:
    """Longer windows are not measured either."""
    config.save_pretrained(tmp_path)
    for cost in costs(MeasureConfig(lengths=(16, 64), documents=1), (str(tmp_path),)):
        assert cost.reason == "" and cost.seconds
