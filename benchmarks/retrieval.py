"""Which schemes of extension keep retrieval, and which only perplexity: a Llama that can answer, extended four times.

    make checkpoint ARGS="--skills --out models/skilled"
    python benchmarks/retrieval.py --checkpoint models/skilled --out benchmarks/results/DATE-retrieval.json

Text is what the checkpoint was not trained on, every 20th file of the standard library; half of it is for the search of
factors, half for perplexity. Questions are new draws of the kinds that it was trained on. What --runs has of this checkpoint and
protocol is not done again. `make numbers` puts the result into docs/extending.md.
"""

import argparse
import json
import sys
from collections.abc import Iterator
from datetime import date
from pathlib import Path
from statistics import fmean
from typing import Any

from extending import BATCH, CANDIDATES, RATE, searched, split_text
from longitude.checkpoints.load import load
from longitude.extend.extend import extend
from longitude.extend.fine_tune import fine_tune
from longitude.extend.units import digest_of_weights
from longitude.measure.config import MeasureConfig
from longitude.measure.plan import plan
from longitude.measure.retrieval import run as ask
from longitude.measure.run import measure
from longitude.runs.progress import Progress
from longitude.runs.provenance import provenance
from longitude.runs.store import key_of
from longitude.statistics.proportions import wilson

FACTOR = 4
UNCHANGED, SEARCHED = "unchanged", "longrope"
METHODS = (UNCHANGED, "linear", "ntk", "dynamic", "yarn", "llama3", SEARCHED)
TUNED = ("linear", "yarn")
STEPS = 200
"""Of fine-tuning on text alone, in windows of the new length."""
TASKS = (
    "passkey",
    "needle-filler",
    "needle-single",
    "needle-multi-key",
    "needle-multi-value",
    "needle-city",
    "needle-country",
    "variable-tracking",
)
"""What the checkpoint learned to answer: LEARNED of examples/skills.py."""
TRIALS = 20
"""Questions of a task and length."""
DOCUMENTS = 24
NEARLY = {"bits": 1.05, "score": 0.9}
"""Of the unchanged model's at its training length: bits per byte at most, mean score at least, to count as kept."""
SEED = 0


# ---- models ----------------------------------------------------------------------------------------------------------
def runs_of(model: Any, parent: Path) -> Path:
    """The folder of what is made and measured of a checkpoint: other weights, or another protocol, have their own."""
    question = {
        "weights": digest_of_weights(model),
        "factor": FACTOR,
        "trials": TRIALS,
        "documents": DOCUMENTS,
        "seed": SEED,
    }
    return parent / key_of(question | {"tuned": [STEPS, BATCH, RATE], "candidates": CANDIDATES})


def made(base: Path, method: str, steps: int, runs: Path, length: int) -> Path:
    """The folder of a model, made where it is not there."""
    out = runs / (method + (f"-{steps}" if steps else ""))
    if method == UNCHANGED or out.exists():
        return base if method == UNCHANGED else out
    if steps:
        before = made(base, method, 0, runs, length)
        fine_tune(before, runs / "text" / "training", out=out, steps=steps, batch=BATCH, learning_rate=RATE, seed=SEED)
    elif method == SEARCHED:
        searched(base, out, runs / "text" / "search", (length // FACTOR, length), SEED)
    else:
        extend(base, out, to=length, method=method, text=None)
    return out


# ---- measured --------------------------------------------------------------------------------------------------------
def bits(where: Path, lengths: list[int], runs: Path) -> dict[int, float]:
    """Bits per byte at each length, in windows that do not overlap."""
    text = str(runs / "text" / "held-out")
    config = MeasureConfig(
        lengths=tuple(lengths), text=text, documents=DOCUMENTS, methods=("non-overlapping",), dtype="float32"
    )
    with Progress() as bar:
        rows = measure(plan(config, (str(where),)), runs / "measured" / where.name, bar).rows
    return {int(row.length or 0): row.value for row in rows if row.metric == "bits_per_byte" and row.value is not None}


def scores(where: Path, lengths: list[int], answers: Path) -> Iterator[dict[str, Any]]:
    """Of each task and length: the mean score with its interval. One file per task keeps what was answered already."""
    checkpoint = load(where)
    for task in TASKS:
        kept = answers / f"{where.name}-{task}.json"
        if not kept.exists():
            rows = list(ask(checkpoint, task, lengths=lengths, trials=TRIALS, seed=SEED))
            columns = ("task", "length", "value", "low", "high", "count", "reason")
            kept.parent.mkdir(parents=True, exist_ok=True)
            kept.write_text(json.dumps([{name: getattr(row, name) for name in columns} for row in rows]))
        yield from json.loads(kept.read_text())


def mean_score(scores: list[dict[str, Any]], length: int) -> dict[str, float]:
    """Over all questions of a length, of every task as many, with Wilson's interval."""
    rows = [row for row in scores if row["length"] == length]
    value, low, high = wilson(fmean(row["value"] for row in rows), sum(row["count"] for row in rows))
    return {"value": value, "low": low, "high": high}


def kept(row: dict[str, Any], unchanged: dict[str, Any], short: int, long: int) -> list[str]:
    """What is at the new length nearly as it was before extending, at the training length."""
    holds = {
        "perplexity": row["bits"][long] <= NEARLY["bits"] * unchanged["bits"][short],
        "retrieval": row["means"][long]["value"] >= NEARLY["score"] * unchanged["means"][short]["value"],
    }
    return [name for name, held in holds.items() if held]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkpoint", type=Path, default=Path("models/skilled"))
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--runs", type=Path, default=Path("runs/retrieval"))
    options = parser.parse_args()
    if not options.checkpoint.exists():
        parser.error(f'{options.checkpoint}: not there; make checkpoint ARGS="--skills --out {options.checkpoint}"')
    model = load(options.checkpoint).model
    runs = runs_of(model, options.runs)
    split_text(runs / "text")
    trained = model.config.max_position_embeddings
    lengths = [trained, 2 * trained, FACTOR * trained]
    rows = []
    for method, steps in [*((method, 0) for method in METHODS), *((method, STEPS) for method in TUNED)]:
        where = made(options.checkpoint, method, steps, runs, lengths[-1])
        answered = list(scores(where, lengths, runs / "answers"))
        row = {"method": method, "steps": steps, "bits": bits(where, lengths, runs), "scores": answered}
        rows.append(row | {"means": {length: mean_score(answered, length) for length in lengths}})
        print(f"{method} {steps or ''}: {row['bits']}, {rows[-1]['means']}", flush=True)
    for row in rows:
        row["kept"] = kept(row, rows[0], lengths[0], lengths[-1])
    protocol = {
        "factor": FACTOR,
        "trained": trained,
        "trials": TRIALS,
        "documents": DOCUMENTS,
        "nearly": NEARLY,
        "tuned": {"steps": STEPS, "batch": BATCH, "learning_rate": RATE},
    }
    found = {"schema": 1, "made": str(date.today()), **provenance(), "protocol": protocol, "rows": rows}
    options.out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
