"""Laws of the state: how much it is, how wide its numbers are, and that it moves with the batch; and of what is saved."""

from __future__ import annotations

import math
import pickle
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from longitude.recurrent.base import RecurrentMixer
from longitude.testing.fixtures import LawBroken, close, learned_of, numbers
from longitude.testing.mixers.fixtures import DIM, MixerExample, Network

NEAR = 1e-10


def tensors_held(cache: Any) -> list[Tensor]:
    """Every tensor that a cache layer holds, in attributes, tuples, dicts and objects of our own."""
    found: list[Tensor] = []
    seen: set[int] = set()

    def walk(thing: Any) -> None:
        if id(thing) in seen:
            return
        seen.add(id(thing))
        for leaf in tree_leaves(thing):
            if isinstance(leaf, Tensor):
                found.append(leaf)
            elif hasattr(leaf, "__dict__") and not isinstance(leaf, type | torch.nn.Module) and not callable(leaf):
                seen.add(id(leaf))
                for value in vars(leaf).values():
                    walk(value)

    walk(cache)
    return found


def bytes_held(cache: Any) -> int:
    """Bytes of the memory behind them, shared memory once: a view of a long tensor holds all of it."""
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors_held(cache)}
    return sum(storages.values())


def _after(net: Network, tokens: int) -> int:
    """Bytes of the cache after so many tokens: of all at once, and where the last three come one by one; the greater."""
    x, held = numbers(1, tokens, DIM), []
    with torch.no_grad():
        for cuts in ((0, tokens), (0, tokens - 3, tokens - 2, tokens - 1, tokens)):
            caches = net.caches()
            net.in_pieces(x, cuts, caches=caches)
            held.append(bytes_held(caches))
    return max(held)


def law_memory(build: MixerExample) -> str | None:
    """The cache grows as the mixer declares in `growth`. O(1): after 512 tokens as many bytes as after 64. O(log N): eight
    times the tokens add at most as much as there was. O(N): eight times the tokens, at most eight times the bytes and room
    to grow into.
    """
    net = Network(build)
    growth = net.mixer.growth
    if isinstance(net.mixer, RecurrentMixer) and growth != "O(1)":
        raise LawBroken(f"a RecurrentMixer has a state of constant size, and declares {growth}")
    short, long = (128, 1024) if growth != "O(1)" else (64, 512)
    few, many = _after(net, short), _after(net, long)
    most = {"O(1)": few, "O(log N)": 2 * few, "O(N)": math.inf}
    if growth not in most:
        raise LawBroken(f"growth: expected one of {', '.join(most)}, got {growth!r}")
    if not few or many > most[growth]:
        raise LawBroken(f"declared {growth}: {few} bytes after {short} tokens, {many} after {long}")
    if growth == "O(N)" and many < 4 * few:
        raise LawBroken(
            f"declared {growth}, but {many} bytes after {long} tokens are not much more than {few} after {short}"
        )
    return None


def law_precision(build: MixerExample) -> str | None:
    """A model in bfloat16, or under autocast, keeps a recurrence's state in float32, and gives its input's dtype back; 500
    tokens in float32 stay near float64, in pieces too.
    """
    exact = Network(build)
    x = numbers(2, 500, DIM)
    with torch.no_grad():
        want = exact(x, 0)
        single = Network(build).float()
        close("float32, 500 tokens", single(x.float(), 0), want, 1e-3)
        close("float32, 500 tokens in pieces", single.in_pieces(x.float(), (0, 301, 302, 410, 500)), want, 1e-3)
        half, caches = Network(build).bfloat16(), exact.caches()
        out = half.in_pieces(x.bfloat16(), (0, 301, 302, 500), caches=caches)
        _kept_wide("a bfloat16 model", half, out, torch.bfloat16, caches)
        caches = exact.caches()
        with torch.autocast("cpu", torch.bfloat16):
            out = single.in_pieces(x.float(), (0, 301, 302, 500), caches=caches)
        _kept_wide("autocast", single, out, None, caches)
        caches = exact.caches()
        exact.in_pieces(x, (0, 30, 31), caches=caches)
        if isinstance(exact.mixer, RecurrentMixer):
            _require_dtype("a float64 model", caches, torch.float64)
    return None


def _kept_wide(what: str, net: Network, out: Tensor, dtype: torch.dtype | None, caches: list[Any]) -> None:
    if dtype is not None and out.dtype != dtype:
        raise LawBroken(f"{what}: expected outputs of {dtype}, got {out.dtype}")
    if not bool(out.isfinite().all()):
        raise LawBroken(f"{what}: expected finite outputs")
    if isinstance(net.mixer, RecurrentMixer):
        _require_dtype(what, caches, torch.float32)


