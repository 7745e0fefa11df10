"""Token shift and short convolution against their definition: look back over the valid tokens of one's document."""

import pytest
import torch

from longitude.recurrent.ops.short_conv import causal_conv, previous
from tests.support import random, refused_calls


def looked_back(x, weight, bias, reset=None, valid=None):
    """Token after token, with a list of those before."""
    out = torch.zeros_like(x)
    for b in range(len(x)):
        taken = []
        for t in range(x.shape[1]):
            if valid is not None and not valid[b, t]:
                continue
            taken = [] if reset is not None and reset[b, t] else taken
            taken.append(x[b, t])
            out[b, t] = bias + sum(weight[:, -1 - j] * taken[-1 - j] for j in range(min(weight.shape[1], len(taken))))
    return out


@pytest.mark.parametrize("cuts", ["whole", "chunks", "one at a time"])
@pytest.mark.parametrize("flags", [(), ("reset",), ("valid",), ("reset", "valid")], ids=str)
@pytest.mark.parametrize("kernel", [1, 2, 4, 6])
def test_convolution_of_valid_tokens(kernel, flags, cuts):
    """However the tokens come in: calls may be shorter than the kernel, and padding may stand anywhere."""
    length = 13
    x, weight, bias = random(3, length, 5), random(5, kernel), random(5)
    reset = torch.rand(3, length) < 0.3 if "reset" in flags else None
    valid = torch.rand(3, length) < 0.6 if "valid" in flags else None
    sizes = {"whole": [13], "chunks": [2, 7, 4], "one at a time": [1] * 13}[cuts]
    parts, tail = [], None
    for some in torch.arange(length).split(sizes):
        here = (None if flag is None else flag[:, some] for flag in (reset, valid))
        part, tail = causal_conv(x[:, some], weight, bias, tail, *here)
        parts.append(part)
    taken = torch.ones(3, length, dtype=torch.bool) if valid is None else valid
    torch.testing.assert_close(torch.cat(parts, 1)[taken], looked_back(x, weight, bias, reset, valid)[taken])
    assert tail is not None and tail.shape == (3, kernel - 1, 5)


X = torch.ones(2, 5, 3)
test_refusals = refused_calls(
    [
        (lambda: causal_conv(X, torch.ones(4, 2)), r"weight: expected \[3, K\].*got \[4, 2\]"),
        (lambda: causal_conv(X, torch.ones(3, 4), tail=torch.ones(2, 2, 3)), r"tail \[2, 3, 3\], got \[2, 2, 3\]"),
        (lambda: previous(X, torch.ones(2, 2, 3)), "tail"),
    ]
)
