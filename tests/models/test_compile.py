"""torch.compile takes the whole model, and does not begin again at every length."""

import pytest
import torch
import torch._dynamo
from torch._dynamo.testing import CompileCounter

import longitude as lg

LENGTHS = [7, 9, 12, 13, 15, 16, 17, 21, 24, 31, 32, 33, 40, 45, 48, 50, 55, 58, 63, 64]
pytestmark = pytest.mark.slow  # the law of compilation is quick for one encoding in tests/testing/test_laws.py


@pytest.mark.parametrize("spec", [name for name in lg.list_encodings() if "path" not in name])
@torch.no_grad()
def test_at_most_two_graphs(spec, build, ids):
    """Whole (fullgraph), 20 lengths, the same logits. Reflections go token by token, so `path` is not among them."""
    torch._dynamo.reset()
    model, graphs = build(spec), CompileCounter()
    compiled = torch.compile(lambda x: model(x, use_cache=False).logits, backend=graphs, fullgraph=True)
    for length in LENGTHS:
        x = ids(2, length)
        torch.testing.assert_close(compiled(x), model(x).logits, atol=1e-10, rtol=0)
    assert graphs.frame_count <= 2
    torch._dynamo.reset()


@pytest.mark.parametrize("spec", ["rope", "t5"])
@torch.no_grad()
def test_padding_does_not_break_the_graph(spec, build, ids):
    torch._dynamo.reset()
    model, graphs = build(spec), CompileCounter()
    compiled = torch.compile(
        lambda x, mask: model(x, attention_mask=mask, use_cache=False).logits, backend=graphs, fullgraph=True
    )
    for length in LENGTHS[:8]:
        x, mask = ids(2, length), torch.arange(length) >= torch.tensor([[0], [3]])
        ours, theirs = compiled(x, mask.long()), model(x, attention_mask=mask.long()).logits
        torch.testing.assert_close(ours[mask], theirs[mask], atol=1e-10, rtol=0)
    assert graphs.frame_count <= 2
    torch._dynamo.reset()


def test_training_compiles(build, ids):
    """Forward, loss and backward in one graph each: the gradients of the eager model."""
    torch._dynamo.reset()
    model = build("t5").train()
    compiled = torch.compile(lambda x: model(x, labels=x).loss, backend="aot_eager", fullgraph=True)
    for length in (7, 12):
        x = ids(2, length)
        both = (
            torch.autograd.grad(run(x), list(model.parameters()))
            for run in (compiled, lambda x: model(x, labels=x).loss)
        )
        for ours, theirs in zip(*both, strict=True):
            torch.testing.assert_close(ours, theirs, atol=1e-10, rtol=0)
    torch._dynamo.reset()
