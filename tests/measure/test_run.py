"""A run directory: what is in it, what continues, what is refused, and what a kill costs."""

import json
import math
import shutil
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from longitude.cli import main
from longitude.measure import Row, read_rows, run as runs
from longitude.measure.config import METHODS, MeasureConfig
from longitude.measure.plan import plan
from longitude.measure.report import terminal, write_report
from longitude.measure.rows import from_frame
from longitude.measure.run import measure, read_results
from longitude.measure.tables import sentences, tables
from longitude.runs.terminal import Progress
from longitude.statistics.documents import interval, paired_difference
from tests.measure.conftest import write
from tests.support import edit_config

WAYS = ("non-overlapping", "sliding", "same-targets")
SIZES: dict[str, Any] = {"lengths": (48, 64), "documents": 3, "chunk": 40, "batch": 64}


@pytest.fixture
def config(text):
    return MeasureConfig(text=str(text), device="cpu", methods=("non-overlapping",), **SIZES)


class Notes(Progress):
    """Keeps what is reported."""

    def __init__(self):
        super().__init__()
        self.units, self.notes = [], []

    def update(self, description, done, total=None):
        if description not in self.units:
            self.units.append(description)

    def note(self, message):
        self.notes.append(message)


def go(config, out, *models):
    watcher = Notes()
    results = measure(plan(config, tuple(map(str, models))), out, watcher)
    return results, list(results.failures), watcher


def in_bits(rows: list[Row]) -> list[Row]:
    return [row for row in rows if row.metric == "bits_per_byte"]


@pytest.mark.one_in(3)
@pytest.mark.parametrize("name", ["llama", "gpt_neox", "bloom"])
def test_perplexity_is_that_of_a_plain_loop(name, checkpoints, config, tmp_path):
    """Over transformers, a window at a time: the same numbers, in chunks with the cache and in batches."""
    results, failures, _ = go(replace(config, dtype="float64", chunk=24), tmp_path / "run", checkpoints[name])
    assert failures == []
    model = AutoModelForCausalLM.from_pretrained(checkpoints[name], dtype=torch.float64).eval()
    planned = plan(config, (str(checkpoints[name]),))
    documents = planned.subjects[0].documents
    assert documents is not None
    for row in results.rows:
        assert row.length is not None
        bits = size = count = 0.0
        for ids, sizes in zip(documents.ids, documents.sizes, strict=True):
            for start in range(0, len(ids) - 1, row.length):
                window = ids[start : start + row.length + 1]
                with torch.no_grad():
                    logits = model(window[None, :-1]).logits[0]
                bits += float(F.cross_entropy(logits, window[1:], reduction="sum")) / math.log(2)
                size += int(sizes[start + 1 : start + row.length + 1].sum())
                count += len(window) - 1
        per_token = {"bits_per_byte": bits / size, "perplexity": 2 ** (bits / count)}
        assert row.value == pytest.approx(per_token[row.metric], rel=1e-6)
    assert {row.metric for row in results.rows} == {"bits_per_byte", "perplexity"}


def test_more_context_is_compared_on_the_same_targets(checkpoints, config, tmp_path):
    """Each length against the shortest, paired over documents; the targets are the last of every document at all lengths."""
    config = replace(config, methods=("same-targets",), dtype="float64")
    results, failures, watcher = go(config, tmp_path / "run", checkpoints["llama"])
    assert failures == [] and len(watcher.units) == 3  # the training length 32, too
    planned = plan(config, (str(checkpoints["llama"]),))
    documents = planned.subjects[0].documents
    assert documents is not None and planned.targets == 16
    model = AutoModelForCausalLM.from_pretrained(checkpoints["llama"], dtype=torch.float64).eval()
    bits = {}
    for length in (32, 48, 64):
        read = torch.stack([ids[-length - 1 :] for ids in documents.ids])
        with torch.no_grad():
            logits = model(read[:, :-1]).logits[:, -16:]
        nats = F.cross_entropy(logits.transpose(1, 2), read[:, -16:], reduction="none").sum(1).numpy()
        bits[length] = (nats, [int(sizes[-16:].sum()) for sizes in documents.sizes])
    rows = in_bits(results.rows)
    assert [row.length for row in rows] == [32, 48, 64] and {row.tokens for row in rows} == {3 * 16}
    for row in rows:
        assert (row.value, row.low) == pytest.approx(interval(*bits[row.length])[:2]) and row.position_to == row.length
    changes = [row for row in results.rows if row.metric == "bits_per_byte_difference"]
    assert [(row.length, row.method) for row in changes] == [(n, "same-targets, less those at 32") for n in (48, 64)]
    for row in changes:
        assert (row.value, row.low, row.high) == pytest.approx(paired_difference(bits[row.length], bits[32]))
    shown = tables(results)[-1]
    assert shown.lengths == [48, 64] and "16 tokens of 3 documents" in shown.caption
    assert [float(cell.value) for cell in shown.lines[0][3]] == pytest.approx([row.value for row in changes], abs=5e-4)
    assert read_rows(tmp_path / "run" / "results.parquet")["metric"].tolist().count("bits_per_byte_difference") == 2
    [shortest] = [unit for unit in (tmp_path / "run" / "units").iterdir() if "-32-same-targets" in unit.name]
    shutil.rmtree(shortest)  # as where it failed: another base would stand in the same column
    assert not [row for row in read_results(tmp_path / "run").rows if row.metric == "bits_per_byte_difference"]


