"""none, sinusoidal, learned: codes against the published numbers."""

import json
import math
from pathlib import Path

import pytest
import torch
from transformers.models.gptj.modeling_gptj import create_sinusoidal_positions

import longitude as lg
from tests.support import refused_calls

GOLDEN = json.loads((Path(__file__).parents[1] / "golden" / "biases.json").read_text())
EXACT = {"atol": 1e-12, "rtol": 0}


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


def test_tensor2tensor_codes_are_those_of_independent_ports() -> None:
    """fairseq's, in two ports: all sines, all cosines, and a column of zeros where the width is odd."""
    for row in GOLDEN["fairseq_sinusoids_at_0_to_11"]:
        ours = codes(lg.Sinusoidal(row["dim"], layout="half", frequencies="tensor2tensor"), *range(12))
        torch.testing.assert_close(ours, torch.tensor(row["codes"], dtype=torch.float64), atol=2e-6, rtol=0)
        assert not row["dim"] % 2 or not bool(ours[:, -1].any())


def test_tensor2tensor_frequencies_interleaved() -> None:
    """w_i = base^(-i/(dim/2 - 1)): 1, 1/10, 1/100 for base 100. An odd width ends in zeros."""
    for dim in (6, 7):
        ours = codes(lg.Sinusoidal(dim, base=100.0, frequencies="tensor2tensor"), 5)[0]
        want = [f(5 * w) for w in (1, 0.1, 0.01) for f in (math.sin, math.cos)] + [0] * (dim - 6)
        torch.testing.assert_close(ours, torch.tensor(want, dtype=torch.float64), **EXACT)
    pair = codes(lg.Sinusoidal(2, frequencies="tensor2tensor"), 5)[0]  # one frequency: 1
    assert pair.tolist() == pytest.approx([math.sin(5), math.cos(5)], abs=1e-12)


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
    assert codes(lg.Sinusoidal(1, layout=layout), 3).item() == pytest.approx(math.sin(3), abs=1e-12)


@pytest.mark.parametrize("layout", ["interleaved", "half"])
@pytest.mark.parametrize("frequencies", ["paper", "tensor2tensor"])
def test_rows_of_positions(layout: str, frequencies: str) -> None:
    """Positions [B, L]: each row as it is alone, of an even and an odd width."""
    for dim in (6, 7):
        encoding, positions = (
            lg.Sinusoidal(dim, layout=layout, frequencies=frequencies),
            torch.tensor([[0, 1, 2], [9, 4, 0]]),
        )
        want = torch.stack([codes(encoding, *row) for row in positions.tolist()])
        assert torch.equal(encoding.embed(torch.zeros(2, 3, dim, dtype=torch.float64), positions), want)


def test_learned_rows() -> None:
    encoding = lg.Learned(10, 4, row_offset=2)
    assert encoding.table.shape == (12, 4)
    start = lg.Learned(1000, 1000).table.detach()
    assert float(start.mean()) == pytest.approx(0, abs=2e-4) and float(start.std()) == pytest.approx(0.02, rel=0.005)
    x = torch.randn(2, 3, 4)
    positions = torch.tensor([[0, 1, 9], [5, 5, 0]])
    torch.testing.assert_close(encoding.embed(x, positions), x + encoding.table[positions + 2])
    encoding.embed(x, positions).sum().backward()
    assert encoding.table.grad is not None
    assert encoding.table.grad[:, 0].tolist() == [0, 0, 2, 1, 0, 0, 0, 2, 0, 0, 0, 1]


def test_learned_ends_at_its_table() -> None:
    with pytest.raises(ValueError, match=r"Learned: expected positions 0 .. 9, got 3 .. 10"):
        lg.Learned(10, 4).embed(torch.zeros(1, 8, 4), torch.arange(3, 11))


# ---- beyond the table: Gehring et al. 2017 say nothing of it ------------------------------------------------------------
def columns(*rows: float, **options) -> lg.Learned:
    """A table of one column with these numbers."""
    encoding = lg.Learned(len(rows), 1, **options).double()
    with torch.no_grad():
        encoding.table[encoding.row_offset :, 0] = torch.tensor(rows)
    return encoding


