"""The two names of a cache: `cache` in transformers from 5.24 on, `past_key_values` before."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

from transformers import Cache
from transformers.modeling_outputs import (
    BaseModelOutputWithPastAndCrossAttentions,
    CausalLMOutputWithPast,
    Seq2SeqLMOutput,
    Seq2SeqModelOutput,
)
from transformers.utils.generic import ModelOutput

from longitude.errors import UsageError

OLD, NEW = "past_key_values", "cache"
INSTALLED = NEW if NEW in CausalLMOutputWithPast.__dataclass_fields__ else OLD
"""Name of the cache in the installed transformers: in arguments and outputs of its models, and in generate()."""
ATTENTION = (NEW, OLD)
"""Names of the cache in attention models of any transformers version."""
CACHES = (*ATTENTION, "cache_params", "state")
"""Names of the cache in any model of any transformers version."""


def named(cache: Cache | None) -> dict[str, Any]:
    """A cache as a keyword argument for models and outputs of the installed transformers."""
    return {INSTALLED: cache}


def cache_in(output: Any) -> Any:
    """The cache in an output of the installed transformers; None if there is none."""
    return getattr(output, INSTALLED, None)


def one_of(cache: Cache | None, past_key_values: Cache | None) -> Cache | None:
    """The cache that was passed, by either name; ValueError for both."""
    if cache is not None and past_key_values is not None:
        raise UsageError("", f"{NEW} or {OLD}, which is its name in transformers before 5.24", "both")
    return past_key_values if cache is None else cache


def renamed(arguments: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a call, with the cache, if there is one, under the name that the installed transformers reads."""
    others = {name: value for name, value in arguments.items() if name not in ATTENTION}
    cache = one_of(arguments.get(NEW), arguments.get(OLD))
    return others if cache is None else {**others, **named(cache)}


def arguments_of(model: Any) -> set[str]:
    """Names of the arguments of a model's forward; if it has **kwargs, also those of the forwards that it overrides."""
    forwards = [model.forward, *(kind.forward for kind in type(model).__mro__ if "forward" in vars(kind))]
    names: set[str] = set()
    for forward in forwards:
        parameters = inspect.signature(forward).parameters
        names |= set(parameters)
        if all(parameter.kind is not parameter.VAR_KEYWORD for parameter in parameters.values()):
            break
    return names


def cache_name(model: Any) -> str | None:
    """Name of the cache in a model's forward and outputs; None for a model without a cache."""
    arguments = arguments_of(model)
    return next((name for name in CACHES if name in arguments), None)


def both_names(name: str, kind: type[ModelOutput]) -> Any:
    """Subclass of an output with `past_key_values` that has it as `cache`, too. name: the name of the class in this module."""

    def get(self: Any) -> Any:
        return self.past_key_values

    def put(self: Any, cache: Cache | None) -> None:
        self.past_key_values = cache

    def item(self: Any, key: Any) -> Any:
        return kind.__getitem__(self, OLD if key == NEW else key)

    # Pickle finds a class by module and qualified name; by `kind.__name__` it would find transformers' own class here.
    where = {"__module__": __name__, "__qualname__": name}
    return type(kind.__name__, (kind,), {"cache": property(get, put), "__getitem__": item, **where})


# Newer outputs have both names. They are used as they are, so that exported graphs contain no class of Longitude.
if TYPE_CHECKING or INSTALLED == NEW:
    DecoderOutput = BaseModelOutputWithPastAndCrossAttentions
    CausalOutput = CausalLMOutputWithPast
    Seq2SeqStackOutput = Seq2SeqModelOutput
    Seq2SeqOutput = Seq2SeqLMOutput
else:
    DecoderOutput = both_names("DecoderOutput", BaseModelOutputWithPastAndCrossAttentions)
    CausalOutput = both_names("CausalOutput", CausalLMOutputWithPast)
    Seq2SeqStackOutput = both_names("Seq2SeqStackOutput", Seq2SeqModelOutput)
    Seq2SeqOutput = both_names("Seq2SeqOutput", Seq2SeqLMOutput)
