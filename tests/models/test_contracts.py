"""What transformers and its users expect of every model class, whatever stands in it."""

import json
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForMaskedLM, AutoModelForSeq2SeqLM, DynamicCache
from transformers.loss.loss_utils import ForCausalLMLoss
from transformers.modeling_outputs import ModelOutput

from longitude.models import LongitudeConfig, LongitudeForCausalLM, LongitudeForMaskedLM, LongitudeForSeq2SeqLM
from longitude.models.decoder import LongitudeModel
from longitude.models.encoder import LongitudeEncoder
from longitude.models.seq2seq import LongitudeEncoderDecoder
from tests.support import close, parameter_gradients, refused

CAUSAL, MASKED, SEQ2SEQ = LongitudeForCausalLM, LongitudeForMaskedLM, LongitudeForSeq2SeqLM
BASES = {CAUSAL: LongitudeModel, MASKED: LongitudeEncoder, SEQ2SEQ: LongitudeEncoderDecoder}
AUTO = {CAUSAL: AutoModelForCausalLM, MASKED: AutoModelForMaskedLM, SEQ2SEQ: AutoModelForSeq2SeqLM}
CLASSES = [*BASES, *BASES.values()]

every_class = pytest.mark.parametrize("kind", CLASSES, ids=lambda kind: kind.__name__)
every_head = pytest.mark.parametrize("kind", BASES, ids=lambda kind: kind.__name__)


def inputs(kind: Any, length: int = 9) -> dict[str, Tensor]:
    """The source is shorter than the target, and each has padding."""
    ids = torch.randint(3, 61, (2, length), generator=torch.Generator().manual_seed(1))
    mask = torch.arange(length) < torch.tensor([[length], [length - 2]])
    if kind not in (SEQ2SEQ, LongitudeEncoderDecoder):
        return {"input_ids": ids, "attention_mask": mask}
    source = {"input_ids": ids[:, :7], "attention_mask": mask[:, :7]}
    return {**source, "decoder_input_ids": ids, "decoder_attention_mask": mask}


def labelled(kind: Any) -> dict[str, Tensor]:
    """The same with labels, some of which are to be skipped."""
    x = inputs(kind)
    labels = x.get("decoder_input_ids", x["input_ids"]).masked_fill(torch.arange(9) % 4 == 2, -100)
    return {**x, "labels": labels if kind is SEQ2SEQ else labels.masked_fill(~x["attention_mask"], -100)}


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


def ending(out: ModelOutput, name: str) -> dict[str, Any]:
    """Outputs whose names end so."""
    return {key: value for key, value in out.items() if key.endswith(name)}


# ---- what is returned ------------------------------------------------------------------------------------------------
@every_class
@torch.no_grad()
def test_the_config_asks_as_the_call_does(kind, build):
    """And the call counts more."""
    x, also = inputs(kind), {"output_hidden_states": True, "output_attentions": True}
    asking, model = (build("alibi", kind, norm_position="post", **options) for options in (also, {}))
    want = model(**x, **also)
    neither = asking(**x, output_hidden_states=False, output_attentions=False)
    assert model(**x).keys() == neither.keys()
    model.config.output_hidden_states = model.config.output_attentions = True
    for out in (asking(**x), model(**x)):
        assert out.keys() == want.keys()
        same(out.to_tuple(), want.to_tuple())
    assert ending(want, "hidden_states") and ending(want, "attentions")
    assert not ending(neither, "hidden_states") and not ending(neither, "attentions")


@every_head
@torch.no_grad()
def test_hidden_states_begin_with_embeddings_and_end_before_the_head(kind, build):
    model, x = build("alibi", kind), inputs(kind)
    out = model(**x, output_hidden_states=True)
    for name, states in ending(out, "hidden_states").items():
        tokens = x["decoder_input_ids"] if name.startswith("decoder") else x["input_ids"]
        close(states[0], model.get_input_embeddings()(tokens) * 4.0)  # sqrt(hidden_size)
        assert len(states) == 3
    close(model.lm_head(states[-1]) if kind is not SEQ2SEQ else out.logits, out.logits)
    if kind is not MASKED:
        for keep, at in ((4, slice(-4, None)), (torch.tensor([0, 3, 8]), [0, 3, 8])):
            close(model(**x, logits_to_keep=keep).logits, out.logits[:, at])


# ---- padding ---------------------------------------------------------------------------------------------------------
PADDED = [(kind, name) for kind in BASES for name in ("t5", "learned", "path_fox", "shaw", "mrope")]


