"""What cases are drawn from: encodings with the options that loops need of them, masks with predicates, positions."""

from dataclasses import dataclass, field

import loops
import numpy as np
import torch

import longitude as lg

ATTEND_WAYS = ("auto", "reference", "chunked", "sdpa", "table", "split", "transport")
HEADS, DIM, WIDTH = 4, 8, 12


@dataclass
class Case:
    kind: str
    numbers: dict = field(default_factory=dict)
    scale: float = 1.0
    options: dict = field(default_factory=dict)
    encoding: object = None
    inputs: dict = field(default_factory=dict)
    keep: np.ndarray | None = None
    parameters: dict = field(default_factory=dict)
    ways: tuple = ("auto",)
    sees = None
    places = None
    loop = None
    library = None
    text = ""


def learned(module, draw, positive=()):
    """Random numbers for every parameter, and those of `positive` above zero."""
    found = {}
    for name, p in module.state_dict().items():
        x = draw.normal(size=tuple(p.shape)) * 0.5
        found[f"p.{name}"] = np.abs(x) + 0.2 if name.split(".")[-1] in positive else x
    return found


def put(module, case, prefix=""):
    """The case's learned numbers as the module's parameters, which then take the gradients."""
    module.double().eval().load_state_dict(
        {prefix + n[2:]: torch.tensor(x) for n, x in case.inputs.items() if n.startswith("p.")}
    )
    case.parameters = {f"p.{n.removeprefix(prefix)}": p for n, p in module.named_parameters()}
    return module


class Called(torch.nn.Module):
    """attend with an encoding's own context."""

    def __init__(self, encoding):
        super().__init__()
        self.encoding = encoding

    def forward(self, q, k, v, x, **options):
        """-> [B, H, Lq, D]"""
        context = self.encoding.context(x)[0] if self.encoding.reads_tokens else None
        return lg.attend(q, k, v, encoding=self.encoding, context=context, **options)


# ---- encodings ------------------------------------------------------------------------------------------------------------
def rope(draw, pick):
    layout, base = pick(["half", "interleaved"]), pick([10000.0, 100.0])
    name = pick("plain plain partial proportion linear ntk yarn llama3 dynamic declared sequence longrope".split())
    o = {"layout": layout, "base": base, "rotary_dim": DIM, "dot": loops.dot_rope}
    more, s, trained = {}, 4.0, 8
    if name == "partial":
        o["rotary_dim"] = more["rotary_dim"] = 4
    elif name == "proportion":
        o["proportion"] = more["proportion"] = pick([0.0, 0.5, 1.0])
    elif name in ("linear", "ntk"):
        more["scaling"] = lg.scaling.Linear(s) if name == "linear" else lg.scaling.NTK(s)
        o |= {"scheme": getattr(loops, name), "numbers": (s,)}
    elif name == "yarn":
        more["scaling"] = lg.scaling.YaRN(s, 64, beta_fast=4)
        o |= {"scheme": loops.yarn, "numbers": (s, 64, 4, 1)}
    elif name == "llama3":
        more["scaling"] = lg.scaling.Llama3(s, 64)
        o |= {"scheme": loops.llama3, "numbers": (s, 64, 1, 4)}
    elif name in ("dynamic", "declared", "sequence"):
        follow, step = {"dynamic": "row"}.get(name, name), int(pick([1, 3])) if name == "dynamic" else None
        end = 24 if name == "declared" else None
        more["scaling"] = lg.scaling.DynamicNTK(s, trained, max_length=end, follow=follow, step=step)
        o |= {
            "scheme": loops.dynamic_ntk,
            "numbers": (s, trained),
            "follow": follow,
            "trained": trained,
            "step": step or 1,
        }
        if name == "declared":
            o |= {"follow": None, "scheme": lambda dim, base, length, *n: loops.dynamic_ntk(dim, base, 24, *n)}
    elif name == "longrope":
        short, long = [1.0, 1.1, 1.5, 2.0], [1.0, 2.0, 3.0, 8.0]
        more["scaling"] = lg.scaling.LongRoPE(short, long, trained, factor=s, follow="row")
        o |= {"scheme": loops.longrope, "numbers": (s, trained, short, long), "follow": "row", "trained": 0}
    return lg.Rotary(DIM, layout, base=base, **more), o, f"rope {name} {layout}"