@pytest.fixture(scope="module")
def llama(checkpoints, text, tmp_path_factory):
    """Results and notes of one model, measured all ways."""
    methods = MeasureConfig(text=str(text), device="cpu", methods=METHODS, **SIZES)
    results, failures, watcher = go(methods, tmp_path_factory.mktemp("llama") / "run", checkpoints["llama"])
    assert failures == []
    return results, watcher.notes


def test_one_model(llama):
    results, notes = llama
    assert notes[0].startswith("llama: needs about")
    flat = {row.length: row for row in in_bits(results.rows) if row.method == "non-overlapping"}
    assert list(flat) == [32, 48, 64]  # the training length is there, though it was not requested
    assert {row.length for row in results.rows if row.method == "sliding"} == {32, 48, 64}
    places = [row for row in results.rows if row.method == "per-position"]
    assert {row.length for row in places} == {64} and places[-1].position_to == 64
    for row in flat.values():
        assert (row.task, row.metric) == ("text", "bits_per_byte")
        assert (row.encoding, row.label, row.train_length) == ("rope", "llama", 32)
        assert (row.documents, row.tokens, row.window, row.weighting, row.bos) == (3, 192, row.length, "token", "none")
        assert row.truncation == "tail dropped to a multiple of 64 targets"
        assert row.dtype == "float32" and row.backend == "sdpa" and row.low < row.value < row.high
        assert row.prefill == ("one pass" if row.length <= 40 else "chunks of 40 with the cache")
    assert len({row.count for row in flat.values()}) == 1  # the same bytes at every length
    assert {row.count for row in results.rows if row.metric == "perplexity" and row.method == "sliding"} == {192}
    assert from_frame(read_rows(results.path / "results.parquet")) == results.rows


