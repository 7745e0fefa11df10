"""The loss: cross-entropy of next tokens, whole or in chunks, divided as Trainer asks."""

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.loss.loss_utils import ForCausalLMLoss

from longitude.models import loss as room
from longitude.models.loss import IGNORED, next_token_loss

VOCABULARY = 61


def problem(batch=3, length=17, dim=8, dtype=torch.float64):
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(batch, length, dim, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
    weight = torch.randn(VOCABULARY, dim, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
    targets = torch.randint(0, VOCABULARY, (batch, length), generator=generator)
    targets[:, ::5] = IGNORED
    return hidden, weight, targets


def loss_of(hidden, weight, targets, items=None):
    return next_token_loss(hidden, lambda x: F.linear(x, weight), VOCABULARY, targets, items)


def close(x, y):
    torch.testing.assert_close(x, y, atol=1e-12, rtol=1e-12)


def test_equals_cross_entropy():
    hidden, weight, targets = problem()
    theirs = F.cross_entropy((hidden @ weight.T).flatten(0, 1), targets.flatten(), ignore_index=IGNORED)
    close(loss_of(hidden, weight, targets), theirs)
    count = int((targets != IGNORED).sum())
    for said in (100, torch.tensor(100)):
        close(loss_of(hidden, weight, targets, said), theirs * count / 100)


@pytest.mark.parametrize("items", [None, 77])
def test_equals_transformers(items, build, ids):
    """Labels are shifted, -100 is skipped, and the divisor is what Trainer passes."""
    model, x = build().float(), ids(3, 20)
    labels = x.clone()
    labels[:, 4:7] = IGNORED
    out = model(x, labels=labels, num_items_in_batch=items)
    theirs = ForCausalLMLoss(out.logits, labels, VOCABULARY, num_items_in_batch=items)
    torch.testing.assert_close(out.loss, theirs)
    shifted = F.pad(labels[:, 1:], (0, 1), value=IGNORED)
    torch.testing.assert_close(model(x, shift_labels=shifted, num_items_in_batch=items).loss, out.loss)


@pytest.mark.parametrize("held", [1, VOCABULARY, 7 * VOCABULARY + 3, 50 * VOCABULARY, 51 * VOCABULARY])
def test_chunks_are_the_whole(held, monkeypatch):
    """51 tokens in chunks of 1, 1, 7, 50 and 51: loss and gradients."""
    hidden, weight, targets = problem()
    whole = loss_of(hidden, weight, targets)
    monkeypatch.setattr(room, "CHUNK_LOGITS", held)
    chunked = loss_of(hidden, weight, targets)
    close(chunked, whole)
    for ours, theirs in zip(*(torch.autograd.grad(x, (hidden, weight)) for x in (chunked, whole)), strict=True):
        close(ours, theirs)


class Largest(TorchDispatchMode):
    """Elements of the largest tensor that any operation made."""

    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for x in out if isinstance(out, tuple | list) else (out,):
            if isinstance(x, torch.Tensor):
                self.elements = max(self.elements, x.numel())
        return out


def test_long_logits_are_never_held(build, ids, monkeypatch):
    """In training neither forward nor backward makes [length, vocabulary]; in evaluation the caller gets the logits."""
    model, x = build(vocab_size=997, max_position_embeddings=256), ids(2, 200)
    monkeypatch.setattr(room, "CHUNK_LOGITS", 2**14)
    with Largest() as made:
        out = model.train()(x, labels=x)
        out.loss.backward()
    assert out.logits is None
    assert made.elements <= 2 * 4 * 200 * 200  # the scores of a batch of two, four heads; 320,000 < 398,800
    with Largest() as made:
        out = model.eval()(x, labels=x)
    assert out.logits.shape == (2, 200, 997) and made.elements == out.logits.numel()
    assert model(x, labels=x, skip_logits=True).logits is None
    assert model.train()(x, labels=x, skip_logits=False).logits is not None
    assert model(x).logits is not None


def test_half_precision_sums_in_float32():
    """bfloat16 logits, but a loss as exact as these logits allow."""
    hidden, weight, targets = problem(3, 300, dtype=torch.bfloat16)
    loss = loss_of(hidden, weight, targets)
    assert loss.dtype == torch.float32
    logits = (hidden @ weight.T).double().flatten(0, 1)
    exact = F.cross_entropy(logits, targets.flatten(), ignore_index=IGNORED)
    torch.testing.assert_close(loss.double(), exact, atol=0, rtol=1e-6)


def test_the_loss_predicts_nothing_from_padding_nor_across_documents(build, ids):
    """Each position alone: its share of the gradient of the embeddings that it reads."""
    model, x = build("none"), ids(1, 6)
    mask, documents = torch.tensor([[0, 0, 1, 1, 1, 1]]), torch.tensor([[0, 0, 0, 0, 1, 1]])
    expected = model(x[:, 2:4], labels=x[:, 2:4]).loss + model(x[:, 4:], labels=x[:, 4:]).loss
    loss = model(x, labels=x, attention_mask=mask, document_ids=documents).loss
    close(2 * loss, expected)
