"""Bytes of tokens: their sum is the bytes of the text that they stand for, whatever the tokenizer does to it."""

from itertools import permutations

import pytest
import torch
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
from tokenizers.processors import TemplateProcessing
from transformers import ByT5Tokenizer, PreTrainedTokenizerFast

from longitude.checkpoints.load import byte_tokenizer
from longitude.measure.documents import documents_of, tokens_of, typical
from longitude.measure.sources import Text
from longitude.study.tokens import Reader
from tests.measure.conftest import byte_pairs
from tests.support import refused

HARD = "  Grüße  aus\tKöln,\n\nx = 1  # ★ 日本 \U0001f600\U0001f600 naïve </s> ende "
CORPUS = ["the cat sat on the mat  and the dog sat too " * 20, HARD, "def f(x):\n    return x + 1\n" * 10]


def byte_bpe() -> PreTrainedTokenizerFast:
    return byte_pairs(CORPUS, 330, eos_token="</s>")


def sentencepiece() -> PreTrainedTokenizerFast:
    """As Llama's: a mark for each space, one put before the text, and bytes for what is unknown."""
    letters = [*(f"<0x{byte:02X}>" for byte in range(256)), *"▁abcdefghijklmnopqrstuvwxyz"]
    vocabulary = {token: i for i, token in enumerate(["<unk>", "<s>", "</s>", *letters])}
    plain = Tokenizer(models.BPE(vocabulary, [], byte_fallback=True, unk_token="<unk>"))
    plain.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    plain.decoder = decoders.Sequence(parts)
    return PreTrainedTokenizerFast(tokenizer_object=plain, bos_token="<s>", eos_token="</s>")


def folding() -> PreTrainedTokenizerFast:
    """Characters in another form than the text's, and words without the spaces around them."""
    plain = Tokenizer(models.WordLevel({"<unk>": 0}, unk_token="<unk>"))
    plain.normalizer = normalizers.NFKD()
    plain.pre_tokenizer = pre_tokenizers.Split(Regex(r"\s+"), "removed")
    return PreTrainedTokenizerFast(tokenizer_object=plain, unk_token="<unk>")


@pytest.mark.parametrize("make", [byte_tokenizer, byte_bpe, sentencepiece, ByT5Tokenizer, folding])
@pytest.mark.parametrize("text", [HARD, HARD.strip(), "a", "\U0001f600", "plain words only"])
def test_all_bytes_of_the_text_are_counted_once(make, text):
    tokenizer = make()
    if make is ByT5Tokenizer:
        text = text.replace("</s>", "")  # it drops the spaces around: below
    ids, sizes = tokens_of(text, tokenizer)
    assert ids.dtype == sizes.dtype == torch.int64 and ids.shape == sizes.shape
    assert ids.tolist() == tokenizer(text, add_special_tokens=False).input_ids
    whole = text.rstrip() if make is folding else text  # spaces at its end are in no token
    assert (sizes >= 0).all() and int(sizes.sum()) == len(whole.encode())


@pytest.mark.parametrize("make", [byte_tokenizer, byte_bpe, sentencepiece])
def test_pieces_are_the_text_with_its_spaces(make):
    """Of a window, too, whose first token may begin within a character."""
    by = Reader()
    by.tokenizer = make()
    ids = by.tokenizer(HARD.strip(), add_special_tokens=False).input_ids
    for start in (0, 4, 5):
        pieces = by.pieces(ids[start:])
        assert "".join(pieces) == by.tokenizer.decode(ids[start:]) and len(pieces) == len(ids) - start
    assert " " in "".join(by.pieces(ids)[1:9])


def test_the_typical_document_is_neither_repetition_nor_noise():
    noise = torch.randint(256, (400,), generator=torch.Generator().manual_seed(0))
    for order in permutations([noise * 0, noise % 4, noise]):
        assert order[typical(order, 399)] is order[[len({*each.tolist()}) for each in order].index(4)]


def test_a_tokenizer_without_offsets_that_drops_text_is_refused():
    with refused("67", "69"):
        tokens_of(HARD, ByT5Tokenizer())


def test_bytes_belong_to_the_first_token_of_a_character_and_spaces_to_the_word_after():
    ids, sizes = tokens_of("a\U0001f600b", byte_tokenizer())
    assert len(ids) == 6 and sizes.tolist() == [1, 4, 0, 0, 0, 1]
    tokenizer = byte_bpe()
    ids, sizes = tokens_of("the cat  sat", tokenizer)
    assert sizes.tolist() == [len(tokenizer.decode([i])) for i in ids.tolist()]


def test_special_tokens_are_not_put_around_the_text():
    tokenizer = byte_pairs(CORPUS, 330, bos_token="</s>", eos_token="</s>")
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single="</s> $A", special_tokens=[("</s>", 0)])
    assert tokenizer("the").input_ids[0] == 0
    assert tokens_of("the", tokenizer)[0].tolist() == tokenizer("the", add_special_tokens=False).input_ids


def texts(count: int, size: int) -> Text:
    return Text("made", [(f"{i}.txt", bytes([97 + i % 26]) * size) for i in range(count)])


def test_documents_are_excerpts_of_their_own():
    found, again, fewer = (documents_of(texts(30, 200), byte_tokenizer(), 64, most) for most in (20, 20, 3))
    assert len(found.ids) == 20 and found.unit.startswith("excerpts")
    assert all(len(ids) == 65 and len(set(ids.tolist())) == 1 for ids in found.ids)
    assert [ids.tolist() for ids in again.ids] == [ids.tolist() for ids in found.ids]
    assert [ids.tolist() for ids in fewer.ids] == [ids.tolist() for ids in found.ids[:3]]


def test_short_documents_are_joined_and_one_file_gives_blocks_from_all_of_it():
    found = documents_of(texts(30, 50), byte_tokenizer(), 64, 5)
    assert [len(ids) for ids in found.ids] == [65] * 5 and found.unit.startswith("blocks")
    content = b"".join(bytes([97 + i]) * 65 for i in range(26))
    found = documents_of(Text("file", [("file", content)]), byte_tokenizer(), 64, 4)
    assert [chr(int(ids[0])) for ids in found.ids] == ["a", "g", "n", "t"]
    with refused("41", "65"):
        documents_of(texts(1, 40), byte_tokenizer(), 64, 4)
