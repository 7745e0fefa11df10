"""Twenty lines that were written without a look at the rules, half of them right: no false alarm, at most two misses."""

# ruff: noqa: E501 - a line is a line here
from longitude.serving.findings import wrong
from tests.serving.models import cases

COMPOSE = """
services:
  vllm:
    image: vllm/vllm-openai:v0.33.0
    environment:
      VLLM_ALLOW_LONG_MAX_MODEL_LEN: "1"
    command: ["--model", "m", "--max-model-len", "131072"]
"""
RIGHT = [
    (
        "qwen2",
        """docker run --gpus all -p 8000:8000 vllm/vllm-openai:v0.33.0 --model m --max-model-len 131072 --hf-overrides '{"rope_parameters": {"rope_type": "yarn", "rope_theta": 1000000.0, "factor": 4.0, "original_max_position_embeddings": 32768}, "max_position_embeddings": 131072}'""",
    ),
    (
        "qwen3",
        """VLLM_ALLOW_LONG_MAX_MODEL_LEN=1 python -m vllm.entrypoints.openai.api_server --model m --hf-overrides '{"rope_scaling": {"rope_type": "yarn", "rope_theta": 1000000, "factor": 2.0, "original_max_position_embeddings": 32768}}' --max-model-len 65536""",
    ),
    ("qwen3", "sglang serve --model-path m --context-length 32768 --tp 2"),
    (
        "qwen3",
        "llama-server -hf Qwen/Qwen3-8B-GGUF -c 65536 --rope-scaling yarn --rope-scale 2 --yarn-orig-ctx 32768 -np 1 -ctk q8_0 -ctv q8_0",
    ),
    (
        "qwen3",
        """model = AutoModelForCausalLM.from_pretrained("m", rope_parameters={"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768, "rope_theta": 1000000.0}, max_position_embeddings=131072)""",
    ),
    (
        "llama",
        """vllm serve m --hf-overrides '{"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 500000.0}}' --max-model-len 16384""",
    ),
    ("llama", "llama-cli -m m.gguf -c 16384 --rope-freq-base 2000000 --override-kv llama.context_length=int:16384"),
    ("gemma3", "vllm serve m --max-model-len 8192 --enable-prefix-caching --gpu-memory-utilization 0.9"),
    (
        "llama",
        """python3 -m sglang.launch_server --model m --json-model-override-args '{"rope_scaling": {"rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}, "max_position_embeddings": 32768}'""",
    ),
    (
        "deepseek",
        """vllm serve m --max-model-len 65536 --speculative-config '{"method": "mtp", "num_speculative_tokens": 1}'""",
    ),
]
WRONG = [
    ("qwen3", "vllm serve m --rope-theta 5000000 --max-model-len 65536"),
    (
        "qwen3_5",
        """VLLM_ALLOW_LONG_MAX_MODEL_LEN=1 vllm serve m --hf-overrides '{"rope_parameters": {"rope_type": "yarn", "rope_theta": 10000000, "partial_rotary_factor": 0.25, "mrope_section": [11, 11, 10], "factor": 2.0, "original_max_position_embeddings": 262144}}' --max-model-len 524288""",
    ),
    (
        "qwen3_5",
        """SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN=1 sglang serve --model-path m --context-length 524288 --json-model-override-args '{"text_config": {"rope_parameters": {"rope_type": "yarn", "rope_theta": 10000000, "partial_rotary_factor": 0.25, "factor": 2.0, "original_max_position_embeddings": 262144}}}'""",
    ),
    ("qwen3", "llama-server -m m.gguf -c 131072 --rope-scale 4 --yarn-orig-ctx 32768"),
    ("qwen3", "llama-server -m m.gguf -c 131072"),
    (
        "llama",
        """vllm serve m --hf-overrides '{"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8192}, "max_position_embeddings": 32768}' --max-model-len 32768""",
    ),
    (
        "qwen3",
        """model = AutoModelForCausalLM.from_pretrained("m", rope_scaling={"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768})""",
    ),
    ("qwen3", COMPOSE),
    (
        "qwen3",
        """SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN=1 python -m sglang.launch_server --model-path m --context-length 131072 --json-model-override-args '{"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 131072}}'""",
    ),
    (
        "gemma3",
        """vllm serve m --hf-overrides '{"rope_parameters": {"rope_type": "yarn", "rope_theta": 1000000.0, "factor": 4.0, "original_max_position_embeddings": 32768}, "max_position_embeddings": 131072}' --max-model-len 131072""",
    ),
]


def alarms(name: str, text: str) -> list[str]:
    judged = cases(name, text, ".yaml" if "services" in text else "")
    assert judged
    return [row.text for _, rows in judged for row in rows if wrong(rows)]


def test_no_false_alarm_and_no_miss() -> None:
    assert [(name, text, texts) for name, text in RIGHT if (texts := alarms(name, text))] == []
    assert [(name, text) for name, text in WRONG if not alarms(name, text)] == []
