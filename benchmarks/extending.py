"""What papers say of extended checkpoints, repeated on three small Llamas: orders of schemes, and searched factors.

    python benchmarks/extending.py --out benchmarks/results/DATE-extending.json --runs runs/extending

Each seed trains a stock Llama on bytes of Python's standard library, without every 20th file. Those files are halved: factors
are searched on one half, and everything is measured on the other. What is in --runs already is not done again, so that the
command continues after a kill; on one core all of it takes half an hour. `make numbers` puts the result into
docs/extending.md.
"""

import argparse
import json
import runpy
import shutil
import sys
import sysconfig
from datetime import date
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fill_numbers import ROOT
from longitude.checkpoints.load import load
from longitude.checkpoints.source import open_source
from longitude.extend.extend import extend
from longitude.extend.factors import rotary_pairs
from longitude.extend.fine_tune import fine_tune
from longitude.extend.plan import Target, plan_extension
from longitude.extend.search import search, windows_of
from longitude.extend.weights import write_checkpoint
from longitude.measure.config import MeasureConfig
from longitude.measure.documents import documents_of
from longitude.measure.plan import plan
from longitude.measure.run import measure
from longitude.measure.sources import read_text
from longitude.runs.progress import Progress
from longitude.runs.provenance import provenance
from longitude.runs.quiet import quiet
from longitude.runs.store import Store
from longitude.statistics.seeds import seed_difference, t_interval

SEEDS = (0, 1, 2)
LENGTH = 128
TRAINING = {"length": LENGTH, "layers": 3, "width": 64, "steps": 1500}
"""Of the Llamas: options of examples/train_tiny_checkpoint.py."""
FACTORS = (4, 8)
METHODS = ("linear", "ntk", "yarn", "llama3")
TUNED = ("linear", "ntk", "yarn", "drope")
TUNED_FACTOR = 4
STEPS, BATCH, RATE = 400, 2, 3e-4
"""Of fine-tuning, in windows of the new length; without rotation (drope) in as many times more of the training length."""
CANDIDATES = 64
"""Of the search for LongRoPE's factors; the paper tries 1,344."""
DOCUMENTS = 24
UNCHANGED, SEARCHED = "unchanged", "longrope"


class Model(NamedTuple):
    """A model that is measured: how it was extended, by what factor, and for how many steps it was trained on."""

    method: str
    factor: int
    steps: int = 0

    @property
    def name(self) -> str:
        return f"{self.method}-{self.factor}" + (f"-{self.steps}" if self.steps else "")


MODELS = [
    *(Model(method, factor) for factor in FACTORS for method in (UNCHANGED, *METHODS, SEARCHED)),
    *(Model(method, TUNED_FACTOR, STEPS) for method in TUNED),
]
BELOW = [
    *((Model(better, f), Model(worse, f)) for f in FACTORS for better, worse in (("ntk", "linear"), ("yarn", "ntk"))),
    *((Model(SEARCHED, f), Model("yarn", f)) for f in FACTORS),
    *(
        (Model(better, TUNED_FACTOR, STEPS), Model(worse, TUNED_FACTOR, STEPS))
        for better, worse in (("yarn", "linear"), ("ntk", "linear"), ("yarn", "ntk"), ("yarn", "drope"))
    ),
]
"""What is claimed: the first reads the new length better than the second."""


# ---- text and models -------------------------------------------------------------------------------------------------
def split_text(folder: Path) -> None:
    """The library's files into folders: training, search, held-out. The example trains on all but every 20th file."""
    example = runpy.run_path(str(ROOT / "examples" / "train_tiny_checkpoint.py"))
    root = Path(sysconfig.get_paths()["stdlib"])
    files = [each for each in sorted(root.rglob("*.py")) if not example["NOT_PROSE"] & {*each.relative_to(root).parts}]
    for i, file in enumerate(files):
        part = "training" if i % 20 else "search" if i % 40 else "held-out"
        (folder / part).mkdir(parents=True, exist_ok=True)
        shutil.copyfile(file, folder / part / f"{i}.py")


def trained(folder: Path, seed: int) -> Path:
    """The Llama of a seed."""
    out = folder / "base"
    if not out.exists():
        options = [f"--{name}={value}" for name, value in TRAINING.items()]
        sys.argv = ["train_tiny_checkpoint.py", "--model=llama", f"--out={out}", f"--seed={seed}", *options]
        runpy.run_path(str(ROOT / "examples" / "train_tiny_checkpoint.py"), run_name="__main__")
    return out


