"""Which labels are blind controls, what they see, and whose control each one is."""

import pytest

from longitude.study.blind import control_of, is_blind, seen, window_of


@pytest.mark.parametrize(
    ("label", "size"),
    [
        ("alibi+window:size=16", 16), ("rope:base=500+window:size=16", 16), ("rope+alibi+window:size=16", 16),
        ("rope+window:size=16..nope+window:size=64", 64),  # the widest layer sees farthest
        ("rope+window:size=16..rope", None), ("rope", None), ("window", None),
        ("rope+attention+window:size=16", None), ("nope+conv+window:size=16", None),
    ],
)  # fmt: skip
def test_only_what_has_a_window_in_every_layer_and_nothing_else_is_blind(label, size):
    assert window_of(label) == size
    assert (is_blind(label, 64), is_blind(label, 63)) == (size == 16, False)


def test_a_layer_sees_one_byte_less_than_its_window_further_back():
    assert [seen("alibi+window:size=16", layers) for layers in (1, 2, 3)] == [16, 31, 46]
    assert seen("alibi+window:size=1", 4) == 1


def test_the_control_of_a_label_is_its_own_with_a_window_else_the_first():
    labels = ("rope", "alibi", "alibi+window:size=16", "rope+window:size=16", "alibi+window:size=32")
    assert [control_of(label, labels, 64) for label in labels] == [labels[3], labels[2], None, None, labels[2]]
    assert control_of("t5", labels, 64) == labels[2] and control_of("t5", labels, 63) is None
