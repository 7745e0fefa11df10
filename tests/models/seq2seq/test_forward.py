"""The encoder-decoder at once: step by step = whole, padding is not there, and position stays in its place."""

import pytest
import torch
import torch.nn.functional as F
from transformers import DynamicCache

import longitude as lg
from longitude.attention.mixer import MIXERS, list_mixers
from longitude.registry import options_of

SPECS = [*lg.list_encodings(), ["rope", "t5"]]
FEW = [pytest.param(spec, marks=[] if spec in ("t5", "learned", "path_fox") else pytest.mark.slow) for spec in SPECS]
"""One of each way to act, and the others where there is time."""
ONE_SIDED = ["cope", "fox", "path", "path_fox", "xpos"]
POST = {"norm": "layernorm", "norm_position": "post", "hidden_act": "relu", "mlp_bias": True, "attention_bias": True}


def small(name):
    """A mixer, with a reach that is shorter than the texts here where it is required."""
    return {"name": name, **({"size": 5} if "size" in options_of(MIXERS[name]) else {})}


def close(x, y, tolerance=1e-10):
    torch.testing.assert_close(x, y, atol=tolerance, rtol=0)


def gradients(loss, model):
    return torch.autograd.grad(loss, list(model.parameters()), allow_unused=True, materialize_grads=True)


@pytest.mark.one_in(4)
@pytest.mark.parametrize("spec", SPECS, ids=str)
@torch.no_grad()
def test_pieces_are_the_whole(spec, build, pair):
    """The target at once, in chunks and token by token; the source is read once, its keys are made once in each block."""
    model, (x, y) = build(spec), pair(target=14)
    mask = torch.arange(11) < torch.tensor([[11], [7]])
    whole = model(x, attention_mask=mask, decoder_input_ids=y, use_cache=False)
    assert whole.past_key_values is None
    read: list[str] = []
    model.encoder.register_forward_hook(lambda *_: read.append("source"))
    for block in model.decoder.layers:
        block.cross.k_proj.register_forward_hook(lambda *_: read.append("key"))
        block.cross.v_proj.register_forward_hook(lambda *_: read.append("value"))
    encoded, cache, chunks = model.encoder(x, attention_mask=mask), None, []
    for piece in y.split((5, 1, 1, 7), 1):
        out = model(
            encoder_outputs=encoded, attention_mask=mask, decoder_input_ids=piece, past_key_values=cache, use_cache=True
        )
        cache = out.past_key_values
        chunks.append(out.logits)
    close(torch.cat(chunks, 1), whole.logits)
    assert read == ["source", *["key", "value"] * 2]
    assert cache.get_seq_length() == 14 and cache.cross_attention_cache.get_seq_length() == 11


@pytest.mark.one_in(7)
@pytest.mark.parametrize(
    ("name", "hybrid"),
    [(name, False) for name in list_mixers()]
    + [(name, True) for name in list_mixers() if name not in ("attention", "latent")],
)
@torch.no_grad()
def test_a_decoder_of_any_mixer(name, hybrid, build, pair, generate):
    """Whole = chunks = generate(), for a decoder of this mixer and for one in which it alternates with attention."""
    kind = {"mixers": [small(name), "attention"]} if hybrid else {"mixer": small(name)}
    model, (x, y) = build("sinusoidal", num_attention_heads=2, num_key_value_heads=2, **kind), pair(target=14)
    assert all(type(block.mixer).bidirectional for block in model.encoder.layers)
    mask = torch.arange(11) < torch.tensor([[11], [7]])
    whole = model(x, attention_mask=mask, decoder_input_ids=y, use_cache=False).logits
    cache, chunks = None, []
    for piece in y.split((5, 1, 1, 7), 1):
        out = model(x, attention_mask=mask, decoder_input_ids=piece, past_key_values=cache, use_cache=True)
        cache = out.past_key_values
        chunks.append(out.logits)
    close(torch.cat(chunks, 1), whole)
    for beams in (1, 3):
        with_cache = generate(model, x, num_beams=beams, attention_mask=mask.long())
        assert torch.equal(with_cache, generate(model, x, num_beams=beams, attention_mask=mask.long(), use_cache=False))


