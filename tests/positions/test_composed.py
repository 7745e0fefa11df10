"""Several encodings as one: what it declares, the order in which members act, and the positions that each is given."""

from typing import Any

import pytest
import torch
from torch import Tensor

import longitude as lg
from longitude.positions.base import OffsetBias
from longitude.positions.composed import compose


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
def test_members_of_members_are_members() -> None:
    a, b, c, d = (Recorder(name=name) for name in "abcd")
    nested = lg.Composed([a, lg.Composed([b, lg.Composed([c])]), lg.Composed([]), d])
    assert [m.name for m in nested] == [m.name for m in nested.members] == list("abcd")
    assert all(m is one for m, one in zip(nested, (a, b, c, d), strict=True))
    assert [m.name for m in compose([lg.Composed([a, b]), c])] == list("abc")


def test_what_a_user_may_write() -> None:
    one, both = Recorder(), lg.Composed([Recorder(), Recorder()])
    assert compose(both) is both
    assert [m is one for m in compose(one)] == [True]
    assert [m is one for m in compose((one, one))] == [True, True]
    assert list(compose(None)) == []
    assert list(compose([])) == []
    assert isinstance(compose(one), lg.Composed)


def test_nothing_composes_while_a_compiler_follows() -> None:
    """A graph may build the empty encoding: nothing in its construction stops Dynamo."""
    x = torch.randn(2, 3, 4)
    compiled = torch.compile(lambda x: compose(None).embed(x, torch.arange(3)) + 1, fullgraph=True, backend="eager")
    assert torch.equal(compiled(x), x + 1)


@pytest.mark.parametrize("wrong", ["alibi", 3, lg.ALiBi, {"name": "alibi"}])
def test_what_is_refused(wrong: Any) -> None:
    with pytest.raises(ValueError, match=r"expected an Encoding or a list of them, got .*lg\.encoding\("):
        compose(wrong)
    with pytest.raises(ValueError, match=r"expected encodings, got .*lg\.encoding\("):
        lg.Composed([Recorder(), wrong])


# property: its value in a member of each kind, and in the whole
DECLARED = [
    ("relative", [True, True], True),
    ("relative", [True, False], False),
    ("learned", [False, False], False),
    ("learned", [False, True], True),
    ("causal_only", [False, False], False),
    ("causal_only", [True, False], True),
    ("shared", [True, True], True),
    ("shared", [False, True], False),
    ("stable_keys", [True, True], True),
    ("stable_keys", [True, False], False),
    ("max_length", [None, None], None),
    ("max_length", [None, 7], 7),
    ("max_length", [9, None, 7], 7),
    ("axes", [1, 1], 1),
    ("axes", [1, 3, 2], 3),
    ("softmax_factor", [1.5, 1.0], 1.5),
    ("softmax_factor", [1.5, 1.25, 2.0], 3.75),
    ("passing_columns", [frozenset(), frozenset("ab")], {"a", "b"}),
    ("passing_columns", [frozenset("ab"), frozenset("bc")], {"a", "b", "c"}),
]


@pytest.mark.parametrize(("name", "members", "whole"), DECLARED)
def test_what_it_declares(name: str, members: list, whole: Any) -> None:
    assert getattr(lg.Composed([Recorder(**{name: value}) for value in members]), name) == whole


def test_a_cache_cannot_both_rewrite_keys_and_keep_them() -> None:
    rewrites, keeps = Recorder(passing_columns=frozenset("a")), Follows()
    lg.Composed([rewrites, Recorder()]), lg.Composed([keeps, Recorder()])
    for members in ([rewrites, keeps], [keeps, rewrites]):
        with pytest.raises(ValueError, match="needs keys as they came in a cache, and another rewrites them there"):
            lg.Composed(members)


def test_nothing_composed_is_no_position() -> None:
    nothing = lg.Composed([])
    declared = {"relative": True, "learned": False, "causal_only": False, "max_length": None, "axes": 1, "shared": True}
    declared |= {"stable_keys": True, "softmax_factor": 1.0, "passing_columns": frozenset()}
    assert {name: getattr(nothing, name) for name in declared} == declared
    assert (nothing.at_input, nothing.reads_tokens) == (False, False)
    x = torch.randn(2, 3, 4)
    assert nothing.embed(x, torch.arange(3)) is x
    assert nothing.prepare(torch.arange(3)) == ()
    assert nothing.queries(x, ()) is x and nothing.keys(x, ()) is x
    assert nothing.context(x) == ({}, [])
    assert nothing.terms({}) == ()
    assert nothing.length_at(3, 9) is None


def test_where_it_acts_is_where_a_member_acts() -> None:
    rope, fox, table = lg.Rotary(8, "half"), lg.FoX(16, 4), lg.Sinusoidal(16)
    for members, at_input, reads in (
        ([rope], False, False),
        ([rope, fox], False, True),
        ([table, rope], True, False),
        ([fox, rope, table], True, True),
    ):
        both = lg.Composed(members)
        assert (both.at_input, both.reads_tokens) == (at_input, reads)


# ---- what its members do ---------------------------------------------------------------------------------------------
def test_transforms_chain_in_order() -> None:
    """First twice x, then 5 more: not twice the sum. Each with tables of its own."""
    both, x = lg.Composed([Recorder(2.0), Recorder(1.0, 5.0)]), torch.tensor([[[[1.0, 3.0]]]])
    assert both.embed(x[0], torch.arange(1)).tolist() == [[[7, 11]]]
    prepared = both.prepare(torch.arange(1))
    assert prepared == ((2.0, 0.0), (1.0, 5.0))
    assert both.queries(x, prepared).tolist() == [[[[7, 11]]]]
    assert both.keys(x, prepared).tolist() == [[[[-3, 1]]]]
    for transform in (both.queries, both.keys):
        with pytest.raises(ValueError, match="zip"):
            transform(x, prepared[:1])


