"""Indexed attention: the formula key by key, implementations of others, ties, and what its options and cache keep."""

import math
from types import SimpleNamespace

import pytest
import torch

import longitude as lg
from longitude.attention.layers import indexed
from longitude.attention.layers.base import checked_call
from longitude.attention.layers.indexed import highest
from longitude.attention.masks import from_tensor
from longitude.attention.mixer import MixerInputs
from longitude.attention.short_conv import convolved
from longitude.positions.composed import compose
from longitude.testing import fill
from tests.support import by_head, close, from_fla, random, refused_calls

DIM, LENGTH, TOP = 16, 40, 5


def layer(seed=0, **options):
    """16 heads of the indexer, so that no score of random numbers is exactly 0."""
    options = {"k_top": TOP, "index_heads": 16, "index_dim": 8, **options}
    return fill(lg.mixer("indexed", dim=DIM, num_heads=4, num_kv_heads=2, **options).double(), seed, std=0.4)


def chosen(own, x):
    x, call, _ = checked_call(own, x, MixerInputs(lg.Causal(), 0))
    keys = own.columns_of(x, call, compose(None), None)[0]["index_keys"]
    return own.chosen(x, x, keys, call, x.shape[1])[0]


def by_loops(own, x):
    """One document [L, dim] without rotations: the keys of each query by their scores, of equal ones the first."""
    q, k, v = (by_head(project(x)[None], n)[0] for project, n in ((own.q_proj, 4), (own.k_proj, 2), (own.v_proj, 2)))
    index_q, index_k = own.index_q(x).unflatten(-1, (16, 8)), own.index_norm(own.index_k(x))
    weights, out = own.index_w(x) / 4, []
    for i in range(len(x)):
        scores = [sum(w * (8**-0.5 * one @ index_k[j]).relu() for w, one in zip(weights[i], index_q[i], strict=True)).item()
                  for j in range(i + 1)]  # fmt: skip
        keys = sorted(range(i + 1), key=lambda j: (-scores[j], j))[:TOP]
        heads = [(0.5 * k[h // 2, keys] @ q[h, i]).softmax(0) @ v[h // 2, keys] for h in range(4)]
        out.append(torch.cat(heads))
    return own.o_proj(torch.stack(out))


@pytest.mark.parametrize("rows", [pytest.param(256, marks=pytest.mark.slow), 11])
def test_it_is_the_formula_key_by_key(rows, monkeypatch):
    """In float64, in one block of queries and in several, with the gradients of all but the indexer, which has none."""
    monkeypatch.setattr(indexed, "ROWS", rows)
    own, x = layer(index_rotation=None), random(1, LENGTH, DIM)
    got, want = own(x), by_loops(own, x[0])[None]
    close(got, want)
    main = [p for name, p in own.named_parameters() if "index" not in name]
    close(*(torch.autograd.grad(y.square().sum(), main, retain_graph=True) for y in (got, want)), 1e-11)
    close(torch.autograd.grad(got.sum(), own.index_q.weight)[0], torch.zeros(128, DIM).double())


def test_it_is_the_function_of_flash_linear_attention():
    """In float32, values and gradients of queries, keys and values."""
    naive = from_fla("dsa.naive", "naive_dsa")
    own, x = layer(index_rotation=None).float(), random(2, LENGTH, DIM, dtype=torch.float32)
    heads = [project(x).unflatten(-1, (n, 4)) for project, n in ((own.q_proj, 4), (own.k_proj, 2), (own.v_proj, 2))]
    index_q, index_k = own.index_q(x).unflatten(-1, (16, 8)), own.index_norm(own.index_k(x))
    want = own.o_proj(naive(*heads, index_q, index_k, own.index_w(x), topk=TOP).flatten(2))
    close(own(x), want, 2e-6)
    weights = own.q_proj.weight, own.k_proj.weight, own.v_proj.weight
    close(*(torch.autograd.grad(y.square().sum(), weights) for y in (own(x), want)), 1e-4, 1e-5)


@pytest.mark.parametrize(
    ("family", "name", "rotation"),
    [("deepseek_v32", "DeepseekV32Indexer", "half"), ("glm_moe_dsa", "GlmMoeDsaIndexer", "interleaved")],
)
def test_it_chooses_as_the_indexers_of_transformers(family, name, rotation):
    """With their rotation of a part of each head. Theirs has queries of a narrower vector, here of the tokens."""
    module = pytest.importorskip(f"transformers.models.{family}.modeling_{family}")
    config = SimpleNamespace(
        hidden_size=DIM, index_n_heads=16, index_head_dim=8, qk_rope_head_dim=4, index_topk=TOP, q_lora_rank=DIM
    )
    own, x = layer(index_rotation=rotation, index_rotary_dim=4, index_base=100.0), random(2, LENGTH, DIM)
    theirs = getattr(module, name)(config, 0).double()
    pairs = {"wq_b": own.index_q, "wk": own.index_k, "weights_proj": own.index_w, "k_norm": own.index_norm}
    theirs.load_state_dict({f"{a}.{part}": p for a, b in pairs.items() for part, p in b.named_parameters()})
    angles = torch.arange(LENGTH)[:, None] * 100.0 ** -torch.tensor([0, 0.5, 0, 0.5])
    mask = torch.where(torch.ones(LENGTH, LENGTH).tril().bool(), 0.0, -torch.inf)[None]
    top = theirs(x, x, (angles.cos()[None].double(), angles.sin()[None].double()), mask, None)
    want = torch.zeros(2, LENGTH, LENGTH, dtype=torch.bool).scatter(-1, top.long(), True) & (mask == 0)
    assert torch.equal(chosen(own, x), want)
    other = layer(index_rotation=None)
    assert not torch.equal(chosen(other, x), want)


def test_of_equal_scores_the_earlier_key_is_chosen():
    scores = torch.tensor([[[0.0, 2.0, 0.0, -0.0, 1.0, 0.0]]])
    seen = highest(scores, torch.tensor([True, True, True, True, True, False]), 4)
    assert seen[0, 0].nonzero().flatten().tolist() == [0, 1, 2, 4]
    few = highest(scores, torch.tensor([False, False, True, True, False, False]), 4)
    assert few[0, 0].nonzero().flatten().tolist() == [2, 3]


def test_with_keys_enough_it_is_full_attention():
    own, full, x = layer(k_top=LENGTH), lg.MultiHeadAttention(DIM, 4, 2).double(), random(2, LENGTH, DIM)
    full.load_state_dict({name: p for name, p in own.state_dict().items() if "index" not in name})
    close(own(x, encoding=lg.ALiBi(4)), full(x, encoding=lg.ALiBi(4)))
    assert (layer()(x) - full(x)).abs().max() > 1e-3


@torch.no_grad()
def test_layers_of_one_forward_choose_for_themselves():
    layers, x, inputs = [layer(seed) for seed in (0, 1)], random(2, LENGTH, DIM), MixerInputs(lg.Causal())
    close([own(x, inputs) for own in layers], [own(x) for own in layers])


# ---- over latents ----------------------------------------------------------------------------------------------------
def over_latents(seed=0, **options):
    options = {"k_top": TOP, "index_heads": 16, "index_dim": 8, "kv_rank": 6, "q_rank": 10, **options}
    return fill(lg.mixer("indexed_latent", dim=DIM, num_heads=4, **options).double(), seed, std=0.4)


@pytest.mark.parametrize("route", ["expanded", "absorbed"])
@pytest.mark.parametrize("q_rank", [None, 10])
def test_over_latents_it_is_latent_attention_to_the_chosen_keys(q_rank, route):
    """Under a mask of the keys that loops choose by the formula, from the latents of queries."""
    own, x = over_latents(q_rank=q_rank, route=route, index_rotation=None), random(2, LENGTH, DIM)
    latent = lg.mixer("latent", dim=DIM, num_heads=4, kv_rank=6, q_rank=q_rank, route=route).double()
    latent.load_state_dict({name: p for name, p in own.state_dict().items() if "index" not in name})
    source = x if q_rank is None else own.q_norm(own.q_down(x))
    scores = torch.einsum("bihd,bjd->bihj", own.index_q(source).unflatten(-1, (16, 8)), own.index_norm(own.index_k(x)))
    scores = (scores.relu() * own.index_w(x)[..., None] / 4 / 8**0.5).sum(2)
    seen = torch.zeros(2, LENGTH, LENGTH, dtype=torch.bool)
    for b in range(2):
        for i in range(LENGTH):
            seen[b, i, sorted(range(i + 1), key=lambda j: -scores[b, i, j].item())[:TOP]] = True
    close(own(x), latent(x, mask=from_tensor(seen, 2, LENGTH, LENGTH)))
    assert (own(x) - latent(x)).abs().max() > 1e-3


# ---- the loss that trains it -----------------------------------------------------------------------------------------
def test_the_loss_is_the_divergence_key_by_key():
    """Sums over single keys; its gradient is softmax(I) - p; a query without keys has 0 of both."""
    scores, weights = random(2, 7, 9, seed=1).requires_grad_(), random(2, 4, 7, 9, seed=2).exp()
    seen = torch.rand(2, 7, 9, generator=torch.Generator().manual_seed(3)) < 0.6
    seen[0, 3], seen[1, 2] = False, torch.arange(9) == 4
    weights = weights.masked_fill(~seen[:, None], 0.0)
    got = lg.attention.indexer_loss(scores.masked_fill(~seen, -torch.inf), weights)
    [gradient] = torch.autograd.grad(got.sum(), scores)
    for b in range(2):
        for t in range(7):
            keys = seen[b, t].nonzero().flatten().tolist()
            p = {j: weights[b, :, t, j].sum().item() for j in keys}
            q = {j: math.exp(scores[b, t, j].item()) for j in keys}
            p, q = ({j: n / sum(by_key.values()) for j, n in by_key.items()} for by_key in (p, q))
            close(got[b, t], torch.tensor(sum(p[j] * math.log(p[j] / q[j]) for j in keys), dtype=torch.float64), 1e-12)
            want = [q.get(j, 0) - p.get(j, 0) for j in range(9)]
            close(gradient[b, t], torch.tensor(want, dtype=torch.float64), 1e-12)


@pytest.mark.parametrize(("make", "dense"), [pytest.param(over_latents, True, marks=pytest.mark.slow), (layer, False)])
def test_a_layers_loss_trains_its_indexer_alone(make, dense):
    own, x = make(), random(2, LENGTH, DIM).requires_grad_()
    rope, own.dropout = lg.Rotary(own.rope_dim if make is over_latents else 4, "half"), 0.5
    own.train().index_norm.eval()
    found = own.indexer_loss(x, encoding=rope, dense=dense)
    assert own.training and not own.index_norm.training and own.k_top == TOP and found > 0.01
    gradients = torch.autograd.grad(found, [x, *own.parameters()], allow_unused=True)[1:]
    moved = {name for (name, _), g in zip(own.named_parameters(), gradients, strict=True) if g is not None and g.any()}
    # The bias of the norm adds the same to all keys of a query, but relu is not linear.
    assert moved == {name for name, _ in own.named_parameters() if name.startswith("index_")}
    optimizer = torch.optim.Adam(own.parameters(), 0.04)
    for _ in range(30):
        optimizer.zero_grad()
        own.indexer_loss(x, encoding=rope, dense=dense).backward()
        optimizer.step()
    assert own.indexer_loss(x, encoding=rope, dense=dense) < 0.7 * found


def test_a_layers_loss_has_the_weights_that_it_attends_by():
    own, x = layer(index_rotation=None), random(1, LENGTH, DIM)
    own.k_top = LENGTH
    weights = own(x, return_weights=True)[1]
    own.k_top = TOP
    x, call, _ = checked_call(own, x, MixerInputs(lg.Causal(), 0))
    [(scores, allowed)] = own.index_scores(x, x, own.index_keys(x, call), call, LENGTH)
    terms = own.index_q(x).unflatten(-1, (16, 8)) @ own.index_norm(own.index_k(x)).mT[:, None] * 8**-0.5
    close(scores, (terms.relu() * own.index_w(x)[..., None] / 16**0.5).sum(2), 1e-12)
    want = lg.attention.indexer_loss(scores.masked_fill(~allowed, -torch.inf), weights).mean()
    close(own.indexer_loss(x), want, 1e-12)
    few = scores.masked_fill(~chosen(own, x), -torch.inf)
    want = lg.attention.indexer_loss(few, own(x, return_weights=True)[1]).mean()
    close(own.indexer_loss(x, dense=False), want, 1e-12)


@pytest.mark.parametrize("dense", [True, False])
def test_packed_and_padded_losses_are_those_of_each_document(dense):
    own, x = layer(index_rotation=None), random(1, LENGTH, DIM)
    documents = torch.tensor([0] * 17 + [1] * 19 + [-1] * 4)[None]
    each = [own.indexer_loss(part, dense=dense) * part.shape[1] for part in (x[:, :17], x[:, 17:36])]
    x[:, 36:] = torch.nan
    close(own.indexer_loss(x, documents=documents, dense=dense), sum(each) / 36, 1e-12)


@pytest.mark.parametrize("dense", [True, False])
def test_the_loss_reads_tokens_behind_the_convolution_of_the_input(dense):
    own, x = layer(short_conv="input"), random(2, LENGTH, DIM)
    plain = layer()
    plain.load_state_dict({name: p for name, p in own.state_dict().items() if name != "input_conv.weight"})
    y = x + convolved(own.input_conv, x)[0]
    close(own(x), plain(y), 1e-12)
    close(own.indexer_loss(x, dense=dense), plain.indexer_loss(y, dense=dense), 1e-12)


def test_a_models_layers_have_losses():
    config = lg.LongitudeConfig(
        hidden_size=16, num_attention_heads=2, num_hidden_layers=2, mixer={"name": "indexed", "k_top": 3}
    )
    model, losses = lg.LongitudeForCausalLM(config), []
    for block in model.model.layers:
        block.mixer.register_forward_pre_hook(lambda mixer, inputs: losses.append(mixer.indexer_loss(*inputs)))
    model(torch.arange(20)[None])
    assert len(losses) == 2 and all(loss.requires_grad and loss > 0 for loss in losses)


test_refusals = refused_calls(
    [
        (lambda: lg.attention.indexer_loss(torch.zeros(3, 3, 3), torch.ones(3, 3, 3)), "[B, H, L, N]", "[3, 3, 3]"),
        (lambda: lg.attention.indexer_loss(torch.zeros(2, 3, 3), torch.ones(1, 4, 3, 3)), "[1, 4, 3, 3]"),
        (lambda: layer(index_rotation=None, index_base=5.0), "index_rotation=None"),
        (lambda: layer(index_rotation=None, index_rotary_dim=2), "index_rotation=None"),
        (lambda: layer().indexer_loss(random(1, 4, DIM), dense="no"), "dense", "no"),
    ]
)
