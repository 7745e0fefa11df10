"""Caches of transformers in our models: by the name that it has now, and by its former one as long as transformers takes it."""

import pytest
import torch
from transformers import DynamicCache, EncoderDecoderCache

from longitude.models import LongitudeForCausalLM, LongitudeForSeq2SeqLM, LongitudeModel
from tests.support import close, refused

KINDS = [LongitudeForCausalLM, LongitudeModel, LongitudeForSeq2SeqLM]
NAMES = ("cache", "past_key_values")


def empty(kind):
    return EncoderDecoderCache(DynamicCache(), DynamicCache()) if kind is LongitudeForSeq2SeqLM else DynamicCache()


def called(model, x, **options):
    """The output of a decoder for x, or of an encoder-decoder for the same source and x as its target."""
    if isinstance(model, LongitudeForSeq2SeqLM):
        return model(torch.arange(1, 8).expand(len(x), -1), decoder_input_ids=x, **options)
    return model(x, **options)


@pytest.mark.filterwarnings("ignore:`past_key_values` is deprecated:FutureWarning")
@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_models_take_both_names(kind, build, ids):
    """In parts, with the cache under either name = in one piece; what comes back is the cache that was given."""
    model, x = build("rope", kind), ids(2, 9)
    want = called(model, x, use_cache=False)
    for name in NAMES:
        cache = empty(kind)
        first = called(model, x[:, :5], **{name: cache})
        assert first.cache is cache and cache.get_seq_length() == 5
        close(called(model, x[:, 5:], **{name: cache})[0], want[0][:, 5:], 1e-10)
    with pytest.raises(ValueError, match="past_key_values"):
        called(model, x, cache=cache, past_key_values=cache)
    assert want.cache is None
    if kind is not LongitudeModel:
        options = {"max_new_tokens": 4, "min_new_tokens": 4, "do_sample": False, "bos_token_id": 1}
        for name in NAMES:
            got = model.generate(x, **options, **{name: (cache := empty(kind))})
            assert torch.equal(got, model.generate(x, **options)) and cache.get_seq_length() >= 4


@pytest.mark.parametrize(
    "cache", [((torch.zeros(2, 2, 3, 8),) * 2,), empty(LongitudeForSeq2SeqLM)], ids=["tuple", "of both"]
)
def test_what_is_no_cache_of_a_decoder_is_refused(cache, build, ids):
    with refused("cache", "LongitudeCache", type(cache).__name__):
        build("rope")(ids(2, 4), cache=cache)
