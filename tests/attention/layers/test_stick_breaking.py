"""Stick-breaking attention: an implementation of others, numbers of any size, and what its options do."""

import pytest
import torch

import longitude as lg
from longitude.testing.fixtures import small_blocks
from tests.support import by_head, close, from_fla, random, refused_calls


def qkv(length=37, heads=4, kv_heads=2, width=8, values=5, seed=0, **options):
    shapes = (heads, width), (kv_heads, width), (kv_heads, values)
    return [random(2, h, length, n, seed=seed + s, **options).requires_grad_() for s, (h, n) in enumerate(shapes)]


def theirs(q, k, v, **options):
    """The naive function of flash-linear-attention, which has heads after tokens."""
    naive = from_fla("stickbreaking_attn.naive", "naive_stickbreaking_attn")
    out, rest = naive(*(x.transpose(1, 2) for x in (q, k, v)), **options)
    return out.transpose(1, 2), rest.transpose(1, 2)


@pytest.mark.parametrize("options", [{}, {"scale": 0.7}], ids=str)
def test_it_is_the_authors_formula(options):
    """Values and gradients, of one block of queries and of several."""
    given = qkv()
    want = theirs(*given, **options)
    directions = [random(*y.shape, seed=9) for y in want]
    with small_blocks(11, 2, 37):
        got = lg.stick_breaking(*given, **options)
        ours = torch.autograd.grad(got, given, directions)
    close((*got, *ours), (*want, *torch.autograd.grad(want, given, directions)), 1e-12)


def test_weights_and_what_is_left_over_are_one():
    q, k, _ = qkv()
    out, rest = lg.stick_breaking(q, k, torch.ones_like(k))
    close(out[..., 0] + rest, torch.ones_like(rest))
    assert (rest[:, :, 0] == 1).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("size", [1e2, 1e4])
def test_large_scores_of_either_sign_are_exact(size, dtype):
    """In float64 the same keys break the same sticks; gradients are finite."""
    q, k, v = (x.detach().to(dtype) for x in qkv())
    signs = random(2, 2, 37, 1, seed=4, dtype=dtype).sign()
    q, k = torch.full_like(q, size**0.5).requires_grad_(), (signs * size**0.5).expand_as(k).clone().requires_grad_()
    out, rest = lg.stick_breaking(q, k, v)
    want, want_rest = lg.stick_breaking(q.double(), k.double(), v.double())
    close(out.double(), want, 0.02 if dtype != torch.float32 else 1e-6)
    close(rest.double(), want_rest, 1e-6)
    assert all(bool(g.isfinite().all()) for g in torch.autograd.grad(out.sum() + rest.sum(), (q, k)))


def test_logarithms_of_later_keys_do_not_cancel():
    """A key with a score of 1e5 breaks all of the stick; small parts of keys after it stay exact in float32."""
    k = torch.tensor([1e5, -9.0, -9.0, 0.0]).view(1, 1, 4, 1)
    out, _ = lg.stick_breaking(torch.ones_like(k), k, torch.eye(4)[None, None], scale=1.0)
    part = torch.sigmoid(torch.tensor(-9.0, dtype=torch.float64))
    close(out[0, 0, 3, :3].double(), torch.stack([(1 - part) ** 2, part * (1 - part), part]), 0.0, 1e-6)


def test_documents_and_windows_are_sticks_of_their_own():
    q, k, v = qkv()
    ids = torch.tensor([[0] * 15 + [1] * 22])
    packed = lg.stick_breaking(q, k, v, mask=lg.Causal() & lg.Documents(ids))
    for own in (slice(0, 15), slice(15, 37)):
        close([x[:, :, own] for x in packed], [*lg.stick_breaking(*(x[:, :, own] for x in (q, k, v)))])
    near, last = lg.stick_breaking(q, k, v, mask=lg.Window(5))[0][:, :, -1:], slice(32, 37)
    close(near, lg.stick_breaking(q[:, :, -1:], k[:, :, last], v[:, :, last])[0])


def test_the_mixer_is_the_function_of_its_projections():
    x, plain = random(2, 9, 16), lg.mixer("stick_breaking", dim=16, num_heads=4, num_kv_heads=2, scale=0.9).double()
    q, k, v = (by_head(project(x), n) for project, n in ((plain.q_proj, 4), (plain.k_proj, 2), (plain.v_proj, 2)))
    out, _ = lg.stick_breaking(q, k, v, scale=0.9)
    close(plain(x), plain.o_proj(out.transpose(1, 2).flatten(2)))


Q, K, V = qkv()
test_refusals = refused_calls(
    [
        (lambda: lg.stick_breaking(Q, K[:, :, :5], V[:, :, :5]), "stick_breaking"),
        (lambda: lg.stick_breaking(Q, K, V, mask=lg.NoMask()), "NoMask"),
    ]
)
