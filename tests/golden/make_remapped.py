"""Writes remapped.json: attention layers as the authors of ReRoPE, Self-Extend and dual chunk attention compute them.

git clone https://github.com/bojone/rerope
git clone https://github.com/datamllab/LongLM
git clone https://github.com/HKUNLP/ChunkLlama
pip install torch numpy
python tests/golden/make_remapped.py FOLDER_OF_THE_CLONES

Their modules patch one release of transformers or want a GPU, so functions are taken out of the files by name and run with
stand-ins for what they import: a layer without projections, cos and sin by the formula, and a flash attention of three lines.
"""

import ast
import math
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Optional

import numpy as np
import tables
import torch
from tables import listed
from torch import Tensor, nn

LENGTH, HEADS, WIDTH, BASE = 17, 2, 4, 100.0
WINDOW, GROUP, FACTOR = 5, 3, 4
CHUNK_SIZE, LOCAL_SIZE = 7, 2
NAMES = {"rerope": "bojone/rerope", "LongLM": "datamllab/LongLM", "ChunkLlama": "HKUNLP/ChunkLlama"}


def rotate_half(x: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return torch.cat([-second, first], -1)


def flash(q: Tensor, k: Tensor, v: Tensor, causal: bool, return_attn_probs: bool) -> tuple[Tensor, Tensor, None]:
    """Q, k, v [B, L, H, D] -> output, logsumexp [B, H, L]."""
    scores = torch.einsum("bihd,bjhd->bhij", q, k) / math.sqrt(q.shape[-1])
    if causal:
        scores = scores.masked_fill(torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1), -math.inf)
    return torch.einsum("bhij,bjhd->bihd", scores.softmax(-1), v), scores.logsumexp(-1), None


def cos_sin(positions: Tensor) -> tuple[Tensor, Tensor]:
    angles = positions.double()[..., None] * BASE ** -(torch.arange(0, WIDTH, 2).double() / WIDTH)
    return (f(torch.cat([angles, angles], -1)).float() for f in (torch.cos, torch.sin))


def functions(file: Path, *names: str, **known: Any) -> SimpleNamespace:
    """Functions and classes of a file, which find in their module what is known."""
    found = {
        "torch": torch, "math": math, "np": np, "nn": nn, "F": nn.functional, "rotate_half": rotate_half, "Tuple": tuple,
        "Optional": Optional, "Cache": Any, "repeat_kv": lambda x, times: x.repeat_interleave(times, 1), **known,
    }  # fmt: skip
    tree = ast.parse(file.read_text())
    tree.body = [node for node in tree.body if getattr(node, "name", None) in names]
    exec(compile(tree, str(file), "exec"), found)
    return SimpleNamespace(**{name: found[name] for name in names})


def layer(rotary: Any, **more: Any) -> SimpleNamespace:
    """An attention layer whose hidden states are queries, keys and values side by side."""
    size = HEADS * WIDTH
    q, k, v = (lambda x, n=n: x[..., n * size : (n + 1) * size] for n in range(3))
    return SimpleNamespace(
        q_proj=q, k_proj=k, v_proj=v, o_proj=lambda x: x, num_heads=HEADS, num_key_value_heads=HEADS, head_dim=WIDTH,
        num_key_value_groups=1, hidden_size=size, pretraining_tp=1, attention_dropout=0.0, training=False,
        config=SimpleNamespace(pretraining_tp=1), rotary_emb=rotary, **more,
    )  # fmt: skip


Q, K, V = (tables.numbers(HEADS, LENGTH, WIDTH, seed=n) for n in range(3))
HIDDEN = torch.cat([x.transpose(0, 1).flatten(1) for x in (Q, K, V)], -1)[None]
POSITIONS = torch.arange(LENGTH)[None]
MASK = torch.full((LENGTH, LENGTH), -math.inf).triu(1)[None, None]


def heads(out: Tensor) -> list:
    return listed(out[0].unflatten(-1, (HEADS, WIDTH)).transpose(0, 1))


