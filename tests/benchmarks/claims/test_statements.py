"""How statements and claims are judged: laws of the verdicts, over estimates and over studies made without training."""

import math
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from scipy import stats

from claims import statements
from claims.base import CONFIRMED, NOT_RUN, REFUTED, UNDECIDED, Claim, Clause, list_claims
from claims.benches import _more, answers_differ, lowest_loss_answers_less
from claims.evidence import Evidence, Measured
from claims.protocol import preset_of
from claims.verdicts import seeds_to_decide, verdict_of, what_decides
from longitude.statistics.documents import Interval
from longitude.statistics.estimates import HOLDS, LOST, UNCLEAR, estimated
from longitude.study.config import StudyConfig
from longitude.study.results import BY_POSITION, LAST, question_of
from tests.study.conftest import BLIND, CONTROL, write_answers, write_run

BELOW, WITHIN = (-math.inf, 1.0), (-1.0, 1.0)


def of_seeds(*values, text=0.0):
    """An estimate of values per seed, whose documents spread by `text`."""
    mean = sum(values) / len(values)
    return estimated(values, Interval(mean, mean - text, mean + text))


@pytest.mark.parametrize(
    ("expected", "values", "verdict"),
    [
        (BELOW, (0.5, 0.6, 0.7), HOLDS), (BELOW, (1.5, 1.6, 1.7), LOST), (BELOW, (0.5, 1.0, 1.5), UNCLEAR),
        (WITHIN, (-0.1, 0.0, 0.1), HOLDS), (WITHIN, (1.5, 1.6, 1.7), LOST), (WITHIN, (-1.7, -1.6, -1.5), LOST),
        (WITHIN, (-0.9, 0.0, 0.9), UNCLEAR),  # an interval wider than the margin shows no equivalence
        (BELOW, (0.5,), UNCLEAR),
    ],
)  # fmt: skip
def test_every_interval_must_lie_on_one_side(expected, values, verdict):
    assert verdict_of(of_seeds(*values), expected) == verdict
    assert verdict_of(of_seeds(*values, text=5), expected) == UNCLEAR


def test_the_seeds_that_decide_do_so_four_times_of_five():
    """By drawing seeds of the same mean and spread, and by the t-interval of each draw."""
    seeds = seeds_to_decide(of_seeds(0.5, 0.8, 1.1), BELOW)
    assert seeds and seeds > 3

    def decided(number):
        """The share of 20,000 draws of the mean 0.8 and the standard deviation 0.3 whose interval ends below the limit 1."""
        draws = np.random.default_rng(0).normal(0.8, 0.3, (20_000, number))
        half = stats.t.ppf(0.975, number - 1) * draws.std(1, ddof=1) / math.sqrt(number)
        return (draws.mean(1) + half < 1).mean()

    assert decided(seeds) > 0.79 and decided(seeds - 1) < 0.81
    for hopeless in (
        of_seeds(0.5, 1.0, 1.5),
        of_seeds(0.5, 0.8, 1.1, text=0.5),
    ):  # the mean is the limit; so is the text
        assert seeds_to_decide(hopeless, BELOW) is None and "more seeds alone do not" in what_decides(hopeless, BELOW)


# ---- of studies ------------------------------------------------------------------------------------------------------
class MadeUp(Evidence):
    """Of studies that no preset has, as they were run."""

    def expected(self, study):
        saved = question_of(self.root / study)
        return StudyConfig.of(saved["configuration"]) if saved else StudyConfig()


def at(label, length, study="text"):
    return Measured(study, label, length)


@pytest.fixture(scope="module")
def evidence(tmp_path_factory):
    """Two studies: of losses, where alibi does not get worse and rope does, and of answers."""
    root = tmp_path_factory.mktemp("claims")
    noise = ((-0.004, 0.0, 0.004), (0.0, 0.004, -0.004))
    bits = {"alibi": (2.55, 2.53, 2.52, 2.52, 2.52), "rope": (2.60, 2.65, 2.90, 3.30, 3.70)}
    text = {
        label: tuple(tuple(bit + n for n in noise[i % 2]) for i, bit in enumerate(levels))
        for label, levels in bits.items()
    }
    text |= BLIND | {"learned": (2.66, None, None, None, None)}
    write_run(root / "text", text, seeds=(0, 1, 2))
    shares = {"rope": ((1.0, 0.99, 1.0),) * 2 + ((0.0, 0.01, 0.02),) * 2, "t5": ((1.0, 1.0, 0.99),) * 4}
    write_answers(root / "copy", shares, seeds=(0, 1, 2))
    return MadeUp(root)


