"""What a study finds: values against sums made by hand, verdicts at their borders, the three lines, and the table."""

import csv
import io
import json
import math
import re

import numpy as np
import pandas as pd
import pytest

from longitude.cli import main
from longitude.statistics import proportions
from longitude.statistics.documents import interval
from longitude.statistics.estimates import HOLDS, LOST, UNCLEAR
from longitude.statistics.seeds import t_interval
from longitude.study.analysis import analyse
from longitude.study.answers import share
from longitude.study.criterion import GAINS, IS_SOLVED, LEVEL, NOT_SOLVED, RISES
from longitude.study.pictures import figures
from longitude.study.report import table, write_report
from longitude.study.results import LAST, read_run
from tests.study.conftest import (
    BITS,
    BLIND,
    CONTROL,
    SHARES,
    conclusion,
    edit_question,
    line,
    printed,
    sealed_again,
    summary,
    units_in,
    write_answers,
    write_run,
)
from tests.support import refused


def test_values_and_changes_are_those_of_the_sums(tmp_path):
    run = write_run(tmp_path, {"rope": BITS["rope"]}, seeds=(0, 1), last=0.97)
    sums = [pd.read_parquet(units_in(tmp_path, "rope", seed)["measure"] / "documents.parquet") for seed in (0, 1)]

    def bits(length):
        parts = [each[(each["length"] == length) & (each["method"] == "non-overlapping")] for each in sums]
        return sum(p["nats"].sum() for p in parts) / math.log(2) / sum(p["bytes"].sum() for p in parts)

    frame = summary(run)
    assert list(frame["length"]) == [256, 512, 1024, 2048, 4096]
    for length in (256, 4096):
        found = line(frame, "rope", length)
        assert found["value"] == pytest.approx(bits(length), rel=1e-12)
        assert (found["seeds"], found["documents"]) == (2, 24)
    nats, weights = (np.stack([each[each["length"] == 4096][name] for each in sums]) for name in ("nats", "bytes"))
    per_seed = nats.sum(1) / weights.sum(1) / math.log(2)
    assert (found["value"], found["seed_low"], found["seed_high"]) == t_interval(per_seed)
    assert found["over"] == "seeds and documents" and found["low"] < min(found["seed_low"], found["text_low"])
    assert found["values"] == pytest.approx(tuple(per_seed))
    assert (found["text_low"], found["text_high"]) == interval(nats.sum(0), weights.sum(0))[1:]
    before = [each[each["method"] == LAST] for each in sums]
    changes = [
        after / (of["nats"].sum() / of["bytes"].sum() / math.log(2)) - 1  # from 0.97 of the mean at 256
        for after, of in zip(per_seed, before, strict=True)
    ]
    change = [found[name] for name in ("change", "seed_change_low", "seed_change_high")]
    assert change == pytest.approx(t_interval(changes), rel=1e-9)
    assert found["change_low"] < found["change"] < found["change_high"]
    assert line(frame, "rope", 256)["change"] is None


def test_documents_are_paired_whatever_their_order(tmp_path):
    run = write_run(tmp_path, {"rope": (2.6, 2.7)}, test_lengths=(256, 512), spread=0.5, noise=0.001)
    before = line(summary(run), "rope", 512)
    path = units_in(tmp_path, "rope", 0)["measure"] / "documents.parquet"
    sums = pd.read_parquet(path)
    pd.concat([sums[sums["length"] == 256], sums[sums["length"] == 512].iloc[::-1]]).to_parquet(path)
    sealed_again(path.parent)
    after = line(summary(run), "rope", 512)
    assert after == before
    spread = (after["high"] - after["low"]) / after["value"]
    assert after["change_high"] - after["change_low"] < spread / 5  # unpaired it would be sqrt(2) times as wide
    assert after["within"] == LOST


SEEDS = (0, 1, 2)


def verdicts_of(run, length=512):
    frame = summary(run)
    return {label: line(frame, label, length)["verdict"] for label in dict.fromkeys(frame["label"])}


