"""What `benchmarks/gpu.py` measures: a cell is what a row is about, and a function that measures it."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

import longitude as lg
from longitude.attention.backends import BACKENDS
from longitude.attention.backends.triton import backend
from longitude.attention.operation import requests, run_parts
from longitude.positions.base import resolved
from longitude.positions.composed import compose

Measured = dict[str, Any]
PASSES = {"forward": False, "forward + backward": True}
ENCODINGS = "nope", "alibi", "t5", "kerple_log", "fox", "fire"
TOKENS, WIDTH = 16384, 2048
"""Of all sequences of a shape, and of all heads of a token."""
MASKED = {"window 1024": {"window": 1024}, "documents of 2048": {"document": 2048}}


@dataclass(frozen=True)
class Shape:
    """Causal attention over sequences of a length; within a window, or packed documents of a size."""

    length: int
    head_dim: int
    window: int | None = None
    document: int | None = None
    tokens: int = TOKENS
    width: int = WIDTH

    @property
    def batch(self) -> int:
        return max(1, self.tokens // self.length)

    @property
    def heads(self) -> int:
        return self.width // self.head_dim

    @property
    def pairs(self) -> int:
        """Of one head: queries with the keys that they attend to."""
        window, document = self.window or self.length, self.document or self.length
        return sum(min(window, i % document + 1) for i in range(self.length))

    @property
    def share(self) -> float:
        """Of the pairs of plain causality."""
        return self.pairs / (self.length * (self.length + 1) // 2)


def flops(shape: Shape, backward: bool) -> float:
    """Of the pairs that the mask allows, as papers count: 4 head_dim forward, 2.5 times as many backward."""
    return 4 * shape.head_dim * shape.pairs * shape.batch * shape.heads * (3.5 if backward else 1)


@dataclass(frozen=True)
class Cell:
    """about: what tells its row from others. targets: the names of those that its score counts for."""

    about: dict[str, Any]
    measure: Callable[[], Measured]
    target: str | None = None

    @property
    def key(self) -> str:
        return " | ".join(str(value) for value in self.about.values())


@dataclass(frozen=True)
class Machine:
    """CUDA, in earnest; or the CPU, interpreted, at sizes that only show that every cell runs."""

    device: str
    rounds: int = 20

    @property
    def earnest(self) -> bool:
        return self.device == "cuda"

    @property
    def dtype(self) -> torch.dtype:
        return torch.bfloat16 if self.earnest else torch.float16  # interpreted products of bfloat16 are wrong

    def shape(self, length: int, head_dim: int, tokens: int = TOKENS, **mask: Any) -> Shape:
        """Or a small one of the same kind."""
        if self.earnest:
            return Shape(length, head_dim, tokens=max(tokens, length), **mask)
        return Shape(48, 16, tokens=48, width=32, **{name: max(4, 48 * size // length) for name, size in mask.items()})

    @property
    def lengths(self) -> tuple[int, ...]:
        return (8192, 2048, 16384, 4096, 1024) if self.earnest else (16384,)

    @property
    def head_dims(self) -> tuple[int, ...]:
        return (64, 128) if self.earnest else (64,)

    def prepare(self) -> None:
        """The backend runs on a CPU where it is interpreted."""
        torch.manual_seed(0)
        if not self.earnest:
            BACKENDS["triton"] = replace(backend.TRITON, devices=None)

    def milliseconds(self, ways: Mapping[str, Callable[[], object]]) -> tuple[dict[str, float], dict[str, str]]:
        """The median of each way, in turns with the others, and why a way has none. On a GPU by its own clock.

        A pause on the GPU before each call lets the host run ahead, so that its own time does not count.
        """
        notes: dict[str, str] = {}
        running = {}
        for name, way in ways.items():
            try:
                for _ in range(2):
                    way()
                self.wait()
                running[name] = way
            except Exception as error:
                notes[name] = first_line(error)
                self.wait()  # raises where the GPU is lost
        found: dict[str, list[float]] = {name: [] for name in running}
        for _ in range(self.rounds):
            for name, way in running.items():
                found[name].append(self._once(way))
        return {name: statistics.median(times) for name, times in found.items()}, notes

    def _once(self, way: Callable[[], object]) -> float:
        if not self.earnest:
            start = time.perf_counter()
            way()
            return 1e3 * (time.perf_counter() - start)
        before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(4_000_000)
        before.record()
        way()
        after.record()
        after.synchronize()
        return before.elapsed_time(after)

    def wait(self) -> None:
        if self.earnest:
            torch.cuda.synchronize()


def first_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {(str(error).strip().splitlines() or ['no message'])[0]}"[:300]


# ---- attention ---------------------------------------------------------------------------------------------------------
class Problem:
    """Tensors of a shape, an encoding with random parameters, and the ways to attend."""

    def __init__(self, machine: Machine, shape: Shape, name: str):
        make = {"device": machine.device, "dtype": machine.dtype}
        # As a model has them: [B, L, H, D] with the heads brought forward.
        three = (torch.randn(shape.batch, shape.length, shape.heads, shape.head_dim, **make) for _ in range(3))
        self.qkv = [x.transpose(1, 2).detach().requires_grad_() for x in three]
        self.grad = torch.randn_like(self.qkv[0])
        known = {"num_heads": shape.heads, "head_dim": shape.head_dim, "dim": 64, "layout": "half"}
        self.encoding = compose([lg.encoding(name, **resolved(name, {}, **known))]).to(**make)
        columns = self.encoding.context(torch.randn(shape.batch, shape.length, 64, **make))[0]
        self.columns = {key: x.detach().requires_grad_() for key, x in columns.items()}
        for parameter in self.encoding.parameters():
            if name != "fire":  # as it is initialised, most blocks have one piece of its curve
                parameter.data.uniform_(0.1, 1.0)
        self.mask: lg.Mask = lg.Window(shape.window) if shape.window else lg.Causal()
        if shape.document:
            self.mask = lg.Causal() & lg.Documents(torch.arange(shape.length, device=machine.device) // shape.document)

        # Made once, as the layers of a forward share what is found of a mask.
        self.parts = requests(*self.qkv, self.encoding, self.columns, self.mask)

    def ours(self, name: str) -> Tensor:
        return run_parts(self.parts, name)[0]

    def torchs(self, kernel: SDPBackend | None) -> Tensor:
        if kernel is None:
            return F.scaled_dot_product_attention(*self.qkv, is_causal=True)
        with sdpa_kernel(kernel):
            return F.scaled_dot_product_attention(*self.qkv, is_causal=True)

    def wanted(self, ours: bool) -> list[Tensor]:
        return [*self.qkv, *([*self.columns.values(), *self.encoding.parameters()] if ours else [])]

    def step(self, forward: Callable[[], Tensor], backward: bool, ours: bool = True) -> Callable[[], object]:
        if not backward:
            return torch.no_grad()(forward)
        return lambda: torch.autograd.grad(forward(), self.wanted(ours), self.grad, allow_unused=True)


def compile_one(machine: Machine, name: str, head_dim: int) -> None:
    """The kernels of an encoding, which are the same for all lengths, by a short call."""
    machine.prepare()
    problem = Problem(machine, machine.shape(128, head_dim, tokens=128), name)
    problem.step(partial(problem.ours, "triton"), True)()
    machine.wait()


def attention(machine: Machine, shape: Shape, name: str, backward: bool) -> Measured:
    """Milliseconds of torch's flash attention, cuDNN's and ours."""
    problem = Problem(machine, shape, name)
    earnest = machine.earnest
    calls = {
        "flash": (partial(problem.torchs, SDPBackend.FLASH_ATTENTION if earnest else None), False),
        "cudnn": (partial(problem.torchs, SDPBackend.CUDNN_ATTENTION if earnest else None), False),
        "triton": (partial(problem.ours, "triton"), True),
    }
    steps = {way: problem.step(call, backward, ours) for way, (call, ours) in calls.items()}
    ms, notes = machine.milliseconds(steps)
    plain = Shape(shape.length, shape.head_dim, tokens=shape.tokens, width=shape.width)
    work = {way: flops(plain if way in ("flash", "cudnn") else shape, backward) for way in ms}
    return {
        "ms": ms,
        "tflops": {way: work[way] / time / 1e9 for way, time in ms.items()},
        "score": ms["flash"] * shape.share / ms["triton"] if {"flash", "triton"} <= ms.keys() else None,
        "notes": notes,
    }


def target_of(name: str, masked: bool, length: int, backward: bool) -> str | None:
    passed = [*PASSES][backward]
    if masked:
        return f"window and documents, {passed}"
    if name in ("fox", "fire") and length >= 2048:
        return f"{'FoX' if name == 'fox' else 'FIRE'}, {passed}"
    return f"ALiBi, T5, KERPLE, {passed}" if name in ("alibi", "t5", "kerple_log") and length >= 2048 else None


def attention_cells(machine: Machine) -> Iterator[Cell]:
    masked = [("alibi", text, mask) for text, mask in MASKED.items()]
    for length in machine.lengths:
        cases = [(name, "", {}) for name in ENCODINGS] + (masked if length == 16384 else [])
        for name, text, mask in cases:
            for head_dim in machine.head_dims:
                shape = machine.shape(length, head_dim, **mask)
                for passed, backward in PASSES.items():
                    about = {"part": "attention", "encoding": name, "mask": text, "length": length, "head_dim": head_dim,
                             "passed": passed}  # fmt: skip
                    yield Cell(about, partial(attention, machine, shape, name, backward),
                               target_of(name, bool(mask), length, backward))  # fmt: skip


# ---- the same bits twice, and memory -----------------------------------------------------------------------------------
def determinism(machine: Machine, name: str, head_dim: int) -> Measured:
    """Output and every gradient, twice, with other work between."""
    problem = Problem(machine, machine.shape(4096, head_dim), name)

    def once() -> list[Tensor | None]:
        out = problem.ours("triton")
        return [out, *torch.autograd.grad(out, problem.wanted(True), problem.grad, allow_unused=True)]

    one = once()
    problem.step(partial(problem.torchs, None), True, False)()
    same = [
        x is y is None or x is not None and y is not None and torch.equal(x, y)
        for x, y in zip(one, once(), strict=True)
    ]
    finite = all(x is None or bool(x.isfinite().all()) for x in one)
    return {"score": float(all(same) and finite), "notes": {} if finite else {"triton": "a number is not finite"}}


def memory(machine: Machine, name: str, head_dim: int) -> Measured:
    """The peak of a training step beyond inputs, output and gradients, over a dense bias [heads, L, L] in bfloat16."""
    shape = machine.shape(8192, head_dim, tokens=8192)
    problem = Problem(machine, shape, name)
    step = problem.step(partial(problem.ours, "triton"), True)
    step()
    dense = 2 * shape.heads * shape.length**2
    results = sum(x.numel() * x.element_size() for x in (problem.grad, *problem.wanted(True)))  # output and gradients
    if not machine.earnest:
        return {"score": None, "notes": {"triton": "memory is counted on CUDA alone"}}
    gc.collect()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    step()
    extra = torch.cuda.max_memory_allocated() - before - results
    return {"score": extra / dense, "bytes": extra, "notes": {}}


def checks(machine: Machine) -> Iterator[Cell]:
    for head_dim in machine.head_dims:
        for name in ("t5", "fox", "kerple_log", "fire"):
            about = {"part": "determinism", "encoding": name, "length": 4096, "head_dim": head_dim}
            yield Cell(about, partial(determinism, machine, name, head_dim), "the same bits twice")
        for name in ("alibi", "t5", "fire"):
            about = {"part": "memory", "encoding": name, "length": 8192, "head_dim": head_dim}
            yield Cell(about, partial(memory, machine, name, head_dim), "memory at 8192, of a dense bias")


# ---- rotation ----------------------------------------------------------------------------------------------------------
def rotation(machine: Machine, length: int, head_dim: int, layout: str, backward: bool) -> Measured:
    """Q and k of as many heads, tables prepared, against a copy of both."""
    shape = machine.shape(length, head_dim)
    make = {"device": machine.device, "dtype": machine.dtype}
    q, k, gq, gk = (
        torch.randn(shape.batch, shape.length, shape.heads, shape.head_dim, **make).transpose(1, 2) for _ in range(4)
    )
    q, k = (x.detach().requires_grad_(backward) for x in (q, k))
    rope = lg.Rotary(head_dim=shape.head_dim, layout=layout)
    tables = rope.prepare(torch.arange(shape.length, device=machine.device))
    into = [torch.empty_like(x) for x in (q, k)]

    def copy() -> None:
        with torch.no_grad():
            for _ in range(1 + backward):
                for x, y in zip((q, k), into, strict=True):
                    y.copy_(x)

    def step(rotate: Callable[[], Any]) -> Callable[[], object]:
        if not backward:
            return torch.no_grad()(rotate)
        return lambda: torch.autograd.grad([*rotate()], [q, k], [gq, gk])

    ways = {"copy": copy, "longitude": step(lambda: rope.queries_and_keys(q, k, tables))}
    ms, notes = machine.milliseconds(ways)
    moved = 2 * 2 * q.numel() * q.element_size() * (1 + backward)
    return {
        "ms": ms,
        "gb_per_second": {way: moved / time / 1e6 for way, time in ms.items()},
        "score": ms["copy"] / ms["longitude"] if {"copy", "longitude"} <= ms.keys() else None,
        "notes": notes,
    }


def rotation_cells(machine: Machine) -> Iterator[Cell]:
    for length in (4096, 16384):
        for head_dim in machine.head_dims:
            for layout in ("half", "interleaved"):
                for passed, backward in PASSES.items():
                    about = {
                        "part": "rotation",
                        "layout": layout,
                        "length": length,
                        "head_dim": head_dim,
                        "passed": passed,
                    }
                    target = "rotation of q and k, of a copy" if not backward else None
                    yield Cell(about, partial(rotation, machine, length, head_dim, layout, backward), target)


# ---- decoding ----------------------------------------------------------------------------------------------------------
def decoding(machine: Machine, batch: int) -> Measured:
    """Tokens/s of greedy generation by a model of Llama's shape, against transformers' own; random weights."""
    import transformers

    transformers.utils.logging.set_verbosity_error()
    hidden, layers, heads, tokens = (2048, 16, 32, 64) if machine.earnest else (32, 1, 2, 3)
    size = {"hidden_size": hidden, "num_hidden_layers": layers, "num_attention_heads": heads,
            "num_key_value_heads": max(heads // 4, 1), "max_position_embeddings": 4096, "vocab_size": 1024}  # fmt: skip
    with torch.device(machine.device):  # where 700 million random numbers take no time
        ours: Any = lg.LongitudeForCausalLM(lg.LongitudeConfig(encoding="rope", **size))
        own = {"intermediate_size": ours.config.intermediate_size, "tie_word_embeddings": True, "bos_token_id": None,
               "eos_token_id": None}  # fmt: skip
        theirs: Any = transformers.LlamaForCausalLM(transformers.LlamaConfig(**size, **own))
    dtype = machine.dtype if machine.earnest else torch.float32
    prompt = torch.randint(1024, (batch, 512 if machine.earnest else 8), device=machine.device)
    fixed = {"max_new_tokens": tokens, "min_new_tokens": tokens, "do_sample": False, "pad_token_id": 0}

    def generate(model: Any) -> Callable[[], object]:
        model = model.to(machine.device, dtype).eval()
        return lambda: model.generate(prompt, attention_mask=torch.ones_like(prompt), **fixed)

    ways = {"transformers": generate(theirs), "longitude": generate(ours)}
    times: dict[str, list[float]] = {name: [] for name in ways}
    for turn in range(4 if machine.earnest else 2):
        for name, way in ways.items():
            machine.wait()
            start = time.perf_counter()
            way()
            machine.wait()
            if turn:
                times[name].append(1e3 * (time.perf_counter() - start))
    ms = {name: statistics.median(found) for name, found in times.items()}
    rate = {name: 1e3 * batch * tokens / each for name, each in ms.items()}
    return {"ms": ms, "tokens_per_second": rate, "score": ms["transformers"] / ms["longitude"], "notes": {}}


def decoding_cells(machine: Machine) -> Iterator[Cell]:
    for batch in (1, 64):
        yield Cell({"part": "decode", "batch": batch}, partial(decoding, machine, batch if machine.earnest else 2))


PARTS = {"checks": checks, "attention": attention_cells, "rotation": rotation_cells, "decode": decoding_cells}
