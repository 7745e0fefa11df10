"""Tables in Markdown: how one is written, and those of a GPU."""

from __future__ import annotations

from typing import Any

PASSES = {"forward": "forward", "forward + backward": "training"}


def markdown(headings: list[str], lines: list[list[str]]) -> str:
    return "\n".join("| " + " | ".join(cells) + " |" for cells in [headings, ["---"] * len(headings), *lines])


def gpu(found: dict[str, Any]) -> str:
    """Targets on a GPU, missed ones first."""
    lines = []
    for each in sorted(found["targets"], key=lambda each: bool(each["kept"])):
        sign = "at most" if each["at_most"] else "at least"
        kept = {True: "kept", False: "**missed**", None: "not measured"}[each["kept"]]
        measured, worst = "-", each["worst"]
        if each["measured"] is not None:
            measured, worst = f"{each['measured']:.2f}", ", ".join(filter(None, worst.split(" | ")[1:]))
        lines.append([each["target"], f"{sign} {each['limit']:.2f}", measured, kept, worst])
    return f"{markdown(['target', 'limit', 'measured', 'verdict', 'worst case'], lines)}\n\n{of_gpu(found)}"


def gpu_ratios(found: dict[str, Any]) -> str:
    """Flash attention's time over ours, by length: forward, and both passes; the fastest in training first."""
    scores: dict[tuple[str, int], dict[tuple[str, int], float]] = {}
    for row in found["rows"]:
        if row["part"] == "attention" and row.get("score"):
            own = scores.setdefault((", ".join(filter(None, (row["encoding"], row["mask"]))), row["head_dim"]), {})
            own[row["passed"], row["length"]] = row["score"]
    columns = [
        (passed, length) for passed in PASSES for length in sorted({n for own in scores.values() for _, n in own})
    ]
    best = {column: max(own.get(column, 0.0) for own in scores.values()) for column in columns}

    def cell(own: dict[tuple[str, int], float], column: tuple[str, int]) -> str:
        if column not in own:
            return "-"
        return f"**{own[column]:.2f}**" if own[column] == best[column] else f"{own[column]:.2f}"

    order = sorted(scores.items(), key=lambda each: -each[1]["forward + backward", 16384])
    lines = [[name, str(width), *(cell(own, column) for column in columns)] for (name, width), own in order]
    return markdown(["bias, mask", "head_dim", *(f"{PASSES[passed]} {n:,}" for passed, n in columns)], lines)


def of_gpu(found: dict[str, Any]) -> str:
    machine = found["machine"]
    versions = f"torch {machine['torch']}, {machine['multiprocessors']} multiprocessors"
    return f"Measured on {machine['made'][:10]}: {machine['gpu']}, {versions}, bfloat16, 16,384 tokens in all."
