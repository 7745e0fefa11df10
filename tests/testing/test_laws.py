"""The laws over everything registered, over variants and compositions, and over encodings that break them on purpose."""

from functools import partial

import pytest
import torch

import longitude as lg
from longitude import testing
from longitude.positions.base import check_sizes
from longitude.testing.bounds import law_memory
from longitude.testing.draws import law_draws
from longitude.testing.dropout import law_dropout
from longitude.testing.equal import law_backends
from longitude.testing.fixtures import learned_of
from longitude.testing.graph import law_graph
from longitude.testing.nonfinite import law_nonfinite
from tests.testing import broken_encodings as broken_calls


# ---- variants: options and compositions that the defaults do not reach (of SHAPES; no encoding is named twice) -----------------
def rope_fox(head_dim, dim, num_heads):
    return lg.Composed([lg.Rotary(head_dim, "half"), lg.FoX(dim, num_heads)])


def path_and_fox(dim, num_heads, head_dim, num_kv_heads):
    return lg.Composed([lg.PaTH(dim, num_heads, head_dim, num_kv_heads), lg.FoX(dim, num_heads)])


def everything_else(dim, num_heads, head_dim):
    members = (lg.Sinusoidal(dim), lg.ALiBi(num_heads), lg.Fire(num_heads, threshold=8.0), lg.Shaw(head_dim, 4))
    return lg.Composed([*members, lg.CoPE(head_dim, 8)])


class PerHeadVectors(lg.Encoding):
    """OffsetVectors with vectors of each head and a learned shift of the query, both ways around the query."""

    learned = True

    def __init__(self, num_heads, head_dim):
        super().__init__()
        check_sizes("PerHeadVectors", num_heads=num_heads, head_dim=head_dim)
        self.num_heads, self.head_dim = num_heads, head_dim
        self.vectors = torch.nn.Parameter(torch.zeros(num_heads, 9, head_dim))
        self.start = torch.nn.Parameter(torch.zeros(num_heads, 1, head_dim))

    def terms(self, context):
        def at(offset):
            return self.vectors[:, offset.clamp(-4, 4) + 4]

        return (lg.OffsetVectors(at, at, self.start),)


class RawKeys(lg.Rotary):
    """A rotation whose cache must hold keys as they were."""

    stable_keys = False


TWO_LISTS = lg.scaling.LongRoPE([1.0, 1.0, 1.5, 2.0], [1.0, 2.0, 4.0, 8.0], 6, factor=8, follow="row")
VARIANTS = {
    "rope half": testing.example("rope", layout="half"),
    "rope partial": testing.example("rope", rotary_dim=4),
    "rope half partial": testing.example("rope", rotary_dim=6, layout="half", base=100.0),
    "rope raw keys": testing.example(RawKeys),
    "rope yarn": testing.example("rope", scaling=lg.scaling.YaRN(8, 64, beta_fast=4)),
    "rope by row": testing.example("rope", scaling=lg.scaling.DynamicNTK(2, 8, follow="row")),
    "rope by row, two lists": testing.example("rope", scaling=TWO_LISTS, layout="half"),
    "rope p": testing.example("rope", proportion=0.5),
    "xpos steep": testing.example("xpos", layout="half", scale_base=8),
    "axial_rope of four": testing.example("axial_rope", axes=4),
    "mrope interleaved": testing.example("mrope", sections=(2, 1, 1), arrangement="interleaved"),
    "sinusoidal odd": testing.example("sinusoidal", layout="half", frequencies="tensor2tensor"),
    "learned offset": testing.example("learned", row_offset=2),
    "learned interpolated": testing.example("learned", max_length=16, beyond="interpolate", length=600),
    "learned clamped": testing.example("learned", max_length=16, beyond="clamp"),
    "alibi one-sided": testing.example("alibi", future="one-sided"),
    "alibi on two heads": testing.example("alibi", biased_heads=2),
    "alibi slopes": testing.example("alibi", slopes=[0.1, 2.0, 0.5, 1.0]),
    "t5 bidirectional": testing.example("t5", num_buckets=8, max_distance=20, bidirectional=True),
    "clipped near": testing.example("clipped", max_distance=3),
    "fire near": testing.example("fire", threshold=4.0),
    "transformer_xl clamped": testing.example("transformer_xl", clamp_length=4),
    "shaw keys": testing.example("shaw", max_distance=2, values=False),
    "cope near": testing.example("cope", max_position=4),
    "path short": testing.example("path", rank=4, kernel=1),
    "vectors per head": testing.example(PerHeadVectors),
    "rope + fox": testing.example(rope_fox),
    "path + fox": testing.example(path_and_fox),
    "everything else": testing.example(everything_else),
}
QUICK = {"compile": ("alibi",), "export": ("rope",), "compiled_training": ()}
"""What traces takes seconds: in the quick tier of these encodings only."""
FOR_VARIANTS = ("backends", "shift", "permutation", "order", "far_positions")
"""Laws that are quick for variants too; the others are slow for them, but for pieces where caches hold raw keys or a stream."""
IN_PIECES = ("rope raw keys", "rope by row", "rope by row, two lists", "path + fox")
QUICK_MASKS = ("padded documents", "documents that come back", "holes", "union", "union both ways", "another order")


