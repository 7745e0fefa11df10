"""The laws of the files beside config.json: tensors of the weights, settings of generate(), and lengths of the tokenizer."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from longitude.check.decoding import CACHE
from longitude.check.subject import CHECKPOINT_LAWS, Subject, listed
from longitude.checkpoints.config import declared_length
from longitude.checkpoints.load import differences
from longitude.checkpoints.positions import last_position
from longitude.runs.files import read_json
from longitude.testing.engine import DoesNotApply, Measurement, one_line

GENERATION, TOKENIZER = "generation_config.json", "tokenizer_config.json"
TOKENS = ("eos_token_id", "pad_token_id", "bos_token_id")
GROWING = (None, "dynamic", "offloaded", "offloaded_dynamic", "quantized", "paged", "hybrid")
"""Kinds of cache that other laws try, or that generate() does not make of this key."""
UNLIMITED = 10**9
"""Number from which on a tokenizer's model_max_length means that there is no limit."""


@CHECKPOINT_LAWS.law(threshold=0)
def weight_files(subject: Subject) -> Measurement:
    """The files of weights have what the model reads, as config.json describes it.

    The number counts tensors that nothing reads, and those that config.json ties to another and the files do not. A table that
    the model computes itself, what its class ignores, and a head equal to the embedding that it is tied to are no fault.
    """
    if (files := subject.checkpoint) is None:
        raise DoesNotApply("it was not loaded from files")
    wrong, others = differences(files.model, files.unused, files.untied)
    return Measurement(len(files.unused) + len(files.untied), 0, cause="; ".join([*wrong, *others]))


@CHECKPOINT_LAWS.law(threshold=0, rests_on=CACHE)
def generation_files(subject: Subject) -> Measurement:
    """generation_config.json and tokenizer_config.json agree with config.json.

    The number counts token ids beyond the vocabulary, lengths beyond a table of positions, and a kind of cache with which
    generate() gives other logits than a full forward pass. Differences that may be intended are noted: other end-of-text tokens,
    shorter lengths.
    """
    if subject.folder is None:
        raise DoesNotApply("it was not loaded from a folder")
    generation, tokenizer = (read_json(subject.folder / name, links=True) for name in (GENERATION, TOKENIZER))
    if generation is None and tokenizer is None:
        raise DoesNotApply(f"its folder has neither {GENERATION} nor {TOKENIZER}")
    generation, tokenizer = generation or {}, tokenizer or {}
    far, near = lengths(generation, tokenizer, subject)
    wrong = [*no_tokens(generation, subject), *other_cache(generation, subject), *far]
    notes = [*near, *other_ends(generation, subject)]
    return Measurement(len(wrong), 0, "; ".join(notes), "; ".join([*wrong, *notes]), whose="config")


def no_tokens(generation: Mapping[str, Any], subject: Subject) -> Iterator[str]:
    """Token ids beyond the vocabulary of the folder's config; --quick uses a config with a smaller vocabulary."""
    size = subject.raw.get("text_config", subject.raw).get("vocab_size") or subject.config.vocab_size
    for key in TOKENS:
        for token in listed(generation.get(key)):
            if not 0 <= token < size and not (key == "pad_token_id" and token == -1):
                yield f"{GENERATION}: {key} = {token}, and the vocabulary has {size} tokens"


def other_cache(generation: Mapping[str, Any], subject: Subject) -> Iterator[str]:
    """A kind of cache with which generate() gives other logits than a full forward pass."""
    kind = generation.get("cache_implementation")
    if kind in GROWING or not hasattr(subject.model, "generate"):
        return
    tokens = subject.tokens(subject.length)
    half, words = subject.length // 2, f"{GENERATION}: with cache_implementation = {kind!r} generate()"
    try:
        got = subject.generated(tokens, half, cache_implementation=kind, disable_compile=True)
    except (AttributeError, IndexError, RuntimeError, TypeError, ValueError) as error:
        yield f"{words} raises {type(error).__name__}: {one_line(error)[:160]}"
        return
    error = subject.error(got, subject.logits(tokens)[:, half - 1 : -1])
    if (first := subject.first_above(error)) is not None:
        yield f"{words} gives other logits than a whole pass from position {half + first} on, by {float(error.max()):.1e}"


def lengths(
    generation: Mapping[str, Any], tokenizer: Mapping[str, Any], subject: Subject
) -> tuple[list[str], list[str]]:
    """Lengths beyond the end of a table of positions, which raise an error; and lengths below the declared one."""
    end, declared = last_position(subject.model), declared_length(subject.config)
    given = {
        f"{GENERATION}: max_length": generation.get("max_length"),
        f"{GENERATION}: max_new_tokens": generation.get("max_new_tokens"),
        f"{TOKENIZER}: model_max_length": tokenizer.get("model_max_length"),
    }
    numbers = {name: one for name, one in given.items() if isinstance(one, int | float) and one < UNLIMITED}
    far = [
        f"{name} = {one:g} is more than the {end} positions of the model's table"
        for name, one in numbers.items()
        if end is not None and one > end
    ]
    near = [
        f"{name} = {one:g} is less than the declared length {declared}"
        for name, one in numbers.items()
        if declared is not None and one < declared and "new" not in name
    ]
    return far, near


def other_ends(generation: Mapping[str, Any], subject: Subject) -> Iterator[str]:
    """Tokens that end a text for generate() and not for config.json: published chat models have such on purpose."""
    raw = subject.raw.get("text_config") or subject.raw
    ours, theirs = (listed(one.get("eos_token_id")) for one in (raw, generation))
    if ours and theirs and not {*ours} & {*theirs}:
        there, here = (", ".join(map(str, ends)) for ends in (theirs, ours))
        yield f"{GENERATION}: generate() ends at {there}, config.json has eos_token_id {here}"
