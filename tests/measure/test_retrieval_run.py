"""Retrieval of whole models: ones that read their prompts by rule, and ones that generate."""

import re
from collections import Counter
from dataclasses import replace
from hashlib import sha256
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from transformers import GenerationConfig

from longitude.checkpoints.load import Checkpoint, byte_tokenizer
from longitude.checkpoints.positions import last_position
from longitude.measure import Row
from longitude.measure.retrieval import TASKS, effective_length, run, scores_by_length
from longitude.measure.retrieval.haystack import of_python
from longitude.measure.retrieval.measurement import answer, plan
from longitude.measure.retrieval.tasks import LANDMARKS
from tests.measure.conftest import build
from tests.support import refused

TOKENS = byte_tokenizer()


def solve(text: str) -> list[str]:
    """The answer to a prompt of any task, read from nothing but the prompt; "unknown" for what is not there."""
    if text.endswith("What is the pass key? The pass key is"):
        return re.findall(r"The pass key is (\d+)\. Remember it\.", text) or ["unknown"]
    if asked := re.search(r"Which character has been to ([^?]*)\? Only answer", text):
        lines = re.findall(r"Actually, (\w+) lives next to (.*?)\.", text)
        return [name for name, landmark in lines if asked[1] in LANDMARKS[landmark]] or ["unknown"]
    if asked := re.search(r"What (?:is|are all) the special magic numbers? for ([^?]*) mentioned in the", text):
        keys = re.split(r", and |, ", asked[1])
        found = [number for key in keys for number in re.findall(rf"magic numbers for {key} is: (\d+)\.", text)]
        return found or ["unknown"]
    if "they are: " in text:
        puzzle = text.rpartition("Memorize and track")[2]
        holds = {re.findall(r"assigned the value (\d+)", puzzle)[0]}
        for name, value in re.findall(r"VAR (\w+) = (?:VAR )?(\w+)", puzzle):
            holds |= {name} if value in holds else set()
        return [name for name in holds if name.isalpha()] or ["unknown"]
    if "numbered list of words" in text:
        items = text.rpartition("Memorize the ones")[2].partition("\nQuestion")[0]
        return [word for word, _ in Counter(re.findall(r"\d+\. (\S+)", items)).most_common(10)]
    coded = text.rpartition("Find the three most")[2].partition("\nQuestion")[0].partition("coded words. ")[2]
    return [word for word, _ in Counter(coded.split()).most_common(4) if word != "..."]


class Reader(nn.Module):
    """A model that answers by rule, from the last `window` tokens of its prompt, in as many tokens as it is given."""

    device, dtype = torch.device("cpu"), torch.float32

    def __init__(self, window=10**9, dies_after=None):
        super().__init__()
        self.window, self.dies_after, self.asked = window, dies_after, 0
        self.config = SimpleNamespace(_attn_implementation="by rule")
        self.generation_config = GenerationConfig()

    def generate(self, input_ids, attention_mask):
        assert input_ids.shape[0] == 1 and attention_mask.all() and self.generation_config.use_cache
        if self.asked == self.dies_after:
            raise MemoryError
        self.asked += 1
        found = " " + " ".join(solve(TOKENS.decode(input_ids[0, -self.window :].tolist())))
        ids = TOKENS(found)["input_ids"][: self.generation_config.max_new_tokens]
        return torch.cat([input_ids, torch.tensor([ids])], dim=1)


def reader(**options) -> Checkpoint:
    return Checkpoint(Reader(**options), TOKENS, None, "reader")  # pyright: ignore[reportArgumentType]


# ---- models that read by rule ------------------------------------------------------------------------------------------
@pytest.mark.one_in(7)
@pytest.mark.parametrize("name", TASKS)
def test_a_model_that_reads_everything_gets_everything(name):
    rows = list(run(reader(), name, lengths=[2500, 8000], trials=4))
    assert [(row.length, row.value, row.count) for row in rows] == [(2500, 1.0, 4), (8000, 1.0, 4)]
    assert effective_length(rows) == 8000


