"""Mixers that carry a state instead of keys and values: parallel = chunked = one token at a time."""

from longitude.recurrent.mamba import Mamba
from longitude.recurrent.mamba2 import Mamba2
from longitude.recurrent.retention import Retention
from longitude.recurrent.rwkv4_layer import RWKV4, RWKVChannelMix
from longitude.recurrent.rwkv6 import RWKV6
from longitude.recurrent.s4d import S4D

# isort: split
# functions after the modules of the same names
from longitude.recurrent.ops.diagonal import s4d
from longitude.recurrent.ops.linear import retention, rwkv6, ssd
from longitude.recurrent.ops.selective_scan import selective_scan
from longitude.recurrent.performer import Performer, orthogonal_features, performer
from longitude.recurrent.rwkv4 import rwkv4

__all__ = [
    "Mamba",
    "Mamba2",
    "Performer",
    "RWKV4",
    "RWKV6",
    "RWKVChannelMix",
    "Retention",
    "S4D",
    "orthogonal_features",
    "performer",
    "retention",
    "rwkv4",
    "rwkv6",
    "s4d",
    "selective_scan",
    "ssd",
]