@pytest.mark.parametrize("spec", FEW, ids=str)
def test_the_future_of_the_target_is_not_seen(spec, build, pair):
    """A later token of the target moves no earlier logit; every token of the source moves all of them."""
    model, (x, y) = build(spec), pair()
    embed = model.get_input_embeddings()
    source, target = (embed(tokens).detach().requires_grad_() for tokens in (x, y))
    logits = model(inputs_embeds=source, decoder_inputs_embeds=target).logits
    for place in (0, 4, 8):
        of_source, of_target = torch.autograd.grad(logits[0, place].square().sum(), [source, target], retain_graph=True)
        assert (of_source[0].abs().amax(-1) > 1e-9).all()
        assert (of_target[0, : place + 1].abs().amax(-1) > 1e-9).all() and (of_target[0, place + 1 :] == 0).all()


@pytest.mark.parametrize("spec", FEW, ids=str)
def test_padding_of_the_source_changes_nothing(spec, build, pair):
    """Left, right or both: loss, logits and gradients are those without."""
    model, (x, y) = build(spec), pair(batch=1)
    plain = model(x, labels=y)
    for left, right in ((4, 0), (0, 3), (2, 2)):
        padded, mask = F.pad(x, (left, right), value=5), F.pad(torch.ones_like(x), (left, right))
        out = model(padded, attention_mask=mask, labels=y)
        close(out.logits, plain.logits)
        for ours, theirs in zip(gradients(out.loss, model), gradients(model(x, labels=y).loss, model), strict=True):
            close(ours, theirs)


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
    close(model(x, decoder_input_ids=padded, decoder_attention_mask=mask).logits[:, 3:], plain.logits)
    with torch.no_grad():
        first = model(x, decoder_input_ids=padded[:, :6], decoder_attention_mask=mask[:, :6], use_cache=True)
        second = model(
            x, decoder_input_ids=padded[:, 6:], decoder_attention_mask=mask, past_key_values=first.past_key_values
        )
    close(torch.cat([first.logits, second.logits], 1)[:, 3:], plain.logits)


# ---- position ---------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("spec", ["rope", "alibi", "t5", "shaw", "clipped", "transformer_xl", "kerple_log"])
@torch.no_grad()
def test_cross_attention_has_no_positions(spec, build, pair):
    """Where the encoding knows offsets alone, moving all of the source or all of the target changes nothing."""
    model, (x, y) = build(spec), pair()
    plain = model(x, decoder_input_ids=y).logits
    close(model(x, decoder_input_ids=y, position_ids=torch.arange(11) + 20).logits, plain)
    close(model(x, decoder_input_ids=y, decoder_position_ids=torch.arange(9) + 20).logits, plain)
    reordered = model(x, decoder_input_ids=y, position_ids=torch.arange(11).flip(0)).logits
    assert (reordered - plain).abs().max() > 1e-3 or spec in ("alibi", "kerple_log")  # whose mirror image is the same


@pytest.mark.parametrize("spec", ["sinusoidal", "learned"])
@torch.no_grad()
def test_an_encoding_of_the_input_acts_at_both(spec, build, pair):
    """Moving the source changes the encoder's output, moving the target changes the logits; a stack has a table of its own."""
    model, (x, y) = build(spec), pair()
    plain = model(x, decoder_input_ids=y)
    moved = model(x, decoder_input_ids=y, position_ids=torch.arange(11) + 20)
    assert (moved.encoder_last_hidden_state - plain.encoder_last_hidden_state).abs().max() > 1e-3
    moved = model(x, decoder_input_ids=y, decoder_position_ids=torch.arange(9) + 20)
    close(moved.encoder_last_hidden_state, plain.encoder_last_hidden_state)
    assert (moved.logits - plain.logits).abs().max() > 1e-3
    if spec == "learned":
        assert model.encoder.encodings[0].table is not model.decoder.encodings[0].table


@torch.no_grad()
def test_both_inputs_by_hand(build, pair):
    """sqrt(dim) E[token] + PE(place), at encoder and decoder alike (Vaswani et al. 2017)."""
    model, (x, y) = build("sinusoidal"), pair()
    out = model(x, decoder_input_ids=y, output_hidden_states=True)
    rate = 10_000.0 ** (-torch.arange(0, 16, 2, dtype=torch.float64) / 16)
    angle = torch.arange(11)[:, None] * rate
    codes = torch.stack([angle.sin(), angle.cos()], -1).flatten(-2)
    embed = model.get_input_embeddings()
    close(out.encoder_hidden_states[0], 4.0 * embed(x) + codes)
    close(out.decoder_hidden_states[0], 4.0 * embed(y) + codes[:9])


