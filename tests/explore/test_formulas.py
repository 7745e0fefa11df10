"""Every formula of the page against the class that runs, in Chromium, at random parameters."""

import math
import random

import numpy as np
import pytest
import torch

import longitude as lg
from longitude.positions.bias import ALiBi, Kerple, Sandwich
from longitude.positions.buckets import T5Bias, t5_bucket
from longitude.positions.scaling import SCHEMES, from_dict, rope_frequencies

pytestmark = [pytest.mark.slow, pytest.mark.browser]
CLOSE = {"rtol": 1e-6, "atol": 1e-6}
"""Of a formula and its class."""
DRAWS = 200
BOTH = """([q, k, offset, d, base, layout]) => {
    const theta = plain(d, base);
    return [rotate(q, offset, theta, layout), score(q, k, offset, theta, layout)];
}"""
BOTH_LINES = """([name, given]) => {
    const shown = ERRATA[name](given);
    return [shown.right, shown.wrong].map(([, [line]]) => line.y);
}"""
REORDERED = """() => {
    const theta = plain(32, 10000), q = gaussians(6, 32), k = gaussians(7, 32);
    const apart = (x) => range(32).map((i) => x[i % 2 * 16 + (i >> 1)]);
    const scores = (layout, q, k) => range(64).map((offset) => cosine(q, k, offset, theta, layout));
    return [scores("half", q, k), scores("interleaved", apart(q), apart(k))];
}"""


@pytest.fixture(scope="module")
def page(chromium, written):
    page = chromium.new_page(offline=True)
    page.goto(written.as_uri())
    yield page
    page.close()


@pytest.fixture
def draws():
    return random.Random(0)


def log_uniform(draws, low, high):
    return math.exp(draws.uniform(math.log(low), math.log(high)))


def scheme(draws: random.Random, name: str) -> dict:
    """Random options of a scheme."""
    options = {"factor": log_uniform(draws, 1, 64)}
    if name not in ("linear", "ntk"):
        options["original_max_length"] = int(log_uniform(draws, 64, 2**20))
    if name == "dynamic_ntk":
        options["max_length"] = int(log_uniform(draws, 32, 2**22))
    if name == "llama3":
        options["low_freq_factor"] = log_uniform(draws, 0.1, 4)
        options["high_freq_factor"] = options["low_freq_factor"] * log_uniform(draws, 1.1, 30)
    if name in ("yarn", "ntk_by_parts"):
        options["beta_slow"] = log_uniform(draws, 0.1, 4)
        options["beta_fast"] = options["beta_slow"] * log_uniform(draws, 1.1, 64)
        options["ramp"] = draws.choice(["dimensions", "rotations"])
        options["truncate"] = options["ramp"] == "rotations" or draws.random() < 0.5
    if name == "yarn":
        options |= draws.choice(
            [{}, {"attention_factor": draws.uniform(0.5, 2)}, {"mscale": 0.7}, {"mscale": 1.2, "mscale_all_dim": 0.6}]
        )
    return options


def test_the_page_has_every_scheme_that_a_factor_decides(page):
    """The others need numbers that nobody moves with a slider: a list for each pair, another base."""
    decided = [name for name in SCHEMES if name not in ("base_change", "longrope")]
    assert sorted(page.evaluate("Object.keys(SCHEMES)")) == sorted(decided)


def test_frequencies_without_a_scheme(page, draws):
    for _ in range(DRAWS):
        d, base = 2 * draws.randrange(1, 129), log_uniform(draws, 1.01, 1e9)
        np.testing.assert_allclose(
            page.evaluate("([d, base]) => plain(d, base)", [d, base]), rope_frequencies(d, base).inverse, rtol=1e-6
        )


@pytest.mark.parametrize("name", ["dynamic_ntk", "linear", "llama3", "ntk", "ntk_by_parts", "yarn"])
def test_schemes(name, page, draws):
    ask = "([name, d, base, options]) => [SCHEMES[name](d, base, options), temperatures(name, options)]"
    refused = 0
    for _ in range(DRAWS):
        d, base, options = 2 * draws.randrange(1, 129), log_uniform(draws, 1.01, 1e9), scheme(draws, name)
        ours, factors = page.evaluate(ask, [name, d, base, options])
        try:
            theirs = rope_frequencies(d, base, from_dict({"name": name, **options}))
        except ValueError:
            assert ours is None, (d, base, options)
            refused += 1
            continue
        np.testing.assert_allclose(ours, theirs.inverse, rtol=1e-6, err_msg=str((d, base, options)))
        assert factors == pytest.approx(theirs[1:], rel=1e-6)
    assert refused < DRAWS / 2


def test_longrope_has_its_temperature(page, draws):
    for _ in range(DRAWS):
        options = {"factor": log_uniform(draws, 1, 64), "original_max_length": draws.randrange(2, 2**17)}
        theirs = lg.scaling.LongRoPE([1.0], [1.0], **options).factors()
        assert page.evaluate("(options) => temperatures('longrope', options)", options) == pytest.approx(
            theirs, rel=1e-6
        )