@pytest.mark.parametrize(
    ("statement", "verdict"),
    [
        (statements.level(at("alibi", 4096), at=256), HOLDS),
        (statements.level(at("rope", 4096), at=256), LOST),
        (statements.rises(at("rope", 1024), at=256), HOLDS),
        (statements.loss_below(at("alibi", 4096), at("rope", 4096)), HOLDS),
        (statements.loss_below(at("rope", 4096), at("alibi", 4096)), LOST),
        (statements.loss_within(at("alibi", 1024), at("alibi", 2048)), HOLDS),
        (statements.rises(at("rope", 1024), at=256, method=None), HOLDS),
        (statements.rises(at("alibi", 1024), at=256), LOST),
        (statements.loss_at_most(at("rope", 4096), at("alibi", 4096)), LOST),
        (statements.level(at("learned", 512), at=256), None),
        (statements.level(at("alibi", 512, "another"), at=256), None),
        (statements.accuracy_above(at("rope", 32, "copy"), 0.9), LOST),
        (statements.accuracy_below(at("rope", 32, "copy"), 0.2), HOLDS),
        (statements.more_accurate(at("rope", 32, "copy"), at("t5", 32, "copy")), LOST),
        (statements.token_time("rwkv6", below=1.5), HOLDS),
        (statements.token_time("no mixer", below=2), None),
    ],
    ids=lambda each: getattr(each, "words", str(each)),
)
def test_statements(evidence, statement, verdict):
    outcome = statement.outcome(evidence)
    assert outcome.verdict == verdict
    assert outcome.number if verdict else outcome.remark


def losses(path, bits, states=None, **options):
    """A study of three seeds, in which a label has the same loss at all lengths."""
    values = {label: (level,) * 5 for label, level in bits.items()}
    write_run(path / "text", values, states, **{"seeds": (0, 1, 2), **options})
    return MadeUp(path)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("state", "verdict", "words"),
    [({"untrained": "never used one part"}, UNCLEAR, "never used"), ({"status": "diverged"}, None, "seed 1 diverged")],
)
def test_what_training_lost_is_named_and_counts_nowhere(tmp_path, state, verdict, words):
    evidence = losses(tmp_path, {"alibi": 2.6, CONTROL: 2.9}, {("alibi", 1): state})
    outcome = statements.level(at("alibi", 4096), at=256).outcome(evidence)
    assert outcome.verdict == verdict and words in outcome.remark


@pytest.mark.slow
def test_what_learned_too_little_decides_nothing(tmp_path):
    """Worse than bigrams, or no better than a model that sees little: it does not keep its loss, and no comparison counts."""
    evidence = losses(tmp_path, {"alibi": 2.0, "t5": 2.6, "nope": 2.9, CONTROL: 2.6}, ngrams={"2": 2.8})
    below = [statements.loss_below(at("alibi", 4096), at(label, 4096)).outcome(evidence) for label in ("t5", "nope")]
    kept = [statements.level(at(label, 4096), at=256).outcome(evidence) for label in ("alibi", "t5", "nope")]
    assert [outcome.verdict for outcome in (*kept, *below)] == [HOLDS, UNCLEAR, UNCLEAR, UNCLEAR, UNCLEAR]


@pytest.mark.slow
def test_without_a_blind_control_nothing_is_decided(tmp_path):
    evidence = losses(tmp_path, {"alibi": 2.0, "t5": 2.6})
    kept = statements.level(at("alibi", 4096), at=256).outcome(evidence)
    below = statements.loss_below(at("alibi", 4096), at("t5", 4096)).outcome(evidence)
    assert (kept.verdict, below.verdict) == (UNCLEAR, UNCLEAR) and "blind control" in kept.remark


@pytest.mark.slow
def test_before_the_planned_seeds_there_are_numbers_and_no_word(tmp_path, monkeypatch):
    evidence = losses(tmp_path, {"alibi": 2.0, "t5": 2.6, CONTROL: 2.9})
    saved = evidence.expected("text")
    monkeypatch.setattr(evidence, "expected", lambda study: replace(saved, seeds=(0, 1, 2, 3, 4)))
    monkeypatch.setattr("claims.evidence.differs", lambda config, study: None)
    outcome = statements.loss_below(at("alibi", 4096), at("t5", 4096)).outcome(evidence)
    assert (outcome.verdict, outcome.remark) == (None, "3 of 5 seeds") and outcome.number


