"""Models that keep something of the tokens outside the cache, or read something else off it."""

from collections.abc import Callable
from typing import Any

import torch
from transformers import StaticCache

from tests.check.building import changed, llama, past_of


def counted_in_places() -> Any:
    """Positions of the places of a static cache, filled or not."""

    def before(named: dict[str, Any]) -> None:
        cache = named.get("cache")
        if isinstance(cache, StaticCache) and past_of(cache):
            new = torch.arange(named["input_ids"].shape[1])
            named["position_ids"] = (cache.layers[0].keys.shape[2] + new)[None]

    return changed(llama(), before)


def counted_in_the_model() -> Any:
    """How many tokens were seen is counted in the model, and crop() takes none back."""
    model = llama()
    model.seen = 0

    def before(named: dict[str, Any]) -> None:
        new, mask = named["input_ids"].shape[1], named.get("attention_mask")
        begun = past_of(named.get("cache")) > 0
        model.seen = model.seen + new if begun else new
        if begun and (mask is None or bool(mask.all())):
            named["position_ids"] = torch.arange(model.seen - new, model.seen)[None]

    return changed(model, before)


def padding_kept_in_the_model() -> Any:
    """How many tokens of each row are padding is kept from the prompt, and reorder_cache() moves none of it."""
    model = llama()

    def before(named: dict[str, Any]) -> None:
        mask, ids, past = named.get("attention_mask"), named["input_ids"], past_of(named.get("cache"))
        if not past:
            model.padding = None if mask is None else (mask == 0).sum(1, keepdim=True)
        elif model.padding is not None and len(ids) == len(model.padding):
            named["position_ids"] = torch.arange(ids.shape[1]) + past - model.padding

    return changed(model, before)


def counted_behind_a_cache() -> Any:
    """Positions behind a cache are counted from its length, unless a mask says that some of it is padding."""

    def before(named: dict[str, Any]) -> None:
        mask, past = named.get("attention_mask"), past_of(named.get("cache"))
        if past and (mask is None or mask.dim() == 2 and bool(mask.all())):
            named["position_ids"] = torch.arange(past, past + named["input_ids"].shape[1])[None]

    return changed(llama(), before)


def is_tree(named: dict[str, Any]) -> bool:
    mask = named.get("attention_mask")
    return mask is not None and mask.dim() == 4 and past_of(named.get("cache")) > 0


def drafts_counted() -> Any:
    """Drafts of a tree are numbered one after the other behind a cache."""

    def before(named: dict[str, Any]) -> None:
        if is_tree(named):
            past = past_of(named["cache"])
            named["position_ids"] = torch.arange(past, past + named["input_ids"].shape[1])[None]

    return changed(llama(), before)


def drafts_in_a_row() -> Any:
    """Each draft of a tree sees those before it, of other branches, too."""

    def before(named: dict[str, Any]) -> None:
        if is_tree(named):
            mask = named["attention_mask"]
            named["attention_mask"] = mask.new_full(mask.shape, torch.finfo(mask.dtype).min).triu(
                1 + mask.shape[3] - mask.shape[2]
            )

    return changed(llama(), before)


BROKEN: dict[str, dict[str, Callable[[], Any]]] = {
    "cached_keys: classes": {"positions of a static cache's places": counted_in_places},
    "cached_keys: crop": {"tokens counted in the model": counted_in_the_model},
    "cached_keys: renumber": {"positions counted behind a cache": counted_behind_a_cache},
    "cached_keys: drafts": {"drafts counted one by one": drafts_counted, "drafts see other branches": drafts_in_a_row},
    "cached_keys: reorder": {"padding of rows kept in the model": padding_kept_in_the_model},
}
