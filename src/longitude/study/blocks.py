"""Transformer blocks of published model families: all options of a model except its layers and positions."""

from typing import Any

from longitude.attention.short_conv import conv_places
from longitude.errors import UsageError
from longitude.labels import parse_label
from longitude.study.config import StudyConfig

BLOCKS: dict[str, dict[str, Any]] = {
    "default": {},
    "llama": {"rms_norm_eps": 1e-5, "embedding_scale": 1.0, "tie_word_embeddings": False},
    "qwen3": {"qk_norm": True, "embedding_scale": 1.0, "tie_word_embeddings": False},
    "gemma3": {"qk_norm": True, "norm_position": "both", "hidden_act": "geglu_tanh"},
    "inkling": {
        "qk_norm": True, "short_conv": ["kv", "output"], "embedding_scale": 1.0, "embedding_norm": True,
        "tie_word_embeddings": False,
    },
    "deepseek": {"mixer": "latent", "embedding_scale": 1.0, "tie_word_embeddings": False},
}  # fmt: skip
"""Arguments of LongitudeConfig. Experts, and Inkling's convolution after its MLP, are left out."""
QUERIES_PER_KEY = {"llama": 4, "qwen3": 2, "gemma3": 2, "inkling": 4}
"""Query heads per key head in a published model of each family; at most: a study uses a number that divides its heads."""


def block_options(config: StudyConfig) -> dict[str, Any]:
    """Arguments of LongitudeConfig for the block of a study, at its width and number of heads."""
    options = dict(BLOCKS[config.block])
    if most := QUERIES_PER_KEY.get(config.block):
        options["num_key_value_heads"] = config.heads // max(n for n in range(1, most + 1) if config.heads % n == 0)
    if config.block == "inkling":
        options["attention_scale"] = config.heads / config.width  # 1 / head_dim, as queries and keys are normalized
    return options


def in_block(config: StudyConfig, label: str) -> dict[str, Any]:
    """Arguments of LongitudeConfig for a label in the block of a study. ValueError for a label of other mixers."""
    block = block_options(config)
    mixer = block.get("mixer", "attention")
    parsed = parse_label(label, mixer)
    if "mixer" in block and parsed.mixers and mixer not in [spec["name"] for spec in parsed.mixers]:
        raise UsageError("", f"{mixer} among the mixers of a label in --block {config.block}, or no mixer", repr(label))
    named = parsed.options(config.depth, mixer)
    if "mixers" in named:
        block.pop("mixer", None)
    for spec in parsed.mixers:  # a label adds its convolutions to those of the block
        if "short_conv" in spec:
            spec["short_conv"] = sorted({*block.get("short_conv", ()), *conv_places(spec["short_conv"])})
    return block | named
