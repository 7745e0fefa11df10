"""Attention in parts: merged by their logsumexp over any keys, and in shards of the queries."""

import math
from functools import partial
from itertools import pairwise

import pytest
import torch

import longitude as lg
from tests.support import built, close, gradients, heads, refused_calls

LENGTH = 62
KNOWN = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 8, "dim": 16, "max_length": 64}


# ---- merge_attention -----------------------------------------------------------------------------------------------------
def dense(q, k, v, allowed):
    """Attention and the logsumexp of its scores, written out; zeros and -inf for a query that sees nothing."""
    some = allowed.any(-1, keepdim=True)
    scores = torch.where(allowed, q @ k.mT, torch.where(some, -math.inf, 0.0).double())
    return scores.softmax(-1) * some @ v, scores.logsumexp(-1).masked_fill(~some[..., 0], -math.inf)


@pytest.mark.parametrize("cuts", [(0, 9), (0, 1, 9), (0, 4, 5, 9), (0, 3, 6, 9)])
def test_merged_parts_are_the_whole(cuts):
    """Over disjoint keys in any order, where a query sees none of a part's keys or none at all, with all gradients."""
    q, k, v = (x.requires_grad_() for x in heads(9, num_heads=3, num_kv_heads=3, head_dim=4))
    allowed = torch.ones(9, 9, dtype=torch.bool).tril(-1)
    want = dense(q, k, v, allowed)
    parts = [dense(q, k[:, :, a:b], v[:, :, a:b], allowed[:, a:b]) for a, b in pairwise(cuts)][::-1]
    parts.insert(1, dense(q, k, v, torch.zeros_like(allowed)))
    got = lg.attention.merge_attention(*zip(*parts, strict=True))
    assert (got[0][:, :, 0] == 0).all() and (got[1][:, :, 0] == -math.inf).all()
    got, want = ([*both, *(g for x in both for g in gradients(x, [q, k, v]))] for both in (got, want))
    close(got, want, atol=1e-13)


def test_merge_in_bfloat16_adds_up_in_float32():
    outs = [torch.randn(1, 2, 5, 4).bfloat16() for _ in range(3)]
    lses = [torch.randn(1, 2, 5) for _ in range(3)]
    out, lse = lg.attention.merge_attention(outs, lses)
    exact, exact_lse = lg.attention.merge_attention([x.double() for x in outs], [x.double() for x in lses])
    assert out.dtype == torch.bfloat16 and lse.dtype == torch.float32
    torch.testing.assert_close(out, exact.bfloat16())
    close(lse.double(), exact_lse, atol=1e-6)


def test_merge_passes_on_what_is_not_finite():
    outs, lses = torch.randn(2, 1, 1, 3, 4), torch.randn(2, 1, 1, 3)
    lses[0, ..., 0], lses[1, ..., 1], outs[1, ..., 2, 0] = math.nan, math.inf, math.nan
    out, lse = lg.attention.merge_attention(list(outs), list(lses))
    assert out[:, :, :2].isnan().all() and out[:, :, 2, 0].isnan() and out[:, :, 2, 1:].isfinite().all()
    assert not lse[:, :, :2].isfinite().any() and lse[:, :, 2].isfinite().all()


OUT, LSE = torch.zeros(1, 2, 3, 4), torch.zeros(1, 2, 3)
test_merge_refuses = refused_calls(
    [
        (partial(lg.attention.merge_attention, outs, lses), "merge_attention")
        for outs, lses in (
            ([], []),
            ([OUT], [LSE, LSE]),
            (OUT, [LSE]),
            ([OUT], [OUT]),
            ([OUT, OUT[:, :, 1:]], [LSE, LSE[:, :, 1:]]),
            ([OUT, OUT.double()], [LSE, LSE]),
            ([OUT, OUT.to("meta")], [LSE, LSE.to("meta")]),
            ([OUT.long()], [LSE]),
        )
    ]
)


# ---- shards of a sequence --------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", ["nope", "rope", "t5", "fire", "rope+clipped"])
@pytest.mark.parametrize("backend", ["auto", "reference", "chunked"])
def test_shards_are_the_whole(name, backend):
    """The first queries by themselves; the others over their own keys, and over those before them, merged."""
    encoding = built(name, KNOWN)
    inputs = q, k, v, *_ = [*(x.requires_grad_() for x in heads(LENGTH)), *encoding.parameters()]
    whole = lg.attend(q, k, v, encoding=encoding, backend="reference")
    early, late, options = slice(0, 23), slice(23, None), {"encoding": encoding, "backend": backend}
    first = lg.attend(q[:, :, early], k[:, :, early], v[:, :, early], **options)
    parts = [
        lg.attend(
            q[:, :, late], k[:, :, keys], v[:, :, keys], mask=mask, q_positions=23, k_positions=keys.start,
            return_lse=True, **options,
        )
        for keys, mask in ((early, lg.NoMask()), (late, lg.Causal()))
    ]  # fmt: skip
    out = torch.cat([first, lg.attention.merge_attention(*zip(*parts, strict=True))[0]], 2)
    close(*([each, *gradients(each, inputs)] for each in (out, whole)), rtol=1e-11)
