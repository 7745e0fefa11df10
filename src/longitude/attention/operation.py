"""attend(): one operation for every encoding, mask and backend; explain() prints which backend runs it and why."""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal, Unpack, overload

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from longitude.attention.backends import BACKENDS, Backend, cheapest, refusal
from longitude.attention.backends.table.backend import TABLE, decoding
from longitude.attention.backends.table.band import is_faster_in_c
from longitude.attention.length_dependent import Part, joined, merged, parted
from longitude.attention.masks import Causal, Mask, require_causal
from longitude.attention.not_finite import nan_where_attended
from longitude.attention.pairs import AllowedPairs
from longitude.attention.request import Options, Request, Step, checked_mask, places, require_options, transformed
from longitude.attention.terms import (
    learned_of,
    mixed,
    multiplied,
    of_one_axis,
    require_columns,
    require_terms,
    with_sinks,
    with_terms_around,
)
from longitude.errors import unknown
from longitude.native import load
from longitude.native.derivatives import in_forward_mode, transforms_active
from longitude.positions.base import Columns, Encoding
from longitude.positions.composed import Composed, by_name, compose
from longitude.positions.coordinates import Positions
from longitude.positions.terms import OffsetBias, Softcap


@overload
def attend(
    q: Tensor, k: Tensor, v: Tensor, *, return_weights: Literal[False] = False, return_lse: Literal[False] = False,
    **options: Unpack[Options],
) -> Tensor: ...  # fmt: skip
@overload
def attend(
    q: Tensor, k: Tensor, v: Tensor, *, return_weights: Literal[True], return_lse: Literal[False] = False,
    **options: Unpack[Options],
) -> tuple[Tensor, Tensor]: ...  # fmt: skip
@overload
def attend(
    q: Tensor, k: Tensor, v: Tensor, *, return_weights: Literal[False] = False, return_lse: Literal[True],
    **options: Unpack[Options],
) -> tuple[Tensor, Tensor]: ...  # fmt: skip
@overload
def attend(
    q: Tensor, k: Tensor, v: Tensor, *, return_weights: bool = ..., return_lse: bool = ..., **options: Unpack[Options]
) -> Tensor | tuple[Tensor, Tensor]: ...
def attend(
    q: Float[Tensor, "B H Lq D"],
    k: Float[Tensor, "B Hkv Lk D"],
    v: Float[Tensor, "B Hkv Lk Dv"],
    *,
    encoding: Encoding | Sequence[Encoding] | str | None = None,
    context: Columns | None = None,
    mask: Mask | Bool[Tensor, "*B Lq Lk"] = Causal(),  # noqa: B008 (frozen)
    q_positions: Positions | None = None,
    k_positions: Positions | None = None,
    scale: float | None = None,
    dropout: float = 0.0,
    softcap: float | None = None,
    return_weights: bool = False,
    return_lse: bool = False,
    backend: str = "auto",
) -> Any:
    """softmax(scale q.k + what the encoding adds, over the keys that the mask allows) v.

    Args:
        q: Queries [B, H, Lq, D]. Without positions they are the last Lq tokens of the keys.
        k: Keys [B, Hkv, Lk, D]; Hkv divides H.
        v: Values [B, Hkv, Lk, Dv].
        encoding: An Encoding, a list of them (composed), or None. Embeddings added to a model's input (embed) have no effect
            here. A string of registered names joined by + builds an encoding for the heads of q, if it has no parameters and
            needs no other arguments.
        context: The columns of `encoding.context(x)` for all keys, if the encoding reads content.
        mask: Which keys a query attends to, by the order of tokens. Or a tensor for all heads, [Lq, Lk] or [B, 1, Lq, Lk], in
            the format of F.scaled_dot_product_attention and transformers: True if a query attends, or 0 and -inf. A tensor is
            slow: `explain` prints which backends support it.
        q_positions: Integers [Lq] or [B, Lq], with several axes [Lq, axes] or [B, Lq, axes] too, or an int p for p, p+1, ...
            The encoding follows positions, causality follows order.
        k_positions: Positions of the keys, in the format of q_positions.
        scale: Factor of q.k; None: head_dim**-0.5.
        dropout: Dropout probability of the attention weights, 0 <= dropout < 1.
        softcap: Number c that caps the products, c tanh(scale q.k / c), before biases and mask; None: no cap.
        return_weights: Also return the weights as applied.
        return_lse: Also return the logsumexp of each query's scores, with which `merge_attention` joins attention over parts
            of the keys.
        backend: "auto" takes the cheapest backend that supports the call. A named backend never falls back. `explain` with the
            same arguments prints what each backend would do.

    Returns:
        [B, H, Lq, Dv], zeros for a query without keys; with return_weights also [B, H, Lq, Lk]; with return_lse also
        [B, H, Lq], in float32 or wider, -inf for a query without keys.

    Raises:
        ValueError: For arguments of wrong type or shape, and if the named backend does not support the call.
    """
    parts = requests(
        q, k, v, encoding, context, mask, q_positions, k_positions, scale, dropout, return_weights, None, softcap
    )
    if return_lse:
        parts = [part.with_lse() for part in parts]
    out, second = run_parts(parts, backend)
    return (out, second) if return_weights or return_lse else out


