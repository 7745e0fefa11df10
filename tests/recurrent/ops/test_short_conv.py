"""Token shift and short convolution against their definition: look back over the valid tokens of one's document."""

import pytest
import torch

from longitude.recurrent.ops.short_conv import causal_conv, previous


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


def numbers(kernel, length):
    """Tokens [3, length, 5], weight, bias, resets and padding."""
    x, weight, bias = (torch.randn(shape, dtype=torch.float64) for shape in ((3, length, 5), (5, kernel), (5,)))
    return x, weight, bias, torch.rand(3, length) < 0.3, torch.rand(3, length) < 0.6


@pytest.mark.parametrize("cuts", ["whole", "chunks", "one at a time"])
@pytest.mark.parametrize("flags", [(), ("reset",), ("valid",), ("reset", "valid")], ids=str)
@pytest.mark.parametrize("kernel", [1, 2, 4, 6])
def test_convolution_of_valid_tokens(kernel, flags, cuts):
    """However the tokens come in: calls may be shorter than the kernel, and padding may stand anywhere."""
    length = 13
    x, weight, bias, reset, valid = numbers(kernel, length)
    reset, valid = reset if "reset" in flags else None, valid if "valid" in flags else None
    sizes = {"whole": [13], "chunks": [2, 7, 4], "one at a time": [1] * 13}[cuts]
    parts, tail = [], None
    for some in torch.arange(length).split(sizes):
        here = (None if flag is None else flag[:, some] for flag in (reset, valid))
        part, tail = causal_conv(x[:, some], weight, bias, tail, *here)
        parts.append(part)
    taken = torch.ones(3, length, dtype=torch.bool) if valid is None else valid
    torch.testing.assert_close(torch.cat(parts, 1)[taken], looked_back(x, weight, bias, reset, valid)[taken])
    assert tail is not None and tail.shape == (3, kernel - 1, 5)


def test_previous_is_the_token_before():
    x = torch.tensor([[[1.0], [2.0], [3.0], [4.0]]])
    before, tail = previous(x)
    assert before.flatten().tolist() == [0, 1, 2, 3] and tail.flatten().tolist() == [4]
    before, tail = previous(x, tail)
    assert before.flatten().tolist() == [4, 1, 2, 3]
    before, tail = previous(x, tail, torch.tensor([[False, False, True, False]]))
    assert before.flatten().tolist() == [4, 1, 0, 3]
    before, tail = previous(x, tail, None, torch.tensor([[True, False, True, False]]))
    assert before[0, [0, 2], 0].tolist() == [4, 1] and tail.flatten().tolist() == [3]


def test_gradients():
    x, weight, bias, reset, valid = numbers(3, 7)
    tail = torch.randn(3, 2, 5, dtype=torch.float64)
    given = [t[:2, :, :2].requires_grad_() if t.dim() == 3 else t[:2].requires_grad_() for t in (x, weight, bias, tail)]
    reset, valid = reset[:2], valid[:2]
    for flags in ((None, None), (reset, valid)):
        assert torch.autograd.gradcheck(lambda *a, flags=flags: causal_conv(*a, *flags), given)


def test_bfloat16_keeps_its_tail_wide():
    x, weight, bias, *_ = numbers(4, 9)
    out, tail = causal_conv(x.bfloat16(), weight, bias)
    assert out.dtype == torch.bfloat16 and tail.dtype == torch.float32
    again, _ = causal_conv(x.bfloat16()[:, :5], weight, bias, tail)
    assert again.dtype == torch.bfloat16


def test_wrong_shapes_are_named():
    x = torch.randn(2, 5, 3)
    with pytest.raises(ValueError, match=r"weight: expected \[3, K\].*got \[4, 2\]"):
        causal_conv(x, torch.randn(4, 2))
    with pytest.raises(ValueError, match=r"tail \[2, 3, 3\], got \[2, 2, 3\]"):
        causal_conv(x, torch.randn(3, 4), tail=torch.randn(2, 2, 3))
    with pytest.raises(ValueError, match="tail"):
        previous(x, torch.randn(2, 2, 3))
