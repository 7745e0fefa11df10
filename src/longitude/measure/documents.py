"""Text as a model's tokens, each with its number of bytes of the text."""

import codecs
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from hashlib import sha256
from itertools import pairwise
from typing import Any
from zlib import compress

import numpy as np
import torch
from torch import Tensor

from longitude.errors import UsageError
from longitude.measure.config import BOS
from longitude.measure.sources import Text, name_hash

ENOUGH = 20
"""With this many documents of enough tokens, each gives an excerpt; with fewer, documents are joined and cut into blocks."""


@dataclass(frozen=True)
class Documents:
    """ids: int64 [length + 1] each. sizes: bytes of each token. text: the text of each. unit: what a document is, in words."""

    ids: list[Tensor]
    sizes: list[Tensor]
    text: list[bytes]
    unit: str

    @cached_property
    def digest(self) -> str:
        """A hash of the tokens and of the text that they stand for."""
        digest = sha256()
        for ids, sizes, text in zip(self.ids, self.sizes, self.text, strict=True):
            digest.update(len(ids).to_bytes(8) + ids.numpy().tobytes() + sizes.numpy().tobytes() + text)
        return digest.hexdigest()


def pieces_of(text: bytes, sizes: np.ndarray) -> list[str]:
    """The text of each token; a character of several tokens is in the last of them."""
    decoder, ends = codecs.getincrementaldecoder("utf-8")("replace"), np.cumsum(sizes).tolist()
    return [decoder.decode(text[start:stop]) for start, stop in pairwise([0, *ends])]


def typical(documents: Sequence[Tensor], length: int) -> int:
    """The document whose first window deflates to the median size: neither a table of constants nor repetitions."""
    sizes = [len(compress(ids[: length + 1].numpy().tobytes())) for ids in documents]
    return sorted(range(len(sizes)), key=sizes.__getitem__)[len(sizes) // 2]


def bos_of(tokenizer: Any, choice: BOS) -> int | None:
    """The token that begins every window and prompt, or None. ValueError for "always" and a tokenizer that has none."""
    token, begin = tokenizer.bos_token_id, tokenizer("a").input_ids[:1]
    if choice == "always" and token is None:
        expected, remedy = "a tokenizer with a beginning-of-sequence token", "take --bos tokenizer or never"
        raise UsageError("--bos always", expected, "one without", remedy)
    puts = choice == "always" or (choice == "tokenizer" and token is not None and begin == [token])
    return token if puts else None


def documents_of(text: Text, tokenizer: Any, length: int, most: int) -> Documents:
    """At most `most` documents of `length` + 1 tokens, the same for the same text and tokenizer.

    A document is an excerpt of a document of the text, from a place drawn by the hash of its name, so that position in a window
    does not depend on the place in the file. If fewer than `most` and fewer than 20 documents are long enough, documents are
    consecutive blocks of the text's tokens, in the order of the hashes. Raises ValueError for a text that is too short.
    """
    ranked = sorted(text.documents, key=lambda named: name_hash(named[0]))
    excerpts: list[tuple[Tensor, Tensor, bytes]] = []
    for name, content in ranked:
        if len(content) > length:  # a token has at least one byte, unless several share a character
            ids, sizes = tokens_of(content.decode("utf-8"), tokenizer)
            if len(ids) > length:
                start = int(name_hash(name), 16) % (len(ids) - length)
                excerpts.append(_excerpt(ids, sizes, content, start, length + 1))
        if len(excerpts) == most:
            break
    unit = "excerpts, one of each document"
    if len(excerpts) < min(most, ENOUGH) or len(text.documents) < 2:
        excerpts, unit = _blocks(ranked, tokenizer, length, most, text.source), "blocks of joined documents"
    ids, sizes, texts = zip(*excerpts, strict=True)
    return Documents(list(ids), list(sizes), list(texts), unit)


def _excerpt(ids: Tensor, sizes: Tensor, content: bytes, start: int, count: int) -> tuple[Tensor, Tensor, bytes]:
    """`count` tokens from `start` on, their bytes, and the text that they stand for."""
    stop = start + count
    first, last = int(sizes[:start].sum()), int(sizes[:stop].sum())
    return ids[start:stop], sizes[start:stop], content[first:last]


def _blocks(
    ranked: list[tuple[str, bytes]], tokenizer: Any, length: int, most: int, source: str
) -> list[tuple[Tensor, Tensor, bytes]]:
    parts, read, count, most = [], b"", 0, most * (length + 1)
    for _, content in ranked:
        parts.append(tokens_of(content.decode("utf-8") + "\n", tokenizer))
        read += content + b"\n"
        count += len(parts[-1][0])
        if count >= most and len(ranked) > 1:
            break
    if count <= length:
        raise ValueError(
            f"the text ({source}) is {count} tokens long by this tokenizer, and the longest length needs {length + 1}: "
            f"{length} and the one after them; give a longer --text or a shorter length"
        )
    ids, sizes = (torch.cat(tensors) for tensors in zip(*parts, strict=True))
    whole = count // (length + 1)
    chosen = min(most // (length + 1), whole)
    return [_excerpt(ids, sizes, read, i * whole // chosen * (length + 1), length + 1) for i in range(chosen)]


def tokens_of(content: str, tokenizer: Any) -> tuple[Tensor, Tensor]:
    """Tokenize text: ids [n] without special tokens, and bytes [n] of the text from the end of the previous token to its end.

    The bytes of tokens therefore add up to the bytes of the text up to the end of the last token, however the tokenizer treats
    spaces. If tokens share a character, the first has its bytes and the others none.
    """
    if getattr(tokenizer, "is_fast", False):
        read = tokenizer(content, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
        ends = np.array([end for _, end in read["offset_mapping"]], dtype=np.int64)
        characters = np.frombuffer(content.encode("utf-32-le"), dtype=np.uint32)
        widths = 1 + (characters > 0x7F).astype(np.int64) + (characters > 0x7FF) + (characters > 0xFFFF)
        ends = np.concatenate([[0], np.cumsum(widths)])[ends]
    else:
        read = tokenizer(content, add_special_tokens=False, verbose=False)
        ends = ends_of(read["input_ids"], tokenizer)
        if len(ends) and ends[-1] != len(content.encode()):
            raise ValueError(
                f"the tokenizer ({type(tokenizer).__name__}) gives no offsets, and what it decodes has {ends[-1]} bytes where "
                f"the text has {len(content.encode())}, so that bits per byte would be wrong; take its fast version"
            )
    sizes = np.diff(np.maximum.accumulate(ends), prepend=0) if len(ends) else ends
    return torch.tensor(read["input_ids"], dtype=torch.int64), torch.from_numpy(np.asarray(sizes, dtype=np.int64))


def ends_of(ids: list[int], tokenizer: Any, back: int = 16) -> np.ndarray:
    """Bytes of decoded text up to the end of each token: the `back` tokens before it are decoded with and without it."""

    def size(some: list[int]) -> int:
        text = tokenizer.decode(some, clean_up_tokenization_spaces=False)
        return len(text.rstrip("\ufffd").encode())  # without a character whose last bytes are missing

    more = [size(ids[max(0, i - back) : i + 1]) - size(ids[max(0, i - back) : i]) for i in range(len(ids))]
    return np.cumsum(np.array(more, dtype=np.int64))
