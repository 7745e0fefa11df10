"""The kernels in Triton equal `reference`, interpreted where there is no GPU (tests/conftest.py), compiled where there is one."""

import math
import mmap
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial

import pytest
import torch

import longitude as lg
from longitude.attention.backends.operators import present
from longitude.attention.backends.triton import backend, launch
from longitude.attention.reference import reference
from longitude.positions.rotation import Angles
from tests.attention.backends.one_request import compare, masks, problem, small_blocks_of
from tests.support import LargestTensor, Reads, close

pytest.importorskip("triton", "3.4", reason="the extra gpu, of Linux, is not installed")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
NAMES = ["fox+t5", "nope", "rope", "alibi", "t5", "kerple_log", "sandwich", "fox", "alibi+t5", "fire"]
FEW = partial(problem, heads=2, kv_heads=1)
"""The interpreter takes as long as there are heads."""
MASKS = [
    "padded documents", "causal", "window", "documents", "padding", "none", "documents both ways", "band", "band and causal",
    "prefix", "prefix of each row",
]  # fmt: skip


@pytest.fixture(autouse=True)
def _on_the_gpu():
    """All that a test makes, masks too."""
    with torch.device("cuda") if torch.cuda.is_available() else nullcontext():
        yield


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch):
    if DEVICE == "cpu":
        monkeypatch.setattr(launch, "blocks_of", small_blocks_of)


def run(r):
    """In half precision numbers of one sequence are many times nearer than these."""
    return backend.attention(r)[0]


def cases():  # a gate has no meaning for the future, nor do the products of interpreted bfloat16
    return [(names, case) for names in NAMES for case in MASKS if "fox" not in names or MASKS.index(case) < 5]


@pytest.mark.one_in(100)
@pytest.mark.parametrize(("names", "case"), cases())
def test_same_answer_and_gradients(names, case):
    """As float64, of queries, keys, values, tokens and parameters; several lengths of the keys, grouped heads."""
    draw = partial(FEW, 37, 37, names=names, mask=masks(37)[case])
    ours = draw()
    compare(run, *ours, tolerance=3e-5, exact=draw(dtype=torch.float64, values=ours[1]))


@pytest.mark.skipif(DEVICE == "cuda", reason="blocks are the chip's")
@pytest.mark.slow
@pytest.mark.parametrize("queries", [64, 16])
def test_squares_of_a_block(queries, monkeypatch):
    """The table's gradient is summed along diagonals of one square, or of four on top of each other; of several blocks.

    Each kernel pads the table for its own blocks: those of the gradient of keys are wider here, as on some chips.
    """
    of_kernel = {"diagonals": launch.Blocks(queries, 16, 4, 1)}
    monkeypatch.setattr(launch, "blocks_of", lambda kernel, x: of_kernel.get(kernel, launch.Blocks(16, 32, 4, 1)))
    compare(run, *FEW(35, 47, names="t5", mask=lg.Window(20)), tolerance=3e-5)


@pytest.mark.slow
@pytest.mark.parametrize(("rows", "keys"), [(1, 1), (1, 40), (17, 70), (70, 17), (64, 64), (33, 95)])
def test_shapes(rows, keys):
    """Queries at the end of the keys, more queries than keys, one; heads that share keys or not, values of another width."""
    for kv_heads, dv in ((1, 5), (4, 24)):
        mask = lg.NoMask() if rows > keys else lg.Causal()
        compare(run, *problem(rows, keys, names="alibi+t5", mask=mask, kv_heads=kv_heads, dv=dv), tolerance=3e-5)


def fire_with_ends(rows, keys, *, future=False, **options):
    """FIRE whose ends of pieces are crossed, with a threshold within the text, so that queries have rates of their own."""
    mask = lg.NoMask() if future else lg.Causal()
    r, wanted = FEW(rows, keys, names="fire", mask=mask, **options)
    of = {tuple(p.shape): p for p in wanted[4:]}
    w1, b1 = of[32, 1], of[(32,)]
    with torch.no_grad():
        w1.copy_(torch.linspace(-3, 3, 32, dtype=w1.dtype)[:, None])
        w1[7:9] = 0
        b1.copy_(-w1[:, 0] * torch.rand(32).to(w1))
        c, multiplier = (p for p in wanted[4:] if p.shape == (1,))
        c.fill_(2.0)
        multiplier.fill_(9 / 512)
    return r, wanted


