"""The law of what is refused: it leaves everything as it was."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from typing import Any

import torch
from transformers import DynamicCache

from longitude.models.causal import LongitudeForCausalLM
from longitude.testing.fixtures import LawBroken, close, numbers
from longitude.testing.mixers.fixtures import DIM, MixerExample, Network
from longitude.testing.mixers.models import NEAR, stacks, token_ids

LENGTH, PAST = 13, 9


@torch.no_grad()
def law_refused_calls(build: MixerExample) -> str | None:
    """A refused call leaves a filled cache as it was: wrong documents, positions, masks, batches and widths, weights that nobody
    can give, and a crop that cannot be; of the mixer alone, and in models with attention above and below it, where a later layer
    may be the one that refuses. One that is not refused is a crop or weights, and a cropped cache continues, too.
    """
    _alone(build)
    for stack, model in stacks(build):
        in_model(stack, model)
    return None


def _alone(build: MixerExample) -> None:
    net, x = Network(build), numbers(2, LENGTH, DIM)
    whole, filled = net(x, 0)[:, PAST:], net.caches()
    net(x[:, :PAST], 0, None, filled)
    more = x[:, PAST:]

    def crop(caches: list[Any]) -> None:
        for layer in caches:
            layer.crop(-2)

    wrong = {
        "documents of this call alone": lambda c: net(more, PAST, torch.zeros(2, 4, dtype=torch.long), c),
        "negative positions": lambda c: net(more, torch.arange(4) - 1, None, c),
        "positions of another length": lambda c: net(more, torch.arange(5), None, c),
        "positions that are no integers": lambda c: net(more, torch.arange(4) * 1.0, None, c),
        "another batch": lambda c: net(numbers(3, 4, DIM), PAST, None, c),
        "another width": lambda c: net(more[..., 1:], PAST, None, c),
        "a mask by name": lambda c: net(more, PAST, None, c, mask="causal"),
    }
    for what, call in wrong.items():
        _refused(what, call, filled, lambda c: close(f"after {what}", net(more, PAST, None, c), whole, NEAR))  # noqa: B023
    _refused(
        "a crop",
        crop,
        filled,
        lambda c: close("after a refused crop", net(more, PAST, None, c), whole, NEAR),
        lambda c: close("after a crop", net(x[:, PAST - 2 :], PAST - 2, None, c)[:, 2:], whole, NEAR),
    )


def in_model(stack: str, model: LongitudeForCausalLM) -> None:
    """The law of one model with two layers."""
    ids = token_ids(2, LENGTH)
    whole = model(ids, use_cache=False).logits[:, PAST:]
    filled = DynamicCache()  # as generate() makes it: our layers come in place
    model(ids[:, :PAST], past_key_values=filled)

    def goes_on(what: str, start: int = PAST) -> Callable[[Any], None]:
        def go(cache: Any) -> None:
            logits = model(ids[:, start:], past_key_values=cache).logits[:, PAST - start :]
            close(f"{stack}, {what}", logits, whole, NEAR)

        return go

    def asks(batch: int = 2, **options: Any) -> Callable[[Any], Any]:
        return lambda cache: model(token_ids(batch, 4), past_key_values=cache, **options)

    def refused_above(tokens: int) -> Callable[[Any], Any]:
        """By the last layer, when the first one has taken the tokens in."""

        def refuse(*_: Any) -> None:
            raise ValueError("refused by a layer above")

        def call(cache: Any) -> None:
            hook = model.model.layers[-1].register_forward_pre_hook(refuse)
            try:
                model(token_ids(2, tokens), past_key_values=cache)
            finally:
                hook.remove()

        return call

    wrong = {
        "a call that a layer above refuses": refused_above(4),
        "a mask of this call alone": asks(attention_mask=torch.ones(2, 4, dtype=torch.long)),
        "negative documents": asks(document_ids=torch.arange(LENGTH).expand(2, -1) - 1),
        "negative positions": asks(position_ids=torch.arange(4)[None] - 1),
        "positions of another length": asks(position_ids=torch.arange(5)[None]),
        "another batch": asks(3),
    }
    if len({type(mixer) for mixer in model.model.mixers}) > 1:  # of one kind, the first refuses what any does
        wrong["a token that a layer above refuses"] = refused_above(1)
    for what, call in wrong.items():
        _refused(f"{stack}, {what}", call, filled, goes_on(f"after {what}"))
    axes = torch.arange(PAST, LENGTH)[None, :, None].expand(2, 4, 3)
    either = {
        "weights": (asks(output_attentions=True), None),
        "positions on several axes": (asks(position_ids=axes), None),
        "a crop": (lambda cache: cache.crop(-2), goes_on("after a crop", PAST - 2)),
    }
    for what, (call, after) in either.items():
        _refused(f"{stack}, {what}", call, filled, goes_on(f"after {what} refused"), after or (lambda cache: None))


def _refused(
    what: str,
    call: Callable[[Any], Any],
    filled: Any,
    then: Callable[[Any], None],
    accepted: Callable[[Any], None] | None = None,
) -> None:
    """`then` of a cache that a call was refused with; `accepted` of one that it was not, if that may be."""
    cache = deepcopy(filled)
    try:
        call(cache)
    except ValueError:
        before, after = ([layer.get_seq_length() for layer in getattr(c, "layers", c)] for c in (filled, cache))
        if after != before:
            raise LawBroken(f"{what}: the refused call left a cache of {after} tokens, expected {before}") from None
        then(cache)
        return
    if accepted is None:
        raise LawBroken(f"{what}: was accepted, expected a ValueError")
    accepted(cache)
