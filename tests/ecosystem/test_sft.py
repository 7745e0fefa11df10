"""TRL's SFTTrainer: packed text, no padding, LoRA; the loss of each step is that of the documents alone."""

import pytest
import torch

pytest.importorskip("trl", reason="the extra `ecosystem` is not installed: make ecosystem")
pytest.importorskip("peft", reason="the extra `ecosystem` is not installed: make ecosystem")

from datasets import Dataset
from peft import LoraConfig
from trl import SFTConfig, SFTTrainer

pytestmark = [
    pytest.mark.slow,
    pytest.mark.ecosystem,
    # TRL uses the name that transformers has given up
    pytest.mark.filterwarnings("ignore:.*gradient_checkpointing. is deprecated:FutureWarning"),
]

WAYS = {
    "packing": {"packing": True, "max_length": 16},
    "padding_free": {"padding_free": True, "max_length": None},
    "padded": {"max_length": 16},
}


def trainer(model, tokenizer, texts, path, lora: bool = False, **options) -> SFTTrainer:
    arguments = SFTConfig(
        output_dir=str(path), use_cpu=True, bf16=False, report_to=[], disable_tqdm=True, dataloader_pin_memory=False,
        save_strategy="no", logging_steps=1, max_steps=2, per_device_train_batch_size=3, gradient_checkpointing=False,
        **options,
    )  # fmt: skip
    modules = [name for name in ("q_proj", "in_proj", "receptance") if any(name in n for n, _ in model.named_modules())]
    return SFTTrainer(
        model=model,
        args=arguments,
        train_dataset=Dataset.from_dict({"text": texts}),
        processing_class=tokenizer,
        peft_config=LoraConfig(r=2, target_modules=modules, task_type="CAUSAL_LM") if lora else None,
    )


def alone(model, batch) -> torch.Tensor:
    """The loss of a flattened batch, each of its documents by itself."""
    cuts = batch["cu_seq_lens_q"].diff().tolist()
    total, count = 0.0, 0
    for x, labels in zip(batch["input_ids"].split(cuts, 1), batch["labels"].split(cuts, 1), strict=True):
        logits = model(x, use_cache=False).logits[0, :-1].float().log_softmax(-1)
        kept = labels[0, 1:] != -100
        total = total - logits[kept].gather(1, labels[0, 1:][kept][:, None]).sum()
        count += int(kept.sum())
    return total / count


@pytest.mark.parametrize("lora", [False, True], ids=["all", "lora"])
@pytest.mark.parametrize("way", WAYS)
def test_it_trains(way, lora, model, tokenizer, texts, tmp_path):
    """Two steps: the weights that are trained move, the others do not; packed = alone."""
    run = trainer(model, tokenizer, texts, tmp_path, lora, **WAYS[way])
    if way != "padded":
        batch = next(iter(run.get_train_dataloader()))
        assert len(batch["cu_seq_lens_q"]) > 2
        run.model.eval()
        with torch.no_grad():
            found = run.model(**batch, use_cache=False).loss
            torch.testing.assert_close(found, alone(run.model, batch), rtol=1e-5, atol=1e-5)
    before = {name: p.detach().clone() for name, p in run.model.named_parameters()}
    run.train()
    moved = {name for name, p in run.model.named_parameters() if not torch.equal(p, before[name])}
    learned = {name for name, p in run.model.named_parameters() if p.requires_grad}
    assert moved and moved <= learned
    assert all("lora_" in name for name in learned) is lora
    losses = [entry["loss"] for entry in run.state.log_history if "loss" in entry]
    assert len(losses) == 2 and all(loss == loss and loss < 10 for loss in losses)
