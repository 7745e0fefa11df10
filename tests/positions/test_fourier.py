"""FoPE: its formula, RoPE as a case of it, and the pairs that do not turn."""

import math

import pytest
import torch

import longitude as lg
from tests.support import close, heads, refused_calls

KV, WIDTH, LENGTH = 2, 8, 100


def fope(**options):
    return lg.encoding(
        "fope",
        **{"head_dim": WIDTH, "num_heads": 4, "num_kv_heads": KV, "layout": "half", "max_length": LENGTH, **options},
    )


@pytest.mark.parametrize("layout", ["half", "interleaved"])
def test_it_is_the_formula(layout):
    """Term by term, at each head's own series."""
    encoding = fope(layout=layout)
    w = [10_000 ** (-2 * j / WIDTH) for j in range(WIDTH // 2)]
    turning = [j for j in range(WIDTH // 2) if w[j] > 2 * math.pi / LENGTH]
    assert turning == [0, 1] and encoding.series.shape == (2, KV, 2, 2)
    pair = {"half": lambda m: (m, m + WIDTH // 2), "interleaved": lambda m: (2 * m, 2 * m + 1)}[layout]
    q, k, _ = heads(7)
    for x, rotate, group in ((q, encoding.rotate_queries, 2), (k, encoding.rotate_keys, 1)):
        got, want = rotate(x, 3), torch.empty_like(x)
        for h in range(x.shape[1]):
            for n in range(7):
                for m in range(WIDTH // 2):
                    series = encoding.series[:, h // group]
                    c = sum(series[0, j, m] * math.cos((3 + n) * w[j]) for j in turning) if m in turning else 1.0
                    s = sum(series[1, j, m] * math.sin((3 + n) * w[j]) for j in turning) if m in turning else None
                    s = 0.0 if s is None else s
                    a, b = pair(m)
                    want[:, h, n, a] = x[:, h, n, a] * c - x[:, h, n, b] * s
                    want[:, h, n, b] = x[:, h, n, a] * s + x[:, h, n, b] * c
        close(got, want, 1e-12)


def test_without_deviation_it_is_rope_with_slow_pairs_at_rest():
    """And with as many positions that every pair turns, RoPE."""
    q, k, v = heads(9)
    rope = lg.Rotary(WIDTH, "half")
    all_turn = fope(deviation=0.0, max_length=10**5)
    close(lg.attend(q, k, v, encoding=all_turn), lg.attend(q, k, v, encoding=rope), 1e-12)
    some = fope(deviation=0.0).rotate(q, 5)
    rotated = rope.rotate(q, 5)
    for m in range(4):
        close(some[..., m::4], (rotated if m < 2 else q)[..., m::4], 1e-12)


def test_series_sum_to_one_and_stay():
    """At position 0 nothing changes; a seed decides the numbers, and moving or copying a model does not change them."""
    encoding, q = fope(seed=3), heads(1)[0]
    close(encoding.series.sum(-2), torch.ones(2, KV, 2, dtype=torch.float64), 1e-12)
    close(encoding.rotate(q, 0), q, 1e-12)
    assert torch.equal(fope(seed=3).series, encoding.series) and not torch.equal(fope(seed=4).series, encoding.series)
    assert (encoding.bfloat16().series.dtype, encoding.state_dict()) == (torch.float64, {})
    with torch.device("meta"):
        assert torch.equal(fope(seed=3).series, encoding.series)


def test_far_positions_repeat_nothing_unseen():
    """What a slow pair would first show beyond the training length is not there: no number of it depends on the position."""
    x = torch.ones(1, KV, 1, WIDTH, dtype=torch.float64)
    near, far = (fope().rotate(x, p) for p in (3, 10**6))
    close(near[..., [2, 3, 6, 7]], far[..., [2, 3, 6, 7]], 0.0)
    assert (near - far).abs().max() > 0.1


test_refused = refused_calls(
    [
        (lambda: fope(head_dim=7), "head_dim"),
        (lambda: fope(num_heads=3), "num_kv_heads", "num_heads=3", "2"),
        (lambda: fope().queries(torch.zeros(1, 3, 2, WIDTH), fope().prepare(torch.arange(2))), "multiple", "2"),
        (lambda: lg.attention.HierarchicalAttention(16, 2, encoding=fope()), "FoPE", "RotaryTable"),
    ]
)
