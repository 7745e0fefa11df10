"""Numbers in README.md and docs that are measured often: the blocks between their markers, from results committed here.

    python benchmarks/fill_numbers.py                           # fill every block
    python benchmarks/fill_numbers.py --keep study runs/study   # a study's table becomes results/DATE-study.json

A block is `<!-- numbers: NAME -->`, a blank line, what this writes, a blank line, `<!-- end -->`. It shows the newest result:
`bench` the performance targets (`make bench`), `study` and `study-*` the losses of a study of text. Other tables of the docs
are what the script that they name printed.
"""

import argparse
import json
import re
import sys
from datetime import date
from pathlib import Path
from textwrap import fill
from typing import Any

from longitude.report.table import markdown
from longitude.report.wording import count, paper, percent
from longitude.statistics.estimates import LOST
from longitude.study.criterion import GAINS, LEVEL, SEEDS

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
BLOCK = re.compile(r"(<!-- numbers: (\S+) -->\n).*?(<!-- end -->)", re.DOTALL)
PROSE = 140
"""Characters of a line of prose."""


def newest(name: str) -> dict[str, Any]:
    """The newest result of a name, results/DATE-NAME.json ("bench": DATE.json). ValueError where there is none."""
    dated = "[0-9]" * 4 + "-[0-9][0-9]" * 2
    path = max(RESULTS.glob(dated + ("" if name == "bench" else f"-{name}") + ".json"), default=None)
    if path is None:
        raise ValueError(f"expected a result {name} in {RESULTS}, found none")
    return json.loads(path.read_text(encoding="utf-8"))


# ---- targets ---------------------------------------------------------------------------------------------------------
def promises(measured: dict[str, Any]) -> str:
    """The missed targets by name, and a table for each baseline: what is missed first, the worst of ours, the range of others."""
    groups: dict[str, list[dict[str, Any]]] = {}
    for target in measured["targets"]:
        groups.setdefault(target["of"], []).append(target)
    tables = {f"Relative to {of}": group for of, group in groups.items() if len(group) > 1}
    alone = "Each relative to its own baseline"
    if single := [target for group in groups.values() if len(group) == 1 for target in group]:
        tables[alone] = single
    parts = []
    if missed := sum(target["met"] is False for target in measured["targets"]):
        parts.append(f"{missed} of {len(measured['targets'])} targets are missed; they are marked below.")
    for title, group in sorted(tables.items(), key=lambda pair: all(target["met"] is not False for target in pair[1])):
        parts.append(f"{title}:\n\n{_targets(measured, group, title == alone)}")
    return "\n\n".join([*parts, protocol(measured)])


def _targets(measured: dict[str, Any], targets: list[dict[str, Any]], baseline: bool) -> str:
    lines = []
    for target in sorted(targets, key=lambda target: target["met"] is not False):
        rows = [row for row in measured["rows"] if row["group"] == target["name"] and row["kind"] == "peer"]
        others = [score for row in rows if (score := row["ratio"] if row["score"] is None else row["score"])]
        value = "-" if target["measured"] is None else f"{target['measured']:.2f}"
        kept = {True: "kept", False: "**missed**", None: "-"}[target["met"]]
        span = " to ".join(f"{other:.1f}" for other in dict.fromkeys(f(others) for f in (min, max) if others))
        first = [target["name"], target["of"]] if baseline else [target["name"]]
        lines.append([*first, kept, value, f"{target['limit']:.2f}", target["worst"] or "", span])
    heads = ["target", *(["baseline"] if baseline else []), "", "measured", "at most", "worst case", "other libraries"]
    return markdown(heads, lines)


def protocol(measured: dict[str, Any]) -> str:
    """When, where and with how many threads a bench ran."""
    machine, versions, row = measured["machine"], measured["versions"], measured["rows"][0]
    return (
        f"Measured on {measured['made'][:10]}: {machine['cores']} cores ({machine['cpu']}), "
        f"{count(row['threads'], 'thread')}, {row['clock']} time, torch {versions['torch']}, load {machine['load'][0]:.1f}."
    )


