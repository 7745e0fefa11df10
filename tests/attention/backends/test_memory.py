"""What memory a route takes, counted by torch's profiler, and that the same call gives the same bits."""

import pytest
import torch

import longitude as lg
from longitude import testing
from longitude.testing.attend_calls import Call
from tests.support import built, heads, needs_c, random

KNOWN = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 8, "dim": 16, "max_length": 4096}


# `table` allocates nothing of Lq x Lk: the law `memory` tries causality, test_split.py other masks.
class MakesAllPairs(lg.ALiBi):
    """The bias of an offset, by way of a table of all pairs of offsets."""

    def terms(self, context):
        (bias,) = super().terms(context)
        return (lg.terms.OffsetBias(lambda offset: bias.at((offset[:, None] - offset * 0).diagonal())),)


class MarksAllPairs(lg.ALiBi):
    """Less than a number per pair: one byte, for a tenth of them."""

    def terms(self, context):
        (bias,) = super().terms(context)
        marks = lambda offset: torch.zeros(len(offset), len(offset) // 10, dtype=torch.bool).sum(1)  # noqa: E731
        return (lg.terms.OffsetBias(lambda offset: bias.at(offset + marks(offset))),)


@needs_c
@pytest.mark.parametrize(
    ("kind", "message"), [(MakesAllPairs, "no tensor of 2048 x 2048"), (MarksAllPairs, r"-> \d+ bytes")]
)
def test_law_goes_red_for_an_encoding_that_makes_all_pairs(kind, message):
    with pytest.raises(testing.LawBroken, match=f"breaks the law 'memory': backend table.* {message}"):
        testing.examine("memory", kind)


# ---- the same bits -------------------------------------------------------------------------------------------------------------
@pytest.fixture(params=[1, 2], ids=["one thread", "two threads"])
def _threads(request):
    """Where torch may choose kernels that are not deterministic."""
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    torch.use_deterministic_algorithms(False)
    yield
    torch.use_deterministic_algorithms(True)
    torch.set_num_threads(before)


@pytest.mark.one_in(23)
@pytest.mark.usefixtures("_threads")
@pytest.mark.parametrize("name", ["nope", "alibi", "t5", "fire", "shaw", "transformer_xl", "fox", "cope", "path"])
def test_the_same_call_gives_the_same_bits(name):
    """On every backend, the output and every gradient, in one process with one number of threads."""
    token, dtype = torch.arange(70), torch.float32
    inputs = *heads(70, 3, dtype=dtype), random(3, 70, KNOWN["dim"], seed=9, dtype=dtype)
    packed = lg.Causal() & lg.Documents(token * 3 // 70) & lg.Padding(token < 62)
    for mask in (lg.Causal(), packed):
        call = Call(built(name, KNOWN, dtype=dtype), {n: x.requires_grad_() for n, x in zip("qkvx", inputs)}, mask)
        assert {"reference", "chunked"} <= {*call.able()}
        for backend in call.able():
            first, again = (call.answer(backend) for _ in range(2))
            assert all(torch.equal(first[what], again[what]) for what in first), (backend, mask)
