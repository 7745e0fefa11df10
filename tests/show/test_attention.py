"""The attention of a checkpoint is what transformers returns for its own eager implementation."""

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from longitude.errors import UsageError
from longitude.show import attention
from tests.measure.conftest import TRAINED, write

TEXT = "one two three four five six seven eight nine ten"


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text(TEXT)
    return path


@pytest.mark.parametrize("name", ["llama", "gpt_neox", "bloom", "ours"])
def test_a_checkpoint_in_a_text(name, tmp_path, text):
    path = write(tmp_path, name)
    found = {each.name: each for each in attention.of_checkpoint(str(path), text, 32, print)}
    model = AutoModelForCausalLM.from_pretrained(path, **({} if name == "ours" else {"attn_implementation": "eager"}))
    ids = torch.tensor([list(TEXT.encode()[:32])])
    with torch.no_grad():
        weights = model.eval()(input_ids=ids, output_attentions=True).attentions[1][0].double().numpy()
    np.testing.assert_allclose(weights.sum(-1), 1, atol=1e-5)
    x, first = found["first"].lines["layer 2"]
    np.testing.assert_allclose(first, weights[:, :, 0].mean(0), atol=1e-5)
    entropy = np.array(found["entropy"].lines["layer 2"][1])
    assert (entropy >= -1e-9).all() and (entropy <= np.log2(x) + 1e-5).all()
    offset_2 = np.mean([weights[:, i, i - 2].mean() for i in range(16, 32)])
    assert found["attention"].lines["layer 2"][1][2] == pytest.approx(offset_2, rel=1e-4)


def random_weights(layers: int, heads: int, length: int) -> torch.Tensor:
    """Causal weights [layers, heads, length, length], float64."""
    scores = torch.randn(layers, heads, length, length, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    return scores.masked_fill(torch.ones(length, length).triu(1).bool(), -torch.inf).softmax(-1)


def test_numbers_of_a_layer_are_those_of_loops():
    """Over the queries of the second half; an entropy is between 0 and log2 of the visible tokens."""
    length = 37
    weights = random_weights(1, 2, length)
    layer, w, late = attention.layer_of(weights), weights[0].numpy(), range(length // 2, length)
    within = [[np.mean([w[h, i, max(0, i - d) : i + 1].sum() for i in late]) for d in range(length)] for h in (0, 1)]
    np.testing.assert_allclose(layer.within, within, rtol=1e-12)
    np.testing.assert_allclose(layer.octaves.cumsum(1)[:, 2], np.array(within)[:, 3], rtol=1e-12)
    np.testing.assert_allclose(layer.octaves.sum(1), 1)
    for distance in (0, 3, 30):
        mean = np.mean([w[:, i, i - distance] for i in late if i >= distance], 0)
        np.testing.assert_allclose(layer.weights[:, distance], mean, rtol=1e-12)
    away = np.mean([[sum((i - j) * w[h, i, j] for j in range(i)) for i in late] for h in (0, 1)], 1)
    np.testing.assert_allclose(layer.distance, away, rtol=1e-12)
    entropy = -(w * np.log2(np.maximum(w, 1e-300))).sum(-1)
    np.testing.assert_allclose(layer.entropy, entropy, atol=1e-12)
    assert (layer.entropy >= 0).all() and (layer.entropy <= np.log2(np.arange(1, length + 1)) + 1e-9).all()
    np.testing.assert_allclose(layer.first, w[:, :, 0])


def test_every_head_has_a_cell_and_a_few_layers_a_line():
    layers = {f"layer {i}": attention.layer_of(x[None]) for i, x in enumerate(random_weights(6, 3, 32), 1)}
    lines = [*attention.by_distance(layers, ""), *attention.by_length(layers, "", 16)]
    assert {line.name for line in lines} == {"attention", "field", "entropy", "first"}
    distance, *_, strips = attention.grids(layers, "")
    np.testing.assert_allclose(np.nansum(strips.values, 1), 3)  # of each head all its attention
    assert distance.values.shape == (6, 3) and (distance.values[2] == layers["layer 3"].distance).all()
    drawn = [*lines[0].lines]
    assert len(drawn) == attention.SOME and drawn[0] == "layer 1" and drawn[-1] == "layer 6"
    assert lines[-1].marks == {"training length": 16}


def test_a_text_that_is_too_short_and_a_model_that_gives_nothing(tmp_path, text, monkeypatch):
    path = str(write(tmp_path, "llama"))
    with pytest.raises(UsageError) as refused:
        attention.of_checkpoint(path, text, 1000, print)
    assert "--text" in refused.value.what and refused.value.got == str(len(TEXT))
    monkeypatch.setattr(attention, "available_memory", lambda device: 10)
    with pytest.raises(UsageError) as refused:
        attention.of_checkpoint(path, text, 32, print)
    assert refused.value.what == "--length"
    monkeypatch.undo()
    monkeypatch.setattr(attention, "read", lambda model, inputs: {})
    with pytest.raises(UsageError) as refused:
        attention.of_checkpoint(path, text, 32, print)
    assert refused.value.what == "--attention"


def test_a_table_of_positions_ends(tmp_path, text):
    path = str(write(tmp_path, "gpt2"))
    with pytest.raises(UsageError) as refused:
        attention.of_checkpoint(path, text, TRAINED + 1, print)
    assert refused.value.what == "--length" and str(TRAINED) in (refused.value.expected or "")
    for length in (-3, 0, 1):
        with pytest.raises(UsageError) as refused:
            attention.of_checkpoint(path, text, length, print)
        assert (refused.value.what, refused.value.got) == ("--length", str(length))
    assert attention.of_checkpoint(path, text, None, print)


def test_layers_of_a_hybrid_have_their_own_numbers():
    """transformers returns the weights of attention layers alone."""
    kinds = ["conv", "conv", "full_attention", "conv"]
    sizes = {"hidden_size": 32, "num_attention_heads": 2, "num_key_value_heads": 2, "intermediate_size": 32}
    config = AutoConfig.for_model("lfm2", vocab_size=64, num_hidden_layers=4, layer_types=kinds, **sizes)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    assert [*attention.read(model, {"input_ids": torch.arange(8)[None]})] == ["layer 3"]


def test_the_built_in_text_is_long_enough_for_any_picture():
    assert sum(len(attention.topics[name]) for name in attention.TOPICS) > 100_000
