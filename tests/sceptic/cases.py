"""Random cases of longitude's public interface, each with the loop that says what it should be.

A case has `inputs`, name -> float64 array, learned numbers among them as "p.<name>"; `loop(inputs)`, an array; and
`library(tensors, way)`, the same by longitude: way is a backend, or a way to cut the call. Where `keep` is given, it says which
outputs mean anything.
"""

import math
from itertools import pairwise

import loops
import numpy as np
import recurrences
import torch
from drawn import ATTEND_WAYS, DIM, HEADS, POSITIVE, WIDTH, Called, Case, encoding, learned, masks, positions, put

import longitude as lg


# ---- kinds of cases ---------------------------------------------------------------------------------------------------------
def attend(draw, pick):
    e, o, label, causal = encoding(draw, pick)
    batch, keys = int(draw.integers(1, 3)), int(draw.integers(1, 11))
    rows = pick([keys, keys, 1, int(draw.integers(1, keys + 1))])
    rows = rows + keys if not causal and draw.random() < 0.08 else rows
    kv_heads = o.get("kv_heads") or pick([1, 2, 4])
    mask, sees = masks(draw, pick, batch, rows, keys, causal)
    case = Case(label.split()[0], o, encoding=e, ways=ATTEND_WAYS)
    case.scale = pick([DIM**-0.5, 1.0, 0.0, -0.3])
    case.sees = sees
    q_at, k_at, given = positions(draw, pick, batch, rows, keys, label, getattr(e, "axes", 1))
    case.places = lambda b: (q_at[b], k_at[b])
    shapes = {"q": (batch, HEADS, rows, DIM), "k": (batch, kv_heads, keys, DIM), "v": (batch, kv_heads, keys, DIM)}
    case.inputs = {n: draw.normal(size=s) for n, s in shapes.items()}
    case.inputs |= {"x": draw.normal(size=(batch, keys, WIDTH)), **learned(e, draw, POSITIVE)}
    module = put(Called(e), case, "encoding.")

    def loop(inputs):
        p = {n[2:]: a for n, a in inputs.items() if n.startswith("p.")}
        return loops.attention(case, inputs["q"], inputs["k"], inputs["v"], inputs["x"], p)

    def library(tensors, way):
        return module(*(tensors[n] for n in "qkvx"), mask=mask, scale=case.scale, backend=way, **given)

    case.loop, case.library = loop, library
    case.text = f"{label} B{batch} L{rows} K{keys} Hkv{kv_heads} scale {case.scale:.2f} {given} {mask}"
    return case


