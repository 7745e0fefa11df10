"""Masks against truth tables written pair by pair, and what fast routes may do with them."""

import itertools
import random

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import longitude as lg
from longitude.attention.backends import BACKENDS, refuses
from longitude.attention.masks import Mask
from longitude.attention.operation import requests

GENERAL = [
    name for name in BACKENDS if name not in ("transport", "split", "flex")
]  # a transport alone, or blocks of 128 queries

KEYS = 9
ORDER = torch.tensor([3, 0, 7, 2, 8, 1, 5, 4, 6])
IDS = torch.tensor([[0, 0, 0, 4, 4, 4, 4, 2, 2], [1, 1, 1, 1, 1, 1, 1, 1, 5]])
VALID = torch.tensor([[0, 0, 1, 1, 1, 1, 1, 1, 1], [1, 1, 1, 1, 0, 0, 0, 0, 0]])
HOLES = torch.tensor([1, 0, 1, 1, 0, 0, 1, 1, 1], dtype=torch.bool)

# A mask and the same in words: whether the query of order i sees the key of order j in sequence b.
ATOMS = {
    "none": (lg.NoMask(), lambda b, i, j: True),
    "causal": (lg.Causal(), lambda b, i, j: j <= i),
    "window1": (lg.Window(1), lambda b, i, j: i == j),
    "window3": (lg.Window(3), lambda b, i, j: i - 3 < j <= i),
    "window99": (lg.Window(99), lambda b, i, j: j <= i),
    "causal by order": (lg.Causal(ORDER), lambda b, i, j: ORDER[j] <= ORDER[i]),
    "window by order": (lg.Window(4, ORDER), lambda b, i, j: ORDER[i] - 4 < ORDER[j] <= ORDER[i]),
    "documents": (lg.Documents(IDS), lambda b, i, j: IDS[b, i] == IDS[b, j]),
    "documents of all": (lg.Documents(IDS[0]), lambda b, i, j: IDS[0, i] == IDS[0, j]),
    "padding": (lg.Padding(VALID), lambda b, i, j: bool(VALID[b, j])),
    "holes": (lg.Padding(HOLES), lambda b, i, j: bool(HOLES[j])),
}
PAIRS = list(itertools.combinations_with_replacement(ATOMS, 2))


def truth(name: str) -> torch.Tensor:
    """[2, KEYS, KEYS] for queries and keys of orders 0 .. KEYS-1."""
    _, sees = ATOMS[name]
    each = [[[bool(sees(b, i, j)) for j in range(KEYS)] for i in range(KEYS)] for b in range(2)]
    return torch.tensor(each)


def table(mask: Mask, rows: int) -> torch.Tensor:
    """[2, rows, KEYS] as the mask itself says it; queries are the last."""
    allowed = mask.allowed(torch.arange(KEYS - rows, KEYS), torch.arange(KEYS))
    assert allowed.dtype == torch.bool
    return allowed[:, 0].expand(2, -1, -1) if allowed.dim() == 4 else allowed.expand(2, -1, -1)


def check(mask: Mask, expected: torch.Tensor) -> None:
    for rows in (KEYS, 4, 1):
        assert torch.equal(table(mask, rows), expected[:, KEYS - rows :])
    # What the reach leaves out may be skipped, so it must hold every allowed pair.
    low, high = mask.reach
    ago = torch.arange(KEYS)[:, None] - torch.arange(KEYS)
    beyond = torch.zeros(KEYS, KEYS, dtype=torch.bool)
    if low is not None:
        beyond |= ago < low
    if high is not None:
        beyond |= ago > high
    assert not (expected & beyond).any(), mask.reach


@pytest.mark.parametrize("name", ATOMS)
def test_truth_of_one(name):
    check(ATOMS[name][0], truth(name))


@pytest.mark.parametrize(("a", "b"), PAIRS)
def test_truth_of_two(a, b):
    (x, _), (y, _) = ATOMS[a], ATOMS[b]
    for first, second in ((x, y), (y, x)):
        check(first & second, truth(a) & truth(b))
        check(first | second, truth(a) | truth(b))


