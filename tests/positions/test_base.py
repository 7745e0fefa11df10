"""The contract, the registry, and the conveniences for readers."""

import dataclasses
import math

import pytest
import torch

import longitude as lg
from longitude.errors import check_flags, check_positive, check_sizes
from longitude.positions.base import ENCODINGS, OffsetBias, OffsetVectors, PairBias, resolved
from longitude.positions.coordinates import canonical, explicit, require_positions, wide
from longitude.registry import options_of
from tests.support import refused_calls

#       relative, learned, causal_only, shared
DECLARED = {
    "none": (True, False, False, True),
    "sinusoidal": (False, False, False, True),
    "learned": (False, True, False, True),
    "rope": (True, False, False, True),
    "alibi": (True, False, False, True),
    "t5": (True, True, False, True),
    "clipped": (True, True, False, False),
    "fire": (False, True, False, False),
    "shaw": (True, True, False, False),
    "cope": (True, True, True, False),
    "fox": (True, True, True, False),
    "path": (True, True, True, False),
    "path_fox": (True, True, True, False),
    "xpos": (True, False, True, True),
    "axial_rope": (True, False, False, True),
    "mrope": (True, False, False, True),
    "kerple_log": (True, True, False, True),
    "kerple_power": (True, True, False, True),
    "sandwich": (True, False, False, True),
    "transformer_xl": (True, True, False, False),
}


@pytest.mark.parametrize("name", DECLARED)
def test_declared_properties(name: str) -> None:
    encoding = lg.testing.example(name)()
    assert (encoding.relative, encoding.learned, encoding.causal_only, encoding.shared) == DECLARED[name]
    assert encoding.max_length == (600 if name == "learned" else None)
    assert encoding.axes == {"mrope": 3, "axial_rope": 2}.get(name, 1)
    assert encoding.stable_keys == (name != "xpos")
    assert encoding.at_input == (name in ("sinusoidal", "learned"))


def test_every_name_is_known_and_declared() -> None:
    assert set(lg.list_encodings()) == set(DECLARED)
    assert lg.list_encodings() == sorted(lg.list_encodings())


def test_by_default_nothing_is_done() -> None:
    """The contract's own values: what an encoding that overrides nothing declares and does."""
    nothing, x, at = lg.Encoding(), torch.randn(2, 3, 4), torch.arange(3)
    declared = {
        "relative": True,
        "learned": False,
        "causal_only": False,
        "max_length": None,
        "axes": 1,
        "shared": False,
    }
    declared |= {"stable_keys": True, "softmax_factor": 1.0, "passing_columns": frozenset(), "model_defaults": {}}
    assert {name: getattr(lg.Encoding, name) for name in declared} == declared
    assert nothing.embed(x, at) is x
    assert nothing.prepare(at) is None
    assert nothing.queries(x, None) is x and nothing.keys(x, None) is x
    carry = object()
    assert nothing.context(x) == ({}, None) and nothing.context(x, carry) == ({}, carry)
    assert nothing.terms({}) == ()
    assert nothing.length_at(3, 9) is None and nothing.length_at(at, at) is None
    assert nothing.reset_parameters() is None
    assert (nothing.at_input, nothing.reads_tokens) == (False, False)
    assert (lg.Sinusoidal(4).at_input, lg.Sinusoidal(4).reads_tokens) == (True, False)
    assert (lg.FoX(4, 2).at_input, lg.FoX(4, 2).reads_tokens) == (False, True)


def test_fields_of_terms() -> None:
    """In this order, with these defaults, and no one may change them."""
    w, b = torch.zeros(1, 2, 3, 4), torch.zeros(1, 2, 3)
    transport, drift, vectors = lg.Transport(w, b), lg.Drift(b), OffsetVectors(torch.sin)
    assert transport.w is w and transport.b is b and (transport.chunk, transport.first) == (128, 0)
    assert (lg.Transport(w, b, 5, 7).chunk, lg.Transport(w, b, 5, 7).first) == (5, 7)
    assert drift.level is b and drift.scaled is False and lg.Drift(b, True).scaled is True
    assert (vectors.values, vectors.shift) == (None, 0.0)
    for term in (transport, drift, vectors, OffsetBias(torch.sin), PairBias(torch.add), lg.RowBias(torch.add)):
        field = dataclasses.fields(term)[0].name
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(term, field, None)


