"""Tiny random checkpoints of many kinds, as transformers saves them, with a tokenizer of bytes; and runs of the verb."""

import json
from contextlib import redirect_stderr, redirect_stdout
from copy import deepcopy
from functools import cache
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.utils import logging

from longitude.checkpoints.load import byte_tokenizer
from longitude.checkpoints.observed import auto_class_of
from longitude.cli import main
from make_families import MROPE, TOKENS, VISION
from tests.support import edit_config

LENGTH = 64
SMALL: dict[str, Any] = {"vocab_size": 258, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
SMALL |= {"initializer_range": 0.2, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
TRAINED = {"max_position_embeddings": LENGTH}
LLAMA = SMALL | TRAINED | {"num_key_value_heads": 2, "intermediate_size": 96}
NARROW = {"vocab_size": 258, "n_embd": 64, "n_layer": 2, "n_head": 4, "initializer_range": 0.2}
WIDE = {"vocab_size": 258, "hidden_size": 64}
PLAIN = {"rope_type": "default", "rope_theta": 10_000.0}
PARTIAL = PLAIN | {"rope_theta": 2_000.0, "partial_rotary_factor": 0.5}
LOCAL = {"sliding_window": 24, "layer_types": ["sliding_attention", "full_attention"]}
CHUNKED = {"head_dim": 16, "num_hidden_layers": 4, "attention_chunk_size": 24}
CHUNKED |= {"intermediate_size_mlp": 96, "num_local_experts": 2}
WARM = PLAIN | {"original_max_position_embeddings": LENGTH, "llama_4_scaling_beta": 0.1}
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": LLAMA,
    "mistral": LLAMA | {"sliding_window": 2 * LENGTH},
    "qwen2": LLAMA,
    "qwen3": LLAMA | {"head_dim": 16},
    "phi3": LLAMA | {"original_max_position_embeddings": LENGTH},
    "gpt_neox": SMALL | TRAINED | {"intermediate_size": 96, "rope_parameters": PARTIAL},
    "gemma3_text": LLAMA | LOCAL | {"head_dim": 16},
    "falcon": WIDE | TRAINED | {"num_hidden_layers": 2, "num_attention_heads": 4},
    "cohere": LLAMA,
    "smollm3": LLAMA | {"num_hidden_layers": 4},
    "cohere2": LLAMA | {"num_hidden_layers": 4, "sliding_window": 24},
    "llama4_text": LLAMA | CHUNKED,
    "ministral3": LLAMA | {"head_dim": 16, "rope_parameters": WARM},
    "gpt2": NARROW | {"n_positions": LENGTH},
    "bloom": WIDE | {"n_layer": 2, "n_head": 4, "bos_token_id": 1, "eos_token_id": 2},
    "mpt": {"vocab_size": 258, "d_model": 64, "n_heads": 4, "n_layers": 2, "max_seq_len": LENGTH},
    "gptj": NARROW | {"n_positions": LENGTH, "rotary_dim": 8},
    "mamba": WIDE | {"num_hidden_layers": 1},
    "qwen2_5_vl": {"text_config": LLAMA | MROPE, "vision_config": VISION} | dict(zip(TOKENS, range(250, 254))),
}
"""By the name that transformers has for a family."""


def saved(kind: str, folder: Path, **changes: Any) -> Path:
    """A random checkpoint; changes: keys of its config.json, None to remove one."""
    torch.manual_seed(1)
    logging.disable_progress_bar()
    options = AutoConfig.for_model(kind, **deepcopy(CONFIGS[kind]))
    model = auto_class_of(options).from_config(options)
    for name, parameter in model.named_parameters():
        if name.endswith(("bias", "q_norm.weight", "k_norm.weight")):
            parameter.data += 0.2 * torch.randn_like(parameter)
    model.save_pretrained(folder)
    tokenizer = byte_tokenizer()
    tokenizer.add_special_tokens({"eos_token": "<|end|>"})
    tokenizer.model_max_length = LENGTH
    tokenizer.save_pretrained(folder)
    if changes:
        edit_config(folder, **changes)
    return folder


def loaded(folder: Path) -> Any:
    """The model in a folder as plain transformers reads it."""
    return AutoModelForCausalLM.from_pretrained(folder).eval()


def logits(model: Any, length: int) -> Tensor:
    """Of two rows of random tokens, without a cache."""
    ids = torch.randint(3, 250, (2, length), generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        return model(input_ids=ids, use_cache=False).logits


def config(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "config.json").read_text())


def weights(folder: Path) -> dict[str, Tensor]:
    return load_file(folder / "model.safetensors")


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory):
    """checkpoint(kind) -> its folder, made once."""
    return cache(lambda kind: saved(kind, tmp_path_factory.mktemp("models") / kind))


@pytest.fixture(scope="session")
def longer(checkpoint, tmp_path_factory):
    """longer(kind, *arguments) -> the folder that `longitude extend` makes of checkpoint(kind), made once and only read."""

    @cache
    def make(kind: str, *arguments: object) -> Path:
        out = tmp_path_factory.mktemp("longer") / "out"
        with redirect_stdout(StringIO()), redirect_stderr(StringIO()) as errors:
            code = main(["extend", *map(str, (checkpoint(kind), *arguments, "--out", out))])
        assert code == 0, errors.getvalue()
        return out

    return make


@pytest.fixture
def save(tmp_path):
    """save(kind="llama", **keys of config.json) -> folder, a checkpoint of one's own."""
    return lambda kind="llama", **keys: saved(kind, tmp_path / "model", **keys)


@pytest.fixture
def text(tmp_path) -> Path:
    """A text of 40 documents."""
    folder = tmp_path / "text"
    folder.mkdir()
    for i in range(40):
        (folder / f"{i}.txt").write_text(f"document {i} says: " + "abc äöü " * 60)
    return folder


@pytest.fixture
def command(command):
    """command(*arguments) of `longitude extend`."""
    return lambda *arguments: command("extend", *arguments)


@pytest.fixture
def write(command, tmp_path):
    """write(*arguments, out="out") -> (the new folder, what was printed) where all is well; what measuring takes aside."""

    def call(*arguments: object, out: str = "out") -> tuple[Path, str]:
        code, printed, error = command(*arguments, "--out", tmp_path / out)
        assert (code, [line for line in error.splitlines() if not line.startswith("measuring: ")]) == (0, [])
        return tmp_path / out, printed

    return call


@pytest.fixture
def refused(command, tmp_path):
    """refused(*arguments) -> the one line of reason; nothing came into being."""

    def call(*arguments: object, out: Path | None = tmp_path / "out") -> str:
        before = sorted(tmp_path.rglob("*"))
        code, printed, line = command(*arguments, *([] if out is None else ["--out", out]))
        line = line[line.rfind("longitude: ") :] if "measuring: " in line else line
        assert (code, printed) == (2, "") and line.startswith("longitude: ") and line.count("\n") == 1, line
        assert sorted(tmp_path.rglob("*")) == before
        return line

    return call
