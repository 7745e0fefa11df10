"""Native sparse attention: the paper's equations as loops, an implementation of others, and what its options and cache keep."""

import pytest
import torch

import longitude as lg
from longitude.attention.layers.sparse import Rule, Tokens, chosen, over_blocks, over_chosen, summaries
from longitude.testing import fill
from tests.support import close, golden, random, refused

DIM, HEADS, KV, WIDTH = 16, 4, 2, 4
SMALL = {"block": 4, "stride": 2, "select_block": 6, "select_count": 4, "window": 5, "hidden": 7}


def layer(seed=0, **options):
    made = lg.attention.NativeSparseAttention(DIM, HEADS, KV, **{**SMALL, **options}).double()
    return fill(made, seed, std=0.4)


def attention(q, keys, values):
    """Softmax of one query over lists of keys and values; zeros over none."""
    if not keys:
        return torch.zeros_like(q)
    weights = torch.stack([WIDTH**-0.5 * (q * key).sum() for key in keys]).softmax(0)
    return sum(w * v for w, v in zip(weights, values, strict=True))


def by_loops(own, x, rotate):
    """Equations 5 to 12 for one document [L, dim], query by query. rotate(x, position)."""
    block, stride, size, count, window = (SMALL[name] for name in list(SMALL)[:5])
    q = own.q_proj(x).unflatten(-1, (HEADS, WIDTH))
    k, v = (project(x).unflatten(-1, (3, KV, WIDTH)) for project in (own.k_proj, own.v_proj))
    gates = own.g_proj(x).unflatten(-1, (HEADS, 3)).sigmoid()
    out = torch.zeros_like(q)

    def summary(of, tokens):
        return torch.relu((tokens + of.places).flatten() @ of.up) @ of.down

    for t in range(len(x)):
        for g in range(KV):
            heads = range(g * HEADS // KV, (g + 1) * HEADS // KV)
            begins = [i * stride for i in range(len(x)) if i * stride + block - 1 <= t]
            keys = [summary(own.key_summary, k[b : b + block, 0, g]) for b in begins]
            values = [summary(own.value_summary, v[b : b + block, 0, g]) for b in begins]
            weights = torch.zeros(len(x))
            for h in heads:
                if keys:
                    p = torch.stack([WIDTH**-0.5 * (q[t, h] * key).sum() for key in keys]).softmax(0)
                    for j in range(t // size + 1):
                        for m in range(size // stride):
                            for n in range(block // stride):
                                i = (
                                    size // stride * j + m - n
                                )  # a stride of block j, in the summary that began n before
                                weights[j] += p[i] if 0 <= i < len(p) else 0
            blocks = range(t // size + 1)
            first = [j for j in blocks if j in (0, t // size - 1, t // size)]
            rest = sorted((j for j in blocks if j not in first), key=lambda j: -weights[j])
            picked = (first + rest)[:count]
            near = [j for j in range(t + 1) if j > t - window]
            fine = [j for j in range(t + 1) if j // size in picked]
            for h in heads:
                branches = [attention(q[t, h], keys, values)]
                for n, tokens in ((1, fine), (2, near)):
                    rotated = [rotate(k[j, n, g], j) for j in tokens]
                    branches.append(attention(rotate(q[t, h], t), rotated, [v[j, n, g] for j in tokens]))
                out[t, h] = sum(gates[t, h, n] * branch for n, branch in enumerate(branches))
    return own.o_proj(out.flatten(1))


@pytest.mark.one_in(2)
@pytest.mark.parametrize("rotated", [pytest.param(True, marks=pytest.mark.slow), False])
def test_it_is_the_equations(rotated):
    """In float64, gradients too; with a rotation that acts on chosen blocks and the window alone."""
    own, x = layer(), random(1, 40, DIM)
    rope = lg.Rotary(WIDTH, "half")
    rotate = lambda y, at: rope.queries(y[None, None, None], rope.prepare(torch.tensor([at]), None, y.dtype))[0, 0, 0]  # noqa: E731
    got = own(x, encoding=rope if rotated else None)
    want = by_loops(own, x[0], rotate if rotated else lambda y, at: y)[None]
    close(got, want, 1e-11)
    parameters, direction = [*own.parameters()], random(*got.shape, seed=5)
    for ours, theirs in zip(*(torch.autograd.grad(y, parameters, direction) for y in (got, want)), strict=True):
        close(ours, theirs, 1e-10)


def test_golden():
    """What flash-linear-attention chooses, and the sum of both branches, in float32."""
    table = golden("sparse")["small"]
    q, k, v, gates, want = (torch.tensor(table[name], dtype=torch.float64) for name in ("q", "k", "v", "gates", "out"))
    size, length = table["block"], len(q)
    rule = Rule(size, size, size, table["count"], 1.0)
    tokens, q = Tokens.of(None, length, q.device), q.transpose(0, 1)[None]
    k, v = k[None, None], v[None, None]
    average = lambda x: x.mean(-2)  # noqa: E731
    coarse, chances = over_blocks(rule, tokens, q, *summaries(rule, tokens, 0, (k, v), (average, average)))
    blocks = chosen(rule, tokens, chances)
    assert [row.nonzero().flatten().tolist() for row in blocks[0, 0]] == table["chosen"]
    assert max(map(len, table["chosen"])) == table["count"]
    branches = coarse, over_chosen(rule, tokens, q, k, v, blocks)
    out = sum(gate.T[..., None] * branch[0] for gate, branch in zip(gates, branches, strict=True))
    close(out.transpose(0, 1), want, 2e-6)


@pytest.mark.parametrize("branch", [1, 2])
def test_all_blocks_or_an_open_window_are_full_attention(branch):
    """Where the other branches have no values and gates are 1/2."""
    own, full = layer(select_count=10, window=40), lg.MultiHeadAttention(DIM, HEADS, KV).double()
    x, rope = random(2, 33, DIM), lg.Rotary(WIDTH, "half")
    k, v = (project.weight.detach().unflatten(0, (3, -1)) for project in (own.k_proj, own.v_proj))
    weights = {
        "q_proj": own.q_proj.weight,
        "k_proj": k[branch],
        "v_proj": v[branch].clone(),
        "o_proj": own.o_proj.weight,
    }
    full.load_state_dict({f"{name}.weight": weight for name, weight in weights.items()})
    with torch.no_grad():
        for zero in (own.g_proj.weight, own.value_summary.down, v[3 - branch]):
            zero.zero_()
    close(own(x, encoding=rope), 0.5 * full(x, encoding=rope), 1e-12)


def test_a_block_of_one_document_is_not_that_of_another():
    """Blocks are counted from the begin of each document, whatever comes before, and padding inside one does not count."""
    own, x = layer(), random(1, 60, DIM)
    documents = torch.tensor([[7] * 13 + [-1] * 3 + [2] * 40 + [-1] * 4])
    documents[0, 25:27] = -1
    places = torch.cat(
        [torch.arange(13), torch.zeros(3), torch.arange(9), torch.zeros(2), torch.arange(9, 38), torch.zeros(4)]
    )
    packed = own(x, positions=places.long(), documents=documents, encoding=lg.Rotary(WIDTH, "half"))
    for number in (7, 2):
        there = documents[0] == number
        tokens = Tokens.of(documents, 60, x.device)
        assert tokens.number[0, there].tolist() == [*range(int(there.sum()))]
    alone = own(x[:, :13], encoding=lg.Rotary(WIDTH, "half"))
    close(packed[:, :13], alone, 1e-12)


def test_cache_holds_all_tokens_and_a_summary_for_each_block():
    own, x = layer(), random(1, 21, DIM)
    cache = own.cache_layer()
    for part in x.split([9, 1, 11], 1):
        own(part, cache=cache)
    assert cache.keys.shape == (1, 3 * KV, 21, WIDTH)
    there = cache.columns["block_keys"].abs().sum((0, 1, 3)) > 0
    assert there.nonzero().flatten().tolist() == [*range(3, 21, 2)]


def test_products_grow_by_summaries_alone():
    """Beyond the chosen blocks and the window, a token's work grows by 1/stride of a key's."""
    own = lg.attention.NativeSparseAttention(256, 4)
    assert own.products(20_000) - own.products(10_000) == 2 * 10_000 / 16 * 256
    full = lg.MultiHeadAttention(256, 4)
    assert own.products(65_536) < 0.2 * full.products(65_536)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: layer(stride=3), ("block=4", "stride=3", "select_block=6", "select_count=4")),
        (lambda: layer(select_block=2), ("select_block",)),
        (lambda: layer(select_count=2), ("select_count", "3")),
        (lambda: layer(window=0), ("window",)),
        (lambda: layer(encoding=lg.ALiBi(HEADS)), ("ALiBi", "NativeSparseAttention")),
        (lambda: layer(encoding=lg.encoding("xpos", head_dim=WIDTH, layout="half")), ("XPos",)),
        (lambda: layer()(torch.zeros(1, 2, DIM).double(), mask=lg.Window(3)), ("mask", "NativeSparseAttention")),
        (lambda: layer()(torch.zeros(1, 2, DIM), cache=lg.MultiHeadAttention(16, 4).cache_layer()), ["SparseCacheLayer"]),
        (lambda: layer()(torch.zeros(1, 2, DIM).double(), memory=torch.zeros(1, 2, DIM)), ("memory",)),
    ],
)  # fmt: skip
def test_refused(make, words):
    with refused(*words):
        make()
