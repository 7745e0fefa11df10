"""Laws of sameness: one answer in pieces, in every form, in any batch, and none that depends on what comes later."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from longitude.attention.backends import BACKENDS
from longitude.attention.masks import NoMask
from longitude.testing.fixtures import LawBroken, Named, close, differentiable, learned_of, numbers, with_gradients
from longitude.testing.mixers.fixtures import DIM, LENGTHS, MixerExample, Network, random_cuts, schedules

NEAR = 1e-10


def law_pieces(build: MixerExample, lengths: tuple[int, ...] = LENGTHS) -> str | None:
    """The whole pass = pieces at random cuts = one token at a time with the cache, in two layers; from position 0 and from a
    later one, with positions said for every piece, and for the first alone.
    """
    net = Network(build)
    with torch.no_grad():
        for length in lengths:
            x = numbers(2, length, DIM)
            for start in (0, 7):
                whole = net(x, start)
                for kind, cuts in schedules(length):
                    if start and kind == "one by one":
                        continue
                    here = f"{length} tokens from position {start}, whole and {kind}"
                    close(here, net.in_pieces(x, cuts, lambda a, b, start=start: start + a), whole, NEAR)
                    said = lambda a, b, start=start: None if a else start  # noqa: E731
                    close(f"{here}, positions said once", net.in_pieces(x, cuts, said), whole, NEAR)
    return None


def law_forms(build: MixerExample, lengths: tuple[int, ...] = LENGTHS) -> str | None:
    """Parallel = chunked, with chunks of any size = recurrent: values and every gradient; and a state that one form leaves,
    every other goes on from.
    """
    forms = build.forms()
    if len(forms) < 2:
        return "it has one form: no option is named mode, route or chunk_size"
    nets = {name: Network(build, **options) for name, options in forms.items()}
    first, *others = nets
    for length in lengths:
        x, documents = numbers(2, length, DIM), _two_documents(length)
        for what, ids in (("", None), (", with documents", documents)):
            want = _answer(nets[first], x, ids)
            for name in others:
                close(f"{length} tokens{what}: {first} and {name}", _answer(nets[name], x, ids), want, NEAR)
    length, cut = 40, 23
    x = numbers(2, length, DIM)
    with torch.no_grad():
        whole = nets[first](x, 0)
        for before in nets:
            for after in nets:
                caches = nets[before].caches()
                parts = [nets[before](x[:, :cut], 0, None, caches), nets[after](x[:, cut:], cut, None, caches)]
                close(f"{before}, and then {after}", torch.cat(parts, 1), whole, NEAR)
    return None


def _two_documents(length: int) -> Tensor:
    """Which begin at other places in each row, with padding in front of one."""
    token = torch.arange(length)
    ids = torch.stack([(token >= length // 3).long(), (token >= length // 2).long()])
    ids[1, : length // 8] = -1
    return ids


def _answer(net: Network, x: Tensor, documents: Tensor | None) -> Named:
    inputs = differentiable(x=x)
    seen = None if documents is None else (documents >= 0)[..., None]
    return with_gradients(
        lambda: net(inputs["x"], 0, documents), {**inputs, **learned_of(net)}, None if seen is None else seen.double()
    )


def law_gradients(build: MixerExample, lengths: tuple[int, ...] = (7, 63)) -> str | None:
    """Gradients of inputs and parameters: of pieces with the cache between them = of the whole pass = central differences in
    float64 along a random direction; and every parameter gets one.
    """
    for length in lengths:
        net = Network(build)
        inputs = differentiable(x=numbers(2, length, DIM))
        wanted = {**inputs, **learned_of(net)}
        x = inputs["x"]
        whole = with_gradients(partial(net, x, 0), wanted)
        for seed in (0, 1):
            cuts = random_cuts(length, seed)
            close(
                f"{length} tokens, cut at {cuts[1:-1]}",
                with_gradients(partial(net.in_pieces, x, cuts), wanted),
                whole,
                NEAR,
            )
        if length != max(lengths):
            continue
        for name in wanted:
            if not bool(whole[f"gradient of {name}"].any()):
                raise LawBroken(f"{name} gets no gradient")
        _differences(net, x, wanted, whole)
    return None


def _differences(net: Network, x: Tensor, wanted: Named, answer: Named) -> None:
    direction = numbers(*answer["output"].shape[1:], seed=9)
    for n, (name, p) in enumerate(wanted.items()):
        step = 1e-6 * numbers(*p.shape, seed=100 + n)
        with torch.no_grad():
            p.add_(step)
            above = (net(x, 0) * direction).sum()
            p.sub_(2 * step)
            below = (net(x, 0) * direction).sum()
            p.add_(step)
        got, want = (answer[f"gradient of {name}"] * step).sum() * 1e6, (above - below) / 2e-6
        close(f"gradient of {name} and differences", got, want, 1e-5)


def law_takes_part(build: MixerExample) -> str | None:
    """Every parameter that requires a gradient gets one, of zeros where it had no say, at any length: one token, a sequence
    inside every window, and documents as short; in every form and on every backend, whole and after a cache. Trainers that
    split a model over machines wait for each of them.
    """
    ways = build.forms((5,))
    if build.has("backend"):
        ways = {
            f"{name} {backend}".strip(): {**way, "backend": backend}
            for name, way in ways.items()
            for backend in BACKENDS
        }
    tried = 0
    for name, options in ways.items():
        net = Network(build, layers=1, **options)
        for length in (1, 3, 9):
            for what, ids in (("", None), (", in documents", _two_documents(length))):
                here = f"{length} tokens{what} {name}".strip()
                try:
                    _require_gradients(here, net, numbers(2, length, DIM), 0, ids)
                except ValueError:  # of a backend that does not know how
                    continue
                tried += 1
    if not tried:
        raise LawBroken("expected a form that gives gradients")
    net = Network(build, layers=1)
    caches = net.caches()
    with torch.no_grad():
        net(numbers(2, 2, DIM), 0, None, caches)
    _require_gradients("a token after a cache", net, numbers(2, 1, DIM), 2, None, caches)
    return None


def _require_gradients(what: str, net: Network, x: Tensor, *rest: Any) -> None:
    learned = {name: p for name, p in net.named_parameters() if p.requires_grad}
    out = net(x, *rest)
    grads = torch.autograd.grad((out * numbers(*out.shape, seed=9)).sum(), [*learned.values()], allow_unused=True)
    if missing := [name for name, g in zip(learned, grads, strict=True) if g is None]:
        raise LawBroken(f"{what}: no gradient, not even of zeros, for {', '.join(missing)}")


def law_rows(build: MixerExample) -> str | None:
    """A row of a batch = the row alone, with a cache too; forward and gradients."""
    net = Network(build)
    x = numbers(3, 21, DIM)
    inputs = differentiable(x=x)
    together = with_gradients(lambda: net(inputs["x"], 0), {**inputs, **learned_of(net)})
    alone = []
    for b in range(3):
        row = differentiable(x=x[b : b + 1])
        alone.append(with_gradients(lambda row=row: net(row["x"], 0), {**row, **learned_of(net)}))
        for name in ("output", "gradient of x"):
            close(f"row {b} of a batch and alone, {name}", together[name][b], alone[b][name][0], NEAR)
    for name in together.keys() - {"output", "gradient of x"}:
        close(f"batch and rows alone, {name}", together[name], sum(a[name] for a in alone), NEAR)  # type: ignore[arg-type]
    with torch.no_grad():
        close("a batch in pieces", net.in_pieces(x, (0, 4, 5, 21)), together["output"], NEAR)
    return None


ROUNDING = 1e-12
"""What a later token may move earlier outputs by, in float64, relative to the largest: products in other memory round another
way on some processors, and a Fourier transform spreads rounding over all places."""


def law_causality(build: MixerExample, lengths: tuple[int, ...] = (7, 63, 130)) -> str | None:
    """Another token at place s leaves outputs before s the same, up to the rounding of float64 (1e-12), in every form; and moves
    the one at s. One that declares `bidirectional` attends to the next token under lg.NoMask().
    """
    for name, options in build.forms((5, 16)).items():
        net = Network(build, **options)
        with torch.no_grad():
            for length in lengths:
                x = numbers(2, length, DIM)
                before = net(x, 0)
                for s in {1, length // 2, length - 1}:
                    other = x.clone()
                    other[:, s] = 3 * numbers(2, DIM, seed=5)
                    after = net(other, 0)
                    here = f"{name}, {length} tokens, another one at {s}: outputs before".removeprefix(", ")
                    close(here, after[:, :s], before[:, :s], ROUNDING)
                    if torch.equal(after[:, s] - other[:, s], before[:, s] - x[:, s]):
                        raise LawBroken(f"{length} tokens, another one at {s}: its own output stays the same")
            if net.mixer.bidirectional:
                x, other = numbers(2, 7, DIM), numbers(2, 7, DIM)
                other[:, 1] += numbers(2, DIM, seed=5)
                if torch.equal(net(x, 0, mask=NoMask())[:, 0], net(other, 0, mask=NoMask())[:, 0]):
                    raise LawBroken(
                        "declared bidirectional, and the first token does not hear the second under NoMask()"
                    )
    return None


def law_modes_of_torch(build: MixerExample) -> str | None:
    """The same under no_grad, inference_mode and train(), where dropout is 0; and a cache filled in one is read in another, by
    one token and by several, with a backward where there are gradients, and continues in the first.
    """
    net = Network(build)
    x = numbers(2, 21, DIM)
    want = net(x, 0).detach()
    with torch.inference_mode():
        close("inference_mode", net(x, 0).clone(), want, NEAR)
    close("train()", net.train()(x, 0).detach(), want, NEAR)
    for before in MODES_OF_TORCH:
        for after in MODES_OF_TORCH:
            for training in (False, True) if after == "gradients" else (False,):
                net.train(training)
                here = f"prefill in {before}, the rest in {after}{', train()' if training else ''}"
                if before != after:
                    close(here, _in_two_modes(here, net, x, before, after), want, NEAR)
    return None


MODES_OF_TORCH = {"gradients": torch.enable_grad, "no_grad": torch.no_grad, "inference_mode": torch.inference_mode}


def _in_two_modes(here: str, net: Network, x: Tensor, before: str, after: str) -> Tensor:
    caches, parts = net.caches(), []
    for mode, a, b in ((before, 0, 9), (after, 9, 10), (after, 10, 17), (before, 17, 21)):
        with MODES_OF_TORCH[mode]():
            parts.append(net(x[:, a:b], a, None, caches).clone())
    learned = learned_of(net)
    if after == "gradients":
        grads = torch.autograd.grad(parts[1].sum() + parts[2].sum(), [*learned.values()], allow_unused=True)
        if not all(g is None or bool(g.isfinite().all()) for g in grads):
            raise LawBroken(f"{here}: a gradient is not finite")
    with torch.no_grad():
        return torch.cat([part.clone() for part in parts], 1)
