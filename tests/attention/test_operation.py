"""attend() from outside: against torch's own attention, by hand, and its every refusal."""

import math
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from transformers import LlamaConfig
from transformers.masking_utils import create_causal_mask

import longitude as lg
from longitude.attention.backends import BACKENDS, chunked
from tests.support import GENERAL, built, close, gradients, heads, random, refused, refused_calls


def qkv(rows, keys, kv_heads=4, dtype=torch.float64):
    """q, k, v that take gradients."""
    q, k, v = heads(max(rows, keys), num_kv_heads=kv_heads, dtype=dtype)
    return [x.requires_grad_() for x in (q[:, :, :rows], k[:, :, :keys], v[:, :, :keys])]


def same(ours, theirs, inputs, tolerance=1e-12):
    """Equal outputs, and equal gradients of the inputs."""
    close(*([out, *gradients(out, inputs)] for out in (ours, theirs)), atol=tolerance)


# ---- without an encoding: torch's own attention -----------------------------------------------------------------------
@pytest.mark.parametrize("backend", ["auto", *GENERAL])
@pytest.mark.parametrize(("length", "scale"), [(1, None), (63, 0.7)])
def test_equals_torch(backend, length, scale):
    q, k, v = inputs = qkv(length, length)
    ours = lg.attend(q, k, v, scale=scale, backend=backend)
    same(ours, F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale), inputs)
    ours = lg.attend(q, k, v, scale=scale, mask=lg.NoMask(), backend=backend)
    same(ours, F.scaled_dot_product_attention(q, k, v, scale=scale), inputs)


@pytest.mark.parametrize("encoding", [None, lg.ALiBi(4), lg.T5Bias(4)], ids=["plain", "alibi", "t5"])
@torch.no_grad()
def test_autocast_changes_nothing(encoding):
    """The dtype of q is the dtype of the answer, whichever backend gives it."""
    q, k, v = qkv(9, 9, dtype=torch.float32)
    for backend in ("auto", *GENERAL):
        plain = lg.attend(q, k, v, encoding=encoding, backend=backend)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            same = lg.attend(q, k, v, encoding=encoding, backend=backend)
        assert same.dtype == torch.float32
        torch.testing.assert_close(same, plain)  # float32 tolerance: bfloat16 would be thousands of times off


@torch.no_grad()
def test_a_formula_that_no_backend_knows_is_not_taken_for_one_that_some_do():
    """The choice of a backend is kept for calls alike: FIRE's formula is not like any function of both positions."""
    inputs, fire = qkv(40, 40), lg.Fire(4).double()
    lg.attend(*inputs, encoding=fire)

    class Function(lg.Encoding):
        def terms(self, context):
            (term,) = fire.terms(context)
            return (lg.terms.PairBias(lambda i, j: 2 * term.at(i, j), term.numbers),)

    encoding = Function()
    close(lg.attend(*inputs, encoding=encoding), lg.attend(*inputs, encoding=encoding, backend="reference"))


# ---- weights and dropout ---------------------------------------------------------------------------------------------
@torch.no_grad()
def test_a_remembered_choice_is_of_the_same_dropout():
    q, k, v = (random(1, 4, 37, 8, seed=n) for n in range(3))
    plain, dropped = (lg.attend(q, k, v, encoding=lg.ALiBi(num_heads=4), dropout=share) for share in (0.0, 0.5))
    assert not torch.allclose(dropped, plain)


def test_weights_after_dropout_are_those_that_make_the_output():
    q, k, v = qkv(40, 40)
    out, weights = lg.attend(q, k, v, dropout=0.3, return_weights=True)
    _, kept = lg.attend(q, k, v, return_weights=True)
    close(weights, torch.where(weights == 0, 0.0, kept / 0.7))
    close(out, weights @ v)


