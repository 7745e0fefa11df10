"""Mamba, Falcon-Mamba and Mamba-2 at toy size: the logits, tokens and gradients of transformers."""

import pytest
import torch

import longitude as lg
from tests.checkpoints.copied import of_mamba
from tests.checkpoints.recurrent_models import CASES, in_float64, in_steps, logits, some_ids, theirs
from tests.support import close


@pytest.fixture
def ids():
    return some_ids()


@pytest.mark.one_in(5)
@pytest.mark.parametrize("case", CASES)
def test_logits_are_equal(case, tmp_path, ids):
    model = theirs(case)
    want = logits(model, ids)
    assert want.abs().max() > 0.3
    ours = of_mamba(model)
    close(logits(ours, ids), want, atol=1e-5)
    with in_float64():
        want = logits(model.double(), ids)
    wide = of_mamba(model)
    close(logits(wide, ids), want)
    close(in_steps(wide, ids), want)
    wide.save_pretrained(tmp_path)
    close(logits(lg.LongitudeForCausalLM.from_pretrained(tmp_path, dtype=torch.float64), ids), want)


@pytest.mark.parametrize("case", ["mamba", "mamba2"])
def test_gradients_are_equal(case, ids):
    """Of every parameter, by our name of it."""
    model = theirs(case).double().train()
    ours = of_mamba(model)
    assert ours.training
    with in_float64():
        model(ids, labels=ids, use_cache=False).loss.backward()
    ours(ids, labels=ids).loss.backward()
    for parameter in model.parameters():
        parameter.data, parameter.grad = parameter.grad, None
    want = of_mamba(model)
    for (name, got), grad in zip(ours.named_parameters(), want.parameters(), strict=True):
        close(got.grad, grad.data, atol=1e-11), name
