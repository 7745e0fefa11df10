"""Mixers as loops over tokens, in float64, written from the papers. x [L, dim] of one document; p: parameters by name.

The others are compared with the layers of transformers (tests/recurrent).
"""

import math

import numpy as np


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def silu(x):
    return x * sigmoid(x)


def retention(x, p, o, first=0):
    heads = o["num_heads"]
    q, k = (np.einsum("td,ed->te", x, p[f"{n}_proj.weight"]).reshape(len(x), heads, -1) for n in "qk")
    v, g = ((x @ p[f"{n}_proj.weight"].T).reshape(len(x), heads, -1) for n in "vg")
    dim = q.shape[2]
    angles = [10000 ** (-i / (dim // 2 - 1)) for i in range(dim // 2)]

    def rotated(y, n):
        z = y.copy()
        for m, angle in enumerate(angles):
            c, s = math.cos(n * angle), math.sin(n * angle)
            z[..., 2 * m], z[..., 2 * m + 1] = (
                y[..., 2 * m] * c - y[..., 2 * m + 1] * s,
                y[..., 2 * m] * s + y[..., 2 * m + 1] * c,
            )
        return z

    out = np.zeros((len(x), v.shape[1] * v.shape[2]))
    state = np.zeros((heads, dim, v.shape[2]))
    for t in range(len(x)):
        row = []
        for h in range(heads):
            state[h] = (1 - 2 ** (-5.0 - h)) * state[h] + np.outer(rotated(k[t, h], first + t) * dim**-0.5, v[t, h])
            y = rotated(q[t, h], first + t) @ state[h]
            row.append(silu(g[t, h]) * y / np.sqrt((y**2).mean() + 1e-6))
        out[t] = np.concatenate(row)
    return out @ p["o_proj.weight"].T


def rwkv6(x, p, o):
    heads = o["num_heads"]
    d = np.vstack([np.zeros_like(x[:1]), x[:-1]]) - x
    low = np.tanh((x + d * p["time_maa_x"][0]) @ p["time_maa_w1"]).reshape(len(x), 5, -1)
    mixed = [x + d * (p[f"time_maa_{j}"][0] + low[:, n] @ p["time_maa_w2"][n]) for n, j in enumerate("wkvrg")]
    w = -np.exp(p["time_decay"][0] + np.tanh(mixed[0] @ p["time_decay_w1"]) @ p["time_decay_w2"])
    k, v, r, g = (
        y @ p[f"{n}.weight"].T for y, n in zip(mixed[1:], ("key", "value", "receptance", "gate"), strict=True)
    )
    w, k, v, r = (y.reshape(len(x), heads, -1) for y in (w, k, v, r))
    out = np.zeros_like(x[:, :1] * np.zeros(v.shape[1] * v.shape[2]))
    state = np.zeros((heads, k.shape[2], v.shape[2]))
    for t in range(len(x)):
        row = []
        for h in range(heads):
            now = np.outer(k[t, h], v[t, h])
            y = r[t, h] @ (state[h] + p["time_faaaa"][h][:, None] * now)
            state[h] = np.exp(w[t, h])[:, None] * state[h] + now
            row.append((y - y.mean()) / np.sqrt(y.var() + 0.00064))
        out[t] = np.concatenate(row) * p["ln_x.weight"] + p["ln_x.bias"]
    return (silu(g) * out) @ p["output.weight"].T


def s4d(x, p, o):
    a = -np.exp(p["log_A_real"]) + 1j * p["A_imag"]
    c, dt = p["C"][..., 0] + 1j * p["C"][..., 1], np.exp(p["log_dt"])
    step = np.exp(dt[:, None] * a)
    h, out = np.zeros_like(a), np.zeros_like(x)
    for t in range(len(x)):
        h = step * h + (step - 1) / a * x[t][:, None]
        out[t] = 2 * (c * h).sum(1).real + p["D"] * x[t]
    erf = np.vectorize(math.erf)
    out = (out * 0.5 * (1 + erf(out / math.sqrt(2)))) @ p["output.weight"].T + p["output.bias"]
    left, right = np.split(out, 2, 1)
    return left * sigmoid(right)
