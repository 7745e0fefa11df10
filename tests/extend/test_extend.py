"""`longitude extend` on rotary models: plain transformers turns what is written as Longitude does."""

import json
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

import longitude as lg
from longitude.checkpoints.positions import rotary_of
from longitude.extend.methods import METHODS
from longitude.positions.hugging_face import RopeConfig, from_hugging_face
from longitude.positions.scaling.base import Scaling, plain
from tests.extend.conftest import loaded, logits

LENGTH = 64
WITHOUT_SEARCH = [method for method in METHODS if method != "longrope"]
SCHEMES = {
    "linear": lg.scaling.Linear(4.0),
    "ntk": lg.scaling.NTK(4.0),
    "dynamic": lg.scaling.DynamicNTK(4.0, LENGTH, follow="sequence"),
    "ntk-by-parts": lg.scaling.NTKByParts(4.0, LENGTH),
    "yarn": lg.scaling.YaRN(4.0, LENGTH),
    "llama3": lg.scaling.Llama3(4.0, LENGTH),
    "base": lg.scaling.BaseChange(5e6),
}


def options(method: str) -> list[object]:
    return ["--method", method, *(["--base", 5e6] if method == "base" else []), "--no-measure"]


class Ours(torch.nn.Module):
    """cos and sin of our encodings in the place of a model's own."""

    def __init__(self, encodings):
        super().__init__()
        self.encodings = encodings

    def forward(self, x, position_ids, layer_type=None):
        turn = self.encodings[layer_type].prepare(position_ids[0], position_ids.shape[1], x.dtype)
        return tuple(torch.cat([one, one], -1)[None] for one in turn)


@pytest.mark.one_in(4)
@pytest.mark.parametrize("method", WITHOUT_SEARCH)
@pytest.mark.parametrize("kind", ["llama", "neox", "gemma3"])
def test_transformers_rotates_as_we_do(kind, method, checkpoint, command, tmp_path) -> None:
    """Frequencies, attention factor and logits, at the original length and at the new one."""
    source, out = checkpoint(kind), tmp_path / "out"
    code, _, said = command(source, "--to", 4 * LENGTH, "--out", out, *options(method))
    assert (code, said) == (0, "")
    model, before = loaded(out), loaded(source)
    ropes = from_hugging_face(before.config)
    ropes = {None: ropes} if isinstance(ropes, RopeConfig) else ropes
    scaled = {
        layer: rope if layer == "sliding_attention" else rope._replace(scaling=SCHEMES[method])
        for layer, rope in ropes.items()
    }
    rotary = rotary_of(model)
    for layer, rope in scaled.items():
        want = lg.rope_frequencies(16, **rope.options(16))
        prefix = f"{layer}_" if layer else ""
        torch.testing.assert_close(getattr(rotary, f"{prefix}inv_freq"), want.inverse.float(), rtol=2e-6, atol=0)
        assert getattr(rotary, f"{prefix}attention_scaling") == pytest.approx(want.attention_factor, rel=1e-12)
    encodings = {layer: rope.encoding(16, "half") for layer, rope in scaled.items()}
    for length in (LENGTH // 2, 4 * LENGTH):
        theirs = logits(model, length)
        model.base_model.rotary_emb, own = Ours(encodings), model.base_model.rotary_emb
        torch.testing.assert_close(logits(model, length), theirs, atol=2e-4 * float(theirs.std()), rtol=0)
        model.base_model.rotary_emb = own
        if method != "dynamic" or length > LENGTH:
            assert (logits(before, length) - theirs).abs().max() > 0.05 * theirs.std()  # and it is not idle


@pytest.mark.parametrize("method", WITHOUT_SEARCH)
def test_factor_one_changes_no_bit(method, checkpoint, command, tmp_path) -> None:
    source, out = checkpoint("llama"), tmp_path / "out"
    code, said, _ = command(source, "--to", LENGTH, "--method", method, "--out", out, "--no-measure")
    assert code == 0 and "copy" in said
    assert {p.name: p.read_bytes() for p in out.iterdir()} == {p.name: p.read_bytes() for p in source.iterdir()}
    torch.testing.assert_close(logits(loaded(out), 2 * LENGTH), logits(loaded(source), 2 * LENGTH))


@pytest.mark.parametrize("method", WITHOUT_SEARCH)
def test_keys(method, checkpoint, command, tmp_path) -> None:
    """max_position_embeddings is the new length, and for dynamic the trained one; both schemas say the same; every other key
    and its place stay."""
    source, out = checkpoint("llama"), tmp_path / "out"
    command(source, "--to", 4 * LENGTH, "--out", out, *options(method))
    before, after = (json.loads((folder / "config.json").read_text()) for folder in (source, out))
    assert after["max_position_embeddings"] == (LENGTH if method == "dynamic" else 4 * LENGTH)
    assert after.get("original_max_position_embeddings") == (None if method == "dynamic" else LENGTH)
    assert after["rope_theta"] == after["rope_parameters"]["rope_theta"]
    assert after.get("rope_scaling") in (None, after["rope_parameters"])
    changed = {"max_position_embeddings", "rope_parameters"}
    assert [(k, v) for k, v in after.items() if k in before and k not in changed] == [
        (k, v) for k, v in before.items() if k not in changed
    ]
    assert list(after)[: len(before)] == list(before)
    old = {key: value for key, value in after.items() if key != "rope_parameters"}
    assert from_hugging_face(old) == from_hugging_face(after)  # what transformers 4 reads
    tokenizer = json.loads((out / "tokenizer_config.json").read_text())
    assert tokenizer["model_max_length"] == 4 * LENGTH


def test_weights_and_company_are_copied(save, command, tmp_path) -> None:
    source, out = tmp_path / "model", tmp_path / "out"
    save("llama", source)
    (source / "chat_template.jinja").write_text("{{ messages }}")
    (source / "optimizer.pt").write_bytes(b"no")
    command(source, "--to", 4 * LENGTH, "--out", out, *options("yarn"))
    for name in ("model.safetensors", "generation_config.json", "tokenizer.json", "chat_template.jinja"):
        assert (out / name).read_bytes() == (source / name).read_bytes()
    assert not (out / "optimizer.pt").exists()
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]


