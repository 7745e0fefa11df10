"""alibi, kerple, sandwich and fire: slopes and biases against the papers, and against independent ports."""

import math

import pytest
import torch
from transformers.models.bloom.modeling_bloom import build_alibi_tensor as bloom
from transformers.models.falcon.modeling_falcon import build_alibi_tensor as falcon
from transformers.models.mpt.modeling_mpt import build_mpt_alibi_tensor as mpt

import longitude as lg
from longitude.positions.bias import FORBIDDEN, Kerple, Sandwich, alibi_slopes
from tests.support import close, needs_c, refused_calls

# Press et al. 2022, section 3, and the slopes of their code where the number of heads is no power of two.
SLOPES = {
    1: [1 / 256],
    2: [1 / 16, 1 / 256],
    3: [0.0625, 0.00390625, 0.25],
    6: [0.25, 0.0625, 0.015625, 0.00390625, 0.5, 0.125],
    8: [1 / 2, 1 / 4, 1 / 8, 1 / 16, 1 / 32, 1 / 64, 1 / 128, 1 / 256],
    12: [
        0.5, 0.25, 0.125, 0.0625, 0.03125, 0.015625, 0.0078125, 0.00390625,
        0.70710678, 0.35355339, 0.17677670, 0.088388348,
    ],
    16: [2 ** (-h / 2) for h in range(1, 17)],
}  # fmt: skip


@pytest.mark.parametrize("heads", SLOPES)
def test_published_slopes(heads: int) -> None:
    assert lg.ALiBi(heads).slopes == alibi_slopes(heads) == pytest.approx(SLOPES[heads], rel=1e-7)


def test_alibi_bias_is_minus_slope_times_distance_both_ways() -> None:
    assert lg.ALiBi(8).bias_at(torch.tensor([0, 1, 10, -10]))[0].tolist() == [0, -0.5, -5, -5]
    assert lg.ALiBi(3, slopes=[3, 0.5, 0]).bias_at(2).tolist() == [-6, -1, 0]


@pytest.mark.parametrize("port", [bloom, falcon, mpt], ids=lambda port: port.__module__.rsplit("_")[-1])
def test_slopes_equal_independent_ports(port) -> None:
    """Falcon's rounds them to bfloat16; MPT's recipe gives the same numbers, however many heads."""
    for heads in range(1, 41):
        row = (port(heads, 2) if port is mpt else port(torch.ones(1, 2), heads, torch.float32))[:, 0]
        assert alibi_slopes(heads) == pytest.approx(row.diff()[:, 0].tolist(), rel=2**-8 if port is falcon else 1e-6)


def test_one_sided_alibi() -> None:
    """Two heads of the past, two of the future; each pair with the slopes of two heads."""
    encoding = lg.ALiBi(4, future="one-sided")
    assert encoding.slopes == [2**-4, 2**-8, 2**-4, 2**-8]
    past, future = encoding.bias_at(torch.tensor([16, -16])).T.tolist()
    assert past == [-1, -(2**-4), FORBIDDEN, FORBIDDEN]
    assert future == [FORBIDDEN, FORBIDDEN, -1, -(2**-4)]
    assert encoding.bias_at(0).tolist() == [0, 0, 0, 0]
    assert lg.ALiBi(4, [1, 2, 3, 4], future="one-sided").bias_at(1).tolist() == [-1, -2, FORBIDDEN, FORBIDDEN]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("backend", ["reference", pytest.param("table", marks=needs_c), "sdpa", "chunked"])
def test_a_one_sided_head_gives_the_other_side_a_weight_of_exactly_zero(backend: str, dtype: torch.dtype) -> None:
    encoding = lg.ALiBi(2, future="one-sided")
    q, k = (8 * torch.randn(1, 2, 9, 4, dtype=dtype) for _ in range(2))
    v = torch.eye(9, dtype=dtype).expand(1, 2, 9, 9)
    kinds = {"encoding": encoding, "mask": lg.NoMask(), "backend": backend}
    try:
        weights = lg.attend(q, k, v, **kinds)
    except ValueError:
        assert backend in ("table", "sdpa") and dtype in (torch.bfloat16, torch.float16)
        return
    assert bool(weights.isfinite().all())
    assert not bool(weights[0, 0].triu(1).any()) and not bool(weights[0, 1].tril(-1).any())
    torch.testing.assert_close(weights.sum(-1), torch.ones(1, 2, 9, dtype=dtype), atol=2e-2, rtol=0)


