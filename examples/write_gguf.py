"""Write a Llama checkpoint as a GGUF file, by the rules of llama.cpp's converter: how each scheme of positions is said there.

    longitude extend models/llama --to 1024 --method yarn --out models/llama-yarn
    python examples/write_gguf.py models/llama-yarn llama-yarn.gguf
    longitude check models/llama-yarn --against llama-yarn.gguf

Weights are written in float32, and no vocabulary: the file takes token numbers. For a file with a tokenizer, or a smaller one,
run llama.cpp's own convert_hf_to_gguf.py on the same folder, and then the same `check`. Needs the package gguf.
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path
from typing import Any

import gguf
import torch
from transformers import AutoConfig, AutoModelForCausalLM

import longitude as lg


def write(folder: Path, path: Path) -> None:
    config = AutoConfig.from_pretrained(folder)
    if config.model_type != "llama":
        raise ValueError(f"{folder}: expected a Llama, got {config.model_type}; other architectures have other rules")
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("no_vocab")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    head_dim = config.head_dim or config.hidden_size // config.num_attention_heads
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    write_positions(writer, lg.from_hugging_face(config.to_dict()), head_dim)
    write_weights(writer, AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32), head_dim)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def write_positions(writer: gguf.GGUFWriter, rope: lg.RopeConfig, head_dim: int) -> None:
    """llama.cpp knows three schemes by a key and Llama 3's by a tensor; NTK is another base, and no scheme."""
    writer.add_rope_dimension_count(rope.rotary_dim(head_dim))
    writer.add_rope_freq_base(rope.base)
    match rope.scaling:
        case None:
            pass
        case lg.scaling.Linear(factor=factor):
            writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
            writer.add_rope_scaling_factor(factor)
        case lg.scaling.YaRN(beta_fast=32, beta_slow=1) as yarn if (
            yarn.truncate
        ):  # for a Llama other betas are not read
            writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
            writer.add_rope_scaling_factor(yarn.factor)
            writer.add_rope_scaling_orig_ctx_len(yarn.original_max_length)
            # It multiplies cos and sin by 0.1 ln(s) + 1 itself, and by this key; yarn_attn_factor is overwritten.
            wanted, _ = yarn.factors()
            writer.add_rope_scaling_attn_factors(wanted / (0.1 * math.log(yarn.factor) + 1))
        case lg.scaling.Llama3() as scheme:  # by what each pair's frequency is divided
            plain, scaled = (lg.rope_frequencies(head_dim, rope.base, each).inverse for each in (None, scheme))
            writer.add_tensor("rope_freqs.weight", (plain / scaled).float().numpy())
        case other:
            raise ValueError(
                f"expected linear, yarn with betas of 32 and 1, llama3 or another base, got {other}: llama.cpp has no such scheme"
            )


def write_weights(writer: gguf.GGUFWriter, model: Any, head_dim: int) -> None:
    """Under llama.cpp's names; rows of queries and keys in pairs of neighbours, which it rotates for a Llama."""
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, model.config.num_hidden_layers)
    for name, weight in model.state_dict().items():
        if name == "lm_head.weight" and model.config.tie_word_embeddings:
            continue
        if ".q_proj." in name or ".k_proj." in name:
            weight = lg.positions.convert_layout(weight, head_dim, "interleaved")
        writer.add_tensor(names.get_name(name, try_suffixes=(".weight", ".bias")), weight.contiguous().numpy())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="a Llama as transformers saves it")
    parser.add_argument("out", type=Path, help="the file, which must not exist yet")
    options = parser.parse_args()
    if options.out.exists():
        parser.error(f"{options.out}: expected a file that does not exist yet; name another")
    try:
        write(options.folder, options.out)
    except (OSError, ValueError) as error:
        parser.error(str(error))
    print(f"{options.out}: {options.out.stat().st_size / 1e6:.1f} MB")


if __name__ == "__main__":
    main()
