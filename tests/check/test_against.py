"""What an engine, a second checkpoint or an adapter believes of a checkpoint."""

import json
import math
import shutil

import pytest
import torch

from longitude.check.against import against
from longitude.checkpoints.load import load
from longitude.positions.layouts import convert_layout
from tests.check.building import LENGTH, YARN, llama
from tests.support import edit_config

gguf = pytest.importorskip("gguf")
HEADS, KEYS, DIM = 4, 2, 8
FACTOR = 0.1 * math.log(4.0) + 1  # of YaRN at four times the length


@pytest.fixture
def checkpoint(tmp_path):
    llama(rope=YARN | {"rope_theta": 5e5}).save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def written(folder, path, permuted=True, architecture="llama", factors=False, **changes):
    """A GGUF file of a Llama as llama.cpp's converter makes one: rows of queries and keys in pairs of neighbours."""
    config = json.loads((folder / "config.json").read_text())
    rope = config["rope_parameters"]
    writer = gguf.GGUFWriter(path, architecture)
    given = {
        "block_count": config["num_hidden_layers"], "head_count": HEADS, "head_count_kv": KEYS, "embedding_length": 32,
        "context_length": config["max_position_embeddings"], "rope_freq_base": rope["rope_theta"],
        "rope_dimension_count": DIM,
    }  # fmt: skip
    if rope["rope_type"] == "yarn":
        original = rope["original_max_position_embeddings"]
        given |= {"rope_scaling_factor": rope["factor"], "rope_scaling_orig_ctx_len": original}
    for name, value in (given | changes).items():
        if value is not None:
            getattr(writer, f"add_{name}")(value)
    if rope["rope_type"] == "yarn":
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
    if factors:
        writer.add_tensor("rope_freqs.weight", torch.ones(DIM // 2).numpy())
    for name, weight in load(folder, tokenizer=False).model.state_dict().items():
        for ours, theirs in (("q_proj", "attn_q"), ("k_proj", "attn_k")):
            if ours in name:
                layout = convert_layout(weight, DIM, "interleaved") if permuted else weight
                writer.add_tensor(f"blk.{name.split('.')[2]}.{theirs}.weight", layout.float().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def wrong(facts):
    return {fact.name: (fact.here, fact.there) for fact in facts if fact.differs}


def test_a_file_of_the_converter_contradicts_nothing(checkpoint, tmp_path):
    facts = {fact.name: fact for fact in against(checkpoint, written(checkpoint, tmp_path / "right.gguf"))}
    assert wrong(facts.values()) == {}
    assert facts["base"].there == 5e5 and facts["factor"].here == 4.0 and facts["scaling"].there == "yarn"
    assert facts["pairs"].there == "interleaved" and facts["queries and keys"].there == "the same, interleaved of half"


@pytest.mark.parametrize(
    ("changes", "name", "values"),
    [
        ({"rope_freq_base": None}, "base", (5e5, 10_000.0)),  # what llama.cpp takes where the file has none
        ({"rope_scaling_attn_factors": 0.5}, "attention factor", (FACTOR, FACTOR / 2)),
        ({"rope_scaling_orig_ctx_len": LENGTH}, "original length", (LENGTH // 4, LENGTH)),
        ({"context_length": 4 * LENGTH}, "declared length", (LENGTH, 4 * LENGTH)),
        ({"head_count_kv": HEADS}, "heads of keys", (KEYS, HEADS)),
        ({"rope_dimension_count": DIM // 2}, "rotated dimensions", (DIM, DIM // 2)),
        ({"permuted": False}, "queries and keys", ("the same, interleaved of half", "the same")),
        ({"architecture": "qwen2"}, "queries and keys", ("the same", "the same, interleaved of half")),
    ],
)
def test_what_differs_is_named(changes, name, values, checkpoint, tmp_path):
    assert wrong(against(checkpoint, written(checkpoint, tmp_path / "wrong.gguf", **changes))) == {name: values}


def test_another_factor_is_another_attention_factor(checkpoint, tmp_path):
    found = wrong(against(checkpoint, written(checkpoint, tmp_path / "wrong.gguf", rope_scaling_factor=2.0)))
    assert found == {"factor": (4.0, 2.0), "attention factor": (FACTOR, pytest.approx(0.1 * math.log(2.0) + 1))}


def test_llama3s_factors_are_a_tensor(tmp_path):
    """Lost, the engine rotates without the scheme."""
    scheme = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    llama(rope=scheme | {"original_max_position_embeddings": LENGTH // 4}).save_pretrained(tmp_path / "model")
    right, lost = (written(tmp_path / "model", tmp_path / f"{had}.gguf", factors=had) for had in (True, False))
    assert wrong(against(tmp_path / "model", right)) == {}
    assert wrong(against(tmp_path / "model", lost)) == {"scaling": ("llama3", "none")}


def test_a_copy_in_half_precision_has_the_same_weights(checkpoint, tmp_path):
    load(checkpoint, tokenizer=False).model.bfloat16().save_pretrained(tmp_path / "half")
    assert wrong(against(checkpoint, tmp_path / "half")) == {}


def test_a_second_checkpoint(checkpoint, tmp_path):
    other = tmp_path / "other"
    shutil.copytree(checkpoint, other)
    assert wrong(against(checkpoint, other)) == {}
    edit_config(other, max_position_embeddings=4 * LENGTH)
    assert wrong(against(checkpoint, other)) == {"declared length": (LENGTH, 4 * LENGTH)}
    model = llama(rope=YARN | {"rope_theta": 5e5})
    for name, module in model.named_modules():
        if name.endswith(("q_proj", "k_proj")):
            module.weight.data = convert_layout(module.weight.data, DIM, "interleaved")
    model.save_pretrained(tmp_path / "interleaved")
    found = wrong(against(checkpoint, tmp_path / "interleaved"))
    assert found == {"queries and keys": ("the same", "the same, interleaved of half")}


def test_an_adapter_is_compared_by_what_it_was_trained_on(checkpoint, tmp_path):
    folder, base = tmp_path / "adapter", tmp_path / "base"
    folder.mkdir()
    llama(rope={"rope_theta": 5e5}).save_pretrained(base)
    (folder / "adapter_config.json").write_text(
        json.dumps({"base_model_name_or_path": str(base), "target_modules": ["q_proj", "v_proj"]})
    )
    facts = against(checkpoint, folder)
    assert facts[0].there == str(base) and facts[1].there == "q_proj, v_proj"
    assert wrong(facts) == {"scaling": ("yarn", "none"), "attention factor": (FACTOR, 1.0)}
    (folder / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": "somewhere/else"}))
    with pytest.raises(ValueError, match="'somewhere/else' is no folder here"):
        against(checkpoint, folder)


def test_the_command(checkpoint, tmp_path, command):
    right, other = (written(checkpoint, tmp_path / f"{base}.gguf", rope_freq_base=base) for base in (5e5, 1e4))
    code, printed, error = command("check", checkpoint, "--against", right)
    assert (code, error) == (0, "") and "nothing contradicts" in printed
    code, printed, _ = command("check", checkpoint, "--against", other, "--json")
    assert code == 1 and json.loads(printed)["differ"] == ["base"]
    other.write_bytes(other.read_bytes()[:40])
    code, _, line = command("check", checkpoint, "--against", other)
    assert code == 2 and "cut off" in line and line.count("\n") == 1
    for arguments in ((checkpoint, "--against", right, "--length", 20), ("alibi", "--against", right)):
        assert command("check", *arguments)[0] == 2
