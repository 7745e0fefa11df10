"""The laws of the files: config.json, the tensors of the weights, settings of generate(), and lengths of the tokenizer."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from longitude.check.causes import FILE, in_parts
from longitude.check.subject import CHECKPOINT_LAWS, Subject, listed
from longitude.checkpoints.declared import class_of, declared_length, require_numbers
from longitude.checkpoints.lint import contradictions, remarks
from longitude.checkpoints.load import differences
from longitude.checkpoints.positions import last_position
from longitude.checkpoints.unread import is_strange, nothing_reads, unread_places
from longitude.positions.hugging_face import NotUnderstood
from longitude.runs.files import read_json
from longitude.testing.engine import DoesNotApply, Measurement, Unknown

GENERATION, TOKENIZER = "generation_config.json", "tokenizer_config.json"
TOKENS = ("eos_token_id", "pad_token_id", "bos_token_id")
UNLIMITED = 10**9
"""Number from which on a tokenizer's model_max_length means that there is no limit."""


@CHECKPOINT_LAWS.law(threshold=0)
def files(subject: Subject) -> Measurement:
    """The files of a checkpoint agree: config.json with itself and its class, weights and generation files with config.json.

    The number counts faults.
    """
    return in_parts(subject, {"config.json": config, "weights": weights, "generation files": generation_files})


@CHECKPOINT_LAWS.law(threshold=0)
def unread_keys(subject: Subject) -> Measurement:
    """No key of config.json about positions is unknown to the model's class and to Longitude.

    It never fails, since a class may do always what a key asks for: other keys that change nothing are noted.
    """
    if (theirs := class_of(subject.config)) is None:
        raise DoesNotApply("transformers has no class of its config")
    try:
        keys = unread_places(subject.raw, theirs)
    except NotUnderstood as error:
        raise DoesNotApply(str(error)) from error
    note = nothing_reads(keys, theirs)
    if any(is_strange(key, theirs) for key in keys):
        raise Unknown(f"{note}; a model that was trained with it has other positions here")
    return Measurement(0, 0, note)


def config(subject: Subject) -> Measurement:
    """Contradictions between the keys of config.json. Unknown where its class rotates otherwise than keys can say."""
    try:
        require_numbers(subject.raw)
    except ValueError as error:
        return Measurement(1, 0, cause=str(error), whose=FILE)
    faults = list(contradictions(subject.raw, subject.config))
    notes = "; ".join(remarks(subject.raw, subject.config))
    if not faults and "not understood" in notes:
        if subject.folder is None and class_of(subject.config) is None:
            raise DoesNotApply("its config has no class in transformers that could contradict it")
        raise Unknown(notes)
    return Measurement(len(faults), 0, notes, cause="; ".join(faults), whose=FILE)


def weights(subject: Subject) -> Measurement:
    """Tensors that nothing reads, and those that config.json ties to another while the files have a different one.

    A table that the model computes itself, what its class ignores, and a head equal to the embedding that it is tied to are no
    fault.
    """
    if (loaded := subject.checkpoint) is None:
        raise DoesNotApply("it was not loaded from files")
    wrong, others = differences(loaded.model, loaded.unused, loaded.untied)
    cause = "; ".join([*wrong, *others])
    return Measurement(len(loaded.unused) + len(loaded.untied), 0, cause=cause, whose=FILE)


def settings_of(subject: Subject) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    """generation_config.json and tokenizer_config.json of the subject's folder. DoesNotApply if there is neither."""
    if subject.folder is None:
        raise DoesNotApply("it was not loaded from a folder")
    generation, tokenizer = (read_json(subject.folder / name, links=True) for name in (GENERATION, TOKENIZER))
    if generation is None and tokenizer is None:
        raise DoesNotApply(f"its folder has neither {GENERATION} nor {TOKENIZER}")
    return generation or {}, tokenizer or {}


def generation_files(subject: Subject) -> Measurement:
    """Token ids beyond the vocabulary, and lengths beyond a table of positions.

    Differences that may be intended are noted: other end-of-text tokens, shorter lengths.
    """
    generation, tokenizer = settings_of(subject)
    far, near = lengths(generation, tokenizer, subject)
    wrong = [*no_tokens(generation, subject), *far]
    notes = [*near, *other_ends(generation, subject)]
    return Measurement(len(wrong), 0, "; ".join(notes), "; ".join([*wrong, *notes]), whose=FILE)


def no_tokens(generation: Mapping[str, Any], subject: Subject) -> Iterator[str]:
    """Token ids beyond the vocabulary of the folder's config; --quick uses a config with a smaller vocabulary."""
    size = subject.raw.get("text_config", subject.raw).get("vocab_size") or subject.config.vocab_size
    for key in TOKENS:
        for token in listed(generation.get(key)):
            if not 0 <= token < size and not (key == "pad_token_id" and token == -1):
                yield f"{GENERATION}: {key} = {token}, and the vocabulary has {size} tokens"


def lengths(
    generation: Mapping[str, Any], tokenizer: Mapping[str, Any], subject: Subject
) -> tuple[list[str], list[str]]:
    """Lengths beyond the end of a table of positions, which raise an error; and lengths below the declared one."""
    end, declared = last_position(subject.model), declared_length(subject.config)
    keys = {"max_length": generation, "max_new_tokens": generation, "model_max_length": tokenizer}
    far, near = list[str](), list[str]()
    for key, settings in keys.items():
        if not isinstance(number := settings.get(key), int | float) or number >= UNLIMITED:
            continue
        name = f"{GENERATION if settings is generation else TOKENIZER}: {key} = {number:g}"
        if end is not None and number > end:
            far.append(f"{name} is more than the {end} positions of the model's table")
        if declared is not None and number < declared and "new" not in key:
            near.append(f"{name} is less than the declared length {declared}")
    return far, near


def other_ends(generation: Mapping[str, Any], subject: Subject) -> Iterator[str]:
    """Tokens that end a text for generate() and not for config.json: published chat models have such on purpose."""
    raw = subject.raw.get("text_config") or subject.raw
    ours, theirs = (listed(keys.get("eos_token_id")) for keys in (raw, generation))
    if ours and theirs and not {*ours} & {*theirs}:
        there, here = (", ".join(map(str, ends)) for ends in (theirs, ours))
        yield f"{GENERATION}: generate() ends at {there}, config.json has eos_token_id {here}"
