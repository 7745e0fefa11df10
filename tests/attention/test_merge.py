"""Attention in parts: merged by their logsumexp over any keys, shard by shard of the queries, and as a ring of two processes.

A shard holds the queries a .. b-1 and the keys up to b (all keys, where the mask lets it see the future), with q_positions=a.
What content decides (FoX, PaTH) reads the tokens before a shard, too: its columns are made of all tokens up to b.
"""

import math
from datetime import timedelta
from functools import partial
from itertools import pairwise

import pytest
import torch
import torch.distributed as dist

import longitude as lg
from longitude.attention.backends import BACKENDS, chunked
from longitude.attention.operation import refusal, requests
from longitude.positions.composed import compose
from tests.support import built, close, gradients, heads, random, refused_calls

HEADS, DIM, WIDTH, LENGTH = 4, 8, 16, 62
KNOWN = {"num_heads": HEADS, "num_kv_heads": 2, "head_dim": DIM, "dim": WIDTH, "max_length": 64}


# ---- merge_attention -----------------------------------------------------------------------------------------------------
def dense(q, k, v, allowed):
    """Attention and the logsumexp of its scores, written out; zeros and -inf for a query that sees nothing."""
    some = allowed.any(-1, keepdim=True)
    scores = torch.where(allowed, q @ k.mT, torch.where(some, -math.inf, 0.0).double())
    return scores.softmax(-1) * some @ v, scores.logsumexp(-1).masked_fill(~some[..., 0], -math.inf)


@pytest.mark.parametrize("cuts", [(0, 9), (0, 1, 9), (0, 4, 5, 9), (0, 3, 6, 9)])
def test_merged_parts_are_the_whole(cuts):
    """Over disjoint keys of any number, in any order, where a query may see none of a part's keys, or none at all: both
    results and all gradients. A part that no query sees changes nothing."""
    q, k, v = (x.requires_grad_() for x in heads(9, num_heads=3, num_kv_heads=3, head_dim=4))
    allowed = torch.ones(9, 9, dtype=torch.bool).tril(-1)
    want = dense(q, k, v, allowed)
    parts = [dense(q, k[:, :, a:b], v[:, :, a:b], allowed[:, a:b]) for a, b in pairwise(cuts)][::-1]
    parts.insert(1, dense(q, k, v, torch.zeros_like(allowed)))
    got = lg.merge_attention(*zip(*parts, strict=True))
    assert (got[0][:, :, 0] == 0).all() and (got[1][:, :, 0] == -math.inf).all()
    got, want = ([*both, *(g for x in both for g in gradients(x, [q, k, v]))] for both in (got, want))
    close(got, want, atol=1e-13)


def test_merge_in_bfloat16_adds_up_in_float32():
    outs = [torch.randn(1, 2, 5, 4).bfloat16() for _ in range(3)]
    lses = [torch.randn(1, 2, 5) for _ in range(3)]
    out, lse = lg.merge_attention(outs, lses)
    exact, exact_lse = lg.merge_attention([x.double() for x in outs], [x.double() for x in lses])
    assert out.dtype == torch.bfloat16 and lse.dtype == torch.float32
    torch.testing.assert_close(out, exact.bfloat16())
    close(lse.double(), exact_lse, atol=1e-6)


def test_merge_passes_on_what_is_not_finite():
    outs, lses = torch.randn(2, 1, 1, 3, 4), torch.randn(2, 1, 1, 3)
    lses[0, ..., 0], lses[1, ..., 1], outs[1, ..., 2, 0] = math.nan, math.inf, math.nan
    out, lse = lg.merge_attention(list(outs), list(lses))
    assert out[:, :, :2].isnan().all() and out[:, :, 2, 0].isnan() and out[:, :, 2, 1:].isfinite().all()
    assert not lse[:, :, :2].isfinite().any() and lse[:, :, 2].isfinite().all()


OUT, LSE = torch.zeros(1, 2, 3, 4), torch.zeros(1, 2, 3)
test_merge_refuses = refused_calls(
    [
        (partial(lg.merge_attention, outs, lses), message)
        for outs, lses, message in (
            ([], [], "got 0 and 0"),
            ([OUT], [LSE, LSE], "got 1 and 2"),
            (OUT, [LSE], "got 'Tensor' and 1"),
            ([OUT], [OUT], r"\[1, 2, 3, 4\] on cpu as part 0"),
            ([OUT, OUT[:, :, 1:]], [LSE, LSE[:, :, 1:]], "of one shape, dtype and device.* as part 1"),
            ([OUT, OUT.double()], [LSE, LSE], "float64.* as part 1"),
            ([OUT, OUT.to("meta")], [LSE, LSE.to("meta")], "meta as part 1"),
            ([OUT.long()], [LSE], "expected floating-point tensors"),
        )
    ]
)


# ---- shards of a sequence --------------------------------------------------------------------------------------------------
FOLLOWING = {
    "dynamic ntk, by row": {"follow": "row", "step": 16},
    "dynamic ntk, declared": {"max_length": 64},
    "dynamic ntk, by sequence": {"follow": "sequence"},
}
WHOLE = (0, LENGTH)


def make(name: str) -> lg.Composed:
    if name in FOLLOWING:
        return compose(lg.Rotary(DIM, "half", scaling=lg.scaling.DynamicNTK(4, 16, **FOLLOWING[name]))).double()
    return built(name, KNOWN)