@dataclass(frozen=True)
class RootOfFactor(Scaling):
    """theta_k / sqrt(s): a scheme that no rope_type of transformers describes."""

    name = "root_of_factor"
    factor: float

    def frequencies(self, rotary_dim, base, length=None, device=None) -> Tensor:
        return plain(rotary_dim, base, device) / self.factor**0.5


def test_a_registered_scheme_is_a_method_by_its_name(checkpoint, command, tmp_path, monkeypatch) -> None:
    """Written as LongRoPE's factors, by which plain transformers rotates at any length."""
    monkeypatch.setitem(lg.scaling.SCHEMES.factories, "root_of_factor", RootOfFactor)
    given = ["--to", 4 * LENGTH, "--method", "root-of-factor", "--no-measure", "--out", tmp_path / "out"]
    code, said, _ = command(checkpoint("llama"), *given)
    assert code == 0 and "theta_k / sqrt(s)" in said
    model, before = loaded(tmp_path / "out"), loaded(checkpoint("llama"))
    for length in (LENGTH, 4 * LENGTH):
        logits(model, length)
        torch.testing.assert_close(rotary_of(model).inv_freq, rotary_of(before).inv_freq / 2, rtol=2e-6, atol=0)


OLD = {"rope_parameters": None, "rope_theta": 5e5, "rope_scaling": None}


@pytest.mark.parametrize("method", ["ntk", "yarn"])
def test_old_schema(method, save, command, tmp_path) -> None:
    source, out = save("llama", tmp_path / "model", **OLD), tmp_path / "out"
    assert command(source, "--to", 4 * LENGTH, "--out", out, *options(method))[0] == 0
    model = loaded(out)
    want = lg.rope_frequencies(16, 5e5, SCHEMES[method])
    torch.testing.assert_close(rotary_of(model).inv_freq, want.inverse.float(), rtol=2e-6, atol=0)


