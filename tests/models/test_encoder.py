"""The encoder and masked language models: tokens attend to both sides, not to padding nor to other documents."""

import inspect
import json

import pytest
import torch
import torch.nn.functional as F
from transformers import AutoConfig, AutoModelForMaskedLM, Trainer, TrainingArguments

import longitude as lg
from longitude.attention.mixer import MIXERS, list_mixers
from longitude.models import LongitudeConfig
from longitude.models.encoder import LongitudeForMaskedLM
from longitude.registry import options_of

VOCABULARY = 61
ONE_SIDED = ["cope", "fox", "path", "path_fox", "xpos"]
SPECS = [name for name in lg.list_encodings() if name not in ONE_SIDED] + [["rope", "t5"]]
SMALL = {
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
}


def build(encoding="rope", **options) -> LongitudeForMaskedLM:
    """A model in float64 and eval mode, its encodings filled with random numbers."""
    torch.manual_seed(0)
    model = LongitudeForMaskedLM(LongitudeConfig(encoding=encoding, **{**SMALL, **options})).double().eval()
    for parameter in model.model.encodings.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return model


def close(x, y, tolerance=1e-10):
    torch.testing.assert_close(x, y, atol=tolerance, rtol=0)


def gradients(loss, model):
    return torch.autograd.grad(loss, list(model.parameters()), allow_unused=True, materialize_grads=True)


# ---- who attends to whom ----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_it_attends_to_both_sides(spec, ids):
    """The first token's output depends on the last token, and the other way round."""
    model = build(spec)
    x = model.get_input_embeddings()(ids(1, 9)).detach().requires_grad_()
    logits = model(inputs_embeds=x).logits
    for place in (0, 4, 8):
        (gradient,) = torch.autograd.grad(logits[0, place].square().sum(), x, retain_graph=True)
        assert (gradient[0].abs().amax(-1) > 1e-9).all()


@pytest.mark.one_in(3)
@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_padding_changes_nothing(spec, ids):
    """Left, right or both: logits, loss and gradients of the tokens are those without."""
    model, x = build(spec), ids(1, 9)
    plain = model(x, labels=x)
    for left, right in ((4, 0), (0, 3), (2, 2)):
        padded = F.pad(x, (left, right), value=5)
        mask = F.pad(torch.ones_like(x), (left, right))
        out = model(padded, attention_mask=mask, labels=padded)  # nor is padding predicted
        close(out.logits[:, left : left + 9], plain.logits)
        close(out.loss, plain.loss)
        for ours, theirs in zip(gradients(out.loss, model), gradients(model(x, labels=x).loss, model), strict=True):
            close(ours, theirs)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_packed_documents_are_separate(spec, ids):
    model, x = build(spec), ids(2, 12)
    documents = torch.tensor([[0] * 5 + [1] * 4 + [2] * 3, [4] * 12])
    parts = [x[:1, :5], x[:1, 5:9], x[:1, 9:], x[1:]]
    packed, apart = model(x, labels=x, document_ids=documents), [model(p, labels=p) for p in parts]
    close(packed.logits[0], torch.cat([one.logits[0] for one in apart[:3]]))
    close(packed.logits[1], apart[3].logits[0])
    loss = sum(p.shape[1] * one.loss for p, one in zip(parts, apart, strict=True)) / x.numel()
    close(packed.loss, loss)
    for ours, theirs in zip(gradients(packed.loss, model), gradients(loss, model), strict=True):
        close(ours, theirs)


@pytest.mark.parametrize("spec", SPECS, ids=str)
@torch.no_grad()
def test_tokens_shuffled_with_their_positions(spec, ids):
    """Without a mask nothing but position tells tokens apart: the output is shuffled alike."""
    model, x = build(spec), ids(2, 11)
    order = torch.randperm(11, generator=torch.Generator().manual_seed(2))
    close(model(x[:, order], position_ids=torch.arange(11)[order]).logits, model(x).logits[:, order])


