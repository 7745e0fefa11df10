"""The public names and where they are: for type checkers, and for `loaded_on_use`, which imports each at its first use."""

from collections.abc import Callable
from typing import Any

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
from longitude.drawings import show as show
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

__version__: str

def loaded_on_use(package: str) -> tuple[Callable[[str], Any], list[str]]: ...
