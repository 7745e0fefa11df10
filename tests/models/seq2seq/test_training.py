"""The encoder-decoder trained by Hugging Face's trainers, saved and loaded; and the guide to it, as it stands."""

import json
import re
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from transformers import (
    AutoConfig,
    AutoModelForSeq2SeqLM,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    Trainer,
    TrainingArguments,
)

from longitude.models import LongitudeConfig, LongitudeForSeq2SeqLM

VOCABULARY = 61
GUIDE = Path(__file__).parents[3] / "docs" / "encoder-decoder.md"
POST = {"norm": "layernorm", "norm_position": "post", "hidden_act": "relu", "mlp_bias": True, "attention_bias": True}


def close(x, y, tolerance=1e-10):
    torch.testing.assert_close(x, y, atol=tolerance, rtol=0)


def gradients(loss, model):
    return torch.autograd.grad(loss, list(model.parameters()), allow_unused=True, materialize_grads=True)


def test_one_matrix_embeds_and_predicts(build, pair):
    model, (x, y) = build(tie_word_embeddings=True), pair()
    names = [name for name, p in model.named_parameters() if p.shape == (VOCABULARY, 16)]
    assert names == ["model.encoder.embed_tokens.weight"]
    assert model.lm_head.weight is model.encoder.embed_tokens.weight
    before = model(x, decoder_input_ids=y).logits
    model.resize_token_embeddings(VOCABULARY + 9, mean_resizing=False)
    assert model.config.vocab_size == VOCABULARY + 9 and model.lm_head.weight is model.get_input_embeddings().weight
    close(model(x, decoder_input_ids=y).logits[..., :VOCABULARY], before)
    untied = build(tie_word_embeddings=False)
    assert untied.lm_head.weight is not untied.encoder.embed_tokens.weight


@pytest.mark.parametrize("spec", ["rope", "t5", "shaw", "sinusoidal"])
def test_checkpointing_gives_the_same_gradients(spec, build, pair):
    model, (x, y) = build(spec, **POST).train(), pair()
    mask = torch.arange(11) < torch.tensor([[11], [7]])
    plain = gradients(model(x, attention_mask=mask, labels=y).loss, model)
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    for reentrant in (False, True):
        enable({"use_reentrant": reentrant})
        out = model(x, attention_mask=mask, labels=y, use_cache=True)
        assert out.past_key_values is None
        out.loss.backward()
        for parameter, expected in zip(model.parameters(), plain, strict=True):
            close(torch.zeros_like(expected) if parameter.grad is None else parameter.grad, expected)
        model.zero_grad()


@pytest.mark.parametrize("spec", ["rope", "t5", "sinusoidal"])
def test_half_precision(spec, build, pair, generate):
    model, (x, y) = build(spec, tie_word_embeddings=True, **POST), pair(40, 33)
    exact = model(x, labels=y).logits.detach()
    with torch.autocast("cpu", torch.bfloat16):
        automatic = model.float()(x, labels=y)
    assert (automatic.logits.double() - exact).abs().mean() < 0.05 * exact.abs().mean()
    out = model.bfloat16()(x, labels=y)
    assert out.logits.dtype == torch.bfloat16 and out.loss.dtype == torch.float32
    assert (out.logits.double() - exact).abs().mean() < 0.08 * exact.abs().mean()
    out.loss.backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())
    assert generate(model, x).shape == (2, 9)


def collate(rows):
    """Sources padded on the left with their mask, targets on the right with -100."""
    long, wide = (max(len(row[name]) for row in rows) for name in ("input_ids", "labels"))
    left = [long - len(row["input_ids"]) for row in rows]
    return {
        "input_ids": torch.stack([F.pad(row["input_ids"], (n, 0)) for row, n in zip(rows, left, strict=True)]),
        "attention_mask": torch.stack([torch.arange(long) >= n for n in left]).long(),
        "labels": torch.stack([F.pad(row["labels"], (0, wide - len(row["labels"])), value=-100) for row in rows]),
    }


def reversals(count: int, longest: int, seed: int) -> list[dict[str, torch.Tensor]]:
    """A few letters, and the same letters backwards with the end behind them."""
    draw = torch.Generator().manual_seed(seed)
    rows = []
    for _ in range(count):
        letters = torch.randint(3, 9, (int(torch.randint(1, longest + 1, (1,), generator=draw)),), generator=draw)
        rows.append({"input_ids": letters, "labels": F.pad(letters.flip(0), (0, 1), value=2)})
    return rows


