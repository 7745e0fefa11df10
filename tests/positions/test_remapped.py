"""Offsets clipped, slowed, grouped or folded: dense scores by the formula, the authors' code, and what merging allows."""

import math

import pytest
import torch

import longitude as lg
from longitude.positions.terms import RowBias
from tests.support import close, golden, heads, random, refused

W, G, FACTOR, C = 5, 3, 4, 5  # chunks of C = 7 - 2


def grouped(shift):
    return lambda i, j: torch.where(i - j < W, i - j, (i // G - j // G).double() + W - shift)


def folded(largest, farthest):
    def offset(i, j):
        apart = i // C - j // C
        before = torch.where(apart == 1, (i % C + C).clamp(max=largest) - j % C, farthest - j % C)
        return torch.where(apart == 0, i - j, before)

    return offset


CASES = {
    "rerope": ({"name": "rerope", "window": W}, lambda i, j: (i - j).clamp(max=W)),
    "leaky": (
        {"name": "leaky_rerope", "window": W, "slowdown": FACTOR},
        lambda i, j: torch.where(i - j < W, i - j, W + (i - j - W).double() / FACTOR),
    ),
    "self_extend": ({"name": "self_extend", "window": W, "group": G}, grouped(W // G)),
    "self_extend code": ({"name": "self_extend", "window": W, "group": G, "variant": "code"}, grouped(W / G)),
    "dual_chunk": ({"name": "dual_chunk", "chunk_size": 7, "local_size": 2}, folded(6, 6)),
    "dual_chunk code": ({"name": "dual_chunk", "chunk_size": 7, "local_size": 2, "variant": "code"}, folded(7, 7)),
    "a wide border": ({"name": "dual_chunk", "chunk_size": 9, "local_size": 4}, folded(8, 8)),
    "a wide border, code": (
        {"name": "dual_chunk", "chunk_size": 12, "local_size": 7, "variant": "code"},
        folded(12, 9),
    ),
}
"""Options, and the offset of a query at i and a key at j, as the sources write it."""


def made(options, **more):
    name, *_ = options.values()
    own = {key: value for key, value in options.items() if key != "name"}
    return lg.encoding(name, head_dim=8, layout="half", base=100.0, **own, **more)


@pytest.fixture(params=CASES)
def case(request):
    options, offset = CASES[request.param]
    return made(options), offset


def rotated_scores(q, k, offset):
    """Scores scale q . R(offset theta) k, pair by pair, [B, H, Lq, Lk]; offset [..., Lq, Lk]."""
    theta = torch.tensor([100.0 ** (-c / 4) for c in range(4)], dtype=torch.float64)
    angle = offset.double()[..., None] * theta
    angle = angle[:, None] if angle.dim() == 4 else angle
    (a, b), (c, d) = (x.repeat_interleave(4 // x.shape[1], 1).chunk(2, -1) for x in (q, k))
    a, b, c, d = a[:, :, :, None], b[:, :, :, None], c[:, :, None], d[:, :, None]
    return 8**-0.5 * ((a * c + b * d) * angle.cos() + (a * d - b * c) * angle.sin()).sum(-1)


def dense(q, k, v, offset, i, j, allowed, added=0.0):
    """Output and logsumexp of softmax over dense scores."""
    scores = rotated_scores(q, k, offset(i[..., :, None], j[..., None, :])) + added
    some = allowed.any(-1, keepdim=True)
    scores = scores.masked_fill(~allowed, -math.inf).masked_fill(~some, 0.0)
    out = (scores.softmax(-1) * some) @ v.repeat_interleave(4 // v.shape[1], 1)
    return out, scores.logsumexp(-1).masked_fill(~some[..., 0], -math.inf)


TOKENS = torch.arange(23)
PLACES = {
    "counting": (TOKENS, 0),
    "from 1003 on": (TOKENS + 1003, 1003),
    "gaps": (TOKENS * 2 + TOKENS % 2, None),
    "by row": (torch.stack([TOKENS + 4, TOKENS + 9]), None),
}
MASKS = {
    "causal": lg.Causal(),
    "window": lg.Window(9),
    "padding": lg.Causal() & lg.Padding(torch.stack([TOKENS > 3, TOKENS > 7])),
    "documents": lg.Causal() & lg.Documents(torch.stack([TOKENS // 8, TOKENS // 15])),
    "documents that come back": lg.Causal() & lg.Documents(TOKENS // 4 % 2),
    "no keys": lg.Causal() & lg.Padding(TOKENS < 0),
}


@pytest.mark.one_in(15)
@pytest.mark.parametrize("backend", ["auto", "table", "chunked", "reference"])
@pytest.mark.parametrize("place", PLACES)
def test_it_is_the_formula(case, place, backend):
    """Output, logsumexp and gradients of a whole sequence are those of dense scores."""
    encoding, offset = case
    positions, given = PLACES[place]
    q, k, v = (x.requires_grad_() for x in heads(23))
    given = positions if given is None else given
    options = {"encoding": encoding, "q_positions": given, "k_positions": given, "return_lse": True}
    if backend == "table" and place in ("gaps", "by row"):
        with refused("'chunked'"):
            lg.attend(q, k, v, backend=backend, **options)
        return
    results = [
        lg.attend(q, k, v, backend=backend, **options),
        dense(q, k, v, offset, positions, positions, torch.ones(23, 23, dtype=torch.bool).tril()),
    ]
    close(*results, 1e-12)
    losses = (out.square().sum() + lse.sin().sum() for out, lse in results)
    close(*(torch.autograd.grad(loss, (q, k, v)) for loss in losses), 1e-11)


@pytest.mark.one_in(31)
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("rows", [1, 6, 23])
def test_masks_and_last_queries(case, mask, rows):
    """Whatever the mask hides, and where queries are the last of the keys, as in decoding."""
    encoding, offset = case
    q, k, v = heads(23)
    q, i = q[:, :, -rows:], TOKENS[-rows:]
    want = dense(q, k, v, offset, i, TOKENS, MASKS[mask].allowed(i, TOKENS))
    close(lg.attend(q, k, v, encoding=encoding, mask=MASKS[mask], return_lse=True), want, 1e-12)


def test_restarting_positions(case):
    """Packed documents whose positions begin again are the documents alone, and count up for C."""
    encoding, _ = case
    q, k, v = heads(23, batch=1)
    positions = torch.cat([torch.arange(9), torch.arange(14)])[None]
    mask = lg.Causal() & lg.Documents((TOKENS >= 9).long())
    packed = lg.attend(q, k, v, encoding=encoding, mask=mask, q_positions=positions, k_positions=positions)
    parts = [lg.attend(*(x[:, :, part] for x in (q, k, v)), encoding=encoding) for part in (slice(9), slice(9, 23))]
    close(packed, torch.cat(parts, 2), 1e-12)
    options = {"mask": mask, "q_positions": positions, "k_positions": positions, "backend": "table"}
    close(lg.attend(q, k, v, encoding=encoding, **options), packed)


def offset_of(encoding, i, j):
    """The offset by which a query at i and a key at j are rotated, float64; NaN for keys in the future that have none."""
    offsets = (i - j).double() * torch.nan
    for region in encoding.regions():
        offsets = torch.where(region.holds(i, j), region.queries(i).double() - region.keys(j), offsets)
    return offsets


def test_offsets(case):
    """Regions give the formula; keys in the future of another chunk have no offset."""
    encoding, offset = case
    i, j = torch.arange(40)[:, None], torch.arange(40)
    got, want = offset_of(encoding, i, j), offset(i, j).double()
    close(got[i >= j], want[i >= j])
    assert got.dtype == torch.float64 and bool((got[(i < j) & got.isnan().logical_not()] < 0).all())


@pytest.mark.parametrize("name", ["rerope", "leaky_rerope", "self_extend", "dual_chunk"])
def test_golden(name):
    """As the authors' attention layers compute it, in float32."""
    table = golden("remapped")
    q, k, v = (torch.tensor(table["inputs"][x], dtype=torch.float64)[None] for x in "qkv")
    options = {"base": table["inputs"]["base"], **table[name]["options"]}
    encoding = lg.encoding(name, head_dim=q.shape[-1], layout="half", **options)
    close(lg.attend(q, k, v, encoding=encoding), torch.tensor(table[name]["out"]).double()[None], 2e-6)


def test_published_offsets():
    """Dual chunk attention's figure 2 (chunks of 6 for a model of 10): no offset above 9. Self-Extend's section 3: a model of N
    positions reaches (N - W) G + W."""
    i, j = torch.arange(12)[:, None], torch.arange(12)
    found = offset_of(made({"name": "dual_chunk", "chunk_size": 10, "local_size": 4}), i, j).long()
    assert found[11].tolist() == [9, 8, 7, 6, 5, 4, 5, 4, 3, 2, 1, 0]
    assert found[6:, 0].tolist() == [6, 7, 8, 9, 9, 9]
    for window, group, trained in ((4, 2, 7), (32, 8, 64)):
        last = torch.tensor((trained - window) * group + window - 1)
        encoding = made({"name": "self_extend", "window": window, "group": group})
        assert offset_of(encoding, last, torch.arange(int(last) + 1)).max() == trained - 1


def test_within_the_window_it_is_rope():
    """One region is a call as any other: every backend that takes rope takes it, without a logsumexp."""
    q, k, v = heads(12)
    rope = lg.Rotary(8, "half", base=100.0)
    for name, options in (
        ("rerope", {"window": 12}),
        ("self_extend", {"window": 12}),
        ("leaky_rerope", {"window": 12}),
    ):
        encoding = made({"name": name, **options})
        for backend in ("sdpa", "table", "chunked", "reference"):
            got = lg.attend(q, k, v, encoding=encoding, backend=backend)
            close(got, lg.attend(q, k, v, encoding=rope, backend="reference"))


def test_composed(case):
    """What others add follows true offsets, visible keys and sinks, once for all regions."""
    encoding, offset = case
    q, k, v = heads(23)
    allowed = torch.ones(23, 23, dtype=torch.bool).tril()
    alibi, ssmax, sink = lg.ALiBi(4), lg.encoding("ssmax", num_heads=4), lg.encoding("sink", num_heads=4).double()
    with torch.no_grad():
        ssmax.rate.copy_(random(4).abs() + 0.1)
        sink.logits.copy_(random(4, seed=1))
    bias = alibi.bias_at(TOKENS[:, None] - TOKENS)
    factor = ssmax.rate.double()[:, None] * (TOKENS + 1.0).double().log()
    out, lse = dense(q * factor[..., None], k, v, offset, TOKENS, TOKENS, allowed, bias)
    share = torch.sigmoid(lse - sink.logits[:, None])
    want = out * share[..., None], torch.logaddexp(lse, sink.logits[:, None])
    every = [encoding, alibi, ssmax, sink]
    close(lg.attend(q, k, v, encoding=every, return_lse=True), want, 1e-12)
    got, weights = lg.attend(q, k, v, encoding=every, return_weights=True)
    close(got, want[0], 1e-12)
    close(weights @ v.repeat_interleave(2, 1), want[0], 1e-12)


class Rows(lg.Encoding):
    """A bias read off whole rows, of tokens."""

    def context(self, x, carry=None, documents=None):
        return {"one": torch.ones(x.shape[0], 2, x.shape[1])}, None

    def terms(self, context):
        context["one"]
        return (RowBias(lambda q, scores, allowed: scores),)


def test_refused():
    own = made(CASES["rerope"][0])
    rows = Rows()
    q, k, v = heads(6)
    dynamic = {"name": "dynamic", "factor": 2.0, "original_max_length": 8, "follow": "row"}
    calls = {
        ("ReRoPE", "SelfExtend"): lambda: lg.Composed([own, made(CASES["self_extend"][0])]),
        ("ReRoPE", "XPos"): lambda: lg.Composed([own, lg.XPos(8, "half")]),
        ("ReRoPE", "CoPE"): lambda: lg.Composed([lg.encoding("cope", head_dim=8), own]),
        ("RowBias",): lambda: lg.attend(q, k, v, encoding=[own, rows], context=rows.context(q[:, 0])[0]),
        ("DynamicNTK", "follow='declared'"): lambda: made(CASES["rerope"][0], scaling=dynamic),
        ("local_size", "chunk_size", "4"): lambda: made({"name": "dual_chunk", "chunk_size": 4, "local_size": 4}),
        ("'sdpa'", "cannot"): lambda: lg.attend(q, k, v, encoding=own, backend="sdpa"),
        ("positions", "[2, 6, 2]"): lambda: lg.attend(
            q, k, v, encoding=[own, lg.encoding("axial_rope", head_dim=8, layout="half")], q_positions=torch.zeros(2, 6, 2).long()
        ),
    }  # fmt: skip
    for words, call in calls.items():
        with refused(*words):
            call()
    assert all(lg.testing.example(name)().causal_only for name in ("rerope", "self_extend", "dual_chunk"))
