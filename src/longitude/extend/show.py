"""Output of extensions and trainings, for the terminal and --json."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

from longitude.extend import serve
from longitude.extend.compare import UNCHANGED, Comparison
from longitude.extend.fine_tune import Training
from longitude.extend.plan import ExtendPlan
from longitude.extend.short_contexts import ShortContextLoss
from longitude.extend.weights import left_out
from longitude.report.table import table
from longitude.report.wording import NOT_FINITE
from longitude.statistics.documents import Interval


def plan_parts(plan: ExtendPlan) -> Iterator[Any]:
    """The scheme, the difference of the configuration, the search, the notes."""
    yield f"{plan.source.name}: {plan.original} to {plan.length} tokens\n"
    scheme = table("", "", words=2, show_header=False)
    for name, value in plan_json(plan).items():
        if value is not None:
            scheme.add_row(name.replace("_", " "), _text(value))
    yield scheme
    changes = table("key", "before", "after", words=3)
    for key, before, after in differences(plan):
        changes.add_row(key, _text(before), _text(after))
    yield from ("\nconfig.json", changes, "")
    if plan.search is not None:
        starts = table("start", "loss")
        for name, loss in (plan.search.starts | {"found": plan.search.loss}).items():
            starts.add_row(name, f"{loss:.4f}")
        yield from (f"{plan.search.tried} candidates tried, nats per token of text at the new length", starts, "")
    yield from plan.notes
    if others := left_out(plan.source):
        yield f"Not copied: {', '.join(others)}."


def plan_json(plan: ExtendPlan) -> dict[str, Any]:
    """The resolved scheme."""
    return {
        "method": plan.target.method,
        "scheme": None if plan.scheme is None else plan.scheme.as_dict(),
        "base": plan.base,
        "factor": plan.factor,
        "attention_factor": plan.attention_factor,
        "original_length": plan.original,
        "length": plan.length,
    }


def differences(plan: ExtendPlan) -> list[tuple[str, Any, Any]]:
    """Keys that change, with rope_scaling for transformers 4 in one row."""
    changes = changed_keys(plan.source.json, plan.config)
    rows = [row for row in changes if not row[0].startswith("rope_scaling.")]
    if len(rows) < len(changes):
        rows.append(("rope_scaling", None, "the same as rope_parameters, for transformers 4"))
    if rows and (limit := plan.tokenizer_limit()):
        rows.append(("tokenizer's model_max_length", *limit))
    return rows


def changed_keys(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[tuple[str, Any, Any]]:
    """(key, before, after) for every key that changes, nested ones as a.b; None for one that is not there."""
    rows = []
    for key in dict.fromkeys([*before, *after]):
        old, new = before.get(key), after.get(key)
        if isinstance(new, Mapping) and isinstance(old or {}, Mapping):
            rows += [(f"{key}.{name}", a, b) for name, a, b in changed_keys(old or {}, new)]
        elif old != new or type(old) is not type(new):
            rows.append((key, old, new))
    return rows


def training_line(training: Training) -> str:
    return (
        f"\ntrained: {len(training.losses)} steps, {training.tokens} tokens, {training.parameters} parameters, "
        f"{training.seconds:.0f} s, {training.tokens_per_second:.3g} tokens/s; nats per token {training.losses[0]:.3f} at the "
        f"first step, {training.losses[-1]:.3f} at the last"
    )


def cost_parts(cost: ShortContextLoss) -> Iterator[Any]:
    """A table of bits per byte, with its text, protocol and verdict."""
    yield "\ncost on short contexts, bits per byte"
    intervals = (cost.before, cost.after, cost.difference)
    yield table("tokens", "original", "extended", "difference", rows=[(str(cost.length), *map(_interval, intervals))])
    yield (
        f"{cost.text}: {cost.documents} documents, {cost.tokens} tokens, windows that do not overlap; intervals of 95% over "
        f"documents. Perplexity on short texts does not show whether things are found in long ones: longitude measure does."
    )
    yield f"{cost.length} tokens: {verdict(cost)}."


def verdict(cost: ShortContextLoss) -> str:
    """Whether short texts got worse, by the interval of the paired difference."""
    change, before = cost.difference, cost.before.value
    if change.value is None or not before:
        return "no verdict, as losses are not finite"
    if change.low is None or change.high is None:
        return "no verdict, as one document has no interval"
    word = "worse" if change.low > 0 else "better" if change.high < 0 else "no difference shown"
    low, value, high = (100 * bits / before for bits in (change.low, change.value, change.high))
    return f"{word}, {value:+.1f}% bits per byte ({low:+.1f}% to {high:+.1f}%, paired over {cost.documents} documents)"


def comparison_parts(comparison: Comparison) -> Iterator[Any]:
    """A row for each method and a column for each bucket of positions, the recommendation, and the command that writes it."""
    chosen = comparison.candidates
    yield f"{chosen.source.name}: {chosen.original} to {chosen.length} tokens, perplexity per token by position\n"
    heads = [f"{first}-{last - 1}" for first, last in pairwise(chosen.edges)]
    shown = table("method", *heads)
    for name, cells in comparison.perplexities.items():
        numbers = [NOT_FINITE if cell.value is None else f"{cell.value:.4g}" for cell in cells]
        shown.add_row(
            name,
            *(f"*{number}" if best == name else number for number, best in zip(numbers, comparison.best, strict=True)),
        )
    yield shown
    yield (
        f"\n*: lowest of its column. {comparison.text}: {comparison.windows} windows of {chosen.length} tokens, the same for "
        f"all. The training length is {chosen.original}."
    )
    if "dynamic" in comparison.profiles:
        yield f"dynamic: as a text of {chosen.length} tokens is read; up to {chosen.original} tokens it is unchanged."
    yield from (f"{name}: {reason}" for name, reason in chosen.configs.items() if isinstance(reason, str))
    yield comparison.recommendation
    if comparison.command is not None:
        yield f"Nothing was written; this writes the best of those that change the model:\n{comparison.command}"


def comparison_json(comparison: Comparison) -> dict[str, Any]:
    """A comparison for machines."""
    chosen = comparison.candidates
    buckets = [{"position_from": first, "position_to": last} for first, last in pairwise(chosen.edges)]
    rows = [
        {
            "method": name,
            "reason": None if name in comparison.profiles else chosen.configs[name],
            "losses": [
                {**bucket, "perplexity": cell.value, "low": cell.low, "high": cell.high, "tokens": tokens}
                for bucket, cell, tokens in zip(buckets, comparison.perplexities.get(name, ()), comparison.sizes)
            ],
        }
        for name in (UNCHANGED, *chosen.configs)
    ]
    best = next(iter(comparison.beyond), None)
    return {
        "model": chosen.source.name,
        "original_length": chosen.original,
        "length": chosen.length,
        "text": comparison.text,
        "windows": comparison.windows,
        "tokens": sum(comparison.sizes),
        "rows": rows,
        "best": [{**bucket, "method": name} for bucket, name in zip(buckets, comparison.best, strict=True)],
        "recommended": None if comparison.undecided or len(comparison.beyond) < 2 else best,
        "undecided": comparison.undecided,
        "against_best": {name: ratio._asdict() for name, ratio in comparison.against_best.items()},
        "recommendation": comparison.recommendation,
        "command": comparison.command,
    }


def as_json(
    plan: ExtendPlan | None = None,
    training: Training | None = None,
    costs: Sequence[ShortContextLoss] = (),
    out: str | None = None,
) -> dict[str, Any]:
    """The results of an extension or a training as JSON."""
    result: dict[str, Any] = {"out": out}
    if plan is not None:
        rows = changed_keys(plan.source.json, plan.config)
        result |= {"model": plan.source.name} | plan_json(plan)
        result |= {
            "difference": [dict(zip(("key", "before", "after"), row, strict=True)) for row in rows],
            "notes": plan.notes,
            "left_out": left_out(plan.source),
            "search": plan.search and {name: getattr(plan.search, name) for name in ("loss", "starts", "tried")},
        }
        if out is not None:
            lines = [vars(line) for line in serve.of_folder(plan, out)]
            result["serve"] = {"lines": lines, "notes": serve.notes(plan)}
    if training is not None:
        result["tuned"] = {name: value for name, value in vars(training).items() if name != "costs"}
    names = {"before": "original", "after": "extended"}
    result["cost"] = [
        {
            names.get(name, name): value._asdict() if isinstance(value, Interval) else value
            for name, value in vars(cost).items()
        }
        | {"metric": "bits_per_byte", "verdict": verdict(cost)}
        for cost in costs
    ]
    return result


def _interval(x: Interval) -> str:
    if x.value is None:
        return NOT_FINITE
    return f"{x.value:.3f}" + ("" if x.low is None else f" ({x.low:.3f} to {x.high:.3f})")


def _text(value: Any) -> str:
    if isinstance(value, dict):
        shown = {key: v for key, v in value.items() if v is not None and key != "name"}
        return f"{value.get('name', '')} " + ", ".join(f"{key}={_text(v)}" for key, v in shown.items())
    if isinstance(value, list) and len(value) > 4:
        return f"[{value[0]}, {value[1]}, ... {value[-1]}] ({len(value)})"
    if isinstance(value, str | float):
        return value if isinstance(value, str) else f"{value:.10g}"
    return "-" if value is None else json.dumps(value)
