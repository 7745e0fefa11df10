"""Names: one rule for how encodings, mixers and tasks are registered, found, listed and given their options."""

import inspect
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import is_dataclass
from functools import cache
from importlib import import_module
from inspect import get_annotations
from pkgutil import iter_modules
from typing import Any, Literal, Self, TypeVar, get_args, get_origin

from longitude import plugins
from longitude.errors import UsageError, check_declared, either, unknown

Factory = TypeVar("Factory", bound=Callable[..., Any])


class Registry(Mapping[str, Any]):
    """Factories by name, sorted.

    packages: packages with modules that register on import. They and all plugins are imported when a name is first looked up,
    so a new entry is a file there. listed_by: function that lists the names for users.
    """

    def __init__(self, noun: str, listed_by: str, packages: Sequence[str]) -> None:
        self.noun, self.listed_by, self.packages = noun, listed_by, packages
        self.factories: dict[str, Callable[..., Any]] = {}
        self.aliases: dict[str, str] = {}
        """Other names, which are read and never written."""
        self._loaded = False

    def register(self, name: str) -> Callable[[Factory], Factory]:
        """Decorates a class or a function that builds one. ValueError if the name is taken by another, or fits no label."""
        if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_.-]*", name):
            raise UsageError("", f"a name of letters, digits and _ . - for the {self.noun}", repr(name), "rename it")

        def add(factory: Factory) -> Factory:
            taken = self.factories.get(name)
            if taken is not None and _place(taken) != _place(factory):
                raise ValueError(f"the {self.noun} {name!r} is registered already: {taken!r}; choose another name")
            self.factories[name] = factory
            plugins.note_registered(self.noun, name, factory)
            return factory

        return add

    def load(self) -> None:
        """Import every module that registers."""
        if self._loaded and plugins.looked_for_installed:
            return
        if not self._loaded:
            self._loaded = True  # before the imports, which may look names up
            for package in map(import_module, self.packages):
                for module in iter_modules(package.__path__):
                    import_module(f"{package.__name__}.{module.name}")
        plugins.load_installed()

    def __getitem__(self, name: str) -> Any:
        """The factory of a name or alias; ValueError with the nearest name if there is none."""
        self.load()
        written = self.aliases.get(name, name) if isinstance(name, str) else None
        if written not in self.factories:
            raise unknown(self.noun, name, self.factories, f"{self.listed_by} lists them.")
        return self.factories[written]

    def canonical(self, name: str) -> str:
        """The canonical name of an alias; other names are returned unchanged."""
        return self.aliases.get(name, name)

    def get(self, key: Any, default: Any = None) -> Any:
        """The factory of a name, or the default: without an error."""
        self.load()
        return self.factories.get(self.canonical(key), default)

    def __contains__(self, name: object) -> bool:
        self.load()
        return name in self.factories or name in self.aliases

    def __iter__(self) -> Iterator[str]:
        self.load()
        return iter(sorted(self.factories))

    def __len__(self) -> int:
        self.load()
        return len(self.factories)


def _place(factory: Callable[..., Any]) -> tuple[str, str]:
    """Module and name of a factory: equal for a class that is defined again in a notebook or an edited file."""
    return factory.__module__, factory.__qualname__


def whole_signature(kind: type) -> inspect.Signature:
    """The signature of a class, with what its constructor passes on to the class that it extends.

    That is the keywords of `**options: Unpack[KEYS]`; or everything, for a mixin with `*sizes` and `**options`, whose next class
    depends on the whole class.
    """
    return _signature([base for base in kind.__mro__ if "__init__" in vars(base)])


def _signature(bases: Sequence[type]) -> inspect.Signature:
    """The signature of the first class; the others are those after it in the order of resolution."""
    function = vars(bases[0])["__init__"]
    _, *parameters = inspect.signature(function).parameters.values()
    if parameters and (unpacked := re.fullmatch(r"Unpack\[(\w+)\]", str(parameters[-1].annotation))):
        keys = function.__globals__[unpacked[1]].__annotations__
        passed_on = _signature(bases[1:]).parameters
        parameters[-1:] = [parameter for name, parameter in passed_on.items() if name in keys]
    elif parameters[1:-1] and parameters[0].kind is inspect.Parameter.VAR_POSITIONAL:
        passed_on = [*_signature(bases[1:]).parameters.values()]
        named = [p for p in passed_on if p.kind is inspect.Parameter.KEYWORD_ONLY]
        parameters = [*passed_on[: len(passed_on) - len(named)], *parameters[1:-1], *named]
    return inspect.Signature(parameters)