def embedded(draw, pick):
    """Sinusoidal and learned codes, at the model's input."""
    length, dim = int(draw.integers(1, 9)), pick([6, 8])
    at = draw.integers(0, 20, size=length)
    case = Case("embed", ways=("embed",))
    case.inputs = {"x": draw.normal(size=(2, length, dim))}
    if draw.random() < 0.5:
        layout, rule = pick(["interleaved", "half"]), pick(["paper", "tensor2tensor"])
        e = lg.Sinusoidal(dim, layout=layout, frequencies=rule)
        w = loops.plain(dim, 10000.0) if rule == "paper" else 10000.0 ** (-np.arange(dim // 2) / (dim // 2 - 1))

        def code(p, t):
            s, c = np.sin(t * w), np.cos(t * w)
            return np.stack([s, c], 1).reshape(-1) if layout == "interleaved" else np.concatenate([s, c])

        case.text = f"sinusoidal {layout} {rule}"
    else:
        beyond = pick(["error", "clamp", "interpolate"])
        rows = {"error": 20, "clamp": 7, "interpolate": 7}[beyond]
        align = pick(["end", "start"])
        more = {"length": 20, "align": align} if beyond == "interpolate" else {}
        e = lg.Learned(rows, dim, beyond=beyond, **more)

        def code(p, t):
            table = p["table"]
            if beyond == "interpolate":
                at = t * (rows - 1) / 19 if align == "end" else min(t * rows / 20, rows - 1)
                low = math.floor(at + 1e-12)
                return table[low] + (at - low) * (table[min(low + 1, rows - 1)] - table[low])
            return table[min(t, rows - 1)]

        case.text = f"learned {beyond} {align}"
    case.inputs |= learned(e, draw)
    put(e, case)

    def loop(inputs):
        p = {n[2:]: a for n, a in inputs.items() if n.startswith("p.")}
        return inputs["x"] + np.stack([code(p, int(t)) for t in at])

    case.loop = loop
    case.library = lambda t, way: e.embed(t["x"], torch.tensor(at))
    return case


def documents_of(draw, pick, batch, length):
    """Numbers that grow by one at each document, -1 for padding on one side, and the parts [(row, slice)]."""
    ids, parts = np.zeros((batch, length), int), []
    for b in range(batch):
        first, stop = 0, length
        if draw.random() < 0.4:
            cut = int(draw.integers(0, length))
            first, stop = (cut, length) if draw.random() < 0.6 else (0, length - cut)
        ids[b] = -1
        at = first
        while at < stop:
            n = int(draw.integers(1, stop - at + 1))
            ids[b, at : at + n] = len(parts)
            parts.append((b, slice(at, at + n)))
            at += n
    return ids, parts


def cuts_of(draw, length):
    inner = sorted({int(c) for c in draw.integers(1, length, size=int(draw.integers(0, 4)))}) if length > 1 else []
    return [0, *inner, length]


def layer(case, draw, pick, module, of_document, width, axes=1):
    """A layer whole, in chunks with its cache; packed and padded, or plain: each document as the loop has it alone."""
    batch, length = int(draw.integers(1, 3)), int(draw.integers(1, 13))
    packed = draw.random() < 0.6
    ids, parts = documents_of(draw, pick, batch, length)
    if not packed:
        parts = [(b, slice(0, length)) for b in range(batch)]
    at = np.zeros((batch, length), int)
    for b, part in parts:
        at[b, part] = np.arange(part.stop - part.start)
    case.inputs = {"x": draw.normal(size=(batch, length, width)), **case.inputs}
    case.keep = np.zeros((batch, length, 1))
    for b, part in parts:
        case.keep[b, part] = 1
    cuts = cuts_of(draw, length)
    case.ways = ("whole", "chunks")
    put(module, case)

    def loop(inputs):
        p, out = {n[2:]: a for n, a in inputs.items() if n.startswith("p.")}, np.zeros((batch, length, width))
        for b, part in parts:
            out[b, part] = of_document(inputs["x"][b, part], p)
        return out

    def library(tensors, way):
        outs = []
        cache = module.cache_layer() if way == "chunks" else None
        steps = cuts if way == "chunks" else [0, length]
        for a, z in pairwise(steps):
            places = torch.tensor(at[:, a:z])
            given = (
                {"positions": places if axes == 1 else places[..., None], "documents": torch.tensor(ids[:, :z])}
                if packed
                else {}
            )
            outs.append(module(tensors["x"][:, a:z], cache=cache, **given))
        return torch.cat(outs, 1)

    case.loop, case.library = loop, library
    case.text += f" B{batch} L{length} cuts {cuts} documents {ids.tolist() if packed else None}"
    return case


def decoding(draw, pick):
    """MultiHeadAttention with its cache."""
    while True:
        e, o, label, _ = encoding(draw, pick)
        if "sequence" not in label:
            break
    kv_heads = o.get("kv_heads") or pick([1, 2, 4])
    size = pick([None, None, int(draw.integers(1, 6))])
    extra = {"size": size} if size else {}
    kind = lg.WindowAttention if size else lg.MultiHeadAttention
    module = kind(WIDTH, HEADS, kv_heads, e, head_dim=DIM, **extra)
    case = Case("decode", inputs=learned(module, draw, POSITIVE))
    case.text = f"{label} Hkv{kv_heads} window {size}"
    axes = getattr(e, "axes", 1)
    prefix = next((n for n in module.state_dict() if n.startswith("encoding.")), "encoding.members.0.")
    prefix = prefix[: len("encoding.members.0.")]

    def of_document(x, p):
        length = len(x)
        own = {n[len(prefix) :]: a for n, a in p.items() if n.startswith(prefix)}
        if label == "path_fox":
            own = {n[len("encoding.") :]: a for n, a in p.items() if n.startswith("encoding.")}
        one = Case(label.split()[0], o, DIM**-0.5)
        one.sees = lambda b, i, j: 0 <= i - j < (size or length + 1)
        token = [n if axes == 1 else (n,) * axes for n in range(length)]
        one.places = lambda b: (token, token)
        q, k, v = ((x @ p[f"{n}_proj.weight"].T).reshape(1, length, -1, DIM).transpose(0, 2, 1, 3) for n in "qkv")
        out = loops.attention(one, q, k, v, x[None], own)
        return out[0].transpose(1, 0, 2).reshape(length, -1) @ p["o_proj.weight"].T

    return layer(case, draw, pick, module, of_document, WIDTH, axes)


def recurrence(draw, pick):
    name = pick("retention mamba mamba2 rwkv4 rwkv6 s4d".split())
    r, o = lg.recurrent, {"num_heads": 2, "groups": pick([1, 2]), "state_size": 3}
    mode = pick(["chunked", "recurrent", "parallel"]) if name != "rwkv6" else pick(["chunked", "recurrent"])
    chunk = {"mode": mode, "chunk_size": int(draw.integers(1, 9))}
    module = {
        "retention": lambda: r.Retention(8, 2, **chunk),
        "mamba": lambda: r.Mamba(6, state_size=3, **chunk),
        "mamba2": lambda: r.Mamba2(6, head_dim=3, state_size=3, groups=o["groups"], **chunk),
        "rwkv4": lambda: r.RWKV4(6, **chunk),
        "rwkv6": lambda: r.RWKV6(8, 2, mix_rank=3, decay_rank=2, **chunk),
        "s4d": lambda: r.S4D(4, state_size=6, **chunk),
    }[name]()
    width = {"retention": 8, "rwkv6": 8, "s4d": 4}.get(name, 6)
    case = Case(name, inputs=learned(module, draw))
    case.text = f"{name} {chunk}"
    loop = getattr(recurrences, name)
    return layer(case, draw, pick, module, lambda x, p: loop(x, p, o), width)


def hierarchical(draw, pick):
    """lg.hierarchical_attention without an encoding."""
    batch, length, window = int(draw.integers(1, 3)), int(draw.integers(1, 14)), int(draw.integers(1, 7))
    kv_heads, combine, size_term = pick([1, 2, 4]), pick(["gate", "softmax"]), pick([True, False])
    case = Case("hierarchical", ways=("auto", "reference", "chunked"))
    for n, heads in (("q", HEADS), ("k", kv_heads), ("v", kv_heads)):
        case.inputs[n] = draw.normal(size=(batch, heads, length, DIM))
    case.inputs["gate"] = draw.random((batch, HEADS, length))

    def softmaxed(scores, values):
        w = np.exp(np.array(scores) - max(scores))
        return (w / w.sum()) @ np.array(values)

    def loop(inputs):
        out = np.zeros_like(inputs["q"])
        for b, h, t in np.ndindex(batch, HEADS, length):
            q, g = inputs["q"][b, h, t] * DIM**-0.5, h * kv_heads // HEADS
            k, v = inputs["k"][b, g], inputs["v"][b, g]
            a = max(0, t - window + 1)
            near, near_v = [q @ k[j] for j in range(a, t + 1)], [v[j] for j in range(a, t + 1)]
            far, far_v, start = [], [], 0
            for level in reversed(range(8)):
                if a & (1 << level):
                    block = slice(start, start + 2**level)
                    far.append(q @ k[block].mean(0) + (math.log(2**level) if size_term else 0.0))
                    far_v.append(v[block].mean(0))
                    start = block.stop
            if combine == "softmax":
                out[b, h, t] = softmaxed(near + far, near_v + far_v)
            else:
                gate = inputs["gate"][b, h, t] if a else 1.0
                out[b, h, t] = gate * softmaxed(near, near_v) + ((1 - gate) * softmaxed(far, far_v) if a else 0.0)
        return out

    def library(t, way):
        gate = t["gate"] if combine == "gate" else None
        return lg.hierarchical_attention(
            t["q"], t["k"], t["v"], window=window, combine=combine, gate=gate, size_term=size_term, backend=way
        )

    case.loop, case.library = loop, library
    case.text = f"B{batch} L{length} window {window} Hkv{kv_heads} {combine} size_term {size_term}"
    return case


def performer(draw, pick):
    """lg.recurrent.performer, in its three modes and in chunks."""
    batch, length, features, epsilon = int(draw.integers(1, 3)), int(draw.integers(1, 12)), 5, pick([1e-4, 0.1])
    case = Case("performer", ways=("chunked", "recurrent", "parallel"))
    case.inputs = {n: draw.normal(size=(batch, 2, length, 4)) for n in "qkv"}
    w = draw.normal(size=(features, 4))

    def loop(inputs):
        out = np.zeros_like(inputs["v"])
        for b, h in np.ndindex(batch, 2):
            s, z, top = np.zeros((features, 4)), np.zeros(features), -math.inf
            for t in range(length):
                q, k = (inputs[n][b, h, t] * 4**-0.25 for n in "qk")
                e = w @ k - k @ k / 2
                grown = max(top, e.max())
                shrink = math.exp(top - grown) if t else 0.0
                phi = np.exp(e - grown) + epsilon
                s, z, top = s * shrink + np.outer(phi, inputs["v"][b, h, t]), z * shrink + phi, grown
                e = w @ q - q @ q / 2
                phi = np.exp(e - e.max()) + epsilon
                out[b, h, t] = phi @ s / (phi @ z)
        return out

    cuts = cuts_of(draw, length)

    def library(t, way):
        state, outs = None, []
        for a, z in pairwise(cuts):
            parts = (t[n][:, :, a:z] for n in "qkv")
            y, state = lg.recurrent.performer(
                *parts, torch.tensor(w), epsilon=epsilon, mode=way, chunk_size=3, state=state
            )
            outs.append(y)
        return torch.cat(outs, 2)

    case.loop, case.library = loop, library
    case.text = f"B{batch} L{length} epsilon {epsilon} cuts {cuts}"
    return case


def model(draw, pick):
    """A whole model: documents packed or padded, in chunks with its cache, as each is alone."""
    mixers = [
        pick("attention attention hierarchical window retention mamba mamba2 rwkv4 rwkv6 s4d".split()) for _ in range(2)
    ]
    spec = [
        {"name": m, **({"size": 4} if m == "window" else {}), **({"window": 3} if m == "hierarchical" else {})}
        for m in mixers
    ]
    name = pick("none rope alibi t5 fire sinusoidal".split()) if "attention" in mixers else pick(["none", "sinusoidal"])
    if "hierarchical" in mixers and name == "fire":
        name = "alibi"
    shape = {"hidden_size": 16, "num_attention_heads": 2, "num_hidden_layers": 2, "vocab_size": 11}
    config = lg.LongitudeConfig(**shape, mixers=spec, encoding=name, max_position_embeddings=64)
    torch.manual_seed(int(draw.integers(2**31)))
    net = lg.LongitudeForCausalLM(config).double().eval()
    batch, length = int(draw.integers(1, 3)), int(draw.integers(2, 14))
    ids, parts = documents_of(draw, pick, batch, length)
    tokens = torch.tensor(draw.integers(0, 11, size=(batch, length)))
    cuts = cuts_of(draw, length)
    case = Case("model", ways=("whole", "chunks"))
    case.keep = (ids >= 0)[..., None].astype(float)
    one = all(len({i for i in row if i >= 0}) <= 1 for row in ids)  # then it may be passed as attention_mask, too
    case.inputs = {}

    @torch.no_grad()
    def loop(inputs):
        out = np.zeros((batch, length, 11))
        for b, part in parts:
            out[b, part] = net(tokens[b : b + 1, part], use_cache=False).logits[0].numpy()
        return out

    @torch.no_grad()
    def library(t, way):
        cache, outs = None, []
        steps = cuts if way == "chunks" else [0, length]
        for a, z in pairwise(steps):
            given = {"attention_mask": torch.tensor((ids[:, :z] >= 0).astype(int))}
            given |= {} if one else {"document_ids": torch.tensor(np.maximum(ids[:, :z], 0))}
            got = net(tokens[:, a:z], past_key_values=cache, use_cache=way == "chunks", **given)
            cache = got.past_key_values
            outs.append(got.logits)
        return torch.cat(outs, 1)

    case.loop, case.library = loop, library
    case.text = f"{mixers} {name} documents {ids.tolist()} cuts {cuts}"
    return case


KINDS = {
    "attend": (attend, 0.5),
    "decode": (decoding, 0.15),
    "recurrence": (recurrence, 0.15),
    "embed": (embedded, 0.03),
    "hierarchical": (hierarchical, 0.05),
    "performer": (performer, 0.04),
    "model": (model, 0.08),
}


def made(seed, only=None):
    """The case of this number."""
    draw = np.random.default_rng(seed)

    def pick(options):
        return options[int(draw.integers(len(options)))]

    name = only or str(draw.choice(list(KINDS), p=[share for _, share in KINDS.values()]))
    return name, KINDS[name][0](draw, pick)