def test_old_schema_of_neox(save, command, tmp_path) -> None:
    """Its base and share have other names there, which transformers 5 reads in their place."""
    source, out = tmp_path / "model", tmp_path / "out"
    save("neox", source, rope_parameters=None, rotary_emb_base=2000, rotary_pct=0.5)
    assert command(source, "--to", 4 * LENGTH, "--out", out, *options("ntk"))[0] == 0
    said = json.loads((out / "config.json").read_text())
    assert said["rotary_emb_base"] == said["rope_parameters"]["rope_theta"] > 2000
    assert "rope_theta" not in said
    want = lg.rope_frequencies(16, 2000, SCHEMES["ntk"], rotary_dim=8)
    torch.testing.assert_close(rotary_of(loaded(out)).inv_freq, want.inverse.float(), rtol=2e-6, atol=0)


def test_old_schema_by_layer_type(save, command, tmp_path) -> None:
    """Gemma 3's two bases: scaling is for the layers that see everything."""
    source, out = tmp_path / "model", tmp_path / "out"
    save("gemma3", source, rope_parameters=None, rope_theta=1e6, rope_local_base_freq=1e4)
    assert command(source, "--to", 4 * LENGTH, "--out", out, *options("yarn"))[0] == 0
    said = json.loads((out / "config.json").read_text())
    assert "rope_parameters" not in said and said["rope_scaling"]["rope_type"] == "yarn"
    rotary = rotary_of(loaded(out))
    full, local = lg.rope_frequencies(16, 1e6, SCHEMES["yarn"]), lg.rope_frequencies(16, 1e4)
    torch.testing.assert_close(rotary.full_attention_inv_freq, full.inverse.float(), rtol=2e-6, atol=0)
    torch.testing.assert_close(rotary.sliding_attention_inv_freq, local.inverse.float(), rtol=2e-6, atol=0)


def test_base_that_only_transformers_knows_is_written_down(save, command, tmp_path) -> None:
    source, out = save("llama", tmp_path / "model", rope_parameters=None), tmp_path / "out"
    code, said, _ = command(source, "--to", 4 * LENGTH, "--out", out, *options("linear"))
    assert code == 0 and "names no base" in said
    assert json.loads((out / "config.json").read_text())["rope_theta"] == 10_000


def test_piped_output_breaks_no_key_and_takes_no_name_for_markup(save, command, tmp_path) -> None:
    source, out = save("llama", tmp_path / "a[bold]b"), tmp_path / "a[bold]c"
    code, said, _ = command(source, "--to", 4 * LENGTH, "--out", out, *options("yarn"))
    lines = said.splitlines()
    assert code == 0 and lines[0] == f"{source}: {LENGTH} to {4 * LENGTH} tokens"
    assert f"written: {out}" in lines
    assert any(line.startswith("rope_parameters.original_max_position_embeddings ") for line in lines)
    assert any(line.startswith("scheme ") and line.rstrip().endswith("truncate=true") for line in lines)


# ---- twice -----------------------------------------------------------------------------------------------------------
def test_dynamic_was_extended_by_a_factor(checkpoint, command, tmp_path) -> None:
    """Its config.json declares the trained length before and after."""
    command(checkpoint("llama"), "--to", 2 * LENGTH, "--out", tmp_path / "once", *options("dynamic"))
    code, _, said = command(tmp_path / "once", "--to", 4 * LENGTH, "--out", tmp_path / "twice", *options("yarn"))
    assert code == 2 and "(dynamic_ntk, from 64 tokens by a factor of 2)" in said


@pytest.mark.parametrize("method", [method for method in WITHOUT_SEARCH if method != "dynamic"])
def test_never_scaled_twice(method, checkpoint, command, tmp_path) -> None:
    source, once, twice, direct = checkpoint("llama"), *(tmp_path / name for name in ("once", "twice", "direct"))
    command(source, "--to", 2 * LENGTH, "--out", once, *options(method))
    code, _, said = command(once, "--to", 4 * LENGTH, "--out", twice, *options("yarn"))
    assert code == 2 and "extended already" in said and not twice.exists()
    code, _, said = command(once, "--to", 4 * LENGTH, "--original", LENGTH, "--out", twice, *options("yarn"))
    if method in ("ntk", "base"):  # the base is lost
        assert code == 2 and "original checkpoint" in said and not twice.exists()
        return
    command(source, "--to", 4 * LENGTH, "--out", direct, *options("yarn"))
    one, other = (json.loads((folder / "config.json").read_text()) for folder in (twice, direct))
    assert one == other


