"""Hierarchical attention as a layer: its state, how it begins, learned merges; laws try it in chunks."""

from itertools import pairwise

import pytest
import torch
from torch import Tensor

import longitude as lg
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


@pytest.mark.parametrize("encoding", ENCODINGS)
@torch.no_grad()
def test_a_new_document_may_run_before_the_old_one(encoding: str) -> None:
    """Runs are grouped by length: the new document of the second row is in a group before that of its old one."""
    mixer, x, documents = layer(encoding), tokens(2), torch.zeros(2, 45, dtype=torch.long)
    documents[0, 25:], documents[1, 3:5], documents[1, 24:] = 1, -1, 1
    cache = mixer.cache_layer()
    calls = pairwise((0, 13, 43, 44, 45))
    outs = [mixer(x[:, a:b], cache=cache, documents=documents[:, :b]) for a, b in calls]
    real = documents >= 0
    close(torch.cat(outs, 1)[real], mixer(x, documents=documents)[real], atol=1e-10)


def test_state_is_the_binary_counter() -> None:
    """After 45 tokens with a window of 5 the blocks are the digits of 40 = 32 + 8, averages of the tokens' own keys."""
    mixer, x = layer(), tokens()
    state = cache_after(mixer, x, 1).state
    keys = mixer.k_proj(x).view(3, 45, KV_HEADS, -1).transpose(1, 2)
    assert state.seen.tolist() == [45] * 3
    assert state.block_keys.shape[2] == 6
    for level, (start, stop) in {5: (0, 32), 3: (32, 40)}.items():
        close(state.block_keys[:, :, level], keys[:, :, start:stop].mean(2), atol=1e-14)
        assert state.ends[:, level].tolist() == [[start, stop - 1]] * 3
    for level in (0, 1, 2, 4):
        assert not state.block_keys[:, :, level].any()
    close(state.keys, keys[:, :, 40:], atol=1e-14)  # token 40 in slot 0


# ---- the layer -------------------------------------------------------------------------------------------------------
def test_as_it_begins() -> None:
    """The gate opens to the window at sigmoid(2), and a learned merge is the average."""
    mixer, x = layer(filled=False), tokens()
    assert mixer.gate_bias is not None and mixer.gate_bias.tolist() == [2.0] * HEADS
    learned = layer(filled=False, merge="learned")
    learned.load_state_dict(mixer.state_dict(), strict=False)
    close(learned(x), mixer(x), atol=1e-14)


def test_learned_merge() -> None:
    """A_l [left; right] with a matrix for each level, the average above; each that is used gets a gradient."""
    mixer, x = layer(merge="learned", merge_levels=7), tokens()
    mixer(x).square().sum().backward()
    merge = mixer.merge_keys
    assert merge is not None and merge.change.grad is not None
    assert [bool(g.any()) for g in merge.change.grad] == [True] * 5 + [False] * 2  # 40 tokens before the window: 2^5
    left, right = torch.randn(2, 3, WIDTH // HEADS, dtype=torch.float64)
    by_hand = torch.cat([left, right], -1) @ merge.change[1].T + (left + right) / 2
    torch.testing.assert_close(merge(2, left, right), by_hand)
    torch.testing.assert_close(merge(8, left, right), (left + right) / 2)


def calling(batch: int = 3, **options):
    return lambda: layer()(tokens(batch), **options)


def after_45_tokens(batch: int = 3, **other):
    """A call of another layer, or of another batch, with the cache of a layer."""
    return lambda: layer(**other)(tokens(batch), cache=cache_after(layer(), tokens()))


test_refusals = refused_calls(
    [
        (calling(positions=torch.zeros(3, 45, 2, dtype=torch.long)), "[3, 45, 2]"),
        (calling(cache=object()), "cache", "HierarchicalAttention", "StateLayer", "cache_layer"),
        (after_45_tokens(window=6), "cache"),
        (after_45_tokens(2), "cache"),
        (after_45_tokens(encoding="bias"), "cache"),
    ]
)
