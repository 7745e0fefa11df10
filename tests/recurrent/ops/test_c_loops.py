"""What is not finite in the loops in C: as in torch's own loop over tokens, forward and backward.

NaN, infinities, and the tiniest number, at random places of every input and of the gradients that come in: the same numbers are
not finite. An infinity keeps its sign where the formula fixes it: in outputs, but for products of complex numbers, of which
inf - inf is a matter of order. Huge numbers overflow in other intermediates: there C may be finite alone if it is right.
"""

import math
from random import Random

import pytest
import torch

from longitude.recurrent import gated_delta_rule, rwkv4, rwkv7, s4d, selective_scan
from longitude.recurrent.ops import c_loops as loops
from tests.support import close, random

needs_loops = pytest.mark.skipif(loops.loops("wkv.c", torch.float32) is None, reason="no C compiler here")
BATCH, LENGTH, CHANNELS, SIZE = 2, 7, 18, 3  # channels: a whole vector of lanes, and a part of one


def given(kind: str, generator: torch.Generator) -> dict[str, torch.Tensor]:
    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).float().double()

    b, length, c, n = BATCH, LENGTH, CHANNELS, SIZE
    if kind == "rwkv4":
        made = {"decay": draw(c), "first": draw(c), "k": draw(b, length, c), "v": draw(b, length, c)}
        return made | {"numerator": draw(b, c), "denominator": draw(b, c).abs() + 0.1, "max": draw(b, c)}
    if kind == "selective_scan":
        made = {"u": draw(b, c, length), "delta": draw(b, c, length), "A": -draw(c, n).abs()}
        return made | {"B": draw(b, n, length), "C": draw(b, n, length), "state": draw(b, c, n)}
    if kind in ("kda", "rwkv7"):
        made = {
            name: draw(b, c // 3, length, m)
            for name, m in (("q", n), ("k", n), ("v", c), ("g", n), ("kappa", n), ("a", n))
        }
        made |= {"g": -made["g"].abs(), "beta": draw(b, c // 3, length).sigmoid(), "state": draw(b, c // 3, n, c)}
        return {name: x for name, x in made.items() if name not in {"kda": ("a", "kappa"), "rwkv7": ("beta",)}[kind]}
    made = {"u": draw(b, c, length), "log_dt": draw(c), "A": -draw(c, n).abs(), "A_imag": draw(c, n)}
    return made | {"C": draw(c, n), "C_imag": draw(c, n), "state": draw(b, c, n), "state_imag": draw(b, c, n)}


def outputs(kind: str, x: dict[str, torch.Tensor], mode: str, reset: torch.Tensor | None) -> tuple[torch.Tensor, ...]:
    if kind == "rwkv4":
        decay, first, k, v, *state = x.values()
        out, after = rwkv4(decay, first, k, v, state=tuple(state), mode=mode, reset=reset)
        return out, *after
    if kind == "selective_scan":
        *most, state = x.values()
        return selective_scan(*most, state=state, delta_softplus=True, mode=mode, chunk_size=3, reset=reset)
    if kind == "rwkv7":
        order = (x[n] for n in ("q", "g", "k", "v", "kappa", "a"))
        return rwkv7(*order, state=x["state"], mode=mode, reset=reset)
    if kind == "kda":
        order = (x[n] for n in ("q", "k", "v", "g", "beta"))
        return gated_delta_rule(*order, state=x["state"], mode=mode, reset=reset)
    u, log_dt, *parts = x.values()
    A, C, state = (torch.complex(*parts[i : i + 2]) for i in (0, 2, 4))
    y, after = s4d(u, log_dt, A, C, state=state, mode=mode, chunk_size=3, reset=reset)
    return y, after.real, after.imag


def answer(kind, given, directions, mode, reset):
    x = {name: value.clone().requires_grad_() for name, value in given.items()}
    out = outputs(kind, x, mode, reset)
    grads = torch.autograd.grad(out, list(x.values()), directions, allow_unused=True, materialize_grads=True)
    return {f"output {n}": o.detach() for n, o in enumerate(out)} | dict(zip(x, grads, strict=True))


def kinds(x: torch.Tensor) -> torch.Tensor:
    """0: finite; else NaN, inf or -inf."""
    return 3 * x.isnan().int() + 2 * (x == math.inf).int() + (x == -math.inf).int()


POISONS = {
    torch.float32: {"nan": math.nan, "inf": math.inf, "-inf": -math.inf, "tiny": 1e-45, "huge": 3e38},
    torch.float64: {"nan": math.nan, "inf": math.inf, "-inf": -math.inf, "tiny": 5e-324},
}


def compare(kind: str, dtype: torch.dtype, poison: str, seed: int) -> None:
    generator, draw = torch.Generator().manual_seed(seed), Random(seed)
    exact = given(kind, generator)
    reset = torch.rand(BATCH, LENGTH, generator=generator) < 0.2 if draw.random() < 0.5 else None
    shapes = [out.shape for out in outputs(kind, exact, "recurrent", None)]
    directions = [torch.randn(shape, generator=generator).double() for shape in shapes]
    name = draw.choice([*exact, "direction"])
    if name == "denominator" and "inf" in poison:  # torch's maximum then has a gradient of 0 * inf, ours none
        name = "numerator"
    target = draw.choice(directions) if name == "direction" else exact[name]
    value = POISONS[dtype][poison] * draw.choice((1, -1) if poison == "huge" else (1,))
    target.view(-1)[draw.randrange(target.numel())] = value
    narrow = {n: x.to(dtype) for n, x in exact.items()}
    ask = [d.to(dtype) for d in directions], reset
    want = answer(kind, narrow, ask[0], "recurrent", reset)
    got = answer(kind, narrow, ask[0], "chunked", reset)
    here = f"{kind}, {dtype}, {value} in {name}, seed {seed}"
    for part in want:
        lost = (kinds(got[part]) == 0) & (kinds(want[part]) > 0)
        if poison == "huge":
            wide = answer(kind, exact, directions, "recurrent", reset)[part][lost]
            torch.testing.assert_close(got[part][lost].double(), wide, rtol=1e-3, atol=1e-3, msg=f"{here}: {part}")
            continue
        assert not lost.any(), f"{here}: {part} is finite, torch's is not"
        assert not ((kinds(got[part]) > 0) & (kinds(want[part]) == 0)).any(), f"{here}: {part} is not finite"
        if part.startswith("output") and kind != "s4d":
            assert torch.equal(kinds(got[part]), kinds(want[part])), f"{here}: {part} is of another kind"


@needs_loops
@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", ["rwkv4", "selective_scan", "s4d", "kda", "rwkv7"])
def test_not_finite_as_in_torch(kind, seed):
    for dtype, poisons in POISONS.items():
        for n, poison in enumerate(poisons):
            compare(kind, dtype, poison, 10 * n + seed)


@needs_loops
def test_the_exponential_of_float32_to_its_ends():
    """exp of -0 and everything up to the largest that float32 holds; 0 below the ordinary numbers; NaN with any payload."""
    x = torch.tensor(
        [-math.inf, -1e4, -104.0, -87.4, -87.2, -1.0, -1e-45, 0.0, 1e-45, 1.0, 80.0, 88.6, 88.72, 88.73, math.inf]
    )
    payloads = torch.tensor([0x7FC00001, 0x7F800001, -1, 0x7FFFFFFF], dtype=torch.int32).view(torch.float32)
    one = torch.ones(1, 1, 1)
    for d in torch.cat([x, torch.linspace(-87, 88, 101), payloads]):
        e = float(d.double().exp())
        _, state = selective_scan(torch.zeros(1, 1, 1), one, d.view(1, 1), one, one, state=one)  # exp(dt A) times 1
        if d.isnan():
            assert state.isnan().all()
        elif d < -87.3:
            assert 0 <= float(state) < 1.2e-38
        else:
            assert float(state) == pytest.approx(e if e < 3.4028235e38 else math.inf, rel=3e-7)


# ---- no rule: torch's operators or a refusal, never another number ---------------------------------------------------
def _formulas():
    """Name -> (function of one float64 tensor and a mode, that tensor): every function that may run in C."""
    q, k, v, kappa, a = (random(1, 2, 9, 4, seed=n) for n in range(5))
    g, beta = -random(1, 2, 9, 4, seed=5).abs(), random(1, 2, 9, seed=6).sigmoid()
    u, delta, A = random(1, 3, 9, seed=7), random(1, 3, 9, seed=8), -random(3, 2, seed=9).abs()
    B, C = random(1, 2, 9, seed=10), random(1, 2, 9, seed=11)
    decay, first = random(3, seed=12), random(3, seed=13)
    rows = random(1, 9, 3, seed=14)
    A_, C_ = (torch.complex(-random(3, 2, seed=n).abs(), random(3, 2, seed=n + 1)) for n in (15, 17))
    return {
        "gated_delta_rule": (
            lambda x, mode: gated_delta_rule(q, x, v, g, beta * x.mean().sigmoid(), mode=mode)[0],
            k / 2,
        ),
        "rwkv7": (lambda x, mode: rwkv7(q, g, x, v, kappa, x * a, mode=mode)[0], k / 4),
        "selective_scan": (lambda x, mode: selective_scan(x, delta * x, A, B, C, mode=mode)[0], u),
        "rwkv4": (lambda x, mode: rwkv4(decay, first, x, x.sin(), mode=mode)[0], rows),
        "s4d": (lambda x, mode: s4d(x * x.sum(), decay, A_, C_, mode=mode)[0], u),
    }


def refuses(first: torch.Tensor, leaf: torch.Tensor) -> bool:
    """Whether the loop ran, and says that it has no more."""
    try:
        torch.autograd.grad(first.sum(), leaf, retain_graph=True)
    except RuntimeError as error:
        return "no derivatives of second order" in str(error)
    return False


@pytest.mark.parametrize("name", _formulas())
def test_derivatives_of_second_order_are_right_or_refused(name, form):
    """Never another number: the loop's gradients are only a part of what leads from the result to an input."""
    function, x = _formulas()[name]
    found = {}
    for mode in ("recurrent", "chunked"):
        leaf = x.clone().requires_grad_()
        [first] = torch.autograd.grad(function(leaf, mode).square().sum(), leaf, create_graph=True)
        if mode == "chunked" and refuses(first, leaf):
            continue
        [found[mode]] = torch.autograd.grad(first.sin().sum(), leaf)
    assert "recurrent" in found
    if "chunked" in found:
        close(found["chunked"], found["recurrent"], 1e-7, rtol=1e-10)
