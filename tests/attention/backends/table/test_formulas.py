"""FIRE and CoPE in the loop of C equal the specification, in values and gradients."""

from functools import partial

import pytest
import torch

import longitude as lg
from tests.support import close, needs_c, random

pytestmark = needs_c
TOKENS = torch.arange(130)


def fire(width: int = 11, threshold: float = 30.0, size: float = 1.0) -> lg.Fire:
    """Its bends lie between 0 and 1, where they are read; `width` of 3 and more have one that never bends."""
    made = lg.Fire(4, width, threshold=threshold).double()
    first, second = made.mlp[0], made.mlp[2]
    with torch.no_grad():
        sign = 1 - 2.0 * (torch.arange(width) % 2)
        first.weight[:, 0], first.bias[:] = sign, -sign * (torch.arange(width) + 0.5).double() / width
        first.weight[2:3] = 0
        second.weight.copy_(size * random(4, width, seed=3))
    return made


def cope(columns: int = 9) -> lg.CoPE:
    made = lg.CoPE(20, max_position=columns).double()
    made.table.data.copy_(random(20, columns, seed=5))
    return made


def rising_cope() -> lg.CoPE:
    """The farther column is 1e5 times a query's first number."""
    made = cope(2)
    made.table.data[:] = torch.tensor([0.0, 1e5]) * (torch.arange(20) == 0)[:, None]
    return made


def found(backend: str, encoding: lg.Encoding, qkv: list[torch.Tensor], mask: lg.Mask, **places) -> list[torch.Tensor]:
    out, lse = lg.attend(*qkv, encoding=encoding, mask=mask, backend=backend, return_lse=True, **places)
    of = (out * random(*out.shape, seed=7)).sum() + lse.masked_fill(lse == -torch.inf, 0.0).sin().sum()
    return [out, lse, *torch.autograd.grad(of, [*qkv, *encoding.parameters()])]


def same(encoding: lg.Encoding, qkv: list[torch.Tensor], mask: lg.Mask, **places) -> None:
    for got, want in zip(*(found(b, encoding, qkv, mask, **places) for b in ("table", "reference")), strict=True):
        close(got, want, 1e-9 * max(1.0, want.abs().max().item()))


def inputs(queries: int, keys: int) -> list[torch.Tensor]:
    shapes = (2, 4, queries, 20), (2, 2, keys, 20), (2, 2, keys, 20)
    return [random(*shape, seed=n).requires_grad_() for n, shape in enumerate(shapes)]


@pytest.mark.parametrize("make", [*(partial(fire, n) for n in (1, 11, 64)), *(partial(cope, n) for n in (1, 5, 300))])
@pytest.mark.parametrize(("queries", "keys"), [(67, 67), (50, 131)])
def test_equals_the_specification(queries, keys, make) -> None:
    """Many bends in a vector of keys, few, and none; counts that are full at once, somewhere, and never; lengths that no vector
    and no block divides; grouped heads."""
    same(make(), inputs(queries, keys), lg.Causal())


MASKS = {
    "window": lg.Window(37),
    "documents": lg.Causal() & lg.Documents(TOKENS // 49),
    "padding": lg.Causal() & lg.Padding(torch.tensor([[0], [71]]) <= TOKENS),
}


@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
@pytest.mark.parametrize("make", [fire, partial(cope, 16)])
def test_masks(make, mask) -> None:
    """CoPE counts only keys that the mask allows."""
    same(make(), inputs(130, 130), mask)


def test_no_mask() -> None:
    same(fire(), inputs(130, 130), lg.NoMask())


@pytest.mark.parametrize(("queries", "keys", "first"), [(60, 130, 0), (130, 60, 50), (61, 61, 200), (60, 61, 300)])
def test_keys_in_the_future(queries, keys, first) -> None:
    """Distances that fall and rise in one vector, only rise, and only fall."""
    for places in ({"q_positions": first, "k_positions": 70}, {"q_positions": 40, "k_positions": first}):
        same(fire(), inputs(queries, keys), lg.NoMask(), **places)


def test_each_sequence_and_document_has_its_own_positions() -> None:
    """Queries are measured against their own position, not by what the first sequence or document has."""
    starts = TOKENS + torch.tensor([[0], [500]])
    same(fire(), inputs(130, 130), lg.Causal(), q_positions=starts, k_positions=starts)
    restarted = TOKENS % 65
    mask = lg.Causal() & lg.Documents(TOKENS // 65)
    same(fire(threshold=9.0), inputs(130, 130), mask, q_positions=restarted, k_positions=restarted)


@pytest.mark.parametrize("size", [0.0, 30.0, 1000.0])
def test_gates_of_any_size(size) -> None:
    """Half open all, so that counts are whole and have the gradient of the column below; wide open and closed ones."""
    q, k, v = (x.detach() for x in inputs(70, 70))
    same(cope(), [x.requires_grad_() for x in (q, size * k, v)], lg.Causal())


@pytest.mark.parametrize("make", [partial(fire, size=1e4), rising_cope])
def test_old_keys_may_count_most(make) -> None:
    """However low their scores, to which more is added: no bound of q k' alone leaves them out."""
    q, k, v = (x.detach() for x in inputs(211, 211))
    q[..., 0], k[:, :, -60:] = 1.0, 3000 * k[:, :, -60:]
    same(make(), [x.requires_grad_() for x in (q, k, v)], lg.Causal())
