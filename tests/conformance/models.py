"""The models that transformers' tests are run over, what a tester of theirs must know of each, and what cannot apply."""

from __future__ import annotations

import ast
import os
import sys
import unittest
from dataclasses import dataclass, field
from importlib import import_module
from importlib.metadata import version
from inspect import signature
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import patch

import torch
import transformers.models
import transformers.models.auto.modeling_auto as auto
from transformers import LlamaConfig, LlamaForCausalLM, LlamaModel
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import longitude.hf  # noqa: F401  (registers attn_implementation="longitude")
from longitude.hf.attention import REFUSED, stock_attention
from longitude.models import LongitudeConfig, LongitudeForCausalLM, LongitudeForMaskedLM, LongitudeForSeq2SeqLM
from longitude.models.configuration import mixer_class
from longitude.models.decoder import LongitudeModel
from longitude.models.encoder import LongitudeEncoder
from longitude.models.seq2seq import LongitudeEncoderDecoder

os.environ["HF_HUB_OFFLINE"] = "1"
torch.set_num_threads(1)  # these models are too small for more
TESTS = Path(__file__).parents[2] / "build" / "conformance" / f"transformers-{version('transformers')}" / "tests"


def theirs() -> Any:
    """transformers' tests/test_modeling_common.py; empty mixins stand for those that its source distribution leaves out."""
    package = ModuleType("transformers_tests")
    package.__path__ = [str(TESTS)]
    sys.modules[package.__name__] = package
    left_out = {"exporters.test_export": "ExportTesterMixin", "generation.test_utils": "GenerationTesterMixin"}
    for path, mixin in left_out.items():
        if not (TESTS / f"{path.replace('.', '/')}.py").exists():
            module = ModuleType(f"{package.__name__}.{path}")
            setattr(module, mixin, type(mixin, (), {}))
            sys.modules[module.__name__] = module
    return import_module(f"{package.__name__}.test_modeling_common")


common = theirs()

# Their tests look up by name which kind of model a class is.
auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES["longitude"] = "LongitudeForCausalLM"
auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES["longitude"] = "LongitudeForMaskedLM"
auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES["longitude"] = "LongitudeForSeq2SeqLM"

DECODER = (LongitudeModel, LongitudeForCausalLM)
ENCODER = (LongitudeEncoder, LongitudeForMaskedLM)
SEQ2SEQ = (LongitudeEncoderDecoder, LongitudeForSeq2SeqLM)
LLAMA = (LlamaModel, LlamaForCausalLM)


@dataclass(frozen=True)
class Case:
    """One model: its classes, what its config says, and the attention function that ours stands in for in a stock model."""

    classes: tuple[type, ...]
    config: dict[str, Any] = field(default_factory=dict)
    instead: str | None = None


def mixers(*names: str) -> dict[str, Any]:
    specs = [{"name": name, "size": 5} if name == "window" else name for name in names]
    return {"mixer": specs[0]} if len(specs) == 1 else {"mixers": specs}


HYBRIDS = [("mamba2", "attention"), ("attention", "rwkv6"), ("hierarchical", "attention")]
ALONE = [("latent",), ("window",), ("retention",), ("mamba",), ("s4d",)]
CASES = {
    **{f"decoder, {name}": Case(DECODER, {"encoding": name}) for name in "rope alibi t5 fire path learned".split()},
    **{f"decoder, {' and '.join(names)}": Case(DECODER, mixers(*names)) for names in HYBRIDS + ALONE},
    **{f"encoder, {name}": Case(ENCODER, {"encoding": name}) for name in "rope alibi t5 learned".split()},
    **{f"encoder-decoder, {name}": Case(SEQ2SEQ, {"encoding": name}) for name in "rope t5 sinusoidal".split()},
    "encoder-decoder, mamba2 and attention": Case(SEQ2SEQ, mixers("mamba2", "attention")),
    "encoder-decoder, retention": Case(SEQ2SEQ, mixers("retention")),
    "stock Llama, ours for sdpa": Case(LLAMA, instead="sdpa"),
    "stock Llama, ours for eager": Case(LLAMA, instead="eager"),
}


