"""Stock transformers models with our attention, and with any encoding.

Importing this package registers attn_implementation="longitude".
"""

from longitude.errors import require_extra

require_extra("longitude.hf", "models")

from transformers import AttentionInterface, PreTrainedModel
from transformers.generation.continuous_batching.continuous_api import ContinuousMixin
from transformers.masking_utils import AttentionMaskInterface

from longitude.hf.attention import refusing, refusing_pages, stock_attention
from longitude.hf.masks import stock_mask
from longitude.hf.stock import from_pretrained, set_positions
from longitude.hf.trainer import Trainer

AttentionInterface.register("longitude", stock_attention)
AttentionMaskInterface.register("longitude", stock_mask)
for _name in ("get_correct_attn_implementation", "set_attn_implementation"):
    setattr(PreTrainedModel, _name, refusing(getattr(PreTrainedModel, _name)))
ContinuousMixin.init_continuous_batching = refusing_pages(ContinuousMixin.init_continuous_batching)

__all__ = ["Trainer", "from_pretrained", "set_positions"]
