"""attend and the loss under torch.func: gradients, maps, second derivatives; what refuses by name; NaN that no look finds."""

import math
import shutil
from functools import partial

import pytest
import torch

import longitude as lg
from longitude.models import causal
from longitude.native.derivatives import by_autograd, in_transform
from longitude.positions.base import ENCODINGS
from longitude.positions.composed import compose
from longitude.testing.examples import example
from tests.support import close, random, refused

T5 = lg.encoding("t5", num_heads=4).double()
TORCHS = pytest.mark.filterwarnings("ignore:There is a performance drop")


def attention(encoding, backend="auto"):
    k, v = random(1, 4, 7, 8, seed=1), random(1, 4, 7, 8, seed=2)
    return lambda q: lg.attend(q, k, v, encoding=encoding, backend=backend)


@TORCHS
@pytest.mark.parametrize("encoding", [None, T5, lg.Shaw(8, 3).double()], ids=["none", "t5", "shaw"])
def test_gradients_and_jacobians(encoding):
    q = random(1, 4, 7, 8)
    leaf = q.clone().requires_grad_()
    [want] = torch.autograd.grad(attention(encoding)(leaf).sin().sum(), leaf)
    close(torch.func.grad(lambda q: attention(encoding)(q).sin().sum())(q), want)
    exact, ours = attention(encoding, "reference"), attention(encoding)
    rows = torch.func.jacrev(lambda q: exact(q)[0, :, :, 0])(q)
    close(torch.func.jacfwd(lambda q: ours(q)[0, :, :, 0])(q), rows)