@pytest.mark.parametrize("name", ["rope", "shaw", "alibi"])
def test_weights_are_on_the_way_to_the_output_and_a_gradient_of_nan_stays_in_its_document(name):
    inputs, documents = qkv(12, 12), torch.tensor([[0] * 5 + [1] * 7] * 2)
    encoding = built(name, {"num_heads": 4, "head_dim": 8})
    mask = lg.Causal() & lg.Documents(documents)
    out, weights = lg.attend(*inputs, encoding=encoding, mask=mask, return_weights=True)
    [of_weights] = torch.autograd.grad(out.sum(), weights, retain_graph=True)
    assert bool(of_weights.any())
    lost = torch.zeros_like(weights)
    lost[:, :, 2] = math.nan
    for each in torch.autograd.grad(weights, inputs[:2], lost):
        assert bool(each[:, :, 5:].isfinite().all())


# ---- positions -------------------------------------------------------------------------------------------------------
ROPE = lg.Rotary(8, layout="interleaved")


@pytest.mark.parametrize("encoding", [ROPE, lg.Fire(4).double()], ids=["rope", "fire"])
@pytest.mark.parametrize("backend", ["auto", "chunked"])
def test_an_int_is_the_positions_that_count_from_it(encoding, backend):
    """What is not given follows: queries are the last of the keys."""
    inputs, rows, keys = qkv(5, 12), torch.arange(107, 112), torch.arange(100, 112)

    def attend(**positions):
        return lg.attend(*inputs, encoding=encoding, **positions, backend=backend)

    one = attend(q_positions=107, k_positions=100)
    tensors = [{"q_positions": q, "k_positions": k} for q, k in ((rows, keys), (rows[None], keys.expand(2, -1)))]
    for given in (*tensors, {"q_positions": 107}, {"k_positions": 100}, {"k_positions": keys}):
        same(attend(**given), one, inputs)
    same(attend(), attend(q_positions=7, k_positions=0), inputs)


# ---- composition -----------------------------------------------------------------------------------------------------
def test_rope_and_forgetting_by_hand():
    torch.manual_seed(0)
    fox = lg.FoX(dim=16, num_heads=4).double()
    x, (q, k, v) = random(2, 11, 16, seed=4), qkv(11, 11)
    composed = lg.Composed([ROPE, fox])
    inputs = [q, k, v, *fox.parameters()]
    ours = lg.attend(q, k, v, encoding=[ROPE, fox], context=composed.context(x)[0])

    angle = torch.arange(11.0, dtype=torch.float64)[:, None] * 10_000.0 ** (-torch.arange(0, 8, 2).double() / 8)
    rotation = torch.polar(torch.ones_like(angle), angle)
    q, k = (torch.view_as_real(torch.view_as_complex(y.unflatten(-1, (4, 2))) * rotation).flatten(-2) for y in (q, k))
    log_f = F.logsigmoid(x @ fox.forget.weight.T + fox.forget.bias).transpose(1, 2)
    scores = q @ k.mT / math.sqrt(8)
    i, j = torch.arange(11)[:, None], torch.arange(11)
    for t in range(11):  # decay from key j to query i: log f of the tokens after j, up to i
        scores = scores + log_f[:, :, t, None, None] * ((j < t) & (t <= i))
    theirs = scores.masked_fill(j > i, -math.inf).softmax(-1) @ v
    same(ours, theirs, inputs)


# ---- softcap ---------------------------------------------------------------------------------------------------------
CAP = 0.7


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", ["nope", "t5"])
def test_products_are_capped_and_biases_are_not(name, backend):
    """Or the backend declines, and explain says the same."""
    encoding, (q, k, v) = built(name, {"num_heads": 4, "head_dim": 8}), qkv(5, 9, 2)
    i, j = torch.arange(4, 9)[:, None], torch.arange(9)
    options = {"encoding": encoding, "mask": lg.Window(6), "softcap": CAP}
    (verdict,) = (v for v in lg.explain(q, k, v, **options) if v.backend == backend)
    if verdict.refusal is not None:
        assert "Softcap" in verdict.refusal or backend not in GENERAL
        with refused(repr(backend), "'reference'"):
            lg.attend(q, k, v, **options, backend=backend)
        return
    k_, v_ = (x.repeat_interleave(2, 1) for x in (k, v))
    scores = CAP * torch.tanh(q @ k_.mT / math.sqrt(8) / CAP)
    scores = scores if name == "nope" else scores + encoding.bias(i[:, 0], j)
    theirs = scores.masked_fill((j > i) | (j <= i - 6), -math.inf).softmax(-1) @ v_
    same(lg.attend(q, k, v, **options, backend=backend), theirs, [q, k, v])
    with torch.no_grad():  # may compute in place
        close(lg.attend(q, k, v, **options, backend=backend), theirs)


