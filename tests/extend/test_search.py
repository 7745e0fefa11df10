"""The search for LongRoPE's factors: what a candidate is, what a model does with it, what a kill leaves, what is promised."""

import errno
import json
import math
import multiprocessing
import os
import shutil
import signal
import sys
import time
from itertools import count
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

import longitude as lg
from longitude.checkpoints.positions import rotary_of
from longitude.checkpoints.source import open_source
from longitude.cli import main
from longitude.extend import criteria, short_contexts
from longitude.extend.factors import Candidate, RotaryPairs, rotary_pairs, rotating_with
from longitude.extend.plan import Target, plan_extension
from longitude.extend.search import SearchResult, search
from longitude.extend.spaces import longrope
from longitude.extend.weights import write_checkpoint
from longitude.measure.sources import read_text
from longitude.measure.text import losses_by_length
from longitude.measure.windows import Bounded
from longitude.runs.store import FORMAT, Store
from tests.extend.conftest import LENGTH, config, loaded, logits

module = sys.modules["longitude.extend.search"]
PAIRS = RotaryPairs(base=10_000.0, rotary_dim=64, original_length=4096, length=16384)


def documents(count: int = 3, length: int = 2 * LENGTH + 1) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(3, 250, (length,), generator=generator) for _ in range(count)]


# ---- starts ----------------------------------------------------------------------------------------------------------
def test_starts_are_the_published_schemes() -> None:
    """NTK, base s^(d/(d-2)) with s = 4, d = 64, divides pair k by 4^(2k/62). YaRN keeps pairs of 32 turns and more, divides
    those of one and less by 4 (correction range 10 to 23), and multiplies scores by 0.1 ln 4 + 1, twice."""
    starts = PAIRS.starts()
    assert starts["unchanged"] == Candidate((1.0,) * 32, 1.0) and starts["linear"] == Candidate((4.0,) * 32, 1.0)
    assert starts["ntk"].factors == pytest.approx([4 ** (2 * k / 62) for k in range(32)], rel=1e-9)
    yarn = starts["yarn"]
    assert (starts["ntk"].attention_factor, yarn.attention_factor) == (1, pytest.approx(1.1386294))
    assert yarn.factors[:11] == pytest.approx([1] * 11) and yarn.factors[23:] == pytest.approx([4] * 9)
    assert starts["ntk-by-parts"] == Candidate(yarn.factors, 1.0)
    for start in starts.values():
        assert all(a <= b * (1 + 1e-12) for a, b in zip(start.factors, start.factors[1:], strict=False))


# ---- a candidate in a model ------------------------------------------------------------------------------------------
def scheme_for(model) -> lg.scaling.LongRoPE:
    pairs = rotary_pairs(model, LENGTH, 4 * LENGTH)
    count = pairs.rotary_dim // 2
    return pairs.longrope(Candidate(tuple(1.07 + 0.4 * k for k in range(count)), 1.1), (1.02,) * count)


@pytest.mark.parametrize("kind", ["llama", "gpt_neox", "gemma3_text", "phi3"])
def test_a_candidate_is_the_written_checkpoint(kind, checkpoint, tmp_path) -> None:
    """The same logits in plain transformers at both sides of the border, by the factors of the scheme; then the model is
    what it was, after an error too."""
    source = open_source(str(checkpoint(kind)))
    model = loaded(source.folder)
    scheme = scheme_for(model)
    plan = plan_extension(source, Target(to=4 * LENGTH, method="longrope"), SearchResult(scheme, 1.0, {}, [], 0))
    write_checkpoint(source, tmp_path / "out", plan.changes, plan.config)
    written = loaded(tmp_path / "out")
    for length in (LENGTH, LENGTH + 1, 4 * LENGTH):
        before = logits(model, length)
        with rotating_with(model, scheme):
            within = logits(model, length)
        torch.testing.assert_close(within, logits(written, length))
        assert not torch.allclose(within, before, atol=1e-4)
        torch.testing.assert_close(logits(model, length), before)
    prefix = "full_attention_" if kind == "gemma3_text" else ""
    with pytest.raises(ZeroDivisionError), rotating_with(model, scheme):
        raise ZeroDivisionError
    torch.testing.assert_close(logits(model, LENGTH), logits(loaded(source.folder), LENGTH))
    rotary, dim = rotary_of(written), 2 * len(scheme.long_factor)
    want = scheme.frequencies(dim, plan.base, 4 * LENGTH)
    torch.testing.assert_close(
        want, plan.base ** (-torch.arange(0, dim, 2) / dim) / want.new_tensor(scheme.long_factor)
    )
    torch.testing.assert_close(getattr(rotary, f"{prefix}inv_freq").double(), want, rtol=2e-6, atol=0)
    assert getattr(rotary, f"{prefix}attention_scaling") == plan.attention_factor == 1.1


