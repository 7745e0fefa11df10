"""Models with any mixer: the same answer whole and step by step, hybrids, checkpoints, and what goes with what."""

import json

import pytest
import torch

import longitude as lg
from longitude.attention.mixer import MIXERS
from longitude.testing import fill

SIZES = {
    "vocab_size": 31,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
OPTIONS = {"window": {"size": 5}, "hierarchical": {"window": 4}}
"""Small enough that a sequence of a few tokens leaves the window."""
HYBRIDS = [["mamba", "attention"], ["attention", "latent"], ["attention", "rwkv6"], ["hierarchical", "retention"]]


def spec(name: str) -> dict:
    return {"name": name, **OPTIONS.get(name, {})}


def model(mixers: list[str], seed: int = 0, **options) -> lg.LongitudeForCausalLM:
    torch.manual_seed(seed)
    config = lg.LongitudeConfig(**SIZES, mixers=[spec(name) for name in mixers], **options)
    return lg.LongitudeForCausalLM(config).double().eval()


def tokens(batch: int = 2, length: int = 23) -> torch.Tensor:
    return torch.randint(0, 31, (batch, length), generator=torch.Generator().manual_seed(1))


STACKS = [[name] * 2 for name in lg.list_mixers()] + HYBRIDS


@pytest.mark.one_in(4)
@pytest.mark.parametrize("mixers", STACKS, ids="+".join)
def test_generation_is_the_whole_pass_again_and_again(mixers):
    """Greedy, two rows, one padded on the left: each token is the best of a pass without cache over its own row."""
    m, x = model(mixers), tokens(2, 11)
    mask = torch.ones_like(x)
    mask[1, :4] = 0
    made = m.generate(x, attention_mask=mask, max_new_tokens=9, do_sample=False, pad_token_id=0)
    for row, first in ((0, 0), (1, 4)):
        text = x[row : row + 1, first:]
        for _ in range(9):
            with torch.no_grad():
                text = torch.cat([text, m(text, use_cache=False).logits[:, -1:].argmax(-1)], 1)
        assert made[row, first:].tolist() == text[0].tolist()


@pytest.mark.one_in(4)
@pytest.mark.parametrize("mixers", STACKS, ids="+".join)
def test_round_trip(mixers, tmp_path):
    """config.json holds every option of the mixer; the loaded model gives the same numbers."""
    m = model(mixers)
    fill(m, 3)
    m.save_pretrained(tmp_path)
    said = json.loads((tmp_path / "config.json").read_text())["mixers"]
    assert [one["name"] for one in said] == mixers and all(
        spec(name).items() <= one.items() for name, one in zip(mixers, said)
    )
    loaded, report = lg.LongitudeForCausalLM.from_pretrained(tmp_path, output_loading_info=True, dtype=torch.float64)
    assert not any(report[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys")), report
    x = tokens()
    with torch.no_grad():
        torch.testing.assert_close(loaded(x).logits, m(x).logits, rtol=0, atol=1e-12)


def test_mixers_that_go_without_an_encoding_hold_no_parameters_of_it():
    m, x = model(["mamba", "attention"], encoding="fox").train(), tokens()
    fill(m)
    m(x, labels=x).loss.backward()
    assert len(m.model.encodings) == 1 and all(p.grad is not None for p in m.parameters())


def test_one_mixer_for_all_layers_and_one_for_each():
    each = lg.LongitudeConfig(**SIZES, mixers=["mamba", "attention"])
    assert [one["name"] for one in each.layer_mixers()] == ["mamba", "attention"] and each.mixer is None
    one = lg.LongitudeConfig(**SIZES, mixer={"name": "mamba", "state_size": 4})
    assert [spec["state_size"] for spec in one.layer_mixers()] == [4, 4]
    assert lg.LongitudeConfig.from_dict(each.to_dict()).mixers == each.mixers
    with pytest.raises(ValueError, match="expected mixer or mixers, got both"):
        lg.LongitudeConfig(**SIZES, mixer="mamba", mixers=["mamba", "attention"])


def test_where_nothing_is_said_rotation_goes_where_it_can():
    assert lg.LongitudeConfig(**SIZES).encoding["name"] == "rope"
    assert lg.LongitudeConfig(**SIZES, mixer="mamba").encoding["name"] == "none"
    hybrid = model(["mamba", "attention"])
    assert hybrid.config.encoding["name"] == "rope"
    assert [len(own.members) for own in hybrid.model.encoding_of_layer] == [0, 1]


def test_an_encoding_that_no_mixer_takes():
    recurrences = [name for name, kind in MIXERS.items() if not kind.scores]
    assert {"mamba", "retention", "rwkv4"} <= set(recurrences)
    for name in recurrences:
        kind = MIXERS[name].__name__
        with pytest.raises(ValueError, match=f"ALiBi adds to scores, and {kind} has none; expected .*attention"):
            model([name] * 2, encoding="alibi")
    with pytest.raises(ValueError, match="Rotary rotates queries and keys, and Mamba has none"):
        model(["mamba"] * 2, encoding="rope")
    with pytest.raises(ValueError, match="ALiBi adds to scores, and Mamba has none"):
        model(["mamba", "attention"], encodings=["alibi", "alibi"])
    assert model(["mamba", "attention"], encoding="alibi")(tokens()).logits.isfinite().all()
    assert model(["mamba", "mamba"], encoding="sinusoidal")(tokens()).logits.isfinite().all()


def test_options_of_a_mixer_have_names():
    with pytest.raises(ValueError, match="unknown option of 'mamba' 'state_sise': did you mean 'state_size'"):
        lg.LongitudeConfig(**SIZES, mixer={"name": "mamba", "state_sise": 4})
    with pytest.raises(ValueError, match="unknown mixer 'mambo': did you mean 'mamba'"):
        lg.LongitudeConfig(**SIZES, mixer="mambo")