def test_truth_of_many():
    """Trees of & and |, drawn with a fixed seed."""
    draw = random.Random(0)

    def tree(depth: int) -> tuple[Mask, torch.Tensor]:
        if depth == 0:
            name = draw.choice(list(ATOMS))
            return ATOMS[name][0], truth(name)
        (x, a), (y, b) = tree(draw.randrange(depth)), tree(draw.randrange(depth))
        return (x & y, a & b) if draw.random() < 0.5 else (x | y, a | b)

    for _ in range(100):
        check(*tree(4))


def test_a_window_is_so_many_keys():
    for size in (1, 2, 5):
        keys = table(lg.Window(size), KEYS)[0].sum(-1).tolist()
        assert keys == [min(i + 1, size) for i in range(KEYS)]


def test_windows_meet_and_join():
    both, either = lg.Window(3) & lg.Causal() & lg.Window(5), lg.Window(3) | lg.Window(5)
    assert (both.reach, either.reach) == ((0, 2), (0, 4))
    q, k, v = torch.randn(3, 1, 2, 30, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    for backend in GENERAL:
        for encoding in (None, lg.ALiBi(2)):
            one, two = (
                lg.attend(q, k, v, encoding=encoding, mask=mask, backend=backend) for mask in (lg.Window(3), both)
            )
            assert torch.allclose(one, two, atol=1e-12)


@pytest.mark.parametrize("backend", GENERAL)
def test_weights_and_output_obey_the_mask(backend):
    """A key that nobody may see changes nothing; NaN in it would show."""
    q, k, v = torch.randn(3, 2, 2, KEYS, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    for mask, unseen in ((lg.Causal(), slice(5, None)), (lg.Causal() & lg.Padding(VALID[:1]), slice(0, 2))):
        out = lg.attend(q, k, v, mask=mask, backend=backend)
        k2, v2 = k.clone(), v.clone()
        k2[:, :, unseen] += 7
        v2[:, :, unseen] -= 9
        changed = lg.attend(q, k2, v2, mask=mask, backend=backend)
        seen = slice(0, 5) if unseen.start else slice(None)
        assert torch.allclose(out[:, :, seen], changed[:, :, seen], atol=1e-12)
        assert unseen.start == 0 or not torch.allclose(out[:, :, 5:], changed[:, :, 5:])


# ---- queries with nothing to look at ---------------------------------------------------------------------------------
NOTHING = {
    "all padding": (lg.Causal() & lg.Padding(torch.stack([VALID[0], VALID[0] * 0])), KEYS),
    "left padding": (lg.Causal() & lg.Padding(VALID), KEYS),
    "window that moved on": (lg.Window(2) & lg.Padding(VALID[1:]), KEYS),
    "more queries than keys": (lg.Causal(), KEYS + 5),
}


@pytest.mark.parametrize("case", NOTHING)
@pytest.mark.parametrize("backend", GENERAL)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_nothing_to_look_at_gives_zeros(backend, case, dtype):
    mask, rows = NOTHING[case]
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, 2, n, 4, dtype=dtype, generator=generator) for n in (rows, KEYS, KEYS))
    for x in (q, k, v):
        x.requires_grad_()
    expected, weights = lg.attend(q, k, v, mask=mask, return_weights=True)
    blind = ~weights.any(-1)
    assert blind.any() and not blind.all()
    with torch.autograd.set_detect_anomaly(True):  # no NaN on the way either
        out = lg.attend(q, k, v, mask=mask, backend=backend)
        grad = torch.randn(out.shape, dtype=dtype, generator=generator)
        ours = torch.autograd.grad(out, (q, k, v), grad)
    assert (out[blind] == 0).all()
    assert (ours[0][blind] == 0).all()
    torch.testing.assert_close(out, expected, atol=1e-5, rtol=0)
    for x, y in zip(ours, torch.autograd.grad(expected, (q, k, v), grad), strict=True):
        torch.testing.assert_close(x, y, atol=1e-5, rtol=0)


