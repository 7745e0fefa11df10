"""Packed text, however it is marked: each document is as if alone, and nothing of one reaches another."""

from functools import partial

import pytest
import torch
from transformers import DataCollatorWithFlattening
from transformers.masking_utils import find_packed_sequence_indices

from longitude.attention.documents import documents_of, runs_of, starting_over
from tests.support import close as near, refused

close = partial(near, atol=1e-10)

LENGTHS = (8, 12, 1, 3)
TOKENS = sum(LENGTHS)
PLACES = torch.cat([torch.arange(n) for n in LENGTHS])[None]
ENDS = torch.tensor([0, *torch.tensor(LENGTHS).cumsum(0).tolist()], dtype=torch.int32)
NUMBERS = torch.repeat_interleave(torch.arange(len(LENGTHS)), torch.tensor(LENGTHS))[None]
MOST = {"max_length_q": 12, "max_length_k": 12}

MARKS = {
    "position_ids": {"position_ids": PLACES},
    "document_ids": {"document_ids": NUMBERS},
    "document_ids that come back": {"document_ids": NUMBERS % 2},
    "seq_idx": {"seq_idx": NUMBERS.int()},
    "cu_seq_lens": {"cu_seq_lens_q": ENDS, "cu_seq_lens_k": ENDS, **MOST},
}
MARKS["all of them"] = MARKS["position_ids"] | MARKS["seq_idx"] | MARKS["cu_seq_lens"]
HIERARCHICAL = {"name": "hierarchical", "window": 4}
MODELS = [
    {"encoding": "rope"},
    {"encoding": "fox"},
    {"encoding": "learned"},
    {"encoding": "auto", "mixers": ["mamba2", "attention", HIERARCHICAL], "num_hidden_layers": 3},
    {"encoding": "nope", "mixers": ["rwkv6", {"name": "window", "size": 5}]},
    {"encoding": "rope", "mixers": ["latent", "retention"]},
]


@pytest.mark.one_in(3)
@pytest.mark.parametrize("options", MODELS, ids=str)
def test_packed_is_alone(options, build, ids):
    """Logits, the loss and all gradients, for every way to mark documents; the loss predicts across no border."""
    model, x = build(**options), ids(1, TOKENS)
    whole = model.model.embed_tokens(x).detach().requires_grad_()
    parts = zip(whole.split(LENGTHS, 1), x.split(LENGTHS, 1), strict=True)
    alone = [model(inputs_embeds=embeds, labels=part) for embeds, part in parts]
    predicted = [n - 1 for n in LENGTHS]
    loss = sum(n * output.loss for n, output in zip(predicted, alone, strict=True) if n) / sum(predicted)
    (wanted,) = torch.autograd.grad(loss, whole, retain_graph=True)
    for marks in MARKS.values():
        packed = model(inputs_embeds=whole, labels=x, **marks)
        close(packed.logits, torch.cat([output.logits for output in alone], 1))
        close(packed.loss, loss)
        close(torch.autograd.grad(packed.loss, whole)[0], wanted)


def test_collators_of_transformers(build, ids):
    """DataCollatorWithFlattening with all its marks: the loss of the documents alone; without position_ids too."""
    model, x = build("rope"), ids(3, 9)
    rows = [{"input_ids": row[:n].tolist()} for row, n in zip(x, (9, 2, 5), strict=True)]
    alone = [model(torch.tensor([row["input_ids"]]), labels=torch.tensor([row["input_ids"]])).loss for row in rows]
    wanted = (8 * alone[0] + 1 * alone[1] + 4 * alone[2]) / 13
    for marks in ({}, {"return_flash_attn_kwargs": True}, {"return_flash_attn_kwargs": True, "return_seq_idx": True}):
        batch = DataCollatorWithFlattening(return_tensors="pt", **marks)(rows)
        close(model(**batch).loss, wanted)
        if marks:
            del batch["position_ids"]
            close(model(**batch).loss, wanted)


# ---- the rule of position_ids -----------------------------------------------------------------------------------------
def test_restarts_are_those_of_transformers():
    """Positions that count on by one or start over: the same documents as transformers finds, in every row."""
    generator = torch.Generator().manual_seed(0)
    for _ in range(50):
        begins = torch.rand(3, 17, generator=generator) < 0.3
        order = torch.arange(17).expand(3, -1)
        first = torch.randint(0, 4, (3, 1), generator=generator)
        places = order - torch.where(begins, order, 0).cummax(1).values + first
        theirs = find_packed_sequence_indices(places)
        ours = documents_of(3, 17, None, places, None, True)
        assert (ours is None) == (theirs is None)
        assert ours is None or torch.equal(ours, theirs)


def test_runs_are_counted_from_the_first_token():
    documents = torch.tensor([[0, 0, 1, 1, 0, 0], [-1, 3, 3, -1, 3, 5]])
    assert runs_of(documents).tolist() == [[0, 0, 1, 1, 2, 2], [-1, 0, 0, -1, 0, 1]]


def test_positions_that_mark_nothing(build, ids):
    """Skipping ahead, an attention_mask with them, several axes, another length: None."""
    places, ones = torch.tensor([[0, 1, 0, 1]]), torch.ones(1, 4)
    assert starting_over(torch.tensor([3, 5, 6, 90]), 2, 4) is None
    assert documents_of(1, 4, None, places, ones, True) is None
    assert documents_of(1, 4, None, places, None, True, causal=False) is None
    assert documents_of(1, 4, None, places[..., None].expand(-1, -1, 3), None, True) is None
    assert documents_of(2, 4, None, places[0], None, True).tolist() == [[0, 0, 1, 1]] * 2
    model, x = build("rope"), ids(1, 4)
    with torch.no_grad():
        together = model(x, position_ids=places, attention_mask=ones.long()).logits
        assert (together - model(x, position_ids=places).logits).abs().max() > 1e-3


def test_a_call_with_documents_keeps_no_cache(build, ids):
    """Its tokens could not be distinguished later; where one is requested, the call is refused."""
    model, x = build("rope"), ids(1, TOKENS)
    for name, marks in MARKS.items():
        kept = model(x, **marks).cache
        assert (kept is None) == ("document_ids" not in name)
        if "document_ids" not in name:
            with refused("document_ids"):
                model(x, use_cache=True, **marks)
    assert model(x, position_ids=torch.arange(TOKENS)).cache is not None


TWO, AT = torch.tensor([[0, 0, 1, 1]]), torch.tensor
REFUSED = [
    ({"seq_idx": TWO, "document_ids": 0 * TWO}, ("seq_idx", "document_ids")),
    ({"seq_idx": TWO, "cu_seq_lens_q": AT([0, 1, 4])}, ("seq_idx", "cu_seq_lens_q")),
    ({"position_ids": AT([0, 0, 0, 1]), "seq_idx": TWO}, ("position_ids", "seq_idx")),
    ({"cu_seq_lens_q": AT([0, 3, 2, 4])}, ("0", "4")),
    ({"cu_seq_lens_q": AT([0.0, 4.0])}, ("cu_seq_lens_q", "[documents + 1]")),
    ({"cu_seq_lens_q": AT([0, 2, 4]), "max_length_q": 1}, ("max_length_q", "2")),
    ({"seq_ids": TWO}, ("'seq_ids'", "'seq_idx'")),
]


@pytest.mark.parametrize(("marks", "message"), REFUSED, ids=[" ".join(message) for _, message in REFUSED])
def test_refused(marks, message, build, ids):
    model = build("rope")
    for either in (model, model.model):
        with refused(*message):
            either(ids(1, 4), **marks)