# ---- the three that live here: symmetric, and with numbers of their own for the future -------------------------------
@pytest.mark.parametrize("spec", ["none", "alibi", "kerple_log", "kerple_power"])
@torch.no_grad()
def test_a_symmetric_encoding_hears_a_mirror_image(spec, ids):
    """The reversed text has the reversed output, at odd lengths and even ones."""
    model = build(spec)
    for length in (1, 7, 12, 63):
        x = ids(2, length)
        close(model(x.flip(1)).logits, model(x).logits.flip(1))


@pytest.mark.parametrize("spec", ["t5", "shaw", "clipped", "rope", "sinusoidal"])
@torch.no_grad()
def test_the_others_do_not_until_past_and_future_change_places(spec, ids):
    """With the table's rows for past and future exchanged, the reversed text has the reversed output."""
    model, x = build({"name": spec, **({"max_distance": 6} if spec in ("shaw", "clipped") else {})}), ids(2, 13)
    expected = model(x).logits.flip(1)
    assert (model(x.flip(1)).logits - expected).abs().max() > 1e-3
    for member in model.model.encodings:
        if spec == "t5":  # bucket 0 is the token itself; each half has the other sign of the offset
            half = member.num_buckets // 2
            mirrored = member.table.clone()
            mirrored[1:half], mirrored[half + 1 :] = member.table[half + 1 :], member.table[1:half]
            member.table.copy_(mirrored)
        elif spec == "shaw":
            member.key_table.copy_(member.key_table.flip(0))
            member.value_table.copy_(member.value_table.flip(0))
        elif spec == "clipped":
            member.table.copy_(member.table.flip(1))
    if spec in ("t5", "shaw", "clipped"):
        close(model(x.flip(1)).logits, expected)


@torch.no_grad()
def test_alibi_falls_off_on_both_sides(ids):
    """The first block's weights by hand: softmax(q.k/sqrt(d) - m |i - j|), m = 2^(-8h/H)."""
    model, x = build("alibi", num_key_value_heads=4), ids(2, 9)
    weights = model(x, output_attentions=True).attentions[0]
    block = model.model.layers[0]
    h = block.mixer_norm(model.model.embed_tokens(x) * 4.0)
    q, k = ((h @ p.weight.T).view(2, 9, 4, 4).transpose(1, 2) for p in (block.mixer.q_proj, block.mixer.k_proj))
    slopes = torch.tensor([0.25, 0.0625, 0.015625, 0.00390625], dtype=torch.float64)
    distance = (torch.arange(9)[:, None] - torch.arange(9)).abs()
    close(weights, (q @ k.mT / 2 - slopes[:, None, None] * distance).softmax(-1))


def test_the_config_says_what_the_encoder_has():
    """T5's buckets are those for both sides; what has no such option stays; a list and layers of their own, too."""
    assert build("t5").config.encoding["bidirectional"] is True
    assert build("t5").model.encodings[0].bidirectional
    assert build("shaw").config.encoding == LongitudeConfig(encoding="shaw", **SMALL).encoding
    assert [one.get("bidirectional") for one in build(["alibi", "t5"]).config.encoding] == [None, True]
    each = build("auto", encodings=["alibi", "t5"]).config.encodings
    assert [one.get("bidirectional") for one in each] == [None, True]
    config = LongitudeConfig(encoding="t5", **SMALL)
    LongitudeForMaskedLM(config)
    assert config.encoding["bidirectional"] is False  # one's own config is left alone


# ---- the loss --------------------------------------------------------------------------------------------------------
def test_labels_are_where_they_stand(ids, monkeypatch):
    """The mean over labelled places of -log p(label), of the same place; in chunks too."""
    model, x = build("alibi"), ids(2, 12)
    labels = torch.where(torch.rand(2, 12, generator=torch.Generator().manual_seed(4)) < 0.3, ids(2, 12, seed=5), -100)
    out = model(x, labels=labels)
    log = out.logits.log_softmax(-1)
    picked = [-log[b, i, labels[b, i]] for b in range(2) for i in range(12) if labels[b, i] >= 0]
    assert 3 <= len(picked) <= 12
    close(out.loss, torch.stack(picked).mean())
    close(model(x, labels=labels, num_items_in_batch=torch.tensor(40)).loss, torch.stack(picked).sum() / 40)
    expected = gradients(out.loss, model)
    monkeypatch.setattr("longitude.models.loss.CHUNK_LOGITS", 5 * VOCABULARY)
    chunked = model(x, labels=labels)
    close(chunked.loss, out.loss)
    for ours, theirs in zip(gradients(chunked.loss, model), expected, strict=True):
        close(ours, theirs)