class Tester:
    """What their tests ask about a model: a small config, inputs that fit it, and its sizes by the names they use."""

    batch_size, seq_length, vocab_size, hidden_size = 4, 7, 99, 32
    num_hidden_layers, num_attention_heads = 2, 4
    is_training = True

    def __init__(self, case: Case):
        self.case = case

    def get_config(self) -> Any:
        names = "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads"
        sizes: dict[str, Any] = {name: getattr(self, name) for name in names}
        sizes |= {"intermediate_size": 48, "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1}
        if self.case.classes is LLAMA:
            eager = "eager" if self.case.instead == "eager" else None  # else it takes sdpa by itself
            return LlamaConfig(**sizes, num_key_value_heads=2, eos_token_id=2, attn_implementation=eager)
        return LongitudeConfig(
            **sizes, **self.case.config, eos_token_id=2, is_encoder_decoder=self.case.classes is SEQ2SEQ
        )

    def prepare_config_and_inputs_for_common(self) -> tuple[Any, dict[str, Any]]:
        shape = self.batch_size, self.seq_length
        mask = torch.ones(shape, dtype=torch.long)
        mask[-1, -2:] = 0
        inputs = {"input_ids": common.ids_tensor(shape, self.vocab_size), "attention_mask": mask}
        if self.case.classes is SEQ2SEQ:
            inputs["decoder_input_ids"] = common.ids_tensor(shape, self.vocab_size)
        return self.get_config(), inputs


NO_WEIGHTS = "a state has no weights over keys: output_attentions is a ValueError where no layer has any"
NOT_IN_FIRST = "the test looks at the weights of the first layer, whose state has none: None stands there"
BOTH_NAMES = "a cache keeps both names here, and the test wants a warning that one of them goes"
LOOK_AT_WEIGHTS = ("test_attention_outputs", "test_retain_grad_hidden_states_attentions")


def not_applicable(case: Case) -> dict[str, str]:
    """Tests that mean nothing for this model, besides those that skip themselves: the test, and why."""
    if case.classes is LLAMA:
        return {}
    names = {"test_bc_cache_name_forward": BOTH_NAMES} if case.classes is SEQ2SEQ else {}
    weighs = [mixer_class(spec).has_weights for spec in Tester(case).get_config().layer_mixers()]
    if weighs[0]:
        return names
    if any(weighs) or case.classes is SEQ2SEQ:
        return names | dict.fromkeys(LOOK_AT_WEIGHTS, NOT_IN_FIRST)
    return {LOOK_AT_WEIGHTS[0]: NO_WEIGHTS}


def case_class(name: str, case: Case) -> type:
    """Their tests of one model."""

    def set_up(self: Any) -> None:
        self.model_tester = Tester(case)
        base = patch.dict(auto.MODEL_MAPPING_NAMES, {"longitude": case.classes[0].__name__})
        base.start()
        self.addCleanup(base.stop)
        if case.instead is not None:
            for registry in (ALL_ATTENTION_FUNCTIONS, ALL_MASK_ATTENTION_FUNCTIONS):
                change = patch.dict(type(registry)._global_mapping, {case.instead: registry["longitude"]})
                change.start()
                self.addCleanup(change.stop)

    skipped = not_applicable(case)
    body = {
        "setUp": set_up,
        "all_model_classes": case.classes,
        "is_encoder_decoder": case.classes is SEQ2SEQ,
        "has_attentions": NO_WEIGHTS not in skipped.values(),
        "test_can_init_all_missing_weights_before_2023": True,
        "__module__": __name__,
        **{test: lambda self, why=why: self.skipTest(why) for test, why in skipped.items()},
    }
    generates = (common.GenerationTesterMixin,) if any(kind.can_generate() for kind in case.classes) else ()
    return type(name, (common.ModelTesterMixin, *generates, unittest.TestCase), body)


# ---- what stock models hand to their attention ------------------------------------------------------------------------
HARMLESS = {"output_attentions", "is_causal", "max_length_q", "max_length_k", "position_ids", "deterministic"}
"""What ours reads or a mask says; cu_seq_lens_q and _k are documents."""


class Arguments(unittest.TestCase):
    """Every argument by which a model of transformers may change its attention is done, or refused in words."""

    def test_all_are_known(self) -> None:
        known = {*signature(stock_attention).parameters, *REFUSED, *HARMLESS, "cu_seq_lens_q", "cu_seq_lens_k"}
        found: dict[str, set[str]] = {}
        for file in Path(transformers.models.__file__).parent.glob("*/modeling_*.py"):
            for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
                if isinstance(node, ast.Call) and getattr(node.func, "id", None) == "attention_interface":
                    for keyword in node.keywords:
                        found.setdefault(keyword.arg or "kwargs", set()).add(file.parent.name)
        assert {"softcap", "s_aux", "scaling"} <= found.keys(), "the models call their attention otherwise"
        assert not (unknown := {name: models for name, models in found.items() if name not in known}), unknown


for _name, _case in CASES.items():
    globals()[_name] = case_class(_name, _case)
