"""Train a small but real language model with plain transformers, in minutes and on a processor.

    python examples/train_tiny_checkpoint.py --model llama --out tiny-llama

The text is the Python standard library's own source, which is on every machine; a token is a byte. The result is an ordinary
checkpoint (safetensors, tokenizer, generation config), good for trying what changes or measures a checkpoint's context.
"""

from __future__ import annotations

import argparse
import math
import shutil
import sysconfig
import time
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch.utils.data import Dataset
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    set_seed,
)

MODELS = ("llama", "gpt_neox", "bloom", "gpt2", "mamba", "rwkv")
HEAD_DIM = 32
BATCH = 8
RATE = 3e-3
NOT_PROSE = {"site-packages", "dist-packages", "test", "tests", "idle_test", "encodings", "pydoc_data"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=MODELS, default="llama")
    parser.add_argument("--out", type=Path, required=True, help="the checkpoint's directory, which must not exist yet")
    parser.add_argument("--length", type=int, default=256, help="tokens (bytes) of a training window")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=192, help=f"a multiple of {HEAD_DIM}, the size of a head")
    parser.add_argument(
        "--minutes", type=float, default=4.0, help="how long to train; five steps at the start measure the speed"
    )
    parser.add_argument(
        "--steps", type=int, help="train so many steps instead: the same seed then gives the same model"
    )
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    if options.out.exists():
        parser.error(f"--out {options.out}: expected a directory that does not exist yet; name another")
    if options.width % HEAD_DIM or options.width < HEAD_DIM:
        parser.error(f"--width: expected a multiple of {HEAD_DIM}, got {options.width}")
    if options.length < 2 or options.layers < 1 or options.minutes <= 0 or (options.steps or 1) < 1:
        parser.error("--length must be 2 or more; --layers, --minutes and --steps more than 0")

    set_seed(options.seed)
    tokenizer = byte_tokenizer(options.length)
    training, validation = read_text(tokenizer)
    windows = Windows(training, options.length)
    if len(windows) < BATCH or not any(len(file) > options.length for file in validation):
        parser.error(f"--length {options.length}: the library's files are too short for it")
    config = tiny(options.model, tokenizer, options.length, options.layers, options.width)
    model = AutoModelForCausalLM.from_config(config)
    steps = options.steps or steps_within(options.minutes, model, windows)
    size = sum(p.numel() for p in model.parameters())
    print(f"{options.model}: {size / 1e6:.1f} M parameters, {steps} steps of {BATCH} x {options.length} bytes")

    unfinished = options.out.with_name(f".{options.out.name}.unfinished")  # so that --out is never half-written
    shutil.rmtree(unfinished, ignore_errors=True)
    Trainer(
        model,
        TrainingArguments(
            output_dir=str(unfinished),
            max_steps=steps,
            per_device_train_batch_size=BATCH,
            learning_rate=RATE,
            lr_scheduler_type="cosine",
            warmup_steps=max(1, steps // 20),
            weight_decay=0.1,
            adam_beta2=0.95,
            seed=options.seed,
            logging_steps=50,
            logging_nan_inf_filter=False,
            save_strategy="no",
            report_to="none",
            dataloader_pin_memory=False,
        ),
        train_dataset=windows,
        callbacks=[Finite()],
    ).train()

    bits = bits_per_byte(model, validation, options.length)
    if not math.isfinite(bits):
        raise SystemExit(f"training diverged: {bits} bits per byte; nothing was saved")
    model.config.use_cache = True  # Trainer switched it off
    model.generation_config = GenerationConfig.from_model_config(config)
    model.save_pretrained(unfinished)
    tokenizer.save_pretrained(unfinished)
    unfinished.rename(options.out)
    print(f"{options.out}: {bits:.3f} bits per byte of validation text, in windows of {options.length}")


def byte_tokenizer(length: int) -> PreTrainedTokenizerFast:
    """One token per byte, an end-of-text and a padding token: any text is within its 258 words."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE({letter: i for i, letter in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token="<|endoftext|>",
        eos_token="<|endoftext|>",
        pad_token="<|padding|>",
        model_max_length=length,
    )


def read_text(tokenizer: PreTrainedTokenizerFast) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """-> the training text, one stream of tokens [n], its files joined by end-of-text; the validation files, each [n].

    Every 20th file, in the order of their paths, is for validation."""
    root = Path(sysconfig.get_paths()["stdlib"])
    files = [file for file in sorted(root.rglob("*.py")) if not NOT_PROSE.intersection(file.relative_to(root).parts)]
    texts = [file.read_text(encoding="utf-8", errors="replace") for file in files]
    tokens = tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"]
    end = tokenizer.eos_token_id
    training = [torch.tensor([*file, end]) for i, file in enumerate(tokens) if i % 20]
    return torch.cat(training), [torch.tensor(file) for i, file in enumerate(tokens) if i % 20 == 0]


class Windows(Dataset):
    """A stream of tokens [n] cut into windows [length], each its own labels: the model shifts them."""

    def __init__(self, stream: torch.Tensor, length: int):
        self.rows = stream[: len(stream) // length * length].view(-1, length)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, i: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.rows[i], "labels": self.rows[i]}


def tiny(model: str, tokenizer: PreTrainedTokenizerFast, length: int, layers: int, width: int) -> PreTrainedConfig:
    """A small configuration of one of MODELS, without dropout, trained at `length`."""
    heads = width // HEAD_DIM
    shared = {
        "vocab_size": len(tokenizer),
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
        "tie_word_embeddings": True,
        "initializer_range": width**-0.5,  # the usual 0.02 is for models of thousands
    }
    wide = {"hidden_size": width, "num_hidden_layers": layers, "num_attention_heads": heads}
    trained = {"max_position_embeddings": length}
    of_model = {
        "llama": {**wide, **trained, "intermediate_size": 8 * width // 3},
        "gpt_neox": {**wide, **trained, "intermediate_size": 4 * width},
        "bloom": {"hidden_size": width, "n_layer": layers, "n_head": heads},
        "gpt2": {
            "n_embd": width,
            "n_layer": layers,
            "n_head": heads,
            "n_positions": length,
            "resid_pdrop": 0.0,
            "embd_pdrop": 0.0,
            "attn_pdrop": 0.0,
        },
        "mamba": {"hidden_size": width, "num_hidden_layers": layers},
        # without halves in evaluation, for which transformers divides the weights, in what it then saves, too
        "rwkv": {"hidden_size": width, "num_hidden_layers": layers, "context_length": length, "rescale_every": 0},
    }
    return AutoConfig.for_model(model, **shared, **of_model[model])


def steps_within(minutes: float, model: PreTrainedModel, windows: Windows) -> int:
    """How many training steps this machine makes in this many minutes, from the time of five."""
    batch = windows.rows[:BATCH]
    started = 0.0
    for i in range(7):
        if i == 2:  # the first ones also allocate
            started = time.perf_counter()
        model(input_ids=batch, labels=batch).loss.backward()
        model.zero_grad()
    return max(1, round(60 * minutes / ((time.perf_counter() - started) / 5 * 1.05)))  # the optimizer takes its share


class Finite(TrainerCallback):
    """Stops where the loss is no number: a broken model is never saved."""

    def on_log(self, args, state, control, logs=None, **_):
        for name in ("loss", "grad_norm"):
            if not math.isfinite(value := (logs or {}).get(name, 0.0)):
                raise SystemExit(f"training diverged: {name} is {value} at step {state.global_step}; nothing was saved")


@torch.no_grad()
def bits_per_byte(model: PreTrainedModel, files: list[torch.Tensor], length: int, most: int = 200) -> float:
    """Mean bits per predicted byte over the first windows [length + 1] of the files, at most `most` of them."""
    model.eval()
    rows = [row for file in files if len(file) > length for row in file.unfold(0, length + 1, length)[:10]][:most]
    losses = []
    for batch in torch.stack(rows).split(BATCH):
        logits = model(input_ids=batch[:, :-1]).logits
        losses.append(torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten(), reduction="none"))
    return torch.cat(losses).mean().item() / math.log(2)


if __name__ == "__main__":
    main()
