"""The contract, the registry, positions as users give them, and the conveniences for readers."""

import math

import pytest
import torch

import longitude as lg
from longitude.labels import parse_label
from longitude.positions.base import ENCODINGS
from longitude.positions.coordinates import canonical, explicit, require_positions
from longitude.registry import options_of
from tests.support import close, refused, refused_calls


# ---- names and options -----------------------------------------------------------------------------------------------
def test_names_options_and_classes_agree() -> None:
    rope = lg.encoding("rope", head_dim=8, layout="half", base=500.0)
    assert isinstance(rope, lg.Rotary) and (rope.head_dim, rope.layout, rope.base) == (8, "half", 500.0)
    assert list(options_of(lambda a, *more, b=1, **options: None)) == ["a", "b"]


def test_another_of_the_same_name_changes_nothing() -> None:
    with refused("'alibi'", "already", "'longitude.positions.bias.ALiBi'"):
        lg.register("alibi")(lg.T5Bias)
    assert ENCODINGS["alibi"] is lg.ALiBi
    assert lg.register("alibi")(lg.ALiBi) is lg.ALiBi  # the same class again


T, AT = torch.arange(3), torch.tensor
ALIBI, ROPE, FIRE = lg.ALiBi(4), lg.Rotary(8, "half"), lg.Fire(4)
HEADS = torch.zeros(2, 1, 3, 8)
test_wrong_use = refused_calls(
    [
        (lambda: lg.encoding("alibbi"), "'alibi'", "lg.list_encodings"),
        (lambda: lg.encoding(3), "encoding", "3"),
        (lambda: lg.encoding("t5", num_heads=4, buckets=3), "'t5'", "'buckets'", "'num_buckets'"),
        (lambda: lg.encoding("t5"), "'t5'", "'num_heads'", "lg.encoding"),
        (lambda: lg.encoding("rope", head_dim=8), "'half' or 'interleaved'", "head_dim=8, layout='half'"),
        (lambda: ALIBI.bias(torch.zeros(2, 3), T), "[Lq]", "[Lk]", "[2, 3]", "[3]"),
        (lambda: ALIBI.bias(AT([-1]), T), "positions", "q_positions", "0", "-1"),
        (lambda: ALIBI.bias_at(AT([0.5])), "offset", "torch.float32"),
        (lambda: ROPE.bias(T, T), "Rotary"),
        (lambda: ROPE.bias_at(3), "bias_at"),
        (lambda: FIRE.bias_at(3), "Fire"),
        (lambda: lg.Composed([ALIBI, FIRE]).bias_at(3), "Composed"),
        (lambda: ROPE.rotate(HEADS.long(), 0), "[2, 1, 3, 8]"),
        (lambda: ROPE.rotate(HEADS[0, 0, 0], 0), "[..., L, head_dim]"),
        (lambda: ROPE.rotate(HEADS[0, 0], T.expand(2, 3)), "[3, 8]"),
        (lambda: ROPE.rotate(HEADS[None], 3), "[B, H, L, head_dim]", "[1, 2, 1, 3, 8]"),
        (lambda: lg.AxialRotary(8, "half").rotate(HEADS[0], T.expand(2, 3)), "[3, 2]", "[1, 3, 2]", "[2, 3]"),
    ]
)


# ---- positions -------------------------------------------------------------------------------------------------------
def test_positions_as_int_and_tensor() -> None:
    assert explicit(5, 3).tolist() == [5, 6, 7]
    assert explicit(T, 2) is T
    assert canonical("me", 0, 2, 3) == 0 and canonical("me", 9, 2, 3, 2) == 9
    for right in (AT([0, 7]), AT([[0], [7]]), AT([0, 7], dtype=torch.int32)):
        require_positions(right, 8)
    require_positions(AT([10**12]))


test_positions_that_do_not_exist = refused_calls(
    [
        (lambda: require_positions(AT([0, 1], dtype=torch.uint8)), "positions", "torch.uint8"),  # differences wrap
        (lambda: require_positions(AT([3, 8]), 8), "0", "7", "3", "8"),
        *((lambda given=given: canonical("me", given, 2, 3), "me", str(given)) for given in (-1, True, 2.0, [0, 1, 2])),
    ]
)


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
PASSED_ON = [([3], 1, [3]), ([2, 3], 1, [2, 3]), ([1, 3], 1, [3]), ([3], 2, [3]), ([2, 3], 2, [2, 3, 1])]
PASSED_ON += [([1, 3], 2, [1, 3, 1]), ([3, 2], 2, [1, 3, 2]), ([3, 3], 3, [1, 3, 3])]
PASSED_ON += [(shape, 2, shape) for shape in ([2, 3, 1], [2, 3, 2], [1, 3, 1], [1, 3, 2])]


