"""Laws of equal results: full forward passes and chunks with a cache, all forms, all batches, all modes of torch."""

from __future__ import annotations

from itertools import product

import torch
from torch import Tensor

from longitude.attention.masks import NoMask
from longitude.recurrent.base import RecurrentMixer
from longitude.testing.engine import DoesNotApply, LawBroken, Measurement
from longitude.testing.examples import DIM, MIXER_LAWS, MixerExample, shared_law
from longitude.testing.fixtures import (
    LayerStack,
    bytes_held,
    close,
    error,
    learned_of,
    numbers,
    random_cuts,
    tensors_held,
)

CACHES = ("transformers",)
LENGTHS = (1, 7, 63, 130)


# ---- caches ----------------------------------------------------------------------------------------------------------
@shared_law(threshold=1e-10, needs=CACHES)
@torch.no_grad()
def chunks(build: MixerExample, lengths: tuple[int, ...] = LENGTHS) -> None:
    """The whole pass = chunks at random cuts = one token at a time with the cache.

    In two layers; from position 0, from a later one, and at positions with gaps; given to every chunk, or to the first alone.
    """
    net = LayerStack(build)
    for length in lengths:
        x, gaps = numbers(2, length, DIM), torch.arange(length) * 2 + 1
        for start in (0, 7, None):
            whole = net(x, gaps if start is None else start)
            one_by_one = [tuple(range(length + 1))] * (start != 7)
            for cuts in (*one_by_one, random_cuts(length, 0), random_cuts(length, 1)):
                here = f"{length} tokens {'with gaps' if start is None else f'from {start} on'}, cut at {cuts[1:-1]}"
                of_every_chunk = lambda a, b: gaps[a:b] if start is None else start + a  # noqa: B023, E731
                close(here, net.in_chunks(x, cuts, of_every_chunk), whole)
                if start is not None and not net.encoding.at_input:
                    first = lambda a, b: None if a else start  # noqa: B023, E731
                    close(f"{here}, position of the first chunk alone", net.in_chunks(x, cuts, first), whole)


# ---- forms -----------------------------------------------------------------------------------------------------------
@MIXER_LAWS.law(threshold=1e-10, needs=CACHES)
def forms(build: MixerExample, lengths: tuple[int, ...] = LENGTHS) -> None:
    """Parallel = chunked, with chunks of any size = recurrent: values and every gradient.

    A state that one form leaves, every other continues from.
    """
    if len(ways := build.forms()) < 2:
        raise DoesNotApply("it has one form: no option is named mode, route or chunk_size")
    nets = {name: LayerStack(build, **options) for name, options in ways.items()}
    first, *others = nets
    for length in lengths:
        x, documents = numbers(2, length, DIM), two_documents(length)
        in_documents = ", with documents", documents, (documents >= 0)[..., None].double()
        for what, ids, seen in (("", None, None), in_documents):
            want = nets[first].answer(x, 0, ids, seen=seen)
            for name in others:
                close(f"{length} tokens{what}: {first} and {name}", nets[name].answer(x, 0, ids, seen=seen), want)
    length, cut = 40, 23
    x = numbers(2, length, DIM)
    with torch.no_grad():
        whole = nets[first](x, 0)
        for before, after in product(nets, nets):
            caches = nets[before].caches()
            parts = [nets[before](x[:, :cut], 0, None, caches), nets[after](x[:, cut:], cut, None, caches)]
            close(f"{before}, and then {after}", torch.cat(parts, 1), whole)


