"""The laws over every registered mixer, and over mixers that break them on purpose."""

from functools import partial

import pytest
import torch
from torch import nn

from longitude.attention import mixer as registry
from longitude.attention.mixer import list_mixers as registered_mixers
from longitude.testing import LawBroken, mixers
from longitude.testing.mixers.models import go_on, language_model
from longitude.testing.mixers.refused import in_model
from tests.testing import broken_mixers as broken
from tests.testing.broken_mixers import Decay, Dropping


def of(name, *encoding, **options):
    """A registered mixer with options, beside these encodings."""
    made = mixers.example(name, **options)
    return mixers.MixerExample(made.factory, made.options, encoding)


# ---- options and encodings that the defaults do not reach
VARIANTS = {
    "attention without positions": of("attention"),
    "attention, rope and t5": of("attention", "rope", "t5"),
    "window dilated": of("window", "rope", size=3, step=2),
    "window of one": of("window", "alibi", size=1),
    "latent, full queries": of("latent", "rope", q_rank=None),
    "hierarchical, one softmax, learned": of("hierarchical", "rope", "alibi", combine="softmax", merge="learned"),
    "hierarchical, learned": of("hierarchical", "rope", merge="learned", window=2),
    "hierarchical, window of one": of("hierarchical", "t5", window=1, size_term=False),
    "s4d inv": of("s4d", init="inv"),
    "mamba2, groups": of("mamba2", groups=2, head_dim=8),
}

# ---- every mixer -----------------------------------------------------------------------------------------------------
DOES_NOT_APPLY = ("it has one form", "it has no dropout")
QUICK = {
    "pieces": {"lengths": (1, 21)},
    "forms": {"lengths": (1, 21)},
    "gradients": {"lengths": (21,)},
    "causality": {"lengths": (7, 33)},
    "padding": {"lengths": (5, 13, 2, 9)},
    "packing": {"rows": ((4, 12, 1, 9), (13, 9)), "first_call": 18},
}
"""Laws whose longer sequences are in the slow tier; chunks of 5 and 16 tokens, and windows, end within these."""
LONG = (7, 63, 130)


def cases():
    for name, law in mixers.cases():
        yield pytest.param(
            law, mixers.example(name), id=f"{law}-{name}", marks=[pytest.mark.slow] if law == "compile" else []
        )
    for name, build in VARIANTS.items():
        for law in mixers.laws():
            yield pytest.param(law, build, id=f"{law}-{name}", marks=[pytest.mark.slow])


@pytest.mark.parametrize(("law", "build"), list(cases()))
def test_law(law: str | mixers.Law, build: mixers.MixerExample) -> None:
    if law in QUICK:
        law = partial(mixers.laws()[law], **QUICK[law])
    said = mixers.examine(law, build)
    assert said == mixers.HOLDS or said.startswith(DOES_NOT_APPLY)


@pytest.mark.slow
@pytest.mark.parametrize("law", QUICK)
@pytest.mark.parametrize("name", registered_mixers())
def test_law_on_long_sequences(law: str, name: str) -> None:
    longer = {} if law in ("padding", "packing") else {"lengths": LONG}
    mixers.examine(partial(mixers.laws()[law], **longer), name)


RED = [
    ("pieces", broken.ForgetsItsState),
    ("pieces", broken.ForgetsItsTail),
    ("forms", broken.WrongInOneForm),
    ("forms", broken.WrongAtChunks),
    ("gradients", broken.CutsGradients),
    ("gradients", broken.SpareParameter),
    ("gradients", broken.WrongGradient),
    ("packing", broken.RunsOnIntoDocuments),
    ("packing", broken.RunsOnOnlyInItsSums),
    ("runs", broken.SeesByNumber),
    ("runs", broken.RunsOnIntoDocuments),
    ("takes_part", broken.ReachesOnlyFar),
    ("packing", broken.GoesOnAfterTheLargest),
    ("restarts", broken.GoesOnAfterTheLargest),
    ("documents_go_on", broken.GoesOnAfterTheLargest),
    ("documents_go_on", broken.RunsOnIntoDocuments),
    ("dropout", broken.DropsWithoutScale),
    ("dropout", broken.DropsNothing),
    ("padding", broken.GoesOnAfterPadding),
    ("padding", broken.DecaysOnPadding),
    ("padding", broken.HearsPadding),
    ("rows", broken.ListensToItsBatch),
    ("causality", broken.HearsTheFuture),
    ("modes_of_torch", broken.NoisyInTraining),
    ("modes_of_torch", broken.KeepsWhatInferenceMade),
    ("memory", broken.KeepsEverything),
    ("memory", broken.HoldsAView),
    ("precision", broken.HalfState),
    ("precision", broken.WidensItsOutput),
    ("surgery", broken.BatchBehind),
    ("saved", broken.DrawnTable),
    ("begins_alive", broken.BeginsAtNothing),
    ("finite", broken.Overflows),
    ("nonfinite", broken.SwallowsNaN),
    ("nonfinite", broken.LosesNaNOfItsRates),
    ("nonfinite", broken.ListensToItsBatch),
    ("dtypes", broken.Frequencies),
    ("dtypes", broken.WidensItsOutput),
    ("decay", broken.SparesAStranger),
    ("wrong_input", broken.TakesAnyMask),
    ("wrong_input", broken.TakesAnyEncoding),
    ("wrong_input", broken.NoOptionIsWrong),
    ("surgery", broken.AcceptsAnyCrop),
    ("refused_calls", broken.CropsWhatItCannot),
    ("refused_calls", broken.TakesAnyPositions),
    ("prompt_lookup", broken.TakesNothingBack),
    ("weights", broken.GivesWeightsOfNothing),
    ("weights", broken.SaysItHasWeights),
    ("weights", broken.HidesItsWeights),
    ("weights", broken.WeighsTwice),
    ("compile", broken.LooksAtItsNumbers),
]


