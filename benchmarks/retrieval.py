"""Which schemes of extension keep retrieval, and which only perplexity: a Llama that can answer, extended four times.

    make checkpoint ARGS="--skills --out models/skilled"
    python benchmarks/retrieval.py --checkpoint models/skilled --out benchmarks/results/DATE-retrieval.json

Runs `longitude extend` for each scheme and `longitude measure` over all of them, as a user would; claim 17 reads the rows. Text
is what the checkpoint was not trained on, every 20th file of the standard library; half of it is for the search of factors, half
for perplexity. What --runs holds is not done again, so another checkpoint needs another folder.
"""

import argparse
import json
import runpy
import shutil
import subprocess
import sys
import sysconfig
from datetime import date
from pathlib import Path
from statistics import fmean
from typing import Any

from fill_numbers import ROOT
from longitude.runs.files import write_json
from longitude.runs.machine import provenance
from longitude.statistics.proportions import wilson

FACTOR = 4
METHODS = ("linear", "ntk", "dynamic", "yarn", "llama3", "longrope")
TUNED = ("linear", "yarn")
STEPS = "200"
"""Of fine-tuning on text alone, in windows of the new length."""
TASKS = (
    "passkey", "needle-filler", "needle-single", "needle-multi-key", "needle-multi-value", "needle-city", "needle-country",
    "variable-tracking",
)  # fmt: skip
"""What the checkpoint learned to answer: LEARNED of examples/skills.py."""
QUESTIONS = {"--trials": "20", "--documents": "24", "--methods": "non-overlapping", "--dtype": "float32", "--seed": "0"}


def longitude(*arguments: Any) -> str:
    """What a command prints."""
    command = [sys.executable, "-m", "longitude", *map(str, arguments)]
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout


def split_text(folder: Path) -> None:
    """The library's files into folders: training, search, held-out. The example trains on all but every 20th file."""
    example = runpy.run_path(str(ROOT / "examples" / "train_tiny_checkpoint.py"))
    root = Path(sysconfig.get_paths()["stdlib"])
    files = [path for path in sorted(root.rglob("*.py")) if not example["NOT_PROSE"] & {*path.relative_to(root).parts}]
    for i, file in enumerate(files):
        part = folder / ("training" if i % 20 else "search" if i % 40 else "held-out")
        part.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(file, part / f"{i}.py")


def extended(base: Path, runs: Path, length: int) -> dict[Path, tuple[str, int]]:
    """Folder -> method and steps: the model as it is, extended by each method, and some of them trained on after that."""
    models = {base: ("unchanged", 0)}
    for method in METHODS:
        models[runs / method] = (method, 0)
        if not (runs / method).exists():
            search = ["--text", runs / "text" / "search"] if method == "longrope" else []
            longitude(
                "extend", base, "--to", length, "--method", method, "--out", runs / method, "--no-measure", *search
            )
    for method in TUNED:
        models[out := runs / f"{method}-{STEPS}"] = (method, int(STEPS))
        if not out.exists():
            training = ["--fine-tune", runs / "text" / "training", "--steps", STEPS]
            training += ["--batch", 2, "--learning-rate", 3e-4, "--out", out, "--no-measure"]
            longitude("extend", runs / method, *training)
    return models


def mean_score(scores: list[dict[str, Any]], length: int) -> dict[str, float]:
    """Over all questions of a length, of every task as many, with Wilson's interval."""
    rows = [row for row in scores if row["length"] == length]
    value, low, high = wilson(fmean(row["value"] for row in rows), sum(row["count"] for row in rows))
    return {"value": value, "low": low, "high": high}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkpoint", type=Path, default=Path("models/skilled"))
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--runs", type=Path, default=Path("runs/retrieval"))
    options = parser.parse_args()
    trained = json.loads((options.checkpoint / "config.json").read_text())["max_position_embeddings"]
    lengths = [trained, 2 * trained, FACTOR * trained]
    split_text(options.runs / "text")
    models = extended(options.checkpoint, options.runs, lengths[-1])
    asked = [word for option in QUESTIONS.items() for word in option]
    text = ["--text", options.runs / "text" / "held-out", "--out", options.runs / "measured", "--json"]
    measured = json.loads(
        longitude("measure", *models, "--lengths", *lengths, "--tasks", *TASKS, "perplexity", *asked, *text)
    )
    rows: list[dict[str, Any]] = []
    for folder, (method, steps) in models.items():
        of_model = [row for row in measured if Path(row["model"]) == folder]
        bits = {row["length"]: row["value"] for row in of_model if row["metric"] == "bits_per_byte"}
        scores = [row for row in of_model if row["task"] in TASKS]
        means = {length: mean_score(scores, length) for length in lengths}
        rows.append({"method": method, "steps": steps, "bits": bits, "scores": scores, "means": means})
    for row in rows:
        print(row["method"], row["steps"], row["bits"], row["means"])
    protocol = {"factor": FACTOR, "trained": trained, "questions": QUESTIONS}
    write_json(
        options.out, {"schema": 1, "made": str(date.today()), **provenance(), "protocol": protocol, "rows": rows}
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
