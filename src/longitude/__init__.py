"""Longitude: position encodings of transformers, and what they do past the length a model was trained on.

After `import longitude as lg`, the main names are lg.NAME, the others lg.MODULE.NAME (lg.attention.WindowAttention). All is
loaded on first use: the import itself costs nothing, and `lg.attend` with all encodings never loads transformers.
"""

import ast
import sys
from collections.abc import Callable
from importlib import import_module
from pkgutil import get_data
from typing import Any

__version__ = "0.1.0"


def loaded_on_use(package: str) -> tuple[Callable[[str], Any], list[str]]:
    """Make `__getattr__` and `__all__` of a package: the names that its stub, __init__.pyi, imports, each loaded on first use."""
    stub = ast.parse(get_data(package, "__init__.pyi") or b"")
    imports = [node for node in stub.body if isinstance(node, ast.ImportFrom)]
    module_of = {alias.name: str(node.module) for node in imports for alias in node.names if alias.asname}

    def get(name: str) -> Any:
        if name not in module_of:
            raise AttributeError(f"module {package!r} has no attribute {name!r}; dir({package}) lists its names")
        home = module_of[name]
        value = None if home == package else getattr(import_module(home), name, None)
        value = import_module(f"{home}.{name}") if value is None else value  # a module
        setattr(sys.modules[package], name, value)  # the next access is an ordinary one
        return value

    return get, sorted(module_of)


_get, _names = loaded_on_use(__name__)
__all__ = ["__version__", *_names]  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> Any:
    if name in _names:
        import_module("longitude.errors").require_torch()
    return _get(name)


def __dir__() -> list[str]:
    return sorted(__all__)