# ---- studies ---------------------------------------------------------------------------------------------------------
def losses(measured: dict[str, Any]) -> str:
    """A study of text: sorted by the loss at the longest length, the best of each length in bold."""
    rows = {(row["label"], row["length"]): row for row in measured["rows"]}
    lengths = sorted({length for _, length in rows})

    def place(label: str) -> tuple[bool, float]:
        last = rows[label, lengths[-1]]
        return little(last), last["value"]

    labels = sorted(dict.fromkeys(label for label, _ in rows), key=place)
    best = {length: min(rows[label, length]["value"] for label in labels) for length in lengths}
    lines = []
    for label in labels:
        values = [rows[label, length]["value"] for length in lengths]
        cells = [f"**{x:.2f}**" if x == best[length] else f"{x:.2f}" for x, length in zip(values, lengths, strict=True)]
        judged = [rows[label, length] for length in dict.fromkeys((lengths[1], lengths[-1]))]
        sight = (judged[-1].get("remark") or "").startswith("sees")
        name = f"{judged[-1]['remark']} (`{label}`)" if sight else paper_and_label(label)
        lines.append([name + " *" * little(judged[-1]), *cells, *map(in_words, judged)])
    study, start = measured["study"], lengths[0]
    seeds = len(study["configuration"]["seeds"])
    means = f"mean of {seeds} seeds" if seeds > 1 else "one seed"
    counts = study.get("ngrams") or {}
    without = f"Trigram counts, without any model, reach {min(counts.values()):.2f} at {start}. " if counts else ""
    heads = ["encoding", f"{start} (trained)", *map(str, lengths[1:])]
    heads += [f"change at {length}" for length in dict.fromkeys((lengths[1], lengths[-1]))]
    last = [rows[label, lengths[-1]] for label in labels]
    if "remark" in last[0]:
        change = "Changes are from the last quarter of a training window. *Gains* is below 0, *level* below +2%, *rises* above. "
    else:
        few = "Fewer than three seeds get no word. "
        alone = "Without a blind control, a loss that does not rise has no word. "
        change = f"Changes are from the mean at {start}. {few if seeds < SEEDS else alone}"
    marks = {"*": "learned too little" * any(map(little, last)), "°": next(filter(None, map(no_better, last)), "")}
    change += "".join(f"Marked {mark}: {words}. " for mark, words in marks.items() if words)
    note = (
        f"Bits per byte, lower is better: {means}, Python source code. {change}{without}"
        f"Run on {study['begun'][:10]}, {study['machine']['cpu']}, "
        f"{count(study['machine']['threads'], 'thread')}, torch {study['versions']['torch']}."
    )
    return f"{markdown(heads, lines)}\n\n{fill(note, PROSE)}"


def little(row: dict[str, Any]) -> bool:
    """Whether a label learned too little; older results name what failed."""
    return "context" in row.get("failed", ()) or ("remark" in row and row["learned"] == LOST)


def no_better(row: dict[str, Any]) -> str:
    """That a label is no better than a blind control, in words; empty if it is."""
    remark = row.get("remark") or ""
    return remark if remark.startswith("no better") else ""


def word(row: dict[str, Any]) -> str:
    """The verdict of a row; of older results, without blind controls, only that a loss rises."""
    if row["seeds"] < SEEDS:
        return ""
    return (row["verdict"] or "") if "remark" in row else "rises" * (row["verdict"] == LOST)


def in_words(row: dict[str, Any]) -> str:
    """The verdict of a row with its change."""
    verdict = f"**{word(row)}**" if word(row) in (GAINS, LEVEL) else word(row)
    return " ".join(filter(None, (verdict, percent(row["change"]), "°" * bool(no_better(row)))))


def paper_and_label(label: str) -> str:
    """What papers call it, and the label beside it if that is another; a pattern of layers has its options instead."""
    if ".." in label:
        return paper(label)
    name = paper(label, options=False)
    return f"{name} (`{label}`)" if name != label else f"`{label}`"


# ---- files -----------------------------------------------------------------------------------------------------------
def filled(text: str) -> str:
    """A document with every block as the results have it."""

    def block(match: re.Match[str]) -> str:
        shown = (promises if match[2] == "bench" else losses)(newest(match[2]))
        return f"{match[1]}\n{shown}\n\n{match[3]}"

    return BLOCK.sub(block, text)


def documents() -> list[Path]:
    return [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def differing(paths: list[Path]) -> list[str]:
    """Blocks that are not what the results say, as "file: block"."""
    texts = {path: path.read_text(encoding="utf-8") for path in paths}
    pairs = [
        (path, *blocks) for path, text in texts.items() for blocks in zip(*map(BLOCK.finditer, (text, filled(text))))
    ]
    return [f"{path.name}: {block[2]}" for path, block, then in pairs if block[0] != then[0]]


def keep(name: str, run: Path) -> Path:
    """Write the table of a study of text as a result."""
    from longitude.study.analysis import analyse

    if not name.startswith("study"):
        raise ValueError(f"--keep: expected a name that begins with study, got {name!r}")
    analysis = analyse(run)
    result = {"schema": 1, "study": analysis.run.study, "rows": [row._asdict() for row in analysis.main]}
    path = RESULTS / f"{date.today()}-{name}.json"
    path.write_text(json.dumps(result, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    return path


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--keep", nargs=2, metavar=("NAME", "RUN"), help="write a study's table as a result")
    options = parser.parse_args()
    if options.keep:
        print(keep(options.keep[0], Path(options.keep[1])))
    else:
        for path in documents():
            before = path.read_text(encoding="utf-8")
            if (after := filled(before)) != before:
                path.write_text(after, encoding="utf-8")
                print(f"filled {path.name}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
