"""The laws over everything registered, over variants and compositions, and over subjects that break them on purpose."""

import re

import pytest
import torch

import longitude as lg
from longitude import testing
from longitude.attention.mixer import MIXERS
from longitude.errors import check_sizes
from longitude.testing import LawBroken, mixers
from tests.testing import broken_encodings as encoding, broken_mixers as mixer


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

        return (lg.terms.OffsetVectors(at, at, self.start),)


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
    "rope learned": testing.example("rope", learned_frequencies=True),
    "rope of values": testing.example("rope", rotate_values=True, rotary_dim=6),
    "rope of values by row": testing.example("rope", rotate_values=True, scaling=TWO_LISTS),
    "xpos steep": testing.example("xpos", layout="half", scale_base=8),
    "axial_rope of four": testing.example("axial_rope", axes=4),
    "axial_rope mixed": testing.example("axial_rope", mixed=True, layout="half"),
    "mrope interleaved": testing.example("mrope", sections=(2, 1, 1), arrangement="interleaved"),
    "sinusoidal odd": testing.example("sinusoidal", layout="half", frequencies="tensor2tensor"),
    "learned interpolated": testing.example("learned", max_length=16, length=600),
    "alibi one-sided": testing.example("alibi", future="one-sided"),
    "alibi slopes": testing.example("alibi", slopes=[0.1, 2.0, 0.0, 1.0]),
    "t5 bidirectional": testing.example("t5", num_buckets=8, max_distance=20, bidirectional=True),
    "clipped near": testing.example("clipped", max_distance=3),
    "fire near": testing.example("fire", threshold=4.0),
    "transformer_xl clamped": testing.example("transformer_xl", clamp_length=4),
    "shaw keys": testing.example("shaw", max_distance=2, values=False),
    "inkling near": testing.example("inkling", extent=3, log_scaling_n_floor=2),
    "cope near": testing.example("cope", max_position=4),
    "path short": testing.example("path", rank=4, kernel=1),
    "vectors per head": testing.example(PerHeadVectors),
    "rope + fox": testing.example(rope_fox),
    "path + fox": testing.example(path_and_fox),
    "everything else": testing.example(everything_else),
}


def of(name, *encodings, **options):
    return mixers.MixerExample(MIXERS[name], options, encodings)


PARTS = {"output_gate": True, "softcap": 2.0, "xsa": True}
MIXER_VARIANTS = {
    "attention without positions": of("attention"),
    "attention, rope and t5": of("attention", "rope", "t5"),
    "attention of 2026": of("attention", "rope", **PARTS, qk_norm=True, short_conv=("input", "qkv", "output")),
    "window of 2026": of("window", "alibi", size=3, **PARTS, qk_norm=True, short_conv="kv"),
    "latent of 2026": of("latent", "rope", output_gate=True, softcap=2.0, short_conv=("input", "output")),
    "window, values rotate": mixers.MixerExample(
        MIXERS["window"], {"size": 3}, testing.example("rope", rotate_values=True)
    ),
    "window of one": of("window", "alibi", size=1),
    "latent, full queries": of("latent", "rope", q_rank=None),
    "hierarchical, window of one": of("hierarchical", "t5", window=1),
    "stick_breaking in a block": of("stick_breaking", qk_norm=True, xsa=True, output_gate=True, short_conv="kv"),
    "repo in a block": of("repo", **PARTS, qk_norm=True, short_conv="qkv"),
    "indexed in a block": of("indexed", "rope", **PARTS, qk_norm=True, short_conv="input"),
    "indexed, interleaved": of("indexed", "ssmax", index_rotation="interleaved", index_rotary_dim=4),
    "indexed_latent, scaled": of(
        "indexed_latent", "rope", q_rank=None, index_scaling=lg.scaling.YaRN(8, 16), index_rotary_dim=4, index_dim=8
    ),
    "parallel, latent and rwkv7": of("parallel", "rope", attention="latent", state="rwkv7"),
    "parallel, window and lstm": of(
        "parallel", "alibi", attention={"name": "window", "size": 3}, state="lstm", normalize=False
    ),
    "kda, bounded": of("kda", lower_bound=-2.0),
    "mamba2, groups": of("mamba2", groups=2, head_dim=8),
    "mamba3, heavy tail": of("mamba3", decay_activation="heavy_tail"),
}
ENCODING_EXAMPLES = {**{name: testing.example(name) for name in lg.list_encodings()}, **VARIANTS}
MIXER_EXAMPLES = {**{name: mixers.example(name) for name in lg.list_mixers()}, **MIXER_VARIANTS}

