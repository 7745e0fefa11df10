"""Longitude: position encodings of transformers, and what they do past the length a model was trained on.

After `import longitude as lg`, the main names are lg.NAME, the others lg.MODULE.NAME (lg.attention.WindowAttention). All is
loaded on first use: the import itself costs nothing, and `lg.attend` with all encodings never loads transformers.
"""

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # the same names for type checkers and editors; tests/test_house.py compares the two lists
    from longitude import (
        attention as attention,
        check as check,
        checkpoints as checkpoints,
        extend as extend,
        hf as hf,
        measure as measure,
        models as models,
        positions as positions,
        recurrent as recurrent,
        study as study,
        testing as testing,
    )
    from longitude.attention.cache import LongitudeCache as LongitudeCache
    from longitude.attention.layers.multihead import MultiHeadAttention as MultiHeadAttention
    from longitude.attention.layers.stick_breaking import stick_breaking as stick_breaking
    from longitude.attention.masks import (
        Band as Band,
        Causal as Causal,
        Chunks as Chunks,
        Dilated as Dilated,
        Documents as Documents,
        Global as Global,
        Mask as Mask,
        NoMask as NoMask,
        Padding as Padding,
        Prefix as Prefix,
        Window as Window,
    )
    from longitude.attention.mixer import (
        Mixer as Mixer,
        list_mixers as list_mixers,
        mixer as mixer,
        register_mixer as register_mixer,
    )
    from longitude.attention.operation import attend as attend, explain as explain
    from longitude.checkpoints.config import from_hugging_face as from_hugging_face
    from longitude.models import (
        LongitudeConfig as LongitudeConfig,
        LongitudeForCausalLM as LongitudeForCausalLM,
        LongitudeForMaskedLM as LongitudeForMaskedLM,
        LongitudeForSeq2SeqLM as LongitudeForSeq2SeqLM,
    )
    from longitude.positions import samplers as samplers, scaling as scaling, terms as terms
    from longitude.positions.absolute import Learned as Learned, NoPosition as NoPosition, Sinusoidal as Sinusoidal
    from longitude.positions.base import (
        Encoding as Encoding,
        encoding as encoding,
        list_encodings as list_encodings,
        register as register,
    )
    from longitude.positions.bias import (
        ALiBi as ALiBi,
        ClippedBias as ClippedBias,
        Fire as Fire,
        Kerple as Kerple,
        Sandwich as Sandwich,
        T5Bias as T5Bias,
    )
    from longitude.positions.composed import Composed as Composed
    from longitude.positions.contextual import CoPE as CoPE, FoX as FoX, PaTH as PaTH
    from longitude.positions.hugging_face import RopeConfig as RopeConfig, to_hugging_face as to_hugging_face
    from longitude.positions.places import Abacus as Abacus, Coupled as Coupled
    from longitude.positions.polar import PoPE as PoPE
    from longitude.positions.relative import Inkling as Inkling, Shaw as Shaw, TransformerXL as TransformerXL
    from longitude.positions.remapped import (
        DualChunk as DualChunk,
        LeakyReRoPE as LeakyReRoPE,
        ReRoPE as ReRoPE,
        SelfExtend as SelfExtend,
    )
    from longitude.positions.rotary import (
        AxialRotary as AxialRotary,
        MultimodalRotary as MultimodalRotary,
        Rotary as Rotary,
        XPos as XPos,
    )
    from longitude.positions.scaling import rope_frequencies as rope_frequencies
    from longitude.positions.temperature import (
        BeamTemperature as BeamTemperature,
        LearnedSink as LearnedSink,
        Llama4Temperature as Llama4Temperature,
        LogAffine as LogAffine,
        LogN as LogN,
        Ministral3Temperature as Ministral3Temperature,
        SSMax as SSMax,
    )
    from longitude.training import parameter_groups as parameter_groups

__version__ = "0.1.0"

_MODULES = (
    "positions", "attention", "recurrent", "models", "hf", "checkpoints", "check", "measure", "extend", "study", "testing",
)  # fmt: skip
_NAMES = {
    "positions": "samplers scaling terms",
    "positions.base": "Encoding encoding list_encodings register",
    "positions.composed": "Composed",
    "positions.absolute": "NoPosition Sinusoidal Learned",
    "positions.rotary": "Rotary XPos AxialRotary MultimodalRotary",
    "positions.scaling": "rope_frequencies",
    "positions.hugging_face": "RopeConfig to_hugging_face",
    "checkpoints.config": "from_hugging_face",
    "positions.bias": "ALiBi Kerple Sandwich Fire T5Bias ClippedBias",
    "positions.relative": "Inkling Shaw TransformerXL",
    "positions.contextual": "CoPE FoX PaTH",
    "positions.places": "Abacus Coupled",
    "positions.polar": "PoPE",
    "positions.remapped": "ReRoPE LeakyReRoPE SelfExtend DualChunk",
    "positions.temperature": "SSMax LogN LogAffine Llama4Temperature Ministral3Temperature BeamTemperature LearnedSink",
    "attention.operation": "attend explain",
    "attention.masks": "Mask Causal Window Band Documents Padding NoMask Prefix Global Dilated Chunks",
    "attention.layers.multihead": "MultiHeadAttention",
    "attention.layers.stick_breaking": "stick_breaking",
    "attention.mixer": "Mixer mixer list_mixers register_mixer",
    "training": "parameter_groups",
    "attention.cache": "LongitudeCache",
    "models": "LongitudeConfig LongitudeForCausalLM LongitudeForMaskedLM LongitudeForSeq2SeqLM",
}
_MODULE_OF = {name: module for module, names in _NAMES.items() for name in names.split()}

__all__ = ["__version__", *_MODULES, *_MODULE_OF]  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> Any:
    if name in _MODULES or name in _MODULE_OF:
        import_module("longitude.errors").require_torch()
    if name in _MODULES:
        return import_module(f"longitude.{name}")
    if name in _MODULE_OF:
        module = import_module(f"longitude.{_MODULE_OF[name]}")
        value = getattr(module, name, None) or import_module(f"{module.__name__}.{name}")  # lg.scaling is a module
        globals()[name] = value  # the next access is an ordinary one
        return value
    raise import_module("longitude.errors").no_attribute(__name__, name)


def __dir__() -> list[str]:
    return sorted(__all__)


def loaded_on_use(package: str, names: Mapping[str, str]) -> tuple[Callable[[str], Any], list[str]]:
    """Make `__getattr__` and `__all__` of a package. names: module of longitude -> public names, separated by spaces.

    The module itself has its own name.
    """
    module_of = {name: module for module, public in names.items() for name in public.split()}

    def get(name: str) -> Any:
        if name not in module_of:
            raise import_module("longitude.errors").no_attribute(package, name)
        module = import_module(f"longitude.{module_of[name]}")
        return getattr(module, name, module)

    return get, sorted(module_of)
