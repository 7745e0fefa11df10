"""Decoding reads nothing back from the device, as capture in a CUDA graph asks: on "meta" a number that is read raises."""

import contextlib

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

import longitude as lg

ENCODINGS = [*"nope rope xpos alibi t5 kerple_log fire cope fox path pope".split(), ["rope", "ssmax"]]


@pytest.fixture(autouse=True)
def _without_autocast(monkeypatch):
    """Which "meta" does not have."""
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda *device: False)
    monkeypatch.setattr(torch, "autocast", lambda *device, **options: contextlib.nullcontext())


class Copies(TorchFunctionMode):
    """What is copied from the host, with the host waiting: lists and numbers, or tensors of the CPU."""

    def __init__(self):
        super().__init__()
        self.found = []

    def __torch_function__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        named = getattr(function, "__name__", "")
        copies = named in ("tensor", "as_tensor", "new_tensor", "to", "cuda", "copy_")
        if copies and isinstance(out, Tensor) and not out.is_cpu:
            sources = args[named == "copy_" :]
            here = sources and isinstance(sources[0], Tensor) and not sources[0].is_cpu
            if not here or named == "new_tensor":
                self.found.append(named)
        return out


@pytest.mark.one_in(4)
@pytest.mark.parametrize("encoding", ENCODINGS, ids=str)
@torch.no_grad()
def test_a_decoding_step_reads_nothing(encoding):
    sizes = {"vocab_size": 9, "hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2}
    model = lg.LongitudeForCausalLM(lg.LongitudeConfig(**sizes, num_hidden_layers=2, encoding=encoding))
    model = model.to("meta", torch.bfloat16).eval()
    out = model(torch.zeros(1, 6, dtype=torch.long, device="meta"), use_cache=True)
    for _ in range(3):
        token = torch.zeros(1, 1, dtype=torch.long, device="meta")
        with Copies() as copies:
            out = model(token, cache=out.cache, use_cache=True)
        assert copies.found == []
    assert out.logits.shape == (1, 1, 9) and out.cache.get_seq_length() == 9
