"""Layers whose weights are not read: whatever changes what they compute."""

import torch
from torch import Tensor, nn

import longitude as lg
from longitude.positions.linear import is_plain
from tests.support import close, random


class Quantized(Tensor):
    """A weight of its own class, as of torchao: linear layers compute with it, and it has no other operation."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if func is torch.nn.functional.linear:
            x, weight, *bias = args
            return func(x, weight.as_subclass(Tensor), *bias, **kwargs or {})
        if func in (Tensor.as_subclass, Tensor.detach, Tensor.requires_grad_) or func.__name__ == "__get__":
            return super().__torch_function__(func, types, args, kwargs or {})
        raise NotImplementedError(f"{func} of a quantized weight")


def quantized(layer: nn.Linear) -> nn.Linear:
    layer.weight = nn.Parameter(layer.weight.detach().as_subclass(Quantized), requires_grad=False)
    return layer


@torch.no_grad()
def test_weights_of_their_own_class_are_called():
    """Latent attention takes its matrix apart in decoding, if it is a plain one."""
    mixer = lg.mixer("latent", dim=16, num_heads=4, kv_rank=6, rope_dim=4).double()
    x, want, cache = random(2, 9, 16), mixer(random(2, 9, 16)), mixer.cache_layer()
    assert is_plain(mixer.kv_up)
    quantized(mixer.kv_up)
    assert not is_plain(mixer.kv_up)
    close(mixer(x), want)
    close(torch.cat([mixer(token, cache=cache) for token in x.split(1, 1)], 1), want)
