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


def generate(model, x, new=NEW, **options):
    """Exactly that many new tokens after x."""
    options = {"do_sample": False, "attention_mask": torch.ones_like(x), **options}
    return model.generate(x, max_new_tokens=new, min_new_tokens=new, **options)


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

    def drawn(seed, **options):
        torch.manual_seed(seed)
        return generate(model, x, **options)

    sampling = {"do_sample": True, "temperature": 1.5}
    for options in (sampling, {"num_beams": 4}, {"num_beams": 3, "num_return_sequences": 3}):
        with_cache = drawn(3, **options)
        assert torch.equal(with_cache, drawn(3, use_cache=False, **options))
        assert torch.equal(with_cache, drawn(3, **options))
    assert not torch.equal(drawn(3, **sampling), drawn(4, **sampling))


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
    part = generate(model, x, new=4, return_dict_in_generate=True)
    assert part.past_key_values.get_seq_length() == 10  # the last token was given out, but not yet read
    options = {"past_key_values": part.past_key_values, "return_dict_in_generate": True}
    more = generate(model, part.sequences, new=4, **options)
    assert torch.equal(more.sequences, generate(model, x, new=8))
    turn = torch.cat([more.sequences, ids(2, 5, seed=9)], 1)
    assert torch.equal(generate(model, turn, past_key_values=more.past_key_values), generate(model, turn))


def test_guesses_of_an_assistant_are_taken_back(build, ids, monkeypatch):
    """Wrong ones are cropped off the cache; an assistant and a model whose cache cannot do that are refused."""
    model, x, cropped, crop = build("shaw"), ids(1, 7), [], LongitudeCacheLayer.crop
    torch.manual_seed(5)
    assistant, whole = build("none"), generate(model, x)
    monkeypatch.setattr(LongitudeCacheLayer, "crop", lambda layer, n: cropped.append(n) or crop(layer, n))
    assert torch.equal(generate(model, x, assistant_model=assistant), whole) and any(cropped)
    sizes = {"vocab_size": 61, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4}
    hybrids = [
        lg.LongitudeForCausalLM(lg.LongitudeConfig(**sizes, mixers=["attention", m])) for m in ("mamba", "hierarchical")
    ]
    for stateful in (build("fox"), *hybrids):
        with pytest.raises(ValueError, match="assisted generation is not supported with stateful models"):
            generate(stateful, x, assistant_model=assistant)
        with pytest.raises(ValueError, match="assistant_model: expected one whose cache can take tokens back"):
            generate(assistant, x, assistant_model=stateful)


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
