"""The text of a study: one split by the hashes of names, and one order of training windows for every model.

A token is a byte, unless the study has a tokenizer; lengths are in tokens.
What is held out depends on the text alone, whatever lengths and however many documents are asked. Packages, in the order of the
hashes of their names, are held out for measuring while they fit into a fifth of the text, and for selection while they fit into a
tenth; all others are for training. A package is a folder directly below the root of a source, or a file there. Near-duplicates
are within one package, so they are on one side. A text without such folders, or of packages too large for that, is split by
file. If files are too large for that, each is cut: the last fifth is for measuring, the tenth before it for selection. Learning
rates are chosen on the selection text.

A document is measured in an excerpt, whose start is drawn by the hash of its name, so that position in a window is independent
of the place in the file. Parts of files, and documents that are too short, are joined and measured in blocks. Training windows
never cross documents, unless these are too short and were joined. Each pass over the text lays non-overlapping windows in every
document from a new random offset, and shuffles them. They depend on text, seed, window and count, but not on the model.
"""

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import numpy as np
import torch
from torch import Tensor

from longitude.errors import UsageError
from longitude.measure.config import listed
from longitude.measure.sources import Text, name_hash, read_texts
from longitude.positions.samplers import Sampler
from longitude.study.config import StudyConfig
from longitude.study.tokens import BYTES, Read, Reader, reader

SHARES = {"validation": 20, "selection": 10}
"""Maximum percentages of the text that are held out."""
FULL = 0.5
"""Smallest part of a share that must be filled; else smaller units are held out."""
WINDOWS = 4
"""Longest windows that each document is measured in, on average."""
FEWEST = 5
"""Minimum number of documents longer than a window; with fewer, all documents are joined."""
SELECTED, SELECTION = 100, 1024
"""Maximum documents that learning rates are chosen on, and maximum tokens of each; one window, if that is longer."""
BLOCKS = "blocks"
"""Word for a split by parts of files, if packages and files are too large to keep whole."""
LONGER = "give a longer text or a shorter length"
Documents = list[tuple[str, bytes]]