@pytest.mark.slow
@pytest.mark.parametrize(("rows", "keys", "future"), [(37, 37, False), (33, 95, False), (40, 40, True), (1, 50, False)])
def test_ends_of_pieces(rows, keys, future):
    """Several in a block, none, and more queries in front of the keys than behind; all gradients."""
    r, wanted = fire_with_ends(rows, keys, future=future, dv=24)
    terms = backend.inputs_of(r).terms
    assert terms.rates.unique().numel() >= min(rows, 20) and terms.curves.shape[2] == 33
    multiplier = [p for p in wanted[4:] if p.shape == (1,)][1]
    compare(run, r, [x for x in wanted if x is not multiplier], tolerance=3e-5)
    compare(run, r, [*wanted[:4], multiplier], tolerance=4e-5)  # a difference of large sums, off by 3.1e-5


@pytest.mark.slow
def test_ends_of_pieces_at_positions_of_their_own():
    """The second sequence is elsewhere, which changes its rates alone."""
    given = torch.stack([torch.arange(37), torch.arange(37) + 300])
    r, wanted = FEW(37, 37, names="fire", q_positions=given, k_positions=given)
    with torch.no_grad():
        _, multiplier = (p for p in wanted[4:] if p.shape == (1,))
        multiplier.fill_(9 / 512)
    assert (backend.inputs_of(r).terms.rates.diff(dim=0) < 0).all()
    compare(run, r, wanted, tolerance=3e-5)


@torch.no_grad()
@pytest.mark.parametrize("names", ["fox", pytest.param("fire", marks=pytest.mark.slow)])
def test_a_decoding_step_reads_no_number(names):
    """Neither what is before the kernels nor what launches them: a CUDA graph captures it. Rows of a cache, one token."""
    from longitude.positions.gpu.rotate import rotate

    r, _ = FEW(1, 40, names=names, dtype=torch.float16)
    tables = torch.rand(2, 1, 8)
    with Reads() as reads:
        assert backend.refusal(r) is None
        launch.forward(backend.inputs_of(r))
        rotate((r.q, r.k[:, :, :1]), Angles(tables[0], tables[1]), "half")
        assert reads.count == 0
        r.q.sum().item()
    assert reads.count == 1


@pytest.mark.slow
def test_the_logsumexp_and_its_gradient():
    """Of a window, packed documents and padding; a query without keys has -inf and zeros, and no gradient."""
    r, wanted = FEW(37, 37, names="alibi+t5", mask=masks(37)["padded documents"], dv=24)
    with torch.no_grad():
        found, want = backend.attention(r), reference(r.with_lse())
    close([*found], [x.float() for x in want], 1e-5)
    assert (found[1] == -math.inf).any()

    def grads(function):
        out, lse = function(r.with_lse())
        loss = out.square().sum() + lse.masked_fill(lse == -math.inf, 0.0).sin().sum()
        return torch.autograd.grad(loss, wanted, allow_unused=True, materialize_grads=True)

    close(grads(backend.attention), grads(reference), 2e-4)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:(invalid value|divide by zero) encountered")  # numpy's, of the interpreter
def test_numbers_that_are_not_finite():
    """NaN in a key, or a score of inf, shows in every query that attends to it; a query of -inf scores has none to divide by."""
    r, _ = FEW(40, 40, names="alibi", mask=lg.Window(9))
    with torch.no_grad():
        for value in (math.nan, math.inf):
            k = r.k.clone()
            k[0, :, 20] = value
            lost = ~run(replace(r, k=k)).isfinite().all(-1)
            assert lost[0, :, 20:29].all() and not lost[1].any() and not lost[0, :, :8].any()
        q = torch.full_like(r.q, -math.inf)
        assert run(replace(r, q=q, k=r.k.abs())).isnan().all()


@torch.no_grad()
def launched(x):
    """Forward and backward as the operators run them: a mode around an operator sees nothing of what is in it."""
    out, lse = launch.forward(x)
    launch.backward(x, torch.ones_like(out), None, out, lse, learned=True)


