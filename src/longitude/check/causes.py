"""What causes a failure: one of three plain causes, and experiments that show where and by what two answers differ.

The causes are the file (config.json, weights or what stands beside them), the class (its code does something else than the
file declares, or than itself in another way), and the rule (the published method does that).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

import transformers
from torch import Tensor, nn

from longitude.check.recorder import apart, norms_without_weights
from longitude.check.subject import Subject
from longitude.testing.engine import STATUSES, DoesNotApply, Law, Measurement, Result, Unknown

FILE, RULE = "the file", "the rule"


def class_of(subject: Subject) -> str:
    """The cause of failures that no law gives another: the class, with the version of transformers if it is theirs."""
    kind = type(subject.model)
    theirs = kind.__module__.startswith("transformers.")
    return f"the class {kind.__name__}" + (f" of transformers {transformers.__version__}" if theirs else "")


LawPart = Callable[[Subject], Measurement]


def in_parts(subject: Subject, parts: Mapping[str, LawPart]) -> Measurement:
    """One measurement of several parts of a law: the first that fails, with the names of all that fail; else the worst.

    Args:
        subject: What the parts are tried on.
        parts: Name -> a test, as of a law. One that fails hides no other.

    Returns:
        The measurement; its note names the parts that are not applicable.

    Raises:
        DoesNotApply: If no part applies.
        Unknown: If no part fails, and one cannot be judged.
    """
    tried: dict[str, Result] = {}
    for done, (name, part) in enumerate(parts.items()):
        subject.on_progress(done / len(parts))
        tried[name] = Law(name, "", part)(subject)
    passed, failed, idle, unknown = (
        {name: result for name, result in tried.items() if result.status == status} for status in STATUSES
    )
    if failed:
        first, *others = failed.values()
        cause = "; ".join(f"{name}: {result.reason}" for name, result in failed.items())
        whose = first.whose if all(result.whose == first.whose for result in others) else ""
        return replace(measurement_of(first), cause=cause, whose=whose)
    if unknown:
        raise Unknown("; ".join(f"{name}: {result.reason}" for name, result in unknown.items()))
    if not passed:
        raise DoesNotApply("; ".join(dict.fromkeys(result.reason for result in idle.values())))
    worst = max(map(measurement_of, passed.values()), key=lambda part: part.measured / (part.threshold or 1.0))
    notes = [result.reason for result in passed.values() if result.reason]
    return replace(worst, note="; ".join([*notes, *([f"not applicable: {', '.join(idle)}"] if idle else [])]))


def measurement_of(result: Result) -> Measurement:
    """The numbers of a result; an infinite one if it has none."""
    measured = float("inf") if result.measured is None else result.measured
    return Measurement(measured, result.threshold or 0.0, position=result.position)


def require_not_of_norms(subject: Subject, error: Callable[[], float]) -> None:
    """DoesNotApply if weights of norms behind the rotation explain an error of a class of transformers (HunYuan)."""
    with norms_without_weights(subject.model):
        if subject.stock and error() <= subject.threshold:
            raise DoesNotApply("its class multiplies queries and keys by weights of norms behind the rotation")


# ---- where and by what two answers differ ----------------------------------------------------------------------------------
def first_apart(subject: Subject, got: Mapping[str, Tensor], want: Mapping[str, Tensor]) -> str:
    """Words for the first part of a model, in the order of a pass, with other outputs than wanted; empty if none has."""
    for name, wanted in want.items():
        output = got.get(name)
        if output is not None and output.shape == wanted.shape and not apart(output, wanted) <= subject.threshold:
            return f"; the first output that differs is that of {of_layer(subject.model, name)}"
    return ""


def of_layer(model: nn.Module, name: str) -> str:
    """Name of the innermost module with a layer_idx that contains a module, else the name of that module."""
    above = [".".join(name.split(".")[: n + 1]) for n in range(name.count(".") + 1)]
    layers = [path for path in above if isinstance(getattr(model.get_submodule(path), "layer_idx", None), int)]
    return layers[-1] if layers else name