def test_verdicts_at_their_border(tmp_path):
    """From the last quarter of a training window, however much lower than the mean that is."""
    last = 0.98
    bits = {"a": (2.0, 2.0399 * last), "b": (2.0, 2.0401 * last), "c": (2.0, 1.9999 * last), "d": (2.0, 2.0001 * last)}
    bits |= {CONTROL: (2.7, 2.8)}
    options = {"test_lengths": (256, 512), "seeds": SEEDS, "last": last}
    exact = write_run(tmp_path / "exact", bits, spread=0, noise=0, documents=4, **options)
    assert verdicts_of(exact) == {"a": LEVEL, "b": RISES, "c": GAINS, "d": LEVEL, CONTROL: None}
    noisy = {"a": bits["a"], "c": (2.0, 1.5 * last), CONTROL: bits[CONTROL]}
    found = verdicts_of(write_run(tmp_path / "noisy", noisy, noise=0.1, **options))
    assert found == {"a": UNCLEAR, "c": GAINS, CONTROL: None}


# ---- attempts to fool the words ----------------------------------------------------------------------------------------
def test_what_changes_as_a_blind_model_does_is_said_to_be_no_better(tmp_path):
    """Blind models gain, too, since their windows have fewer short contexts at longer lengths."""
    bits = {"alike": (2.0, 1.96), "better": (2.0, 1.8), "level": (2.0, 2.02), CONTROL: (2.5, 2.45)}
    run = analyse(write_run(tmp_path, bits, test_lengths=(256, 512), seeds=SEEDS, noise=0.002))
    findings = {label: line(summary(run), label, 512) for label in bits}
    remark = "no better than a model that sees 253 bytes"  # four layers, 63 bytes back each
    assert (findings["alike"]["verdict"], findings["alike"]["remark"]) == (GAINS, remark)
    assert (findings["level"]["verdict"], findings["level"]["remark"]) == (LEVEL, remark)
    assert (findings["better"]["verdict"], findings["better"]["remark"]) == (GAINS, None)
    assert (findings[CONTROL]["verdict"], findings[CONTROL]["remark"]) == (None, "sees 253 bytes")
    assert f"alike, level: {remark}" in conclusion(run).caution and CONTROL not in conclusion(run).result


def test_what_is_not_better_than_a_blind_model_at_the_training_length_gets_no_good_word(tmp_path):
    bits = {"alibi": (2.5, 2.3), "rope": (2.6, 3.0), CONTROL: (2.5, 2.45)}
    run = write_run(tmp_path, bits, test_lengths=(256, 512), seeds=SEEDS, noise=0.1)
    assert verdicts_of(run) == {"alibi": UNCLEAR, "rope": RISES, CONTROL: None}
    without = {"alibi": bits["alibi"]}
    without = analyse(write_run(tmp_path / "without", without, test_lengths=(256, 512), seeds=SEEDS, noise=0.1))
    assert verdicts_of(without) == {"alibi": UNCLEAR}
    assert "add alibi+window:size=64" in conclusion(without).caution


@pytest.mark.slow
def test_no_verdict_changes_when_another_label_leaves(tmp_path):
    """Nor when the best one does, or a blind control of another label."""
    bits = {
        "alibi": (2.5, 2.4), "best": (1.5, 1.6), "t5": (2.3, (2.31, 2.315, 2.32)), "rope": (2.2, 3.0), "nope": (3.4, 3.4),
        CONTROL: (2.6, 2.6), "t5+window:size=64": (2.4, 2.4),
    }  # fmt: skip
    options = {"test_lengths": (256, 512), "seeds": SEEDS, "spread": 0, "noise": 0}
    every = verdicts_of(write_run(tmp_path / "all", bits, **options))
    assert len({*every.values()}) == 5  # the four words, and none for the blind
    for left in ("alibi", "best", "t5", "rope", "nope", "t5+window:size=64"):
        others = {label: values for label, values in bits.items() if label != left}
        verdicts = verdicts_of(write_run(tmp_path / left, others, **options))
        assert verdicts == {label: every[label] for label in others}


