"""Rotating pairs cheaply: each form equals the textbook's formula, in values and gradients, on any memory."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import gradcheck, gradgradcheck
from torch.fx.experimental.proxy_tensor import make_fx

import longitude as lg
from longitude.positions import rotation
from longitude.positions.rotation import RotaryTable, apply_rotary, compiled, rotate_by_formula
from tests.support import close

LAYOUTS = ("half", "interleaved")
needs_compiler = pytest.mark.skipif(compiled(torch.float32) is None, reason="no C compiler here")


@pytest.fixture(params=["compiled", "eager"])
def route(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Both ways, with threads at any size; the compiled one where there is a compiler."""
    if request.param == "eager":
        monkeypatch.setattr(rotation, "compiled", lambda dtype: None)
    elif compiled(torch.float32) is None:
        pytest.skip("no C compiler here")
    monkeypatch.setattr(rotation, "WORTH_THREADS", 0)
    monkeypatch.setattr(rotation, "IN_CACHE", 64)
    return request.param


def textbook(x: torch.Tensor, positions: torch.Tensor, layout: str, rotary_dim: int, base: float = 10_000.0):
    """Su et al. 2021, equation 34: x cos + rotated x sin, with tables as wide as x. positions [L] or [B, L]."""
    theta = torch.tensor([base ** (-2 * k / rotary_dim) for k in range(rotary_dim // 2)], dtype=torch.float64)
    angles = positions.double()[..., None] * theta
    angles = angles[:, None] if angles.dim() == 3 else angles
    first = list(range(rotary_dim // 2)) if layout == "half" else list(range(0, rotary_dim, 2))
    second = [n + (rotary_dim // 2 if layout == "half" else 1) for n in first]
    out = x.clone()
    out[..., first] = x[..., first] * angles.cos() - x[..., second] * angles.sin()
    out[..., second] = x[..., first] * angles.sin() + x[..., second] * angles.cos()
    return out


def memories(x: torch.Tensor) -> dict[str, torch.Tensor]:
    """The same numbers in different places: as projections leave them, as slices, at odd offsets, with gaps."""
    B, H, L, D = x.shape
    fused = torch.zeros(B, L, 3, H, D, dtype=x.dtype)
    fused[:, :, 1] = x.transpose(1, 2)
    odd = torch.zeros(x.numel() + 1, dtype=x.dtype)
    odd[1:] = x.flatten()
    gaps = torch.zeros(B, H, L, 2 * D, dtype=x.dtype)
    gaps[..., ::2] = x
    wider = torch.zeros(B, H, L, D + 1, dtype=x.dtype)
    wider[..., 1:] = x
    return {
        "contiguous": x.clone(),
        "projection": x.transpose(1, 2).contiguous().transpose(1, 2),
        "fused": fused[:, :, 1].transpose(1, 2),
        "odd offset": odd[1:].view_as(x),
        "gaps": gaps[..., ::2],
        "odd strides": wider[..., 1:],
    }


@pytest.mark.one_in(5)
@pytest.mark.parametrize("rotary_dim", [16, 6])
@pytest.mark.parametrize("length", [1, 7, 63])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_equals_the_textbook(route: str, layout: str, length: int, rotary_dim: int) -> None:
    """Values and gradients, float64 and float32, positions for all or for each row, on any memory."""
    rope = lg.Rotary(16, layout, rotary_dim=rotary_dim)
    near = torch.arange(length) + 5
    for positions in (near, torch.stack([near, 2 * near + 1])):
        x, weight = torch.randn(2, 2, 3, length, 16, dtype=torch.float64)
        for dtype, atol, rtol in ((torch.float64, 1e-12, 0), (torch.float32, 5e-6, 1e-6)):
            tables = rope.prepare(positions, dtype=dtype)
            rounded, wanted = x.to(dtype), x.to(dtype).double().requires_grad_()
            want = textbook(wanted, positions, layout, rotary_dim)
            (back,) = torch.autograd.grad(want, wanted, weight.to(dtype).double())
            for memory in memories(rounded).values():
                memory.requires_grad_()
                got = rope.queries(memory, tables)
                assert got.dtype == dtype
                close(got.double(), want, atol, rtol)
                (given,) = torch.autograd.grad(got, memory, memories(weight.to(dtype))["odd strides"])
                close(given.double(), back, atol, rtol)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_narrow_numbers_rotate_in_float32(route: str, layout: str, dtype: torch.dtype) -> None:
    """One rounding, at the end; in both passes."""

    def rounded_once(got: torch.Tensor, want: torch.Tensor) -> bool:
        return bool(((got.double() - want).abs() <= want.abs() * torch.finfo(dtype).eps / 2 + 2e-6).all())

    x = torch.randn(2, 4, 9, 16).to(dtype).requires_grad_()
    positions = torch.arange(900, 909)
    got = lg.Rotary(16, layout).rotate(x, positions)
    assert got.dtype == dtype
    assert rounded_once(got, textbook(x.double(), positions, layout, 16))
    weight = torch.randn(2, 4, 9, 16).to(dtype)
    (back,) = torch.autograd.grad(got, x, weight)
    wide = x.detach().double().requires_grad_()
    (want,) = torch.autograd.grad(textbook(wide, positions, layout, 16), wide, weight.double())
    assert back.dtype == dtype
    assert rounded_once(back, want)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_gradients_of_every_order(layout: str) -> None:
    """Also where rotations stretch, as those of xpos and YaRN do: the gradient is the transpose, not the inverse."""
    cos, sin = 3 * torch.randn(2, 2, 1, 2, 2, dtype=torch.float64)
    table, x = RotaryTable(cos, sin), torch.randn(2, 1, 2, 4, dtype=torch.float64, requires_grad=True)
    assert gradcheck(lambda x: apply_rotary(x, table, layout), x, check_forward_ad=True)
    assert gradgradcheck(lambda x: apply_rotary(x, table, layout).square() * x.sin(), x)
    learned = [t.requires_grad_() for t in (cos, sin)]
    assert gradcheck(lambda x, cos, sin: apply_rotary(x, RotaryTable(cos, sin), layout), (x, *learned))


@needs_compiler
@pytest.mark.parametrize("threads", [0, 10**9])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_compiled_equals_the_formula_to_the_bit(layout: str, threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Grouped heads in one call, a part of the head that rests, blocks that end early, one thread and several."""
    monkeypatch.setattr(rotation, "WORTH_THREADS", threads)
    monkeypatch.setattr(rotation, "one_by_one", None)
    for length, width in ((1, 24), (37, 30), (300, 24)):
        rope = lg.Rotary(width, layout, rotary_dim=24)
        table = rope.prepare(torch.randint(0, 9999, (3, length)))
        q, k = torch.randn(3, 5, length, width), torch.randn(3, 2, length, width)
        for x, got in zip((q, k), rope.queries_and_keys(q, k, table), strict=True):
            assert torch.equal(got[..., :24], rotate_by_formula(x[..., :24], table, layout))
            assert torch.equal(got[..., 24:], x[..., 24:])


@needs_compiler
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_numbers_are_rounded_as_by_torch(dtype: torch.dtype) -> None:
    """Every number there is, and products that fall between two, overflow, or are subnormal; to the bit."""
    x = torch.arange(-(2**15), 2**15, dtype=torch.int16).view(dtype).view(1, 1, 1024, 64)
    for cos, sin in ((1.0, 0.0), (1.5, 0.0), (0.5, 0.8), (1.0, 1e-6)):  # products with 1.5 lie half way between two
        table = RotaryTable(torch.full((1024, 32), cos), torch.full((1024, 32), sin))
        for layout in LAYOUTS:
            want = rotate_by_formula(x.float(), table, layout).to(dtype)
            torch.testing.assert_close(apply_rotary(x, table, layout), want, rtol=0, atol=0, equal_nan=True)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_queries_and_keys_of_one_call(route: str, layout: str) -> None:
    """Equal to two calls, in every memory that a projection may leave them in; a gradient of one alone, or of none."""
    rope = lg.Rotary(8, layout, rotary_dim=6)
    table = rope.prepare(torch.arange(5) + 9)
    q, k = torch.randn(2, 4, 5, 8), torch.randn(2, 2, 5, 8)
    for own, other in zip(memories(q).values(), reversed(memories(k).values()), strict=True):
        own.requires_grad_()
        both, apart = rope.queries_and_keys(own, other, table), (rope.queries(own, table), rope.keys(other, table))
        for x, y in zip(both, apart, strict=True):
            close(x, y, 1e-6)
        assert both[0].requires_grad
        (first,), (second,) = (torch.autograd.grad(x[0].square().sum(), own) for x in (both, apart))
        close(first, second, 1e-5)
    table = rope.prepare(torch.arange(5), dtype=torch.float64)
    wide = [x[:1, :2].double().requires_grad_() for x in (q, k)]
    assert gradcheck(lambda q, k: rope.queries_and_keys(q, k, table), wide, check_forward_ad=True)
    assert gradcheck(lambda k: rope.queries_and_keys(wide[0].detach(), k, table)[1], wide[1:])


@pytest.mark.parametrize("layout", LAYOUTS)
def test_tables_of_another_length_are_refused(layout: str) -> None:
    """Of either tensor: C must never read beyond them."""
    rope = lg.Rotary(8, layout)
    table, q, k = rope.prepare(torch.arange(5)), torch.randn(1, 2, 5, 8), torch.randn(1, 2, 3, 8)
    for pair in ((q, k), (k, q)):
        with pytest.raises(RuntimeError, match="size"):
            rope.queries_and_keys(*pair, table)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_other_batches_and_no_heads(route: str, layout: str) -> None:
    """Of queries than of keys: each is rotated as alone, and C reads neither beyond its end."""
    rope = lg.Rotary(8, layout)
    table = rope.prepare(torch.arange(5))
    for q_batch, k_batch in ((64, 1), (1, 3)):
        q, k = torch.randn(q_batch, 2, 5, 8), torch.randn(k_batch, 1, 5, 8)
        for rotated, x in zip(rope.queries_and_keys(q, k, table), (q, k), strict=True):
            close(rotated, rotate_by_formula(x, table, layout), 1e-6)
    for none in (torch.randn(2, 0, 5, 8), torch.randn(2, 5, 0, 8).transpose(1, 2)):
        assert rope.queries_and_keys(none, none, table)[0].shape == (2, 0, 5, 8)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_tables_that_broadcast(route: str, layout: str) -> None:
    """One position for all tokens, rows for a single one: the formula's, whatever the shapes."""
    x, positions = torch.randn(2, 2, 5, 4, dtype=torch.float64), torch.tensor([[0, 1, 2, 3, 4], [9, 8, 7, 6, 5]])
    single, rows = (lg.Rotary(4, layout).prepare(p, dtype=torch.float64) for p in (torch.tensor([3]), positions))
    for dtype, tolerance in ((torch.float64, 1e-12), (torch.float32, 1e-5)):
        y = x.to(dtype)
        close(
            apply_rotary(y, single.to(dtype), layout).double(), textbook(x, torch.full((5,), 3), layout, 4), tolerance
        )
        wanted = textbook(x[:1].expand(2, -1, -1, -1), positions, layout, 4)
        close(apply_rotary(y[:1], rows.to(dtype), layout).double(), wanted, tolerance)


def test_a_subclass_keeps_its_own_rotation() -> None:
    class Keyless(lg.Rotary):
        def keys(self, k: torch.Tensor, prepared: RotaryTable) -> torch.Tensor:
            return k

    rope, x = Keyless(8, "half"), torch.randn(1, 2, 5, 8)
    q, k = rope.queries_and_keys(x, x, rope.prepare(torch.arange(5)))
    assert k is x and not torch.equal(q, x)


def test_tracers_get_operators_of_torch() -> None:
    """No tracer, mode or fake tensor meets memory that C reads."""
    table, x = lg.Rotary(8, "half").prepare(torch.arange(4)), torch.randn(1, 2, 4, 8)
    traced = make_fx(lambda x: apply_rotary(x, table, "half"))(torch.zeros_like(x))
    close(traced(x), rotate_by_formula(x, table, "half"), 1e-6)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        assert apply_rotary(mode.from_tensor(x), table, "half").shape == x.shape


@needs_compiler
@pytest.mark.parametrize("layout", LAYOUTS)
def test_not_finite_as_in_the_formula(layout):
    """NaN, infinities, the largest and the tiniest numbers, in tokens and in angles."""
    generator = torch.Generator().manual_seed(0)
    x, cos, sin = (torch.randn(*shape, generator=generator) for shape in ((2, 3, 21, 40), (21, 20), (21, 20)))
    for value in (float("nan"), float("inf"), -float("inf"), 3e38, 1e-45):
        for t in (x, cos, sin):
            given = [u.clone() for u in (x, cos, sin)]
            places = torch.randint(0, t.numel(), (9,), generator=generator)
            next(g for g, u in zip(given, (x, cos, sin), strict=True) if u is t).view(-1)[places] = value
            got = apply_rotary(given[0], RotaryTable(*given[1:]), layout)
            torch.testing.assert_close(
                got, rotate_by_formula(given[0], RotaryTable(*given[1:]), layout), equal_nan=True
            )
