"""Four properties of every encoding, measured: what tells positions apart, what knows offsets, what lasts, what it costs.

    python benchmarks/properties.py [--out runs/properties] [--markdown FILE] [--threads 2] [options of `longitude study`]

codes       The smallest distance between the codes of two different positions below N = 8 times the training length, over the
            root mean square norm of these codes. The code of position p is what the encoding makes of p: the vector that is
            added at the input; a query of ones as it is turned (cos - sin and cos + sin of each pair, times its magnitude in
            xPos); or what is added to the scores at offset p, the biases of all heads or the vectors of all heads, from a query
            at N - 1. 0: two positions look exactly alike. "content": position is read off the content, so it has no code.
            Encodings with a table have codes for its positions only.
relative    As declared, and verified by the battery (longitude.testing).
loss        Bits per byte in windows of N over those in windows of the training length, with the 95 % interval of the ratio
            (documents, and seeds where several), from a study of all encodings; it is run, or continued, in --out.
cost        Time of lg.attend forward and backward with the encoding, the columns that it reads off the tokens included, over
            that of plain causal attention: B=1 H=8 D=64 L=2048, float32; all in one process, interleaved, medians. On a busy
            machine wall-clock ratios are noise: `--threads 1 --cpu-time` counts processor seconds instead.

Learned numbers are those of the study's first seed and first layer, for codes; freshly drawn ones, for costs. Prints a table,
writes it as markdown, and with its protocol as properties.json in --out.
"""

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

import longitude as lg
from longitude.catalogue import acts
from longitude.cli import main as longitude_command
from longitude.models import LongitudeConfig, LongitudeForCausalLM
from longitude.positions.base import Encoding, OffsetBias, OffsetVectors, PairBias, encoding as build
from longitude.positions.composed import compose
from longitude.study.config import parse_encoding, safe
from longitude.study.results import read_run
from longitude.study.runner import commit_of_code, machine, versions
from longitude.study.statistics import findings

TIMES = 8  # the longest length, in training lengths
HEADS, HEAD_DIM, LENGTH = 8, 64, 2048  # of the timings


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
            ones = torch.ones(len(positions), head_dim, dtype=torch.float64)
            parts.append(member.rotate_queries(ones, positions))
        for term in member.terms({}):
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