def test_names_options_and_classes_agree() -> None:
    rope = lg.encoding("rope", head_dim=8, layout="half", base=500.0)
    assert isinstance(rope, lg.Rotary) and (rope.head_dim, rope.layout, rope.base) == (8, "half", 500.0)
    assert ENCODINGS["alibi"] is lg.ALiBi
    assert "options" not in options_of(lambda a, *more, b=1, **options: None)
    assert list(options_of(lambda a, *more, b=1, **options: None)) == ["a", "b"]
    assert list(options_of(lg.T5Bias)) == ["num_heads", "num_buckets", "max_distance", "bidirectional", "shared"]


def test_resolved_writes_out_every_option() -> None:
    assert resolved("t5", {"num_buckets": 16}, num_heads=4, head_dim=8) == {
        "num_heads": 4, "num_buckets": 16, "max_distance": 128, "bidirectional": False, "shared": True,
    }  # fmt: skip
    assert resolved("path", {}, dim=16, num_heads=4, head_dim=4, num_kv_heads=2)["num_kv_heads"] == 2
    full = resolved("path", {"num_kv_heads": None, "dim": 8}, dim=16, num_heads=4, head_dim=4, num_kv_heads=2, kernel=9)
    assert (full["num_kv_heads"], full["dim"], full["kernel"]) == (None, 8, 3)  # what is given stays; defaults, too
    assert list(resolved("rope", {"layout": "half"}, head_dim=8)) == list(options_of(lg.Rotary))


test_wrong_use = refused_calls(
    [
        (
            lambda: lg.encoding("alibbi"),
            r"unknown encoding 'alibbi': did you mean 'alibi'\? lg.list_encodings\(\) lists them",
        ),
        (lambda: lg.encoding("zzz"), "unknown encoding 'zzz': there are: alibi, "),
        (lambda: lg.encoding(3), "unknown encoding 3: there are: alibi, "),
        (lambda: lg.encoding(["alibi"]), r"unknown encoding .*alibi.*: did you mean 'alibi'"),
        (lambda: lg.encoding("t5", num_heads=4, buckets=3), "option of 't5' 'buckets': did you mean 'num_buckets'"),
        (lambda: lg.encoding("t5"), r"'t5' needs the option 'num_heads': lg.encoding\('t5', num_heads=...\)"),
        (lambda: lg.register("alibi")(lg.T5Bias), "the encoding 'alibi' is registered already"),
        (lambda: lg.FoX(16, 4).bias(torch.arange(3), torch.arange(3)), "FoX has no bias that positions alone decide"),
        (
            lambda: lg.ALiBi(4).bias(torch.zeros(2, 3), torch.arange(3)),
            r"positions \[Lq\] and \[Lk\], got \[2, 3\] and \[3\]",
        ),
        (
            lambda: lg.ALiBi(4).bias(torch.arange(3), torch.zeros(2, 3)),
            r"positions \[Lq\] and \[Lk\], got \[3\] and \[2, 3\]",
        ),
        (lambda: lg.ALiBi(4).bias(torch.tensor([-1]), torch.arange(3)), "q_positions: .* got -1 .. -1"),
        (lambda: lg.ALiBi(4).bias(torch.arange(3), torch.tensor([0.5])), "k_positions: expected integer positions"),
        (lambda: lg.ALiBi(4).bias(3, 4), r"positions \[Lq\] and \[Lk\], got \[\] and \[\]"),
        (
            lambda: lg.Rotary(8, "half").bias(torch.arange(3), torch.arange(3)),
            r"Rotary has no bias .* so no \.bias\(\)",
        ),
        (lambda: lg.Rotary(8, "half").bias_at(3), r"so no \.bias_at\(\)"),
        (lambda: lg.ALiBi(4).bias_at(torch.tensor([0.5])), r"offset: expected integers \(int64\), got torch.float32"),
        (lambda: lg.Shaw(8).bias_at(3), "Shaw has no bias that positions alone decide"),
        (lambda: lg.Composed([lg.ALiBi(4), lg.Shaw(8)]).bias_at(3), "Composed has no bias that positions alone decide"),
        (lambda: lg.Fire(4).bias_at(3), r"Fire depends on both positions, not on their offset alone; use \.bias\(\)"),
        (lambda: lg.Composed([lg.ALiBi(4), lg.Fire(4)]).bias_at(3), "Composed depends on both positions"),
    ]
)


