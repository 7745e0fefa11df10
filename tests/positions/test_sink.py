"""Learned sinks: a softmax with one more column, its gradients, and who may compute it."""

import math

import pytest
import torch

import longitude as lg
from tests.support import close, heads, random, refused_calls

Q, K, V = heads(40)
LOGITS = random(4, seed=9)
MASKS = {
    "causal": lg.Causal(),
    "window": lg.Window(4),
    "documents": lg.Causal() & lg.Documents(torch.arange(40) // 13),
    "padding": lg.Causal() & lg.Padding(torch.arange(40) >= torch.tensor([[3], [0]])),
    "global": (lg.Window(3) | lg.Global([1])) & lg.Causal(),
}


def sink(logits=LOGITS):
    made = lg.LearnedSink(4).double()
    made.logits.data.copy_(logits)
    return made


def with_column(q, k, v, logits, mask):
    """The softmax written out: a column of logits that has no value. Output and logsumexp."""
    allowed = mask.allowed(torch.arange(40), torch.arange(40))
    scores = (q @ k.repeat_interleave(2, 1).mT / math.sqrt(8)).masked_fill(~allowed, -math.inf)
    scores = torch.cat([scores, logits[:, None, None].expand(2, 4, 40, 1)], -1)
    return scores.softmax(-1)[..., :-1] @ v.repeat_interleave(2, 1), scores.logsumexp(-1)


@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
def test_every_backend_gives_a_softmax_with_one_more_column(mask):
    """Output, logsumexp, and the gradients of all, of the logits too; queries without keys give zeros."""
    own = sink()
    inputs = [x.clone().requires_grad_() for x in (Q, K, V)]
    able = [each.backend for each in lg.explain(*inputs, encoding=own, mask=mask) if each.refusal is None]
    assert {"reference", "chunked"} <= {*able}
    out, lse = with_column(*inputs, own.logits, mask)
    directions = random(*out.shape, seed=1), random(*lse.shape, seed=2)

    def loss(out, lse):
        return (out * directions[0]).sum() + (lse * directions[1]).sum()

    wanted = [*inputs, own.logits]
    want = torch.autograd.grad(loss(out, lse), wanted)
    for backend in able:
        got = lg.attend(*inputs, encoding=own, mask=mask, return_lse=True, backend=backend)
        close(got, (out, lse))
        close(torch.autograd.grad(loss(*got), wanted), want, 1e-11)
        alone = lg.attend(*inputs, encoding=own, mask=mask, backend=backend)
        close(alone, out)


def test_the_published_gradients():
    """The backward pass with out' and lse' in the place of out and lse; ds_h = -sum_i sigmoid(s_h - lse_i) dout_i . out'_i."""
    own = sink()
    q, k, v = (x.clone().requires_grad_() for x in (Q, K, V))
    out, lse = lg.attend(q, k, v, encoding=own, return_lse=True, backend="table")
    grad = random(*out.shape, seed=3)
    dq, dk, dv, ds = torch.autograd.grad((out * grad).sum(), [q, k, v, own.logits])
    by_query = [x.repeat_interleave(2, 1) for x in (K, V)]
    scores = (Q @ by_query[0].mT / math.sqrt(8)).masked_fill(~torch.ones(40, 40).tril().bool(), -math.inf)
    p = (scores - lse.detach()[..., None]).exp()  # lse'
    delta = (grad * out.detach()).sum(-1)  # out'
    of_scores = p * (grad @ by_query[1].mT - delta[..., None])
    close(dq, of_scores @ by_query[0] / math.sqrt(8), 1e-11)
    close(dk, (of_scores.mT @ Q / math.sqrt(8)).unflatten(1, (2, 2)).sum(2), 1e-11)
    close(dv, (p.mT @ grad).unflatten(1, (2, 2)).sum(2), 1e-11)
    close(ds, -(torch.sigmoid(LOGITS[:, None] - scores.logsumexp(-1)) * delta).sum((0, 2)), 1e-11)


def test_weights_are_those_that_were_applied():
    out, weights = lg.attend(Q, K, V, encoding=sink(), return_weights=True)
    close(weights @ V.repeat_interleave(2, 1), out)
    assert bool((weights.sum(-1) < 1).all())


def test_composed_with_what_adds_to_scores_and_with_a_temperature():
    """In any order; the sink's logit is neither biased nor multiplied."""
    alibi, ssmax = lg.ALiBi(4), lg.testing.example("ssmax")()
    out, lse = lg.attend(Q, K, V, encoding=[alibi, ssmax], return_lse=True)
    want = out * torch.sigmoid(lse - LOGITS[:, None])[..., None]
    for members in ([alibi, ssmax, sink()], [sink(), ssmax, alibi]):
        for backend in ("auto", "reference", "chunked"):
            close(lg.attend(Q, K, V, encoding=members, backend=backend), want)


test_wrong_use = refused_calls([
    (lambda: lg.attend(Q, K, V, encoding=sink(), backend="sdpa"),
     "'sdpa'", "cannot"),
    (lambda: lg.attend(Q, K, V, encoding=sink(), return_weights=True, backend="table"), "'table'", "cannot", "'reference'"),
    (lambda: lg.Composed([lg.LearnedSink(4), lg.LearnedSink(4)]), "LearnedSink"),
    (lambda: lg.attend(Q[:, :2], K, V, encoding=sink()), "LearnedSink", "num_heads=4", "2"),
])  # fmt: skip
