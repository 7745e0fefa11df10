"""What `longitude bench` times, and how turns give ratios. Nothing here is timed."""

from functools import partial

import pytest
import torch

import longitude as lg
from longitude.bench.cases import AttentionShape, Inputs, ours, plain
from longitude.bench.clock import Spread, interleaved

SMALL = AttentionShape(2, 4, 2, 8, 17)


def working(**seconds: tuple[float, ...]):
    """Cases that take this long in their first call, the second, ..., and a clock that nothing else moves."""
    now, left = [0.0], {name: iter(each) for name, each in seconds.items()}

    def work(name: str) -> None:
        now[0] += next(left[name])

    return {name: partial(work, name) for name in seconds}, lambda: now[0]


def test_a_ratio_is_of_one_turn():
    """The machine is ten times slower in the second turn: no ratio changes. The first call, 100 times slower, does not count."""
    (cases, clock), order = working(plain=(100, 1, 10, 2), a=(900, 2, 20, 3)), []
    timings = interleaved(cases, "plain", 3, clock, order.append)
    assert order == ["plain", "a"] * 4
    assert timings["plain"].ratio is None and timings["plain"].seconds == Spread(2, 1.5, 6)
    assert timings["a"].seconds.median == 3 and timings["a"].ratio == Spread(2, 1.75, 2)  # of 2, 2 and 1.5


def test_cases_may_have_baselines_of_their_own():
    cases, clock = working(p=(1, 1), a=(1, 3), q=(1, 2), b=(1, 8))
    timings = interleaved(cases, {"a": "p", "b": "q"}, 1, clock)
    ratios = {name: timing.ratio and timing.ratio.median for name, timing in timings.items()}
    assert ratios == {"p": None, "a": 3, "q": None, "b": 4}


@pytest.mark.parametrize("name", lg.list_encodings())
def test_every_encoding_is_timed_with_all_it_computes(name):
    """At the input, on the scores, by its columns: gradients reach all that it has learned, and the tokens it reads."""
    inputs = Inputs.of(SMALL)
    torch.testing.assert_close(plain(inputs).forward()[0], lg.attend(inputs.q, inputs.k, inputs.v))
    case = ours(name, "auto", inputs)
    gradients = case.step(backward=True)()
    encoding = lg.testing.example(name)()
    assert any(each is inputs.x for each in case.wanted) == (encoding.at_input or encoding.reads_tokens)
    for wanted, gradient in zip(case.wanted, gradients, strict=True):
        assert gradient is not None and gradient.shape == wanted.shape and gradient.isfinite().all()
    with torch.no_grad():
        assert all(out.isfinite().all() for out in case.step(backward=False)())
