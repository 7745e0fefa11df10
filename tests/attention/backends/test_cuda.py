"""On a GPU every backend equals `reference` computed in float64 on the CPU, on the numbers as they were rounded.

Run by `make gpu`; without a GPU two backends are tried on the CPU, and kernels in Triton are interpreted.
"""

from dataclasses import replace

import pytest
import torch

import longitude as lg
from longitude.attention.backends import BACKENDS, refuses
from longitude.attention.backends.triton import backend
from longitude.attention.operation import requests
from longitude.attention.reference import reference
from longitude.positions.composed import compose
from tests.attention.backends.one_request import HEADS, KNOWN, WIDTH, masks
from tests.support import built, close

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
NAMES = ["fire", "fox+t5", "cope"]
NAMES += ["nope", "rope", "alibi", "t5", "kerple_log", "shaw", "fox", "path"] if DEVICE == "cuda" else []
MASKS = ["causal", "window", "documents", "padded documents", "none", "prefix"]
TOLERANCE = {torch.float32: 1e-4, torch.float16: 2**-8, torch.bfloat16: 2**-5}
CAUSAL = ("fox", "path", "cope")
TRIED = list(BACKENDS) if DEVICE == "cuda" else ["triton", "chunked"]
"""Backends: on a CPU all have their own tests, and these show that this file works."""
HALF = torch.float16, torch.bfloat16
pytestmark = [pytest.mark.gpu, pytest.mark.slow]


def here(backend):
    """As it is declared; interpreted kernels run on a CPU, where products of bfloat16 are wrong."""
    if backend.name == "triton" and DEVICE == "cpu":
        return replace(backend, devices=None, dtypes=(torch.float16,))
    return backend


def same(name, encoding_name, mask, dtype, *, rows, keys, head_dim=16, kv_heads=2):
    """The output and the gradients of inputs and parameters; skipped where the backend refuses."""
    known = KNOWN | {"num_kv_heads": kv_heads, "head_dim": head_dim}
    exact = built(encoding_name, known).to(dtype).double()
    shapes = (2, HEADS, rows, head_dim), (2, kv_heads, keys, head_dim), (2, kv_heads, keys, head_dim), (2, keys, WIDTH)
    inputs = [torch.randn(shape).to(dtype).double().requires_grad_() for shape in shapes]
    ours = built(encoding_name, known).to(DEVICE, dtype)
    copies = [x.detach().to(DEVICE, dtype).requires_grad_() for x in inputs]

    def request(encoding, tensors, mask):
        q, k, v, x = tensors
        (part,) = requests(q, k, v, encoding, compose(encoding).context(x)[0], mask)
        return part.request

    r = request(ours, copies, masks_on(DEVICE, keys)[mask])
    if (why := refuses(here(BACKENDS[name]), r)) is not None:
        pytest.skip(why)
    theirs, _ = reference(request(exact, inputs, masks_on("cpu", keys)[mask]))
    out = BACKENDS[name].run(r)
    assert out.dtype == dtype and out.device.type == DEVICE
    close(out.double().cpu(), theirs, TOLERANCE[dtype] * theirs.abs().max().item())
    direction = torch.randn(theirs.shape, dtype=torch.float64).to(dtype)
    options = {"allow_unused": True, "materialize_grads": True}
    got = torch.autograd.grad(out, [*copies, *ours.parameters()], direction.to(DEVICE), **options)
    want = torch.autograd.grad(theirs, [*inputs, *exact.parameters()], direction.double(), **options)
    for a, b in zip(got, want, strict=True):
        close(a.double().cpu(), b, 5 * TOLERANCE[dtype] * (1 + b.abs().max().item()))


def masks_on(device, keys):
    with torch.device(device):
        return masks(keys)


def cases(names):
    return [(name, mask) for name in names for mask in MASKS if mask in MASKS[:4] or not name.startswith(CAUSAL)]


@pytest.mark.skipif(DEVICE == "cpu", reason="minutes, interpreted")
@pytest.mark.parametrize("dtype", HALF, ids=str)
@pytest.mark.parametrize("head_dim", [32, 64, 100, 128])
@pytest.mark.parametrize(("encoding", "mask"), cases(["nope", "t5", "fox+t5"]))
def test_kernels_over_many_blocks(encoding, mask, head_dim, dtype):
    """Of the size that the chip takes, several in each direction, none of them full."""
    same("triton", encoding, mask, dtype, rows=515, keys=515, head_dim=head_dim)
    if mask == "causal" and encoding != "fox+t5":
        same("triton", encoding, mask, dtype, rows=131, keys=700, head_dim=head_dim, kv_heads=1)


@pytest.mark.skipif(DEVICE == "cpu", reason="CUDA graphs")
@pytest.mark.parametrize("name", ["nope", "t5", "fox"])
def test_a_call_is_captured_in_a_cuda_graph(name):
    """Nothing waits for the device: a replay computes what a call does."""
    q, k, v, x = (
        torch.randn(shape, device=DEVICE, dtype=torch.bfloat16)
        for shape in [(2, HEADS, 300, 64)] * 3 + [(2, 300, WIDTH)]
    )
    encoding = built(name, KNOWN | {"head_dim": 64}).to(DEVICE, torch.bfloat16)
    columns = compose(encoding).context(x)[0]
    call = torch.no_grad()(lambda: lg.attend(q, k, v, encoding=encoding, context=columns, backend="triton"))
    aside = torch.cuda.Stream()
    aside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(aside):
        for _ in range(3):
            call()
    torch.cuda.current_stream().wait_stream(aside)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = call()
    for each in (q, k, v):
        each.copy_(torch.randn_like(each))
    graph.replay()
    assert torch.equal(out, call())


@pytest.mark.parametrize("name", ["t5", "fox", "fire"])
def test_the_same_bits_ten_times(name):
    """Of many blocks, several heads and sequences, while the device has other work."""
    size = (2, HEADS, 2048 if DEVICE == "cuda" else 40, 64)
    dtype = HALF[DEVICE == "cuda"]
    q, k, v = (torch.randn(size, dtype=dtype).to(DEVICE).requires_grad_() for _ in range(3))
    encoding = built(name, KNOWN | {"head_dim": 64}).to(DEVICE, dtype)
    columns = compose(encoding).context(torch.randn(2, size[2], WIDTH, dtype=dtype, device=DEVICE))[0]
    columns = {key: x.detach().requires_grad_() for key, x in columns.items()}
    (part,) = requests(q, k, v, encoding, columns)

    def once():
        out = backend.attention(part.request)[0]
        wanted = [q, k, v, *columns.values(), *encoding.parameters()]
        return [out, *torch.autograd.grad(out.square().sum(), wanted, allow_unused=True)]

    first = once()
    for _ in range(9 if DEVICE == "cuda" else 1):
        for one, other in zip(first, once(), strict=True):
            assert one is other is None or torch.equal(one, other)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("name", TRIED)
@pytest.mark.parametrize(("encoding", "mask"), cases(NAMES))
def test_same_answer_and_gradients(encoding, mask, name, dtype):
    if encoding == "path" and dtype in HALF:
        pytest.skip("a product of reflections multiplies the rounding of its columns")
    same(name, encoding, mask, dtype, rows=70, keys=70)