ROWS = torch.arange(3)[:, None]
TOKEN = torch.arange(7).expand(3, 7)
GIVEN = {
    "documents": (TOKEN // (ROWS + 2), lambda ids: {"mask": lg.Causal() & lg.Documents(ids)}),
    "padding": (ROWS <= TOKEN, lambda valid: {"mask": lg.Causal() & lg.Padding(valid)}),
    "chunks": (TOKEN % (ROWS + 4), lambda places: {"mask": lg.Causal() & lg.Chunks(2, places)}),
    "prefix": (ROWS[:, 0], lambda length: {"mask": lg.Prefix(length[None])}),
    "global": (ROWS == TOKEN, lambda tokens: {"mask": (lg.Window(2) | lg.Global(tokens)) & lg.Causal()}),
    "tensor": ((TOKEN * 3 + ROWS)[:, None] % 4 <= TOKEN[:, :, None], lambda seen: {"mask": seen}),
    "positions": (TOKEN * (ROWS + 1), lambda places: {"q_positions": places, "k_positions": places}),
}


@TORCHS
@pytest.mark.one_in(4)
@pytest.mark.parametrize("name", lg.list_encodings())
def test_a_map_over_masks_and_positions_is_its_rows(name):
    encoding = compose(example(name)())

    def one(options, q, k, v, x, numbers):
        given = options(numbers)
        if "q_positions" in given and encoding.axes > 1:
            given = {which: places[None, :, None].expand(1, -1, encoding.axes) for which, places in given.items()}
        context = encoding.context(x[None])[0] if encoding.reads_tokens else None
        return lg.attend(q[None], k[None], v[None], encoding=encoding, context=context, **given)[0]

    tensors = random(3, 4, 7, 8), random(3, 2, 7, 8, seed=1), random(3, 2, 7, 8, seed=2), random(3, 7, 16, seed=3)
    for what, (numbers, options) in GIVEN.items():
        call, rows = partial(one, options), (*tensors, numbers)
        try:
            want = torch.stack([call(*row) for row in zip(*rows, strict=True)])
        except ValueError:  # keys in the future
            assert what in ("prefix", "tensor")
            with refused("lg.Causal()"):
                torch.func.vmap(call)(*rows)
        else:
            if (name, what) != ("xpos", "positions"):  # refused: the next test
                close(torch.func.vmap(call)(*rows), want)


@TORCHS
def test_a_map_over_positions_that_tables_follow_is_refused_in_words():
    """And numbers that are wrong in one of the rows."""
    follows = lg.Rotary(8, "half", scaling=lg.scaling.DynamicNTK(3, 4, follow="row"))
    for encoding, places in ((follows, TOKEN), (lg.XPos(8, "half"), TOKEN), (None, TOKEN - ROWS)):
        q = random(3, 1, 4, 7, 8)
        with refused("positions"):
            torch.func.vmap(lambda q, at: lg.attend(q, q, q, encoding=encoding, k_positions=at))(q, places)  # noqa: B023


@TORCHS
def test_scores_of_minus_infinity_give_nan_in_a_map_too():
    """Zeros that torch's kernel makes of them are found without a look at the numbers."""
    q, k, v = (random(2, 4, 7, 8, seed=n) for n in range(3))
    k[1, :, :2] = -math.inf
    got = torch.func.vmap(lambda *three: lg.attend(*(x[None] for x in three))[0])(q.abs(), k, v)
    want = lg.attend(q.abs(), k, v, backend="reference")
    assert want.isnan().any()
    torch.testing.assert_close(got, want, equal_nan=True)


def test_who_has_no_rule_says_so():
    def named(q):
        assert in_transform() and not by_autograd()
        with refused("'table'", "torch.func", "'chunked'", "'reference'"):
            attention(T5, "table")(q)
        return attention(T5, "chunked")(q).sum()

    torch.func.grad(named)(random(1, 4, 7, 8))
    assert by_autograd()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("encoding", "masked"),
    [
        ([lg.Rotary(8, "half"), lg.ALiBi(4)], lambda seen: seen),
        ("log_n", lambda seen: lg.Causal()),
        (None, lambda seen: seen),
        (None, lambda seen: lg.Causal()),
    ],
    ids=["list-tensor", "name-causal", "none-tensor", "none-causal"],
)
def test_one_graph_of_free_sizes(encoding, masked, monkeypatch):
    """Heads that share keys, a list of encodings, a name, and a mask given as a tensor; lengths, heads and batch are free."""
    monkeypatch.setattr(ENCODINGS, "_loaded", False)  # as where nothing was looked up before

    def call(q, k, v, seen):
        return lg.attend(q, k, v, encoding=encoding, mask=masked(seen))

    torch._dynamo.reset()
    compiled = torch.compile(call, backend="eager", fullgraph=True, dynamic=True)
    for length in (7, 12):
        q, k, v = (random(2, heads, length, 8, seed=heads) for heads in (4, 2, 2))
        seen = torch.ones(2, 1, length, length, dtype=torch.bool).tril()
        close(compiled(q, k, v, seen), call(q, k, v, seen), 1e-12)


@pytest.mark.slow
@pytest.mark.parametrize("what", ["documents", "positions", "numbers"])
def test_a_map_in_a_graph_is_its_rows(what):
    """Also where an assertion would be in the graph, which torch cannot map."""
    rows, given = GIVEN["documents" if what == "documents" else "positions"]
    if what == "numbers":
        rows, given = (TOKEN[:, :, None] < TOKEN[:, None]).double() * torch.finfo(torch.float64).min, GIVEN["tensor"][1]
    q = random(3, 4, 7, 8)
    mapped = torch.func.vmap(lambda q, rows: lg.attend(q[None], q[None], q[None], encoding=T5, **given(rows))[0])
    torch._dynamo.reset()
    close(torch.compile(mapped, backend="aot_eager", fullgraph=True)(q, rows), mapped(q, rows), 1e-12)


@pytest.mark.slow
@pytest.mark.ecosystem
@pytest.mark.timeout(900)  # a compiler of C++ on a busy machine
@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor writes C++, and there is no compiler")
def test_inductor_with_a_free_length():
    """Positions divided by a large number, whose loop inductor splits where it may not."""
    q = random(3, 4, 37, 8)
    torch._dynamo.reset()
    call = partial(lg.attend, encoding=lg.Ministral3Temperature())
    close(torch.compile(call, fullgraph=True, dynamic=True)(q, q, q), call(q, q, q), 1e-10)


OPERATORS = [name for name in torch._C._dispatch_get_all_op_names() if name.startswith("longitude::")]
assert {"longitude::toeplitz_attention", "longitude::toeplitz_attention_backward"} <= {*OPERATORS}


