"""Mixers that carry a state instead of keys and values: parallel = chunked = one token at a time."""

from longitude.recurrent.delta import GatedDeltaNet, KimiDeltaAttention, gated_delta_rule
from longitude.recurrent.gated import GRU, LSTM
from longitude.recurrent.mamba import Mamba, selective_scan
from longitude.recurrent.mamba2 import Mamba2, ssd
from longitude.recurrent.mamba3 import Mamba3, mamba3
from longitude.recurrent.performer import Performer, orthogonal_features, performer
from longitude.recurrent.retention import Retention, retention
from longitude.recurrent.rwkv4 import RWKV4, rwkv4
from longitude.recurrent.rwkv6 import RWKV6, rwkv6
from longitude.recurrent.rwkv7 import RWKV7, rwkv7
from longitude.recurrent.s4d import S4D, s4d

__all__ = [
    "GRU", "GatedDeltaNet", "KimiDeltaAttention", "LSTM", "Mamba", "Mamba2",
    "Mamba3", "Performer", "RWKV4", "RWKV6", "RWKV7", "Retention", "S4D",
    "gated_delta_rule", "mamba3", "orthogonal_features", "performer", "retention", "rwkv4", "rwkv6",
    "rwkv7", "s4d", "selective_scan", "ssd",
]  # fmt: skip
