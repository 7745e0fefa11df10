"""Laws of an encoding or a mixer in a language model, alone and with attention above and below it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from copy import deepcopy
from itertools import pairwise
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from longitude.positions.composed import Composed, compose
from longitude.positions.coordinates import Positions
from longitude.testing.battery.decoding import CACHES
from longitude.testing.engine import DoesNotApply, LawBroken
from longitude.testing.examples import (
    DIM,
    ENCODING_LAWS,
    MIXER_LAWS,
    Example,
    MixerExample,
    fill,
    mixer_example,
    shared_law,
)
from longitude.testing.fixtures import close, numbers, random_cuts, tensors_in

if TYPE_CHECKING:
    from longitude.models.causal import LongitudeForCausalLM

EQUAL = 1e-10
VOCABULARY = 29


def language_model(*builds: MixerExample, encoding: Composed | None = None) -> LongitudeForCausalLM:
    """A model with a layer of each mixer, with `encoding`, or else those of its example; in float64, filled."""
    from longitude.models.causal import LongitudeForCausalLM
    from longitude.models.configuration import LongitudeConfig

    config = LongitudeConfig(
        vocab_size=VOCABULARY,
        hidden_size=DIM,
        intermediate_size=DIM,
        num_hidden_layers=len(builds),
        num_attention_heads=4,
        num_key_value_heads=2,
        encoding="nope",
    )
    model = fill(LongitudeForCausalLM(config).double().eval(), std=DIM**-0.5)
    stack, encodings = model.model, []
    for seed, (block, build) in enumerate(zip(stack.layers, builds, strict=True)):
        block.mixer = build(seed)
        encodings.append(build.encodings(block.mixer) if encoding is None else encoding)
    stack.encodings = nn.ModuleList(encodings)
    stack.share_encodings(encodings)
    stack.axes = max(encoding_of_layer.axes for encoding_of_layer in encodings)
    model._is_stateful = stack.forgets
    return model


def of_attention(build: Example) -> LongitudeForCausalLM:
    """A model of two layers of attention with an encoding."""
    encoding = compose(build())
    if encoding.reads_neighbors:
        raise DoesNotApply("it reads tokens on both sides, and the model is a decoder")
    return language_model(*[mixer_example("attention")] * 2, encoding=encoding)


def models_with(build: MixerExample) -> Iterator[tuple[str, LongitudeForCausalLM]]:
    """The mixer twice, and with attention above and below it."""
    attention = mixer_example("attention")
    for name, builds in {
        "two layers": (build, build),
        "attention above": (build, attention),
        "attention below": (attention, build),
    }.items():
        yield name, language_model(*builds)


def token_ids(rows: int, length: int) -> Tensor:
    return torch.randint(0, VOCABULARY, (rows, length), generator=torch.Generator().manual_seed(0))


# ---- documents -------------------------------------------------------------------------------------------------------
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
    "right padding": ({"attention_mask": LEFT_PADDED.flip(1)}, ((0, 0, 18), (1, 0, 13)), 7, ("no positions",)),
    "cut in its padding": ({"attention_mask": LEFT_PADDED}, ((0, 0, 18), (1, 5, 18)), 3, ("no positions",)),
}


@MIXER_LAWS.law(threshold=EQUAL, needs=CACHES)
def documents_across_calls(build: MixerExample) -> None:
    """In a model, documents packed into a row, and rows padded on the left, give the logits of each alone.

    Alone and with attention, in one call and cut anywhere with a cache; positions given to the first call, or to none.
    """
    for name, model in models_with(build):
        require_documents_across_calls(name, model)


@torch.no_grad()
def require_documents_across_calls(name: str, model: LongitudeForCausalLM) -> None:
    """The law of one model."""
    ids = token_ids(2, LENGTH)
    for what, (streams, sequences, first, ways) in STREAMS.items():
        alone = torch.zeros(2, LENGTH, VOCABULARY, dtype=torch.float64)
        positions, real = torch.zeros(2, LENGTH, dtype=torch.long), torch.zeros(2, LENGTH, 1)
        for row, start, stop in sequences:
            alone[row, start:stop] = model(ids[row : row + 1, start:stop], use_cache=False).logits[0]
            positions[row, start:stop], real[row, start:stop] = torch.arange(stop - start), 1
        whole = model(ids, use_cache=False, **streams).logits
        close(f"{name}, {what}, one call", whole * real, alone, EQUAL)
        positions_of = {
            "no positions": lambda a, b: None,
            "positions of the first call": lambda a, b: None if a else positions[:, :b],  # noqa: B023
        }
        for seed, how in enumerate(ways):
            cuts = (0, first, *(first + cut for cut in random_cuts(LENGTH - first, seed, 1)[1:]))
            out = in_calls(model, ids, cuts, positions_of[how], **streams)
            close(f"{name}, {what}, {how}, cut at {cuts[1:-1]}", out * real, alone, EQUAL)


def in_calls(
    model: Any,
    ids: Tensor,
    cuts: tuple[int, ...],
    positions: Callable[[int, int], Positions | None],
    **streams: Tensor,
) -> Tensor:
    """Logits of tokens that come in chunks, with a cache between them; streams: attention_mask, document_ids, of all tokens."""
    cache, parts = None, []
    for a, b in pairwise(cuts):
        so_far = {name: marks[:, :b] for name, marks in streams.items()}
        out = model(ids[:, a:b], position_ids=positions(a, b), cache=cache, use_cache=True, **so_far)
        cache = out.cache
        parts.append(out.logits)
    return torch.cat(parts, 1)


@ENCODING_LAWS.law(threshold=EQUAL, needs=CACHES)
def places(build: Example) -> None:
    """If it computes places from token ids: in a model, packed documents and padded rows = alone, cut anywhere."""
    if not compose(build()).reads_ids:
        raise DoesNotApply("it reads no token ids")
    require_documents_across_calls("two layers", of_attention(build))


# ---- prompt lookup ---------------------------------------------------------------------------------------------------
@ENCODING_LAWS.law(name="prompt_lookup", threshold=EQUAL, needs=CACHES)
def prompt_lookup_of_encodings(build: Example) -> None:
    """In a model, greedy generation with prompt lookup gives the tokens and logits that it gives without, or is refused at once.

    An encoding that passes a state from token to token, which could not be taken back, declares `carries`.
    """
    encoding = compose(build())
    carried = bool(tensors_in(encoding.context(numbers(1, 3, DIM))[1]))
    if carried != encoding.carries:
        passed = "a state" if carried else "none"
        raise LawBroken(f"declared carries = {encoding.carries}, and its context passes on {passed}")
    _require_prompt_lookup("two layers", of_attention(build))


@MIXER_LAWS.law(name="prompt_lookup", threshold=EQUAL, needs=CACHES)
def prompt_lookup_of_mixers(build: MixerExample) -> None:
    """In a model, greedy generation with prompt lookup gives the tokens and logits that it gives without, or is refused at once.

    Alone and with attention; refused where what guesses left in the cache could not be taken back.
    """
    for name, model in models_with(build):
        _require_prompt_lookup(name, model)


def _require_prompt_lookup(what: str, model: LongitudeForCausalLM) -> None:
    # Repeated, so that its first guess is the next token of the prompt, which is wrong.
    ids = token_ids(1, 3).repeat(1, 4)
    options = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0, "attention_mask": torch.ones_like(ids)}
    options |= {"output_logits": True, "return_dict_in_generate": True}
    calls: list[None] = []
    try:
        with model.register_forward_pre_hook(lambda module, inputs: calls.append(None)):
            made = model.generate(ids, prompt_lookup_num_tokens=2, **options)
    except ValueError as refusal:
        if calls:
            raise LawBroken(f"{what}: prompt lookup was refused after {len(calls)} calls: {refusal}") from refusal
        return
    want = model.generate(ids, **options)
    if made.sequences.tolist() != want.sequences.tolist():
        raise LawBroken(f"{what}: prompt lookup writes other tokens than greedy generation")
    close(f"{what}, logits with prompt lookup and without", torch.stack(made.logits), torch.stack(want.logits))


# ---- offloaded parameters --------------------------------------------------------------------------------------------
SAME = 1e-12
WAYS = "cpu_offload", "disk_offload", "little memory"


def offloaded(model: Any, way: str, folder: str) -> Any:
    """A copy of a model whose parameters are on meta between calls. way: one of WAYS; folder: an empty one."""
    import accelerate

    model = deepcopy(model)
    if way == "cpu_offload":
        return accelerate.cpu_offload(model)
    if way == "disk_offload":
        return accelerate.disk_offload(model, folder)
    size = sum(p.numel() * p.element_size() for p in model.parameters())
    places = accelerate.infer_auto_device_map(model, {"cpu": size}, model._no_split_modules)
    return accelerate.dispatch_model(model, places, offload_dir=folder)


@torch.no_grad()
def require_same_offloaded(model: Any, ids: Tensor) -> None:
    """LawBroken unless a model answers the same under every way of offloading, in one call and in three with a cache."""

    def answers(model: Any) -> dict[str, Tensor]:
        behind_a_cache = in_calls(model, ids, (0, 3, 6, ids.shape[1]), lambda a, b: None)
        return {"one call": model(ids, use_cache=False).logits, "with a cache": behind_a_cache}

    want = answers(model)
    for way in WAYS:
        with TemporaryDirectory() as folder:
            close(way, answers(offloaded(model, way, folder)), want, SAME)


@shared_law(name="offloading", threshold=SAME, needs=("transformers", "accelerate"))
def offloading(build: MixerExample) -> None:
    """In a model whose parameters are offloaded to memory or disk by accelerate, logits are those of the model in memory."""
    require_same_offloaded(language_model(build, build), token_ids(2, 9))
