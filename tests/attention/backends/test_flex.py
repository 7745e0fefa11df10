"""The `flex` backend. Without a GPU: its own functions under a stand-in that reads blocks as FlexAttention is documented to;
FlexAttention uncompiled, with gradients; its graphs; in the slow tier its C++ kernel. What only CUDA shows is at the end."""

import math
import shutil
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.attention.flex_attention as torch_flex
from torch._dynamo.testing import CompileCounter
from torch._subclasses.fake_tensor import FakeTensorMode

import longitude as lg
from longitude.attention.backends import BACKENDS, flex, refuses
from longitude.attention.operation import choose, requests
from longitude.positions.composed import compose
from longitude.testing.memory_use import memory_of
from tests.attention.backends.one_request import DIM, HEADS, compare, masks, problem

NAMES = ["none", "rope", "alibi", "t5", "clipped", "kerple_log", "sandwich", "fox", "alibi+t5", "rope+fox", "fox+t5"]


def pairs():  # a gate has no meaning for the future
    return [(names, case) for names in NAMES for case in list(masks(1))[: 8 if "fox" in names else None]]


# ---- its functions, under a stand-in for FlexAttention ------------------------------------------------------------------
def by_blocks(q, k, v, score_mod, block_mask, scale, enable_gqa):
    """Partial blocks are masked pair by pair, full ones are taken whole, all others are never read."""
    assert enable_gqa or q.shape[1] == k.shape[1]
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    sizes = (*q.shape[:3], k.shape[2])
    b, h, i, j = (torch.arange(n).view([-1 if axis == own else 1 for axis in range(4)]) for own, n in enumerate(sizes))

    def pairs_of(count, indices):
        chosen = torch.arange(indices.shape[-1]) < count[..., None]
        listed = torch.zeros_like(chosen.expand(indices.shape)).scatter(-1, indices.long(), chosen)
        return listed.repeat_interleave(128, -1).repeat_interleave(128, -2)

    partial = pairs_of(block_mask.kv_num_blocks, block_mask.kv_indices)
    full = pairs_of(block_mask.full_kv_num_blocks, block_mask.full_kv_indices)
    assert not (partial & full).any() and block_mask.BLOCK_SIZE == (128, 128)
    seen = full | partial & block_mask.mask_mod(b, h, i, j)
    scores = score_mod(scale * (q @ k.mT).float(), b, h, i, j)
    return (scores.masked_fill(~seen, -1e30).softmax(-1).masked_fill(~seen, 0.0) @ v.float()).to(q.dtype)


@pytest.fixture
def stand_in(monkeypatch):
    monkeypatch.setattr(torch_flex, "flex_attention", by_blocks)
    monkeypatch.setattr(flex, "compiled", lambda: flex.attention)


@pytest.mark.one_in(7)
@pytest.mark.parametrize(("names", "case"), pairs())
def test_same_answer_and_gradients(names, case, stand_in):
    compare(flex.flex, *problem(137, 137, names=names, mask=masks(137)[case]))


@pytest.mark.parametrize("shape", [(128, 128), (129, 300), (256, 257), (140, 130), (300, 1)])
@pytest.mark.parametrize("kv_heads", [1, HEADS])
def test_shapes(shape, kv_heads, stand_in):
    for case in ("causal", "window", "padded"):
        compare(flex.flex, *problem(*shape, names="alibi+t5", mask=masks(shape[1])[case], kv_heads=kv_heads, dv=5))


@pytest.mark.parametrize("names", ["alibi", "t5"])
def test_positions(names, stand_in):
    """From anywhere, in steps, and of each row its own."""
    token = torch.arange(140)
    rows = torch.stack([token * 2, (token - 9).clamp(min=0)])
    for q_positions, k_positions in ((token * 3 + 7, token * 3), (rows, rows), (100_003, 99_000), (token + 5, None)):
        compare(flex.flex, *problem(140, 140, names=names, q_positions=q_positions, k_positions=k_positions))


