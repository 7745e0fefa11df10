"""Trained on several machines, every parameter takes part: DistributedDataParallel waits for the gradient of each."""

import os
import subprocess
import sys

import pytest

import longitude as lg

WORKER = """
import torch
import torch.distributed as dist
import longitude as lg

dist.init_process_group("gloo", rank=0, world_size=1, init_method="file://" + {file!r})
config = lg.LongitudeConfig(
    vocab_size=31, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, mixer={mixer!r}
)
model = torch.nn.parallel.DistributedDataParallel(lg.LongitudeForCausalLM(config))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for length in (2, 5, 12):
    ids = torch.arange(2 * length).view(2, length) % 31
    for _ in range(2):  # the second backward is the one that misses a gradient of the first
        optimizer.zero_grad()
        model(ids, labels=ids, skip_logits=True).loss.backward()
        assert all(p.grad is not None for p in model.parameters())
        optimizer.step()
dist.destroy_process_group()
"""
MIXERS = [{"name": name} | ({"size": 16} if name == "window" else {}) for name in lg.list_mixers()]


@pytest.mark.slow
@pytest.mark.parametrize("mixer", MIXERS, ids=lambda mixer: mixer["name"])
def test_every_parameter_takes_part(mixer, tmp_path):
    """A window of 16 or of 256 holds all of 2, 5 or 12 tokens."""
    if mixer["name"] == "hierarchical":
        mixer = mixer | {"merge": "learned"}
    program = WORKER.format(file=str(tmp_path / "store"), mixer=mixer)
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=os.environ, timeout=300)
    assert ran.returncode == 0, ran.stderr
