"""Options of scaling that are wrong, given to a scheme, as a dict or in the config of a model; and how that config holds them."""

import json

import numpy as np
import pytest
import torch

import longitude as lg
from longitude.models import LongitudeConfig
from longitude.positions.scaling import NTK, Clipped, DynamicNTK, Llama3, LongRoPE, NTKByParts, YaRN, from_dict
from tests.support import refused_calls

ONES = [1.0] * 32


def frequencies(scaling=None, head_dim: int = 64, base: float = 10_000.0, **options):
    return lambda: lg.rope_frequencies(head_dim, base, scaling, **options)


def scheme(kind: type, *given, **options):
    return lambda: kind(*given, **options)


test_wrong_options = refused_calls(
    [
        (frequencies(head_dim=7), "rotary_dim", "head_dim=7"),
        (frequencies("yarn"), "'name'", "None", "'yarn'"),
        (frequencies(NTK(2), 2), "ntk", "rotary_dim", "4", "2"),
        (frequencies(DynamicNTK(2, 2048)), "max_length", "follow='declared'"),
        (frequencies(YaRN(4, 2048), base=1.0), "yarn", "1.0"),
        (frequencies(NTKByParts(4.0, 3), 8, 2.0), "beta_slow=1", "3", "llama3"),
        (frequencies(YaRN(4.0, 8, beta_slow=16), 64, 10.0), "yarn", "original_max_length", "beta_slow=16", "8"),
        (frequencies(LongRoPE(ONES, ONES, 9, attention_factor=1.0)), "longrope", "max_length"),
        (frequencies(LongRoPE(ONES[1:], ONES, 9, 2)), "short_factor", "32", "rotary_dim", "2"),
        (frequencies(Clipped(8, pairs=33)), "clipped", "pairs", "32", "33"),
        (scheme(YaRN, 4, 2048, 1, 32), "beta_fast", "beta_slow", "1", "32"),
        (scheme(Llama3, 8, 2048, 4, 1), "high_freq_factor", "low_freq_factor", "1", "4"),
        (scheme(LongRoPE, 1.0, ONES, 9, 4), "longrope", "short_factor", "1.0"),
        (scheme(LongRoPE, ONES, ONES, 9), "max_length", "attention_factor"),
        (scheme(from_dict, {"name": "yarm", "factor": 4}), "'yarm'", "'yarn'"),
        (scheme(from_dict, {"name": "linear", "factor": 4, "facter": 4}), "'facter'", "'factor'"),
        (scheme(LongitudeConfig, encoding=[{"name": "mrope", "scaling": {"name": "yarm"}}]), "'yarm'"),
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
