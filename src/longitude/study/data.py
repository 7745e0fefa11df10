"""The text of a study: documents of tokens, split by document, and one order of training windows for every model.

A token is a byte, unless the study has a tokenizer; lengths are in tokens.
A text with at least 20 documents longer than the longest window is split by document. Documents are ordered by the hash of
their names: the first are for validation, the next for selection, all others for training. A text with fewer is cut into
contiguous blocks of four times the longest window. The blocks are then the documents; the tail is for validation, and the
blocks before it are for selection. Learning rates are chosen on the selection text. It is held out of every study, so that
rates can be added later.

A validation document is an excerpt from a place drawn by the hash of its name, so that position in a window is independent of
the place in the file. Training windows never cross documents. Each pass over the text lays non-overlapping windows in every
document from a new random offset, and shuffles them. They depend on text, seed, window and count, but not on the model.
"""

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from longitude.measure.sources import Text, name_hash, read_texts
from longitude.positions.samplers import Sampler
from longitude.study.config import StudyConfig, listed
from longitude.study.tokens import BYTES, Read, Reader, reader

ENOUGH = 20
"""Documents from which a text is split by document."""
BLOCK = 4
"""Length of a block, in longest windows."""
SHARE, SELECTION = 0.2, 0.1
"""Maximum shares of the eligible documents or blocks for validation and for selection."""


@dataclass(frozen=True)
class StudyData:
    """Data of a study, read before it begins.

    Attributes:
        training: Documents of tokens, integers [n] each (bytes: uint8); empty if examples are drawn.
        validation: Held-out documents of tokens, int64 [n] each.
        selection: Windows on which learning rates are chosen, each with the token after it.
        description: Description of the data for question.json.
        token_bytes: Bytes of each token in the validation documents; None if a token is a byte.
        apart: Documents from which the selection windows were cut, int64 [n] each.
        start: For each seed, the file of weights that training starts from; empty if weights are random.
    """

    training: list[np.ndarray]
    validation: list[Tensor]
    selection: list[np.ndarray]
    description: dict[str, Any]
    token_bytes: list[Tensor] | None = None
    apart: Sequence[Tensor] = ()
    start: Mapping[int, bytes] = field(default_factory=dict)

    @property
    def bytes_per_token(self) -> float:
        """Mean bytes per token of the training text."""
        return self.description["training_bytes"] / sum(map(len, self.training))


class Examples(torch.utils.data.Dataset, ABC):
    """Training examples in their order, which the seed alone decides: example i as the model's forward takes it."""

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def targets(self, examples: int) -> int:
        """Tokens to predict in the first `examples` examples."""

    def read(self, examples: int) -> int:
        """Tokens that a model reads in them; the targets, unless it reads others."""
        return self.targets(examples)


def prepare(config: StudyConfig) -> StudyData:
    """Read the text of a study and split it. ValueError: the text is missing, empty, not text, or too short."""
    text = read_texts(config.data)
    size = sum(len(content) for _, content in text.documents)
    if size == 0:
        raise ValueError(f"--data {listed(config.data)}: the text is empty; give a text with something to read")
    return split(
        text, config.longest, config.train_length, config.documents, reader(config.tokenizer), config.split_length
    )


