"""`longitude extend`: plain transformers rotates what is written as Longitude does; learned tables; ALiBi; all others refused."""

import json
from dataclasses import dataclass
from itertools import product

import pytest
import torch
from torch import Tensor

import longitude as lg
from longitude.checkpoints.config import from_hugging_face
from longitude.checkpoints.positions import rotary_of
from longitude.positions.hugging_face import RopeConfig
from longitude.positions.scaling.base import METHODS, Scaling, plain, register_scheme
from tests.extend.conftest import LENGTH, config, files, loaded, logits, saved
from tests.support import edit_config

WITHOUT_SEARCH = [name for name, method in METHODS.items() if not method.searched and name != "clipped"]
SCHEMES = {
    "linear": lg.scaling.Linear(4.0),
    "ntk": lg.scaling.NTK(4.0),
    "dynamic": lg.scaling.DynamicNTK(4.0, LENGTH, follow="sequence"),
    "ntk-by-parts": lg.scaling.NTKByParts(4.0, LENGTH),
    "yarn": lg.scaling.YaRN(4.0, LENGTH),
    "llama3": lg.scaling.Llama3(4.0, LENGTH),
    "resonance": lg.scaling.Resonance(4.0, LENGTH),
    "drope": lg.scaling.Linear(1e30),
    "base": lg.scaling.BaseChange(5e6),
}


def by(method: str, length: int = 4 * LENGTH) -> list[object]:
    base = ["--base", 5e6] if method == "base" else []
    return ["--to", length, "--method", method, *base, "--no-measure"]


def close(got: Tensor, want: Tensor) -> None:
    torch.testing.assert_close(got, want.float(), rtol=2e-6, atol=0)


class Ours(torch.nn.Module):
    """cos and sin of our encodings in the place of a model's own."""

    def __init__(self, encodings):
        super().__init__()
        self.encodings = encodings

    def forward(self, x, position_ids, layer_type=None):
        table = self.encodings[layer_type].prepare(position_ids[0], position_ids.shape[1], x.dtype)
        return tuple(torch.cat([half, half], -1)[None] for half in table)


@pytest.mark.one_in(13)
@pytest.mark.parametrize("method", WITHOUT_SEARCH)
@pytest.mark.parametrize("kind", ["llama", "gpt_neox", "gemma3_text"])
def test_transformers_rotates_as_we_do(kind, method, checkpoint, longer) -> None:
    """Frequencies, attention factor and logits, at the original length and at the new one."""
    model, before = loaded(longer(kind, *by(method))), loaded(checkpoint(kind))
    ropes = from_hugging_face(before.config)
    scaled = {
        layer: rope if layer == "sliding_attention" else rope._replace(scaling=SCHEMES[method])
        for layer, rope in ({None: ropes} if isinstance(ropes, RopeConfig) else ropes).items()
    }
    rotary = rotary_of(model)
    for layer, rope in scaled.items():
        want = lg.rope_frequencies(16, **rope.options(16))
        prefix = f"{layer}_" if layer else ""
        close(getattr(rotary, f"{prefix}inv_freq"), want.inverse)
        assert getattr(rotary, f"{prefix}attention_scaling") == pytest.approx(want.attention_factor, rel=1e-12)
    encodings = {layer: rope.encoding(16, "half") for layer, rope in scaled.items()}
    for length in (LENGTH // 2, 4 * LENGTH):
        theirs = logits(model, length)
        model.base_model.rotary_emb, theirs_module = Ours(encodings), model.base_model.rotary_emb
        torch.testing.assert_close(logits(model, length), theirs, atol=2e-4 * float(theirs.std()), rtol=0)
        model.base_model.rotary_emb = theirs_module
        if method != "dynamic" or length > LENGTH:
            assert (logits(before, length) - theirs).abs().max() > 0.05 * theirs.std()  # and it is not idle


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    ("kind", "message"), [("smollm3", ": 3."), ("ministral3", "'ministral3_temperature', 'beta': 0.1, ")]
)
def test_what_stays_is_said(kind, message, tmp_path, write) -> None:
    """Layers without rotation, temperatures, and keys that nothing reads, which stay in the file."""
    source = saved(kind, tmp_path / "model")
    inside = config(source)["rope_parameters"] | {"warmth": 0.3}
    edit_config(source, rope_parameters=inside, rope_warmth=[2.0])
    out, printed = write(source, *by("yarn"))
    assert message in printed
    assert "rope_parameters.warmth" in printed and "rope_warmth" in printed
    after = config(out)
    assert after["rope_parameters"]["warmth"] == 0.3 and after["rope_warmth"] == [2.0]
    assert after["rope_parameters"].get("llama_4_scaling_beta") == inside.get("llama_4_scaling_beta")
    before, ropes = from_hugging_face_quietly(source), from_hugging_face_quietly(out)
    assert (ropes.rotates, ropes.temperature) == (before.rotates, before.temperature)
    assert ("no_rope_layers" in after) == (kind == "smollm3")


