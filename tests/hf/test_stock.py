"""attn_implementation="longitude" in plain transformers models: the same numbers as theirs, or a reason."""

import copy
import math
from functools import partial
from inspect import signature

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForSeq2SeqLM, DynamicCache, masking_utils
from transformers.integrations.flash_attention import flash_attention_forward
from transformers.integrations.flex_attention import flex_attention_forward
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import create_causal_mask, create_sliding_window_causal_mask

import longitude as lg
import longitude.hf  # registers
from longitude.hf.attention import REFUSED, stock_attention
from longitude.hf.masks import StockMask
from tests.support import close as near, heads, in_pieces, parameter_gradients, refused

close = partial(near, atol=1e-10)


@pytest.fixture
def pair(stock, kind):
    return stock(kind, "longitude"), stock(kind)


def gradients(model, ids, **inputs):
    labels = ids.masked_fill(inputs.get("attention_mask", torch.ones_like(ids)) == 0, -100)
    loss = model.train()(ids, **inputs, labels=labels).loss
    return parameter_gradients(loss, model.eval())


def test_dropout_acts_in_training_only(stock, ids):
    model = stock("llama", "longitude", attention_dropout=0.5)
    close(model(ids).logits, model(ids).logits)
    model.train()
    assert (model(ids).logits - model(ids).logits).abs().max() > 1e-3


def test_whole_and_padded_with_gradients(pair, ids, mask):
    ours, theirs = pair
    close(ours(ids).logits, theirs(ids).logits)
    close(gradients(ours, ids), gradients(theirs, ids))
    for padding in (mask, mask.flip(1)):
        real = padding.bool()
        close(ours(ids, attention_mask=padding).logits[real], theirs(ids, attention_mask=padding).logits[real])
    close(gradients(ours, ids, attention_mask=mask), gradients(theirs, ids, attention_mask=mask))


def test_sinks(stock, ids, mask):
    """gpt-oss: the same numbers and gradients, windows, padding and a cache included; documents that arguments mark."""
    ours, theirs = stock("gpt_oss", "longitude"), stock("gpt_oss")
    close(ours(ids).logits, theirs(ids).logits)
    close(gradients(ours, ids, attention_mask=mask), gradients(theirs, ids, attention_mask=mask))
    want = theirs(ids, attention_mask=mask).logits
    close(in_pieces(ours, ids, (9, 10, 17), attention_mask=mask)[mask.bool()], want[mask.bool()])
    x = ours.get_input_embeddings()(ids[:1]).detach()
    packed = ours(inputs_embeds=x, use_cache=False, seq_idx=NUMBERS, position_ids=PLACES).logits
    close(packed, torch.cat([theirs(inputs_embeds=part).logits for part in x.split([7, 10], 1)], 1))
    with torch.no_grad():
        for layer in ours.model.layers:
            layer.self_attn.sinks.fill_(-1e4)
    assert (ours(ids).logits - theirs(ids).logits).abs().max() > 1e-2


def test_sinks_stay_the_models_with_another_encoding(stock, ids):
    """Its own rotation put back is the same model; a sink of ours is one more."""
    model, rope = stock("gpt_oss"), {"name": "rope", "layout": "half", "angle_dtype": "float32"}
    want = model(ids).logits
    longitude.hf.set_positions(model, rope)
    near(model(ids).logits, want, 1e-5)
    longitude.hf.set_positions(model, [rope, "sink"])
    assert (model(ids).logits - want).abs().max() > 1e-3


GEMMA = {"num_key_value_heads": 2, "head_dim": 4, "sliding_window": 5, "attn_logit_softcapping": 0.5}


def test_a_softcap_is_the_models(stock, ids, mask):
    """As in Gemma 2, against the attention of transformers that has one; whole, padded and with a cache."""
    ours, theirs = (stock("gemma2", name, **GEMMA) for name in ("longitude", "eager"))
    rows = zip(ids, mask.bool(), strict=True)  # of padding in float64 theirs makes NaN
    want = torch.cat([theirs(row[real][None]).logits[0] for row, real in rows])
    near(ours(ids, attention_mask=mask).logits[mask.bool()], want, 1e-6)
    near(in_pieces(ours, ids, (9, 10, 17), attention_mask=mask)[mask.bool()], want, 1e-6)
    uncapped = stock("gemma2", "longitude", **GEMMA | {"attn_logit_softcapping": None})
    assert (uncapped(ids, attention_mask=mask).logits[mask.bool()] - want).abs().max() > 1e-4
    longitude.hf.set_positions(ours, {"name": "rope", "layout": "half", "angle_dtype": "float32"})
    near(ours(ids, attention_mask=mask).logits[mask.bool()], want, 1e-6)


