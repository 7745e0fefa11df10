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
from transformers import AutoConfig, AutoModelForCausalLM

from longitude.check import check, laws
from longitude.testing.engine import Result

PAGE = Path(__file__).with_name("families.md")
FAMILIES = """
    apertus arcee bamba biogpt bitnet bloom cohere cohere2 cwm deepseek_v2 deepseek_v3 doge ernie4_5 exaone4 falcon falcon_h1
    falcon_mamba gemma gemma2 gemma3_text glm glm4 glm4_moe gpt2 gpt_bigcode gpt_neo gpt_neox gpt_oss granite granitemoe helium
    hunyuan_v1_dense jamba lfm2 llama llama4_text mamba mamba2 minimax ministral3 mistral mixtral mpt nemotron olmo olmo2
    olmo3 olmoe opt persimmon phi phi3 phimoe qwen2 qwen2_moe qwen3 qwen3_moe recurrent_gemma rwkv seed_oss smollm3 stablelm
    starcoder2 vaultgemma xglm
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
    "falcon_h1": {"mamba_d_ssm": 128},
}  # fmt: skip
MARKS = {"holds": "yes", "does not apply": "-", "broken": "**no**"}


def toy(family: str) -> Any:
    """A random model of a family, small in every way that its config has."""
    has = {*AutoConfig.for_model(family).to_dict(), *type(AutoConfig.for_model(family)).attribute_map}
    options = SHAPE | {key: value for key, value in OPTIONS.items() if key in has} | OWN.get(family, {})
    torch.manual_seed(0)
    config = AutoConfig.for_model(family, **{key: value for key, value in options.items() if value is not None})
    return AutoModelForCausalLM.from_config(config).eval()


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
    return AutoModelForCausalLM._model_mapping[type(AutoConfig.for_model(family))].__name__


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
