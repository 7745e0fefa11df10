"""The laws of every recurrence as a function: three forms, any chunk, any cut, documents, padding, gradients, dtypes."""

from typing import Any

import pytest
import torch
import torch.utils.checkpoint
from torch import Tensor

import longitude as lg
from longitude.recurrent import (
    gated_delta_rule,
    orthogonal_features,
    performer,
    retention,
    rwkv4,
    rwkv6,
    rwkv7,
    s4d,
    selective_scan,
    ssd,
)
from tests.support import random, refused

EXACT = torch.float64
BATCH, HEADS, KEYS, VALUES = 2, 4, 6, 5


def uniform(*shape: int, seed: int) -> Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed), dtype=EXACT)


# A case: the function and its inputs.
def of_retention(length: int, strength: float):
    q, k = random(2, BATCH, HEADS, length, KEYS)
    return retention, (q, k, random(BATCH, HEADS, length, VALUES, seed=1))


def of_rwkv6(length: int, strength: float):
    r, k = random(2, BATCH, HEADS, length, KEYS)
    log_w = -strength * uniform(BATCH, HEADS, length, KEYS, seed=2)
    v, u = random(BATCH, HEADS, length, VALUES, seed=1), random(HEADS, KEYS, seed=3)
    return rwkv6, (r, k, v, log_w, u)


def of_rwkv7(length: int, strength: float):
    r, k, kappa = random(3, BATCH, HEADS, length, KEYS)
    log_w = -strength * uniform(BATCH, HEADS, length, KEYS, seed=2)
    v, a = random(BATCH, HEADS, length, VALUES, seed=1), uniform(BATCH, HEADS, length, KEYS, seed=3)
    return rwkv7, (r, log_w, k, v, kappa / kappa.norm(dim=-1, keepdim=True), a)


def of_delta(length: int, strength: float):
    q, k = random(2, BATCH, 2, length, KEYS)
    v, g = random(BATCH, HEADS, length, VALUES, seed=1), -strength * uniform(BATCH, HEADS, length, KEYS, seed=2)
    tokens = q, k / k.norm(dim=-1, keepdim=True), v, g, uniform(BATCH, HEADS, length, seed=3)
    return gated_delta_rule, tokens


def of_ssd(length: int, strength: float):
    b, c = random(2, BATCH, 2, length, KEYS)
    x, log_decay = random(BATCH, HEADS, length, VALUES, seed=1), -strength * uniform(BATCH, HEADS, length, seed=2)
    return ssd, (x, log_decay, b, c)


def of_performer(length: int, strength: float):
    q, k = random(2, BATCH, HEADS, length, 4)
    v, features = random(BATCH, HEADS, length, VALUES, seed=1), orthogonal_features(4, 9)
    return performer, (q, strength * k, v, features)


def of_rwkv4(length: int, strength: float, n: int = VALUES):
    k, v = random(2, BATCH, length, n)
    return rwkv4, (*random(2, n, seed=1), k, v)


def of_selective_scan(length: int, strength: float, n: int = VALUES):
    u, delta = random(BATCH, n, length), uniform(BATCH, n, length, seed=1)
    B, C = random(2, BATCH, KEYS, length, seed=2)
    return selective_scan, (u, delta, -strength * uniform(n, KEYS, seed=3), B, C)


def of_s4d(length: int, strength: float, n: int = VALUES):
    u, log_dt = random(BATCH, n, length), 4 * uniform(n, seed=1) - 4
    A = torch.complex(-strength * uniform(n, KEYS, seed=2), 9 * uniform(n, KEYS, seed=3))
    return s4d, (u, log_dt, A, torch.complex(*random(2, n, KEYS, seed=4)))


MATRICES = [of_retention, of_rwkv6, of_rwkv7, of_delta, of_ssd, of_performer]
SCANS = [of_rwkv4, of_selective_scan, of_s4d]


@pytest.fixture(params=[*((case, False) for case in (*MATRICES, *SCANS)), *((case, True) for case in SCANS)],
                ids=lambda param: param[0].__name__[3:] + " in torch" * param[1])  # fmt: skip
def case(request, in_torch):
    """Each function; those with a loop in C in torch's operators, too."""
    made, without = request.param
    if without:
        in_torch()
    return made


def listed(state) -> list[Tensor]:
    return [state] if isinstance(state, Tensor) else list(state)


def tokens_first(out: Tensor, function: Any) -> Tensor:
    """[B, L, ...]"""
    return out if function is rwkv4 else out.transpose(1, 2)


def real(x: Tensor) -> Tensor:
    return torch.view_as_real(x) if x.is_complex() else x


def everything(function, inputs, state=None, **options) -> list[Tensor]:
    """Outputs, the state, and the gradients of all inputs and of the state before."""
    inputs = [x.clone().requires_grad_() for x in inputs]
    before = [] if state is None else [x.clone().requires_grad_() for x in listed(state)]
    given = None if state is None else before[0] if isinstance(state, Tensor) else tuple(before)
    out, after = function(*inputs, state=given, **options)
    weights = torch.linspace(-1, 2, out.numel(), dtype=out.dtype).view(out.shape)
    if (valid := options.get("valid")) is not None:  # what padding gets means nothing
        out = torch.where(valid.view(*valid.shape, *[1] * (out.dim() - 2)), tokens_first(out, function), 0)
        weights = tokens_first(weights, function)
    loss = (out * weights).sum() + sum(real(x).square().sum() for x in listed(after))
    grads = torch.autograd.grad(loss, [*inputs, *before], allow_unused=True, materialize_grads=True)
    return [out, *listed(after), *grads]