@pytest.mark.one_in(2)
@pytest.mark.parametrize(("kind", "name"), [case for case in PADDED if case != (MASKED, "path_fox")])
def test_padding_changes_nothing(kind, name, build, ids):
    """Left, right or both: logits, loss and gradients of the tokens are those without. Padding is not predicted."""
    model, x = build(name, kind, **({"encoder_encoding": "t5"} if kind is SEQ2SEQ else {}), bos_token_id=1), ids(1, 9)
    plain = model(x, labels=x)
    wanted = parameter_gradients(plain.loss, model)
    for left, right in ((4, 0), (0, 3), (2, 2)):
        padded, mask = F.pad(x, (left, right), value=5), F.pad(torch.ones_like(x), (left, right))
        labels = {CAUSAL: padded.masked_fill(mask == 0, -100), MASKED: padded, SEQ2SEQ: x}[kind]
        out = model(padded, attention_mask=mask, labels=labels)
        close(out.logits if kind is SEQ2SEQ else out.logits[:, left : left + 9], plain.logits, 1e-10)
        close(out.loss, plain.loss, 1e-10)
        close(parameter_gradients(out.loss, model), wanted, 1e-10)


# ---- checkpoints -----------------------------------------------------------------------------------------------------
@every_head
@torch.no_grad()
def test_the_base_model_is_where_its_prefix_points(kind, build, tmp_path):
    """A head's checkpoint loads into the base model, and the base model's into a head; the Auto class loads the head's."""
    model, x = build("alibi", kind), inputs(kind)
    base = getattr(model, model.base_model_prefix)
    assert model.base_model is base and type(base) is BASES[kind] and base.config is model.config
    hidden = base(**x)[0]
    model.save_pretrained(tmp_path / "head")
    base.save_pretrained(tmp_path / "base")
    for source in ("head", "base"):
        same(BASES[kind].from_pretrained(tmp_path / source)(**x)[0], hidden)
        same(kind.from_pretrained(tmp_path / source).base_model(**x)[0], hidden)
    loaded = AUTO[kind].from_pretrained(tmp_path / "head", dtype=torch.float64)
    assert type(loaded) is kind and loaded.lm_head.weight is loaded.get_input_embeddings().weight
    close(loaded(**x).logits, model(**x).logits, 1e-10)
    assert json.loads((tmp_path / "head" / "config.json").read_text())["architectures"] == [kind.__name__]
    made = AUTO[kind].from_config(AutoConfig.from_pretrained(tmp_path / "head"))
    assert {n: p.shape for n, p in made.named_parameters()} == {n: p.shape for n, p in model.named_parameters()}
    assert model.get_encoder() is (model.encoder if kind is SEQ2SEQ else model)


@pytest.mark.one_in(2)
@every_class
def test_a_checkpoint_of_another_kind_is_refused(kind, build, tmp_path):
    """An encoder's weights fit a decoder, which would make nonsense of them without a word."""
    build("alibi", kind).save_pretrained(tmp_path)
    readers = {other: other.written_by for other in CLASSES} | {auto: head.__name__ for head, auto in AUTO.items()}
    for other, written_by in readers.items():
        if written_by != kind.written_by:
            with refused(written_by, kind.__name__):
                other.from_pretrained(tmp_path)


@every_head
@torch.no_grad()
def test_the_vocabulary_may_grow(kind, build):
    """One matrix embeds and predicts, and stays one."""
    model, x = build("t5", kind), inputs(kind)
    before = model(**x).logits
    assert [tuple(p.shape) for p in model.parameters()].count((61, 16)) == 1
    model.resize_token_embeddings(70, mean_resizing=False)
    assert model.config.vocab_size == 70 and model.lm_head.weight is model.get_input_embeddings().weight
    close(model(**x).logits[..., :61], before)
    untied = build("t5", kind, tie_word_embeddings=False)
    assert untied.lm_head.weight is not untied.get_input_embeddings().weight


# ---- training --------------------------------------------------------------------------------------------------------
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
def test_the_loss_is_that_of_the_logits(kind, adapted, build):
    """Whatever makes them; and in evaluation it is a function of those returned."""
    model, x = build("alibi", kind), labelled(kind)
    if adapted:
        model.lm_head = Adapted(model.lm_head)
    shifted = None if kind is CAUSAL else x["labels"]
    out = model(**x)
    assert torch.autograd.grad(out.loss, out.logits, retain_graph=True)[0].abs().max() > 0
    if kind is not MASKED:
        last = model(**x, logits_to_keep=2)
        torch.testing.assert_close(last.loss, out.loss)
        assert last.logits.shape[1] == 2
    for training in (False, True):
        for items in (None, 40, torch.tensor(40)):
            theirs = ForCausalLMLoss(out.logits, x["labels"], 61, num_items_in_batch=items, shift_labels=shifted)
            loss = model.train(training)(**x, num_items_in_batch=items).loss
            torch.testing.assert_close(loss.float(), theirs.float())
        assert (model(**x).logits is None) == training


