"""Position parameters of a GGUF file as llama.cpp interprets them, read with the package `gguf`.

The angle of pair i at position p, with f the entry of a tensor of factors (1 without one) and s `rope.scaling.factor`, is

* t = p base^(-2i/d) / f if the type of scaling is "none";
* t / s for every other type, "longrope" included; a file without a type is "linear", and one without a factor has s = 1;
* t (1 - r) / s + t r for "yarn", with the ramp r of pair i computed from unscaled frequencies: f does not affect it.

`rope_freqs.weight` applies at every length. Without it the size of the context decides, not the sequence: all tokens use
rope_factors_long if the context was opened with more than the original length, else rope_factors_short, or no factors if that
list is missing. Llama's files have both lists only for the type "longrope". YaRN multiplies cos and sin by 0.1 ln(s) + 1 and by
`rope.scaling.attn_factor`. Only Grok has `yarn_attn_factor` and `yarn_ext_factor`.

Source:
    llama.cpp in llama-cpp-python 0.3.36: rope_yarn and ggml_rope_cache_init (ggml/src/ggml-cpu/ops.cpp), load_hparams and
    get_rope_factors (src/llama-model.cpp), the constructor of llama_context, src/models/*.cpp.
    https://github.com/ggml-org/llama.cpp
"""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from longitude.checkpoints.load import in_one_line
from longitude.errors import UsageError
from longitude.positions.scaling import YaRN, rope_frequencies
from longitude.runs.files import regular

NEIGHBOURS = """
    llama llama4 deci baichuan starcoder internlm2 minicpm xverse command-r cohere2 olmo arctic deepseek deepseek2 chatglm glm4
    granite granitemoe mistral3 smollm3 arcee ernie4_5 ernie4_5-moe bailingmoe
""".split()
HALVES = """
    falcon grok dbrx stablelm bitnet qwen qwen2 qwen2moe qwen3 qwen3moe olmo2 olmoe phi2 phi3 phimoe gemma gemma2 gemma3
    gemma3n gemma4
    starcoder2 openelm gptneox codeshell nemotron exaone exaone4 minicpm3 gpt-oss hunyuan-dense hunyuan-moe lfm2 seed_oss apertus
    dots1 qwen3next
""".split()
"""Architectures by the pairs that llama.cpp rotates (llama_model_rope_type in llama-model.cpp); no key in the file has it."""

FACTORS = "rope_freqs.weight"
"""The tensor by which llama.cpp's converter writes Llama 3's scheme; no key names it."""

SHORT, LONG = "frequencies", "frequencies beyond the original length"
LISTS = {SHORT: "rope_factors_short.weight", LONG: "rope_factors_long.weight"}
"""LongRoPE's tensors of factors."""
FACTORED = """
    llama llama-embed llama4 deci minicpm minicpm3 mistral3 arcee exaone exaone4 exaone-moe apertus granite granitemoe
    granitehybrid granite_swa nanbeige gemma4 phi3 phimoe
""".split()
"""Architectures that divide by a tensor of factors. Falcon-H1 has one and ignores it; other files with one raise an error."""
BETAS = ("grok", "mistral3")
"""Architectures for which YaRN's betas are read; for all others they are 32 and 1, whatever the file has."""
WINDOW_BASES = {"gemma3": 10_000.0, "gemma3n": 10_000.0}
"""Rotary base of layers with windows for files without one, as hard-coded in llama.cpp."""


class Divided(NamedTuple):
    """Radians per position of each pair [pairs], float64, and the base before a scheme divided them."""

    base: float
    inverse: Tensor

    def of_pair(self, pair: int) -> str:
        """The frequency of a pair in words, and the divisor of its scheme."""
        plain, rad = self.base ** (-pair / len(self.inverse)), float(self.inverse[pair])
        return f"pair {pair}: {rad:.6g} rad, " + (f"{plain:.6g} divided by {plain / rad:.5g}" if rad else "not rotated")


ARRAY = 9
"""The type of a list."""


def reader_of(path: Path) -> Any:
    """The package's reader, which raises ValueError at the end of the file: it takes the sizes in a file for true."""
    from gguf import GGUFReader

    class Reader(GGUFReader):
        def _get(self, offset: int, dtype: Any, count: int = 1, override_order: Any = None) -> Any:
            values = super()._get(offset, dtype, count, override_order)
            if len(values) < count:
                raise ValueError(f"{count} values at byte {offset} of {len(self.data)}")
            return values

        def _get_field_parts(self, orig_offs: int, raw_type: int) -> Any:
            if raw_type == ARRAY:  # the package would walk through the file to its end
                count = int(self._get(orig_offs + 4, np.uint64)[0])
                if count > len(self.data) - orig_offs:
                    raise ValueError(f"a list of {count} values at byte {orig_offs} of {len(self.data)}")
            return super()._get_field_parts(orig_offs, raw_type)

    return Reader(path)