# ---- the whole search ------------------------------------------------------------------------------------------------
def call(model, state, **options):
    options = {"evaluations": 40, "seed": 3} | options
    length = options.pop("length", 2 * LENGTH)
    criterion = criteria.running_text(options.pop("documents", documents()), length)
    return search(model, longrope(rotary_pairs(model, LENGTH, length)), criterion, store=Store(state), **options)


@pytest.fixture(scope="module")
def model(checkpoint):
    return loaded(checkpoint("llama"))


@pytest.fixture(scope="module")
def whole(model, tmp_path_factory):
    """(result, folder, calls of on_progress) of a search that nothing interrupted."""
    folder, calls = tmp_path_factory.mktemp("searches") / "whole", []
    return call(model, folder, on_progress=lambda *each: calls.append(each)), folder, calls


def results(state: Path) -> dict[str, float]:
    """What the units of a state hold, by their names: nats per token."""
    return {path.parent.name: json.loads(path.read_text())["nats"] for path in state.glob("units/*/result.json")}


@pytest.fixture
def state(whole, tmp_path):
    """A copy of what that search left."""
    return shutil.copytree(whole[1], tmp_path / "s")


def test_a_search_keeps_its_promises(model, whole, tmp_path) -> None:
    found, folder, calls = whole
    assert found.loss < min(found.starts.values())
    assert {*found.starts} == {"unchanged", "linear", "ntk", "yarn", "ntk-by-parts", "llama3"}
    assert found.tried == 40 == calls[-1][0] and all(total == 40 for _, total, _ in calls)
    assert [best for _, _, best in calls] == sorted((best for _, _, best in calls), reverse=True)
    assert [loss for _, loss in found.history] == sorted({loss for _, loss in found.history}, reverse=True)
    assert found.history[-1][1] == found.loss
    factors = found.scheme.long_factor
    assert list(factors) == sorted(factors) and factors[0] >= 1 and factors[-1] <= 2.5
    short = logits(model, LENGTH)
    with rotating_with(model, found.scheme):
        torch.testing.assert_close(logits(model, LENGTH), short)  # up to the original length nothing changes
        [losses] = losses_by_length(model, documents(), lengths=[2 * LENGTH], methods=["non-overlapping"])
    assert losses.nats.sum() / losses.tokens.sum() == pytest.approx(found.loss, abs=1e-6)
    saved = found.as_json()["found"]
    assert saved["long_factor"] == list(factors) and saved["short_factor"] == [1.0] * 8
    assert saved["attention_factor"] == found.scheme.attention_factor == 1
    assert saved["nats_per_token"] == found.loss and saved["starts"] == found.starts
    assert found.loss == min(results(folder).values()) and len(results(folder)) == 40
    assert call(model, tmp_path, seed=4).scheme != found.scheme


def test_a_start_that_nothing_beats_is_the_result() -> None:
    yarn, plain = PAIRS.starts()["yarn"], PAIRS.starts()["linear"]
    losses, named = {yarn: 1.0, plain: 2.0}, {"yarn": 1.0, "linear": 2.0}
    chosen = module._best(PAIRS, losses, named, {})
    assert chosen.loss == 1 and chosen.scheme.attention_factor == yarn.attention_factor and "short texts" in chosen.note
    losses |= {Candidate(yarn.factors, 1.2): 0.5, Candidate((1.0,) * 32, 1.0): 0.9}
    chosen = module._best(PAIRS, losses, named, {})
    assert (chosen.loss, chosen.scheme.attention_factor, chosen.note) == (0.9, 1.0, "")


