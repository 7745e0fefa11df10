"""Performer: features that are unbiased, a causal sum that approaches softmax attention, and a stabiliser that leaks nothing."""

import math

import pytest
import torch

import longitude as lg
from longitude.recurrent import Performer, orthogonal_features, performer
from longitude.recurrent.performer import exponents
from tests.support import close, random

EXACT = torch.float64


def test_features_are_unbiased():
    """E[phi(q) . phi(k)] = exp(q . k / sqrt(D)); for q . k / sqrt(D) = 0.01 that is 1.01005."""
    torch.manual_seed(0)
    q, k = torch.full((1, 1, 1, 4), 0.1, dtype=EXACT), torch.tensor([0.2, -0.1, 0.05, 0.05], dtype=EXACT)
    k = k[None, None, None]
    product = float((q * k).sum() / 2)
    assert math.isclose(product, 0.01)
    for w in (torch.randn(200_000, 4, dtype=EXACT), orthogonal_features(4, 200_000)):
        terms = (exponents(q, w) + exponents(k, w)).exp()
        assert abs(float(terms.mean()) - 1.0100502) < 4 * float(terms.std()) / 200_000**0.5 < 0.003


def test_directions_are_orthogonal_and_lengths_gaussian():
    w = orthogonal_features(6, 15, seed=3)
    for block in w.split(6):
        products = block @ block.mT
        torch.testing.assert_close(products, products.diagonal().diag())
    assert torch.equal(w, orthogonal_features(6, 15, seed=3)) and not torch.equal(w, orthogonal_features(6, 15, seed=4))
    many = orthogonal_features(6, 60_000)
    torch.testing.assert_close(many.square().sum(-1).mean(), torch.tensor(6.0, dtype=EXACT), rtol=0.02, atol=0)
    torch.testing.assert_close(many.mT @ many / 60_000, torch.eye(6, dtype=EXACT), rtol=0, atol=0.03)
    torch.testing.assert_close(many.mean(0), torch.zeros(6, dtype=EXACT), rtol=0, atol=0.03)


@pytest.mark.parametrize("epsilon", [0.0, 0.1])
def test_is_the_published_sum(epsilon):
    """phi(q_t) sum phi(k_s)^T v_s / phi(q_t) . sum phi(k_s); a projection for each head, the largest exponent of keys so far."""
    q, k, v = random(3, 2, 3, 9, 4)
    w = random(3, 7, 4, seed=1)

    def exponents_of(x):
        x = x / 4**0.25
        return torch.einsum("bhld,hmd->bhlm", x, w) - x.square().sum(-1, keepdim=True) / 2

    of_q, of_k = exponents_of(q), exponents_of(k)
    largest = of_k.amax(-1, keepdim=True).cummax(2).values
    phi_q = (of_q - of_q.amax(-1, keepdim=True)).exp() + epsilon
    phi_k = ((of_k - largest).exp() + epsilon) * largest.exp()
    weights = (phi_q @ phi_k.mT).tril()
    close(performer(q, k, v, w, epsilon=epsilon)[0], weights @ v / weights.sum(-1, keepdim=True))


def test_large_keys_neither_overflow_nor_leak():
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 1, 1, 30, 8)
    k[:, :, 20] *= 300  # exp of its exponents would be 0 or infinite
    q[:, :, 5] *= 300
    out, (s, z, largest) = performer(q, k, v, 10 * orthogonal_features(8, 16), chunk_size=8)
    assert all(torch.isfinite(x).all() for x in (out, s, z, largest))
    k[:, :, 20] *= -1
    again, _ = performer(q, k, v, 10 * orthogonal_features(8, 16), chunk_size=8)
    torch.testing.assert_close(out[:, :, :20], again[:, :, :20])


def test_the_layer_has_fixed_features_outside_its_checkpoint():
    torch.manual_seed(0)
    layer = Performer(32, 4, 2)
    assert layer.features == int(8 * math.log(8)) and layer.k_proj.out_features == 16
    assert set(layer.state_dict()) == {f"{name}_proj.weight" for name in "qkvo"}
    x = torch.randn(2, 9, 32)
    twin = Performer(32, 4, 2, seed=0)
    twin.load_state_dict(layer.state_dict())
    torch.testing.assert_close(layer(x), twin(x))
    twin.seed = 1
    assert (layer(x) - twin(x)).abs().max() > 1e-4
    with torch.inference_mode():
        fresh = Performer(32, 4, features=17, seed=9)
        fresh(x)
    Performer(32, 4, features=17, seed=9)(x).sum().backward()  # features made in inference can be trained with


def test_rotations_act_before_the_features():
    torch.manual_seed(0)
    layer, x = Performer(32, 4), torch.randn(1, 9, 32)
    rope = lg.encoding("rope", head_dim=8, layout="half")
    assert (layer(x) - layer(x, encoding=rope)).abs().max() > 1e-3
    q, k, v = (p(x).view(1, 9, 4, 8).transpose(1, 2) for p in (layer.q_proj, layer.k_proj, layer.v_proj))
    at = torch.arange(9)
    out, _ = performer(rope.rotate(q, at), rope.rotate(k, at), v, orthogonal_features(8, 16))
    torch.testing.assert_close(layer(x, encoding=rope), layer.o_proj(out.transpose(1, 2).flatten(2)))