def rerope(folder: Path, leaky: bool) -> dict:
    def rotary(x: Tensor, seq_len: int, slower: float = 1.0) -> tuple[Tensor, ...]:
        return tuple(t[None, None] for t in cos_sin(torch.arange(seq_len + LENGTH) / slower))

    name = "leaky_rerope" if leaky else "rerope"
    # A training length that no logarithm reaches: queries keep their temperature.
    known = {"window": WINDOW, "scaling_factor": FACTOR, "training_length": 10**9}
    theirs = functions(folder / f"{name}_patch.py", "apply_rotary_pos_emb", f"forward_with_{name}", **known)
    own = layer(rotary, rotary_emb2=lambda x, seq_len: rotary(x, seq_len, FACTOR))
    out, *_ = getattr(theirs, f"forward_with_{name}")(own, HIDDEN.clone(), MASK, POSITIONS)
    return {"options": {"window": WINDOW, **({"slowdown": FACTOR} if leaky else {})}, "out": heads(out)}


def self_extend(folder: Path) -> dict:
    file = folder / "self_extend_patch" / "Llama.py"
    theirs = functions(file, "apply_rotary_pos_emb", "repeat_kv", "self_extend_forward")
    own = layer(lambda x, positions, seq_len: tuple(cos_sin(positions)))
    sizes = {"group_size_1": GROUP, "group_size_2": WINDOW}
    out, *_ = theirs.self_extend_forward(own, HIDDEN, MASK, POSITIONS, **sizes)
    return {"options": {"window": WINDOW, "group": GROUP, "variant": "code"}, "out": heads(out)}


def dual_chunk(folder: Path) -> dict:
    file = folder / "chunkllama_attn_replace.py"
    known = {"chunk_size": CHUNK_SIZE, "local_window": LOCAL_SIZE, "MAX_NEW_TOKENS": 4, "flash_attn_func": flash}
    names = (
        "get_mscale",
        "merge_attn_outputs",
        "do_flash_attn",
        "ChunkLlamaRotaryEmbedding",
        "apply_rotary_pos_emb",
        "forward",
    )
    theirs = functions(file, *names, **known)
    # Not beyond this length, from which they multiply cos and sin by 1 + 0.05 ln(length / max_position_embeddings).
    rotary = theirs.ChunkLlamaRotaryEmbedding(WIDTH, max_position_embeddings=16384, base=BASE)
    own, cache = layer(rotary, layer_idx=0), GrowingCache()
    # Token by token: a whole pass rounds the weights by which it merges chunks to bfloat16.
    steps = [theirs.forward(own, HIDDEN[:, t : t + 1], None, POSITIONS[:, t : t + 1], cache)[0] for t in range(LENGTH)]
    options = {"chunk_size": CHUNK_SIZE, "local_size": LOCAL_SIZE, "variant": "code"}
    return {"options": options, "out": heads(torch.cat(steps, 1))}


class GrowingCache:
    """What their layer asks of a cache."""

    keys = values = torch.zeros(1, HEADS, 0, WIDTH)

    def get_usable_length(self, new: int, layer: int) -> int:
        return self.keys.shape[2]

    def update(self, keys: Tensor, values: Tensor, layer: int, cache_kwargs: None) -> tuple[Tensor, Tensor]:
        self.keys, self.values = torch.cat([self.keys, keys], 2), torch.cat([self.values, values], 2)
        return self.keys, self.values


def commit(folder: Path) -> str:
    return subprocess.run(
        ["git", "rev-parse", "HEAD"], cwd=folder, capture_output=True, text=True, check=True
    ).stdout.strip()


if __name__ == "__main__":
    clones = Path(sys.argv[1])
    cases = {
        "rerope": rerope(clones / "rerope", leaky=False),
        "leaky_rerope": rerope(clones / "rerope", leaky=True),
        "self_extend": self_extend(clones / "LongLM"),
        "dual_chunk": dual_chunk(clones / "ChunkLlama"),
    }
    commits = {name: commit(clones / folder) for folder, name in NAMES.items()}
    inputs = {"base": BASE, "q": listed(Q), "k": listed(K), "v": listed(V)}
    tables.save("remapped", "torch numpy", commits=commits, inputs=inputs, **cases)
