"""Several sizes and training lengths in one study: models as those of a study of each, and what they say together."""

from dataclasses import replace
from itertools import combinations

import numpy as np
import pandas as pd
import pytest

from longitude.errors import UsageError
from longitude.measure import read_rows
from longitude.runs.store import Store
from longitude.statistics.estimates import Estimate, Sums, level
from longitude.study import analysis, parts
from longitude.study.analysis import analyse
from longitude.study.config import StudyConfig
from longitude.study.parts import Ceiling, agreement, by_size, ceilings
from longitude.study.plan import checked, plan
from longitude.study.presets import of_preset
from longitude.study.results import keep, read_run
from longitude.study.tables import every_finding, tables_of_parts
from tests.study.conftest import TINY, reading_numbers, run

pytestmark = pytest.mark.usefixtures("numbers")
AXES = replace(
    TINY,
    train_lengths=(16, 32),
    hidden=(16, 32),
    test_lengths=(16, 32, 48),
    seeds=(0, 1),
    encodings=("nope", "rope"),
    methods=("non-overlapping",),
    steps=2,
)


@pytest.fixture(scope="module")
def axes(tmp_path_factory):
    path = tmp_path_factory.mktemp("axes") / "run"
    with reading_numbers():
        assert run(AXES, path)[0].complete
    return path


# ---- what is trained ---------------------------------------------------------------------------------------------------
def test_every_part_has_the_tokens_the_steps_and_the_heads_of_the_first():
    config = StudyConfig(train_length=64, train_lengths=(64, 128, 256), hidden=(64, 96, 128), layers=(1, 2), heads=2)
    first, *others = config.parts
    assert len(config.parts) == 3 * 3 * 2 and (first.train_length, first.width, first.depth) == (64, 64, 1)
    assert {(each.train_length, each.width, each.depth) for each in others} == {
        (length, hidden, layers) for length in (64, 128, 256) for hidden in (64, 96, 128) for layers in (1, 2)
    } - {(64, 64, 1)}
    for part in others:
        assert (part.steps, part.training_tokens) == (first.steps, first.training_tokens)
        assert part.width // part.heads == first.width // first.heads == 32 and part.parts == [part]


@pytest.mark.slow
def test_rows_say_the_training_length_and_its_tokens_are_equal(axes):
    rows = read_rows(axes / "results.parquet")
    assert {*rows["train_length"]} == {16, 32} and rows["parameters"].nunique() == 2
    assert {*rows["train_tokens"]} == {2 * TINY.batch_size * 16} and {*rows["train_steps"]} == {2}


@pytest.mark.slow
def test_a_ceiling_and_a_size_are_models_that_a_study_of_them_alone_trains(axes):
    store = Store(axes)
    for options in ({"train_length": 32, "batch_size": 1}, {"hidden": 32, "heads": 4}):
        alone = plan(replace(TINY, seeds=(0, 1), steps=2, methods=AXES.methods, **options), axes)
        assert all(store.holds(units.training) and store.holds(units.measuring) for units in alone.trials)
    other = plan(replace(TINY, seeds=(0, 1), steps=2, train_length=32), axes)
    assert not any(store.holds(units.training) for units in other.trials)


@pytest.mark.parametrize(
    ("options", "what"),
    [
        ({"train_length": 24}, "--train-length"),
        ({"train_lengths": (16, 24)}, "--train-lengths"),
        ({"train_lengths": (32, 16)}, "--train-lengths"),
        ({"train_lengths": (16, 48)}, "--batch-size"),
        ({"hidden": (16, 20)}, "--hidden"),
        ({"hidden": (32, 16)}, "--hidden"),
        ({"start": "other:rope"}, "--start"),
    ],
    ids=str,
)
def test_what_cannot_be_compared_is_refused(options, what):
    with pytest.raises(UsageError) as refused:
        checked(replace(AXES, **options))
    assert refused.value.what == what


def test_drawn_examples_have_one_training_length():
    with pytest.raises(UsageError) as refused:
        checked(StudyConfig(task="copy-decoder", data=("generated",), methods=("forward",), train_lengths=(4, 8)))
    assert refused.value.what == "--train-lengths"


def test_one_number_is_a_list_of_one(tmp_path):
    (tmp_path / "mine.toml").write_text("hidden = 64\nlayers = [2, 4]")
    config = of_preset(str(tmp_path / "mine.toml"))
    assert (config.hidden, config.layers) == ((64,), (2, 4)) and replace(config, hidden=32).hidden == (32,)


