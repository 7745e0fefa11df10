"""The encoder-decoder: step by step = whole, position stays in its place, generate(), the config."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from transformers import DynamicCache, EncoderDecoderCache

from longitude.attention.mixer import list_mixers
from longitude.models import LongitudeForSeq2SeqLM
from tests.models.conftest import OF_DECODERS, mixer_spec
from tests.support import close as near, parameter_gradients, refused

close = partial(near, atol=1e-10)

SPECS = [*OF_DECODERS, ["rope", "t5"]]
CAUSAL_ONLY = "cope fox path path_fox xpos rerope leaky_rerope self_extend dual_chunk".split()
POST = {"norm": "layernorm", "norm_position": "post", "hidden_act": "relu", "mlp_bias": True, "attention_bias": True}


@pytest.fixture
def build(build):
    """Models that do not fall into repeating one token, which would hide anything: untied, with loud cross-attention."""

    def make(encoding="rope", **options):
        encoder = {"encoder_encoding": "alibi"} if encoding in CAUSAL_ONLY else {}
        defaults = {"tie_word_embeddings": False, "bos_token_id": 1, "eos_token_id": 2}
        model = build(encoding, LongitudeForSeq2SeqLM, **defaults | encoder | options)
        for block in model.decoder.layers:
            block.cross.q_proj.weight.data *= 2
            block.cross.o_proj.weight.data *= 6
        return model

    return make


@pytest.fixture
def pair(ids):
    """pair(source, target, batch) -> tokens of a source and of a target, none of them special."""

    def make(source=11, target=9, batch=2):
        return ids(batch, source).clamp(min=3), ids(batch, target, seed=2).clamp(min=3)

    return make


def generate(model, x, new=8, **options):
    """The start and exactly `new` tokens after it, by argmax unless options choose otherwise."""
    return model.generate(x, max_new_tokens=new, min_new_tokens=new, **{"do_sample": False, **options})


MASK = torch.arange(11) < torch.tensor([[11], [7]])


def in_chunks(model, x, y):
    """Logits of the target in chunks and token by token, and the last cache."""
    encoded, cache, chunks = model.encoder(x, attention_mask=MASK), None, []
    for chunk in y.split((5, 1, 1, 7), 1):
        inputs = {"encoder_outputs": encoded, "attention_mask": MASK, "decoder_input_ids": chunk}
        out = model(**inputs, cache=cache, use_cache=True)
        cache = out.cache
        chunks.append(out.logits)
    return torch.cat(chunks, 1), cache


@pytest.mark.one_in(10)
@pytest.mark.parametrize("spec", SPECS, ids=str)
@torch.no_grad()
def test_chunks_are_the_whole(spec, build, pair):
    """The source is read once, and its keys are made once in each block."""
    model, (x, y) = build(spec), pair(target=14)
    whole = model(x, attention_mask=MASK, decoder_input_ids=y, use_cache=False)
    assert whole.cache is None and model(x, labels=y).cache is None
    read: list[str] = []
    model.encoder.register_forward_hook(lambda *_: read.append("source"))
    for block in model.decoder.layers:
        block.cross.k_proj.register_forward_hook(lambda *_: read.append("key"))
        block.cross.v_proj.register_forward_hook(lambda *_: read.append("value"))
    chunks, cache = in_chunks(model, x, y)
    close(chunks, whole.logits)
    assert read == ["source", *["key", "value"] * 2]
    assert cache.get_seq_length() == 14 and cache.cross_attention_cache.get_seq_length() == 11


@pytest.mark.one_in(12)
@pytest.mark.parametrize("name", list_mixers())
@torch.no_grad()
def test_a_decoder_of_any_mixer(name, build, pair):
    """Whole = chunks = generate()."""
    sizes = {"num_attention_heads": 2, "num_key_value_heads": 2}
    model, (x, y) = build("sinusoidal", mixer=mixer_spec(name), **sizes), pair(target=14)
    assert all(type(block.mixer).bidirectional for block in model.encoder.layers)
    whole = model(x, attention_mask=MASK, decoder_input_ids=y, use_cache=False).logits
    close(in_chunks(model, x, y)[0], whole)
    for beams in (1, 3):
        options = {"num_beams": beams, "attention_mask": MASK.long()}
        assert torch.equal(generate(model, x, **options), generate(model, x, use_cache=False, **options))


@pytest.mark.parametrize("spec", ["rope", "alibi", "learned", "path_fox", ["rope", "t5"]], ids=str)
def test_padding_of_the_target_changes_nothing(spec, build, pair):
    """Labels of -100 at the end, and targets padded on the left, cached chunks included."""
    model, (x, y) = build(spec), pair(batch=1)
    plain = model(x, labels=y)
    out = model(x, labels=F.pad(y, (0, 4), value=-100))
    close(out.loss, plain.loss)
    close(out.logits[:, :9], plain.logits)
    inputs = model.prepare_decoder_input_ids_from_labels(y)
    padded, mask = F.pad(inputs, (3, 0), value=5), F.pad(torch.ones_like(inputs), (3, 0))
    cache, chunks = None, []
    for start, stop in ((0, 6), (6, 12)):
        inputs = {"decoder_input_ids": padded[:, start:stop], "decoder_attention_mask": mask[:, :stop]}
        out = model(x, **inputs, cache=cache, use_cache=True)
        cache = out.cache
        chunks.append(out.logits)
    close(torch.cat(chunks, 1)[:, 3:], plain.logits)
    close(model(x, decoder_input_ids=padded, decoder_attention_mask=mask).logits[:, 3:], plain.logits)


# ---- position --------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("spec", ["rope", "alibi", "t5", "shaw", "transformer_xl"])
@torch.no_grad()
def test_cross_attention_has_no_positions(spec, build, pair):
    """Where the encoding knows offsets alone, moving all of the source or all of the target changes nothing."""
    model, (x, y) = build(spec), pair()
    plain = model(x, decoder_input_ids=y).logits
    close(model(x, decoder_input_ids=y, position_ids=torch.arange(11) + 20).logits, plain)
    close(model(x, decoder_input_ids=y, decoder_position_ids=torch.arange(9) + 20).logits, plain)
    reordered = model(x, decoder_input_ids=y, position_ids=torch.arange(11).flip(0)).logits
    assert (reordered - plain).abs().max() > 1e-3 or spec == "alibi"  # whose mirror image is the same


def test_each_stack_has_the_encoding_it_needs(build):
    """T5: buckets for both sides in the encoder, for the past in the decoder, a table each."""
    model = build("t5")
    assert model.encoder.encodings[0].bidirectional and not model.decoder.encodings[0].bidirectional
    assert not model.config.encoding["bidirectional"] and model.config.encoder_encoding["bidirectional"]
    learned = build("learned")
    assert learned.encoder.encodings[0].table is not learned.decoder.encodings[0].table
    mixed = build("fox", encoder_encoding={"name": "t5", "num_buckets": 8})
    assert mixed.encoder.encodings[0].num_buckets == 8 and mixed.encoder.encodings[0].bidirectional
    by_layer = build("auto", encodings=["alibi", "t5"])
    assert [type(member).__name__ for member in by_layer.encoder.encodings] == ["ALiBi", "T5Bias"]


# ---- layers, labels, caches ------------------------------------------------------------------------------------------
def test_gradients_reach_every_layer(build, pair):
    model, (x, y) = build("rope", **POST), pair()
    assert not any(block.cross for block in model.encoder.layers)
    out = model(x, labels=y)
    assert all(g.abs().max() > 0 for g in parameter_gradients(out.loss, model))  # nothing is left out


def test_labels_become_inputs_one_later(build, pair):
    model, (x, y) = build(), pair()
    labels = y.clone()
    labels[1, 6:] = -100
    shifted = model.prepare_decoder_input_ids_from_labels(labels)
    assert shifted.tolist() == [[1, *y[0, :-1].tolist()], [1, *y[1, :6].tolist(), 0, 0]]
    close(model(x, labels=labels).logits, model(x, decoder_input_ids=shifted).logits)
    for options, start in (({"decoder_start_token_id": 7}, 7), ({"bos_token_id": None}, 0)):
        assert generate(build(**options), x)[:, 0].tolist() == [start, start]
    last = build(pad_token_id=None, bos_token_id=None, decoder_start_token_id=9)
    assert last.prepare_decoder_input_ids_from_labels(labels)[1].tolist() == [9, *y[1, :6].tolist(), 9, 9]
    nothing = build(pad_token_id=None, bos_token_id=None, eos_token_id=None)
    with refused("decoder_start_token_id", "bos_token_id", "pad_token_id"):
        nothing(x, labels=y)


@torch.no_grad()
def test_a_cache_of_another_source_is_refused(build, pair):
    model, (x, y) = build(), pair()
    cache = model(x, decoder_input_ids=y, use_cache=True).cache
    with refused("cache", "[2, 2, 5, 4]", "[2, 2, 11, 4]"):
        model(x[:, :5], decoder_input_ids=y[:, :1], cache=cache)
    with refused("cache", "3", "2"):
        build(num_hidden_layers=3)(x, decoder_input_ids=y, cache=cache)


# ---- generate() ------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("spec", ["t5", pytest.param("path_fox", marks=pytest.mark.slow)])
@torch.no_grad()
def test_with_the_cache_as_without(spec, build, pair):
    """Greedy is the argmax of whole passes; beams change places, and take both caches along."""
    model, (x, _) = build(spec), pair()
    expected = torch.full((2, 1), 1)
    for _ in range(8):
        logits = model(x, decoder_input_ids=expected, use_cache=False).logits[:, -1]
        logits[:, 2] = -torch.inf  # generate() may not stop before min_new_tokens
        expected = torch.cat([expected, logits.argmax(-1, keepdim=True)], 1)
    assert torch.equal(generate(model, x), expected)
    for options in ({}, {"do_sample": True, "temperature": 1.5}, {"num_beams": 3, "num_return_sequences": 3}):
        sequences = []
        for use_cache in (True, False):
            torch.manual_seed(3)
            sequences.append(generate(model, x, use_cache=use_cache, **options))
        assert torch.equal(*sequences)


@torch.no_grad()
def test_generate_continues_from_what_is_given(build, pair):
    """A prefix of the target; a source encoded before; a returned cache; all with the same tokens."""
    model, (x, _) = build("alibi"), pair()
    whole = generate(model, x)
    assert torch.equal(generate(model, x, new=5, decoder_input_ids=whole[:, :4]), whole)
    assert torch.equal(generate(model, None, encoder_outputs=model.encoder(x)), whole)
    part = generate(model, x, new=4, return_dict_in_generate=True)
    more = generate(model, x, new=4, decoder_input_ids=part.sequences, cache=part.cache)
    assert torch.equal(more, whole)
    cache = EncoderDecoderCache(DynamicCache(), DynamicCache())
    assert torch.equal(generate(model, x, cache=cache), whole)
