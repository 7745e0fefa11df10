"""Random cases, each with the loop that gives what it should be. Calls of attend are those of the law `random_calls`."""

import random
from collections.abc import Callable
from dataclasses import dataclass, replace

import loops
import numpy as np
import recurrences
import torch
from torch import Tensor

import longitude as lg
from longitude import testing
from longitude.attention.backends import BACKENDS
from longitude.attention.masks import Pairs
from longitude.testing.battery.random_calls import draw
from longitude.testing.examples import DIM, SHAPES, MixerExample
from longitude.testing.fixtures import LayerStack, Named, learned_of, numbers, parameters_of, random_cuts

HEADS, WIDTH = SHAPES["num_heads"], SHAPES["head_dim"]


@dataclass
class Case:
    """loop: of arrays by the names of inputs and parameters; forward: of tensors and a way, a backend or how to cut the call.

    seen: 1 where outputs mean anything, of padding 0.
    """

    label: str
    text: str
    inputs: Named
    learned: Named
    loop: Callable[[dict[str, np.ndarray]], np.ndarray]
    forward: Callable[[Named, str], Tensor]
    ways: tuple[str, ...] = ("whole", "chunks")
    seen: Tensor | float = 1.0

    @property
    def every(self) -> Named:
        return {**self.inputs, **self.learned}


def below(arrays, *prefixes):
    """The numbers whose names begin so, by the rest of their names."""
    for prefix in prefixes:
        arrays = {name.removeprefix(prefix): x for name, x in arrays.items() if name.startswith(prefix)}
    return arrays


