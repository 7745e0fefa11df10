"""What a newcomer brings to attend: the name of an encoding, masks as torch and transformers have them, cu_seqlens."""

import math

import pytest
import torch
import torch.nn.functional as F
from transformers import LlamaConfig
from transformers.masking_utils import create_causal_mask

import longitude as lg
from tests.support import close, heads, random, refused


def test_an_encoding_by_its_name():
    """Built of the heads of q; names compose."""
    q, k, v = heads(9)
    for name in ("alibi", "sandwich", "alibi+sandwich"):
        built = [lg.encoding(one, num_heads=4) for one in name.split("+")]
        close(lg.attend(q, k, v, encoding=name), lg.attend(q, k, v, encoding=built))


@pytest.mark.parametrize("shape", [(9, 9), (2, 9, 9), (2, 1, 9, 9), (1, 1, 9, 9)])
def test_a_mask_is_that_of_torch(shape):
    """Values and gradients, where every query has a key; 0 and -inf say the same."""
    q, k, v = (x.requires_grad_() for x in heads(9, num_kv_heads=4))
    seen = (random(*shape) > 0) | torch.eye(9, dtype=torch.bool)
    out = lg.attend(q, k, v, mask=seen)
    want = F.scaled_dot_product_attention(q, k, v, attn_mask=seen[:, None] if seen.dim() == 3 else seen)
    close(out, want)
    close(*(torch.autograd.grad(x.square().sum(), (q, k, v)) for x in (out, want)), 1e-11)
    close(lg.attend(q, k, v, mask=torch.zeros(shape).masked_fill(~seen, -math.inf)), out)


def test_queries_that_are_the_last_of_the_keys():
    """A query without keys gets zeros, where torch gives NaN."""
    q, k, v = heads(9)
    seen = torch.zeros(4, 9, dtype=torch.bool)
    seen[1:, :7] = True
    out = lg.attend(q[:, :, -4:], k, v, mask=seen)
    assert not out[:, :, 0].any()
    close(out[:, :, 1:], lg.attend(q[:, :, -3:], k, v, mask=lg.Padding(torch.arange(9) < 7)))


def test_masks_of_transformers():
    """In four dimensions, of padded rows, as their models make them for eager attention."""
    q, k, v = heads(9)
    valid = torch.ones(2, 9, dtype=torch.long)
    valid[0, :3] = 0
    config = LlamaConfig(num_hidden_layers=1)
    for kind in ("sdpa", "eager"):
        config._attn_implementation = kind
        theirs = create_causal_mask(config, torch.zeros(2, 9, 32), valid, None)
        out = lg.attend(q, k, v, mask=theirs, encoding="alibi")
        want = lg.attend(q, k, v, mask=lg.Causal() & lg.Padding(valid), encoding="alibi")
        real = valid.bool()[:, None, :, None].expand_as(out)
        close(out[real], want[real])


def test_a_causal_tensor_serves_what_must_be_causal():
    q, k, v = heads(9)
    fox = lg.encoding("fox", dim=6, num_heads=4).double()
    options, seen = {"encoding": fox, "context": fox.context(random(2, 9, 6))[0]}, torch.ones(9, 9, dtype=torch.bool)
    close(lg.attend(q, k, v, mask=seen.tril(), **options), lg.attend(q, k, v, **options))
    with refused("future", "lg.Causal"):
        lg.attend(q, k, v, mask=seen, **options)


def test_documents_from_cu_seqlens():
    """Where each begins, and the end; an empty one has no token."""
    q, k, v = heads(9)
    for dtype in (torch.int32, torch.int64):
        documents = lg.Documents.from_cu_seqlens(torch.tensor([0, 5, 5, 8, 9], dtype=dtype))
        assert documents.ids.tolist() == [0] * 5 + [2] * 3 + [3]
    out = lg.attend(q, k, v, mask=lg.Causal() & documents)
    for start, stop in ((0, 5), (5, 8), (8, 9)):
        close(out[:, :, start:stop], lg.attend(*(x[:, :, start:stop] for x in (q, k, v))))
