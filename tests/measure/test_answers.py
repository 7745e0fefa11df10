"""What a run keeps and shows beyond a score: answers, pairs of them, counts; perplexity by place; what begins a window."""

import json
import math
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers.processors import TemplateProcessing
from torch.nn.functional import cross_entropy

from longitude.checkpoints.load import byte_tokenizer
from longitude.measure import losses_by_length
from longitude.measure.config import MeasureConfig
from longitude.measure.documents import bos_of
from longitude.measure.plan import plan
from longitude.measure.report import terminal, write_report
from longitude.measure.retrieval import TASKS, measurement
from longitude.measure.retrieval.measurement import Answer
from longitude.measure.retrieval.prompts import encode, tokens_of_chat
from longitude.measure.run import Results, measure, read_results
from longitude.measure.tables import tables, wrong_answers
from longitude.measure.windows import Bounded, Reader
from longitude.runs.terminal import Progress
from longitude.statistics import proportions
from tests.measure.conftest import build

ASKED: dict[str, Any] = {"tasks": ("passkey",), "depths": (0.0, 1.0), "trials": 3, "trained": False}
ASKED |= {"lengths": (512,), "chunk": 40, "device": "cpu"}


def go(config: MeasureConfig, out: Path, *models: Path) -> Results:
    with Progress() as bar:
        return measure(plan(config, tuple(map(str, models))), out, bar)


# ---- answers ---------------------------------------------------------------------------------------------------------
@pytest.fixture
def answers(monkeypatch):
    """answers(which numbers of trials each model gets right): nothing is generated."""

    def let(right: dict[str, set[int]]) -> None:
        def answered(model: Any, tokenizer: Any, prompt: Any, prefill: Any = None) -> str:
            got = next(asked) % ASKED["trials"] in right[type(model).__name__]
            return f" {prompt.question.answers[0]}" if got else " the <i>sun</i>"

        asked = count()
        monkeypatch.setattr(measurement, "answer", answered)

    return let


@pytest.mark.slow
def test_answers_are_kept_and_can_be_scored_and_asked_again(checkpoints, tmp_path, answers) -> None:
    answers({"LlamaForCausalLM": {0, 2}})
    config = MeasureConfig(**ASKED)
    results = go(config, tmp_path / "run", checkpoints["llama"])
    lines = [json.loads(line) for line in (tmp_path / "run" / "answers.jsonl").read_text().splitlines()]
    assert lines == [json.loads(json.dumps(each)) for each in results.answers] and len(lines) == 6
    assert read_results(tmp_path / "run").answers == lines
    asked = measurement.plan("passkey", [512], [0.0, 1.0], 3)
    for line in lines:
        answer = Answer(**{name: value for name, value in line.items() if name != "model"})
        prompt = asked.prompt(byte_tokenizer(), answer.length, answer.depth, answer.trial)
        assert [*prompt.question.answers] == [*answer.expected]
        assert TASKS["passkey"].score(answer.generated, answer.expected) == answer.score == (answer.trial != 1)
    assert {row.value for row in results.rows} == {2 / 3}
    wrong = wrong_answers(results)
    assert [(each["trial"], each["depth"]) for each in wrong] == [(1, 0.0), (1, 1.0)]
    page = write_report(results).read_text()
    assert "the &lt;i&gt;sun" in page and wrong[0]["expected"][0] in page
    assert any("answers.jsonl" in part for part in terminal(results) if isinstance(part, str))


def test_models_are_compared_on_the_same_questions(checkpoints, tmp_path, answers) -> None:
    """Both get two of three right at both depths: on two questions each is better, and the scores alone say nothing."""
    answers({"LlamaForCausalLM": {0, 2}, "GPTNeoXForCausalLM": {1, 2}})
    results = go(MeasureConfig(**ASKED), tmp_path / "run", checkpoints["llama"], checkpoints["gpt_neox"])
    scores, pairs = tables(results)
    assert [line[3][0].value for line in scores.lines] == ["67%", "67%"]
    [(label, _, _, [cell])] = pairs.lines
    assert (label, cell.value) == ("gpt_neox", "+0%") and cell.interval.endswith(", 2 and 2 of 6")


def test_the_interval_of_pairs() -> None:
    """Bonett and Price 2012 by hand: of 10 pairs 3 one way and 1 the other: 2/12 +- 1.96 sqrt((6/12 - (2/12)^2) / 12)."""
    value, low, high = proportions.paired([1] * 3 + [0] + [1] * 6, [0] * 3 + [1] + [1] * 6)
    half = 1.959964 * math.sqrt((0.5 - 1 / 36) / 12)
    assert (value, low, high) == pytest.approx((0.2, 1 / 6 - half, 1 / 6 + half))
    _, low, high = proportions.paired([1.0] * 4, [1.0] * 4)
    assert low < 0 < high  # four pairs alike are no proof of equality
    assert proportions.paired([0.5, 1.0], [1.0, 0.25])[0] == pytest.approx(0.125)


# ---- what begins a window --------------------------------------------------------------------------------------------
def beginning(adds: bool) -> Any:
    """Bytes, and a token <s> that the tokenizer knows, or puts before every text."""
    tokenizer = byte_tokenizer()
    tokenizer.add_special_tokens({"bos_token": "<s>"})
    if adds:
        special = [("<s>", tokenizer.bos_token_id)]
        tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single="<s> $A", special_tokens=special)
    return tokenizer


@pytest.mark.parametrize(("method", "step"), [("non-overlapping", 16), ("sliding", 8)])
def test_a_window_begins_with_the_token(method, step) -> None:
    """By a plain loop: it stands in the place of the first, so windows keep their width, and all targets are scored."""
    model, bos = build("llama", vocab_size=258).double().eval(), 256
    ids = torch.randint(0, 256, (49,), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        nats = torch.full((48,), math.nan, dtype=torch.float64)
        for start in range(0, 48 - 16 + 1, step):
            inputs = torch.cat([torch.tensor([bos]), ids[start + 1 : start + 16]])
            losses = cross_entropy(model(inputs[None]).logits[0], ids[start + 1 : start + 17], reduction="none")
            fresh = 0 if start == 0 else 16 - step
            nats[start + fresh : start + 16] = losses[fresh:]
    options = {"lengths": [16], "methods": [method], "stride": step if method == "sliding" else None, "span": 48}
    for reader in (Reader(model, bos), Bounded(model, None, bos=bos), Bounded(model, 5, bos=bos)):
        [losses] = losses_by_length(model, [ids], **options, reader=reader)
        assert losses.nats[0] == pytest.approx(float(nats.sum()), rel=1e-9)


@pytest.mark.parametrize(
    ("choice", "adds", "puts"),
    [("tokenizer", True, True), ("tokenizer", False, False), ("always", False, True), ("never", True, False)],
)
def test_which_token_begins(choice, adds, puts) -> None:
    tokenizer = beginning(adds)
    bos = tokenizer.bos_token_id
    assert bos_of(tokenizer, choice) == (bos if puts else None)
    assert (encode(tokenizer, "abc", choice)[0] == bos) == puts
    assert encode(tokenizer, "abc", choice)[-3:] == [97, 98, 99] and len(encode(tokenizer, "abc", choice)) == 3 + puts
    if choice != "tokenizer":  # a template decides for itself
        assert tokens_of_chat(tokenizer, "abc", choice) == [bos] * puts + [97, 98, 99]
        assert tokens_of_chat(tokenizer, "<s>abc", choice) == [bos] * puts + [97, 98, 99]
