"""Attention without a bias in our loop: chosen by a committed table, equal to the reference, and never where torch knows more."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

import longitude as lg
from longitude.attention.backends import BACKENDS, routes
from longitude.attention.backends.table import band
from tests.support import printed

HEADS, DIM = 8, 24
ALL = {f"{name} {dtype}": {"32": 16} for name in ("forward", "training") for dtype in ("float32", "bfloat16")}
compiled = pytest.mark.skipif(not band.available(torch.float32), reason="needs a C compiler")


def qkv(length=40, dtype=torch.float32, learns=False, kv_heads=HEADS, batch=2):
    generator = torch.Generator().manual_seed(length)
    made = (torch.randn(batch, length, h, DIM, generator=generator) for h in (HEADS, kv_heads, kv_heads))
    return tuple(x.to(dtype).transpose(1, 2).requires_grad_(learns) for x in made)


def chosen(*three, **arguments):
    return next(v.backend for v in lg.explain(*three, **arguments) if v.chosen)


# ---- the table -------------------------------------------------------------------------------------------------------
def test_the_committed_table_is_of_known_work_and_measured():
    table = json.loads(Path(routes.__file__).with_name("routes.json").read_text())
    assert {"avx512", "avx512 amx", "avx2"} == table.keys()
    known = {f"{what}{mask}" for what in ALL for mask in ("", " all pairs", " causal")}
    for own in table.values():
        assert own["measured"] and own["shortest"].keys() <= known
        for by_threads in own["shortest"].values():
            for threads, by_dim in by_threads.items():
                assert int(threads) >= 1
                assert all(int(dim) > 0 and (n is None or n >= 16) for dim, n in by_dim.items())


@compiled
def test_what_was_not_measured_is_never_guessed_better(monkeypatch, tmp_path):
    """More threads take the row of fewer, larger head_dims none; another processor and pass none."""
    monkeypatch.setattr(routes, "__file__", str(tmp_path / "routes.py"))
    rows = {"2": {"32": 64, "48": None, "64": 16, "128": None}, "4": {"64": 32}}
    (tmp_path / "routes.json").write_text(json.dumps({"x": {"shortest": {"forward float32": rows}}}))
    of = routes.routes_of.__wrapped__
    assert of("x", 1) == {"forward float32": {}} and of("y", 8) == {}
    assert of("x", 3) == {"forward float32": rows["2"]} and of("x", 9) == {"forward float32": rows["4"]}
    with routes.repeated(of("x", 2)):
        found = [routes.shortest("forward float32", "causal", str(dim)) for dim in (8, 32, 33, 49, 64, 65, 129)]
        assert found == [64, 64, None, 16, 16, None, None]
        assert routes.shortest("training float32", "causal", "32") is None


@compiled
def test_a_row_of_a_mask_comes_before_one_of_both():
    both, causal = {"32": 64}, {"32": 16}
    with routes.repeated({"forward float32": both, "forward float32 causal": causal}):
        assert routes.shortest("forward float32", "causal", "32") == 16
        assert routes.shortest("forward float32", "all pairs", "32") == 64
        assert chosen(*qkv(40)) == "table" and chosen(*qkv(40), mask=lg.NoMask()) == "sdpa"
    with routes.repeated({"forward float32 causal": causal}):
        assert chosen(*qkv(40)) == "table" and chosen(*qkv(200), mask=lg.NoMask()) == "sdpa"


@compiled
def test_shape_pass_and_dtype_decide():
    with routes.repeated({"forward float32": {"32": 32}}):
        for length, expected in ((31, "sdpa"), (32, "table"), (200, "table")):
            assert chosen(*qkv(length)) == chosen(*qkv(length), mask=lg.NoMask()) == expected
        assert chosen(*qkv(40, torch.bfloat16)) == chosen(*qkv(40, torch.float64)) == "sdpa"
        assert chosen(*qkv(40, learns=True)) == chosen(*qkv(40), dropout=0.1) == "sdpa"
        assert chosen(*(x[:1, :2] for x in qkv(40))) == "sdpa"  # less work than was measured
        assert chosen(*(x[:1, :2] for x in qkv(200))) == "table"
        q, k, v = qkv(64)
        assert chosen(q[:, :, -1:], k, v) == chosen(q[:, :, -20:], k, v, mask=lg.NoMask()) == "sdpa"
        assert (
            chosen(q, k, v[..., :8]) == chosen(q[..., :8], k[..., :8], v) == "table"
        )  # values narrower and wider than keys
        with torch.no_grad():
            assert chosen(*qkv(40, learns=True)) == "table"


@compiled
def test_explain_says_the_row(capsys):
    with routes.repeated(ALL):
        lg.explain(*qkv())
    [line] = [line for line in capsys.readouterr().out.splitlines() if line.startswith("routes")]
    assert f"{routes.processor()}, {torch.get_num_threads()} threads, forward float32 causal, head_dim 24" in line
    assert "sequences of 16 and more (LONGITUDE_ROUTES=0" in line
    lg.explain(*qkv(), encoding=lg.ALiBi(HEADS))
    assert "routes" not in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.one_in(3)
@pytest.mark.parametrize("variable", ["LONGITUDE_ROUTES", "LONGITUDE_COMPILE", None])
def test_one_variable_or_no_compiler_leaves_it_to_torch(variable, monkeypatch):
    code = """