def test_a_loss_that_is_no_number_loses(tmp_path, monkeypatch) -> None:
    torch.manual_seed(0)
    small = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=258, max_position_embeddings=LENGTH, **small)).eval()
    real = module._loss
    monkeypatch.setattr(module, "_loss", lambda *given: math.inf if given[2].factors[-1] > 1.5 else real(*given))
    found = call(model, tmp_path / "s")
    assert math.isfinite(found.loss) and found.starts["linear"] == math.inf and found == call(model, tmp_path / "s")
    assert found.as_json()["found"]["starts"]["linear"] is None
    monkeypatch.undo()
    torch.nn.init.constant_(model.lm_head.weight, math.nan)
    pairs = rotary_pairs(model, LENGTH, 2 * LENGTH)
    text, none = criteria.running_text(documents(1), LENGTH), tmp_path / "passes.jsonl"
    assert module._loss(model, pairs, Candidate((1.0,) * 4, 1.0), text, none) == math.inf and not none.exists()
    with pytest.raises(ValueError, match="no loss of the model is finite"):
        call(model, tmp_path / "none")


def test_windows_come_from_all_over_the_text() -> None:
    windows = criteria.running_text([torch.arange(100 * 4096 + 1)], 4096).windows
    assert [len(window) for window in windows] == [4097] * 4
    assert [int(window[0]) // 4096 for window in windows] == [0, 25, 50, 75]
    assert len(criteria.running_text(documents(100, LENGTH + 1), LENGTH).windows) == 100
    assert len(criteria.running_text(documents(1000, LENGTH + 1), LENGTH).windows) == criteria.TOKENS // LENGTH


# ---- time and kills --------------------------------------------------------------------------------------------------
def test_the_budget_becomes_a_number_by_the_times_that_are_kept(model, tmp_path, monkeypatch) -> None:
    """The same after a kill, and in a process beside this one."""
    times = []
    monkeypatch.setattr(module, "affordable", lambda *given: times.append(given) or 44)
    found = call(model, tmp_path / "s", evaluations=None, budget=0.8)
    assert found.tried == 50 and call(model, tmp_path / "s", evaluations=None, budget=0.8) == found
    assert times[0] == times[1] and times[0][0] == 0.8 and times[0][1] > times[0][2] > 0


@pytest.mark.slow
def test_the_budget_is_kept_or_a_note_precedes_it(model, tmp_path, monkeypatch) -> None:
    """A sixth is for what is not searching, the starts are a part of it; a minute of candidates of half a second."""
    assert [module.affordable(1.0, spent, 0.5) for spent in (0.0, 6.0, 60.0)] == [102, 90, 0]
    notes = []
    found = call(model, tmp_path / "s", evaluations=None, budget=1e-6, on_note=notes.append)
    assert found.tried == module.FEWEST == found.as_json()["evaluations"]
    assert len(notes) == 1 and "32 candidates" in notes[0]
    monkeypatch.setattr(module, "PUBLISHED", 33)
    call(model, tmp_path / "enough", evaluations=None, budget=60.0, on_note=notes.append)
    assert len(notes) == 1


@pytest.mark.one_in(5)
@pytest.mark.parametrize("after", [7, 1, 5, 6, 23])
def test_an_interrupted_search_ends_as_one_that_was_not(after, model, whole, tmp_path, monkeypatch) -> None:
    """Whenever it happens: among the starts, between them and the rest, later."""
    real, calls, stops = module._loss, [], [after]

    def loss(*arguments):
        if len(calls) + 1 in stops:
            raise KeyboardInterrupt
        calls.append(arguments[2])
        return real(*arguments)

    monkeypatch.setattr(module, "_loss", loss)
    with pytest.raises(KeyboardInterrupt):
        call(model, tmp_path / "s")
    stops.clear()
    assert call(model, tmp_path / "s") == whole[0]
    assert len(set(calls)) == len(calls) == 40, "nothing twice"
    assert call(model, tmp_path / "s") == whole[0] and len(calls) == 40, "nothing again once it is finished"
    assert results(tmp_path / "s") == results(whole[1])


def test_a_kill_within_a_candidate_costs_one_pass(model, whole, tmp_path, monkeypatch) -> None:
    """Its passes are kept as they come, the last one half-written here; and the loss is the same to the bit."""
    monkeypatch.setattr(criteria, "BATCH", 1)
    read, passes = Bounded.losses, []

    def losses(self, tokens, skip):
        passes.append(tokens)
        if len(passes) == 3:
            raise KeyboardInterrupt
        return read(self, tokens, skip)

    monkeypatch.setattr(Bounded, "losses", losses)
    with pytest.raises(KeyboardInterrupt):
        call(model, tmp_path / "s")
    [kept] = tmp_path.glob("s/units/.candidate-*/passes.jsonl")
    assert len(kept.read_text().splitlines()) == 2
    with open(kept, "a") as file:
        file.write('{"pass": "ab')
    count = len(criteria.running_text(documents(), 2 * LENGTH).windows)
    assert count == 3 and call(model, tmp_path / "s", evaluations=6).starts == pytest.approx(whole[0].starts, abs=1e-6)
    assert len(passes) == 3 + 1 + 5 * 3, "the two that were whole are not read again"
    assert call(model, tmp_path / "other", evaluations=6).starts == call(model, tmp_path / "s", evaluations=6).starts


# ---- errors ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("kind", "options", "words"),
    [
        ("llama", {"length": LENGTH}, "length above the original one, 64, got 64"),
        ("llama", {"documents": documents(length=128)}, "documents of 129 tokens or more, got one of 128"),
        ("llama", {"documents": []}, "documents of 129 tokens or more, got one of 0"),
        ("gpt2", {}, "GPT2LMHeadModel: expected a model with rotary positions"),
    ],
)
def test_wrong_use(kind, options, words, checkpoint, tmp_path) -> None:
    with pytest.raises(ValueError, match=words):
        call(loaded(checkpoint(kind)), tmp_path / "new", **options)
    assert not (tmp_path / "new").exists(), "nothing was begun"


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("llama", {"documents": documents(4)[1:]}),
        ("llama", {"length": 192, "documents": documents(length=200)}),
        ("qwen2", {}),
    ],
)
def test_another_question_has_units_of_its_own(kind, options, whole, checkpoint, state) -> None:
    """Another text, length or model; the first one's answer stays, and is that of a state that held nothing."""
    before = results(state)
    found = call(loaded(checkpoint(kind)), state, evaluations=8, **options)
    assert len(results(state)) == len(before) + 8 and results(state).items() > before.items()
    assert found == call(loaded(checkpoint(kind)), state.with_name("empty"), evaluations=8, **options) != whole[0]


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("result.json", b"[]"),
        ("result.json", b"{\xff"),
        ("result.json", b'{"nats": "low", "seconds": 1.0}'),
        ("result.json", None),
        ("unit.json", b"{}"),
        ("unit.json", "newer"),
    ],
)
def test_a_damaged_unit_and_that_of_a_newer_release_are_named(name, content, model, whole, state) -> None:
    """And the remedy is one."""
    path = min(state.glob(f"units/*/{name}"))
    if content == "newer":
        path.write_text(json.dumps(json.loads(path.read_text()) | {"format": FORMAT + 1}))
    elif content is None:
        path.unlink()
    else:
        path.write_bytes(content)
    with pytest.raises(ValueError) as caught:
        call(model, state)
    assert str(path.parent) in str(caught.value)
    path.parent.rename(state / "away")
    assert call(model, state) == whole[0]


