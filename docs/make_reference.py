"""The API reference: a page for each section, every public name with its whole docstring, by Sphinx's autodoc."""

import inspect
from collections.abc import Iterator
from importlib import import_module
from types import ModuleType
from typing import Any

import make_api

WORDS = {
    "attention": "One operation, its masks, patterns, backends, caches and layers.",
    "positions": "Encodings, the terms that they give to attention, and their frequencies.",
    "models": "Transformers as Hugging Face models.",
    "checkpoints": "What a checkpoint does with position, read from its config and its own modules.",
    make_api.OTHERS: "What belongs to no folder of the package.",
    "interfaces": "What your own files import beyond `lg`: tasks, pictures, backends; and what signatures name.",
}
"""Sections that are no module."""
INTERFACES = (
    "study.tasks.base.register_task", "study.tasks.base.Task", "study.tasks.base.Measuring", "study.analysis.Analysis",
    "study.criterion.Finding", "statistics.estimates.Comparison", "statistics.estimates.Estimate", "report.figure.Figure",
    "recurrent.base.RecurrentMixer", "registry.Registry", "attention.mixer.MixerInputs",
    "attention.request.Request", "attention.operation.Verdict", "testing.engine.Measurement", "attention.documents.Packed",
    "checkpoints.load.Source", "measure.windows.Reader", "extend.plan.Target",
    "checkpoints.load.Checkpoint", "extend.plan.ExtendPlan", "extend.extend.Extension", "testing.engine.Result",
    "testing.engine.Law", "testing.examples.Example", "positions.layers.LayerPositions", "recurrent.mamba3.Mamba3State",
    "positions.scaling.base.Frequencies", "extend.search.SearchResult", "extend.short_contexts.ShortContextLoss",
    "extend.fine_tune.Training", "statistics.documents.Interval",
)  # fmt: skip


def pages() -> Iterator[tuple[str, str]]:
    """("api/attention", its reStructuredText), ...; what has several names stands under the first of them."""
    sections: dict[str, list[str]] = {}
    known: set[int] = set()
    named = [*make_api.public_names()]
    for name, value in named:
        if callable(value) and not isinstance(value, ModuleType) and id(value) not in known:
            known.add(id(value))
            sections.setdefault(make_api.home(name, value), []).append(directive(name, value))
    for path in INTERFACES:
        module, _, name = path.rpartition(".")
        value = getattr(import_module(f"longitude.{module}"), name)
        sections.setdefault("interfaces", []).append(directive(f"lg.{path}", value))
    modules = {name: value for name, value in named if isinstance(value, ModuleType)}
    for section, entries in sections.items():
        title = section.replace("lg.", "longitude.")
        opening = (inspect.getdoc(modules[section]) or "").partition("\n")[0] if section in modules else WORDS[section]
        yield f"api/{title}", "\n".join([title, "=" * len(title), "", opening, "", *entries])


def directive(name: str, value: Any) -> str:
    """One name, as `import longitude as lg` has it."""
    path = name.replace("lg.", "longitude.", 1)
    return f".. autoclass:: {path}\n   :members:\n" if inspect.isclass(value) else f".. autofunction:: {path}\n"
