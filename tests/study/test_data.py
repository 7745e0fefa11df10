"""Text in, documents and windows out: split by document, the same order for every model, no byte crossing over."""

import hashlib
import math
from pathlib import Path

import numpy as np
import pytest
import torch

from longitude.checkpoints.load import byte_tokenizer, load
from longitude.measure.sources import read_text, read_texts
from longitude.positions.samplers import Randomized
from longitude.runs.store import Store
from longitude.study.config import StudyConfig
from longitude.study.data import WINDOWS, Text, Windows, package_of, prepare, sides_of, split
from longitude.study.plan import plan
from longitude.study.runner import study
from longitude.study.tasks.base import Measuring, task_for, task_of
from longitude.study.tokens import BYTES, Reader, reader
from longitude.study.train import build_model
from tests.measure.conftest import byte_pairs
from tests.study.conftest import NUMBERS
from tests.support import refused


def words(count: int, start: int = 0) -> bytes:
    """`count` bytes of text in which every four bytes are different."""
    return b"".join(b"%03x " % i for i in range(start, start + count // 4 + 1))[:count]


def config(data: Path | str, **more) -> StudyConfig:
    sizes = {"train_length": 16, "test_lengths": (16, 64), "documents": 4}
    return StudyConfig(data=tuple(str(data).split()), **sizes | more)


def folder(root: Path, sizes: list[int]) -> Path:
    for i, size in enumerate(sizes):
        (root / f"part{i % 3}").mkdir(exist_ok=True)
        (root / f"part{i % 3}" / f"{i}.txt").write_bytes(words(size, 1000 * i))
    return root


# ---- the split --------------------------------------------------------------------------------------------------------
def sides(data) -> dict[str, bytes]:
    """What is on each side, in one piece."""
    tensors = {"selection": data.apart, "validation": data.validation}
    return {"training": b"|".join(each.tobytes() for each in data.training)} | {
        side: b"|".join(bytes(each.tolist()) for each in some) for side, some in tensors.items()
    }


def test_many_files_are_split_by_file(tmp_path):
    data = prepare(config(folder(tmp_path, [65 + i for i in range(30)]), documents=100))
    of = data.description
    assert (of["split_by"], of["unit"]) == ("files", "documents")  # a folder is a third of the text, which is too much
    assert 3 <= len(data.validation) <= 6 and 2 <= len(data.apart) <= 3
    assert len(data.training) + len(data.apart) + len(data.validation) == 30
    assert {len(document) for document in data.validation} == {65}
    found = sides(data)
    for side, own in found.items():
        others = b"|".join(text for name, text in found.items() if name != side)
        assert not any(part[4:24] in others for part in own.split(b"|"))
    assert {len(window) for window in data.selection(16)} == {17}


@pytest.mark.parametrize("options", [{"longest": 512}, {"documents": 3}, {"train_length": 32}], ids=str)
def test_what_is_held_out_does_not_depend_on_what_is_asked(options):
    """Neither side gains or loses a byte with other lengths and more documents, whatever the text is cut by."""
    files = [(f"{i}.txt", words(100 + 40 * i, 1000 * i)) for i in range(40)]
    for name, content in {"files": files, "one": [("a", words(9000))]}.items():
        sizes = {"longest": 64, "train_length": 16, "documents": 4}
        first, other = (split(Text(name, content), *of.values()) for of in (sizes, sizes | options))
        for key in ("training_sha256", "selection_sha256", "split_by"):
            assert first.description[key] == other.description[key]
        held = {name for name, _ in sides_of(Text(name, content))[0]["validation"]}
        assert name == "one" or {*first.description["validation_names"], *other.description["validation_names"]} <= held


@pytest.mark.parametrize("roots", [(), ("one/", "two/")], ids=str)
def test_no_package_is_on_two_sides(roots):
    """Folders below the root, of each source; the files of one are near-duplicates."""
    names = [f"{root}p{i % 25}/part/{i}.py" for root in roots or ("",) for i in range(100)]
    found, split_by = sides_of(Text("", [(name, words(300, i % 25)) for i, name in enumerate(names)]), roots)
    packages = {side: {package_of(name, roots) for name, _ in documents} for side, documents in found.items()}
    assert split_by == "packages" and sum(map(len, packages.values())) == len(set().union(*packages.values()))
    assert all(packages.values()) and sum(map(len, found.values())) == len(names)
    assert {len(name.split("/")) for each in packages.values() for name in each} == {2 if roots else 1}


def test_a_side_has_at_most_its_share_and_at_least_half_of_it():
    sizes = [10, 3000, 40, 700, 500, 900, 60, 800, 20, 650, 300, 450] * 3
    text = Text("", [(f"{i}.py", words(size, 1000 * i)) for i, size in enumerate(sizes)])
    found, split_by = sides_of(text)
    shares = {side: sum(len(content) for _, content in found[side]) / sum(sizes) for side in found}
    assert split_by == "files" and 0.1 <= shares["validation"] <= 0.2 and 0.05 <= shares["selection"] <= 0.1


def by_hash(names) -> list[str]:
    return sorted(names, key=lambda name: hashlib.sha256(name.encode()).hexdigest())


def test_what_is_held_out_is_first_by_the_hashes_of_names():
    """Names that are alike, as those of one author or year, are then on all sides."""
    names = [f"{i:02}.py" for i in range(80)]
    found, _ = sides_of(Text("", [(name, words(100, i)) for i, name in enumerate(names)]))
    held = {side: [name for name, _ in documents] for side, documents in found.items()}
    assert held["validation"] + held["selection"] == by_hash(names)[:24] and len(held["validation"]) == 16


def test_packages_that_fill_less_than_half_of_a_share_are_split_by_file():
    """Three of 6% each are for measuring, and one of 3% is all that is left for selection; 5% are not."""
    first, second, third, last = by_hash("abcd")
    for files, split_by in ((3, "files"), (5, "packages")):
        sizes = {first: 6, second: 6, third: 6, last: files, "large": 82 - files}
        names = [f"{package}/{i}.py" for package, count in sizes.items() for i in range(count)]
        assert sides_of(Text("", [(name, words(100, i)) for i, name in enumerate(names)]))[1] == split_by


def test_few_files_are_cut_and_measured_in_blocks(tmp_path):
    data = prepare(config(folder(tmp_path, [10_000, 6_000]), documents=100))
    of, found = data.description, sides(data)
    assert of["split_by"] == "blocks" and of["unit"] == f"blocks of {WINDOWS * 64} bytes"
    assert [len(each) for each in data.training] == [7000, 4200] and [len(each) for each in data.apart] == [1000, 600]
    windows, sizes = of["validation_windows"], [len(each) for each in data.validation]
    assert windows == (2000 + 1 + 1200 - 1) // 64 == sum(size - 1 for size in sizes) // 64
    assert max(sizes) == WINDOWS * 64 + 1 and len(sizes) == math.ceil(windows / WINDOWS)
    whole = words(10_000)[8000:] + b"\n" + words(6_000, 1000)[4800:]
    assert all(part in whole for part in found["validation"].split(b"|"))
    assert found["training"] == words(10_000)[:7000] + b"|" + words(6_000, 1000)[:4200]


def test_files_are_cut_between_characters():
    content = "é—".encode() * 201
    found, split_by = sides_of(Text("", [("a", content)]))
    parts = [part for side in ("training", "selection", "validation") for _, part in found[side]]
    assert split_by == "blocks" and b"".join(parts) == content and "".join(part.decode() for part in parts)
    assert [len(part) for part in parts] == pytest.approx([703, 101, 201], abs=3)


def test_documents_that_are_too_short_are_joined_on_their_side():
    text = Text("", [(f"{i}", words(20, 100 * i)) for i in range(200)])
    data, of_short = split(text, 64, 32, 100), split(text, 16, 8, 100)
    assert data.description["unit"] == f"blocks of {WINDOWS * 64} bytes" and of_short.description["unit"] == "documents"
    assert data.description["training_sha256"] == of_short.description["training_sha256"]
    assert [len(each) for each in data.trainable(32)] == [21 * len(data.training) - 1]
    assert len(of_short.trainable(8)) == len(data.training) and {*map(len, data.selection(32))} == {33}


def test_each_document_is_measured_in_four_of_the_longest_windows_on_average():
    """More of those that are long where others are short, and fewer in all where the text has no more."""
    sizes = {f"{i}": 4 * 64 + 1 for i in range(60)}
    measured = split(Text("", [(name, words(size, 1000 + int(name))) for name, size in sizes.items()]), 64, 16, 6)
    assert [len(each) for each in measured.validation] == [4 * 64 + 1] * 6
    long, short = words(8 * 64 + 1, 5000), words(2 * 64 + 1, 9000)
    mixed = split(Text("", [(f"{i}", long if i % 2 else short) for i in range(60)]), 64, 16, 8)
    assert mixed.description["validation_windows"] >= 4 * len(mixed.validation)
    little = split(Text("", [(name, words(2 * 64 + 1, int(name))) for name in sizes]), 64, 16, 6)
    assert little.description["validation_windows"] == 2 * 6


def test_the_hash_is_of_what_is_trained_and_measured_on():
    text = words(2000)
    contents = {"a": text, "b": text, "tail": text[:-1] + b"#", "head": b"#" + text[1:]}
    found = {name: split(Text(name, [(name, each)]), 64, 16, 3) for name, each in contents.items()}
    hashes = {name: data.description["sha256"] for name, data in found.items()}
    assert hashes["a"] == hashes["b"] != hashes["head"]


# ---- windows ----------------------------------------------------------------------------------------------------------
def test_windows_never_cross_documents_and_targets_are_the_next_bytes():
    documents = [np.full(17, 0, np.uint8), np.full(33, 1, np.uint8), np.arange(100, 200, dtype=np.uint8)]
    windows = Windows(documents, 16, 200, seed=3)
    assert len(windows) == 200
    for i in range(200):
        inputs, targets = windows[i]["input_ids"], windows[i]["shift_labels"]
        assert inputs.shape == targets.shape == (16,) and inputs.dtype == targets.dtype == torch.int64
        assert torch.equal(inputs[1:], targets[:-1])
        assert set((targets - inputs).tolist()) in ({0}, {1})  # inside one document


def test_a_pass_covers_every_document_evenly():
    documents = [np.zeros(17, np.uint8), np.ones(16 * 50 + 1, np.uint8)]
    windows = Windows(documents, 16, 50 * 4, seed=0)
    first = sorted(int(windows[i]["input_ids"][0]) for i in range(50))
    assert first.count(0) == 1 and first.count(1) == 49
    starts = windows.starts[:50]
    assert len(set(starts)) == 50 and all(b - a >= 16 for a, b in zip(sorted(starts), sorted(starts)[1:]))


def test_order_is_a_function_of_text_and_seed_alone():
    documents = [np.frombuffer(words(500, i), np.uint8) for i in range(5)]
    one, again, other = (Windows(documents, 16, 300, seed) for seed in (0, 0, 1))
    torch.manual_seed(99)
    np.testing.assert_array_equal(one.starts, again.starts)
    assert (one.starts != other.starts).any()
    np.testing.assert_array_equal(Windows(documents, 16, 100, 0).starts, one.starts[:100])  # more steps only add


def test_sampled_positions_belong_to_the_seed_and_the_window():
    documents = [np.frombuffer(words(500, i), np.uint8) for i in range(5)]

    def positions(count: int, seed: int) -> list[list[int]]:
        windows = Windows(documents, 16, count, seed, Randomized(48))
        return [windows[i]["position_ids"].tolist() for i in reversed(range(count))][::-1]  # in any order

    drawn = positions(40, 1)
    assert len({*map(tuple, drawn)}) == 40 and positions(90, 1)[:40] == drawn
    assert not any(one == other for one, other in zip(drawn, positions(40, 2), strict=True))
    assert Windows(documents, 16, 40, 1)[3].keys() == {"input_ids", "shift_labels"}  # contiguous: the model counts


# ---- sources, and bad ones ---------------------------------------------------------------------------------------------
def test_the_standard_library_is_text_enough_for_the_defaults():
    data, most = prepare(StudyConfig()), StudyConfig().documents
    of = data.description
    assert (of["unit"], of["split_by"], len(data.validation)) == ("documents", "packages", most)
    assert of["validation_windows"] >= 4 * most and of["training_bytes"] > 2_000_000 and "Python 3." in of["source"]
    assert all(len(document) % 1024 == 1 for document in data.validation)
    folders = {folder for name, _ in read_text("stdlib").documents for folder in name.split("/")[:-1]}
    assert not folders & {"site-packages", "test", "tests"}


def test_sources_of_an_installed_package_by_its_name(tmp_path, monkeypatch):
    for name in ("mine/__init__.py", "mine/part/one.py", "mine/tests/none.py", "mine/data.txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(f"# {name}")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert [name for name, _ in read_text("package:mine").documents] == ["__init__.py", "part/one.py"]
    for wrong in ("package:no_such_package", "package:math", "package:"):
        with refused(what=f"--data {wrong}"):
            read_text(wrong)


def test_bad_texts(tmp_path):
    contents = {"empty.txt": b"", "model.bin": b"\x00\x01\x02" * 1000, "short.txt": words(320)}
    for name, content in contents.items():
        (tmp_path / name).write_bytes(content)
    for name, message in (("empty.txt", "is empty"), ("model.bin", "expected UTF-8"), ("short.txt", "^--test-lengths")):
        with pytest.raises(ValueError, match=message):
            prepare(config(tmp_path / name))
    with pytest.raises(ValueError, match=r"^--train-length"):
        split(Text("", [(str(i), words(65)) for i in range(20)]), 64, 5000, 4)


def test_a_folder_names_what_it_leaves_out(tmp_path):
    folder(tmp_path, [3000])
    (tmp_path / "latin.txt").write_bytes("größe".encode("latin-1"))
    (tmp_path / "empty.txt").touch()
    (tmp_path / ".hidden").write_text("secret")
    text = read_text(str(tmp_path))
    assert [name for name, _ in text.documents] == ["part0/0.txt"]
    assert text.left_out == "1 files that are not UTF-8 text, such as latin.txt; 1 empty files"


def test_several_texts_are_one(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # names, which decide what is held out, begin with the place as it is given
    for i in range(2):
        (tmp_path / str(i)).mkdir()
        folder(tmp_path / str(i), [100] * 12)
    (tmp_path / "more.txt").write_bytes(words(500))
    places = ["0", "1", "more.txt"]
    text = read_texts(places)
    assert len(text.documents) == len(dict(text.documents)) == 25 and text.source == " and ".join(places)
    assert text.documents[-1] == (f"{places[2]}/more.txt", words(500))
    data = prepare(config(" ".join(places)))
    assert data.description["unit"] == "documents" and data.description["bytes"] == 24 * 100 + 500
    assert read_texts(places[:1]) == read_text(places[0])
    with pytest.raises(ValueError, match=r"--data 0/part0: it is part of 0 already"):
        read_texts([*places, f"{places[0]}/part0"])


# ---- tokens -----------------------------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory) -> str:
    """A byte-level BPE of 300 tokens, as a tokenizer.json."""
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    byte_pairs(["def longitude(latitude): return latitude"] * 9, 300).backend_tokenizer.save(str(path))
    return str(path)


def test_tokens_have_the_bytes_of_the_text(tokenizer):
    """In whatever it is written; and a token that is a byte is read as bytes are."""
    by = reader(tokenizer)
    content = "def größe(latitude): return 'λ \U0001f30d'\n\n  # latitude".encode()
    ids, sizes = by.read(content)
    assert sizes.sum() == len(content) > len(ids) and by.vocabulary > 256
    assert by.tokenizer.decode(ids) == content.decode()
    assert "".join(by.pieces(ids.tolist())) == content.decode()
    assert by.description["tokenizer"].keys() == {"name", "vocabulary", "sha256"}
    with_bytes = Reader(tokenizer)
    with_bytes.tokenizer = byte_tokenizer()
    text = words(2000)
    assert (with_bytes.read(text).ids == BYTES.read(text).ids).all() and (with_bytes.read(text).bytes == 1).all()


def test_a_uniform_model_of_tokens_has_log2_of_its_vocabulary_per_token(tokenizer, tmp_path):
    """Bits per byte = log2(vocabulary) tokens / bytes."""
    (tmp_path / "text").write_text("def latitude(longitude): return latitude\n" * 400)
    study = config(tmp_path / "text", tokenizer=tokenizer, layers=1, hidden=16, heads=2, methods=("non-overlapping",))
    data = prepare(study)
    assert data.description["unit"].endswith("256 tokens") and data.token_bytes is not None
    assert [len(each) for each in data.token_bytes] == [len(each) for each in data.validation]
    model = build_model(study, "rope", 0)
    assert model.config.vocab_size == reader(tokenizer).vocabulary
    for parameter in model.parameters():
        torch.nn.init.zeros_(parameter)
    task = task_for(study)
    assert (task.unit, task.loss_unit, task_of("text").unit) == ("tokens", "token", "bytes")
    labels = {"label": "rope", "seed": 0}
    rows, tables = task.measure(Measuring(model, study, data, [16], labels, lambda done, total: None))
    row, sizes = rows[0], sum(int(each[1:].sum()) for each in data.token_bytes)
    assert row.metric == "bits_per_byte" and tables[0]["bytes"].sum() == sizes > 2 * row.tokens
    assert row.value == pytest.approx(math.log2(model.config.vocab_size) * row.tokens / sizes)


@pytest.mark.slow
def test_a_model_of_tokens_is_trained_and_saved_with_its_tokenizer(tokenizer, tmp_path):
    (tmp_path / "text").write_text("def latitude(longitude): return latitude\n" * 400)
    small = {
        "encodings": ("rope",),
        "layers": 1,
        "hidden": 16,
        "heads": 2,
        "steps": 2,
        "batch_size": 2,
        "device": "cpu",
    }
    study_of_tokens = config(tmp_path / "text", tokenizer=tokenizer, **small)
    planned = plan(study_of_tokens, tmp_path / "run")
    assert study(planned).complete
    checkpoint = load(Store(planned.run).folder(planned.trials[0].training))
    ids = checkpoint.tokenizer("def latitude", add_special_tokens=False)["input_ids"]
    assert ids == list(reader(tokenizer).read(b"def latitude").ids)


def test_tokenizers_that_are_none(tmp_path):
    with pytest.raises(ValueError, match=r"^--tokenizer .*/nope: there is no such file or folder"):
        plan(StudyConfig(tokenizer=str(tmp_path / "nope")), tmp_path / "run")
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ValueError, match=r"^--tokenizer .*tokenizer.json: it cannot be loaded"):
        reader(str(tmp_path / "tokenizer.json"))


def test_windows_of_a_pass_are_shuffled_and_excerpts_begin_where_their_names_say(data):
    starts = Windows(data.training, 16, 20, 0).starts
    assert list(starts) != sorted(starts)
    first = {bytes(excerpt[:3].tolist()) for excerpt in data.validation}
    whole = {content[:3] for _, content in NUMBERS.documents}
    assert first - whole  # not all at the beginning of their document
