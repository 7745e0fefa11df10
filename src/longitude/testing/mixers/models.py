"""Laws of a mixer in a language model, alone and with attention, above and below it: what only the model decides."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import pairwise

import torch
from torch import Tensor, nn

from longitude.models.causal import LongitudeForCausalLM
from longitude.models.configuration import LongitudeConfig
from longitude.positions.base import Positions
from longitude.positions.composed import Composed
from longitude.testing.fixtures import LawBroken, close, fill
from longitude.testing.mixers.fixtures import DIM, MixerExample, mixer_example, random_cuts

NEAR = 1e-10
VOCABULARY = 29


def language_model(*builds: MixerExample, encoding: Composed | None = None) -> LongitudeForCausalLM:
    """A model with a layer of each, every one with `encoding`, or else those of its example; in float64, filled."""
    config = LongitudeConfig(
        vocab_size=VOCABULARY,
        hidden_size=DIM,
        intermediate_size=DIM,
        num_hidden_layers=len(builds),
        num_attention_heads=4,
        num_key_value_heads=2,
        encoding="none",
    )
    model = fill(LongitudeForCausalLM(config).double().eval(), std=DIM**-0.5)
    stack, own = model.model, []
    for seed, (block, build) in enumerate(zip(stack.layers, builds, strict=True)):
        block.mixer = build(seed)
        own.append(build.encodings(block.mixer) if encoding is None else encoding)
    stack.encodings = nn.ModuleList(own)
    stack.share_encodings(own)
    stack.axes = max(one.axes for one in own)
    model._is_stateful = stack.forgets
    return model


def stacks(build: MixerExample) -> Iterator[tuple[str, LongitudeForCausalLM]]:
    """The mixer twice, and with attention above and below it."""
    attention = mixer_example("attention")
    for name, builds in {
        "two layers": (build, build),
        "attention above": (build, attention),
        "attention below": (attention, build),
    }.items():
        yield name, language_model(*builds)


def token_ids(rows: int, length: int, seed: int = 0) -> Tensor:
    return torch.randint(0, VOCABULARY, (rows, length), generator=torch.Generator().manual_seed(seed))


def in_calls(
    model: LongitudeForCausalLM,
    ids: Tensor,
    cuts: tuple[int, ...],
    positions: Callable[[int, int], Positions | None] = lambda a, b: None,
    **streams: Tensor,
) -> Tensor:
    """Logits of tokens that come in chunks, with a cache between them; streams: attention_mask, document_ids, of all tokens."""
    cache, parts = None, []
    for a, b in pairwise(cuts):
        so_far = {name: given[:, :b] for name, given in streams.items()}
        out = model(ids[:, a:b], position_ids=positions(a, b), past_key_values=cache, use_cache=True, **so_far)
        cache = out.past_key_values
        parts.append(out.logits)
    return torch.cat(parts, 1)


@torch.no_grad()
def law_documents_go_on(build: MixerExample) -> str | None:
    """In a model, alone and with attention: documents packed into a row, and rows padded on the left, give the logits that
    each gives alone, in one call and cut anywhere with a cache; positions given to the first call, or to none.
    """
    for stack, model in stacks(build):
        go_on(stack, model)
    return None


LENGTH = 18
DOCUMENTS = torch.tensor([[0] * 9 + [1] * 9, [0] * 4 + [1] * 7 + [2] * 7])
LEFT_PADDED = torch.tensor([[1] * LENGTH, [0] * 5 + [1] * (LENGTH - 5)])
STREAMS = {
    # how tokens are marked, (row, start, stop) of each sequence, where a first call ends, and to which calls positions go
    "documents": (
        {"document_ids": DOCUMENTS},
        ((0, 0, 9), (0, 9, 18), (1, 0, 4), (1, 4, 11), (1, 11, 18)),
        13,
        ("no positions", "positions of the first call"),
    ),
    "left padding": ({"attention_mask": LEFT_PADDED}, ((0, 0, 18), (1, 5, 18)), 7, ("no positions",)),
    "cut in its padding": ({"attention_mask": LEFT_PADDED}, ((0, 0, 18), (1, 5, 18)), 3, ("no positions",)),
}


@torch.no_grad()
def go_on(stack: str, model: LongitudeForCausalLM) -> None:
    """The law of one model."""
    ids = token_ids(2, LENGTH)
    for what, (streams, places, first, ways) in STREAMS.items():
        alone = torch.zeros(2, LENGTH, VOCABULARY, dtype=torch.float64)
        positions, real = torch.zeros(2, LENGTH, dtype=torch.long), torch.zeros(2, LENGTH, 1)
        for row, start, stop in places:
            alone[row, start:stop] = model(ids[row : row + 1, start:stop], use_cache=False).logits[0]
            positions[row, start:stop], real[row, start:stop] = torch.arange(stop - start), 1
        whole = model(ids, use_cache=False, **streams).logits
        close(f"{stack}, {what}, one call", whole * real, alone, NEAR)
        given = {
            "no positions": lambda a, b: None,
            "positions of the first call": lambda a, b: None if a else positions[:, :b],  # noqa: B023
        }
        for seed, how in enumerate(ways):
            cuts = (0, first, *(first + cut for cut in random_cuts(LENGTH - first, seed, 1)[1:]))
            out = in_calls(model, ids, cuts, given[how], **streams)
            close(f"{stack}, {what}, {how}, cut at {cuts[1:-1]}", out * real, alone, NEAR)


def law_prompt_lookup(build: MixerExample) -> str | None:
    """In a model, alone and with attention: greedy generation with prompt lookup writes what it writes without, or is refused
    before the first call, because what guesses left in the cache could not be taken back.
    """
    for stack, model in stacks(build):
        looked_up(stack, model)
    return None


def looked_up(what: str, model: LongitudeForCausalLM) -> None:
    """LawBroken unless guesses are taken back, or refused before anything is done."""
    ids = token_ids(1, 3).repeat(1, 4)
    options = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0, "attention_mask": torch.ones_like(ids)}
    calls: list[None] = []
    hook = model.register_forward_pre_hook(lambda module, inputs: calls.append(None))
    try:
        made = model.generate(ids, prompt_lookup_num_tokens=2, **options)
    except ValueError as refusal:
        if calls:
            raise LawBroken(f"{what}: prompt lookup was refused after {len(calls)} calls: {refusal}") from refusal
        return
    finally:
        hook.remove()
    if made.tolist() != model.generate(ids, **options).tolist():
        raise LawBroken(f"{what}: prompt lookup writes other tokens than greedy generation")
