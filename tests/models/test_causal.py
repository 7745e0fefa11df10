"""The decoder's forward pass: positions, encodings of layers, masks."""

from functools import partial

import pytest
import torch

from tests.models.conftest import mixer_spec
from tests.support import close as near, in_pieces, refused

close = partial(near, atol=1e-10)


@pytest.mark.parametrize("places", [torch.arange(9) + 20, torch.tensor([0, 3, 6, 9, 12, 13, 14, 15, 16])], ids=str)
@torch.no_grad()
def test_a_cache_continues_after_the_positions_that_were_given(places, build, ids):
    """As [L], [1, L] or [B, L]."""
    model, x = build(["learned", "rope"]), ids(2, 9)
    whole = model(x, position_ids=places).logits
    for first_places in (places[:5], places[None, :5], places[:5].expand(2, -1)):
        first = model(x[:, :5], position_ids=first_places, use_cache=True)
        close(model(x[:, 5:], cache=first.cache).logits, whole[:, 5:])


def test_shared_encodings_are_one_module(build):
    """T5's table serves all layers, as published; clipped's is per layer; equal specs share, others do not."""
    assert len(build("t5").model.encodings) == 1
    assert len(build("clipped").model.encodings) == 2
    assert len(build(None, encodings=["t5", {"name": "t5", "num_buckets": 16}]).model.encodings) == 2


@torch.no_grad()
def test_learned_rows_suffice_for_padded_text(build, ids):
    """Padding stands at row 0, so a table of the text's length is enough however much is padded; one token more is refused."""
    model, x = build("learned", max_position_embeddings=4), ids(1, 10)
    mask = (torch.arange(10) >= 6).long()[None]
    close(model(x, attention_mask=mask).logits[:, 6:], model(x[:, 6:]).logits)
    with refused("Learned", "0", "3", "4"):
        model(x[:, 5:])


def test_masks_that_cannot_be(build, ids):
    """One that does not cover the cache, and padding between tokens of one sequence."""
    model, x, ones = build(), ids(), torch.ones(2, 13, dtype=torch.long)
    cache = model(x, use_cache=True).cache
    with refused("attention_mask", "[2, 14]"):
        model(x[:, :1], cache=cache, attention_mask=ones[:, :1])
    later = torch.cat([ones, ones[:, :1] * 0, ones[:, :1]], 1)
    with refused("attention_mask"):
        model(x[:, :2], cache=cache, attention_mask=later)
    hole = ones.index_fill(1, torch.tensor(7), 0)
    with refused("attention_mask", "output_attentions"):
        model(x, attention_mask=hole, output_attentions=True)


SPECS = ["rope", "learned", "abacus", "fox", "path", "cope", "shaw"]
MIXERS = ["window", "hierarchical", "mamba2", "rwkv6"]


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    "options", [*({"encoding": s} for s in SPECS), *({"mixer": mixer_spec(m)} for m in MIXERS)], ids=str
)
@torch.no_grad()
def test_padding_between_tokens_changes_nothing(options, build, ids):
    """As PEFT's prompt tuning pads; whole, and with a cache. Positions are those of the tokens alone."""
    model, x = build(**{"encoding": "auto"} | options), ids(3, 15)
    mask = torch.ones(3, 15, dtype=torch.long)
    mask[0, 3:7] = mask[1, 5:6] = mask[1, 9] = 0
    whole = model(x, attention_mask=mask, output_hidden_states=True)
    close(whole.hidden_states[-1], model.model(x, attention_mask=mask)[0])
    close(model.lm_head(whole.hidden_states[-1]), whole.logits)
    for row in range(3):
        real = mask[row].bool()
        close(whole.logits[row, real], model(x[row : row + 1, real]).logits[0])
    pieces = in_pieces(model, x, (11, 12, 13, 15), attention_mask=mask)
    close(pieces[mask.bool()], whole.logits[mask.bool()])