def test_logits_are_left_out_in_training(ids):
    model, x = build(), ids()
    assert model.train()(x, labels=x).logits is None
    assert model(x).logits is not None and model(x, labels=x, skip_logits=False).logits is not None
    assert model.eval()(x, labels=x).logits is not None
    loss, logits = model(x, labels=x, return_dict=False)
    close(loss, model(x, labels=x).loss)
    assert logits.shape == (*x.shape, VOCABULARY)


@torch.no_grad()
def test_hidden_states_and_attentions(ids):
    model, x = build("alibi"), ids()
    out = model(x, output_hidden_states=True, output_attentions=True)
    assert len(out.hidden_states) == 3 and len(out.attentions) == 2
    close(model.lm_head(out.hidden_states[-1]), out.logits)
    for weights in out.attentions:
        close(weights.sum(-1), torch.ones(2, 4, 13, dtype=torch.float64))
        assert (weights > 0).all()
    assert model.model(x, return_dict=False)[0].shape == (2, 13, 16)


@pytest.mark.parametrize("spec", ["alibi", "t5", "shaw"])
def test_checkpointing_gives_the_same_gradients(spec, ids):
    model, x = build(spec).train(), ids()
    plain = gradients(model(x, labels=x).loss, model)
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    for reentrant in (False, True):
        enable({"use_reentrant": reentrant})
        model(x, labels=x).loss.backward()
        for parameter, expected in zip(model.parameters(), plain, strict=True):
            close(parameter.grad, expected)
        model.zero_grad()


@pytest.mark.parametrize("spec", ["alibi", "t5", "shaw", "rope"])
def test_half_precision(spec, ids):
    model, x = build(spec), ids(2, 40)
    exact = model(x).logits.detach()
    out = model.bfloat16()(x, labels=x)
    assert out.logits.dtype == torch.bfloat16 and out.loss.dtype == torch.float32
    assert (out.logits.double() - exact).abs().mean() < 0.05 * exact.abs().mean()
    out.loss.backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


# ---- trained, saved, loaded ------------------------------------------------------------------------------------------
def test_trained_saved_and_loaded(ids, tmp_path):
    """Trainer, unchanged, on a text in which every third token is hidden: a neighbour on the right tells which it was."""
    model = build("t5", norm="layernorm", norm_position="post", hidden_act="gelu").float()
    x = ids(8, 12)
    x[:, ::3] = x[:, 1::3] // 2 + 1
    hidden = torch.zeros_like(x, dtype=torch.bool)
    hidden[:, ::3] = True
    examples = [
        {"input_ids": row.masked_fill(h, 0), "labels": row.masked_fill(~h, -100)}
        for row, h in zip(x, hidden, strict=True)
    ]
    arguments = TrainingArguments(
        output_dir=str(tmp_path), use_cpu=True, report_to=[], disable_tqdm=True, dataloader_pin_memory=False, max_steps=40,
        logging_steps=1, save_strategy="no", learning_rate=0.01, max_grad_norm=1.0, lr_scheduler_type="constant",
    )  # fmt: skip
    run = Trainer(model=model, args=arguments, train_dataset=examples, eval_dataset=examples)
    run.train()
    losses = [entry["loss"] for entry in run.state.log_history if "loss" in entry]
    assert losses[-1] < 0.3 * losses[0]
    run.save_model()
    written = json.loads((tmp_path / "config.json").read_text())
    assert written["encoding"]["bidirectional"] is True and written["architectures"] == ["LongitudeForMaskedLM"]
    loaded = LongitudeForMaskedLM.from_pretrained(tmp_path)
    for name, value in model.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], value), name
    assert loaded.lm_head.weight is loaded.model.embed_tokens.weight
    with torch.no_grad():
        torch.testing.assert_close(loaded(x).logits, model.eval()(x).logits)


