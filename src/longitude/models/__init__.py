"""Transformers as Hugging Face models. Importing this room makes them known to the Auto classes."""

from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

from longitude.models.causal import LongitudeForCausalLM
from longitude.models.configuration import LongitudeConfig
from longitude.models.decoder import LongitudeModel

AutoConfig.register("longitude", LongitudeConfig, exist_ok=True)
AutoModel.register(LongitudeConfig, LongitudeModel, exist_ok=True)
AutoModelForCausalLM.register(LongitudeConfig, LongitudeForCausalLM, exist_ok=True)

__all__ = ["LongitudeConfig", "LongitudeForCausalLM", "LongitudeModel"]
