"""Windows in chunks, with the model's cache and a head that computes few positions at a time, lose nothing."""

from itertools import product

import pytest
import torch

from longitude.measure import losses_by_length
from longitude.measure.windows import Bounded, Reader, follows_length, reading_of
from tests.measure.conftest import build
from tests.support import close, refused

FAMILIES = ["llama", "gpt_neox", "bloom", "gpt2", "ours"]


@pytest.fixture(scope="module")
def documents():
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(256, (n,), generator=generator) for n in (33, 70)]  # of two lengths


def losses(model, documents, reader=None, lengths=(12, 32)):
    options = {"stride": 12, "span": 32, "token_bytes": 1, "batch_tokens": 128}
    return losses_by_length(model, documents, lengths=lengths, reader=reader, **options)


@pytest.mark.parametrize(("name", "dtype"), [*((name, torch.float64) for name in FAMILIES), ("llama", torch.float32)])
def test_chunks_equal_the_whole(documents, name, dtype):
    model = build(name).to(dtype).eval()
    expected = losses(model, documents)
    limit = 1e-10 if dtype == torch.float64 else 1e-5
    limit = 1e-8 if name == "bloom" else limit  # Bloom's softmax is float32 in every dtype
    for size, logits in ((7, 256 * 20), (None, 256 * 30)):
        for one, other in zip(expected, losses(model, documents, Bounded(model, size, logits)), strict=True):
            assert one.method == other.method and one.position_from == other.position_from
            assert abs(one.nats - other.nats).max() <= limit * max(1, abs(one.nats).max())
            assert (one.tokens == other.tokens).all()


@pytest.mark.one_in(3)
@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("size", [8, None])
def test_the_head_never_computes_more(name, size):
    model, asked, read = build(name).eval(), [], []
    model.get_output_embeddings().register_forward_hook(lambda module, given, output: asked.append(output.numel()))
    layer = next(module for module in model.base_model.modules() if isinstance(module, torch.nn.ModuleList))[0]
    layer.register_forward_hook(lambda module, given, output: read.append(1))
    Bounded(model, size, 256 * 10).losses(torch.arange(66).view(2, 33), 0)
    assert max(asked) == 256 * 10 and sum(asked) == 256 * 64
    assert len(read) == (4 if size else 1)  # the body runs once per chunk, however often the head does


def test_skipped_targets_are_not_scored():
    model, tokens = build("llama").double().eval(), torch.randint(256, (2, 33))
    with torch.inference_mode():
        for skip, size in product((0, 5, 8, 23, 31), (8, None)):
            close(Bounded(model, size, 256 * 6).losses(tokens, skip), Reader(model).losses(tokens, skip), 1e-10)


@pytest.mark.parametrize("name", FAMILIES)
def test_stock_models_are_read_in_chunks(name):
    reading = reading_of(build(name).eval(), 16)
    assert reading.reason is None and reading.finite
    assert reading.described(17) == "chunks of 16 with the cache" and reading.described(16) == "one pass"


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_what_follows_the_length_is_read_whole_and_why(kind):
    factors = {"short_factor": [1.0] * 4, "long_factor": [4.0] * 4, "original_max_position_embeddings": 32}
    rope = {"rope_type": kind, "rope_theta": 10000.0, "factor": 4.0} | (factors if kind == "longrope" else {})
    reading = reading_of(build("llama", rope_parameters=rope).eval(), 16)
    assert reading.described(64) == f"one pass: its rotary frequencies follow the length ({kind})"


def test_our_own_models_follow_the_length_by_their_scaling():
    scaling = {"name": "dynamic", "factor": 4.0, "original_max_length": 32}
    ours = lambda **more: build("ours", encoding={"name": "rope", "scaling": scaling | more})  # noqa: E731
    assert follows_length(ours(follow="sequence")) is not None and follows_length(ours(max_length=128)) is None


def test_no_length_leaves_its_tables_to_the_next(documents):
    """transformers keeps the frequencies of the longest text that a dynamic model has read."""
    rope = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}
    model = build("llama", rope_parameters=rope).double().eval()
    model.model.rotary_emb.original_max_seq_len = model.config.max_position_embeddings = 8  # beyond, at both lengths
    model.model.rotary_emb.max_seq_len_cached = 8
    reader = reading_of(model, 16).reader
    both = losses(model, documents, reader, lengths=(12, 32))
    again = losses(model, documents, reader, lengths=(12,))
    close(both[0].nats, again[0].nats, 1e-10)
    model.model.rotary_emb(torch.zeros(1, 1, 16), torch.arange(32)[None])
    now = losses(model, documents, reader, lengths=(12,))[0].nats
    close(now, again[0].nats, 1e-10)
    assert abs(losses(model, documents, lengths=(12,))[0].nats - again[0].nats).max() > 1e-6  # what restarting is for


def test_a_cache_that_is_missing_or_off_by_one_is_not_trusted(monkeypatch):
    model = build("llama").eval()
    forward, embed = model.forward, model.model.rotary_emb.forward
    with monkeypatch.context() as patched:
        without = {"use_cache": False, "cache": None}
        patched.setattr(model, "forward", lambda **named: forward(**named | without))
        assert reading_of(model, 16).reason == "it keeps no cache of keys and values"
    shift = lambda x, position_ids, **named: embed(x, position_ids + (position_ids[0, 0] > 0), **named)  # noqa: E731
    monkeypatch.setattr(model.model.rotary_emb, "forward", shift)
    assert "differ from those of one pass" in str(reading_of(model, 16).reason)


def test_a_model_that_sees_the_future_has_no_perplexity():
    model = build("llama").eval()
    model.config._attn_implementation = "eager"

    def unmasked(module, given, named):
        length = named["input_ids"].shape[1]
        return given, named | {"attention_mask": torch.zeros(1, 1, length, length)}

    model.register_forward_pre_hook(unmasked, with_kwargs=True)
    with refused("LlamaForCausalLM", "causal"):
        reading_of(model, 16)
