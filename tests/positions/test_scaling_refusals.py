"""Options of scaling that are wrong, given to a scheme, as a dict or in the config of a model; and how that config holds them."""

import json
import math

import numpy as np
import pytest
import torch

import longitude as lg
from longitude.models import LongitudeConfig
from longitude.positions.scaling import (
    NTK,
    BaseChange,
    DynamicNTK,
    Linear,
    Llama3,
    LongRoPE,
    NTKByParts,
    YaRN,
    from_dict,
)
from tests.support import refused_calls

ONES = [1.0] * 32


def frequencies(scaling=None, head_dim: int = 64, base: float = 10_000.0, **options):
    return lambda: lg.rope_frequencies(head_dim, base, scaling, **options)


def scheme(kind: type, *given, **options):
    return lambda: kind(*given, **options)


test_wrong_options = refused_calls(
    [
        (frequencies(head_dim=7), "even rotary_dim of at most head_dim=7, got 7"),
        (frequencies(head_dim=8, rotary_dim=10), "at most head_dim=8, got 10"),
        (frequencies(rotary_dim=0), "rotary_dim to be an int of 1 or more, got 0"),
        (frequencies(head_dim=8.0, rotary_dim=8), "head_dim to be an int of 1 or more, got 8.0"),
        (frequencies(base=0), "base above 0, got 0"),
        (frequencies(proportion=1.1), "proportion from 0 to 1, got 1.1"),
        (frequencies(proportion=-0.1), "proportion from 0 to 1, got -0.1"),
        (frequencies(proportion=True), "proportion from 0 to 1, got True"),
        (frequencies(proportion="all"), "proportion from 0 to 1, got 'all'"),
        (frequencies("yarn"), "expected a scheme, .* got 'yarn'"),
        (frequencies({"name": ["yarn"]}), r"unknown scaling \['yarn'\]: did you mean 'yarn'"),
        (frequencies(NTK(2), 2), "ntk: expected a rotary_dim of 4 or more, got 2"),
        (frequencies(DynamicNTK(2, 9, 18), 2), "dynamic_ntk: expected a rotary_dim of 4 or more, got 2"),
        (frequencies(DynamicNTK(2, 2048)), "expected max_length, the length that follow='declared' chooses"),
        (frequencies(YaRN(4, 2048), base=1.0), "yarn: expected a base above 1, got 1.0"),
        (frequencies(NTKByParts(4.0, 3), 8, 2.0), "rotates beta_slow=1 times, got 3; ramp='rotations' has no such"),
        (frequencies(YaRN(4.0, 8, beta_slow=16), 64, 10.0), "yarn: .* pair rotates beta_slow=16 times, got 8"),
        (frequencies(YaRN(4.0, 6, truncate=False)), "beta_slow=1 times, got 6"),  # just below one rotation
        (frequencies(LongRoPE(ONES, ONES, 9, attention_factor=1.0)), "longrope: expected max_length"),
        (frequencies(LongRoPE(ONES[1:], ONES, 9, 2)), r"short_factor of 32 numbers \(rotary_dim/2\), got 31"),
        (frequencies(LongRoPE(ONES, ONES * 2, 9, 2)), r"long_factor of 32 numbers \(rotary_dim/2\), got 64"),
        (scheme(Linear, 0.5), "linear: expected a factor of 1 or more, got 0.5; it multiplies lengths"),
        (scheme(Llama3, 0.5, 2048), "llama3: expected a factor of 1 or more"),
        (scheme(LongRoPE, ONES, ONES, 2048, 0.5), "longrope: expected a factor of 1 or more"),
        (scheme(Linear, -2.0), "linear: expected factor above 0, got -2.0"),
        (scheme(Linear, math.nan), "factor above 0, got nan"),
        (scheme(Linear, None), "linear: expected factor above 0, got None"),
        (scheme(Linear, "4"), "factor above 0, got '4'"),
        (scheme(BaseChange, -1.0), "base_change: expected base above 0, got -1.0"),
        (scheme(DynamicNTK, 2, 2048.5), "original_max_length to be an int of 1 or more, got 2048.5"),
        (scheme(DynamicNTK, 2, 2048, 0), "expected max_length to be an int of 1 or more, got 0"),
        (scheme(DynamicNTK, 2, 2048, step=0), "expected step to be an int of 1 or more, got 0"),
        (scheme(DynamicNTK, 2, 2048, step=8), "expected step only with follow='row', got follow='declared'"),
        (scheme(DynamicNTK, 2, 2048, follow="rows"), "follow 'declared', 'row' or 'sequence', got 'rows'"),
        (scheme(YaRN, 4, None), "original_max_length to be an int of 1 or more, got None"),
        (scheme(YaRN, 4, 2048, 1, 32), "beta_fast .* beta_slow, .* got 1 and 32"),
        (scheme(YaRN, 4, 2048, 32, 0), "beta_slow above 0, got 0"),
        (scheme(YaRN, 4, 2048, math.nan), "beta_fast above 0, got nan"),
        (scheme(YaRN, 4, 2048, ramp="paper"), "'dimensions' or 'rotations', got 'paper'"),
        (scheme(YaRN, 4, 2048, truncate="no"), "truncate to be True or False, got 'no'"),
        (scheme(YaRN, 4, 2048, truncate=False, ramp="rotations"), "only with ramp=.dimensions., got ramp=.rotations"),
        (scheme(YaRN, 4, 2048, attention_factor=0), "yarn: expected attention_factor above 0, got 0"),
        (scheme(YaRN, 4, 2048, mscale=-1), "yarn: expected mscale above 0, got -1"),
        (scheme(YaRN, 4, 2048, mscale_all_dim="1"), "yarn: expected mscale_all_dim above 0, got '1'"),
        (scheme(Llama3, 8, 2048, 4, 1), "high_freq_factor of at least low_freq_factor, got 1 and 4"),
        (scheme(Llama3, 8, 2048, 0, 4), "llama3: expected low_freq_factor above 0, got 0"),
        (scheme(Llama3, 8, 2048, 1, math.nan), "llama3: expected high_freq_factor above 0, got nan"),
        (scheme(LongRoPE, 1.0, ONES, 9, 4), "longrope: expected short_factor to be a list of numbers, got 1.0"),
        (scheme(LongRoPE, ONES, [1.0, "2"], 9, 4), r"expected long_factor\[1\] above 0, got '2'"),
        (scheme(LongRoPE, [1.0, 0.0], ONES, 9, 4), r"expected short_factor\[1\] above 0, got 0.0"),
        (scheme(LongRoPE, ONES, ONES, 9), "factor, max_length or attention_factor, .* got none"),
        (scheme(LongRoPE, ONES, ONES, 1, 4), "original_max_length of 2 or more, got 1"),
        (scheme(from_dict, {"name": "yarm", "factor": 4}), "unknown scaling 'yarm': did you mean 'yarn'?"),
        (scheme(from_dict, {"name": "linear", "factor": 4, "facter": 4}), "'facter': did you mean 'factor'?"),
        (scheme(from_dict, {"name": "yarn", "original_max_length": 9}), "'yarn' needs the option 'factor'"),
        (scheme(LongitudeConfig, encoding=[{"name": "mrope", "scaling": {"name": "yarm"}}]), "unknown scaling 'yarm'"),
        (scheme(from_dict, {"rope_type": "yarn"}), "a Hugging Face config is read by from_hugging_face"),
    ]
)


