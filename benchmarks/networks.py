"""Targets of whole models: a training step, generation, and an unmodified Llama."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

import longitude as lg
from kinds import offset_biases, rotations
from longitude.bench.measurement import Row
from longitude.labels import parse_label
from target import Call, Session

VOCABULARY, WIDTH, LAYERS, HEADS = 256, 256, 4, 4


def of_ours(label: str, length: int, backend: str = "auto") -> nn.Module:
    torch.manual_seed(0)
    config = lg.LongitudeConfig(
        vocab_size=VOCABULARY, hidden_size=WIDTH, num_hidden_layers=LAYERS, num_attention_heads=HEADS,
        max_position_embeddings=length, attention_backend=backend, **parse_label(label).options(LAYERS),
    )  # fmt: skip
    return lg.LongitudeForCausalLM(config)


def llama(length: int) -> nn.Module:
    """A Llama of transformers of the same size, layer by layer."""
    import transformers

    same: Any = of_ours("rope", length).config
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=WIDTH, num_hidden_layers=LAYERS, num_attention_heads=HEADS,
        intermediate_size=same.intermediate_size, max_position_embeddings=length, tie_word_embeddings=True,
        bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config)


def training_step(model: nn.Module, ids: Tensor) -> Callable[[], object]:
    """Forward with the loss, backward, and a step of AdamW."""
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)

    def step() -> None:
        optimizer.zero_grad()
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()

    return step


def training(session: Session) -> list[Row]:
    """A decoder of 4 layers, 256 wide, 4 sequences of 2048, over one without an encoding on torch's attention."""
    shape = session.shape(2048, 4, HEADS, WIDTH // HEADS)
    ids = torch.randint(VOCABULARY, (shape.batch, shape.length), generator=torch.Generator().manual_seed(0))
    base = "no encoding"
    plain = training_step(of_ours("nope", shape.length, "sdpa"), ids)
    calls: dict[str, Call] = {base: ("plain", "sdpa", plain)}
    for label in (*offset_biases(), *rotations()):
        calls[label] = ("ours", "auto", training_step(of_ours(label, shape.length), ids))
    return session.compare(calls, base, shape, "step", 4, "training step")


def generation(*labels: str) -> Callable[[Session], list[Row]]:
    @torch.no_grad()
    def measure(session: Session) -> list[Row]:
        """128 tokens, greedily, after a prompt of 128, with a cache; one sequence, and eight."""
        rows = []
        for batch in (1, 8):
            shape = session.shape(128, batch, HEADS, WIDTH // HEADS)
            prompt = torch.randint(VOCABULARY, (batch, shape.length), generator=torch.Generator().manual_seed(0))
            calls: dict[str, Call] = {"transformers Llama": ("plain", "transformers", generating(llama(256), prompt))}
            for label in labels:
                calls[label] = ("ours", "auto", generating(of_ours(label, 256), prompt))
            rows += session.compare(calls, "transformers Llama", shape, "generate", 7, "generation")
        return rows

    return measure


def generating(model: Any, prompt: Tensor) -> Callable[[], object]:
    """As many tokens as the prompt has."""
    model.eval()
    count, mask = prompt.shape[1], torch.ones_like(prompt)
    fixed = {"max_new_tokens": count, "min_new_tokens": count, "do_sample": False, "pad_token_id": 0}
    return lambda: model.generate(prompt, attention_mask=mask, **fixed)


SIZES_135M: dict[str, Any] = {
    "vocab_size": 49152, "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30, "num_attention_heads": 9,
    "num_key_value_heads": 3, "tie_word_embeddings": True,
}  # fmt: skip
"""Of SmolLM2-135M."""


@torch.no_grad()
def unmodified(session: Session) -> list[Row]:
    """An unmodified Llama of 135 million random parameters, by our attention over sdpa: a prompt of 2048, then 64 tokens."""
    import transformers

    import longitude.hf  # noqa: F401 (registers the attention)

    shape, rows = session.shape(2048, 1, 9, 64), []
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES_135M, max_position_embeddings=4096)).eval()
    prompt = torch.randint(SIZES_135M["vocab_size"], (1, shape.length))
    cache = model(prompt, logits_to_keep=1).cache

    def prefill(implementation: str) -> None:
        model.set_attn_implementation(implementation)
        model(prompt, logits_to_keep=1)

    def tokens(implementation: str) -> None:
        model.set_attn_implementation(implementation)
        for _ in range(64):
            model(prompt[:, :1], cache=cache)
        cache.crop(-64)

    for passed, step in (("prefill", prefill), ("64 tokens", tokens)):
        calls: dict[str, Call] = {
            "sdpa": ("plain", "transformers", partial(step, "sdpa")),
            "unmodified Llama": ("ours", "auto", partial(step, "longitude")),
        }
        rows += session.compare(calls, "sdpa", shape, passed, 5, "unmodified")
    return rows
