"""Configs of published models, few layers of each, with their values about positions; what lines make of them; and frequent dicts."""
# ruff: noqa: E501 - a line or a config is a line here

import json
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

from longitude.serving.effective import Case, judged, opened
from longitude.serving.findings import Finding, findings
from longitude.serving.line import lines_in

SIZES: dict[str, Any] = {
    "hidden_size": 256, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 128, "num_hidden_layers": 2,
    "intermediate_size": 64, "vocab_size": 256,
}  # fmt: skip
MOE = {"moe_intermediate_size": 32, "num_experts": 4, "num_experts_per_tok": 2}
ORIGINAL = "original_max_position_embeddings"
FLAT = {"rope_type": "yarn", "factor": 4.0, ORIGINAL: 32768}
F2 = {"rope_type": "yarn", "factor": 2.0, ORIGINAL: 262144}
MROPE = {"rope_type": "default", "rope_theta": 10000000, "partial_rotary_factor": 0.25}
MROPE |= {"mrope_section": [11, 11, 10], "mrope_interleaved": True}
Y2 = {"text_config": {"rope_parameters": {**MROPE, **F2}}}
Y4 = {"text_config": {"rope_parameters": {**MROPE, **F2, "factor": 4.0}}}
DEEPSEEK = {
    "type": "yarn", "factor": 40, ORIGINAL: 4096, "beta_fast": 32, "beta_slow": 1, "mscale": 1.0, "mscale_all_dim": 1.0,
}  # fmt: skip
LATENT = {
    "q_lora_rank": 32, "kv_lora_rank": 32, "qk_rope_head_dim": 64, "qk_nope_head_dim": 64, "v_head_dim": 64, "n_routed_experts": 4,
    "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "moe_intermediate_size": 32, "num_key_value_heads": 2, "n_shared_experts": 1,
}  # fmt: skip
CONFIGS: dict[str, dict[str, Any]] = {
    "qwen3": {"model_type": "qwen3", "max_position_embeddings": 40960, "rope_theta": 1000000, "rope_scaling": None},
    "glm4_yarn": {"model_type": "glm4", "max_position_embeddings": 32768, "rope_theta": 10000.0, "partial_rotary_factor": 0.5, "pad_token_id": None, "rope_scaling": {"type": "yarn", "factor": 4.0, ORIGINAL: 32768}},
    "qwen2": {"model_type": "qwen2", "max_position_embeddings": 32768, "rope_theta": 1000000},
    "qwen3_moe": {"model_type": "qwen3_moe", "max_position_embeddings": 40960, "rope_theta": 1000000, **MOE},
    "qwen3_coder": {"model_type": "qwen3_moe", "max_position_embeddings": 262144, "rope_theta": 10000000, **MOE},
    "qwen3_moe_yarn": {"model_type": "qwen3_moe", "max_position_embeddings": 131072, "rope_theta": 1000000, "rope_scaling": FLAT, **MOE},
    "qwen3_5": {
        "model_type": "qwen3_5", "architectures": ["Qwen3_5ForConditionalGeneration"], "vision_config": {},
        "text_config": {"model_type": "qwen3_5_text", **SIZES, "head_dim": 256, "num_hidden_layers": 4,
                        "max_position_embeddings": 262144, "rope_parameters": MROPE},
    },
    "qwen4": {
        "model_type": "qwen4_exp",
        "text_config": {**SIZES, "head_dim": 256, "num_hidden_layers": 4, "max_position_embeddings": 262144, "rope_parameters": MROPE},
    },
    "llama2": {"model_type": "llama", "max_position_embeddings": 4096, "rope_scaling": None},  # has no base
    "llama2k": {"model_type": "llama", "max_position_embeddings": 2048, "rope_theta": 10000.0},
    "llama": {"model_type": "llama", "max_position_embeddings": 8192, "rope_theta": 500000.0},
    "llama3": {
        "model_type": "llama", "max_position_embeddings": 131072, "rope_theta": 500000.0,
        "rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, ORIGINAL: 8192},
    },
    "gemma3_4b": {
        "model_type": "gemma3", "vision_config": {},
        "text_config": {"model_type": "gemma3_text", **SIZES, "max_position_embeddings": 131072, "rope_scaling": {"rope_type": "linear", "factor": 8.0}},
    },
    "gemma3": {
        "model_type": "gemma3_text", "max_position_embeddings": 32768, "sliding_window": 512,
        "layer_types": ["sliding_attention", "full_attention"],
        "rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 1000000.0},
                            "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0}},
    },
    "gpt_oss": {
        "model_type": "gpt_oss", "max_position_embeddings": 131072, "rope_theta": 150000.0, "num_local_experts": 4, "head_dim": 64,
        "sliding_window": 128, "layer_types": ["sliding_attention", "full_attention"],
        "rope_scaling": {"rope_type": "yarn", "factor": 32.0, ORIGINAL: 4096, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False},
    },
    "ministral": {
        "model_type": "ministral3", "max_position_embeddings": 262144,
        "rope_parameters": {"rope_type": "yarn", "rope_theta": 1000000.0, "factor": 16.0, ORIGINAL: 16384, "beta_fast": 32.0,
                            "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1},
    },
    "deepseek": {"model_type": "deepseek_v3", "max_position_embeddings": 163840, "rope_theta": 10000, "rope_scaling": DEEPSEEK, **LATENT},
    "glm4": {"model_type": "glm4", "max_position_embeddings": 32768, "rope_theta": 10000.0, "partial_rotary_factor": 0.5, "pad_token_id": 0},
    "phi": {"model_type": "phi", "max_position_embeddings": 2048, "rope_theta": 10000.0, "partial_rotary_factor": 0.5, "pad_token_id": 0},
    "mistral": {"model_type": "mistral", "max_position_embeddings": 32768, "sliding_window": 4096, "rope_theta": 10000.0},
}  # fmt: skip


@cache
def model(name: str) -> Path:
    """The folder of a config.json, without weights."""
    folder = Path(mkdtemp(prefix="longitude-serving-")) / name
    folder.mkdir()
    config = CONFIGS[name]
    sizes = {} if "text_config" in config else SIZES
    (folder / "config.json").write_text(json.dumps(sizes | config))
    return folder


@cache
def alone(name: str) -> Any:
    """(config, its rotations, note): what `opened` reads, once a session."""
    return opened(str(model(name)))


def cases(name: str, text: str, suffix: str = "") -> list[tuple[Case, list[Finding]]]:
    """The cases of the lines in a text, and their findings."""
    made = [judged(line, *alone(name)[:2]) for line in lines_in(text, suffix)]
    return [(case, findings(case)) for case in made]
