"""What the files beside config.json have: tensors that it does not describe, another generate(), a shorter tokenizer."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import GPT2LMHeadModel, GPTNeoForCausalLM

from longitude.check.run import check_subject, subject_of
from longitude.checkpoints.load import load
from tests.check import broken_caches
from tests.check.broken_models import gpt2
from tests.check.building import LENGTH, built, llama


@pytest.fixture
def result(tmp_path):
    """What the law says of a folder with these two files, and of a model in memory in its place."""
    llama(eos_token_id=2).save_pretrained(tmp_path)

    def of(generation=None, tokenizer=None, model=None, law="files", length=None):
        for name, content in (("generation_config", generation), ("tokenizer_config", tokenizer)):
            (tmp_path / f"{name}.json").unlink(missing_ok=True)
            if content is not None:
                (tmp_path / f"{name}.json").write_text(json.dumps(content))
        checkpoint = load(tmp_path, tokenizer=False) if model is None else model
        return check_subject(subject_of(checkpoint, folder=tmp_path, length=length), [law])[law]

    return of


def test_what_may_be_on_purpose_is_noted(result):
    found = result({"eos_token_id": [0], "max_length": 20}, {"model_max_length": LENGTH // 2})
    assert found.status == "passed"
    assert "ends at 0, config.json has eos_token_id 2" in found.reason
    assert "max_length = 20" in found.reason and f"model_max_length = {LENGTH // 2}" in found.reason
    found = result({"eos_token_id": [7, 2], "max_length": LENGTH}, {"model_max_length": 1e30})
    assert (found.status, found.reason) == ("passed", "")


def test_a_token_that_does_not_exist(result):
    found = result({"eos_token_id": 2, "pad_token_id": 4000})
    assert (found.status, found.whose) == ("failed", "the file") and "pad_token_id = 4000" in found.reason


@pytest.mark.one_in(2)
@pytest.mark.parametrize("length", [LENGTH + 1, LENGTH, 10**30])
def test_a_length_beyond_a_table_of_positions(result, length):
    """10^30 is how tokenizers write that there is none; a rotation has no end."""
    found = result({"max_length": length, "max_new_tokens": length}, {"model_max_length": length}, model=gpt2())
    broken = length == LENGTH + 1
    assert (found.status, found.measured) == (("failed", 3) if broken else ("passed", 0)), found
    assert result({"max_length": length}, {"model_max_length": length}).status == "passed"


def test_a_kind_of_cache_that_changes_logits(result):
    options = {"law": "cached_keys", "length": 16}
    assert result({"cache_implementation": "static"}, **options).status == "passed"
    found = result({"cache_implementation": "static"}, model=broken_caches.counted_in_places(), **options)
    assert (
        found.status == "failed" and "generate(): generation_config.json" in found.reason and "'static'" in found.reason
    )
    assert "'rolling'" in result({"cache_implementation": "rolling"}, model=llama(), **options).reason


def spoiled(folder, change, model):
    """A checkpoint whose tensors were changed by hand: change(tensors), in place."""
    model.save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return check_subject(subject_of(load(folder, tokenizer=False)), ["files"])["files"]


def another_layer(tensors):
    copies = {name.replace(".1.", ".2."): tensor.clone() for name, tensor in tensors.items() if ".layers.1." in name}
    tensors |= copies


def put(name, make):
    return lambda tensors: tensors.update({name: make(tensors)})


def embedding(factor):
    return lambda tensors: factor * tensors["model.embed_tokens.weight"]


HEAD = "lm_head.weight"
SCORE = put("score.weight", lambda tensors: torch.ones(2, 32))


@pytest.mark.parametrize(
    ("change", "keys", "count", "names"),
    [
        (another_layer, {}, 9, ["num_hidden_layers = 2", "model.layers.2.", "and 1 more"]),
        (put(HEAD, embedding(2.0)), {"tie_word_embeddings": True}, 1, [HEAD, "model.embed_tokens.weight"]),
        (SCORE, {}, 1, ["score.weight"]),
        (lambda tensors: (another_layer(tensors), SCORE(tensors)), {}, 10, ["model.layers.2.", "score.weight"]),
    ],
)
def test_tensors_that_config_json_does_not_describe(change, keys, count, names, tmp_path):
    found = spoiled(tmp_path, change, llama(**keys))
    assert (found.status, found.whose, found.measured) == ("failed", "the file", count)
    assert all(name in found.reason for name in names)


@pytest.mark.one_in(5)
@pytest.mark.parametrize(
    ("change", "keys"),
    [
        (lambda tensors: None, {}),
        (put(HEAD, embedding(1.0)), {"tie_word_embeddings": True}),
        (lambda tensors: None, {"tie_word_embeddings": True}),
        (put("model.layers.0.self_attn.rotary_emb.inv_freq", lambda tensors: torch.ones(4)), {}),
        (put("model.rotary_emb.inv_freq", lambda tensors: torch.ones(4)), {}),
        (another_layer, {"num_nextn_predict_layers": 1}),  # counted, and for engines that predict further tokens
    ],
)
def test_tensors_that_change_nothing(change, keys, tmp_path):
    assert spoiled(tmp_path, change, llama(**keys)).status == "passed"


@pytest.mark.parametrize(
    ("kind", "options", "names"),
    [
        (GPT2LMHeadModel, {"n_embd": 32, "n_layer": 1, "n_head": 4}, ["attn.bias"]),  # its class says so
        (
            GPTNeoForCausalLM,  # a buffer that it computes
            {"hidden_size": 32, "num_layers": 1, "num_heads": 4, "attention_types": [[["global"], 1]]},
            ["attn.attention.bias", "attn.attention.masked_bias"],
        ),
    ],
)
def test_masks_that_were_saved_before(kind, options, names, tmp_path):
    model = built(kind, vocab_size=96, bos_token_id=0, eos_token_id=0, **options)
    masks = {f"transformer.h.0.{name}": torch.ones(1, 1, 4, 4) for name in names}
    assert spoiled(tmp_path, lambda tensors: tensors.update(masks), model).status == "passed"


def test_a_model_in_memory_has_no_files():
    found = check_subject(subject_of(llama()), ["files"])["files"]
    assert (found.status, found.reason) == ("passed", "not applicable: weights, generation files")
