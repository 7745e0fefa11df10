"""Loss by length against a loop that gives every target its context by hand."""

import math
from itertools import pairwise
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

from longitude.measure import losses_by_length
from longitude.measure.text import default_bins
from tests.measure.conftest import build
from tests.support import refused

VOCAB = 37
LENGTHS = [3, 8, 16]  # 3 does not divide 16: ragged windows
COUNTS = [16, 32, 32, 48]  # of the documents, multiples of 16


@pytest.fixture(scope="module")
def model():
    return build("llama", vocab_size=VOCAB, initializer_range=0.7).double().eval()  # context matters


@pytest.fixture(scope="module")
def documents():
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(VOCAB, (n,), generator=generator) for n in (17, 33, 48, 50)]


def losses_of(model, documents, window, stride=None, **options):
    """The sums of one protocol."""
    methods = ["non-overlapping" if stride is None else "sliding"]
    [losses] = losses_by_length(model, documents, lengths=[window], methods=methods, stride=stride, **options)
    return losses


def rows_of(*measured, bootstrap_seed=0, labels=None, **options):
    sums = losses_by_length(*measured, **options)
    return [losses.row(bootstrap_seed=bootstrap_seed, **labels or {}) for losses in sums]


def brute(model, documents, window, stride):
    """Every target alone: the loss of token t + 1 after the tokens of its window, one forward pass each; by document."""
    by_document = []
    for document, count in zip(documents, COUNTS, strict=False):
        losses = []
        for t in range(count):
            move = 0 if t < window else -(-(t + 1 - window) // stride)  # moves until the window's inputs reach t
            with torch.no_grad():
                logits = model(input_ids=document[None, move * stride : t + 1]).logits[0, -1]
            losses.append(-torch.log_softmax(logits, 0)[document[t + 1]].item())
        by_document.append(np.array(losses))
    return by_document


@pytest.mark.one_in(11)
@pytest.mark.parametrize("batch_tokens", [1, 40])
@pytest.mark.parametrize("window", LENGTHS)
@pytest.mark.parametrize("stride", [None, 1, 2, "window"])
def test_losses_are_those_of_every_target_alone(model, documents, window, stride, batch_tokens):
    stride = window if stride == "window" else stride
    losses = losses_of(model, documents, window, stride, span=16, batch_tokens=batch_tokens)
    expected = [each.sum() for each in brute(model, documents, window, stride or window)]
    np.testing.assert_allclose(losses.nats, expected, rtol=1e-12)
    assert losses.tokens.tolist() == COUNTS


def test_small_chunks_of_logits_do_not_matter(model, documents, monkeypatch):
    whole = losses_of(model, documents, 16, 3)
    monkeypatch.setattr("longitude.measure.windows.CHUNK", 5 * VOCAB)
    np.testing.assert_allclose(losses_of(model, documents, 16, 3).nats, whole.nats, rtol=1e-13)


def test_positions_are_those_of_the_longest_windows(model, documents):
    sizes = torch.arange(VOCAB) % 3 + 1
    options = {"lengths": LENGTHS, "methods": ["per-position"], "bins": [0, 1, 5, 16]}
    losses = losses_by_length(model, documents, **options, token_bytes=[sizes[each] for each in documents])
    nats = np.stack([each.reshape(-1, 16).sum(0) for each in brute(model, documents, 16, 16)])
    assert [(each.position_from, each.position_to) for each in losses] == [(0, 1), (1, 5), (5, 16)]
    for each in losses:
        np.testing.assert_allclose(each.nats, nats[:, each.position_from : each.position_to].sum(1), rtol=1e-12)
        assert each.tokens.tolist() == [w * (each.position_to - each.position_from) for w in (1, 2, 2, 3)]
        assert each.window == each.stride == 16
    scored = [sizes[document[1 : count + 1]].view(-1, 16) for document, count in zip(documents, COUNTS)]
    assert losses[1].bytes.tolist() == [int(each[:, 1:5].sum()) for each in scored]


@pytest.mark.parametrize("targets", [1, 3])
def test_the_same_targets_with_more_context(model, documents, targets):
    """Of every 16 targets the last ones, each by hand: the token after all of its window that comes before it."""
    sizes = torch.arange(VOCAB) % 3 + 1
    given = {"token_bytes": [sizes[each] for each in documents], "targets": targets}
    losses = losses_by_length(model, documents, lengths=LENGTHS, methods=["same-targets"], **given)
    assert [each.window for each in losses] == LENGTHS
    for window, each in zip(LENGTHS, losses, strict=True):
        expected = []
        for document, count in zip(documents, COUNTS, strict=True):
            nats = 0.0
            for end in range(16, count + 1, 16):
                for t in range(end - targets, end):
                    with torch.no_grad():
                        logits = model(input_ids=document[None, end - window : t + 1]).logits[0, -1]
                    nats -= torch.log_softmax(logits, 0)[document[t + 1]].item()
            expected.append(nats)
        np.testing.assert_allclose(each.nats, expected, rtol=1e-12)
        assert each.tokens.tolist() == [targets * count // 16 for count in COUNTS]
        assert (each.position_from, each.position_to) == (window - targets, window)
    assert len({each.bytes.tobytes() for each in losses}) == 1
    ends = {"methods": ["per-position"], "bins": [16 - targets, 16]}
    [longest] = losses_by_length(model, documents, lengths=[16], **ends, token_bytes=given["token_bytes"])
    np.testing.assert_allclose(losses[-1].nats, longest.nats, rtol=1e-12)
    assert losses[-1].bytes.tolist() == longest.bytes.tolist()


def test_positions_of_a_span_that_windows_do_not_fill(model, documents):
    """span 16 in windows of 5: the last window of every document is one token."""
    losses = losses_by_length(model, documents, lengths=[5], methods=["per-position"], span=16, bins=range(6))
    [nats] = brute(model, documents[:1], 5, 5)
    for position, each in enumerate(losses):
        np.testing.assert_allclose(each.nats[0], nats[position::5].sum(), rtol=1e-12)
    assert [each.tokens[0] for each in losses] == [4, 3, 3, 3, 3]


def test_the_model_runs_once_for_positions_and_progress_follows(model, documents):
    seen, run = [], []
    hook = model.register_forward_pre_hook(lambda _, __, of: run.append(of["input_ids"].numel()), with_kwargs=True)
    options = {"lengths": LENGTHS, "methods": ["non-overlapping", "per-position"], "batch_tokens": 32}
    losses_by_length(model, documents, **options, progress=lambda *done: seen.append(done))
    hook.remove()
    total = 3 * sum(COUNTS)
    assert sum(run) == total and max(run) <= 32
    assert seen == [(done, total) for done in np.cumsum(run)]


class Uniform(nn.Module):
    """Every token equally likely: log2(vocab) bits, whatever the text."""

    def __init__(self, logit=0.0, dtype=torch.float32):
        super().__init__()
        self.weight = nn.Parameter(torch.full((VOCAB,), logit, dtype=dtype))

    def forward(self, input_ids, use_cache):
        assert not use_cache and not self.training and not torch.is_grad_enabled()
        return SimpleNamespace(logits=self.weight.expand(*input_ids.shape, -1))


def test_bits_are_per_byte_of_the_targets(documents):
    sizes = torch.arange(VOCAB) % 4 + 1
    count = sum(int(sizes[document[1 : n + 1]].sum()) for document, n in zip(documents, COUNTS))
    options = {"lengths": [16], "methods": ["non-overlapping"], "token_bytes": [sizes[each] for each in documents]}
    [row] = rows_of(Uniform(), documents, **options)
    assert row.metric == "bits_per_byte" and row.count == count
    assert row.value == pytest.approx(sum(COUNTS) * math.log2(VOCAB) / count, rel=1e-6)
    assert row.low < row.value < row.high
    alone = rows_of(Uniform(), documents[:1], lengths=[16], token_bytes=1)
    assert all(row.value is not None and row.low is None and row.high is None for row in alone)  # of one document
    diverged = rows_of(Uniform(math.nan), documents, lengths=LENGTHS, token_bytes=1)
    assert {(row.value, row.low, row.high) for row in diverged} == {(None, None, None)}
    assert all(row.count > 0 for row in diverged)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_perplexity_without_bytes_is_averaged_in_float32(documents, dtype):
    [row] = rows_of(Uniform(dtype=getattr(torch, dtype)), documents, lengths=[16], methods=["sliding"])
    assert (row.metric, row.dtype) == ("perplexity", dtype)
    assert row.value == pytest.approx(VOCAB, rel=1e-5)  # bfloat16 would be off by 1e-3
    assert row.count == row.tokens == sum(COUNTS)


def test_protocol_is_written_down_and_the_seed_is_of_the_bootstrap(model, documents):
    labels = {"encoding": "rope", "label": "rope", "seed": 3, "train_length": 8, "commit": "abc", "backend": "sdpa"}
    options = {"lengths": LENGTHS, "token_bytes": 1, "labels": labels}
    rows = rows_of(model, documents, **options)
    assert [row.method for row in rows] == ["non-overlapping"] * 3 + ["sliding"] * 3 + ["per-position"] * 5
    for row in rows:
        assert {name: getattr(row, name) for name in labels} == labels
        assert (row.task, row.bos, row.weighting, row.dtype, row.documents) == ("text", "none", "token", "float64", 4)
        assert row.window == row.length
        assert row.stride == (max(1, row.window // 2) if row.method == "sliding" else row.window)
        assert row.truncation == "tail dropped to a multiple of 16 targets"
    assert {row.tokens for row in rows if row.method != "per-position"} == {sum(COUNTS)}
    assert rows_of(model, documents, **options) == rows
    other = rows_of(model, documents, **options, bootstrap_seed=1)
    assert [row.value for row in other] == [row.value for row in rows]
    assert [row.low for row in other] != [row.low for row in rows]


def test_training_mode_of_every_submodule_is_put_back(documents):
    def stop(done, total):
        raise RuntimeError("stop")

    model = Uniform()
    model.part = nn.Dropout().eval()
    model.training = True
    losses_of(model, documents, 16)
    assert model.training and not model.part.training
    with pytest.raises(RuntimeError, match="stop"):
        losses_of(model, documents, 16, progress=stop)
    assert model.training and not model.part.training


def test_default_bins_cover_every_position_once():
    for length in (1, 2, 7, 64, 100):
        edges = default_bins(length)
        assert edges[0] == 0 and edges[-1] == length and all(a < b for a, b in pairwise(edges))
    assert default_bins(4096) == [
        0, 1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096,
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"lengths": [16, 32]}, ("0", "17", "33")),
        ({"span": 15}, ("span", "16", "15")),
        ({"bins": [0, 17]}, ("bins", "0", "16", "17")),
        ({"bins": {12: [0, 12]}}, ("bins", "12")),
        ({"token_bytes": [torch.ones(3, dtype=torch.int64)]}, ("token_bytes", "[3]")),
        ({"documents": [torch.zeros(17)]}, ("torch.float32", "[17]")),
        ({"labels": {"lable": "rope"}}, ("'lable'", "'label'")),
    ],
)
def test_wrong_use(documents, change, words):
    with refused(*words):
        rows_of(Uniform(), **{"documents": documents, "lengths": [8, 16]} | change)


@pytest.mark.parametrize("answer", [None, torch.zeros(2, 3)])
def test_a_model_without_causal_logits_is_refused(documents, answer):
    model = Uniform()
    model.forward = lambda input_ids, use_cache: SimpleNamespace(logits=answer)
    with refused("AutoModelForCausalLM"):
        losses_by_length(model, documents, lengths=[16])