def test_rotation_and_bias_as_one() -> None:
    """Members' own results, whatever the others are."""
    rope, alibi = lg.Rotary(8, "half"), lg.ALiBi(4)
    both, x = lg.Composed([rope, alibi]), torch.randn(1, 4, 5, 8)
    assert torch.equal(both.rotate_queries(x, 7), rope.rotate_queries(x, 7))
    assert torch.equal(both.rotate_keys(x, 7), rope.rotate_keys(x, 7))
    twice = lg.Composed([rope, rope])  # rotations add
    torch.testing.assert_close(twice.rotate(x, torch.full((5,), 3)), rope.rotate(x, torch.full((5,), 6)))
    assert torch.equal(both.bias_at(torch.arange(9)), alibi.bias_at(torch.arange(9)))


def test_terms_add_in_order() -> None:
    both = lg.Composed([Recorder(2.0), lg.Rotary(8, "half"), Recorder(3.0)])
    assert [term.at(torch.tensor(1)).item() for term in both.terms({})] == [2, 3]
    assert both.bias_at(torch.tensor([1, 4])).tolist() == [[5, 20]]


def test_prepare_passes_on_length_and_dtype() -> None:
    one, other = Recorder(), Recorder()
    both, at = lg.Composed([one, other]), torch.arange(3)
    both.prepare(at)
    both.prepare(at, 40, torch.float64)
    for member in (one, other):
        assert member.calls == [(at, None, torch.float32), (at, 40, torch.float64)]


def test_columns_join_and_carries_stay_apart() -> None:
    one, other = Recorder(2.0, name="one"), Recorder(3.0, name="other")
    both, x, documents = lg.Composed([one, lg.ALiBi(4), other]), torch.randn(1, 5, 4), torch.zeros(1, 5).long()
    columns, carry = both.context(x)
    assert list(columns) == ["one", "other"]
    assert torch.equal(columns["one"], 2 * x) and torch.equal(columns["other"], 3 * x)
    assert carry == [2, None, 3]
    _, carry = both.context(x, carry, documents)
    assert carry == [4, None, 6]
    assert one.calls == [(None, None), (2, documents)] and other.calls == [(None, None), (3, documents)]
    with pytest.raises(ValueError, match="zip"):
        both.context(x, [1, 2])


def test_two_columns_of_one_name_are_refused() -> None:
    with pytest.raises(ValueError, match=r"both give the columns \['forgotten'\]; use one of them"):
        lg.Composed([lg.FoX(16, 4), lg.Rotary(8, "half"), lg.FoX(16, 4)]).context(torch.zeros(1, 3, 16))


def test_one_member_may_follow_a_length() -> None:
    for members in ([Follows(), Recorder()], [Recorder(), Follows()]):
        both = lg.Composed(members)
        assert both.length_at(4, 9) == 10
        assert both.length_at(2, 9) is None
        assert not both.stable_keys
    newest = torch.tensor([5, 9])
    assert lg.Composed([lg.ALiBi(4), Follows()]).length_at(newest, newest).tolist() == [6, 10]
    twice = lg.Composed([Follows(), lg.ALiBi(4), Follows()])
    assert twice.length_at(2, 9) is None
    with pytest.raises(ValueError, match="two composed encodings both follow a length; use one of them"):
        twice.length_at(3, 9)


# ---- which positions members are given -------------------------------------------------------------------------------
def test_positions_as_each_member_takes_them() -> None:
    """A trailing axis of one number is dropped for who measures one axis, and kept for who measures several."""
    one, three = Recorder(), Recorder(axes=3)
    both, x = lg.Composed([one, three]), torch.zeros(2, 5, 4)
    line = torch.arange(10).view(2, 5)
    for given, passed in ((line, line), (line[0], line[0]), (line[..., None], line)):
        one.calls.clear(), three.calls.clear()
        both.embed(x, given)
        both.prepare(given)
        assert torch.equal(one.calls[0], passed) and torch.equal(one.calls[1][0], passed)
        assert torch.equal(three.calls[0], given) and torch.equal(three.calls[1][0], given)
    grid = line[..., None].expand(2, 5, 3)
    for act in (lambda: both.embed(x, grid), lambda: both.prepare(grid)):
        with pytest.raises(
            ValueError, match=r"Recorder measures one axis: expected positions \[L\] or \[B, L\], got \[2, 5, 3\]"
        ):
            act()


def test_several_axes_with_members_that_reads_no_positions() -> None:
    """A bias is given offsets, so a grid of positions does not concern it; a rotation of one axis, or a table at the
    input, is refused one."""
    grid = torch.stack([torch.arange(5), torch.arange(5) * 7], -1)[None]
    axial, x = lg.AxialRotary(8, "half"), torch.randn(1, 2, 5, 8)
    rotated = lg.Composed([axial, lg.ALiBi(2)])
    assert torch.equal(rotated.rotate(x, grid), axial.rotate(x, grid))
    for member in (lg.Rotary(8, "half"), lg.Sinusoidal(8)):
        both = lg.Composed([axial, member])
        with pytest.raises(ValueError, match=f"{type(member).__name__} measures one axis"):
            both.embed(x[:, 0], grid) if both.at_input else both.prepare(grid)
    table = lg.Sinusoidal(8)
    same = lg.Composed([axial, table]).embed(x[:, 0], torch.arange(5)[None, :, None])
    assert torch.equal(same, table.embed(x[:, 0], torch.arange(5)[None]))