def encoding(draw, pick, causal_only=None):
    """-> an encoding, what the loop needs of it, its name, whether it is causal only."""
    name = pick(
        "none rope rope rope rope axial_rope mrope xpos alibi alibi t5 clipped kerple_log kerple_power sandwich fire "
        "transformer_xl shaw cope fox path path_fox".split()
    )
    if name == "rope":
        e, o, label = rope(draw, pick)
        return e, o, label, False
    o, heads = {"heads": HEADS}, HEADS
    match name:
        case "none":
            e = lg.NoPosition()
        case "axial_rope" | "mrope":
            layout = pick(["half", "interleaved"])
            o |= {"dot": loops.dot_axes, "layout": layout}
            if name == "axial_rope":
                e = lg.AxialRotary(DIM, layout, axes=2)
                o |= {"axis": [0, 0, 1, 1], "theta": np.tile(loops.plain(DIM // 2, 10000.0), 2)}
            else:
                e = lg.MultimodalRotary(DIM, layout, sections=(2, 1, 1))
                o |= {"axis": [0, 0, 1, 2], "theta": loops.plain(DIM, 10000.0)}
        case "xpos":
            scale_base, layout = pick([4, 512]), pick(["half", "interleaved"])
            o |= {"dot": loops.dot_xpos, "layout": layout, "base": 100.0, "scale_base": scale_base}
            e = lg.XPos(DIM, o["layout"], base=100.0, scale_base=o["scale_base"])
        case "alibi":
            e, o["add"] = lg.ALiBi(heads), loops.add_alibi
        case "t5":
            far, both = pick([8, 20]), pick([True, False])
            o |= {"num_buckets": 8, "max_distance": far, "bidirectional": both, "add": loops.add_t5}
            e = lg.T5Bias(heads, 8, o["max_distance"], bidirectional=o["bidirectional"])
        case "clipped":
            o |= {"max_distance": pick([1, 3, 40]), "add": loops.add_clipped}
            e = lg.ClippedBias(heads, max_distance=o["max_distance"])
        case "kerple_log" | "kerple_power":
            e, o["add"] = lg.encoding(name, num_heads=heads), getattr(loops, f"add_{name}")
        case "sandwich":
            o |= {"dim": pick([8, 128]), "add": loops.add_sandwich}
            e = lg.Sandwich(heads, dim=o["dim"])
        case "fire":
            o |= {"threshold": pick([4.0, 512.0]), "add": loops.add_fire}
            e = lg.Fire(heads, width=6, threshold=o["threshold"])
        case "transformer_xl":
            o |= {"clamp": pick([None, 3]), "dim": WIDTH}
            e = lg.TransformerXL(heads, DIM, WIDTH, clamp_length=o["clamp"])
        case "shaw":
            o |= {"max_distance": pick([1, 4, 40])}
            e = lg.Shaw(DIM, o["max_distance"], values=pick([True, False]))
        case "cope":
            o |= {"max_position": pick([3, 64])}
            e = lg.CoPE(DIM, o["max_position"])
        case "fox":
            o["scale_gate"] = pick([True, False])
            e = lg.FoX(WIDTH, heads, scale_gate=o["scale_gate"])
        case _:
            o["scale_gate"] = True
            e = lg.encoding(
                name, dim=WIDTH, num_heads=heads, head_dim=DIM, num_kv_heads=o["heads"], rank=pick([3, None])
            )
            o["kv_heads"] = heads
    return e, o, name, name in ("xpos", "cope", "fox", "path", "path_fox")


POSITIVE = ("a", "p", "c", "multiplier")


# ---- masks: longitude's, and a predicate of (row of the batch, order of query, order of key) --------------------------------
def masks(draw, pick, batch, rows, keys, causal):
    def atom():
        n = int(draw.integers(1, keys + 2))
        chosen = draw.random((batch, keys)) < 0.3
        valid = np.stack([np.arange(keys) >= draw.integers(0, keys + 1) for _ in range(batch)])
        valid = valid if pick([True, False]) else valid[:, ::-1].copy()
        ids = np.cumsum(draw.random((batch, keys)) < 0.3, 1)
        step, after = int(draw.integers(1, 4)), int(draw.integers(0, 3))
        kinds = [
            (lg.Causal(), lambda b, i, j: j <= i),
            (lg.NoMask(), lambda b, i, j: True),
            (lg.Window(n), lambda b, i, j: 0 <= i - j < n),
            (lg.Dilated(n, step), lambda b, i, j: i - j >= 0 and (i - j) % step == 0 and (i - j) // step < n),
            (lg.Padding(torch.tensor(valid)), lambda b, i, j: valid[b, j]),
            (lg.Band(n, after), lambda b, i, j: -after <= i - j <= n),
            (lg.Documents(torch.tensor(ids)), lambda b, i, j: ids[b, i] == ids[b, j]),
            (lg.Prefix(n), lambda b, i, j: j <= i or j < n),
            (lg.Global(torch.tensor(chosen)), lambda b, i, j: chosen[b, i] or chosen[b, j]),
        ]
        return kinds[int(draw.integers(0, 6 if rows > keys else len(kinds)))]

    def tree(depth):
        if depth == 0 or draw.random() < 0.4:
            return atom()
        (a, f), (c, g) = tree(depth - 1), tree(depth - 1)
        if draw.random() < 0.6:
            return a & c, lambda b, i, j: f(b, i, j) and g(b, i, j)
        return a | c, lambda b, i, j: f(b, i, j) or g(b, i, j)

    mask, sees = (lg.Causal(), lambda b, i, j: j <= i) if draw.random() < 0.25 else tree(2)
    if causal or draw.random() < 0.4:
        return lg.Causal() & mask, lambda b, i, j: j <= i and sees(b, i, j)
    return mask, sees


# ---- positions ----
def positions(draw, pick, batch, rows, keys, label, axes):
    """-> positions of queries and of keys, per row of the batch, and what attend gets."""
    ordered = label == "xpos" or "sequence" in label
    kind = pick(["nothing", "int", "stream", "rows", "free"])
    if kind in ("nothing", "int") or rows > keys and ordered:
        first = int(draw.integers(max(0, rows - keys), 30)) if kind == "int" else max(0, rows - keys)
        to, at = range(first, first + keys), range(first + keys - rows, first + keys)
        given = {"k_positions": first} if kind == "int" else {}
    else:
        many = batch if kind != "stream" else 1

        def some(n):
            if ordered:
                return np.cumsum(draw.integers(0, 3, size=(many, n)), 1)
            repeated, permuted = np.arange(n)[None].repeat(many, 0) % 4, np.tile(draw.permutation(n), (many, 1))
            return pick([draw.integers(0, 40, size=(many, n)), permuted, repeated])

        k = some(keys)
        q = some(rows) if rows > keys or (kind == "free" and not ordered) else k[:, keys - rows :]
        given = {"q_positions": torch.tensor(q), "k_positions": torch.tensor(k)}
        if kind == "stream":
            given = {n: p[0] for n, p in given.items()}
            if axes > 1:
                given = {n: p[None, :, None] for n, p in given.items()}
        elif axes > 1:
            given = {n: p[..., None] for n, p in given.items()}
        if axes > 1 and draw.random() < 0.5:  # coordinates of their own
            sizes = (("q_positions", rows), ("k_positions", keys))
            given = {name: torch.tensor(draw.integers(0, 9, size=(batch, n, axes))) for name, n in sizes}
            return *([[tuple(c) for c in row] for row in p.tolist()] for p in given.values()), given
        at, to = (
            [[int(p) if axes == 1 else (int(p),) * axes for p in y[b % len(y)]] for b in range(batch)] for y in (q, k)
        )
        return at, to, given
    return *([[p if axes == 1 else (p,) * axes for p in y]] * batch for y in (at, to)), given