@pytest.mark.one_in(2)
@every_head
@pytest.mark.parametrize(("name", "position"), [("t5", "pre"), ("sinusoidal", "post")])
def test_checkpointing_gives_the_same_gradients(kind, name, position, build):
    """And goes without a cache."""
    model, x = build(name, kind, norm_position=position).train(), labelled(kind)
    plain = parameter_gradients(model(**x).loss, model)
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    cache = {} if kind is MASKED else {"use_cache": True}
    for reentrant in (False, True):
        enable({"use_reentrant": reentrant})
        out = model(**x, **cache)
        assert not cache or out.cache is None
        out.loss.backward()
        close([torch.zeros_like(p) if p.grad is None else p.grad for p in model.parameters()], plain, 1e-10)
        model.zero_grad()
    if cache:
        filled = model.eval()(**x, **cache).cache
        assert filled.get_seq_length() == 9
        with refused("cache", "gradient_checkpointing_disable", "9"):
            model.train()(**x, cache=filled)


@every_head
def test_dropout_acts_in_training_alone(kind, build):
    model, x = build("rope", kind, hidden_dropout=0.3, attention_dropout=0.3), labelled(kind)
    close(model(**x).logits, build("rope", kind)(**x).logits)
    assert len({model.train()(**x).loss.item() for _ in range(3)}) == 3


# ---- refusals --------------------------------------------------------------------------------------------------------
X = torch.full((2, 6), 3)
ONES = torch.ones(2, 6, 16).double()
ENCODED = {"encoder_outputs": (ONES[:, :4],)}
REFUSED = [
    (CAUSAL, {"atention_mask": X}, ("'atention_mask'", "'attention_mask'")),
    (MASKED, {"use_cache": True}, ("'use_cache'",)),
    (CAUSAL, {"input_ids": None}, ("input_ids", "inputs_embeds")),
    (SEQ2SEQ, {"labels": None}, ("decoder_input_ids", "decoder_inputs_embeds")),
    (SEQ2SEQ, {"decoder_input_ids": X, "decoder_inputs_embeds": ONES}, ("decoder_input_ids", "decoder_inputs_embeds")),
    (CAUSAL, {"attention_mask": X[:, :5]}, ("attention_mask", "[2, 6]", "[2, 5]")),
    (SEQ2SEQ, ENCODED | {"input_ids": None, "attention_mask": X}, ("attention_mask", "[2, 4]", "[2, 6]")),
    (CAUSAL, {"document_ids": X[:1]}, ("document_ids", "[2, 6]", "[1, 6]")),
    (CAUSAL, {"document_ids": X - 4}, ("document_ids", "0", "-1", "attention_mask")),
    (SEQ2SEQ, {"document_ids": X}, ("document_ids",)),
    (CAUSAL, {"labels": X[:, :5]}, ("labels", "[2, 6]", "[2, 5]")),
    (CAUSAL, {"position_ids": X[:, :5]}, ("position_ids", "[6]", "[2, 6]", "[2, 5]")),
    (CAUSAL, {"position_ids": X - 4}, ("positions", "position_ids", "0", "-1")),
    (SEQ2SEQ, {"cache": DynamicCache()}, ("cache", "EncoderDecoderCache")),
]


@pytest.mark.parametrize(("kind", "options", "message"), REFUSED)
def test_refusals(kind, options, message, build):
    model = build("rope", kind, bos_token_id=1)
    arguments = {"input_ids": X, **({"labels": X} if kind is SEQ2SEQ and "decoder_input_ids" not in options else {})}
    with refused(*message):
        model(**arguments | options)


NARROW = torch.ones(2, 6, 12)


@every_head
def test_embeddings_instead_of_tokens(kind, build):
    """The same answer; what does not fit is refused."""
    model, x = build("sinusoidal", kind, norm="layernorm"), inputs(kind)
    tokens = [name for name in x if name.endswith("input_ids")]
    embedded = {name.replace("input_ids", "inputs_embeds"): model.get_input_embeddings()(x[name]) for name in tokens}
    masks = {name: x[name] for name in x if name not in tokens}
    close(model(**embedded, **masks).logits, model(**x).logits)
    model.float()
    good = {name: torch.ones(2, 6, 16) for name in embedded}
    for name in good:
        for wrong in (NARROW, ONES, [[1.0] * 16]):  # another width, a wider dtype, no tensor
            with refused(name, "16"):
                model(**good | {name: wrong})
    model(**good)
    with torch.autocast("cpu", torch.bfloat16):
        model(**{name: embeds.bfloat16() for name, embeds in good.items()})
        with refused("inputs_embeds"):
            model(**dict.fromkeys(good, NARROW))


@pytest.mark.parametrize("kind", [CAUSAL, SEQ2SEQ])
def test_continuous_batching_is_refused_at_the_call(kind, build):
    with refused("generate_batch", "attention_mask", kind.__name__):
        build("rope", kind).generate_batch([[3, 4, 5], [3]], max_new_tokens=2)


def test_ones_own_config_is_left_alone():
    config = LongitudeConfig(encoding="t5", vocab_size=61)
    before = config.to_dict()
    masked, seq2seq = MASKED(config), SEQ2SEQ(config)
    assert config.to_dict() == before and not config.is_encoder_decoder
    assert masked.config.encoding["bidirectional"]
    assert seq2seq.config.is_encoder_decoder and not seq2seq.encoder.config.is_encoder_decoder
