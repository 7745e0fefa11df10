"""A kernel reads memory by the sizes of its tensors: one that disagrees with the others raises before anything is read.

test_sanitizers.py runs the same calls under the sanitizer of addresses, which finds what a missing check lets through.
"""

from collections.abc import Callable, Iterator
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from longitude.attention.backends.operators import Inputs
from longitude.attention.backends.table import band
from longitude.attention.backends.table.backend import DecodingStep
from longitude.attention.backends.triton import launch
from longitude.errors import UsageError
from longitude.positions.rotation import Angles, compiled, rotate_in_one_pass
from longitude.recurrent.ops import c_loops
from tests.support import random

B, H, G, Q, K, D, V, L, N = 2, 4, 2, 5, 7, 6, 3, 9, 20
SPANS = torch.tensor([[0, 0, 3, 0, 4], [1, 2, 5, 3, 7]])
BEYOND = (2, 0, 1, 0, 1), (-1, 0, 1, 0, 1), (0, 3, 2, 0, 1), (0, 0, 6, 0, 1), (0, 0, 1, 0, 8), (0, 0, 1, -1, 2)
HEADS = {"q": (B, H, Q, D), "k": (B, G, K, D), "v": (B, G, K, V)}
OF_OUT = {"grad": (B, H, Q, V), "grad_lse": (B, H, Q), "out": (B, H, Q, V)}
TABLE, CURVES = {"table": (H, Q + K - 1)}, {"curves": (H, 3, 2), "rates": (B, 1, Q)}
VECTORS = {"key_vectors": (H, 9, D), "value_vectors": (H, 9, V)}
LEVELS = {"q_level": (B, H, Q), "k_level": (B, H, K)}
F64_LEVELS = {name: random(*shape) for name, shape in LEVELS.items()}


class Case(NamedTuple):
    """A kernel: its tensors, or their shapes in float32; how it is called; and dimensions and dtypes that may have any value."""

    tensors: dict[str, Any]
    run: Callable[..., Any]
    free: str = ""


def of_band(**x: Tensor) -> Any:
    """Attention in C, forward; or backward if there is a gradient."""
    backward = [x.pop(name, None) for name in ("grad", "grad_lse", "out", "ends")]
    q, k, v, limits = x.pop("q"), x.pop("k"), x.pop("v"), band.Limits(x.pop("spans", None), low=0)
    inputs = Inputs(q, k, v, band.Terms(**x), limits, 0.3)
    return band.forward(inputs) if backward[0] is None else band.backward(inputs, *backward, learned=True)


def of_decoding(**x: Tensor) -> Any:
    """Decoding in C: the step that a first layer described, called with the tensors of another one."""
    first = [random(*shape, dtype=torch.float32) for shape in ((B, H, 1, D), (B, G, K, D), (B, G, K, V))]
    inputs = Inputs(*first, band.Terms(), band.Limits(low=0), 0.3)
    return DecodingStep(inputs)(SimpleNamespace(**x))


def of_triton(**x: Tensor) -> Any:
    """Attention in Triton, of which only the checks run here."""
    backward = [x.pop(name, None) for name in ("grad", "grad_lse", "out", "lse")]
    of_heads, limits = [x.pop(name) for name in "qkv"], launch.Limits(x.pop("lo"), x.pop("hi"))
    inputs = Inputs(*of_heads, launch.Terms(**x), limits, 0.3)
    return launch.require(inputs, *(backward if backward[0] is not None else ()))