def read(encoding: lg.Learned, positions: torch.Tensor) -> torch.Tensor:
    """What is added to zeros, [tokens]."""
    return encoding.embed(torch.zeros(1, positions.shape[-1], 1, dtype=torch.float64), positions)[0, :, 0].detach()


@pytest.mark.parametrize("row_offset", [0, 2])
@pytest.mark.parametrize(
    ("align", "golden"), [("end", [0, 6, 12, 18, 24, 30]), ("start", [0, 20 / 3, 40 / 3, 20, 80 / 3, 30])]
)
def test_interpolated_golden(align: str, golden: list[float], row_offset: int) -> None:
    encoding = columns(0, 10, 20, 30, beyond="interpolate", length=6, align=align, row_offset=row_offset)
    assert encoding.max_length == 6 and encoding.table.shape == (4 + row_offset, 1)
    torch.testing.assert_close(read(encoding, torch.arange(6)), torch.tensor(golden, dtype=torch.float64), **EXACT)
    torch.testing.assert_close(
        read(encoding, torch.tensor([5, 1, 1]).int()), torch.tensor([30.0, golden[1], golden[1]]).double()
    )
    with pytest.raises(ValueError, match=r"Learned: expected positions 0 .. 5, got 0 .. 6"):
        read(encoding, torch.arange(7))


def test_interpolated_from_the_end_by_default() -> None:
    assert read(columns(0, 10, beyond="interpolate", length=3), torch.arange(3)).tolist() == [0, 5, 10]
    assert read(columns(7, beyond="interpolate", length=3), torch.arange(3)).tolist() == [7, 7, 7]


@pytest.mark.parametrize("align", ["end", "start"])
def test_interpolation_is_exact_for_whole_rows_and_a_long_table(align: str) -> None:
    """Rows that are read whole are the table's very numbers, where p (M-1)/(L-1) in floating point may fall short."""
    encoding = lg.Learned(4096, 3, beyond="interpolate", length=8191 if align == "end" else 8192, align=align)
    got = encoding.embed(torch.zeros(1, 4096, 3), torch.arange(0, 8191, 2))[0]
    assert torch.equal(got, encoding.table)


def test_interpolation_of_far_int32_positions_does_not_overflow() -> None:
    """Position times row is 2^33 here."""
    encoding = lg.Learned(65_537, 1, beyond="interpolate", length=131_073)
    last = encoding.codes(torch.tensor([131_072], dtype=torch.int32))
    assert torch.equal(last, encoding.table[-1:])


@pytest.mark.parametrize("align", ["end", "start"])
def test_interpolated_gradients(align: str) -> None:
    encoding = lg.Learned(4, 3, row_offset=1, beyond="interpolate", length=9, align=align).double()
    x, positions = torch.randn(2, 9, 3, dtype=torch.float64), torch.arange(9)

    assert torch.autograd.gradcheck(lambda table: encoding.embed(x, positions), [encoding.table])  # moves it in place
    (grad,) = torch.autograd.grad(encoding.embed(x, positions).sum(), [encoding.table])
    assert not bool(grad[0].any()) and bool((grad[1:] != 0).all())


def test_interpolation_is_not_in_the_models_bfloat16() -> None:
    """Between 256 and 260 bfloat16 has 258 alone; the embedding in float32 is a third of the way."""
    low = columns(256, 260, beyond="interpolate", length=4).bfloat16()
    got = low.embed(torch.zeros(1, 4, 1), torch.arange(4))[0, :, 0]
    assert got.tolist() == pytest.approx([256, 256 + 4 / 3, 256 + 8 / 3, 260], abs=1e-4)
    assert low.embed(torch.zeros(1, 4, 1).bfloat16(), torch.arange(4)).dtype == torch.bfloat16


def test_clamped() -> None:
    encoding = columns(1, 2, 3, beyond="clamp", row_offset=1)
    assert encoding.max_length is None
    assert read(encoding, torch.tensor([0, 1, 2, 3, 131_071])).tolist() == [1, 2, 3, 3, 3]
    (grad,) = torch.autograd.grad(encoding.codes(torch.tensor([1, 2, 7])).sum(), [encoding.table])
    assert grad[:, 0].tolist() == [0, 0, 1, 2]
    with pytest.raises(ValueError, match=r"positions of 0 or more, got -1 .. 4"):
        read(encoding, torch.tensor([4, -1]))


