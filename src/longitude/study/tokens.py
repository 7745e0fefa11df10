"""Inputs of a study's models: the bytes of a text, or the tokens of a tokenizer with their bytes."""

import hashlib
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from longitude.checkpoints.load import read_tokenizer
from longitude.measure.documents import ends_of, pieces_of, tokens_of
from longitude.study.config import BYTE


class Read(NamedTuple):
    """A tokenized document: ids [n], and the number of bytes of each [n]; None if a token is a byte."""

    ids: np.ndarray
    bytes: np.ndarray | None = None

    def part(self, start: int, stop: int) -> "Read":
        """The tokens from `start` on, up to `stop`."""
        return Read(self.ids[start:stop], None if self.bytes is None else self.bytes[start:stop])

    @property
    def size(self) -> int:
        """Size of the text in bytes."""
        return len(self.ids) if self.bytes is None else int(self.bytes.sum())


class Reader:
    """Reads text by `--tokenizer`: "byte", a tokenizer.json, a folder that has one, or a name on the hub.

    Attributes:
        tokenizer: A tokenizer of transformers; None for bytes.
        vocabulary: Number of token ids.
    """

    def __init__(self, name: str = BYTE):
        """ValueError if there is no such tokenizer."""
        self.name, self.tokenizer, self.vocabulary = name, None, 256
        if name != BYTE:
            self.tokenizer = _tokenizer(name)
            self.vocabulary = 1 + max(self.tokenizer.get_vocab().values())

    def read(self, content: bytes) -> Read:
        """UTF-8 -> tokens, without special ones."""
        if self.tokenizer is None:
            return Read(np.frombuffer(content, np.uint8))
        ids, sizes = tokens_of(content.decode("utf-8"), self.tokenizer)
        return Read(ids.numpy().astype(np.int32), sizes.numpy().astype(np.int32))

    def pieces(self, ids: Sequence[int]) -> list[str]:
        """The text of each token, as `pieces_of`; many tokenizers decode a single one without the space before it."""
        if self.tokenizer is None:
            return pieces_of(bytes(ids), np.ones(len(ids), np.int64))
        text = self.tokenizer.decode(ids, clean_up_tokenization_spaces=False)
        # a token with a part of a character may change the text of the token before it
        ends = np.maximum.accumulate(ends_of([*ids], self.tokenizer))
        return pieces_of(text.encode(), np.diff(ends, prepend=0))

    @property
    def unit(self) -> str:
        """Unit of lengths."""
        return "bytes" if self.tokenizer is None else "tokens"

    @property
    def description(self) -> dict[str, Any]:
        """The tokenizer for question.json; empty for bytes."""
        if self.tokenizer is None:
            return {}
        whole = getattr(self.tokenizer, "backend_tokenizer", None)
        state = whole.to_str() if whole is not None else repr(sorted(self.tokenizer.get_vocab().items()))
        about = {"name": self.name, "vocabulary": self.vocabulary, "sha256": hashlib.sha256(state.encode()).hexdigest()}
        return {"tokenizer": about}


BYTES = Reader()


@lru_cache(maxsize=4)
def reader(name: str) -> Reader:
    """The reader of a --tokenizer; loaded once. ValueError if there is none."""
    return Reader(name)


def _tokenizer(name: str) -> Any:
    path = Path(name).expanduser()
    place = "there is no such file or folder, and no such name on the hub; byte reads bytes"
    problem = f"--tokenizer {name}: {'it cannot be loaded' if path.exists() else place}"
    return read_tokenizer(str(path) if path.exists() else name, problem)
