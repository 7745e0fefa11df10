"""`longitude bench`: every row says how it was measured, ratios are of one turn, and files are whole. Nothing here is timed."""

import subprocess
import sys
from dataclasses import replace

import pytest
import torch

import longitude as lg
from longitude.bench import memory, sweep as sweeps
from longitude.bench.cases import AttentionShape, Inputs, offset_biases, ours, plain, rotations
from longitude.bench.clock import Spread, interleaved
from longitude.bench.config import BenchConfig, checked
from longitude.bench.peers import PEERS, installed
from longitude.bench.rows import FAILED, Row
from longitude.bench.sweep import sweep
from longitude.positions import base

# What x-transformers does when it is imported.
pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")

SMALL = AttentionShape(2, 4, 2, 8, 17)


def tiny(**options) -> BenchConfig:
    sizes = {
        "lengths": (12, 17),
        "heads": 4,
        "kv_heads": 2,
        "head_dim": 8,
        "repeats": 1,
        "threads": 1,
        "no_memory": True,
    }
    return checked(BenchConfig(**(sizes | options)))


# ---- the clock -------------------------------------------------------------------------------------------------------
class FakeClock:
    """A clock that only moves when somebody works."""

    def __init__(self):
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def works(self, *seconds: float):
        """A case that takes so long in the first call, the second, ..."""
        left = iter(seconds)

        def call() -> None:
            self.now += next(left)

        return call


def test_a_ratio_is_of_one_turn():
    """The machine is ten times slower in the second turn: no ratio sees it. The first call, 100 times slower, does not count."""
    clock, order = FakeClock(), []
    cases = {"plain": clock.works(100, 1, 10, 2), "a": clock.works(900, 2, 20, 3)}
    timings = interleaved(cases, "plain", 3, clock, order.append)
    assert order == ["plain", "a"] * 4
    assert timings["plain"].ratio is None
    assert timings["plain"].seconds == Spread(2, 1.5, 6)
    assert timings["a"].seconds.median == 3
    assert timings["a"].ratio == Spread(2, 1.75, 2)  # of 2, 2 and 1.5


def test_cases_may_have_baselines_of_their_own():
    clock = FakeClock()
    cases = {"p": clock.works(1, 1), "a": clock.works(1, 3), "q": clock.works(1, 2), "b": clock.works(1, 8)}
    timings = interleaved(cases, {"a": "p", "b": "q"}, 1, clock)
    ratios = {name: timing.ratio and timing.ratio.median for name, timing in timings.items()}
    assert ratios == {"p": None, "a": 3, "q": None, "b": 4}


# ---- what is timed ---------------------------------------------------------------------------------------------------
def test_plain_is_causal_attention():
    inputs = Inputs.of(SMALL)
    (out,) = plain(inputs).forward()
    torch.testing.assert_close(out, lg.attend(inputs.q, inputs.k, inputs.v))
    assert out.shape == (2, 4, 17, 8)


@pytest.mark.parametrize("name", lg.list_encodings())
def test_every_encoding_is_timed_with_what_it_does(name):
    """At the input, on the scores, by its columns: a backward step reaches all that it has learned, and the tokens it reads."""
    inputs = Inputs.of(SMALL)
    case = ours(name, "auto", inputs)
    gradients = case.step(backward=True)()
    assert len(gradients) == len(case.wanted)
    built = lg.testing.example(name)()
    reads = built.at_input or built.reads_tokens
    assert any(each is inputs.x for each in case.wanted) == reads
    for wanted, gradient in zip(case.wanted, gradients, strict=True):
        assert gradient is not None and gradient.shape == wanted.shape and gradient.isfinite().all()
    with torch.no_grad():
        assert all(out.isfinite().all() for out in case.step(backward=False)())


