"""What transformers and its users expect of every model class, whatever stands in it."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers.loss.loss_utils import ForCausalLMLoss
from transformers.modeling_outputs import ModelOutput

from longitude.models import LongitudeConfig, LongitudeForCausalLM, LongitudeForMaskedLM, LongitudeForSeq2SeqLM
from longitude.models.decoder import LongitudeModel
from longitude.models.encoder import LongitudeEncoder
from longitude.models.seq2seq import LongitudeEncoderDecoder

HEADS = {
    LongitudeForCausalLM: LongitudeModel,
    LongitudeForMaskedLM: LongitudeEncoder,
    LongitudeForSeq2SeqLM: LongitudeEncoderDecoder,
}
CLASSES = [*HEADS, *HEADS.values()]
SMALL = {
    "vocab_size": 61,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "pad_token_id": 0,
}

every_class = pytest.mark.parametrize("kind", CLASSES, ids=lambda kind: kind.__name__)
every_head = pytest.mark.parametrize("kind", HEADS, ids=lambda kind: kind.__name__)


def made(kind: Any, **options: Any) -> Any:
    torch.manual_seed(0)
    return kind(LongitudeConfig(**{"encoding": "alibi", **SMALL, **options})).double().eval()


def inputs(kind: Any, length: int = 9) -> dict[str, Tensor]:
    """The source is shorter than the target, and each has padding."""
    ids = torch.randint(3, 61, (2, length), generator=torch.Generator().manual_seed(1))
    mask = torch.arange(length) < torch.tensor([[length], [length - 2]])
    if kind not in (LongitudeForSeq2SeqLM, LongitudeEncoderDecoder):
        return {"input_ids": ids, "attention_mask": mask}
    source = {"input_ids": ids[:, :7], "attention_mask": mask[:, :7]}
    return {**source, "decoder_input_ids": ids, "decoder_attention_mask": mask}


def same(x: Any, y: Any) -> None:
    """Equal in every tensor, and in what is None."""
    if isinstance(x, tuple | list):
        assert len(x) == len(y)
        for a, b in zip(x, y, strict=True):
            same(a, b)
    elif isinstance(x, Tensor):
        torch.testing.assert_close(x, y)
    else:
        assert type(x) is type(y)


def held(out: ModelOutput, ending: str) -> dict[str, Any]:
    return {name: value for name, value in out.items() if name.endswith(ending)}


# ---- what is returned ------------------------------------------------------------------------------------------------
@every_class
@torch.no_grad()
def test_the_config_asks_as_the_call_does(kind):
    """And the call counts more."""
    x = inputs(kind)
    plain, asking = made(kind), made(kind, output_hidden_states=True, output_attentions=True, norm_position="post")
    said = made(kind, norm_position="post")(**x, output_hidden_states=True, output_attentions=True)
    later = made(kind, norm_position="post")
    later.config.output_hidden_states = later.config.output_attentions = True
    for out in (asking(**x), later(**x)):
        assert out.keys() == said.keys()
        same(out.to_tuple(), said.to_tuple())
    assert held(said, "hidden_states") and held(said, "attentions")
    quiet = asking(**x, output_hidden_states=False, output_attentions=False)
    assert not held(quiet, "hidden_states") and not held(quiet, "attentions")
    assert plain(**x).keys() == quiet.keys()


@every_class
@torch.no_grad()
def test_tuples(kind):
    """Asked for by the call or by the config, inner models included."""
    x, model = {**inputs(kind), "output_hidden_states": True}, made(kind)
    want = model(**x).to_tuple()
    same(model(**x, return_dict=False), want)
    assert isinstance(model(**x, return_dict=None), ModelOutput)
    model.config.return_dict = False
    same(model(**x), want)
    assert isinstance(model(**x, return_dict=True), ModelOutput)
    same(made(kind, return_dict=False)(**x), want)


@every_class
@torch.no_grad()
def test_chosen_hidden_states(kind):
    model, x = made(kind), inputs(kind)
    every = model(**x, output_hidden_states=True)
    for chosen, kept in (([0, -1], {0, 2}), (1, {1}), ([1, -2], {1})):
        out = model(**x, output_hidden_states=chosen)
        for name, states in held(every, "hidden_states").items():
            same(out[name], tuple(state if i in kept else None for i, state in enumerate(states)))
    with pytest.raises(ValueError, match="expected indices from -3 to 2, got 3"):
        model(**x, output_hidden_states=[3])


@every_class
@torch.no_grad()
def test_weights_are_weights(kind):
    """Each row sums to 1 over the keys that are none of padding."""
    x = inputs(kind)
    out = made(kind)(**x, output_attentions=True)
    for name, layers in held(out, "attentions").items():
        keys = x["attention_mask"] if not name.startswith("decoder") else x["decoder_attention_mask"]
        queries = x["attention_mask"] if name in ("attentions", "encoder_attentions") else x["decoder_attention_mask"]
        assert len(layers) == 2
        for weights in layers:
            assert weights.shape == (2, 4, queries.shape[1], keys.shape[1])
            assert (weights.masked_select(~keys[:, None, None]) == 0).all()
            sums = weights.sum(-1).transpose(1, 2)[queries]
            torch.testing.assert_close(sums, torch.ones_like(sums))


@pytest.mark.parametrize("kind", [LongitudeModel, LongitudeForCausalLM])
@torch.no_grad()
def test_layers_without_weights(kind):
    """None for the layer of a state, and an error where no layer has any; hidden states come from all."""
    model, x = made(kind, encoding="none", mixers=["retention", "attention"]), inputs(kind)
    out = model(**x, output_attentions=True, output_hidden_states=True)
    assert out.attentions[0] is None and out.attentions[1].shape == (2, 4, 9, 9)
    assert all(state.shape == (2, 9, 16) for state in out.hidden_states)
    states = made(kind, encoding="none", mixer="retention")
    assert len(states(**x, output_hidden_states=True).hidden_states) == 3
    with pytest.raises(ValueError, match=r"output_attentions: no layer .* are Retention; expected one of attention, "):
        states(**x, output_attentions=True)


@torch.no_grad()
def test_an_encoder_decoder_gives_what_its_stacks_give():
    model = made(LongitudeForSeq2SeqLM, mixers=["retention", "attention"], encoding="none", encoder_encoding="rope")
    x = inputs(LongitudeForSeq2SeqLM)
    out = model(**x, output_hidden_states=True, output_attentions=True)
    encoded = model.encoder(x["input_ids"], x["attention_mask"], output_hidden_states=True, output_attentions=True)
    decoded = model.decoder(
        inputs_embeds=model.encoder.embed_tokens(x["decoder_input_ids"]),
        attention_mask=x["decoder_attention_mask"],
        source=encoded.last_hidden_state,
        source_valid=x["attention_mask"],
        output_hidden_states=True,
        output_attentions=True,
    )
    same(out.encoder_hidden_states, encoded.hidden_states)
    same(out.encoder_attentions, encoded.attentions)
    same(out.decoder_hidden_states, decoded.hidden_states)
    same(out.decoder_attentions, decoded.attentions)
    same(out.cross_attentions, decoded.cross_attentions)
    assert out.decoder_attentions[0] is None and all(weights is not None for weights in out.cross_attentions)


def test_memories_that_were_not_kept():
    model, x = made(LongitudeModel), inputs(LongitudeModel)["input_ids"]
    kept = model(x, output_hidden_states=[0]).hidden_states
    with pytest.raises(ValueError, match="memories: expected a tensor for each layer"):
        model(x, memories=kept)


# ---- base models -----------------------------------------------------------------------------------------------------
@every_head
@torch.no_grad()
def test_the_base_model_is_where_its_prefix_says(kind, tmp_path):
    """A head's checkpoint loads into the base model, and the base model's into a head."""
    model, x = made(kind), inputs(kind)
    base = getattr(model, model.base_model_prefix)
    assert model.base_model is base and type(base) is HEADS[kind] and base.config is model.config
    hidden = base(**x)[0]
    model.save_pretrained(tmp_path / "head")
    base.save_pretrained(tmp_path / "base")
    for source in ("head", "base"):
        for loaded in (
            HEADS[kind].from_pretrained(tmp_path / source),
            kind.from_pretrained(tmp_path / source).base_model,
        ):
            same(loaded(**x)[0], hidden)
    assert model.get_encoder() is (model.encoder if kind is LongitudeForSeq2SeqLM else model)


@every_class
def test_a_checkpoint_of_another_kind_is_refused(kind, tmp_path):
    made(kind).save_pretrained(tmp_path)
    for other in CLASSES:
        if other.written_by != kind.written_by:
            with pytest.raises(
                ValueError, match=f"expected a checkpoint of {other.written_by}, got one of {kind.__name__}"
            ):
                other.from_pretrained(tmp_path)


# ---- the loss --------------------------------------------------------------------------------------------------------
class Adapted(nn.Module):
    """A head with something more, as adapters make it; `weight` is still the plain one's."""

    def __init__(self, head: nn.Linear):
        super().__init__()
        self.head, self.weight = head, head.weight
        self.more = nn.Parameter(torch.randn_like(head.weight))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(x) + x @ self.more.mT