# ---- in the config of a model ----------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", ["rope", "mrope"])
def test_config_holds_every_option_of_the_scheme(name: str) -> None:
    want = YaRN(4.0, 1024).as_dict()
    for spec in ({"name": "yarn", "factor": 4.0, "original_max_length": 1024}, YaRN(4.0, 1024)):
        config = LongitudeConfig(encoding={"name": name, "scaling": spec})
        assert config.encoding["scaling"] == want  # type: ignore[index]
        assert json.loads(config.to_json_string())["encoding"]["scaling"] == want
    assert LongitudeConfig(encoding=name).encoding["scaling"] is None  # type: ignore[index]


NUMBERS = [1.0, 0.5, 0.25, 0.125]


@pytest.mark.parametrize(
    "slopes",
    [np.array(NUMBERS, np.float32), tuple(NUMBERS), [*map(np.float32, NUMBERS)], torch.tensor(NUMBERS)],
    ids=type,
)
def test_numbers_of_other_libraries_become_plain_in_a_config(slopes) -> None:
    config = LongitudeConfig(encoding={"name": "alibi", "slopes": slopes, "num_heads": np.int64(4)})
    assert repr(config.encoding["slopes"]) == repr(NUMBERS)  # type: ignore[index]
    assert json.loads(config.to_json_string())["encoding"] == config.encoding