def by_shards(encoding, backend="reference", mask=lg.Causal(), cuts=WHOLE, first=lambda a: 0, last=lambda b: b):  # noqa: B008
    """Output and gradients of q, k, v, x and what is learned. first, last: the keys that the queries a .. b-1 hold."""
    q, k, v, x = inputs = [x.requires_grad_() for x in (*heads(LENGTH), random(2, LENGTH, WIDTH, seed=8))]
    outs = []
    for a, b in pairwise(cuts):
        keys = slice(first(a), last(b))
        context = {name: column[:, :, keys] for name, column in encoding.context(x[:, : keys.stop])[0].items()}
        given = encoding, context, mask, a, keys.start
        own = q[:, :, a:b], k[:, :, keys], v[:, :, keys]
        if refusal(BACKENDS[backend], [part.request for part in requests(*own, *given, None, 0.0, False)]) is not None:
            return None
        names = "encoding", "context", "mask", "q_positions", "k_positions"
        outs.append(lg.attend(*own, **dict(zip(names, given)), backend=backend))
    out = torch.cat(outs, 2)
    return [out, *gradients(out, [*inputs, *encoding.parameters()])]


@pytest.mark.one_in(11)
@pytest.mark.parametrize("name", [*lg.list_encodings(), "transformer_xl+t5+fox", *[*FOLLOWING][:2]])
def test_shards_are_the_whole(name, monkeypatch):
    monkeypatch.setattr(chunked, "BLOCK_BYTES", 2**18)  # blocks of a few queries
    encoding = make(name)
    settings = [{"mask": lg.Causal()}, {"mask": lg.Window(7), "first": lambda a: max(0, a - 6)}]
    if not encoding.causal_only:
        settings.append({"mask": lg.NoMask(), "last": lambda b: LENGTH})
    for setting in settings:
        want = by_shards(encoding, mask=setting["mask"])
        for backend in BACKENDS:
            if by_shards(encoding, backend, mask=setting["mask"]) is not None:
                for cuts in (WHOLE, (0, 16, 31, 46, LENGTH), (0, 1, 30, 37, LENGTH)):
                    close(by_shards(encoding, backend, cuts=cuts, **setting), want, rtol=1e-12)


def test_a_rule_of_the_whole_has_no_shards():
    """The published rule rotates every key by the length of the whole call, so those of earlier shards have other tables."""
    encoding = make("dynamic ntk, by sequence")
    want, got = by_shards(encoding)[0], by_shards(encoding, cuts=(0, 40, LENGTH))[0]
    close(got[:, :, 40:], want[:, :, 40:])
    assert (got[:, :, :40] - want[:, :, :40]).abs().max() > 1e-3


# ---- a ring ------------------------------------------------------------------------------------------------------------
class Passed(torch.autograd.Function):
    """x goes to the next process and the previous one's comes; gradients go the other way. Of one shape everywhere."""

    @staticmethod
    def forward(ctx, x):
        return pass_on(x, +1)

    @staticmethod
    def backward(ctx, grad):
        return pass_on(grad, -1)


def pass_on(x: torch.Tensor, step: int) -> torch.Tensor:
    rank, world = dist.get_rank(), dist.get_world_size()
    came = torch.empty_like(x, memory_format=torch.contiguous_format)
    sent = dist.isend(x.contiguous(), (rank + step) % world)
    dist.recv(came, (rank - step) % world)
    sent.wait()
    return came


def ring(q, k, v, encoding) -> torch.Tensor:
    """This process's queries over all keys before them: each block of keys and values comes by once."""
    rank, world, rows = dist.get_rank(), dist.get_world_size(), q.shape[2]
    outs, lses, unused = [], [], 0.0
    kv = torch.stack([k, v])
    for block in range(rank, rank - world, -1):
        if block != rank:
            kv = Passed.apply(kv)
        if block < 0:  # of a later process, after our queries; its gradient, zero, must still go home
            unused = unused + 0.0 * kv.sum()
            continue
        mask = lg.Causal() if block == rank else lg.NoMask()
        places = {"q_positions": rank * rows, "k_positions": block * rows}
        out, lse = lg.attend(q, *kv, encoding=encoding, mask=mask, **places, return_lse=True)
        outs.append(out)
        lses.append(lse)
    return lg.merge_attention(outs, lses)[0] + unused


def one_process(rank: int, world: int, meeting: str) -> None:
    """Each encoding by the ring, compared with the whole that every process computes for itself."""
    torch.set_num_threads(1)
    timeout = timedelta(seconds=120)
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=world, timeout=timeout)
    rows = LENGTH // world
    own = slice(rank * rows, (rank + 1) * rows)
    for name in ["none", "rope", "alibi", "t5", "kerple_log", "rope+clipped"]:
        encoding = built(name, KNOWN)
        out, *grads = by_shards(encoding)
        want = [out, *grads[:3], *grads[4:]]
        inputs = [x[:, :, own].clone().requires_grad_() for x in heads(LENGTH)]
        got = ring(*inputs, encoding)
        direction = random(*out.shape, seed=7)[:, :, own]
        grads = torch.autograd.grad(got, [*inputs, *encoding.parameters()], direction)
        for g in grads[3:]:
            dist.all_reduce(g)
        for ours, theirs in zip((got, *grads), want, strict=True):
            torch.testing.assert_close(
                ours, theirs[:, :, own] if theirs.dim() == 4 else theirs, atol=1e-12, rtol=0, msg=name
            )
    dist.destroy_process_group()


@pytest.mark.slow
@pytest.mark.skipif(not dist.is_available() or not dist.is_gloo_available(), reason="this torch has no gloo")
def test_a_ring_of_two_is_the_whole(tmp_path):
    """The output, and the gradients of q, k, v and of learned tables, summed over the processes."""
    torch.multiprocessing.spawn(one_process, (2, str(tmp_path / "meeting")), nprocs=2)
