"""Several encodings as one: what it declares, the order in which members act, and the positions that each is given."""

from typing import Any

import pytest
import torch
from torch import Tensor

import longitude as lg
from longitude.positions.composed import compose
from longitude.positions.terms import OffsetBias
from tests.support import refused_calls


class Recorder(lg.Encoding):
    """Does x -> scale x + shift everywhere, and remembers its calls."""

    def __init__(self, scale: float = 1.0, shift: float = 0.0, name: str = "", **properties: Any):
        super().__init__()
        self.scale, self.shift, self.name, self.calls = scale, shift, name, []
        for of, value in properties.items():
            setattr(self, of, value)

    def embed(self, x: Tensor, positions: Tensor) -> Tensor:
        self.calls.append(positions)
        return x * self.scale + self.shift

    def prepare(self, positions: Tensor, length: int | None = None, dtype: torch.dtype = torch.float32) -> Any:
        self.calls.append((positions, length, dtype))
        return self.scale, self.shift

    def queries(self, q: Tensor, prepared: Any) -> Tensor:
        return q * prepared[0] + prepared[1]

    def keys(self, k: Tensor, prepared: Any) -> Tensor:
        return k * prepared[0] - prepared[1]

    def context(self, x: Tensor, carry: Any = None, documents: Tensor | None = None) -> tuple[dict[str, Tensor], Any]:
        self.calls.append((carry, documents))
        return {self.name: x * self.scale}, (carry or 0) + self.scale

    def terms(self, context: dict[str, Tensor]) -> tuple:
        return (OffsetBias(lambda offset: self.scale * offset[None]),)


class Follows(lg.Encoding):
    """Its tables follow the newest key, from the query at position 3 on."""

    stable_keys = False

    def length_at(self, query: Any, newest: Any) -> Any:
        return None if isinstance(query, int) and query < 3 else newest + 1


# ---- what it is ------------------------------------------------------------------------------------------------------
def test_what_a_user_may_write() -> None:
    a, b, c, d = (Recorder(name=name) for name in "abcd")
    nested = lg.Composed([a, lg.Composed([b, lg.Composed([c])]), lg.Composed([]), d])
    cases = ((nested, "abcd"), ([lg.Composed([a, b]), c], "abc"), (a, "a"), ((a, a), "aa"), (None, ""), ([], ""))
    for given, members in cases:
        assert [m.name for m in compose(given)] == [*members]
    assert compose(nested) is nested


# property: its value in a member of each kind, and in the whole
DECLARED = [
    ("relative", [True, False], False),
    ("learned", [False, True], True),
    ("causal_only", [True, False], True),
    ("shared", [False, True], False),
    ("stable_keys", [True, False], False),
    ("max_length", [None, None], None),
    ("max_length", [9, None, 7], 7),
    ("axes", [], 1),
    ("axes", [1, 3, 2], 3),
    ("softmax_factor", [1.5, 1.25, 2.0], 3.75),
    ("passing_columns", [], set()),
    ("passing_columns", [frozenset("ab"), frozenset("bc")], {"a", "b", "c"}),
]


@pytest.mark.parametrize(("name", "members", "whole"), DECLARED)
def test_what_it_declares(name: str, members: list, whole: Any) -> None:
    assert getattr(lg.Composed([Recorder(**{name: value}) for value in members]), name) == whole