def requests(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    encoding: Encoding | Sequence[Encoding] | str | None = None,
    context: Columns | None = None,
    mask: Mask | Tensor = Causal(),  # noqa: B008 (frozen)
    q_positions: Positions | None = None,
    k_positions: Positions | None = None,
    scale: float | None = None,
    dropout: float = 0.0,
    return_weights: bool = False,
    sinks: Tensor | None = None,
    softcap: float | None = None,
) -> list[Part]:
    """Check the arguments of attend: one part, or one for each length that tables follow. sinks: see raw_request."""
    mask = checked_mask(q, k, v, mask)
    require_options(scale, dropout, softcap)
    encoding = (
        by_name(encoding, q.shape[1], k.shape[1], q.shape[3], q.device)
        if isinstance(encoding, str)
        else compose(encoding)
    )
    encoding.require_loaded(q.device)
    require_causal(encoding.causal_only, mask)
    at = places(q, k, q_positions, k_positions, encoding.axes)
    r = raw_request(q, k, v, encoding, context, mask, *at, scale, dropout, return_weights, sinks=sinks, softcap=softcap)
    if encoding.stable_keys:
        return [Part(slice(None), slice(None), transformed(r, encoding, *at))]
    return parted(r, encoding, *at)


def raw_request(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    encoding: Composed,
    context: Columns | None,
    mask: Mask,
    q_positions: Positions,
    k_positions: Positions,
    scale: float | None,
    dropout: float,
    return_weights: bool,
    pairs: AllowedPairs | None = None,
    sinks: Tensor | None = None,
    transformed_by: int = 1,
    softcap: float | None = None,
) -> Request:
    """Build a request of queries and keys without transforming them; layers call it, because their cache may store rotated keys.

    mask: already validated. pairs: allowed pairs of the mask, from an earlier layer of the same forward. sinks: a logit for
    each query head, besides those of the encoding. transformed_by: width of q and k over head_dim. softcap: see attend.
    """
    heads, rows, keys, head_dim = q.shape[1], q.shape[2], k.shape[2], q.shape[3] // transformed_by
    for who, name, size in encoding.sizes:
        got = heads if name == "num_heads" else head_dim
        if size != got:
            raise ValueError(f"{who} was built with {name}={size}, q has {got}")
    if context or encoding.reads_tokens:
        require_columns(context, encoding, q, k)
    terms = added = ()
    learned: list[Tensor] = []
    if encoding.adds_terms:
        try:
            terms = encoding.terms(context or {})
        except KeyError as missing:
            raise ValueError(
                f"context: the encoding reads the column {missing} off the tokens; pass context=encoding.context(x)[0]"
            ) from None
        if {OffsetBias} != {*map(type, terms)}:  # these alone fit any call
            terms = tuple(term.placed(rows, keys) for term in terms)
            require_terms(terms, q, k, v)
        added = tuple([term for term in terms if term.added])
        if added and encoding.learned and torch.is_grad_enabled():
            learned = learned_of(encoding, terms)
    if not isinstance(q_positions, int) or not isinstance(k_positions, int):
        q_positions, k_positions = of_one_axis(q_positions, k_positions, terms, keys - rows)
    r = Request(
        q, k, v, added if softcap is None else (*added, Softcap(softcap)), mask, q_positions, k_positions,
        scale=head_dim**-0.5 if scale is None else scale,
        dropout=dropout,
        weights=return_weights,
        learned=tuple(learned),
        q_order=keys - rows,
        pairs=pairs,  # type: ignore[arg-type]
        sinks=sinks,
    )  # fmt: skip
    return r if len(added) == len(terms) else with_terms_around(r, terms)