# ---- costs -----------------------------------------------------------------------------------------------------------
def costs(labels: list[str], runs: int, clock: Callable[[], float]) -> tuple[dict[str, float], float]:
    """Label -> time over plain attention; and the seconds of plain attention."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, HEADS, LENGTH, HEAD_DIM, requires_grad=True) for _ in range(3))
    x, grad = torch.randn(1, LENGTH, HEADS * HEAD_DIM), torch.randn(1, HEADS, LENGTH, HEAD_DIM)
    encodings: dict[str | None, Encoding | None] = {None: None}
    for label in labels:
        shape = LongitudeConfig(
            hidden_size=HEADS * HEAD_DIM,
            num_attention_heads=HEADS,
            num_hidden_layers=1,
            max_position_embeddings=LENGTH,
            encoding=parse_encoding(label),
        )
        encodings[label] = compose([build(**spec) for spec in shape.layer_specs()[0]])

    def step(encoding: Encoding | None) -> None:
        columns = None if encoding is None else encoding.context(x)[0]
        lg.attend(q, k, v, encoding=encoding, context=columns).backward(grad)

    seconds: dict[str | None, list[float]] = {name: [] for name in encodings}
    for turn in range(runs + 1):  # the first warms up
        for name, encoding in encodings.items():
            start = clock()
            step(encoding)
            if turn:
                seconds[name].append(clock() - start)
    plain = statistics.median(seconds[None])
    return {label: statistics.median(seconds[label]) / plain for label in labels}, plain


# ---- the table -------------------------------------------------------------------------------------------------------
def measured(run_path: Path, runs: int, clock: Callable[[], float]) -> tuple[list[dict], float]:
    """One line per encoding of the run, and the seconds of plain attention."""
    run = read_run(run_path)
    longest = run.lengths[-1]
    found = {each.label: each for each in findings(run) if each.length == longest}
    spent, plain = costs(run.labels, runs, clock)
    lines = []
    for label in run.labels:
        own, line = found[label], {"encoding": label, "codes": None, "relative": None, "loss": None}
        folder = run.path / "cells" / f"{safe(label)}-{run.config['seeds'][0]}"
        if (folder / "config.json").exists():
            model = LongitudeForCausalLM.from_pretrained(folder)
            encoding = model.model.encoding_of_layer[0]
            line["relative"] = encoding.relative
            line["codes"] = separation(codes(encoding, longest, model.config.hidden_size, model.config.head_dim))
        if own.change is not None:
            ends = (None if end is None else 1 + end for end in (own.change_low, own.change_high))
            line["loss"] = (1 + own.change, *ends)
        why = [cell.reason for cell in run.of(label) if cell.reason]
        lines.append(line | {"missing": why[0] if why else None, "cost": spent[label]})
    return lines, plain


def worded(line: dict) -> list[str]:
    """A line as it is shown."""
    apart, loss = line["codes"], line["loss"]
    if isinstance(apart, float):
        apart = f"{apart:.2g}" if apart else "0"
    if loss:
        loss = f"{loss[0]:.2f}" + ("" if loss[1] is None else f" ({loss[1]:.2f} to {loss[2]:.2f})")
    relative = {True: "yes", False: "no", None: "-"}[line["relative"]]
    return [line["encoding"], apart or "-", relative, loss or "-", f"{line['cost']:.2f}"]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/properties"))
    parser.add_argument("--markdown", type=Path, help="write the table there, too")
    parser.add_argument("--train-length", type=int, default=256)
    parser.add_argument("--threads", type=int, default=2, help="of the timings")
    parser.add_argument("--cpu-time", action="store_true", help="processor seconds instead of wall-clock seconds")
    parser.add_argument("--runs", type=int, default=5, help="timings of each encoding")
    options, rest = parser.parse_known_args()
    lengths = [options.train_length, TIMES * options.train_length]
    if "--encodings" not in rest:
        rest = ["--encodings", "all", *rest]
    study = ["study", *rest, "--train-length", lengths[0], "--test-lengths", *lengths, "--out", options.out]
    if (code := longitude_command([str(word) for word in study])) > 1:
        return code

    torch.set_num_threads(options.threads)
    clock, unit = (time.process_time, "processor") if options.cpu_time else (time.perf_counter, "wall-clock")
    load = os.getloadavg()[0]
    lines, plain = measured(options.out, options.runs, clock)
    headings = ["encoding", "distance of codes", "relative", f"loss at {lengths[1]} / at {lengths[0]}", "cost"]
    timed = (
        f"cost: B=1 H={HEADS} D={HEAD_DIM} L={LENGTH} float32, forward and backward, over plain causal attention "
        f"({plain * 1e3:.0f} ms); torch {torch.__version__}, {options.threads} threads, {unit} time, load {load:.1f}, "
        f"medians of {options.runs}"
    )
    table = Table(*headings, box=None, caption=timed, caption_justify="left")
    for line in lines:
        table.add_row(*worded(line))
    console = Console()
    console.print(table, highlight=False)
    for line in lines:
        if line["missing"]:
            console.print(f"{line['encoding']}: {line['missing']}", highlight=False, markup=False)
    written = [headings, ["---"] * len(headings), *map(worded, lines)]
    text = "\n".join("| " + " | ".join(cells) + " |" for cells in written) + f"\n\n{timed}\n"
    if options.markdown:
        options.markdown.write_text(text)
    protocol = {
        "definitions": __doc__,
        "timing": {
            "threads": options.threads,
            "clock": unit,
            "load": load,
            "runs": options.runs,
            "plain_seconds": plain,
        },
        "shape": {"batch": 1, "heads": HEADS, "head_dim": HEAD_DIM, "length": LENGTH, "dtype": "float32"},
        "machine": machine(),
        "versions": versions(),
        "commit": commit_of_code(),
        "study": json.loads((options.out / "study.json").read_text()),
    }
    whole = json.dumps({"protocol": protocol, "rows": lines}, indent=1)
    (options.out / "properties.json").write_text(whole + "\n")
    return code


if __name__ == "__main__":
    sys.exit(main())
