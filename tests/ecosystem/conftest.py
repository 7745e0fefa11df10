"""Small models, a tokenizer made here, and texts, for libraries that people train and serve with."""

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

import longitude as lg
import longitude.hf

LETTERS = "abcdefghij"
SIZES = {"vocab_size": 16, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4, "pad_token_id": 0}


@pytest.fixture
def tokenizer() -> PreTrainedTokenizerFast:
    """A word for each of ten letters: nothing is fetched."""
    words = {word: n for n, word in enumerate(["<pad>", "<eos>", "<unk>", *LETTERS])}
    made = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    named = {"pad_token": "<pad>", "eos_token": "<eos>", "unk_token": "<unk>"}
    return PreTrainedTokenizerFast(tokenizer_object=made, **named)


@pytest.fixture
def texts() -> list[str]:
    return [" ".join(LETTERS[(i * j) % 10] for j in range(3 + i % 5)) for i in range(24)]


def ours(*mixers: str, encoding: str = "auto") -> lg.LongitudeForCausalLM:
    torch.manual_seed(0)
    return lg.LongitudeForCausalLM(lg.LongitudeConfig(**SIZES, encoding=encoding, mixers=list(mixers) or None))


def stock() -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**SIZES, intermediate_size=32, attn_implementation="longitude"))


MODELS = {
    "ours": ours,
    "recurrences": lambda: ours("mamba2", "rwkv6"),
    "hybrid": lambda: ours("mamba2", "attention"),
    "stock": stock,
}


@pytest.fixture(params=MODELS)
def model(request: pytest.FixtureRequest):
    """Ours with attention, with recurrences and with both, and a stock Llama on our attention."""
    return MODELS[request.param]()