@pytest.mark.parametrize("backend", ["table", "sdpa", "chunked"])
def test_a_one_sided_head_that_sees_only_the_other_side(backend: str) -> None:
    """Its own token is padding: the scores keep their digits, so every backend gives the same weights and gradients."""
    q, k, v = torch.randn(3, 1, 2, 6, 4, dtype=torch.float64).requires_grad_().unbind()
    visible = torch.tensor([[True] * 2 + [False] * 4])
    kinds = {"encoding": lg.ALiBi(2, future="one-sided"), "mask": lg.NoMask() & lg.Padding(visible)}
    want, got = (lg.attend(q, k, v, backend=name, **kinds) for name in ("reference", backend))
    close(got, want, 1e-10)
    close(*(torch.autograd.grad(out.square().sum(), [q, k, v]) for out in (got, want)), 1e-10)


# ---- KERPLE: Chi et al. 2022, section 4 ----------------------------------------------------------------------------------
def kerple(kind: str, a: float, p: float) -> Kerple:
    encoding = Kerple(1, kind).double()
    with torch.no_grad():
        encoding.a.fill_(a)
        encoding.p.fill_(p)
    return encoding


@pytest.mark.parametrize(
    ("kind", "a", "p", "offset", "golden"),
    [
        ("log", 1, 1, 1, -0.6931472),
        ("log", 1, 1, 10, -2.3978953),
        ("power", 0.1, 0.5, 4, -0.2),
        ("power", 3, 2, 5, -75),
        ("power", 3, 1, 5, -15),  # ALiBi with a slope of 3
        ("log", 0, 1, 100, -math.log(2)),  # a is at least 0.01
        ("log", 1, -1, 9, -0.01 * math.log(10)),  # so is p
        ("power", -1, 1, 7, -0.07),
        ("power", 1, 3, 7, -49),  # but here: 2
    ],
)
def test_kerple_golden(kind: str, a: float, p: float, offset: int, golden: float) -> None:
    encoding = kerple(kind, a, p)
    there, back, here = encoding.bias_at(torch.tensor([offset, -offset, 0]))[0].tolist()
    assert there == back == pytest.approx(golden, rel=5e-8)
    assert here == 0


@pytest.mark.parametrize(
    ("kind", "outside", "bound"),
    [("log", (-1.0, -3.0), (0.01, 0.01)), ("power", (-1.0, -3.0), (0.01, 0.01)), ("power", (1.0, 5.0), (1.0, 2.0))],
)
def test_a_bound_of_kerple_does_not_stop_a_gradient(kind: str, outside: tuple, bound: tuple) -> None:
    """Outside, the value is the bound's, and the gradient that which the bound has; there is none at offset 0."""
    grads = []
    for a, p in (outside, bound):
        encoding = kerple(kind, a, p)
        grads.append(torch.autograd.grad(encoding.bias_at(torch.tensor([2, 7])).sum(), [encoding.a, encoding.p]))
        at_zero = torch.autograd.grad(encoding.bias_at(0).sum(), [encoding.a, encoding.p])
        assert [g.item() for g in at_zero] == [0, 0]
    close(*grads)
    assert all(g.item() != 0 for g in grads[0])


@pytest.mark.parametrize("kind", ["log", "power"])
def test_kerple_starts_as_the_authors_do(kind: str) -> None:
    encoding = lg.encoding(f"kerple_{kind}", num_heads=4000)
    assert isinstance(encoding, Kerple) and encoding.kind == kind
    for name, highest in (("a", 1), ("p", 2)):
        x = getattr(encoding, name).detach()
        assert x.min() >= 0 and x.max() <= highest
        assert float(x.mean()) == pytest.approx(highest / 2, abs=0.05 * highest)
        assert float(x.std()) == pytest.approx(highest / math.sqrt(12), rel=0.05)


# ---- Sandwich: Chi et al. 2023, section 5 --------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("head", "want"),
    [
        (0, {1: -1.446619, 10: -19.34091, 100: -33.31891, 1000: -53.38965, -10: -19.34091}),
        (7, {1: -0.1808273, 100: -4.164864}),
    ],
)
def test_published_sandwich(head: int, want: dict) -> None:
    bias = Sandwich(8).bias_at(torch.tensor([*want]))[head]
    close(bias, torch.tensor([*want.values()], dtype=torch.float64), 0, 5e-7)


