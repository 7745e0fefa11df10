"""none, sinusoidal, learned: codes against the published numbers."""

import math

import pytest
import torch
from transformers.models.gptj.modeling_gptj import create_sinusoidal_positions

import longitude as lg


def codes(encoding: lg.Sinusoidal, *positions: int) -> torch.Tensor:
    """What is added to zeros [positions, dim]."""
    x = torch.zeros(1, len(positions), encoding.dim, dtype=torch.float64)
    return encoding.embed(x, torch.tensor(positions))[0]


def test_none_does_nothing() -> None:
    x, encoding = torch.randn(2, 7, 16), lg.NoPosition()
    assert torch.equal(encoding.embed(x, torch.arange(7)), x)
    assert encoding.terms({}) == () and encoding.prepare(torch.arange(7)) is None
    q, k, v = torch.randn(3, 2, 4, 7, 8)
    plain = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    torch.testing.assert_close(lg.attend(q, k, v, encoding=encoding), plain)


# Vaswani et al. 2017, section 3.5: sin(p / 10000^(2i/d)) at 2i, cos at 2i + 1.
def test_sinusoidal_golden() -> None:
    near = {"atol": 5e-8, "rtol": 0}
    four = torch.tensor([0.1411200, -0.9899925, 0.0299955, 0.9995500], dtype=torch.float64)
    torch.testing.assert_close(codes(lg.Sinusoidal(4), 3)[0], four, **near)
    wide = codes(lg.Sinusoidal(512), 100)[0]
    golden = torch.tensor([-0.5063656, 0.8623189, 0.7975424, -0.6032629, 0.01036614, 0.9999463], dtype=torch.float64)
    torch.testing.assert_close(wide[[0, 1, 2, 3, 510, 511]], golden, **near)
    assert codes(lg.Sinusoidal(6), 0)[0].tolist() == [0, 1, 0, 1, 0, 1]


def test_sinusoidal_half_layout_is_that_of_an_independent_table() -> None:
    table = create_sinusoidal_positions(50, 16).double()
    ours = codes(lg.Sinusoidal(16, layout="half"), *range(50))
    torch.testing.assert_close(ours, table, atol=1e-5, rtol=0)
    interleaved = codes(lg.Sinusoidal(16), *range(50))
    assert torch.equal(interleaved[:, ::2], ours[:, :8]) and torch.equal(interleaved[:, 1::2], ours[:, 8:])


def test_tensor2tensor_frequencies() -> None:
    """Its slowest is exactly 1/base, where the paper's is base^(-(d-2)/d): 1.0366329e-4 for d = 512."""
    slowest = [
        codes(lg.Sinusoidal(512, frequencies=f, layout="half"), 1)[0, 255].item() for f in ("tensor2tensor", "paper")
    ]
    assert slowest[0] == pytest.approx(math.sin(1e-4), rel=1e-12)
    assert slowest[1] == pytest.approx(math.sin(1.0366329e-4), rel=1e-7)


@pytest.mark.parametrize("layout", ["interleaved", "half"])
def test_odd_width_drops_the_last_cosine(layout: str) -> None:
    odd = codes(lg.Sinusoidal(5, layout=layout), 0, 3)
    half = (
        [math.sin(3 * 10_000 ** (-2 * i / 5)) for i in range(3)],
        [math.cos(3 * 10_000 ** (-2 * i / 5)) for i in range(2)],
    )
    s, c = half
    want = [s[0], c[0], s[1], c[1], s[2]] if layout == "interleaved" else [*s, *c]
    torch.testing.assert_close(odd[1], torch.tensor(want, dtype=torch.float64), atol=1e-12, rtol=0)


def test_dot_product_of_two_codes_knows_their_offset_alone() -> None:
    c = codes(lg.Sinusoidal(32), *range(40))
    dots = c @ c.T
    for offset in (0, 1, 13):
        w = 10_000 ** (-torch.arange(0, 32, 2, dtype=torch.float64) / 32)
        torch.testing.assert_close(dots.diagonal(offset), (offset * w).cos().sum().expand(40 - offset))


def test_sinusoidal_far_positions() -> None:
    """Within 1e-6 of float64, and neighbours differ, in a float32 and a bfloat16 model."""
    far = torch.tensor([100_003, 131_070, 131_071])
    want = torch.tensor([[math.sin(p * 10_000 ** (-2 * i / 16)) for i in range(8)] for p in far.tolist()])
    for dtype, tolerance in ((torch.float32, 1e-6), (torch.bfloat16, 2**-9)):
        got = lg.Sinusoidal(16).to(dtype).embed(torch.zeros(1, 3, 16, dtype=dtype), far)[0, :, ::2]
        assert got.dtype == dtype
        assert float((got.double() - want).abs().max()) <= tolerance
        assert not torch.equal(got[1], got[2])


def test_learned_rows() -> None:
    encoding = lg.Learned(10, 4, row_offset=2)
    assert encoding.table.shape == (12, 4)
    assert 0.01 < float(encoding.table.detach().std()) < 0.03
    x = torch.randn(2, 3, 4)
    positions = torch.tensor([[0, 1, 9], [5, 5, 0]])
    torch.testing.assert_close(encoding.embed(x, positions), x + encoding.table[positions + 2])
    encoding.embed(x, positions).sum().backward()
    assert encoding.table.grad is not None
    assert encoding.table.grad[:, 0].tolist() == [0, 0, 2, 1, 0, 0, 0, 2, 0, 0, 0, 1]


def test_learned_ends_at_its_table() -> None:
    with pytest.raises(ValueError, match=r"Learned: expected positions 0 .. 9, got 3 .. 10"):
        lg.Learned(10, 4).embed(torch.zeros(1, 8, 4), torch.arange(3, 11))


WRONG = [
    (lambda: lg.Sinusoidal(0), "dim"),
    (lambda: lg.Sinusoidal(4, base=0.0), "base"),
    (lambda: lg.Sinusoidal(4, base=float("nan")), "base"),
    (lambda: lg.Sinusoidal(4, layout="halves"), "'interleaved' or 'half', got 'halves'"),
    (lambda: lg.Sinusoidal(4, frequencies="t2t"), "'paper' or 'tensor2tensor', got 't2t'"),
    (lambda: lg.Sinusoidal(4).embed(torch.zeros(1, 2, 5), torch.arange(2)), r"\[B, L, 4\], got \[1, 2, 5\]"),
    (lambda: lg.Learned(-1, 4), "max_length"),
    (lambda: lg.Learned(8, 4, row_offset=-1), "row_offset"),
    (lambda: lg.Learned(8, 4).embed(torch.zeros(1, 2, 4), torch.tensor([-1, 0])), "got -1 .. 0"),
    (lambda: lg.Learned(8, 4).embed(torch.zeros(1, 2, 4), torch.tensor([0.5, 1])), "integer positions"),
]


@pytest.mark.parametrize(("call", "message"), WRONG, ids=[message for _, message in WRONG])
def test_wrong_options(call, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()