# ---- the verb --------------------------------------------------------------------------------------------------------
@pytest.fixture
def arguments(checkpoint, text, monkeypatch):
    """Of a short search."""
    monkeypatch.setattr(criteria, "TOKENS", 512)
    monkeypatch.setattr("longitude.extend.short_contexts.TOKENS", 512)
    return [checkpoint("llama"), "--to", 2 * LENGTH, "--method", "longrope", "--budget", 1e-6, "--text", text]


@pytest.mark.one_in(2)
@pytest.mark.parametrize("tuned", [[], ["--steps", 2]], ids=["alone", "fine-tuned"])
def test_longrope(tuned, arguments, text, checkpoint, command, refused, tmp_path) -> None:
    """Both lists of the search stand in config.json and in a JSON next to it; short texts are as they were."""
    for option in ("--dry-run", "--no-measure"):
        assert option in refused(*arguments, option)
    out = tmp_path / "out"
    tuned = ["--fine-tune", text, *tuned] if tuned else []
    code, printed, _ = command(*arguments, *tuned, "--out", out, "--json")
    found = json.loads(printed)
    assert code == 0 and found["search"]["loss"] <= min(found["search"]["starts"].values())
    rope, saved = config(out)["rope_parameters"], json.loads((out / "longrope_search.json").read_text())
    assert rope["rope_type"] == "longrope" and rope["original_max_position_embeddings"] == LENGTH
    assert all(rope[name] == saved["found"][name] for name in ("long_factor", "short_factor"))
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []
    short, before = logits(loaded(out), LENGTH), logits(loaded(checkpoint("llama")), LENGTH)
    assert logits(loaded(out), 2 * LENGTH).isfinite().all()
    assert torch.allclose(short, before, atol=1e-5) == (rope["attention_factor"] == 1 and not tuned)
    assert len(found["tuned"]["losses"] if tuned else [0, 0]) == 2


