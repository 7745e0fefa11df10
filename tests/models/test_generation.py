"""generate(): with the cache as without, batched as alone, continued as never stopped, in every kind of cache."""

import pytest
import torch
from transformers import DynamicCache

import longitude as lg
from longitude.attention.cache import LongitudeCacheLayer
from tests.models.conftest import mixer_spec
from tests.support import refused

NEW = 9


@pytest.fixture
def build(build):
    """Models that do not fall into repeating one token, which would hide anything: untied, and attention is loud."""

    def make(encoding="auto", *kind, **options):
        model = build(encoding, *kind, tie_word_embeddings=False, **options)
        for layer in () if kind else model.model.layers:
            if isinstance(layer.mixer, lg.MultiHeadAttention):
                layer.mixer.q_proj.weight.data *= 2
                layer.mixer.o_proj.weight.data *= 8
        return model

    return make


def generate(model, x, new=NEW, **options):
    """Exactly that many new tokens after x."""
    options = {"do_sample": False, "attention_mask": torch.ones_like(x), **options}
    return model.generate(x, max_new_tokens=new, min_new_tokens=new, **options)


MODELS = [
    *({"encoding": spec} for spec in ("t5", "path_fox", "abacus", "self_extend")),
    *({"encoding": "auto", "mixer": mixer_spec(name)} for name in ("window", "hierarchical", "latent", "mamba2")),
    {"encoding": "auto", "mixers": ["mamba", "attention"]},
]
"""One of each way to act and to cache; the laws hold every encoding and mixer in models, whole and in parts."""


@pytest.mark.one_in(8)
@pytest.mark.parametrize("options", MODELS, ids=str)
@torch.no_grad()
def test_with_the_cache_as_without(options, build, ids):
    """Greedy is the argmax of whole passes; sampling and beams take the cache along."""
    model, x = build(**options), ids(2, 7)
    expected = x
    for _ in range(NEW):
        best = model(expected, use_cache=False).logits[:, -1].argmax(-1)
        expected = torch.cat([expected, best[:, None]], 1)
    for ways in ({}, {"use_cache": False}, {"cache": DynamicCache()}):
        assert torch.equal(generate(model, x, **ways), expected)
    assert len(set(expected[:, 7:].flatten().tolist())) > 2
    for ways in ({"do_sample": True, "temperature": 1.5}, {"num_beams": 3, "num_return_sequences": 3}):
        sequences = []
        for use_cache in (True, False):
            torch.manual_seed(3)
            sequences.append(generate(model, x, use_cache=use_cache, **ways))
        assert torch.equal(*sequences)


@pytest.mark.one_in(18)
@pytest.mark.parametrize("beams", [1, 3])
@pytest.mark.parametrize("options", MODELS, ids=str)
def test_a_left_padded_batch_is_its_rows_alone(options, beams, build, ids):
    model, x = build(**options), ids(3, 8)
    mask = torch.arange(8) >= torch.tensor([[0], [3], [6]])
    padded = x.masked_fill(~mask, 0)
    together = generate(model, padded, attention_mask=mask.long(), num_beams=beams)
    for row, first in enumerate((0, 3, 6)):
        alone = generate(model, x[row : row + 1, first:], num_beams=beams)
        assert torch.equal(together[row, first:], alone[0])


@pytest.mark.one_in(3)
@pytest.mark.parametrize("spec", ["learned", "path_fox", ["rope", "fox"]], ids=str)
def test_continuing_from_a_returned_cache(spec, build, ids):
    """The tokens that one run would have given; also after a turn of the user's."""
    model, x = build(spec), ids(2, 7)
    part = generate(model, x, new=4, return_dict_in_generate=True)
    assert part.cache.get_seq_length() == 10  # the last token was given out, but not yet read
    options = {"cache": part.cache, "return_dict_in_generate": True}
    more = generate(model, part.sequences, new=4, **options)
    assert torch.equal(more.sequences, generate(model, x, new=8))
    longer = torch.cat([more.sequences, ids(2, 5, seed=9)], 1)
    assert torch.equal(generate(model, longer, cache=more.cache), generate(model, longer))