def require_backend(name: str) -> None:
    """ValueError unless it is "auto" or a backend's name."""
    if name != "auto" and name not in BACKENDS:
        raise unknown("backend", name, ["auto", *BACKENDS], "lg.explain(...) shows what each supports.")


def choose(requests: Sequence[Request], name: str) -> Backend:
    """The backend of that name, or the cheapest that supports all requests; ValueError with the reason otherwise."""
    require_backend(name)
    if name == "auto":
        return cheapest(requests)
    if why := refusal(BACKENDS[name], requests):
        able = [repr(other) for other, backend in BACKENDS.items() if refusal(backend, requests) is None]
        named = " and ".join([", ".join(able[:-1]), able[-1]] if len(able) > 1 else able)
        raise ValueError(f"backend {name!r} cannot: {why}; {named} can, and 'auto' takes {cheapest(requests).name!r}")
    return BACKENDS[name]


CHOICES: dict[Hashable, tuple[Backend, tuple[Backend, ...]]] = {}
"""Choices of earlier calls whose signature has no tensor, each with the backends that were registered then."""


def choose_once(r: Request, name: str, step: Step | None = None) -> Backend:
    """`choose`, computed once for requests of a step with equal signatures, or of calls whose shapes and band decide."""
    if r.step is not None:
        return r.once(chosen_in_step, name)
    if torch.compiler.is_compiling() or transforms_active() or in_forward_mode():
        return choose([r], name)
    lasting = type(r.q) is Tensor and r.q.is_cpu and len(r.pairs.beyond_band) == 0 and r.contiguous
    if not lasting and step is None:
        return choose([r], name)
    choices: dict[Hashable, Any] = CHOICES if lasting or step is None else step.results
    key = name, r.signature(), not r.terms and is_faster_in_c(r)
    backends = tuple(BACKENDS.values())
    chosen, among = choices.get(key, (None, ()))
    if chosen is None or among != backends:
        if len(CHOICES) >= 256:  # a growing KV cache adds a key for each token
            CHOICES.clear()
        chosen = choose([r], name)
        choices[key] = chosen, backends
    return chosen


def chosen_in_step(r: Request, name: str) -> Backend:
    """The backend of that name, or for a token of each sequence the C kernel, whose call then serves all layers."""
    registered = BACKENDS["table"] is TABLE  # another declines, since LONGITUDE_BACKENDS switches it off
    step = decoding(r) if registered and name in ("auto", "table") else None
    return choose([r], name) if step is None else replace(BACKENDS["table"], run=step)


def run(r: Request, backend: str = "auto") -> tuple[Tensor, Tensor | None]:
    """The output, and the weights or the logsumexp if they were requested."""
    return answer(choose_once(r, backend), r)


def run_parts(parts: list[Part], backend: str = "auto") -> tuple[Tensor, Tensor | None]:
    """Run a call of one or more parts: its tables may depend on several lengths, or it may be cut into regions."""
    if len(parts) == 1 and not parts[0].regions:
        return run(parts[0].request, backend)
    with torch.autocast(parts[0].request.q.device.type, enabled=False):
        chosen = choose([r for part in parts for r in part.requests], backend)
        if parts[0].regions:
            return merged(parts[0].request, parts[0].regions, partial(answer, chosen))
        return joined(parts, partial(answer, chosen))