def two_documents(length: int) -> Tensor:
    """Ids [2, length] of documents that begin at other tokens in each row, with padding in front of one."""
    token = torch.arange(length)
    ids = torch.stack([(token >= length // 3).long(), (token >= length // 2).long()])
    ids[1, : length // 8] = -1
    return ids


# ---- gradients -------------------------------------------------------------------------------------------------------
DIFFERENCES = 1e-5
"""Largest relative difference between central differences and a gradient."""


@shared_law(threshold=1e-10, needs=CACHES)
def gradients(build: MixerExample, lengths: tuple[int, ...] = (7, 63)) -> None:
    """Gradients in chunks = of the whole pass = central differences in float64; every parameter gets one.

    Differences are taken along a random direction of the input and of each parameter. `Mixer.choosing` gets no gradient.
    """
    for (name, options), length in product(build.forms((16,), ("auto", "reference")).items(), lengths):
        if options.get("mode", "chunked") != "chunked" or options.get("route", "expanded") != "expanded":
            continue  # the law of forms compares their gradients
        here = f"{length} tokens {name}".strip()
        net = LayerStack(build, **options)
        x = numbers(2, length, DIM)
        whole = net.answer(x, 0)
        for cuts in (random_cuts(length, 0), random_cuts(length, 1)):
            close(f"{here}, cut at {cuts[1:-1]}", net.answer(x, cuts, forward=net.in_chunks), whole)
        if length != max(lengths):
            continue
        direction = numbers(*whole["output"].shape[1:], seed=9)
        for n, (parameter, p) in enumerate({"x": x, **learned_of(net)}.items()):
            gradient = whole[f"gradient of {parameter}"]
            if not bool(gradient.any()) and {*parameter.split(".")}.isdisjoint(net.mixer.choosing):
                raise LawBroken(f"{here}: {parameter} gets no gradient")
            step = 1e-6 * numbers(*p.shape, seed=100 + n)
            with torch.no_grad():
                p.add_(step)
                above = (net(x, 0) * direction).sum()
                p.sub_(2 * step)
                below = (net(x, 0) * direction).sum()
                p.add_(step)
            got, want = (gradient * step).sum() * 1e6, (above - below) / 2e-6
            close(f"{here}: gradient of {parameter} and differences", got, want, DIFFERENCES)


# ---- order -----------------------------------------------------------------------------------------------


@shared_law(threshold=1e-12)
@torch.no_grad()
def causality(build: MixerExample, lengths: tuple[int, ...] = (7, 63, 130)) -> None:
    """Another token leaves outputs before it the same, and changes its own.

    Up to rounding, in every form: products in other memory round another way on some processors, and a Fourier transform
    spreads rounding over all positions. A mixer that declares `bidirectional` attends to the next token under lg.NoMask().
    """
    for name, options in build.forms((5, 16), ("auto", "reference", "chunked")).items():
        net = LayerStack(build, **options)
        net.require_order()
        for length in lengths:
            x = numbers(2, length, DIM)
            before = net(x, 0)
            for s in {1, length // 2, length - 1}:
                other = x.clone()
                other[:, s] = 3 * numbers(2, DIM, seed=5)
                after = net(other, 0)
                here = f"{name}, {length} tokens, another one at {s}".removeprefix(", ")
                close(f"{here}: outputs before", after[:, :s], before[:, :s])
                if torch.equal(after[:, s] - other[:, s], before[:, s] - x[:, s]):
                    raise LawBroken(f"{here}: its own output stays the same")
        if net.mixer.bidirectional and not net.encoding.causal_only:
            other = (x := numbers(2, 7, DIM)).clone()
            other[:, 1] += numbers(2, DIM, seed=5)
            if error(net(x, 0, mask=NoMask())[:, 0], net(other, 0, mask=NoMask())[:, 0]) == 0:
                raise LawBroken("declared bidirectional, and the first token does not attend to the second")


# ---- modes of torch --------------------------------------------------------------------------------------------------
GRAD_MODES = {"gradients": torch.enable_grad, "no_grad": torch.no_grad, "inference_mode": torch.inference_mode}


@shared_law(threshold=1e-10, needs=CACHES)
def grad_modes(build: MixerExample) -> None:
    """Equal results under no_grad, inference_mode and train(), if dropout is 0.

    A cache filled in one mode is read in another, by one token and by several, with a backward if there are gradients, and
    continues in the first mode.
    """
    net, x = LayerStack(build), numbers(2, 21, DIM)
    want = net(x, 0).detach()
    with torch.inference_mode():
        close("inference_mode", net(x, 0).clone(), want)
    close("train()", net.train()(x, 0).detach(), want)
    for before, after, training in product(GRAD_MODES, GRAD_MODES, (False, True)):
        if before == after or training and after != "gradients":
            continue
        net.train(training)
        here = f"prefill in {before}, the rest in {after}{', train()' if training else ''}"
        caches, parts = net.caches(), []
        for mode, a, b in ((before, 0, 9), (after, 9, 10), (after, 10, 17), (before, 17, 21)):
            with GRAD_MODES[mode]():
                parts.append(net(x[:, a:b], a, None, caches).clone())
        if after == "gradients":
            grads = torch.autograd.grad(parts[1].sum() + parts[2].sum(), [*learned_of(net).values()], allow_unused=True)
            if not all(g is None or bool(g.isfinite().all()) for g in grads):
                raise LawBroken(f"{here}: a gradient is not finite")
        with torch.no_grad():
            close(here, torch.cat([part.clone() for part in parts], 1), want)


# ---- caches: how large, how wide, and what is done to them between calls ---------------------------------------------
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
