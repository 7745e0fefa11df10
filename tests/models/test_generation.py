"""generate(): with the cache as without, batched as alone, continued as never stopped."""

import pytest
import torch
from transformers import DynamicCache

import longitude as lg
from longitude.attention.cache import LongitudeCacheLayer

SPECS = [*lg.list_encodings(), ["rope", "fox"]]
NEW = 9


@pytest.fixture
def build(build):
    """Models that do not fall into repeating one token, which would hide anything: untied, and attention is loud."""

    def make(encoding, **options):
        model = build(encoding, tie_word_embeddings=False, **options)
        for layer in model.model.layers:
            layer.mixer.q_proj.weight.data *= 2
            layer.mixer.o_proj.weight.data *= 8
        return model

    return make


def generate(model, x, **options):
    """Exactly NEW tokens after x."""
    mask = options.pop("attention_mask", torch.ones_like(x))
    return model.generate(
        x, attention_mask=mask, max_new_tokens=NEW, min_new_tokens=NEW, **{"do_sample": False, **options}
    )


@pytest.mark.one_in(4)
@pytest.mark.parametrize("spec", SPECS, ids=str)
@torch.no_grad()
def test_greedy_is_the_argmax_of_whole_passes(spec, build, ids):
    model, x = build(spec), ids(2, 7)
    expected = x
    for _ in range(NEW):
        best = model(expected, use_cache=False).logits[:, -1].argmax(-1)
        expected = torch.cat([expected, best[:, None]], 1)
    assert torch.equal(generate(model, x), expected)
    assert torch.equal(generate(model, x, use_cache=False), expected)
    assert len(set(expected[:, 7:].flatten().tolist())) > (1 if "kerple" in str(spec) else 2)


@pytest.mark.one_in(7)
@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_sampling_and_beams_with_the_cache_as_without(spec, build, ids):
    model, x = build(spec), ids(2, 7)
    for options in (
        {"do_sample": True, "temperature": 1.5},
        {"num_beams": 4},
        {"num_beams": 3, "num_return_sequences": 3},
    ):
        outs = []
        for use_cache in (True, False, True):
            torch.manual_seed(3)
            outs.append(generate(model, x, use_cache=use_cache, **options))
        assert torch.equal(outs[0], outs[1])
        assert torch.equal(outs[0], outs[2])
    torch.manual_seed(4)
    other = generate(model, x, do_sample=True, temperature=1.5)
    torch.manual_seed(3)
    assert not torch.equal(generate(model, x, do_sample=True, temperature=1.5), other)


@pytest.mark.one_in(5)
@pytest.mark.parametrize("spec", SPECS, ids=str)
@pytest.mark.parametrize("beams", [1, 3])
def test_a_left_padded_batch_is_its_rows_alone(spec, beams, build, ids):
    model, x = build(spec), ids(3, 8)
    mask = torch.arange(8) >= torch.tensor([[0], [3], [6]])
    padded = x.masked_fill(~mask, 0)
    together = generate(model, padded, attention_mask=mask.long(), num_beams=beams)
    for row, first in enumerate((0, 3, 6)):
        alone = generate(model, x[row : row + 1, first:], num_beams=beams)
        assert torch.equal(together[row, first:], alone[0])


@pytest.mark.one_in(3)
@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_going_on_from_a_returned_cache(spec, build, ids):
    """Stop, and go on with the cache: the tokens that one run would have given; also after a turn of the user's."""
    model, x = build(spec), ids(2, 7)
    whole = model.generate(x, attention_mask=torch.ones_like(x), max_new_tokens=8, min_new_tokens=8, do_sample=False)
    part = model.generate(
        x, attention_mask=torch.ones_like(x), max_new_tokens=4, min_new_tokens=4, do_sample=False,
        return_dict_in_generate=True,
    )  # fmt: skip
    cache, so_far = part.past_key_values, part.sequences
    assert cache.get_seq_length() == 10  # the last token was given out, but not yet read
    more = model.generate(
        so_far, attention_mask=torch.ones_like(so_far), past_key_values=cache, max_new_tokens=4, min_new_tokens=4,
        do_sample=False, return_dict_in_generate=True,
    )  # fmt: skip
    assert torch.equal(more.sequences, whole)
    turn = torch.cat([more.sequences, ids(2, 5, seed=9)], 1)
    assert torch.equal(generate(model, turn, past_key_values=more.past_key_values), generate(model, turn))


