"""torch.compile takes the whole model, and does not begin again at every length."""

import pytest
import torch
import torch._dynamo
from torch._dynamo.testing import CompileCounter

import longitude as lg

LENGTHS = [7, 9, 12, 13, 15, 16, 17, 21, 24, 31, 32, 33, 40, 45, 48, 50, 55, 58, 63, 64]
QUICK = ["rope", "t5", "alibi"]
SPECS = [
    pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in lg.encodings() if "path" not in name
]


@pytest.mark.parametrize("spec", SPECS)
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
