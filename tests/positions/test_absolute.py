"""none, sinusoidal, learned: codes against the published numbers."""

import math

import pytest
import torch
from transformers.models.gptj.modeling_gptj import create_sinusoidal_positions
from transformers.models.m2m_100.modeling_m2m_100 import M2M100SinusoidalPositionalEmbedding

import longitude as lg
from tests.support import close, refused, refused_calls


def codes(encoding: lg.Sinusoidal, *positions: int) -> torch.Tensor:
    """What is added to zeros [positions, dim]."""
    x = torch.zeros(1, len(positions), encoding.dim, dtype=torch.float64)
    return encoding.embed(x, torch.tensor(positions))[0]


def float64(*numbers: float) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.float64)


# ---- sinusoidal ------------------------------------------------------------------------------------------------------
def test_published_codes() -> None:
    """Vaswani et al. 2017, section 3.5: sin(p / 10000^(2i/d)) at 2i, cos at 2i + 1."""
    close(codes(lg.Sinusoidal(4), 3)[0], float64(0.1411200, -0.9899925, 0.0299955, 0.9995500), 5e-8)
    want = float64(-0.5063656, 0.8623189, 0.7975424, -0.6032629, 0.01036614, 0.9999463)
    close(codes(lg.Sinusoidal(512), 100)[0, [0, 1, 2, 3, 510, 511]], want, 5e-8)


def test_half_layout_is_that_of_an_independent_table() -> None:
    ours = codes(lg.Sinusoidal(16, layout="half"), *range(50))
    close(ours, create_sinusoidal_positions(50, 16).double(), 1e-5)
    interleaved = codes(lg.Sinusoidal(16), *range(50))
    assert torch.equal(interleaved[:, ::2], ours[:, :8]) and torch.equal(interleaved[:, 1::2], ours[:, 8:])


def test_tensor2tensor_codes_are_those_of_independent_ports() -> None:
    """fairseq's, as transformers has it: all sines, all cosines, and a column of zeros where the width is odd."""
    for dim in (4, 5, 16, 17):
        ours = codes(lg.Sinusoidal(dim, layout="half", frequencies="tensor2tensor"), *range(12))
        close(ours, M2M100SinusoidalPositionalEmbedding.get_embedding(12, dim).double(), 2e-6)


def test_tensor2tensor_frequencies_interleaved() -> None:
    """w_i = base^(-i/(dim/2 - 1)): 1, 1/10, 1/100 for base 100. An odd width ends in zeros; one pair has frequency 1."""
    for dim in (6, 7):
        want = [f(5 * w) for w in (1, 0.1, 0.01) for f in (math.sin, math.cos)] + [0] * (dim - 6)
        close(codes(lg.Sinusoidal(dim, base=100.0, frequencies="tensor2tensor"), 5)[0], float64(*want))
    close(codes(lg.Sinusoidal(2, frequencies="tensor2tensor"), 5)[0], float64(math.sin(5), math.cos(5)))


@pytest.mark.parametrize("layout", ["interleaved", "half"])
def test_odd_width_drops_the_last_cosine(layout: str) -> None:
    s, c = ([f(3 * 10_000 ** (-2 * i / 5)) for i in range(3)] for f in (math.sin, math.cos))
    want = [s[0], c[0], s[1], c[1], s[2]] if layout == "interleaved" else [*s, *c[:2]]
    close(codes(lg.Sinusoidal(5, layout=layout), 3)[0], float64(*want))
    close(codes(lg.Sinusoidal(1, layout=layout), 3)[0], float64(math.sin(3)))


# ---- learned ---------------------------------------------------------------------------------------------------------
def test_learned_rows() -> None:
    encoding = lg.Learned(10, 4)
    assert encoding.table.shape == (10, 4)
    start = lg.Learned(1000, 1000).table.detach()
    assert float(start.mean()) == pytest.approx(0, abs=2e-4) and float(start.std()) == pytest.approx(0.02, rel=0.005)
    x, positions = torch.randn(2, 3, 4), torch.tensor([[0, 1, 9], [5, 5, 0]])
    torch.testing.assert_close(encoding.embed(x, positions), x + encoding.table[positions])


# Beyond the table: Gehring et al. 2017 say nothing of it.
def columns(*rows: float, **options) -> lg.Learned:
    """A table of one column with these numbers."""
    encoding = lg.Learned(len(rows), 1, **options).double()
    with torch.no_grad():
        encoding.table[:, 0] = torch.tensor(rows)
    return encoding


def read(encoding: lg.Learned, *positions: int) -> torch.Tensor:
    """What is added to zeros, [tokens]."""
    return encoding.embed(torch.zeros(1, len(positions), 1).double(), torch.tensor(positions))[0, :, 0].detach()


def test_interpolated_rows() -> None:
    encoding = columns(0, 10, 20, 30, length=6)
    assert encoding.max_length == 6 and encoding.table.shape == (4, 1)
    close(read(encoding, *range(6)), float64(0, 6, 12, 18, 24, 30))
    close(read(encoding, 5, 1, 1), float64(30, 6, 6))
    with refused("Learned", "0", "5", "6"):
        read(encoding, *range(7))


def test_a_table_of_one_row_is_that_row_everywhere() -> None:
    assert read(columns(7, length=3), 0, 1, 2).tolist() == [7, 7, 7]


def test_interpolation_is_exact_for_whole_rows_and_a_long_table() -> None:
    """Rows that are read whole are the table's very numbers, where p (M-1)/(L-1) in floating point may fall short."""
    encoding = lg.Learned(4096, 3, length=8191)
    assert torch.equal(encoding.embed(torch.zeros(1, 4096, 3), torch.arange(0, 8191, 2))[0], encoding.table)


def test_interpolation_of_far_int32_positions_does_not_overflow() -> None:
    """Position times row is 2^33 here."""
    encoding = lg.Learned(65_537, 1, length=131_073)
    assert torch.equal(encoding.codes(torch.tensor([131_072], dtype=torch.int32)), encoding.table[-1:])


def test_interpolation_is_not_in_the_models_bfloat16() -> None:
    """Between 256 and 260 bfloat16 has 258 alone; the embedding in float32 is a third of the way."""
    low = columns(256, 260, length=4).bfloat16()
    got = low.embed(torch.zeros(1, 4, 1), torch.arange(4))[0, :, 0]
    assert got.tolist() == pytest.approx([256, 256 + 4 / 3, 256 + 8 / 3, 260], abs=1e-4)


X, AT = torch.zeros(1, 2, 4), torch.tensor
test_wrong_options = refused_calls(
    [
        (lambda: lg.Sinusoidal(4).embed(torch.zeros(1, 2, 6), torch.arange(2)), "[B, L, 4]", "[1, 2, 6]"),
        (lambda: lg.Sinusoidal(1, frequencies="tensor2tensor"), "dim", "2"),
        (lambda: lg.Sinusoidal(4).embed(X, AT([5])), "Sinusoidal", "[2]", "[1, 2]", "[1]"),
        (lambda: lg.Learned(8, 4, length=8), "max_length=8"),
        (lambda: lg.Learned(8, 4).embed(X, AT([7, 8])), "Learned", "0", "7", "8"),
    ]
)
