"""The search for LongRoPE's factors: what a candidate is, what a model does with it, what a kill leaves, what is promised."""

import json
import math
import os
import signal
import subprocess
import sys
import textwrap
import time

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

import longitude as lg
from longitude.checkpoints.positions import rotary_of
from longitude.checkpoints.source import open_source
from longitude.extend import search as room
from longitude.extend.factors import Candidate, RotaryPairs, rotary_pairs, rotating_with
from longitude.extend.plan import Target, plan_extension
from longitude.extend.search import SearchResult, search
from longitude.extend.weights import write_checkpoint
from longitude.measure.text import document_losses
from tests.extend.conftest import loaded, logits

LENGTH = 64
PAIRS = RotaryPairs(base=10_000.0, rotary_dim=64, original_length=4096, length=16384)


def documents(count: int = 3, length: int = 2 * LENGTH + 1) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(3, 250, (length,), generator=generator) for _ in range(count)]


# ---- starts ----------------------------------------------------------------------------------------------------------
def test_linear_divides_every_pair_by_the_factor() -> None:
    assert PAIRS.starts()["linear"] == Candidate((4.0,) * 32, 1.0)


def test_ntk_leaves_the_fastest_pair_and_divides_the_slowest_by_the_factor() -> None:
    """base s^(d/(d-2)) with s = 4, d = 64: pair k is divided by 4^(2k/62)."""
    start = PAIRS.starts()["ntk"]
    assert start.factors == pytest.approx([4 ** (2 * k / 62) for k in range(32)], rel=1e-9)
    assert start.attention_factor == 1


def test_yarn_comes_with_its_attention_factor() -> None:
    """0.1 ln 4 + 1; pairs of 32 turns and more stay, of one turn and less are divided by 4 (correction range 10 to 23)."""
    start = PAIRS.starts()["yarn"]
    assert start.attention_factor == pytest.approx(1.1386294)
    assert start.factors[:11] == pytest.approx([1] * 11) and start.factors[23:] == pytest.approx([4] * 9)
    assert PAIRS.starts()["ntk-by-parts"] == Candidate(start.factors, 1.0)


def test_no_start_ever_falls() -> None:
    for start in PAIRS.starts().values():
        assert all(a <= b * (1 + 1e-12) for a, b in zip(start.factors, start.factors[1:], strict=False))
    assert PAIRS.starts()["unchanged"] == Candidate((1.0,) * 32, 1.0)


# ---- a candidate in a model ------------------------------------------------------------------------------------------
def scheme_for(model, attention_factor: float = 1.1) -> lg.scaling.LongRoPE:
    pairs = rotary_pairs(model, LENGTH, 4 * LENGTH)
    count = pairs.rotary_dim // 2
    return pairs.longrope(Candidate(tuple(1.07 + 0.4 * k for k in range(count)), attention_factor), (1.02,) * count)


@pytest.mark.parametrize("kind", ["llama", "neox", "gemma3", "phi3"])
def test_a_candidate_gives_the_logits_of_the_written_checkpoint(kind, checkpoint, tmp_path) -> None:
    """In plain transformers, at both sides of the border; and the model is afterwards what it was."""
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


def test_its_frequencies_are_those_of_the_scheme(checkpoint) -> None:
    model = loaded(checkpoint("llama"))
    scheme = scheme_for(model)
    with rotating_with(model, scheme):
        logits(model, LENGTH + 1)
        module = rotary_of(model)
        expected = scheme.frequencies(16, 10_000.0, LENGTH + 1)
        assert module is not None
        torch.testing.assert_close(module.inv_freq.double(), expected, rtol=1e-6, atol=0)
        assert module.attention_scaling == 1.1


def test_a_model_is_put_back_after_an_error(checkpoint) -> None:
    model = loaded(checkpoint("llama"))
    before = logits(model, LENGTH)
    with pytest.raises(KeyboardInterrupt), rotating_with(model, scheme_for(model)):
        raise KeyboardInterrupt
    torch.testing.assert_close(logits(model, LENGTH), before)


# ---- the whole search ------------------------------------------------------------------------------------------------
def call(model, state, **options):
    options = {"length": 2 * LENGTH, "original_length": LENGTH, "evaluations": 40, "seed": 3} | options
    return search(model, options.pop("documents", documents()), state=state, **options)


@pytest.fixture
def model(checkpoint):
    return loaded(checkpoint("llama"))


