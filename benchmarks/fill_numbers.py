"""Numbers in README.md and docs come from the results committed here: fill the blocks between their markers.

    python benchmarks/fill_numbers.py                    # fill every block
    python benchmarks/fill_numbers.py --check            # name the blocks that differ; exit code 1 where one does
    python benchmarks/fill_numbers.py --keep study runs/study   # a study's table becomes results/DATE-study.json
    python benchmarks/fill_numbers.py --keep claims runs/claims # studies of claims become results/claims/NAME, without models
    python benchmarks/fill_numbers.py --keep claims/shaw runs/claims/shaw                   # one of them does

A block is `<!-- numbers: NAME -->`, a blank line, what this writes, a blank line, `<!-- end -->`. It shows the newest result:

bench           what encodings promise and what was measured: results/DATE.json (`make bench`)
bench-mixers    the same of mixers and whole models: results/DATE-mixers.json (`make bench-mixers`)
decode          a generated token with each mixer: results/DATE-decode.json (`make bench-decode`)
ceilings        the label of each task that solves it: results/DATE-ceilings.json (`make ceilings`)
attention       where trained models look, by length and distance: results/DATE-attention.json (benchmarks/attention.py)
retrieval       what extended models still find: results/DATE-retrieval.json (benchmarks/retrieval.py)
real-*          a real model, whole: results/DATE-real.json (examples/real_checkpoint.py --out)
properties      three properties of every encoding: results/DATE-properties.json (`make properties`)
gpu             targets on a GPU: results/DATE-gpu.json (`make gpu`); gpu-ratios: its ratios
study, study-*  the table of a study: results/DATE-study.json, DATE-study-mixers.json, ... (--keep study-mixers runs/mixers)
"""

import argparse
import json
import re
import sys
from collections.abc import Callable
from datetime import date
from pathlib import Path
from statistics import fmean
from textwrap import fill
from typing import Any

import markdown_tables
from longitude.report.wording import count, paper
from markdown_tables import markdown

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
BLOCK = re.compile(r"(<!-- numbers: (\S+) -->\n).*?(<!-- end -->)", re.DOTALL)
FILES = {
    "study-glance": "-study",
    "bench": "",
    "bench-mixers": "-mixers",
    "gpu-ratios": "-gpu",
    **dict.fromkeys(("real-methods", "real-answers", "real-training", "real-times"), "-real"),
}
"""Block -> how the name of its file ends, where that is not the block's own name."""
PROSE = 140
"""Characters of a line of prose."""


def ending(name: str) -> str:
    """How the name of a block's file ends, after the date."""
    return FILES.get(name, f"-{name}") + ".json"


def newest(name: str) -> Path | None:
    """The newest result of a block; None where there is none."""
    dated = "[0-9]" * 4 + "-[0-9][0-9]" * 2
    return max(RESULTS.glob(dated + ending(name)), default=None)


# ---- one function per kind of result -----------------------------------------------------------------------------------
WORDS = {
    "plain causal attention": "PyTorch causal attention without an encoding",
    "torch's attention": "PyTorch attention",
    "the same with torch's attention": "the same with PyTorch attention",
    "plain attention's own memory": "memory of PyTorch attention",
    "transformers' Llama": "the Llama of transformers",
    "bias of the offset, forward": "relative position bias, forward",
    "memory of these four, 1024 to 4096": "memory of Shaw, Transformer-XL, PaTH and FoX, 1024 to 4096",
    "decoding one token at 8192, any bias of the offset": "decoding one token at 8192, any relative position bias",
    "a token behind 1024": "a token at context length 1024",
    **{
        f"a token behind 32768, {kind}": f"a token at context length 32768, {kind}"
        for kind in ("recurrent", "hierarchical")
    },
}
"""The results' own words -> words for readers."""
TITLES = {"growth of the length": "Memory growth / length growth"}
"""Baseline -> the title of its table, if that is not "Relative to" it."""


