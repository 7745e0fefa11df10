"""A small model with random weights of the same config.json, for laws that do not need the checkpoint's weights."""

from __future__ import annotations

import copy
from typing import Any

import torch
from transformers import PreTrainedConfig

from longitude.checkpoints.compare import head_dim_of
from longitude.checkpoints.declared import fault_of
from longitude.checkpoints.load import built_without_weights, config_of, maker_of, require_causal
from longitude.errors import one_line_of
from longitude.runs.machine import available_memory, require_memory
from longitude.runs.quiet import quiet

QUICK = (
    "files", "unread_keys", "rotary_frequencies", "given_positions", "far_positions", "served_positions", "meta_device",
    "layer_rotations", "layer_masks", "attention_outputs", "alibi_slopes", "scaling_border", "image_positions",
)  # fmt: skip
"""Laws that compare tables, queries, keys and masks with config.json, which no trained weight changes."""
HEADS, VOCABULARY = 4, 256
SMALL = {
    "intermediate_size": 64, "ffn_dim": 64, "n_inner": 64, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32,
    "intermediate_size_mlp": 64, "num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4, "num_experts_per_tok": 2,
    "n_group": 1, "topk_group": 1, "q_lora_rank": 32, "kv_lora_rank": 32, "v_head_dim": 16, "qk_nope_head_dim": 16,
}  # fmt: skip
"""Config keys that no law of positions reads, and the sizes that replace larger ones."""


def small(config: PreTrainedConfig) -> PreTrainedConfig:
    """A copy of a config with few heads, narrow layers and a small vocabulary; layers, head_dim and positions stay."""
    less = copy.deepcopy(config)
    if getattr(less, "vision_config", None) is not None and hasattr(less.vision_config, "depth"):
        less.vision_config.depth = 1
    text = less.get_text_config()
    heads = text.num_attention_heads
    try:
        head_dim = head_dim_of(text)
    except ValueError:  # heads of layers differ
        head_dim = None
    keys = getattr(text, "num_key_value_heads", None) or heads
    for key, size in SMALL.items():
        if isinstance(current := getattr(text, key, None), int) and current > size:
            setattr(text, key, size)
    if head_dim and heads > HEADS:
        text.num_attention_heads = HEADS
        if getattr(text, "num_key_value_heads", None) is not None:
            text.num_key_value_heads = max(1, HEADS * keys // heads)
        text.hidden_size = HEADS * head_dim
    text.vocab_size = min(text.vocab_size, VOCABULARY)
    for key in ("pad_token_id", "bos_token_id", "eos_token_id"):
        token = getattr(text, key, None)
        if isinstance(token, list) or isinstance(token, int) and not 0 <= token < text.vocab_size:
            setattr(text, key, {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}[key])
    return less


def random_model(name_or_path: str, seed: int = 0) -> Any:
    """A small random model from a checkpoint's config.json; the weights are not needed.

    Args:
        name_or_path: A folder, a config.json, or a name on the hub.
        seed: Random seed of the weights.

    Returns:
        The model in eval mode, in float32; of full size if no smaller model can be built from its config.

    Raises:
        ValueError: For a configuration that cannot be read, or of no causal model.
    """
    config = config_of(name_or_path)
    require_causal(name_or_path, config, images=True)
    try:
        return random_of(config, seed)
    except Exception as error:  # sizes that depend on each other
        require_gpu_of(name_or_path, error)
        outline = built_without_weights(name_or_path, config)
        size = 4 * sum(p.numel() for p in outline.parameters())
        require_memory(size, available_memory(), "a random model of its own size takes", "check it with its weights")
        try:
            return random_of(config, seed, shrink=copy.deepcopy)
        except Exception as whole:
            why = fault_of(config) or one_line_of(whole)
            raise ValueError(f"{name_or_path}: a model of its config.json does not run ({why})") from whole


def require_gpu_of(who: str, error: Exception) -> None:
    """ValueError if a model failed because Triton finds no GPU for the kernels that transformers uses."""
    if "active drivers" in str(error):  # Triton's words
        raise ValueError(
            f"{who} does not run here: transformers uses kernels of flash-linear-attention for it, which need a GPU ({error}); "
            f"uninstall fla-core, or check it on a machine with one"
        ) from error


def random_of(config: PreTrainedConfig, seed: int = 0, make: Any = None, shrink: Any = small) -> Any:
    """A small random model of a config in memory, tried on two tokens. It raises what its class raises if none can be made."""
    with quiet(), torch.no_grad(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = (make or maker_of(config))(shrink(config)).eval()
        model(input_ids=torch.zeros(1, 2, dtype=torch.long))
    return model