def test_a_search_keeps_its_promises(model, tmp_path) -> None:
    calls = []
    short = logits(model, LENGTH)
    found = call(model, tmp_path / "s", on_progress=lambda *each: calls.append(each))
    assert found.loss <= min(found.starts.values())
    assert [*found.starts] == ["unchanged", "linear", "ntk", "yarn", "ntk-by-parts", "llama3"]
    assert found.tried == 40 == calls[-1][0] and all(total == 40 for _, total, _ in calls)
    assert [best for _, _, best in calls] == sorted((best for _, _, best in calls), reverse=True)
    assert [loss for _, loss in found.history] == sorted({loss for _, loss in found.history}, reverse=True)
    assert found.history[-1][1] == found.loss
    factors = found.scheme.long_factor
    assert list(factors) == sorted(factors) and factors[0] >= 1 and factors[-1] <= 2.5
    with rotating_with(model, found.scheme):
        torch.testing.assert_close(logits(model, LENGTH), short)  # up to the original length nothing changes
        [losses] = [document_losses(model, documents(), window=2 * LENGTH)]
    assert losses.nats.sum() / losses.tokens.sum() == pytest.approx(found.loss, abs=1e-6)
    saved = json.loads((tmp_path / "s" / "search.json").read_text())["found"]
    assert saved["long_factor"] == list(factors) and saved["short_factor"] == [1.0] * 8
    assert saved["attention_factor"] == found.scheme.attention_factor == 1
    assert saved["nats_per_token"] == found.loss and saved["starts"] == found.starts


@pytest.mark.slow
def test_the_seed_decides(model, tmp_path) -> None:
    first, again, other = (call(model, tmp_path / name, seed=seed) for name, seed in (("a", 0), ("b", 0), ("c", 1)))
    assert first == again
    assert first.scheme != other.scheme


@pytest.mark.slow
def test_an_attention_factor_of_its_own_only_where_asked_for(model, tmp_path) -> None:
    longer = {"length": 4 * LENGTH, "documents": documents(length=4 * LENGTH + 1), "evaluations": 80}
    found = call(model, tmp_path / "s", attention=True, **longer)
    tried = [json.loads(line) for line in (tmp_path / "s" / "tried.jsonl").read_text().splitlines()]
    assert found.loss == min(each["loss"] for each in tried)
    factors = {each["attention_factor"] for each in tried}
    assert len(factors) > 3 and min(factors) == 1 and max(factors) <= 1 + 0.1 * math.log(4) + 1e-9
    call(model, tmp_path / "kept")
    tried = [json.loads(line) for line in (tmp_path / "kept" / "tried.jsonl").read_text().splitlines()]
    assert {each["attention_factor"] for each in tried[6:]} == {1.0}


def test_a_start_that_nothing_beats_is_the_result() -> None:
    yarn, plain = PAIRS.starts()["yarn"], PAIRS.starts()["linear"]
    losses, named = {yarn: 1.0, plain: 2.0}, {"yarn": 1.0, "linear": 2.0}
    chosen = room._best(PAIRS, losses, named, attention=False)
    assert chosen.loss == 1 and chosen.scheme.attention_factor == yarn.attention_factor and "short texts" in chosen.note
    better = Candidate((1.0,) * 32, 1.0)
    chosen = room._best(
        PAIRS, {yarn: 1.0, plain: 2.0, Candidate(yarn.factors, 1.2): 0.5, better: 0.9}, named, attention=False
    )
    assert (chosen.loss, chosen.scheme.attention_factor, chosen.note) == (0.9, 1.0, "")


