"""The rules of the house: what an import may cost, that imports go one way, where a name may stand, what is never unpickled."""

import ast
import importlib
import re
import sys
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

import longitude as lg
from tests.support import printed

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "longitude"
OPTIONAL = "transformers accelerate safetensors pandas pyarrow scipy altair vl_convert plotille tyro rich jinja2"
OPTIONAL += " datasets"


# ---- imports -------------------------------------------------------------------------------------------------------
ALLOWED = {"longitude", "jaxtyping", "numpy", "importlib"}  # numpy comes with torch; jaxtyping reads numpy.typing
MODULES = 100  # 96 today


@pytest.mark.slow
def test_an_import_brings_few_modules() -> None:
    """Beyond torch's own: `import longitude` itself alone; first use no optional package, and not the compiler, which a compiled
    function at module level would load (2.4 s). lg.samplers and lg.scaling are modules of a package that imports neither."""
    code = """
import torch, sys
import torch.utils.checkpoint  # older torch imports it, and sympy for it, on first use
before = set(sys.modules)
import longitude as lg
print(*set(sys.modules) - before)
lg.attend; lg.list_encodings()
print(*set(sys.modules) - before)
lg.list_mixers()
print(*{"torch._dynamo", "transformers"} & set(sys.modules))
for name in [name for name in sys.modules if name.startswith("longitude")]:
    del sys.modules[name]
import longitude as lg
print(lg.samplers.__name__, lg.scaling.__name__)
"""
    at_import, at_first_use, *for_names, names = (set(line.split()) for line in printed(code).splitlines())
    assert names == {"longitude.positions.samplers", "longitude.positions.scaling"}
    assert at_import == {"longitude"}
    assert {name.split(".")[0] for name in at_first_use} <= ALLOWED
    assert not any(for_names)
    assert len(at_first_use) <= MODULES


@pytest.mark.slow
def test_attend_layers_every_encoding_and_mixer_work_without_the_optional_packages() -> None:
    """torch and jaxtyping are enough; a module set to None in sys.modules cannot be imported."""
    code = f"""
import sys
sys.modules.update(dict.fromkeys("{OPTIONAL}".split()))
import torch
import longitude as lg
from longitude.positions.base import resolved
from longitude.positions.composed import compose

x, (q, k, v) = torch.randn(1, 5, 16), torch.randn(3, 1, 2, 5, 8)
shape = dict(num_heads=4, num_kv_heads=4, head_dim=4, dim=16, max_length=8, layout="half")
shape |= dict(window=2, chunk_size=3, local_size=1, size=2, sides=(8, 8))
for name in lg.list_encodings():
    encoding = compose(lg.encoding(name, **resolved(name, {{}}, **shape | dict(num_heads=2, num_kv_heads=2, head_dim=8))))
    context, _ = encoding.context(encoding.embed(x, torch.arange(5)))
    out = lg.attend(q, k, v, encoding=encoding, context=context)
    assert out.shape == q.shape and out.isfinite().all(), name
    encoding = lg.encoding(name, **resolved(name, {{}}, **shape))
    layer = lg.MultiHeadAttention(16, 4, encoding=encoding)
    layer(encoding.embed(x, torch.arange(5))).sum().backward()
    print(name)

from longitude.attention.mixer import mixer_resolved
for name in lg.list_mixers():
    lg.mixer(name, **mixer_resolved(name, {{}}, **shape))(x).sum().backward()
    print(name)
"""
    assert printed(code).split() == [*lg.list_encodings(), *lg.list_mixers()]


def modules() -> dict[str, Path]:
    """Dotted name -> file, of every module of the package."""
    found = {".".join(file.relative_to(ROOT / "src").with_suffix("").parts): file for file in PACKAGE.rglob("*.py")}
    return {name.removesuffix(".__init__"): file for name, file in found.items()}


def imported(file: Path, known: set[str]) -> set[str]:
    """Modules of the package that a file names in an import: at its top, inside functions, and for type checkers only."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module:
            names |= {f"{node.module}.{alias.name}" for alias in node.names} & known or {node.module}
        elif isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
    return names & known


@pytest.mark.slow
def test_no_import_circle_between_files() -> None:
    files = modules()
    assert len(files) > 100
    # `import longitude as lg` in the package's own __init__ for type checkers names everything: it is the front door.
    graph = {name: imported(file, set(files)) - {name, "longitude"} for name, file in files.items()}
    graph["longitude"] = set()
    TopologicalSorter(graph).prepare()
    with pytest.raises(CycleError, match="longitude"):  # were there one
        TopologicalSorter(graph | {"longitude.errors": {"longitude.hf.stock"}}).prepare()


# ---- names ---------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("package", ["", ".attention", ".checkpoints", ".measure", ".positions", ".study"])
def test_public_names_come_from_where_type_checkers_see_them(package) -> None:
    room = importlib.import_module(f"longitude{package}")
    stub = ast.parse(Path(str(room.__file__)).with_suffix(".pyi").read_text())
    imports = [node for node in stub.body if isinstance(node, ast.ImportFrom)]
    modules = {alias.name: str(node.module) for node in imports for alias in node.names if alias.asname}
    assert sorted(modules) == sorted({*room.__all__} - {"__version__"}) and modules
    for name, module in modules.items():
        thing = getattr(room, name)
        package = sys.modules[module]  # itself the function, where a package and its function share the name
        assert thing in (sys.modules.get(f"{module}.{name}"), getattr(package, name), package), name
    with pytest.raises(AttributeError, match="no attribute 'alibi'"):
        room.alibi  # noqa: B018


# ---- data ----------------------------------------------------------------------------------------------------------
def test_data_from_outside_is_never_unpickled() -> None:
    """ruff refuses pickle; these are the ways to it that ruff does not know."""
    ways = re.compile(r"torch\.load\(|trust_remote_code\s*=\s*True|weights_only\s*=\s*False")
    assert [f.name for f in PACKAGE.rglob("*.py") if ways.search(f.read_text())] == []
