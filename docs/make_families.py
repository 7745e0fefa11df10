"""The page of families, docs/families.md: what `longitude check` says of each architecture of transformers, at toy size.

python docs/make_families.py                     # all: a few minutes; writes the page
python docs/make_families.py llama gemma3_text   # these alone, printed
"""

import re
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

from longitude.check import check, laws
from longitude.testing.engine import Result

PAGE = Path(__file__).with_name("families.md")
FAMILIES = """
    afmoe apertus arcee axk1 bamba beam biogpt bitnet bloom codegen cohere cohere2 cohere2_moe ctrl cwm deepseek_v2
    deepseek_v3 diffllama doge ernie4_5 ernie4_5_moe exaone4 exaone_moe falcon falcon_h1 falcon_mamba flex_olmo flint gemma
    gemma2 gemma3_text gemma4_text glm glm4 glm4_moe glm4_moe_lite gpt2 gpt_bigcode gpt_neo gpt_neox gpt_neox_japanese gpt_oss
    gptj granite granite_swa granitemoe granitemoe_swa granitemoehybrid granitemoeshared helium hunyuan_v1_dense
    hunyuan_v1_moe hy_v3 internlm3 iquestcoder jais2 jamba jetmoe kolibri1 laguna lfm2 lfm2_moe llama llama4_text
    longcat_flash mamba mamba2 mellum mimo_v2_flash minicpm3 minimax minimax_m2 ministral ministral3 mistral mixtral
    modernbert-decoder mpt nanochat nemotron nemotron_h olmo olmo2 olmo3 olmoe openai-gpt opt persimmon phi phi3 phimoe qwen2
    qwen2_5_vl qwen2_moe qwen2_vl qwen3 qwen3_moe qwen3_vl recurrent_gemma roberta roformer rwkv seed_oss smollm3 solar_open
    stablelm starcoder2 vaultgemma xglm xlnet xlstm youtu
""".split()
SHAPE = {
    "vocab_size": 96, "hidden_size": 64, "num_hidden_layers": 6, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 64, "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
OPTIONS = {
    "head_dim": 16, "sliding_window": 8, "query_pre_attn_scalar": 16, "moe_intermediate_size": 32, "num_experts": 4,
    "num_local_experts": 4, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1,
    "first_k_dense_replace": 1, "q_lora_rank": 24, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16,
    "v_head_dim": 16, "state_size": 8, "attention_hidden_size": 64, "lru_width": 64, "attention_window_size": 16,
    "mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 8, "mamba_chunk_size": 8, "mamba_d_ssm": 64, "n_groups": 1,
    "d_model": 64, "n_heads": 4, "n_layers": 4, "max_seq_len": 64, "n_positions": 64, "n_embd": 64, "n_layer": 4, "n_head": 4,
    "num_layers": 4, "num_heads": 4, "ffn_dim": 64, "word_embed_proj_dim": 64, "attention_heads": 4,
}  # fmt: skip
"""Of those families that have them."""
UNSET = {"max_position_embeddings": None}
OWN = {
    "apertus": UNSET, "cwm": UNSET, "gpt_oss": UNSET, "ministral3": UNSET, "recurrent_gemma": UNSET,
    "bamba": {"attn_layer_indices": [2, 5]}, "deepseek_v2": {"head_dim": 8, "num_key_value_heads": 4},
    "deepseek_v3": {"head_dim": 8, "num_key_value_heads": 4},
    "minimax": {"sliding_window": None}, "mamba2": {"num_heads": 8, "head_dim": 16, "expand": 2, "chunk_size": 8},
    "gpt_neo": {"num_hidden_layers": None, "num_layers": 4, "attention_types": [[["global", "local"], 2]], "window_size": 8},
    "falcon_h1": {"mamba_d_ssm": 128}, "roberta": {"is_decoder": True}, "xlnet": UNSET,
    "xlstm": {"hidden_size": 128},  # its cache is of multiples of 64
    **{
        kind: {"head_dim": 8, "num_key_value_heads": 4}
        for kind in ("axk1", "glm4_moe_lite", "longcat_flash", "minicpm3", "youtu")
    },
    "codegen": {"rotary_dim": 8}, "gptj": {"rotary_dim": 8}, "mimo_v2_flash": {"head_dim": 24}, "roformer": {"is_decoder": True},
    "gemma4_text": {"global_head_dim": 32, "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 96},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"] * 3, "position_embedding_type": "rope"},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 3},
}  # fmt: skip
TOKENS = {"image_token_id": 90, "video_token_id": 91, "vision_start_token_id": 92, "vision_end_token_id": 93}
VISION = {
    "depth": 1, "hidden_size": 32, "embed_dim": 32, "intermediate_size": 32, "num_heads": 2, "patch_size": 2,
    "spatial_merge_size": 2, "out_hidden_size": 64, "deepstack_visual_indexes": [0], "num_position_embeddings": 16,
    "window_size": 8, "fullatt_block_indexes": [0],
}  # fmt: skip
"""Of families with images; their text model has the shape of the others."""
MARKS = {"holds": "yes", "does not apply": "-", "broken": "**no**"}


