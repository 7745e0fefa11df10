"""`longitude bench --decode` and the targets of mixers: what is timed is what is said, tiny. Nothing here is timed in earnest."""

import json
import re
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from longitude.attention.mixer import list_mixers, mixer
from longitude.bench import decode_report, targets_mixers
from longitude.bench.config import BenchConfig, checked_for_decoding
from longitude.bench.decode import Decoder, Line, all_labels, decode, exponent
from longitude.bench.sweep import Nobody
from longitude.bench.target import Session
from longitude.cli import main
from longitude.cli.bench import defaults
from longitude.testing.mixers import bytes_held

# What x-transformers does when it is imported.
pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")

SESSION = Session(threads=1, repeats=1, memory=False, peers=False, shrink=256)
LABELS = ("none+attention", "window:size=4", "retention")


def command(capsys, *arguments: str) -> tuple[int, str, str]:
    code = main(arguments)
    captured = capsys.readouterr()
    return code, captured.out, captured.err


@pytest.fixture(scope="module")
def measured():
    config = checked_for_decoding(BenchConfig(contexts=(20, 130), mixers=LABELS, repeats=1, threads=1))
    return config, *decode(config, Nobody())


# ---- what is measured ----------------------------------------------------------------------------------------------------
def test_exponents_are_slopes():
    contexts = [64, 256, 1024]
    for p in (0.0, 0.5, 1.0, 2.0):
        assert exponent(contexts, [3 * n**p for n in contexts]) == pytest.approx(p)
    assert exponent([64], [1.0]) is None
    assert [decode_report._power(p) for p in (None, -0.001, 0.66, -0.11)] == ["", "0.00", "0.66", "-0.11"]


@pytest.mark.parametrize("label", LABELS)
def test_a_step_is_the_whole_pass_one_token_further(label):
    """Behind each context; and a step behind one leaves the caches of the others alone."""
    decoder = Decoder(label, 40)
    caches = {n: cache for n, (cache, _) in zip((16, 33), decoder.filled((16, 33)), strict=True)}
    for n in (33, 16):
        assert caches[n].get_seq_length() == n
        tokens = torch.cat([decoder.ids[:, :n], decoder.ids[:, :1]], 1)
        with torch.no_grad():
            want = decoder.model(tokens, use_cache=False).logits[:, -1:]
        torch.testing.assert_close(decoder.step(caches[n])(), want, atol=1e-4, rtol=1e-4)


def test_every_label_is_measured_behind_every_context(measured):
    config, lines, steps = measured
    assert [line.label for line in lines] == [*LABELS]
    assert [(step.label, step.context) for step in steps] == [(label, n) for label in LABELS for n in (20, 130)]
    for step in steps:
        assert step.seconds > 0 and step.prefill > 0 and step.turns == 5 and step.threads == 1
        assert (step.ratio is None) == (step.context == 20) and step.against == "20"
    assert config.mixers == LABELS


def test_growth_and_bytes_are_those_of_the_cache(measured):
    """Attention holds two vectors of 256 float32 numbers per token in each of 4 layers, and room for more; a window no more than
    3 tokens and room; retention a state."""
    _, lines, steps = measured
    assert [line.growth for line in lines] == ["O(N)", "O(1)", "O(1)"]
    held = {(step.label, step.context): step.cache_bytes for step in steps}
    for n in (20, 130):
        assert held["none+attention", n] >= 4 * n * 2 * 256 * 4
    assert held["retention", 20] == held["retention", 130]
    assert held["retention", 20] >= 4 * 4 * 64 * 128 * 4
    assert lines[2].memory_exponent == pytest.approx(0) and (lines[0].memory_exponent or 0) > 0.05
    decoder = Decoder("retention", 40)
    ((cache, _),) = decoder.filled((20,))
    assert held["retention", 20] == bytes_held(cache.layers)


