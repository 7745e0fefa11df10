"""CoPE in the loop of C equals the specification, in values and gradients."""

import pytest
import torch

import longitude as lg
from longitude.attention.backends.table import band
from tests.support import close, random

pytestmark = pytest.mark.skipif(band.functions(torch.float64) is None, reason="no C compiler here")


def cope(columns: int, dim: int = 20) -> lg.CoPE:
    made = lg.CoPE(dim, max_position=columns).double()
    made.table.data.copy_(random(dim, columns, seed=5))
    return made


def found(backend: str, encoding: lg.CoPE, qkv: list[torch.Tensor], mask: lg.Mask) -> list[torch.Tensor]:
    out, lse = lg.attend(*qkv, encoding=encoding, mask=mask, backend=backend, return_lse=True)
    of = (out * random(*out.shape, seed=7)).sum() + lse.masked_fill(lse == -torch.inf, 0.0).sin().sum()
    return [out, lse, *torch.autograd.grad(of, [*qkv, encoding.table])]


def inputs(queries: int, keys: int, shared: int = 2) -> list[torch.Tensor]:
    shapes = (2, 4, queries, 20), (2, shared, keys, 20), (2, shared, keys, 20)
    return [random(*shape, seed=n).requires_grad_() for n, shape in enumerate(shapes)]


@pytest.mark.parametrize("columns", [1, 2, 5, 64, 300])
@pytest.mark.parametrize(("queries", "keys"), [(5, 5), (67, 67), (50, 131), (211, 211)])
def test_equals_the_specification(queries: int, keys: int, columns: int) -> None:
    """Counts that are full at once, somewhere, and never; lengths that no vector and no block divides; grouped heads."""
    qkv, encoding = inputs(queries, keys), cope(columns)
    for got, want in zip(*(found(b, encoding, qkv, lg.Causal()) for b in ("table", "reference")), strict=True):
        close(got, want, 1e-10)


@pytest.mark.parametrize("name", ["window", "documents", "padding"])
def test_only_keys_that_the_mask_allows_are_counted(name: str) -> None:
    tokens = torch.arange(130)
    mask = {
        "window": lg.Window(37),
        "documents": lg.Causal() & lg.Documents(tokens // 49),
        "padding": lg.Causal() & lg.Padding(tokens >= torch.tensor([[0], [71]])),
    }[name]
    qkv, encoding = inputs(130, 130), cope(16)
    for got, want in zip(*(found(b, encoding, qkv, mask) for b in ("table", "reference")), strict=True):
        close(got, want, 1e-10)


@pytest.mark.parametrize("size", [0.0, 30.0, 1000.0])
def test_gates_of_any_size(size: float) -> None:
    """Half open all, so that counts are whole and have the gradient of the column below; wide open and closed ones."""
    q, k, v = (x.detach() for x in inputs(70, 70))
    qkv, encoding = [q.requires_grad_(), (size * k).requires_grad_(), v.requires_grad_()], cope(9)
    for got, want in zip(*(found(b, encoding, qkv, lg.Causal()) for b in ("table", "reference")), strict=True):
        close(got, want, 1e-9 * max(1.0, want.abs().max().item()))


def test_old_keys_with_low_scores_may_count_most() -> None:
    """What makes them count is added after their score: no bound of q k' alone leaves them out."""
    q, k, v = (x.detach() for x in inputs(211, 211))
    q[..., 0], k[:, :, -60:], encoding = 1.0, 3000 * k[:, :, -60:], cope(2)
    encoding.table.data[:] = torch.tensor([0.0, 1e5]) * (torch.arange(20) == 0)[:, None]
    qkv = [x.requires_grad_() for x in (q, k, v)]
    for got, want in zip(*(found(b, encoding, qkv, lg.Causal()) for b in ("table", "reference")), strict=True):
        close(got, want, 1e-9 * max(1.0, want.abs().max().item()))


@torch.no_grad()
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_what_is_not_finite(value: float) -> None:
    q, k, v = inputs(70, 70)
    k[0, 1, 4] = value
    found = (lg.attend(q, k, v, encoding=cope(9), backend=b) for b in ("table", "reference"))
    got, want = found
    right = want.isfinite()
    close(got[right], want[right], 1e-10)
    assert torch.equal(got.isfinite(), right)


def test_who_takes_it() -> None:
    """A few queries, as when one is decoded, and other terms beside it, go by rows of scores."""
    q, k, v = inputs(9, 9)
    chosen = lambda *q, encoding: next(v.backend for v in lg.explain(*q, encoding=encoding) if v.chosen)  # noqa: E731
    assert chosen(q, k, v, encoding=cope(9)) == "table"
    assert chosen(q[:, :, -1:], k, v, encoding=cope(9)) != "table"
    assert chosen(q, k, v, encoding=[cope(9), lg.ALiBi(4).double()]) != "table"
