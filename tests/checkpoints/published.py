"""The position sections of published configs, typed from public knowledge: keys about position, and the sizes that they rest on.

Tests hold what is read of each to what the class of the installed transformers does with it, so a number here matters as an input
of the kind that is published, and is no source.
"""

import json
from copy import deepcopy
from pathlib import Path
from typing import Any

from transformers import AutoConfig

from longitude.checkpoints.lint import contradictions, remarks

Config = dict[str, Any]
ORIGINAL = "original_max_position_embeddings"


def of(
    kind: str, heads: int, layers: int, length: int, theta: float | None = None, width: int = 128, **more: Any
) -> Config:
    """A config in the schema before transformers 5; width: of a head, which many files do not name."""
    sizes = {"hidden_size": heads * width, "num_attention_heads": heads, "num_hidden_layers": layers}
    base = {} if theta is None else {"rope_theta": theta}
    return {"model_type": kind, **sizes, "max_position_embeddings": length, **base, **more}


def said(raw: Config) -> tuple[list[str], list[str]]:
    """(contradictions, remarks) of a file."""
    config = AutoConfig.for_model(**deepcopy(raw))
    return [*contradictions(raw, config)], remarks(raw, config)


def llama3(factor: float, **more: float) -> Config:
    scheme = {"rope_type": "llama3", "factor": factor, "low_freq_factor": 1.0, "high_freq_factor": 4.0, ORIGINAL: 8192}
    return {"rope_scaling": scheme | more}


def yarn(factor: float, original: int, **more: Any) -> Config:
    return {"rope_scaling": {"type": "yarn", "factor": factor, ORIGINAL: original, **more}}


def longrope(pairs: int, top: float, **more: Any) -> Config:
    """Lists as long and as large as published ones: near 1 for short texts, rising to `top` for long ones."""
    short = [1.0 + 0.02 * (pair % 7) + 0.5 * pair / pairs for pair in range(pairs)]
    long = [top ** (pair / (pairs - 1)) for pair in range(pairs)]
    return {"rope_scaling": {"type": "longrope", "short_factor": short, "long_factor": long, **more}}


def latent(kind: str, heads: int, layers: int, length: int, theta: float, **more: Any) -> Config:
    """DeepSeek's attention, of whose heads 64 dimensions rotate."""
    widths = {
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "q_lora_rank": 1536,
    }
    return of(kind, heads, layers, length, theta, num_key_value_heads=heads, **widths | more)


