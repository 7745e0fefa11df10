"""Tables of short contexts against a loop over the formula, and on text that they know by heart."""

from collections import Counter, defaultdict
from dataclasses import replace
from itertools import product

import numpy as np
import pandas as pd
import pytest
import torch

from longitude.measure import losses_by_length
from longitude.study.data import Windows
from longitude.study.ngrams import NGrams, ngrams_of
from longitude.study.results import FIRST, LAST
from longitude.study.tasks.base import Measuring
from longitude.study.tasks.text import Text, distances, foretold
from longitude.study.train import build_model
from tests.study.conftest import COPY, TINY


def loop(training, window, at, order, vocabulary):
    """p of window[at], by dictionaries."""
    p = 1 / vocabulary
    for k in range(1, min(order, at + 1) + 1):
        after = defaultdict(Counter)
        for row in training.tolist():
            for i in range(max(1, k - 1), len(row)):
                after[tuple(row[i - k + 1 : i])][row[i]] += 1
        seen = after[tuple(window[at - k + 1 : at])]
        if seen:
            p = (seen[window[at]] + len(seen) * p) / (seen.total() + len(seen))
    return p


@pytest.mark.parametrize("order", [1, 2, 3, 4])
def test_equal_to_the_formula(order):
    random = np.random.default_rng(order)
    training, held_out = random.integers(0, 5, (7, 12)), random.integers(0, 6, (3, 9))
    got = NGrams(training, order, 6).nats(held_out)
    want = [[-np.log(loop(training, row, i, order, 6)) for i in range(1, 9)] for row in held_out.tolist()]
    np.testing.assert_allclose(got, want, rtol=1e-12)


@pytest.mark.parametrize(("order", "vocabulary"), [(0, 256), (8, 256), (4, 100_000)])
def test_orders_that_do_not_fit(order, vocabulary):
    with pytest.raises(ValueError, match="order: expected 1 or more"):
        NGrams(np.zeros((1, 3), int), order, vocabulary)


def test_a_study_counts_its_own_windows(data):
    config = replace(TINY, steps=20)
    windows = Windows(data.training, 16, 40, seed=0)
    training = np.stack([windows.text[start : start + 17] for start in windows.starts])
    texts = [document.numpy() for document in data.validation]
    held_out = [text[i : i + 17] for text in texts for i in range(0, len(text) // 48 * 48, 16)]
    want = {k: NGrams(training, k, 256).nats(np.stack(held_out)).mean() / np.log(2) for k in (2, 3)}
    assert ngrams_of(config, data) == pytest.approx(want)


def test_bits_are_per_byte_where_tokens_are_longer(data):
    twice = replace(data, token_bytes=[np.full(len(document), 2) for document in data.validation])
    bytes_, tokens = (ngrams_of(TINY, each) for each in (data, twice))
    assert tokens == {order: pytest.approx(bits / 2) for order, bits in bytes_.items()}


@pytest.mark.parametrize("config", [COPY, replace(TINY, steps=2**24, batch_size=8)])
def test_no_ngrams_of_other_tasks_and_of_too_much_text(config, data):
    assert ngrams_of(config, data) == {}


def test_losses_at_the_quarters_of_training_windows(data):
    config = replace(TINY, methods=("non-overlapping", "per-position"))
    model = build_model(config, "rope", 0)
    labels = {"label": "rope", "seed": 0}
    _, tables = Text().measure(Measuring(model, config, data, (16, 32, 48), labels, lambda *_: None))
    of = pd.concat(tables).query("length == 16").set_index(["method", "document"])
    options = {"lengths": [16, 48], "bins": {16: [0, 4]}, "methods": ["per-position"], "token_bytes": 1}
    [want] = list(losses_by_length(model, data.validation, **options))
    np.testing.assert_allclose(of.loc["first quarter", "nats"], want.nats, rtol=1e-6)
    assert list(of.loc["first quarter", "bytes"]) == list(of.loc["last quarter", "bytes"]) == list(want.bytes)
    assert (of.loc["first quarter", "bytes"] * 4 == of.loc["non-overlapping", "bytes"]).all()


def far_back(text: bytes, at: int) -> int:
    """By a loop: how far before a byte its copy stands; 0 where the 8 before it are new, or another byte followed them last."""
    last = text.rfind(text[at - 8 : at], 0, at - 1) if at >= 8 else -1
    return at - (last + 8) if last >= 0 and text[last + 8] == text[at] else 0


def test_copies_are_those_that_a_loop_finds():
    random = np.random.default_rng(0)
    words = [bytes(random.integers(97, 123, 9)) for _ in range(6)]
    text = b"".join(words[i] for i in random.integers(0, 6, 60)) + b"aaaaaaaaaaaaaaaaaaaa"
    found = distances(np.frombuffer(text, np.uint8).astype(np.int64))
    assert found.tolist() == [far_back(text, at) for at in range(len(text))]
    assert 100 < (found > 0).sum() < len(text) and (found == 1).sum() >= 10
    assert distances(np.arange(8)).tolist() == [0] * 8


def periodic(period):
    return torch.arange(145) % period


@pytest.mark.parametrize(("period", "kind"), [(16, "near copy"), (17, "far copy"), (48, "far copy"), (49, None)])
def test_a_copy_is_near_up_to_the_training_length_and_far_up_to_the_longest(period, kind):
    document = torch.arange(period + 20) % period
    found = {name: int(mask.sum()) for name, [mask] in foretold([document], 16, 48).items()}
    assert found == {"near copy": 0, "far copy": 0} | ({kind: 20 - 8} if kind else {})


def test_near_and_far_copies_are_measured_on_their_own_bytes_at_every_length(data):
    config = replace(TINY, train_length=16, test_lengths=(16, 48), methods=("non-overlapping", "copies"))
    model = build_model(config, "alibi", 0)
    data = replace(data, validation=[periodic(11), periodic(30), torch.cat([periodic(11), periodic(30)[1:]])])
    of = Measuring(model, config, data, (16, 48), {"label": "alibi", "seed": 0}, lambda *_: None)
    table = pd.concat(Text().measure(of)[1])
    masks = foretold(data.validation, 16, 48)
    assert set(table["method"]) == {"non-overlapping", "near copy", "far copy", FIRST, LAST}
    at = table.set_index(["method", "length"])
    for name, length in product(masks, (16, 48)):
        rows, whole = at.loc[[(name, length)]], at.loc[[("non-overlapping", length)]].query("document == 2")
        assert rows["bytes"].tolist() == [int(masks[name][2][1:289].sum())] and rows["bytes"].item() > 90
        assert 0 < rows["nats"].sum() < whole["nats"].sum()