@pytest.mark.parametrize(("seeds", "planned"), [((0, 1), (0, 1)), ((0, 1, 2), (0, 1, 2, 3))])
def test_too_few_seeds_have_numbers_and_no_word(seeds, planned, tmp_path):
    bits = {"rope": (2.2, 3.0), CONTROL: (2.6, 2.6)}
    failed = {(label, seed): {"status": "failed", "step": 0} for label in bits for seed in {*planned} - {*seeds}}
    run = analyse(write_run(tmp_path, bits, test_lengths=(256, 512), seeds=planned, states=failed, documents=4))
    assert {*verdicts_of(run).values()} == {None} and not summary(run)["change"][1::2].isna().any()
    needed = max(3, len(planned))
    assert f"No word: {len(seeds)} of {needed} seeds" in conclusion(run).result
    assert not any(pair.decided for pair in run.compared(512))


@pytest.mark.slow
def test_the_shorter_length_stands_beside_the_longest(tmp_path):
    """Whoever chooses a length to ask for sees both words: level at 512, and not at 4096."""
    run = write_run(tmp_path, {"fire": (2.3, 2.3, 2.5, 2.8, 3.1), **BLIND}, seeds=SEEDS, noise=0.004)
    analysis = analyse(run)
    assert [verdicts_of(run, length)["fire"] for length in (512, 4096)] == [LEVEL, RISES]
    page = write_report(analysis).read_text()
    [row] = [text for text in printed(run, 120).splitlines() if text.startswith("fire")]
    assert re.search(r"level .*rises \+35%", row)
    assert "at 512" in page and re.search(r"level [−+]?0\.\d%", page) and "rises" in page


def groups(result):
    """Word -> labels of a result."""
    return {word: names.split(", ") for word, names in re.findall(r"([A-Z][\w ]*): ([^.]+)", result)}


def test_the_three_lines(tmp_path):
    bits = {name: BITS[name][::4] for name in ("nope", "rope", "alibi", "t5", "learned")} | {CONTROL: (2.7, 2.7)}
    states = {("nope", 0): {"status": "diverged", "step": 117, "reason": "the loss was not finite at step 117"}}
    options = {"spread": 0, "noise": 0, "states": states, "seeds": SEEDS, "documents": 4, "test_lengths": (256, 4096)}
    found = conclusion(write_run(tmp_path, bits, **options))
    words = {"Gains": ["alibi"], "Rises": ["t5", "rope"], "No word": ["NoPE (2 of 3 seeds)"]}
    assert groups(found.result) == words
    assert "4096" in found.result and "16 times" in found.result
    assert re.match(r"alibi: 0\.12 .*\[0\.12, 0\.12\].* t5,.*3 seeds", found.best)
    for words in ("learned", "diverged at step 117", "NoPE (seed 0)"):
        assert words in found.caution


@pytest.mark.slow
def test_what_learned_too_little_gets_no_good_word(tmp_path):
    bits = {"nope": (3.03, 3.03), "alibi": (2.48, 2.45), "rope": (2.27, 4.39), CONTROL: (2.6, 2.6)}
    options = {"ngrams": {"2": 3.49, "3": 2.67}, "test_lengths": (256, 512)}
    run = write_run(tmp_path, bits, seeds=SEEDS, noise=0.004, **options)
    assert verdicts_of(run) == {"nope": UNCLEAR, "alibi": GAINS, "rope": RISES, CONTROL: None}
    assert [line(summary(run), label, 512)["learned"] for label in ("nope", "rope")] == [LOST, HOLDS]
    found, shown = conclusion(run), printed(run, 120)
    assert groups(found.result) == {"Gains": ["alibi"], "Rises": ["rope"], "Cannot tell": ["NoPE *"]}
    numbers = r"NoPE .*3.0\d+ against 2.670 of trigram counts; 3.0\d+ against 2.[56]\d+ of a model that sees 253 bytes"
    assert re.search(numbers, found.caution)
    assert found.best.startswith("alibi: 0.5") and "3 seeds" in found.best and "NoPE" in found.best
    rows = [line.split()[0] for line in shown.splitlines()[3:] if " ±" in line]
    # by result; what learned too little is last
    assert rows == ["alibi", CONTROL, "rope:base=10000", "NoPE"] and "NoPE (nope) *" in shown


def test_of_two_that_learned_too_little_neither_is_best(tmp_path):
    bits, floor = {"nope": (9.03, 9.03), "alibi": (8.48, 8.45)}, {"2": 3.49, "3": 2.67}
    options = {"test_lengths": (256, 512), "seeds": SEEDS, "noise": 0.004, "documents": 8}
    found = conclusion(write_run(tmp_path, bits, ngrams=floor, **options))
    assert "Best" not in found.lines and groups(found.result) == {"Cannot tell": ["alibi *", "NoPE *"]}