def test_parts_of_a_request(stand_in):
    token = torch.arange(400)
    mask = lg.Window(150) & lg.Documents(token // 170) & lg.Padding(token > 3)
    r, wanted = problem(400, 400, names="fox+t5", mask=mask)
    compare(flex.flex, r.piece(slice(200, 339), slice(60, 350)), wanted)
    compare(flex.flex, r.piece(slice(0, 130), slice(0, 131), [1]), wanted)


def test_only_blocks_with_pairs_are_visited(stand_in, monkeypatch):
    """A window's blocks are a band, documents' a diagonal, and padding is in none: as many as hold a pair that is seen."""
    asked = []
    spy = lambda *a, block_mask, **o: asked.append(block_mask) or by_blocks(*a, block_mask=block_mask, **o)  # noqa: E731
    monkeypatch.setattr(torch_flex, "flex_attention", spy)
    token = torch.arange(600)
    packed, padded = lg.Documents(token // 128), lg.Padding(token < 300)
    for mask in (lg.Causal(), lg.Window(100), lg.Causal() & packed, lg.Causal() & padded, lg.Window(100) & padded):
        r, _ = problem(600, 600, mask=mask)
        with torch.no_grad():
            flex.flex(r)
        seen = torch.nn.functional.pad(r.allowed(), (0, 424, 0, 424)).unflatten(-1, (8, 128)).unflatten(-3, (8, 128))
        found = asked[-1].kv_num_blocks + asked[-1].full_kv_num_blocks
        assert found[0].flatten().tolist() == seen.any(-1).any(-2).sum(-1).tolist()
        if isinstance(mask, lg.Causal):
            assert asked[-1].full_kv_num_blocks[0].flatten().tolist() == [0, 1, 2, 3, 4, 0, 0, 0]


def test_levels_in_the_thousands_keep_their_differences(stand_in):
    """A gate that forgets the first half: differences inside a half are small compared with the levels themselves."""
    r, _ = problem(140, 140, names="fox")
    level = torch.rand(2, HEADS, 140, dtype=torch.float64) - 7000 * (torch.arange(140) >= 70)
    for scaled in (False, True):
        compare(flex.flex, replace(r, terms=(lg.Drift(level, scaled),)), [r.q, r.k, r.v], tolerance=2e-6)


def test_only_offsets_of_pairs_are_computed(stand_in):
    r, _ = problem(130, 300)
    bias = torch.randn(HEADS, 429)

    def at(offset):
        assert offset.min() >= -129 and offset.max() <= 299
        return bias[:, 299 - offset]

    compare(flex.flex, replace(r, terms=(lg.OffsetBias(at),)), [])


def test_half_precision_keeps_its_bias_in_float32(stand_in):
    """Far positions: a bias rounded to bfloat16 would be wrong by 2 at a distance of 1000."""
    r, _ = problem(200, 200, dtype=torch.bfloat16, q_positions=1000, k_positions=0)
    compare(flex.flex, r, [], tolerance=2**-7)


# ---- FlexAttention itself, uncompiled: the gradients that CUDA's kernel derives from the same graph ------------------------
@pytest.fixture
def compiled_by(monkeypatch):
    """Compile again with another backend of torch.compile; gradients too, which torch refuses on the CPU beforehand."""

    def choose_backend(backend):
        run = torch.compile(flex.attention, fullgraph=True, dynamic=False, backend=backend)
        monkeypatch.setattr(flex, "compiled", lambda: run)

    monkeypatch.setattr(torch_flex, "_validate_device", lambda *inputs: None)
    torch._dynamo.reset()
    yield choose_backend
    torch._dynamo.reset()


@pytest.mark.slow
@pytest.mark.filterwarnings(
    "ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"
)  # torch's tracer looks
@pytest.mark.parametrize("names", ["fox+t5", "none", "t5", "fox", "alibi+t5", "rope+fox"])
def test_gradients_of_flex_attention(names, compiled_by):
    """Grouped heads, documents, padding, queries without keys; fox: a level read as query's and as key's."""
    compiled_by("aot_eager")
    token = torch.arange(137)
    mask = lg.Causal() & lg.Documents(token // 50) & lg.Padding(torch.stack([token % 50 > 3, token < 70]))
    compare(flex.flex, *problem(137, 137, names=names, mask=mask))


# ---- graphs ------------------------------------------------------------------------------------------------------------
@pytest.mark.slow
@torch.no_grad()
def test_at_most_two_graphs_for_twenty_lengths(compiled_by):
    """Powers of two: all lengths up to 256 are one graph, up to 512 another. Masks of causality, windows and padding share."""
    compiled_by(graphs := CompileCounter())
    kinds = [lambda n: lg.Causal(), lg.Window, lambda n: lg.Causal() & lg.Padding(torch.arange(n) > 5)]
    for n, length in enumerate(range(130, 510, 20)):
        compare(flex.flex, problem(length, length, mask=kinds[n % 3](length))[0], [])
    assert graphs.frame_count == 2
    compare(flex.flex, problem(200, 200, mask=lg.Documents(torch.arange(200) // 9))[0], [])
    assert graphs.frame_count == 3


@pytest.mark.slow
@torch.no_grad()
def test_more_graphs_than_torch_would_allow_by_itself(compiled_by):
    """Scales, widths and shapes are graphs of their own: torch's default of 8 would end in an error at the ninth."""
    compiled_by("eager")
    for dv in range(1, 10):
        compare(flex.flex, problem(128, 128, names="none", dv=dv)[0], [])


# ---- the C++ kernel, through attend -------------------------------------------------------------------------------------
with torch.no_grad():
    READY = refuses(BACKENDS["flex"], problem(128, 128)[0]) is None
needs_compiler = [
    pytest.mark.slow,
    pytest.mark.skipif(not READY, reason="FlexAttention's CPU kernel needs g++ and AVX2"),
]
TOKEN = torch.arange(300)
COMPILED = {
    "alibi": {},
    "no term": {"names": "none", "mask": lg.NoMask()},
    "learned, ungrouped": {"names": "t5", "kv_heads": HEADS, "mask": lg.Window(33)},
    "drift": {"names": "fox+t5", "mask": lg.Causal() & lg.Documents(TOKEN // 70)},
    "no keys": {"mask": lg.Causal() & lg.Padding(TOKEN % 3 != 0) & lg.Documents(TOKEN // 3)},
    "narrow values": {"dv": 5, "mask": lg.Causal() & lg.Padding(torch.stack([TOKEN > 200, TOKEN < 9]))},
    "positions of each row": {"k_positions": torch.stack([TOKEN * 2, TOKEN])},
    "bfloat16": {"dtype": torch.bfloat16, "tolerance": 2**-7},
    "float16": {"dtype": torch.float16, "tolerance": 2**-10, "names": "alibi+t5"},
}


class TestCompiled:
    pytestmark = needs_compiler

    @pytest.mark.parametrize("case", COMPILED)
    def test_same_answer(self, case):
        options: Any = dict(COMPILED[case])
        tolerance = options.pop("tolerance", 1e-5)
        with torch.no_grad():
            r, _ = problem(200, 300, **options)
            assert refuses(BACKENDS["flex"], r) is None
            compare(flex.flex, r, [], tolerance)

    def test_attend_explain_and_memory(self, capsys):
        """By name; under autocast the dtype of q stays; and it needs no more than it claims."""
        q, k, v = torch.randn(3, 1, HEADS, 1000, DIM).unbind()
        options: Any = {"encoding": lg.ALiBi(HEADS), "mask": lg.Window(200), "backend": "flex"}
        with torch.no_grad():
            (verdict,) = (x for x in lg.explain(q, k, v, **options) if x.backend == "flex")
            assert "-> flex" in capsys.readouterr().out and verdict.chosen
            expected = lg.attend(q, k, v, **{**options, "backend": "reference"})
            with torch.autocast("cpu", torch.bfloat16):
                torch.testing.assert_close(lg.attend(q, k, v, **options), expected, atol=1e-5, rtol=0)
            peak = memory_of(lambda: lg.attend(q, k, v, **options)).peak
        assert 0.5 * verdict.memory <= peak <= 1.5 * verdict.memory + 2**20

    @pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
    def test_what_is_not_finite_reaches_every_query_that_sees_it(self, value):
        """Left to itself, the kernel makes zeros of a query of NaN."""
        for name, seeing in (("q", [150]), ("k", range(150, 190)), ("v", range(150, 190)), ("level", range(150, 190))):
            with torch.no_grad():
                r, _ = problem(300, 300, names="fox+t5", mask=lg.Window(40))
                poisoned = r.terms[0].level if name == "level" else getattr(r, name)[..., 0]
                poisoned[0, :, 150] = value
                out = flex.flex(r)
            assert not out[0, :, list(seeing), 0].isfinite().any() and out[1].isfinite().all(), name


# ---- refusals, and who chooses it ---------------------------------------------------------------------------------------
def test_refusals_are_in_words(monkeypatch):
    def why(rows=200, keys=200, **options):
        return refuses(BACKENDS["flex"], problem(rows, keys, **options)[0]) or ""

    with torch.no_grad():
        assert why(64, 300) == "its blocks hold 128 queries: 64 would be mostly padding"
        assert "not in torch.float64" in why(dtype=torch.float64)
        assert "does not support PairBias" in why(names="fire")
        token = torch.arange(200)
        assert "joined by &" in why(mask=lg.Causal() & (lg.Window(3) | lg.Documents(token)))
        assert "different orders" in why(mask=lg.Causal() & lg.Window(5, order=token.flip(0)))
        assert "512 MiB, above 64" in why(k_positions=token * 50_000)
        monkeypatch.setattr(shutil, "which", lambda name: None)
        assert "needs a C++ compiler" in why()
    assert why(names="t5") == why(names="none") == "FlexAttention has no backward on the CPU"
    with monkeypatch.context() as compiling:
        compiling.setattr(torch.compiler, "is_compiling", lambda: True)
        assert "another torch.compile" in why()
    monkeypatch.setattr(torch, "__version__", "2.6.0")
    assert why().startswith("it needs torch 2.7")
    with pytest.raises(ValueError, match=r"backend 'flex' cannot: it needs torch 2\.7"):
        lg.attend(*torch.randn(3, 1, 1, 128, 8).unbind(), backend="flex")


H100 = flex.Gpu((9, 0), 227 << 10, rocm=False, triton=True)


def test_what_a_gpu_is_refused():
    plain, wide, narrow = (problem(200, 200, names="none", dv=dv)[0] for dv in (DIM, 192, 8))
    assert flex.gpu_limits(plain, H100) is None and flex.gpu_limits(wide, H100) is None
    learned = problem(200, 200, names="t5")[0]  # the tests ask for deterministic algorithms
    for r, gpu, reason in (
        (plain, H100._replace(triton=False), "needs triton"),
        (plain, H100._replace(rocm=True), "ROCm"),
        (plain, H100._replace(capability=(7, 5)), "this GPU has 7.5"),
        (narrow, H100, "16 to 256, not 8"),
        (wide, H100._replace(shared_memory=99 << 10), "99 KiB"),
        (learned, H100, "no fixed order"),
    ):
        assert reason in (flex.gpu_limits(r, gpu) or "")


def test_auto_compiles_nothing_on_the_cpu_and_prefers_flex_to_blocks_on_cuda(monkeypatch):
    given: Any = ({}, {"dtype": torch.bfloat16}, {"names": "fox"}, {"dv": 5})
    with torch.no_grad():
        assert all(choose([problem(200, 200, **options)[0]], "auto").name != "flex" for options in given)
    monkeypatch.setattr(flex.Gpu, "of", lambda device: H100)
    names = {torch.float32: ("sdpa", "flex", "reference"), torch.bfloat16: ("sdpa", "triton", "triton")}
    for dtype, expected in names.items():
        with FakeTensorMode():
            q = torch.empty(1, HEADS, 512, 64, device="cuda", dtype=dtype)
            for encoding, name in zip((None, lg.ALiBi(HEADS), lg.T5Bias(HEADS)), expected, strict=True):
                (part,) = requests(q, q, q, compose(encoding), None, lg.Causal(), None, None, None, 0.0, False)
                assert choose([part.request], "auto").name == name


# ---- what only CUDA shows ----------------------------------------------------------------------------------------------
@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
class TestCuda:
    @pytest.fixture(autouse=True)
    def _on_cuda(self):
        """Gradients of tables need atomics."""
        torch._dynamo.reset()
        torch.use_deterministic_algorithms(False)
        with torch.device("cuda"):
            yield
        torch.use_deterministic_algorithms(True)

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
    @pytest.mark.parametrize("names", ["none", "t5", "fox", "fox+t5"])
    def test_same_answer_and_gradients(self, names, dtype):
        for case in (case for name, case in pairs() if name == names):
            r, wanted = problem(300, 300, names=names, mask=masks(300)[case], dtype=dtype)
            assert refuses(BACKENDS["flex"], r) is None
            compare(flex.flex, r, wanted, {torch.float32: 1e-5, torch.bfloat16: 2**-6, torch.float16: 2**-9}[dtype])

    def test_shapes_and_positions(self):
        for shape in ((128, 128), (200, 1000), (140, 130)):
            compare(flex.flex, *problem(*shape, names="t5", kv_heads=1, dv=24))
        rows = torch.stack([torch.arange(200) * 2, torch.arange(200)])
        compare(flex.flex, *problem(200, 200, names="t5", q_positions=rows, k_positions=rows))

    def test_memory_is_linear(self):
        """Dense scores of 16384 tokens would take 4 GiB in float32."""
        q = torch.randn(1, HEADS, 16384, 64, dtype=torch.bfloat16)
        run = torch.no_grad()(lambda: lg.attend(q, q, q, encoding=lg.ALiBi(HEADS), backend="flex"))
        run()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        run()
        assert torch.cuda.max_memory_allocated() - before < 2**28
