"""Three properties of every encoding, measured: whether it tells positions apart, whether it is relative, what it costs.

    python benchmarks/properties.py [--out FILE.json] [--run runs/properties] [--threads 2] [options of `longitude study`]

codes       The smallest distance between the codes of two different positions below N = 8 times the training length, over the
            root mean square norm of these codes. The code of position p is what the encoding makes of p: the vector that is
            added at the input; a query of ones as it is rotated (cos - sin and cos + sin of each pair, times its magnitude in
            xPos); or what is added to the scores at offset p, the biases of all heads or the vectors of all heads, from a query
            at N - 1. 0: two positions look exactly alike. "content": position is read off the content, so it has no code.
            Encodings with a table have codes for its positions only.
relative    As declared, and verified by the battery (longitude.testing).
cost        Time of lg.attend forward and backward with the encoding, as `longitude bench` times it, over that of plain causal
            attention: B=1 H=8 D=64 L=2048, float32; all in one process, interleaved, medians. On a busy machine wall-clock
            ratios are noise: `--threads 1 --cpu-time` counts processor seconds instead.

Learned numbers are those of a study of all encodings, of its first seed and first layer, for codes; it is run, or continued, in
--run. For costs they are freshly drawn. Prints a table and
writes its rows with their protocol, by default as benchmarks/results/DATE-properties.json;
docs/encodings.md has the printed table.
"""

import argparse
import os
import sys
from collections.abc import Callable
from dataclasses import asdict
from datetime import date
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fill_numbers import RESULTS, paper_and_label
from longitude.bench.cases import AttentionShape, Inputs, ours, plain
from longitude.bench.clock import CLOCKS, interleaved
from longitude.catalogue import acts
from longitude.cli import main as longitude_command
from longitude.models import LongitudeForCausalLM
from longitude.positions.base import Encoding, OffsetBias, OffsetVectors, PairBias
from longitude.positions.composed import compose
from longitude.report.table import markdown
from longitude.runs.files import write_json
from longitude.runs.provenance import commit_of_code, machine, versions
from longitude.study.results import question_of, read_run

STUDY = {"--encodings": "all", "--steps": "260", "--learning-rates": "0.004", "--seeds": "0"}
"""Of the study, where ARGS does not say another: an hour on two cores."""
TIMES = 8  # the longest length, in training lengths
SHAPE = AttentionShape(batch=1, heads=8, kv_heads=8, head_dim=64, length=2048)  # of the timings


# ---- codes -----------------------------------------------------------------------------------------------------------
@torch.no_grad()
def codes(encoding: Encoding, count: int, dim: int, head_dim: int) -> Tensor | None:
    """What an encoding makes of positions 0 .. count-1 -> [count, numbers], float64; None where content decides."""
    encoding = encoding.double()
    if "content" in acts(encoding, dim):
        return None
    positions = torch.arange(min(count, encoding.max_length or count))
    parts = [torch.zeros(len(positions), 0, dtype=torch.float64)]
    for member in compose(encoding):
        if member.at_input:
            parts.append(member.embed(torch.zeros(1, len(positions), dim, dtype=torch.float64), positions)[0])
        if type(member).keys is not Encoding.keys:
            heads = getattr(member, "num_heads", 1)
            ones = torch.ones(1, heads, len(positions), head_dim, dtype=torch.float64)
            parts.append(member.rotate_queries(ones, positions)[0, 0])
        columns = compose(member).context(torch.zeros(1, len(positions), dim, dtype=torch.float64))[0]
        for term in member.terms(columns):
            last = positions[-1]
            match term:
                case OffsetBias(at):
                    parts.append(at(positions).T.double())
                case PairBias(at):
                    parts.append(at(last.view(1, 1), (last - positions)[None])[..., 0, :].T.double())
                case OffsetVectors(keys):
                    vectors = keys(positions).double()
                    parts.append(vectors.movedim(-2, 0).flatten(1) if vectors.dim() == 3 else vectors)
    return torch.cat(parts, 1)


def smallest_distance(codes: Tensor) -> tuple[float, float]:
    """codes [count, numbers] -> the smallest Euclidean distance of two of them, and their root mean square norm."""
    smallest = torch.inf
    for first in range(0, len(codes), 256):
        block = codes[first : first + 256]
        far = torch.cdist(block, codes, compute_mode="donot_use_mm_for_euclid_dist")
        far[torch.arange(len(block)), torch.arange(first, first + len(block))] = torch.inf
        smallest = min(smallest, float(far.min()))
    return smallest, float(codes.square().sum(1).mean().sqrt())