def cases():
    every = [(name, law, testing.example(name)) for name, law in testing.cases()]
    every += [(n, law, build) for n, build in VARIANTS.items() for law in testing.laws() if law != "compiled_training"]
    for name, law, build in every:
        heavy = name not in QUICK.get(law, (name,)) or name in VARIANTS and law not in FOR_VARIANTS
        heavy = heavy and not (law == "pieces" and name in IN_PIECES)
        yield pytest.param(law, build, id=f"{law}-{name}", marks=[pytest.mark.slow] if heavy else [])


DOES_NOT_APPLY = ("causal_only", "Transport", "its terms are no part", "its tables follow", "the table route")


@pytest.mark.parametrize(("law", "build"), list(cases()))
def test_law(law: str | testing.Law, build: testing.Example) -> None:
    if law == "backends":  # the other lengths and masks are in the slow tier; float32 is compared at 12 keys
        if build not in VARIANTS.values():
            testing.examine(partial(law_backends, lengths=((1, 1), (5, 12)), kinds=("documents by row",)), build)
        law = partial(law_backends, lengths=((5, 9),), kinds=QUICK_MASKS)
    if law == "memory":
        law = partial(law_memory, length=512)
    said = testing.examine(law, build)
    assert said == testing.HOLDS or said.startswith(DOES_NOT_APPLY)


@pytest.mark.slow
@pytest.mark.parametrize("name", [*lg.list_encodings(), *VARIANTS])
def test_wide_laws(name: str) -> None:
    """Laws over all their masks, and over many draws."""
    build = VARIANTS.get(name) or testing.example(name)
    law_draws(build, range(3, 203))
    law_dropout(build, kinds=None)
    law_graph(build, kinds=None)
    law_nonfinite(build, kinds=None)


@pytest.mark.slow
@pytest.mark.parametrize("name", [*lg.list_encodings(), *VARIANTS])
def test_backends_agree_at_all_lengths_and_under_all_masks(name: str) -> None:
    build = VARIANTS.get(name) or testing.example(name)
    law_backends(build)
    if any(isinstance(m, lg.PaTH) for m in build().modules()):
        lengths = ((63, 63), (100, 100))  # the specification walks its tokens one by one
    else:
        lengths = ((63, 63), (37, 300)) if name in VARIANTS else ((500, 500), (37, 300))
    law_backends(build, lengths=lengths)


@pytest.mark.slow
def test_laws_apply_where_they_should() -> None:
    """A reason not to apply is rare: for these encodings, and no others."""
    quick = ("permutation", "order", "shift", "export")
    skipped = {
        (law, name) for law in quick for name in lg.list_encodings() if testing.examine(law, name) != testing.HOLDS
    }
    order = {("permutation", name) for name in ("cope", "fox", "path", "path_fox", "xpos")}
    plain = {"none", "sinusoidal", "learned", "rope", "xpos", "axial_rope", "mrope"}
    assert skipped == order | {("export", name) for name in lg.list_encodings() if name not in plain}


