"""Hugging Face's Trainer, unchanged."""

import pytest
import torch
from transformers import Trainer, TrainingArguments

from longitude.models import LongitudeForCausalLM

LENGTH = 12
CHECKPOINTING = next(
    name for name in ("activation_checkpointing", "gradient_checkpointing") if hasattr(TrainingArguments, name)
)  # it changed its name in 2026


def rows(ids, count=8, shifted=False):
    """Examples of one length; their labels have holes, of another size each."""
    examples = []
    for n, x in enumerate(ids(count, LENGTH)):
        labels = x.clone()
        labels[: 1 + n % 5] = -100
        examples.append({"input_ids": x, "labels": labels})
        if shifted:  # with the labels, as collators of packed text do
            examples[-1]["shift_labels"] = torch.cat([labels[1:], torch.tensor([-100])])
    return examples


def trainer(model, path, examples, **options):
    arguments = TrainingArguments(
        output_dir=str(path),
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
        dataloader_pin_memory=False,
        remove_unused_columns="shift_labels" not in examples[0],  # it looks for columns in the signature of forward
        **{"max_steps": 3, "logging_steps": 1, "save_strategy": "no", "learning_rate": 0.01, "max_grad_norm": 0.0}
        | options,
    )
    return Trainer(model=model, args=arguments, train_dataset=examples, eval_dataset=examples)


def losses(run):
    return [entry["loss"] for entry in run.state.log_history if "loss" in entry]


def test_it_learns(build, ids, tmp_path):
    """Twenty steps over eight examples: the loss falls, the encoding moves, and what is saved is what was trained."""
    model = build("t5").float()
    before = model.model.encodings[0].table.detach().clone()
    run = trainer(model, tmp_path, rows(ids), max_steps=20, per_device_train_batch_size=8)
    run.train()
    assert losses(run)[-1] < 0.5 * losses(run)[0]
    assert not torch.equal(model.model.encodings[0].table, before)
    run.save_model()
    loaded = LongitudeForCausalLM.from_pretrained(tmp_path)
    for name, value in model.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], value), name


@pytest.mark.one_in(3)
@pytest.mark.parametrize("shifted", [False, True], ids=["labels", "shift_labels"])
@pytest.mark.parametrize("loss", ["logged", "weights"])
def test_accumulated_batches_are_the_big_batch(shifted, loss, build, ids, tmp_path):
    """8 = 4 x 2 although the micro-batches hold unequal numbers of labels: one step of SGD gives the same weights."""
    runs = []
    for batch, accumulated in ((8, 1), (2, 4), (1, 8)):
        run = trainer(
            build("alibi"), tmp_path, rows(ids, shifted=shifted), max_steps=1, optim="sgd", learning_rate=0.5,
            per_device_train_batch_size=batch, gradient_accumulation_steps=accumulated,
        )  # fmt: skip
        run.train()
        runs.append(run)
    for other in runs[1:]:
        if loss == "logged":
            assert losses(other) == pytest.approx(losses(runs[0]), rel=1e-6)
        else:
            for ours, theirs in zip(other.model.parameters(), runs[0].model.parameters(), strict=True):
                torch.testing.assert_close(ours, theirs, atol=1e-10, rtol=0)
    moved = build("alibi").state_dict()["model.embed_tokens.weight"] - runs[0].model.model.embed_tokens.weight
    assert moved.abs().max() > 1e-4


def test_shifted_labels_are_labels(build, ids, tmp_path):
    runs = [trainer(build("rope"), tmp_path, rows(ids, shifted=shifted)) for shifted in (False, True)]
    for run in runs:
        run.train()
    assert losses(runs[0]) == pytest.approx(losses(runs[1]), rel=1e-9)


@pytest.mark.parametrize("shifted", [False, True], ids=["labels", "shift_labels"])
def test_evaluation(shifted, build, ids, tmp_path):
    """evaluate() gives the loss that the model gives; predict() the logits."""
    model, examples = build("rope"), rows(ids, shifted=shifted)
    run = trainer(model, tmp_path, examples, per_device_eval_batch_size=8)
    batch = {name: torch.stack([example[name] for example in examples]) for name in examples[0]}
    with torch.no_grad():
        expected = model.eval()(**batch)
    assert run.evaluate()["eval_loss"] == pytest.approx(expected.loss.item(), rel=1e-6)
    predictions = run.predict(examples).predictions
    logits = predictions[0] if isinstance(predictions, tuple) else predictions
    torch.testing.assert_close(torch.from_numpy(logits), expected.logits)


@pytest.mark.slow
def test_checkpointed_and_packed(build, ids, tmp_path):
    """document_ids pass through, and checkpointing changes no step."""
    examples = [{**row, "document_ids": torch.arange(LENGTH) // 5} for row in rows(ids)]
    runs = []
    for checkpointing in (False, True):
        runs.append(trainer(build("fire"), tmp_path, examples, **({CHECKPOINTING: True} if checkpointing else {})))
        runs[-1].train()
    assert losses(runs[0]) == pytest.approx(losses(runs[1]), rel=1e-6)
    unpacked = trainer(build("fire"), tmp_path, rows(ids))
    unpacked.train()
    assert losses(runs[0]) != pytest.approx(losses(unpacked), rel=1e-3)
