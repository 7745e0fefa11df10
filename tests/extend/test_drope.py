"""`longitude extend --method drope`: nothing rotates in plain transformers, and the model is recalibrated."""

import json

import pytest
import torch

from longitude.checkpoints.positions import rotary_of
from tests.extend.conftest import LENGTH, config, loaded, logits


def by(method: str) -> list[object]:
    return ["--to", 4 * LENGTH, "--method", method, "--no-measure"]


class Identity(torch.nn.Module):
    """cos 1 and sin 0 in the place of a model's own."""

    def forward(self, x, position_ids, layer_type=None):
        return torch.ones(1, 1, 16, dtype=x.dtype), torch.zeros(1, 1, 16, dtype=x.dtype)


@pytest.mark.one_in(6)
@pytest.mark.parametrize("kind", ["llama", "smollm3", "qwen3"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_drope_rotates_nothing_in_plain_transformers(kind, dtype, checkpoint, write) -> None:
    """At the ends of the new length and a million positions on: as the same weights with the rotation taken out."""
    out, printed = write(checkpoint(kind), *by("drope"))
    model, before = loaded(out).to(dtype), loaded(checkpoint(kind)).to(dtype)
    rotated = logits(before, 4 * LENGTH)
    before.base_model.rotary_emb = Identity()
    torch.testing.assert_close(logits(model, 4 * LENGTH), logits(before, 4 * LENGTH))
    assert (logits(model, 4 * LENGTH) - rotated).abs().max() > 0.05 * rotated.std()
    ids = torch.arange(3, 13)[None]
    far = [model(input_ids=ids, position_ids=torch.arange(10)[None] + begin).logits for begin in (0, 10**6)]
    torch.testing.assert_close(*far)
    assert "recalibrated" in printed and config(out)["max_position_embeddings"] == 4 * LENGTH


def test_drope_leaves_layers_with_a_window_their_rotation(checkpoint, write) -> None:
    out, printed = write(checkpoint("gemma3_text"), *by("drope"))
    rotary, before = rotary_of(loaded(out)), rotary_of(loaded(checkpoint("gemma3_text")))
    assert torch.equal(rotary.sliding_attention_inv_freq, before.sliding_attention_inv_freq)
    assert rotary.full_attention_inv_freq.max() <= 1e-30 and "24 tokens: 0." in " ".join(printed.split())


@pytest.mark.slow
def test_drope_is_recalibrated_at_the_original_length(checkpoint, command, text, tmp_path, monkeypatch) -> None:
    """Trained and measured in one command, and what is written is not extended again."""
    monkeypatch.setattr("longitude.extend.short_contexts.TOKENS", 512)
    options = ["--to", 4 * LENGTH, "--method", "drope", "--fine-tune", text, "--steps", 2, "--text", text, "--json"]
    code, printed, _ = command(checkpoint("llama"), *options, "--out", tmp_path / "out")
    result = json.loads(printed)
    assert code == 0 and result["tuned"]["tokens"] == 2 * LENGTH and result["cost"][0]["difference"]["value"] != 0
    code, _, line = command(tmp_path / "out", *by("yarn"), "--out", tmp_path / "again")
    assert code == 2 and "was extended already" in line
