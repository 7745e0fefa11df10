"""Wrong input of every kind: a ValueError that says what was expected."""

import pytest
import torch

import longitude as lg
from longitude.positions.base import OffsetBias, PairBias
from tests.support import refused_calls

BIASES = [
    name
    for name in lg.list_encodings()
    if (terms := lg.testing.example(name)().terms if name not in ("cope", "fox", "path", "path_fox") else None)
    and any(isinstance(term, OffsetBias | PairBias) for term in terms({}))
]
NO_POSITIONS = {
    "halves": (torch.tensor([0.0, 0.5]), "expected integer positions"),
    "NaN": (torch.tensor([0.0, float("nan")]), "expected integer positions"),
    "bytes, whose differences wrap": (torch.tensor([0, 1], dtype=torch.uint8), "expected integer positions"),
    "bools": (torch.tensor([True, False]), "expected integer positions"),
    "negative": (torch.tensor([0, -1]), "expected positions of 0 or more, got -1"),
}


def test_all_biases_are_tried() -> None:
    assert set(BIASES) == {"alibi", "clipped", "fire", "kerple_log", "kerple_power", "sandwich", "t5"}


@pytest.mark.parametrize("kind", NO_POSITIONS)
@pytest.mark.parametrize("name", BIASES)
def test_bias_at_no_position(name: str, kind: str) -> None:
    encoding, (positions, message) = lg.testing.example(name)(), NO_POSITIONS[kind]
    token = torch.arange(2)
    for pair in ((positions, token), (token, positions)):
        with pytest.raises(ValueError, match=message):
            encoding.bias(*pair)
    if name != "fire" and not positions.is_signed() or positions.is_floating_point():
        with pytest.raises(ValueError, match=r"expected integers|not on their offset"):
            encoding.bias_at(positions)
    short = torch.arange(2, dtype=torch.int32)
    torch.testing.assert_close(encoding.bias(short, short), encoding.bias(token, token))


FLAGS = [
    ("T5Bias", (2,), "bidirectional"),
    ("T5Bias", (2,), "shared"),
    ("ClippedBias", (2,), "shared"),
    ("Kerple", (2,), "shared"),
    ("Fire", (2,), "shared"),
    ("Shaw", (4,), "values"),
    ("Shaw", (4,), "shared"),
    ("TransformerXL", (2, 4, 8), "shared"),
    ("CoPE", (4,), "scaled"),
    ("FoX", (8, 2), "scale_gate"),
]


@pytest.mark.parametrize(("kind", "sizes", "flag"), FLAGS)
def test_a_flag_is_true_or_false(kind: str, sizes: tuple, flag: str) -> None:
    """Text such as "no" would count as True."""
    for value in ("no", 1, None, float("nan")):
        with pytest.raises(ValueError, match=f": expected {flag} to be True or False, got {value!r}"):
            getattr(lg, kind)(*sizes, **{flag: value})
    for value in (True, False):
        assert getattr(getattr(lg, kind)(*sizes, **{flag: value}), flag) is value


X = torch.zeros(2, 3, 4)
HEADS = torch.zeros(2, 1, 3, 4)
SHAPES = {
    "one position for three tokens": torch.tensor([5]),
    "a number": torch.tensor(5),
    "one position per row": torch.tensor([[1], [2]]),
    "two for three": torch.arange(2),
    "a list": [0, 1, 2],
    "nothing": None,
    "a bool": True,
}


@pytest.mark.parametrize("kind", SHAPES)
def test_positions_of_another_shape(kind: str) -> None:
    """Never broadcast: each token has its own."""
    for call in (
        lambda p: lg.Sinusoidal(4).embed(X, p),
        lambda p: lg.Learned(9, 4).embed(X, p),
        lambda p: lg.Rotary(4, "half").rotate(HEADS, p),
        lambda p: lg.XPos(4, "half").rotate_keys(HEADS, p),
        lambda p: lg.AxialRotary(4, "half").rotate(HEADS, p),
    ):
        with pytest.raises(ValueError, match="expected"):
            call(SHAPES[kind])


test_other_mistakes = refused_calls(
    [
        (lambda: lg.Rotary(4, "half").rotate(HEADS.long(), 0), "of floats, got torch.int64"),
        (lambda: lg.Rotary(4, "half").rotate(HEADS[0, 0, 0], 0), r"expected x \[..., L, head_dim\]"),
        (lambda: lg.PaTH(32, 4, 8, num_kv_heads=3), "expected num_kv_heads to divide num_heads=4, got 3"),
        (lambda: lg.convert_layout([1, 2], 8, "half"), "expected a tensor"),
        (lambda: lg.multimodal_positions(3), "expected a list of texts"),
        (lambda: lg.encoding(["rope"]), "unknown encoding"),
    ]
)
