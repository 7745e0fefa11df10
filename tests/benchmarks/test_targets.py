"""The command `longitude bench`: what it prints and writes, what it refuses; and each target of its set, very small."""

import io
import json
import re
from dataclasses import fields, replace

import pytest
import torch
from rich.console import Console

import longitude as lg
from longitude.bench import figures, report, targets
from longitude.bench.rows import Row
from longitude.bench.run import Progress
from longitude.bench.target import Session, Target
from longitude.cli import main

# What x-transformers does when it is imported.
pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")

TINY = [
    "--lengths",
    "12",
    "17",
    "--heads",
    "4",
    "--kv-heads",
    "2",
    "--head-dim",
    "8",
    "--repeats",
    "2",
    "--threads",
    "1",
]


def command(capsys, *arguments: str) -> tuple[int, str, str]:
    code = main(arguments)
    captured = capsys.readouterr()
    return code, captured.out, captured.err


# ---- the command -----------------------------------------------------------------------------------------------------
ROW = {field.name for field in fields(Row)}


@pytest.mark.slow
def test_bench_ends_with_table_json_and_chart(tmp_path, capsys):
    out = tmp_path / "deep" / "one.json"
    arguments = ("bench", *TINY, "--encodings", "alibi", "rope", "--no-memory", "--no-peers", "--out", str(out))
    code, shown, _ = command(capsys, *arguments)
    assert code == 0
    assert re.search(r"alibi +\w+ +\d+\.\d\d", shown) and re.search(r"plain +torch +\d+\.\d ms", shown)
    assert shown.rstrip().endswith(f"chart: {tmp_path}/deep/one.html")
    assert sorted(path.name for path in out.parent.iterdir()) == ["one.html", "one.json", "one.svg"]
    svg = out.with_suffix(".svg").read_text()
    assert svg.startswith("<svg") and "alibi" in svg and "forward+backward" in svg
    page = out.with_suffix(".html").read_text()
    assert "<script" in page and not re.search(r"<(script|link)[^>]*(src|href)=", page)  # nothing is fetched

    found = json.loads(out.read_text())
    assert found["schema"] == 1 and found["configuration"]["lengths"] == [12, 17]
    assert all(set(row) == ROW for row in found["rows"])
    assert {row["name"] for row in found["rows"] if row["kind"] == "ours"} == {"alibi", "rope"}
    for said in ("system", "cpu", "cores", "threads", "os", "memory_gib", "load", "environment"):
        assert found["machine"][said] is not None
    assert found["machine"]["threads"] == torch.get_num_threads() and {row["threads"] for row in found["rows"]} == {1}
    assert {"python", "torch", "transformers", "x-transformers", "rotary-embedding-torch"} <= set(found["versions"])


