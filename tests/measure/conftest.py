"""Small checkpoints of stock models on disk, with a tokenizer of bytes: real files, random weights that look around."""

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

from longitude.checkpoints.load import byte_tokenizer
from longitude.models import LongitudeConfig, LongitudeForCausalLM

WIDE = {"hidden_size": 16, "num_attention_heads": 2, "num_hidden_layers": 2, "vocab_size": 256}
STOCK = {"initializer_range": 0.5, "bos_token_id": None, "eos_token_id": None}
TRAINED = 32


def build(name: str, **more):
    """A model of a family, with weights that make position and context matter."""
    torch.manual_seed(0)
    length = {"max_position_embeddings": TRAINED}
    if name == "ours":
        return LongitudeForCausalLM(LongitudeConfig(**WIDE, **length, **({"encoding": "alibi"} | more)))
    own = {
        "llama": WIDE | length | {"intermediate_size": 24},
        "gpt_neox": WIDE | length | {"intermediate_size": 24},
        "gpt2": {"n_embd": 16, "n_head": 2, "n_layer": 2, "n_positions": TRAINED},
        "bloom": {"hidden_size": 16, "n_head": 2, "n_layer": 2},
    }[name]
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(name, **STOCK | {"vocab_size": 256} | own | more))


def write(folder, name: str, tokenizer: bool = True, **more):
    """The path of a checkpoint, written by save_pretrained."""
    path = folder / name
    build(name, **more).save_pretrained(path)
    if tokenizer and name != "ours":
        byte_tokenizer().save_pretrained(path)
    return path


def byte_pairs(corpus: list[str], size: int, **special: str) -> PreTrainedTokenizerFast:
    """As GPT-2's: tokens of bytes, which may split a character, and begin with the space before them."""
    plain = Tokenizer(models.BPE())
    plain.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    plain.decoder = decoders.ByteLevel()
    alphabet = {"initial_alphabet": pre_tokenizers.ByteLevel.alphabet(), "special_tokens": sorted({*special.values()})}
    plain.train_from_iterator(corpus, trainers.BpeTrainer(vocab_size=size, show_progress=False, **alphabet))
    return PreTrainedTokenizerFast(tokenizer_object=plain, **special)


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory):
    """name -> path of a checkpoint that no test changes."""
    folder = tmp_path_factory.mktemp("checkpoints")
    return {name: write(folder, name) for name in ("llama", "gpt_neox", "gpt2", "bloom", "ours")}


@pytest.fixture(scope="session")
def text(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text("".join(f"line {i} says {i * i % 97} and ümlaut\n" for i in range(60)))
    return path
