"""Transformers as Hugging Face models. Importing this package registers them with the Auto classes."""

from longitude.errors import require_extra

require_extra("longitude.models", "models")

from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoModelForMaskedLM, AutoModelForSeq2SeqLM

from longitude.models.causal import LongitudeForCausalLM
from longitude.models.configuration import LongitudeConfig
from longitude.models.decoder import LongitudeModel
from longitude.models.encoder import LongitudeForMaskedLM
from longitude.models.seq2seq import LongitudeForSeq2SeqLM

AutoConfig.register("longitude", LongitudeConfig, exist_ok=True)
AutoModel.register(LongitudeConfig, LongitudeModel, exist_ok=True)
AutoModelForCausalLM.register(LongitudeConfig, LongitudeForCausalLM, exist_ok=True)
AutoModelForMaskedLM.register(LongitudeConfig, LongitudeForMaskedLM, exist_ok=True)
AutoModelForSeq2SeqLM.register(LongitudeConfig, LongitudeForSeq2SeqLM, exist_ok=True)

__all__ = ["LongitudeModel"]
"""The others are lg.LongitudeConfig and so on."""