# ---- which laws of which subject are quick, and over which lengths and masks -----------------------------------------------
QUICK_MASKS = ("padded documents", "documents that come back", "holes", "union", "union both ways", "another order")
LENGTHS = {
    "chunks": [{"lengths": (1, 21)}],
    "forms": [{"lengths": (1, 21)}],
    "gradients": [{"lengths": (21,)}],
    "causality": [{"lengths": (7, 33)}],
    "padding": [{"lengths": (5, 13, 2)}],
    "packed_documents": [{"rows": ((4, 12, 1, 9), (13, 9)), "first_call": 18}],
}
SHORT = {
    testing: LENGTHS
    | {
        "chunks": [{"lengths": (13,)}],
        "padding": [{"lengths": (5, 9, 2)}],
        "gradients": [{"lengths": (7,)}],
        "causality": [{"lengths": (13,)}],
        "memory": [{"length": 512}],
        "nan_in_documents": [{"paddings": ("behind",)}],
        "backends": [
            {"lengths": ((1, 1), (5, 12)), "kinds": ("documents by row",)},
            {"lengths": ((5, 9),), "kinds": QUICK_MASKS},
        ],
    },
    mixers: LENGTHS,
}
"""Laws that the quick tier tries on short sequences: chunks of 5 and 16 tokens, and windows, end within these."""
WIDE = {"random_calls": [{"draws": range(3, 203)}], **{law: [{"kinds": None}] for law in ("dropout", "autograd_graph")}}
TRACED = ("compile", "export", "compiled_training", "compiled_transforms")
"""What traces takes seconds: slow for all, as is NaN in documents, in every form on every backend."""
IN_TURNS = (
    "padding packed_documents documents_across_calls forms chunks gradients nan_and_inf dropout "
    "grad_modes extreme_inputs backends transforms causality memory precision shift "
    "shared_tables random_calls queries_without_keys prompt_lookup dtypes autograd_graph "
    "cache_operations adapters offloading"
).split()
TURNS = len(IN_TURNS)
"""Of the laws that take longest each subject meets one in the quick tier, and each law every 25th subject."""
LONGEST = {"queries_without_keys": 40, "offloading": 40, "documents_across_calls": 40}
"""Those that take a second and more: quick for one subject in so many."""
FOR_VARIANTS = ("shift", "permutation", "order", "far_positions")
IN_CHUNKS = ("rope of values", "rope raw keys", "rope by row", "rope by row, two lists", "path + fox")
"""Variants whose caches hold raw keys, rotated values or a stream."""


def batched(names, size):
    return [names[start : start + size] for start in range(0, len(names), size)]


def is_slow(battery, name, law):
    place = list(MIXER_EXAMPLES if battery is mixers else ENCODING_EXAMPLES).index(name)
    if law in IN_TURNS and name not in IN_CHUNKS and (IN_TURNS.index(law) + place) % LONGEST.get(law, TURNS):
        return True
    if law in (*TRACED, "nan_in_documents"):
        return True
    if name in MIXER_VARIANTS:
        return name != "attention of 2026"
    quick = law in FOR_VARIANTS or law == "backends" or law == "chunks" and name in IN_CHUNKS
    return name in VARIANTS and not quick


WITHOUT_QUERIES = ("gradients", "window of one")
"""The weight of a single key is 1, whatever the query."""
DOES_NOT_APPLY = (
    "causal_only|Transport|its tables follow|the table route|it reads no token ids|it has one form|it has no dropout|"
    "its values rotate|it reads tokens on both sides"
)


def subjects(battery, law, slow):
    """Names of the examples that a law is tried on, in one of the two tiers."""
    names = list(MIXER_EXAMPLES if battery is mixers else ENCODING_EXAMPLES)
    if law in ("compiled_training", "compiled_transforms"):
        names = [name for name in names if name not in VARIANTS]
    return [name for name in names if (law, name) != WITHOUT_QUERIES and is_slow(battery, name, law) == slow]


LAWS = [(battery, law) for battery in (testing, mixers) for law in battery.laws()]


def require_law(battery, law, name):
    build = (MIXER_EXAMPLES if battery is mixers else ENCODING_EXAMPLES)[name]
    every = SHORT[battery].get(law, [{}])
    for options in every[name in VARIANTS and law == "backends" :]:
        result = battery.laws()[law](build, **options).require(build.name)
        assert result.status == "passed" or re.match(DOES_NOT_APPLY, result.reason), (name, result)