@pytest.mark.parametrize("name", OPERATORS)
def test_no_operator_takes_tangents_for_zeros(name):
    """Each operator registered with torch by hand, in whatever graph it is: carried forward, it says that it has no rule."""
    operator = getattr(torch.ops.longitude, name.removeprefix("longitude::")).default
    numbers = {"Tensor": lambda: random(1, 2, 3, 4), "bool": lambda: False, "int": lambda: 1, "float": lambda: 1.0}
    given = [numbers.get(str(a.type), lambda: None)() for a in operator._schema.arguments]
    tensors = [x for x in given if isinstance(x, torch.Tensor)]

    def call(*tensors):
        rest = iter(tensors)
        return operator(*(next(rest) if isinstance(x, torch.Tensor) else x for x in given))

    with pytest.raises(NotImplementedError):
        torch.func.jvp(call, tuple(tensors), tuple(tensors))


def test_an_exported_graph_is_no_constant():
    """It holds no operator of ours, which torch would take for one."""
    attend = attention(T5)

    class Attention(torch.nn.Module):
        def forward(self, q):
            return attend(q)

    q = random(1, 4, 7, 8)
    exported = torch.export.export(Attention(), (q,)).module()
    close(*(torch.func.jvp(call, (q,), (q,)) for call in (exported, attention(T5))))


def test_parts_of_several_lengths_and_of_a_loss(monkeypatch):
    """What autograd makes again in backward."""
    encoding = lg.Rotary(8, "half", scaling=lg.scaling.DynamicNTK(3, 8, follow="row"))
    q = random(1, 4, 7, 8)
    leaf = q.clone().requires_grad_()
    [want] = torch.autograd.grad(attention(encoding)(leaf).sin().sum(), leaf)
    close(torch.func.grad(lambda q: attention(encoding)(q).sin().sum())(q), want)
    monkeypatch.setattr(causal, "CHUNK_LOGITS", 20)
    head, targets = random(10, 8, seed=1), torch.arange(7)[None]
    of = lambda hidden: causal.next_token_loss(hidden, lambda x: x @ head.T, 10, targets)  # noqa: E731
    leaf = random(1, 7, 8, seed=2).requires_grad_()
    [want] = torch.autograd.grad(of(leaf), leaf)
    close(torch.func.grad(of)(leaf.detach()), want)


@pytest.mark.parametrize("encoding", [lg.ALiBi(4), T5], ids=["alibi", "t5"])
def test_gradients_of_gradients_are_right_or_refused(encoding):
    """Also where another path leads to the same leaf: never a part of them."""
    found = {}
    for backend in ("table", "chunked", "reference"):
        leaf = random(1, 4, 7, 8).requires_grad_()
        [first] = torch.autograd.grad((attention(encoding, backend)(leaf) * leaf).sum(), leaf, create_graph=True)
        if backend == "table":
            with pytest.raises(RuntimeError, match=r'gradients of gradients.*backend="reference" has them'):
                torch.autograd.grad(first.sin().sum(), leaf)
        else:
            [found[backend]] = torch.autograd.grad(first.sin().sum(), leaf)
    close(found["chunked"], found["reference"], 1e-10)


@TORCHS
@pytest.mark.filterwarnings("ignore:Attempted to insert a get_attr")
@pytest.mark.parametrize(
    "name",
    [
        "nope",
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("rope", "alibi", "rerope", "dual_chunk", "fire")),
    ],
)
def test_linearize_is_jvp(name):
    """torch.func.linearize records a call, in which no number can be read and in-place writes to a part are lost."""
    q, k, v, direction = (random(2, 4, 9, 8, seed=n) for n in range(4))
    places = torch.arange(9) + torch.tensor([[0], [3]])
    encoding = example(name)()
    for given in ({}, {"q_positions": places, "k_positions": places}):
        ours = partial(lg.attend, k=k, v=v, encoding=encoding, **given)
        close(torch.func.linearize(ours, q)[1](direction), torch.func.jvp(ours, (q,), (direction,))[1])
