"""The contract, the registry, and the conveniences for readers."""

import pytest
import torch

import longitude as lg
from longitude.positions.base import explicit, factory_of, options_of, require_positions, resolved
from longitude.positions.composed import compose

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
    assert set(lg.encodings()) == set(DECLARED)
    assert lg.encodings() == sorted(lg.encodings())


def test_names_options_and_classes_agree() -> None:
    rope = lg.encoding("rope", head_dim=8, layout="half", base=500.0)
    assert isinstance(rope, lg.Rotary) and (rope.head_dim, rope.layout, rope.base) == (8, "half", 500.0)
    assert factory_of("alibi") is lg.ALiBi
    assert list(options_of(lg.T5Bias)) == ["num_heads", "num_buckets", "max_distance", "bidirectional", "shared"]


def test_resolved_writes_out_every_option() -> None:
    assert resolved("t5", {"num_buckets": 16}, num_heads=4, head_dim=8) == {
        "num_heads": 4, "num_buckets": 16, "max_distance": 128, "bidirectional": False, "shared": True,
    }  # fmt: skip
    assert resolved("path", {}, dim=16, num_heads=4, head_dim=4, num_kv_heads=2)["num_kv_heads"] == 2


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: lg.encoding("alibbi"),
            r"unknown encoding 'alibbi': did you mean 'alibi'\? lg.encodings\(\) lists them",
        ),
        (lambda: lg.encoding("zzz"), "unknown encoding 'zzz': there are: alibi, "),
        (lambda: lg.encoding("t5", num_heads=4, buckets=3), "option of 't5' 'buckets': did you mean 'num_buckets'"),
        (lambda: lg.encoding("t5"), r"'t5' needs the option 'num_heads': lg.encoding\('t5', num_heads=...\)"),
        (lambda: lg.register("alibi")(lg.T5Bias), "an encoding named 'alibi' is registered already"),
        (lambda: compose("alibi"), "expected an Encoding or a list of them, got 'alibi'"),
        (lambda: compose(["alibi"]), "expected encodings, got 'alibi'"),
        (lambda: lg.FoX(16, 4).bias(torch.arange(3), torch.arange(3)), "FoX has no bias that positions alone decide"),
        (lambda: lg.Rotary(8, "half").bias_at(3), "Rotary has no bias"),
        (lambda: lg.ALiBi(4).bias(torch.zeros(2, 3), torch.arange(3)), r"expected positions \[Lq\] and \[Lk\]"),
    ],
)
def test_wrong_use(call, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()


def test_registering_the_same_class_again_is_fine() -> None:
    assert lg.register("alibi")(lg.ALiBi) is lg.ALiBi


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
    ],
)
def test_require_positions(positions: torch.Tensor, max_length: int | None, message: str) -> None:
    with pytest.raises(ValueError, match=f"me: {message}"):
        require_positions(positions, max_length, "me")


def test_require_positions_takes_all_there_are() -> None:
    require_positions(torch.tensor([0, 7]), 8)
    require_positions(torch.tensor([[0], [10**12]]))


def test_bias_conveniences_agree() -> None:
    for name in ("alibi", "t5", "clipped"):
        encoding = lg.testing.example(name)()
        i, j = torch.arange(3, 9), torch.arange(12)
        torch.testing.assert_close(encoding.bias(i, j), encoding.bias_at(i[:, None] - j))
        assert encoding.bias_at(3).shape == (4,) and encoding.bias_at(torch.zeros(2, 5).long()).shape == (4, 2, 5)
    both = lg.Composed([lg.ALiBi(4), lg.T5Bias(4)])
    torch.testing.assert_close(both.bias_at(7), both.members[0].bias_at(7) + both.members[1].bias_at(7))


def test_rotate_conveniences() -> None:
    rope, x = lg.Rotary(8, "half"), torch.randn(5, 8)
    assert torch.equal(rope.rotate(x, 3), rope.rotate(x.expand(2, 4, 5, 8), 3)[0, 0])
    assert torch.equal(lg.ALiBi(4).rotate(x, 3), x)
    with pytest.raises(ValueError, match="positions of several rows"):
        rope.rotate(x, torch.zeros(2, 5).long())


def test_composed_declares_what_its_members_declare() -> None:
    both = lg.Composed([lg.Learned(50, 16), lg.Learned(40, 16), lg.FoX(16, 4)])
    assert (both.relative, both.learned, both.causal_only, both.shared, both.max_length) == (
        False,
        True,
        True,
        False,
        40,
    )
    nothing = compose(None)
    assert (nothing.relative, nothing.learned, nothing.causal_only, nothing.at_input) == (True, False, False, False)
    assert compose(both) is both


def test_two_columns_of_one_name_are_refused() -> None:
    with pytest.raises(ValueError, match=r"both give the columns \['forgotten'\]"):
        lg.Composed([lg.FoX(16, 4), lg.FoX(16, 4)]).context(torch.zeros(1, 3, 16))