@pytest.mark.slow
@pytest.mark.parametrize("kind", [pytest.param(Trainer, marks=pytest.mark.slow), Seq2SeqTrainer])
def test_it_learns_and_is_saved(kind, tmp_path, build, generate):
    """Eight short examples by heart, with either trainer; generate() writes them, and so does what was saved."""
    model = build("sinusoidal", tie_word_embeddings=True, hidden_size=32).float()
    rows = reversals(8, 5, seed=1)
    settings = {
        "output_dir": str(tmp_path), "use_cpu": True, "report_to": [], "disable_tqdm": True, "max_steps": 40,
        "dataloader_pin_memory": False, "save_strategy": "no", "learning_rate": 0.01, "logging_steps": 1,
    }  # fmt: skip
    if kind is Seq2SeqTrainer:
        arguments = Seq2SeqTrainingArguments(**settings, predict_with_generate=True, generation_max_length=8)
    else:
        arguments = TrainingArguments(**settings)
    run = kind(model=model, args=arguments, train_dataset=rows, eval_dataset=rows, data_collator=collate)
    run.train()
    losses = [entry["loss"] for entry in run.state.log_history if "loss" in entry]
    assert losses[-1] < 0.2 * losses[0]
    batch = collate(rows)
    with torch.no_grad():
        expected = model.eval()(**batch)
    assert run.evaluate()["eval_loss"] == pytest.approx(expected.loss.item(), rel=1e-5)
    answers = model.generate(batch["input_ids"], attention_mask=batch["attention_mask"], max_new_tokens=7)
    for row, answer in zip(rows, answers.tolist(), strict=True):
        assert answer[1 : 1 + len(row["labels"])] == row["labels"].tolist()
    if kind is Seq2SeqTrainer:
        predicted = run.predict(rows).predictions
        assert (predicted[:, : answers.shape[1]] == answers.numpy()).all()
    run.save_model()
    loaded = AutoModelForSeq2SeqLM.from_pretrained(tmp_path)
    assert isinstance(loaded, LongitudeForSeq2SeqLM)
    for name, value in model.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], value), name
    assert loaded.lm_head.weight is loaded.encoder.embed_tokens.weight
    again = loaded.generate(batch["input_ids"], attention_mask=batch["attention_mask"], max_new_tokens=7)
    assert torch.equal(again, answers)


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    "options",
    [
        {"encoding": "t5", "num_encoder_layers": 3, "decoder_start_token_id": 5},
        {"encoding": "fox", "encoder_encoding": "shaw", "tie_word_embeddings": False},
        {"encoding": "auto", "encodings": ["alibi", "learned"][::-1], **POST},
    ],
    ids=lambda options: options["encoding"],
)
@torch.no_grad()
def test_saved_and_loaded(options, tmp_path, build, pair, generate):
    """Every option is in config.json, and what is loaded computes the same."""
    model, (x, y) = build(**options), pair()
    model.save_pretrained(tmp_path)
    written = json.loads((tmp_path / "config.json").read_text())
    assert written["is_encoder_decoder"] is True and written["architectures"] == ["LongitudeForSeq2SeqLM"]
    for loaded in (
        AutoModelForSeq2SeqLM.from_pretrained(tmp_path, dtype=torch.float64),
        LongitudeForSeq2SeqLM.from_pretrained(tmp_path, dtype=torch.float64),
    ):
        close(loaded(x, decoder_input_ids=y).logits, model(x, decoder_input_ids=y).logits)
        assert torch.equal(generate(loaded, x), generate(model, x))
    made = AutoModelForSeq2SeqLM.from_config(AutoConfig.from_pretrained(tmp_path))
    assert isinstance(made, LongitudeForSeq2SeqLM)
    assert {n: p.shape for n, p in made.named_parameters()} == {n: p.shape for n, p in model.named_parameters()}


def test_ones_own_config_is_left_alone():
    config = LongitudeConfig(encoding="t5", num_encoder_layers=3, vocab_size=VOCABULARY)
    before = config.to_dict()
    model = LongitudeForSeq2SeqLM(config)
    assert config.to_dict() == before and not config.is_encoder_decoder
    assert model.config.is_encoder_decoder and not model.encoder.config.is_encoder_decoder


# ---- the guide -------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("steps", [5, pytest.param(300, marks=pytest.mark.slow)])
def test_the_guide_runs(steps, capsys):
    """Its code from top to bottom, as it stands or with few steps; what it trains is right nearly always."""
    blocks = re.findall(r"```python\n(.*?)```", GUIDE.read_text(encoding="utf-8"), re.DOTALL)
    code = "\n".join(blocks)
    assert "steps = 300\n" in code
    exec(code.replace("steps = 300\n", f"steps = {steps}\n"), {})
    right = int(re.search(r"(\d+)% of 200 new strings", capsys.readouterr().out)[1])
    assert right > 90 if steps == 300 else right < 50