# ---- documents -------------------------------------------------------------------------------------------------------
ENDS = torch.tensor([0, 7, 17], dtype=torch.int32)
PLACES = torch.cat([torch.arange(7), torch.arange(10)])[None]
NUMBERS = torch.tensor([[0] * 7 + [1] * 10], dtype=torch.int32)
CUTS = {"cu_seq_lens_q": ENDS, "cu_seq_lens_k": ENDS}
MARKS = {
    "positions": {"position_ids": PLACES},
    "ends": {**CUTS, "max_length_q": 10, "max_length_k": 10},
    "all": {**CUTS, "position_ids": PLACES, "seq_idx": NUMBERS},
    "numbers": {"seq_idx": NUMBERS},
    "numbers and a mask": {"seq_idx": NUMBERS, "attention_mask": torch.ones(1, 17)},
}


@pytest.mark.parametrize("name", MARKS)
def test_documents(name, pair, ids):
    """Marked by positions that start over, as transformers finds them, or by arguments: each as alone, gradients too."""
    ours, theirs = pair
    inputs, marks = ours.get_input_embeddings()(ids[:1]).detach().requires_grad_(), MARKS[name]
    packed = ours(inputs_embeds=inputs, use_cache=False, **marks).logits
    if name == "positions":
        close(packed, theirs(inputs_embeds=inputs, use_cache=False, **marks).logits)
    # Alone at the positions that they have in the row: angles are float32, and rounded differently at other positions.
    places = marks.get("position_ids", torch.arange(17)[None]).split([7, 10], 1)
    parts = zip(inputs.split([7, 10], 1), places, strict=True)
    alone = torch.cat([ours(inputs_embeds=x, position_ids=p).logits for x, p in parts], 1)
    close(packed, alone)
    close(*(torch.autograd.grad(out.cos().sum(), inputs)[0] for out in (packed, alone)))
    together = ours(inputs_embeds=inputs, attention_mask=torch.ones(1, 17)).logits
    assert (together - alone)[:, 7:].abs().max() > 1e-3


def test_marks_behind_a_cache_are_refused(stock, ids):
    model = stock("llama", "longitude")
    cache = model(ids[:1, :4]).cache
    with refused("seq_idx", "document_ids", "use_cache=False"):
        model(ids[:1], cache=cache, seq_idx=NUMBERS)


# ---- caches, windows, weights ----------------------------------------------------------------------------------------
@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
def test_decoding_with_the_cache(mode, pair, ids, mask):
    """Without gradients the layers of a step share what the first one chose."""
    ours, theirs = pair
    with mode():
        pieces = in_pieces(ours, ids, (9, 14, 15, 16, 17), attention_mask=mask)
    close(pieces[mask.bool()], theirs(ids, attention_mask=mask).logits[mask.bool()])


@pytest.mark.one_in(5)
@pytest.mark.parametrize(
    "options",
    [{}, {"num_beams": 3}, {"use_cache": False}, {"cache_implementation": "static", "disable_compile": True}],
    ids=["greedy", "beams", "no cache", "static cache"],
)
def test_generation(pair, ids, mask, options):
    ours, theirs = pair
    options = {"attention_mask": mask, "max_new_tokens": 9, "min_new_tokens": 9, "do_sample": False, **options}
    assert ours.generate(ids, **options).tolist() == theirs.generate(ids, **options).tolist()


@pytest.mark.parametrize("asked_by", ["call", "config"])
@torch.no_grad()
def test_weights_are_those_of_eager(asked_by, stock, ids):
    """Eager rounds its softmax to float32. transformers lets a config ask only before "longitude" is set, and would return
    an empty tuple."""
    ours, theirs = (stock("llama", "eager", output_attentions=asked_by == "config") for _ in range(2))
    ours.set_attn_implementation("longitude")
    asked = {"output_attentions": True} if asked_by == "call" else {}
    got, want = ours(ids, **asked).attentions, theirs(ids, **asked).attentions
    assert len(got) == len(want) == 2
    near(got, want, 1e-5)
    assert ours(ids, output_attentions=False).attentions is None


def test_an_encoder_sees_both_sides(stock, ids, mask):
    ours, theirs = (stock("bert", backend)(ids, attention_mask=mask).logits for backend in ("longitude", "sdpa"))
    close(ours[mask.bool()], theirs[mask.bool()])