# ---- encodings: their options, and what loops need besides ------------------------------------------------------------------
LAYOUTS = ["half", "interleaved"]
OPTIONS = {
    "axial_rope": {"layout": LAYOUTS, "axes": [2]},
    "mrope": {"layout": LAYOUTS, "sections": [(2, 1, 1)]},
    "xpos": {"layout": LAYOUTS, "base": [100.0], "scale_base": [4, 512]},
    "t5": {"num_buckets": [8], "max_distance": [8, 20], "bidirectional": [True, False]},
    "clipped": {"max_distance": [1, 3, 40]},
    "sandwich": {"dim": [8, 128]},
    "fire": {"width": [6], "threshold": [4.0, 512.0]},
    "transformer_xl": {"clamp_length": [None, 3]},
    "shaw": {"max_distance": [1, 4, 40], "values": [True, False]},
    "cope": {"max_position": [3, 64]},
    "fox": {"scale_gate": [True, False]},
    "path": {"rank": [3, None]},
    "path_fox": {"rank": [3, None]},
    "log_n": {"trained_length": [None, 16]},
    "llama4_temperature": {"attn_scale": [0.5], "floor_scale": [1, 7]},
    "ministral3_temperature": {"beta": [0.5], "original_max_length": [1, 5]},
    **{name: {} for name in ("nope", "alibi", "kerple_log", "kerple_power", "ssmax", "sink")},
}
AXES = {
    "axial_rope": {"axis": [0, 0, 1, 1], "theta": np.tile(loops.plain(WIDTH // 2, 10000.0), 2)},
    "mrope": {"axis": [0, 0, 1, 2], "theta": loops.plain(WIDTH, 10000.0)},
}
S, SHORT, LONG = lg.scaling, [1.0, 1.1, 1.5, 2.0], [1.0, 2.0, 3.0, 8.0]
BY_ROW = {"follow": "row", "trained": 8, "scheme": loops.dynamic_ntk, "numbers": (4.0, 8)}
ROPES = {
    "plain": ({}, {}),
    "partial": ({"rotary_dim": 4}, {}),
    **{f"proportion {share}": ({"proportion": share}, {}) for share in (0.0, 0.5, 1.0)},
    "yarn": ({"scaling": S.YaRN(4.0, 64, beta_fast=4)}, {"scheme": loops.yarn, "numbers": (4.0, 64, 4, 1)}),
    "dynamic": ({"scaling": S.DynamicNTK(4.0, 8, follow="row")}, BY_ROW),
    "dynamic by 2": (
        {"scaling": S.DynamicNTK(4.0, 32, follow="row")},
        BY_ROW | {"trained": 32, "numbers": (4.0, 32), "step": 2},
    ),
    "declared": ({"scaling": S.DynamicNTK(4.0, 8, max_length=24, follow="declared")}, BY_ROW | {"follow": 24}),
    "sequence": ({"scaling": S.DynamicNTK(4.0, 8, follow="sequence")}, BY_ROW | {"follow": "sequence"}),
    "longrope": (
        {"scaling": S.LongRoPE(SHORT, LONG, 8, factor=4.0, follow="row")},
        {"follow": "row", "trained": 0, "scheme": loops.longrope, "numbers": (4.0, 8, SHORT, LONG)},
    ),
}


def encoding(r):
    """-> an Example, what its loop needs, its name and scaling."""
    name, scheme = r.choice([*OPTIONS, "alibi", "path", "path_fox", *["rope"] * 4]), r.choice([*ROPES, "plain"])
    if name == "rope":
        options, more = ROPES[scheme]
        options = {"layout": r.choice(LAYOUTS), "base": r.choice([10000.0, 100.0]), **options}
    else:
        options = {option: r.choice(values) for option, values in OPTIONS[name].items()}
        scheme, more = "", AXES.get(name, {})
    dot = loops.dot_axes if name in AXES else getattr(loops, f"dot_{name}", loops.dot_plain)
    o = {**SHAPES, **options, **more, "kind": name, "dot": dot, "add": getattr(loops, f"add_{name}", None)}
    o["warm"] = getattr(loops, f"warm_{name}", None)
    return testing.example(name, **options), o, f"{name} {scheme}".strip()


# ---- attend ---------------------------------------------------------------------------------------------------------------
def allows(mask):
    """A mask as a predicate of (row of the batch, order of the query, order of the key)."""

    def of(x, b, at):
        return bool(x[at] if x.dim() == 1 else x[b % len(x), at])

    match mask:
        case lg.NoMask():
            return lambda b, i, j: True
        case Pairs(seen=seen):
            return lambda b, i, j: bool(seen[i, j])
        case lg.Causal():
            return lambda b, i, j: i >= j
        case lg.Window(size=size):
            return lambda b, i, j: 0 <= i - j < size
        case lg.Band(before=before, after=after):
            return lambda b, i, j: -after <= i - j <= before
        case lg.Padding(valid=valid):
            return lambda b, i, j: of(valid, b, j)
        case lg.Documents(ids=ids):
            rows = ids.view(-1, ids.shape[-1])
            return lambda b, i, j: rows[b % len(rows), i] == rows[b % len(rows), j]
        case lg.Prefix(length=length):
            return lambda b, i, j: j <= i or j < (length[b % len(length)] if isinstance(length, Tensor) else length)
        case lg.Global(tokens=tokens) if tokens.dtype == torch.bool:
            return lambda b, i, j: of(tokens, b, i) or of(tokens, b, j)
        case lg.Global(tokens=tokens):
            return lambda b, i, j: i in tokens.tolist() or j in tokens.tolist()
        case lg.Chunks(size=size, places=None, first=first):
            return lambda b, i, j: (i + first) // size == (j + first) // size
        case lg.Chunks(size=size, places=places):
            chunks = places.view(-1, places.shape[-1]) // size
            return lambda b, i, j: chunks[b % len(chunks), i] == chunks[b % len(chunks), j]
    every, joined = [allows(part) for part in mask.masks], any if type(mask).__name__ == "AnyOf" else all
    return lambda b, i, j: joined(one(b, i, j) for one in every)


def placed(batch, rows, keys, axes, options):
    """Positions of queries and keys, [B, L], with several axes [B, L, axes]: by default queries are the last."""
    q, k = options.get("q_positions"), options.get("k_positions")
    if k is None:
        k = max(0, rows - keys) if q is None else q + rows - keys if isinstance(q, int) else q
    if q is None:
        q = k + keys - rows if isinstance(k, int) else k[:, -rows:] if k.dim() == 3 else k[..., -rows:]
    given = (np.arange(p, p + n) if isinstance(p, int) else p.numpy() for p, n in ((q, rows), (k, keys)))
    of_axes = [
        np.broadcast_to(p if p.ndim == 3 else p[..., None], (batch, p.shape[-1 - (p.ndim == 3)], axes)) for p in given
    ]
    return [p if axes > 1 else p[..., 0] for p in of_axes]


def attend(r, seed):
    build, o, label = encoding(r)
    call = replace(draw(build, seed, longest=10), documents=None)
    (batch, _, rows, _), keys = call.tensors["q"].shape, call.tensors["k"].shape[2]
    if label in (
        "xpos",
        "rope sequence",
    ):  # in order: xpos grows without bound ahead, the other takes the newest of all
        given = call.options.get("k_positions")
        options = {name: x for name, x in call.options.items() if not isinstance(x, Tensor)}
        if isinstance(given, Tensor) and rows <= keys:
            options["k_positions"] = given.sort(-1).values
        call = replace(call, options=options)
    if label == "kerple_power":  # beyond its bound the gradient is not that of the value
        call.encoding.p.data.clamp_(max=2.0)
    places = placed(batch, rows, keys, call.encoding.axes, call.options)
    scale, allowed = call.options.get("scale", WIDTH**-0.5), allows(call.mask)
    seen = [[[j for j in range(keys) if allowed(b, keys - rows + n, j)] for n in range(rows)] for b in range(batch)]

    def loop(arrays):
        out = loops.attention(o, scale, seen, *places, *(arrays[n] for n in "qkvx"), below(arrays, "encoding."))
        return out if call.options.get("return_lse") else out[..., :-1]

    ways = ("auto", *BACKENDS)
    learned = parameters_of(call.encoding)
    return Case(f"attend {o['kind']}", f"{label} {call}", call.tensors, learned, loop, call.output, ways)


# ---- layers: whole and in chunks behind a cache, packed and padded or plain -------------------------------------------------
def documents(r, batch, length):
    """Ids [B, L], -1 for padding on one side, positions, and the documents [(row, slice)]."""
    ids, positions, found = torch.full((batch, length), -1), torch.zeros(batch, length, dtype=torch.long), []
    for b in range(batch):
        pad = r.randrange(length) if r.random() < 0.4 else 0
        start, stop = (pad, length) if r.random() < 0.6 else (0, length - pad)
        while start < stop:
            end = r.randint(start + 1, stop)
            ids[b, start:end], positions[b, start:end] = len(found), torch.arange(end - start)
            found.append((b, slice(start, end)))
            start = end
    return ids, positions, found


def layer(r, seed, label, text, net, of_document):
    """A case of x + layer(x): each document is as `of_document` has it alone."""
    testing.fill(net, seed, DIM**-0.5)
    batch, length = r.randint(1, 2), r.randint(1, 12)
    ids, positions, found = documents(r, batch, length)
    if plain := r.random() < 0.4:
        ids, positions, found = None, None, [(b, slice(0, length)) for b in range(batch)]
    cuts, seen = random_cuts(length, seed, most=4), 1.0 if plain else (ids >= 0)[..., None].double()

    def loop(arrays):
        out = np.zeros((batch, length, DIM))
        for b, part in found:
            own = arrays["x"][b, part]
            out[b, part] = own + of_document(own, arrays)
        return out

    def forward(tensors, way):
        if way == "whole":
            return net(tensors["x"], positions, ids)
        return net.in_chunks(tensors["x"], cuts, lambda a, b: a if plain else positions[:, a:b], ids)

    text += f" B{batch} L{length} cuts {cuts} documents {ids}"
    inputs = {"x": numbers(batch, length, DIM, seed=seed)}
    return Case(label, text, inputs, learned_of(net), loop, forward, seen=seen)


def decoding(r, seed):
    label = "rope sequence"
    while label == "rope sequence":  # its tables follow the newest token, so that the past changes
        build, o, label = encoding(r)
    size = r.choice([None, None, r.randint(1, 6)])
    options = {"size": size} if size else {}
    if "path" not in label:
        options["num_kv_heads"] = r.choice([1, 2, 4])
    kind = lg.attention.WindowAttention if size else lg.MultiHeadAttention
    net = LayerStack(MixerExample(kind, options, build), layers=1)
    members = () if o["kind"] == "path_fox" else ("members.0.",)

    def of_document(x, arrays):
        p, length, axes = below(arrays, "layers.0."), len(x), net.encoding.axes
        q, k, v = ((x @ p[f"{n}_proj.weight"].T).reshape(1, length, -1, WIDTH).swapaxes(1, 2) for n in "qkv")
        places, own = placed(1, length, length, axes, {}), below(arrays, "encoding.", *members)
        seen = [[[*range(max(0, n + 1 - (size or length)), n + 1)] for n in range(length)]]
        out = loops.attention(o, WIDTH**-0.5, seen, *places, q, k, v, x[None], own)
        return out[0, ..., :-1].swapaxes(0, 1).reshape(length, -1) @ p["o_proj.weight"].T

    return layer(r, seed, "decode", f"{label} {options}", net, of_document)


def recurrence(r, seed):
    name = r.choice(["retention", "rwkv6", "s4d"])
    options = {"mode": r.choice(["chunked", "recurrent", "parallel"]), "chunk_size": r.randint(1, 9)}
    build = testing.mixers.example(name, **options)
    o, loop = build.resolved(), getattr(recurrences, name)
    net = LayerStack(build, layers=1)
    return layer(
        r, seed, f"recurrence {name}", f"{options}", net, lambda x, arrays: loop(x, below(arrays, "layers.0."), o)
    )


KINDS = {"attend": (attend, 0.6), "decode": (decoding, 0.2), "recurrence": (recurrence, 0.2)}


def made(seed, only=None):
    """The case of this number."""
    r = random.Random(seed + 10**6)  # other numbers than those of `draw`
    name = only or r.choices([*KINDS], [share for _, share in KINDS.values()])[0]
    return KINDS[name][0](r, seed)