def split(
    text: Text, longest: int, train_length: int, most: int, by: Reader = BYTES, split_length: int | None = None
) -> StudyData:
    """Text -> training and validation documents; `most` for validation, or fewer with as many longest windows together.

    split_length: what decides the split, by default the longest length; of held-out documents those longer than that one are
    measured.
    """
    split_length = split_length or longest
    documents = [(name, by.read(content)) for name, content in text.documents]
    eligible = [name for name, read in documents if len(read.ids) > split_length]
    by_document = len(eligible) >= ENOUGH
    if by_document:
        rank = sorted(eligible, key=name_hash)
        unit = "documents"
    else:
        documents = _blocks(text, BLOCK * split_length, by)
        rank = [name for name, _ in documents][::-1]
        unit = f"contiguous blocks of {BLOCK * split_length} {by.unit}"
    validated, selecting = (min(most, max(1, int(share * len(rank)))) for share in (SHARE, SELECTION))
    chosen, selected = {*rank[:validated]}, {*rank[validated : validated + selecting]}
    held = [(name, read) for name, read in documents if name in chosen and len(read.ids) > longest]
    if not held:
        most_held = max(len(read.ids) for name, read in documents if name in chosen)
        raise ValueError(
            f"--test-lengths: no held-out document is longer than {longest} {by.unit}, the longest has {most_held}, and others "
            f"are training text; name lengths below that, or another --out, where the split is made for {longest}"
        )
    windows = -(-most // len(held))
    training = [read for name, read in documents if name not in chosen | selected]
    usable = [read for read in training if len(read.ids) > train_length]
    if not usable:
        raise ValueError(
            f"the text has no training document longer than the training length {train_length}; "
            f"give a longer text or a shorter --train-length"
        )
    excerpts = [_excerpt(name, read, windows * longest + 1, longest) for name, read in held]
    measured = sum(len(excerpt.ids) - 1 for excerpt in excerpts) // longest
    if measured < most and longest <= split_length:
        raise ValueError(
            f"--documents {most} asks for as many windows of {longest} {by.unit} of held-out text, and {SHARE:.0%} of the "
            f"text ({text.source}) hold {measured}; give a longer text or --documents {measured}"
        )
    digest, training_digest = hashlib.sha256(), ""
    for part in (training, excerpts):
        _digest(digest, [read.ids for read in part])
        training_digest = training_digest or digest.hexdigest()
    each = -(-most // len(selected)) * split_length + 1
    apart = [_excerpt(name, read, each, train_length).ids for name, read in documents if name in selected]
    selection = [
        ids[at : at + train_length + 1] for ids in apart for at in range(0, len(ids) - train_length, train_length)
    ]
    description = {
        "source": text.source,
        "sha256": digest.hexdigest(),
        "training_sha256": training_digest,
        "selection_sha256": _digest(hashlib.sha256(), selection),
        "bytes": sum(len(content) for _, content in text.documents),
        "documents": len(text.documents),
        "left_out": text.left_out or None,
        "unit": unit,
        "training_documents": len(usable),
        "training_bytes": sum(read.size for read in usable),
        "training_documents_too_short": len(training) - len(usable),
        "selection_documents": len(apart),
        "selection_windows": len(selection),
        "validation_documents": len(excerpts),
        "validation_bytes": sum(excerpt.size for excerpt in excerpts),
        "validation_names": [name for name, _ in held],
        **by.description,
    }
    validation = [torch.from_numpy(excerpt.ids.astype(np.int64)) for excerpt in excerpts]
    sizes = [torch.from_numpy(each.bytes.astype(np.int64)) for each in excerpts if each.bytes is not None]
    whole = [torch.from_numpy(ids.astype(np.int64)) for ids in apart]
    return StudyData([read.ids for read in usable], validation, selection, description, sizes or None, whole)


def _digest(digest: Any, arrays: Sequence[np.ndarray]) -> str:
    """Hex digest after adding the number and contents of arrays to a hash."""
    digest.update(len(arrays).to_bytes(8))
    for array in arrays:
        content = array.tobytes()
        digest.update(len(content).to_bytes(8) + content)
    return digest.hexdigest()


def _blocks(text: Text, size: int, by: Reader) -> list[tuple[str, Read]]:
    """The whole text in blocks of `size` tokens, documents joined by a newline; the rest is part of the first block."""
    whole = by.read(b"\n".join(content for _, content in text.documents))
    length = len(whole.ids)
    count = length // size
    if count < 3:
        raise ValueError(
            f"the text ({text.source}) is {length} {by.unit} long and must be at least {3 * size}: three blocks of {BLOCK} "
            f"times the longest window {size // BLOCK}; give a longer text or shorter --test-lengths"
        )
    rest = length - count * size
    cuts = [0, *range(rest + size, length + 1, size)]
    return [(f"block {i}", whole.part(cuts[i], cuts[i + 1])) for i in range(count)]


def _excerpt(name: str, read: Read, most: int, longest: int) -> Read:
    """As many as n * longest + 1 tokens, n as large as `most` allows, from a place that the name draws."""
    length = min(len(read.ids) - 1, most - 1) // longest * longest + 1
    start = int(name_hash(name), 16) % (len(read.ids) - length + 1)
    return read.part(start, start + length)


class Fixed(Examples):
    """Examples that no seed decides: name -> [N, ...]."""

    def __init__(self, **parts: Tensor):
        self.parts = parts

    def __len__(self) -> int:
        return len(next(iter(self.parts.values())))

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {name: part[index] for name, part in self.parts.items()}

    def targets(self, examples: int) -> int:
        *_, labels = self.parts.values()
        return int((labels[:examples] >= 0).sum())


class Windows(Examples):
    """`count` training windows in their order: window i is {"input_ids": [length], "shift_labels": [length]}, int64.

    With a sampler also "position_ids" [length], which the seed and i decide, whatever was drawn before.
    """

    def __init__(
        self, documents: Sequence[np.ndarray], length: int, count: int, seed: int, positions: Sampler | None = None
    ):
        self.text = np.concatenate(documents)
        self.length, self.seed, self.positions = length, seed, positions
        sizes = np.array([len(document) for document in documents])
        begins = np.cumsum(sizes) - sizes
        random = np.random.default_rng(seed)
        passes, laid = [], 0
        while laid < count:
            offsets = random.integers(0, np.minimum(length, sizes - length))  # each document holds a window after it
            fit = (sizes - 1 - offsets) // length
            place = np.arange(fit.sum()) - np.repeat(np.cumsum(fit) - fit, fit)
            starts = np.repeat(begins + offsets, fit) + place * length
            passes.append(random.permutation(starts))
            laid += len(starts)
        self.starts = np.concatenate(passes)[:count]

    def __len__(self) -> int:
        return len(self.starts)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        start = self.starts[index]
        window = torch.from_numpy(self.text[start : start + self.length + 1].astype(np.int64))
        item = {"input_ids": window[:-1], "shift_labels": window[1:]}
        if self.positions is not None:
            item["position_ids"] = sampled(self.positions, self.length, self.seed, index)
        return item

    def targets(self, examples: int) -> int:
        return examples * self.length


def sampled(positions: Sampler, length: int, *seeds: int) -> Tensor:
    """Positions [length] of one training sequence, which the seeds alone decide."""
    first, *rest = seeds
    own = np.random.SeedSequence(first, spawn_key=rest).generate_state(1)[0]
    return positions(1, length, torch.Generator().manual_seed(int(own)))[0]