@pytest.mark.parametrize("new", [1, 21])
def test_a_mask_is_of_all_tokens(new, build, ids):
    """Of the cached ones and these, or of these where they are all: transformers takes any other for one of them."""
    model, x = build("alibi"), ids(1, 21)
    want, newest = generate(model, x), x[:, -new:]

    def masked(tokens):
        cache = model(x[:, :20], use_cache=True).cache
        return generate(model, newest, cache=cache, attention_mask=None if tokens is None else x.new_ones(1, tokens))

    assert torch.equal(masked(21)[:, -NEW:], want[:, -NEW:])
    if new == 21:
        assert torch.equal(masked(None), want)
    for tokens in (1, 20, 22, 35, *[None] * (new == 1)):
        with refused("attention_mask", str(20 + new), "20"):
            masked(tokens)
    with refused("attention_mask", "[1, 21]"):
        generate(model, x, attention_mask=x.new_ones(1, 23))


def test_a_mask_of_a_target_is_of_all_its_tokens(build, ids):
    model = build("alibi", lg.LongitudeForSeq2SeqLM, bos_token_id=1)
    options = {"decoder_input_ids": ids(1, 5), "do_sample": False, "max_new_tokens": 2}
    with refused("decoder_attention_mask", "[1, 5]"):
        model.generate(ids(1, 9), **options, decoder_attention_mask=torch.ones(1, 7))
    assert model.generate(ids(1, 9), **options, decoder_attention_mask=torch.ones(1, 5)).shape == (1, 8)  # and BOS


def test_what_equals_the_padding_inside_of_a_prompt_needs_a_mask(build, ids):
    """transformers makes a mask of pad_token_id where none is given: right for padding at one side alone."""
    model, x = build("alibi"), ids(1, 9)
    x[0, 4] = 0
    options = {"max_new_tokens": 3, "do_sample": False, "pad_token_id": 0}
    with refused("pad_token_id", "0", "attention_mask"):
        model.generate(x, **options)
    assert model.generate(x, attention_mask=torch.ones_like(x), **options) is not None
    padded = torch.cat([x.new_zeros(1, 2), ids(1, 9)], 1)
    wanted = model.generate(ids(1, 9), **options)
    assert torch.equal(model.generate(padded, **options)[:, -3:], wanted[:, -3:])


def test_guesses_of_an_assistant_are_taken_back(build, ids, monkeypatch):
    """Wrong ones are cropped off the cache; an assistant and a model whose cache cannot do that are refused."""
    model, x, cropped, crop = build("shaw"), ids(1, 7), [], LongitudeCacheLayer.crop
    assistant, whole = build("nope"), generate(model, x)
    monkeypatch.setattr(LongitudeCacheLayer, "crop", lambda layer, n: cropped.append(n) or crop(layer, n))
    assert torch.equal(generate(model, x, assistant_model=assistant), whole) and any(cropped)
    hybrids = [build("auto", mixers=["attention", other]) for other in ("mamba", "hierarchical")]
    for stateful in (build("fox"), build("nope", short_conv=["kv"]), *hybrids):
        with refused("LongitudeForCausalLM"):
            generate(stateful, x, assistant_model=assistant)
        with refused("assistant_model", "LongitudeForCausalLM"):
            generate(assistant, x, assistant_model=stateful)


# ---- kinds of caches -------------------------------------------------------------------------------------------------
@pytest.mark.usefixtures("offloading")
@pytest.mark.parametrize("mixers", [["mamba2", {"name": "window", "size": 5}], ["latent", "hierarchical"]], ids=str)
def test_offloaded_caches(mixers, build, ids, monkeypatch):
    """The same text, and every layer leaves and comes back once for each call; a static cache is refused."""
    model, x, moves = build("auto", mixers=mixers), ids(2, 7), []
    wanted = generate(model, x)
    with refused("cache", "DynamicCache", "StaticCache", "cache_implementation"):
        generate(model, x, cache_implementation="static")

    def watched(layer, name):
        move = getattr(layer, name)
        monkeypatch.setattr(layer, name, lambda self: (moves.append(name), move(self))[1])

    for layer in {type(make()) for make in model.model.cache_layers}:
        watched(layer, "prefetch")
        watched(layer, "offload")
    assert torch.equal(generate(model, x, cache_implementation="offloaded"), wanted)
    assert moves == ["prefetch", "offload"] * 2 * NEW
