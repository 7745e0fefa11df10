"""explain(): each backend's verdict in words, its memory, and the one that runs."""

import re
from dataclasses import replace

import pytest
import torch

import longitude as lg
from longitude.attention.backends import BACKENDS
from longitude.attention.backends.chunked import BLOCK_BYTES
from longitude.testing.fixtures import memory_of
from tests.support import built, refused

Q, K, V = torch.randn(3, 2, 4, 384, 16, generator=torch.Generator().manual_seed(0)).unbind()
FOX = lg.FoX(8, 4)
REQUESTS = {
    "plain": {},
    "fixed bias": {"encoding": lg.ALiBi(4)},
    "learned bias": {"encoding": lg.T5Bias(4)},
    "pairs": {"encoding": lg.Fire(4)},
    "vectors": {"encoding": lg.Shaw(16)},
    "long vectors": {"encoding": lg.TransformerXL(4, 16, 8)},
    "gates": {"encoding": FOX, "context": FOX.context(torch.randn(2, 384, 8))[0]},
    "rows": {"encoding": lg.CoPE(16)},
    "both sides": {"encoding": lg.encoding("deberta", num_heads=4, head_dim=16, dim=8)},
    "two axes": {"encoding": lg.encoding("swin_v2", num_heads=4, sides=(400, 400))},
    "packed": {"mask": lg.Causal() & lg.Documents(torch.arange(384) // 100), "encoding": lg.ALiBi(4)},
    "dropout": {"dropout": 0.1, "encoding": lg.ALiBi(4)},
    "weights": {"return_weights": True},
}
SLOW = "pairs", "gates", "rows", "both sides", "two axes"


@pytest.mark.parametrize("case", REQUESTS)
def test_a_verdict_per_backend_and_the_chosen_one_runs(case, capsys, monkeypatch):
    verdicts = lg.explain(Q, K, V, **REQUESTS[case])
    lines = capsys.readouterr().out.splitlines()
    lines = [line for line in lines if not line.startswith("C kernels: ")]
    assert [v.backend for v in verdicts] == list(BACKENDS)
    (chosen,) = (v for v in verdicts if v.chosen)
    assert chosen.price == min(v.price for v in verdicts if v.refusal is None)
    for verdict, line in zip(verdicts, lines, strict=True):
        assert verdict.backend in line and line.startswith("->") == verdict.chosen
        if verdict.refusal is not None:
            assert f"refuses: {verdict.refusal}" in line
            with refused("cannot"):
                lg.attend(Q, K, V, **REQUESTS[case], backend=verdict.backend)
            continue
        assert f"{verdict.price:.1f} times" in line and f"{verdict.memory / 2**20:.1f} MiB" in line

    def never(r):
        raise AssertionError("not the one that explain chose")

    for name in BACKENDS.keys() - {chosen.backend}:
        monkeypatch.setitem(BACKENDS, name, replace(BACKENDS[name], run=never))
    lg.attend(Q, K, V, **REQUESTS[case])


def test_calls_of_regions_are_counted(capsys):
    """Two regions in each of four documents."""
    rerope = lg.encoding("rerope", head_dim=16, layout="half", window=8)
    lg.explain(Q, K, V, encoding=rerope, mask=REQUESTS["packed"]["mask"])
    assert re.findall(r"\d+", capsys.readouterr().out.splitlines()[0]) == ["8", "2"]


@pytest.mark.parametrize(
    "case", ["plain", "fixed bias", "vectors", *(pytest.param(x, marks=pytest.mark.slow) for x in SLOW)]
)
def test_claimed_memory_is_measured_memory(case):
    """At most 1.5 times the claim, and at least 0.4 of it: above inputs and output, give or take one MiB."""
    slack, output = 2**20, Q.numel() * Q.element_size()
    with torch.no_grad():
        for verdict in lg.explain(Q, K, V, **REQUESTS[case]):
            if verdict.refusal is None:
                lg.attend(Q, K, V, **REQUESTS[case], backend=verdict.backend)  # what the first call keeps
                call = lambda name=verdict.backend: lg.attend(Q, K, V, **REQUESTS[case], backend=name)  # noqa: E731
                used = memory_of(call).peak - output
                assert 0.4 * verdict.memory - slack <= used <= 1.5 * verdict.memory + slack, (verdict, used / 2**20)


@pytest.mark.parametrize(
    ("name", "q", "keys", "positions"),
    [
        ("deberta", (4, 2, 1, 64), 512, torch.arange(512) + torch.arange(4)[:, None]),
        ("swin", (1, 1, 512, 8), 512, torch.stack([torch.arange(512) // 30, torch.arange(512) % 30], -1)),
    ],
)
def test_memory_of_terms_larger_than_the_scores(name, q, keys, positions):
    """Few heads or few queries: most of it is what a term computes on the way to its bias."""
    batch, heads, rows, dim = q
    known = {"num_heads": heads, "head_dim": dim, "dim": 16, "sides": (30, 30)}
    encoding = built(name, known, dtype=torch.float32)
    k, q = torch.randn(batch, heads, keys, dim), torch.randn(q)
    options = {"encoding": encoding, "mask": lg.NoMask(), "k_positions": positions}
    options["q_positions"] = positions[:, -1:] if rows == 1 else positions
    [claim] = [verdict.memory for verdict in lg.explain(q, k, k, **options) if verdict.backend == "reference"]
    with torch.no_grad():
        used = memory_of(lambda: lg.attend(q, k, k, **options, backend="reference")).peak
    assert 0.4 * claim <= used <= 1.5 * claim + 2**20 and claim > 8 * q.shape[:3].numel() * keys, (claim, used)


def test_a_call_that_no_kernel_takes_stays_in_the_memory_of_a_block():
    """Scores of all pairs at once took three times as long on a CPU: of 8 heads, 1,024 tokens."""
    (q, k, v), options = torch.zeros(3, 1, 8, 1024, 32).unbind(), {"softcap": 20.0, "dropout": 0.1}
    [chosen] = [each for each in lg.explain(q, k, v, **options) if each.chosen]
    assert chosen.memory <= BLOCK_BYTES
    small = q[:, :, :128], k[:, :, :128], v[:, :, :128]
    assert [each.backend for each in lg.explain(*small, **options) if each.chosen] == ["reference"]