@pytest.mark.parametrize("kind", ["bart", "t5"])
@pytest.mark.parametrize("length", [9, 17, 23])
def test_cross_attention_reads_all_tokens_of_the_encoder(kind, length, ids, mask):
    """With fewer target tokens than source tokens, as many, and more; T5 adds a bias of its own to the scores."""
    more = {"bart": {"d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "encoder_ffn_dim": 24, "decoder_ffn_dim": 24,
                     "encoder_attention_heads": 4, "decoder_attention_heads": 4, "init_std": 0.4},
            "t5": {"d_model": 16, "d_kv": 4, "d_ff": 24, "num_layers": 2, "num_heads": 4, "initializer_factor": 2.0}}  # fmt: skip
    options = {"vocab_size": 50, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, "decoder_start_token_id": 1}
    config = AutoConfig.for_model(kind, **options, **more[kind])
    make = AutoModelForSeq2SeqLM.from_config
    ours, theirs = (
        make(copy.deepcopy(config), attn_implementation=name).double().eval() for name in ("longitude", "sdpa")
    )
    ours.load_state_dict(theirs.state_dict())
    target = torch.randint(3, 50, (2, length), generator=torch.Generator().manual_seed(2))
    inputs = {"input_ids": ids, "attention_mask": mask, "decoder_input_ids": target}
    want, got = theirs(**inputs).logits, ours(**inputs).logits
    close(got, want)
    close(*(parameter_gradients(x.cos().sum(), model) for x, model in ((got, ours), (want, theirs))))
    options = {"attention_mask": mask, "max_new_tokens": 7, "min_new_tokens": 7, "do_sample": False}
    assert ours.generate(ids, **options).tolist() == theirs.generate(ids, **options).tolist()


def test_no_square_is_made(stock):
    """The mask that layers are handed holds nothing of L x L, whatever it forbids."""
    config, length = stock("mistral", "longitude").config, 4096
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


def test_a_layer_that_sets_causality_and_window_itself():
    """Where the model makes no mask; is_causal of the call counts more than the layer's."""
    layer = torch.nn.Module()
    q = k = v = torch.randn(1, 2, 9, 4, dtype=torch.float64)
    for causal, window, mask in ((None, 3, lg.Window(3)), (None, None, lg.Causal()), (False, None, lg.NoMask())):
        out, weights = stock_attention(layer, q, k, v, None, scaling=0.5, sliding_window=window, is_causal=causal)
        close(out, lg.attend(q, k, v, mask=mask, scale=0.5).transpose(1, 2))
        assert weights is None
    layer.is_causal = False  # pyright: ignore[reportAttributeAccessIssue]
    close(stock_attention(layer, q, k, v, None)[0], lg.attend(q, k, v, mask=lg.NoMask()).transpose(1, 2))