@pytest.mark.parametrize("kind", ["linear", "yarn", "dynamic"])
def test_extended_by_others(kind, save, checkpoint, command, tmp_path) -> None:
    """Their files say it in rope_parameters alone."""
    rope = {"rope_type": kind, "rope_theta": 1e4, "factor": 2.0}
    rope |= {"original_max_position_embeddings": LENGTH} if kind == "yarn" else {}
    keys = {"rope_parameters": rope, "max_position_embeddings": LENGTH if kind == "dynamic" else 2 * LENGTH}
    source, out, direct = save("llama", tmp_path / "model", **keys), tmp_path / "out", tmp_path / "direct"
    code, _, said = command(source, "--to", 4 * LENGTH, "--out", out, *options("ntk"))
    assert code == 2 and f"--original {LENGTH}" in said and not out.exists()
    assert command(source, "--to", 4 * LENGTH, "--original", LENGTH, "--out", out, *options("ntk"))[0] == 0
    command(checkpoint("llama"), "--to", 4 * LENGTH, "--out", direct, *options("ntk"))
    assert torch.equal(rotary_of(loaded(out)).inv_freq, rotary_of(loaded(direct)).inv_freq)


@pytest.mark.parametrize("method", ["ntk", "yarn"])
def test_what_transformers_would_rotate_otherwise_is_refused(method, save, command, tmp_path) -> None:
    """Llama's plain rotation takes no notice of a partial factor, and its scaled ones do."""
    rope = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}
    source, out = save("llama", tmp_path / "model", rope_parameters=rope), tmp_path / "out"
    code, _, said = command(source, "--to", 4 * LENGTH, "--out", out, *options(method))
    assert code == 2 and "does not rotate as" in said and not out.exists()


def test_factor_and_original_by_option(checkpoint, command, tmp_path) -> None:
    out = tmp_path / "out"
    given = ["--to", 4 * LENGTH, "--factor", 8, "--original", LENGTH // 2]
    command(checkpoint("llama"), *given, "--out", out, *options("llama3"))
    said = json.loads((out / "config.json").read_text())["rope_parameters"]
    assert (said["factor"], said["original_max_position_embeddings"]) == (8.0, LENGTH // 2)


# ---- output ----------------------------------------------------------------------------------------------------------
def test_dry_run_writes_nothing(checkpoint, command, tmp_path) -> None:
    code, said, _ = command(checkpoint("llama"), "--to", 4 * LENGTH, "--method", "yarn", "--dry-run")
    assert code == 0 and "attention factor" in said and "1.138629436" in said
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_cost_is_measured(checkpoint, command, text, tmp_path) -> None:
    source = checkpoint("llama")
    found = {}
    for method in ("dynamic", "linear"):
        out = tmp_path / method
        given = ["--to", 4 * LENGTH, "--method", method, "--text", text, "--out", out, "--json"]
        code, said, _ = command(source, *given)
        assert code == 0
        found[method] = json.loads(said)["cost"][0]
    assert found["dynamic"]["difference"] == {"value": 0.0, "low": 0.0, "high": 0.0}
    assert abs(found["linear"]["difference"]["value"]) > 0.01
    assert found["linear"]["length"] == LENGTH and found["linear"]["documents"] > 1
    assert found["linear"]["original"] == found["dynamic"]["original"]


def test_json_says_what_the_file_does(checkpoint, command, tmp_path) -> None:
    out = tmp_path / "out"
    _, said, _ = command(checkpoint("llama"), "--to", 4 * LENGTH, "--out", out, *options("yarn"), "--json")
    found = json.loads(said)
    assert found["attention_factor"] == pytest.approx(1.1386294)
    assert (found["original_length"], found["length"], found["factor"]) == (LENGTH, 4 * LENGTH, 4.0)
    assert {"key": "max_position_embeddings", "before": LENGTH, "after": 4 * LENGTH} in found["difference"]
    assert found["out"] == str(out)