def test_the_growth_of_a_hybrid_is_its_steepest():
    assert Decoder("retention+window:size=4", 16).growth == "O(1)"
    assert Decoder("retention+attention", 16).growth == "O(N)"


def test_all_is_every_mixer():
    labels = all_labels()
    assert [name for name in list_mixers() if not any(name in label for label in labels)] == []
    assert "rope+attention" in labels and len(labels) == len(list_mixers())
    config = checked_for_decoding(BenchConfig(mixers=labels, contexts=(16,)))
    assert checked_for_decoding(BenchConfig(contexts=(16,))).mixers == config.mixers


# ---- the command ---------------------------------------------------------------------------------------------------------
@pytest.mark.slow
def test_decode_ends_with_table_json_and_chart(tmp_path, capsys):
    out = tmp_path / "deep" / "one.json"
    asked = ("--contexts", "16", "33", "--mixers", "rope+attention", "retention", "--repeats", "1", "--threads", "1")
    code, shown, _ = command(capsys, "bench", "--decode", *asked, "--out", str(out))
    assert code == 0
    assert re.search(r"rope\+attention +O\(N\) +\d+\.\d\d", shown) and re.search(r"retention +O\(1\) +\d", shown)
    assert sorted(path.name for path in out.parent.iterdir()) == ["one.html", "one.json", "one.svg"]
    svg = out.with_suffix(".svg").read_text()
    assert "Milliseconds per token" in svg and "Megabytes of cache" in svg and "O(log N)" in svg and "retention" in svg
    found = json.loads(out.read_text())
    assert found["configuration"]["contexts"] == [16, 33] and "prefill" in found["protocol"]
    assert {row["bytes_per_token"] * row["context"] for row in found["rows"]} == {
        row["cache_bytes"] for row in found["rows"]
    }
    assert found["lines"][0]["mixers"][0]["name"] == "attention" and found["lines"][0]["growth"] == "O(N)"


