"""Seconds that `import longitude`, and its first use, take beyond torch's own import: at most 0.3 each.

    python benchmarks/import_time.py [--repeats 9]

Each repeat is a fresh Python; the smallest is taken, because another program on the machine only adds to it. Exit code 1: a
budget is exceeded. tests/test_house.py counts the modules instead, which no busy machine changes.
"""

import argparse
import subprocess
import sys

BUDGET = 0.3
USES = {"import longitude": "", "first use": "lg.attend; lg.list_encodings()"}
PROGRAM = """
import torch, time
start = time.perf_counter()
import longitude as lg
{use}
print(time.perf_counter() - start)
"""


def seconds(use: str) -> float:
    command = [sys.executable, "-c", PROGRAM.format(use=use)]
    return float(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


def main() -> int:
    parser = argparse.ArgumentParser(description="Seconds of an import beyond torch's own.")
    parser.add_argument("--repeats", type=int, default=9, help="fresh processes for each; the smallest is taken")
    repeats = parser.parse_args().repeats
    least = {name: min(seconds(use) for _ in range(repeats)) for name, use in USES.items()}
    for name, found in least.items():
        print(f"{name:<17} {found:.3f} s of {BUDGET}")
    return int(max(least.values()) > BUDGET)


if __name__ == "__main__":
    sys.exit(main())
