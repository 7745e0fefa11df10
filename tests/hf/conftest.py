"""Tiny stock models of transformers, and tokens for them."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForMaskedLM
from transformers.trainer_utils import set_seed

SHAPE: dict[str, Any] = {
    "vocab_size": 50, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4,
    "max_position_embeddings": 64, "initializer_range": 0.4, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
FAST = {"num_key_value_heads": 2, "rope_parameters": {"rope_type": "default", "rope_theta": 500.0}}
EXPERTS = FAST | {"head_dim": 4, "num_local_experts": 2}
MODELS: dict[str, dict[str, Any]] = {
    "llama": FAST,
    "mistral": {"num_key_value_heads": 2, "sliding_window": 5},
    "gpt_neox": {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}},
    "llama4_text": EXPERTS
    | {"intermediate_size_mlp": 24, "no_rope_layers": [1, 0], "attention_chunk_size": 5, "floor_scale": 4},
    "gpt_oss": EXPERTS | {"sliding_window": 5, "num_experts_per_tok": 1},
}


@pytest.fixture(params=["llama", "mistral", "gpt_neox"])
def kind(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def stock() -> Callable[..., Any]:
    """stock(kind, backend) -> a model in float64, the same for every backend; each with a config of its own."""

    def make(kind: str = "llama", backend: str = "sdpa", **more: Any) -> Any:
        config = AutoConfig.for_model(kind, **{**SHAPE, **MODELS.get(kind, {}), **more})
        set_seed(0)
        auto = AutoModelForMaskedLM if kind == "bert" else AutoModelForCausalLM
        experts = {}
        if kind == "gpt_oss":  # its sinks are in no function of torch's, and its experts in none of float64
            backend, experts = "eager" if backend == "sdpa" else backend, {"experts_implementation": "eager"}
        model = auto.from_config(config, attn_implementation=backend, **experts).double().eval()
        for layer in model.model.layers if experts else ():
            torch.nn.init.normal_(layer.self_attn.sinks)
        return model

    return make


@pytest.fixture
def ids() -> Tensor:
    return torch.randint(3, 50, (2, 17), generator=torch.Generator().manual_seed(1))


@pytest.fixture
def mask() -> Tensor:
    """Left padding of the first row: six tokens."""
    return (torch.arange(17) >= torch.tensor([[6], [0]])).long()