@pytest.mark.parametrize("mask", [lg.Causal(), lg.Causal() & lg.Documents(torch.arange(9) // 4), lg.NoMask()], ids=str)
def test_a_softcap_in_blocks_is_that_of_the_whole(mask, monkeypatch):
    """With the logsumexp and with sinks, in a pass cut by queries."""
    monkeypatch.setattr(chunked, "BLOCK_BYTES", 2**11)
    q, k, v = inputs = qkv(9, 9, 2)
    for options in ({}, {"encoding": lg.encoding("sink", num_heads=4)}, {"return_lse": True}):
        found = []
        for backend in ("chunked", "reference"):
            answer = lg.attend(q, k, v, mask=mask, softcap=CAP, backend=backend, **options)
            found.append(torch.cat([answer[0], answer[1][..., None]], -1) if isinstance(answer, tuple) else answer)
        same(*found, inputs)
    assert (lg.attend(q, k, v, mask=mask, softcap=CAP) - lg.attend(q, k, v, mask=mask)).abs().max() > 1e-2


# ---- what a newcomer brings: the name of an encoding, masks as torch and transformers have them, cu_seqlens ----------
def test_an_encoding_by_its_name():
    """Built of the heads of q; names compose."""
    q, k, v = heads(9)
    for name in ("alibi", "sandwich", "alibi+sandwich"):
        members = [lg.encoding(one, num_heads=4) for one in name.split("+")]
        close(lg.attend(q, k, v, encoding=name), lg.attend(q, k, v, encoding=members))


@pytest.mark.parametrize("shape", [(9, 9), (2, 9, 9), (2, 1, 9, 9), (1, 1, 9, 9)])
def test_a_mask_is_that_of_torch(shape):
    """Values and gradients, where every query has a key; 0 and -inf say the same."""
    q, k, v = (x.requires_grad_() for x in heads(9, num_kv_heads=4))
    seen = (random(*shape) > 0) | torch.eye(9, dtype=torch.bool)
    out = lg.attend(q, k, v, mask=seen)
    want = F.scaled_dot_product_attention(q, k, v, attn_mask=seen[:, None] if seen.dim() == 3 else seen)
    close(out, want)
    close(*(torch.autograd.grad(x.square().sum(), (q, k, v)) for x in (out, want)), 1e-11)
    close(lg.attend(q, k, v, mask=torch.zeros(shape).masked_fill(~seen, -math.inf)), out)


def test_queries_that_are_the_last_of_the_keys():
    """A query without keys gets zeros, where torch gives NaN."""
    q, k, v = heads(9)
    seen = torch.zeros(4, 9, dtype=torch.bool)
    seen[1:, :7] = True
    out = lg.attend(q[:, :, -4:], k, v, mask=seen)
    assert not out[:, :, 0].any()
    close(out[:, :, 1:], lg.attend(q[:, :, -3:], k, v, mask=lg.Padding(torch.arange(9) < 7)))


def test_masks_of_transformers():
    """In four dimensions, of padded rows, as their models make them for eager attention."""
    q, k, v = heads(9)
    valid = torch.ones(2, 9, dtype=torch.long)
    valid[0, :3] = 0
    config = LlamaConfig(num_hidden_layers=1)
    for kind in ("sdpa", "eager"):
        config._attn_implementation = kind
        theirs = create_causal_mask(config, torch.zeros(2, 9, 32), valid, None)
        out = lg.attend(q, k, v, mask=theirs, encoding="alibi")
        want = lg.attend(q, k, v, mask=lg.Causal() & lg.Padding(valid), encoding="alibi")
        real = valid.bool()[:, None, :, None].expand_as(out)
        close(out[real], want[real])


def test_a_causal_tensor_serves_what_must_be_causal():
    q, k, v = heads(9)
    fox = lg.encoding("fox", dim=6, num_heads=4).double()
    options, seen = {"encoding": fox, "context": fox.context(random(2, 9, 6))[0]}, torch.ones(9, 9, dtype=torch.bool)
    close(lg.attend(q, k, v, mask=seen.tril(), **options), lg.attend(q, k, v, **options))
    with refused("future", "lg.Causal"):
        lg.attend(q, k, v, mask=seen, **options)


def test_documents_from_cu_seqlens():
    """Where each begins, and the end; an empty one has no token."""
    q, k, v = heads(9)
    for dtype in (torch.int32, torch.int64):
        documents = lg.Documents.from_cu_seqlens(torch.tensor([0, 5, 5, 8, 9], dtype=dtype))
        assert documents.ids.tolist() == [0] * 5 + [2] * 3 + [3]
    out = lg.attend(q, k, v, mask=lg.Causal() & documents)
    for start, stop in ((0, 5), (5, 8), (8, 9)):
        close(out[:, :, start:stop], lg.attend(*(x[:, :, start:stop] for x in (q, k, v))))


# ---- refusals --------------------------------------------------------------------------------------------------------
Q = torch.randn(2, 4, 5, 8)
Q2 = Q[:, :, :2]
PAIR = torch.tensor([3, 4])
MASKS = [torch.ones(*shape, dtype=torch.bool) for shape in ((5, 4), (2, 4, 5, 5), (3, 1, 5, 5))]
MASKS += [torch.ones(5, 5, dtype=torch.long), random(5, 5)]
SEQLENS = [None, *map(torch.tensor, ([1, 5], [0, 5, 3], [0], [[0, 5]], [0.0, 5.0]))]
SHORT = {"encoding": lg.FoX(16, 4), "context": {"forgotten": torch.zeros(2, 4, 3)}}


def calling(q=Q, k=Q, v=Q, **options):
    return lambda: lg.attend(q, k, v, **options)


test_refusals = refused_calls(
    [
        (calling(Q.tolist()), "q", "list"),
        (calling(Q[:, 0]), "q", "[2, 5, 8]"),
        (calling(Q.long()), "q", "torch.int64"),
        (calling(Q[:, :3], Q[:, :2], Q[:, :2]), "3", "2"),
        (calling(k=Q[..., 1:]), "[2, 4, 5, 8]", "[2, 4, 5, 7]"),
        (calling(k=Q.double()), "torch.float32", "torch.float64"),
        (calling(k=Q.to("meta")), "meta"),
        (calling(v=Q[:, :, :4]), "[2, 4, 5, 8]", "[2, 4, 4, 8]"),
        (calling(Q[:, :, :0]), "[2, 4, 0, 8]"),
        (calling(scale="big"), "scale", "None", "head_dim", "-0.5"),
        (calling(dropout=1.0), "dropout", "1.0"),
        (calling(softcap=0.0), "softcap", "0.0"),
        (calling(backend="tabel"), "'tabel'", "'table'", "lg.explain"),
        (calling(encoding=lg.Shaw(16)), "head_dim=16", "8", "Shaw"),
        (calling(encoding=lg.FoX(16, 4)), "'forgotten'", "context=encoding.context", "[0]"),
        (calling(**SHORT), "[2, heads, 5, ...]", "[2, 4, 3]"),
        (calling(k_positions=0.5), "k_positions", "0.5"),
        (calling(Q2, q_positions=PAIR), "k_positions", "2", "[3, 4]", "5"),
        (calling(Q, Q2, Q2, k_positions=PAIR), "q_positions", "5", "2"),
        (lambda: lg.explain(Q, Q, Q, masks=lg.Causal()), "'masks'", "'mask'"),
        # names of encodings whose options cannot be read off the heads
        (calling(encoding="rope"), "'rope'", "'layout'", "lg.encoding"),
        (calling(encoding="fox"), "'dim'"),
        (calling(encoding="t5"), "T5Bias"),
        (calling(encoding="alibi+kerple_log"), "Kerple"),
        (calling(encoding="alibee"), "'alibi'"),
        # no mask is read by a part of its shape, nor are numbers taken for truth
        *((calling(mask=mask), "mask", str([*mask.shape])) for mask in MASKS),
        *((partial(lg.Documents.from_cu_seqlens, x), "integers", "cu_seqlens", "0") for x in SEQLENS),
    ]
)