def made(model: Model, folder: Path, text: Path, seed: int) -> Path:
    """The folder of a model, made where it is not there."""
    base, out = folder / "base", folder / model.name
    if model.method == UNCHANGED:
        return base
    if out.exists():
        return out
    if model.steps:
        before = made(model._replace(steps=0), folder, text, seed)
        batch = BATCH * model.factor if model.method == "drope" else BATCH
        given: Any = {"steps": STEPS, "batch": batch, "learning_rate": RATE, "seed": seed}
        fine_tune(before, text / "training", out=out, **given)
    elif model.method == SEARCHED:
        searched(base, out, text / "search", (LENGTH, model.factor * LENGTH), seed)
    else:
        extend(base, out, to=model.factor * LENGTH, method=model.method, text=None)
    return out


def searched(base: Path, out: Path, text: Path, lengths: tuple[int, int], seed: int) -> None:
    """As `extend --method longrope` does, with a number of candidates instead of minutes. lengths: trained, new."""
    trained, length = lengths
    checkpoint = load(base)
    documents = documents_of(read_text(str(text), "--text"), checkpoint.tokenizer, length, DOCUMENTS).ids
    store = Store(out.with_name(f"{out.name}.search"))
    pairs, windows = rotary_pairs(checkpoint.model, trained, length), windows_of(documents, length)
    found = search(checkpoint.model, pairs, windows, store=store, evaluations=CANDIDATES, seed=seed)
    source = open_source(str(base))
    planned = plan_extension(source, Target(to=length, method=SEARCHED), found)
    write_checkpoint(source, out, planned.changes, planned.config)


def losses(base: Path, model: Model, where: Path, text: Path, out: Path) -> dict[int, float]:
    """Bits per byte at the training length and at the new one, on files that nothing has read."""
    config = MeasureConfig(
        lengths=(LENGTH, model.factor * LENGTH), text=str(text), documents=DOCUMENTS, methods=("non-overlapping",)
    )
    with Progress() as bar:
        rows = measure(plan(config, (str(where),)), out, bar).rows
    return {int(row.length or 0): row.value for row in rows if row.metric == "bits_per_byte" and row.value is not None}


# ---- the result ------------------------------------------------------------------------------------------------------
def result(found: dict[Model, list[dict[int, float]]]) -> dict[str, Any]:
    """A row for each model, and the differences that are claimed, with t-intervals over seeds, paired by seed."""
    rows: list[dict[str, Any]] = []
    for model, seeds in found.items():
        long = model.factor * LENGTH
        values = {length: [each[length] for each in seeds] for length in (LENGTH, long)}
        short, new = (t_interval(values[length])._asdict() for length in (LENGTH, long))
        rows.append({**model._asdict(), "length": long, "values": values[long], "short": short, "long": new})
    claims = []
    for better, worse in BELOW:
        a, b = (np.array([each[model.factor * LENGTH] for each in found[model]]) for model in (better, worse))
        difference = seed_difference(a, b)._asdict()
        claims.append({"better": better._asdict(), "worse": worse._asdict(), "difference": difference})
    protocol = {"trained": TRAINING, "seeds": SEEDS, "documents": DOCUMENTS, "candidates": CANDIDATES}
    protocol["tuned"] = {"steps": STEPS, "batch": BATCH, "learning_rate": RATE}
    return {
        "schema": 1,
        "made": str(date.today()),
        **provenance(),
        "protocol": protocol,
        "rows": rows,
        "claims": claims,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--runs", type=Path, default=Path("runs/extending"))
    options = parser.parse_args()
    text = options.runs / "text"
    split_text(text)
    found: dict[Model, list[dict[int, float]]] = {model: [] for model in MODELS}
    for seed in SEEDS:
        folder = options.runs / f"seed-{seed}"
        with quiet():
            base = trained(folder, seed)
        for model in MODELS:
            where = made(model, folder, text, seed)
            measured = folder / "measured" / model.name
            found[model].append(losses(base, model, where, text / "held-out", measured))
            print(f"seed {seed}, {model.name}: {found[model][-1]}", flush=True)
    options.out.write_text(json.dumps(result(found), indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