@pytest.mark.parametrize(
    ("battery", "law", "name"),
    [
        pytest.param(battery, law, name, id=f"{law}-{name}")
        for battery, law in LAWS
        for name in subjects(battery, law, slow=False)
    ],
)
def test_law(battery, law, name) -> None:
    require_law(battery, law, name)


@pytest.mark.slow
@pytest.mark.timeout(1200)  # five compilations, on a busy core
@pytest.mark.parametrize(
    ("battery", "law", "names"),
    [
        pytest.param(battery, law, names, id=f"{law}-{', '.join(names)}")
        for battery, law in LAWS
        for names in batched(subjects(battery, law, slow=True), 5)
    ],
)
def test_law_of_the_others(battery, law, names) -> None:
    """A few to each item: thousands of items would take a minute to collect."""
    for name in names:
        require_law(battery, law, name)


@pytest.mark.slow
@pytest.mark.timeout(1200)  # all laws of one, on a busy core
@pytest.mark.parametrize("name", ENCODING_EXAMPLES)
def test_laws_of_encodings_at_all_lengths_under_all_masks(name: str) -> None:
    build = ENCODING_EXAMPLES[name]
    if any(isinstance(m, lg.PaTH) for m in build().modules()):
        lengths = ((63, 63), (100, 100))  # the specification walks its tokens one by one
    else:
        most = 63 if name in VARIANTS else min(500, build().max_length or 500)
        lengths = ((most, most), (37, 300))
    longer = {
        "backends": [{}, {"lengths": lengths}],
        "chunks": [{"lengths": (63,)}],
        "padding": [{}],
        "packed_documents": [{}],
        "nan_in_documents": [{}],
    }
    for law, every in (WIDE | longer).items():
        for options in every:
            testing.laws()[law](build, **options).require(name)


@pytest.mark.slow
@pytest.mark.parametrize("law", LENGTHS)
@pytest.mark.parametrize("name", lg.list_mixers())
def test_laws_of_mixers_on_long_sequences(law: str, name: str) -> None:
    longer = {} if law in ("padding", "packed_documents") else {"lengths": (7, 63, 130)}
    mixers.laws()[law](MIXER_EXAMPLES[name], **longer).require(name)


@pytest.mark.slow
def test_laws_apply_where_they_should() -> None:
    """A reason not to apply is rare: for these encodings, and no others."""
    laws = ("permutation", "order", "shift")
    spared = {(law, n) for law in laws for n in lg.list_encodings() if testing.examine(law, n).status != "passed"}
    names = "cope dual_chunk fox leaky_rerope path path_fox rerope self_extend xpos".split()
    assert spared == {("permutation", name) for name in names}


# ---- each law is broken by a subject made for it -----------------------------------------------------------------------------
RED = {testing: encoding.RED, mixers: mixer.RED}
TRIED_ELSEWHERE = set("backends random_calls dropout autograd_graph memory queries_without_keys".split())
"""On broken backends, in test_laws_of_backends.py and tests/attention/backends/test_memory.py."""


@pytest.mark.parametrize(
    ("battery", "law", "broken"),
    [
        pytest.param(
            battery, law, kind, id=f"{law}-{kind.__name__}", marks=[pytest.mark.slow] * (n > 0 or law in TRACED)
        )
        for battery, laws in RED.items()
        for law, every in laws.items()
        for n, kind in enumerate(every)  # quick: the first of each law
    ],
)
def test_law_goes_red(battery, law: str, broken: type) -> None:
    with pytest.raises(LawBroken, match=f"{broken.__name__} breaks the law '{law}'"):
        battery.examine(law, broken)


def test_every_law_was_seen_red() -> None:
    assert set(RED[mixers]) == set(mixers.laws())
    assert set(RED[testing]) | TRIED_ELSEWHERE == set(testing.laws())


@pytest.mark.one_in(8)
@pytest.mark.parametrize(
    "law", [pytest.param(law, marks=[pytest.mark.slow] * (law in TRACED)) for law in mixers.laws()]
)
def test_law_holds_for_a_right_mixer(law: str) -> None:
    build = mixers.example(mixer.Dropping if law == "dropout" else mixer.Decay)
    for options in SHORT[mixers].get(law, [{}]):
        assert mixers.laws()[law](build, **options).require().status == "passed"
