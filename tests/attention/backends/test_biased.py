"""Blocks with a bias of all pairs: torch's fused function and five products equal the specification, every gradient included."""

import pytest
import torch
from torch import Tensor

import longitude as lg
from longitude.attention.backends import chunked
from tests.support import close


class Learned(lg.Encoding):
    """A bias of both positions and one of the offset, of the same two numbers."""

    learned = True

    def __init__(self) -> None:
        super().__init__()
        self.numbers = torch.nn.Parameter(torch.tensor([0.3, -0.7], dtype=torch.float64))

    def terms(self, context: object) -> tuple:
        a, b = self.numbers
        heads = torch.arange(1, 5, dtype=torch.float64)[:, None, None]
        return (
            lg.terms.PairBias(lambda i, j: torch.sin(a * i + heads * j)[..., :, :, :]),
            lg.terms.OffsetBias(lambda offset: b * heads.view(-1, *[1] * offset.dim()) * offset.abs().sqrt()),
        )


def cope() -> lg.CoPE:
    made = lg.CoPE(8, max_position=4).double()
    torch.nn.init.normal_(made.table, generator=torch.Generator().manual_seed(2))
    return made


MASKS = {"causal": lg.Causal(), "window": lg.Window(5), "all": lg.NoMask(), "padded": None}


def inputs(queries: int, keys: int, shared: int = 2) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = (2, 4, queries, 8), (2, shared, keys, 8), (2, shared, keys, 8)
    return [torch.randn(s, generator=generator, dtype=torch.float64).requires_grad_() for s in shapes]


def found(backend: str, encoding: lg.Encoding, qkv: list[Tensor], mask: lg.Mask, second: bool = False) -> list[Tensor]:
    out, lse = lg.attend(*qkv, encoding=encoding, mask=mask, backend=backend, return_lse=True)
    finite = lse.masked_fill(lse == -torch.inf, 0.0)
    wanted = [*qkv, *encoding.parameters()]
    grads = torch.autograd.grad(out.square().sum() + finite.sin().sum(), wanted, create_graph=second)
    if second:
        return [*torch.autograd.grad(sum(g.square().sum() for g in grads), wanted)]
    return [out, lse, *grads]


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Which blocks took it, of few queries each."""
    calls: list[bool] = []

    block = chunked.biased

    def biased_block(r: object) -> object:
        done = block(r)  # type: ignore[arg-type]
        calls.append(done is not None)
        return done

    monkeypatch.setattr(chunked, "biased", biased_block)
    monkeypatch.setattr(chunked, "block_rows", lambda r: 4)
    return calls


@pytest.mark.parametrize("make", [Learned, lambda: lg.Fire(4, threshold=5.0).double(), cope])
@pytest.mark.parametrize("name", MASKS)
def test_equals_the_specification(name: str, make: object, counted: list[bool]) -> None:
    """Grouped heads, blocks that end early, both results; padding leaves queries without keys, which go the slow way."""
    valid = torch.arange(13) >= torch.tensor([[0], [6]])
    mask = MASKS[name] or lg.Causal() & lg.Padding(valid)
    encoding = make()  # type: ignore[operator]
    if encoding.causal_only and name == "all":
        return
    for queries in (13, 7):
        qkv = inputs(queries, 13)
        for got, want in zip(*(found(b, encoding, qkv, mask) for b in ("chunked", "reference")), strict=True):
            close(got, want, 1e-10)
    assert any(counted)
    assert all(counted) == (name != "padded")


@pytest.mark.parametrize("make", [Learned, cope])
def test_double_backward(make: object, counted: list[bool]) -> None:
    qkv, encoding = inputs(6, 6, 4), make()  # type: ignore[operator]
    for got, want in zip(*(found(b, encoding, qkv, lg.Causal(), True) for b in ("chunked", "reference")), strict=True):
        close(got, want, 1e-9)
    assert counted


@torch.no_grad()
def test_scores_that_are_all_infinitely_low(counted: list[bool]) -> None:
    """A query whose keys are all -inf by the bias has NaN, as in the specification, not torch's zeros."""

    class Lowest(lg.Encoding):
        def terms(self, context: object) -> tuple:
            low = torch.tensor(-torch.inf, dtype=torch.float64)
            return (
                lg.terms.PairBias(
                    lambda i, j: torch.where(i == 6, low, 0.0 * (i + j))[..., None, :, :].expand(4, -1, -1)
                ),
            )

    got, want = (
        lg.attend(*inputs(9, 9), encoding=Lowest(), mask=lg.Causal(), backend=b) for b in ("chunked", "reference")
    )
    torch.testing.assert_close(got, want, atol=1e-10, rtol=0, equal_nan=True)
    assert want[:, :, 6].isnan().all() and True in counted and False in counted
