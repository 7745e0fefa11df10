"""Longformer's attention against transformers', against attention under a mask, and its price."""

import pytest
import torch
from transformers import LongformerConfig
from transformers.models.longformer import modeling_longformer

import longitude as lg
from longitude.attention.layers.longformer import LongformerAttention
from longitude.testing.fixtures import memory_of
from tests.support import close, random, refused_calls

DIM, HEADS, WINDOW = 16, 4, 4


def layer(encoding=None, **options) -> LongformerAttention:
    torch.manual_seed(0)
    return LongformerAttention(DIM, HEADS, encoding, **{"window": WINDOW, **options}).double().eval()


def tokens(length: int, batch: int = 2) -> torch.Tensor:
    return random(batch, length, DIM, seed=1)


@pytest.fixture
def exact(monkeypatch):
    """transformers takes its softmax in float32; here it is taken in the dtype of the scores."""
    softmax = torch.nn.functional.softmax
    monkeypatch.setattr(torch.nn.functional, "softmax", lambda x, dim, dtype=None: softmax(x, dim))


def pair() -> tuple[LongformerAttention, torch.nn.Module]:
    config = LongformerConfig(
        hidden_size=DIM, num_attention_heads=HEADS, attention_window=[2 * WINDOW], attention_probs_dropout_prob=0.0
    )
    ours, theirs = layer(), modeling_longformer.LongformerSelfAttention(config, 0).double()
    with torch.no_grad():
        for mine, name in (("q", "query"), ("k", "key"), ("v", "value")):
            getattr(ours, f"{mine}_proj").load_state_dict(getattr(theirs, name).state_dict())
            getattr(ours, f"global_{mine}_proj").load_state_dict(getattr(theirs, f"{name}_global").state_dict())
        ours.o_proj.weight.copy_(torch.eye(DIM))  # theirs stands in a module of its own
        ours.o_proj.bias.zero_()
    return ours, theirs


CASES = {
    "no global token": ([[], []], [0, 0]),
    "one": ([[0], [0]], [0, 0]),
    "others in each row": ([[0, 5], [3, 12, 13]], [0, 0]),
    "padding": ([[0, 5], [3]], [5, 0]),
    "padding of more than a window": ([[0], [1, 2]], [11, 3]),
}


@pytest.mark.parametrize("length", [8, 24, 21])  # theirs wants multiples of 2w: padding outside, which is cut again
@pytest.mark.parametrize("case", CASES)
def test_equals_transformers(case, length, exact):
    """Values, and the gradients of tokens and of all projections."""
    chosen, padding = CASES[case]
    padding = [min(n, length // 2 - 1) for n in padding]
    ours, theirs = pair()
    wide = -(-length // (2 * WINDOW)) * 2 * WINDOW
    state = torch.zeros(2, wide, dtype=torch.float64)
    for b in (0, 1):
        state[b, [place for place in chosen[b] if place < length - padding[b]]] = 10000.0
        state[b, length - padding[b] :] = -10000.0
    x = tokens(length).requires_grad_()
    flags = {"is_index_masked": state < 0, "is_index_global_attn": state > 0, "is_global_attn": bool((state > 0).any())}
    padded = torch.nn.functional.pad(x, (0, 0, 0, wide - length))
    expected = theirs(padded, attention_mask=state, **flags)[0][:, :length]
    state = state[:, :length]
    out = ours(x, tokens=state > 0, documents=-(state < 0).long())
    close(out, expected, atol=1e-11)
    direction = torch.randn(out.shape, dtype=torch.float64) * (state >= 0)[..., None]
    mine = [x, *(getattr(ours, f"{g}{n}_proj").weight for g in ("", "global_") for n in "qkv")]
    names = ("query", "key", "value")
    other = [x, *(getattr(theirs, f"{name}{g}").weight for g in ("", "_global") for name in names)]
    zeros = {"allow_unused": True, "materialize_grads": True}
    close(*(torch.autograd.grad(y, of, direction, **zeros) for y, of in ((out, mine), (expected, other))), atol=1e-10)


@pytest.mark.parametrize("length", [1, 30])
@pytest.mark.parametrize("encoding", [None, lg.ALiBi(HEADS)], ids=["plain", "offsets"])
def test_with_equal_projections_it_is_attention_under_a_mask(length, encoding):
    m, full = layer(encoding), lg.MultiHeadAttention(DIM, HEADS, encoding=encoding, bias=True).double()
    for n in "qkv":
        getattr(m, f"global_{n}_proj").load_state_dict(getattr(m, f"{n}_proj").state_dict())
    full.load_state_dict(m.state_dict(), strict=False)
    order, x = torch.arange(length), tokens(length)
    chosen = torch.stack([order % 9 == 0, (order == 3) | (order == 4)])
    documents = torch.stack([order // 13, torch.where(order < 2, -1, 0)])
    mask = lg.Band(WINDOW, WINDOW) | lg.Global(chosen)
    out, expected = m(x, tokens=chosen, documents=documents), full(x, mask=mask, documents=documents)
    close(out[documents >= 0], expected[documents >= 0])
    close(out[1, :2], m.o_proj.bias.expand(min(2, length), -1))  # padding


def test_encodings_that_rotate_queries_and_keys():
    """Rotated by positions: adding one number to all of them changes nothing, and another order of them does."""
    m, x, places = layer(lg.Rotary(DIM // HEADS, "half")), tokens(20), torch.arange(20)
    out = m(x, tokens=[0, 7])
    close(m(x, tokens=[0, 7], positions=9), out, atol=1e-9)
    close(m(x, tokens=[0, 7], positions=(places + 3).expand(2, -1)), out, atol=1e-9)
    moved = m(x, tokens=[0, 7], positions=2 * places)
    assert all((moved - out)[:, i].abs().max() > 1e-3 for i in (0, 7, 12))
    assert (layer()(x, tokens=[0, 7]) - out).abs().max() > 1e-3


@pytest.mark.slow
def test_memory_grows_with_the_length_alone():
    """Forward and backward: four times the tokens take four times the memory."""
    peaks = []
    for length in (512, 2048):
        m, x = LongformerAttention(DIM, HEADS, window=32), torch.randn(1, length, DIM)
        peaks.append(memory_of(lambda: m(x, tokens=[0, 100, 200]).sum().backward()).peak)  # noqa: B023
    assert peaks[1] < 4.4 * peaks[0]


def test_a_run_is_a_document():
    m, x = layer(), tokens(6)
    back, other = torch.tensor([[0, 0, 1, 1, 0, 0]] * 2), torch.tensor([[4, 4, 9, 9, 2, 2]] * 2)
    for chosen in ([], [0, 5]):
        close(m(x, tokens=chosen, documents=back), m(x, tokens=chosen, documents=other))


def calling(**options):
    return lambda: layer()(tokens(9), **options)


test_refusals = refused_calls(
    [
        (lambda: layer(window=0), "window"),
        (lambda: layer(lg.FoX(DIM, HEADS)), "LongformerAttention"),
        (calling(tokens=[9]), "Global", "9"),
        (calling(tokens=torch.zeros(2, 8, dtype=torch.bool)), "Global(tokens)", "[2, 8]"),
        (calling(documents=torch.zeros(2, 8, dtype=torch.long)), "documents", "[2, 9]"),
    ]
)