def test_an_encoding_that_somebody_adds_is_timed(monkeypatch):
    class Root(lg.Encoding):
        def __init__(self, num_heads: int):
            super().__init__()
            self.num_heads = num_heads

        def terms(self, context):
            return (lg.OffsetBias(lambda offset: -offset.abs().float().sqrt().expand(self.num_heads, *offset.shape)),)

    monkeypatch.setitem(base.ENCODINGS.factories, "root", Root)
    assert "root" in offset_biases(False) and "root" not in offset_biases(True)
    rows = sweep(tiny(no_peers=True, lengths=(12,)))
    assert {row.name for row in rows if row.ratio is not None} == {*lg.list_encodings()}


def test_kinds_of_encodings():
    assert {"alibi", "sandwich"} <= {*offset_biases(False)}
    assert {"t5", "clipped", "kerple_log", "kerple_power"} <= {*offset_biases(True)}
    assert {*offset_biases()} == {*offset_biases(False), *offset_biases(True)}
    assert {"rope", "xpos", "axial_rope", "mrope"} <= {*rotations()}
    assert not {"none", "sinusoidal", "fire", "fox", "path", "shaw"} & {*offset_biases(), *rotations()}


def same_of_ours(name: str, learned: list[torch.Tensor]) -> lg.Encoding:
    """Our encoding with the numbers of a peer."""
    if "T5" in name:
        bias = lg.T5Bias(num_heads=4)
        scale = SMALL.head_dim**0.5 if name.startswith("x-") else 1.0
        with torch.no_grad():
            bias.table.copy_(learned[0] * scale)
        return bias
    if "rotary" in name or "Llama" in name:
        return lg.Rotary(head_dim=8, layout="half" if "Llama" in name else "interleaved")
    return lg.ALiBi(num_heads=4)


@pytest.mark.parametrize("peer", PEERS, ids=lambda peer: peer.name)
def test_a_peer_does_the_same_work(peer):
    """The output of attend with our encoding, and its gradients of q, k and v; gradients reach what it has learned."""
    if peer.name not in installed():
        pytest.skip(f"{peer.package} is not installed")
    inputs = Inputs.of(SMALL)
    case, three = peer.case(inputs), [inputs.q, inputs.k, inputs.v]
    learned = list(case.wanted[3:])
    got = case.forward()[0]
    want = lg.attend(*three, encoding=same_of_ours(peer.name, learned))
    torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-4)
    gradients = torch.autograd.grad(got, case.wanted, inputs.gradient)
    for theirs, own in zip(gradients, torch.autograd.grad(want, three, inputs.gradient), strict=False):
        torch.testing.assert_close(theirs, own, atol=1e-4, rtol=1e-4)
    assert len(learned) == ("T5" in peer.name)
    assert all(gradient.abs().sum() > 0 for gradient in gradients[3:])


@pytest.mark.parametrize("peer", [peer for peer in PEERS if peer.turn], ids=lambda peer: peer.name)
def test_a_peer_turns_as_we_do(peer):
    if peer.name not in installed():
        pytest.skip(f"{peer.package} is not installed")
    inputs = Inputs.of(SMALL)
    rope = same_of_ours(peer.name, [])
    for got, x in zip(peer.turn(inputs)(), (inputs.q, inputs.k), strict=True):
        torch.testing.assert_close(got, rope.rotate(x, 0), atol=1e-5, rtol=1e-5)


# ---- rows ------------------------------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def rows() -> list[Row]:
    return sweep(tiny(encodings=("alibi", "rope+cope", "sinusoidal"), backends=("auto", "reference", "sdpa")))


def test_rows_are_complete(rows):
    """One for every encoding, backend, length and pass, and for every peer; each with its protocol."""
    lines = 1 + 3 * 3 + len(installed())
    assert len(rows) == 2 * 2 * lines
    for row in rows:
        assert (row.threads, row.clock, row.turns, row.batch, row.heads, row.kv_heads, row.head_dim, row.dtype) == (
            1, "wall", 1, 1, 4, 2, 8, "float32",
        )  # fmt: skip
        assert row.length in (12, 17) and row.passed in ("forward", "forward+backward")
        if row.note:
            assert row.seconds is row.ratio is None
        else:
            assert row.seconds > 0 and (row.ratio is None) == (row.kind == "plain")
    assert not [row for row in rows if row.note.startswith(FAILED)]