# ---- the battery itself: each law goes red for an encoding that breaks it ----------------------------------------------------
class Broken(lg.Encoding):
    """A bias that is right; subclasses spoil one thing."""

    def __init__(self, num_heads, rate=0.5):
        super().__init__()
        check_sizes("Broken", num_heads=num_heads)
        self.num_heads, self.rate = num_heads, rate

    def of(self, offset):
        return -self.rate * offset.abs().double()

    def terms(self, context):
        return (lg.OffsetBias(lambda offset: self.of(offset).expand(self.num_heads, *offset.shape)),)


class InBfloat16(Broken):
    def of(self, offset):
        return super().of(offset).bfloat16()


class InTheModelsDtype(Broken):
    learned = True

    def __init__(self, num_heads):
        super().__init__(num_heads)
        self.rate = torch.nn.Parameter(torch.ones(()))

    def of(self, offset):
        return -self.rate * offset.abs().to(self.rate.dtype)


class SharesATable(Broken):
    tables = {}

    def of(self, offset):
        key = tuple(offset.shape)
        if key not in self.tables:
            self.tables[key] = super().of(offset)
        return self.tables[key]


class Saves(Broken):
    def __init__(self, num_heads):
        super().__init__(num_heads)
        self.register_buffer("slopes", torch.ones(num_heads))


class NotFiniteAhead(Broken):
    def of(self, offset):
        return torch.where(offset < 0, -torch.inf, super().of(offset))


class Absolute(lg.Sinusoidal):
    relative = True


class SaysAbsolute(Broken):
    relative = False


class DeclaresNothing(lg.ClippedBias):
    learned = False


class NoGradient(lg.ClippedBias):
    def terms(self, context):
        return (lg.OffsetBias(lambda offset: self.table.detach()[:, offset.clamp(-9, 9) + 127]),)


class WrongGradient(lg.ClippedBias):
    def terms(self, context):
        right = self.table.detach() + 2 * (self.table - self.table.detach())
        return (lg.OffsetBias(lambda offset: right[:, offset.clamp(-9, 9) + 127]),)


class Asserts(lg.Learned):
    def embed(self, x, positions):
        assert positions.max() < self.max_length
        return x + self.table[positions].to(x.dtype)


class LeavesATrace(lg.Sinusoidal):
    def embed(self, x, positions):
        torch.set_default_dtype(torch.float64)
        return super().embed(x, positions)


class ForgetsCarry(lg.FoX):
    def context(self, x, carry=None, documents=None):
        return super().context(x, None, documents)


class MixesDocuments(lg.PaTH):
    def context(self, x, carry=None, documents=None):
        return super().context(x, carry, None if documents is None else documents * 0)


class MixesRows(lg.FoX):
    def context(self, x, carry=None, documents=None):
        return super().context(x - x.mean(0), carry, documents)


class SeesTheFuture(lg.FoX):
    def context(self, x, carry=None, documents=None):
        return super().context(x + x.mean(1, keepdim=True), carry, documents)


class HalfSums(lg.FoX):
    def context(self, x, carry=None, documents=None):
        columns, carry = super().context(x, carry, documents)
        return {name: column.to(x.dtype) for name, column in columns.items()}, carry


class SaysNothingOfTheFuture(lg.CoPE):
    causal_only = False


class StaleKeys(lg.Rotary):
    """Turns by the newest position it sees, which grows while decoding, and claims that keys stay right."""

    def prepare(self, positions, length=None, dtype=torch.float32):
        turn = super().prepare(positions, length, dtype)
        return type(turn)(*(x * (1 + 0.1 * int(positions.max())) for x in turn))


class SwallowsNaN(lg.ClippedBias):
    def terms(self, context):
        table = self.table.nan_to_num()
        return (lg.OffsetBias(lambda offset: table[:, offset.clamp(-9, 9) + 127]),)


class MovesItsTables(Broken):
    def __init__(self, num_heads):
        super().__init__(num_heads)
        self.register_buffer("slope", torch.tensor(90.3), persistent=False)
        self.hidden = torch.nn.ParameterList([torch.zeros(num_heads, 9)])

    def of(self, offset):
        return (offset * self.slope.double()).cos()


class NoGradientCompiled(lg.ClippedBias):
    def terms(self, context):
        return NoGradient.terms(self, context) if torch.compiler.is_compiling() else super().terms(context)


