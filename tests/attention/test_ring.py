"""Attention in parts, merged by their logsumexp: in one process, and as a ring of two that each hold half of the sequence."""

import math
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import longitude as lg
from tests.support import built, close, gradients, heads, random

HEADS, DIM, LENGTH = 4, 8, 62
ENCODINGS = ["none", "rope", "alibi", "t5", "kerple_log", "rope+clipped"]
ROOT = Path(__file__).parents[2]
KNOWN = {"num_heads": HEADS, "head_dim": DIM}


def numbers() -> list[torch.Tensor]:
    """q, k, v and the gradient of the output."""
    return [*heads(LENGTH), random(2, HEADS, LENGTH, DIM, seed=9)]


def whole(encoding: lg.Composed) -> list[torch.Tensor]:
    """The output, the gradients of q, k and v, and those of what is learned."""
    *inputs, grad = numbers()
    inputs = [x.requires_grad_() for x in inputs]
    out = lg.attend(*inputs, encoding=encoding, backend="reference")
    return [out.detach(), *torch.autograd.grad(out, [*inputs, *encoding.parameters()], grad)]


# ---- merge, in one process ---------------------------------------------------------------------------------------------
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


@pytest.mark.parametrize(
    ("outs", "lses", "message"),
    [
        ([], [], "got 0 and 0"),
        ([OUT], [LSE, LSE], "got 1 and 2"),
        (OUT, [LSE], "got 'Tensor' and 1"),
        ([OUT], [OUT], r"\[1, 2, 3, 4\] on cpu as part 0"),
        ([OUT, OUT[:, :, 1:]], [LSE, LSE[:, :, 1:]], "of one shape, dtype and device.* as part 1"),
        ([OUT, OUT.double()], [LSE, LSE], "float64.* as part 1"),
        ([OUT, OUT.to("meta")], [LSE, LSE.to("meta")], "meta as part 1"),
        ([OUT.long()], [LSE], "expected floating-point tensors"),
    ],
)
def test_merge_refuses(outs, lses, message):
    with pytest.raises(ValueError, match=message):
        lg.merge_attention(outs, lses)


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
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=world)
    rows = LENGTH // world
    own = slice(rank * rows, (rank + 1) * rows)
    for name in ENCODINGS:
        encoding = built(name, KNOWN)
        q, k, v, grad = (x[:, :, own] for x in numbers())
        inputs = [x.clone().requires_grad_() for x in (q, k, v)]
        out = ring(*inputs, encoding)
        grads = torch.autograd.grad(out, [*inputs, *encoding.parameters()], grad)
        for g in grads[3:]:
            dist.all_reduce(g)
        for got, want in zip((out.detach(), *grads), whole(encoding), strict=True):
            torch.testing.assert_close(got, want[:, :, own] if want.dim() == 4 else want, atol=1e-12, rtol=0, msg=name)
    dist.destroy_process_group()


@pytest.mark.slow
@pytest.mark.skipif(not dist.is_available() or not dist.is_gloo_available(), reason="this torch has no gloo")
def test_a_ring_of_two_is_the_whole(tmp_path):
    """The output, and the gradients of q, k, v and of learned tables, summed over the processes."""
    command = [sys.executable, "-m", "tests.attention.test_ring", str(tmp_path / "meeting"), "2"]
    running = [
        subprocess.Popen([*command, str(rank)], stderr=subprocess.PIPE, text=True, cwd=ROOT) for rank in range(2)
    ]
    try:
        errors = [process.communicate(timeout=120)[1] for process in running]
    finally:
        for process in running:
            process.kill()
    assert [process.returncode for process in running] == [0, 0], "\n".join(errors)


if __name__ == "__main__":
    torch.set_num_threads(1)
    one_process(int(sys.argv[3]), int(sys.argv[2]), sys.argv[1])
