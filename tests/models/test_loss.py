"""The loss: cross-entropy of next tokens, whole or in chunks, divided as Trainer asks."""

import pytest
import torch
import torch.nn.functional as F

from longitude.models import causal as room
from longitude.models.causal import IGNORED, next_token_loss
from tests.support import LargestTensor, close, random

VOCABULARY = 61


def problem(length=17, dtype=torch.float64):
    hidden, weight = random(3, length, 8, dtype=dtype), random(VOCABULARY, 8, seed=1, dtype=dtype)
    targets = torch.randint(0, VOCABULARY, (3, length))
    targets[:, ::5] = IGNORED
    return hidden.requires_grad_(), weight.requires_grad_(), targets


def loss_of(hidden, weight, targets, items=None):
    return next_token_loss(hidden, lambda x: F.linear(x, weight), VOCABULARY, targets, items)


@pytest.mark.parametrize("held", [1, VOCABULARY, 7 * VOCABULARY + 3, 50 * VOCABULARY, 51 * VOCABULARY])
def test_chunks_are_the_whole(held, monkeypatch):
    """51 tokens in chunks of 1, 1, 7, 50 and 51: loss and gradients."""
    hidden, weight, targets = problem()
    whole = loss_of(hidden, weight, targets)
    monkeypatch.setattr(room, "CHUNK_LOGITS", held)
    chunked = loss_of(hidden, weight, targets)
    close(chunked, whole)
    close(*(torch.autograd.grad(loss, (hidden, weight)) for loss in (chunked, whole)))


def test_long_logits_are_never_held(build, ids, monkeypatch):
    """In training neither forward nor backward makes [length, vocabulary]; in evaluation the caller gets the logits."""
    model, x = build(vocab_size=997, max_position_embeddings=256), ids(2, 200)
    monkeypatch.setattr(room, "CHUNK_LOGITS", 2**14)
    with LargestTensor() as made:
        out = model.train()(x, labels=x)
        out.loss.backward()
    assert out.logits is None
    assert made.elements <= 2 * 4 * 200 * 200  # the scores of a batch of two, four heads; 320,000 < 398,800
    with LargestTensor() as made:
        out = model.eval()(x, labels=x)
    assert out.logits.shape == (2, 200, 997) and made.elements == out.logits.numel()
    assert model(x).logits is not None


def test_half_precision_sums_in_float32():
    """bfloat16 logits, but a loss as exact as these logits allow."""
    hidden, weight, targets = problem(300, dtype=torch.bfloat16)
    loss = loss_of(hidden, weight, targets)
    assert loss.dtype == torch.float32
    logits = (hidden @ weight.T).double().flatten(0, 1)
    exact = F.cross_entropy(logits, targets.flatten(), ignore_index=IGNORED)
    torch.testing.assert_close(loss.double(), exact, atol=0, rtol=1e-6)
