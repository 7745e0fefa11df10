"""Mixers that carry a state instead of keys and values: parallel = chunked = one token at a time."""

from longitude.recurrent.convolution import s4d
from longitude.recurrent.favor import Performer, orthogonal_features, performer
from longitude.recurrent.finch import RWKV6
from longitude.recurrent.linear import retention, rwkv6, ssd
from longitude.recurrent.mamba import Mamba
from longitude.recurrent.mamba2 import Mamba2
from longitude.recurrent.retnet import Retention
from longitude.recurrent.scan import selective_scan
from longitude.recurrent.state_space import S4D
from longitude.recurrent.time_mix import RWKV4, RWKVChannelMix
from longitude.recurrent.wkv import rwkv4

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