def test_without_ngrams_it_is_unknown_what_was_learned(tmp_path):
    bits, options = {"alibi": (2.55, 2.52), CONTROL: (2.7, 2.7)}, {"test_lengths": (256, 4096), "documents": 8}
    found = line(summary(write_run(tmp_path, bits, ngrams={}, seeds=SEEDS, **options)), "alibi", 4096)
    assert (found["learned"], found["within"], found["verdict"]) == (UNCLEAR, HOLDS, UNCLEAR)


def test_changes_of_older_studies_are_from_the_mean_and_say_so(tmp_path):
    bits = {"alibi": (2.3, 2.2), CONTROL: (2.6, 2.6)}
    run = write_run(tmp_path, bits, test_lengths=(256, 512), seeds=SEEDS, spread=0, noise=0, last=None, documents=4)
    run = analyse(run)
    assert line(summary(run), "alibi", 512)["change"] == pytest.approx(2.2 / 2.3 - 1)
    assert "change from the mean at 256" in conclusion(run).caution


@pytest.mark.parametrize("reference", [256, 512])
def test_what_is_not_below_ngrams_never_holds(reference, tmp_path):
    bits = {"level": (6.3, 6.3), "falling": (6.3, 6.0), CONTROL: (6.5, 6.5)}
    options = {"seeds": SEEDS, "test_lengths": (reference, 1024), "train_length": 256, "documents": 8}
    frame = summary(write_run(tmp_path, bits, ngrams={"2": 4.48, "3": 4.55}, **options))
    assert {*frame.query("length > @reference and label in ('level', 'falling')")["verdict"]} == {UNCLEAR}


def test_labels_are_compared_seed_by_seed(tmp_path):
    bits = {"a": (2.5, (2.50, 2.61, 2.55)), "b": (2.5, (2.40, 2.50, 2.46)), "c": (2.5, (2.45, 2.48, 2.51))}
    run = analyse(write_run(tmp_path, bits, test_lengths=(256, 512), seeds=(0, 1, 2), spread=0.3, noise=0))
    of = {(each.better, each.worse): each for each in run.compared(512)}
    found = of["b", "a"]
    assert found[:6] == ("b", "a", 512, 3, 24, pytest.approx(0.1, abs=1e-9))
    assert found.low == found[6] == pytest.approx(0.1 - 4.302653 * 0.01 / 3**0.5, abs=1e-6)
    assert found.p == pytest.approx(3 * 0.0033, abs=1e-4) and found.decided
    assert found.q == pytest.approx(3 * 0.0033, abs=1e-4) and found.seed_low == pytest.approx(found.low, abs=1e-6)
    assert not of["b", "c"].decided and of["b", "c"].low < 0
    assert conclusion(run).best.startswith("Unclear between b and c")


@pytest.mark.slow
def test_no_winner_in_noise(tmp_path):
    wins = 0
    for i in range(20):
        values = 2.5 + np.random.default_rng(i).normal(0, 0.05, (4, 3))
        bits = {label: (2.5, tuple(each)) for label, each in zip("abcd", values, strict=True)}
        run = write_run(tmp_path / str(i), bits, test_lengths=(256, 512), seeds=(0, 1, 2), noise=0)
        wins += any(each.decided for each in analyse(run).compared(512))
    assert wins <= 3  # of 20 tables at 5 %: 4 and more once in sixty


def test_one_seed_has_no_winner(tmp_path):
    """Its documents say how much other text would change, not another training."""
    run = analyse(write_run(tmp_path, {"a": (2.5, 2.4), "b": (2.5, 2.5)}, test_lengths=(256, 512), noise=0))
    [found] = run.compared(512)
    assert found.over == "documents" and found.p < 0.05 and found.low > 0 and not found.decided
    assert conclusion(run).best.startswith("a: 0.1") and "one seed" in conclusion(run).best