@cache
def annotations_of(factory: Callable[..., Any]) -> dict[str, Any]:
    """The annotation of each option of a class or function; Any for one that only a type checker can evaluate."""
    if not isinstance(factory, type):
        return _evaluated(factory.__annotations__, factory.__globals__)
    annotations: dict[str, Any] = {}
    for base in reversed(factory.__mro__):
        constructor = vars(base).get("__init__")
        texts = get_annotations(base) if is_dataclass(factory) else getattr(constructor, "__annotations__", {})
        annotations |= _evaluated(texts, vars(sys.modules[base.__module__]))
    return {name: annotations[name] for name in whole_signature(factory).parameters if name in annotations}


def _evaluated(texts: Mapping[str, Any], scope: dict[str, Any]) -> dict[str, Any]:
    # get_type_hints() raises for all names if one of them fails: a plugin's others would not be checked.
    annotations = {}
    for name, text in texts.items():
        try:
            annotations[name] = eval(text, scope) if isinstance(text, str) else text  # noqa: S307  code that runs anyway
        except Exception:
            annotations[name] = Any
    return annotations


class _WholeSignature:
    def __get__(self, instance: object, kind: type) -> inspect.Signature:
        return whole_signature(kind)


class Checked:
    """Base of classes whose constructors refuse arguments that their annotations exclude, before anything runs."""

    __signature__ = _WholeSignature()

    def __new__(cls, *values: Any, **named: Any) -> Self:
        from torch.compiler import is_compiling  # the classes need torch, and this module does not

        # torch.compile traces no signature, and attend(encoding="alibi") builds the encoding in the graph.
        if is_compiling():
            return super().__new__(cls)
        try:
            arguments = whole_signature(cls).bind_partial(*values, **named).arguments
        except TypeError:  # the constructor raises it
            arguments = {}
        check_declared(cls.__name__, annotations_of(cls), arguments)
        return super().__new__(cls)


def options_of(factory: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    """The options of a class or function, by name."""
    parameters = inspect.signature(factory).parameters.items()
    return {name: p for name, p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)}


def resolve_options(
    name: str,
    factory: Callable[..., Any],
    options: Mapping[str, Any],
    known: Mapping[str, Any],
    builder: str,
    without: Sequence[str] = (),
) -> dict[str, Any]:
    """Resolve each option of a factory: from `options`, else from `known` if its default is missing or None, else its default.

    known: a model's num_heads, head_dim, ... builder: public function to name in the ValueError for an unknown or missing
    option. without: options that are not the caller's to give.
    """
    parameters = {option: p for option, p in options_of(factory).items() if option not in without}
    for option in options:
        if option not in parameters:
            raise unknown(f"option of {name!r}", option, parameters, f"its options: {', '.join(parameters) or 'none'}.")
    full, missing = {}, []
    for option, parameter in parameters.items():
        if option in options:
            full[option] = options[option]
        elif option in known and parameter.default in (None, inspect.Parameter.empty):
            full[option] = known[option]
        elif parameter.default is not inspect.Parameter.empty:
            full[option] = parameter.default
        else:
            missing.append(option)
    if missing:
        raise ValueError(_needs(name, factory, missing, full, builder))
    return full


def _needs(
    name: str, factory: Callable[..., Any], missing: Sequence[str], full: Mapping[str, Any], builder: str
) -> str:
    """The missing options with their values, if a Literal lists them, and a call that gives every required option."""
    kinds, parameters = annotations_of(factory), options_of(factory)
    values = {option: get_args(kinds[option]) for option in missing if get_origin(kinds.get(option)) is Literal}
    needs = [f"{option!r} ({either(values[option])})" if option in values else repr(option) for option in missing]
    shown = {option: repr(values[option][0]) if option in values else "..." for option in missing}
    shown |= {option: repr(full[option]) for option, p in parameters.items() if p.default is p.empty and option in full}
    call = ", ".join([repr(name), *(f"{option}={shown[option]}" for option in parameters if option in shown)])
    return f"{name!r} needs the option{'s' * (len(missing) > 1)} {', '.join(needs)}: {builder}({call})"
