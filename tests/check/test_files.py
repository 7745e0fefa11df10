"""What generation_config.json and tokenizer_config.json say beside config.json."""

import json

import pytest

from longitude.check import check_subject, subject_of
from longitude.checkpoints.load import load
from tests.check import broken_caches
from tests.check.building import LENGTH, llama


@pytest.fixture
def result(tmp_path):
    """What the law says of a folder with these two files, and of a model in memory in its place."""
    llama(eos_token_id=2).save_pretrained(tmp_path)

    def of(generation=None, tokenizer=None, model=None):
        for name, content in (("generation_config", generation), ("tokenizer_config", tokenizer)):
            (tmp_path / f"{name}.json").unlink(missing_ok=True)
            if content is not None:
                (tmp_path / f"{name}.json").write_text(json.dumps(content))
        checkpoint = load(tmp_path, tokenizer=False) if model is None else model
        return check_subject(subject_of(checkpoint, folder=tmp_path), ["generation_files"])["generation_files"]

    return of


def test_what_may_be_on_purpose_is_noted(result):
    found = result({"eos_token_id": [0], "max_length": 20}, {"model_max_length": LENGTH // 2})
    assert found.status == "holds"
    assert "ends at 0, config.json has eos_token_id 2" in found.reason
    assert "max_length = 20" in found.reason and f"model_max_length = {LENGTH // 2}" in found.reason
    found = result({"eos_token_id": [7, 2], "max_length": LENGTH}, {"model_max_length": 1e30})
    assert (found.status, found.reason) == ("holds", "")
    assert result().status == "does not apply"


def test_a_token_that_does_not_exist(result):
    found = result({"eos_token_id": 2, "pad_token_id": 4000})
    assert (found.status, found.whose) == ("broken", "config") and "pad_token_id = 4000" in found.reason


def test_a_kind_of_cache_that_changes_logits(result):
    assert result({"cache_implementation": "static"}).status == "holds"
    found = result({"cache_implementation": "static"}, model=broken_caches.counted_in_places())
    assert found.status == "broken" and "'static'" in found.reason and found.measured == 1
    assert "'rolling'" in result({"cache_implementation": "rolling"}, model=llama()).reason