@torch.no_grad()
def test_the_auto_class_knows_it(ids, tmp_path):
    model = build("shaw")
    model.save_pretrained(tmp_path)
    loaded = AutoModelForMaskedLM.from_pretrained(tmp_path, dtype=torch.float64)
    assert isinstance(loaded, LongitudeForMaskedLM)
    close(loaded(ids()).logits, model(ids()).logits)
    assert isinstance(AutoModelForMaskedLM.from_config(AutoConfig.from_pretrained(tmp_path)), LongitudeForMaskedLM)


@torch.no_grad()
def test_the_vocabulary_may_grow(ids):
    model, x = build("t5"), ids()
    before = model(x).logits
    model.resize_token_embeddings(VOCABULARY + 9, mean_resizing=False)
    assert model.config.vocab_size == VOCABULARY + 9 and model.lm_head.weight is model.model.embed_tokens.weight
    close(model(x).logits[..., :VOCABULARY], before)


# ---- what cannot be --------------------------------------------------------------------------------------------------
def test_encodings_of_the_past_alone_are_refused():
    """Each of them, alone or in company: the refusal names it, the encoder, and what works."""
    for name in ONE_SIDED:
        for spec in (name, ["sinusoidal", name]):
            kind = {"cope": "CoPE", "fox": "FoX", "path": "PaTH", "path_fox": "PaTH", "xpos": "XPos"}[name]
            with pytest.raises(
                ValueError, match=f"{kind} has no meaning .* an encoder attends to them; expected one of alibi, ax"
            ):
                build(spec)


@pytest.mark.parametrize("name", list_mixers())
def test_every_mixer_is_bidirectional_or_refused(name, ids):
    kind = MIXERS[name]
    encoding, own = "sinusoidal", {"name": name, **({"size": 5} if "size" in options_of(kind) else {})}
    if not kind.bidirectional:
        with pytest.raises(ValueError, match=f"'{name}' is causal, .*both sides; expected 'attention'"):
            build(encoding, mixer=own)
        with pytest.raises(ValueError, match=f"'{name}' is causal"):
            build(encoding, mixers=["attention", own])
        return
    model, x = build(encoding, mixer=own), ids(1, 9)
    embedded = model.get_input_embeddings()(x).detach().requires_grad_()
    (gradient,) = torch.autograd.grad(model(inputs_embeds=embedded).logits[0, 0].square().sum(), embedded)
    assert (gradient[0].abs().amax(-1) > 1e-9).all()
    padded, mask = F.pad(x, (2, 3), value=5), F.pad(torch.ones_like(x), (2, 3))
    close(model(padded, attention_mask=mask).logits[:, 2:11], model(x).logits)


X = torch.ones(2, 6, dtype=torch.long)
REFUSED = {
    "typo": ({"atention_mask": X}, "unknown argument 'atention_mask': did you mean 'attention_mask'"),
    "no input": ({"input_ids": None}, "expected either input_ids or inputs_embeds"),
    "mask length": ({"attention_mask": X[:, :5]}, r"attention_mask: expected \[2, 6\].*got \[2, 5\]"),
    "labels": ({"labels": X[:, :5]}, r"labels: expected \[2, 6\], got \[2, 5\]"),
    "a cache": ({"use_cache": True}, "unknown argument 'use_cache'"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refusals(case):
    options, message = REFUSED[case]
    with pytest.raises(ValueError, match=message):
        build()(**{"input_ids": X, **options})


def test_signature_is_what_trainer_reads():
    """Trainer finds labels and padding by these names."""
    names = list(inspect.signature(LongitudeForMaskedLM.forward).parameters)
    assert {"input_ids", "attention_mask", "labels", "num_items_in_batch"} <= {*names}
