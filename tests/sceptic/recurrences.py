"""Mixers as loops over tokens, in float64, written from the papers. x [L, dim] of one document; p: parameters by name."""

import math

import numpy as np


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def silu(x):
    return x * sigmoid(x)


def softplus(x):
    return np.log1p(np.exp(x))


def convolved(x, weight, bias):
    """A causal depthwise convolution [C, 1, K]; the last tap meets the token itself."""
    out = np.zeros_like(x) + bias
    taps = weight.shape[2]
    for t in range(len(x)):
        for n in range(taps):
            if t - n >= 0:
                out[t] += weight[:, 0, taps - 1 - n] * x[t - n]
    return out


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


def mamba(x, p, o):
    u, z = np.split(x @ p["in_proj.weight"].T, 2, 1)
    u = silu(convolved(u, p["conv1d.weight"], p["conv1d.bias"]))
    states, rank = p["A_log"].shape[1], p["dt_proj.weight"].shape[1]
    h, out = np.zeros_like(p["A_log"]), np.zeros_like(u)
    for t in range(len(x)):
        read = p["x_proj.weight"] @ u[t]
        dt, b, c = read[:rank], read[rank : rank + states], read[rank + states :]
        delta = softplus(p["dt_proj.weight"] @ dt + p["dt_proj.bias"])
        h = np.exp(-np.exp(p["A_log"]) * delta[:, None]) * h + (delta * u[t])[:, None] * b
        out[t] = (h @ c + p["D"] * u[t]) * silu(z[t])
    return out @ p["out_proj.weight"].T


def mamba2(x, p, o):
    heads, groups, states = len(p["A_log"]), o["groups"], o["state_size"]
    inner = len(p["norm.weight"])
    every = x @ p["in_proj.weight"].T
    z, mixed, dt = every[:, :inner], every[:, inner : 2 * inner + 2 * groups * states], every[:, -heads:]
    mixed = silu(convolved(mixed, p["conv1d.weight"], p["conv1d.bias"]))
    u, b, c = mixed[:, :inner], mixed[:, inner : inner + groups * states], mixed[:, inner + groups * states :]
    u, b, c = u.reshape(len(x), heads, -1), b.reshape(len(x), groups, states), c.reshape(len(x), groups, states)
    out, h = np.zeros((len(x), inner)), np.zeros((heads, states, u.shape[2]))
    for t in range(len(x)):
        row = []
        for n in range(heads):
            g = n // (heads // groups)
            delta = softplus(dt[t, n] + p["dt_bias"][n])
            h[n] = math.exp(-delta * math.exp(p["A_log"][n])) * h[n] + np.outer(b[t, g], delta * u[t, n])
            row.append(c[t, g] @ h[n] + p["D"][n] * u[t, n])
        y = (np.concatenate(row) * silu(z[t])).reshape(groups, -1)
        y = y / np.sqrt((y**2).mean(1, keepdims=True) + 1e-5)
        out[t] = y.reshape(-1) * p["norm.weight"]
    return out @ p["out_proj.weight"].T


def rwkv4(x, p, o):
    before = np.vstack([np.zeros_like(x[:1]), x[:-1]])

    def read(name):
        mu = p[f"time_mix_{name}"][0, 0]
        return (mu * x + (1 - mu) * before) @ p[f"{name}.weight"].T

    k, v, r = read("key"), read("value"), read("receptance")
    w, u, out = np.exp(p["time_decay"]), p["time_first"], np.zeros_like(v)
    for t in range(len(x)):
        above, below = np.exp(u + k[t]) * v[t], np.exp(u + k[t])
        for i in range(t):
            weight = np.exp(-(t - 1 - i) * w + k[i])
            above, below = above + weight * v[i], below + weight
        out[t] = above / below
    return (sigmoid(r) * out) @ p["output.weight"].T


def rwkv6(x, p, o):
    heads = o["num_heads"]
    d = np.vstack([np.zeros_like(x[:1]), x[:-1]]) - x
    low = np.tanh((x + d * p["mix_x"]) @ p["mix_down"]).reshape(len(x), 5, -1)
    mixed = [x + d * (p["mix_by"][n] + low[:, n] @ p["mix_up"][n]) for n in range(5)]  # w, k, v, r, g
    w = -np.exp(p["decay"] + np.tanh(mixed[0] @ p["decay_down"]) @ p["decay_up"])
    k, v, r, g = (y @ p[f"{n}_proj.weight"].T for y, n in zip(mixed[1:], "kvrg", strict=True))
    w, k, v, r = (y.reshape(len(x), heads, -1) for y in (w, k, v, r))
    out = np.zeros_like(x[:, :1] * np.zeros(v.shape[1] * v.shape[2]))
    state = np.zeros((heads, k.shape[2], v.shape[2]))
    for t in range(len(x)):
        row = []
        for h in range(heads):
            now = np.outer(k[t, h], v[t, h])
            y = r[t, h] @ (state[h] + p["bonus"][h][:, None] * now)
            state[h] = np.exp(w[t, h])[:, None] * state[h] + now
            row.append((y - y.mean()) / np.sqrt(y.var() + 0.00064))
        out[t] = np.concatenate(row) * p["norm.weight"] + p["norm.bias"]
    return (silu(g) * out) @ p["o_proj.weight"].T


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
