"""Targets of whole models: a training step, generation, and how often a compiler begins again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import longitude as lg
from longitude.bench.cases import AttentionShape, offset_biases, rotations
from longitude.bench.rows import Row, sized
from longitude.bench.target import Session

VOCABULARY, WIDTH, LAYERS, HEADS = 256, 256, 4, 4
LENGTHS = (65, 70, 77, 80, 96, 100, 111, 128, 130, 144, 150, 160, 177, 192, 200, 208, 224, 231, 250, 256)
"""Of the compiler's target."""


def sizes(session: Session, length: int, batch: int) -> AttentionShape:
    return session.work(length, batch, HEADS, WIDTH // HEADS)


def of_ours(label: str, length: int) -> nn.Module:
    torch.manual_seed(0)
    config = lg.LongitudeConfig(
        vocab_size=VOCABULARY, hidden_size=WIDTH, num_hidden_layers=LAYERS, num_attention_heads=HEADS,
        max_position_embeddings=length, encoding=label,
    )  # fmt: skip
    return lg.LongitudeForCausalLM(config)


def of_llama(length: int) -> nn.Module:
    """Transformers' Llama of the same size, layer by layer."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    same: Any = of_ours("rope", length).config
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY, hidden_size=WIDTH, num_hidden_layers=LAYERS, num_attention_heads=HEADS,
            intermediate_size=same.intermediate_size, max_position_embeddings=length, tie_word_embeddings=True,
            bos_token_id=None, eos_token_id=None,
        )
    )  # fmt: skip


def of_bloom(length: int) -> nn.Module:
    from transformers import BloomConfig, BloomForCausalLM

    torch.manual_seed(0)
    return BloomForCausalLM(
        BloomConfig(vocab_size=VOCABULARY, hidden_size=WIDTH, n_layer=LAYERS, n_head=HEADS, use_cache=False)
    )


def of_mpt(length: int) -> nn.Module:
    from transformers import MptConfig, MptForCausalLM

    torch.manual_seed(0)
    return MptForCausalLM(
        MptConfig(
            vocab_size=VOCABULARY, d_model=WIDTH, n_layers=LAYERS, n_heads=HEADS, max_seq_len=length, expansion_ratio=4,
            use_cache=False,
        )
    )  # fmt: skip


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
    """A decoder of 4 layers, 256 wide, 4 sequences of 2048; beside it transformers' own of one sequence, over its Llama."""
    work = sizes(session, 2048, 4)
    ids = torch.randint(VOCABULARY, (work.batch, work.length), generator=torch.Generator().manual_seed(0))
    without = "no encoding"
    cases: dict[str, Any] = {without: ("plain", "auto", training_step(of_ours("none", work.length), ids))}
    for label in (*offset_biases(), *rotations()):
        cases[label] = ("ours", "auto", training_step(of_ours(label, work.length), ids))
    rows = session.compare(cases, without, work, "step", 4, "training step")
    if not session.peers:
        return rows
    made = {"transformers Llama": of_llama, "transformers Bloom": of_bloom, "transformers MPT": of_mpt}
    steps = {name: ("peer", "transformers", training_step(make(work.length), ids[:1])) for name, make in made.items()}
    return rows + session.compare(steps, "transformers Llama", sizes(session, 2048, 1), "step", 3, "training step")


@torch.no_grad()
def generation(session: Session) -> list[Row]:
    """128 tokens, greedily, after a prompt of 128, with a cache."""
    work = sizes(session, 128, 1)
    prompt = torch.randint(VOCABULARY, (1, work.length), generator=torch.Generator().manual_seed(0))
    models = {
        "transformers Llama": ("plain", "transformers", of_llama(2 * work.length)),
        "rope": ("ours", "auto", of_ours("rope", 2 * work.length)),
    }

    def generate(model: Any) -> Callable[[], object]:
        model.eval()
        fixed = {"max_new_tokens": work.length, "min_new_tokens": work.length, "do_sample": False, "pad_token_id": 0}
        return torch.no_grad()(lambda: model.generate(prompt, attention_mask=torch.ones_like(prompt), **fixed))

    cases = {name: (kind, backend, generate(model)) for name, (kind, backend, model) in models.items()}
    return session.compare(cases, "transformers Llama", work, "generate", 7, "generation")


@torch.no_grad()
def graphs(session: Session) -> list[Row]:
    """Graphs that torch.compile makes of a whole model for 20 lengths, without a compiler behind it."""
    import torch._dynamo

    rows = []
    for label in ("rope", "alibi", "t5"):
        torch._dynamo.reset()
        model, made = of_ours(label, LENGTHS[-1]).eval(), []

        def backend(graph: Any, inputs: Any, made: list[Any] = made) -> Any:
            made.append(graph)
            return graph.forward

        compiled = torch.compile(lambda x, model=model: model(x, use_cache=False).logits, backend=backend)
        for length in LENGTHS:
            session.say(f"compiling at {length}: {label}")
            compiled(torch.zeros(2, length, dtype=torch.long))
        rows.append(
            Row(
                name=label, kind="ours", backend="auto", work="compiling", passed="forward", score=float(len(made)),
                threads=session.threads, clock="none", turns=1, **sized(AttentionShape(2, HEADS, HEADS, WIDTH // HEADS, 256)),
            )
        )  # fmt: skip
    torch._dynamo.reset()
    return rows