@pytest.mark.slow
def test_no_measurement_overwrites_another(tmp_path, monkeypatch, capsys):
    """Without --out, and by make: a file for each."""
    monkeypatch.chdir(tmp_path)
    places = {str(defaults(asked.split())["out"]) for asked in ("", "--set", "--mixer-set", "--decode")}
    assert len(places) == 4
    asked = ("--contexts", "16", "--mixers", "retention", "--repeats", "1", "--threads", "1")
    assert command(capsys, "bench", "--decode", *asked)[0] == 0
    assert sorted(path.name for path in (tmp_path / "runs").iterdir()) == [
        f"bench-decode.{kind}" for kind in ("html", "json", "svg")
    ]
    makefile = (Path(__file__).parents[2] / "Makefile").read_text()
    assert "bench-mixers: OF := -mixers" in makefile and "bench-decode: OF := -decode" in makefile


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ("--decode --mixers mambo", "unknown mixer 'mambo': did you mean 'mamba'"),
        ("--decode --mixers window", "'window' needs the option 'size'"),
        ("--decode --mixers alibi+retention", "ALiBi adds to scores, and Retention has none"),
        ("--decode --mixers retention all", "either all or a list"),
        ("--decode --mixers retention retention", "each once"),
        ("--decode --contexts 64 32", "--contexts must ascend"),
        ("--decode --contexts 0", "--contexts must be positive"),
        ("--decode --repeats 0", "--repeats must be at least 1"),
        ("--decode --lengths 64", "--lengths is not of decoding: --decode takes --contexts, --mixers"),
        ("--contexts 64", "--contexts is of decoding: add --decode"),
        ("--mixers retention", "--mixers is of decoding: add --decode"),
        ("--set --decode", "one of --set, --mixer-set and --decode"),
        ("--mixer-set --heads 4", "--heads is what the targets of --mixer-set say"),
    ],
)
def test_wrong_use_is_one_line_and_exit_code_2(arguments, reason, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    code, out, err = command(capsys, "bench", *arguments.split())
    assert code == 2 and out == ""
    assert err.startswith("longitude: ") and err.count("\n") == 1 and reason in err
    assert not list(tmp_path.iterdir())


# ---- the chart -------------------------------------------------------------------------------------------------------------
def test_names_at_the_ends_do_not_overlap(measured):
    """Twenty lines that end at nearly one height: names a line of letters apart, within the panel, in the order of the lines."""
    points = [{"label": f"m{n}", "ms": 5 * 1.001**n} for n in range(20)]
    ends = decode_report._ends(points, "ms", [1.0, 100.0], {point["label"]: None for point in points})
    heights = [end["at"] for end in ends]
    gap = (100.0 / 1.0) ** (decode_report.LETTERS / decode_report.HEIGHT)
    assert [end["label"] for end in ends] == [point["label"] for point in points]
    assert all(above / below == pytest.approx(gap) for below, above in pairwise(heights))
    assert heights[0] >= 1.0 and heights[-1] <= 100.0


def test_a_document_is_read_back_as_measured(measured):
    config, lines, steps = measured
    again = json.loads(json.dumps(decode_report.document(config, lines, steps)))
    assert decode_report.of(again) == (lines, steps)
    assert isinstance(lines[0], Line)


# ---- targets of mixers -------------------------------------------------------------------------------------------------------
def test_every_recurrence_has_its_formula():
    assert set(targets_mixers.formulas(16)) == set(targets_mixers.recurrences())


def test_a_formula_is_the_same_in_both_forms():
    for name, each in targets_mixers.formulas(37).items():
        chunks, steps = each.run("chunked"), each.run("recurrent")
        torch.testing.assert_close(chunks, steps, atol=1e-3, rtol=1e-3, msg=lambda words, name=name: f"{name}: {words}")
        assert all(gradient.isfinite().all() for gradient in torch.autograd.grad(chunks.sum(), each.wanted))


def test_the_steps_of_a_layer_are_its_chunks():
    for name in targets_mixers.recurrences():
        torch.manual_seed(0)
        layer = mixer(name, **targets_mixers.of_width(name))
        x = torch.randn(1, 9, targets_mixers.WIDTH)
        with torch.no_grad():
            torch.testing.assert_close(targets_mixers.token_by_token(layer, x), layer(x), atol=1e-4, rtol=1e-4)


def test_plain_latent_attention_does_the_same_work():
    own, plain, rope = targets_mixers.latents()
    x = torch.randn(2, 19, targets_mixers.WIDTH)
    got, want = plain(x, *targets_mixers.angles(19, own.rope_dim)), own(x, encoding=rope)
    torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-4)
    mine, theirs = (sum(p.numel() for p in model.parameters()) for model in (own, plain))
    assert mine == theirs


def test_plain_encoder_decoder_has_the_same_matrices():
    own, plain = targets_mixers.seq2seqs()
    mine, theirs = (sorted(p.numel() for p in model.parameters() if p.dim() > 1) for model in (own, plain))
    assert sum(mine) == sum(theirs)
    ids = torch.zeros(1, 5, dtype=torch.long)
    assert own(input_ids=ids, decoder_input_ids=ids, use_cache=False).logits.shape == plain(ids, ids).shape


@pytest.mark.one_in(4)
@pytest.mark.parametrize(
    "target",
    [
        pytest.param(each, id=each.name, marks=[pytest.mark.slow] * ("recurren" in each.name))
        for each in targets_mixers.TARGETS
    ],
)
def test_a_target_is_measured(target):
    rows = target.rows(SESSION)
    outcome = target.outcome(rows)
    assert not [row.note for row in rows if row.note] and all(row.group == target.name for row in rows)
    assert outcome["measured"] > 0 and outcome["met"] == (outcome["measured"] <= target.limit)
    assert outcome["how"] and any(row.kind == "plain" for row in rows)
    assert {row.against is None for row in rows if row.kind == "ours"} == {False}
