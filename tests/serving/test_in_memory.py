"""A scaling that never reached the tables of a model in memory: `check` of the model says so."""

import copy

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from longitude.check import check
from tests.serving.models import ORIGINAL, SIZES

LAW = "rotary_frequencies"


def model(**rope: object) -> torch.nn.Module:
    parameters = {"rope_type": "default", "rope_theta": 10000.0, **rope}
    config = AutoConfig.for_model("llama", **SIZES, max_position_embeddings=256, rope_parameters=parameters)
    return AutoModelForCausalLM.from_config(config).eval()


@pytest.mark.parametrize("kind", ["yarn", "linear"])
def test_a_scaling_written_after_loading(kind) -> None:
    """Soup#793: the config says it, and no table changes."""
    loaded = model()
    assert check(loaded, laws=[LAW])[LAW].status == "passed"
    scheme = {"rope_type": kind, "factor": 4.0} | ({ORIGINAL: 64} if kind == "yarn" else {})
    loaded.config.rope_parameters = {"rope_theta": 10000.0, **scheme}
    assert check(loaded, laws=[LAW])[LAW].status == "failed"


def test_a_factor_that_is_never_passed_on() -> None:
    """Megatron-LM#6305: the model was built with 8, whatever the config has."""
    built = model(rope_type="linear", factor=8.0)
    built.config = copy.deepcopy(built.config)
    built.config.rope_parameters = built.config.rope_parameters | {"factor": 4.0}
    assert check(built, laws=[LAW])[LAW].status == "failed"