@pytest.mark.parametrize("spec", ["rope", "alibi", "t5", "shaw", "sinusoidal"])
def test_guesses_that_are_taken_back(spec, build, ids):
    """Assisted decoding crops the cache after wrong guesses: the tokens of the model alone."""
    model, x = build(spec), ids(1, 7)
    torch.manual_seed(5)
    assistant = build("none")
    cropped = []
    whole = generate(model, x)
    crop = LongitudeCacheLayer.crop
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LongitudeCacheLayer, "crop", lambda layer, n: cropped.append(n) or crop(layer, n))
        assert torch.equal(generate(model, x, assistant_model=assistant), whole)
    assert any(cropped)


@pytest.mark.parametrize("mixer", ["mamba", "hierarchical"])
def test_guesses_that_could_not_be_taken_back(mixer, build, ids):
    sizes = {"vocab_size": 61, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = lg.LongitudeForCausalLM(lg.LongitudeConfig(**sizes, mixers=["attention", mixer]))
    with pytest.raises(ValueError, match="assisted generation is not supported with stateful models"):
        generate(model, ids(1, 7), assistant_model=build("none"))
    with pytest.raises(ValueError, match="assistant_model: expected one whose cache can take tokens back"):
        generate(build("none"), ids(1, 7), assistant_model=model)


@pytest.mark.parametrize("spec", ["fox", "path"])
def test_an_encoding_with_a_state_takes_no_guesses(spec, build, ids):
    with pytest.raises(ValueError, match="assisted generation is not supported with stateful models"):
        generate(build(spec), ids(1, 7), prompt_lookup_num_tokens=2)
    with pytest.raises(ValueError, match="assistant_model: expected one whose cache can take tokens back"):
        generate(build("none"), ids(1, 7), assistant_model=build(spec))


@pytest.mark.parametrize("spec", ["rope", "learned", "fox"])
def test_the_last_document_goes_on(spec, build, ids):
    """What a packed prompt is followed by is what its last document is followed by alone; left padding included."""
    model, x = build(spec), ids(2, 11)
    documents = torch.tensor([[0] * 4 + [1] * 7] * 2)
    mask = (torch.arange(11) >= torch.tensor([[0], [2]])).long()
    for beams in (1, 2):
        packed = generate(model, x, document_ids=documents, attention_mask=mask, num_beams=beams)
        assert torch.equal(packed[:, 4:], generate(model, x[:, 4:], num_beams=beams))


def test_embeddings_instead_of_tokens(build, ids):
    model, x = build("rope"), ids(2, 11)
    options = {"max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False, "attention_mask": torch.ones_like(x)}
    written = model.generate(inputs_embeds=model.get_input_embeddings()(x), **options)
    assert torch.equal(written, model.generate(x, **options)[:, 11:])


def test_an_empty_cache_of_transformers_is_adopted(build, ids):
    model, x = build("fox"), ids()
    assert torch.equal(generate(model, x, past_key_values=DynamicCache()), generate(model, x))


def test_padded_and_continued(build, ids):
    """A left-padded batch goes on from its cache."""
    model, x = build(["rope", "fox"]), ids(2, 6)
    mask = torch.tensor([[0, 0, 1, 1, 1, 1], [1] * 6])
    options = {"do_sample": False, "return_dict_in_generate": True}
    first = model.generate(x, attention_mask=mask, max_new_tokens=3, min_new_tokens=3, **options)
    mask = torch.nn.functional.pad(mask, (0, 3), value=1)
    again = generate(model, first.sequences, attention_mask=mask, past_key_values=first.past_key_values)
    assert torch.equal(again[0, 2:], generate(model, first.sequences[:1, 2:])[0])
    assert torch.equal(again[1:], generate(model, first.sequences[1:]))


def test_a_learned_table_ends_in_generation_too(build, ids):
    model = build("learned", max_position_embeddings=10)
    with pytest.raises(ValueError, match=r"Learned: expected positions 0 .. 9"):
        generate(model, ids(1, 6))