# ---- spans: padding and documents stay linear ------------------------------------------------------------------------
class Largest(TorchDispatchMode):
    """Elements of the largest tensor that any operation made."""

    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for x in out if isinstance(out, tuple | list) else (out,):
            if isinstance(x, torch.Tensor):
                self.elements = max(self.elements, x.numel())
        return out


def long(length: int, left: int = 0, right: int = 0) -> torch.Tensor:
    order = torch.arange(length)
    return (order >= left) & (order < length - right)


LENGTH = 512
PACKED = torch.arange(LENGTH) // 100
LONG = {
    "documents": lg.Causal() & lg.Documents(PACKED),
    "other documents per row": lg.Causal() & lg.Documents(torch.stack([PACKED, torch.arange(LENGTH) // 77])),
    "left padding": lg.Causal() & lg.Padding(torch.stack([long(LENGTH, left=30), long(LENGTH)])),
    "right padding": lg.Causal() & lg.Padding(torch.stack([long(LENGTH), long(LENGTH, right=9)])),
    "both": lg.Window(40) & lg.Padding(long(LENGTH, 3, 3)) & lg.Documents(PACKED),
    "said twice": lg.Causal() & lg.Documents(PACKED) & lg.Documents(torch.arange(LENGTH) // 50 % 2),
    "padding twice": lg.Causal() & lg.Padding(long(LENGTH, left=30)) & lg.Padding(long(LENGTH, right=9)),
}


@pytest.mark.parametrize("case", LONG)
@pytest.mark.parametrize(
    ("encoding", "backend"),
    [(None, "auto"), (None, "sdpa"), (lg.ALiBi(2), "table")],
    ids=["plain", "sdpa", "alibi"],
)
def test_spans_are_never_dense(case, encoding, backend):
    q, k, v = torch.randn(3, 2, 2, LENGTH, 8, generator=torch.Generator().manual_seed(0)).requires_grad_().unbind()
    arguments = {"encoding": encoding, "mask": LONG[case]}
    dense = lg.attend(q, k, v, **arguments, backend="reference")
    with Largest() as made:
        out = lg.attend(q, k, v, **arguments, backend=backend)
        out.sum().backward()
    assert made.elements <= 2 * 3 * q.numel() < LENGTH * LENGTH, (
        made.elements
    )  # q, k and v were unbound from one tensor
    assert torch.allclose(out, dense, atol=2e-6)


def test_the_count_sees_a_dense_route():
    q = torch.randn(1, 1, LENGTH, 8)
    with Largest() as made:
        lg.attend(q, q, q, backend="reference")
    assert made.elements >= LENGTH * LENGTH


NO_SPANS = {
    "not contiguous": lg.Causal() & lg.Documents(torch.tensor([0, 0, 1, 1, 0, 0, 1, 1, 1])),
    "middle of a sequence": lg.Causal() & lg.Padding(HOLES),
    "joined by &": lg.Causal() | lg.Documents(IDS),
}


@pytest.mark.parametrize("words", NO_SPANS)
def test_what_has_no_spans_is_refused_in_words_and_right_elsewhere(words):
    q, k, v = torch.randn(3, 2, 2, KEYS, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    mask = NO_SPANS[words]
    with pytest.raises(ValueError, match=f"'table' cannot: .*{words}.* can, and 'auto' takes 'sdpa'"):
        lg.attend(q, k, v, mask=mask, backend="table")
    expected = lg.attend(q, k, v, mask=mask, backend="reference")
    for backend in ("auto", "sdpa", "chunked"):
        assert torch.allclose(lg.attend(q, k, v, mask=mask, backend=backend), expected, atol=1e-12)


def test_random_spans_on_every_backend():
    """Packed, padded, windowed and cached all at once, drawn with a fixed seed: whoever accepts gives the same."""
    draw, taken = random.Random(0), dict.fromkeys(GENERAL, 0)
    for seed in range(40):
        keys = draw.randint(1, 40)
        rows = draw.choice([keys, draw.randint(1, keys)])
        generator = torch.Generator().manual_seed(seed)
        q, k, v = (torch.randn(2, 2, n, 4, dtype=torch.float64, generator=generator) for n in (rows, keys, keys))
        mask = draw.choice([lg.Causal(), lg.Window(draw.randint(1, 9)), lg.NoMask()])
        if draw.random() < 0.7:
            cuts = torch.rand(draw.choice([1, 2]), keys, generator=generator) < 0.15
            mask = mask & lg.Documents(cuts.cumsum(-1))
        if draw.random() < 0.7:
            mask = mask & lg.Padding(
                torch.stack([long(keys, draw.randint(0, keys // 2), draw.randint(0, keys // 3)) for _ in range(2)])
            )
        encoding = draw.choice([None, lg.ALiBi(2), lg.Rotary(4, "half")])
        (part,) = requests(q, k, v, encoding, None, mask, None, None, None, 0.0, False)
        r = part.request
        expected = BACKENDS["reference"].run(r)
        for name, backend in BACKENDS.items():
            if refuses(backend, r) is None:
                taken[name] += 1
                assert torch.allclose(backend.run(r), expected, atol=1e-12), (name, seed)
    assert all(n >= 20 for n in taken.values()), taken


# ---- mistakes --------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: lg.Window(0), "1 or more keys, got 0"),
        (lambda: lg.Window(2.5), "1 or more keys, got 2.5"),
        (lambda: lg.Window(True), "got True"),
        (lambda: lg.Documents(torch.zeros(3)), r"integer ids \[Lk\] or \[B, Lk\], got torch.float32 \[3\]"),
        (lambda: lg.Documents(torch.zeros(1, 1, 3, dtype=torch.long)), r"got torch.int64 \[1, 1, 3\]"),
        (lambda: lg.Documents([0, 0]), r"got \[0, 0\]"),
        (lambda: lg.Padding(torch.ones(2, 3)), r"bool or int, got torch.float32 \[2, 3\]"),
        (lambda: lg.Padding(None), "got None"),
    ],
)
def test_mistakes_when_made(make, message):
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize(
    ("mask", "message"),
    [
        (lg.Documents(IDS[:, :5]), r"Documents\(ids\): expected \[9\] or \[2, 9\], one per key, got \[2, 5\]"),
        (lg.Documents(IDS[:, :4]), r"got \[2, 4\]"),  # one per query is not one per key
        (lg.Padding(torch.ones(3, 9, dtype=torch.long)), r"Padding\(valid\): .*got \[3, 9\]"),
        (lg.Causal(ORDER[:4]), r"Causal: expected order \[9\].*got torch.int64 \[4\]"),
        (lg.Window(2, ORDER.float()), r"Window: expected order \[9\].*got torch.float32"),
        (lg.Causal() & (lg.NoMask() | lg.Documents(IDS[:, 1:])), r"got \[2, 8\]"),  # inside a tree too
        ("causal", r"mask: expected lg.Causal\(\).*got 'causal'"),
        (torch.ones(4, 9, dtype=torch.bool), "mask: expected lg.Causal"),
        (None, r"NoMask\(\).*got None"),
    ],
)
def test_mistakes_when_used(mask, message):
    q, k = torch.randn(2, 1, 4, 4), torch.randn(2, 1, KEYS, 4)
    with pytest.raises(ValueError, match=message):
        lg.attend(q, k, k, mask=mask)


def test_documents_need_queries_among_the_keys():
    q, k = torch.randn(2, 1, 12, 4), torch.randn(2, 1, KEYS, 4)
    with pytest.raises(ValueError, match="queries among the 9 keys, got 12"):
        lg.attend(q, k, k, mask=lg.Documents(IDS))
