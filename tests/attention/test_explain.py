"""explain(): each backend's verdict in words, its memory, and the one that runs."""

from dataclasses import replace

import pytest
import torch

import longitude as lg
from longitude.attention.backends import BACKENDS
from longitude.testing.memory_use import memory_of

Q, K, V = torch.randn(3, 2, 4, 384, 16, generator=torch.Generator().manual_seed(0)).unbind()
REQUESTS = {
    "plain": {},
    "fixed bias": {"encoding": lg.ALiBi(4)},
    "learned bias": {"encoding": lg.T5Bias(4)},
    "pairs": {"encoding": lg.Fire(4)},
    "vectors": {"encoding": lg.Shaw(16)},
    "rows": {"encoding": lg.CoPE(16)},
    "packed": {"mask": lg.Causal() & lg.Documents(torch.arange(384) // 100), "encoding": lg.ALiBi(4)},
    "dropout": {"dropout": 0.1, "encoding": lg.ALiBi(4)},
    "weights": {"return_weights": True},
}


@pytest.mark.parametrize("case", REQUESTS)
def test_a_verdict_per_backend_and_the_chosen_one_runs(case, capsys, monkeypatch):
    verdicts = lg.explain(Q, K, V, **REQUESTS[case])
    lines = capsys.readouterr().out.splitlines()
    assert [v.backend for v in verdicts] == list(BACKENDS)
    assert len(lines) == len(BACKENDS)
    for verdict, line in zip(verdicts, lines, strict=True):
        assert verdict.backend in line and line.startswith("->") == verdict.chosen
        if verdict.refusal is None:
            assert "takes it" in line and f"{verdict.memory / 2**20:.1f} MiB" in line
        else:
            assert f"refuses: {verdict.refusal}" in line
            with pytest.raises(ValueError, match="cannot"):
                lg.attend(Q, K, V, **REQUESTS[case], backend=verdict.backend)
    (chosen,) = (v for v in verdicts if v.chosen)
    assert chosen.passed_over is None and "passed over" not in str(chosen)
    for verdict in verdicts:
        if verdict.refusal is None and not verdict.chosen:
            why = f"about {verdict.price:.1f} times the time of plain attention, '{chosen.backend}'"
            why = why if verdict.price > chosen.price else f"no cheaper than '{chosen.backend}', which comes first"
            assert f"passed over: {why}" in str(verdict)
        elif verdict.refusal is not None:
            assert verdict.passed_over is None
    assert chosen.price == min(v.price for v in verdicts if v.refusal is None)

    def never(r):
        raise AssertionError("not the one that explain chose")

    for name, backend in BACKENDS.items():
        if name != chosen.backend:
            monkeypatch.setitem(BACKENDS, name, replace(backend, run=never))
    lg.attend(Q, K, V, **REQUESTS[case])


def test_a_named_backend_is_chosen_or_none_is(capsys):
    asked = {v.backend: v.chosen for v in lg.explain(Q, K, V, backend="chunked")}
    assert asked == {name: name == "chunked" for name in BACKENDS}
    assert not any(v.chosen for v in lg.explain(Q, K, V, encoding=lg.Fire(4), backend="table"))
    assert "table      refuses: it does not support PairBias" in capsys.readouterr().out


def test_why_others_were_passed_over():
    """Cheaper ones come first, what takes too much memory last, and a name that was asked for before all."""

    def why(q, **arguments):
        return {v.backend: v.passed_over for v in lg.explain(q, q, q, **arguments)}

    assert why(Q, encoding=lg.Fire(4))["chunked"].startswith("about 8.0 times the time of plain attention, '")
    long = torch.empty(1, 4, 8192, 64)
    assert why(long)["reference"] == "4096.0 MiB are more than it is taken for unasked"
    asked = why(Q, encoding=lg.ALiBi(4), backend="chunked")
    assert asked["chunked"] is None
    assert asked["sdpa"] == asked["reference"] == "'chunked' was requested"
    assert set(why(Q, encoding=lg.Fire(4), backend="table").values()) >= {None, "'table' was requested"}


def test_equal_prices_are_taken_in_order(monkeypatch):
    monkeypatch.setitem(BACKENDS, "chunked", replace(BACKENDS["chunked"], price=BACKENDS["sdpa"].price))
    verdicts = {v.backend: v for v in lg.explain(Q, K, V)}
    assert verdicts["sdpa"].chosen
    assert verdicts["chunked"].passed_over == "no cheaper than 'sdpa', which comes first"


def test_the_logsumexp_is_asked_for_as_of_attend():
    refusals = {v.backend: v.refusal for v in lg.explain(Q, K, V, return_lse=True)}
    assert refusals["sdpa"] == "it does not return the logsumexp of the scores" and refusals["reference"] is None


def test_an_argument_that_attend_does_not_have():
    with pytest.raises(ValueError, match="unknown argument 'masks': did you mean 'mask'"):
        lg.explain(Q, K, V, masks=lg.Causal())


# ---- memory ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("case", ["plain", "fixed bias", "pairs", "vectors", "rows"])
def test_claimed_memory_is_measured_memory(case):
    """At most 1.5 times the claim, and at least 0.4 of it: above inputs and output, give or take one MiB."""
    slack, output = 2**20, Q.numel() * Q.element_size()
    with torch.no_grad():
        for verdict in lg.explain(Q, K, V, **REQUESTS[case]):
            if verdict.refusal is None and verdict.backend != "flex":  # it compiles; test_flex measures it
                lg.attend(Q, K, V, **REQUESTS[case], backend=verdict.backend)  # what the first call keeps
                call = lambda name=verdict.backend: lg.attend(Q, K, V, **REQUESTS[case], backend=name)  # noqa: E731
                used = memory_of(call).peak - output
                assert 0.4 * verdict.memory - slack <= used <= 1.5 * verdict.memory + slack, (verdict, used / 2**20)


def test_chunked_and_table_stay_small_at_length():
    """At 8192 tokens a dense bias would take 1 GiB; `chunked` keeps to its blocks, and `table` to lines."""
    q = torch.empty(1, 4, 8192, 64)
    memory = {v.backend: v.memory / 2**20 for v in lg.explain(q, q, q, encoding=lg.ALiBi(4))}
    assert memory["reference"] >= 4096
    assert memory["chunked"] <= 32
    assert memory["table"] <= 16
