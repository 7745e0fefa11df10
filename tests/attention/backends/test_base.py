"""Which backend runs: a named one or none, "auto" the cheapest; what `chunked` and `sdpa` take; backends that users register."""

from dataclasses import replace

import torch

import longitude as lg
from longitude.attention.backends import BACKENDS, chunked, refuses
from longitude.attention.operation import choose, requests
from longitude.attention.reference import reference
from longitude.positions.composed import compose
from tests.support import close, needs_c, random, refused

HEADS, DIM = 4, 8


def request(q, mask=None, encoding=None):
    """The only request of a call of self-attention."""
    (part,) = requests(q, q, q, compose(encoding), None, mask or lg.Causal(), None, None, None, 0.0, False)
    return part.request


def test_chunked_skips_what_a_window_cannot_reach(monkeypatch):
    blocks = []
    monkeypatch.setattr(chunked, "BLOCK_BYTES", 2**16)
    monkeypatch.setattr(chunked, "reference", lambda r, *how: blocks.append((r.rows, r.length)) or reference(r, *how))
    q = random(1, HEADS, 200, DIM)
    close(lg.attend(q, q, q, mask=lg.Window(8), backend="chunked"), reference(request(q, lg.Window(8)))[0])
    assert len(blocks) > 10 and all(keys <= rows + 7 for rows, keys in blocks), blocks


@needs_c
def test_sdpa_refuses_a_bias_it_would_round_or_that_is_long():
    q = torch.randn(1, HEADS, 6, DIM)
    with refused("'sdpa'", "cannot", "'table'"):
        lg.attend(*[q.bfloat16()] * 3, encoding=lg.ALiBi(HEADS), backend="sdpa")
    q = torch.empty(1, HEADS, 2049, DIM)
    with refused("64", "MiB"):
        lg.attend(q, q, q, encoding=lg.ALiBi(HEADS), backend="sdpa")
    assert refuses(BACKENDS["sdpa"], request(q)) is None


def test_sdpa_takes_long_packed_text_in_half_precision():
    """Span by span it is plain causal attention: the dense mask that it would not make counts for nothing."""
    q = torch.empty(1, HEADS, 8192, DIM, dtype=torch.float16)
    r = request(q, lg.Causal() & lg.Documents(torch.arange(8192) // 1000))
    assert refuses(BACKENDS["sdpa"], r) is None and BACKENDS["sdpa"].memory(r) == 0
    assert choose([r], "auto").name == "sdpa"
    recurring = request(q, lg.Causal() & lg.Documents(torch.arange(8192) // 1000 % 2))
    assert "dense bias would take 128 MiB" in refuses(BACKENDS["sdpa"], recurring)


def test_a_backend_of_ones_own_is_one_like_any_other(monkeypatch):
    monkeypatch.setattr("longitude.attention.backends.base.BACKENDS", known := dict(BACKENDS))
    backend = lg.attention.Backend("own", run=lambda r: reference(r)[0], memory=lambda r: 0, price=lambda r: 0.5)
    assert lg.attention.register_backend(backend) is known["own"] is lg.attention.register_backend(backend)
    for name in ("auto", "sdpa"):
        with refused(f"'{name}'"):
            lg.attention.register_backend(replace(backend, name=name))
    biased = request(torch.randn(1, HEADS, 6, DIM), encoding=lg.ALiBi(HEADS))
    assert refuses(backend, biased) == "it does not support OffsetBias"
