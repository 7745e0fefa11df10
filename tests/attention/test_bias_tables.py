"""The cached tables of biases: the formula itself, whatever offsets were computed before."""

import copy
import pickle
from functools import partial

import pytest
import torch

import longitude as lg
from longitude.attention import terms
from longitude.attention.terms import bias_of
from longitude.positions.terms import OffsetBias

FIXED = {
    "alibi": partial(lg.ALiBi, 4),
    "one-sided": partial(lg.ALiBi, 4, future="one-sided"),
    "sandwich": partial(lg.Sandwich, 4, dim=16),
}
LEARNED = {
    "t5": partial(lg.T5Bias, 3, max_distance=20),
    "clipped": partial(lg.ClippedBias, 3, 20),
    "kerple_log": partial(lg.Kerple, 3),
    "kerple_power": partial(lg.Kerple, 3, "power"),
}
RANGES = [(0, 0), (1, 0), (6, -6), (100, 0), (127, 1), (128, 0), (-3, -9), (5000, 4990), (0, -700), (2**40, 2**40 - 5)]


def bias(encoding, first: int, last: int, dtype=torch.float64) -> torch.Tensor:
    """With a query for each head of the bias."""
    (term,) = encoding.terms({})
    return bias_of(term, first, last, torch.empty(1, encoding.num_heads, 1, 8, device="cpu"), dtype)


def formula(encoding, first: int, last: int) -> torch.Tensor:
    return encoding.bias_at(torch.arange(first, last - 1, -1)).detach()


@pytest.fixture(autouse=True)
def forgotten():
    terms._table.cache_clear()


@pytest.mark.parametrize("kind", FIXED)
def test_a_table_is_the_formula_at_its_offsets(kind):
    encoding = FIXED[kind]()
    for first, last in [*RANGES, *RANGES[::-1]]:
        assert torch.equal(bias(encoding, first, last), formula(encoding, first, last))
    assert bias(encoding, 9, -9, torch.float32).dtype == torch.float32


@pytest.mark.parametrize("kind", LEARNED)
@torch.no_grad()
def test_a_learned_table_is_cached_while_its_numbers_stay(kind):
    """However they change, behind autograd's back too; and never where a gradient is wanted."""
    encoding = LEARNED[kind]().double()
    parameter = next(encoding.parameters())
    torch.nn.init.uniform_(parameter, 0.1, 1)
    for first, last in [*RANGES, *RANGES[::-1]]:
        assert torch.equal(bias(encoding, first, last), formula(encoding, first, last))
    kept, again = bias(encoding, 100, 0), bias(encoding, 99, 1)
    assert kept.untyped_storage().data_ptr() == again.untyped_storage().data_ptr()
    for change in (lambda: parameter.mul_(1.25), lambda: parameter.data.mul_(1.25)):
        change()
        assert torch.equal(bias(encoding, 100, 0), formula(encoding, 100, 0))
    twin = copy.deepcopy(encoding)
    next(twin.parameters()).mul_(0.5)
    assert not torch.equal(bias(twin, 100, 0), bias(encoding, 100, 0))
    with torch.enable_grad():
        assert bias(encoding, 100, 0).requires_grad


class ThroughALayer(lg.Encoding):
    """A bias that a layer makes of the offset."""

    learned = True
    num_heads = 3

    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(1, 3, dtype=torch.float64)

    def terms(self, context):
        return (OffsetBias(lambda offset: self.layer(offset[..., None].double()).movedim(-1, 0), of=self),)


@torch.no_grad()
def test_a_hook_or_an_adapter_that_is_switched_is_seen():
    encoding = ThroughALayer()
    plain = bias(encoding, 20, 0)
    handle = encoding.layer.register_forward_hook(lambda layer, given, out: 2 * out)
    assert torch.equal(bias(encoding, 20, 0), 2 * plain)
    handle.remove()
    assert torch.equal(bias(encoding, 20, 0), plain)


def test_changed_and_copied_encodings_have_their_own():
    """A table belongs to numbers, not to the module that holds them now."""
    encoding = lg.ALiBi(2)
    twin, same = copy.deepcopy(encoding), pickle.loads(pickle.dumps(encoding))  # noqa: S301
    before = bias(encoding, 5, 0).clone()
    encoding.slopes[0] = 7.0
    assert bias(encoding, 5, 0)[0, 0] == -35
    for other in (twin, same):
        assert torch.equal(bias(other, 5, 0), before)
    assert not encoding.state_dict() and "table" not in repr(vars(encoding))


def test_a_table_made_in_inference_mode_serves_training():
    q, k, v = (torch.randn(1, 2, 6, 4, requires_grad=True) for _ in range(3))
    with torch.inference_mode():
        lg.attend(q, k, v, encoding=lg.ALiBi(2), backend="sdpa")
    lg.attend(q, k, v, encoding=lg.ALiBi(2), backend="sdpa").sum().backward()


def test_fake_tensors_leave_no_table_behind():
    from torch._subclasses.fake_tensor import FakeTensorMode

    real, alibi = torch.randn(3, 1, 2, 6, 4), lg.ALiBi(2)
    with FakeTensorMode():
        lg.attend(*torch.empty(3, 1, 2, 6, 4), encoding=alibi, backend="sdpa")
    torch.testing.assert_close(*(lg.attend(*real, encoding=alibi, backend=name) for name in ("sdpa", "reference")))
    with FakeTensorMode(), torch.device("cpu"):
        lg.attend(*torch.empty(3, 1, 2, 6, 4), encoding=alibi, backend="sdpa")
