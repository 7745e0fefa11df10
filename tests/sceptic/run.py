"""Tries longitude as a sceptic would who sees its public interface only: random cases against loops written from the papers.

    python tests/sceptic/run.py --cases 5000 --seed 0            # prints cases, failures and the worst error of each kind
    python tests/sceptic/run.py --cases 1 --seed 4711 --verbose  # one case again

Values in float64 within 1e-9 of the loop's; gradients, along a random direction, within 1e-5 of its central differences.
"""

import argparse
import sys
import time
import warnings
from collections import defaultdict
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parent))

import cases
from drawn import ATTEND_WAYS

VALUE, GRADIENT = 1e-9, 1e-5


class Tally:
    def __init__(self):
        self.cases, self.calls, self.refused, self.kinks = 0, 0, 0, 0
        self.worst, self.failures, self.taken = defaultdict(lambda: [0.0, 0.0]), [], defaultdict(int)


def gap(got, want):
    if got.shape != want.shape:
        return float("inf")
    found = np.abs(got - want).max(initial=0.0) / max(1.0, np.abs(want).max(initial=0.0))
    return float(found) if np.isfinite(found) else float("inf")


def slope(case, direction, step):
    ahead, behind = ({n: x + s * step * direction[n] for n, x in case.inputs.items()} for s in (1, -1))
    return case.loop(ahead), case.loop(behind)


def tried(seed, tally, only=None):
    """One case by every way: the failures it has, in words."""
    failures = []
    try:
        name, case = cases.made(seed, only)
    except Exception as e:
        return [f"could not be built: {type(e).__name__}: {e}"]
    label = f"{name} {case.kind}" if name in ("attend", "recurrence") else name
    keep = 1.0 if case.keep is None else case.keep
    want = case.loop(case.inputs) * keep
    draw = np.random.default_rng(seed + 10**9)
    direction, out = {n: draw.normal(size=x.shape) for n, x in case.inputs.items()}, draw.normal(size=want.shape) * keep
    expected = None
    for way in case.ways:
        tensors = {n: torch.tensor(x, requires_grad=True) for n, x in case.inputs.items() if n not in case.parameters}
        try:
            got = case.library(tensors, way)
        except ValueError as e:
            if way in ATTEND_WAYS[1:] and "cannot:" in str(e):
                tally.refused += 1
                continue
            failures.append(f"{way}: ValueError: {e}")
            continue
        except Exception as e:
            failures.append(f"{way}: {type(e).__name__}: {e}")
            continue
        tally.calls += 1
        tally.taken[way] += 1
        error = gap(got.detach().numpy() * keep, want)
        tally.worst[label][0] = max(tally.worst[label][0], error)
        if error > VALUE:
            failures.append(f"{way}: values differ by {error:.1e}")
            continue
        if not case.inputs:
            continue
        if expected is None:
            slopes = []
            for step in (1e-5, 1e-6):
                ahead, behind = slope(case, direction, step)
                slopes.append(float(((ahead - behind) * out).sum() / (2 * step)))
            expected = slopes[0] if abs(slopes[0] - slopes[1]) <= GRADIENT / 10 * max(1.0, abs(slopes[0])) else np.nan
            tally.kinks += bool(np.isnan(expected))
        try:
            tensors |= case.parameters
            grads = torch.autograd.grad((got * torch.tensor(out)).sum(), list(tensors.values()), allow_unused=True)
        except Exception as e:
            failures.append(f"{way}: backward: {type(e).__name__}: {e}")
            continue
        along = sum(
            float((g * torch.tensor(direction[n])).sum()) for n, g in zip(tensors, grads, strict=True) if g is not None
        )
        if np.isnan(expected):
            continue
        error = abs(along - expected) / max(1.0, abs(expected))
        error = error if np.isfinite(error) else float("inf")
        tally.worst[label][1] = max(tally.worst[label][1], error)
        if error > GRADIENT:
            failures.append(f"{way}: gradients differ by {error:.1e}")
    tally.cases += 1
    return [f"{label}: {failure}; {case.text}" for failure in failures]


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=5000)
    parser.add_argument("--seed", type=int, default=0, help="number of the first case")
    parser.add_argument("--kind", choices=list(cases.KINDS), help="cases of this kind only")
    parser.add_argument("--verbose", action="store_true", help="print every case")
    args = parser.parse_args(arguments)
    warnings.simplefilter("ignore")
    tally, began = Tally(), time.monotonic()
    for seed in range(args.seed, args.seed + args.cases):
        found = tried(seed, tally, args.kind)
        if found:
            tally.failures.append(seed)
            print(
                f"--seed {seed}" + (f" --kind {args.kind}" if args.kind else "") + ": " + "\n    ".join(found),
                flush=True,
            )
        elif args.verbose:
            print(f"--seed {seed}: {cases.made(seed, args.kind)[1].text}", flush=True)
    print(f"\n{'kind':32s}  worst value  worst gradient")
    for label, (value, gradient) in sorted(tally.worst.items()):
        print(f"{label:32s}  {value:11.1e}  {gradient:14.1e}")
    print(
        f"\n{tally.cases} cases, {tally.calls} calls ({', '.join(f'{way} {n}' for way, n in sorted(tally.taken.items()))}), "
        f"{tally.refused} refused in words, {tally.kinks} at a kink; {len(tally.failures)} cases failed; "
        f"{time.monotonic() - began:.0f} s"
    )
    return 1 if tally.failures else 0


if __name__ == "__main__":
    raise SystemExit(main())