# ---- time and kills --------------------------------------------------------------------------------------------------
def test_the_budget_becomes_a_number_once(model, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(room.Tries, "seconds_each", lambda *_: 1.0)
    monkeypatch.setattr(room, "affordable", lambda budget, spent, seconds: int(60 * budget / seconds) - 6)
    found = call(model, tmp_path / "s", evaluations=None, budget=50 / 60)
    assert found.tried == 50
    monkeypatch.setattr(room.Tries, "seconds_each", lambda *_: 0.5)  # a faster machine now
    assert call(model, tmp_path / "s", evaluations=None, budget=50 / 60) == found
    assert call(model, tmp_path / "s", evaluations=None, budget=30 / 60).tried == 60, "another budget counts anew"
    assert call(model, tmp_path / "s", evaluations=None, budget=0.001).tried == room.FEWEST


def test_the_budget_is_kept() -> None:
    """A sixth of it is for what is not searching, the starts are a part of it; a minute of candidates of half a second."""
    assert room.affordable(1.0, 0.0, 0.5) == 102 and room.affordable(1.0, 6.0, 0.5) == 90
    assert room.affordable(1.0, 60.0, 0.5) == 0


def test_more_than_the_budget_is_said_beforehand(model, tmp_path, monkeypatch) -> None:
    notes = []
    found = call(model, tmp_path / "s", evaluations=None, budget=1e-6, on_note=notes.append)
    assert found.tried == room.FEWEST == json.loads((tmp_path / "s" / "search.json").read_text())["evaluations"]
    assert len(notes) == 1 and "32 candidates" in notes[0]
    monkeypatch.setattr(room, "PUBLISHED", 33)
    call(model, tmp_path / "enough", evaluations=None, budget=60.0, on_note=notes.append)
    assert len(notes) == 1


def test_a_finished_search_evaluates_nothing_again(model, tmp_path, monkeypatch) -> None:
    found = call(model, tmp_path / "s")
    monkeypatch.setattr(room, "_loss", lambda *_: pytest.fail("it was known"))
    assert call(model, tmp_path / "s") == found


@pytest.mark.one_in(5)
@pytest.mark.parametrize("after", [1, 5, 6, 7, 23])
def test_an_interrupted_search_ends_as_one_that_was_not(after, model, tmp_path, monkeypatch) -> None:
    """Whenever it happens: among the starts, between them and the rest, later; and with a line that is half-written."""
    whole = call(model, tmp_path / "whole")
    real, calls = room._loss, []

    def loss(*arguments):
        calls.append(arguments)
        if len(calls) == after:
            raise KeyboardInterrupt
        return real(*arguments)

    monkeypatch.setattr(room, "_loss", loss)
    with pytest.raises(KeyboardInterrupt):
        call(model, tmp_path / "s")
    with open(tmp_path / "s" / "tried.jsonl", "a") as file:
        file.write('{"factors": [1.0, 1.1')
    calls.clear()
    after = 0
    assert call(model, tmp_path / "s") == whole
    assert len({each[2] for each in calls}) == len(calls), "nothing twice"
    for name in ("tried.jsonl", "search.json"):
        assert (tmp_path / "s" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()


def test_a_loss_that_is_no_number_loses(tmp_path, monkeypatch) -> None:
    torch.manual_seed(0)
    small = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=258, max_position_embeddings=LENGTH, **small)).eval()
    real = room._loss
    monkeypatch.setattr(room, "_loss", lambda *given: math.inf if given[2].factors[-1] > 1.5 else real(*given))
    found = call(model, tmp_path / "s")
    assert math.isfinite(found.loss) and found.starts["linear"] == math.inf and found == call(model, tmp_path / "s")
    assert json.loads((tmp_path / "s" / "search.json").read_text())["found"]["starts"]["linear"] is None
    monkeypatch.undo()
    torch.nn.init.constant_(model.lm_head.weight, math.nan)
    with pytest.raises(ValueError, match="no loss of the model is finite"):
        call(model, tmp_path / "none")


# ---- errors ----------------------------------------------------------------------------------------------------------
def test_wrong_use_is_told(model, checkpoint, tmp_path) -> None:
    with pytest.raises(ValueError, match="length above the original one, 64, got 64"):
        call(model, tmp_path / "s", length=LENGTH)
    with pytest.raises(ValueError, match="documents of 129 tokens or more, got one of 128"):
        call(model, tmp_path / "s", documents=[*documents(), torch.zeros(2 * LENGTH, dtype=torch.long)])
    with pytest.raises(ValueError, match="documents of 129 tokens or more, got one of 0"):
        call(model, tmp_path / "s", documents=[])
    with pytest.raises(ValueError, match="GPT2LMHeadModel: expected a model with rotary positions"):
        call(loaded(checkpoint("gpt2")), tmp_path / "s")
    assert not (tmp_path / "s").exists(), "nothing was begun"


def test_the_state_of_another_search_is_refused(model, checkpoint, tmp_path) -> None:
    call(model, tmp_path / "s")
    with pytest.raises(ValueError, match=r"holds a search with text .* remove .* to search again"):
        call(model, tmp_path / "s", documents=documents(length=2 * LENGTH + 2)[1:])
    with pytest.raises(ValueError, match="holds a search with length 128, not 192"):
        call(model, tmp_path / "s", length=3 * LENGTH, documents=documents(length=200))
    with pytest.raises(ValueError, match="holds a search with model"):
        call(loaded(checkpoint("qwen2")), tmp_path / "s")


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("search.json", b"[]"),
        ("search.json", b"{}"),
        ("search.json", b"{\xff"),
        ("search.json", None),  # as it was, without its budget
        ("tried.jsonl", b'{"x": 1}\n'),
        ("tried.jsonl", b"garbage\n"),
        ("tried.jsonl", b"\xff\xfe\n"),
        ("tried.jsonl", b"[1, 2]\n"),
        ("tried.jsonl", b'{"factors": [1.0], "attention_factor": 1.0, "loss": "low"}\n'),
    ],
)
def test_a_damaged_state_is_refused(name, content, model, tmp_path) -> None:
    call(model, tmp_path / "s", evaluations=12)
    path = tmp_path / "s" / name
    if content is None:
        content = path.read_bytes().replace(b'"budget"', b'"bud"')
    path.write_bytes(content)
    with pytest.raises(ValueError, match=f"{name} is .*; remove {path.parent} to search again"):
        call(model, tmp_path / "s", evaluations=12)
    assert path.read_bytes() == content


