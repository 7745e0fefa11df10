"""PaTH by the kernels of flash-linear-attention, which Triton interprets where there is no GPU."""

import warnings
from dataclasses import replace
from importlib import import_module

import pytest
import torch

import longitude as lg
from longitude.attention.backends import BACKENDS, fla, refuses
from tests.attention.backends.one_request import compare, masks, problem

pytest.importorskip("triton", "3.4", reason="the extra gpu, of Linux, is not installed")
pytest.importorskip("fla", reason="flash-linear-attention's kernels, of Linux, are not installed")
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy interprets rows beyond the last one, too
HERE = replace(fla.FLA, devices=None)
ALLOWED = {case: masks(100)[case] for case in ("causal", "packed")}
ALLOWED["padded before"] = lg.Causal() & lg.Padding(torch.arange(100) >= torch.tensor([[30], [47]]))


@pytest.fixture(autouse=True)
def _as_it_needs(monkeypatch):
    """No choice of blocks by their time, which only a GPU has; atomic additions are allowed."""
    from triton.runtime.autotuner import Autotuner

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of no GPU
        import_module("fla.ops.path_attn")
    if not torch.cuda.is_available():
        monkeypatch.setattr(Autotuner, "_bench", lambda self, *args, config, **meta: [1.0, 1.0, 1.0])
    torch.use_deterministic_algorithms(False)
    yield
    torch.use_deterministic_algorithms(True, warn_only=torch.cuda.is_available())


@pytest.mark.one_in(15)
@pytest.mark.parametrize("kv_heads", [2, 1])
@pytest.mark.parametrize("case", ["causal", "packed", "padded before"])
@pytest.mark.parametrize("names", ["path", "path+fox"])
def test_same_answer_and_gradients(names, case, kv_heads):
    """To what float16 leaves of products of up to 100 reflections."""
    r, wanted = problem(100, 100, names=names, mask=ALLOWED[case], heads=2, kv_heads=kv_heads, dtype=torch.float16)
    assert refuses(HERE, r) is None
    compare(fla.run, r, wanted, tolerance=1e-2)


@pytest.mark.slow
def test_the_numbers_of_float16_are_no_reason_to_miss_a_wrong_formula():
    """What another strength of the reflections, or no gate, would change is far above the tolerance."""
    r, _ = problem(100, 100, names="path", heads=2, kv_heads=1, dtype=torch.float16)
    weaker = replace(r, terms=tuple(replace(term, b=0.9 * term.b) for term in r.terms))
    ours, other = fla.run(r), fla.run(weaker)
    assert (ours - other).abs().max() > 2e-2 * ours.abs().max()


@pytest.mark.parametrize(
    ("r", "why"),
    [
        (lambda: problem(20, 20, names="alibi")[0], "does not support OffsetBias"),
        (lambda: problem(20, 20, names="path")[0], "not in torch.float32"),
        (lambda: problem(20, 20, names="fox", dtype=torch.float16)[0], "no transport"),
        (lambda: problem(20, 20, names="path", dv=24, dtype=torch.float16)[0], "head_dim 16, 32, 64, 128"),
        (lambda: problem(20, 20, names="path", mask=lg.Window(5), dtype=torch.float16)[0], "Causal()"),
        (lambda: problem(120, 120, names="path", mask=masks(120)["padded"], dtype=torch.float16)[0], "padding after"),
        (lambda: problem(5, 20, names="path", dtype=torch.float16)[0], "no cache"),
    ],
)
def test_refusals(r, why):
    assert why in refuses(HERE, r())


def test_it_is_refused_where_deterministic_algorithms_are_asked_for_and_elsewhere():
    r, _ = problem(20, 20, names="path", dtype=torch.float16)
    assert refuses(BACKENDS["fla"], r) == "it runs on cuda, not on cpu"
    torch.use_deterministic_algorithms(True, warn_only=torch.cuda.is_available())
    assert "not deterministic" in refuses(HERE, r)


def test_no_second_derivative():
    r, (q, *_) = problem(20, 20, names="path", dtype=torch.float16)
    with pytest.raises(RuntimeError, match="no second derivatives"):
        torch.autograd.grad(fla.run(r).sum(), q, create_graph=True)


def test_without_the_package(monkeypatch):
    monkeypatch.setattr(fla, "find_spec", lambda name: None)
    r, _ = problem(20, 20, names="path", dtype=torch.float16)
    assert "pip install flash-linear-attention" in refuses(HERE, r)
