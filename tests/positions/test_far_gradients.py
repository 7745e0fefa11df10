"""Gradients of learned parameters at far positions: as accurate in bfloat16 as near 0, and exact whatever they count from."""

from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import Tensor

import longitude as lg
from longitude import testing
from longitude.testing.examples import Example
from longitude.testing.fixtures import LayerStack, numbers
from tests.support import close

FREQUENCIES: dict[str, Example] = {
    "rope": testing.example("rope", learned_frequencies=True, layout="half"),
    "axial_rope mixed": testing.example("axial_rope", mixed=True),
}
OTHERS = {name: testing.example(name) for name in lg.list_encodings() if testing.example(name)().learned}
CASES = [
    pytest.param(name, example, start, marks=() if name in FREQUENCIES else pytest.mark.slow, id=f"{name} {start}")
    for name, example in {**OTHERS, **FREQUENCIES}.items()
    for start in (0, 4_000, 32_000)
    if start < (example().max_length or 10**9) - 64 and example().overrides("prepare", "terms")
]


def gradients(stack: LayerStack, x: Tensor, start: int) -> dict[str, Tensor]:
    out, learned = stack(x, start), dict(stack.encoding.named_parameters())
    loss = (out * numbers(*out.shape, seed=9).to(out.dtype)).sum()
    found = torch.autograd.grad(loss, list(learned.values()), materialize_grads=True, allow_unused=True)
    return {name: grad.double() for name, grad in zip(learned, found, strict=True)}


@pytest.mark.parametrize(("name", "example", "start"), CASES)
def test_gradients_in_bfloat16(name: str, example: Example, start: int) -> None:
    """Within 10% of float64 with the same numbers, as a whole; rounding alone is 1 to 5%."""
    low = LayerStack(example.in_attention(), layers=1, encoding=example()).bfloat16()
    exact, x = deepcopy(low).double(), numbers(2, 64, 16).bfloat16()
    got, want = gradients(low, x, start), gradients(exact, x.double(), start)
    for parameter, expected in want.items():
        if (size := float(expected.norm())) > 1e-6:
            assert float((got[parameter] - expected).norm()) < 0.1 * size, parameter


def slopes(loss: Any, parameter: Tensor, width: float = 1e-7) -> Tensor:
    """Central differences of a loss at each number of a parameter."""
    flat, found = parameter.data.view(-1), []
    for n in range(len(flat)):
        ends = []
        for step in (width, -width):
            flat[n] += step
            ends.append(float(loss().detach()))
            flat[n] -= step
        found.append((ends[0] - ends[1]) / (2 * width))
    return torch.tensor(found, dtype=torch.float64).view_as(parameter)


@pytest.mark.parametrize("name", FREQUENCIES)
@pytest.mark.parametrize("members", [(), ("shaw",), ("alibi",)], ids=["alone", "shaw", "alibi"])
def test_the_exact_gradient_stays(name: str, members: tuple[str, ...]) -> None:
    """By differences: of a call, of queries elsewhere than the keys, and where vectors of offsets see the rotation."""
    rotary = FREQUENCIES[name]().double()
    encoding = lg.Composed([rotary, *(testing.example(member)() for member in members)])
    q, k, v = (numbers(1, heads, 7, 8, seed=seed) for heads, seed in ((4, 1), (2, 2), (2, 3)))
    [learned] = rotary.parameters()
    for q_positions, k_positions in ((90, 90), (200, 90)):

        def loss(i: int = q_positions, j: int = k_positions) -> Tensor:
            out = lg.attend(q, k, v, encoding=encoding, mask=lg.NoMask(), q_positions=i, k_positions=j)
            return (out * numbers(*out.shape, seed=9)).sum()

        [got] = torch.autograd.grad(loss(), [learned])
        close(got, slopes(loss, learned), atol=1e-5)


@pytest.mark.parametrize("first_learns", [True, False])
def test_calls_with_a_cache_share_what_they_count_from(first_learns: bool) -> None:
    """Cached keys with a gradient count from their call's center; those without one have no gradient to balance."""
    rotary = FREQUENCIES["rope"]().double()
    layer = lg.MultiHeadAttention(16, 2, encoding=rotary).double()
    x = numbers(1, 9, 16)
    assert rotary.alpha is not None
    fixed = deepcopy(layer)

    def loss() -> Tensor:
        cache = layer.cache_layer()
        if first_learns:
            layer(x[:, :5], positions=700, cache=cache)
        else:
            with torch.no_grad():
                fixed(x[:, :5], positions=700, cache=cache)
        return (layer(x[:, 5:], positions=705, cache=cache) * numbers(1, 4, 16, seed=9)).sum()

    [got] = torch.autograd.grad(loss(), [rotary.alpha])
    close(got, slopes(loss, rotary.alpha), atol=1e-4)