@pytest.mark.one_in(4)
@pytest.mark.parametrize(
    ("kind", "keys"),
    [
        ("gemma3_text", {"layer_types": ["sliding_attention"] * 2}),
        ("mistral", {"sliding_window": 24}),
        ("cohere2", {}),
        ("llama4_text", {}),
    ],
)
def test_where_no_distance_grows_nothing_is_extended(kind, keys, save, refused) -> None:
    """All layers that rotate have a window below the training length; in Cohere 2 and Llama 4 the others rotate nothing."""
    for method in ("yarn", "linear"):
        line = refused(save(kind, **keys), *by(method))
        assert " 24 tokens" in line and f" {LENGTH}" in line


def from_hugging_face_quietly(folder):
    with pytest.warns(UserWarning, match="rope_warmth"):
        return from_hugging_face(config(folder))


KINDS = ("mistral", "qwen2", "qwen3", "falcon", "cohere", "smollm3")


@pytest.mark.one_in(7)
@pytest.mark.parametrize(("kind", "method"), [*product(["llama"], WITHOUT_SEARCH), *product(KINDS, ["yarn"])])
def test_keys(kind, method, checkpoint, longer) -> None:
    """max_position_embeddings is the new length, and for dynamic the trained one; both schemas agree; all other keys stay."""
    out = longer(kind, *by(method))
    before, after = config(checkpoint(kind)), config(out)
    assert loaded(out).config.max_position_embeddings == after["max_position_embeddings"]
    assert after["max_position_embeddings"] == (LENGTH if method == "dynamic" else 4 * LENGTH)
    assert after.get("original_max_position_embeddings") == (None if method == "dynamic" else LENGTH)
    assert after["rope_theta"] == after["rope_parameters"]["rope_theta"]
    assert after.get("rope_scaling") in (None, after["rope_parameters"])
    changed = {"max_position_embeddings", "rope_parameters"}
    assert {k: v for k, v in after.items() if k in before.keys() - changed} == {
        k: v for k, v in before.items() if k not in changed
    }
    assert list(after)[: len(before)] == list(before)
    old = {key: value for key, value in after.items() if key != "rope_parameters"}
    assert from_hugging_face(old) == from_hugging_face(after)  # what transformers 4 reads
    assert json.loads((out / "tokenizer_config.json").read_text())["model_max_length"] == 4 * LENGTH


def test_other_files_are_copied_and_piped_output_takes_no_name_for_markup(save, write, tmp_path) -> None:
    source = save().rename(tmp_path / "a[bold]b")
    (source / "chat_template.jinja").write_text("{{ messages }}")
    (source / "optimizer.pt").write_bytes(b"no")
    out, printed = write(source, *by("yarn"), out="a[bold]c")
    before, after = files(source), files(out)
    after.pop("serve.md")
    assert before.keys() - after.keys() == {"optimizer.pt"} and "Not copied: optimizer.pt." in printed
    assert {name for name in after if after[name] != before[name]} == {"config.json", "tokenizer_config.json"}
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]
    lines = printed.splitlines()
    assert lines[0] == f"{source}: {LENGTH} to {4 * LENGTH} tokens" and f"written: {out}" in lines
    assert any(line.startswith("rope_parameters.original_max_position_embeddings ") for line in lines)
    assert any(line.startswith("scheme ") and line.rstrip().endswith("truncate=true") for line in lines)


@dataclass(frozen=True)
class RootOfFactor(Scaling):
    """theta_k / sqrt(s): a scheme that no rope_type of transformers describes."""

    factor: float

    def frequencies(self, rotary_dim, base, length=None, device=None) -> Tensor:
        return plain(rotary_dim, base, device) / self.factor**0.5


def with_root_of_factor(monkeypatch) -> None:
    """Register the scheme for one test."""
    for registered in (lg.scaling.SCHEMES.factories, lg.scaling.SCHEMES.aliases, METHODS):  # restored after the test
        monkeypatch.setitem(registered, "root_of_factor", None)
        monkeypatch.setitem(registered, "root-of-factor", None)
        monkeypatch.delitem(registered, "root_of_factor")
        monkeypatch.delitem(registered, "root-of-factor")
    register_scheme("root_of_factor")(RootOfFactor)


def test_a_registered_scheme_is_a_method_by_its_name(checkpoint, write, monkeypatch) -> None:
    """Written as LongRoPE's factors, by which plain transformers rotates at any length."""
    with_root_of_factor(monkeypatch)
    out, printed = write(checkpoint("llama"), *by("root-of-factor"))
    assert "theta_k / sqrt(s)" in printed
    model, before = loaded(out), loaded(checkpoint("llama"))
    for length in (LENGTH, 4 * LENGTH):
        logits(model, length)
        close(rotary_of(model).inv_freq, rotary_of(before).inv_freq / 2)


