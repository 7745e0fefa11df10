"""RePo: the formula pair by pair, the published layer, and what its positions are made of."""

import torch
import torch.nn.functional as F

import longitude as lg
from longitude.testing import fill
from tests.support import by_head, close, random, refused_calls

DIM, LENGTH = 16, 23


def layer(kv_heads=4, **options):
    return fill(lg.mixer("repo", dim=DIM, num_heads=4, num_kv_heads=kv_heads, **options).double(), std=0.4)


def by_pairs(own, x, pair):
    """One document [L, dim]: pairs as complex numbers, turned by the difference of the positions of query and key."""
    heads = (own.q_proj, 4), (own.k_proj, own.num_kv_heads), (own.v_proj, own.num_kv_heads)
    q, k, v = (by_head(project(x)[None], n)[0] for project, n in heads)
    z = F.linear(F.silu(x @ own.position_gate.weight.T) * (x @ own.position_content.weight.T), own.position_out.weight)
    out = []
    for h in range(4):
        of = h * own.num_kv_heads // 4
        scores = 0
        for number, (a, b) in enumerate(pair):
            turn = torch.exp(1j * 100.0 ** -(number / 2) * (z[:, None, of] - z[None, :, of]))
            query, key = torch.complex(q[h][:, a], q[h][:, b]), torch.complex(k[of][:, a], -k[of][:, b])
            scores = scores + (query[:, None] * turn * key).real
        seen = torch.ones(len(x), len(x)).tril().bool()
        out.append((0.5 * scores).masked_fill(~seen, -torch.inf).softmax(-1) @ v[of])
    return own.o_proj(torch.cat(out, -1))


def test_it_is_the_formula_pair_by_pair_with_its_gradients():
    """With as many heads of keys as of queries, and with fewer; in both layouts; past any training, as nothing is counted."""
    for kv_heads, layout, pair in ((4, "half", [(0, 2), (1, 3)]), (2, "interleaved", [(0, 1), (2, 3)])):
        own, x = layer(kv_heads, layout=layout, base=100.0), random(1, LENGTH, DIM)
        got, want = own(x), by_pairs(own, x[0], pair)[None]
        close(got, want)
        close(*(torch.autograd.grad(y.square().sum(), [*own.parameters()]) for y in (got, want)), 1e-10)


def test_equal_positions_are_no_positions():
    own, plain, x = layer(), lg.MultiHeadAttention(DIM, 4).double(), random(2, LENGTH, DIM)
    plain.load_state_dict({name: p for name, p in own.state_dict().items() if "position" not in name})
    assert (own(x) - plain(x)).abs().max() > 1e-2
    torch.nn.init.zeros_(own.position_out.weight)
    close(own(x), plain(x))


MODEL = {"hidden_size": 16, "num_attention_heads": 2, "mixer": "repo", "encoding": "rope"}
test_refusals = refused_calls(
    [
        (lambda: lg.LongitudeForCausalLM(lg.LongitudeConfig(**MODEL)), "RePoAttention"),
        (lambda: layer()(random(1, 5, DIM), encoding=lg.Rotary(4, "half")), "RePoAttention"),
        (lambda: layer(head_dim=3), "rope"),
    ]
)