def promises(found: dict[str, Any]) -> str:
    """The missed targets by name, and a table for each baseline: what is missed first, the worst of ours, the range of others."""
    groups: dict[str, list[dict[str, Any]]] = {}
    for target in found["targets"]:
        groups.setdefault(target["of"], []).append(target)
    tables = {
        TITLES.get(of, f"Relative to {WORDS.get(of, of)}"): group for of, group in groups.items() if len(group) > 1
    }
    own = "Each relative to its own baseline"
    if single := [target for group in groups.values() if len(group) == 1 for target in group]:
        tables[own] = single
    parts = []
    if missed := sum(each["met"] is False for each in found["targets"]):
        parts.append(f"{missed} of {len(found['targets'])} targets are missed; they are marked below.")
    for title, group in sorted(tables.items(), key=lambda each: all(target["met"] is not False for target in each[1])):
        parts.append(f"{title}:\n\n{_targets(found, group, title == own)}")
    return "\n\n".join([*parts, protocol(found)])


def _targets(found: dict[str, Any], targets: list[dict[str, Any]], baseline: bool) -> str:
    lines = []
    for target in sorted(targets, key=lambda target: target["met"] is not False):
        rows = [row for row in found["rows"] if row["group"] == target["name"] and row["kind"] == "peer"]
        others = [score for row in rows if (score := row["ratio"] if row["score"] is None else row["score"])]
        measured = "-" if target["measured"] is None else f"{target['measured']:.2f}"
        kept = {True: "kept", False: "**missed**", None: "-"}[target["met"]]
        span = " to ".join(f"{other:.1f}" for other in dict.fromkeys(f(others) for f in (min, max) if others))
        of = [WORDS.get(target["of"], target["of"])] if baseline else []
        lines.append(
            [
                WORDS.get(target["name"], target["name"]),
                *of,
                kept,
                measured,
                f"{target['limit']:.2f}",
                target["worst"] or "",
                span,
            ]
        )
    heads = ["target", *(["baseline"] if baseline else []), "", "measured", "at most", "worst case", "other libraries"]
    return markdown(heads, lines)


def protocol(found: dict[str, Any]) -> str:
    """When, where and with how many threads a bench ran."""
    machine, versions, row = found["machine"], found["versions"], found["rows"][0]
    return (
        f"Measured on {found['made'][:10]}: {machine['cores']} cores ({machine['cpu']}), {count(row['threads'], 'thread')}, "
        f"{row['clock']} time, torch {versions['torch']}, load {machine['load'][0]:.1f}."
    )


def decoding(found: dict[str, Any]) -> str:
    """A token at the context length that ratios are to, and at the longest."""
    rows = {(row["label"], row["context"]): row for row in found["rows"]}
    near, far = int(found["rows"][0]["against"]), max(row["context"] for row in found["rows"])
    lines = []
    for line in found["lines"]:
        first, last = rows[line["label"], near], rows[line["label"], far]
        ms = [f"{row['seconds'] * 1e3:.2f}" for row in (first, last)]
        megabytes = f"{last['cache_bytes'] / 1e6:.3g}"
        lines.append([f"`{line['label']}`", line["growth"], *ms, f"{last['ratio']:.2f}", megabytes])
    headings = ["mixer", "cache", f"ms at context {near}", f"ms at context {far}", "ratio", f"MB of cache at {far}"]
    return f"{markdown(headings, lines)}\n\n{protocol(found)}"


def ceilings(found: dict[str, Any]) -> str:
    """Right answers at the training length, at twice and at four times of it, where these were measured."""
    lines = []
    for row in found["rows"]:
        length, floor = row["train_length"], row["floors"][str(row["train_length"])]
        shares = [row["shares"].get(str(times * length)) for times in (1, 2, 4)]
        cells = ["" if share is None else f"{100 * share:.0f}" for share in shares]
        words = [f"`{row['task']}`", row["metric"], row["label"], f"{row['steps']:,}", str(length)]
        lines.append([*words, *cells, f"{100 * floor:.0f}"])
    headings = ["task", "percent of", "ceiling", "steps", "trained at", "there", "twice", "four times", "floor there"]
    first, machines = min(row["made"] for row in found["rows"]), sorted({row["machine"] for row in found["rows"]})
    return f"{markdown(headings, lines)}\n\nOne seed, one core ({', '.join(machines)}), from {first} on."


