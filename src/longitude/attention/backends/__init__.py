"""The ways to compute one operation, one file each: what it declares, and how it runs."""

from longitude.attention.backends.base import Backend, refuses
from longitude.attention.backends.chunked import CHUNKED, REFERENCE
from longitude.attention.backends.flex import FLEX
from longitude.attention.backends.sdpa import SDPA
from longitude.attention.backends.split import SPLIT
from longitude.attention.backends.table.backend import TABLE
from longitude.attention.backends.transport import TRANSPORT

BACKENDS = {backend.name: backend for backend in (SDPA, TABLE, TRANSPORT, SPLIT, FLEX, CHUNKED, REFERENCE)}

__all__ = ["BACKENDS", "Backend", "refuses"]
