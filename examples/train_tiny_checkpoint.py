"""Train a small but real language model with plain transformers, in minutes and on a processor.

    python examples/train_tiny_checkpoint.py --model llama --out tiny-llama

The text is the Python standard library's own source, which is on every machine; a token is a byte. The result is an ordinary
checkpoint (safetensors, tokenizer, generation config), good for trying what changes or measures a checkpoint's context.
With --skills it is a Llama of 1024 words that also answers questions about what it has read: skills.py.
"""

from __future__ import annotations

import argparse
import math
import shutil
import sysconfig
import time
from pathlib import Path
from typing import Any

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
    parser.add_argument("--length", type=int, help="tokens of a training window; 256 (bytes), with --skills 512")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument(
        "--width", type=int, help=f"a multiple of {HEAD_DIM}, the size of a head; 192, with --skills 128"
    )
    parser.add_argument(
        "--minutes", type=float, default=4.0, help="how long to train; five steps at the start measure the speed"
    )
    parser.add_argument(
        "--steps", type=int, help="train so many steps instead: the same seed then gives the same model"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--skills",
        action="store_true",
        help="a Llama that finds what is in its context: half an hour on one core, whatever --minutes says",
    )
    options = parser.parse_args()
    if options.length is None:
        options.length = 512 if options.skills else 256
    if options.width is None:
        options.width = 128 if options.skills else 192
    if options.out.exists():
        parser.error(f"--out {options.out}: expected a directory that does not exist yet; name another")
    if options.width % HEAD_DIM or options.width < HEAD_DIM:
        parser.error(f"--width: expected a multiple of {HEAD_DIM}, got {options.width}")
    if options.length < 2 or options.layers < 1 or options.minutes <= 0 or (options.steps or 1) < 1:
        parser.error("--length must be 2 or more; --layers, --minutes and --steps more than 0")
    if options.model == "rwkv" and options.layers < 2:
        parser.error("--layers: expected 2 or more for rwkv, whose first weights transformers makes by them, got 1")
    if options.skills and (options.model != "llama" or options.length < 512):
        parser.error(
            "--skills: expected --model llama and --length 512 or more, as the longest question needs, "
            f"got {options.model} and {options.length}"
        )

    set_seed(options.seed)
    training, validation = read_library()
    if not any(len(file) > options.length for file in validation):
        parser.error(f"--length {options.length}: the library's files are too short for it")
    unfinished = options.out.with_name(f".{options.out.name}.unfinished")  # so that --out is never half-written
    shutil.rmtree(unfinished, ignore_errors=True)
    if options.skills:
        from skills import trainer_of  # asks questions of Longitude's, which a plain checkpoint does without
    else:
        trainer_of = trainer_on_bytes
    tokenizer, trainer = trainer_of(options, training, unfinished)
    trainer.add_callback(Finite())
    model, steps = trainer.model, trainer.args.max_steps
    print(f"{options.model}: {sum(p.numel() for p in model.parameters()) / 1e6:.1f} M parameters, {steps} steps")
    trainer.train()

    bits = bits_per_byte(model, tokenizer, validation, options.length)
    if not math.isfinite(bits):
        raise SystemExit(f"training diverged: {bits} bits per byte; nothing was saved")
    model.config.use_cache = True  # Trainer switched it off
    model.generation_config = GenerationConfig.from_model_config(model.config)
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


def read_library() -> tuple[list[str], list[str]]:
    """-> the library's files for training, those for validation: every 20th, in the order of their paths."""
    root = Path(sysconfig.get_paths()["stdlib"])
    files = [file for file in sorted(root.rglob("*.py")) if not NOT_PROSE.intersection(file.relative_to(root).parts)]
    texts = [file.read_text(encoding="utf-8", errors="replace") for file in files]
    return [text for i, text in enumerate(texts) if i % 20], texts[::20]


def encode(texts: list[str], tokenizer: PreTrainedTokenizerFast) -> list[torch.Tensor]:
    """The tokens of each text, [n]."""
    return [
        torch.tensor(ids, dtype=torch.long)
        for ids in tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"]
    ]


def stream_of(texts: list[str], tokenizer: PreTrainedTokenizerFast) -> torch.Tensor:
    """All texts as one stream of tokens [n], end-of-text behind each."""
    end = torch.tensor([tokenizer.eos_token_id])
    return torch.cat([part for file in encode(texts, tokenizer) for part in (file, end)])


class Windows(Dataset):
    """A stream of tokens [n] cut into windows [length], each its own labels: the model shifts them."""

    def __init__(self, stream: torch.Tensor, length: int):
        self.rows = stream[: len(stream) // length * length].view(-1, length)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, i: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.rows[i], "labels": self.rows[i]}


def trainer_on_bytes(
    options: argparse.Namespace, texts: list[str], folder: Path
) -> tuple[PreTrainedTokenizerFast, Trainer]:
    """Of a model of bytes: windows of the texts, for so many steps or as many as fit into so many minutes."""
    tokenizer = byte_tokenizer(options.length)
    windows = Windows(stream_of(texts, tokenizer), options.length)
    model = AutoModelForCausalLM.from_config(
        tiny(options.model, tokenizer, options.length, options.layers, options.width)
    )
    steps = options.steps or steps_within(options.minutes, model, windows)
    arguments = TrainingArguments(
        max_steps=steps,
        per_device_train_batch_size=BATCH,
        learning_rate=RATE,
        lr_scheduler_type="cosine",
        warmup_steps=max(1, steps // 20),
        weight_decay=0.1,
        adam_beta2=0.95,
        **always(options.seed, folder),
    )
    return tokenizer, Trainer(model, arguments, train_dataset=windows)


def always(seed: int, folder: Path) -> dict[str, Any]:
    """Arguments of every training here."""
    return {
        "output_dir": str(folder),
        "seed": seed,
        "logging_steps": 50,
        "logging_nan_inf_filter": False,
        "save_strategy": "no",
        "report_to": "none",
        "dataloader_pin_memory": False,
    }


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
def bits_per_byte(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, texts: list[str], length: int, most: int = 200
) -> float:
    """Bits over bytes of the texts' first windows [length + 1], at most `most` of them; the first token is not counted."""
    model.eval()
    files = encode(texts, tokenizer)
    rows = [row for file in files if len(file) > length for row in file.unfold(0, length + 1, length)[:10]][:most]
    bits, size = 0.0, 0
    for batch in torch.stack(rows).split(BATCH):
        logits, following = model(input_ids=batch[:, :-1]).logits, batch[:, 1:]
        nats = torch.nn.functional.cross_entropy(logits.flatten(0, 1), following.flatten(), reduction="sum")
        bits += nats.item() / math.log(2)
        size += sum(
            len(token) for row in following for token in tokenizer.convert_ids_to_tokens(row)
        )  # a letter is a byte
    return bits / size


if __name__ == "__main__":
    main()