def properties(found: dict[str, Any]) -> str:
    headings = ["encoding", "distance of the two most similar positions", "relative", "time / PyTorch"]
    rows = sorted(found["rows"], key=lambda row: row["cost"])
    lines = [[paper_and_label(row["encoding"]), *property_cells(row)[1:]] for row in rows]
    lines[0][-1] = f"**{lines[0][-1]}**"
    table = markdown(headings, lines)
    return f"{table}\n\n{found['protocol']['words']}"


def retrieval(found: dict[str, Any]) -> str:
    """Of every way to extend: bits per byte and mean score by length, and what it keeps."""
    rows = found["rows"]
    lengths = list(rows[0]["bits"])

    def score(of: dict[str, Any]) -> str:
        return f"{of['value']:.2f} ({of['low']:.2f} to {of['high']:.2f})"

    headings = ["method", *(f"bits, {n}" for n in lengths), *(f"score, {n}" for n in lengths), f"kept at {lengths[-1]}"]
    lines = [
        [
            named(row),
            *(f"{row['bits'][n]:.2f}" for n in lengths),
            *(score(row["means"][n]) for n in lengths),
            " and ".join(row["kept"]) or "neither",
        ]
        for row in rows
    ]
    protocol = found["protocol"]
    words = (
        f"Bits per byte of {protocol['documents']} excerpts, mean scores of {protocol['trials']} questions of each task with "
        "Wilson's intervals of 95% over all questions."
    )
    return f"{markdown(headings, lines)}\n\n{words} {dated(found)}"


REACH = {"distance": "{:.0f}", "beyond": "{:.0%}", "entropy": "{:.1f}", "first": "{:.1%}"}
"""What a row of attention has of a length -> its form."""


def attention(found: dict[str, Any]) -> str:
    """Of every label: distance, entropy and sink by length; then scores by distance, as they are and shuffled."""
    rows, trained = found["rows"], found["protocol"]["trained"]
    labels = list(dict.fromkeys(row["label"] for row in rows))
    by_length = [row for row in rows if row["of"] == "reach"]
    lengths = sorted({row["length"] for row in by_length})

    def mean(rows: list[dict[str, Any]], name: str, form: str) -> str:
        return form.format(fmean(row[name] for row in rows)) if rows else ""

    def at(label: str, length: int) -> list[dict[str, Any]]:
        return [row for row in by_length if (row["label"], row["length"]) == (label, length)]

    heads = ["model spec", *(f"{name}, {length}" for name in REACH for length in (trained, lengths[-1]))]
    lines = [
        [
            f"`{label}`",
            *(mean(at(label, length), name, REACH[name]) for name in REACH for length in (trained, lengths[-1])),
        ]
        for label in labels
    ]
    columns = len(next(row for row in rows if row["of"] == "scores")["octaves"][0])
    ends = ["0", "1", *(f"{2**i} to {2 ** (i + 1) - 1}" for i in range(1, columns - 1))]
    falls = []
    for label in labels:
        for shuffled in (False, True):
            of_label = [row for row in rows if (row["label"], row.get("shuffled")) == (label, shuffled)]
            own = [octaves for row in of_label for octaves in row["octaves"]]
            means = [f"{fmean(each):.2f}" for each in zip(*own, strict=True)]
            falls.append([f"`{label}`", "shuffled" if shuffled else "as it is", *means])
    seeds = len({row["seed"] for row in rows})
    words = (
        f"Means over {count(seeds, 'seed')}, layers, heads and {found['protocol']['texts']} held-out windows; trained at "
        f"{trained}. "
        "Beyond: share of the weights beyond the training length. First: weight of the first token. Entropy in bits."
    )
    tables = f"{markdown(heads, lines)}\n\n{markdown(['model spec', 'text', *ends], falls)}"
    return f"{tables}\n\n{fill(words, PROSE)} {dated(found)}"


