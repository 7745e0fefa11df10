"""The forward pass: outputs, caches, padding, packing, checkpointing, and every wrong argument."""

import pytest
import torch

import longitude as lg

VOCABULARY = 61
SPECS = [*lg.list_encodings(), ["rope", "fox"]]


def close(x, y, tolerance=1e-10):
    torch.testing.assert_close(x, y, atol=tolerance, rtol=0)


def gradients(loss, model):
    """Of every learned number, zero where the loss does not depend on it."""
    return torch.autograd.grad(loss, list(model.parameters()), allow_unused=True, materialize_grads=True)


# ---- whole = in pieces, padded, packed --------------------------------------------------------------------------------


@pytest.mark.one_in(4)
@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_padding_changes_nothing(spec, build, ids):
    """Left or right: logits, loss and gradients of the tokens are those without; cached pieces included."""
    model, x = build(spec), ids(1, 9)
    plain = model(x, labels=x)
    wanted = gradients(plain.loss, model)
    for left, right in ((0, 3), (2, 2), (4, 0)):
        padded = torch.nn.functional.pad(x, (left, right), value=5)
        mask = torch.nn.functional.pad(torch.ones_like(x), (left, right))
        labels = padded.masked_fill(mask == 0, -100)
        out = model(padded, attention_mask=mask, labels=labels)
        close(out.logits[:, left : left + 9], plain.logits)
        close(out.loss, plain.loss)
        close(gradients(out.loss, model), wanted)
    with torch.no_grad():
        first = model(padded[:, :7], attention_mask=mask[:, :7], use_cache=True)
        second = model(padded[:, 7:], attention_mask=mask, past_key_values=first.past_key_values)
        close(torch.cat([first.logits, second.logits], 1)[:, 4:], plain.logits)


@torch.no_grad()
def test_packed_and_padded_at_once(build, ids):
    model, x = build(["rope", "fox"]), ids(1, 10)
    documents, mask = torch.tensor([[9, 9, 0, 0, 0, 0, 1, 1, 1, 9]]), torch.tensor([[0, 0, 1, 1, 1, 1, 1, 1, 1, 0]])
    out = model(x, document_ids=documents, attention_mask=mask).logits
    close(out[:, 2:6], model(x[:, 2:6]).logits)
    close(out[:, 6:9], model(x[:, 6:9]).logits)


@pytest.mark.parametrize("spec", SPECS, ids=str)
@torch.no_grad()
def test_positions_may_be_said(spec, build, ids):
    """position_ids [L], [1, L] or [B, L]; relative encodings see offsets alone; a cache goes on from where they ended."""
    model, x = build(spec), ids(2, 9)
    plain = model(x).logits
    count = torch.arange(9)
    for said in (count, count[None], count.expand(2, -1)):
        close(model(x, position_ids=said).logits, plain)
    later = model(x, position_ids=count + 20).logits
    relative = all(member.relative for member in model.model.encodings)
    assert torch.allclose(later, plain, atol=1e-9) == (
        relative or spec == "fire"
    )  # fire: below its threshold, relative
    first = model(x[:, :5], position_ids=count[None, :5] + 20, use_cache=True)
    close(model(x[:, 5:], past_key_values=first.past_key_values).logits, later[:, 5:])


@torch.no_grad()
def test_each_layer_may_have_its_own_encoding(build, ids):
    """Layer by layer: what a layer is given acts in that layer, with the weights held fixed."""
    x, weights = ids(), build("none").state_dict()
    models = {}
    for specs in (("none", "none"), ("rope", "none"), ("none", "rope"), ("rope", "rope")):
        models[specs] = build(None, encodings=list(specs))
        models[specs].load_state_dict(weights)
    states = {k: m(x, output_hidden_states=True).hidden_states for k, m in models.items()}
    plain = states["none", "none"]
    for specs, hidden in states.items():
        assert torch.allclose(hidden[1], plain[1]) == (specs[0] == "none")
    assert not torch.allclose(states["none", "rope"][2], plain[2])
    rope = build("rope")
    rope.load_state_dict(weights)
    close(rope(x).logits, models["rope", "rope"](x).logits)


# ---- outputs ---------------------------------------------------------------------------------------------------------
@torch.no_grad()
def test_hidden_states_and_attentions(build, ids):
    model, x = build("alibi"), ids()
    out = model(x, output_hidden_states=True, output_attentions=True)
    close(out.hidden_states[0], model.model.embed_tokens(x) * 4.0)  # sqrt(hidden_size)
    close(model.lm_head(out.hidden_states[-1]), out.logits)
    assert all((weights.triu(1) == 0).all() for weights in out.attentions)
    close(out.logits, model(x).logits)