@pytest.mark.parametrize(("shape", "axes", "passed"), PASSED_ON)
def test_no_dimension_of_positions_is_mistaken_for_another(shape: list, axes: int, passed: list) -> None:
    given = torch.arange(math.prod(shape)).view(shape)
    assert torch.equal(torch.as_tensor(canonical("me", given, 2, 3, axes)), given.view(passed))


def test_positions_that_may_mean_two_things_are_refused() -> None:
    """Two rows of two tokens on two axes."""
    square = torch.zeros(2, 2).long()
    with refused("me", "[2, 2]", "[B, L]", "[L, axes]"):
        canonical("me", square, 2, 2, 2)
    assert canonical("me", square, 2, 2, 1) is square
    assert canonical("me", square, 1, 2, 2).shape == canonical("me", square, 5, 2, 2).shape == (1, 2, 2)


WRONG_SHAPES = [([], 1), ([4], 1), ([1], 1), ([2, 1], 1), ([3, 3], 1), ([2, 3, 1], 1)]
WRONG_SHAPES += [([2, 3, 3], 2), ([3, 3, 2], 2), ([2, 4, 2], 2), ([2, 3, 2, 1], 2), ([2, 2], 2)]


@pytest.mark.parametrize(("shape", "axes"), WRONG_SHAPES)
def test_positions_of_another_shape_are_refused(shape: list, axes: int) -> None:
    """Never broadcast: each token has its own."""
    with refused("[3]", "[2, 3]", *["[3, 2]", "[2, 3, 2]"][: 2 * (axes > 1)], what="me", got=str(shape)):
        canonical("me", torch.zeros(shape).long(), 2, 3, axes)


# ---- for readers -----------------------------------------------------------------------------------------------------
def test_bias_of_offsets_and_of_positions() -> None:
    """Queries first, then keys; heads in front; everything added."""
    i, j = torch.arange(3, 9), torch.arange(12)
    for name in ("alibi", "t5", "clipped"):
        encoding = lg.testing.example(name)()
        for own in (encoding.bias(i, j), encoding.bias(i.int(), j.int())):
            close(own, encoding.bias_at(i[:, None] - j))
        assert encoding.bias_at(3).shape == (4,) and encoding.bias_at(torch.zeros(2, 5).long()).shape == (4, 2, 5)
    fire, alibi = lg.testing.example("fire")(), lg.ALiBi(4)
    (term,) = fire.terms({})
    own = fire.bias(i, j)
    assert own.shape == (4, 6, 12)
    close(own[:, 2, 7], term.at(i[2:3, None], j[None, 7:8])[:, 0, 0])
    close(lg.Composed([alibi, fire, alibi]).bias(i, j), own + 2 * alibi.bias(i, j))
    close(lg.Composed([alibi, alibi]).bias_at(7), 2 * alibi.bias_at(7))


def test_rotate_takes_any_leading_dimensions() -> None:
    rope, x = lg.Rotary(8, "half"), torch.randn(2, 4, 5, 8, dtype=torch.float64)
    want = rope.rotate(x, torch.arange(3, 8))  # positions along the dimension before the last
    for got in (rope.rotate(x, 3)[0], rope.rotate(x[0], 3), rope.rotate(x[0], torch.arange(3, 8))):
        close(got, want[0], 0)
    close(rope.rotate(x[0, 0], 3), want[0, 0], 0)
    assert torch.equal(lg.ALiBi(4).rotate(x, 3), x)
    xpos = lg.XPos(8, "half")
    tables = xpos.prepare(torch.arange(3, 8), dtype=torch.float64)
    assert torch.equal(xpos.rotate_queries(x, 3), xpos.queries(x, tables))
    assert torch.equal(xpos.rotate_keys(x, 3), xpos.keys(x, tables))
    axial, place = lg.AxialRotary(8, "half"), torch.tensor([[0, 3], [1, 1], [2, 9], [5, 5], [7, 0]])
    close(axial.rotate(x[0], place), axial.rotate(x, place)[0], 0)


def test_none_is_read_and_nope_is_written():
    """The name of papers is written; the other is read: as an encoding, in a label and in a config."""
    assert type(lg.encoding("nope")) is type(lg.encoding("none")) and "none" not in lg.list_encodings()
    assert parse_label("none+mamba").encodings == [{"name": "nope"}]
    assert lg.LongitudeConfig(encoding="nope").encoding == lg.LongitudeConfig(encoding="none").encoding
