"""What memory a route takes, counted by torch's profiler, and that the same call gives the same bits."""

import pytest
import torch

import longitude as lg
from longitude import testing
from longitude.testing.attend_calls import Call
from tests.support import built, heads, needs_c, random

KNOWN = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 8, "dim": 16, "max_length": 4096}


def packed(length: int) -> lg.Mask:
    """Three documents, and padding after the last."""
    token = torch.arange(length)
    return lg.Causal() & lg.Documents(token * 3 // length) & lg.Padding(token < length - length // 8)


# ---- `table` allocates nothing of Lq x Lk: the law `memory` tries causality, test_split.py other masks ------------------------


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


def numbers(length: int, batch: int) -> list[torch.Tensor]:
    """q, k, v and the tokens that context reads."""
    dtype = torch.float32
    inputs = *heads(length, batch, dtype=dtype), random(batch, length, KNOWN["dim"], seed=9, dtype=dtype)
    return [x.requires_grad_() for x in inputs]


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
    *inputs, x = numbers(70, batch=3)
    for mask in (lg.Causal(), packed(70)):
        call = Call(built(name, KNOWN, dtype=torch.float32), dict(zip("qkvx", (*inputs, x))), mask)
        assert {"reference", "chunked"} <= {*call.able()}
        for backend in call.able():
            first, again = (call.answer(backend) for _ in range(2))
            assert all(torch.equal(first[what], again[what]) for what in first), (backend, mask)
