"""What candidates are tried on: the loss of the tokens that count, and texts with a number hidden in each."""

import math
import re

import pytest
import torch
import torch.nn.functional as F
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from longitude.checkpoints.load import byte_tokenizer
from longitude.extend import criteria
from longitude.extend.criteria import Criterion, needles, running_text
from tests.extend.conftest import LENGTH, loaded
from tests.measure.conftest import byte_pairs

TEXTS = ["Some words stand here. Others follow them, in lines. " * 40, "It is another text; nobody reads it. " * 40]


def pairs_with_beginning() -> PreTrainedTokenizerFast:
    """Tokens of several digits, with the space before them in the first; and one at the beginning of each text."""
    numbers = " ".join(str(n) for n in range(1000))
    tokenizer = byte_pairs([*TEXTS, numbers], 400, bos_token="<|begin|>")
    begin = ("<|begin|>", tokenizer.bos_token_id)
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing("<|begin|> $A", special_tokens=[begin])
    return tokenizer


TOKENIZERS = {"bytes": byte_tokenizer, "pairs": pairs_with_beginning}


@pytest.fixture(params=TOKENIZERS)
def tokenizer(request):
    return TOKENIZERS[request.param]()


def of(text: str) -> list[str]:
    """The numbers of the needles."""
    return re.findall(r"One of the special magic numbers for [a-z]+-[a-z]+ is: (\d{7})\.", text)


def test_a_number_is_hidden_at_even_depths_and_asked_for_at_the_end(tokenizer) -> None:
    criterion = needles(TEXTS, tokenizer, 1600)
    assert len(criterion.windows) == 10 == len(criterion.skipped)
    depths = []
    for i, (window, skip) in enumerate(zip(criterion.windows, criterion.skipped, strict=True)):
        assert 1580 <= len(window) <= 1600 and window.dtype == torch.int64
        text = tokenizer.decode(window, skip_special_tokens=True)
        assert tokenizer.bos_token_id in (None, int(window[0])) and window.tolist().count(tokenizer.bos_token_id) <= 1
        [number] = of(text)
        assert text.endswith(f"mentioned in the provided text is {number}") and text.count(number) == 2
        assert tokenizer.decode(window[skip + 1 :]).strip() == number, "they count: these digits and no others"
        begin, end = text.index("afterwards.\n") + 12, text.rindex("\nWhat is the special magic number")
        hidden = text.index("One of the special magic")
        depths.append((hidden - begin) / (end - begin - 65))
        assert TEXTS[i % 2][:20] in text and TEXTS[1 - i % 2][:20] not in text
    assert depths == pytest.approx([i / 9 for i in range(10)], abs=0.1)
    assert depths[0] == 0 and depths[-1] == pytest.approx(1, abs=0.01)


def test_short_windows_are_more(monkeypatch) -> None:
    assert len(needles(TEXTS, byte_tokenizer(), 512).windows) == 32
    monkeypatch.setattr(criteria, "TOKENS", 512)
    assert len(needles(TEXTS, byte_tokenizer(), 512).windows) == 10
    assert needles(TEXTS, byte_tokenizer(), 512).digest() == needles(TEXTS, byte_tokenizer(), 512).digest()


@pytest.fixture(scope="module")
def model(checkpoint):
    return loaded(checkpoint("llama"))


def test_the_loss_is_that_of_transformers_with_labels_on_the_answers_alone(model) -> None:
    """A plain loop: one window at a time, all logits, labels -100 but for the seven digits."""
    criterion = needles(TEXTS, byte_tokenizer(), 600)
    losses, counted = [], 0
    for window in criterion.windows:
        labels = window.clone()
        labels[:-7] = -100
        with torch.inference_mode():
            losses.append(model(input_ids=window[None], labels=labels[None], use_cache=False).loss.item())
        counted += int((labels >= 0).sum())
    assert counted == 7 * len(losses) == sum(len(w) - 1 - s for w, s in zip(criterion.windows, criterion.skipped))
    assert criterion.loss(model) == pytest.approx(sum(losses) / len(losses), abs=1e-6)
    everything = Criterion(criterion.windows, [0] * len(losses))
    assert abs(everything.loss(model) - criterion.loss(model)) > 1e-3
    assert everything.digest() != criterion.digest()


def test_the_loss_is_a_mean_over_tokens_of_windows_of_any_shape(model) -> None:
    generator = torch.Generator().manual_seed(0)
    windows = [torch.randint(3, 250, (size,), generator=generator) for size in (40, 65, 65, 65, 33)]
    skipped = [3, 60, 60, 0, 31]
    nats = []
    for window, skip in zip(windows, skipped, strict=True):
        with torch.inference_mode():
            logits = model(input_ids=window[None, :-1], use_cache=False).logits[0]
        nats += F.cross_entropy(logits, window[1:], reduction="none")[skip:].tolist()
    assert len(nats) == 36 + 4 + 4 + 64 + 1
    assert Criterion(windows, skipped).loss(model) == pytest.approx(sum(nats) / len(nats), abs=1e-6)
    text = running_text(windows[1:4], 64)
    assert text.skipped == [0, 0, 0] and math.isfinite(text.loss(model))


def test_what_holds_no_needle_is_refused() -> None:
    letters = Tokenizer(models.WordLevel({"<unk>": 0, "words": 1}, unk_token="<unk>"))
    letters.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    losing = PreTrainedTokenizerFast(tokenizer_object=letters)
    for texts, tokenizer, length, words in [
        (TEXTS, None, 512, "needs the model's tokenizer; load it with tokenizer=True"),
        ([], byte_tokenizer(), 512, "expected text to hide needles in, got none"),
        (["", " \n"], byte_tokenizer(), 512, "has no words"),
        (TEXTS, byte_tokenizer(), 4 * LENGTH, "256 tokens fit no question about a needle .*; give a longer --to"),
        (TEXTS, losing, 512, "does not contain"),
    ]:
        with pytest.raises(ValueError, match=words):
            needles(texts, tokenizer, length)