def test_each_stack_has_the_encoding_it_needs(build):
    """T5: buckets for both sides in the encoder, for the past in the decoder, a table each."""
    model = build("t5")
    assert model.encoder.encodings[0].bidirectional and not model.decoder.encodings[0].bidirectional
    assert model.config.encoding["bidirectional"] is False and model.config.encoder_encoding["bidirectional"] is True
    for name in ONE_SIDED:
        with pytest.raises(
            ValueError, match=r"has no meaning for tokens in the future, and an encoder attends to them"
        ):
            build(name, encoder_encoding=None)
    mixed = build("fox", encoder_encoding={"name": "t5", "num_buckets": 8})
    assert mixed.encoder.encodings[0].num_buckets == 8 and mixed.encoder.encodings[0].bidirectional
    each = build("auto", encodings=["alibi", "t5"])
    assert [type(member).__name__ for member in each.encoder.encodings] == ["ALiBi", "T5Bias"]
    with pytest.raises(
        ValueError, match=r"encodings: got 2, .* an encoder of 3 layers; expected as many, or encoder_enc"
    ):
        build("auto", encodings=["alibi", "t5"], num_encoder_layers=3)


@pytest.mark.parametrize("name", [name for name in list_mixers() if name not in ("attention", "window", "latent")])
def test_the_encoder_of_a_recurrence_hears_with_attention(name, build, pair):
    """And has positions, though the decoder needs none."""
    model = build("auto", mixer=small(name), num_attention_heads=2, num_key_value_heads=2)
    assert all(type(block.mixer) is lg.MultiHeadAttention for block in model.encoder.layers)
    x, _ = pair()
    hidden = model.encoder(x)[0]
    assert (model.encoder(x.flip(1))[0].flip(1) - hidden).abs().max() > 1e-3


# ---- layers, weights, outputs -----------------------------------------------------------------------------------------
@pytest.mark.parametrize("layers", [1, 2, 5])
def test_depths_may_differ(layers, build, pair):
    model, (x, y) = build("rope", num_encoder_layers=layers, **POST), pair()
    assert len(model.encoder.layers) == layers and len(model.decoder.layers) == 2
    assert not any(block.cross for block in model.encoder.layers)
    assert len(model(x, labels=y, output_hidden_states=True).encoder_hidden_states) == layers + 1
    assert all(g.abs().max() > 0 for g in gradients(model(x, labels=y).loss, model))  # nothing is left out


@pytest.mark.parametrize("dropout", [0.0, 0.5])
@pytest.mark.parametrize("position", ["pre", "post"])
def test_dropout_is_where_the_paper_has_it(dropout, position, monkeypatch, build, pair):
    """Of both embedding sums and of what every part adds, before the norm; in training alone."""
    calls: list[tuple[int, ...]] = []
    dropped = F.dropout
    monkeypatch.setattr(F, "dropout", lambda x, p, *a, **k: calls.append(tuple(x.shape)) or dropped(x, p, *a, **k))
    model, (x, y) = build("rope", hidden_dropout=dropout, norm_position=position), pair()
    model(x, labels=y)
    assert not calls
    model.train()(x, labels=y)
    assert calls == ([(2, 11, 16)] * (1 + 2 * 2) + [(2, 9, 16)] * (1 + 2 * 3) if dropout else [])


@torch.no_grad()
def test_outputs(build, pair):
    model, (x, y) = build("alibi", num_encoder_layers=3), pair()
    out = model(x, decoder_input_ids=y, output_hidden_states=True, output_attentions=True)
    assert [len(out[name]) for name in ("encoder_hidden_states", "decoder_hidden_states")] == [4, 3]
    assert [w.shape for w in out.encoder_attentions] == [(2, 4, 11, 11)] * 3
    assert [w.shape for w in out.decoder_attentions] == [(2, 4, 9, 9)] * 2
    assert [w.shape for w in out.cross_attentions] == [(2, 4, 9, 11)] * 2
    padded = model(x, torch.arange(11) < torch.tensor([[11], [7]]), y, output_attentions=True)
    for weights in padded.cross_attentions:
        close(weights.sum(-1), torch.ones(2, 4, 9, dtype=torch.float64))
        assert (weights[1, ..., 7:] == 0).all() and (weights[1, ..., :7] > 0).all()
    close(out.encoder_last_hidden_state, model.encoder(x).last_hidden_state)
    plain = model(x, decoder_input_ids=y)
    close(plain.logits, out.logits)
    assert plain.decoder_hidden_states is None and plain.encoder_attentions is plain.cross_attentions is None
    close(model(x, decoder_input_ids=y, logits_to_keep=2).logits, out.logits[:, -2:])
    close(model(x, decoder_input_ids=y, logits_to_keep=torch.tensor([0, 5])).logits, out.logits[:, [0, 5]])
    logits, *_ = model(x, decoder_input_ids=y, return_dict=False)
    close(logits, out.logits)
    embed = model.get_input_embeddings()
    close(model(inputs_embeds=embed(x), decoder_inputs_embeds=embed(y)).logits, out.logits)
    close(model(encoder_outputs=(model.encoder(x)[0],), decoder_input_ids=y).logits, out.logits)
    assert model(x, labels=y).past_key_values is None and plain.past_key_values is not None