import torch, longitude as lg
from longitude.attention.backends import routes
q = torch.randn(1, 8, 1024, 64)
routes.processor = lambda: "avx512"
print(bool(routes.routes()))
with routes.repeated({"forward float32": {"64": 16}}):
    print(next(v.backend for v in lg.explain(q, q, q) if v.chosen), routes.routes())
"""
    if variable is not None:
        monkeypatch.setenv(variable, "0")
    lines = printed(code).splitlines()
    if variable is not None or not band.available(torch.float32):
        assert lines[0] == "False" and lines[-1] == "sdpa {}"
    else:
        assert lines[0] == "True" and "table" in lines[-1]


# ---- what it computes ------------------------------------------------------------------------------------------------
@compiled
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kv_heads", [HEADS, 2])
@pytest.mark.parametrize("encoding", [None, lg.Rotary(DIM, "half")], ids=["none", "rotary"])
@pytest.mark.parametrize("mask", [lg.Causal(), lg.NoMask()], ids=["causal", "all"])
def test_equals_the_reference_and_torch(mask, encoding, kv_heads, dtype):
    """Output and gradients, of strided inputs, of some of which no gradient is wanted."""
    inputs = qkv(77, dtype, True, kv_heads)
    inputs[1].requires_grad_(False)
    exact = [x.detach().double().requires_grad_(x.requires_grad) for x in inputs]
    wanted = [[x for x in three if x.requires_grad] for three in (inputs, exact)]
    gradient = torch.randn(inputs[0].shape, generator=torch.Generator().manual_seed(1))
    with routes.repeated(ALL):
        assert chosen(*inputs, encoding=encoding, mask=mask) == "table"
        ours = lg.attend(*inputs, encoding=encoding, mask=mask)
    reference = lg.attend(*exact, encoding=encoding, mask=mask, backend="reference")
    assert ours.dtype == dtype
    results = [
        [out, *torch.autograd.grad(out, of, gradient.to(out.dtype))]
        for out, of in zip((ours, reference), wanted, strict=True)
    ]
    tolerance = 2e-5 if dtype == torch.float32 else 0.06
    for got, want in zip(*results, strict=True):
        torch.testing.assert_close(got.double(), want, atol=tolerance, rtol=tolerance)


@compiled
@pytest.mark.parametrize("length", [3, 77])
@pytest.mark.parametrize("encoding", [None, lg.ALiBi(HEADS)], ids=["none", "alibi"])
def test_bfloat16_is_rounded_once_and_to_the_nearest(encoding, length):
    """Of the same numbers, what float32 gives within half a step; NaN stays NaN."""
    narrow = qkv(length, torch.bfloat16, True)
    wide = [x.detach().float().requires_grad_() for x in narrow]
    gradient = torch.randn(narrow[0].shape, generator=torch.Generator().manual_seed(1)).bfloat16()
    (got, *grads), (want, *wanted) = (
        [out, *torch.autograd.grad(out, three, gradient.to(out.dtype))]
        for three in (narrow, wide)
        for out in [lg.attend(*three, encoding=encoding, backend="table")]
    )
    assert ((got.float() - want).abs() <= want.abs() * 2.0**-8 * 1.01 + 1e-6).all()
    for each, exact in zip(grads, wanted, strict=True):  # delta is of an output that was rounded
        torch.testing.assert_close(each.float(), exact, atol=0.03, rtol=0.01)
    lost = narrow[2].detach().clone()
    lost[0, 0, 0, 0] = torch.nan
    assert lg.attend(*narrow[:2], lost, encoding=encoding, backend="table")[0, 0, :, 0].isnan().all()


@compiled
def test_a_call_repeats_bit_for_bit():
    with routes.repeated(ALL):
        inputs = qkv(300, learns=True)
        runs = [torch.autograd.grad(lg.attend(*inputs).square().sum(), inputs) for _ in range(2)]
    assert all(torch.equal(*both) for both in zip(*runs, strict=True))


# ---- where torch's function has rules that ours lacks ------------------------------------------------------------------
WAYS = {
    "grad": lambda *three: torch.func.vjp(lg.attend, *three)[0],
    "compile": torch.compile(lg.attend, backend="eager", fullgraph=True),
}


@compiled
@pytest.mark.parametrize("way", WAYS)
def test_transforms_modes_and_graphs_stay_torchs(way, monkeypatch):
    inputs = qkv()
    expected = torch.nn.functional.scaled_dot_product_attention(*inputs, is_causal=True)

    def never(r):
        raise AssertionError("our loop ran")

    with routes.repeated(ALL), monkeypatch.context() as patched:
        assert chosen(*inputs) == "table"
        patched.setitem(BACKENDS, "table", replace(BACKENDS["table"], run=never))
        torch.testing.assert_close(WAYS[way](*inputs), expected, atol=1e-5, rtol=1e-5)
    torch._dynamo.reset()


@compiled
def test_tensors_without_memory_stay_torchs():
    """Nor those whose operators a mode wants to see, such as one that counts them."""
    with routes.repeated(ALL):
        with FakeTensorMode():
            q = torch.empty(2, HEADS, 40, DIM)
            assert chosen(q, q, q) == "sdpa"
        with FlopCounterMode(display=False):
            assert chosen(*qkv()) == "sdpa"
        assert chosen(*qkv()) == "table"
