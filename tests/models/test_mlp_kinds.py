"""Blocks with RWKV's channel mix, whose last token stands in the cache."""

import pytest
import torch

from longitude.testing import fill
from longitude.testing.battery.models import require_documents_across_calls
from tests.support import close

KINDS = {
    "rwkv4": {"mixer": "rwkv4", "mlp": "rwkv", "embedding_norm": True, "norm": "layernorm"},
    "rwkv6, norms behind": {"mixer": "rwkv6", "mlp": "rwkv", "norm_position": "post"},
}


@pytest.mark.one_in(2)
@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_documents(kind, build):
    model = build(**{"encoding": "auto", **KINDS[kind]}, vocab_size=29)
    require_documents_across_calls(kind, model)


@pytest.mark.parametrize("kind", KINDS)
def test_every_parameter_learns_and_checkpointing_changes_nothing(kind, build, ids):
    model, x = fill(build(**{"encoding": "auto", **KINDS[kind]})).train(), ids(2, 9)
    grads = []
    for again in (False, True):
        if again:
            (getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable)()
        model.zero_grad()
        model(x, labels=x).loss.backward()
        grads.append({name: parameter.grad.clone() for name, parameter in model.named_parameters()})
    for name, grad in grads[0].items():
        assert grad.any(), name
        close(grads[1][name], grad)
