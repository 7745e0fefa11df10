"""Positions of several axes in whole models: images between text, batches, generation, layers of other kinds."""

from functools import partial

import pytest
import torch

import longitude as lg
from tests.support import close as near

close = partial(near, atol=1e-10)


@torch.no_grad()
def test_text_continues_after_an_image(build, ids):
    """Positions of several axes, given for the prompt, are followed by 1 + the largest so far; in a padded batch, and where
    another document begins, too."""
    model, x = build("mrope"), ids(2, 14)
    every = lg.positions.multimodal_positions([2, (1, 2, 3), 6])
    mask, tokens = (torch.arange(17) >= torch.tensor([[3], [0]])).long(), ids(2, 17)
    behind_padding = torch.cat([torch.zeros(3, 3, dtype=torch.long), every])
    padded = torch.stack([behind_padding, lg.positions.multimodal_positions([2, (1, 2, 3), 9])])
    whole = model(tokens, position_ids=padded, attention_mask=mask).logits
    first = model(tokens[:, :12], position_ids=padded[:, :12], attention_mask=mask[:, :12], use_cache=True)
    rest = [model(tokens[:, t, None], attention_mask=mask[:, : t + 1], cache=first.cache).logits for t in range(12, 17)]
    close(torch.cat(rest, 1), whole[:, 12:])

    documents = torch.tensor([[0] * 11 + [1] * 3]).expand(2, -1)
    packed = torch.cat([every[:11], torch.arange(3)[:, None].expand(-1, 3)])
    whole = model(x, position_ids=packed, document_ids=documents).logits
    first = model(x[:, :9], position_ids=packed[:9], document_ids=documents[:, :9], use_cache=True)
    close(model(x[:, 9:], document_ids=documents, cache=first.cache).logits, whole[:, 9:])


@torch.no_grad()
@pytest.mark.parametrize(("spec", "length"), [("mrope", 3), ("axial_rope", 2)])
def test_batch_length_and_axes_that_are_equal(build, ids, spec, length):
    """[B, L] and [L, axes] look alike: in a model two dimensions are [B, L]."""
    model, x = build(spec), ids(length, length)
    positions = (torch.arange(length) * 5)[None].expand(length, -1)
    close(model(x, position_ids=positions).logits, model(x, position_ids=positions[0]).logits)
    longer = ids(length, 2 * length)
    cache = model(longer[:, :length], use_cache=True).cache
    close(model(longer[:, length:], cache=cache).logits, model(longer).logits[:, length:])