def test_losses_that_nothing_tells_of_are_not_taken(model, tmp_path) -> None:
    """Without search.json nobody knows which model tried.jsonl is of."""
    found = call(model, tmp_path / "s", evaluations=12)
    log = tmp_path / "s" / "tried.jsonl"
    entries = [json.loads(line) | {"loss": 0.001} for line in log.read_text().splitlines()]
    log.write_text("".join(json.dumps(entry) + "\n" for entry in entries))
    (tmp_path / "s" / "search.json").unlink()
    assert call(model, tmp_path / "s", evaluations=12) == found
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="is no folder"):
        call(model, tmp_path / "file")


def test_windows_come_from_all_over_the_text() -> None:
    long = torch.arange(100 * 4096 + 1)
    windows = room._windows([long], 4096)
    assert [len(window) for window in windows] == [4097] * 4
    assert [int(window[0]) // 4096 for window in windows] == [0, 25, 50, 75]
    assert len(room._windows(documents(100, LENGTH + 1), LENGTH)) == 100
    assert len(room._windows(documents(1000, LENGTH + 1), LENGTH)) == room.TOKENS // LENGTH


# ---- on real processes and a trained model -----------------------------------------------------------------------------
SEARCHING = """
    import sys
    from pathlib import Path
    import torch
    from transformers import AutoModelForCausalLM
    from longitude.extend.search import search

    torch.set_num_threads(1)
    model = AutoModelForCausalLM.from_pretrained(sys.argv[1]).eval()
    texts = [torch.randint(3, 250, (129,), generator=torch.Generator().manual_seed(i)) for i in range(4)]
    search(model, texts, length=128, original_length=64, evaluations=80, seed=5, state=Path(sys.argv[2]))
"""


@pytest.mark.slow
def test_killed_and_called_again_it_ends_the_same(checkpoint, tmp_path) -> None:
    """kill -9, twice, at whatever moment: the files are those of a search that nobody killed, byte for byte."""
    command = [sys.executable, "-c", textwrap.dedent(SEARCHING), str(checkpoint("llama"))]
    subprocess.run([*command, str(tmp_path / "whole")], check=True, capture_output=True)
    log, kills = tmp_path / "killed" / "tried.jsonl", 0
    for lines in (2, 40):
        process = subprocess.Popen([*command, str(tmp_path / "killed")], stderr=subprocess.PIPE)
        while process.poll() is None and (not log.exists() or log.read_bytes().count(b"\n") < lines):
            time.sleep(0.002)
        if process.poll() is None:
            os.kill(process.pid, signal.SIGKILL)
            kills += 1
        process.communicate()
    assert kills == 2
    assert 40 <= log.read_bytes().count(b"\n") < 80
    subprocess.run([*command, str(tmp_path / "killed")], check=True, capture_output=True)
    for name in ("tried.jsonl", "search.json"):
        assert (tmp_path / "killed" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()


@pytest.mark.slow
def test_on_a_trained_model_it_beats_every_start_on_text_it_never_saw(tmp_path) -> None:
    """Trained at 64, searched and measured at 256, on different files of the standard library."""
    from longitude.measure.sources import read_text

    contents = [content for _, content in read_text("stdlib").documents if len(content) > 8_000]
    tokens = [torch.frombuffer(bytearray(content), dtype=torch.uint8).long() for content in contents[:150]]
    training, validation = torch.cat(tokens[:110]), tokens[110:]
    small = {"hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=256, max_position_embeddings=64, tie_word_embeddings=True, **small))
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3)
    generator = torch.Generator().manual_seed(0)
    for _ in range(300):
        starts = torch.randint(len(training) - 64, (24,), generator=generator)
        batch = torch.stack([training[i : i + 64] for i in starts])
        loss = model(input_ids=batch, labels=batch).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    model.eval()
    seen, held = ([text[:257] for text in half] for half in (validation[0::2], validation[1::2]))
    found = search(model, seen, length=256, original_length=64, evaluations=80, state=tmp_path / "s")
    pairs = rotary_pairs(model, 64, 256)

    def nats(scheme) -> float:
        with rotating_with(model, scheme):
            losses = document_losses(model, held, window=256)
        return float(losses.nats.sum() / losses.tokens.sum())

    others = {name: nats(pairs.longrope(start, start.factors)) for name, start in pairs.starts().items()}
    assert found.loss < min(found.starts.values())
    assert nats(found.scheme) < min(others.values())
    assert found.scheme.attention_factor == 1
