"""attn_implementation="longitude" in plain transformers models: the same numbers as theirs, or a reason."""

import copy
from inspect import signature
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForMaskedLM, DynamicCache
from transformers.integrations.flash_attention import flash_attention_forward
from transformers.integrations.flex_attention import flex_attention_forward
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import create_causal_mask, create_sliding_window_causal_mask
from transformers.trainer_utils import set_seed

import longitude as lg
import longitude.hf  # registers
from longitude.hf.attention import REFUSED, stock_attention
from longitude.hf.masks import StockMask

SHAPE = {
    "vocab_size": 50,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "initializer_range": 0.4,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
MODELS: dict[str, dict[str, Any]] = {
    "llama": {"num_key_value_heads": 2},
    "mistral": {"num_key_value_heads": 2, "sliding_window": 5},
    "gpt_neox": {},
}
PADDED = 6


def made(kind: str, backend: str, **more: Any) -> Any:
    """A tiny model in float64, the same for every backend; each with a config of its own, which says the backend."""
    config = AutoConfig.for_model(kind, **{**SHAPE, **MODELS.get(kind, {}), **more})
    set_seed(0)
    auto = AutoModelForMaskedLM if kind == "bert" else AutoModelForCausalLM
    return auto.from_config(config, attn_implementation=backend).double().eval()


@pytest.fixture
def ids() -> Tensor:
    return torch.randint(3, 50, (2, 17), generator=torch.Generator().manual_seed(1))


@pytest.fixture
def mask(ids: Tensor) -> Tensor:
    """Left padding of the first row."""
    mask = torch.ones_like(ids)
    mask[0, :PADDED] = 0
    return mask


@pytest.fixture(params=MODELS)
def pair(request: pytest.FixtureRequest) -> tuple[Any, Any]:
    return made(request.param, "longitude"), made(request.param, "sdpa")


def close(a: Tensor, b: Tensor) -> None:
    torch.testing.assert_close(a, b, rtol=0, atol=1e-10)


def gradients(model: Any, **inputs: Tensor) -> dict[str, Tensor]:
    labels = inputs["input_ids"].masked_fill(
        inputs.get("attention_mask", torch.ones_like(inputs["input_ids"])) == 0, -100
    )
    model.train()
    model(**inputs, labels=labels).loss.backward()
    model.eval()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def test_whole_pass_with_gradients(pair: tuple[Any, Any], ids: Tensor) -> None:
    ours, theirs = pair
    close(ours(ids).logits, theirs(ids).logits)
    own, other = gradients(ours, input_ids=ids), gradients(theirs, input_ids=ids)
    assert own.keys() == other.keys() and len(own) > 10
    for name in own:
        close(own[name], other[name])


def test_padding_with_gradients(pair: tuple[Any, Any], ids: Tensor, mask: Tensor) -> None:
    ours, theirs = pair
    for padding in (mask, mask.flip(1)):
        real = padding.bool()
        close(ours(ids, attention_mask=padding).logits[real], theirs(ids, attention_mask=padding).logits[real])
    alone = ours(ids[:1, PADDED:], position_ids=torch.arange(PADDED, 17)[None], use_cache=False).logits
    close(ours(ids, attention_mask=mask).logits[:1, PADDED:], alone)
    own = gradients(ours, input_ids=ids, attention_mask=mask)
    other = gradients(theirs, input_ids=ids, attention_mask=mask)
    for name in own:
        close(own[name], other[name])


def test_packed_documents(pair: tuple[Any, Any], ids: Tensor) -> None:
    """Found by transformers in position_ids that start again."""
    ours, theirs = pair
    places = torch.cat([torch.arange(7), torch.arange(10)])[None]
    packed = ours(ids, position_ids=places, use_cache=False).logits
    close(packed, theirs(ids, position_ids=places, use_cache=False).logits)
    close(packed[:, 7:], ours(ids[:, 7:]).logits)


ENDS = torch.tensor([0, 7, 17], dtype=torch.int32)
PLACES = torch.cat([torch.arange(7), torch.arange(10)])[None]
NUMBERS = torch.tensor([[0] * 7 + [1] * 10], dtype=torch.int32)


@pytest.mark.parametrize(
    "marks",
    [
        {"cu_seq_lens_q": ENDS, "cu_seq_lens_k": ENDS, "max_length_q": 10, "max_length_k": 10},
        {"cu_seq_lens_q": ENDS, "cu_seq_lens_k": ENDS, "position_ids": PLACES, "seq_idx": NUMBERS},
        {"seq_idx": NUMBERS},
        {"seq_idx": NUMBERS, "attention_mask": torch.ones(1, 17)},
    ],
    ids=["ends", "all", "numbers", "numbers and a mask"],
)
def test_documents_marked_by_arguments(pair: tuple[Any, Any], marks: dict[str, Any], ids: Tensor) -> None:
    """cu_seq_lens and seq_idx, with or without position_ids that start over: each document as alone, gradients too."""
    ours, _ = pair
    inputs = ours.get_input_embeddings()(ids[:1]).detach().requires_grad_()
    packed = ours(inputs_embeds=inputs, use_cache=False, **marks).logits
    # Alone at the positions that they have in the row: angles are float32, and rounded differently at other positions.
    places = marks.get("position_ids", torch.arange(17)[None]).split([7, 10], 1)
    parts = zip(inputs.split([7, 10], 1), places, strict=True)
    alone = torch.cat([ours(inputs_embeds=x, position_ids=p).logits for x, p in parts], 1)
    close(packed, alone)
    close(*(torch.autograd.grad(out.cos().sum(), inputs)[0] for out in (packed, alone)))
    together = ours(inputs_embeds=inputs, attention_mask=torch.ones(1, 17)).logits
    assert (together - alone)[:, 7:].abs().max() > 1e-3


@pytest.mark.parametrize(
    ("marks", "reason"),
    [
        ({"cu_seq_lens_q": ENDS, "position_ids": PLACES.roll(1)}, "other documents than position_ids"),
        ({"cu_seq_lens_q": ENDS, "seq_idx": NUMBERS.roll(1)}, "seq_idx and cu_seq_lens_q mark different documents"),
        ({"cu_seq_lens_q": ENDS[:2]}, "expected numbers that rise from 0 to the 17 tokens"),
    ],
)
def test_marks_that_contradict_each_other(marks: dict[str, Any], reason: str, ids: Tensor) -> None:
    with pytest.raises(ValueError, match=reason):
        made("llama", "longitude")(ids[:1], use_cache=False, **marks)


def test_marks_behind_a_cache_are_refused(ids: Tensor) -> None:
    model = made("llama", "longitude")
    cache = model(ids[:1, :4]).past_key_values
    with pytest.raises(ValueError, match="this one has a cache or memories"):
        model(ids[:1], past_key_values=cache, seq_idx=NUMBERS)


def test_the_window_is_respected(ids: Tensor) -> None:
    """What stands `sliding_window` before a token does not reach it in one layer, what stands one later does."""
    model = made("mistral", "longitude", num_hidden_layers=1)
    for place, reaches in ((16 - 5, False), (16 - 4, True)):
        other = ids.clone()
        other[:, place] = 3 + (ids[:, place] - 2) % 47
        moved = (model(ids).logits - model(other).logits)[:, -1].abs().max()
        assert bool(moved > 1e-6) is reaches


def test_decoding_with_the_cache(pair: tuple[Any, Any], ids: Tensor, mask: Tensor) -> None:
    ours, theirs = pair
    cache, chunks = DynamicCache(config=ours.config), []
    for start, stop in ((0, 9), (9, 14), (14, 15), (15, 16), (16, 17)):
        chunks.append(ours(ids[:, start:stop], attention_mask=mask[:, :stop], past_key_values=cache).logits)
    close(torch.cat(chunks, 1)[mask.bool()], theirs(ids, attention_mask=mask).logits[mask.bool()])


@pytest.mark.one_in(5)
@pytest.mark.parametrize(
    "options",
    [{}, {"num_beams": 3}, {"use_cache": False}, {"cache_implementation": "static", "disable_compile": True}],
    ids=["greedy", "beams", "no cache", "static cache"],
)
def test_generation(pair: tuple[Any, Any], ids: Tensor, mask: Tensor, options: dict[str, Any]) -> None:
    ours, theirs = pair
    options = {"attention_mask": mask, "max_new_tokens": 9, "min_new_tokens": 9, "do_sample": False, **options}
    assert ours.generate(ids, **options).tolist() == theirs.generate(ids, **options).tolist()


def test_dropout_acts_in_training_only(ids: Tensor) -> None:
    model = made("llama", "longitude", attention_dropout=0.5)
    close(model(ids).logits, model(ids).logits)
    model.train()
    assert (model(ids).logits - model(ids).logits).abs().max() > 1e-3


def test_weights_are_those_of_eager(ids: Tensor) -> None:
    """Eager rounds its softmax to float32."""
    ours = made("llama", "longitude")(ids, output_attentions=True).attentions
    theirs = made("llama", "eager")(ids, output_attentions=True).attentions
    assert len(ours) == len(theirs) == 2
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-5)