@every_head
@pytest.mark.parametrize("adapted", [False, True])
def test_the_loss_is_that_of_the_logits(kind, adapted):
    """Whatever makes them; and it is a function of those returned, in evaluation and in training."""
    model, x = made(kind), inputs(kind)
    if adapted:
        model.lm_head = Adapted(model.lm_head)
    labels = x.get("decoder_input_ids", x["input_ids"]).masked_fill(torch.arange(9) % 4 == 2, -100)
    mask = x["attention_mask"]
    if kind is not LongitudeForSeq2SeqLM:
        labels = labels.masked_fill(~mask, -100)
    shifted = None if kind is LongitudeForCausalLM else labels
    for training in (False, True):
        out = model.train(training)(**x, labels=labels, skip_logits=False)
        assert torch.autograd.grad(out.loss, out.logits, retain_graph=True)[0].abs().max() > 0
        theirs = ForCausalLMLoss(out.logits, labels, 61, shift_labels=shifted)
        torch.testing.assert_close(out.loss.float(), theirs.float())
        torch.testing.assert_close(model(**x, labels=labels, skip_logits=True).loss, out.loss)
        if kind is not LongitudeForMaskedLM:
            last = model(**x, labels=labels, skip_logits=False, logits_to_keep=2)
            torch.testing.assert_close(last.loss, out.loss)
            assert last.logits.shape[1] == 2
