"""A cache has two names, `cache` and `past_key_values`: models take it by either, and outputs answer to both."""

import copy
import pickle

import pytest
import torch
from torch.utils import _pytree
from transformers import (
    DynamicCache,
    EncoderDecoderCache,
    LlamaConfig,
    LlamaForCausalLM,
    MambaConfig,
    MambaForCausalLM,
    Trainer,
    TrainingArguments,
)

from longitude.models import LongitudeForCausalLM, LongitudeForSeq2SeqLM, LongitudeModel
from longitude.models.cache_names import ATTENTION, INSTALLED, cache_in, cache_name, named, renamed
from tests.support import close, refused

KINDS = [LongitudeForCausalLM, LongitudeModel, LongitudeForSeq2SeqLM]
HEADS = [LongitudeForCausalLM, LongitudeForSeq2SeqLM]
both = pytest.mark.parametrize("name", ATTENTION)


def empty(kind):
    return EncoderDecoderCache(DynamicCache(), DynamicCache()) if kind is LongitudeForSeq2SeqLM else DynamicCache()


def called(model, x, **options):
    """The output of a decoder for x, or of an encoder-decoder for the same source and x as its target."""
    if isinstance(model, LongitudeForSeq2SeqLM):
        return model(torch.arange(1, 8).expand(len(x), -1), decoder_input_ids=x, **options)
    return model(x, **options)


@both
@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_models_take_both(name, kind, build, ids):
    """In parts, with the cache under either name = in one piece; what comes back is the cache that was given."""
    model, x, cache = build("rope", kind), ids(2, 9), empty(kind)
    want = called(model, x, use_cache=False)
    first = called(model, x[:, :5], **{name: cache})
    assert first.cache is first.past_key_values is cache and cache.get_seq_length() == 5
    close(called(model, x[:, 5:], **{name: cache})[0], want[0][:, 5:], 1e-10)


@pytest.mark.parametrize("kind", [*HEADS, LongitudeModel])
def test_two_caches_are_refused(kind, build, ids):
    with refused("past_key_values", "5.24"):
        called(build("rope", kind), ids(), cache=empty(kind), past_key_values=empty(kind))


@pytest.mark.slow
@both
@pytest.mark.one_in(5)
@pytest.mark.parametrize("kind", [LongitudeForCausalLM, LongitudeModel])
@torch.no_grad()
def test_a_compiled_step_takes_both(name, kind, build, ids):
    """As one graph; the cache that was given comes back by both names."""
    model, x = build("rope", kind), ids(2, 6)
    step = torch.compile(model, backend="eager", fullgraph=True)
    out = step(x[:, 5:], **{name: (cache := model(x[:, :5], use_cache=True).cache)})
    assert out.cache is out.past_key_values is cache
    close(out[0], model(x, use_cache=False)[0][:, 5:], 1e-10)


@pytest.mark.parametrize(
    "cache", [((torch.zeros(2, 2, 3, 8),) * 2,), empty(LongitudeForSeq2SeqLM)], ids=["tuple", "of both"]
)
def test_what_is_no_cache_of_a_decoder_is_refused(cache, build, ids):
    with refused("cache", "LongitudeCache", type(cache).__name__):
        build("rope")(ids(2, 4), cache=cache)


@both
@pytest.mark.parametrize("options", [{}, {"num_beams": 3}, {"return_dict_in_generate": True}], ids=str)
@pytest.mark.parametrize("kind", HEADS)
def test_generate_takes_both(name, options, kind, build, ids):
    """The tokens of a run that makes its own cache; the one given is what is filled."""
    model, x, cache = build("t5", kind), ids(2, 7), empty(kind)
    options = {"max_new_tokens": 4, "min_new_tokens": 4, "do_sample": False, "bos_token_id": 1, **options}
    want, got = model.generate(x, **options), model.generate(x, **options, **{name: cache})
    if "return_dict_in_generate" in options:
        assert cache_in(got) is cache
        want, got = want.sequences, got.sequences
    assert torch.equal(want, got) and cache.get_seq_length() >= 4


def test_two_caches_of_generate_are_refused(build, ids):
    with refused("both"):
        build("rope").generate(ids(), max_new_tokens=1, cache=DynamicCache(), past_key_values=DynamicCache())


@pytest.mark.parametrize("kind", KINDS)
def test_outputs_stay_what_they_are(kind, build, ids):
    """Copied, written and read, and taken apart as torch does: by both names still; without a cache, None."""
    out = called(build("rope", kind), ids(2, 5), use_cache=True)
    leaves, structure = _pytree.tree_flatten(out)
    for same in (copy.copy(out), pickle.loads(pickle.dumps(out)), _pytree.tree_unflatten(leaves, structure)):  # noqa: S301
        assert type(same) is type(out) and same.cache.get_seq_length() == same.past_key_values.get_seq_length() == 5
    for name in ATTENTION:
        assert out[name] is out.cache
        setattr(out, name, None)
        assert out.cache is out.past_key_values is None
        setattr(out, name, same.cache)
    without = called(build("rope", kind), ids(2, 5), use_cache=False)
    assert without.cache is None and without.past_key_values is None


def test_of_models_of_transformers(ids):
    """They call theirs what `named` and `cache_in` do, and `cache_name` reads it off any forward."""
    sizes = {"vocab_size": 61, "hidden_size": 16, "num_hidden_layers": 1}
    llama = LlamaForCausalLM(LlamaConfig(**sizes, intermediate_size=16, num_attention_heads=2))
    cache = cache_in(llama(ids(2, 5), use_cache=True))
    assert cache_in(llama(ids(2, 1), **named(cache))) is cache and cache.get_seq_length() == 6
    assert cache_name(llama) == INSTALLED and cache_name(torch.nn.Linear(1, 1)) is None
    assert cache_name(MambaForCausalLM(MambaConfig(**sizes))) == (INSTALLED if INSTALLED == "cache" else "cache_params")


def test_the_cache_of_a_call_is_renamed():
    cache = DynamicCache()
    for name in ATTENTION:
        assert renamed({"input_ids": 1, name: cache}) == {"input_ids": 1, INSTALLED: cache}
    assert renamed({"input_ids": 1, "cache": None}) == {"input_ids": 1}


def test_trainer_gathers_no_cache(build, ids, tmp_path):
    """In an evaluation the cache is no prediction, by whichever name."""
    model, x = build("rope"), ids(1, 5)
    _, logits, _ = Trainer(model, TrainingArguments(str(tmp_path), use_cpu=True)).prediction_step(
        model, {"input_ids": x, "use_cache": True}, prediction_loss_only=False
    )
    assert isinstance(logits, torch.Tensor) and logits.shape == (1, 5, 61)
