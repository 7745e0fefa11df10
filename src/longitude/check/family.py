"""Laws of the config do not blame a model for a failure that transformers' own class of its config has, too.

If a law fails, transformers' class makes a small model with random weights of the same config. If the law fails there as well,
Longitude reads the config otherwise than that class, and the law does not apply.
"""

from __future__ import annotations

import copy
import inspect
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import cache, wraps
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any
from warnings import catch_warnings

import torch
import transformers
from transformers import PreTrainedConfig

from longitude.check.quick import random_of, small
from longitude.check.subject import Subject
from longitude.checkpoints.config import positions_of_layers
from longitude.checkpoints.load import auto_class_of
from longitude.checkpoints.positions import has_alibi
from longitude.positions.config_keys import LENGTHS
from longitude.positions.hugging_face import not_understood
from longitude.testing.engine import DoesNotApply, Measurement, from_outside, in_words

Test = Callable[[Subject], Measurement]
LARGEST = 2 * 10**8
"""Most parameters of a model that is made to compare."""
NEEDED = (
    "model_type",
    "rope_theta",
    "rope_type",
    "type",
    "num_hidden_layers",
    "hidden_size",
    "vocab_size",
    "num_attention_heads",
    *LENGTHS,
)
"""Keys without which no config can be read, or which decide what is tried."""


def by_its_class(test: Test) -> Test:
    """Decorator of a law that reads the config: broken only if the class of transformers fulfills it."""

    @wraps(test)
    def tried(subject: Subject) -> Measurement:
        try:
            found = test(subject)
            if found.holds:
                return found
            reason = found.cause
        except DoesNotApply:
            raise
        except Exception as error:
            if from_outside(error, test, subject) is not None:
                raise
            found, reason = error, f"what this law asks of it fails ({in_words(error)})"
        return judged(test, subject, found, reason)

    return tried


def judged(test: Test, subject: Subject, found: Measurement | Exception, reason: str) -> Measurement:
    """A failure, unchanged or with its source: a key without effect, or the checkpoint. DoesNotApply if the class fails."""
    if subject.stock and replaced(type(subject.model)) is not None:
        # What a class does in this process is not what transformers published: the failure is that of the replacement.
        if isinstance(found, Exception):
            raise found
        return found
    known = ("alibi",) if has_alibi(subject.config) else ()
    keys = [key for key in not_understood(subject.config, by_class=subject.stock) if key not in known]
    unknown = f" (not understood: {', '.join(keys)})" if keys else ""
    fresh = None if keys and not subject.stock else of_its_class(subject)
    if fresh is None and (keys or subject.stock):
        raise DoesNotApply(f"nothing tells what its class makes of its config{unknown}: {reason}")
    if fresh is not None and (theirs := measured(test, fresh)) is not None:
        kind = f"{type(fresh.model).__name__} of transformers"
        if isinstance(found, Measurement) and (key := without_effect(test, fresh, theirs)):
            return replace(found, cause=f"{key} is not followed by {kind}: {reason}", whose="config")
        does = (
            "cannot be tried"
            if isinstance(found, Exception)
            else "itself does otherwise than is read here of its config"
        )
        raise DoesNotApply(f"{kind} {does}{unknown}: {reason}")
    if isinstance(found, Exception):
        raise found
    if subject.stock and fresh is not None and not found.whose and fulfilled(test, fresh):
        return replace(found, whose="checkpoint")  # another model of its class and config is right
    return found


def measured(test: Test, subject: Subject) -> float | None:
    """Measured failure of a law; infinite if it raises, None if it passes or does not apply."""
    try:
        found = test(subject)
    except DoesNotApply:
        return None
    except Exception:
        return float("inf")
    return None if found.holds else found.measured