def named(model: dict[str, Any]) -> str:
    """The method of an extended model, with its training."""
    return f"`{model['method']}`" + (f", {model['steps']} steps" if model["steps"] else "")


def dated(found: dict[str, Any]) -> str:
    return f"{found['made']}, {found['machine']['cpu']}, torch {found['versions']['torch']}."


def property_cells(row: dict[str, Any]) -> list[str]:
    """A row of the table of properties, as it is shown."""
    codes = row["codes"]
    if isinstance(codes, float):
        codes = f"{codes:.2g}" if codes else "0"
    relative = {True: "yes", False: "no", None: "-"}[row["relative"]]
    return [row["encoding"], codes or "-", relative, f"{row['cost']:.2f}"]


def answers(found: dict[str, Any]) -> str:
    """A study of exact answers: sorted by the share of right ones at the longest length, then at shorter ones."""
    rows = {(row["label"], row["length"]): row for row in found["rows"]}
    lengths = sorted({length for _, length in rows})

    def shares(label: str) -> list[float]:
        return [rows[label, length]["value"] for length in reversed(lengths)]

    lines = []
    for label in sorted(dict.fromkeys(label for label, _ in rows), key=shares, reverse=True):
        last = rows[label, lengths[-1]]
        ends = f"{100 * last['low']:.0f} to {100 * last['high']:.0f}"
        cells = [f"{100 * rows[label, length]['value']:.0f}" for length in lengths]
        lines.append([paper_and_label(label), *cells, ends])
    study = found["study"]
    about = study["configuration"]
    trained, seeds = about["train_length"], len(about["seeds"])
    means = f"mean of {seeds} seeds" if seeds > 1 else "one seed"
    columns = [f"{length} (trained)" if length == trained else str(length) for length in lengths]
    head = ["encoding", *columns, f"95% interval at {lengths[-1]}"]
    note = (
        f"Task `{about['task']}`, % right: trained to {trained} symbols, {means}, {last['documents']} examples of each length. "
        f"Run on {study['begun'][:10]}, {study['machine']['cpu']}, {count(study['machine']['threads'], 'thread')}, torch "
        f"{study['versions']['torch']}."
    )
    return f"{markdown(head, lines)}\n\n{fill(note, PROSE)}"


def paper_and_label(label: str) -> str:
    """What papers call it, and the label beside it if that is another; a pattern of layers has its options instead."""
    if ".." in label:
        return paper(label)
    name = paper(label, options=False)
    return f"{name} (`{label}`)" if name != label else f"`{label}`"


def at_a_glance(found: dict[str, Any]) -> str:
    """A study of text: sorted by the loss at the longest length, the best of each length in bold."""
    rows = {(row["label"], row["length"]): row for row in found["rows"]}
    lengths = sorted({length for _, length in rows})

    def place(label: str) -> tuple[bool, float]:
        last = rows[label, lengths[-1]]
        return "context" in last.get("failed", ()), last["value"]

    labels = sorted(dict.fromkeys(label for label, _ in rows), key=place)
    best = {length: min(rows[label, length]["value"] for label in labels) for length in lengths}
    lines = []
    for label in labels:
        values = [rows[label, length]["value"] for length in lengths]
        cells = [f"**{x:.2f}**" if x == best[length] else f"{x:.2f}" for x, length in zip(values, lengths, strict=True)]
        last = rows[label, lengths[-1]]
        change = f"{100 * last['change']:+.{0 if abs(last['change']) > 0.1 else 1}f}%".replace("-", "−")
        verdict = {"holds": "**holds**", "does not hold": "rises"}.get(last["verdict"], "unclear")
        verdict += ", and learned too little" if "context" in last.get("failed", ()) else ""
        lines.append([paper_and_label(label), *cells, change, verdict])
    study, start = found["study"], lengths[0]
    seeds = len(study["configuration"]["seeds"])
    means = f"mean of {seeds} seeds" if seeds > 1 else "one seed"
    over = next((row["over"] for row in rows.values() if row.get("over")), "documents")
    counts = study.get("ngrams") or {}
    without = f"Trigram counts, without any model, reach {min(counts.values()):.2f} at {start}. " if counts else ""
    heads = [
        "encoding",
        f"{start} (trained)",
        *map(str, lengths[1:]),
        f"change, {start} to {lengths[-1]}",
        f"loss at {lengths[-1] // start}×",
    ]
    note = (
        f"Bits per byte, lower is better: {means}, Python source code. An encoding "
        f"*holds* if its loss stays within 2% of its loss at {start}, with the whole 95% interval over {over}. {without}"
        f"Run on {study['begun'][:10]}, {study['machine']['cpu']}, "
        f"{count(study['machine']['threads'], 'thread')}, torch {study['versions']['torch']}."
    )
    return f"{markdown(heads, lines)}\n\n{fill(note, PROSE)}"


