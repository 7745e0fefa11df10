"""`longitude bench`: what it times, how turns give ratios, rows with their protocol, wrong use. Nothing here is timed."""

import json
import re
from dataclasses import fields, replace
from functools import partial

import pytest
import torch

import longitude as lg
from longitude.bench import measurement, report, sweep as sweeps
from longitude.bench.cases import AttentionShape, Inputs, ours, plain
from longitude.bench.config import BenchConfig, checked
from longitude.bench.measurement import FAILED, Row, interleaved
from longitude.runs.machine import can_measure_peak
from longitude.runs.terminal import Progress
from tests.support import refused

TINY = {"lengths": (12, 17), "heads": 4, "kv_heads": 2, "head_dim": 8, "repeats": 1, "threads": 1, "no_memory": True}


def sweep(**options) -> list[Row]:
    return sweeps.sweep(checked(BenchConfig(**(TINY | options))), Progress())


# ---- cases and turns --------------------------------------------------------------------------------------------------
SMALL = AttentionShape(2, 4, 2, 8, 17)


def working(**seconds: tuple[float, ...]):
    """Cases that take this long in their first call, the second, ..., and a clock that nothing else moves."""
    now, left = [0.0], {name: iter(each) for name, each in seconds.items()}

    def work(name: str) -> None:
        now[0] += next(left[name])

    return {name: partial(work, name) for name in seconds}, lambda: now[0]


def test_a_ratio_is_of_one_turn():
    """The machine is ten times slower in the second turn: no ratio changes. The first call, 100 times slower, does not count."""
    (cases, clock), order = working(plain=(100, 1, 10, 2), a=(900, 2, 20, 3)), []
    timings = interleaved(cases, "plain", 3, clock, order.append)
    assert order == ["plain", "a"] * 4
    assert timings["plain"] == {"seconds": 2, "seconds_low": 1.5, "seconds_high": 6}
    ratio = {"ratio": 2, "ratio_low": 1.75, "ratio_high": 2, "against": "plain"}  # of 2, 2 and 1.5
    assert timings["a"].items() >= ratio.items() and timings["a"]["seconds"] == 3


def test_cases_may_have_baselines_of_their_own():
    cases, clock = working(p=(1, 1), a=(1, 3), q=(1, 2), b=(1, 8))
    timings = interleaved(cases, {"a": "p", "b": "q"}, 1, clock)
    ratios = {name: timing.get("ratio") for name, timing in timings.items()}
    assert ratios == {"p": None, "a": 3, "q": None, "b": 4}


@pytest.mark.one_in(6)
@pytest.mark.parametrize("name", lg.list_encodings())
def test_every_encoding_is_timed_with_all_it_computes(name):
    """At the input, on the scores, by its columns: gradients reach all that it has learned, and the tokens it reads."""
    inputs = Inputs.of(SMALL)
    torch.testing.assert_close(plain(inputs).forward()[0], lg.attend(inputs.q, inputs.k, inputs.v))
    case = ours(name, "auto", inputs)
    gradients = case.step(backward=True)()
    encoding = lg.testing.example(name)()
    assert any(each is inputs.x for each in case.wanted) == (encoding.at_input or encoding.reads_tokens)
    for wanted, gradient in zip(case.wanted, gradients, strict=True):
        assert gradient is not None and gradient.shape == wanted.shape and gradient.isfinite().all()
    with torch.no_grad():
        assert all(out.isfinite().all() for out in case.step(backward=False)())


# ---- rows ------------------------------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def rows() -> list[Row]:
    return sweep(encodings=("alibi", "rope+cope", "sinusoidal"), backends=("auto", "reference", "sdpa"))


def test_rows_are_complete(rows):
    lines = 1 + 3 * 3
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
    assert set(refused) == {("rope+cope", "sdpa")}
    assert "sdpa refuses: it does not support RowBias" in refused["rope+cope", "sdpa"]


def test_a_noisy_ratio_is_marked(rows):
    """Quartiles 0.2 apart around 1.5 are 13 %, 0.4 apart are 27 %."""
    quiet = replace(rows[0], ratio=1.5, ratio_low=1.4, ratio_high=1.6)
    assert report.remarks([quiet]) == []
    assert "(1 of 2): a busy machine" in report.remarks([quiet, replace(quiet, ratio_high=1.8)])[0]


# ---- memory ----------------------------------------------------------------------------------------------------------
@pytest.mark.slow
@pytest.mark.skipif(not can_measure_peak(), reason="reads /proc")
def test_memory_of_a_case():
    """A dense mask of 8 heads at 1024 is 32 MiB, and none of that is in plain attention, 2 MiB a tensor."""
    shape = AttentionShape(1, 8, 8, 64, 1024)
    plain_mib, dense_mib = (measurement.growth(shape, name, "reference", 1) for name in ("plain", "alibi"))
    assert 4 < plain_mib < 32 and dense_mib > plain_mib + 64


def test_what_does_not_fit_is_refused_before_anything_is_measured(monkeypatch):
    """Plain attention, which is asked first: tests/test_cli.py."""
    monkeypatch.setattr(sweeps, "interleaved", lambda *_: pytest.fail("it measured"))
    monkeypatch.setattr(sweeps, "available_memory", lambda: 200 * 2**20)
    with refused("alibi", "reference", "4096", "GiB"):
        sweep(encodings=("alibi",), backends=("reference",), lengths=(64, 4096))


# ---- the command -----------------------------------------------------------------------------------------------------
FEW = "--lengths 12 17 --heads 4 --kv-heads 2 --head-dim 8 --repeats 2 --threads 1 --no-memory".split()


@pytest.mark.slow
def test_bench_ends_with_a_table_and_rows(tmp_path, command):
    out = tmp_path / "deep" / "one.json"
    code, shown, _ = command("bench", *FEW, "--encodings", "alibi", "rope", "--out", str(out))
    assert code == 0
    assert re.search(r"alibi +\w+ +\d+\.\d\d", shown) and re.search(r"plain +torch +\d+\.\d ms", shown)
    assert [path.name for path in out.parent.iterdir()] == ["one.json"] and str(out) in shown
    measured = json.loads(out.read_text())
    assert measured["schema"] == 1 and measured["configuration"]["lengths"] == [12, 17]
    assert {row["name"] for row in measured["rows"] if row["kind"] == "ours"} == {"alibi", "rope"}
    assert all(set(row) == {field.name for field in fields(Row)} for row in measured["rows"])
    machine = measured["machine"]
    for name in ("system", "cpu", "cores", "os", "memory_gib", "load", "environment"):
        assert machine[name] is not None
    assert machine["threads"] == torch.get_num_threads() and {row["threads"] for row in measured["rows"]} == {1}
    assert {"python", "torch", "transformers"} <= set(measured["versions"])