@pytest.mark.parametrize("layout", ["half", "interleaved"])
def test_rotation_and_score(layout, page, draws):
    generator = torch.Generator().manual_seed(0)
    for _ in range(40):
        d, base, offset = 2 * draws.randrange(1, 65), log_uniform(draws, 10, 1e6), draws.randrange(0, 2**17)
        q, k = torch.randn(2, 1, d, generator=generator, dtype=torch.float64)
        rotary = lg.Rotary(d, layout, base=base)
        rotated = rotary.rotate_queries(q, torch.tensor([offset]))[0]
        theirs = rotated @ rotary.rotate_keys(k, torch.tensor([0]))[0]
        given = [q[0].tolist(), k[0].tolist(), offset, d, base, layout]
        ours = page.evaluate(
            BOTH,
            given,
        )
        np.testing.assert_allclose(ours[0], rotated, **CLOSE)
        np.testing.assert_allclose(ours[1], theirs, **CLOSE)


def test_slopes_and_bias_of_alibi(page, draws):
    for heads in range(1, 130):
        offset = draws.randrange(-(2**20), 2**20)
        ours = page.evaluate("([heads, offset]) => alibiSlopes(heads).map((m) => alibi(m, offset))", [heads, offset])
        np.testing.assert_allclose(ours, ALiBi(heads).bias_at(offset), **CLOSE)


@pytest.mark.parametrize("bidirectional", [False, True])
def test_buckets_of_t5(bidirectional, page, draws):
    """Every offset up to twice max_distance, where the last bucket is."""
    whole = [(10, 160), (20, 160), (20, 320), (36, 1352)]  # where a bucket begins at a whole number, exactly
    for buckets, reach in [*whole, *((2 * draws.randrange(2, 65), draws.randrange(70, 3000)) for _ in range(40))]:
        offsets = torch.arange(-2 * reach, 2 * reach)
        ours = page.evaluate(
            "([offsets, ...how]) => offsets.map((offset) => t5Bucket(offset, ...how))",
            [offsets.tolist(), buckets, reach, bidirectional],
        )
        assert ours == t5_bucket(offsets, buckets, reach, bidirectional).tolist(), (buckets, reach)


def test_kerple_and_sandwich(page, draws):
    for _ in range(DRAWS):
        heads, offset = draws.randrange(1, 33), draws.randrange(-(2**17), 2**17)
        for kind in ("log", "power"):
            kerple = Kerple(heads, kind).double()
            a, p = ([draws.uniform(0.01, 2) for _ in range(heads)] for _ in range(2))
            kerple.a.data, kerple.p.data = torch.tensor(a, dtype=torch.float64), torch.tensor(p, dtype=torch.float64)
            ours = page.evaluate(
                f"([a, p, offset]) => a.map((each, i) => kerple{kind.title()}(each, p[i], offset))", [a, p, offset]
            )
            np.testing.assert_allclose(ours, kerple.bias_at(offset).detach(), **CLOSE)
        dim = 2 * draws.randrange(1, 100)
        ours = page.evaluate(
            "([heads, dim, offset]) => range(heads).map((h) => sandwich(h + 1, heads, dim, offset))",
            [heads, dim, offset],
        )
        np.testing.assert_allclose(ours, Sandwich(heads, dim).bias_at(offset), **CLOSE)


# ---- what panels make of them ----------------------------------------------------------------------------------------
def settings(draws: random.Random) -> dict:
    heads = draws.randrange(1, 33)
    return {
        "heads": heads,
        "head": draws.randrange(heads) + 1,
        "dim": 2 * draws.randrange(2, 65),
        "base": log_uniform(draws, 1000, 1e6),
        "trained": 2 ** draws.randrange(8, 14),
        "factor": draws.uniform(1, 16),
        "scheme": draws.choice(
            ["without a scheme", *(name for name in SCHEMES if name not in ("base_change", "longrope"))]
        ),
        "reach": 2 ** draws.randrange(5, 11),
        "a": draws.uniform(0.01, 1),
        "p": draws.uniform(0.01, 2),
    }


def compared(name: str, given: dict, offsets: torch.Tensor) -> torch.Tensor:
    """The curve of the first panel, from the class."""
    head = given["head"] - 1
    if name == "rope":
        options = {"factor": given["factor"], "original_max_length": given["trained"]}
        options["max_length"] = math.ceil(given["factor"] * given["trained"])
        kind = SCHEMES.get(given["scheme"], None)
        scaling = kind and kind(**{key: each for key, each in options.items() if key in kind.__dataclass_fields__})
        rotary = lg.Rotary(given["dim"], "half", base=given["base"], scaling=scaling)
        ones, newest = torch.ones(1, given["dim"], dtype=torch.float64), int(offsets.max())
        keys = rotary.rotate_keys(ones.expand(len(offsets), -1), newest - offsets)
        scores = keys @ rotary.rotate_queries(ones, torch.tensor([newest]))[0] * given["dim"] ** -0.5
        return scores - scores[offsets == 0]
    if name == "t5":
        encoding, every = T5Bias(1, 32, given["reach"]).double(), torch.arange(4096)
        buckets = t5_bucket(every, 32, given["reach"])
        first = [int(every[buckets == bucket].min()) if (buckets == bucket).any() else 0 for bucket in range(32)]
        encoding.table.data[:, 0] = -torch.tensor(first, dtype=torch.float64).log1p()
        return encoding.bias_at(offsets)[0].detach()
    if name == "alibi":
        return ALiBi(given["heads"]).bias_at(offsets)[head]
    if name == "sandwich":
        return Sandwich(given["heads"]).bias_at(offsets)[head]
    encoding = lg.encoding(name, num_heads=1).double()
    encoding.a.data.fill_(given["a"])
    encoding.p.data.fill_(given["p"])
    return encoding.bias_at(offsets)[0].detach()