def test_another_of_the_same_name_changes_nothing() -> None:
    with pytest.raises(ValueError, match="choose another name"):
        lg.register("alibi")(lg.T5Bias)
    assert ENCODINGS["alibi"] is lg.ALiBi
    assert lg.register("alibi")(lg.ALiBi) is lg.ALiBi  # the same class again


def test_repr_says_numbers_and_words() -> None:
    assert repr(lg.Rotary(8, "half")) == (
        "Rotary(head_dim=8, layout='half', base=10000.0, rotary_dim=8, proportion=1.0, angle_dtype='float64')"
    )
    assert repr(lg.Shaw(8, 4, values=False)).startswith("Shaw(head_dim=8, max_distance=4, values=False, shared=False")


def test_positions_as_int_and_tensor() -> None:
    assert explicit(5, 3).tolist() == [5, 6, 7]
    given = torch.tensor([9, 1])
    assert explicit(given, 2) is given


@pytest.mark.parametrize(
    ("positions", "max_length", "message"),
    [
        (torch.tensor([0.0]), None, "expected integer positions"),
        (torch.tensor([True]), None, "expected integer positions"),
        (torch.tensor([3, -1]), None, r"expected positions of 0 or more, got -1 .. 3"),
        (torch.tensor([3, 8]), 8, r"expected positions 0 .. 7, got 3 .. 8"),
        (torch.tensor([[3], [-1]], dtype=torch.int32), 8, r"expected positions 0 .. 7, got -1 .. 3"),
        (torch.tensor([3, 8], dtype=torch.int16), None, "expected integer positions"),
    ],
)
def test_require_positions(positions: torch.Tensor, max_length: int | None, message: str) -> None:
    with pytest.raises(ValueError, match=f"me: {message}"):
        require_positions(positions, max_length, "me")


def test_require_positions_takes_all_there_are() -> None:
    require_positions(torch.tensor([0, 7]), 8)
    require_positions(torch.tensor([[0], [10**12]]))
    require_positions(torch.tensor([0, 7], dtype=torch.int32))