@torch.no_grad()
def test_logits_to_keep_and_embeddings_instead_of_tokens(build, ids):
    model, x = build("sinusoidal"), ids()
    every = model(x).logits
    for keep, at in ((1, slice(-1, None)), (4, slice(-4, None)), (torch.tensor([0, 3, 12]), [0, 3, 12])):
        close(model(x, logits_to_keep=keep).logits, every[:, at])
    close(model(inputs_embeds=model.get_input_embeddings()(x)).logits, every)


@pytest.mark.parametrize("spec", ["rope", "t5", "fire", ["path", "fox"]], ids=str)
def test_half_precision(spec, build, ids):
    """A bfloat16 model: finite, near the float64 one, and gradients reach every learned number."""
    model, x = build(spec), ids(2, 40)
    exact = model(x).logits.detach()
    out = model.bfloat16()(x, labels=x)
    assert out.logits.dtype == torch.bfloat16 and out.loss.dtype == torch.float32
    assert (out.logits.double() - exact).abs().mean() < 0.05 * exact.abs().mean()
    out.loss.backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


def checkpointing(model, options=None):
    """By the name that this transformers has for it."""
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    enable(options)


@pytest.mark.one_in(4)
@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_checkpointing_gives_the_same_gradients(spec, build, ids):
    model, x = build(spec).train(), ids()
    plain = gradients(model(x, labels=x).loss, model)
    for reentrant in (False, True):
        checkpointing(model, {"use_reentrant": reentrant})
        again = model(x, labels=x).loss
        again.backward()
        found = [torch.zeros_like(p) if p.grad is None else p.grad for p in model.parameters()]
        close(found, list(plain))
        model.zero_grad()


def test_checkpointing_goes_without_a_cache_and_says_so(build, ids, caplog):
    model, x = build().train(), ids()
    checkpointing(model)
    assert model(x, use_cache=True).past_key_values is None
    assert model.eval()(x, use_cache=True).past_key_values is not None


def test_training_drops_and_evaluation_does_not(build, ids):
    model, x = build(hidden_dropout=0.3, attention_dropout=0.3), ids()
    close(model(x).logits, build()(x).logits)
    losses = {model.train()(x, labels=x).loss.item() for _ in range(3)}
    assert len(losses) == 3


@torch.no_grad()
def test_the_vocabulary_may_grow(build, ids):
    model, x = build("rope"), ids()
    before = model(x).logits
    model.resize_token_embeddings(VOCABULARY + 9, mean_resizing=False)
    assert model.config.vocab_size == VOCABULARY + 9 and model.lm_head.weight is model.model.embed_tokens.weight
    close(model(x).logits[..., :VOCABULARY], before)


