"""Models that are right as they stand, and wrong under autocast, behind the meta device, packed, or with an image."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForImageTextToText, LlamaForCausalLM, Mamba2Config, Mamba2ForCausalLM

from tests.check.building import LENGTH, SHAPE, built, llama, with_tables


def product_under_autocast(right: Any, x: Tensor, at: Tensor) -> tuple[Tensor, Tensor]:
    """Angles as a product of matrices, which autocast computes in bfloat16."""
    angle = at.float()[..., None] @ (10_000.0 ** -(torch.arange(8) % 4 / 4))[None]
    return angle.cos().to(x.dtype), angle.sin().to(x.dtype)


class PlainRotary(nn.Module):
    """Frequencies that are no weights, and that _init_weights() does not know."""

    frequencies: Tensor

    def __init__(self, width: int):
        super().__init__()
        self.register_buffer(
            "frequencies", 10_000.0 ** -(torch.arange(width) % (width // 2) * 2 / width), persistent=False
        )

    def forward(self, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        angle = position_ids[..., None].float() * self.frequencies.float()
        return angle.cos().to(x.dtype), angle.sin().to(x.dtype)


class Unfilled(LlamaForCausalLM):
    def __init__(self, config):
        super().__init__(config)
        self.model.rotary_emb = PlainRotary(config.head_dim)


def unfilled() -> Any:
    return built(Unfilled, **llama().config.to_dict())


def lengths_dropped() -> Any:
    """A layer that passes nothing of packed documents on to its attention."""
    model = llama()

    def dropped(module: Any, given: Any, named: dict[str, Any]) -> Any:
        left = ("cu_seq_lens_q", "cu_seq_lens_k", "position_ids")
        return given, {name: value for name, value in named.items() if name not in left}

    model.model.layers[1].self_attn.register_forward_pre_hook(dropped, with_kwargs=True)
    return model


class Mamba2Apart(Mamba2ForCausalLM):
    """Documents of one row, each in a pass of its own. generate() knows recurrent models by their class names."""

    def forward(self, input_ids=None, seq_idx=None, **options):
        if seq_idx is None:
            return super().forward(input_ids=input_ids, **options)
        kept = {name: options[name] for name in ("use_cache",) if name in options}
        sizes = seq_idx[0].unique_consecutive(return_counts=True)[1].tolist()
        answers = [super(Mamba2Apart, self).forward(input_ids=part, **kept) for part in input_ids.split(sizes, 1)]
        answers[0].logits = torch.cat([answer.logits for answer in answers], 1)
        return answers[0]


class Mamba2BeginsLate(Mamba2ForCausalLM):
    """Documents of one row, each after a separator that it has not alone.

    States that run on are no bug to find: Mamba-2 of transformers does so without its kernels.
    """

    def forward(self, input_ids=None, seq_idx=None, **options):
        if seq_idx is None:
            return super().forward(input_ids=input_ids, **options)
        sizes = seq_idx[0].unique_consecutive(return_counts=True)[1].tolist()
        parts = [torch.cat([part[:, :1] * 0, part], 1) for part in input_ids.split(sizes, 1)]
        answers = [super(Mamba2BeginsLate, self).forward(input_ids=part, use_cache=False) for part in parts]
        answers[0].logits = torch.cat([answer.logits[:, 1:] for answer in answers], 1)
        return answers[0]


def mamba2(kind: Any = Mamba2ForCausalLM) -> Any:
    torch.manual_seed(0)
    shape = {"num_heads": 8, "head_dim": 8, "state_size": 8, "chunk_size": 8, "n_groups": 1, "hidden_size": 32}
    return kind(Mamba2Config(**SHAPE | shape, pad_token_id=0, bos_token_id=1, eos_token_id=2)).eval()


def qwen3_vl() -> Any:
    torch.manual_seed(0)
    rope = {"rope_type": "default", "rope_theta": 10_000.0, "mrope_section": [2, 1, 1]}
    text = SHAPE | {"head_dim": 8, "intermediate_size": 32, "num_key_value_heads": 2, "rope_parameters": rope}
    text |= {"max_position_embeddings": LENGTH, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    vision = {
        "depth": 1,
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_heads": 2,
        "patch_size": 2,
        "out_hidden_size": 32,
    }
    vision |= {"deepstack_visual_indexes": [0], "num_position_embeddings": 16}
    tokens = {"image_token_id": 90, "video_token_id": 91, "vision_start_token_id": 92, "vision_end_token_id": 93}
    config = AutoConfig.for_model("qwen3_vl", text_config=text, vision_config=vision, **tokens)
    return AutoModelForImageTextToText.from_config(config).eval()


def text_after_all_patches() -> Any:
    """Text after an image is counted from the number of its patches."""
    model = qwen3_vl()
    right = model.model.get_rope_index

    def later(input_ids, mm_token_type_ids, **options):
        positions, delta = right(input_ids, mm_token_type_ids, **options)
        counted = torch.arange(input_ids.shape[1]) - (options["attention_mask"][0] == 0).sum()
        behind = (mm_token_type_ids[0] == 0) & (mm_token_type_ids[0].cumsum(0) > 0)
        positions[..., behind] = counted[behind]
        return positions, delta

    model.model.get_rope_index = later
    return model


BROKEN: dict[str, dict[str, Callable[[], Any]]] = {
    "far_positions": {"angles rounded under autocast": lambda: with_tables(product_under_autocast)},
    "meta_device": {"a table that nothing fills": unfilled},
    "packing: lengths": {"a layer without the lengths of documents": lengths_dropped},
    "packing: states": {"a separator before each": lambda: mamba2(Mamba2BeginsLate)},
    "image_positions": {"text after all patches": text_after_all_patches},
}
HEALTHY: dict[str, Callable[[], Any]] = {"mamba2, documents apart": lambda: mamba2(Mamba2Apart), "qwen3_vl": qwen3_vl}
