"""Hierarchical attention equals its definition, computed here query by query, and full attention where it must."""

import math

import pytest
import torch
from torch import Tensor

import longitude as lg
from longitude.attention.layers import hierarchical as module
from longitude.attention.layers.hierarchical import HierarchicalAttention, hierarchical_attention
from longitude.positions.composed import compose
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
    found, start = [], 0
    while start < a:
        size = 2 ** int(math.log2(a - start))
        found.append((start, start + size))
        start += size
    return found


def definition(q, k, v, gate, window, combine, encoding=(), size_term=True) -> Tensor:
    """Query by query."""
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
        far = far + torch.tensor([math.log(e - s) if size_term else 0.0 for s, e in parts], dtype=torch.float64)
        if combine == "softmax":
            weights = torch.cat([near, far], -1).softmax(-1)
            outs.append((weights[..., None] * torch.cat([near_v, far_v], 2)).sum(2))
        else:
            g = gate[:, :, t, None]
            both = [(s.softmax(-1)[..., None] * x).sum(2) for s, x in ((near, near_v), (far, far_v))]
            outs.append(g * both[0] + (1 - g) * both[1])
    return torch.stack(outs, 2)


def gate_of(combine: str, gate: Tensor) -> dict[str, Tensor]:
    return {"gate": gate} if combine == "gate" else {}


# ---- what is published -----------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"gate": 1.0}, 7.0),
        ({"gate": 0.0}, 2.5),
        ({"gate": 0.0, "size_term": False}, 3.0),
        ({"combine": "softmax"}, 4.0),
    ],
)
def test_zero_keys(options: dict, expected: float) -> None:
    q = torch.zeros(1, 1, 9, 2, dtype=torch.float64)
    v = torch.arange(9.0, dtype=torch.float64).view(1, 1, 9, 1).expand(1, 1, 9, 2)
    if "gate" in options:
        options = options | {"gate": torch.full((1, 1, 9), options["gate"], dtype=torch.float64)}
    out = hierarchical_attention(q, q, v, window=3, **options)
    close(out[0, 0, 8], torch.full((2,), expected, dtype=torch.float64), atol=1e-14)
    early = torch.tensor([0.0, 0.5, 1.0], dtype=torch.float64)  # the gate is 1 without blocks
    close(out[0, 0, :3, 0], early, atol=1e-14)


# ---- the definition --------------------------------------------------------------------------------------------------
@pytest.mark.one_in(5)
@pytest.mark.parametrize("combine", ["gate", "softmax"])
@pytest.mark.parametrize("name", ENCODINGS)
@pytest.mark.parametrize(("length", "window"), [(1, 1), (7, 3), (24, 5)])
def test_output_and_gradients(name: str, length: int, window: int, combine: str) -> None:
    inputs = [x.requires_grad_() for x in numbers(length, batch=1)]
    encoding = built(name)
    q, k, v, gate = inputs
    ours = hierarchical_attention(q, k, v, window=window, combine=combine, encoding=encoding, **gate_of(combine, gate))
    theirs = definition(q, k, v, gate, window, combine, encoding)
    close(ours, theirs)
    wanted = [*inputs, *encoding.parameters()]
    close(gradients(ours, wanted), gradients(theirs, wanted), atol=1e-11)


@pytest.mark.parametrize(
    ("window", "size_term", "chunk"), [(1, False, 32), (33, True, 32), (33, True, 1), (33, True, 8), (33, True, 64)]
)
def test_longer_than_a_chunk(window: int, size_term: bool, chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "CHUNK", chunk)
    q, k, v, gate = numbers(71, batch=1)
    ours = hierarchical_attention(q, k, v, window=window, gate=gate, size_term=size_term, encoding=built("rotation"))
    close(ours, definition(q, k, v, gate, window, "gate", built("rotation"), size_term))


