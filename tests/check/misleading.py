"""Models with the symptom of a known bug and another cause, which no reason may name."""

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor
from transformers import PhimoeForCausalLM

from tests.check.broken_models import bloom
from tests.check.building import ORIGINAL, SHAPE, built, changed, llama, past_of, with_tables


def phimoe() -> Any:
    """Its class keeps short_factor in long sequences."""
    rope = {
        "rope_type": "longrope",
        "rope_theta": 1e4,
        "short_factor": [1.0] * 4,
        "long_factor": [2.0] * 4,
        ORIGINAL: 64,
    }
    rope |= {"short_mscale": 1.1, "long_mscale": 1.1}
    shape = {"num_key_value_heads": 4, "intermediate_size": 32, "num_local_experts": 2, "max_position_embeddings": 1024}
    return built(
        PhimoeForCausalLM, **SHAPE | shape, pad_token_id=0, bos_token_id=1, eos_token_id=2, rope_parameters=rope
    )


# ---- tables --------------------------------------------------------------------------------------------------------------
def far(change: Callable[[Tensor, Tensor], Tensor]) -> Callable[[], Any]:
    """change: of a table [1, L, width] and whether its positions [1, L, 1] are far."""
    return partial(
        with_tables, lambda right, x, at: tuple(change(table, (at > 500)[..., None]) for table in right(x, at))
    )


def with_biases(change: Callable[[int], float]) -> Any:
    """change: by what the number of tokens multiplies them."""
    model = bloom()
    right = model.transformer.build_alibi_tensor
    model.transformer.build_alibi_tensor = lambda mask, *more, **named: (
        right(mask, *more, **named) * change(mask.shape[1])
    )
    return changed(model)


def changed_in_memory() -> Any:
    model = llama()
    model.model.rotary_emb.original_inv_freq = model.model.rotary_emb.original_inv_freq + 0.5
    return model


# ---- calls ------------------------------------------------------------------------------------------------------------------
def by_call(scale: Callable[[int, dict[str, Any]], Any]) -> Any:
    """scale: by what logits are multiplied, of the number of the call and its arguments."""
    calls = [0]

    def after(answer: Any, named: dict[str, Any]) -> None:
        calls[0] += 1
        answer.logits = answer.logits * scale(calls[0], named)

    return changed(llama(), after=after)


def packed(call: int, named: dict[str, Any]) -> float:
    at = named.get("position_ids")
    return 1.2 if at is not None and bool((at.diff() < 0).any()) else 1.0


def moved(call: int, named: dict[str, Any]) -> float:
    at = named.get("position_ids")
    return 1.0 if at is None or past_of(named.get("cache")) else 1 + int(at.min()) / 100


def chunk(call: int, named: dict[str, Any]) -> float:
    return 1.2 if past_of(named.get("cache")) and named["input_ids"].shape[1] > 1 else 1.0


def cached(call: int, named: dict[str, Any]) -> float:
    return 1.2 if past_of(named.get("cache")) else 1.0


ROUNDING = ("rounded", "wrapped", "clamped")
MISLEADING: dict[str, tuple[Callable[[], Any], str, tuple[str, ...]]] = {
    # as positions that are rounded to bfloat16, of which 99840 is the nearest to 100,003
    "positions clamped at 99840": (
        partial(with_tables, lambda right, x, at: right(x, at.clamp(max=99840))), "far_positions", ROUNDING,
    ),
    "positions modulo 4096": (partial(with_tables, lambda right, x, at: right(x, at % 4096)), "far_positions", ROUNDING),
    "a slower clock": (partial(with_tables, lambda right, x, at: right(x, at * 1.001)), "far_positions", ROUNDING),
    "far tables of zeros": (far(lambda table, away: table * ~away), "far_positions", ROUNDING),
    "far tables larger": (far(lambda table, away: table * (1 + 0.5 * away)), "far_positions", ROUNDING),
    "far tables not finite": (far(lambda table, away: table / ~away), "far_positions", ROUNDING),
    "biases that fade in long rows": (partial(with_biases, lambda n: 1 if n < 1000 else 0.3), "far_positions", ROUNDING),
    "biases times 1.3": (partial(with_biases, lambda n: 1.3), "alibi_slopes", ("heads and a largest bias",)),
    "the same table at every position": (
        partial(with_tables, lambda right, x, at: tuple(table[:, :1].expand_as(table) for table in right(x, at))),
        "given_positions", ("counted in the model",),
    ),
    "a table changed in memory": (changed_in_memory, "meta_device", ("not made again", "_init_weights")),
    # passes
    "logits that grow with every call": (
        partial(by_call, lambda call, named: 1 + call / 10), "repeatable", ("random", "dropout", "leaves"),
    ),
    "logits of packed rows": (partial(by_call, packed), "packing", ("attend to each other", "reach the mask")),
    "logits that follow the first position": (
        partial(by_call, moved), "relative_positions", ("only by its rotation", "not rotated", "layouts"),
    ),
    "logits of a later chunk": (partial(by_call, chunk), "chunked_prefill", ("positions", "recurrent", "depend", "mask")),
    "logits behind a cache": (partial(by_call, cached), "cached_decoding", ("positions are", "mask or", "bias", "keys were")),
}  # fmt: skip
"""How each is built, the law that it breaks, and words of causes that it has not."""