@pytest.mark.slow
@pytest.mark.parametrize("below", registered_mixers())
def test_laws_of_models_in_every_pair(below: str) -> None:
    """Each mixer under each: documents that go on across calls, and refused calls."""
    for above in registered_mixers():
        model = language_model(mixers.example(below), mixers.example(above))
        go_on(f"{above} over {below}", model)
        with torch.no_grad():
            in_model(f"{above} over {below}", model)


@pytest.mark.one_in(4)
@pytest.mark.parametrize(
    "law", [pytest.param(law, marks=[pytest.mark.slow] if law == "compile" else []) for law in mixers.laws()]
)
def test_law_holds_for_a_right_one(law: str) -> None:
    kind = Dropping if law == "dropout" else Decay
    assert mixers.examine(partial(mixers.laws()[law], **QUICK.get(law, {})), kind) == mixers.HOLDS


@pytest.mark.parametrize(("law", "kind"), RED, ids=[f"{law}-{kind.__name__}" for law, kind in RED])
def test_law_goes_red(law: str, kind: type) -> None:
    with pytest.raises(LawBroken, match=f"{kind.__name__} breaks the law '{law}'"):
        mixers.examine(law, kind)


def test_every_law_was_seen_red() -> None:
    assert {law for law, _ in RED} == set(mixers.laws())


# ---- the public face ---------------------------------------------------------------------------------------------------
def test_a_newcomer_gets_the_battery_with_no_second_edit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry.MIXERS, "factories", dict(registry.MIXERS.factories))
    registry.register_mixer("newcomer")(Decay)
    assert {law for name, law in mixers.cases() if name == "newcomer"} == set(mixers.laws())
    assert mixers.examine("rows", "newcomer") == mixers.HOLDS


def test_check_takes_names_classes_functions_and_options() -> None:
    without = tuple(set(mixers.laws()) - {"rows", "saved"})
    for mixer in ("attention", Decay, lambda dim: Decay(dim), mixers.example(Decay, mode="parallel")):
        assert mixers.check(mixer, without=without) == {"rows": "holds", "saved": "holds"}
    assert mixers.example(Decay, chunk_size=3)(mode="recurrent").chunk_size == 3
    assert mixers.examine("forms", lambda dim: Decay(dim)).startswith(DOES_NOT_APPLY)


def test_check_refuses_what_it_cannot_mean() -> None:
    with pytest.raises(ValueError, match="unknown mixer 'atention': did you mean 'attention'"):
        mixers.check("atention")
    with pytest.raises(ValueError, match="unknown option 'chunk': did you mean 'chunk_size'"):
        mixers.check(Decay, chunk=1)
    with pytest.raises(ValueError, match="expected names of laws, pieces"):
        mixers.check(Decay, without=("compiled",))
    with pytest.raises(ValueError, match="got a mixer"):
        mixers.check(Decay(16))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="returns a Mixer"):
        mixers.check(lambda: nn.Linear(2, 2))  # type: ignore[arg-type]


def test_fillings_differ_by_seed_and_leave_nothing_at_zero() -> None:
    for name in registered_mixers():
        one, again, other = (dict(mixers.example(name)(seed).named_parameters()) for seed in (0, 0, 1))
        for p in one:
            assert bool(one[p].ne(0).all()), (name, p)
            assert torch.equal(one[p], again[p]) and not torch.equal(one[p], other[p])


def test_bytes_of_a_view_are_those_of_what_it_holds() -> None:
    whole = torch.zeros(100, 8)
    assert mixers.bytes_held([whole[-1:], whole[:1]]) == 100 * 8 * 4
    assert mixers.bytes_held({"a": (torch.zeros(3), torch.zeros(2, dtype=torch.int64))}) == 12 + 16