# ---- documents and positions -----------------------------------------------------------------------------------------
@pytest.mark.parametrize(("window", "combine"), [(1, "softmax"), (3, "gate"), (50, "gate")])
@pytest.mark.parametrize("name", ["rotation", "fixed bias"])
def test_documents_as_a_compiler_sees_them(
    name: str, window: int, combine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a look at where they end: the same, gradients too, with numbers that come back."""
    inputs = [x.requires_grad_() for x in numbers(40)]
    q, k, v, gate = inputs
    documents = torch.zeros(2, 40, dtype=torch.long)
    documents[0, :7], documents[0, 20:] = -1, 1
    documents[1, 11:30], documents[1, 36:] = 3, -1
    options = {"window": window, "combine": combine, "encoding": built(name), **gate_of(combine, gate)}
    answers = []
    for compiling in (False, True):
        with monkeypatch.context() as patch:
            if compiling:
                patch.setattr(module, "readable", lambda *tensors: False)
            out = hierarchical_attention(q, k, v, documents=documents, **options)
        answers.append([out, *gradients(out, inputs)])
    close(*answers, atol=1e-11)


@pytest.mark.parametrize("name", ["rotation", "learned bias"])
def test_positions_move_together(name: str) -> None:
    """Far away, as numbers of each row, and with gaps: a block stands half way between its first and last token."""
    q, k, v, gate = numbers(40)
    options = {"window": 3, "gate": gate, "encoding": built(name)}
    near = hierarchical_attention(q, k, v, **options)
    rows = torch.arange(40) + torch.tensor([[5], [90_000]])
    close(hierarchical_attention(q, k, v, positions=rows, **options), near, atol=1e-9)
    with_gap = torch.arange(40) * 3 // 2
    gaps = hierarchical_attention(q, k, v, positions=with_gap, **options)
    assert not torch.allclose(gaps, near)
    moved = hierarchical_attention(q, k, v, positions=with_gap + 11, **options)
    close(moved, gaps)


# ---- precision -------------------------------------------------------------------------------------------------------
def test_bfloat16() -> None:
    """Summaries of narrow keys are wide: as near to float64 as one rounding of the output."""
    narrow = [x.bfloat16() for x in numbers(500, batch=1)]
    options = {"window": 16, "encoding": lg.Rotary(DIM, "interleaved")}
    q, k, v, gate = narrow
    with torch.autocast("cpu", torch.bfloat16):
        found = hierarchical_attention(q, k, v, gate=gate, **options)
    q, k, v, gate = (x.double() for x in narrow)
    exact = hierarchical_attention(q, k, v, gate=gate, **options)
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found.double(), exact, rtol=2**-6, atol=2**-7)


# ---- refusals --------------------------------------------------------------------------------------------------------
class Mirror(lg.Encoding):
    def keys(self, k: Tensor, prepared: object) -> Tensor:
        return k.flip(-1)


def calling(**options):
    q, k, v, gate = numbers(7, dtype=torch.float32)
    return lambda: hierarchical_attention(q, k, v, **{"window": 3, "gate": gate, **options})


test_refusals = refused_calls(
    [
        (calling(window=0), "window"),
        (calling(combine="gates"), "'gate'"),
        (calling(size_term=1), "size_term"),
        (calling(gate=None), "combine='gate'", "None"),
        (calling(combine="softmax"), "gate", "combine='softmax'"),
        (calling(gate=torch.ones(2, 1, 7)), "gate", "[B, H, L]"),
        (calling(documents=torch.zeros(2, 6, dtype=torch.long)), "documents"),
        (calling(encoding=lg.Fire(HEADS)), "PairBias", "Fire"),
        (calling(encoding=lg.FoX(16, HEADS)), "FoX"),
        (calling(encoding=lg.XPos(DIM, "half")), "XPos"),
        (calling(encoding=lg.ReRoPE(DIM, "half", 4)), "ReRoPE"),
        (calling(encoding=lg.Rotary(DIM, "half", rotate_values=True)), "Rotary", "values"),
        (lambda: HierarchicalAttention(16, 2, encoding=Mirror()), "RotaryTable"),
    ]
)
