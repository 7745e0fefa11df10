"""What the loops in C save: the same calls with torch's operators (LONGITUDE_COMPILE=0), over those with the loops.

    python benchmarks/loops.py [--rounds 5]

Two processes for each round, one after the other, on one thread; medians of processor time of 7 calls, then of the
rounds' ratios. float32, 8 heads of 64, batch 1; recurrences of width 256.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable

TURNS = 7
HEADS = {"num_heads": 4}
RECURRENCES = {"gated_deltanet": HEADS, "kda": HEADS, "rwkv7": HEADS, "mamba": {}, "s4d": {}, "rwkv4": {}}
"""Mixers of delta.c (three), scan.c, diagonal.c and wkv.c."""


def cases() -> dict[str, Callable[[], object]]:
    """Name -> a call."""
    import torch

    import longitude as lg

    torch.set_num_threads(1)

    def qkv(length: int, learns: bool = False) -> list[torch.Tensor]:
        generator = torch.Generator().manual_seed(0)
        return [torch.randn(1, 8, length, 64, generator=generator, requires_grad=learns) for _ in range(3)]

    def forward(encoding: lg.Encoding, length: int) -> Callable[[], object]:
        q, k, v = qkv(length)
        return lambda: lg.attend(q, k, v, encoding=encoding)

    def training(encoding: lg.Encoding, length: int) -> Callable[[], object]:
        q, k, v = qkv(length, learns=True)
        return lambda: lg.attend(q, k, v, encoding=encoding).sum().backward()

    def rotation(length: int) -> Callable[[], object]:
        encoding, (q, k, _), at = lg.Rotary(64, "half"), qkv(length), torch.arange(length)
        return lambda: (encoding.rotate_queries(q, at), encoding.rotate_keys(k, at))

    found = {f"ALiBi, forward, {length}": forward(lg.ALiBi(8), length) for length in (1024, 2048)}
    found |= {f"T5, forward, {length}": forward(lg.T5Bias(8).requires_grad_(False), length) for length in (1024, 2048)}
    key_cache, value_cache = qkv(2048)[1:]
    one, t5 = key_cache[:, :, -1:], lg.T5Bias(8).requires_grad_(False)
    found["T5, a token after 2048"] = lambda: lg.attend(one, key_cache, value_cache, encoding=t5)
    found["ALiBi, with backward, 2048"] = training(lg.ALiBi(8), 2048)
    found["T5, with backward, 2048"] = training(lg.T5Bias(8), 2048)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(1, 512, 256, generator=generator)

    def recurrence(name: str, learns: bool) -> Callable[[], object]:
        torch.manual_seed(0)
        layer = lg.mixer(name, dim=256, **RECURRENCES[name]).requires_grad_(learns)
        return lambda: layer(x).sum().backward() if learns else layer(x)

    for name in RECURRENCES:
        found[f"{name}, forward, 512"] = recurrence(name, False)
        found[f"{name}, with backward, 512"] = recurrence(name, True)
    return found | {f"rotation of q and k, {length}": rotation(length) for length in (512, 2048)}


def measured() -> dict[str, float]:
    """Name -> seconds of the processor, here."""
    seconds = {}
    for name, call in cases().items():
        call(), call()
        times = []
        for _ in range(TURNS):
            begun = time.process_time()
            call()
            times.append(time.process_time() - begun)
        seconds[name] = statistics.median(times)
    return seconds


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.here:
        print(json.dumps(measured()))
        return 0
    rounds = []
    for _ in range(options.rounds):
        both = []
        for wish in ("", "0"):
            environment = {**os.environ, "LONGITUDE_COMPILE": wish}
            done = subprocess.run(
                [sys.executable, __file__, "--here"], env=environment, check=True, capture_output=True, text=True
            )
            both.append(json.loads(done.stdout.splitlines()[-1]))
        rounds.append({name: both[1][name] / seconds for name, seconds in both[0].items()})
    for name in rounds[0]:
        print(f"{name:30s} {statistics.median(each[name] for each in rounds):.2f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