@pytest.mark.slow
def test_documents_of_a_package_are_drawn_together(tmp_path):
    """Twenty-four copies of two packages: the interval over text is that of two things, not of twenty-four."""
    alone = losses(tmp_path / "alone", {"alibi": 2.0, CONTROL: 2.9}, noise=0.0, spread=0.3)
    packed = losses(tmp_path / "packed", {"alibi": 2.0, CONTROL: 2.9}, noise=0.0, spread=0.3)
    names = [f"{'ab'[i % 2]}/{i}.py" for i in range(24)]
    packed.run("text").study["data"] |= {"split_by": "packages", "validation_names": names}
    whole, grouped = (evidence.sums(at("alibi", 256)) for evidence in (alone, packed))
    assert grouped.of.shape == (3, 2)
    np.testing.assert_allclose(grouped.of[:, 0], whole.of[:, ::2].sum(1))
    np.testing.assert_allclose(grouped.over.sum(), whole.over.sum())


@pytest.mark.slow
def test_what_was_not_learned_says_nothing_of_longer_inputs(tmp_path):
    shares = {"t5": ((1.0, 0.99, 1.0),) * 4, "nope": ((0.9, 0.91, 0.92),) + ((0.1, 0.12, 0.11),) * 3}
    write_answers(tmp_path / "copy", shares, seeds=(0, 1, 2))
    pairs = [statements.more_accurate(at("t5", n, "copy"), at("nope", n, "copy")) for n in (32, 16)]
    assert [pair.outcome(MadeUp(tmp_path)).verdict for pair in pairs] == [UNCLEAR, HOLDS]


def claim(*clauses):
    return Claim(name="x", title="", number="1", clauses=clauses, source="", link="", protocol="")


def test_a_claim_is_confirmed_by_all_and_refuted_by_one(evidence):
    def verdict(*parts):
        return claim(Clause("It is so.", a=parts)).judged(evidence).verdict

    good, bad = (statements.level(at(label, 4096), at=256) for label in ("alibi", "rope"))
    unclear = statements.loss_below(at("alibi", 1024), at("alibi", 2048))
    missing = statements.level(at("fire", 512), at=256)
    assert verdict(good, good) == CONFIRMED and verdict(good, unclear) == UNDECIDED
    assert verdict(good, bad) == verdict(bad, unclear) == verdict(bad, missing) == REFUTED
    assert verdict(good, missing) == verdict(unclear, missing) == NOT_RUN


def test_the_largest_size_that_is_complete_decides(evidence):
    good, bad = (statements.level(at(label, 4096), at=256) for label in ("alibi", "rope"))
    missing = statements.level(at("fire", 512), at=256)
    pairs = [claim(Clause("It is so.", a=(good,), b=(other,))).judged(evidence) for other in (bad, missing)]
    assert [(judged.rung, judged.verdict) for judged in pairs] == [("b", REFUTED), ("a", CONFIRMED)]


# ---- of benches ------------------------------------------------------------------------------------------------------
def answered(method, bits, share, questions=160):
    scores = [{"length": 2048, "count": questions}]
    return {"method": method, "steps": 0, "bits": {"2048": bits}, "means": {"2048": {"value": share}}, "scores": scores}


ALIKE, LESS = answers_differ(2048, 0.01, 0.1), lowest_loss_answers_less(2048)


@pytest.mark.parametrize(
    ("statement", "rows", "verdict"),
    [
        (ALIKE, [answered("a", 1.45, 0.5), answered("b", 1.455, 0.9)], HOLDS),
        (ALIKE, [answered("a", 1.45, 0.5), answered("b", 1.60, 0.9)], None),  # no pair of one loss
        (ALIKE, [answered("a", 1.45, 0.5, 10), answered("b", 1.455, 0.9, 10)], UNCLEAR),
        (ALIKE, [answered("a", 1.45, 0.8, 10**4), answered("b", 1.455, 0.82, 10**4)], LOST),
        (LESS, [answered("a", 1.3, 0.5), answered("b", 1.5, 0.9)], HOLDS),
        (LESS, [answered("a", 1.3, 0.9), answered("b", 1.5, 0.5)], LOST),
    ],
)
def test_answers_of_extended_models(statement, rows, verdict):
    assert statement.outcome(SimpleNamespace(bench=lambda name: {"rows": rows})).verdict == verdict


def test_the_interval_of_a_difference_is_that_of_newcombe():
    """Newcombe 1998, Statistics in Medicine 17, table II, example (a), method 10: 56/70 less 48/80."""
    few, many = answered("a", 1.0, 48 / 80, 80), answered("b", 1.0, 56 / 70, 70)
    assert _more(few, many, "2048", 1) == pytest.approx((0.2, 0.0524, 0.3339), abs=5e-5)


def test_what_claims_read_is_in_their_presets():
    for place in (place for each in list_claims() for _, statement in each.every for place in statement.reads):
        config = preset_of(place.study)
        assert place.label in config.encodings and place.length in config.test_lengths, place
        method = BY_POSITION if place.method == LAST else place.method
        assert method is None or method in config.methods, place
