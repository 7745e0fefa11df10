"""One request of attention at a time, for tests of backends that are called by hand."""

from typing import Any

import torch

import longitude as lg
from longitude.attention.backends.triton import launch
from longitude.attention.masks import Band, Prefix
from longitude.attention.operation import requests
from longitude.attention.reference import reference
from longitude.attention.request import Request
from longitude.positions.composed import compose
from longitude.testing import attend_calls
from tests.support import built, close, random

HEADS, DIM, WIDTH = 4, 16, 8
INPUTS = 4
"""Of the tensors that want gradients: q, k, v and tokens; the rest are parameters."""
KNOWN = {"num_heads": HEADS, "num_kv_heads": HEADS, "head_dim": DIM, "dim": WIDTH, "max_length": 512, "layout": "half"}


def problem(
    rows,
    keys,
    *,
    names="alibi",
    mask=None,
    heads=HEADS,
    kv_heads=2,
    dv=DIM,
    dtype=torch.float32,
    values=(),
    **positions,
) -> Any:
    """A request, and what may want gradients: q, k, v, tokens, parameters; values: theirs, of another dtype."""
    encoding = built(names, {**KNOWN, "num_heads": heads, "num_kv_heads": heads}, dtype=dtype)
    shapes = (2, heads, rows, DIM), (2, kv_heads, keys, DIM), (2, kv_heads, keys, dv), (2, keys, WIDTH)
    inputs = [torch.randn(shape).to(dtype).requires_grad_() for shape in shapes]
    for leaf, value in zip([*inputs, *encoding.parameters()], values):
        leaf.data.copy_(value)
    q, k, v, x = inputs
    (part,) = requests(q, k, v, encoding, compose(encoding).context(x)[0], mask or lg.Causal(), **positions)
    return part.request, [*inputs, *encoding.parameters()]


def compare(run, r: Request, wanted, tolerance=1e-5, exact=None):
    """The output relative to its largest number; gradients, sums of many rounded products, five times as near.

    A parameter's are sums over rows as well. The gradients of a row's scores sum to zero but for the rounding of its output, and
    what that leaves grows with the root of the rows. exact: the problem that `reference` solves, by default the same.
    """
    of_reference, exact_wanted = exact or (r, wanted)
    ours, theirs = run(r), reference(of_reference)[0]
    assert ours.dtype == r.q.dtype
    close(ours.to(theirs.dtype), theirs, atol=tolerance * theirs.abs().max().item())
    if wanted and ours.requires_grad:
        direction = random(*ours.shape).to(ours)
        options = {"allow_unused": True, "materialize_grads": True, "retain_graph": True}
        pairs = (ours, wanted), (theirs, exact_wanted)
        grads = (torch.autograd.grad(out, leaves, direction.to(out.dtype), **options) for out, leaves in pairs)
        rows = r.q.shape[:-1].numel()
        for i, (a, b) in enumerate(zip(*grads, strict=True)):
            close(
                a.to(b.dtype), b, atol=(5 if i < INPUTS else max(5, rows**0.5)) * tolerance * (1 + b.abs().max().item())
            )


def masks(keys: int) -> dict[str, lg.Mask]:
    """Those of the laws, and bands and prefixes."""
    return attend_calls.masks(2, keys, False) | {
        "band": Band(9, 40) & Band(30, 30),
        "band and causal": Band(9, 40) & lg.Causal(),
        "prefix": Prefix(30),
        "prefix of each row": Prefix(torch.tensor([7, 100])) & lg.Padding(torch.arange(keys) > 3),
    }


def small_blocks_of(kernel: str, x: object) -> launch.Blocks:
    """Several of each kind in a short sequence, none of them alike in queries and keys where they need not be."""
    size = (16, 32) if kernel == "forward" else (32, 16)
    return launch.Blocks(*size, 4, 1, STRIP=kernel != "backward_queries")  # both ways to load the table
