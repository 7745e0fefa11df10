"""Plugins: users' code that registers encodings, mixers and tasks, without changes to this package.

A plugin is a file (`--plugin my_file.py`), or a module that an installed distribution names by an entry point of the group
`longitude.plugins`. Installed ones are imported when a name is first looked up. Processes started from here load the same files,
which `VARIABLE` names to them.
"""

import hashlib
import os
import sys
import traceback
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from re import findall
from types import ModuleType
from typing import Any

GROUP = "longitude.plugins"
VARIABLE = "LONGITUDE_PLUGINS"


@dataclass(frozen=True)
class Plugin:
    """A plugin that is loaded here, or that a run was made with.

    Attributes:
        name: Name of its file without .py, or of its entry point.
        sha256: Hash of its file, or of all Python files of its package.
        path: Path of its file; None if it is installed.
        distribution: Name and version of what installed it; None for a file.
        registered: Names that it registered, with what each is: {"mine": "encoding"}.
    """

    name: str
    sha256: str
    path: str | None = None
    distribution: str | None = None
    registered: dict[str, str] = field(default_factory=dict)

    @property
    def record(self) -> dict[str, str]:
        """It in the question of a run: a file has a path, an installed one its distribution."""
        return {name: value for name, value in vars(self).items() if isinstance(value, str)}


_loaded: dict[str, Plugin] = {}
looked_for_installed = False
_outside: dict[str, tuple[str, str]] = {}
"""Name -> (kind, module) of everything that is registered from outside of this package."""


def loaded() -> list[Plugin]:
    """Plugins of this process, installed ones included."""
    load_installed()
    return list(_loaded.values())


def load(path: str | Path) -> Plugin:
    """Run a file that registers. ValueError if it cannot be read, raises an error, or registers nothing."""
    file = Path(path).expanduser().resolve()
    try:
        content = file.read_bytes()
    except OSError as error:
        raise ValueError(f"--plugin {path}: it cannot be read ({error.strerror}); give a file of Python") from error
    if file.suffix != ".py":
        raise ValueError(f"--plugin {path}: expected a file that ends in .py")
    name, sha256 = file.stem, hashlib.sha256(content).hexdigest()
    there = _loaded.get(name)
    if there is not None and there.path != str(file):
        other = there.path or there.distribution
        raise ValueError(f"--plugin {file}: there is a plugin {name!r} already, from {other}; rename one of them")
    if there is not None and there.sha256 == sha256:
        return there
    before = dict(_outside)
    try:
        module = run_file(str(file), content)
    except ValueError as error:
        raise ValueError(f"--plugin {error}") from error
    names = {name: noun for name, (noun, of) in _outside.items() if name not in before or of == module.__name__}
    if not names:
        raise ValueError(
            f"--plugin {file}: it registers nothing; put @lg.register, @lg.register_mixer or @register_task over its classes"
        )
    _loaded[name] = Plugin(name, sha256, str(file), None, names)
    os.environ[VARIABLE] = os.pathsep.join(plugin.path for plugin in _loaded.values() if plugin.path is not None)
    return _loaded[name]


def run_file(path: str, content: bytes) -> ModuleType:
    """Run a file as a module with a name made from its path. ValueError with the line that raises."""
    name = f"longitude_plugin_{Path(path).stem}_{hashlib.sha256(path.encode()).hexdigest()[:8]}"
    module = ModuleType(name)
    module.__file__ = path
    sys.modules[name] = module
    try:
        exec(compile(content, path, "exec"), vars(module))
    except (Exception, SystemExit) as error:
        del sys.modules[name]
        lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == path]
        line = error.lineno if isinstance(error, SyntaxError) else lines[-1] if lines else None
        where = path if line is None else f"{path}, line {line},"
        raise ValueError(f"{where} cannot be run: {type(error).__name__}: {error}") from error
    return module


def load_installed() -> None:
    """Import the modules of all entry points, once. ValueError, at every call, if one cannot be imported."""
    global looked_for_installed
    if looked_for_installed:
        return
    looked_for_installed = True  # before the imports, which may look names up
    try:
        for point in sorted(entry_points(group=GROUP), key=lambda point: point.name):
            if point.name not in _loaded:
                _from_entry_point(point)
        for path in filter(None, os.environ.get(VARIABLE, "").split(os.pathsep)):
            load(path)
    except ValueError:
        looked_for_installed = False
        raise


def restore(plugins: Sequence[Plugin]) -> None:
    """Load the plugins of the process that started this one. ValueError if the code of one has changed meanwhile."""
    load_installed()
    for plugin in plugins:
        if plugin.path is not None:
            load(plugin.path)
        if plugin.name not in _loaded or _loaded[plugin.name].sha256 != plugin.sha256:
            place = plugin.path or plugin.distribution
            raise ValueError(f"the plugin {plugin.name!r} ({place}) has changed since the command began; run it again")


def records(*texts: str) -> list[dict[str, str]]:
    """Records for a run: of every plugin file, and of installed plugins with a name in these texts (a task, labels, methods)."""
    # a scheme of positions is written with hyphens and with underscores
    names = {name.replace("-", "_") for text in texts for name in findall(r"[\w.-]+", text)}
    return [
        plugin.record
        for plugin in loaded()
        if plugin.path is not None or any(name.replace("-", "_") in names for name in plugin.registered)
    ]


def require_loaded(saved: Iterable[Mapping[str, str]], whose: str) -> None:
    """Raise ValueError for the first saved plugin that is not loaded here; whose: the run that used the saved plugins."""
    here = {plugin.name for plugin in loaded()}
    for before in saved:
        if before["name"] not in here:
            place = before.get("path") or before.get("distribution")
            remedy = f"add --plugin {place}" if "path" in before else f"install {place}"
            raise ValueError(f"{whose} has the plugin {before['name']!r} ({place}), which is not loaded; {remedy}")


def note_registered(noun: str, name: str, factory: Any) -> None:
    """Called with every name that is registered, to know which plugin it is from."""
    module = getattr(factory, "__module__", "")
    if not module.startswith("longitude."):
        _outside[name] = (noun.partition(" ")[0], module)


def _from_entry_point(point: EntryPoint) -> None:
    distribution = f"{point.dist.name} {point.dist.version}" if point.dist else "unknown"
    who = f"the plugin {point.name!r} of {distribution} ({GROUP}: {point.value})"
    if point.attr:
        raise ValueError(f"{who}: expected the name of a module that registers, got {point.value}")
    before = dict(_outside)
    try:
        module = import_module(point.module)
    except Exception as error:
        raise ValueError(f"{who} cannot be imported: {type(error).__name__}: {error}; mend or uninstall it") from error
    package = point.module.partition(".")[0]  # which may have been imported before
    names = {n: noun for n, (noun, of) in _outside.items() if n not in before or of.partition(".")[0] == package}
    roots = [Path(root) for root in getattr(module, "__path__", [])]
    files = [file for root in roots for file in sorted(root.rglob("*.py"))] or [Path(module.__file__ or "")]
    hashes = [hashlib.sha256(file.read_bytes()) for file in files]
    digest = hashes[0] if len(hashes) == 1 else hashlib.sha256(b"".join(part.digest() for part in hashes))
    _loaded[point.name] = Plugin(point.name, digest.hexdigest(), None, distribution, names)
