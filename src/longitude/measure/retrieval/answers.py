"""Greedy answers of a model, and how far its positions go."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers import GenerationConfig
from transformers.utils import logging

from longitude.measure.retrieval.prompts import Prompt


def answer(model: Any, tokenizer: Any, prompt: Prompt, prefill: int | None = None) -> str:
    """The greedy continuation of a prompt, as text; at most its new tokens. prefill: tokens per pass, None for all."""
    ids = torch.tensor([prompt.ids], device=model.device)
    with _greedy(model, prompt.new_tokens, prefill), torch.inference_mode():
        said = model.generate(input_ids=ids, attention_mask=torch.ones_like(ids))
    return tokenizer.decode(said[0, len(prompt.ids) :], skip_special_tokens=True)


@contextmanager
def _greedy(model: Any, new_tokens: int, prefill: int | None) -> Iterator[None]:
    """The model with generation settings of ours: a checkpoint's penalties and temperatures would be part of the score.

    Transformers' reminder that a prompt is longer than the model was trained for is what the rows are about.
    """
    own, level = model.generation_config, logging.get_verbosity()
    end = own.eos_token_id
    model.generation_config = GenerationConfig(
        max_new_tokens=new_tokens,
        do_sample=False,
        num_beams=1,
        use_cache=True,
        prefill_chunk_size=prefill,
        bos_token_id=own.bos_token_id,
        eos_token_id=end,
        pad_token_id=0 if end is None else end if isinstance(end, int) else end[0],
    )
    logging.set_verbosity_error()
    try:
        yield
    finally:
        model.generation_config = own
        logging.set_verbosity(level)