@dataclass(frozen=True)
class StudyData:
    """Data of a study, read before it begins.

    Attributes:
        training: Documents of tokens for training, integers [n] each (bytes: uint8); empty if examples are drawn.
        validation: Held-out documents of tokens, int64 [n] each.
        description: Description of the data for question.json.
        token_bytes: Bytes of each token in the validation documents; None if a token is a byte.
        apart: Documents held out for selection, int64 [n] each, in the order of the hashes of their names.
        separator: Tokens between documents that are joined.
        start: For each seed, the file of weights that training starts from; empty if weights are random.
    """

    training: list[np.ndarray]
    validation: list[Tensor]
    description: dict[str, Any]
    token_bytes: list[Tensor] | None = None
    apart: Sequence[Tensor] = ()
    separator: np.ndarray = field(default_factory=lambda: np.frombuffer(b"\n", np.uint8))
    start: Mapping[int, bytes] = field(default_factory=dict)

    @property
    def bytes_per_token(self) -> float:
        """Mean bytes per token of the training text."""
        return self.description["training_bytes"] / sum(map(len, self.training))

    def selection(self, length: int) -> list[np.ndarray]:
        """Windows on which learning rates are chosen, each with the token after it [length + 1]."""
        most = max(1, SELECTION // length) * length
        documents = longer([document.numpy() for document in self.apart], length, self.separator)[:SELECTED]
        return [ids[at : at + length + 1] for ids in documents for at in range(0, min(most, len(ids) - length), length)]

    def trainable(self, length: int) -> list[np.ndarray]:
        """The documents that training windows of a length are cut from."""
        return longer(self.training, length, self.separator)


class Examples(torch.utils.data.Dataset, ABC):
    """Training examples in their order, which the seed alone decides: example i has the arguments of the model's forward."""

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def targets(self, examples: int) -> int:
        """Tokens to predict in the first `examples` examples."""

    def read(self, examples: int) -> int:
        """Input tokens of these examples; by default as many as the targets."""
        return self.targets(examples)


def prepare(config: StudyConfig) -> StudyData:
    """Read the text of a study and split it. ValueError: the text is missing, empty, not text, or too short."""
    text = read_texts(config.data)
    if _size(text.documents) == 0:
        raise ValueError(f"--data {listed(config.data)}: the text is empty; give a text with something to read")
    roots = [f"{source}/" for source in config.data] if len(config.data) > 1 else []
    return split(text, config.longest, config.train_length, config.documents, reader(config.tokenizer), roots)


def split(
    text: Text, longest: int, train_length: int, most: int, by: Reader = BYTES, roots: Sequence[str] = ()
) -> StudyData:
    """Text -> documents for training, selection and measuring.

    Args:
        text: All of it.
        longest: Tokens of the longest window. It decides what is measured of the held-out documents, not which are held out.
        train_length: Tokens of a training window.
        most: Maximum number of documents to measure on.
        by: Reads the documents.
        roots: Prefixes of names, one per source, if there are several sources.
    """
    sides, split_by = sides_of(text, roots)
    training, apart = ([by.read(content) for _, content in sides[side]] for side in ("training", "selection"))
    separator = by.read(b"\n").ids
    measured, unit = _measured(sides["validation"], longest, most, by, split_by == BLOCKS)
    usable = longer([document.ids for document in training], train_length, separator)
    selected = longer([document.ids for document in apart], train_length, separator)
    for part, there in {"training": usable, "selection": selected, "validation": measured}.items():
        option, length = ("--test-lengths", longest) if part == "validation" else ("--train-length", train_length)
        if not there:
            has, whole = (sum(len(content) for _, content in some) for some in (sides[part], text.documents))
            expected = f"{part} text with a window of {length} {by.unit}"
            got = f"{has} of the {whole} bytes of {text.source}"
            raise UsageError(option, expected, got, LONGER)
    digest = hashlib.sha256()
    training_digest = _digest(digest, [document.ids for document in training])
    excerpts = [document for _, document in measured]
    description = {
        "source": text.source,
        "sha256": _digest(digest, [document.ids for document in excerpts]),
        "training_sha256": training_digest,
        "selection_sha256": _digest(hashlib.sha256(), [document.ids for document in apart]),
        "bytes": _size(text.documents),
        "documents": len(text.documents),
        "left_out": text.left_out or None,
        "split_by": split_by,
        "unit": unit,
        "training_documents": len(training),
        "training_bytes": sum(document.size for document in training),
        "training_documents_too_short": sum(len(document.ids) <= train_length for document in training)
        * (len(usable) > 1),
        "selection_documents": len(apart),
        "validation_documents": len(excerpts),
        "validation_windows": sum(len(document.ids) - 1 for document in excerpts) // longest,
        "validation_bytes": sum(document.size for document in excerpts),
        "validation_names": [name for name, _ in measured],
        **by.description,
    }
    chosen, validation = (
        [torch.from_numpy(document.ids.astype(np.int64)) for document in some] for some in (apart, excerpts)
    )
    sizes = [torch.from_numpy(document.bytes.astype(np.int64)) for document in excerpts if document.bytes is not None]
    return StudyData([document.ids for document in training], validation, description, sizes or None, chosen, separator)


# ---- what is held out -------------------------------------------------------------------------------------------------
def sides_of(text: Text, roots: Sequence[str] = ()) -> tuple[dict[str, Documents], str]:
    """The documents for "training", "selection" and "validation", and the unit of the split: packages, files or blocks.

    Held-out documents are in the order of the hashes of their names.
    """
    packages = {package for name, _ in text.documents if (package := package_of(name, roots)) != name}
    by_package = [("packages", lambda name: package_of(name, roots))] if len(packages) > 1 else []
    for split_by, unit_of in [*by_package, ("files", str)]:
        sides = _held_out(text.documents, unit_of)
        if all(_size(sides[side]) * 100 >= FULL * share * _size(text.documents) for side, share in SHARES.items()):
            return sides, split_by
    sides = {}
    for side, edges in {"training": (0, 70), "selection": (70, 80), "validation": (80, 100)}.items():
        sides[side] = [(name, part) for name, content in text.documents if (part := _part(content, *edges))]
    return sides, BLOCKS


def package_of(name: str, roots: Sequence[str] = ()) -> str:
    """The first folder below the root of a document's source, with the root; the document's name if it is in no folder."""
    root = next((root for root in roots if name.startswith(root)), "")
    first, slash, _ = name[len(root) :].partition("/")
    return root + first if slash else name


def _held_out(documents: Documents, unit_of: Callable[[str], str]) -> dict[str, Documents]:
    """Units on the first side where they fit, in the order of the hashes of their names."""
    units: dict[str, Documents] = {}
    for name, content in documents:
        units.setdefault(unit_of(name), []).append((name, content))
    held: dict[str, set[str]] = {side: set() for side in SHARES}
    sizes, whole = dict.fromkeys(SHARES, 0), _size(documents)
    for unit in sorted(units, key=name_hash):
        for side, share in SHARES.items():
            if (size := sizes[side] + _size(units[unit])) * 100 <= share * whole:
                held[side].add(unit)
                sizes[side] = size
                break
    out = set[str]().union(*held.values())
    sides = {side: [named for unit in chosen for named in units[unit]] for side, chosen in held.items()}
    ranked = {
        side: sorted(named_documents, key=lambda named: name_hash(named[0])) for side, named_documents in sides.items()
    }
    return {"training": [named for named in documents if unit_of(named[0]) not in out], **ranked}


def _part(content: bytes, start: int, stop: int) -> bytes:
    """From `start` to `stop` percent of a document, between characters."""
    places = [len(content) * percent // 100 for percent in (start, stop)]
    begins = lambda i: content[i] & 0xC0 != 0x80  # noqa: E731 - whether a UTF-8 character starts at i
    first, last = (next(filter(begins, range(place, len(content))), len(content)) for place in places)
    return content[first:last]


def _size(documents: Documents) -> int:
    return sum(len(content) for _, content in documents)


# ---- what is trained and measured on ----------------------------------------------------------------------------------
def longer(documents: Sequence[np.ndarray], length: int, separator: np.ndarray) -> list[np.ndarray]:
    """Documents longer than a window; if these are fewer than `FEWEST`, all joined, unless that is too short as well."""
    usable = [ids for ids in documents if len(ids) > length]
    if len(usable) >= FEWEST or not documents:
        return usable
    joined = np.concatenate([part for ids in documents for part in (ids, separator)][:-1])
    return [joined] * (len(joined) > length)


def _measured(held: Documents, longest: int, most: int, by: Reader, cut: bool) -> tuple[list[tuple[str, Read]], str]:
    """At most `most` excerpts of held-out documents or blocks, by the hashes of their names; and the word for them."""
    read = [(name, by.read(content)) for name, content in held] if not cut else []
    long = [(name, document) for name, document in read if len(document.ids) > longest]
    if len(long) >= FEWEST:
        fit = [(len(read.ids) - 1) // longest for _, read in long[:most]]
        enough = (n for n in count(WINDOWS) if n >= max(fit) or sum(min(n, length) for length in fit) >= WINDOWS * most)
        size = next(enough) * longest + 1
        return [(name, _excerpt(name, read, size, longest)) for name, read in long[:most]], "documents"
    whole = by.read(b"\n".join(content for _, content in held))
    windows, block = (len(whole.ids) - 1) // longest, WINDOWS * longest
    ends = [min((i + 1) * block, windows * longest) + 1 for i in range(-(-windows // WINDOWS))]
    every = [(f"block {i}", whole.part(i * block, end)) for i, end in enumerate(ends)]
    return sorted(every, key=lambda named: name_hash(named[0]))[:most], f"{BLOCKS} of {block} {by.unit}"


def _digest(digest: Any, arrays: Sequence[np.ndarray]) -> str:
    """Hex digest after adding the number and contents of arrays to a hash."""
    digest.update(len(arrays).to_bytes(8))
    for array in arrays:
        content = array.tobytes()
        digest.update(len(content).to_bytes(8) + content)
    return digest.hexdigest()


def _excerpt(name: str, read: Read, most: int, longest: int) -> Read:
    """An excerpt of n * longest + 1 tokens, n as large as `most` and the document allow; the name's hash draws its place."""
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
            offsets = random.integers(0, np.minimum(length, sizes - length))  # then one window fits
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
    seed = np.random.SeedSequence(first, spawn_key=rest).generate_state(1)[0]
    return positions(1, length, torch.Generator().manual_seed(int(seed)))[0]
