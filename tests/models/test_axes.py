"""Positions of several axes in whole models: images between text, batches, generation, layers of other kinds."""

from functools import partial

import pytest
import torch

import longitude as lg
from tests.support import close as near, refused

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
@pytest.mark.parametrize("segments", [[2, (1, 2, 3), 1], [3, (1, 2, 3)]], ids=["text last", "image last"])
def test_generate_after_an_image(build, ids, segments):
    model, x = build("mrope"), ids(2, 9)
    image = lg.positions.multimodal_positions(segments)
    want, positions, every = x, image, []
    for _ in range(5):
        logits = model(want, position_ids=positions, use_cache=False).logits[:, -1]
        every.append(logits)
        want = torch.cat([want, logits.argmax(-1, keepdim=True)], 1)
        positions = torch.cat([positions, (positions.max() + 1).expand(1, 3)])
    options = {"max_new_tokens": 5, "do_sample": False, "eos_token_id": None, "attention_mask": torch.ones_like(x)}
    options["position_ids"] = image.expand(2, -1, -1)
    for use_cache in (True, False):
        got = model.generate(x, use_cache=use_cache, output_logits=True, return_dict_in_generate=True, **options)
        assert torch.equal(got.sequences, want)
        near(torch.stack(got.logits), torch.stack(every).float(), 1e-5)
    beams = [model.generate(x, num_beams=3, use_cache=use_cache, **options) for use_cache in (True, False)]
    assert torch.equal(*beams)


@torch.no_grad()
@pytest.mark.parametrize(("spec", "length"), [("mrope", 3), ("axial_rope", 2)])
def test_batch_length_and_axes_that_are_equal(build, ids, spec, length):
    """[B, L] and [L, axes] look alike: in a model two dimensions are [B, L]; elsewhere the user must decide."""
    model, x = build(spec), ids(length, length)
    positions = (torch.arange(length) * 5)[None].expand(length, -1)
    close(model(x, position_ids=positions).logits, model(x, position_ids=positions[0]).logits)
    longer = ids(length, 2 * length)
    cache = model(longer[:, :length], use_cache=True).cache
    close(model(longer[:, length:], cache=cache).logits, model(longer).logits[:, length:])
    q = torch.randn(length, 2, length, 12)
    encoding = lg.encoding(spec, head_dim=12, layout="half")
    with refused("[B, L]", "[L, axes]"):
        lg.attend(q, q, q, encoding=encoding, q_positions=positions)
    with refused("[B, L]", "[L, axes]"):
        encoding.rotate(q, positions)
    close(encoding.rotate(q, positions[..., None]), encoding.rotate(q, positions[0]))


@torch.no_grad()
def test_layers_that_rotate_by_three_axes_one_or_none(build, ids):
    """Positions with axes pass layers without positions, and are refused by those that measure one."""
    image = lg.positions.multimodal_positions([2, (1, 2, 3), 1])
    model, x = build(None, encodings=["mrope", "nope"]), ids(2, 9)
    whole = model(x, position_ids=image).logits
    first = model(x[:, :4], position_ids=image[:4], use_cache=True)
    close(model(x[:, 4:], position_ids=image[4:], cache=first.cache).logits, whole[:, 4:])
    for other in ("alibi", "rope", "fire"):
        mixed = build(None, encodings=["mrope", other])
        mixed(x)
        with refused("positions", "[1, 9, 3]"):
            mixed(x, position_ids=image)
