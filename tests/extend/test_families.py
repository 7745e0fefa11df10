"""Every causal family of transformers: what is written rotates as meant in every layer, or a sentence says why nothing is."""

import math
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as FAMILIES
from transformers.utils import logging

import longitude as lg
from longitude.checkpoints.config import positions_of_layers
from longitude.extend import extend
from longitude.positions.scaling.base import Frequencies, Scaling
from make_families import OPTIONS, OWN, SHAPE
from tests.checkpoints.families import Measured, Unseen, measured
from tests.extend.test_extend import RootOfFactor, with_root_of_factor
from tests.support import edit_config, refused

LENGTH = 64
PLAIN = {"rope_type": "default", "rope_theta": 10_000.0}
LATENT = {"num_key_value_heads": 4, "head_dim": 8}
NESTED = {
    "vision_config": {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
}
"""Small towers for images."""
INDEXED = {
    "indexer_n_heads": 4,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 8,
    "indexer_budget": 16,
    "indexer_compress_ratio": 4,
}
MORE: dict[str, dict[str, Any]] = {
    "dots1": {"n_shared_experts": 1}, "zaya": {"num_experts_per_tok": 1, "num_hidden_layers": 4},
    "phi3": {"original_max_position_embeddings": LENGTH, "sliding_window": None},
    "phi4_multimodal": {"original_max_position_embeddings": LENGTH}, "gemma4_unified_text": {"global_head_dim": 32},
    **{family: {"sliding_window": None} for family in ("mistral", "mixtral", "phimoe", "starcoder2", "doge")},
    "gemma3": NESTED,
    "gemma3n_text": {"num_kv_shared_layers": 0, "vocab_size_per_layer_input": 96, "hidden_size_per_layer_input": 8},
    "qwen4_exp_text": INDEXED, "qwen4_exp": INDEXED, "cohere_compass_text": {"rope_parameters": {"full_attention": PLAIN}},
}  # fmt: skip
"""Sizes of families that the page of families has not, or has others of."""
LARGEST = 20_000_000
"""Numbers of a model that the sweep writes."""
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
    text = default.get_text_config(decoder=True)
    has = {*text.to_dict(), *type(text).attribute_map}
    options = SHAPE | {key: value for key, value in OPTIONS.items() if key in has} | OWN.get(family, {})
    options |= (LATENT if "kv_lora_rank" in has else {}) | {
        key: value for key, value in MORE.get(family, {}).items() if key not in NESTED
    }
    options = {key: value for key, value in (options | keys).items() if value is not None}
    if text is default:
        return AutoConfig.for_model(family, **options)
    towers = {key: value for key, value in MORE.get(family, {}).items() if key in NESTED}
    return AutoConfig.for_model(family, text_config=options, **towers)


def checkpoint(family: str, folder: Path) -> Path | None:
    """A random checkpoint with a rotation that nothing scaled; None where none is small."""
    try:
        config = small(family)
        scaled = str(getattr(config.get_text_config(decoder=True), "rope_parameters", None))
        if any(f"'{kind}'" in scaled for kind in ("yarn", "llama3", "longrope", "dynamic", "linear")):
            config = small(family, rope_parameters=PLAIN, max_position_embeddings=LENGTH)
        with torch.device("meta"):
            size = sum(x.numel() for x in AutoModelForCausalLM.from_config(config).parameters())
        if size > LARGEST:
            return None
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    except Exception:  # whatever a class raises of sizes that do not fit together
        return None
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
    return near and any(math.isclose(one, factor, rel_tol=1e-5) for one in (got.factor, *got.of_tables))


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
    assert any(one is not None and window > LENGTH for one, window in zip(plain, windows, strict=True)), family
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


@pytest.mark.one_in(19)
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("family", QUICK)
def test_a_family(family, method, tmp_path) -> None:
    source = checkpoint(family, tmp_path / "model")
    assert source is not None
    found = outcome(family, source, tmp_path / "out", method)
    is_refused = family in ("cohere2", "recurrent_gemma") or (family, method) == ("granite_swa", "ntk")
    assert found == ("refused" if is_refused else "written")


@pytest.mark.parametrize(("family", "remedy"), [("beam", "max_position_embeddings"), ("lfm3", "--method")])
def test_a_refusal_names_what_works(family, remedy, tmp_path) -> None:
    """Beam rotates behind windows alone; the rope_type of LFM3's layers of full attention has a factor and nothing else."""
    pytest.importorskip(f"transformers.models.{family}", reason="transformers is older than the model")
    source = checkpoint(family, tmp_path / "model")
    assert source is not None
    with refused(remedy, what="rope_parameters"):
        extend(source, tmp_path / "no", to=4 * LENGTH, method="yarn", text=None)
    if family == "lfm3":
        assert outcome(family, source, tmp_path / "out", "linear") == "written"
        return
    ids = torch.arange(4 * LENGTH)[None] % 90
    was = AutoModelForCausalLM.from_pretrained(source)(ids).logits
    edit_config(source, max_position_embeddings=4 * LENGTH)
    assert torch.equal(AutoModelForCausalLM.from_pretrained(source)(ids).logits, was)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("method", METHODS)
def test_every_family(method, tmp_path) -> None:
    """Nothing else than right files and sentences; and most families that rotate are small enough to be tried."""
    found: dict[str, str] = {}
    for family in FAMILIES:
        source = checkpoint(family, tmp_path / "model")
        if source is not None:
            try:
                config = AutoConfig.from_pretrained(source).get_text_config(decoder=True)
                rotates = any(one is not None for one in measured(config))
                found[family] = outcome(family, source, tmp_path / "out", method) if rotates else "does not rotate"
            except Unseen:
                found[family] = "not shown"
            print(family, method, found[family], flush=True)
        for folder in tmp_path.iterdir():
            shutil.rmtree(folder)
    counted = Counter(found.values())
    print(method, dict(counted), "untried:", *({*FAMILIES} - found.keys()))
    print("refused:", *(family for family, what in found.items() if what == "refused"))
    assert counted["written"] >= 60 and counted["written"] + counted["refused"] >= 100