def test_labels_become_inputs_one_later(build, pair, generate):
    model, (x, y) = build(), pair()
    labels = y.clone()
    labels[1, 6:] = -100
    shifted = model.prepare_decoder_input_ids_from_labels(labels)
    assert shifted[0].tolist() == [1, *y[0, :-1].tolist()]
    assert shifted[1].tolist() == [1, *y[1, :6].tolist(), 0, 0]
    out = model(x, labels=labels)
    close(out.logits, model(x, decoder_input_ids=shifted).logits)
    log = out.logits.log_softmax(-1)
    picked = [-log[b, i, labels[b, i]] for b in range(2) for i in range(9) if labels[b, i] >= 0]
    close(out.loss, torch.stack(picked).mean())
    close(model(x, labels=labels, num_items_in_batch=torch.tensor(40)).loss, torch.stack(picked).sum() / 40)
    start = build(decoder_start_token_id=7)
    assert start.prepare_decoder_input_ids_from_labels(labels)[:, 0].tolist() == [7, 7]
    assert generate(start, x)[:, 0].tolist() == [7, 7]
    nobody = build(pad_token_id=None, bos_token_id=None, eos_token_id=None)
    with pytest.raises(ValueError, match=r"expected decoder_start_token_id .* in the config"):
        nobody(x, labels=y)
    padding = build(bos_token_id=None)
    assert generate(padding, x)[:, 0].tolist() == [0, 0]
    last = build(pad_token_id=None, bos_token_id=None, decoder_start_token_id=9)
    assert last.prepare_decoder_input_ids_from_labels(labels)[1].tolist() == [9, *y[1, :6].tolist(), 9, 9]


# ---- refusals ---------------------------------------------------------------------------------------------------------
X = torch.full((2, 6), 3)
REFUSED = {
    "typo": ({"decoder_inputs_ids": X}, "unknown argument 'decoder_inputs_ids': did you mean 'decoder_input_ids'"),
    "packed": ({"document_ids": X}, "document_ids: an encoder-decoder has one source and one target per row"),
    "no target": ({"labels": None}, "expected labels, or either decoder_input_ids or decoder_inputs_embeds"),
    "two targets": (
        {"labels": None, "decoder_input_ids": X, "decoder_inputs_embeds": torch.ones(2, 6, 16)},
        "expected labels, or either",
    ),
    "no source": ({"input_ids": None}, "expected either input_ids or inputs_embeds"),
    "mask": ({"attention_mask": X[:, :5]}, r"attention_mask: expected \[2, 6\].*got \[2, 5\]"),
    "mask of a source": (
        {"input_ids": None, "encoder_outputs": (torch.ones(2, 4, 16).double(),), "attention_mask": X},
        r"attention_mask: expected \[2, 4\], one per token of the source, got \[2, 6\]",
    ),
    "mask of the target": ({"decoder_attention_mask": X[:, :5]}, r"attention_mask: expected \[2, 6\].*got \[2, 5\]"),
    "labels": ({"decoder_input_ids": X, "labels": X[:, :5]}, r"labels: expected \[2, 6\], got \[2, 5\]"),
    "cache": ({"past_key_values": DynamicCache()}, "past_key_values: expected transformers' EncoderDecoderCache"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refusals(case, build):
    options, message = REFUSED[case]
    with pytest.raises(ValueError, match=message):
        build()(**{"input_ids": X, "labels": X, **options})


@torch.no_grad()
def test_a_cache_of_another_source_is_refused(build, pair):
    model, (x, y) = build(), pair()
    cache = model(x, decoder_input_ids=y, use_cache=True).past_key_values
    with pytest.raises(
        ValueError, match=r"cache: expected keys \[2, 2, 5, 4\] of this layer's source, got \[2, 2, 11, 4\]"
    ):
        model(x[:, :5], decoder_input_ids=y[:, :1], past_key_values=cache)
    with pytest.raises(ValueError, match="past_key_values: expected 3 layers, as the decoder has, got 2"):
        build(num_hidden_layers=3)(x, decoder_input_ids=y, past_key_values=cache)
