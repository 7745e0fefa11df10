"""Position encodings: formulas, parameters, tables, terms. Tensors only; independent of attention and models."""

from longitude import loaded_on_use

__getattr__, __all__ = loaded_on_use(__name__)
