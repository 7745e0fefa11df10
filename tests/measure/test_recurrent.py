"""Published recurrent models, their copies of ours, and a hybrid: on one page, with the same numbers."""

import pytest
from transformers import Mamba2Config, Mamba2ForCausalLM, MambaConfig, MambaForCausalLM

import longitude as lg
from longitude.checkpoints.load import byte_tokenizer, config_of
from longitude.measure.config import MeasureConfig
from longitude.measure.plan import outline_of, plan
from longitude.measure.run import measure
from longitude.measure.windows import keeps_keys
from longitude.runs.terminal import Progress
from longitude.testing import fill
from tests.checkpoints.copied import of_mamba
from tests.checkpoints.recurrent_models import GROUPED

SIZES = {"vocab_size": 256, "hidden_size": 16, "num_hidden_layers": 2}
HEADS = {"num_heads": 4, "head_dim": 8, "state_size": 8}
MODELS = {
    "mamba": lambda: MambaForCausalLM(MambaConfig(**SIZES)),
    "mamba2": lambda: Mamba2ForCausalLM(Mamba2Config(**SIZES, **HEADS, n_groups=2 if GROUPED else 1)),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_theirs_and_ours_on_one_page(name, text, tmp_path):
    theirs, ours = (tmp_path / each for each in ("theirs", "ours"))
    model = fill(MODELS[name](), std=0.2)
    model.save_pretrained(theirs)
    byte_tokenizer().save_pretrained(theirs)
    of_mamba(model).save_pretrained(ours)
    options = {"lengths": (24, 48), "documents": 2, "chunk": 16, "methods": ("non-overlapping",)}
    config = MeasureConfig(text=str(text), device="cpu", **options)
    planned = plan(config, (str(theirs), str(ours)))
    assert [each.trained for each in planned.subjects] == [None, None]
    results = measure(planned, tmp_path / "run", Progress())
    assert results.failures == ()
    rows = {(row.label, row.length): row for row in results.rows if row.metric == "bits_per_byte"}
    expected = "one pass" if name == "mamba" else "chunks of 16"  # theirs does not take up its state for several tokens
    assert rows["theirs", 48].prefill.startswith(expected) and rows["ours", 48].prefill.startswith("chunks of 16")
    for length in (24, 48):
        assert rows["ours", length].value == pytest.approx(rows["theirs", length].value, rel=1e-5)


MIXERS = [({"mixer": "mamba"}, False), ({"mixers": ["mamba", "attention"]}, True), ({"encoding": "rope"}, True)]


@pytest.mark.parametrize(("options", "keeps"), MIXERS)
def test_models_without_keys_need_no_memory_for_them(options, keeps, tmp_path):
    lg.LongitudeConfig(**SIZES, num_attention_heads=1, **options).save_pretrained(tmp_path)
    assert keeps_keys(outline_of(str(tmp_path), config_of(tmp_path))) == keeps