def assert_same(given: list[Tensor], wanted: list[Tensor], tolerance: float = 1e-10) -> None:
    for a, b in zip(given, wanted, strict=True):
        assert torch.isfinite(a).all()
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


@pytest.mark.one_in(5)
@pytest.mark.parametrize("flags", [(), ("reset",), ("valid",), ("reset", "valid")], ids=str)
def test_forms_agree(case, flags):
    """Without and with documents and padding, and with chunks of any size."""
    function, inputs = case(37, 20.0 if flags else 2.0)
    _, state = function(*case(3, 1.0)[1])
    valid = uniform(BATCH, 37, seed=5) < 0.7 if "valid" in flags else None
    reset = uniform(BATCH, 37, seed=6) < 0.2 if "reset" in flags else None
    options = {"reset": reset if valid is None or reset is None else reset & valid, "valid": valid}
    wanted = everything(function, inputs, state, mode="recurrent", **options)
    for mode, chunk_size in (("parallel", 64), ("chunked", 1), ("chunked", 8)):
        assert_same(everything(function, inputs, state, mode=mode, chunk_size=chunk_size, **options), wanted)


NEXT = torch.tensor([0] * 6 + [1] + [0] * 8).bool().expand(BATCH, 15)
"""Documents of 6 and 9 tokens."""


@pytest.mark.parametrize("mode", ["recurrent", "parallel", "chunked"])
def test_a_document_that_overflows_takes_no_other_along(form, mode):
    """Of finite numbers: keys that are too long for the delta rule."""
    q, k = random(2, BATCH, HEADS, 15, KEYS).float()
    v, g = random(BATCH, HEADS, 15, VALUES, seed=1).float(), torch.zeros(BATCH, HEADS, 15)
    beta = torch.ones(BATCH, HEADS, 15)
    options = {"mode": mode, "chunk_size": 10, "reset": NEXT}
    want, _ = gated_delta_rule(q, k, v, g, beta, **options)
    k[:, :, :6] *= 1e10
    out, _ = gated_delta_rule(q, k, v, g, beta, **options)
    assert not out[:, :, :6].isfinite().all()
    torch.testing.assert_close(out[:, :, 6:], want[:, :, 6:], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("channels", [1, 17, 40])
@pytest.mark.parametrize("made", SCANS, ids=lambda made: made.__name__)
def test_forms_agree_in_any_number_of_channels(made, channels):
    """The loops in C take sixteen at a time."""
    function, inputs = made(11, 2.0, channels)
    assert_same(everything(function, inputs), everything(function, inputs, mode="recurrent"))


def narrow(inputs: Any, dtype: torch.dtype) -> list[Tensor]:
    wide = torch.promote_types(dtype, torch.float32)
    return [x.to(torch.promote_types(wide, torch.complex32)) if x.is_complex() else x.to(dtype) for x in inputs]


@pytest.mark.one_in(5)
@pytest.mark.parametrize("mode", ["chunked", "parallel"])
@pytest.mark.parametrize("case", [(of_rwkv6, False), (of_ssd, False), (of_selective_scan, False), (of_selective_scan, True)],
                         ids=["rwkv6", "ssd", "selective_scan", "selective_scan in torch"], indirect=True)  # fmt: skip
@pytest.mark.parametrize("strength", [20.0, 500.0])
def test_strong_decays_in_float32(case, strength, mode):
    """Quotients of products of such decays would overflow, or lose the little that is left."""
    function, inputs = case(130, strength)
    single = narrow(inputs, torch.float32)
    wanted = everything(function, narrow(single, EXACT), mode="recurrent")
    for given, exact in zip(everything(function, single, mode=mode), wanted, strict=True):
        assert torch.isfinite(given).all()
        torch.testing.assert_close(given.to(EXACT), exact, rtol=1e-4, atol=1e-4 * float(exact.detach().abs().max()))


def test_bad_input(case):
    """Flags of another length, states of another call, tokens that are no floats: none is broadcast, or read as it is."""
    function, inputs = case(7, 1.0)
    tokens = 2 if function is rwkv4 else 0
    wrong = [(*inputs[:tokens], x, *inputs[tokens + 1 :]) for x in (inputs[tokens][0], inputs[tokens].long())]
    options = (
        {"chunk_size": 0},
        {"mode": "chunk"},
        {"state": torch.zeros(3, 3)},
        {"reset": torch.zeros(1, 7, dtype=torch.bool)},
        {"reset": torch.zeros(BATCH, 1, dtype=torch.bool)},
        {"valid": torch.ones(BATCH, 7, dtype=torch.long)},
    )
    for arguments, named in (*((x, {}) for x in wrong), *((inputs, x) for x in options)):
        with refused(function.__name__):
            function(*arguments, **named)


@pytest.mark.parametrize("name", ["mamba", "s4d", "rwkv4"])
def test_gradients_through_checkpointing(name: str) -> None:
    """Checkpointing computes what backward saved again, and lets it be read once."""
    torch.manual_seed(0)
    layer = lg.mixer(name, dim=8).double()
    x = torch.randn(1, 7, 8, dtype=torch.float64, requires_grad=True)
    plain = torch.autograd.grad(layer(x).square().sum(), x)[0]
    again = torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=False)
    torch.testing.assert_close(torch.autograd.grad(again.square().sum(), x)[0], plain)