# ---- what they say -----------------------------------------------------------------------------------------------------
@pytest.mark.slow
def test_a_ceiling_is_the_value_of_the_label_trained_there(axes):
    """And the gap that of the means over seeds, whatever their order: no seed pairs them."""
    read, rows = read_run(axes), read_rows(axes / "results.parquet")
    whole = rows[rows["position_from"].isna() & (rows["length"] == 32)].dropna(subset=["value"])
    found = ceilings(read)
    assert [(each.label, each.size) for each in found] == [
        (x, y) for y in ("16 x 1", "32 x 1") for x in ("nope", "rope")
    ]
    for each, most in zip(found, (0, 0, 1, 1), strict=True):
        own = whole[whole["label"] == each.label]
        own = own[own["parameters"] == sorted({*own["parameters"]})[most]]
        here, there = (own[own["train_length"] == length]["value"].mean() for length in (16, 32))
        assert (each.value.value, each.ceiling.value) == pytest.approx((here, there))
        assert (
            each.gap.value == pytest.approx(here - there)
            and each.gap.over == "seeds and documents"
            and each.p is not None
        )


@pytest.mark.slow
def test_a_gap_is_not_paired_by_seed(axes, monkeypatch):
    """A ceiling whose seeds stand in another order has the same gap and interval."""
    read = read_run(axes)
    first = ceilings(read)[0].gap
    turned = replace(
        read.others[0], trials=tuple(replace(trial, seed=1 - trial.seed) for trial in read.others[0].trials[::-1])
    )
    again = ceilings(replace(read, others=(turned, *read.others[1:])))[0].gap
    assert (again.value, again.low, again.high) == pytest.approx((first.value, first.low, first.high))


@pytest.mark.parametrize(
    ("low", "high", "p", "learned", "over", "verdict"),
    [
        (0.1, 0.5, 0.01, True, "seeds and documents", "above"),
        (-0.5, -0.1, 0.01, True, "seeds and documents", "below"),
        (-0.1, 0.5, 0.2, True, "seeds and documents", "cannot tell"),
        (0.1, 0.5, 0.06, True, "seeds and documents", "cannot tell"),
        (0.1, 0.5, 0.01, True, "documents", "cannot tell"),
        (0.1, 0.5, 0.01, False, "seeds and documents", "learned too little"),
    ],
)
def test_a_ceiling_that_learned_nothing_or_one_seed_decides_nothing(low, high, p, learned, over, verdict):
    value = Estimate(1.0)
    gap = Estimate((low + high) / 2, low, high, over, values=(0.2, 0.4))
    assert Ceiling("rope", "16 x 1", 32, value, value, gap, p, learned).verdict == verdict


@pytest.mark.slow
def test_the_guard_of_a_ceiling_is_at_its_own_training_length(axes, monkeypatch):
    asked = []

    def too_little(criterion, label):
        asked.append((criterion.run.train_length, label))
        return criterion.run.train_length == 32

    monkeypatch.setattr(analysis.LossCriterion, "learned_too_little", too_little)
    assert {each.verdict for each in ceilings(read_run(axes))} == {"learned too little"}
    assert {length for length, _ in asked} == {32}


@pytest.mark.slow
def test_orders_are_compared_between_neighboring_sizes(axes, monkeypatch):
    monkeypatch.setattr(analysis.LossCriterion, "learned_too_little", lambda *_: False)
    read = read_run(axes)
    assert [*by_size(read)] == ["16 x 1", "32 x 1"] and {part.train_length for part in by_size(read).values()} == {16}
    found = agreement(read)
    assert [(each.smaller, each.larger, each.length, each.pairs) for each in found] == [
        ("16 x 1", "32 x 1", length, 1) for length in (16, 32, 48)
    ]
    for each in found:
        values = [
            {label: level(parts.CRITERIA["losses"](part).sums(label, each.length, "non-overlapping"), "bits_per_byte").value or 0
             for label in read.labels} for part in by_size(read).values()
        ]  # fmt: skip
        assert each.kept == all((small[a] < small[b]) == (large[a] < large[b]) for small, large in [values]
                                for a, b in combinations(read.labels, 2))  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("width", [16, 32])
def test_what_learned_too_little_at_either_size_is_in_no_pair(width, axes, monkeypatch):
    monkeypatch.setattr(
        analysis.LossCriterion,
        "learned_too_little",
        lambda criterion, label: label == "rope" and criterion.run.config.width == width,
    )
    assert [each.pairs for each in agreement(read_run(axes))] == [0, 0, 0]


@pytest.mark.slow
def test_a_study_is_kept_with_all_its_parts(axes, tmp_path):
    read, kept = read_run(axes), read_run(keep(read_run(axes), tmp_path / "kept"))
    assert [part.config for part in kept.parts] == [part.config for part in read.parts] and not (
        tmp_path / "kept/3/1"
    ).exists()
    assert tables_of_parts(kept) == tables_of_parts(read)
    pd.testing.assert_frame_equal(every_finding(analyse(kept)), every_finding(analyse(read)))


def test_seeds_of_both_sides_are_needed():
    one, two = (Sums(tuple(range(n)), np.full((n, 5), 2.0) + np.arange(n)[:, None], np.ones((n, 5))) for n in (1, 2))
    found = parts.unpaired(two, one, "mean")
    assert (
        found is not None and found.over == "documents" and found.value == pytest.approx(0.5) and len(found.values) == 1
    )
