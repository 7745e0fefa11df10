"""Small models to ask questions of, and tokens for them."""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch

import longitude as lg
from longitude.models import LongitudeConfig, LongitudeForCausalLM, LongitudeModel

VOCABULARY = 61
OF_DECODERS = [name for name in lg.list_encodings() if name != "convolutional"]  # it reads tokens on both sides
SMALL: dict[str, Any] = {"vocab_size": VOCABULARY, "hidden_size": 16, "num_hidden_layers": 2, "pad_token_id": 0}
SMALL |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}


def mixer_spec(name: str) -> dict[str, Any]:
    """A mixer, with a reach shorter than the texts here where it has one."""
    return {"name": name, **{"window": {"size": 5}, "chunks": {"size": 5}, "hierarchical": {"window": 4}}.get(name, {})}


@pytest.fixture
def offloading(monkeypatch: pytest.MonkeyPatch) -> None:
    """A torch for CUDA makes no stream where there is no GPU, and transformers asks for one."""
    if torch.version.cuda and not torch.cuda.is_available():
        monkeypatch.setattr(torch, "Stream", nullcontext)


@pytest.fixture
def build() -> Callable[..., Any]:
    """build("rope", kind, ...options of the config) -> a model in float64 and eval mode, encodings filled with random numbers."""

    def make(encoding="rope", kind=LongitudeForCausalLM, **options) -> Any:
        torch.manual_seed(0)
        model = kind(LongitudeConfig(encoding=encoding, **SMALL | options)).double().eval()
        for stack in model.modules():
            if isinstance(stack, LongitudeModel):
                for parameter in stack.encodings.parameters():
                    torch.nn.init.normal_(parameter, std=0.3)
        return model

    return make


@pytest.fixture
def ids() -> Callable[..., torch.Tensor]:
    """ids(batch, length, seed) -> token numbers without 0, which pads."""

    def make(batch: int = 2, length: int = 13, seed: int = 1) -> torch.Tensor:
        generator = torch.Generator().manual_seed(seed)
        return torch.randint(1, VOCABULARY, (batch, length), generator=generator)

    return make
