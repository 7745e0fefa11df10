"""Small models of transformers, and ways to change one; and GGUF files."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import BloomForCausalLM, GPT2LMHeadModel, LlamaForCausalLM

SHAPE: dict[str, Any] = {"vocab_size": 96, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
LENGTH = 32
ORIGINAL = "original_max_position_embeddings"
DYNAMIC = {"rope_type": "dynamic", "factor": 4.0}
LONGROPE = {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [1.0, 2.0, 3.0, 4.0], "factor": 2.0}
LONGROPE["original_max_position_embeddings"] = LENGTH // 2
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": LENGTH // 4}


def built(kind: Any, **options: Any) -> Any:
    torch.manual_seed(0)
    return kind(kind.config_class(**options)).eval()


def bloom() -> Any:
    return built(BloomForCausalLM, vocab_size=96, hidden_size=32, n_layer=2, n_head=4, seq_length=LENGTH)


def gpt2() -> Any:
    return built(GPT2LMHeadModel, vocab_size=96, n_embd=32, n_layer=2, n_head=4, n_positions=LENGTH)


def past_of(cache: Any) -> int:
    return cache.get_seq_length() if cache is not None else 0


def llama(rope: dict[str, Any] = {}, **options: Any) -> Any:  # noqa: B006
    rope = {"rope_type": "default", "rope_theta": 10_000.0, **rope}
    shape = {"intermediate_size": 64, "num_key_value_heads": 2, "max_position_embeddings": LENGTH, **options}
    return built(LlamaForCausalLM, **SHAPE | shape, rope_parameters=rope)


def by_layer(kind: Any, **options: Any) -> Any:
    """A model some layers of which do not rotate, or whose queries have a temperature."""
    shape = {"intermediate_size": 48, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": LENGTH}
    rope = {"rope_type": "default", "rope_theta": 10_000.0}
    return built(kind, **SHAPE | shape | {"num_hidden_layers": 4, "rope_parameters": rope, "pad_token_id": 0} | options)


# ---- GGUF ------------------------------------------------------------------------------------------------------------
WIDTH, TRAINED = 16, 64


def file_of(path: Path, architecture: str = "llama", tensors: Any = None, **keys: Any) -> Path:
    """A file of positions alone; keys: beneath `rope.`, with __ for a dot."""
    writer = pytest.importorskip("gguf").GGUFWriter(path, architecture)
    writer.add_embedding_length(WIDTH)
    writer.add_head_count(1)
    writer.add_context_length(TRAINED)
    for key, value in keys.items():
        name = f"{architecture}.rope.{key.replace('__', '.')}"
        writer.add_string(name, value) if isinstance(value, str) else writer.add_float32(name, value)
    for name, numbers in (tensors or {"token_embd": [0.0]}).items():
        writer.add_tensor(f"{name}.weight", torch.tensor(numbers).numpy())
    return finished(writer)


def finished(writer: Any) -> Path:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return writer.path


# ---- calls ------------------------------------------------------------------------------------------------------------------
def changed(
    model: Any,
    before: Callable[[dict[str, Any]], Any] | None = None,
    after: Callable[[Any, dict[str, Any]], Any] | None = None,
) -> Any:
    """before: changes the named arguments of each call, in place; after: the answer to them."""
    model.__class__ = type("Changed", (type(model),), {})  # so that it is no stock model
    if before is not None:
        model.register_forward_pre_hook(lambda module, given, named: before(named), with_kwargs=True)
    if after is not None:
        model.register_forward_hook(lambda module, given, named, answer: after(answer, named), with_kwargs=True)
    return model


def with_tables(change: Callable[..., Any]) -> Any:
    """change: of the right function of tables, hidden states and position_ids."""
    model = llama()
    tables = model.model.rotary_emb
    right = tables.forward
    tables.forward = lambda x, position_ids: change(right, x, position_ids)
    return model