def toy(family: str) -> Any:
    """A random model of a family, small in every way that its config has."""
    default = AutoConfig.for_model(family)
    if getattr(default, "vision_config", None) is not None:
        return toy_of_images(family)
    has = {*default.to_dict(), *type(default).attribute_map}
    options = SHAPE | {key: value for key, value in OPTIONS.items() if key in has} | OWN.get(family, {})
    torch.manual_seed(0)
    config = AutoConfig.for_model(family, **{key: value for key, value in options.items() if value is not None})
    return AutoModelForCausalLM.from_config(config).eval()


def toy_of_images(family: str) -> Any:
    """The same, of text and images: three axes of positions."""
    rope = {"rope_type": "default", "rope_theta": 10_000.0, "mrope_section": [2, 3, 3]}
    vision = VISION | ({"hidden_size": 64} if family == "qwen2_vl" else {})  # what others call out_hidden_size
    torch.manual_seed(0)
    config = AutoConfig.for_model(
        family, text_config=SHAPE | {"head_dim": 16, "rope_parameters": rope}, vision_config=vision, **TOKENS
    )
    return AutoModelForImageTextToText.from_config(config).eval()


def page(found: dict[str, dict[str, Result]]) -> str:
    """A table of families and laws, and the reason of each law that is broken, or that does not apply where it might."""
    names = list(laws())
    lines = [
        "# Families",
        "",
        "What `longitude check` says of the architectures of transformers "
        f"{transformers.__version__}: random weights, toy size (`python docs/make_families.py` makes this page).",
        "**yes**: the law holds; **no**: it is broken, with the reason below and whose it is; -: it does not apply.",
        "",
        "| family | " + " | ".join(f"`{name}`" for name in names) + " |",
        "| --- |" + " --- |" * len(names),
    ]
    for family, results in found.items():
        lines.append(f"| `{family}` | " + " | ".join(MARKS[result.status] for result in results.values()) + " |")
    lines += ["", "## What is broken", ""]
    for family, results in found.items():
        for result in results.values():
            if result.status == "broken":
                lines.append(f"* `{family}`, `{result.law}`, {result.whose}: {result.reason}.")
    lines += ["", "## What does not apply", ""]
    reasons: dict[tuple[str, str], list[str]] = {}
    for family, results in found.items():
        for result in results.values():
            if result.status == "does not apply" and not result.reason.startswith("it rests on"):
                words = result.reason.replace(type_of(family), "its class")
                reasons.setdefault((result.law, re.sub(r" \(by [^)]*\)", "", words)), []).append(f"`{family}`")
    for law in names:
        for (own, reason), families in reasons.items():
            if own == law:
                who = "all" if len(families) == len(found) else ", ".join(families)
                lines.append(f"* `{law}`: {reason}: {who}.")
    return "\n".join(lines) + "\n"


def type_of(family: str) -> str:
    """The name of its class."""
    config = type(AutoConfig.for_model(family))
    causal = AutoModelForCausalLM._model_mapping
    return (causal if config in causal else AutoModelForImageTextToText._model_mapping)[config].__name__


def main() -> None:
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    found = {}
    for family in sys.argv[1:] or FAMILIES:
        found[family] = check(toy(family))
        for result in found[family].values():
            if result.status == "broken" or sys.argv[1:]:
                print(f"{family}: {result.law} {result.status} {result.measured} {result.reason}", flush=True)
    print(f"{len(found)} families, {len(laws())} laws")
    if not sys.argv[1:]:
        PAGE.write_text(page(found), encoding="utf-8")


if __name__ == "__main__":
    main()
