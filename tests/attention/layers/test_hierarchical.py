"""Hierarchical attention equals its definition, computed here query by query, and full attention where it must."""

import math
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

import longitude as lg
from longitude.attention.layers import hierarchical as module
from longitude.attention.layers.hierarchical import HierarchicalAttention
from longitude.attention.state_mixer import StateInputs, document_flags
from longitude.positions.composed import compose
from longitude.positions.coordinates import explicit
from longitude.testing import fill
from tests.support import close, gradients, heads, random, refused_calls

HEADS, KV_HEADS, DIM = 4, 2, 8
ENCODINGS = {
    "nothing": lambda: None,
    "rotation": lambda: lg.Rotary(DIM, "interleaved"),
    "rotation of some, by halves": lambda: lg.Rotary(DIM, "half", rotary_dim=4, base=100.0),
    "fixed bias": lambda: lg.ALiBi(HEADS),
    "learned bias": lambda: lg.T5Bias(HEADS, num_buckets=8, max_distance=32),
    "both": lambda: [lg.Rotary(DIM, "half"), lg.Kerple(HEADS)],
}


def built(name: str):
    return fill(compose(ENCODINGS[name]()).double(), seed=5)


def numbers(length: int, batch: int = 2, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    """q, k, v, gate."""
    gate = random(batch, HEADS, length, seed=9, dtype=dtype).sigmoid()
    return [*heads(length, batch, HEADS, KV_HEADS, DIM, dtype=dtype), gate]


# ---- the definition, in other words ----------------------------------------------------------------------------------
def rotate(encoding, x: Tensor, positions: Tensor) -> Tensor:
    """x [B, H, n, DIM] at positions [n] that may lie between two tokens, by the angles themselves."""
    for member in encoding:
        if isinstance(member, lg.Rotary):
            pairs = member.rotary_dim // 2
            angle = positions[:, None] * member.base ** (-torch.arange(pairs, dtype=torch.float64) / pairs)
            part = x[..., : 2 * pairs].unflatten(-1, (2, pairs) if member.layout == "half" else (pairs, 2))
            where = -2 if member.layout == "half" else -1
            a, b = part.unbind(where)
            rotated = torch.stack([a * angle.cos() - b * angle.sin(), a * angle.sin() + b * angle.cos()], where)
            x = torch.cat([rotated.flatten(-2), x[..., 2 * pairs :]], -1)
    return x


def bias(encoding, offsets: Tensor) -> Tensor | float:
    """[H, n]; between two offsets the mean of both."""
    total: Tensor | float = 0.0
    for member in encoding:
        if isinstance(member, lg.ALiBi):
            total = total - torch.tensor([2.0**-2, 2.0**-4, 2.0**-6, 2.0**-8], dtype=torch.float64)[:, None] * offsets
        elif not isinstance(member, lg.Rotary):
            near = torch.stack([offsets.floor(), offsets.ceil()]).long()
            total = total + member.bias_at(near).mean(1)
    return total


def binary_blocks(a: int) -> list[tuple[int, int]]:
    """The largest block first: as many tokens as the highest power of two that still fits."""
    blocks, start = [], 0
    while start < a:
        size = 2 ** int(math.log2(a - start))
        blocks.append((start, start + size))
        start += size
    return blocks


def definition(q, k, v, gate, window, encoding=()) -> Tensor:
    k, v = (x.repeat_interleave(HEADS // KV_HEADS, 1) for x in (k, v))
    every = torch.arange(q.shape[2], dtype=torch.float64)
    q, tokens = rotate(encoding, q, every), rotate(encoding, k, every)
    outs = []
    for t in range(q.shape[2]):
        a = max(0, t - window + 1)
        near = (tokens[:, :, a : t + 1] @ q[:, :, t, :, None])[..., 0] / DIM**0.5 + bias(encoding, t - every[a : t + 1])
        parts, near_v = binary_blocks(a), v[:, :, a : t + 1]
        if not parts:
            outs.append((near.softmax(-1)[..., None] * near_v).sum(2))
            continue
        centres = torch.tensor([s + (e - s - 1) / 2 for s, e in parts], dtype=torch.float64)
        far_k, far_v = (torch.stack([x[:, :, s:e].mean(2) for s, e in parts], 2) for x in (k, v))
        far = (rotate(encoding, far_k, centres) @ q[:, :, t, :, None])[..., 0] / DIM**0.5 + bias(encoding, t - centres)
        far = far + torch.tensor([math.log(e - s) for s, e in parts], dtype=torch.float64)
        g = gate[:, :, t, None]
        both = [(s.softmax(-1)[..., None] * x).sum(2) for s, x in ((near, near_v), (far, far_v))]
        outs.append(g * both[0] + (1 - g) * both[1])
    return torch.stack(outs, 2)


def hierarchical(q, k, v, gate, *, window, encoding=None, documents=None, positions=0) -> Tensor:
    """What the layer does between its projections."""
    encoding, length = compose(encoding), q.shape[2]
    at = explicit(positions, length, q.device)
    flags = (None, None) if documents is None else document_flags(documents)
    inputs = StateInputs(*flags, at, encoding, encoding.prepare(at, None, q.dtype), documents, False)
    layer = SimpleNamespace(window=window, factor=q.shape[3] ** -0.5, dropping=0.0, backend="auto")
    return module.attend_tokens(layer, q, k, v, gate, inputs)[0]


@pytest.mark.parametrize(("share", "expected"), [(1.0, 7.0), (0.0, 2.5)])
def test_zero_keys(share: float, expected: float) -> None:
    q = torch.zeros(1, 1, 9, 2, dtype=torch.float64)
    v = torch.arange(9.0, dtype=torch.float64).view(1, 1, 9, 1).expand(1, 1, 9, 2)
    out = hierarchical(q, q, v, torch.full((1, 1, 9), share, dtype=torch.float64), window=3)
    close(out[0, 0, 8], torch.full((2,), expected, dtype=torch.float64), atol=1e-14)
    early = torch.tensor([0.0, 0.5, 1.0], dtype=torch.float64)  # the gate is 1 without blocks
    close(out[0, 0, :3, 0], early, atol=1e-14)


# ---- the definition --------------------------------------------------------------------------------------------------
@pytest.mark.one_in(3)
@pytest.mark.parametrize("name", ENCODINGS)
@pytest.mark.parametrize(("length", "window"), [(1, 1), (7, 3), (24, 5)])
def test_output_and_gradients(name: str, length: int, window: int) -> None:
    inputs = [x.requires_grad_() for x in numbers(length, batch=1)]
    encoding = built(name)
    ours = hierarchical(*inputs, window=window, encoding=encoding)
    theirs = definition(*inputs, window, encoding)
    close(ours, theirs)
    wanted = [*inputs, *encoding.parameters()]
    close(gradients(ours, wanted), gradients(theirs, wanted), atol=1e-11)


@pytest.mark.parametrize("chunk", [32, 1, 8])
def test_longer_than_a_chunk(chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "CHUNK", chunk)
    inputs = numbers(71, batch=1)
    ours = hierarchical(*inputs, window=33, encoding=built("rotation"))
    close(ours, definition(*inputs, 33, built("rotation")))


# ---- documents and positions -----------------------------------------------------------------------------------------
@pytest.mark.parametrize(("name", "window"), [("rotation", 1), ("fixed bias", 3), ("rotation", 50)])
def test_documents_as_a_compiler_sees_them(name: str, window: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a look at where they end: the same, gradients too, with numbers that come back."""
    inputs = [x.requires_grad_() for x in numbers(40)]
    documents = torch.zeros(2, 40, dtype=torch.long)
    documents[0, :7], documents[0, 20:] = -1, 1
    documents[1, 11:30], documents[1, 36:] = 3, -1
    answers = []
    for compiling in (False, True):
        with monkeypatch.context() as patch:
            if compiling:
                patch.setattr(module, "readable", lambda *tensors: False)
            out = hierarchical(*inputs, window=window, encoding=built(name), documents=documents)
        answers.append([out, *gradients(out, inputs)])
    close(*answers, atol=1e-11)


@pytest.mark.parametrize("name", ["rotation", "learned bias"])
def test_positions_move_together(name: str) -> None:
    """Far away, as numbers of each row, and with gaps: a block stands half way between its first and last token."""
    inputs, options = numbers(40), {"window": 3, "encoding": built(name)}
    near = hierarchical(*inputs, **options)
    rows = torch.arange(40) + torch.tensor([[5], [90_000]])
    close(hierarchical(*inputs, positions=rows, **options), near, atol=1e-9)
    with_gap = torch.arange(40) * 3 // 2
    gaps = hierarchical(*inputs, positions=with_gap, **options)
    assert not torch.allclose(gaps, near)
    close(hierarchical(*inputs, positions=with_gap + 11, **options), gaps)


# ---- the state of a layer --------------------------------------------------------------------------------------------
def layer(encoding: str = "rotation", window: int = 5) -> HierarchicalAttention:
    made = HierarchicalAttention(HEADS * DIM, HEADS, KV_HEADS, window=window, encoding=ENCODINGS[encoding]())
    return fill(made.double(), std=0.3)


def tokens(batch: int = 3) -> Tensor:
    return random(batch, 45, HEADS * DIM)


@pytest.mark.parametrize(
    ("name", "chunk"), [("rotation", 1), ("rotation", 4), ("learned bias", 2), ("learned bias", 32)]
)
@torch.no_grad()
def test_calls_with_documents(name: str, chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Documents that end in different calls, padding within one, and rows with different numbers of tokens before."""
    monkeypatch.setattr(module, "CHUNK", chunk)
    mixer, x, documents = layer(name), tokens(), torch.zeros(3, 45, dtype=torch.long)
    documents[0, 25:], documents[1, 3:5], documents[1, 24:], documents[2, :14] = 1, -1, 1, -1
    cache = mixer.cache_layer()
    calls = pairwise((0, 13, 30, 31, 43, 44, 45))
    outs = [mixer(x[:, a:b], cache=cache, documents=documents[:, :b]) for a, b in calls]
    close(torch.cat(outs, 1), mixer(x, documents=documents), atol=1e-10)
    assert cache.state.blocks.keys.shape[2] <= math.log2(45 / chunk) + 1  # the digits of a binary counter
    whole = mixer.cache_layer()
    mixer(x[:, :40], cache=whole, documents=documents[:, :40])
    close(mixer(x[:, 40:], cache=whole, documents=documents), mixer(x, documents=documents)[:, 40:], atol=1e-10)


def test_state_is_the_binary_counter() -> None:
    """After 204 tokens with a window of 5 the blocks are the digits of 6 chunks, averages of the tokens' own keys."""
    mixer, x = layer(), random(3, 204, HEADS * DIM)
    cache = mixer.cache_layer()
    for part in x.split(41, 1):
        mixer(part, cache=cache)
    state, keys = cache.state, mixer.k_proj(x).view(3, 204, KV_HEADS, -1).transpose(1, 2)
    assert state.seen.tolist() == [204] * 3 and state.blocks.keys.shape[2] == 3
    for level, (start, stop) in {2: (0, 128), 1: (128, 192)}.items():
        close(state.blocks.keys[:, :, level], keys[:, :, start:stop].mean(2), atol=1e-14)
        assert state.blocks.ends[:, 0, level].tolist() == [[start, stop - 1]] * 3
    assert not state.blocks.keys[:, :, 0].any()
    close(state.keys[:, :, -12:, :DIM], keys[:, :, 192:], atol=1e-14)  # the last 7, and a window of 5


def test_the_gate_opens_to_the_window() -> None:
    """sigmoid(2) of a new layer's output is of the window."""
    assert HierarchicalAttention(HEADS * DIM, HEADS).gate_bias.tolist() == [2.0] * HEADS


def after_45_tokens(batch: int = 3, **other):
    """A call of another layer, or of another batch, with the cache of a layer."""

    def call() -> None:
        mixer = layer()
        cache = mixer.cache_layer()
        mixer(tokens(), cache=cache)
        layer(**other)(tokens(batch), cache=cache)

    return call


class Mirror(lg.Encoding):
    def keys(self, k: Tensor, prepared: object) -> Tensor:
        return k.flip(-1)


test_refusals = refused_calls(
    [
        (lambda encoding=encoding: HierarchicalAttention(32, HEADS, encoding=encoding()), *named)
        for encoding, *named in (
            (lambda: lg.Fire(HEADS), "PairBias", "Fire"),
            (lambda: lg.FoX(16, HEADS), "FoX"),
            (lambda: lg.XPos(DIM, "half"), "XPos"),
            (lambda: lg.ReRoPE(DIM, "half", 4), "ReRoPE"),
            (lambda: lg.Rotary(DIM, "half", rotate_values=True), "Rotary", "values"),
            (Mirror, "RotaryTable"),
        )
    ]
    + [(after_45_tokens(**other), "cache") for other in ({"window": 6}, {"batch": 2}, {"encoding": "learned bias"})]
)
