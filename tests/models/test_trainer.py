"""Hugging Face's trainers, unchanged."""

from typing import Any

import pytest
import torch
from transformers import Trainer, TrainingArguments

from tests.support import close

LENGTH = 12
SETTINGS: dict[str, Any] = {
    "use_cpu": True, "report_to": [], "disable_tqdm": True, "dataloader_pin_memory": False, "max_steps": 3,
    "logging_steps": 1, "save_strategy": "no", "learning_rate": 0.01, "max_grad_norm": 0.0,
}  # fmt: skip


def rows(ids, shifted=False):
    """Eight examples of one length; their labels have holes, of another size each."""
    examples = []
    for n, x in enumerate(ids(8, LENGTH)):
        labels = x.clone()
        labels[: 1 + n % 5] = -100
        examples.append({"input_ids": x, "labels": labels})
        if shifted:  # with the labels, as collators of packed text do
            examples[-1]["shift_labels"] = torch.cat([labels[1:], torch.tensor([-100])])
    return examples


def trainer(model, path, examples, **options):
    options = {"remove_unused_columns": "shift_labels" not in examples[0], **options}  # it reads forward's signature
    arguments = TrainingArguments(str(path), **SETTINGS | options)
    return Trainer(model, arguments, train_dataset=examples, eval_dataset=examples)


def losses(run):
    return [entry["loss"] for entry in run.state.log_history if "loss" in entry]


@pytest.mark.parametrize("shifted", [pytest.param(False, marks=pytest.mark.slow), True], ids=["labels", "shift_labels"])
def test_accumulated_batches_are_the_big_batch(shifted, build, ids, tmp_path):
    """Although the micro-batches hold unequal numbers of labels: one step of SGD gives the same loss and weights."""
    start, runs = build("alibi").state_dict()["model.embed_tokens.weight"], []
    for steps in (1, 4):
        run = trainer(
            build("alibi"), tmp_path, rows(ids, shifted), max_steps=1, optim="sgd", learning_rate=0.5,
            per_device_train_batch_size=8 // steps, gradient_accumulation_steps=steps,
        )  # fmt: skip
        run.train()
        runs.append(run)
    whole, other = runs
    assert losses(other) == pytest.approx(losses(whole), rel=1e-6)
    close(list(other.model.parameters()), list(whole.model.parameters()), 1e-10)
    assert (start - whole.model.model.embed_tokens.weight).abs().max() > 1e-4


@pytest.mark.parametrize("shifted", [False, True], ids=["labels", "shift_labels"])
def test_evaluation(shifted, build, ids, tmp_path):
    """evaluate() gives the loss that the model gives, predict() the logits; shifted labels are labels."""
    model, examples = build("rope"), rows(ids, shifted)
    run = trainer(model, tmp_path, examples, per_device_eval_batch_size=8)
    batch = {name: torch.stack([example[name] for example in examples]) for name in ("input_ids", "labels")}
    with torch.no_grad():
        expected = model.eval()(**batch)
    assert run.evaluate()["eval_loss"] == pytest.approx(expected.loss.item(), rel=1e-6)
    predictions = run.predict(examples).predictions
    logits = predictions[0] if isinstance(predictions, tuple) else predictions
    torch.testing.assert_close(torch.from_numpy(logits), expected.logits)