def separation(codes: Tensor | None) -> float | str:
    """The smallest distance over the norm; 0 where all codes are alike."""
    if codes is None:
        return "content"
    smallest, norm = smallest_distance(codes)
    return smallest / norm if smallest else 0.0


# ---- the table -------------------------------------------------------------------------------------------------------
def costs(labels: list[str], repeats: int, clock: Callable[[], float]) -> tuple[dict[str, float], float]:
    """Label -> time over plain attention; and the seconds of plain attention."""
    inputs = Inputs.of(SHAPE)
    cases = {case.name: case for case in (plain(inputs), *(ours(label, "auto", inputs) for label in labels))}
    timings = interleaved({name: case.step(backward=True) for name, case in cases.items()}, "plain", repeats, clock)
    ratios = {label: ratio.median for label in labels if (ratio := timings[label].ratio)}
    return ratios, timings["plain"].seconds.median


def measured(path: Path, repeats: int, clock: Callable[[], float]) -> tuple[list[dict[str, Any]], float]:
    """One row per encoding of the run, and the seconds of plain attention."""
    run = read_run(path)
    longest = run.lengths[-1]
    spent, seconds = costs(run.labels, repeats, clock)
    rows = []
    for label in run.labels:
        row: dict[str, Any] = {"encoding": label, "codes": None, "relative": None}
        folder = run.of(label)[0].folder
        if (folder / "config.json").exists():
            model = LongitudeForCausalLM.from_pretrained(folder)
            encoding = model.model.encoding_of_layer[0]
            row["relative"] = encoding.relative
            row["codes"] = separation(codes(encoding, longest, model.config.hidden_size, model.config.head_dim))
        missing = next((cell.reason for cell in run.of(label) if cell.reason), None)
        rows.append(row | {"missing": missing, "cost": spent[label]})
    return rows, seconds


def cells(row: dict[str, Any]) -> list[str]:
    """A row as it is shown: distance of codes, relative, cost."""
    distance = row["codes"]
    if isinstance(distance, float):
        distance = f"{distance:.2g}" if distance else "0"
    relative = {True: "yes", False: "no", None: "-"}[row["relative"]]
    return [distance or "-", relative, f"{row['cost']:.2f}"]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=RESULTS / f"{date.today()}-properties.json")
    parser.add_argument("--run", type=Path, default=Path("runs/properties"), help="directory of the study")
    parser.add_argument("--train-length", type=int, default=256)
    parser.add_argument("--threads", type=int, default=2, help="of the timings")
    parser.add_argument("--cpu-time", action="store_true", help="processor seconds instead of wall-clock seconds")
    parser.add_argument("--repeats", type=int, default=5, help="timings of each encoding")
    options, rest = parser.parse_known_args()
    for option, value in STUDY.items():
        rest = rest if option in rest else [option, value, *rest]
    lengths = [str(options.train_length), str(TIMES * options.train_length)]
    study = ["study", *rest, "--train-length", lengths[0], "--test-lengths", *lengths, "--out", str(options.run)]
    if (code := longitude_command(study)) > 1:
        return code

    torch.set_num_threads(options.threads)
    clock, load = "processor" if options.cpu_time else "wall", os.getloadavg()[0]
    rows, seconds = measured(options.run, options.repeats, CLOCKS[clock])
    words = (
        f"Cost: B=1 H={SHAPE.heads} D={SHAPE.head_dim} L={SHAPE.length} float32, forward and backward, over plain causal "
        f"attention ({seconds * 1e3:.0f} ms); torch {torch.__version__}, {options.threads} threads, {clock} time, load "
        f"{load:.1f}, medians of {options.repeats}; {date.today()}."
    )
    timing = {
        "threads": options.threads,
        "clock": clock,
        "load": load,
        "repeats": options.repeats,
        "plain_seconds": seconds,
    }
    protocol = {
        "definitions": __doc__, "words": words, "timing": timing, "shape": asdict(SHAPE), "machine": machine(),
        "versions": versions(), "commit": commit_of_code(), "study": question_of(options.run),
    }  # fmt: skip
    result = {"protocol": protocol, "rows": rows}
    write_json(options.out, result)
    headings = ["encoding", "distance of the two most similar positions", "relative", "time / PyTorch"]
    rows.sort(key=lambda row: row["cost"])
    print(markdown(headings, [[paper_and_label(row["encoding"]), *cells(row)] for row in rows]), words, sep="\n\n")
    for row in rows:
        if row["missing"]:
            print(f"{row['encoding']}: {row['missing']}")
    return code


if __name__ == "__main__":
    sys.exit(main())
