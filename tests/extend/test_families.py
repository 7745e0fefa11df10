"""Families that rotate in ways of their own: what is written rotates as meant, or a sentence says why nothing is."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText
from transformers.utils import logging

import longitude as lg
from longitude.checkpoints.config import positions_of_layers
from longitude.checkpoints.load import open_source
from longitude.extend import extend
from longitude.extend.layers import NotAsMeant
from longitude.extend.plan import Target, plan_extension
from longitude.positions.scaling.base import Frequencies, Scaling
from make_families import OPTIONS, OWN, SHAPE, toy
from tests.checkpoints.families import _SEEN, NAME, Measured, as_pairs, measured
from tests.extend.conftest import LENGTH, PLAIN
from tests.extend.test_extend import RootOfFactor, with_root_of_factor
from tests.support import edit_config

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


FAMILIES = "llama gemma3_text deepseek_v4 granite_swa olmo3 qwen3_next cohere2 smollm3 mimo_v2_flash recurrent_gemma"


@pytest.mark.one_in(60)
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("family", FAMILIES.split())
def test_a_family(family, method, tmp_path) -> None:
    source = checkpoint(family, tmp_path / "model")
    result = outcome(family, source, tmp_path / "out", method)
    is_refused = family in ("cohere2", "recurrent_gemma") or (family, method) == ("granite_swa", "ntk")
    assert result == ("refused" if is_refused else "written")


# ---- models of text and images ---------------------------------------------------------------------------------------
AXES = {"qwen2_5_vl": [0, 0, 1, 1, 1, 2, 2, 2], "qwen3_vl": [0, 1, 2, 0, 1, 2, 0, 1]}
"""Time, height or width, which each pair of a head follows."""


def yarn(pairs: int, base: float) -> tuple[Tensor, float]:
    """Frequencies and attention factor, as Peng et al. (2023) define them, in float64."""
    k = torch.arange(pairs, dtype=torch.float64)
    fast, slow = (pairs * math.log(LENGTH / (2 * math.pi * turns), base) for turns in (32, 1))
    ramp = ((k - max(math.floor(fast), 0)) / (math.ceil(slow) - max(math.floor(fast), 0))).clamp(0, 1)
    return base ** (-k / pairs) * (1 - ramp + ramp / S), 0.1 * math.log(S) + 1


def queries(folder: Path, axis: int) -> Tensor:
    """Pairs of the first layer's queries, complex [heads, 2, pairs], of one token at 0 and at 1 along one axis of positions."""
    model: Any = AutoModelForImageTextToText.from_pretrained(folder).double().eval()
    model.set_attn_implementation(NAME)
    at = torch.zeros(3, 1, 2, dtype=torch.long)
    at[axis, 0, 1] = 1
    _SEEN.clear()
    with torch.no_grad():
        model(input_ids=torch.full((1, 2), 5), position_ids=at, use_cache=False)
    return as_pairs(_SEEN[0][1][0], halves=True)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("family", AXES)
def test_every_axis_of_images_is_extended(family, tmp_path) -> None:
    """In unmodified transformers, by the published formula; with another mrope_section neither it nor our check holds."""
    source, out = tmp_path / "model", tmp_path / "out"
    toy(family).save_pretrained(source)
    (source / "preprocessor_config.json").write_text("{}")
    extend(source, out, to=int(S * LENGTH), method="yarn", text=None)
    frequencies, factor = yarn(8, 1e4)

    def as_published(folder: Path) -> bool:
        right = []
        for axis in range(3):
            before, after = queries(source, axis), queries(folder, axis)
            angles = (after[:, 1] * after[:, 0].conj()).sum(0).angle().abs()
            want = frequencies * (torch.tensor(AXES[family]) == axis)
            right.append(torch.allclose(angles, want, rtol=0, atol=1e-6))
            right.append(torch.allclose(after[:, 0], factor * before[:, 0]))
        return all(right)

    assert as_published(out) and (out / "preprocessor_config.json").exists()
    model: Any = AutoModelForImageTextToText.from_pretrained(out)
    ids = torch.arange(2 * LENGTH)[None] % 80 + 3
    made = model.generate(ids, max_new_tokens=4, do_sample=False, output_logits=True, return_dict_in_generate=True)
    assert torch.stack(made.logits).isfinite().all()
    plan = plan_extension(open_source(str(source)), Target(to=int(S * LENGTH), method="yarn"))
    plan.inner["rope_parameters"]["mrope_section"] = plan.inner["rope_scaling"]["mrope_section"] = [4, 2, 2]
    with pytest.raises(NotAsMeant, match="axes"):
        plan.require_rotation(plan.read_config())
    edit_config(out, text_config=plan.inner)
    assert not as_published(out)


def test_a_width_that_its_class_leaves_out_is_written(tmp_path):
    """Mixtral's files have no head_dim, and transformers' YaRN multiplies by it."""
    small("mixtral", head_dim=None, sliding_window=None).save_pretrained(tmp_path / "model")
    edit_config(tmp_path / "model", head_dim=None)
    AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(tmp_path / "model")).save_pretrained(tmp_path / "model")
    extend(tmp_path / "model", tmp_path / "out", to=256, method="yarn", text=None)
    rotary = AutoModelForCausalLM.from_pretrained(tmp_path / "out").model.rotary_emb
    want = lg.rope_frequencies(16, base=rotary.config.rope_parameters["rope_theta"], scaling=lg.scaling.YaRN(4.0, 64))
    torch.testing.assert_close(rotary.inv_freq.double(), torch.as_tensor(want[0]).double(), rtol=1e-6, atol=0)


def test_a_linear_scheme_does_not_say_how_long_the_text_was_before_it(tmp_path):
    """131,072 / 8 is 16,384, and Gemma 3 was trained at 32,768."""
    scaled = {"rope_type": "linear", "rope_theta": 1e4, "factor": 8.0}
    config = small("llama", rope_parameters=scaled, max_position_embeddings=512)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "model")
    target = {"to": 1024, "method": "yarn"}
    with pytest.raises(ValueError, match="extended already") as refusal:
        plan_extension(open_source(str(tmp_path / "model")), Target(**target))
    assert "64" not in str(refusal.value) and "None" not in str(refusal.value)
    assert plan_extension(open_source(str(tmp_path / "model")), Target(**target, original=128)).factor == 8


def test_layers_with_other_numbers_of_heads(tmp_path):
    """Gemma 4: layers that see all tokens have key heads of their own."""
    config = small("gemma4_text", num_global_key_value_heads=1, attention_k_eq_v=True)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "model")
    plan = plan_extension(open_source(str(tmp_path / "model")), Target(to=256, method="linear"))
    assert plan.inner["max_position_embeddings"] == 256
