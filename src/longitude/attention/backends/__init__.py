"""Backends of attention, a file or folder each: declaration and implementation."""

from importlib import import_module
from pkgutil import iter_modules

from longitude.attention.backends.base import BACKENDS, Backend, cheapest, refusal, refuses, register_backend
from longitude.attention.backends.chunked import CHUNKED, REFERENCE
from longitude.attention.backends.sdpa import SDPA
from longitude.attention.backends.split import SPLIT
from longitude.attention.backends.table.backend import TABLE
from longitude.attention.backends.transport.backend import TRANSPORT
from longitude.attention.backends.triton.backend import TRITON
from longitude.errors import UsageError
from longitude.native.gpu import switched_off

# "auto" chooses the first of equal prices.
for backend in (SDPA, TABLE, TRITON, TRANSPORT, SPLIT, CHUNKED, REFERENCE):
    register_backend(backend)
for module in iter_modules(__path__):  # a backend of another file registers itself
    import_module(f"{__name__}.{module.name}")
if unknown := switched_off() - BACKENDS.keys():
    raise UsageError("LONGITUDE_BACKENDS", f"backends out of {', '.join(BACKENDS)}", ", ".join(sorted(unknown)))

__all__ = ["BACKENDS", "Backend", "cheapest", "refusal", "refuses", "register_backend"]
