"""The encoder: tokens attend to both sides, not to padding nor to other documents."""

import pytest
import torch
import torch.nn.functional as F

import longitude as lg
from longitude.attention.mixer import MIXERS, list_mixers
from longitude.models import LongitudeForMaskedLM
from tests.models.conftest import mixer_spec
from tests.support import close, parameter_gradients, refused

CAUSAL_ONLY = {
    "cope": "CoPE", "fox": "FoX", "path": "PaTH", "path_fox": "PaTH", "xpos": "XPos", "rerope": "ReRoPE",
    "leaky_rerope": "LeakyReRoPE", "self_extend": "SelfExtend", "dual_chunk": "DualChunk",
}  # fmt: skip
SPECS = [name for name in lg.list_encodings() if name not in CAUSAL_ONLY] + [["rope", "t5"]]


@pytest.fixture
def build(build):
    return lambda encoding, **options: build(encoding, LongitudeForMaskedLM, **options)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_packed_documents_are_separate(spec, build, ids):
    model, x = build(spec), ids(2, 12)
    documents = torch.tensor([[0] * 5 + [1] * 4 + [2] * 3, [4] * 12])
    parts = [x[:1, :5], x[:1, 5:9], x[:1, 9:], x[1:]]
    packed, apart = model(x, labels=x, document_ids=documents), [model(p, labels=p) for p in parts]
    close(packed.logits.flatten(0, 1), torch.cat([output.logits[0] for output in apart]), 1e-10)
    loss = sum(p.shape[1] * output.loss for p, output in zip(parts, apart, strict=True)) / x.numel()
    close(packed.loss, loss, 1e-10)
    close(parameter_gradients(packed.loss, model), parameter_gradients(loss, model), 1e-10)


def test_the_config_holds_what_the_encoder_has(build):
    """T5's buckets are those for both sides; what has no such option stays; a list and layers of their own, too."""
    assert build("t5").config.encoding["bidirectional"] and build("t5").model.encodings[0].bidirectional
    assert build("shaw").config.encoding == lg.LongitudeConfig(encoding="shaw", hidden_size=16).encoding
    both = build(["alibi", "t5"]).config.encoding, build("auto", encodings=["alibi", "t5"]).config.encodings
    for specs in both:
        assert [spec.get("bidirectional") for spec in specs] == [None, True]


def test_encodings_of_the_past_alone_are_refused(build):
    """In company too: the refusal names it, the encoder, and what works."""
    for name, kind in CAUSAL_ONLY.items():
        with refused(kind, "encoder", "abacus", "alibi"):
            build(["sinusoidal", name])


@pytest.mark.parametrize("name", list_mixers())
def test_every_mixer_is_bidirectional_or_refused(name, build, ids):
    kind = MIXERS[name]
    spec = mixer_spec(name)
    if not kind.bidirectional:
        for options in ({"mixer": spec}, {"mixers": ["attention", spec]}):
            with refused(f"'{name}'", "'attention'"):
                build("sinusoidal", **options)
        return
    model, x = build("sinusoidal", mixer=spec), ids(1, 9)
    embedded = model.get_input_embeddings()(x).detach().requires_grad_()
    (gradient,) = torch.autograd.grad(model(inputs_embeds=embedded).logits[0, 0].square().sum(), embedded)
    assert (gradient[0].abs().amax(-1) > 1e-9).all()
    padded, mask = F.pad(x, (2, 3), value=5), F.pad(torch.ones_like(x), (2, 3))
    close(model(padded, attention_mask=mask).logits[:, 2:11], model(x).logits, 1e-10)
