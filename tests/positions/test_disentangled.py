"""deberta: transformers' DeBERTa, and the formula as a loop."""

import math

import pytest
import torch
from transformers import DebertaConfig, DebertaV2Config
from transformers.models.deberta.modeling_deberta import DisentangledSelfAttention as OfDeberta
from transformers.models.deberta_v2.modeling_deberta_v2 import DisentangledSelfAttention as OfDebertaV2

import longitude as lg
from longitude.positions.disentangled import Disentangled, log_bucket
from tests.support import by_head, close, gradients, random, refused

HEADS, WIDTH = 3, 8
SHAPE = {"hidden_size": HEADS * WIDTH, "num_attention_heads": HEADS, "relative_attention": True}
SHAPE |= {"pos_att_type": ["c2p", "p2c"], "attention_probs_dropout_prob": 0.0, "hidden_dropout_prob": 0.0}


def like(table: torch.Tensor, keys: torch.nn.Linear, queries: torch.nn.Linear, **options) -> Disentangled:
    """The encoding with the weights of theirs; the projection of keys has no bias in the first DeBERTa."""
    encoding = Disentangled(HEADS, WIDTH, HEADS * WIDTH, **options).double()
    with torch.no_grad():
        encoding.table.copy_(table)
        encoding.project_keys.weight.copy_(keys.weight)
        encoding.project_queries.load_state_dict(queries.state_dict())
    return encoding


@pytest.mark.parametrize("backend", ["reference", "chunked"])
@pytest.mark.parametrize(("length", "span", "farthest"), [(13, 16, None), (13, 4, 12), (29, 8, 20), (29, 5, None)])
def test_equals_deberta_v2(length: int, span: int, farthest: int | None, backend: str) -> None:
    """Also for offsets beyond the last bucket. Their scale is a root in float32, so they agree as far as that."""
    torch.manual_seed(0)
    buckets = {"position_buckets": span if farthest else -1, "max_relative_positions": farthest or span}
    theirs = OfDebertaV2(DebertaV2Config(**SHAPE, **buckets, share_att_key=False)).double().eval()
    torch.nn.init.zeros_(theirs.pos_key_proj.bias)
    x, table = random(2, length, HEADS * WIDTH), random(2 * span, HEADS * WIDTH, seed=1)
    ours = like(table, theirs.pos_key_proj, theirs.pos_query_proj, span=span, max_distance=farthest)
    real = torch.arange(length) < torch.tensor([[length], [length - 3]])  # the second row is padded
    want = theirs(x, real[:, None, :, None] & real[:, None, None], rel_embeddings=table)[0]
    q, k, v = (by_head(p(x), HEADS) for p in (theirs.query_proj, theirs.key_proj, theirs.value_proj))
    got = lg.attend(q, k, v, encoding=ours, mask=lg.Padding(real), backend=backend)
    close(got.transpose(1, 2).flatten(2)[real], want[real], atol=1e-7)


def test_equals_the_first_deberta() -> None:
    torch.manual_seed(0)
    theirs = OfDeberta(DebertaConfig(**SHAPE, max_relative_positions=16)).double().eval()
    x, table = random(2, 11, HEADS * WIDTH), random(32, HEADS * WIDTH, seed=1)
    ours = like(table, theirs.pos_proj, theirs.pos_q_proj, span=16)
    offsets = (torch.arange(11)[:, None] - torch.arange(11))[None]
    want = theirs(x, torch.ones(2, 1, 11, 11, dtype=torch.bool), relative_pos=offsets, rel_embeddings=table)[0]
    q, k, v = by_head(theirs.in_proj(x), HEADS).chunk(3, -1)
    q, v = (z + by_head(bias[None, None], HEADS) for z, bias in ((q, theirs.q_bias), (v, theirs.v_bias)))
    close(lg.attend(q, k, v, encoding=ours, mask=lg.NoMask()).transpose(1, 2).flatten(2), want, atol=1e-7)


@pytest.mark.parametrize("span", [3, 40])
def test_written_out_with_gradients(span: int) -> None:
    """Causal, two heads of keys for four of queries, at positions with a gap; with fewer vectors than rows, and with more."""
    encoding = lg.testing.example("deberta", span=span)()
    positions = torch.tensor([0, 1, 2, 5, 6, 20, 21])
    q, k, v = (random(2, heads, 7, 8, seed=heads).requires_grad_() for heads in (4, 2, 2))
    rows = {
        name: project(encoding.table).view(2 * span, 4, 8)
        for name, project in (("keys", encoding.project_keys), ("queries", encoding.project_queries))
    }
    want = torch.zeros(2, 4, 7, 8, dtype=torch.float64)
    for head in range(4):
        for i in range(7):
            scores = []
            for j in range(i + 1):
                row = int((positions[i] - positions[j]).clamp(-span, span - 1)) + span
                key = k[:, head // 2, j]
                both = q[:, head, i] * (key + rows["keys"][row, head]) + key * rows["queries"][row, head]
                scores.append(both.sum(-1) / math.sqrt(3 * 8))
            weights = torch.stack(scores, -1).softmax(-1)
            want[:, head, i] = torch.einsum("bj,bjd->bd", weights, v[:, head // 2, : i + 1])
    tensors = [q, k, v, *encoding.parameters()]
    for backend in ("reference", "chunked"):
        got = lg.attend(q, k, v, encoding=encoding, q_positions=positions, k_positions=positions, backend=backend)
        close(got, want)
        for ours, loop in zip(gradients(got, tensors), gradients(want, tensors), strict=True):
            close(ours, loop)


def test_buckets_of_v2() -> None:
    """DeBERTa v2, 256 buckets for 512 offsets: one each up to 128, the last from 506 on."""
    offset = torch.tensor([0, 1, 127, 128, 129, 505, 506, 511, -129, -511])
    assert log_bucket(offset, 256, 512).tolist() == [0, 1, 127, 128, 129, 254, 255, 255, -129, -255]


def test_refuses_buckets_that_are_none() -> None:
    with refused("span=16", "max_distance=9"):
        Disentangled(2, 8, 16, span=16, max_distance=9)
