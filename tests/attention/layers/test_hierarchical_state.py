"""Hierarchical attention as a layer: its state, how it begins; laws try it in chunks."""

from itertools import pairwise

import pytest
import torch
from torch import Tensor

import longitude as lg
from longitude.attention.layers import hierarchical
from longitude.attention.layers.hierarchical import HierarchicalAttention
from tests.support import close, random, refused_calls

WIDTH, HEADS, KV_HEADS = 16, 4, 2
ENCODINGS = {
    "rotation": lambda: lg.Rotary(WIDTH // HEADS, "half"),
    "bias": lambda: lg.T5Bias(HEADS, num_buckets=8, max_distance=16),
}


def layer(encoding: str = "rotation", filled: bool = True, **options) -> HierarchicalAttention:
    torch.manual_seed(2)
    options = {"window": 5, "encoding": ENCODINGS[encoding](), **options}
    made = HierarchicalAttention(WIDTH, HEADS, KV_HEADS, **options).double()
    if filled:
        for parameter in made.parameters():
            parameter.data += 0.3 * torch.randn_like(parameter)
    return made


def tokens(batch: int = 3, length: int = 45) -> Tensor:
    return random(batch, length, WIDTH, seed=length)


def cache_after(mixer: HierarchicalAttention, x: Tensor, size: int = 45):
    """The cache that holds x, in calls of `size` tokens."""
    cache = mixer.cache_layer()
    for part in x.split(size, 1):
        mixer(part, cache=cache)
    return cache


@pytest.mark.parametrize(("encoding", "chunk"), [("rotation", 1), ("rotation", 4), ("bias", 2), ("bias", 32)])
@torch.no_grad()
def test_calls_with_documents(encoding: str, chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Documents that end in different calls, padding within one, and rows with different numbers of tokens before."""
    monkeypatch.setattr(hierarchical, "CHUNK", chunk)
    mixer, x, documents = layer(encoding), tokens(), torch.zeros(3, 45, dtype=torch.long)
    documents[0, 25:], documents[1, 3:5], documents[1, 24:], documents[2, :14] = 1, -1, 1, -1
    cache = mixer.cache_layer()
    calls = pairwise((0, 13, 30, 31, 43, 44, 45))
    outs = [mixer(x[:, a:b], cache=cache, documents=documents[:, :b]) for a, b in calls]
    close(torch.cat(outs, 1), mixer(x, documents=documents), atol=1e-10)
    whole = mixer.cache_layer()
    mixer(x[:, :40], cache=whole, documents=documents[:, :40])
    close(mixer(x[:, 40:], cache=whole, documents=documents), mixer(x, documents=documents)[:, 40:], atol=1e-10)


def test_state_is_the_binary_counter() -> None:
    """After 204 tokens with a window of 5 the blocks are the digits of 6 chunks, averages of the tokens' own keys."""
    mixer, x = layer(), tokens(length=204)
    state = cache_after(mixer, x, 41).state
    keys = mixer.k_proj(x).view(3, 204, KV_HEADS, -1).transpose(1, 2)
    assert state.seen.tolist() == [204] * 3
    assert state.blocks.keys.shape[2] == 3
    for level, (start, stop) in {2: (0, 128), 1: (128, 192)}.items():
        close(state.blocks.keys[:, :, level], keys[:, :, start:stop].mean(2), atol=1e-14)
        assert state.blocks.ends[:, 0, level].tolist() == [[start, stop - 1]] * 3
    assert not state.blocks.keys[:, :, 0].any()
    close(state.keys[:, :, -12:, : WIDTH // HEADS], keys[:, :, 192:], atol=1e-14)  # the last 7, and a window of 5


def test_the_gate_opens_to_the_window() -> None:
    """sigmoid(2) of a new layer's output is of the window."""
    assert layer(filled=False).gate_bias.tolist() == [2.0] * HEADS


def after_45_tokens(batch: int = 3, **other):
    """A call of another layer, or of another batch, with the cache of a layer."""
    return lambda: layer(**other)(tokens(batch), cache=cache_after(layer(), tokens()))


test_refusals = refused_calls(
    [(after_45_tokens(window=6), "cache"), (after_45_tokens(2), "cache"), (after_45_tokens(encoding="bias"), "cache")]
)