# ---- refusals --------------------------------------------------------------------------------------------------------
X = torch.ones(2, 6, dtype=torch.long)
REFUSED = {
    "typo": ({"atention_mask": X}, "unknown argument 'atention_mask': did you mean 'attention_mask'"),
    "no input": ({"input_ids": None}, "expected either input_ids or inputs_embeds"),
    "both inputs": ({"inputs_embeds": torch.ones(2, 6, 16)}, "expected either input_ids or inputs_embeds"),
    "mask length": ({"attention_mask": X[:, :5]}, r"attention_mask: expected \[2, 6\].*got \[2, 5\]"),
    "mask of four axes": ({"attention_mask": torch.ones(2, 1, 6, 6)}, r"attention_mask: .*got \[2, 1, 6, 6\]"),
    "documents": ({"document_ids": X[:1]}, r"document_ids: expected \[2, 6\].*got \[1, 6\]"),
    "negative documents": (
        {"document_ids": X - 2},
        "document_ids: expected numbers of 0 or more, got -1; .*attention_mask",
    ),
    "padding in seq_idx": ({"seq_idx": X - 2}, "seq_idx: expected numbers of 0 or more, got -1; .*attention_mask"),
    "labels": ({"labels": X[:, :5]}, r"labels: expected \[2, 6\], got \[2, 5\]"),
    "labels of documents": ({"labels": X[:, :5], "document_ids": X}, r"labels: expected \[2, 6\], got \[2, 5\]"),
    "labels of a row": ({"labels": X[0]}, r"labels: expected \[2, 6\], got \[6\]"),
    "shift_labels": ({"shift_labels": X[:, :5]}, r"shift_labels: expected \[2, 6\], got \[2, 5\]"),
    "positions": ({"position_ids": X[:, :5]}, r"position_ids: expected \[6\] or \[2, 6\], got \[2, 5\]"),
    "float positions": ({"position_ids": torch.arange(6.0)}, "position_ids: expected integer positions"),
    "negative positions": ({"position_ids": X - 2}, "position_ids: expected positions of 0 or more, got -1"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refusals(case, build):
    options, message = REFUSED[case]
    with pytest.raises(ValueError, match=message):
        build()(**{"input_ids": X, **options})


EMBEDS = {
    "width": torch.ones(2, 6, 12),
    "rank": torch.ones(6, 16),
    "wider dtype": torch.ones(2, 6, 16, dtype=torch.float64),
    "integers": X[..., None].expand(2, 6, 16),
    "no tensor": [[1.0] * 16],
}


@pytest.mark.parametrize("kind", [lg.LongitudeForCausalLM, lg.LongitudeForMaskedLM, lg.LongitudeForSeq2SeqLM])
def test_embeddings_that_do_not_fit_are_refused(kind):
    config = lg.LongitudeConfig(
        vocab_size=8, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, norm="layernorm"
    )
    with torch.random.fork_rng():
        model = kind(config).eval()
    names = ["inputs_embeds"]
    if kind is lg.LongitudeForSeq2SeqLM:
        names.append("decoder_inputs_embeds")
    good = torch.ones(2, 6, 16)
    for name in names:
        for wrong in EMBEDS.values():
            with pytest.raises(ValueError, match=rf"^{name}: expected .*\[.*16\].*, got .*; "):
                model(**{**dict.fromkeys(names, good), name: wrong})
    model(**dict.fromkeys(names, good))
    with torch.autocast("cpu", torch.bfloat16):
        model(**dict.fromkeys(names, good.bfloat16()))
        with pytest.raises(ValueError, match="inputs_embeds: expected"):
            model(**dict.fromkeys(names, EMBEDS["width"]))


def test_a_table_that_ends_says_so(build, ids):
    model = build("learned", max_position_embeddings=12)
    model(ids(length=12))
    with pytest.raises(ValueError, match=r"Learned: expected positions 0 .. 11, got 0 .. 12"):
        model(ids(length=13))


def test_a_mask_must_cover_the_cache(build, ids):
    model, x = build(), ids()
    cache = model(x, use_cache=True).past_key_values
    with pytest.raises(ValueError, match=r"attention_mask: expected \[2, 14\], one per token, cached ones included"):
        model(x[:, :1], past_key_values=cache, attention_mask=torch.ones(2, 1, dtype=torch.long))


# ---- what has no meaning is refused ----------------------------------------------------------------------------------
def test_padding_between_tokens_is_refused() -> None:
    model = lg.LongitudeForCausalLM(lg.LongitudeConfig(hidden_size=16, num_hidden_layers=1, num_attention_heads=2))
    ids, hole = torch.tensor([[5, 6, 0, 7]]), torch.tensor([[1, 1, 0, 1]])
    with pytest.raises(ValueError, match="padding is between tokens of one sequence"):
        model(ids, attention_mask=hole)
    model(ids, attention_mask=hole, document_ids=torch.tensor([[0, 0, 0, 1]]))  # between documents it may
    with pytest.raises(ValueError, match="attention_mask: expected 1 for tokens and 0 for padding"):
        model(ids, attention_mask=torch.tensor([[-1e9, 0.0, 0.0, 0.0]]))


def test_an_option_that_is_nearly_ours_is_a_slip() -> None:
    with pytest.raises(ValueError, match="did you mean 'encoding'"):
        lg.LongitudeConfig(encodng="alibi")


def test_learned_rows_suffice_for_padded_text() -> None:
    """Padding stands at row 0, so a table of the text's length is enough however much is padded."""
    config = lg.LongitudeConfig(
        hidden_size=16, num_hidden_layers=1, num_attention_heads=2, max_position_embeddings=4, encoding="learned"
    )
    model = lg.LongitudeForCausalLM(config).eval()
    ids = torch.tensor([[0] * 6 + [5, 6, 7, 8]])
    padded = model(ids, attention_mask=(ids > 0).long()).logits[:, 6:]
    torch.testing.assert_close(padded, model(ids[:, 6:]).logits)
