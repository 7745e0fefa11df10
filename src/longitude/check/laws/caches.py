"""The law of cached keys: every class of cache, whatever is done to its keys, gives the logits of a whole pass."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, cast, get_args

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers import DynamicCache
from transformers.cache_utils import Cache

from longitude.check.causes import FILE, in_parts, require_not_of_norms
from longitude.check.laws.decoding import CACHE
from longitude.check.laws.files import GENERATION, settings_of
from longitude.check.laws.layers import BACKWARDS, as_declared, has_temperature, promised
from longitude.check.laws.passes import require_one_way
from longitude.check.laws.rotation import SHIFT, ropes
from longitude.check.recorder import apart, recorded
from longitude.check.subject import CHECKPOINT_LAWS, EQUAL, Subject
from longitude.models.stock_caches import OF_KEYS, kinds_of, without_rounding
from longitude.positions.layers import LayerPositions
from longitude.positions.rotation import Layout
from longitude.positions.scaling.base import Follows
from longitude.testing.engine import DoesNotApply, Measurement, one_line

MOST = 96
"""Tokens that go through each cache."""
STEPS, CHUNK = 12, 7
WRONG = 5
"""Tokens that are taken out of a cache again."""
ORDER = (2, 0, 0)
"""Rows of a batch after a step of beam search: one goes on twice, one not at all."""
RESTS = (*CACHE, "relative_positions", "chunked_prefill", "batch_invariance", "left_padding", "packing")
PROMPT = 3
"""Tokens before drafts: few, since a 4-D mask has no windows."""
DRAFTS = (None, 0, 0, 1, 2)
"""A tree of drafts: the draft that each one follows, None for one that follows the prompt."""
GROWING = (None, "dynamic", "offloaded", "offloaded_dynamic", "quantized", "paged", "hybrid")
"""Values of cache_implementation for caches that `classes` tries, or that generate() makes no other cache of."""
REFUSALS = (AttributeError, IndexError, NotImplementedError, RuntimeError, TypeError, ValueError)


class NotCroppable(RuntimeError):
    """Raised for a cache whose is_croppable is False, such as that of recurrent layers."""


def require_cache(subject: Subject) -> None:
    """DoesNotApply for a model that does not accept and return a cache of transformers."""
    require_one_way(subject)
    if subject.cache_name not in OF_KEYS:
        raise DoesNotApply("its forward takes no cache, so it cannot be given one")
    if not subject.attends:
        raise DoesNotApply("its layers are recurrent alone, and keep states instead of keys and values")
    answer = subject.model(input_ids=subject.tokens(2), use_cache=True)
    if not isinstance(getattr(answer, str(subject.cache_name), None), Cache):
        raise DoesNotApply("its answers have no cache of transformers' classes")


def of_kinds(subject: Subject, errors_of: Callable[[Callable[[], Any]], dict[str, Tensor]], cause: str) -> Measurement:
    """Call errors_of with a constructor of every cache class: it returns an error by position [L] for each way to use it.

    Classes that the model or transformers does not support are named in the note, and break no law.
    """
    errors: dict[str, Tensor] = {}
    refused: list[str] = []
    places = min(subject.length, MOST) + STEPS
    kinds = kinds_of(subject.model.config, places, subject.device.type != "cpu")
    for name, make in kinds.items():
        try:
            with without_rounding():
                errors |= {f"{name}{way}": error for way, error in errors_of(make).items()}
        except REFUSALS as error:
            refused.append(f"{name} cache ({type(error).__name__})")
    if not errors:
        raise DoesNotApply(f"every class of cache refuses that: {', '.join(refused)}")
    return replace(subject.measurement(errors, cause), note=f"not taken: {', '.join(refused)}" if refused else "")


@CHECKPOINT_LAWS.law(threshold=EQUAL, rests_on=(*RESTS, "rotary_frequencies"))
def cached_keys(subject: Subject) -> Measurement:
    """Logits behind every cache of transformers = a whole pass, also after crop(), reordering, renumbering, and for drafts.

    Sliding-window caches are tried if the config has windows; quantized caches keep full precision here.
    """
    require_cache(subject)
    measurement = in_parts(subject, {"classes": classes, "generate()": generating})
    if not measurement.holds:  # whatever else is done to these caches then fails as well
        return measurement
    moved = {"crop": crop, "renumber": renumber, "drafts": drafts, "reorder": reorder}
    try:
        after = in_parts(subject, moved)
    except DoesNotApply:
        return measurement
    notes = dict.fromkeys(note for of_part in (measurement, after) for note in of_part.note.split("; ") if note)
    return replace(after, note="; ".join(notes)) if after.holds else after


def classes(subject: Subject) -> Measurement:
    """Error of decoding with every cache class of transformers, and again after reset()."""
    tokens = subject.tokens(min(subject.length, MOST))
    half, length = tokens.shape[1] // 2, tokens.shape[1]
    want = subject.logits(tokens)
    steps = min(STEPS, length - half - CHUNK - 1)
    sizes = [half, CHUNK, *[1] * steps, length - half - CHUNK - steps] if steps > 0 else [half, length - half]

    def errors_of(make: Callable[[], Any]) -> dict[str, Tensor]:
        cache = make()
        errors = {"": subject.error(subject.in_chunks(tokens, sizes, True, cache=cache), want)}
        cache.reset()
        return errors | {" after reset()": subject.error(subject.in_chunks(tokens, sizes, True, cache=cache), want)}

    return of_kinds(subject, errors_of, "decoding behind a cache that is given differs from a whole pass")


def generating(subject: Subject) -> Measurement:
    """Error of generate() with the kind of cache that generation_config.json names."""
    kind = settings_of(subject)[0].get("cache_implementation")
    if kind in GROWING or not hasattr(subject.model, "generate"):
        raise DoesNotApply("its generation_config.json names no other kind of cache")
    tokens = subject.tokens(subject.length)
    half, where = subject.length // 2, f"{GENERATION}: with cache_implementation = {kind!r} generate()"
    try:
        got = subject.generated(tokens, half, cache_implementation=kind, disable_compile=True)
    except REFUSALS as error:
        cause = f"{where} raises {type(error).__name__}: {one_line(error)[:160]}"
        return Measurement(float("inf"), subject.threshold, cause=cause, whose=FILE)
    error = subject.error(got, subject.logits(tokens)[:, half - 1 : -1])
    return subject.measurement(pad(error, (half - 1, 1)), f"{where} gives other logits than a whole pass")


def crop(subject: Subject) -> Measurement:
    """Error after wrong tokens were removed again, as in speculative decoding: then come the right ones."""
    tokens = subject.tokens(min(subject.length, MOST))
    half, length = tokens.shape[1] // 2, tokens.shape[1]
    want, wrong = subject.logits(tokens), subject.tokens(WRONG, seed=1)

    def errors_of(make: Callable[[], Any]) -> dict[str, Tensor]:
        cache = make()
        cache.activate_past_recording()
        subject.in_chunks(tokens[:, :half], [half], True, cache=cache)
        if not cache.is_croppable:
            raise NotCroppable
        subject.in_chunks(wrong, [1, WRONG - 1], True, cache=cache)
        cache.crop(-WRONG)
        rest = subject.in_chunks(tokens[:, half:], [1, 1, length - half - 2], True, cache=cache)
        return {"": subject.error(torch.cat([want[:, :half], rest], 1), want)}

    cause = (
        "after crop() logits are not those of the tokens that are left, though the cache says that it can be cropped"
    )
    return of_kinds(subject, errors_of, cause)


def drafts(subject: Subject) -> Measurement:
    """Error of each branch of a tree of drafts against that branch alone, as in speculative decoding.

    Drafts come in one call behind a prompt, with positions of their own and a 4-D mask, in which each sees the prompt and its own
    branch.
    """
    if subject.recurrent:
        raise DoesNotApply("states of its recurrent layers run through all drafts of a call")
    for argument in ("position_ids", "attention_mask"):
        subject.require(argument, "branches cannot be declared")
    if mixes_outside_attention(subject):
        raise DoesNotApply("tokens reach each other outside of attention, too, where no mask keeps branches apart")
    prompt = PROMPT
    paths = [path_of(draft) for draft in range(len(DRAFTS))]
    prompt_tokens, branches = subject.tokens(prompt), subject.tokens(len(DRAFTS), seed=1)
    want = torch.cat([subject.logits(torch.cat([prompt_tokens, branches[:, path]], 1))[:, -1:] for path in paths], 1)
    length = prompt + len(DRAFTS)
    sees = torch.ones(length, length, dtype=torch.bool, device=subject.device).tril()
    for draft, path in enumerate(paths):
        sees[prompt + draft, prompt:] = False
        sees[prompt + draft, [prompt + at for at in path]] = True
    mask = torch.zeros(sees.shape, dtype=subject.kind, device=subject.device)
    mask = mask.masked_fill(~sees, torch.finfo(subject.kind).min)[None, None]
    steps = [*range(prompt), *(prompt + len(path) - 1 for path in paths)]
    positions = torch.tensor([steps], device=subject.device)
    try:
        whole = subject.logits(torch.cat([prompt_tokens, branches], 1), attention_mask=mask, position_ids=positions)
        cache = getattr(subject.model(input_ids=prompt_tokens, use_cache=True), str(subject.cache_name))
        options = {"attention_mask": mask[:, :, prompt:], "position_ids": positions[:, prompt:]}
        behind = subject.model(input_ids=branches, use_cache=True, **subject.with_cache(cache), **options)
    except REFUSALS as error:
        raise DoesNotApply(f"its forward refuses a 4-D mask ({type(error).__name__})") from error
    ways = {"in one pass": whole[:, prompt:], "behind a cache": subject.some(behind.logits)}
    errors = {way: subject.error(got, want) for way, got in ways.items()}
    broken = [way for way, error in errors.items() if subject.first_above(error) is not None]
    cause = f"drafts in a tree get other logits than each branch alone ({'; '.join(broken)})"
    return Measurement(float(torch.stack([*errors.values()]).max()), subject.threshold, cause=cause)


def renumber(subject: Subject) -> Measurement:
    """Error of tokens behind cached keys that were turned to later positions.

    As caches are renumbered after tokens were evicted: keys are turned by 64 positions more, and tokens go on 64 positions later.
    What is left after an eviction is no fresh pass, since it has seen what is gone; this is the part that must be equal.
    """
    subject.require("position_ids", "tokens cannot go on at other positions")
    config = subject.config
    if any(isinstance(rope.scaling, Follows) for rope in ropes(config).values()):
        raise DoesNotApply("its tables follow the length of the sequence")
    if subject.recurrent or getattr(config, "qk_rope_head_dim", None) or config.model_type in BACKWARDS:
        raise DoesNotApply("its cache keeps something else than rotated keys of all layers")
    layers = {layout: promised(config, layout) for layout in get_args(Layout)}
    if has_temperature(layers["half"]):
        raise DoesNotApply("it multiplies queries by a factor of their position")
    tokens = subject.tokens(min(subject.length, MOST))
    half, length = tokens.shape[1] // 2, tokens.shape[1]
    later = torch.arange(half, length, device=subject.device)[None] + SHIFT

    def behind_turned_keys(layers: Sequence[LayerPositions]) -> Tensor:
        want, cache = subject.logits(tokens)[:, half:], cast(Any, DynamicCache())
        subject.model(input_ids=tokens[:, :half], use_cache=True, **subject.with_cache(cache))
        if len(cache.layers) > len(layers):  # a layer that is gone through several times (Dory) keeps keys of each
            raise DoesNotApply("its cache keeps keys of more layers than the model has")
        for layer, kept in zip(layers, cache.layers, strict=False):  # layers that share keys with others keep none
            kept.keys = turned(kept.keys, layer)
        answer = subject.model(
            input_ids=tokens[:, half:], position_ids=later, use_cache=True, **subject.with_cache(cache)
        )
        return subject.error(subject.some(answer.logits), want)

    def error() -> Tensor:
        return min((behind_turned_keys(of_layout) for of_layout in layers.values()), key=lambda e: float(e.max()))

    try:
        measured = error()
    except REFUSALS as refusal:
        raise DoesNotApply(f"its cache keeps no keys that can be turned ({type(refusal).__name__})") from refusal
    if subject.first_above(measured) is not None:
        require_not_of_norms(subject, lambda: float(error().max()))
    cause = f"tokens behind cached keys that are turned by {SHIFT} positions, and given positions as many later, get other logits"
    return subject.measurement(measured, cause)


def turned(keys: Tensor, layer: LayerPositions) -> Tensor:
    """Rotated keys [B, H, L, D] of a layer, at positions SHIFT later."""
    at = torch.full(keys.shape[:1] + keys.shape[2:3], SHIFT, device=keys.device)
    factor = as_declared(torch.ones_like(keys), layer.encoding, 0 * at, False)  # cached keys have it already
    return (as_declared(keys, layer.encoding, at, False) / factor).to(keys)


def mixes_outside_attention(subject: Subject) -> bool:
    """Whether a token reaches queries or keys of the next one if attention gives zeros, as by a convolution."""
    tokens, others = subject.tokens(2), subject.tokens(2, seed=1)
    others[:, 1] = tokens[:, 1]
    try:
        layers, changed = recorded(subject, tokens), recorded(subject, others)
    except DoesNotApply:  # its attention cannot be replaced
        return False
    pairs = [
        (getattr(changed[n], kind), getattr(layer, kind)) for n, layer in layers.items() for kind in ("query", "key")
    ]
    return any(not apart(got[:, :, 1:], want[:, :, 1:].double()) <= subject.threshold for got, want in pairs)


def path_of(draft: int) -> list[int]:
    """A draft and those before it on its branch, the first one first."""
    before = DRAFTS[draft]
    return [*([] if before is None else path_of(before)), draft]


def reorder(subject: Subject) -> Measurement:
    """Error after rows were moved with reorder_cache(), as in beam search, with rows padded on the left by different numbers."""
    length = min(subject.length, MOST)
    half = length // 2
    pads = (0, 3, half // 2) if "attention_mask" in subject.takes else (0, 0, 0)
    tokens, mask = subject.padded(subject.tokens(length, rows=len(ORDER)), pads)
    order = torch.tensor(ORDER, device=subject.device)
    moved = torch.cat([tokens[order, :half], tokens[:, half:]], 1)
    want = [subject.logits(moved[r : r + 1, pads[row] :])[:, half - pads[row] :] for r, row in enumerate(ORDER)]

    def errors_of(make: Callable[[], Any]) -> dict[str, Tensor]:
        cache = make()
        subject.in_chunks(tokens[:, :half], [half], True, cache=cache, mask=mask)
        cache.reorder_cache(order)
        rest = subject.in_chunks(moved[:, half:], [1, 1, length - half - 2], True, cache=cache, mask=mask[order])
        errors = [subject.error(rest[r : r + 1], want[r]) for r in range(len(ORDER))]
        return {"": torch.cat([errors[0].new_zeros(half), torch.stack(errors).amax(0)])}

    cause = "after reorder_cache(), as in beam search, rows do not go on as they would alone"
    return of_kinds(subject, errors_of, cause)