def test_clipped_pairs_do_not_rotate_in_plain_transformers(checkpoint, write) -> None:
    """Frequency 0 is a factor that JSON can hold, and pairs that turned in training stay as they are."""
    out, _ = write(checkpoint("llama"), *by("clipped"))
    model, before = loaded(out), rotary_of(loaded(checkpoint("llama"))).inv_freq
    logits(model, 4 * LENGTH)
    got, clipped = rotary_of(model).inv_freq, before * LENGTH < 2 * torch.pi
    fade = (1 + torch.linspace(0, torch.pi, int(clipped.sum())).cos()) / 2
    assert 2 < clipped.sum() < len(clipped)
    close(got[~clipped], before[~clipped])
    torch.testing.assert_close(got[clipped], before[clipped] * fade, rtol=1e-5, atol=1e-12)


OLD = {"rope_parameters": None, "rope_scaling": None}
NEOX = OLD | {"rotary_emb_base": 2000, "rotary_pct": 0.5}
GEMMA_FREQUENCIES = {"full_attention_inv_freq": (16, 1e6, SCHEMES["yarn"]), "sliding_attention_inv_freq": (16, 1e4)}
GEMMA = OLD | {"rope_theta": 1e6, "rope_local_base_freq": 1e4}


@pytest.mark.one_in(4)
@pytest.mark.parametrize(
    ("kind", "keys", "method", "frequencies", "absent"),
    [
        ("llama", OLD | {"rope_theta": 5e5}, "ntk", {"inv_freq": (16, 5e5, SCHEMES["ntk"])}, None),
        ("llama", OLD | {"rope_theta": 5e5}, "yarn", {"inv_freq": (16, 5e5, SCHEMES["yarn"])}, None),
        ("gpt_neox", NEOX, "ntk", {"inv_freq": (8, 2000, SCHEMES["ntk"])}, "rope_theta"),
        ("gemma3_text", GEMMA, "yarn", GEMMA_FREQUENCIES, "rope_parameters"),
    ],
)
def test_schemas_of_transformers_4(kind, keys, method, frequencies, absent, save, write) -> None:
    """Names of their own for base and share in GPT-NeoX; two bases in Gemma 3, of which full attention is scaled."""
    out, _ = write(save(kind, **keys), *by(method))
    rotary, written = rotary_of(loaded(out)), config(out)
    for name, arguments in frequencies.items():
        close(getattr(rotary, name), lg.rope_frequencies(*arguments).inverse)
    assert absent not in written
    if kind == "gpt_neox":
        assert written["rotary_emb_base"] == written["rope_parameters"]["rope_theta"] > 2000
        assert written["rotary_pct"] == 0.5 and "partial_rotary_factor" not in written


def test_factor_and_original_by_option(checkpoint, write) -> None:
    out, printed = write(checkpoint("llama"), *by("yarn"), "--factor", 8, "--original", LENGTH // 2, "--json")
    rope, result = config(out)["rope_parameters"], json.loads(printed)
    assert (rope["factor"], rope["original_max_position_embeddings"]) == (8.0, LENGTH // 2)
    assert (result["original_length"], result["length"], result["factor"]) == (LENGTH // 2, 4 * LENGTH, 8.0)
    assert result["attention_factor"] == pytest.approx(1.2079442) and result["out"] == str(out)
    assert {"key": "max_position_embeddings", "before": LENGTH, "after": 4 * LENGTH} in result["difference"]


@pytest.mark.one_in(8)
@pytest.mark.parametrize("method", WITHOUT_SEARCH)
def test_never_scaled_twice(method, longer, write, refused) -> None:
    """Dynamic declares the training length before and after; the base before ntk and base is lost."""
    once, further = longer("llama", *by(method)), by("yarn", 8 * LENGTH)
    reason = "(dynamic, from 64 tokens by a factor of 4)" if method == "dynamic" else "extended already"
    assert reason in refused(once, *further)
    if method in ("ntk", "base"):
        assert "original checkpoint" in refused(once, *further, "--original", LENGTH)
        return
    assert f"expected --original {LENGTH}" in refused(once, *further, "--original", LENGTH // 2)
    again, _ = write(once, *further, "--original", LENGTH)
    assert config(again) == config(longer("llama", *further))


# ---- output ----------------------------------------------------------------------------------------------------------
@pytest.mark.slow
@pytest.mark.parametrize("kind", ["llama", "qwen2_5_vl"])
def test_cost_is_measured(kind, checkpoint, write, text, monkeypatch) -> None:
    monkeypatch.setattr("longitude.extend.short_contexts.TOKENS", 512)
    costs = {}
    for method in ("dynamic", "linear"):
        options = ["--to", 4 * LENGTH, "--method", method, "--text", text, "--json"]
        costs[method] = json.loads(write(checkpoint(kind), *options, out=method)[1])["cost"][0]
    assert costs["dynamic"]["difference"] == {"value": 0.0, "low": 0.0, "high": 0.0}
    linear = costs["linear"]
    assert linear["difference"]["value"] == pytest.approx(linear["extended"]["value"] - linear["original"]["value"])
    assert abs(linear["difference"]["value"]) > 0.01
    assert linear["length"] == LENGTH and linear["documents"] > 1
    assert linear["original"] == costs["dynamic"]["original"]
