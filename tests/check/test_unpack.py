"""A GGUF file as a checkpoint: plain transformers gives its logits, and rotates as llama.cpp does."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, Gemma2Config

from longitude.check import unpack
from longitude.checkpoints.gguf import GGUF, SHORT
from longitude.cli import main
from tests.check.building import write_gguf
from tests.support import refused

FACTORS = [1.0] * 6 + [1.5, 2.5] + [4.0] * 8


def loaded(folder: str):
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def test_logits_are_those_of_the_model(tmp_path):
    written = write_gguf(tmp_path / "one.gguf")
    folder = unpack.unpacked(str(tmp_path / "one.gguf"), inside=tmp_path / "made")
    tokens = torch.arange(61)[None] % 3
    torch.testing.assert_close(loaded(folder)(tokens).logits, written(tokens).logits)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert tokenizer.decode(tokenizer("aba")["input_ids"]) == "aba"
    assert "quantization_config" not in json.loads((Path(folder) / "config.json").read_text())


@pytest.mark.parametrize(
    ("keys", "factors", "scale"),
    [
        ({"rope_scaling_type": "LINEAR", "rope_scaling_factor": 4.0}, None, 1.0),
        ({"rope_scaling_factor": 2.0}, None, 1.0),  # a file without a type is linear
        ({"rope_scaling_type": "YARN", "rope_scaling_factor": 4.0, "rope_scaling_orig_ctx_len": 16}, None, 1.138629436),
        ({}, FACTORS, 1.0),
    ],
    ids=["linear", "no type", "yarn", "factors"],
)
def test_a_scheme_rotates_as_in_the_file(keys, factors, scale, tmp_path):
    """transformers alone reads the base, and loses the scheme."""
    types = pytest.importorskip("gguf").RopeScalingType
    keys = {name: getattr(types, value) if name.endswith("type") else value for name, value in keys.items()}
    write_gguf(file := tmp_path / "one.gguf", factors, keys)
    rotary = loaded(unpack.unpacked(str(file), inside=tmp_path / "made")).model.rotary_emb
    wanted = GGUF(file).frequencies()[SHORT].inverse
    torch.testing.assert_close(rotary.inv_freq.double(), wanted, rtol=1e-6, atol=0)
    assert rotary.attention_scaling == pytest.approx(scale)
    assert not torch.allclose(wanted, 500.0 ** (-torch.arange(16) / 16).double())


def test_a_file_is_unpacked_once_for_each_state(tmp_path):
    notes: list[str] = []
    write_gguf(file := tmp_path / "one.gguf")
    first, second = (unpack.unpacked(str(file), notes.append, tmp_path / "made") for _ in range(2))
    assert first == second and len(notes) == 1
    write_gguf(file, keys={"rope_freq_base": 1e4})
    assert unpack.unpacked(str(file), notes.append, tmp_path / "made") != first and len(notes) == 2
    assert unpack.unpacked("owner/name", notes.append) == "owner/name" and len(notes) == 2


def test_what_is_no_file_or_is_cut_off_is_refused(tmp_path):
    with refused("nowhere.gguf"):
        unpack.unpacked(str(tmp_path / "nowhere.gguf"))
    write_gguf(file := tmp_path / "one.gguf")
    file.write_bytes(file.read_bytes()[:2000])
    with refused("one.gguf"):
        unpack.unpacked(str(file), inside=tmp_path / "made")
    assert [*(tmp_path / "made").glob("[!.]*")] == []


def test_a_file_without_a_tensor_is_refused(tmp_path):
    """transformers would fill it with random numbers."""
    write_gguf(file := tmp_path / "one.gguf")
    file.write_bytes(file.read_bytes().replace(b"blk.0.ffn_up", b"blk.0.ffn_ab"))
    with refused("mlp.up_proj"):
        unpack.unpacked(str(file), inside=tmp_path / "made")


def test_a_folder_that_differs_from_its_file_is_not_kept(tmp_path, monkeypatch):
    monkeypatch.setattr(unpack, "with_scheme", lambda config, file: None)
    write_gguf(file := tmp_path / "one.gguf", FACTORS)
    with refused("llama3"):
        unpack.unpacked(str(file), inside=tmp_path / "made")
    assert [*(tmp_path / "made").glob("[!.]*")] == []


@pytest.mark.slow
def test_every_command_takes_a_file(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    write_gguf(tmp_path / "one.gguf")
    (tmp_path / "text.txt").write_text("ab" * 400)
    measured = "measure one.gguf --lengths 16 --text text.txt --documents 1 --methods non-overlapping --json"
    extended = "extend one.gguf --to 128 --method yarn --no-measure --out longer"
    for words in ("show one.gguf", "check one.gguf --quick", measured, extended):
        assert main(words.split()) == 0, capsys.readouterr().err
    assert loaded("longer").config.rope_parameters["rope_type"] == "yarn"


@pytest.mark.parametrize("keys", [{"attention_scale": 0.5}, {"logit_scale": 2.0}, {"attn_logit_softcapping": 20.0}])
def test_a_key_that_changes_scores_and_is_not_read_is_refused(keys, tmp_path):
    write_gguf(file := tmp_path / "one.gguf", keys=keys)
    with refused(str(*keys.values())):
        unpack.unpacked(str(file), inside=tmp_path / "made")


@pytest.mark.parametrize("key", [b"llama.context_length", b"tokenizer.ggml.tokens"])
def test_a_file_without_context_length_or_tokenizer_is_refused(key, tmp_path):
    """transformers would take a context of 2,048, and raises a KeyError for the tokens."""
    write_gguf(file := tmp_path / "one.gguf")
    file.write_bytes(file.read_bytes().replace(key, key[:-1] + b"_"))
    with refused(key.decode()):
        unpack.unpacked(str(file), inside=tmp_path / "made")


def test_a_scheme_without_a_factor_scales_nothing(tmp_path):
    types = pytest.importorskip("gguf").RopeScalingType
    for kind in ("LINEAR", "YARN"):
        write_gguf(file := tmp_path / f"{kind}.gguf", keys={"rope_scaling_type": getattr(types, kind)})
        rotary = loaded(unpack.unpacked(str(file), inside=tmp_path / "made")).model.rotary_emb
        torch.testing.assert_close(
            rotary.inv_freq.double(), 500.0 ** (-torch.arange(16) / 16).double(), rtol=1e-6, atol=0
        )


def test_a_wrong_number_is_named_with_the_file(tmp_path):
    write_gguf(file := tmp_path / "one.gguf", keys={"rope_freq_base": -1.0})
    with refused("one.gguf") as caught:
        unpack.unpacked(str(file), inside=tmp_path / "made")
    assert "made" not in str(caught.value)


@pytest.mark.parametrize(("layers", "scalar"), [(46, 144), (42, 128)])
def test_the_query_scale_of_gemma_2_is_llama_cpp_s(layers, scalar):
    """27B: 1/sqrt(4608 / 32); the others 1/sqrt(head_dim). No key of the file has it."""
    config = Gemma2Config(num_hidden_layers=layers, hidden_size=4608, num_attention_heads=32, head_dim=128)
    unpack.with_scores(
        config, SimpleNamespace(architecture="gemma2", own={"attn_logit_softcapping": 20.0}.get, path="f")
    )
    assert (config.query_pre_attn_scalar, config.attn_logit_softcapping) == (scalar, 20.0)


def text_of(content: bytes) -> bytes:
    return len(content).to_bytes(8, "little") + content


@pytest.mark.parametrize(
    "key",
    [b"".join((bytes([9, 0, 0, 0, kind, 0, 0, 0]), (2**40).to_bytes(8, "little"))) for kind in (0, 4, 8, 9, 12)]
    + [bytes([8, 0, 0, 0]) + (2**62).to_bytes(8, "little"), bytes([99, 0, 0, 0])]
    + [bytes([9, 0, 0, 0]) + (bytes([9, 0, 0, 0, 1]) + bytes(7)) * 9000],
)
def test_sizes_in_a_file_are_not_believed(key, tmp_path) -> None:
    """A list of 2^40 values in a file of 60 bytes would be read one by one, until the memory ends."""
    header = b"GGUF" + (3).to_bytes(4, "little") + (0).to_bytes(8, "little") + (1).to_bytes(8, "little")
    (file := tmp_path / "a.gguf").write_bytes(header + text_of(b"general.architecture") + key)
    with pytest.raises(ValueError, match=r"a\.gguf: no GGUF file"):
        GGUF(file)
    file.write_bytes(header[:8] + (2**40).to_bytes(8, "little") + bytes(8))
    with pytest.raises(ValueError, match="tensors"):
        GGUF(file)
