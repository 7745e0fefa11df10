"""Random cases of longitude against loops written from the papers, which know nothing of its insides.

    python tests/sceptic/run.py --cases 5000 --seed 0            # prints cases, failures and the worst error of each kind
    python tests/sceptic/run.py --cases 1 --seed 4711 --verbose  # one case again

Values in float64 within 1e-9 of the loop's; gradients, along a random direction, within 1e-5 of its central differences.
"""

import argparse
import math
import sys
import time
import warnings
from collections import Counter, defaultdict
from functools import partial
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent))

import cases

from longitude.testing.fixtures import differentiable, error, numbers, with_gradients

VALUE, GRADIENT = 1e-9, 1e-5


class Tally:
    def __init__(self):
        self.count, self.taken = Counter(), Counter()
        self.worst = defaultdict(lambda: [0.0, 0.0])  # of values, of gradients


def looped(case, moved):
    """The loop's output, where inputs and parameters are moved by these."""
    return torch.from_numpy(
        case.loop({name: (x + moved.get(name, 0)).detach().numpy() for name, x in case.every.items()})
    )


def slope(case, directions, along):
    """The derivative of the loop's output along directions, by central differences; NaN at a kink."""
    slopes = []
    for step in (1e-5, 1e-6):
        ahead, behind = (looped(case, {n: s * d for n, d in directions.items()}) for s in (step, -step))
        slopes.append(float(((ahead - behind) * along).sum() / (2 * step)))
    return slopes[0] if abs(slopes[0] - slopes[1]) <= GRADIENT / 10 * max(1.0, abs(slopes[0])) else math.nan


def tried(seed, tally, only=None):
    """One case by every way: the failures it has, in words."""
    try:
        case = cases.made(seed, only)
    except Exception as e:
        return [f"could not be built: {type(e).__name__}: {e}"]
    want = looped(case, {}) * case.seen
    along = numbers(*want.shape, seed=seed + 7) * case.seen
    directions = {name: numbers(*x.shape, seed=seed + 8 + n) for n, (name, x) in enumerate(case.every.items())}
    expected, failures, worst = slope(case, directions, along), [], tally.worst[case.label]
    tally.count["cases"] += 1
    tally.count["at a kink"] += math.isnan(expected)
    for way in case.ways:
        inputs = differentiable(**case.inputs)
        try:
            forward = partial(case.forward, inputs, way)
            got = with_gradients(forward, {**inputs, **case.learned}, case.seen, along)
        except Exception as e:
            if isinstance(e, ValueError) and way != "auto" and "cannot:" in str(e):
                tally.count["refused in words"] += 1
            else:
                failures.append(f"{way}: {type(e).__name__}: {e}")
            continue
        tally.taken[way] += 1
        found = sum(float((got[f"gradient of {name}"] * d).sum()) for name, d in directions.items())
        gaps = error(got["output"], want), abs(found - expected) / max(1.0, abs(expected))
        for n, (what, most) in enumerate((("values", VALUE), ("gradients", GRADIENT))):
            if what == "gradients" and math.isnan(expected):
                continue
            worst[n] = max(worst[n], gaps[n])
            if not gaps[n] <= most:
                failures.append(f"{way}: {what} differ by {gaps[n]:.1e}")
    return [f"{case.label}: {failure}; {case.text}" for failure in failures]


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
        again = f"--seed {seed}" + (f" --kind {args.kind}" if args.kind else "")
        if found := tried(seed, tally, args.kind):
            tally.count["failed"] += 1
            print(f"{again}: " + "\n    ".join(found), flush=True)
        elif args.verbose:
            print(f"{again}: {cases.made(seed, args.kind).text}", flush=True)
    print(f"\n{'kind':32s}  worst value  worst gradient")
    for label, (value, gradient) in sorted(tally.worst.items()):
        print(f"{label:32s}  {value:11.1e}  {gradient:14.1e}")
    counts = (f"{tally.count[name]} {name}" for name in ("cases", "refused in words", "at a kink", "failed"))
    calls = ", ".join(f"{way} {n}" for way, n in sorted(tally.taken.items()))
    print(f"\n{', '.join(counts)}; calls: {calls}; {time.monotonic() - began:.0f} s")
    return 1 if tally.count["failed"] else 0


if __name__ == "__main__":
    raise SystemExit(main())