def test_chosen_keys_that_the_mask_hides_stay_hidden():
    """Queries choose their first key, and others that may be after them."""
    q, k, v = heads(9)
    chosen = torch.stack([torch.randperm(9) for _ in range(2 * 9)]).view(2, 9, 9)[..., :4]
    chosen[..., 0] = 0
    allowed = torch.zeros(2, 9, 9, dtype=torch.bool).scatter(2, chosen, True).tril()
    out, _ = stock_attention(torch.nn.Module(), q, k, v, None, scaling=0.5, indices=chosen)
    scores = (0.5 * q @ k.mT.repeat_interleave(q.shape[1] // k.shape[1], 1)).masked_fill(~allowed[:, None], -math.inf)
    close(out.transpose(1, 2), scores.softmax(-1) @ v.repeat_interleave(q.shape[1] // k.shape[1], 1))


# ---- chunks --------------------------------------------------------------------------------------------------------------
in_float32 = partial(near, atol=2e-6)
"""Llama 4 rotates in float32."""


def test_chunks(stock, ids, mask):
    """Llama 4's text model: chunks behind padding, in documents, with a cache that drops what is behind a chunk; gradients."""
    ours, theirs = stock("llama4_text", "longitude"), stock("llama4_text")
    in_float32(ours(ids).logits, theirs(ids).logits)
    in_float32(gradients(ours, ids), gradients(theirs, ids))
    real = mask.bool()
    want = theirs(ids, attention_mask=mask).logits
    in_float32(ours(ids, attention_mask=mask).logits[real], want[real])
    in_float32(in_pieces(ours, ids, (9, 10, 11, 17), attention_mask=mask)[real], want[real])
    for places in (PLACES, PLACES.expand(2, -1)):
        x = ids[: len(places)]
        in_float32(*(model(x, position_ids=places, use_cache=False).logits for model in (ours, theirs)))


@pytest.mark.skipif(
    not hasattr(masking_utils, "remap_positions_for_packed_sequence"),
    reason="this transformers counts chunks from the row's begin, and we have its masks: test_chunks",
)
def test_chunks_in_documents_that_arguments_mark(stock, ids):
    """They are counted in each, as where position_ids start over."""
    model = stock("llama4_text", "longitude")
    for layer in model.model.layers:
        layer.self_attn.attn_temperature_tuning = False  # transformers counts its steps from the row's begin
    x = model.get_input_embeddings()(ids[:1]).detach()
    packed = model(inputs_embeds=x, use_cache=False, seq_idx=NUMBERS, position_ids=PLACES).logits
    in_float32(packed, torch.cat([model(inputs_embeds=part).logits for part in x.split([7, 10], 1)], 1))


# ---- masks of a user's own ----------------------------------------------------------------------------------------------
def own_mask(rows, keys):
    """Two trees of tokens behind a common trunk, the second row padded on the left: bool [2, 1, rows, keys], the last rows."""
    token = torch.arange(keys)
    branch = torch.where(token < 6, -1, token % 2)
    seen = (token[:, None] >= token) & ((branch[:, None] == branch) | (branch == -1))
    both = torch.stack([seen, seen & (token >= 3) | (token[:, None] == token)])
    return both[:, None, -rows:]


@pytest.mark.parametrize("form", ["bool", "lowest", "inf"])
def test_a_mask_of_four_dimensions(form, pair, ids):
    """As sdpa takes it, whatever windows the model has; read once for all layers; with its gradients and a cache."""
    ours, theirs = pair

    def mask(rows, keys):
        seen = own_mask(rows, keys)
        hidden = {"bool": None, "lowest": torch.finfo(torch.float64).min, "inf": -torch.inf}[form]
        return seen if hidden is None else torch.zeros(seen.shape, dtype=torch.float64).masked_fill(~seen, hidden)

    whole = {"attention_mask": mask(17, 17), "position_ids": (torch.arange(17) % 9)[None].expand(2, -1)}
    close(ours(ids, **whole).logits, theirs(ids, **whole).logits)
    close(*(parameter_gradients(model(ids, **whole).logits.square().sum(), model) for model in pair), rtol=1e-9)
    caches = [DynamicCache(), DynamicCache()]
    for start, stop in ((0, 9), (9, 10), (10, 17)):
        step = {"attention_mask": mask(stop - start, stop), "position_ids": whole["position_ids"][:, start:stop]}
        close(*(model(ids[:, start:stop], cache=cache, **step).logits for model, cache in zip(pair, caches)))
    assert (ours(ids).logits - ours(ids, **whole).logits).abs().max() > 1e-2


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
def test_a_mask_that_changes_is_read_again(mode, stock, ids):
    ours, theirs = stock("llama", "longitude"), stock("llama")
    with mode():
        mask = own_mask(17, 17).clone()
        for _ in range(2):
            close(ours(ids, attention_mask=mask).logits, theirs(ids, attention_mask=mask).logits)
            mask[:, :, 9:, 2] = False


def test_continuous_batching_is_refused_at_the_call(stock, ids):
    with refused("generate_batch", "'longitude'"):
        stock("llama", "longitude").generate_batch(ids.tolist(), max_new_tokens=2)


@pytest.mark.parametrize("past", [0, 9])
def test_a_mask_longer_than_the_tokens_is_cut_as_by_sdpa(past, stock, ids, mask):
    """A mask made once for a whole generation: what stands for tokens that are still to come is not read."""
    longer = torch.cat([mask, torch.tensor([[1, 0, 1]] * len(mask))], 1)
    logits = []
    for backend in ("longitude", "sdpa"):
        model = stock("llama", backend)
        cache = DynamicCache(config=model.config)
        if past:
            model(ids[:, :past], attention_mask=mask[:, :past], cache=cache)
        logits.append(model(ids[:, past:], attention_mask=longer, cache=cache).logits)
    real = mask[:, past:].bool()
    close(logits[0][real], logits[1][real])


# ---- refusals --------------------------------------------------------------------------------------------------------
DENSE = torch.ones(2, 1, 17, 17, dtype=torch.bool)


UNSUPPORTED = {
    "by head": ({"attention_mask": DENSE.expand(2, 4, 17, 17)}, ("attention_mask", "[17, 17]", "[2, 1, 17, 17]")),
    "bias": ({"attention_mask": DENSE * 1.5}, ("attention_mask", "[17, 17]", "[2, 1, 17, 17]", "0")),
    "keys": ({"attention_mask": DENSE[..., 1:]}, ("attention_mask", "[17, 17]")),
    "two marks": (
        {"attention_mask": DENSE[:1], "seq_idx": torch.arange(34).view(2, 17) // 9}, ("seq_idx", "[B, 1, L, keys]"),
    ),
    "short mask": ({"attention_mask": torch.ones(2, 9)}, ("attention_mask", "[2, 17]")),
    "head mask": ({"head_mask": torch.ones(4)}, ("head_mask",)),
    "sinks": ({"s_aux": torch.ones(3)}, ("s_aux", "[4]", "[3]")),
    "rows with common ends": ({"cu_seq_lens_q": ENDS}, ("cu_seq_lens_q", "1", "2")),
    "marks against positions": (
        {"input_ids": NUMBERS + 3, "use_cache": False, "cu_seq_lens_q": ENDS, "position_ids": PLACES.roll(1)}, ("position_ids",),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", UNSUPPORTED)
def test_what_it_cannot_honour_is_refused(name, stock, ids):
    inputs, reason = UNSUPPORTED[name]
    with refused(*reason):
        stock("llama", "longitude")(**{"input_ids": ids} | inputs)


@pytest.mark.parametrize("name", sorted(REFUSED | dict.fromkeys(("position_bias", "indices"))))
def test_what_would_change_the_attention_is_refused(name):
    """Or has another shape than this attention supports."""
    q = k = v = torch.randn(1, 2, 9, 4)
    with refused(name):
        stock_attention(torch.nn.Module(), q, k, v, None, **{name: torch.ones(2)})
    stock_attention(torch.nn.Module(), q, k, v, None, **{name: None})


def test_what_their_attention_reads_is_known():
    """Each argument of the functions that ours replaces is done or refused; any other is not attention's business."""
    done = {*signature(stock_attention).parameters, "is_causal"}
    functions = [sdpa_attention_forward, flash_attention_forward, flex_attention_forward]
    read = {name for function in functions for name in signature(function).parameters}
    assert {"scaling", "softcap", "position_bias"} <= read
    assert read <= done | REFUSED.keys()


def test_a_mask_of_another_kind_is_refused(stock, ids):
    """Images that attend to themselves both ways, as some models have."""
    config, blocks = stock("llama", "longitude").config, torch.zeros_like(ids)
    with refused("'or_masks'"):
        create_causal_mask(config, torch.empty(2, 17, 0), None, None, block_sequence_ids=blocks)


# ---- what a model adds to its scores -----------------------------------------------------------------------------------
def padded_and_windowed(batch, length):
    valid = torch.arange(length) >= 7 * torch.arange(batch)[:, None]
    return lg.Causal() & lg.Window(40) & lg.Padding(valid)


@pytest.mark.parametrize("length", [20, 300])
@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("masked", [False, True])
def test_a_bias_is_added_to_the_scores(length, rows, masked):
    """softmax of scale q.k + bias, in each form of the bias's batch, with all gradients."""
    generator = torch.Generator().manual_seed(3)
    draw = partial(torch.randn, generator=generator, dtype=torch.float64)
    q, k, v = draw(2, 4, length, 8), draw(2, 2, length, 8), draw(2, 2, length, 8)
    bias = draw(rows, 4, length, length)
    inputs = [x.requires_grad_() for x in (q, k, v, bias)]
    mask = padded_and_windowed(2, length) if masked else lg.Causal()
    order = torch.arange(length)
    allowed = mask.allowed(order, order)
    scores = q @ k.repeat_interleave(2, 1).mT / 8 + bias
    weights = scores.masked_fill(~allowed, -1e300).softmax(-1) * allowed  # zeros where all keys are hidden
    want = (weights @ v.repeat_interleave(2, 1)).transpose(1, 2)
    module, seen = torch.nn.Module(), StockMask(mask, length)
    options = {"scaling": 1 / 8, "position_bias": bias}
    got, _ = stock_attention(module, q, k, v, seen, **options)
    close(got, want)
    close(*(torch.autograd.grad(x.cos().sum(), inputs) for x in (got, want)))
    with torch.no_grad():
        close(stock_attention(module, q, k, v, seen, **options)[0], want)
        of_last = {"scaling": 1 / 8, "position_bias": bias[:, :, -1:], "output_attentions": True}
        alone, last = stock_attention(module, q[:, :, -1:], k, v, seen, **of_last)
        close(alone, want[:, -1:])
        close(last, weights[:, :, -1:])


def test_a_bias_of_another_shape_is_refused():
    q = torch.randn(2, 4, 9, 8)
    with refused("position_bias", "[2, 4, 9, 9]", "[3, 4, 9, 9]"):
        stock_attention(torch.nn.Module(), q, q, q, None, position_bias=torch.randn(3, 4, 9, 9))