@pytest.mark.parametrize("name", ["rope", "alibi", "t5", "kerple_log", "kerple_power", "sandwich"])
def test_curves_that_are_compared(name, page, draws):
    assert name in page.evaluate("Object.keys(COMPARED)")
    for _ in range(30):
        given = settings(draws)
        offsets = torch.tensor([0, *(draws.randrange(2**16) for _ in range(8))])
        ours = page.evaluate(
            "([name, given, offsets]) => offsets.map(COMPARED[name](given))", [name, given, offsets.tolist()]
        )
        np.testing.assert_allclose(ours, compared(name, given, offsets), **CLOSE, err_msg=str(given))


def test_a_key_that_prefers_an_offset(page, draws):
    """The key is the query, rotated: the score is highest there, whatever the base."""
    for _ in range(20):
        preferred, dim, base = draws.randrange(0, 300), 2 * draws.randrange(8, 65), log_uniform(draws, 1000, 1e6)
        ask = """([preferred, dim, base]) => {
            const theta = plain(dim, base), [q, k] = vectorsOf({ vectors: "k prefers an offset", dim, preferred }, theta);
            return [q, k, range(400).map((offset) => cosine(q, k, offset, theta))];
        }"""
        q, k, scores = page.evaluate(ask, [preferred, dim, base])
        rotary = lg.Rotary(dim, "half", base=base)
        theirs = (
            rotary.rotate_queries(torch.tensor([q]).double().expand(400, -1), torch.arange(400))
            @ torch.tensor(k).double()
        )
        np.testing.assert_allclose(scores, theirs / dim, **CLOSE)
        assert int(np.argmax(scores)) == preferred and scores[preferred] == pytest.approx(1)


def test_random_vectors_are_normal_and_differ(page):
    one, same, other = page.evaluate("[gaussians(1, 20000), gaussians(1, 20000), gaussians(2, 20000)]")
    assert one == same != other
    assert np.mean(one) == pytest.approx(0, abs=0.03) and np.std(one) == pytest.approx(1, abs=0.03)
    assert np.corrcoef(one, other)[0, 1] == pytest.approx(0, abs=0.03)


# ---- mistakes: numbers of docs/errata.md -----------------------------------------------------------------------------
def test_the_mistaken_ntk_base(page):
    right, wrong = page.evaluate("[ntkBase(10000, 5000/4096, 64), wrongNtkBase(10000, 5000/4096, 64)]")
    assert [right, wrong] == pytest.approx([12285.8, 10064.5], abs=0.05)
    slowest = page.evaluate("ERRATA.ntk({ dim: 64, base: 10000, factor: 5000/4096 }).wrong[1][0].y.at(-1)")
    assert slowest == pytest.approx(1.0063, abs=5e-5)


def test_positions_that_are_rounded_down(page, draws):
    assert page.evaluate("sharedPositions(5000/4096, 4096)") == 904
    for _ in range(50):
        trained, factor = draws.randrange(8, 2000), draws.choice([1, 1.25, 1.5, 2, 3, 4, 6, 8])
        rounded = [math.floor(p / factor) for p in range(math.ceil(factor * trained))]
        assert page.evaluate("([s, L]) => sharedPositions(s, L)", [factor, trained]) == len(rounded) - len(set(rounded))


def test_a_ramp_upside_down(page):
    """Width 128, s = 8, L = 4096: pair 0 has 0.125 of its frequency and pair 63 all of it."""
    right, wrong = page.evaluate(BOTH_LINES, ["ramp", {"dim": 128, "base": 10_000, "trained": 4096, "factor": 8}])
    assert [right[0], right[-1]] == pytest.approx([1, 0.125]) and [wrong[0], wrong[-1]] == pytest.approx([0.125, 1])


def test_layouts_agree_at_offset_0_and_after_reordering(page):
    half, other = page.evaluate(BOTH_LINES, ["layout", {"dim": 32, "base": 10_000, "seed": 3, "trained": 256}])
    assert half[0] == pytest.approx(other[0]) and np.abs(np.subtract(half, other)).max() > 0.1
    np.testing.assert_allclose(*page.evaluate(REORDERED), **CLOSE)
