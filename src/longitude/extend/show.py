"""What the terminal and --json show of a plan and its cost."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from longitude.checkpoints.keys import ABSENT
from longitude.extend.config import ExtendConfig
from longitude.extend.cost import Cost
from longitude.extend.layout import Parity
from longitude.extend.plan import ExtendPlan
from longitude.extend.run import Outcome
from longitude.extend.search import Found
from longitude.extend.weights import left_out, tokenizer_limit


def parts(plan: ExtendPlan) -> Iterator[Any]:
    """The plan: the scheme, the difference of the configuration, the notes."""
    from rich.table import Table
    from rich.text import Text

    yield Text(f"{plan.source.name}: {plan.original} to {plan.length} tokens", "bold")
    yield ""
    shown = Table(box=None, pad_edge=False, show_header=False)
    for name, value in scheme(plan).items():
        if value is not None:
            shown.add_row(Text(name.replace("_", " "), "bold"), Text(_said(value)))
    yield shown
    rows = differences(plan)
    if rows:
        yield Text("\nconfig.json", "bold")
        changes = Table("key", "before", "after", box=None, pad_edge=False)
        changes.columns[0].overflow = "fold"
        for key, before, after in rows:
            changes.add_row(Text(key, "bold"), Text(_said(before)), Text(_said(after)))
        yield changes
    else:
        yield "\nconfig.json: nothing changes"
    yield ""
    if plan.search is not None:
        yield from search_table(plan.search)
        yield ""
    yield from plan.notes
    if others := left_out(plan.source):
        yield f"Not carried along: {', '.join(others)}."


def search_table(found: Found) -> Iterator[Any]:
    """The losses of the starts beside what the search found."""
    from rich.table import Table
    from rich.text import Text

    yield Text(f"{found.tried} candidates tried, nats per token at the new length", "bold")
    shown = Table("start", "loss", box=None, pad_edge=False)
    for name, loss in found.starts.items():
        shown.add_row(name, f"{loss:.4f}")
    shown.add_row("found", f"{found.loss:.4f}", style="bold")
    yield shown


def scheme(plan: ExtendPlan) -> dict[str, Any]:
    """The resolved scheme, for people and machines."""
    return {
        "positions": plan.kind,
        "method": None if plan.nothing else plan.method,
        "scheme": None if plan.scheme is None else plan.scheme.as_dict(),
        "base": plan.base,
        "factor": None if plan.nothing else plan.factor,
        "attention_factor": plan.attention_factor if plan.kind == "rotary" else None,
        "original_length": plan.original,
        "length": plan.length,
    }


def differences(plan: ExtendPlan) -> list[tuple[str, Any, Any]]:
    """Keys that change, with the double for transformers 4 in one row."""
    rows = plan.difference()
    double = [row for row in rows if row[0].startswith("rope_scaling.")]
    if double:
        rows = [row for row in rows if row not in double]
        rows.append(("rope_scaling", ABSENT, "the same as rope_parameters, for transformers 4"))
    if rows and (limit := tokenizer_limit(plan.source, plan.original, plan.length)):
        rows.append(("tokenizer's model_max_length", *limit))
    return rows


def results(outcome: Outcome, config: ExtendConfig, out: Path | None) -> Iterator[Any]:
    """What was done."""
    if outcome.parity is not None:
        yield parity_line(outcome.parity, config.convert_layout or "")
    if (tuned := outcome.tuned) is not None:
        yield (
            f"\ntrained: {len(tuned.losses)} steps, {tuned.tokens} tokens, {tuned.parameters} parameters, {tuned.seconds:.0f} s; "
            f"nats per token {tuned.losses[0]:.3f} at the first step, {tuned.losses[-1]:.3f} at the last"
        )
    if outcome.written:
        yield f"\nwritten: {out}"
    elif config.dry_run:
        yield "\nnothing was written (--dry-run)"
    if outcome.costs:
        yield ""
        yield from costs_table(outcome.costs, outcome.written)


def costs_table(costs: list[Cost], written: bool) -> Iterator[Any]:
    from rich.table import Table
    from rich.text import Text

    yield Text(f"{'what short texts pay' if written else 'what the model has'}, bits per byte", "bold")
    shown = Table("tokens", box=None, pad_edge=False)
    for name in ("original", "extended", "difference") if written else ("as it is",):
        shown.add_column(name)
    for cost in costs:
        shown.add_row(
            str(cost.length), *(_interval(x) for x in (cost.before, cost.after, cost.difference) if x is not None)
        )
    yield shown
    last = costs[-1]
    yield (
        f"{last.text}: {last.documents} documents, {last.tokens} tokens, windows that do not overlap; intervals of 95 % over "
        f"documents. Perplexity on short texts says nothing about finding things in long ones: longitude measure does."
    )


def parity_line(parity: Parity, to: str) -> str:
    whose = (
        f"transformers turns this model by it: the written checkpoint is for transformers, and right if the weights were "
        f"{'interleaved' if to == 'half' else 'half'} before"
        if parity.native == to
        else f"transformers turns this model as {parity.native}: the written checkpoint is for engines that turn as {to}, and "
        f"plain transformers reads it wrongly"
    )
    return (
        f"parity: logits of the converted weights, turned {to}, differ by {parity.error:.1e} of their spread from those before, "
        f"turned the other way (turned the wrong way: {parity.apart:.1e}). {whose[0].upper()}{whose[1:]}."
    )


def as_json(outcome: Outcome, out: Path | None) -> dict[str, Any]:
    """All of it for machines."""
    found: dict[str, Any] = {"out": str(out) if outcome.written else None}
    if (plan := outcome.plan) is not None:
        found |= {"model": plan.source.name} | scheme(plan)
        found["difference"] = [
            {"key": key, "before": None if a is ABSENT else a, "after": None if b is ABSENT else b}
            for key, a, b in plan.difference()
        ]
        found["notes"] = plan.notes
        found["left_out"] = left_out(plan.source)
        found["search"] = plan.search and {name: getattr(plan.search, name) for name in ("loss", "starts", "tried")}
    if outcome.tuned is not None:
        found["tuned"] = asdict(outcome.tuned)
    if outcome.parity is not None:
        parity = outcome.parity
        found["parity"] = {"error": parity.error, "wrong_rotation": parity.apart, "transformers": parity.native}
    found["cost"] = [
        {
            "length": cost.length,
            "metric": "bits_per_byte",
            "original": cost.before._asdict(),
            "extended": cost.after and cost.after._asdict(),
            "difference": cost.difference and cost.difference._asdict(),
            "documents": cost.documents,
            "tokens": cost.tokens,
            "text": cost.text,
        }
        for cost in outcome.costs
    ]
    return found


def _interval(x: Any) -> str:
    if x.value is None:
        return "not finite"
    return f"{x.value:.3f}" + ("" if x.low is None else f" ({x.low:.3f} to {x.high:.3f})")


def _said(value: Any) -> str:
    if isinstance(value, dict):
        shown = {key: v for key, v in value.items() if v is not None and key != "name"}
        return f"{value.get('name', '')} " + ", ".join(f"{key}={_said(v)}" for key, v in shown.items())
    if isinstance(value, list) and len(value) > 4:
        return f"[{value[0]}, {value[1]}, ... {value[-1]}] ({len(value)})"
    if isinstance(value, float):
        return f"{value:.10g}"
    return value if isinstance(value, str) else repr(value) if value is ABSENT else json.dumps(value)