@pytest.mark.slow
def test_the_page_needs_no_network_and_is_built_again(llama, capsys):
    results, _ = llama
    text = write_report(results).read_text()
    assert "default-src 'none'" in text and '<link rel="stylesheet"' not in text and 'src="http' not in text
    assert "Loss by window length" in text and "Loss by position" in text
    assert all(f"{row.value:.3f}" in text for row in in_bits(results.rows) if row.method == "sliding")
    shown = [part for part in terminal(results) if hasattr(part, "columns")]
    assert [column.header for column in shown[0].columns] == ["model", "positions", "trained at", "32", "48", "64"]
    (results.path / "report.html").unlink(missing_ok=True)
    assert main(["report", str(results.path)]) == 0
    assert "bits per byte" in capsys.readouterr().out and (results.path / "report.html").exists()
    assert main(["report", str(results.path), "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)) == len(results.rows)
    assert main(["report", str(results.path), "--csv"]) == 2


def test_what_decides_a_number_decides_its_unit(checkpoints, config):
    base = replace(config, methods=WAYS, tasks=("perplexity", "passkey"), lengths=(300, 512))

    def keys(**changes):
        planned = plan(replace(base, **changes), (str(checkpoints["llama"]),))
        units = planned.units(planned.subjects[0])
        longest = {part: unit.key for part, unit in units.items() if part.length == 512}
        return {part: key for part, key in longest.items() if part.way in (*WAYS, "0")}

    def other(**changes):
        now = keys(**changes)
        return {part.way if part.task == "perplexity" else part.task for part in before if before[part] != now[part]}

    before = keys()
    assert other(stride=7) == {"sliding"} and other(trials=3) == {"passkey"} == other(chat=False)
    assert other(targets=9) == {"same-targets"} and other(documents=2) == other(batch=7) == {*WAYS}
    assert other(chunk=9) == other(dtype="float64") == other(seed=1) == {*WAYS, "passkey"}


def test_beyond_a_table_of_positions_there_is_a_reason(checkpoints, config, tmp_path):
    config = replace(config, methods=("non-overlapping", "per-position"))
    results, failures, _ = go(config, tmp_path / "run", checkpoints["gpt2"], checkpoints["ours"])
    assert failures == []
    assert {row.length for row in results.rows if row.label == "gpt2"} == {32}
    assert any(row.method == "per-position" and row.label == "gpt2" for row in results.rows)
    assert "gpt2 has no perplexity at 48 64: its table of positions ends at 32" in sentences(results)
    ours = [row for row in results.rows if row.label == "ours"]
    assert {row.length for row in ours} == {32, 48, 64} and {row.encoding for row in ours} == {"alibi"}


def test_a_unit_that_fails_is_reported_and_tried_again(checkpoints, config, tmp_path, monkeypatch):
    with monkeypatch.context() as patched:
        patched.setattr(runs, "losses_by_length", lambda *_, **__: 1 / 0)
        results, failures, _ = go(config, tmp_path / "run", checkpoints["llama"])
    assert len(failures) == 3 and "ZeroDivisionError" in failures[0] and results.rows == []
    results, failures, _ = go(config, tmp_path / "run", checkpoints["llama"])
    assert failures == [] and len(in_bits(results.rows)) == 3


def test_an_extended_model_is_compared_with_the_first(checkpoints, config, tmp_path):
    rope = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0}
    longer = write(tmp_path, "llama", rope_parameters=rope, original_max_position_embeddings=32)
    edit_config(longer, max_position_embeddings=64)
    results, _, _ = go(replace(config, methods=("non-overlapping",)), tmp_path / "run", checkpoints["llama"], longer)
    assert [about["trained"] for about in results.question["models"].values()] == [32, 32]
    table, _ = tables(results)
    assert table.lengths == [32, 48, 64] and [line[1] for line in table.lines] == ["rope", "rope linear"]
    [cost] = [sentence for sentence in sentences(results) if "bits per byte at 32 tokens" in sentence]
    rows = {(row.model, row.length): row.value for row in in_bits(results.rows)}
    change = rows[str(longer), 32] / rows[str(checkpoints["llama"]), 32] - 1
    assert f"{change:+.1%}" in cost
    others = [each._replace(documents={"nats": [1.0] * 3, "bytes": [2] * 3}) for each in results.measured[3:]]
    unpaired = replace(results, measured=(*results.measured[:3], *others))  # of other tokens
    assert not any("bits per byte at 32 tokens" in sentence for sentence in sentences(unpaired))


def spoil(folder, change):
    """Change the weights of a checkpoint in place."""
    weights = load_file(folder / "model.safetensors")
    change(weights)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.mark.slow
def test_one_bad_model_of_several_costs_the_others_nothing(checkpoints, config, tmp_path, monkeypatch):
    """One that cannot be loaded, for a reason that no header shows."""
    bad, load = shutil.copytree(checkpoints["llama"], tmp_path / "bad"), runs.load
    spoil(bad, lambda weights: weights["model.norm.weight"].mul_(1.5))  # else it is the same model as the other
    with monkeypatch.context() as patched:
        patched.setattr(runs, "load", lambda path, **of: load(path, **of) if path != str(bad) else int("damaged"))
        with pytest.raises(ValueError, match="damaged"):
            go(config, tmp_path / "alone", bad)
        results, [failure], _ = go(config, tmp_path / "run", bad, checkpoints["llama"])
    assert failure.startswith("bad was not measured: ") and failure.endswith("'damaged'")
    assert failure in sentences(results) and "bad was not measured" in write_report(results).read_text()
    table, _ = tables(results)
    assert [line[0] for line in table.lines] == ["bad", "llama"]
    assert {cell.value for cell in table.lines[0][3]} == {"–"} and "–" not in {c.value for c in table.lines[1][3]}
    results, failures, watcher = go(config, tmp_path / "run", bad, checkpoints["llama"])  # mended, it is measured
    assert failures == [] and {unit.split()[0] for unit in watcher.units} == {"bad"} and len(watcher.units) == 3


def test_a_model_that_answers_nan_is_not_asked(checkpoints, config, tmp_path):
    nan = shutil.copytree(checkpoints["llama"], tmp_path / "nan")
    spoil(nan, lambda weights: weights["model.norm.weight"].fill_(3e38))
    config = replace(config, lengths=(512,), tasks=("perplexity", "passkey"), depths=(0.0, 1.0), trials=1)
    results, failures, _ = go(config, tmp_path / "run", nan)
    assert failures == ["nan: its logits are not finite, so it is not measured; look at its weights"]
    assert failures[0] in sentences(results)
    assert {row.task for row in results.rows} == {"text"} and all(row.value is None for row in results.rows)