@pytest.mark.slow
@pytest.mark.parametrize("names", ["t5", "fire"])
def test_memory_is_linear(names):
    """Nothing of pairs, the workspace of the table's gradient included."""
    taken = []
    for length in (16, 32, 64):
        r, _ = FEW(length, length, names=names, dv=1)
        with LargestTensor() as largest:
            launched(backend.inputs_of(r))
        taken.append(largest.elements)
    assert taken[2] < 2.2 * taken[1] < 5 * taken[0]


def test_many_sequences_on_any_gpu(monkeypatch):
    """A grid's second and third dimension end at 65535; each launch is on the device of its tensors. Nothing is computed."""
    from longitude.attention.backends.triton import kernels
    from longitude.positions.gpu import rotate

    grids, devices = [], []

    class Recorder:
        def __getitem__(self, grid):
            grids.append(grid)
            assert len(devices) % 2 == 1, "on whichever device is torch's current one"
            return lambda *positional, **named: None

    @contextmanager
    def device_of(x):
        devices.append(x)
        yield
        devices.append(x)

    for kernel in launch.KERNELS:
        monkeypatch.setattr(kernels, kernel, Recorder())
    monkeypatch.setattr(rotate, "kernel", Recorder())
    monkeypatch.setattr(torch.cuda, "device_of", device_of)
    r, _ = FEW(3, 3, names="nope")
    x = backend.inputs_of(r)
    x = x._replace(**{name: getattr(x, name)[:1].detach().expand(70_000, -1, -1, -1) for name in "qkv"})
    launched(x)
    rotate.rotate((x.q, x.k), Angles(torch.ones(3, 8), torch.ones(3, 8)), "half")
    assert len(grids) == 6 and all(max(grid[1:], default=1) < 2**16 for grid in grids)
    assert sum(grid[2] for grid in grids if len(grid) == 3) == 2 * 70_000


@pytest.mark.slow
def test_sequences_in_several_launches(monkeypatch):
    """As many more than a grid takes are."""
    r, _ = FEW(20, 20, names="t5", mask=masks(20)["documents"])
    x = backend.inputs_of(r)
    want = everything(x)
    monkeypatch.setattr(launch, "MOST", 1)
    assert launch.launches(2) == [(0, 1), (1, 1)]
    assert all(torch.equal(a, b) for a, b in zip(everything(x), want, strict=True))


@pytest.mark.slow
@pytest.mark.skipif(DEVICE == "cuda", reason="the memory is the host's")
def test_vectors_far_apart():
    """Beyond 2^31 numbers offsets are counted in 64 bits. Only what is read takes memory; other addresses are there, too."""
    distance, rows, before = 2**24 - 8, 130, 2**32
    size = 2 * (before + rows * distance)
    pages = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x4000)  # MAP_NORESERVE
    numbers = torch.frombuffer(pages, dtype=torch.float16)
    r, _ = FEW(rows, rows, names="nope", mask=lg.Window(20), dtype=torch.float16)
    x = backend.inputs_of(r)
    x = x._replace(**{name: getattr(x, name).detach()[:1, :1] for name in "qkv"})
    apart = x._replace(**{
        name: numbers.as_strided(y.shape, (1, 1, distance, 1), before + 64 * n).copy_(y)
        for n, (name, y) in enumerate(zip("qkv", x[:3], strict=True))
    })  # fmt: skip
    assert launch.far(apart) and not launch.far(x)
    assert all(torch.equal(a, b) for a, b in zip(everything(apart), everything(x), strict=True))


@torch.no_grad()
def everything(x):
    """Output, logsumexp and gradients."""
    out, lse = launch.forward(x)
    grads = launch.backward(x, torch.ones_like(out), None, out, lse, learned=True)
    return [out, lse, grads.q, grads.k, grads.v, *present(grads.terms).values()]


@pytest.mark.slow
def test_strided_inputs():
    """As models make them: [B, L, H, D] with the heads brought forward; shared heads; numbers of a vector apart."""
    r, _ = FEW(40, 40, names="alibi")
    want = run(r)
    for change in (
        lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
        lambda x: x.mT.contiguous().mT,
        lambda x: torch.cat([x, x], 3)[..., : x.shape[3]],
    ):
        close(run(replace(r, q=change(r.q), k=change(r.k), v=change(r.v))), want, 1e-6)
    shared = r.k[:, :1].expand_as(r.k)
    close(run(replace(r, k=shared)), run(replace(r, k=shared.contiguous())), 1e-6)