def test_the_best_ngrams_judge_whatever_their_order(tmp_path):
    bits, counted = {"low": (2.3, 2.3), "high": (2.7, 2.7), CONTROL: (2.8, 2.8)}, {"2": 2.5, "3": 3.1}
    run = analyse(write_run(tmp_path, bits, test_lengths=(256, 512), spread=0, noise=0, ngrams=counted))
    assert [line(summary(run), label, 512)["learned"] for label in ("low", "high")] == [HOLDS, LOST]
    assert "2.700 against 2.500 of bigram counts" in conclusion(run).caution


def test_effective_length_with_its_interval(tmp_path):
    bits = {"a": (2.0, 2.01, (2.0, 2.06, 2.03), 2.5), "b": (2.0, 2.1, 2.0, 2.0)}
    found = analyse(write_run(tmp_path, bits, test_lengths=(256, 512, 1024, 2048), seeds=(0, 1, 2), spread=0, noise=0))
    of = {label: found.criterion.effective(found.of(label)) for label in bits}
    assert of == {"a": (1024, 512, 1024), "b": (256, 256, 256)}


ONE, ALL = {"bits": ["rope"]}, (1.0,) * 4
DIVERGED = {("rope", 0): {"status": "diverged", "step": 3}}
CASES = {
    "one document": ({"bits": ["rope", "alibi"], "documents": 1}, ["No word: 1 of 3 seeds", "One document"]),
    "training length not measured": (ONE | {"train_length": 300}, ["after training on 300", "from the mean at 256"]),
    "one seed failed": (
        {"bits": ["rope", "t5"], "seeds": (0, 1), "states": {("rope", 1): {"status": "failed", "step": 0}}},
        ["Failed: rope (seed 1)", "one seed, interval over documents: rope"],
    ),
    "none at the longest": ({"bits": ["learned"]}, ["No encoding was measured at 4096"]),
    "by position only": (ONE | {"methods": ("per-position",)}, ["by position only"]),
    "seeds of answers": ({"shares": {"rope": (1.0, 1.0, 1.0, (1.0, 0.0))}, "seeds": (0, 1)}, ["No word: 2 of 3 seeds"]),
    "no answers": ({"shares": {"rope": ALL}, "states": DIVERGED}, ["No encoding was measured"]),
}  # fmt: skip


@pytest.mark.one_in(3)
@pytest.mark.parametrize("case", CASES)
@pytest.mark.slow
def test_three_lines_whatever_was_measured(case, tmp_path):
    options, expected = CASES[case]
    options = dict(options)
    if shares := options.pop("shares", None):
        run = write_answers(tmp_path, shares, **options)
    else:
        lengths = options.get("test_lengths", (1,) * 5)
        bits = {name: BITS.get(name, BITS["rope"])[: len(lengths)] for name in options.pop("bits")}
        run = write_run(tmp_path, bits, **options)
    found, shown = conclusion(run), printed(run)
    assert found.result and not any("\n" in line for line in found)
    for words in expected:
        assert words in " ".join(found)
    assert max(map(len, shown.splitlines())) <= 80


def test_nothing_holds_beyond_training_that_training_never_used(tmp_path):
    words = "never used its far part, which begins beyond 256 positions, in training at 256"
    states = {("alibi", 0): {"untrained": words}}
    bits = {"rope": (2.6, 3.7), "alibi": (2.55, 2.52), CONTROL: (2.7, 2.7)}
    run = write_run(tmp_path, bits, states=states, seeds=SEEDS, test_lengths=(256, 4096), documents=8)
    run = analyse(run)
    found = conclusion(run)
    assert f"alibi {words}" in found.caution and groups(found.result)["Cannot tell"] == ["alibi"]
    assert set(summary(run).query("label == 'alibi' and length > 256")["verdict"]) == {"cannot tell"}
    assert line(summary(run), "rope", 4096)["verdict"] == RISES
    assert f"alibi {words}" in " ".join(printed(run).split())


def test_a_trial_that_is_not_done_counts_for_nothing(tmp_path):
    bits, methods = {"rope": BITS["rope"]}, ("non-overlapping", "per-position")
    one = write_run(tmp_path / "one", bits, methods=methods)
    two = write_run(tmp_path / "two", bits, methods=methods, seeds=(0, 1))
    status = units_in(two, "rope", 1)["measure"] / "status.json"
    status.write_text(json.dumps(json.loads(status.read_text()) | {"status": "diverged"}))
    sealed_again(status.parent)
    of_two, of_one = summary(two), summary(one)
    assert of_two.drop(columns="reason").equals(of_one.drop(columns="reason"))
    assert set(of_two["reason"]) == {"diverged at step 20"} and set(of_one["reason"]) == {None}
    assert {row.seed for row in read_run(two).rows} == {0}