def real_methods(found: dict[str, Any]) -> str:
    """Perplexity of a real model by position, of each method that fits it; the lowest of a column in bold."""
    result = found["methods"]["result"]
    heads = [f"{each['position_from']:,} to {each['position_to'] - 1:,}" for each in result["best"]]
    rows = []
    for row in result["rows"]:
        cells = [f"{each['perplexity']:.2f}" for each in row["losses"]]
        best = [each["method"] == row["method"] for each in result["best"]]
        marked = [f"**{cell}**" if first else cell for cell, first in zip(cells, best, strict=bool(cells))]
        rows += [[f"`{row['method']}`", *marked]] if cells else []
    windows = f"{result['windows']} window{'s' * (result['windows'] != 1)}"
    words = f"{windows} of {result['length']:,} tokens, the same for all methods."
    return f"{markdown(['method', *heads], rows)}\n\n{words} {made(found)}"


def real_answers(found: dict[str, Any]) -> str:
    """Every question that a real model was asked, with its answer."""
    rows = [
        [
            each["model"],
            f"{each['length']:,}",
            each["expected"][0],
            f"`{each['generated'].strip()}`",
            f"{each['score']:g}",
        ]
        for each in found["answers"]
    ]
    return f"{markdown(['model', 'tokens', 'expected', 'generated', 'score'], rows)}\n\n{made(found)}"


def real_training(found: dict[str, Any]) -> str:
    """Losses of the steps, and bits per byte on short texts before and after: extended, and trained."""
    tuned = found["training"]["result"]["tuned"]
    rows = []
    for name, step in {"extended": "extend", "extended and trained": "training"}.items():
        [cost] = found[step]["result"]["cost"]
        change = "{value:+.3f} ({low:+.3f} to {high:+.3f})".format(**cost["difference"])
        numbers = [f"{cost[which]['value']:.3f}" for which in ("original", "extended")]
        rows.append([name, *numbers, change, f"{cost['tokens']:,} in windows of {cost['length']:,}"])
    table = markdown(["bits per byte", "original", "new", "difference", "tokens"], rows)
    steps = f"{len(tuned['losses'])} steps, {tuned['tokens']:,} tokens at {tuned['tokens_per_second']:.1f} per second"
    loss = f"{tuned['losses'][0]:.2f} nats per token at the first step, {tuned['losses'][-1]:.2f} at the last"
    return f"{steps}: {loss}.\n\n{table}\n\nDifferences are paired, with intervals of 95%. {made(found)}"


def real_times(found: dict[str, Any]) -> str:
    """Seconds of every command."""
    rows = [
        [
            f"`{each['command'].replace('longitude ', '', 1)}`",
            f"{each['seconds']:.0f}",
            f"{each['processor_seconds']:.0f}",
            f"{each['load']:.0f}",
        ]
        for each in found.values()
        if isinstance(each, dict)
    ]
    return f"{markdown(['command', 'seconds', 'processor seconds', 'load average'], rows)}\n\n{made(found)}"


def made(found: dict[str, Any]) -> str:
    """What a real model was run on, and when."""
    return f"{found['model']}, {found['cores']} cores shared with other work, {found['made']}."


