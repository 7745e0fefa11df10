"""Rotating pairs cheaply: each form equals the textbook's formula, in values and gradients, on any memory."""

import pytest
import torch
from torch.autograd import gradcheck, gradgradcheck
from torch.fx.experimental.proxy_tensor import make_fx

import longitude as lg
from longitude.positions import rotation
from longitude.positions.rotation import RotaryTable, apply_rotary, compiled, rotate_by_formula
from tests.support import close

LAYOUTS = ("half", "interleaved")
needs_compiler = pytest.mark.skipif(compiled() is None, reason="no C compiler here")


@pytest.fixture(params=["compiled", "eager"])
def route(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Both ways, at any size; the compiled one where there is a compiler."""
    if request.param == "eager":
        monkeypatch.setattr(rotation, "compiled", lambda: None)
    elif compiled() is None:
        pytest.skip("no C compiler here")
    monkeypatch.setattr(rotation, "WORTH_COMPILING", 0)
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


@pytest.mark.one_in(3)
@pytest.mark.parametrize("rotary_dim", [16, 6])
@pytest.mark.parametrize("length", [1, 7, 63, 500])
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
                for gradient in memories(weight.to(dtype)).values():
                    (given,) = torch.autograd.grad(got, memory, gradient, retain_graph=True)
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


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")  # torch's own, in forward mode
@pytest.mark.parametrize("layout", LAYOUTS)
def test_gradients_of_every_order(layout: str) -> None:
    """Also where rotations stretch, as those of xpos and YaRN do: the gradient is the transpose, not the inverse."""
    cos, sin = 3 * torch.randn(2, 2, 1, 3, 3, dtype=torch.float64)
    table, x = RotaryTable(cos, sin), torch.randn(2, 2, 3, 6, dtype=torch.float64, requires_grad=True)
    assert gradcheck(lambda x: apply_rotary(x, table, layout), x, check_forward_ad=True)
    assert gradgradcheck(lambda x: apply_rotary(x, table, layout).square() * x.sin(), x)
    learned = [t.requires_grad_() for t in (cos, sin)]
    assert gradcheck(lambda x, cos, sin: apply_rotary(x, RotaryTable(cos, sin), layout), (x, *learned))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_neither_side_is_touched(route: str, layout: str) -> None:
    """Out of place, and the result is a tensor like any other: it may be changed in place, with its gradient."""
    rope = lg.Rotary(8, layout)
    x = torch.randn(1, 2, 5, 8, requires_grad=True)
    tables = rope.prepare(torch.arange(5))
    kept = [t.detach().clone() for t in (x, *tables)]
    rotated_once = rope.queries(x, tables)
    want = torch.autograd.grad(rope.queries(x, tables).sum() * 2, x)[0]
    assert torch.equal(torch.autograd.grad(rotated_once.mul_(2).sum(), x)[0], want)
    assert all(torch.equal(t.detach(), was) for t, was in zip((x, *tables), kept, strict=True))


def test_nothing_of_x_is_kept() -> None:
    """The gradient needs the tables alone."""
    kept = []
    x, rope = torch.randn(1, 2, 5, 8, requires_grad=True), lg.Rotary(8, "half")
    tables = rope.prepare(torch.arange(5))
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        rope.queries(x, tables)
    assert not any(t.shape == x.shape for t in kept)


@needs_compiler
@pytest.mark.parametrize("layout", LAYOUTS)
def test_compiled_equals_the_formula_to_the_bit(layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """So the size at which it starts shows nowhere. Grouped heads, several threads, blocks that end early."""
    table = lg.Rotary(24, layout).prepare(torch.randint(0, 9999, (3, 37)))
    calls = []
    monkeypatch.setattr(rotation, "WORTH_COMPILING", 3 * 5 * 37 * 24)
    monkeypatch.setattr(rotation, "rotate_neighbours", lambda x, table: calls.append(x) or x)
    monkeypatch.setattr(rotation, "rotate_halves", lambda x, cos, sin: calls.append(x) or x)
    for heads in (5, 7):
        x = torch.randn(3, heads, 37, 24)
        assert torch.equal(apply_rotary(x, table, layout), rotate_by_formula(x, *table, layout))
    assert not calls
    apply_rotary(torch.randn(3, 4, 37, 24), table, layout)
    assert len(calls) == 1  # too small


@needs_compiler
def test_the_operator_is_known_to_tracers() -> None:
    table = lg.Rotary(8, "half").prepare(torch.arange(4))
    x = torch.randn(1, 2, 4, 8)
    op = torch.ops.longitude.rotate.default
    torch.library.opcheck(op, (x, *table, True), test_utils=("test_schema", "test_faketensor"))
    traced = make_fx(lambda x: op(x, *table, True))(torch.zeros_like(x))
    assert torch.equal(traced(x), rotate_by_formula(x, *table, "half"))


@pytest.mark.parametrize("layout", LAYOUTS)
@torch.no_grad()
def test_few_tokens_of_a_decoding_step(layout: str) -> None:
    """In float32 and float64, on any memory."""
    x = torch.randn(2, 3, 1, 6, dtype=torch.float64)
    for dtype, atol in ((torch.float64, 1e-12), (torch.float32, 5e-6)):
        table = lg.Rotary(6, layout).prepare(torch.tensor([3]), dtype=dtype)
        for memory in memories(x.to(dtype)).values():
            close(apply_rotary(memory, table, layout).double(), textbook(x, torch.tensor([3]), layout, 6), atol, 1e-6)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_tables_that_broadcast(layout: str) -> None:
    """One position for all tokens, rows for a single one: the formula's, whatever the shapes."""
    table = lg.Rotary(4, layout).prepare(torch.tensor([3]), dtype=torch.float64)
    x = torch.randn(2, 2, 5, 4, dtype=torch.float64)
    for grad in (True, False):
        with torch.set_grad_enabled(grad):
            close(apply_rotary(x, table, layout), textbook(x, torch.full((5,), 3), layout, 4))
    positions = torch.tensor([[0, 1, 2, 3, 4], [9, 8, 7, 6, 5]])
    rows = lg.Rotary(4, layout).prepare(positions, dtype=torch.float64)
    close(apply_rotary(x[:1], rows, layout), textbook(x[:1].expand(2, -1, -1, -1), positions, layout, 4))
    with pytest.raises(RuntimeError, match="size"):
        apply_rotary(x[:, :, :3], rows, layout)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_function_transforms(route: str, layout: str) -> None:
    table, x = lg.Rotary(4, layout).prepare(torch.arange(3)), torch.randn(5, 2, 3, 4)
    rows = torch.func.vmap(lambda row: apply_rotary(row[None], table, layout)[0])(x)
    torch.testing.assert_close(rows, apply_rotary(x, table, layout))
    torch.testing.assert_close(torch.func.grad(lambda x: apply_rotary(x, table, layout).square().sum())(x), 2 * x)


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
            got = torch.ops.longitude.rotate.default(*given, layout == "half")
            torch.testing.assert_close(got, rotate_by_formula(*given, layout), equal_nan=True)
