"""generate() with the checks of forward, before transformers drops a mask of ones or makes a mask itself."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from transformers.generation.utils import GenerationMixin

from longitude.attention.documents import has_gaps, streams_of
from longitude.errors import UsageError
from longitude.models.inputs import require_assistant
from longitude.models.stock_caches import renames_cache


class CheckedGenerationMixin(GenerationMixin):
    """generate() of transformers, for models that need padding on one side of a sequence."""

    @renames_cache
    def generate(self, *arguments: Any, **options: Any) -> Any:
        require_assistant(options.get("assistant_model"))
        positions = options.get("position_ids")
        if options.get("document_ids") is not None or (positions is not None and positions.dim() > 2):
            got = "document_ids" if options.get("document_ids") is not None else "positions of several axes"
            raise UsageError("generate", "one document, and positions [B, L]", got, "call the model for each token")
        inputs = arguments[0] if arguments else options.get("inputs")
        require_mask(self.config.is_encoder_decoder, inputs, options)  # pyright: ignore[reportAttributeAccessIssue]
        return super().generate(*arguments, **options)  # pyright: ignore[reportAttributeAccessIssue]

    def init_continuous_batching(self, *arguments: Any, **options: Any) -> Any:
        raise UsageError(
            "generate_batch",
            "generate, with attention_mask for prompts of several lengths",
            "continuous batching",
            f"{type(self).__name__} has no paged cache",
        )

    def _prepare_attention_mask_for_generation(
        self, inputs_tensor: Tensor, generation_config: Any, model_kwargs: dict[str, Any]
    ) -> Any:
        """The mask that transformers infers from pad_token_id. ValueError if it has padding between tokens."""
        mask: Any = super()._prepare_attention_mask_for_generation(inputs_tensor, generation_config, model_kwargs)
        batch, length = mask.shape
        streams = streams_of(mask, None, batch, length, mask.device)
        if streams is not None and has_gaps(streams):
            pad = generation_config.pad_token_id
            raise ValueError(
                f"pad_token_id: {pad} is between tokens of the prompt, and without an attention_mask it is taken for padding; "
                "expected attention_mask=torch.ones_like(input_ids) if it is a token, or padding at one side"
            )
        return mask


def require_mask(is_encoder_decoder: bool, inputs: Tensor | None, options: dict[str, Any]) -> None:
    """ValueError unless a mask covers all tokens: cached ones, and those of this call, which may include cached ones."""
    prefix = "decoder_" if is_encoder_decoder else ""
    ids, embeds = options.get(f"{prefix}input_ids"), options.get(f"{prefix}inputs_embeds")
    prompt = embeds if embeds is not None else ids if is_encoder_decoder or ids is not None else inputs
    mask, cache = options.get(f"{prefix}attention_mask"), options.get("cache")
    if prompt is None or (mask is not None and mask.dim() != 2):
        return
    tokens, past = prompt.shape[1], 0 if cache is None else cache.get_seq_length()
    masked = tokens if mask is None else mask.shape[1]
    if masked not in (tokens, past + tokens) or (masked == tokens and past >= tokens):
        got = "none" if mask is None else list(mask.shape)
        raise ValueError(
            f"{prefix}attention_mask: expected [{prompt.shape[0]}, {past + tokens}] for {tokens} tokens after {past} cached "
            f"ones, or all tokens, cached ones included, with a mask of the same length or none; got {got}"
        )