def test_truncated() -> None:
    encoding = columns(1, 2, 3, beyond="truncate")
    assert encoding.max_length == 3
    x = torch.randn(2, 5, 1, dtype=torch.float64)
    want = x[:, :3] + torch.tensor([[1], [2], [3]])
    torch.testing.assert_close(encoding.embed(x, torch.arange(5)), want)
    torch.testing.assert_close(encoding.embed(x, torch.arange(5).expand(2, 5)), want)
    torch.testing.assert_close(encoding.embed(x[:, :2], torch.arange(2)), want[:, :2])
    with pytest.raises(ValueError, match=r"Learned: expected positions 0 .. 2, got 2 .. 3"):
        encoding.embed(x[:, :2], torch.arange(2, 4))


@pytest.mark.parametrize("beyond", ["error", "truncate"])
def test_truncate_cuts_what_belongs_to_the_tokens(beyond: str) -> None:
    encoding = lg.Learned(3, 2, beyond=beyond)
    ids, vectors = torch.arange(10).view(2, 5), torch.randn(2, 5, 4)
    first = encoding.truncate(ids, vectors)
    assert torch.equal(first[0], ids[:, :3]) and torch.equal(first[1], vectors[:, :3])
    last = encoding.truncate(ids, vectors, side="last")
    assert torch.equal(last[0], ids[:, 2:]) and torch.equal(last[1], vectors[:, 2:])
    for side in ("first", "last"):
        assert torch.equal(encoding.truncate(ids[:, :2], side=side)[0], ids[:, :2])


def test_truncate_of_an_interpolated_table_keeps_its_length() -> None:
    assert lg.Learned(2, 2, beyond="interpolate", length=4).truncate(torch.zeros(1, 9))[0].shape == (1, 4)


WRONG = [
    (lambda: lg.Sinusoidal(1, frequencies="tensor2tensor"), "dim of 2 or more for frequencies of tensor2tensor, got 1"),
    (lambda: lg.Learned(8, 0), "dim"),
    (lambda: lg.Learned(8, 4, row_offset=True), "row_offset"),
    (lambda: lg.Learned(8, 4, row_offset=1.5), "row_offset to be an int of 0 or more, got 1.5"),
    (lambda: lg.Learned(8, 4, beyond="clip"), "beyond 'error', 'clamp', 'truncate' or 'interpolate', got 'clip'"),
    (lambda: lg.Learned(8, 4, length=9), "length and align only with beyond='interpolate', got length=9"),
    (lambda: lg.Learned(8, 4, beyond="clamp", length=9), "with beyond='clamp'; leave them out"),
    (
        lambda: lg.Learned(8, 4, beyond="truncate", align="start"),
        "got length=None, align='start' with beyond='truncate'",
    ),
    (lambda: lg.Learned(8, 4, beyond="interpolate"), "keys cached at another length would be stale"),
    (lambda: lg.Learned(8, 4, beyond="interpolate", length=8), "length above max_length=8, got 8"),
    (lambda: lg.Learned(8, 4, beyond="interpolate", length=9.5), "length to be an int"),
    (lambda: lg.Learned(8, 4, beyond="interpolate", length=9, align="middle"), "'end' or 'start', got 'middle'"),
    (lambda: lg.Learned(8, 4).truncate(torch.zeros(1, 9), side="left"), "side 'first' or 'last', got 'left'"),
    (
        lambda: lg.Learned(8, 4).truncate(torch.zeros(1, 9), torch.zeros(1, 8)),
        r"of one length, got \[\[1, 9\], \[1, 8\]\]",
    ),
    (lambda: lg.Learned(8, 4).truncate(torch.zeros(9)), r"tensors \[B, L, ...\] of one length, got \[\[9\]\]"),
    (lambda: lg.Learned(8, 4, beyond="clamp").truncate(torch.zeros(1, 9)), "beyond='clamp', where all exist"),
    (lambda: lg.Learned(8, 4).embed(torch.zeros(1, 2, 5), torch.arange(2)), r"\[B, L, 4\], got \[1, 2, 5\]"),
    (
        lambda: lg.Sinusoidal(4).embed(torch.zeros(1, 2, 4), torch.tensor([-1, 0])),
        "positions of 0 or more, got -1 .. 0",
    ),
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


test_wrong_options = refused_calls(WRONG)
