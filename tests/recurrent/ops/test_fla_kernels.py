"""The bridge to flash-linear-attention, against a stand-in with its signatures and its layout; and its kernels, interpreted."""

import builtins
import warnings
from importlib import import_module
from types import SimpleNamespace

import pytest
import torch

from longitude.recurrent import delta, gated_delta_rule, retention, rwkv6, rwkv7, ssd
from longitude.recurrent.ops import decayed, fla_kernels as kernels, matrix_state


def test_when_a_kernel_serves(monkeypatch):
    def serve(shape=(2, 4, 128, 64), dtype=torch.bfloat16, cuda=True, mode="chunked", reset=None):
        x = SimpleNamespace(shape=shape, dtype=dtype, is_cuda=cuda)
        return kernels.serve(x, x, mode, reset)  # type: ignore[arg-type]

    monkeypatch.setattr(kernels, "installed", lambda: True)
    assert not serve()  # tests ask for deterministic algorithms, which it does not promise
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: False)
    monkeypatch.setattr(torch, "get_float32_matmul_precision", lambda: "highest")
    assert serve() and serve(dtype=torch.float16)
    assert not serve(cuda=False)
    assert not serve(mode="recurrent") and not serve(mode="parallel")
    assert not serve(reset=torch.ones(2, 128, dtype=torch.bool))
    assert not serve(shape=(2, 4, 1, 64))  # a step is a step
    assert not serve(shape=(2, 4, 128, 65)) and not serve(shape=(2, 4, 128, 512))
    assert not serve(dtype=torch.float64) and not serve(dtype=torch.float32)
    monkeypatch.setattr(torch, "get_float32_matmul_precision", lambda: "high")
    assert serve(dtype=torch.float32) and not serve(dtype=torch.float64)
    monkeypatch.setattr(kernels, "installed", lambda: False)
    assert not serve()


# ---- the kernels themselves, interpreted ----------------------------------------------------------------------------------
@pytest.fixture
def interpreted(monkeypatch):
    """No choice of blocks by time; -> the bridges that were called.

    Compiled, the number of a loop is a tensor; interpreted, it is an int without `.to`. Rows are chosen without tl.gather, which
    their own name for it keeps from being interpreted.
    """
    pytest.importorskip("fla", reason="flash-linear-attention's kernels, of Linux, are not installed")
    interpreter = pytest.importorskip("triton.runtime.interpreter", reason="the extra gpu, of Linux, is not installed")
    if torch.cuda.is_available():
        pytest.skip("interpreted where there is no GPU")

    def numbers(*ends):
        return map(interpreter._implicit_cvt, builtins.range(*map(int, ends)))

    dplr = "generalized_delta_rule.dplr.chunk"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of no GPU
        for name in ("common.chunk_h", "rwkv6.chunk", "common.chunk_delta_h", f"{dplr}_h_fwd", f"{dplr}_h_bwd"):
            monkeypatch.setattr(import_module(f"fla.ops.{name}"), "range", numbers, raising=False)
        for name in (f"{dplr}_A_fwd", f"{dplr}_A_bwd"):
            monkeypatch.setattr(import_module(f"fla.ops.{name}"), "IS_GATHER_SUPPORTED", False)
    autotuner = import_module("triton.runtime.autotuner").Autotuner
    monkeypatch.setattr(autotuner, "_bench", lambda self, *args, config, **meta: [1.0, 1.0, 1.0])
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: False)
    calls = []
    bridges = {
        decayed: "decayed_by_kernel",
        delta: "delta_by_kernel",
        import_module("longitude.recurrent.rwkv7"): "rwkv7_by_kernel",
    }
    monkeypatch.setattr(matrix_state, "serve", lambda q, v, mode, reset: mode == "chunked" and reset is None)
    for module, name in bridges.items():
        theirs = getattr(module, name)
        monkeypatch.setattr(module, name, lambda *a, name=name, theirs=theirs: (calls.append(name), theirs(*a))[1])
    return calls


