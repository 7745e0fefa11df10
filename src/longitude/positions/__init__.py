"""What position encodings are: formulas, parameters, tables, terms. Tensors only; knows nothing of attention or models."""

from importlib import import_module
from pkgutil import iter_modules

# Every module of this folder registers its encodings: adding one is writing one file.
for _module in iter_modules(__path__):
    import_module(f"{__name__}.{_module.name}")
