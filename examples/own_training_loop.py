"""Longitude inside a model and a training loop of your own, with torch alone: nothing of transformers is imported.

    python examples/own_training_loop.py --encoding rope

The model is a small decoder that somebody might have written; the lines that are Longitude's are marked. It learns to repeat the
symbol of four places before, in sequences of 24, and is then asked at 96: which encodings still know where that is?
"""

import argparse
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import longitude as lg

SYMBOLS, BACK, SHORT, LONG = 8, 4, 24, 96
OPTIONS = {"alibi": {"num_heads": 4}, "rope": {"head_dim": 16, "layout": "half"}, "t5": {"num_heads": 4}, "nope": {}}


class Block(nn.Module):
    """Attention and an MLP, x [B, L, dim] -> [B, L, dim]."""

    def __init__(self, dim: int, heads: int, encoding: lg.Encoding):
        super().__init__()
        self.heads, self.encoding = heads, encoding
        self.norms = nn.ModuleList(nn.LayerNorm(dim) for _ in range(2))
        self.qkv, self.out = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.mlp = nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (y.unflatten(-1, (self.heads, -1)).transpose(1, 2) for y in self.qkv(self.norms[0](x)).chunk(3, -1))
        y = lg.attend(q, k, v, encoding=self.encoding)  # Longitude: where F.scaled_dot_product_attention stood
        x = x + self.out(y.transpose(1, 2).flatten(2))
        return x + self.mlp(self.norms[1](x))


class Decoder(nn.Module):
    def __init__(self, encoding: str, dim: int = 64, heads: int = 4, layers: int = 2):
        super().__init__()
        shared = lg.encoding(encoding, **OPTIONS[encoding])  # Longitude: one encoding, which all layers share
        self.embed, self.head = nn.Embedding(SYMBOLS, dim), nn.Linear(dim, SYMBOLS)
        self.blocks = nn.ModuleList(Block(dim, heads, shared) for _ in range(layers))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def batches(length: int, count: int, seed: int, size: int = 32) -> Iterator[tuple[Tensor, Tensor]]:
    """(symbols, what to answer), each [size, length]; -100 where nothing stands so far back."""
    generator = torch.Generator().manual_seed(seed)
    for _ in range(count):
        ids = torch.randint(SYMBOLS, (size, length), generator=generator)
        yield ids, F.pad(ids, (BACK, -BACK), value=-100)


def train(model: nn.Module, steps: int) -> float:
    """Returns the loss of the last step."""
    groups = lg.parameter_groups(
        model, weight_decay=0.1, lr=3e-3
    )  # Longitude: decay for matrices, tables ten times as fast
    optimizer = torch.optim.AdamW(groups)
    loss = torch.zeros(())
    for ids, answers in batches(SHORT, steps, seed=0):
        loss = F.cross_entropy(model(ids).flatten(0, 1), answers.flatten(), ignore_index=-100)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return float(loss.detach())


@torch.no_grad()
def right(model: nn.Module, length: int) -> float:
    """The share of right answers."""
    ids, answers = next(batches(length, 1, seed=1))
    asked = answers >= 0
    return float((model(ids).argmax(-1) == answers)[asked].double().mean())


def main() -> dict[int, float]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--encoding", choices=OPTIONS, default="rope")
    parser.add_argument("--steps", type=int, default=300)
    options = parser.parse_args()
    torch.manual_seed(0)
    model = Decoder(options.encoding)
    loss = train(model, options.steps)
    found = {length: right(model, length) for length in (SHORT, LONG)}
    print(f"{options.encoding}: loss {loss:.3f}, right " + ", ".join(f"{x:.0%} at {n}" for n, x in found.items()))
    return found


if __name__ == "__main__":
    main()