def of_rotation(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> Any:
    run = compiled(torch.float32)
    return run and rotate_in_one_pass(run, (q, k), Angles(cos, sin), "half")


def of_gpu_rotation(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> Any:
    from longitude.positions.gpu import rotate

    return rotate.require_rows("rotation", (q, k), Angles(cos, sin))


def of_loop(name: str, **sizes: int) -> Callable[..., Any]:
    """A recurrent kernel, forward and backward."""

    def run(**x: Tensor) -> Any:
        inputs = [t.requires_grad_() if t.is_floating_point() else t for t in x.values()]
        out = c_loops.Loop.apply(name, sizes, *inputs)
        return *out, *torch.autograd.grad(sum(t.sum() for t in out), [t for t in x.values() if t.requires_grad])

    return run


def of_call(name: str, sizes: tuple[int, ...], blocks: int = 0) -> Callable[..., Any]:
    """Backward of a recurrent kernel alone, whose gradients autograd would check."""
    named = dict(zip(c_loops.KERNELS[name].sizes.split(), sizes, strict=True)) | {"blocks": blocks}
    return lambda **x: c_loops._call(name, 1, named, *x.values())


FLAGS = torch.zeros(B, L, dtype=torch.uint8)
TOKEN, INTERVAL = (B, L, N), torch.zeros(1, Q, dtype=torch.int32)
DELTA = {
    "q": (B, G, L, D), "r": (B, G, L, D), "k": (B, H, L, D), "b": (B, H, L, D), "v": (B, H, L, V), "log_w": (B, H, L, D),
    "keep": FLAGS, "state": (B, H, D, V),
}  # fmt: skip
SCAN = {
    "dt": (B, L, 2, N), "x": (B, L, 2, N), "A": (2, V, N), "B": (B, L, 2, V), "C": (B, L, 2, V), "keep": FLAGS,
    "h": (B, 2, V, N),
}  # fmt: skip
TRITON = HEADS | {"lo": INTERVAL, "hi": INTERVAL}
CASES = {
    "band": Case(HEADS | TABLE | {"spans": SPANS}, of_band, "spans.0 v.3"),
    "band levels": Case(HEADS | F64_LEVELS, of_band, "v.3"),
    "levels backward": Case(HEADS | F64_LEVELS | OF_OUT | {"ends": (2, B, H, Q)}, of_band, "grad_lse.dtype"),
    "band vectors": Case(HEADS | TABLE | VECTORS, of_band, "key_vectors.1 value_vectors.1"),
    "band counts": Case(HEADS | {"logits": (B, H, Q, 3)}, of_band, "logits.3 v.3"),
    "band curves": Case(HEADS | TABLE | CURVES, of_band, "curves.2 v.3"),
    "band backward": Case(
        HEADS | TABLE | VECTORS | OF_OUT | {"ends": (2, B, H, Q)}, of_band, "key_vectors.1 value_vectors.1 grad_lse.dtype"
    ),
    "counts backward": Case(
        HEADS | {"logits": (B, H, Q, 3)} | OF_OUT | {"ends": (2, B, H, Q)}, of_band, "logits.3 grad_lse.dtype"
    ),
    "curves backward": Case(
        HEADS | TABLE | CURVES | OF_OUT | {"ends": (2, B, H, Q)}, of_band, "curves.2 grad_lse.dtype"
    ),
    "decoding": Case(HEADS | {"q": (B, H, 1, D)}, of_decoding),
    "rotation": Case(
        {"q": (B, H, L, 8), "k": (B, G, L, 9), "cos": (B, 1, L, 4), "sin": (B, 1, L, 4)}, of_rotation, "q.1 k.1 q.3+ k.3"
    ),
    "delta": Case(DELTA, of_loop("delta.c", early=1, chunk=L)),
    "scan": Case(SCAN, of_loop("scan.c", chunk=4)),
    "diagonal": Case(
        {"u": TOKEN, "r": (2, V, N), "B": (2, V, N), "C": (2, V, N), "flags": FLAGS, "h": (B, 2, V, N)},
        of_loop("diagonal.c", chunk=4),
    ),
    "wkv": Case({"w": (N,), "u": (N,), "k": TOKEN, "v": TOKEN, "flags": FLAGS, "h": (3, B, N)}, of_loop("wkv.c")),
    "delta backward": Case(
        DELTA | {"gout": (B, H, L, V), "glast": (B, H, D, V)} | dict.fromkeys(("gq", "gr", "gk", "gb"), (B, H, L, D))
        | {"gv": (B, H, L, V), "gw": (B, H, L, D), "gfirst": (B, H, D, V)},
        of_call("delta.c", (B, G, L, D, H, V, D, 1, L, 1)),
    ),
    "scan backward": Case(
        SCAN | {"gy": (B, L, 2, N), "glast": (B, 2, V, N), "gdt": (B, L, 2, N), "gx": (B, L, 2, N), "gA": (B, 2, V, N)}
        | {"gB": (B, 2, 2, L, V), "gC": (B, 2, 2, L, V), "gfirst": (B, 2, V, N)},
        of_call("scan.c", (B, L, 2, N, V, 4, 1), blocks=2),
    ),
    "triton": Case(TRITON | TABLE | LEVELS, of_triton, "v.3"),
    "triton curves": Case(TRITON | TABLE | CURVES, of_triton, "curves.2 v.3"),
    "triton backward": Case(TRITON | OF_OUT | {"lse": (B, H, Q)}, of_triton, "grad_lse.dtype"),
    "rotation in triton": Case(
        {"q": (B, H, L, 8), "k": (B, G, L, 9), "cos": (L, 4), "sin": (L, 4)}, of_gpu_rotation, "q.1 k.1 q.3+ k.3"
    ),
}  # fmt: skip


def tensors_of(case: Case) -> dict[str, Tensor]:
    drawn = {name: x if isinstance(x, Tensor) else random(*x, dtype=torch.float32) for name, x in case.tensors.items()}
    return {name: x.clone() if isinstance(x, Tensor) else x for name, x in drawn.items()}


def wrong(case: Case) -> Iterator[tuple[str, dict[str, Tensor]]]:
    """Calls with a tensor that is one longer or shorter in a dimension, has one more, another dtype or a span beyond; named."""
    for name, x in tensors_of(case).items():
        for dim, size in enumerate(x.shape):
            for change in (-1, 1):
                place = f"{name}.{dim}"
                if place not in case.free and not (f"{place}+" in case.free and change > 0):
                    shape = [*x.shape[:dim], size + change, *x.shape[dim + 1 :]]
                    yield f"{place} {change:+}", tensors_of(case) | {name: torch.zeros(shape, dtype=x.dtype)}
        yield f"{name} in one dimension more", tensors_of(case) | {name: x[None]}
        if f"{name}.dtype" not in case.free:
            other = torch.float64 if x.dtype != torch.float64 else torch.int64
            yield f"{name} in another dtype", tensors_of(case) | {name: x.to(other)}
    for gone in ("curves", "rates", "table") if "curves" in case.tensors else ():
        yield f"no {gone}", {name: x for name, x in tensors_of(case).items() if name != gone}
    for span in BEYOND if "spans" in case.tensors else ():
        yield f"the span {span}", tensors_of(case) | {"spans": torch.tensor([span])}


def is_here(name: str) -> bool:
    if "triton" in name:
        return find_spec("triton") is not None
    return band.available(torch.float32)


def raises(case: Case, tensors: dict[str, Tensor]) -> bool:
    try:
        case.run(**tensors)
    except (UsageError, IndexError):
        return True
    return False


@pytest.mark.parametrize("name", CASES)
def test_a_tensor_that_disagrees_raises(name: str) -> None:
    if not is_here(name):
        pytest.skip("the kernel is not here")
    case = CASES[name]
    case.run(**tensors_of(case))
    for what, tensors in wrong(case):
        assert raises(case, tensors), what


@pytest.mark.parametrize("name", [name for name in CASES if "triton" not in name and "backward" not in name])
def test_strides_change_no_number(name: str) -> None:
    if not is_here(name):
        pytest.skip("the kernel is not here")
    case = CASES[name]
    spread = {name: x[..., None].repeat(*[1] * x.dim(), 3)[..., 1] for name, x in tensors_of(case).items()}
    torch.testing.assert_close(case.run(**tensors_of(case)), case.run(**spread))


def run_everything() -> None:
    """Every right and every wrong call of the kernels that are here, for the sanitizer."""
    for name, case in CASES.items():
        if is_here(name):
            for _, tensors in [("", tensors_of(case)), *wrong(case)]:
                raises(case, tensors)