REWRITES, KEEPS, FOX = Recorder(passing_columns=frozenset("a")), Follows(), lg.FoX(16, 4)
LINE = torch.arange(10).view(2, 5)
GRID = LINE[..., None].expand(2, 5, 3)
test_what_is_refused = refused_calls(
    [
        (lambda: compose("alibi"), "'alibi'", "lg.encoding"),
        (lambda: lg.Composed([Recorder(), "alibi"]), "'alibi'", "lg.encoding"),
        (lambda: lg.Composed([REWRITES, KEEPS]), "follow='declared'"),
        (lambda: lg.Composed([FOX, FOX]), "['forgotten']"),
        (lambda: lg.Composed([KEEPS, lg.ALiBi(4), KEEPS]), "Follows"),
        (lambda: lg.Composed([Recorder()] * 2).queries(GRID, ((1, 2),)), "zip"),
        (lambda: lg.Composed([lg.ALiBi(4)] * 2).context(GRID, [1, 2, 3]), "zip"),
        (lambda: lg.Composed([Recorder(), Recorder(axes=3)]).prepare(GRID), "Recorder", "[2, 5, 3]"),
        (lambda: lg.Composed([Recorder(axes=3), lg.Rotary(8, "half")]).prepare(GRID), "Rotary", "[2, 5, 3]"),
    ]
)


# ---- what its members do ---------------------------------------------------------------------------------------------
def test_transforms_chain_and_terms_add_in_order() -> None:
    """First twice x, then 5 more: not twice the sum. Each with tables of its own."""
    both, x = lg.Composed([Recorder(2.0), Recorder(1.0, 5.0)]), torch.tensor([[[[1.0, 3.0]]]])
    assert both.embed(x[0], torch.arange(1)).tolist() == [[[7, 11]]]
    prepared = both.prepare(torch.arange(1))
    assert prepared == ((2.0, 0.0), (1.0, 5.0))
    assert both.queries(x, prepared).tolist() == [[[[7, 11]]]]
    assert both.keys(x, prepared).tolist() == [[[[-3, 1]]]]
    assert [term.at(torch.tensor(1)).item() for term in both.terms({})] == [2, 1]
    assert both.bias_at(torch.tensor([1, 4])).tolist() == [[3, 12]]


def test_columns_join_and_carries_stay_apart() -> None:
    one, other = Recorder(2.0, name="one"), Recorder(3.0, name="other")
    both, x, documents = lg.Composed([one, lg.ALiBi(4), other]), torch.randn(1, 5, 4), torch.zeros(1, 5).long()
    columns, carry = both.context(x)
    assert list(columns) == ["one", "other"] and carry == [2, None, 3]
    assert torch.equal(columns["one"], 2 * x) and torch.equal(columns["other"], 3 * x)
    assert both.context(x, carry, documents)[1] == [4, None, 6]
    assert one.calls == [(None, None), (2, documents)] and other.calls == [(None, None), (3, documents)]


def test_one_member_may_follow_a_length() -> None:
    newest = torch.tensor([5, 9])
    for members in ([Follows(), Recorder()], [Recorder(), Follows()]):
        both = lg.Composed(members)
        assert (both.length_at(4, 9), both.length_at(2, 9)) == (10, None)
        assert both.length_at(newest, newest).tolist() == [6, 10]


def test_positions_as_each_member_takes_them() -> None:
    """A trailing axis of one number is dropped for members of one axis; a bias, given offsets, ignores a grid."""
    one, three = Recorder(), Recorder(axes=3)
    both, x = lg.Composed([one, three]), torch.zeros(2, 5, 4)
    for given, passed in ((LINE, LINE), (LINE[0], LINE[0]), (LINE[..., None], LINE)):
        one.calls.clear(), three.calls.clear()
        both.embed(x, given)
        both.prepare(given)
        assert torch.equal(one.calls[0], passed) and torch.equal(one.calls[1][0], passed)
        assert torch.equal(three.calls[0], given) and torch.equal(three.calls[1][0], given)
    grid = torch.stack([torch.arange(5), torch.arange(5) * 7], -1)[None]
    axial, x = lg.AxialRotary(8, "half"), torch.randn(1, 2, 5, 8)
    assert torch.equal(lg.Composed([axial, lg.ALiBi(2)]).rotate(x, grid), axial.rotate(x, grid))


@pytest.mark.parametrize("name", lg.list_encodings())
def test_composes_on_meta_as_loading_does(name: str) -> None:
    compose(lg.testing.example(name)(filled=False).to("meta"))
