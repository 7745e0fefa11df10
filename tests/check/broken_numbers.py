"""Models with wrong numbers in one kind of call: far away, in long rows, packed, in a later chunk or behind a cache."""

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor

from tests.check.building import bloom, changed, llama, past_of, with_tables


def far(change: Callable[[Tensor, Tensor], Tensor]) -> Callable[[], Any]:
    """change: of a table [1, L, width] and whether its positions [1, L, 1] are far."""
    return partial(
        with_tables, lambda right, x, at: tuple(change(table, (at > 500)[..., None]) for table in right(x, at))
    )


def with_biases(factor: Callable[[int], float]) -> Any:
    """factor: of the biases, from the number of tokens."""
    model = bloom()
    right = model.transformer.build_alibi_tensor
    model.transformer.build_alibi_tensor = lambda mask, *more, **named: (
        right(mask, *more, **named) * factor(mask.shape[1])
    )
    return changed(model)


def changed_in_memory() -> Any:
    model = llama()
    model.model.rotary_emb.original_inv_freq = model.model.rotary_emb.original_inv_freq + 0.5
    return model


def by_call(factor: Callable[[int, dict[str, Any]], Any]) -> Any:
    """factor: of the logits, from the number of the call and its arguments."""
    calls = [0]

    def after(answer: Any, named: dict[str, Any]) -> None:
        calls[0] += 1
        answer.logits = answer.logits * factor(calls[0], named)

    return changed(llama(), after=after)


def packed(call: int, named: dict[str, Any]) -> float:
    at = named.get("position_ids")
    return 1.2 if at is not None and bool((at.diff() < 0).any()) else 1.0


def moved(call: int, named: dict[str, Any]) -> float:
    at = named.get("position_ids")
    return 1.0 if at is None or past_of(named.get("cache")) else 1 + int(at.min()) / 100


def cached(call: int, named: dict[str, Any]) -> float:
    return 1.2 if past_of(named.get("cache")) else 1.0


BROKEN: dict[str, dict[str, Callable[[], Any]]] = {
    "far_positions": {
        "far tables of zeros": far(lambda table, away: table * ~away),
        "far tables not finite": far(lambda table, away: table / ~away),
        "biases that fade in long rows": partial(with_biases, lambda n: 1 if n < 1000 else 0.3),
    },
    "meta_device": {"a table changed in memory": changed_in_memory},
    "repeatable": {"logits that grow with every call": partial(by_call, lambda call, named: 1 + call / 10)},
    "packing": {"logits of packed rows": partial(by_call, packed)},
    "relative_positions": {"logits that follow the first position": partial(by_call, moved)},
    "cached_decoding": {"logits behind a cache": partial(by_call, cached)},
}
