"""LongPPL: the tokens that an evaluator finds, against the published definition as a loop, and across tokenizers."""

import math
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from longitude.checkpoints.load import load
from longitude.cli import main
from longitude.measure import from_frame, read_rows
from longitude.measure.config import MeasureConfig
from longitude.measure.documents import documents_of, tokens_of
from longitude.measure.key_tokens import key_tokens, within
from longitude.measure.plan import plan
from longitude.measure.run import measure
from longitude.measure.sources import read_text
from longitude.runs.progress import Progress
from tests.measure.conftest import build, byte_pairs, write
from tests.support import refused

CONTEXT = 16


def as_published(model, ids, context, gain, least):
    """Section 3 and the authors' order: windows of context + a quarter, whose last quarter is compared with the whole."""
    step, found = context // 4, np.zeros(len(ids), dtype=bool)
    with torch.no_grad():
        whole = F.log_softmax(model(ids[None]).logits[0].float(), -1)
        for start in range(0, len(ids) - context, step):
            some = ids[start : start + context + step]
            short = F.log_softmax(model(some[None]).logits[0].float(), -1)
            for t in range(context, len(some)):
                long_p, short_p = whole[start + t - 1, some[t]], short[t - 1, some[t]]
                found[start + t] = bool(long_p - short_p > gain and long_p > least)
    return found


@pytest.mark.parametrize("length", [17, 64, 101])
@pytest.mark.parametrize(("gain", "least"), [(2.0, -2.0), (1e-3, -1e9)])
def test_key_tokens_are_the_published_ones(length, gain, least, monkeypatch):
    """Of a model whose answers need what is far away; with other limits more tokens are key."""
    monkeypatch.setattr("longitude.measure.key_tokens.GAIN", gain)
    monkeypatch.setattr("longitude.measure.key_tokens.LEAST", least)
    model = build("llama", initializer_range=1.0).eval()
    torch.manual_seed(1)
    ids = torch.randint(256, (length,))
    with torch.no_grad():
        for t in range(CONTEXT, length - 1, 2):  # what it finds likeliest
            ids[t + 1] = model(ids[None, : t + 1]).logits[0, -1].argmax()
    got = key_tokens(model, ids, CONTEXT)
    np.testing.assert_array_equal(got, as_published(model, ids, CONTEXT, gain, least))
    assert length == 17 or 2 < got.sum() < length - CONTEXT


def test_tokens_within_the_text_of_key_tokens():
    """Whole tokens only; neighbouring key tokens are one text; a token without bytes is none."""
    key = np.array([0, 1, 1, 1, 1, 0, 0, 1], dtype=bool)
    assert within(key, torch.tensor([1, 2, 2, 0, 1, 1, 1])).tolist() == [False, True, True, False, False, False, True]
    assert within(key, torch.tensor([1, 4, 2, 1])).tolist() == [False, True, False, True]
    assert within(key, torch.tensor([3, 5])).tolist() == [False, False]


@pytest.mark.parametrize("pairs", [False, True])
def test_documents_keep_the_text_of_their_tokens(text, pairs):
    """Its bytes are those of the tokens; read again, it gives them, but for a character that the excerpt cuts."""
    source = read_text(str(text), "--text")
    tokenizer = byte_pairs([text.read_text()], 300) if pairs else load(write(Path(text).parent, "llama")).tokenizer
    for most in (1, 30):
        documents = documents_of(source, tokenizer, 50, most)
        for ids, sizes, content in zip(documents.ids, documents.sizes, documents.text, strict=True):
            assert len(content) == int(sizes.sum())
            if not pairs:
                again = bytes(tokens_of(content.decode(), tokenizer)[0].tolist())
                assert again[2:-2] in bytes(ids.tolist())
            assert content in text.read_bytes()


@pytest.fixture
def plain(tmp_path_factory):
    """Text of which no token is a part of a character."""
    path = tmp_path_factory.mktemp("text") / "plain.txt"
    path.write_text("".join(f"line {i} says {i * i % 97} and so on\n" for i in range(60)))
    return path


@pytest.fixture
def models(tmp_path, text):
    """A model of bytes that is sure of what it says, and one of pairs of bytes."""
    evaluator = write(tmp_path, "llama", initializer_range=1.0)
    other = tmp_path / "pairs"
    build("llama", vocab_size=300).save_pretrained(other)
    byte_pairs([text.read_text()], 300).save_pretrained(other)
    return evaluator, other


def test_longppl_of_a_run(models, plain, tmp_path, capsys, monkeypatch):
    """exp of the mean loss of key tokens, with windows of each length; the same command continues without the evaluator."""
    monkeypatch.setattr("longitude.measure.key_tokens.GAIN", 0.5)  # random weights are never as sure
    monkeypatch.setattr("longitude.measure.key_tokens.LEAST", -9.0)
    evaluator, other = models
    argv = ["measure", str(evaluator), str(other), "--text", str(plain), "--lengths", "32", "64", "--documents", "3"]
    argv += ["--methods", "non-overlapping", "--evaluator", str(evaluator), "--evaluator-context", "8"]
    argv += ["--out", str(tmp_path / "run"), "--device", "cpu"]
    assert main(argv) == 0
    assert "LongPPL" in capsys.readouterr().out
    rows = from_frame(read_rows(tmp_path / "run" / "results.parquet"))
    of_length = {row.length: row for row in rows if row.task == "longppl" and row.model == str(evaluator)}
    checkpoint = load(evaluator)
    documents = documents_of(read_text(str(plain), "--text"), checkpoint.tokenizer, 64, 3)
    for length in (32, 64):
        nats = []
        for ids in documents.ids:
            key = key_tokens(checkpoint.model, ids, 8)
            for start in range(0, 64, length):
                with torch.no_grad():
                    logits = checkpoint.model(ids[None, start : start + length]).logits[0]
                loss = F.cross_entropy(logits, ids[start + 1 : start + length + 1], reduction="none")
                nats += loss[torch.from_numpy(key[start + 1 : start + length + 1])].tolist()
        assert of_length[length].tokens == len(nats) > 0
        assert of_length[length].value == pytest.approx(math.exp(np.mean(nats)), rel=1e-5)
    units = sorted(path.name for path in (tmp_path / "run" / "units").iterdir())
    assert sum(name.startswith("key-tokens-") for name in units) == 2  # documents are cut in tokens of each model
    assert main(argv) == 0
    assert sorted(path.name for path in (tmp_path / "run" / "units").iterdir()) == units


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"evaluator_context": 64}, ("--evaluator-context", "64")),
        ({"evaluator_context": 0}, ("context", "1", "0")),
        ({"tasks": ("passkey",), "text": "stdlib"}, ("--evaluator", "perplexity")),
        ({"evaluator": "./nowhere"}, ("nowhere",)),
    ],
)
def test_wrong_use(change, words, models, text):
    options = {"evaluator": str(models[0]), "evaluator_context": 8, "lengths": (32, 64), "text": str(text)} | change
    with refused(*words):
        plan(MeasureConfig(**options), (str(models[0]),))


def test_a_document_beyond_the_evaluators_table(tmp_path, models, text):
    """A model with learned positions cannot be asked about more."""
    gpt2 = write(tmp_path, "gpt2")
    config = MeasureConfig(lengths=(32, 64), text=str(text), evaluator=str(gpt2), evaluator_context=8, device="cpu")
    with refused("32"):
        measure(plan(config, (str(models[0]),)), tmp_path / "run", Progress())
