from longitude.attention.backends.base import Backend as Backend, register_backend as register_backend
from longitude.attention.cache import LongitudeCacheLayer as LongitudeCacheLayer
from longitude.attention.layers.cross import CrossAttention as CrossAttention
from longitude.attention.layers.hierarchical import (
    HierarchicalAttention as HierarchicalAttention,
)
from longitude.attention.layers.indexed import (
    IndexedAttention as IndexedAttention,
    IndexedLatentAttention as IndexedLatentAttention,
    indexer_loss as indexer_loss,
)
from longitude.attention.layers.latent import LatentAttention as LatentAttention
from longitude.attention.layers.longformer import LongformerAttention as LongformerAttention
from longitude.attention.layers.parallel import ParallelMixer as ParallelMixer
from longitude.attention.layers.repo import RePoAttention as RePoAttention
from longitude.attention.layers.stick_breaking import StickBreaking as StickBreaking
from longitude.attention.layers.window import ChunkAttention as ChunkAttention, WindowAttention as WindowAttention
from longitude.attention.merge import merge_attention as merge_attention