@pytest.mark.parametrize("lost", [".", "question.json"])
def test_what_is_no_study_is_refused_and_its_old_page_stays(lost, tmp_path):
    run = write_run(tmp_path / "run", {"rope": BITS["rope"]})
    (run / "report.html").write_text("before")
    (run / lost).rename(tmp_path / "elsewhere")
    with refused(str(run)):
        write_report(analyse(run))
    if lost != ".":
        assert (run / "report.html").read_text() == "before" and not (run / "figures").exists()


# ---- answers -----------------------------------------------------------------------------------------------------------
def test_values_of_answers_are_shares_with_wilsons_interval(tmp_path):
    frame = summary(write_answers(tmp_path, {name: SHARES[name] for name in ("rope", "learned")}))
    found = line(frame, "rope", 16)
    assert (found["value"], found["low"], found["high"]) == proportions.mean([1.0] * 198 + [0.0] * 2)
    assert (found["seeds"], found["documents"], found["change"]) == (1, 200, None)
    assert line(frame, "learned", 32)["value"] is None
    frame = summary(write_answers(tmp_path / "three", {name: SHARES[name] for name in ("t5", "learned")}, seeds=SEEDS))
    verdicts = {label: list(part["verdict"]) for label, part in frame.groupby("label")}
    assert verdicts["t5"] == [IS_SOLVED, IS_SOLVED, UNCLEAR, NOT_SOLVED]
    assert verdicts["learned"] == [IS_SOLVED, IS_SOLVED, None, None]


def test_reach_ends_before_the_first_length_that_is_not_solved(tmp_path):
    gap = {"rope": (1.0, 0.5, 1.0, 1.0), "t5": (0.1, 1.0, 1.0, 1.0)}
    found = analyse(write_answers(tmp_path, gap))
    assert [found.criterion.effective(found.of(label)).low for label in gap] == [8, None]
    unclear = write_answers(tmp_path / "unclear", {"rope": (1.0, 1.0, 1.0, 0.9)})
    [row] = [line.split() for line in printed(unclear, 100).splitlines() if line.startswith("rope")]
    assert row[-1] == "20"  # 90% of 200 examples at 32 may be less of all


def test_a_failure_to_learn_is_not_a_failure_of_length(tmp_path):
    shares = {"rope": (1.0, 1.0, 0.1, 0.1), "nope": (0.6, 0.5, 0.5, 0.5), "t5": (1.0, 0.9, 0.5, 0.5)}
    run = write_answers(tmp_path, shares)
    found = analyse(run)
    frame = summary(found)
    assert {label: line(frame, label, 32)["learned"] for label in shares} == {"rope": HOLDS, "nope": LOST, "t5": HOLDS}
    assert {line(frame, label, 32)["within"] for label in shares} == {LOST}
    assert "NoPE (50%)" in conclusion(found).caution
    edit_question(run, lambda asked: asked["data"].update(floor={"16": 0.5}))
    assert "rule without positions: 50%" in conclusion(run).caution


def test_several_seeds_widen_the_interval():
    random = np.random.default_rng(0)
    alike = (random.random((3, 200)) < 0.5).astype(float)
    apart = np.stack([np.ones(200), np.zeros(200), random.random(200) < 0.5]).astype(float)
    one, other = share(alike), share(apart)
    assert one.seed_high - one.seed_low < 0.2 and other.high - other.low == 1
    assert one.low < min(one.seed_low, one.text_low) and one.high > max(one.seed_high, one.text_high)
    assert all(0.13 < of.text_high - of.text_low < 0.14 for of in (one, other))  # Wilson, 200 of 0.5
    certain = share(np.ones((3, 200)))
    assert certain.value == certain.seed_low == certain.high == 1 and 0.98 < certain.text_low == certain.low < 1


