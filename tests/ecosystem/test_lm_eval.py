"""lm-eval's harness: the log-likelihoods that it finds are the model's."""

import json

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.extend.conftest import LENGTH, saved

pytest.importorskip("lm_eval", reason="the extra `ecosystem` is not installed: make ecosystem")

pytestmark = [pytest.mark.slow, pytest.mark.ecosystem]


def test_loglikelihoods_and_texts(model, tokenizer):
    """Requests of other lengths in one batch; then greedy text until a word."""
    from lm_eval.api.instance import Instance
    from lm_eval.models.huggingface import HFLM

    model.eval()
    harness = HFLM(pretrained=model, tokenizer=tokenizer, batch_size=3, device="cpu", max_length=32)
    pairs = [("a b c", " d e"), ("a", " b"), ("c d e f g h", " i j a"), ("b b", " c")]
    asked = [Instance(request_type="loglikelihood", doc={}, arguments=pair, idx=n) for n, pair in enumerate(pairs)]
    for (context, answer), (found, greedy) in zip(pairs, harness.loglikelihood(asked), strict=True):
        whole, first = tokenizer(context + answer).input_ids, len(tokenizer(context).input_ids)
        with torch.no_grad():
            logits = model(torch.tensor([whole])).logits[0].log_softmax(-1)
        wanted = sum(float(logits[i - 1, whole[i]]) for i in range(first, len(whole)))
        assert found == pytest.approx(wanted, abs=1e-4)
        assert greedy == all(int(logits[i - 1].argmax()) == whole[i] for i in range(first, len(whole)))
    until = {"until": ["<eos>"], "max_gen_toks": 5, "do_sample": False}
    calls = [(context, dict(until)) for context, _ in pairs]
    asked = [Instance(request_type="generate_until", doc={}, arguments=call, idx=n) for n, call in enumerate(calls)]
    for (context, _), text in zip(calls, harness.generate_until(asked), strict=True):
        x = torch.tensor([tokenizer(context).input_ids])
        out = model.generate(x, attention_mask=torch.ones_like(x), max_new_tokens=5, do_sample=False)
        assert text.split() == tokenizer.decode(out[0, x.shape[1] :], skip_special_tokens=True).split()


# ---- a task of its own -----------------------------------------------------------------------------------------------
TASK = """
task: letters
dataset_path: json
dataset_kwargs: {data_files: {test: FILE}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{text}}"
doc_to_target: "{{answer}}"
doc_to_choice: "{{choices}}"
target_delimiter: " "
metric_list: [{metric: acc, aggregation: mean, higher_is_better: true}]
"""
DOCUMENTS = [
    {
        "text": " ".join("abcdefghij"[(n + i) % 10] for i in range(3 + n)),
        "choices": ["a b", "c", "j i h"],
        "answer": n % 3,
    }
    for n in range(9)
]


@pytest.fixture
def task(tmp_path):
    """Letters and three answers: what simple_evaluate takes, from two files and nothing of the network."""
    from lm_eval.tasks import TaskManager

    folder = tmp_path / "tasks"
    folder.mkdir()
    (folder / "letters.jsonl").write_text("\n".join(map(json.dumps, DOCUMENTS)))
    (folder / "letters.yaml").write_text(TASK.replace("FILE", str(folder / "letters.jsonl")))
    return TaskManager(include_path=str(folder), include_defaults=False)


def score(model, tokenizer, text, answer):
    """The log-likelihood of an answer."""
    whole, first = tokenizer(f"{text} {answer}").input_ids, len(tokenizer(text).input_ids)
    with torch.no_grad():
        logits = model(torch.tensor([whole])).logits[0].log_softmax(-1)
    return sum(float(logits[i - 1, whole[i]]) for i in range(first, len(whole)))


@pytest.fixture(params=["ours", "hybrid", "extended"])
def folder(request, tmp_path, tokenizer, command):
    """Of a saved model: two of ours, and a Llama that was extended to four times its length."""
    path = tmp_path / "folder"
    if request.param == "extended":
        source = saved("llama", tmp_path / "model")
        assert command("extend", source, "--to", 4 * LENGTH, "--method", "yarn", "--out", path)[0] == 0
    else:
        from tests.ecosystem.conftest import MODELS

        MODELS[request.param]().save_pretrained(path)
        tokenizer.save_pretrained(path)
    return path


def test_a_task_of_our_own(folder, task, tmp_path, monkeypatch):
    """From a folder, as the command line does; the accuracy is that of whole passes, one by one."""
    import lm_eval

    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    found = lm_eval.simple_evaluate(
        model="hf", model_args={"pretrained": str(folder), "dtype": "float32"}, tasks=["letters"], task_manager=task,
        batch_size=4, device="cpu", bootstrap_iters=0, log_samples=True,
    )  # fmt: skip
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder).eval(), AutoTokenizer.from_pretrained(folder)
    right = []
    for document, sample in zip(DOCUMENTS, found["samples"]["letters"], strict=True):
        scores = [score(model, tokenizer, document["text"], choice) for choice in document["choices"]]
        assert [float(each[0]) for each in sample["filtered_resps"]] == pytest.approx(scores, abs=1e-3)
        right.append(scores.index(max(scores)) == document["answer"])
    assert found["results"]["letters"]["acc,none"] == pytest.approx(sum(right) / len(right))