@pytest.mark.parametrize("name", TASKS)
def test_a_model_that_reads_only_the_question_gets_nothing(name):
    [row] = run(reader(window=130), name, lengths=[3000], trials=4)
    assert row.value == 0 and row.low == 0 and row.high == pytest.approx(0.4899, abs=1e-4)


def test_the_grid_shows_the_window():
    # 1014 tokens of prompt: description 149, filler 768, line 58, question 37. The line begins 865 - depth * 768 before
    # the end; with 2038 tokens 1889 - depth * 1792. 700 tokens are seen.
    rows = list(run(reader(window=700), "passkey", lengths=[512, 1024, 2048], depths=[0, 0.25, 0.5, 0.75, 1], trials=3))
    seen = {length: [row.value for row in rows if row.length == length] for length in (512, 1024, 2048)}
    assert seen == {512: [1] * 5, 1024: [0, 1, 1, 1, 1], 2048: [0, 0, 0, 1, 1]}
    for row in rows:
        assert row.value == (row.length - 10 - row.position_from <= 700)
    assert scores_by_length(rows) == pytest.approx({512: 1.0, 1024: 0.8, 2048: 0.4})
    lengths = {threshold: effective_length(rows, threshold) for threshold in (0.4, 0.41, 0.8, 0.81, 1)}
    assert lengths == {0.4: 2048, 0.41: 1024, 0.8: 1024, 0.81: 512, 1: 512}
    assert effective_length(rows) == 512


def test_rows_hold_how_they_were_measured():
    labels = {"model": "a/b", "label": "x", "train_length": 256}
    [row] = run(reader(), "needle-single", lengths=[1500], depths=[0.5], trials=3, seed=5, **labels)
    assert row.task == "needle-single" and row.metric == "recall" and row.weighting == "trial" and row.bos == "none"
    assert (row.model, row.label, row.seed, row.train_length) == ("a/b", "x", None, 256)
    assert row.method == f"greedy, questions of seed 5, in {of_python().source}"
    assert row.depth == 0.5 and row.truncation == "none, prompts are filled"
    assert row.window is not None and 1490 <= row.window <= 1500 and row.tokens == 3 * 128
    assert row.position_from is not None and row.position_to is not None
    assert 500 < row.position_from < row.position_to < 1000
    assert (row.dtype, row.backend, row.prefill) == ("float32", "by rule", "one pass")
    [passkey] = run(reader(), "passkey", lengths=[600], trials=1)
    assert passkey.metric == "accuracy" and passkey.method == "greedy, questions of seed 0"
    assert passkey.depth is passkey.position_from is None
    tokens = byte_tokenizer()
    tokens.chat_template = "{{ messages[0].content }}"
    [chat] = run(replace(reader(), tokenizer=tokens), "passkey", lengths=[600], trials=1)
    template = sha256(tokens.chat_template.encode()).hexdigest()[:12]
    assert chat.method == f"greedy, questions of seed 0, in the chat template (sha256 {template})"


def test_a_length_that_is_too_short_has_a_row_without_value_and_progress_counts_it():
    seen = []
    options = {"lengths": [400, 700, 2000], "trials": 2, "progress": lambda *tokens: seen.append(tokens)}
    rows = list(run(reader(), "variable-tracking", **options))
    assert [row.value for row in rows] == [None, None, 1.0] and rows[0].count == 0
    assert re.fullmatch(r"its shortest prompt .* takes \d+ tokens", rows[1].reason or "")
    assert seen == [(800, 6200), (2200, 6200), (4200, 6200), (6200, 6200)]
    with refused("[300, 700]"):
        run(reader(), "variable-tracking", lengths=[300, 700])


def test_a_crash_loses_one_row():
    rows = []
    with pytest.raises(MemoryError):
        rows.extend(run(reader(dies_after=7), "passkey", lengths=[512, 1024], depths=[0, 1], trials=3))
    assert [(row.length, row.depth) for row in rows] == [(512, 0), (512, 1)]


# ---- models that generate ------------------------------------------------------------------------------------------------
def tiny(name: str = "llama", **options) -> Checkpoint:
    model = build(name, **options).eval()
    return Checkpoint(model, TOKENS, model.config, "tiny")