class ReadsLength(Broken):
    """Asks the data how long it is, so that every length makes a graph."""

    def of(self, offset):
        return super().of(offset) * sum(1.0 for _ in range(offset.shape[0]))


RED = [
    ("far_positions", InTheModelsDtype),
    ("far_positions", InBfloat16),
    ("far_positions", HalfSums),
    ("tables", SharesATable),
    ("state", Saves),
    ("state", DeclaresNothing),
    ("order", NotFiniteAhead),
    ("shift", Absolute),
    ("shift", SaysAbsolute),
    ("gradients", NoGradient),
    ("gradients", WrongGradient),
    ("wrong_input", Asserts),
    ("wrong_input", LeavesATrace),
    ("pieces", ForgetsCarry),
    ("pieces", StaleKeys),
    ("packing", MixesDocuments),
    ("padding", MixesDocuments),
    ("rows", MixesRows),
    ("causality", SeesTheFuture),
    ("nonfinite", SwallowsNaN),
    ("dtypes", MovesItsTables),
    ("decay", MovesItsTables),
    pytest.param("compile", ReadsLength, marks=pytest.mark.slow),
    pytest.param("compiled_training", NoGradientCompiled, marks=pytest.mark.slow),
    ("permutation", SaysNothingOfTheFuture),
    ("takes_part", broken_calls.OnlyForSeveral),
    ("modes_of_torch", broken_calls.MadeInInference),
    ("refused_calls", broken_calls.CountsByItself),
    ("prompt_lookup", broken_calls.HidesItsState),
]


@pytest.mark.parametrize(("law", "broken"), RED)
def test_law_goes_red(law: str, broken: type) -> None:
    dtype = torch.get_default_dtype()
    try:
        with pytest.raises(testing.LawBroken, match=f"{broken.__name__} breaks the law '{law}'"):
            testing.examine(law, broken)
    finally:
        torch.set_default_dtype(dtype)


# ---- the public face ----------------------------------------------------------------------------------------------------
def test_a_newcomer_gets_the_battery_with_no_second_edit(monkeypatch: pytest.MonkeyPatch) -> None:
    from longitude.positions import base

    monkeypatch.setattr(base.ENCODINGS, "factories", dict(base.ENCODINGS.factories))
    lg.register("newcomer")(Broken)
    assert {law for name, law in testing.cases() if name == "newcomer"} == set(testing.laws())
    without = ("compile", "compiled_training", "backends", "memory", "export", "dropout")  # each is tried above
    said = testing.check("newcomer", without=without)
    assert set(said) == set(testing.laws()) - {*without}
    assert set(said.values()) == {testing.HOLDS}


def test_check_takes_names_classes_functions_and_options() -> None:
    without = tuple(set(testing.laws()) - {"shift", "state"})
    for encoding in ("alibi", lg.ALiBi, lambda: lg.ALiBi(4), testing.example("alibi")):
        assert testing.check(encoding, without=without) == {"shift": "holds", "state": "holds"}
    assert testing.example("rope", layout="half")().layout == "half"
    assert testing.example(lg.Rotary, layout="half", base=5.0)(base=7.0).base == 7.0


def test_check_refuses_what_it_cannot_mean() -> None:
    with pytest.raises(ValueError, match="unknown encoding 'alibbi': did you mean 'alibi'"):
        testing.check("alibbi")
    with pytest.raises(ValueError, match="unknown option 'slope': did you mean 'slopes'"):
        testing.check("alibi", slope=1)
    with pytest.raises(ValueError, match="expected names of laws, backends"):
        testing.check("alibi", without=("compiled",))
    with pytest.raises(ValueError, match="got an encoding"):
        testing.check(lg.ALiBi(4))
    with pytest.raises(ValueError, match="returns an Encoding"):
        testing.check(lambda: torch.nn.Linear(2, 2))


def test_parameters_are_filled_and_fillings_differ_by_seed() -> None:
    for name in lg.list_encodings():
        build = testing.example(name)
        one, again, other = (learned_of(build(seed)) for seed in (0, 0, 1))
        for p in one:
            assert bool(one[p].ne(0).all()), (name, p)
            assert torch.equal(one[p], again[p]) and not torch.equal(one[p], other[p])
