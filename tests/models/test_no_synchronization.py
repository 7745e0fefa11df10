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
        if (
            named in ("tensor", "as_tensor", "new_tensor", "to", "cuda", "copy_")
            and isinstance(out, Tensor)
            and not out.is_cpu
        ):
            given = args[named == "copy_" :]
            here = given and isinstance(given[0], Tensor) and not given[0].is_cpu
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


LONG = {"factor": 4.0, "original_max_length": 64}
SCALINGS = [
    {"name": "ntk", "factor": 4.0},
    {"name": "dynamic", **LONG, "max_length": 256},
    {"name": "yarn", **LONG},
    {"name": "longrope", **LONG, "short_factor": [1.0] * 8, "long_factor": [2.0] * 8},
]


@pytest.mark.parametrize("scaling", SCALINGS, ids=lambda scaling: scaling["name"])
def test_tables_of_a_scaled_rotation_copy_nothing(scaling):
    """From the second call on. Nor do those of M-RoPE, whose pairs read one axis each."""
    rope = lg.Rotary(head_dim=16, layout="half", scaling=scaling)
    mrope = lg.encoding("mrope", head_dim=16, sections=(4, 2, 2), layout="half")
    flat, axes = (torch.zeros(shape, dtype=torch.long, device="meta") for shape in (7, (1, 7, 3)))
    for _ in range(2):
        with Copies() as copies:
            rope.prepare(flat)
            mrope.prepare(axes)
    assert copies.found == []