def _require_dtype(what: str, caches: list[Any], dtype: torch.dtype) -> None:
    kinds = {t.dtype.to_real() for t in tensors_held(caches) if t.is_floating_point() or t.is_complex()}
    if kinds != {dtype}:
        raise LawBroken(f"{what}: expected a state of {dtype}, got {', '.join(map(str, kinds))}")


def law_surgery(build: MixerExample) -> str | None:
    """Rows of a cache reordered, repeated and selected = those sequences; forgotten = begun anew; taken back (crop) = never
    heard, or a ValueError.
    """
    net = Network(build)
    x = numbers(3, 30, DIM)
    starts = torch.tensor([[0], [4], [11]])
    documents, token = torch.zeros(3, 30, dtype=torch.long), torch.arange(30)
    documents[token < starts] = -1
    positions = (token - starts).clamp(min=0)
    changes = {
        "reorder_cache": (lambda layer: layer.reorder_cache(torch.tensor([2, 2, 0])), [2, 2, 0]),
        "batch_repeat_interleave": (lambda layer: layer.batch_repeat_interleave(2), [0, 0, 1, 1, 2, 2]),
        "batch_select_indices": (lambda layer: layer.batch_select_indices(torch.tensor([2, 1])), [2, 1]),
    }
    with torch.no_grad():
        whole = net(x, positions, documents)
        for what, (change, rows) in changes.items():
            caches = net.caches()
            net(x[:, :21], positions[:, :21], documents[:, :21], caches)
            for layer in caches:
                change(layer)
            for a, b in ((21, 22), (22, 30)):
                out = net(x[rows, a:b], positions[rows, a:b], documents[rows, :b], caches)
                close(f"{what}, tokens {a} to {b}", out, whole[rows, a:b], NEAR)
        caches = net.caches()
        net(x, 0, None, caches)
        for layer in caches:
            layer.reset()
        close("reset", net.in_pieces(x, (0, 9, 30), caches=caches), net(x, 0), NEAR)
        _crop(net, x)
    return None


def _crop(net: Network, x: Tensor) -> None:
    caches = net.caches()
    net(x[:, :20], 0, None, caches)
    net(numbers(3, 3, DIM, seed=8), 20, None, caches)  # guessed tokens, taken back
    try:
        for layer in caches:
            layer.crop(-3)
    except ValueError:
        return
    if [layer.get_seq_length() for layer in caches] != [20, 20]:
        raise LawBroken(f"cropped by 3 of 23: left with {[layer.get_seq_length() for layer in caches]}")
    close("cropped", net(x[:, 20:], 20, None, caches), net(x, 0)[:, 20:], NEAR)


def law_saved(build: MixerExample) -> str | None:
    """state_dict is all there is: meta -> to_empty -> reset_parameters -> load, copies and pickles give the same answers."""
    mixer = build()
    missing = {name for name, _ in mixer.named_parameters()} - set(mixer.state_dict())
    if missing:
        raise LawBroken(f"expected every parameter in state_dict, {sorted(missing)} are not")
    with torch.device("meta"):
        empty = build.factory(**build.resolved()).double().eval()
    strays = [name for name, t in (*empty.named_parameters(), *empty.named_buffers()) if t.device.type != "meta"]
    if strays:
        raise LawBroken(f"made on another device than the default one: {strays}")
    loaded = empty.to_empty(device="cpu")
    with torch.random.fork_rng(devices=[]):
        loaded.reset_parameters()
    loaded.load_state_dict(mixer.state_dict())
    pickle.dumps(mixer)
    net, x = Network(build), numbers(2, 21, DIM)
    with torch.no_grad():
        ask = {"encoding": net.encoding, "positions": 0}
        want = mixer(x, **ask)
        close("made on meta, emptied, loaded", loaded(x, **ask), want, 1e-12)
        close("copied", deepcopy(mixer)(x, **ask), want, 1e-12)
    return None


def law_begins_alive(build: MixerExample) -> str | None:
    """As built, before anything is learned: outputs are finite and of a size that a model can train from, and every parameter
    gets a finite gradient; `reset_parameters` draws numbers as good.
    """
    for reset in (False, True):
        mixer = build(filled=False).float()
        if reset:
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(3)
                mixer.reset_parameters()
        encoding = build.encodings(mixer).float()
        learned = learned_of(mixer)
        out = mixer(numbers(2, 63, DIM).float(), encoding=encoding, positions=0)
        what, size = "after reset_parameters" if reset else "as built", float(out.detach().std())
        if not 1e-4 < size < 1e2:
            raise LawBroken(f"{what}: expected outputs of moderate size, got a deviation of {size:.1e}")
        grads = torch.autograd.grad((out * numbers(*out.shape, seed=9)).sum(), [*learned.values()], allow_unused=True)
        dead = [n for n, g in zip(learned, grads, strict=True) if g is None or not bool(g.isfinite().all())]
        if dead:
            raise LawBroken(f"{what}: no gradient, or none that is finite, for {', '.join(dead)}")
    return None