def test_answers_are_greedy_whatever_the_checkpoint_sets():
    checkpoint = tiny()
    model = checkpoint.model
    prompt = plan("passkey", [400], None, 1).prompt(TOKENS, 400, 0.5, 0)
    ids = torch.tensor([prompt.ids])
    with torch.no_grad():
        for _ in range(prompt.new_tokens):  # the whole prompt again for each token
            ids = torch.cat([ids, model(input_ids=ids, use_cache=False).logits[:, -1:].argmax(-1)], dim=1)
    expected = TOKENS.decode(ids[0, len(prompt.ids) :])
    assert answer(model, TOKENS, prompt) == expected
    assert answer(model, TOKENS, prompt, prefill=33) == expected
    model.generation_config = own = GenerationConfig(
        do_sample=True, temperature=9.0, repetition_penalty=5.0, no_repeat_ngram_size=1, max_length=20, use_cache=False
    )
    assert answer(model, TOKENS, prompt) == expected
    assert model.generation_config is own
    rows = list(run(checkpoint, "passkey", lengths=[300, 500], depths=[0, 1], trials=2, prefill=64))
    assert len(rows) == 4 and all(row.value is not None and row.count == 2 for row in rows)
    assert rows[0].depth == 0 and rows[0].backend == "sdpa" and rows[0].prefill == "chunks of 64 with the cache"


def test_a_table_of_positions_ends():
    checkpoint = tiny("gpt2", n_positions=400)
    assert last_position(checkpoint.model) == 400 and last_position(tiny().model) is None
    rows = list(run(checkpoint, "passkey", lengths=[400, 401], trials=1))
    assert [row.value is None for row in rows] == [False, True]
    assert rows[1].reason == "the model's table ends at 400 positions"
    with refused("400"):
        run(checkpoint, "passkey", lengths=[500])


@pytest.mark.parametrize(
    ("tokenizer", "options", "words"),
    [
        (TOKENS, {"labels": 3}, ("'labels'", "'label'")),
        (TOKENS, {"prefill": 0}, ("prefill", "1")),
        (None, {}, ("text", "tokenizer=True")),
    ],
)
def test_wrong_options_are_refused_before_anything_runs(tokenizer, options, words):
    with refused(*words):
        run(replace(reader(dies_after=0), tokenizer=tokenizer), "passkey", lengths=[512], **options)


# ---- summaries ------------------------------------------------------------------------------------------------------------
def row(task, length, value, depth=None, model="m"):
    return Row(task=task, length=length, value=value, depth=depth, model=model, metric="accuracy", weighting="trial")


def test_effective_length_stays_above():
    values = {4: 1.0, 8: 0.9, 16: 0.856, 32: 0.8559, 64: 1.0}
    rows = [row("passkey", length, value) for length, value in values.items()]
    assert effective_length(rows) == 16  # though 64 is above again
    assert effective_length(rows, 0.9) == 8 and effective_length(rows, 0.5) == 64 and effective_length(rows[3:]) is None
    assert effective_length([]) is None


def test_tasks_count_equally_and_depths_within_a_task():
    rows = [row("passkey", 4, value, depth) for value, depth in ((1.0, 0.0), (1.0, 0.5), (0.4, 1.0))]
    rows += [row("common-words", 4, 0.2), row("common-words", 8, 1.0)]
    assert scores_by_length(rows) == pytest.approx({4: 0.5})  # at 8 a task is missing
    assert scores_by_length([*rows, row("passkey", 8, None)]) == pytest.approx({4: 0.5})
    assert scores_by_length([*rows, row("passkey", 8, 0.5)]) == pytest.approx({4: 0.5, 8: 0.75})
    other = Row(task="text", metric="perplexity", length=4, value=9.0, weighting="token")
    assert scores_by_length([*rows, other]) == pytest.approx({4: 0.5})


def test_summaries_are_of_one_model():
    rows = [row("passkey", 4, 1.0, 0.5), row("passkey", 4, 1.0, 0.5, model="n")]
    with refused("rows", "2"):
        effective_length(rows)
    with refused("effective", got="85.6"):
        effective_length(rows[:1], 85.6)
