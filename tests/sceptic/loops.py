"""Attention as loops over batch, heads, queries and keys, in float64, written from the papers. Knows nothing of longitude.

Every function here takes numpy arrays; p: the learned numbers of an encoding by name.
"""

import math

import numpy as np


# ---- frequencies of rotary encodings -------------------------------------------------------------------------------------
def plain(dim, base):
    return np.array([base ** (-2 * k / dim) for k in range(dim // 2)])


def dynamic_ntk(dim, base, length, s, trained):
    length = max(length, trained)
    return plain(dim, base * (s * length / trained - (s - 1)) ** (dim / (dim - 2))), 1.0


def yarn(dim, base, length, s, trained, fast, slow):
    """The published code: a ramp over the index of the pair, between the pairs that rotate `fast` and `slow` times."""

    def pair_of(rotations):
        return dim * math.log(trained / (2 * math.pi * rotations)) / (2 * math.log(base))

    low, high = max(math.floor(pair_of(fast)), 0), min(math.ceil(pair_of(slow)), dim - 1)
    high = high + 0.001 if low == high else high
    kept = 1 - np.clip((np.arange(dim // 2) - low) / (high - low), 0, 1)
    theta = plain(dim, base)
    return theta / s * (1 - kept) + theta * kept, 0.1 * math.log(s) + 1


def longrope(dim, base, length, s, trained, short, long):
    stretch = short if length <= trained else long
    return plain(dim, base) / np.array(stretch), math.sqrt(1 + math.log(s) / math.log(trained))


def pairs_of(layout, dim):
    return [(2 * k, 2 * k + 1) if layout == "interleaved" else (k, k + dim // 2) for k in range(dim // 2)]


def rotated(x, angles, factor, layout, dim):
    """x [D]: its first `dim` numbers rotated by angles [dim/2]."""
    y = x.copy()
    for (a, b), angle in zip(pairs_of(layout, dim), angles, strict=True):
        y[a] = factor * (x[a] * math.cos(angle) - x[b] * math.sin(angle))
        y[b] = factor * (x[a] * math.sin(angle) + x[b] * math.cos(angle))
    return y


# ---- the dot product of query i and key j, as a rotation changes it ------------------------------------------------------
def dot_plain(o, q, k, i, j, newest):
    return q @ k


def dot_rope(o, q, k, i, j, newest):
    dim, length = o.get("rotary_dim", len(q)), o.get("follow")
    if length == "row":
        trained, step = o["trained"], o.get("step", 1)
        length = trained + math.ceil((max(i + 1, trained) - trained) / step) * step
    elif length == "sequence":
        length = newest + 1
    theta, factor = plain(dim, o["base"]), 1.0
    if "scheme" in o:
        theta, factor = o["scheme"](dim, o["base"], length, *o["numbers"])
    theta[int(o.get("proportion", 1) * dim) // 2 :] = 0
    return rotated(q, i * theta, factor, o["layout"], dim) @ rotated(k, j * theta, factor, o["layout"], dim)


def dot_axes(o, q, k, i, j, newest):
    """i, j: coordinates; theta and the axis of each pair are options."""
    q, k = (rotated(x, p[o["axis"]] * o["theta"], 1.0, o["layout"], len(x)) for x, p in ((q, i), (k, j)))
    return q @ k


def dot_xpos(o, q, k, i, j, newest):
    dim, total = len(q), 0.0
    q, k = (rotated(x, p * plain(dim, o["base"]), 1.0, o["layout"], dim) for x, p in ((q, i), (k, j)))
    for n, (a, b) in enumerate(pairs_of(o["layout"], dim)):
        zeta = (2 * n / dim + 0.4) / 1.4
        total += zeta ** ((i - j) / o["scale_base"]) * (q[a] * k[a] + q[b] * k[b])
    return total


# ---- what is added to the score of head h ---------------------------------------------------------------------------------
def slopes(heads):
    power = 2 ** math.floor(math.log2(heads))
    first = [2 ** (-8 * h / power) for h in range(1, power + 1)]
    return first + [2 ** (-8 * h / (2 * power)) for h in range(1, 2 * power + 1)][0::2][: heads - power]


def add_alibi(o, p, h, i, j):
    return -slopes(o["num_heads"])[h] * abs(i - j)


def bucket(distance, count, far, both):
    """distance: query position - key position."""
    found = 0
    if both:
        count //= 2
        found, distance = (count if distance < 0 else 0), abs(distance)
    distance = max(distance, 0)
    exact = count // 2
    if distance < exact:
        return found + distance
    more = math.log(distance / exact) / math.log(far / exact) * (count - exact)
    return found + min(count - 1, exact + int(more + 1e-9))


def add_t5(o, p, h, i, j):
    return p["table"][bucket(i - j, o["num_buckets"], o["max_distance"], o["bidirectional"]), h]


def add_clipped(o, p, h, i, j):
    far = o["max_distance"]
    return p["table"][h, max(-far, min(far, i - j)) + far]


def add_kerple_log(o, p, h, i, j):
    return -p["p"][h] * math.log(1 + p["a"][h] * abs(i - j))


def add_kerple_power(o, p, h, i, j):
    return -p["a"][h] * abs(i - j) ** p["p"][h] if i != j else 0.0


def add_sandwich(o, p, h, i, j):
    dim = o["dim"]
    total = sum(math.cos((i - j) / 10000 ** (2 * k / dim)) for k in range(1, dim // 2 + 1))
    return (total - dim / 2) / (8 * (h + 1) / o["num_heads"])


def add_fire(o, p, h, i, j):
    def psi(x):
        return math.log(abs(p["c"].item() * x) + 1)

    threshold = abs(p["multiplier"].item() * o["threshold"])
    at = psi(i - j) / (psi(max(i, threshold)) + 1e-6)
    hidden = np.maximum(p["mlp.0.weight"][:, 0] * at + p["mlp.0.bias"], 0)
    return p["mlp.2.weight"][h] @ hidden + p["mlp.2.bias"][h]


# ---- what multiplies a query at position i that attends to n keys ----------------------------------------------------------
def warm_ssmax(o, p, h, n, i):
    return p["rate"][h] * math.log(n)


def warm_log_n(o, p, h, n, i):
    return math.log(n) / (math.log(o["trained_length"]) if o["trained_length"] else 1)


def warm_llama4_temperature(o, p, h, n, i):
    return 1 + o["attn_scale"] * math.log(1 + (i + 1) // o["floor_scale"])


def warm_ministral3_temperature(o, p, h, n, i):
    return 1 + o["beta"] * math.log(1 + i // o["original_max_length"])


# ---- what content decides -------------------------------------------------------------------------------------------------
def log_gates(p, x, prefix=""):
    """G [L, H], sums of ln sigmoid(w . x + b)."""
    z = x @ p[prefix + "forget.weight"].T + p[prefix + "forget.bias"]
    return np.cumsum(-np.log1p(np.exp(-z)), 0)


def reflections(p, x, heads, prefix=""):
    """w [L, H, D] and b [L, H] of PaTH."""
    inner = x @ p[prefix + "down.weight"].T if prefix + "down.weight" in p else x
    inner = inner @ p[prefix + "up.weight"].T
    taps, w = p[prefix + "taps"], np.zeros_like(inner)
    for t in range(len(x)):
        for n in range(len(taps)):  # the last tap meets the token itself
            if t - n >= 0:
                w[t] += taps[len(taps) - 1 - n] * inner[t - n]
    w = w / (1 + np.exp(-w))
    w = w.reshape(len(x), heads, -1)
    w = w / np.sqrt((w**2).sum(-1, keepdims=True) + 1e-6)
    return w, 2 / (1 + np.exp(-(x @ p[prefix + "strength.weight"].T + p[prefix + "strength.bias"])))


def dot_path(q, k, w, b, i, j):
    """q . H_i ... H_(j+1) k, orders i >= j."""
    for t in range(j + 1, i + 1):
        k = k - b[t] * (w[t] @ k) * w[t]
    return q @ k


# ---- attention ------------------------------------------------------------------------------------------------------------
def attention(o, scale, seen, at, to, q, k, v, x, p):
    """q [B, H, Lq, D], k, v [B, Hkv, Lk, D], x [B, Lk, dim] -> [B, H, Lq, D + 1], the logsumexp behind the output, -9 for none.

    o: the encoding's kind, options, what it does to a dot product and what it adds; p: its learned numbers; at, to: positions of
    queries and keys; seen[b][n]: the keys that a query attends to.
    """
    batch, heads, rows, _ = q.shape
    keys, group, kind = k.shape[2], heads // k.shape[1], o["kind"]
    out = np.zeros((batch, heads, rows, v.shape[3] + 1))
    out[..., -1] = -9
    for b in range(batch):
        both = kind == "path_fox"
        gates = log_gates(p, x[b], "members.1." * both) if kind in ("fox", "path_fox") else None
        reflected = reflections(p, x[b], k.shape[1], "members.0." * both) if "path" in kind else None
        for h, n in np.ndindex(heads, rows):
            i, row, g, scores = keys - rows + n, q[b, h, n], h // group, []
            if o["warm"] and seen[b][n]:
                row = row * o["warm"](o, p, h, len(seen[b][n]), at[b, n])
            for j in seen[b][n]:
                if reflected is not None:
                    dot = dot_path(row, k[b, g, j], reflected[0][:, g], reflected[1][:, g], i, j)
                elif kind == "transformer_xl":
                    dot = xl(o, p, h, row, k[b, g, j], at[b, n] - to[b, j])
                elif kind == "shaw":
                    dot = row @ (k[b, g, j] + p["key_table"][shaw_row(o, to[b, j] - at[b, n])])
                else:
                    dot = o["dot"](o, row, k[b, g, j], at[b, n], to[b, j], to[b].max())
                score = scale * dot
                if gates is not None:
                    score += (gates[i, h] - gates[j, h]) * (scale if o.get("scale_gate", both) else 1.0)
                if o["add"]:
                    score += o["add"](o, p, h, at[b, n], to[b, j])
                scores.append(score)
            if kind == "sink":  # one more score, of no value
                out[b, h, n, -1] = p["logits"][h]
            if not scores:
                continue
            if kind == "cope":
                scores = cope(o, p, len(row) ** -0.5, row, scores)
            weights, total = softmax([*scores, p["logits"][h]] if kind == "sink" else scores)
            weights, out[b, h, n, -1] = weights[: len(scores)], total
            for weight, j in zip(weights, seen[b][n], strict=True):
                out[b, h, n, :-1] += weight * v[b, g, j]
                if kind == "shaw" and "value_table" in p:
                    out[b, h, n, :-1] += weight * p["value_table"][shaw_row(o, to[b, j] - at[b, n])]
    return out


def softmax(scores):
    """The weights, and the logarithm of what they were divided by."""
    w = np.exp(np.array(scores) - max(scores))
    return w / w.sum(), max(scores) + math.log(w.sum())


def shaw_row(o, ahead):
    far = o["max_distance"]
    return max(-far, min(far, ahead)) + far


def xl(o, p, h, q, k, offset):
    far = o["clamp_length"] or math.inf
    offset = max(-far, min(far, offset))
    f = plain(o["dim"], 10000.0)
    code = np.concatenate([np.sin(offset * f), np.cos(offset * f)])
    w = p["project.weight"].reshape(p["u"].shape[0], -1, o["dim"])[h]
    return (q + p["u"][h]) @ k + (q + p["v"][h]) @ (w @ code)


def cope(o, p, scale, q, scores):
    """Positions count gates from the key to the query."""
    gates = 1 / (1 + np.exp(-np.array(scores)))
    table, most, found = p["table"], o["max_position"], []
    for n, score in enumerate(scores):
        at = min(gates[n:].sum(), most - 1)
        low = min(math.floor(at), most - 1)
        high = min(low + 1, most - 1)
        mixed = (1 - (at - low)) * table[:, low] + (at - low) * table[:, high]
        found.append(score + scale * (q @ mixed))
    return found
