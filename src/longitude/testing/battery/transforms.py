"""A law of torch.func: gradients, those of each sequence, and derivatives carried forward are those of autograd."""

from __future__ import annotations

import warnings

import torch
from torch import Tensor
from torch.func import functional_call, grad, jvp, vmap

from longitude.testing.examples import DIM, MixerExample
from longitude.testing.fixtures import LayerStack, Named, close, learned_of, numbers
from longitude.testing.parts import shared_law

SLOW_OR_OLD = "There is a performance drop|`torch.jit"
"""Warnings of torch when vmap runs an operator row by row, and from torch's forward-mode code."""


@shared_law(threshold=1e-9)
def transforms(build: MixerExample, length: int = 9) -> None:
    """torch.func.grad, vmap(grad) over the rows of a batch, and jvp give what autograd gives for each sequence alone.

    vmap over rows that have their own documents gives what each gives.
    """
    net, x, direction = LayerStack(build), numbers(3, length, DIM), numbers(length, DIM, seed=9)
    learned = {name: p.detach() for name, p in learned_of(net).items()}

    def loss(learned: Named, sequence: Tensor) -> Tensor:
        return (functional_call(net, learned, sequence[None])[0] * direction).sum()

    want = [net.answer(sequence[None], direction=direction) for sequence in x]
    by_row = [{name: answer[f"gradient of {name}"] for name in learned} for answer in want]
    tangents = {name: numbers(*p.shape, seed=n) for n, (name, p) in enumerate(learned.items())}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", SLOW_OR_OLD)
        close("grad", grad(loss)(learned, x[0]), by_row[0])
        close("grad of the input", grad(loss, argnums=1)(learned, x[0]), want[0]["gradient of x"][0])
        together = vmap(grad(loss), (None, 0))(learned, x)
        forward = jvp(lambda learned: loss(learned, x[0]), (learned,), (tangents,))[1]
        documents = torch.stack([torch.arange(length) // (n + 2) - n % 2 for n in range(3)])
        mapped = vmap(lambda sequence, documents: net(sequence[None], 0, documents[None])[0])(x, documents)
        close("vmap over documents", mapped, net(x, 0, documents))
    for n, each in enumerate(by_row):
        close(f"vmap(grad), sequence {n}", {name: rows[n] for name, rows in together.items()}, each)
    along = [(tangents[name] * by_row[0][name]).sum() for name in learned]
    close("jvp", forward, sum(along, torch.zeros(())).to(forward))
