"""What masks of few pairs cost: nothing of the size of a square, and no pair in vain."""

from dataclasses import replace

import pytest
import torch

import longitude as lg
from longitude.attention.backends import BACKENDS
from longitude.attention.masks import Band, Global, Prefix
from longitude.attention.operation import choose, requests
from tests.support import LargestTensor, close, heads, needs_c

LONG = 1024
CHEAP = {
    "band": Band(30, 30),
    "prefix": Prefix(100),
    "prefix of each row": Prefix(torch.tensor([100, 700])),
    "window | global": lg.Window(30) | Global([0, 500, 900]),
    "causal window | global": (lg.Window(30) | Global([0, 500])) & lg.Causal(),
    "padded": (Band(30, 30) | Global([200])) & lg.Padding(torch.arange(LONG) < torch.tensor([[LONG], [800]])),
    "packed": lg.Window(30) & lg.Documents(torch.arange(LONG) // 300),
    "documents of each row": lg.Causal() & lg.Documents(torch.arange(LONG) // torch.tensor([[300], [231]])),
    "padding before": lg.Causal() & lg.Padding(torch.arange(LONG) >= torch.tensor([[90], [0]])),
    "padding on both sides": lg.Window(40)
    & lg.Padding((torch.arange(LONG) - 500).abs() < 490)
    & lg.Documents(torch.arange(LONG) // 300),
}


@needs_c
@pytest.mark.one_in(3)
@pytest.mark.parametrize("encoding", [None, lg.ALiBi(2)], ids=["plain", "offsets"])
@pytest.mark.parametrize("case", CHEAP)
def test_nothing_is_ever_quadratic(case, encoding):
    inputs = [x.requires_grad_() for x in heads(LONG, num_heads=2, dtype=torch.float32)]
    options = {"mask": CHEAP[case], "encoding": encoding}
    with LargestTensor() as made:
        lg.attend(*inputs, **options).sum().backward()
    assert made.elements <= 6 * inputs[0].numel() < LONG * LONG, made.elements
    close(*(lg.attend(*inputs, **options, backend=b) for b in ("auto", "reference")), atol=3e-6)


@needs_c
@pytest.mark.parametrize(
    ("mask", "chosen"), [(Band(9, 9), "table"), (Prefix(9), "split"), (lg.Window(9) | Global([0]), "split")]
)
def test_auto_takes_the_route_that_skips(mask, chosen):
    q = torch.randn(1, 2, 200, 8)
    (part,) = requests(q, q, q, None, None, mask, None, None, None, 0.0, False)
    assert choose([part.request], "auto").name == chosen
    assert choose([part.request.with_lse()], "auto").name == chosen


@pytest.mark.parametrize("encoding", [None, lg.ALiBi(2)], ids=["plain", "offsets"])
def test_nan_in_a_key_or_value_shows_in_every_query_that_attends_to_it(encoding):
    for mask in (Prefix(3), (lg.Window(4) | Global([1])) & lg.Causal()):
        allowed = mask.allowed(torch.arange(11), torch.arange(11)).view(11, 11)
        for key, name in ((1, 1), (1, 2), (5, 1), (5, 2)):
            qkv = heads(11, num_heads=2)
            qkv[name][0, :, key, 1] = torch.nan
            lost = lg.attend(*qkv, mask=mask, encoding=encoding, backend="split").isnan().any(-1)
            assert lost[0, :, allowed[:, key]].all() and not lost[1:].any()


def test_regions_hold_no_more_than_the_mask(monkeypatch):
    """The pairs that are computed, counted: those of the pattern, and no square."""
    pairs = []
    for backend in ("sdpa", "table", "chunked", "reference"):
        kept = BACKENDS[backend]

        def run(r, kept=kept):
            low, high = r.mask.reach
            width = r.length if high is None else high + 1 - (0 if low is None else low)
            pairs.append(r.rows * min(r.length, width))
            return kept.partial(r) if r.lse else kept.run(r)

        monkeypatch.setitem(BACKENDS, backend, replace(kept, run=run, partial=run if kept.partial else None))
    q = torch.randn(1, 1, LONG, 8)
    for mask, most in ((Band(16, 16) | Global([0, 7]), LONG * (33 + 2 + 2)), (Prefix(64), LONG * LONG + 64 * 64)):
        pairs.clear()
        lg.attend(q, q, q, mask=mask, backend="split")
        assert 0 < sum(pairs) <= most
