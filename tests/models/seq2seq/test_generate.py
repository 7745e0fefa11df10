"""generate() of the encoder-decoder: with the caches as without, batched as alone."""

import pytest
import torch
import torch.nn.functional as F
from transformers import DynamicCache, EncoderDecoderCache

import longitude as lg

SPECS = [*lg.list_encodings(), ["rope", "t5"]]
GENERATED = [
    pytest.param(spec, marks=[] if spec in ("t5", "learned", "path_fox") else pytest.mark.slow) for spec in SPECS
]
"""One of each way to act, and the others where there is time."""


@pytest.mark.one_in(5)
@pytest.mark.parametrize("spec", GENERATED, ids=str)
@pytest.mark.parametrize("side", ["left", "right"])
def test_a_padded_batch_is_its_rows_alone(spec, side, build, pair, generate):
    """generate(), greedily and with beams: each row writes what it writes alone."""
    model, (x, _) = build(spec), pair(source=8, batch=3)
    lengths = (8, 5, 2)
    valid = torch.arange(8) < torch.tensor(lengths)[:, None]
    valid = valid.flip(1) if side == "left" else valid
    padded = torch.zeros_like(x).masked_scatter(valid, torch.cat([row[:n] for row, n in zip(x, lengths, strict=True)]))
    for beams in (1, 3):
        together = generate(model, padded, attention_mask=valid.long(), num_beams=beams)
        for row, n in enumerate(lengths):
            assert torch.equal(together[row], generate(model, x[row : row + 1, :n], num_beams=beams)[0])
        if beams == 1:
            assert len(set(together[:, 1:].flatten().tolist())) > 2


@pytest.mark.parametrize("spec", GENERATED, ids=str)
@torch.no_grad()
def test_greedy_is_the_argmax_of_whole_passes(spec, build, pair, generate):
    model, (x, _) = build(spec), pair()
    expected = torch.full((2, 1), 1)
    for _ in range(8):
        logits = model(x, decoder_input_ids=expected, use_cache=False).logits[:, -1]
        logits[:, 2] = -torch.inf  # generate() may not stop before min_new_tokens
        expected = torch.cat([expected, logits.argmax(-1, keepdim=True)], 1)
    assert torch.equal(generate(model, x), expected)
    assert torch.equal(generate(model, x, use_cache=False), expected)


@pytest.mark.parametrize("spec", GENERATED, ids=str)
def test_sampling_and_beams_with_the_cache_as_without(spec, build, pair, generate):
    model, (x, _) = build(spec), pair()
    for options in (
        {"do_sample": True, "temperature": 1.5},
        {"num_beams": 4},
        {"num_beams": 3, "num_return_sequences": 3},
    ):
        outs = []
        for use_cache in (True, False):
            torch.manual_seed(3)
            outs.append(generate(model, x, use_cache=use_cache, **options))
        assert torch.equal(*outs)


def test_beams_take_their_caches_along(monkeypatch, build, pair, generate):
    """Beams that change places carry both caches; what comes out is the likeliest of all, searched by hand."""
    orders: list[list[int]] = []
    reorder = EncoderDecoderCache.reorder_cache
    monkeypatch.setattr(
        EncoderDecoderCache,
        "reorder_cache",
        lambda cache, beams: orders.append(beams.tolist()) or reorder(cache, beams),
    )
    model, (x, _) = build("rope", vocab_size=8), pair()
    x = x % 5 + 3
    best = generate(model, x[:1], new=3, num_beams=343)[0]
    assert any(order != sorted(order) for order in orders)
    with torch.no_grad():
        every = torch.cartesian_prod(*[torch.tensor([0, 1, 3, 4, 5, 6, 7])] * 3)  # all but the end of a text
        inputs = F.pad(every, (1, 0), value=1)
        logits = model(x[:1].expand(len(every), -1), decoder_input_ids=inputs[:, :-1]).logits
        likely = logits.log_softmax(-1).gather(-1, every[..., None]).sum((1, 2))
    assert torch.equal(best, inputs[likely.argmax()])


@torch.no_grad()
def test_generate_goes_on_from_what_is_given(build, pair, generate):
    """A prefix of the target; a source encoded before; a returned cache; all with the same tokens."""
    model, (x, _) = build("alibi"), pair()
    whole = generate(model, x)
    assert torch.equal(generate(model, x, new=5, decoder_input_ids=whole[:, :4]), whole)
    assert torch.equal(generate(model, None, encoder_outputs=model.encoder(x)), whole)
    part = generate(model, x, new=4, return_dict_in_generate=True, output_scores=True)
    more = generate(model, x, new=4, decoder_input_ids=part.sequences, past_key_values=part.past_key_values)
    assert torch.equal(more, whole)
    cache = EncoderDecoderCache(DynamicCache(), DynamicCache())
    assert torch.equal(generate(model, x, past_key_values=cache), whole)


@torch.no_grad()
def test_a_target_stops_at_its_end(build, pair, generate):
    """A row that wrote the end is filled with padding, while others go on."""
    model, (x, _) = build("rope", eos_token_id=None), pair(batch=3)
    written = generate(model, x, new=12)
    end = written[0, 3]
    stopped = model.generate(x, max_new_tokens=12, do_sample=False, eos_token_id=int(end), pad_token_id=0)
    for row, plain in zip(stopped, written, strict=True):
        at = (plain[1:] == end).nonzero()
        stop = int(at[0]) + 2 if len(at) else 13
        assert torch.equal(row[:stop], plain[:stop]) and (row[stop:] == 0).all()