def test_a_row_names_the_backend_that_ran(rows):
    ran = {(row.name, row.asked, row.backend) for row in rows if row.kind == "ours" and not row.note}
    assert {("alibi", "reference", "reference"), ("sinusoidal", "auto", "sdpa")} <= ran
    assert not [row for row in rows if row.kind == "ours" and not row.note and row.backend == "auto"]
    refused = {(row.name, row.asked): row.note for row in rows if row.note}
    assert (
        set(refused) == {("rope+cope", "sdpa")}
        and "sdpa refuses: it does not know RowBias" in refused["rope+cope", "sdpa"]
    )


def test_a_peer_that_raises_is_a_row_with_its_reason(monkeypatch):
    def broken(inputs):
        raise ImportError("moved to another module")

    monkeypatch.setattr(sweeps, "installed", lambda: {"theirs": replace(PEERS[0], name="theirs", make=broken)})
    found = [row for row in sweep(tiny(encodings=("rope",), lengths=(12,))) if row.name == "theirs"]
    assert [row.note for row in found] == ["failed: ImportError: moved to another module"] * 2


def test_a_peer_that_does_not_fit_is_not_timed(monkeypatch):
    dense = replace(PEERS[0], name="theirs", scores=2**30, make=lambda inputs: pytest.fail("it would not fit"))
    monkeypatch.setattr(sweeps, "installed", lambda: {"theirs": dense})
    found = [row for row in sweep(tiny(encodings=("rope",), lengths=(12,))) if row.name == "theirs"]
    assert all("GiB of memory" in row.note for row in found)


# ---- memory ----------------------------------------------------------------------------------------------------------
@pytest.mark.slow
@pytest.mark.skipif(not memory.can_measure(), reason="reads /proc")
def test_memory_is_of_the_call_alone():
    """In a process of its own: a test runner's keeps what earlier tests have freed."""
    measured = """
import torch
from longitude.bench import memory
held = torch.ones(2**24)  # 64 MiB that were there before
print(memory.lifted(lambda: torch.ones(2**24)), memory.lifted(lambda: held.sum()))
"""
    found = subprocess.run([sys.executable, "-c", measured], capture_output=True, text=True, check=True).stdout.split()
    assert float(found[0]) == pytest.approx(64, abs=8)
    assert float(found[1]) < 8


@pytest.mark.slow
@pytest.mark.skipif(not memory.can_measure(), reason="reads /proc")
def test_memory_of_a_case():
    """A dense mask of 8 heads at 1024 is 32 MiB, and none of that is in plain attention, 2 MiB a tensor."""
    work = AttentionShape(1, 8, 8, 64, 1024)
    plain_mib, dense_mib = (memory.growth(work, name, "reference", 1) for name in ("plain", "alibi"))
    assert 4 < plain_mib < 32 and dense_mib > plain_mib + 64


def test_what_does_not_fit_is_refused_before_anything_is_measured(monkeypatch):
    config = tiny(encodings=("alibi",), backends=("reference",), lengths=(64, 4096), no_peers=True)
    monkeypatch.setattr(memory, "available", lambda: 200 * 2.0**20)
    monkeypatch.setattr(sweeps, "interleaved", lambda *_: pytest.fail("it measured"))
    with pytest.raises(
        ValueError, match=r"alibi on the backend reference needs at length 4096 about 1\.\d GiB of memory, 0\.2"
    ):
        sweep(config)
    monkeypatch.setattr(memory, "available", lambda: 2.0**20)
    with pytest.raises(ValueError, match="attention itself needs at length 4096"):
        sweep(config)