def test_the_same_command_continues_after_an_interruption(arguments, command, tmp_path, monkeypatch) -> None:
    """While the checkpoint is written: nothing that was measured or tried is read again."""

    def interrupted(*_, **__):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(sys.modules["longitude.extend.extend"], "write_checkpoint", interrupted)
        assert command(*arguments, "--out", tmp_path / "out")[0] == 130
    assert len([*tmp_path.glob(".out.work/units/candidate-*")]) == 32 and not (tmp_path / "out").exists()
    monkeypatch.setattr(module, "_loss", lambda *_: pytest.fail("it was known"))
    reads = []
    monkeypatch.setattr(
        "longitude.extend.short_contexts.losses_by_length",
        lambda *given, **named: reads.append(given) or losses_by_length(*given, **named),
    )
    assert command(*arguments, "--out", tmp_path / "out")[0] == 0 and len(reads) == 1, "of the new one alone"
    assert (tmp_path / "out").is_dir() and not (tmp_path / ".out.work").exists()


@pytest.mark.slow
def test_a_damaged_unit_ends_the_command_in_a_line(arguments, command, tmp_path, monkeypatch) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(sys.modules["longitude.extend.extend"], "plan_extension", lambda *_, **__: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            command(*arguments, "--out", tmp_path / "out")
    unit = min(tmp_path.glob(".out.work/units/candidate-*"))
    (unit / "result.json").write_text("{}")
    code, printed, line = command(*arguments, "--out", tmp_path / "out")
    assert (code, printed) == (2, "") and str(unit) in line and unit.is_dir() and not (tmp_path / "out").exists()
    unit.rename(tmp_path / "away")
    assert command(*arguments, "--out", tmp_path / "out")[0] == 0


@pytest.mark.slow
def test_a_full_disk_leaves_nothing_half_written(arguments, command, tmp_path, monkeypatch) -> None:
    """At whatever write it becomes full; the same command goes on where there is space again, and ends as if there always was."""
    writes, most, sync, random = [], [math.inf], os.fsync, Random(0)

    def full(descriptor):
        if len(writes) >= most[0]:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        writes.append(sync(descriptor))

    monkeypatch.setattr(os, "fsync", full)
    assert command(*arguments, "--out", tmp_path / "whole")[0] == 0
    fewest, times = len(writes) // 3, 0
    while not (tmp_path / "out").exists():
        writes.clear()
        most[0], times = random.randint(0, fewest), times + 1
        code, _, line = command(*arguments, "--out", tmp_path / "out")
        # It may also become full when the checkpoint has its name, and the folder that it is in is flushed.
        assert (code == 0 and (tmp_path / "out").exists()) or (code == 2 and "No space left" in line)
        assert not [path for path in tmp_path.rglob("*") if path.name.endswith(".tmp") or "unfinished" in path.name]
    assert times > 3 and config(tmp_path / "out") == config(tmp_path / "whole")
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]


