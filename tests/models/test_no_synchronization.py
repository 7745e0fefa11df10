"""Decoding reads nothing back from the device, as capture in a CUDA graph asks: on "meta" a number that is read raises."""

import contextlib

import pytest
import torch

import longitude as lg

ENCODINGS = [
    "none",
    "rope",
    "xpos",
    "alibi",
    "t5",
    "kerple_log",
    "fire",
    "cope",
    "fox",
    "path",
    "pope",
    ["rope", "ssmax"],
]


@pytest.fixture(autouse=True)
def _without_autocast(monkeypatch):
    """Which "meta" does not have."""
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda *device: False)
    monkeypatch.setattr(torch, "autocast", lambda *device, **options: contextlib.nullcontext())


@pytest.mark.parametrize("encoding", ENCODINGS, ids=str)
@torch.no_grad()
def test_a_decoding_step_reads_nothing(encoding):
    config = {
        "vocab_size": 9,
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    }
    model = lg.LongitudeForCausalLM(lg.LongitudeConfig(**config, encoding=encoding)).to("meta", torch.bfloat16).eval()
    out = model(torch.zeros(1, 6, dtype=torch.long, device="meta"), use_cache=True)
    for _ in range(3):
        token = torch.zeros(1, 1, dtype=torch.long, device="meta")
        out = model(token, past_key_values=out.past_key_values, use_cache=True)
    assert out.logits.shape == (1, 1, 9) and out.past_key_values.get_seq_length() == 9


def test_what_is_read_raises():
    """Otherwise the test above could not fail."""
    with pytest.raises(RuntimeError):
        torch.zeros(1, device="meta").item()