def test_an_encoder_sees_both_sides(ids: Tensor, mask: Tensor) -> None:
    ours, theirs = made("bert", "longitude"), made("bert", "sdpa")
    real = mask.bool()
    close(ours(ids, attention_mask=mask).logits[real], theirs(ids, attention_mask=mask).logits[real])


def test_no_square_is_made(ids: Tensor) -> None:
    """The mask that layers are handed holds nothing of L x L, whatever is asked."""
    config = made("mistral", "longitude").config
    length = 4096
    hidden, valid = torch.empty(1, length, 0), torch.ones(1, length)
    valid[:, :100] = 0
    packed = torch.arange(length)[None] % 1000
    for attention_mask, places in ((None, None), (valid, None), (None, packed)):
        seen = create_sliding_window_causal_mask(config, hidden, attention_mask, None, position_ids=places)
        assert isinstance(seen, StockMask)
        assert [part.size for part in seen.mask.parts() if isinstance(part, lg.Window)] == [5]
        held = [x for part in seen.mask.parts() for x in vars(part).values() if isinstance(x, Tensor)]
        assert all(x.numel() <= length for x in held)
        assert len(held) == (0 if attention_mask is None and places is None else 1)


def test_a_layer_that_says_causality_and_window_itself() -> None:
    """Where the model makes no mask; is_causal of the call counts more than the layer's."""
    layer = torch.nn.Module()
    q = k = v = torch.randn(1, 2, 9, 4, dtype=torch.float64)
    for causal, window, mask in ((None, 3, lg.Window(3)), (None, None, lg.Causal()), (False, None, lg.NoMask())):
        out, weights = stock_attention(layer, q, k, v, None, scaling=0.5, sliding_window=window, is_causal=causal)
        close(out, lg.attend(q, k, v, mask=mask, scale=0.5).transpose(1, 2))
        assert weights is None
    layer.is_causal = False  # pyright: ignore[reportAttributeAccessIssue]
    close(stock_attention(layer, q, k, v, None)[0], lg.attend(q, k, v, mask=lg.NoMask()).transpose(1, 2))