BETAS = {"beta_fast": 32, "beta_slow": 1}
ONE = {"mscale": 1.0, "mscale_all_dim": 1.0}
LESS = {"mscale": 0.707, "mscale_all_dim": 0.707}
WINDOW = {"sliding_window": 4096}
THREE_WINDOWS = [*["sliding_attention"] * 3, "full_attention"]
FIVE_WINDOWS = [*["sliding_attention"] * 5, "full_attention"]
THREE_LINEAR = [*["linear_attention"] * 3, "full_attention"]
MSCALE = 1.243163121016122
KIMI_K2 = latent("deepseek_v3", 64, 61, 131072, 50000.0, **yarn(32.0, 4096, beta_fast=1.0, beta_slow=1.0, **ONE))
OLMO_3 = of(
    "olmo3", 32, 32, 65536, 500000, **WINDOW, layer_types=THREE_WINDOWS * 8,
    rope_scaling={"rope_type": "yarn", "factor": 8.0, ORIGINAL: 8192, "attention_factor": 1.2079441541679836, **BETAS},
)  # fmt: skip
PHI_35_MOE = of(
    "phimoe", 32, 32, 131072, 10000.0, num_key_value_heads=8, sliding_window=131072, original_max_position_embeddings=4096,
    **longrope(64, 60.0, short_mscale=MSCALE, long_mscale=MSCALE, original_max_position_embeddings=4096),
)  # fmt: skip
MPT_16 = {
    "model_type": "mpt", "d_model": 512, "n_heads": 4, "n_layers": 2, "max_seq_len": 2048,
    "attn_config": {"alibi": True, "alibi_bias_max": 16},
}  # fmt: skip
VISION = {"rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]}}
QWEN3_VL = of("qwen3_vl_text", 32, 36, 262144, 5000000, num_key_value_heads=8, head_dim=128)

PUBLISHED: dict[str, Config] = {
    # ---- Llama, and what took its code ----
    "Llama 1 7B": of("llama", 32, 32, 2048),
    "Llama 3.1 8B": of("llama", 32, 32, 131072, 500000.0, num_key_value_heads=8, **llama3(8.0)),
    "Llama 3.2 1B": of("llama", 32, 16, 131072, 500000.0, 64, head_dim=64, num_key_value_heads=8, **llama3(32.0)),
    "Llama 4 Scout": of(
        "llama4_text", 40, 48, 10485760, 500000.0, head_dim=128, num_key_value_heads=8, attention_chunk_size=8192,
        attn_temperature_tuning=True, floor_scale=8192, attn_scale=0.1, **llama3(16.0, high_freq_factor=1.0),
    ),
    "Llama 4 Maverick": of(
        "llama4_text", 40, 48, 1048576, 500000.0, head_dim=128, num_key_value_heads=8, attention_chunk_size=8192,
        no_rope_layers=[1, 1, 1, 0] * 12, rope_scaling=None,
    ),
    "LongChat 7B 16k": of("llama", 32, 32, 16384, 10000.0, rope_scaling={"type": "linear", "factor": 8.0}),
    "YaRN Llama 2 7B 128k": of("llama", 32, 32, 4096, 10000.0, **yarn(32.0, 4096, finetuned=True)),
    "Dynamic NTK Llama": of("llama", 32, 32, 2048, 10000.0, rope_scaling={"type": "dynamic", "factor": 2.0}),
    "SmolLM3 3B": of(
        "smollm3", 16, 36, 65536, 5000000.0, num_key_value_heads=4, no_rope_layer_interval=4, no_rope_layers=[1, 1, 1, 0] * 9,
    ),
    # ---- Mistral ----
    "Mistral 7B v0.1": of("mistral", 32, 32, 32768, 10000.0, num_key_value_heads=8, sliding_window=4096),
    "Ministral 3 3B": of("ministral3", 32, 26, 262144, None, 96, head_dim=128, num_key_value_heads=8, rope_parameters={
        "type": "yarn", "rope_type": "yarn", "factor": 16.0, ORIGINAL: 16384, "rope_theta": 1000000.0, **BETAS, **ONE,
        "llama_4_scaling_beta": 0.1,
    }),
    # ---- Qwen ----
    "Qwen1.5 7B": of("qwen2", 32, 32, 32768, 1000000.0, use_sliding_window=False, sliding_window=32768, max_window_layers=28),
    "Qwen2.5 7B, YaRN": of("qwen2", 28, 28, 32768, 1000000.0, num_key_value_heads=4, **yarn(4.0, 32768)),
    "Qwen2.5 7B 1M": of(
        "qwen2", 28, 28, 1010000, 10000000.0, num_key_value_heads=4, use_sliding_window=False,
        dual_chunk_attention_config={"chunk_size": 262144, "local_size": 8192, "original_max_position_embeddings": 262144},
    ),
    "Qwen3 8B, YaRN": of("qwen3", 32, 36, 131072, 1000000, head_dim=128, num_key_value_heads=8, **yarn(4.0, 32768)),
    "Qwen3-Next 80B-A3B": of(
        "qwen3_next", 16, 48, 262144, 10000000, head_dim=256, num_key_value_heads=2, partial_rotary_factor=0.25,
        full_attention_interval=4,
    ),
    "Qwen3.5": of(
        "qwen3_5_text", 16, 32, 262144, head_dim=256, num_key_value_heads=4, layer_types=THREE_LINEAR * 8,
        rope_parameters={
            "rope_type": "default", "rope_theta": 10000000, "partial_rotary_factor": 0.25, "mrope_interleaved": True,
            "mrope_section": [11, 11, 10],
        },
    ),
    "Qwen2-VL 7B": of("qwen2_vl_text", 28, 28, 32768, 1000000.0, num_key_value_heads=4, use_sliding_window=False, **VISION),
    "Qwen3-VL 8B": QWEN3_VL | {
        "rope_scaling": {"mrope_interleaved": True, "mrope_section": [24, 20, 20], "rope_type": "default"}
    },
    "Qwen3-VL without mrope_interleaved": QWEN3_VL | {"rope_scaling": {"mrope_section": [24, 20, 20], "rope_type": "default"}},
    # ---- Gemma ----
    "Gemma 2 9B": of("gemma2", 16, 42, 8192, 10000.0, 224, head_dim=256, num_key_value_heads=8, **WINDOW),
    "Gemma 3 1B": of(
        "gemma3_text", 4, 26, 32768, 1000000, 288, head_dim=256, num_key_value_heads=1, rope_local_base_freq=10000,
        sliding_window=512, sliding_window_pattern=6, rope_scaling=None,
    ),
    "Gemma 3 4B": {"model_type": "gemma3", "text_config": of(
        "gemma3_text", 8, 34, 131072, None, 320, head_dim=256, num_key_value_heads=4, sliding_window=1024,
        rope_scaling={"factor": 8.0, "rope_type": "linear"},
    )},
    "Gemma 3n E4B": of(
        "gemma3n_text", 8, 35, 32768, 1000000.0, 256, head_dim=256, num_key_value_heads=2, rope_local_base_freq=10000.0,
        sliding_window=512, layer_types=["sliding_attention" if (n + 1) % 5 else "full_attention" for n in range(35)],
    ),
    "Gemma 4": of(
        "gemma4_text", 8, 30, 262144, None, 352, head_dim=256, global_head_dim=512, num_key_value_heads=8, sliding_window=1024,
        layer_types=FIVE_WINDOWS * 5, rope_parameters={
            "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1000000.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
        },
    ),
    # ---- Phi ----
    "Phi-2": of("phi", 32, 32, 2048, 10000.0, 80, partial_rotary_factor=0.4),
    "Phi-3 mini 128k": of("phi3", 32, 32, 131072, 10000.0, 96, original_max_position_embeddings=4096, **longrope(48, 60.0)),
    "Phi-3.5 MoE": PHI_35_MOE,
    "Phi-4 mini": of(
        "phi3", 24, 32, 131072, 10000.0, num_key_value_heads=8, partial_rotary_factor=0.75, original_max_position_embeddings=4096,
        **longrope(48, 40.0),
    ),
    # ---- DeepSeek, Kimi, GLM ----
    "DeepSeek V2 Lite": latent("deepseek_v2", 16, 27, 163840, 10000, q_lora_rank=None, **yarn(40, 4096, **BETAS, **LESS)),
    "DeepSeek V3": latent("deepseek_v3", 128, 61, 163840, 10000, **yarn(40, 4096, **BETAS, **ONE)),
    "DeepSeek V3.2": latent("deepseek_v32", 128, 61, 163840, 10000, **yarn(40, 4096, **BETAS, **ONE)),
    "DeepSeek V4": of(
        "deepseek_v4", 64, 43, 1048576, 10000, head_dim=512, qk_rope_head_dim=64, compress_rope_theta=160000, sliding_window=128,
        rope_scaling={"type": "yarn", "factor": 16, ORIGINAL: 65536, **BETAS},
    ),
    "Kimi K2": KIMI_K2,
    "Kimi K2 by its own name": KIMI_K2 | {"model_type": "kimi_k2"},
    "Kimi Linear 48B": latent(
        "kimi_linear", 32, 27, 1048576, 10000.0, q_lora_rank=None, mla_use_nope=True, linear_attn_config={
            "full_attn_layers": [4, 8, 12, 16, 20, 24, 27], "head_dim": 128, "num_heads": 32, "short_conv_kernel_size": 4,
            "kda_layers": [n for n in range(1, 28) if n not in (4, 8, 12, 16, 20, 24, 27)],
        },
    ),
    "GLM-4 9B": of("glm", 32, 40, 131072, 10000.0, head_dim=128, num_key_value_heads=2, partial_rotary_factor=0.5),
    # ---- others that rotate ----
    "gpt-oss 20B": of(
        "gpt_oss", 64, 24, 131072, 150000, 45, head_dim=64, num_key_value_heads=8, sliding_window=128,
        layer_types=["sliding_attention", "full_attention"] * 12, initial_context_length=4096,
        **yarn(32.0, 4096, beta_fast=32.0, beta_slow=1.0, truncate=False),
    ),
    "OLMo 3 7B": OLMO_3,
    "Falcon 7B": of("falcon", 71, 32, 2048, None, 64, alibi=False),
    "Falcon-H1 1.5B": of("falcon_h1", 8, 24, 131072, 100000000000.0, 256, head_dim=128, num_key_value_heads=2),
    "GPT-NeoX 20B": of("gpt_neox", 64, 44, 2048, None, 96, rotary_pct=0.25, rotary_emb_base=10000),
    "GPT-J 6B": {"model_type": "gptj", "n_embd": 4096, "n_head": 16, "n_layer": 28, "n_positions": 2048, "rotary_dim": 64},
    "Command R7B": of("cohere2", 32, 32, 8192, 50000, head_dim=128, num_key_value_heads=8, sliding_window_pattern=4, **WINDOW),
    "Granite 4 tiny": of(
        "granitemoehybrid", 12, 40, 131072, 10000, num_key_value_heads=4, position_embedding_type="nope",
        layer_types=[*["mamba"] * 9, "attention"] * 4,
    ),
    "InternLM2 7B": of(
        "internlm2", 32, 32, 32768, 1000000, num_key_value_heads=8, rope_scaling={"type": "dynamic", "factor": 2.0},
    ),
    "InternLM3 8B": of(
        "internlm3", 32, 48, 32768, 50000000, head_dim=128, num_key_value_heads=2,
        rope_scaling={"rope_type": "dynamic", "factor": 6.0},
    ),
    "Baichuan 2 13B": {"model_type": "baichuan", "hidden_size": 5120, "num_attention_heads": 40, "num_hidden_layers": 40},
    "MiniCPM3 4B": of(
        "minicpm3", 40, 62, 32768, 10000.0, 64, num_key_value_heads=40, kv_lora_rank=256, q_lora_rank=768, qk_nope_head_dim=64,
        qk_rope_head_dim=32, v_head_dim=64, **longrope(16, 9.0, original_max_position_embeddings=32768),
    ),
    "Hunyuan A13B": of("hunyuan_v1_moe", 32, 32, 32768, 10000.0, head_dim=128, num_key_value_heads=8, rope_scaling={
        "alpha": 1000.0, **BETAS, "factor": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0, "type": "dynamic",
    }),
    "EXAONE 3.5 7.8B": of("exaone", 32, 32, 32768, 1000000.0, num_key_value_heads=8, **llama3(8.0)),
    "EXAONE 4 32B": of(
        "exaone4", 40, 64, 131072, 1000000, head_dim=128, num_key_value_heads=8, layer_types=THREE_WINDOWS * 16, **WINDOW,
        **llama3(16.0),
    ),
    "Nemotron-H 8B": of(
        "nemotron_h", 32, 52, 8192, head_dim=128, num_key_value_heads=8, rope_theta=10000,
        hybrid_override_pattern="M-M-M-M*-" + "M-M-M-M-M*-" * 3 + "M-M-M-M-M-",
    ),
    "Bamba 9B": of(
        "bamba", 32, 32, 4096, 10000.0, num_key_value_heads=8, partial_rotary_factor=0.5, attn_layer_indices=[9, 18, 27],
    ),
    "Zamba2 1.2B": of(
        "zamba2", 32, 38, 4096, 10000, 64, use_mem_rope=True,
        layers_block_type=["hybrid" if n in (5, 11, 17, 23, 29, 35) else "linear_attention" for n in range(38)],
    ),
    "MiniMax M2": of("minimax_m2", 48, 62, 196608, 5000000, 64, head_dim=128, num_key_value_heads=8, rotary_dim=64),
    "AFM 4.5B": of("arcee", 20, 36, 65536, 10000.0, num_key_value_heads=4, **yarn(20.0, 4096, **BETAS, mscale=1.0)),
    "dots.llm1": of(
        "dots1", 32, 62, 32768, 10000000, head_dim=128, num_key_value_heads=32, n_routed_experts=128, n_shared_experts=2,
        num_experts_per_tok=6, n_group=1, topk_group=1,
    ),
    "LFM2 1.2B": of(
        "lfm2", 32, 16, 128000, 1000000.0, 64, num_key_value_heads=8,
        layer_types=["full_attention" if n in (2, 5, 8, 10, 12, 14) else "conv" for n in range(16)],
    ),
    "RecurrentGemma 2B": of("recurrent_gemma", 10, 26, 8192, 10000.0, 256, num_key_value_heads=1, partial_rotary_factor=0.5),
    # ---- no rotation ----
    "GPT-2": {"model_type": "gpt2", "n_embd": 768, "n_head": 12, "n_layer": 12, "n_positions": 1024},
    "StarCoder": {"model_type": "gpt_bigcode", "n_embd": 6144, "n_head": 48, "n_layer": 40, "n_positions": 8192},
    "OPT 1.3B": of("opt", 32, 24, 2048, None, 64),
    "XGLM 564M": {"model_type": "xglm", "d_model": 1024, "attention_heads": 16, "num_layers": 24},
    "BLOOM 560M": {"model_type": "bloom", "hidden_size": 1024, "n_head": 16, "n_layer": 24},
    "Falcon RW 1B": of("falcon", 32, 24, 2048, None, 64, alibi=True),
    "MPT 7B": {"model_type": "mpt", "d_model": 4096, "n_heads": 32, "n_layers": 32, "attn_config": {"alibi": True}},
    "MPT with alibi_bias_max 16": MPT_16,
    "Jamba": of("jamba", 32, 32, 262144, num_key_value_heads=8),
    "Zamba 7B": {"model_type": "zamba", "hidden_size": 3712, "num_attention_heads": 16, "num_hidden_layers": 76},
    "Mamba 130M": {"model_type": "mamba", "hidden_size": 768, "num_hidden_layers": 24, "state_size": 16},
    "RWKV 4 169M": {"model_type": "rwkv", "hidden_size": 768, "num_hidden_layers": 12, "attention_hidden_size": 768},
}  # fmt: skip

RELEASED: dict[str, Config] = {
    name: row["config"] for name, row in json.loads(Path(__file__).with_name("released.json").read_text()).items()
}
"""The same keys of files that were released from 2023 to 2026, with the values that public copies have; the file names these."""