def test_json_is_what_is_written(tmp_path, monkeypatch, capsys):
    from longitude.bench import run

    written = []
    monkeypatch.setattr(run, "write", lambda out, measured: written.append(measured))
    code, printed, _ = command(capsys, "bench", *TINY, "--encodings", "rope", "--no-memory", "--no-peers", "--json")
    assert code == 0 and json.loads(printed) == json.loads(json.dumps(written[0]))
    assert {row["kind"] for row in written[0]["rows"]} == {"plain", "ours"}


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ("--encodings rop", "unknown encoding 'rop': did you mean 'rope'"),
        ("--encodings rope all", "either all or a list"),
        ("--backends tabel", "unknown backend 'tabel': did you mean 'table'"),
        ("--pass forward", "unknown option '--pass': did you mean '--passes'"),
        ("--passes backward", "unknown pass 'backward': did you mean 'forward"),
        ("--dtype float", "unknown dtype 'float': did you mean 'float"),
        ("--lengths 64 32", "must ascend"),
        ("--lengths 0", "must be positive"),
        ("--repeats 0", "--repeats must be at least 1, got 0"),
        ("--kv-heads 3", "--kv-heads must divide --heads, got 3 and 8"),
        ("--encodings rope rope", "each once"),
        ("--encodings axial_rope --head-dim 10", "--encodings axial_rope: axial_rope: expected head_dim"),
        ("--lengths 1000000000 --encodings none", "about 30517.6 GiB of memory"),
        ("--out there.txt", "ends in .json"),
        ("--set --lengths 64", "--lengths is what the targets of --set say"),
        ("--peers", "did you mean '--no-peers'"),
    ],
)
def test_wrong_use_is_one_line_and_exit_code_2(arguments, reason, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    code, out, err = command(capsys, "bench", *arguments.split())
    assert code == 2 and out == ""
    assert err.startswith("longitude: ") and err.count("\n") == 1 and reason in err
    assert not list(tmp_path.iterdir())


def test_interrupted_nothing_is_written(tmp_path, monkeypatch, capsys):
    from longitude.bench import run

    def stopped(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(run, "sweep", stopped)
    code, out, err = command(capsys, "bench", *TINY, "--out", str(tmp_path / "one.json"))
    assert code == 130 and out == "" and "nothing was written" in err
    assert not list(tmp_path.iterdir())


# ---- the set ---------------------------------------------------------------------------------------------------------
SESSION = Session(threads=1, repeats=1, memory=False, peers=False, shrink=64)


def test_targets_have_names_of_their_own():
    names = [target.name for target in targets.TARGETS]
    assert len({*names}) == len(names) and all(target.limit > 0 for target in targets.TARGETS)


def measured_by_processes(target: Target) -> bool:
    return "memory" in target.name


QUICK = [target for target in targets.TARGETS if "graphs" not in target.name and not target.environment]


@pytest.mark.one_in(4)
@pytest.mark.parametrize(
    "target",
    [pytest.param(each, id=each.name, marks=[pytest.mark.slow] * each.name.startswith("training")) for each in QUICK],
)
def test_a_target_is_measured(target):
    rows = target.rows(SESSION)
    outcome = target.outcome(rows)
    assert not [row.note for row in rows if row.note] and all(row.group == target.name for row in rows)
    if measured_by_processes(target):
        assert rows == [] and outcome["measured"] is None and outcome["met"] is None
        return
    assert outcome["measured"] > 0 and outcome["met"] == (outcome["measured"] <= target.limit)
    assert any(row.kind == "plain" for row in rows)


def test_a_session_can_be_told_to_another_process():
    with Progress(Console(file=io.StringIO())) as progress:
        session = replace(SESSION, say=progress.say)
        assert replace(Session(**json.loads(json.dumps(session.told()))), say=progress.say) == session


@pytest.mark.slow
def test_a_target_in_a_process_of_its_own():
    target = next(target for target in targets.TARGETS if target.environment)
    rows = target.rows(replace(SESSION, peers=True))
    assert not [row.note for row in rows if row.note]
    assert {row.name for row in rows if row.kind == "ours"} == {"longitude, half", "longitude, interleaved"}
    assert {row.passed for row in rows} == {"forward", "forward+backward"}


ONE = Row(
    name="a", kind="ours", backend="table", passed="forward", batch=1, heads=1, kv_heads=1, head_dim=1, length=1,
    dtype="float32", threads=1, clock="wall", turns=5, seconds=0.5, ratio=1.5, ratio_low=1.4, ratio_high=1.6,
)  # fmt: skip


def test_measured_is_the_worst_of_ours():
    found = [ONE, replace(ONE, name="b", ratio=1.2), replace(ONE, name="c", ratio=9.0, kind="peer")]
    target = Target("t", 1.4, "plain", lambda session: found)
    outcome = target.outcome(target.rows(SESSION))
    assert (outcome["measured"], outcome["met"], outcome["worst"]) == (1.5, False, "a, fwd, 1")
    scored = [replace(ONE, score=1.4), replace(ONE, name="b", score=0.3, ratio=7.0)]
    assert target.outcome(scored)["measured"] == 1.4 and target.outcome(scored)["met"] is True


def test_targets_are_shown_as_measured():
    """In the table as in the chart: what was promised, the worst of ours, and the others beside it."""
    found = [ONE, replace(ONE, name="c", ratio=9.0, kind="peer"), replace(ONE, name="d", ratio=4.0, kind="peer")]
    first, second = (Target(name, limit, "plain", lambda session: found) for name, limit in (("t", 1.4), ("u", 1.5)))
    rows = [*first.rows(SESSION), *second.rows(SESSION)]
    measured = {
        "versions": {"transformers": "1", "x-transformers": None, "rotary-embedding-torch": "1"},
        "configuration": {"no_peers": False},
        "rows": [row.as_dict() for row in rows],
        "targets": [target.outcome([row for row in rows if row.group == target.name]) for target in (first, second)],
    }
    console = Console(width=100, record=True, file=io.StringIO())
    for part in report.parts(measured):
        console.print(part)
    text = console.export_text()
    assert re.search(r"t +<= 1.40 +1.50 +missed +a, fwd, 1 +4.0 to 9.0", text)
    assert re.search(r"u +<= 1.50 +1.50 +met", text)
    assert "not compared: x-transformers;" in text
    points = figures.chart(measured).to_dict()["layer"][0]["data"]["values"]
    assert [(point["target"], point["whose"]) for point in points] == [
        ("t", figures.BEYOND), ("t", figures.PEER), ("t", figures.PEER),
        ("u", figures.WITHIN), ("u", figures.PEER), ("u", figures.PEER),
    ]  # fmt: skip


def test_a_noisy_ratio_is_marked():
    """Quartiles 0.2 apart around 1.5 are 13 %, 0.4 apart are 27 %."""
    measured = [ONE, replace(ONE, ratio_high=1.8)]
    assert [report.is_noisy(row) for row in measured] == [False, True]
    assert "(1 of 2): a busy machine" in report.remarks(measured)[0]


def test_a_target_that_raises_is_a_row_with_its_reason():
    def broken(session):
        raise RuntimeError("no such kernel")

    target = Target("t", 1.0, "plain", broken)
    rows = target.rows(SESSION)
    assert [row.note for row in rows] == ["failed: RuntimeError: no such kernel"]
    assert target.outcome(rows)["met"] is None


def test_the_share_of_a_window():
    """Pairs within a window over causal pairs, as the masks count them."""
    length, size = 24, 5
    i = torch.arange(length)
    share = lg.Window(size).allowed(i, i).sum() / lg.Causal().allowed(i, i).sum()
    assert targets.share_of(size, length) == pytest.approx(float(share))


@pytest.mark.slow
def test_the_set_ends_with_table_json_and_chart(tmp_path, monkeypatch, capsys):
    from longitude.bench import run

    few = [target for target in targets.TARGETS if target.name.startswith(("decoding", "graphs", "rotating"))]
    monkeypatch.setitem(run.SETS, "encodings", few)
    out = tmp_path / "set.json"
    code, shown, _ = command(capsys, "bench", "--set", "--repeats", "1", "--threads", "1", "--out", str(out))
    found = json.loads(out.read_text())
    assert code == 0 and [target["name"] for target in found["targets"]] == [target.name for target in few]
    assert "<= 1.10" in shown and "decoding" in out.with_suffix(".svg").read_text()
    assert all(set(row) == ROW and row["group"] for row in found["rows"])