def answer(backend: Backend, r: Request) -> tuple[Tensor, Tensor | None]:
    """Return the output of a backend, and its weights or logsumexp. The dtype of q decides, under autocast too."""
    if torch.is_autocast_enabled(r.q.device.type):
        with torch.autocast(r.q.device.type, enabled=False):
            return answer(backend, r)
    if r.terms:
        r = mixed(r)
    if r.factors is not None:
        r = multiplied(r)
    # `nan_where_attended` would do the same by more calls, in each layer of a decoding step.
    plain = len(r.pairs.beyond_band) == 0
    result = _computed(backend, r) if plain else nan_where_attended(backend, r, partial(_computed, backend))
    return result if r.finish is None else (r.finish(result[0]), result[1])


def _computed(backend: Backend, r: Request) -> tuple[Tensor, Tensor | None]:
    if r.sinks is not None and not backend.sinks:
        assert backend.partial is not None
        out, lse = with_sinks(*backend.partial(replace(r, sinks=None, lse=True)), r.sinks)
        return out, lse if r.lse else None
    if r.weights or r.lse:
        assert backend.partial is not None
        return backend.partial(r)
    return backend.run(r), None


@dataclass(frozen=True)
class Verdict:
    """Verdict of `explain` on a backend: whether it supports a request, its cost, and whether it runs.

    Attributes:
        backend: Name of the backend.
        refusal: Reason why it does not support the request; None: it does.
        memory: Bytes beyond inputs and output.
        price: Estimated time relative to causal attention without bias.
        chosen: Whether the backend runs.
    """

    backend: str
    refusal: str | None
    memory: int
    price: float
    chosen: bool

    def __str__(self) -> str:
        mark = "->" if self.chosen else "  "
        if self.refusal is not None:
            return f"{mark} {self.backend:10s} refuses: {self.refusal}"
        time = "by name only" if self.price == math.inf else f"about {self.price:.1f} times the time of plain attention"
        return f"{mark} {self.backend:10s} takes it, {time}, {self.memory / 2**20:.1f} MiB beyond inputs and output"


def explain(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    return_weights: bool = False,
    return_lse: bool = False,
    **arguments: Unpack[Options],
) -> tuple[Verdict, ...]:
    """Print what each backend would do with the arguments of `attend`: its memory, or why it is not used.

    On the CPU it also prints how the C kernels were compiled, or why there are none. Without a bias it prints the shortest
    sequences for which our C kernel runs instead of torch's function.

    Args:
        q: Queries [B, H, Lq, D].
        k: Keys [B, Hkv, Lk, D].
        v: Values [B, Hkv, Lk, Dv].
        return_weights: As in `attend`.
        return_lse: As in `attend`.
        arguments: The other keywords of `attend`.

    Returns:
        A Verdict for each backend.

    Raises:
        ValueError: As in `attend`; and for an argument that `attend` does not have.
    """
    for name in arguments.keys() - Options.__annotations__.keys():
        raise unknown("argument", name, Options.__annotations__, "explain takes what attend takes.")
    options: dict[str, Any] = {**arguments}
    name = options.pop("backend", "auto")
    parts = requests(q, k, v, return_weights=return_weights, **options)
    requested = [r for part in parts for r in (part.with_lse() if return_lse else part).requests]
    largest = max(requested, key=lambda r: r.rows * r.length)
    if len(parts) > 1:
        print(f"tables follow {len(parts)} lengths, each in a call of its own; memory is of the largest")
    if (regions := len(parts[0].regions)) > 1:
        print(
            f"positions move by pairs: {len(requested)} calls in {regions} regions are merged; memory is of the largest"
        )
    if largest.q.is_cpu:
        print(load.route())
    require_backend(name)
    refusals = {b.name: refusal(b, requested) for b in BACKENDS.values()}
    chosen = choose(requested, name) if name == "auto" or refusals[name] is None else None
    verdicts = [
        Verdict(b.name, refusals[b.name], b.memory(largest), b.price(requested[-1]), b is chosen)
        for b in BACKENDS.values()
    ]
    print("\n".join(map(str, verdicts)))
    return tuple(verdicts)