def same_as_steps(call, inputs, calls, bridge):
    """Outputs, the last state and all gradients: call(mode) by their kernels equals one token after the other."""

    def results(mode):
        out, last = call(mode)
        direction = torch.linspace(-1, 1, out.numel()).view_as(out)
        return [out, last, *torch.autograd.grad((out * direction).sum() + last.sin().sum(), inputs)]

    wanted = results("recurrent")
    assert not calls
    given = results("chunked")
    assert calls == [bridge]
    for ours, theirs in zip(wanted, given, strict=True):
        torch.testing.assert_close(theirs, ours, rtol=1e-4, atol=1e-4 * ours.abs().max().item())


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy interprets rows beyond the last one, too
@pytest.mark.parametrize("name", ["retention", "ssd", "rwkv6"])
def test_decayed_states_by_their_kernels(interpreted, name):
    """Of two chunks, with a state and padding."""
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 1, 1, 70, 16)
    log_w, state = -torch.rand(1, 1, 70, 16), torch.randn(1, 1, 16, 16)
    formula, tokens = {
        "retention": (retention, (q, k, v)),
        "ssd": (ssd, (v, log_w[..., 0], k, q)),
        "rwkv6": (rwkv6, (q, k, v, log_w, torch.randn(1, 16))),
    }[name]
    inputs = [x.clone().requires_grad_() for x in (*tokens, state)]
    valid = torch.arange(70)[None] > 4

    def call(mode):
        return formula(*inputs[:-1], mode=mode, state=inputs[-1], valid=valid)

    same_as_steps(call, inputs, interpreted, "decayed_by_kernel")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("by_channel", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_the_delta_rule_by_their_kernels(interpreted, by_channel):
    """Of two chunks with grouped heads and padding."""
    torch.manual_seed(0)
    q, k = torch.randn(2, 1, 1, 70, 16)
    k = torch.nn.functional.normalize(k, dim=-1)
    v, state, beta = torch.randn(1, 2, 70, 16), torch.randn(1, 2, 16, 16), torch.rand(1, 2, 70)
    g = -torch.rand(1, 2, 70, 16) if by_channel else -torch.rand(1, 2, 70)
    valid = torch.arange(70)[None] > 4
    inputs = [x.requires_grad_() for x in (q, k, v, g, beta, state)]

    def call(mode):
        return gated_delta_rule(*inputs[:5], mode=mode, state=inputs[5], valid=valid)

    same_as_steps(call, inputs, interpreted, "delta_by_kernel")


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's; and theirs, that float32 is slow
@pytest.mark.slow
@pytest.mark.parametrize("padded", [True, False])
def test_rwkv7_by_their_kernel(interpreted, padded):
    """Of three chunks; keys and values of other widths, a state and padding, or neither; decays down to e^-30."""
    torch.manual_seed(0)
    r, k, kappa = torch.randn(3, 2, 1, 37, 16)
    kappa = torch.nn.functional.normalize(kappa, dim=-1)
    v, a, log_w = torch.randn(2, 1, 37, 24), torch.rand(2, 1, 37, 16), -torch.rand(2, 1, 37, 16)
    log_w[..., 5] *= 30
    inputs = [x.requires_grad_() for x in (r, log_w, k, v, kappa, a)]
    options = {"valid": (torch.arange(37) > torch.tensor([[4], [0]]))} if padded else {}
    if padded:
        inputs.append(torch.randn(2, 1, 16, 24).requires_grad_())

    def call(mode):
        return rwkv7(*inputs[:6], mode=mode, state=inputs[6] if padded else None, **options)

    same_as_steps(call, inputs, interpreted, "rwkv7_by_kernel")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_rwkv7_in_half_precision_by_their_kernel(interpreted):
    """Decays and the state stay float32, as the mixer makes them."""
    torch.manual_seed(0)
    r, k, v, kappa = torch.randn(4, 1, 2, 21, 16).half()
    kappa = torch.nn.functional.normalize(kappa.float(), dim=-1)
    a, log_w = torch.rand(2, 1, 2, 21, 16)
    want, _ = rwkv7(r, -log_w, k, v, kappa, a, mode="recurrent")
    out, state = rwkv7(r, -log_w, k, v, kappa, a)
    assert interpreted == ["rwkv7_by_kernel"] and out.dtype == torch.float16 and state.dtype == torch.float32
    torch.testing.assert_close(out, want, rtol=0, atol=1e-2 * want.abs().max().item())