def test_a_share_and_its_ends_are_from_0_to_1():
    """Of two seeds that nearly always are right, or never, also where errors of seeds and of examples are added."""
    right = np.ones((2, 40))
    right[1, :6] = 0
    for found in (share(right), share(1 - right)):
        assert found.over == "seeds and documents" and 0 <= found.low < found.value < found.high <= 1
    assert share(right).high == 1 and share(1 - right).low == 0


def test_what_a_rule_without_positions_reaches_stands_beside_the_labels(tmp_path):
    run = write_answers(tmp_path, {name: SHARES[name] for name in ("rope", "t5")})
    edit_question(run, lambda asked: asked["data"].update(floor={"8": 0.5, "16": 0.25}))
    found = analyse(run)
    last = [str(list(column.cells)[-1]) for column in table(found).columns]
    assert last[:5] == ["rule without positions", "50%", "25%", "", ""]
    figure = figures(found)[0]
    dotted = [layer for layer in figure.chart.to_dict()["layer"] if layer["mark"].get("strokeDash") == [1, 3]]
    assert [each["value"] for each in dotted[0]["data"]["values"]] == [0.5, 0.25] and "dotted" in figure.caption


def test_the_three_lines_of_answers(tmp_path):
    failed = {("t5", seed): {"status": "failed", "step": 0} for seed in SEEDS}
    shares = {name: of_lengths[::3] for name, of_lengths in SHARES.items()}
    found = conclusion(write_answers(tmp_path, shares, states=failed, seeds=SEEDS, test_lengths=(8, 32)))
    assert groups(found.result) == {"Solved": ["alibi"], "Not solved": ["rope"]}
    assert "97" in found.best and "[94, 99]" in found.best and "rope" in found.best
    assert "learned" in found.caution and "failed: t5" in found.caution


# ---- tables as CSV -----------------------------------------------------------------------------------------------------
BOTH = {"test_lengths": (256, 512), "seeds": (0, 1, 2), "noise": 0.002}
A = {"rope": (2.27, 4.39), "alibi": (2.48, 2.45)}


def test_a_table_as_csv_is_the_summary(tmp_path, capsys):
    run = write_run(tmp_path, A | {CONTROL: (2.6, 2.6)}, documents=8, **BOTH)
    assert main(["report", str(run), "--csv"]) == 0
    short = list(csv.DictReader(io.StringIO(capsys.readouterr().out)))
    assert [*short[0]] == ["encoding", "length", "bits_per_byte", "low", "high", "change", "verdict"]
    assert main(["report", str(run), "--csv", "--all"]) == 0
    rows = list(csv.DictReader(io.StringIO(capsys.readouterr().out)))
    expected = summary(run)
    assert [row["label"] for row in rows] == [*expected["label"]]
    assert [int(row["length"]) for row in rows] == [*expected["length"]]
    assert [float(row["value"]) for row in rows] == list(expected["value"])
    assert [float(row["bits_per_byte"]) for row in short] == [float(row["value"]) for row in rows]
    verdicts = {row["encoding"]: row["verdict"] for row in short}
    assert verdicts == {"rope": RISES, "alibi": GAINS, CONTROL: short[-1]["verdict"]}
    assert len(rows[0]["values"].split()) == 3 and {row["verdict"] for row in rows} == {"", GAINS, RISES}
    assert {row["label"]: row["effective_length"] for row in rows} == {"rope": "256", "alibi": "512", CONTROL: "512"}


@pytest.mark.slow
def test_comparisons_of_every_length_as_csv(tmp_path, capsys):
    run = str(write_run(tmp_path / "one", A | {"nope": (3.1, 3.1)}, **BOTH))
    assert main(["report", run, "--csv", "--comparisons"]) == 0
    rows = list(csv.DictReader(io.StringIO(capsys.readouterr().out)))
    assert len(rows) == 2 * 3 and {row["length"] for row in rows} == {"256", "512"}
    for row in rows:
        low, value, high = (float(row[name]) for name in ("low", "value", "high"))
        assert low <= float(row["seed_low"]) <= value <= float(row["seed_high"]) <= high
        assert float(row["q"]) <= float(row["p"])
    for wrong in (["--comparisons"], ["--csv", "--json"]):
        assert main(["report", run, *wrong]) == 2