class GGUF:
    """An open GGUF file. ValueError for another kind of file, or a truncated file."""

    def __init__(self, path: Path):
        if find_spec("gguf") is None:
            raise ValueError(f"{path}: reading it needs the package gguf: pip install gguf")
        with in_one_line(f"{path}: no GGUF file, or one that is cut off"), regular(path, links=True):
            self.reader = reader_of(path)
        self.path = path
        self._tensors = {tensor.name: tensor for tensor in self.reader.tensors}
        self.architecture = str(self.field("general.architecture"))

    def field(self, name: str) -> Any:
        """The value of a key; None if the file has none."""
        field = self.reader.get_field(name)
        return None if field is None else field.contents()

    def key(self, name: str) -> Any:
        """The value of a key of the file's architecture; None if it has none."""
        return self.field(f"{self.architecture}.{name}")

    def facts(self) -> dict[str, Any]:
        """Properties of the file by name; None if the file has none."""
        heads, dim = self.key("attention.head_count"), self.key("embedding_length")
        width = self.key("attention.key_length") or (dim // heads if dim and heads and isinstance(heads, int) else None)
        kind, factor = self.key("rope.scaling.type"), self.key("rope.scaling.factor")
        factor = (self.key("rope.scale_linear") if factor is None else factor) or None  # an older name; 0 is none
        if kind is None and factor:
            kind = "linear"  # llama.cpp's default for a file with a factor and no type
        factored = self.architecture in FACTORED
        if kind in (None, "none") and factored and FACTORS in self._tensors:
            kind = "llama3"
        yarn, has_betas = kind == "yarn", self.architecture in BETAS
        unknown = (
            None if factored else next((name for name in (FACTORS, *LISTS.values()) if name in self._tensors), None)
        )
        pairs = {**dict.fromkeys(NEIGHBOURS, "interleaved"), **dict.fromkeys(HALVES, "half")}.get(self.architecture)
        return {
            "layers": self.key("block_count"),
            "heads of queries": heads,
            "heads of keys": self.key("attention.head_count_kv") or heads,
            "head_dim": width,
            "rotated dimensions": self.key("rope.dimension_count") or width,
            "pairs": pairs,
            "base": self.key("rope.freq_base") or 10_000.0,
            "scaling": "none" if kind is None else str(kind),
            "factor": factor,
            "factors of frequencies": unknown and f"{unknown}, not known to be read for {self.architecture}",
            "attention factor": self._attention_factor(kind, factor or 1.0),
            "original length": self.key("rope.scaling.original_context_length"),
            "beta fast": (has_betas and self.key("rope.scaling.yarn_beta_fast") or 32.0) if yarn else None,
            "beta slow": (has_betas and self.key("rope.scaling.yarn_beta_slow") or 1.0) if yarn else None,
            "base of windows": self.key("rope.freq_base_swa") or WINDOW_BASES.get(self.architecture),
            "declared length": self.key("context_length"),
            "window": self.key("attention.sliding_window"),
        }

    def _attention_factor(self, kind: Any, factor: float) -> float | None:
        """Factor of cos and sin in llama.cpp besides YaRN's built-in 0.1 ln(s) + 1; None for DeepSeek, which is not read."""
        of_yarn = 1.0
        if kind == "yarn":
            multiplier = self.key("rope.scaling.yarn_log_multiplier")
            if multiplier and self.architecture != "mistral3":
                return None
            of_yarn = YaRN(max(factor, 1.0), 2, mscale=1.0, mscale_all_dim=multiplier).factors()[0]
        return of_yarn * (self.key("rope.scaling.attn_factor") or 1.0)

    def frequencies(self) -> dict[str, Divided]:
        """Frequencies as llama.cpp computes them; two if it switches at a length, none if they are not known."""
        facts = self.facts()
        width, base, factor = facts["rotated dimensions"], facts["base"], facts["factor"] or 1.0
        if not width or facts["factors of frequencies"]:
            return {}
        scheme = None
        if facts["scaling"] == "yarn":
            original = facts["original length"] or facts["declared length"]
            scheme = YaRN(factor, original, beta_fast=facts["beta fast"], beta_slow=facts["beta slow"])
        inverse = rope_frequencies(width, base=base, scaling=scheme).inverse
        if facts["scaling"] not in ("none", "llama3", "yarn"):
            inverse = inverse / factor
        names = {SHORT: FACTORS} if FACTORS in self._tensors else LISTS
        if not {*names.values()} & self._tensors.keys():
            return {SHORT: Divided(base, inverse)}
        return {kind: Divided(base, inverse / self._factors(name, inverse)) for kind, name in names.items()}

    def _factors(self, name: str, inverse: Tensor) -> Tensor:
        """Factors [pairs] by which frequencies are divided; 1 if the file has no tensor of this name."""
        if name not in self._tensors:
            return torch.ones_like(inverse)
        factors = _numbers(self._tensors[name]).to(inverse)
        if factors.shape != inverse.shape:
            expected = f"{name} to have a factor for each of {len(inverse)} pairs"
            raise UsageError(str(self.path), expected, len(factors))
        return factors

    def rotation_weights(self) -> Iterator[tuple[str, Tensor]]:
        """(name in transformers, weight in float32) of each projection of queries and keys, one by one."""
        names = {"attn_q": "q_proj", "attn_k": "k_proj"}
        for tensor in self.reader.tensors:
            match tensor.name.split("."):
                case ["blk", layer, kind, "weight"] if kind in names:
                    yield f"model.layers.{layer}.self_attn.{names[kind]}.weight", _numbers(tensor)

    @property
    def exact(self) -> bool:
        """Whether its weights are floats, and not quantized."""
        kinds = {tensor.tensor_type.name for tensor in self.reader.tensors if "attn_" in tensor.name}
        return kinds <= {"F32", "F16", "BF16"}


def _numbers(tensor: Any) -> Tensor:
    """A tensor of the file as float32."""
    from gguf.quants import dequantize

    return torch.tensor(dequantize(tensor.data, tensor.tensor_type), dtype=torch.float32)
