"""Families that rotate in ways of their own: what is written rotates as meant, or a sentence says why nothing is."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.utils import logging

import longitude as lg
from longitude.checkpoints.config import positions_of_layers
from longitude.extend import extend
from longitude.positions.scaling.base import Frequencies, Scaling
from make_families import OPTIONS, OWN, SHAPE
from tests.checkpoints.families import Measured, measured
from tests.extend.test_extend import RootOfFactor, with_root_of_factor

LENGTH = 64
PLAIN = {"rope_type": "default", "rope_theta": 10_000.0}
LATENT = {"num_key_value_heads": 4, "head_dim": 8}
S = 4.0
METHODS: dict[str, Scaling] = {
    "linear": lg.scaling.Linear(S),
    "ntk": lg.scaling.NTK(S),
    "dynamic": lg.scaling.DynamicNTK(S, LENGTH, follow="sequence"),
    "yarn": lg.scaling.YaRN(S, LENGTH),
    "llama3": lg.scaling.Llama3(S, LENGTH),
    "root-of-factor": RootOfFactor(S),
}
"""The last has no rope_type, and is written as LongRoPE's factors."""


@pytest.fixture(autouse=True)
def registered(monkeypatch):
    with_root_of_factor(monkeypatch)
    logging.disable_progress_bar()
    logging.set_verbosity_error()


def small(family: str, **keys: Any) -> Any:
    """A config of a family, small in every way that it can be."""
    default = AutoConfig.for_model(family)
    has = {*default.to_dict(), *type(default).attribute_map}
    options = SHAPE | {key: value for key, value in OPTIONS.items() if key in has} | OWN.get(family, {})
    options |= LATENT if "kv_lora_rank" in has else {}
    return AutoConfig.for_model(family, **{key: value for key, value in (options | keys).items() if value is not None})


def checkpoint(family: str, folder: Path) -> Path:
    """A random checkpoint with a rotation that nothing scaled."""
    config = small(family)
    scaled = str(getattr(config, "rope_parameters", None))
    if any(f"'{kind}'" in scaled for kind in ("yarn", "llama3", "longrope", "dynamic", "linear")):
        config = small(family, rope_parameters=PLAIN, max_position_embeddings=LENGTH)
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


def scaled(plain: Measured, scheme: Scaling, length: int) -> Frequencies:
    """What a scheme makes of a plain rotation, whose base is in its slowest pair."""
    pairs = len(plain.frequencies)
    base = float(plain.frequencies[-1]) ** (-pairs / (pairs - 1))
    return lg.rope_frequencies(2 * pairs, base, scheme, length=length)


def same(got: Measured, inverse: Tensor, factor: float) -> bool:
    near = got.frequencies.shape == inverse.shape and torch.allclose(
        got.frequencies, inverse, rtol=1e-4, atol=got.slack
    )
    return near and any(math.isclose(number, factor, rel_tol=1e-5) for number in (got.factor, *got.of_tables))


def outcome(family: str, source: Path, out: Path, method: str) -> str:
    """What became of it: "written", with layers as meant, or "refused", in one line and with nothing left."""
    before, length, reason = sorted(out.parent.iterdir()), int(S * LENGTH), ""
    config = AutoConfig.from_pretrained(source).get_text_config(decoder=True)
    declared = config.to_dict().get("max_position_embeddings")
    try:
        extend(source, out, to=length, method=method, original=None if declared else LENGTH, text=None)
    except ValueError as refusal:
        reason = str(refusal).strip()
    if not out.exists():
        assert reason and "\n" not in reason and sorted(out.parent.iterdir()) == before, (family, method)
        return "refused"
    windows = [
        layer.window or layer.chunk or math.inf for layer in positions_of_layers(config, "half") if layer.attends
    ]
    windows = [math.inf if family == "deepseek_v4" else window for window in windows]  # it sees summaries beyond them
    by_type = any(isinstance(entry, dict) for entry in config.rope_parameters.values())
    plain, written = measured(config), AutoConfig.from_pretrained(out).get_text_config(decoder=True)
    assert any(rotation is not None and window > LENGTH for rotation, window in zip(plain, windows, strict=True)), (
        family
    )
    for at in (LENGTH, length):
        for window, was, now in zip(windows, plain, measured(written, at), strict=True):
            assert (was is None) == (now is None), (family, method)
            if was is None or now is None:
                continue
            kept = same(now, was.frequencies, was.factor)
            if float(was.frequencies[-1]) == 0:  # p-RoPE, whose base is not in its last pair
                meant = method == "linear" and same(now, was.frequencies / S, was.factor)
            else:
                want = scaled(was, METHODS[method], at)
                meant = same(now, want.inverse, 1.0 if family == "deepseek_v4" else want.attention_factor)
            assert meant if window > LENGTH else kept if by_type else kept or meant, (family, method, window, at)
    return "written"


QUICK = (
    "llama",
    "gemma3_text",
    "deepseek_v4",
    "granite_swa",
    "olmo3",
    "qwen3_next",
    "cohere2",
    "smollm3",
    "mimo_v2_flash",
    "recurrent_gemma",
)


@pytest.mark.one_in(60)
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("family", QUICK)
def test_a_family(family, method, tmp_path) -> None:
    source = checkpoint(family, tmp_path / "model")
    result = outcome(family, source, tmp_path / "out", method)
    is_refused = family in ("cohere2", "recurrent_gemma") or (family, method) == ("granite_swa", "ntk")
    assert result == ("refused" if is_refused else "written")
