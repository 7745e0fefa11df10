"""The audit page, docs/audit.md: what published long-context lines do, by the rules of `longitude check --serve`.

python docs/make_audit.py        # seconds: fills the last three columns of audit.csv and writes the page

A line is wrong only if it was judged with the values of its model's config, or if its engine stops before it reads a config.
"""

import csv
import json
from datetime import date
from pathlib import Path
from typing import Any

from longitude.report.table import markdown
from longitude.serving.config import Config
from longitude.serving.effective import alone_of, judged
from longitude.serving.findings import findings, wrong
from longitude.serving.line import FACTS, lines_in
from longitude.serving.write import corrected

TABLE = Path(__file__).with_name("audit.csv")
PAGE = TABLE.with_suffix(".md")
SIZES = {
    "hidden_size": 256,
    "num_attention_heads": 2,
    "num_hidden_layers": 4,
    "vocab_size": 256,
    "intermediate_size": 64,
}
"""Sizes that no rule about positions reads; the files have larger ones."""
RIGHT, WRONG, OPEN = "right", "wrong", "cannot tell"


def verdict_of(row: dict[str, str]) -> tuple[str, str, str]:
    """(verdict, what the line does, corrected line) of a row."""
    [line] = lines_in(row["line"])
    raw: dict[str, Any] = json.loads(row["config"] or "{}")
    if not raw:
        raw = {"model_type": "unknown", "max_position_embeddings": 4096, "rope_theta": 10000.0}
    part = raw.get("text_config", raw)
    part |= {key: size for key, size in SIZES.items() if key not in part}
    config = Config.of(raw)
    case = judged(line, config, alone_of({}, config)[0])
    rows = findings(case)
    if not row["config"]:
        stops = case.asked.stops
        return (WRONG, f"{line.name} stops: {stops[0].what}", "") if stops else (OPEN, "its config was not read", "")
    harmful = [finding for finding in rows if finding.verdict in ("wrong", "unknown")]
    does = "; ".join(finding.text for finding in harmful) or f"serves {case.served.length:,} tokens"
    if wrong(rows):
        return WRONG, does, corrected(case)[0] or ""
    return (OPEN if harmful else RIGHT), does, ""


def engine_of(row: dict[str, str]) -> str:
    return lines_in(row["line"])[0].name


def page(rows: list[dict[str, str]], day: str) -> str:
    """The page."""
    counts = {verdict: sum(row["verdict"] == verdict for row in rows) for verdict in (WRONG, RIGHT, OPEN)}
    models = len({row["model"] for row in rows})
    versions = ", ".join(f"{facts.name} {facts.version}" for facts in FACTS.values() if facts.version)
    parts = [
        "# Published long-context lines, audited",
        "Look up what a published line does with positions in a current engine, before you copy it. Each line was judged by the "
        "rules of [`longitude check --serve`](serving.md).",
        f"{counts[WRONG]} of {len(rows)} lines for {models} models are wrong in current engines, {counts[RIGHT]} are right, and "
        f"{counts[OPEN]} cannot be told. Many of the wrong lines were right in the release that they were written for.",
        markdown(
            ("model", "engine", "source", "date", "verdict"),
            [
                (row["model"], engine_of(row), row["source"], row["date"], row["verdict"])
                for row in sorted(rows, key=lambda row: (WRONG, RIGHT, OPEN).index(row["verdict"]))
            ],
        ),
        "[audit.csv](audit.csv) has the whole lines, the config values and where they were read, what each line does, and the "
        "corrected lines.",
        "## Wrong lines, corrected",
    ]
    for row in rows:
        if row["verdict"] == WRONG:
            parts += [f"**{row['model']}**, {engine_of(row)} ({row['source']}): {row['does']}."]
            parts += [f"```text\n{row['corrected']}\n```"] if row["corrected"] else []
    parts.append(
        f"Judged on {day} by the rules of {versions}. The rules were read in the engines' files; no engine was run."
    )
    return "\n\n".join(parts) + "\n"


def main() -> None:
    with TABLE.open(newline="", encoding="utf-8") as file:
        rows = [*csv.DictReader(file)]
    for row in rows:
        row["verdict"], row["does"], row["corrected"] = verdict_of(row)
    with TABLE.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, rows[0].keys(), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    PAGE.write_text(page(rows, date.today().isoformat()), encoding="utf-8")


if __name__ == "__main__":
    main()
