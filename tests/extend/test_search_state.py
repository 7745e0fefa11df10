"""What stays beside a search that goes on: refused where it is damaged, not taken where nothing says what it is of."""

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from longitude.extend.search import SearchResult, search

LENGTH = 64


@pytest.fixture
def call(checkpoint):
    """call(state) -> what a small search finds."""
    model = AutoModelForCausalLM.from_pretrained(checkpoint("llama")).eval()
    documents = [torch.randint(3, 250, (2 * LENGTH + 1,), generator=torch.Generator().manual_seed(i)) for i in range(2)]

    def found(state: Path) -> SearchResult:
        return search(model, documents, length=2 * LENGTH, original_length=LENGTH, state=state, evaluations=12)

    return found


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("search.json", b"[]"),
        ("search.json", b"{}"),
        ("search.json", b"{\xff"),
        ("search.json", None),  # as it was, without its budget
        ("tried.jsonl", b'{"x": 1}\n'),
        ("tried.jsonl", b"garbage\n"),
        ("tried.jsonl", b"\xff\xfe\n"),
        ("tried.jsonl", b"[1, 2]\n"),
        ("tried.jsonl", b'{"factors": [1.0], "attention_factor": 1.0, "loss": "low"}\n'),
    ],
)
def test_a_damaged_state_is_refused(name, content, call, tmp_path) -> None:
    call(tmp_path / "s")
    path = tmp_path / "s" / name
    if content is None:
        content = json.dumps(
            {key: each for key, each in json.loads(path.read_text()).items() if key != "budget"}
        ).encode()
    path.write_bytes(content)
    with pytest.raises(ValueError, match=f"{name} is damaged; remove {path.parent} to search again"):
        call(tmp_path / "s")
    assert path.read_bytes() == content


def test_losses_that_nothing_tells_of_are_not_taken(call, tmp_path) -> None:
    """Without search.json nobody knows which model tried.jsonl is of."""
    found = call(tmp_path / "s")
    log = tmp_path / "s" / "tried.jsonl"
    entries = [json.loads(line) | {"loss": 0.001} for line in log.read_text().splitlines()]
    log.write_text("".join(json.dumps(entry) + "\n" for entry in entries))
    (tmp_path / "s" / "search.json").unlink()
    assert call(tmp_path / "s") == found
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="is no folder"):
        call(tmp_path / "file")