def replaced(kind: type) -> str | None:
    """A function of a class's module, or of its classes, that was replaced by code from outside of transformers.

    Libraries patch such functions. None: everything is as published.
    """
    module = sys.modules[kind.__module__]
    packages = [Path(package.__file__ or "").parent for package in (transformers, torch)]
    defined = {*re.findall(r"^\s*def (\w+)", inspect.getsource(module), re.MULTILINE)}
    for holder in (module, *(each for each in vars(module).values() if isinstance(each, type))):
        if holder is not module and holder.__module__ != module.__name__:
            continue
        for name, value in vars(holder).items():
            code = getattr(inspect.unwrap(value) if callable(value) else None, "__code__", None)
            if code is None or code.co_filename.startswith("<") or name not in defined:
                continue
            if not any(Path(code.co_filename).is_relative_to(package) for package in packages):
                return f"{holder.__name__}.{name}"
    return None


@cache
def as_published(kind: type) -> type:
    """A class of transformers, loaded again from its file, without functions that were replaced in its module."""
    module = sys.modules[kind.__module__]
    spec = spec_from_file_location(f"{module.__name__}_as_published", module.__file__)
    assert spec is not None and spec.loader is not None
    fresh = sys.modules[spec.name] = module_from_spec(spec)
    spec.loader.exec_module(fresh)
    return getattr(fresh, kind.__name__)


def fulfilled(test: Test, subject: Subject) -> bool:
    """Whether a law applies and passes."""
    try:
        return test(subject).holds
    except Exception:
        return False


def of_its_class(subject: Subject) -> Subject | None:
    """A small random model of the config, as transformers makes it; None if it cannot."""
    return as_subject(subject, copy.deepcopy(subject.model.config))


def as_subject(subject: Subject, config: PreTrainedConfig, declared: Any = None) -> Subject | None:
    """Subject of a small random model of another config; declared: the config that laws compare with."""
    make = type(subject.model)._from_config if subject.stock else auto_class_of(config).from_config
    try:
        smaller = small(config)
        with torch.device("meta"):
            size = sum(parameter.numel() for parameter in make(smaller).parameters())
        if size > LARGEST:
            return None
        model = random_of(config, make=make)
    except Exception:  # no class, or sizes that depend on each other
        return None
    learned = torch.Generator().manual_seed(0)
    for name, weight in model.named_parameters():
        if "norm" in name and weight.dim() == 1:  # new norms change no direction, trained ones do
            weight.data += torch.rand(weight.shape, generator=learned).to(weight)
    if next(subject.model.parameters()).dtype == torch.float64:
        model = model.double()
    return replace(subject, model=model.to(subject.device), reference=None, declared=declared)


# ---- keys without effect ---------------------------------------------------------------------------------------------------
def without_effect(test: Test, fresh: Subject, failure: float) -> str:
    """A key that the class does not read, if its absence would explain the failure: "key = value", or an empty string."""
    config = fresh.model.config
    for key, value, less in without_each_key(config):
        try:
            other = type(config).from_dict(less)
        except Exception:  # it is needed
            continue
        if not readable(other) and readable(config):
            continue
        if not fulfilled(test, replace(fresh, declared=other)):
            continue  # it explains nothing
        if (again := as_subject(fresh, other, declared=config)) is not None and measured(test, again) == failure:
            return f"{key} = {value}"
    return ""


def readable(config: PreTrainedConfig) -> bool:
    """Whether its layers can be read; if not, laws test something else, which shows nothing about a key."""
    try:
        with catch_warnings(action="ignore"):
            positions_of_layers(config.get_text_config(), "half")
    except (KeyError, ValueError):
        return False
    return True


def without_each_key(config: PreTrainedConfig) -> Iterator[tuple[str, Any, dict[str, Any]]]:
    """(key, its value, the config as a dict without it), of each key at the top and among the rope parameters."""
    given = config.to_dict()
    for key, value in given.items():
        if key == "rope_parameters" and isinstance(value, Mapping):
            for inner in value:
                if inner not in NEEDED and not isinstance(value[inner], Mapping):
                    less = {name: one for name, one in value.items() if name != inner}
                    yield f"{key}.{inner}", value[inner], given | {key: less}
        elif key not in NEEDED and isinstance(value, int | float) and not isinstance(value, bool):
            less = {name: one for name, one in given.items() if name != key}
            yield key, value, less
            if "window" in key and "layer_types" in less:
                yield key, value, {name: one for name, one in less.items() if name != "layer_types"}