def extending(arguments: list[str], log: str) -> None:
    """In a process of its own: the command, with a line for every candidate whose evaluation begins."""
    torch.set_num_threads(1)
    criteria.TOKENS = short_contexts.TOKENS = 512
    loss = module._loss

    def logged(*given):
        with open(log, "a") as file:
            file.write(f"{given[2]}\n")
        return loss(*given)

    module._loss = logged
    sys.exit(main(["extend", *arguments]))


@pytest.mark.slow
@pytest.mark.parametrize("kills", [20])
def test_killed_at_any_moment_and_shared_by_two_processes(kills, arguments, tmp_path) -> None:
    """Each kill hits one of two processes; what is written is what one undisturbed process writes."""
    context: Any = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.extend.test_search"])
    random = Random(kills)

    def start(name: str) -> Any:
        given = [*map(str, arguments), "--out", str(tmp_path / name)]
        process = context.Process(target=extending, args=(given, str(tmp_path / f"{name}.log")))
        process.start()
        return process

    def found(name: str) -> tuple[dict[str, bytes], dict[str, Any], list[str]]:
        """The files of a checkpoint, its search, and the candidates whose evaluation began."""
        files = {path.name: path.read_bytes() for path in (tmp_path / name).iterdir()}
        return files, json.loads(files.pop("longrope_search.json")), (tmp_path / f"{name}.log").read_text().splitlines()

    begun = time.monotonic()
    whole = start("whole")
    whole.join()
    took = time.monotonic() - begun
    wanted = found("whole")
    assert whole.exitcode == 0 and len(wanted[2]) == 32
    for name in map("out-{}".format, count()):  # a round may end before a kill hits
        if kills <= 0:
            break
        hit, late = 0, False
        running = [start(name), start(name)]
        while not (tmp_path / name).exists() and hit < kills:
            time.sleep(random.uniform(0, took / 4))
            victim = running.pop(0)
            victim.kill()
            victim.join()
            hit, late = hit + (victim.exitcode == -signal.SIGKILL), (tmp_path / name).exists()
            running.append(start(name))
        for process in running:
            process.join()
        files, search, tried = found(name)
        assert (files, search) == wanted[:2]
        assert {*tried} == {*wanted[2]} and len(tried) <= 32 + hit, "nothing twice, but for what a kill interrupted"
        if not late:  # no kill between the name of the folder and the end
            assert 0 in {process.exitcode for process in running}
            assert not [path for path in tmp_path.iterdir() if path.name.startswith(f".{name}.")]
        kills -= hit


# ---- a trained model -------------------------------------------------------------------------------------------------
@pytest.mark.slow
def test_a_searched_model_beats_every_start_on_held_out_text(tmp_path) -> None:
    """Trained at 64 tokens of the standard library; searched, and then measured, at 256 of other files."""
    files = [content for _, content in read_text("stdlib").documents if len(content) > 8_000][:150]
    tokens = [torch.frombuffer(bytearray(content), dtype=torch.uint8).long() for content in files]
    windows, others = torch.cat(tokens[:110]).unfold(0, 64, 64), [file[:257] for file in tokens[110:]]
    torch.manual_seed(0)
    small = {"hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=256, max_position_embeddings=64, tie_word_embeddings=True, **small))
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3)
    for batch in windows[torch.randperm(len(windows))].split(24)[:300]:
        optimizer.zero_grad()
        model(input_ids=batch, labels=batch).loss.backward()
        optimizer.step()
    pairs = rotary_pairs(model.eval(), 64, 256)
    selection, held_out = (criteria.running_text(some, 256) for some in (others[0::2], others[1::2]))
    found = search(model, longrope(pairs), selection, evaluations=80, store=Store(tmp_path / "s"))
    candidates = [Candidate(found.scheme.long_factor, found.scheme.attention_factor), *pairs.starts().values()]
    searched, *starts = (
        module._loss(model, pairs, each, held_out, tmp_path / f"{i}.jsonl") for i, each in enumerate(candidates)
    )
    assert found.scheme.attention_factor == 1 and searched < min(starts)
