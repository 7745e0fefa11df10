"""Laws of a mixer's cache: how large it is, how wide its numbers are, and what is done to it between calls."""

from __future__ import annotations

import torch

from longitude.recurrent.base import RecurrentMixer
from longitude.testing.battery.decoding import CACHES
from longitude.testing.engine import LawBroken, Measurement
from longitude.testing.examples import DIM, MIXER_LAWS, MixerExample
from longitude.testing.fixtures import LayerStack, close, numbers
from longitude.testing.memory_use import bytes_held, tensors_held

MOST = {"O(1)": 1.0, "O(log N)": 2.0, "O(N)": 16.0}
"""Largest growth of a cache in bytes for eight times the tokens; caches that grow with the tokens reserve memory ahead."""


@MIXER_LAWS.law(name="memory", needs=CACHES)
@torch.no_grad()
def memory_of_a_cache(build: MixerExample) -> Measurement:
    """The cache grows as the mixer declares in `growth`: times its bytes for eight times the tokens.

    O(1): after 512 tokens as many bytes as after 64. O(log N): 1024 tokens take at most twice what 128 do. O(N): more than four
    times. Of all tokens at once, and where the last three come one by one; the greater.
    """
    net = LayerStack(build)
    growth = net.mixer.growth
    if isinstance(net.mixer, RecurrentMixer) and growth != "O(1)":
        raise LawBroken(f"a RecurrentMixer has a state of constant size, and declares {growth}")
    if growth not in MOST:
        raise LawBroken(f"growth: expected one of {', '.join(MOST)}, got {growth!r}")
    few, many = (_bytes_after(net, tokens) for tokens in ((64, 512) if growth == "O(1)" else (128, 1024)))
    if not few:
        raise LawBroken("its cache stores nothing")
    if growth == "O(N)" and many < 4 * few:
        raise LawBroken(f"declared {growth}, but eight times the tokens take {many} bytes, hardly more than {few}")
    return Measurement(many / few, MOST[growth], cause=f"declared {growth}: {few} bytes, then {many}")


def _bytes_after(net: LayerStack, tokens: int) -> int:
    x, held = numbers(1, tokens, DIM), []
    for cuts in ((0, tokens), (0, tokens - 3, tokens - 2, tokens - 1, tokens)):
        caches = net.caches()
        net.in_chunks(x, cuts, caches=caches)
        held.append(bytes_held(caches))
    return max(held)


@MIXER_LAWS.law(threshold=1e-3, needs=CACHES)
@torch.no_grad()
def precision(build: MixerExample) -> None:
    """500 tokens in float32 stay near float64, in chunks too; states are float32 or wider.

    A model in bfloat16, or under autocast, keeps a recurrence's state in float32, and gives its input's dtype back.
    """
    exact, single = LayerStack(build), LayerStack(build).float()
    x = numbers(2, 500, DIM)
    want = exact(x, 0)
    close("float32, 500 tokens", single(x.float(), 0), want)
    close("float32, 500 tokens in chunks", single.in_chunks(x.float(), (0, 301, 302, 410, 500)), want)
    half, brain = LayerStack(build).bfloat16(), torch.bfloat16
    for what, net, tokens, autocast, out_dtype, state_dtype in (
        ("a bfloat16 model", half, x.bfloat16(), False, brain, torch.float32),
        ("autocast", single, x.float(), True, None, torch.float32),
        ("a float64 model", exact, x[:, :31], False, torch.float64, torch.float64),
    ):
        caches, end = net.caches(), tokens.shape[1]
        with torch.autocast("cpu", brain, enabled=autocast):
            out = net.in_chunks(tokens, (0, end * 3 // 5, end * 3 // 5 + 1, end), caches=caches)
        if not bool(out.isfinite().all()) or out.dtype != (out_dtype or out.dtype):
            raise LawBroken(f"{what}: expected finite outputs of {out_dtype or 'any dtype'}, got {out.dtype}")
        held = {t.dtype.to_real() for t in tensors_held(caches) if t.is_floating_point() or t.is_complex()}
        if isinstance(net.mixer, RecurrentMixer) and held != {state_dtype}:
            raise LawBroken(f"{what}: expected a state of {state_dtype}, got {', '.join(map(str, held))}")


@MIXER_LAWS.law(threshold=1e-10, needs=CACHES)
@torch.no_grad()
def cache_operations(build: MixerExample) -> None:
    """Rows of a cache reordered, repeated and selected = those sequences; reset = a new cache; crop = tokens never given.

    Or a ValueError, of a crop that cannot be.
    """
    net = LayerStack(build)
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
    whole = net(x, positions, documents)
    for what, (change, rows) in changes.items():
        caches = net.caches()
        net(x[:, :21], positions[:, :21], documents[:, :21], caches)
        for layer in caches:
            change(layer)
        for a, b in ((21, 22), (22, 30)):
            out = net(x[rows, a:b], positions[rows, a:b], documents[rows, :b], caches)
            close(f"{what}, tokens {a} to {b}", out, whole[rows, a:b])
    caches, whole = net.caches(), net(x, 0)
    net(x, 0, None, caches)
    for layer in caches:
        layer.reset()
    close("reset", net.in_chunks(x, (0, 9, 30), caches=caches), whole)
    caches = net.caches()
    net(x[:, :20], 0, None, caches)
    net(numbers(3, 3, DIM, seed=8), 20, None, caches)  # guessed tokens, taken back
    try:
        for layer in caches:
            layer.crop(-3)
    except ValueError:
        return
    if (left := [layer.get_seq_length() for layer in caches]) != [20, 20]:
        raise LawBroken(f"cropped by 3 of 23: left with {left}")
    close("cropped", net(x[:, 20:], 20, None, caches), whole[:, 20:])
