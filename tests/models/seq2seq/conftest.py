"""Encoder-decoders to ask questions of, and pairs of texts for them."""

from collections.abc import Callable

import pytest
import torch

from longitude.models import LongitudeConfig, LongitudeForSeq2SeqLM

SMALL = {
    "vocab_size": 61,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
PAST = ("cope", "fox", "path", "path_fox", "xpos")
"""Encodings of the past alone: for a decoder whose encoder has another."""


@pytest.fixture
def build() -> Callable[..., LongitudeForSeq2SeqLM]:
    """build("rope", ...options of the config) -> a model in float64 and eval mode, its encodings filled with random numbers.

    It does not fall into repeating one token, which would hide anything: it is untied, and cross-attention is loud."""

    def make(encoding="rope", **options) -> LongitudeForSeq2SeqLM:
        torch.manual_seed(0)
        if encoding in PAST:
            options.setdefault("encoder_encoding", "alibi")
        options.setdefault("tie_word_embeddings", False)
        model = LongitudeForSeq2SeqLM(LongitudeConfig(encoding=encoding, **{**SMALL, **options})).double().eval()
        for stack in (model.encoder, model.decoder):
            for parameter in stack.encodings.parameters():
                torch.nn.init.normal_(parameter, std=0.3)
        for block in model.decoder.layers:
            block.cross.q_proj.weight.data *= 2
            block.cross.o_proj.weight.data *= 6
        return model

    return make


@pytest.fixture
def pair(ids) -> Callable[..., tuple[torch.Tensor, torch.Tensor]]:
    """pair(source, target, batch) -> tokens of a source and of a target, none of them special."""

    def make(source: int = 11, target: int = 9, batch: int = 2) -> tuple[torch.Tensor, torch.Tensor]:
        return ids(batch, source).clamp(min=3), ids(batch, target, seed=2).clamp(min=3)

    return make


@pytest.fixture
def generate() -> Callable[..., torch.Tensor]:
    """generate(model, x, new) -> the start and exactly `new` tokens after it, by argmax unless options say otherwise."""

    def make(model, x, new: int = 8, **options) -> torch.Tensor:
        return model.generate(x, max_new_tokens=new, min_new_tokens=new, **{"do_sample": False, **options})

    return make