def test_require_positions_asserts_where_looking_would_stop_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Under torch.compile and on other devices: an assertion of the device, and no look at the values."""
    require_positions(torch.tensor([-3], device="meta"))  # has no values to look at
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    require_positions(torch.tensor([0, 7]), 8)
    with pytest.raises(RuntimeError, match=r"me: expected positions 0 \.\. 7"):
        require_positions(torch.tensor([0, 8]), 8, "me")
    with pytest.raises(RuntimeError, match="positions: expected positions of 0 or more"):
        require_positions(torch.tensor([0, -1]))


# two rows of three tokens: shape, axes -> the shape passed on
PASSED_ON = [
    ([3], 1, [3]),
    ([2, 3], 1, [2, 3]),
    ([1, 3], 1, [3]),
    ([3], 2, [3]),
    ([2, 3], 2, [2, 3, 1]),
    ([1, 3], 2, [1, 3, 1]),
    ([3, 2], 2, [1, 3, 2]),
    ([3, 3], 3, [1, 3, 3]),
    ([2, 3, 1], 2, [2, 3, 1]),
    ([2, 3, 2], 2, [2, 3, 2]),
    ([1, 3, 1], 2, [1, 3, 1]),
    ([1, 3, 2], 2, [1, 3, 2]),
]


@pytest.mark.parametrize(("shape", "axes", "passed"), PASSED_ON)
def test_no_dimension_of_positions_is_mistaken_for_another(shape: list, axes: int, passed: list) -> None:
    given = torch.arange(math.prod(shape)).view(shape)
    got = canonical("me", given, 2, 3, axes)
    assert isinstance(got, torch.Tensor) and list(got.shape) == passed
    assert torch.equal(got.flatten(), given.flatten())


def test_positions_that_may_mean_two_things_are_refused() -> None:
    """Two rows of two tokens on two axes."""
    square = torch.zeros(2, 2).long()
    with pytest.raises(ValueError, match=r"me: \[2, 2\] may mean .* pass \[2, 2, 1\] or \[1, 2, 2\]"):
        canonical("me", square, 2, 2, 2)
    assert canonical("me", square, 2, 2, 1) is square
    assert canonical("me", square, 1, 2, 2).shape == (1, 2, 2)
    assert canonical("me", square, 5, 2, 2).shape == (1, 2, 2)


@pytest.mark.parametrize(
    ("positions", "axes", "message"),
    [
        (-1, 1, "me: expected integers of 0 or more, got -1"),
        (True, 1, "me: expected integers of 0 or more, .* got True"),
        (2.0, 1, "me: expected integers of 0 or more, .* got 2.0"),
        ([0, 1, 2], 1, r"me: expected integers of 0 or more, .* got \[0, 1, 2\]"),
        (torch.tensor(3), 1, r"me: expected \[3\] or \[2, 3\], got \[\]$"),
        (torch.arange(4), 1, r"me: expected \[3\] or \[2, 3\], got \[4\]$"),
        (torch.zeros(3, 3).long(), 1, r"got \[3, 3\]$"),
        (torch.zeros(3, 1).long(), 1, r"got \[3, 1\]$"),
        (torch.zeros(2, 3, 1).long(), 1, r"got \[2, 3, 1\]$"),
        (torch.zeros(2, 3, 3).long(), 2, r"or with axes \[3, 2\] or \[2, 3, 2\], got \[2, 3, 3\]$"),
        (torch.zeros(3, 3, 2).long(), 2, r"got \[3, 3, 2\]$"),
        (torch.zeros(2, 4, 2).long(), 2, r"got \[2, 4, 2\]$"),
        (torch.zeros(2, 3, 2, 1).long(), 2, r"got \[2, 3, 2, 1\]$"),
        (torch.zeros(2, 2).long(), 2, r"got \[2, 2\]$"),
        (torch.zeros(3), 1, "me: expected integer positions"),
        (torch.tensor([0, -1, 2]), 1, "me: expected positions of 0 or more, got -1 .. 2"),
    ],
)
def test_other_positions_are_refused(positions, axes: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        canonical("me", positions, 2, 3, axes)
    assert canonical("me", 0, 2, 3) == 0 and canonical("me", 9, 2, 3, 2) == 9


def test_wide() -> None:
    assert wide(torch.device("cpu")) == wide(torch.device("cuda")) == torch.float64
    assert wide(torch.device("mps")) == torch.float32


@pytest.mark.parametrize("wrong", [0, -1, 0.0, -0.5, math.inf, math.nan, True, "3", None])
def test_numbers_above_zero(wrong) -> None:
    check_positive("me", a=1e-9, b=3, c=1e300)
    check_positive("me")
    with pytest.raises(ValueError, match=f"me: expected b above 0, got {wrong!r}"):
        check_positive("me", a=1.0, b=wrong)


@pytest.mark.parametrize("wrong", [0, 1, "true", None])
def test_flags(wrong) -> None:
    check_flags("me", a=True, b=False)
    with pytest.raises(ValueError, match=f"me: expected b to be True or False, got {wrong!r}"):
        check_flags("me", a=True, b=wrong)


@pytest.mark.parametrize("wrong", [0, -1, 1.0, 2.5, True, "3", None])
def test_sizes(wrong) -> None:
    check_sizes("me", a=1, b=10**9)
    with pytest.raises(ValueError, match=f"me: expected b to be an int of 1 or more, got {wrong!r}"):
        check_sizes("me", a=1, b=wrong)


def test_bias_conveniences_agree() -> None:
    for name in ("alibi", "t5", "clipped"):
        encoding = lg.testing.example(name)()
        i, j = torch.arange(3, 9), torch.arange(12)
        torch.testing.assert_close(encoding.bias(i, j), encoding.bias_at(i[:, None] - j))
        assert encoding.bias_at(3).shape == (4,) and encoding.bias_at(torch.zeros(2, 5).long()).shape == (4, 2, 5)
    both = lg.Composed([lg.ALiBi(4), lg.T5Bias(4)])
    torch.testing.assert_close(both.bias_at(7), both.members[0].bias_at(7) + both.members[1].bias_at(7))


def test_bias_of_both_positions() -> None:
    """Queries first, then keys; heads in front; everything added."""
    fire, alibi = lg.testing.example("fire")(), lg.ALiBi(4)
    i, j = torch.arange(3, 9), torch.arange(12)
    (term,) = fire.terms({})
    own = fire.bias(i, j)
    assert own.shape == (4, 6, 12)
    torch.testing.assert_close(own[:, 2, 7], term.at(i[2:3, None], j[None, 7:8])[:, 0, 0])
    torch.testing.assert_close(lg.Composed([alibi, fire, alibi]).bias(i, j), own + 2 * alibi.bias(i, j))
    assert alibi.bias(i, j)[0, 2, 1] == alibi.bias_at(4)[0]


def test_rotate_conveniences() -> None:
    rope, x = lg.Rotary(8, "half"), torch.randn(5, 8)
    assert torch.equal(rope.rotate(x, 3), rope.rotate(x.expand(2, 4, 5, 8), 3)[0, 0])
    assert torch.equal(lg.ALiBi(4).rotate(x, 3), x)
    heads = torch.randn(2, 4, 5, 8, dtype=torch.float64)
    want = rope.rotate(heads, torch.arange(3, 8))  # positions along the dimension before the last
    assert torch.equal(rope.rotate(heads, 3), want)
    torch.testing.assert_close(rope.rotate(heads[0], 3), want[0], atol=0, rtol=0)
    torch.testing.assert_close(rope.rotate(heads[0], torch.arange(3, 8)), want[0], atol=0, rtol=0)
    xpos = lg.XPos(8, "half")
    tables = xpos.prepare(torch.arange(3, 8), dtype=torch.float64)
    for rotate, transform in (
        (xpos.rotate_queries, xpos.queries),
        (xpos.rotate_keys, xpos.keys),
        (xpos.rotate, xpos.queries),
    ):
        assert torch.equal(rotate(heads, 3), transform(heads, tables))
    axial = lg.AxialRotary(8, "half")
    place = torch.tensor([[0, 3], [1, 1], [2, 9], [5, 5], [7, 0]])
    assert torch.equal(axial.rotate(heads[:1], place), axial.rotate(heads[:1], place[None]))
    torch.testing.assert_close(axial.rotate(heads[0], place), axial.rotate(heads, place)[0], atol=0, rtol=0)
    with pytest.raises(ValueError, match=r"positions: expected \[5\] or \[1, 5\], or with axes .* got \[2, 5\]"):
        axial.rotate(heads[0], torch.zeros(2, 5).long())
    several = r"expected x \[B, H, L, head_dim\] for positions of several rows, got x "
    for y, positions in ((x, torch.zeros(2, 5).long()), (heads[0], torch.zeros(2, 5).long()), (heads[None], 3)):
        with pytest.raises(ValueError, match=several + rf"\[{', '.join(map(str, y.shape))}\]"):
            rope.rotate(y, positions)