GEMMA = {"num_key_value_heads": 2, "head_dim": 4, "sliding_window": 5}
SINKS = {**GEMMA, "num_local_experts": 2, "num_experts_per_tok": 1}


@pytest.mark.parametrize(
    ("kind", "more", "inputs", "reason"),
    [
        ("gemma2", GEMMA, {}, "softcap"),
        ("gpt_oss", SINKS, {}, "s_aux"),
        ("llama", {}, {"attention_mask": torch.ones(2, 1, 17, 17, dtype=torch.bool)}, r"expected attention_mask \[B, tokens\]"),
        ("llama", {}, {"attention_mask": torch.ones(2, 9)}, r"expected \[2, 17\]"),
        ("llama", {}, {"head_mask": torch.ones(4)}, "head_mask"),
        ("llama", {}, {"cu_seq_lens_q": torch.tensor([0, 7, 17])}, "one row, the flattened batch; expected batch 1, got 2"),
        ("bloom", {"n_layer": 2, "n_head": 4}, {}, "Bloom"),
    ],
    ids=["softcap", "sinks", "dense mask", "short mask", "head mask", "rows with common ends", "its own attention"],
)  # fmt: skip
def test_what_it_cannot_honour_is_refused(kind: str, more: dict, inputs: dict, reason: str, ids: Tensor) -> None:
    with pytest.raises(ValueError, match=reason):
        made(kind, "longitude", **more)(ids, **inputs)


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_what_would_change_the_attention_is_refused(name: str) -> None:
    q = k = v = torch.randn(1, 2, 9, 4)
    with pytest.raises(ValueError, match=f"does not support {name}: "):
        stock_attention(torch.nn.Module(), q, k, v, None, **{name: torch.ones(2)})
    stock_attention(torch.nn.Module(), q, k, v, None, **{name: None})


def test_what_their_attention_reads_is_known() -> None:
    """Each argument of the functions that ours stands in for is done or refused; any other is not attention's business."""
    done = {*signature(stock_attention).parameters, "is_causal"}
    functions = [sdpa_attention_forward, flash_attention_forward, flex_attention_forward]
    read = {name for function in functions for name in signature(function).parameters}
    assert {"scaling", "softcap", "position_bias"} <= read
    assert read <= done | REFUSED.keys()


@pytest.mark.parametrize("kind", MODELS)
def test_the_loss_has_arguments_of_its_own(kind: str, ids: Tensor) -> None:
    """shift_labels, and whatever else a model hands on to its layers."""
    ours, theirs = made(kind, "longitude"), made(kind, "sdpa")
    shifted = torch.nn.functional.pad(ids[:, 1:], (0, 1), value=-100)
    more = {"labels": ids, "shift_labels": shifted, "num_items_in_batch": 20}
    close(ours(ids, **more).loss, theirs(ids, **more).loss)
    close(ours(ids, **more).loss, ours(ids, labels=ids).loss * 32 / 20)


@torch.no_grad()
def test_attentions_that_the_config_asks_for(ids: Tensor) -> None:
    """transformers lets a config ask only before "longitude" is set, and would return an empty tuple."""
    ours, theirs = (made("llama", "eager", output_attentions=True) for _ in range(2))
    ours.set_attn_implementation("longitude")
    want = theirs(ids).attentions
    assert len(ours(ids).attentions) == len(want) == 2
    for a, b in zip(ours(ids).attentions, want, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-5)
    assert ours(ids, output_attentions=False).attentions is None


def test_a_mask_of_another_kind_is_refused(ids: Tensor) -> None:
    """Images that see themselves both ways, as some models ask for."""
    config = copy.deepcopy(made("llama", "longitude").config)
    blocks = torch.zeros_like(ids)
    with pytest.raises(ValueError, match="another mask, 'or_masks'"):
        create_causal_mask(config, torch.empty(2, 17, 0), None, None, block_sequence_ids=blocks)
