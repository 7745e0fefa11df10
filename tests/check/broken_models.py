"""Models with one bug each, of plain transformers classes, and the law that it breaks."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import (
    Cohere2ForCausalLM,
    FalconForCausalLM,
    GPTNeoXForCausalLM,
    Ministral3ForCausalLM,
    SmolLM3ForCausalLM,
)

from longitude.hf import set_positions
from longitude.models import LongitudeForCausalLM
from longitude.positions.rotation import convert_layout
from tests.check import broken_caches, broken_layers, broken_numbers, broken_running
from tests.check.building import (
    LENGTH,
    LONGROPE,
    ORIGINAL,
    SHAPE,
    YARN,
    bloom,
    built,
    by_layer,
    changed,
    gpt2,
    llama,
    past_of,
    with_tables,
)


def neox() -> Any:
    rope = {"rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": 0.5}
    shape = {"intermediate_size": 64, "max_position_embeddings": LENGTH}
    return built(GPTNeoXForCausalLM, **SHAPE, **shape, rope_parameters=rope)


def ministral(step: int) -> Any:
    rope = YARN | {"rope_theta": 1e4, "original_max_position_embeddings": step, "llama_4_scaling_beta": 0.3}
    return by_layer(Ministral3ForCausalLM, max_position_embeddings=4 * step, rope_parameters=rope)


def ours(encoding: str) -> Any:
    return built(LongitudeForCausalLM, **SHAPE, max_position_embeddings=LENGTH, encoding=encoding)


# ---- calls ------------------------------------------------------------------------------------------------------------------
def off_by(step: int, model: Any) -> Any:
    """Counts what is cached wrongly."""

    def shift(named: dict[str, Any]) -> None:
        if past := past_of(named.get("cache")):
            given = named.get("position_ids")
            given = (torch.arange(named["input_ids"].shape[1]) + past)[None] if given is None else given
            named["position_ids"] = given + step

    return changed(model, shift)


def with_mask(change: Callable[..., Any]) -> Any:
    """change: of the attention mask, and of one [rows, 1, queries, keys] that allows everything."""
    model = llama()

    def mask(named: dict[str, Any]) -> None:
        rows, queries = named["input_ids"].shape
        everything = torch.zeros(rows, 1, queries, past_of(named.get("cache")) + queries, dtype=model.dtype)
        named["attention_mask"] = change(named.get("attention_mask"), everything)

    return changed(model, mask)


def none_behind_a_cache(mask: Any, everything: Tensor) -> Any:
    """A prompt that continues behind a cache attends to its own future."""
    queries, keys = everything.shape[2:]
    return everything if keys > queries > 1 else mask


def no_packing(mask: Any, everything: Tensor) -> Any:
    """Positions reach the tables, and not the mask."""
    return torch.ones_like(everything[:, 0, 0], dtype=torch.long) if mask is None else mask


def with_logits(model: Any, change: Callable[[Tensor], Tensor]) -> Any:
    def after(answer: Any, named: dict[str, Any]) -> None:
        answer.logits = change(answer.logits)

    return changed(model, after=after)


def no_bias_at_decode() -> Any:
    """ALiBi is left out as soon as there is a cache."""
    model = bloom()
    body, right = model.transformer, model.transformer.build_alibi_tensor
    body.decodes = False
    body.build_alibi_tensor = lambda *given, **named: right(*given, **named) * (not body.decodes)

    def before(named: dict[str, Any]) -> None:
        past = past_of(named.get("cache"))
        body.decodes = past > 0
        if body.decodes and named.get("attention_mask") is None:
            rows, queries = named["input_ids"].shape
            named["attention_mask"] = torch.ones(rows, past + queries)

    return changed(model, before)


def in_generate(change: Callable[[dict[str, Any], bool], Any]) -> Any:
    """change: of the arguments that generate() makes, in place, and whether they are of the prompt; forward alone is right."""
    model = gpt2()
    right = model.prepare_inputs_for_generation

    def prepared(input_ids, is_first_iteration=False, **kwargs):
        given = right(input_ids, is_first_iteration=is_first_iteration, **kwargs)
        change(given, is_first_iteration)
        return given

    model.prepare_inputs_for_generation = prepared
    return model


# ---- tables and weights -------------------------------------------------------------------------------------------------------
def theta_lost_in_the_model() -> Any:
    model = llama(rope={"rope_theta": 500_000.0})
    model.model.rotary_emb = llama().model.rotary_emb
    return model


def theta_lost_in_the_config() -> Any:
    model = llama()
    del model.config.rope_parameters["rope_theta"]
    return model


def interleaved(model: Any) -> Any:
    for name, module in model.named_modules():
        if name.endswith(("q_proj", "k_proj")):
            module.weight.data = convert_layout(module.weight.data, model.config.head_dim, "interleaved")
    return model


def copying() -> Any:
    """What a trained model can do, by hand: it says what followed when the last LENGTH // 2 + 8 tokens began."""
    size, words, width = LENGTH // 2 + 8, 48, 64  # tokens that are repeated, of as many as `check` compares
    shape = {
        "vocab_size": words,
        "hidden_size": width,
        "num_attention_heads": 1,
        "num_key_value_heads": 1,
        "head_dim": width,
    }
    model = llama(rope={"rope_theta": 100.0}, **shape, num_hidden_layers=1, pad_token_id=0)
    for parameter in model.parameters():
        parameter.data.zero_()
    for norm in (
        model.model.norm,
        model.model.layers[0].input_layernorm,
        model.model.layers[0].post_attention_layernorm,
    ):
        norm.weight.data.fill_(1.0)
    word, layer = torch.eye(words), model.model.layers[0].self_attn
    model.model.embed_tokens.weight.data[:, :words] = word
    model.model.embed_tokens.weight.data[:, words] = 1.0  # the same in every token
    angle = (size - 1) * 100.0 ** -(torch.arange(width // 2) * 2 / width)
    layer.q_proj.weight.data[:, words] = 0.4 * torch.cat([angle.cos(), -angle.sin()])  # nearest to keys so far before
    layer.k_proj.weight.data[: width // 2, words] = 1.0
    layer.v_proj.weight.data[:words, :words], layer.o_proj.weight.data[:words, :words] = word, 20 * word
    model.lm_head.weight.data[:, :words] = 2 * word
    return model


def interleaved_fused_weights() -> Any:
    """GPT-NeoX keeps a head's query, key and value in one projection."""
    model = neox()
    for layer in model.gpt_neox.layers:
        fused = layer.attention.query_key_value
        for rows in (fused.weight, fused.bias):
            parts = rows.data.unflatten(0, (4, 3, 8))
            for which in (0, 1):
                flat = parts[:, which].flatten(0, 1)
                parts[:, which] = convert_layout(flat, 8, "interleaved", 4).unflatten(0, (4, 8))
    return model


def attention_factor_to_the(power: float) -> Any:
    model = llama(rope=YARN)
    model.model.rotary_emb.attention_scaling **= power
    return model


def switches_early() -> Any:
    """LongRoPE that takes its long list at exactly the original length, and keys that are rotated again."""
    model = llama(rope=LONGROPE)
    model.config.rope_parameters["original_max_position_embeddings"] -= 1  # what the switch reads
    model.model.rotary_emb.config = model.config.__class__(**model.config.to_dict())
    model.config.rope_parameters["original_max_position_embeddings"] += 1
    return model


# ---- rotations ----------------------------------------------------------------------------------------------------------------
def absolute_too() -> Any:
    """The first layer adds a little of the cosine of positions to its input."""
    model = llama()

    def before(module: nn.Module, given: Any, named: dict[str, Any]) -> Any:
        return (given[0] + 0.1 * named["position_ids"][..., None].to(given[0].dtype).cos(),), named

    model.model.layers[0].register_forward_pre_hook(before, with_kwargs=True)
    return model


def falcon() -> Any:
    """With ALiBi, and rope_parameters that nothing reads."""
    shape = {"alibi": True, "new_decoder_architecture": False, "multi_query": False}
    return built(FalconForCausalLM, **SHAPE, max_position_embeddings=LENGTH, **shape)


def replaced() -> Any:
    model = llama()
    set_positions(model, "alibi")
    return model


def table_begins_again() -> Any:
    """A table of 32 rows of which 20 are used, from the first on again."""
    model = changed(gpt2())
    right = model.transformer.wpe.forward
    model.transformer.wpe.forward = lambda positions: right(positions % 20)
    return model


Models = dict[str, dict[str, Callable[[], Any]]]
"""Law -> name of a bug -> the model."""


def joined(*tables: Models) -> Models:
    laws = dict.fromkeys(law for table in tables for law in table)
    return {law: {name: make for table in tables for name, make in table.get(law, {}).items()} for law in laws}


OF_MODELS: Models = {
    "served_positions": {"a table begins again": table_begins_again},
    "repeatable": {
        "dropout left on": lambda: with_logits(llama(), lambda x: nn.functional.dropout(x, 0.1)),
    },
    "files: config.json": {"theta lost in the config": theta_lost_in_the_config},
    "rotary_frequencies": {
        "theta lost in the model": theta_lost_in_the_model,
        "attention factor twice": partial(attention_factor_to_the, 2),
        "attention factor missing": partial(attention_factor_to_the, 0),
        "LongRoPE switches early": switches_early,
        "sin has the wrong sign": partial(with_tables, lambda right, x, at: (right(x, at)[0], -right(x, at)[1])),
    },
    "far_positions": {
        "positions clamped": partial(with_tables, lambda right, x, at: right(x, at.clamp(max=2 * LENGTH))),
        "positions in bfloat16": partial(with_tables, lambda right, x, at: right(x, at.bfloat16())),
        "frequencies in bfloat16": lambda: llama().bfloat16(),  # from_pretrained(dtype=...) rounds none
        "ALiBi in bfloat16": lambda: bloom().bfloat16(),
    },
    "causality": {"no mask": partial(with_mask, lambda mask, everything: everything)},
    "given_positions": {
        "positions from the padding": lambda: changed(gpt2(), lambda named: named.update(position_ids=None)),
        "tables of the first positions": partial(
            with_tables, lambda right, x, at: right(x, torch.arange(at.shape[1]).expand_as(at))
        ),
        "positions of its own": lambda: changed(llama(), lambda named: named.update(position_ids=None)),
    },
    "relative_positions": {"absolute positions, too": absolute_too},
    "cached_decoding": {
        "cache off by one": lambda: off_by(1, llama()),
        "cache off by minus one, learned table": lambda: off_by(-1, gpt2()),
        "generate() off by one": partial(in_generate, lambda given, first: given["position_ids"].sub_(int(not first))),
        "biases zero at decode": no_bias_at_decode,
    },
    "batch_invariance": {
        "rows mixed": lambda: with_logits(neox(), lambda x: x - 0.1 * x.mean(0, keepdim=True)),
    },
    "left_padding": {
        "padding ignored": partial(with_mask, lambda mask, everything: None),
        "padding counted in generate()": partial(in_generate, lambda given, _: given.pop("position_ids", None)),
    },
    "packing: documents": {"packing ignored": partial(with_mask, no_packing)},
    "scaling_border: decoding": {
        "LongRoPE drifts": partial(llama, rope=LONGROPE),
        "LongRoPE drifts at a far border": partial(llama, LONGROPE | {ORIGINAL: 8192}, max_position_embeddings=16384),
    },
    "layer_masks": {"no mask behind a cache": partial(with_mask, none_behind_a_cache)},
    "rotary_layout": {
        "interleaved weights in a half model": lambda: interleaved(llama()),
        "interleaved weights, without a reference": lambda: interleaved(copying()),
        "interleaved fused weights in a half model": interleaved_fused_weights,
    },
}
BROKEN = joined(OF_MODELS, *(room.BROKEN for room in (broken_layers, broken_numbers, broken_caches, broken_running)))
"""Models that break a law, or the part of it that is named behind a colon, and no other law."""
REASONS = {  # numbers and places in the reason
    "a table begins again": "12 of 32 positions have another row: position 20 has that of 0",
    "drafts counted one by one": "(behind a cache)",
    "sin has the wrong sign": "by -0.001 rad a position, expected 0.001",
    "no mask behind a cache": "behind its cache query 18 attends to 23 keys, expected 19",
    "padding counted in generate()": "(generate())",
    "packing ignored": "documents packed into one row attend to each other",
    "LongRoPE drifts": f"across the original length {LENGTH // 2} drifts from position {LENGTH // 2} on",
    "interleaved weights in a half model": "the weights are interleaved in a half model",
    "interleaved weights, without a reference": "the weights are interleaved in a half model: random tokens",
}
REFERENCES = {
    "interleaved weights in a half model": llama,
    "interleaved fused weights in a half model": neox,
    "cache off by one": llama,
    "rows mixed": neox,
    "theta lost in the model": partial(llama, rope={"rope_theta": 500_000.0}),
    **dict.fromkeys(("sin has the wrong sign", "tables for the other layout"), llama),
}
HEALTHY: dict[str, Callable[[], Any]] = {
    "llama": llama,
    "llama, linear": partial(llama, rope={"rope_type": "linear", "factor": 4.0}),
    "copying": copying,
    "llama, yarn": partial(llama, rope=YARN),
    "neox": neox,
    "bloom": bloom,
    "gpt2": gpt2,
    **broken_layers.HEALTHY,
    **broken_running.HEALTHY,
    "smollm3": partial(by_layer, SmolLM3ForCausalLM),
    "cohere2": partial(by_layer, Cohere2ForCausalLM, sliding_window=8),
    "ministral3": partial(ministral, 8),
    "ministral3, long": partial(ministral, 256),
    **{f"ours, {name}": partial(ours, name) for name in ("rope", "alibi", "sinusoidal")},
}