KINDS: dict[str, Callable[[Any], str]] = {
    "real-methods": real_methods, "real-answers": real_answers, "real-training": real_training, "real-times": real_times,
    "bench": promises, "bench-mixers": promises, "decode": decoding, "ceilings": ceilings,
    "properties": properties, **dict.fromkeys(("study-glance", "study", "study-mixers", "study-carriers"), at_a_glance),
    "attention": attention,
    "retrieval": retrieval, "gpu": markdown_tables.gpu,
    "gpu-ratios": markdown_tables.gpu_ratios,
}  # fmt: skip


def rendered(name: str) -> str | None:
    """The block of a name as its newest result has it; None without a result."""
    path = newest(name)
    return None if path is None else KINDS.get(name, answers)(json.loads(path.read_text(encoding="utf-8")))


# ---- files -------------------------------------------------------------------------------------------------------------
def filled(text: str) -> str:
    """A document with every block as the results have it; a block without a result stays."""

    def block(found: re.Match[str]) -> str:
        content = rendered(found[2])
        return found[0] if content is None else f"{found[1]}\n{content}\n\n{found[3]}"

    return BLOCK.sub(block, text)


def blocks(text: str) -> dict[str, str]:
    return {block[2]: block[0] for block in BLOCK.finditer(text)}


def documents() -> list[Path]:
    return [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def differing(paths: list[Path]) -> list[str]:
    """Blocks that are not what the results say, or have none, as "file: block"."""
    found = []
    for path in paths:
        text = path.read_text(encoding="utf-8")
        then = blocks(filled(text))
        for name, block in blocks(text).items():
            if newest(name) is None:
                found.append(f"{path.name}: {name} (no result *{ending(name)})")
            elif block != then[name]:
                found.append(f"{path.name}: {name}")
    return found


def keep_claims(name: str, run: Path) -> list[Path]:
    """Write studies that claims are judged on, without their models: all of a folder (claims), or one (claims/NAME).

    ValueError for one that was run with other options than its preset has.
    """
    from claims.evidence import KEPT
    from claims.protocol import SERIES, differs, preset_name, preset_of
    from claims.series import list_studies
    from longitude.study.results import keep as keep_study, read_run

    one = name.removeprefix(f"{SERIES}/")
    found = {one: run} if one != name else {each: run / each for each in list_studies() if (run / each).is_dir()}
    if not found:
        raise ValueError(f"--keep {name}: {run} holds none of the studies {', '.join(list_studies())}")
    presets = {each: preset_of(each, {}) for each in found}  # loads the plugins that the studies were run with
    runs = {each: read_run(path) for each, path in found.items()}
    for each, read in runs.items():
        if why := differs(presets[each], read.study):
            raise ValueError(f"--keep {name}: {read.path} was run with {why} as --preset {preset_name(each)} has it")
    return [keep_study(read, KEPT / each) for each, read in runs.items()]


def keep(name: str, run: Path) -> Path:
    """Write what a study found as a result."""
    if not name.startswith("study"):
        raise ValueError(f"--keep: expected claims, claims/NAME or a name that begins with study, got {name!r}")
    from longitude.study.analysis import analyse

    analysis = analyse(run)
    result = {"schema": 1, "study": analysis.run.study, "rows": [each._asdict() for each in analysis.main]}
    path = RESULTS / f"{date.today()}{ending(name)}"
    path.write_text(json.dumps(result, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    return path


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="change nothing, name what differs")
    parser.add_argument("--keep", nargs=2, metavar=("NAME", "RUN"), help="write a study's table as a result")
    options = parser.parse_args()
    if options.keep and options.keep[0].startswith("claims"):
        print(*keep_claims(options.keep[0], Path(options.keep[1])), sep="\n")
        return 0
    if options.keep:
        print(keep(options.keep[0], Path(options.keep[1])))
        return 0
    if options.check:
        found = differing(documents())
        print("\n".join(found) or "every block is what the results say")
        return int(bool(found))
    for path in documents():
        before = path.read_text(encoding="utf-8")
        if (after := filled(before)) != before:
            path.write_text(after, encoding="utf-8")
            print(f"filled {path.name}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