test_wrong_options = refused_calls(
    [
        (lambda: lg.ALiBi(4, slopes=[1.0, 2.0]), "slopes", "4", "2"),
        (lambda: lg.ALiBi(2, slopes=[1.0, -2.0]), "ALiBi", "-2.0"),
        (lambda: lg.ALiBi(2, slopes=[1.0, float("nan")]), "0", "nan"),
        (lambda: lg.ALiBi(2, slopes=["x", "y"]), "slopes"),
        (lambda: lg.ALiBi(2, future="causal"), "'symmetric'", "'one-sided'", "'causal'"),
        (lambda: lg.ALiBi(3, future="one-sided"), "future='one-sided'", "3"),
        (lambda: Sandwich(2, dim=7), "Sandwich", "7"),
    ]
)


# ---- FIRE: Li et al. 2024, definition 3.2 and appendix C -----------------------------------------------------------------
def fire(a: float, b: float, **options) -> lg.Fire:
    """FIRE whose mlp is x -> a x + b, for x of 0 or more."""
    encoding = lg.Fire(1, width=1, **options).double()
    first, _, second = encoding.mlp
    with torch.no_grad():
        for p, value in ((first.weight, 1), (first.bias, 0), (second.weight, a), (second.bias, b)):
            p.fill_(value)
    return encoding


def test_fire_argument() -> None:
    """Of one head whose mlp is the identity: below the threshold ln 1.6 / ln 52.2, beyond it ln 1.6 / ln 101; |i - j| ahead."""
    share = fire(1, 0, c=0.1, threshold=512.0, eps=1e-12)
    for i, j, want in ((10, 4, 0.1188354), (1000, 994, 0.1018399), (4, 10, 0.1188354)):
        assert share.bias(torch.tensor([i]), torch.tensor([j])).item() == pytest.approx(want, abs=5e-8)
    damped = fire(1, 0, threshold=8.0, eps=0.5).bias(torch.tensor([2]), torch.tensor([0])).item()
    assert damped == pytest.approx(math.log(1.2) / (math.log(1.8) + 0.5), rel=1e-6)


def test_fire_row() -> None:
    row = fire(2, -1, c=0.1, threshold=8.0).bias(torch.tensor([2]), torch.arange(3))[0, 0].tolist()
    assert row == pytest.approx([-0.3796346, -0.6756986, -1.0], abs=1e-6)


def test_fire_starts_at_the_papers_numbers() -> None:
    encoding = lg.Fire(4)
    assert [tuple(p.shape) for p in encoding.mlp.parameters()] == [(32, 1), (32,), (4, 32), (4,)]
    with torch.no_grad():
        for p in encoding.parameters():
            p.fill_(math.nan)
        encoding.reset_parameters()
        assert all(bool(p.isfinite().all()) for p in encoding.parameters())
    assert (encoding.c.item(), encoding.multiplier.item()) == (pytest.approx(0.1), 1.0)
    assert (encoding.threshold, encoding.eps) == (512.0, 1e-6)


def test_a_bend_of_fire_at_zero_has_the_gradient_of_relu() -> None:
    """A rising and a falling unit that bend at t = 0 are both inactive there, in the pieces as in the network."""
    made, t = lg.Fire(3, width=11).double(), torch.zeros(1, 1, dtype=torch.float64, requires_grad=True)
    with torch.no_grad():
        made.mlp[0].weight[:2, 0], made.mlp[0].bias[:2] = torch.tensor([1.0, -1.0]), 0.0
    (term,) = made.terms({})
    slope, _, ends = term.at.curves().unbind(1)
    (of_network,) = torch.autograd.grad(made.mlp(t).sum(), t)
    close(slope[:, torch.searchsorted(ends[0].detach(), t[0].detach())].sum(), of_network.sum())


@pytest.mark.parametrize("sign", [1, -1])
def test_fire_in_the_whole_formula(sign: int) -> None:
    """The signs of c and of the multiplier do not matter."""
    encoding = lg.testing.example("fire", threshold=5.0)()
    p = {name: x.detach() for name, x in encoding.named_parameters()}
    i, j = 9, 2

    def psi(x: float) -> float:
        return math.log(abs(p["c"].item() * x) + 1)

    share = psi(i - j) / (psi(max(i, abs(p["multiplier"].item() * 5))) + 1e-6)
    hidden = (p["mlp.0.weight"][:, 0] * share + p["mlp.0.bias"]).clamp(min=0)
    want = p["mlp.2.weight"] @ hidden + p["mlp.2.bias"]
    with torch.no_grad():
        encoding.c.mul_(sign)
        encoding.multiplier.mul_(sign)
    close(encoding.bias(torch.tensor([i]), torch.tensor([j]))[:, 0, 0].detach(), want, 1e-7)
