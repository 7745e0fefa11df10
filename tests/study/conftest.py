"""A run directory as a study leaves it, with numbers that look like a study's, made without training anything."""

import json
import math
from collections.abc import Callable
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest

from longitude.measure import Row, default_bins, interval, write_rows
from longitude.study.config import StudyConfig
from longitude.study.labels import safe

BITS = {  # bits per byte at 256, 512, 1024, 2048, 4096; None: not measured at that length
    "none": (2.82, 2.88, 3.06, 3.42, 3.95),
    "sinusoidal": (2.91, 3.20, 3.55, 3.80, 3.95),
    "rope": (2.60, 2.65, 2.90, 3.30, 3.70),
    "alibi": (2.55, 2.53, 2.52, 2.52, 2.52),
    "t5": (2.56, 2.55, 2.57, 2.60, 2.64),
    "learned": (2.66, None, None, None, None),
    "fire": (2.60, 2.60, 2.61, 2.62, 2.64),
}


def write_run(
    path: Path,
    bits: dict[str, tuple[float | None, ...]] = BITS,
    *,
    seeds: tuple[int, ...] = (0,),
    documents: int = 24,
    lengths: tuple[int, ...] = (256, 512, 1024, 2048, 4096),
    train_length: int = 256,
    methods: tuple[str, ...] = ("non-overlapping", "per-position"),
    states: dict[tuple[str, int], dict] | None = None,
    spread: float = 0.12,
    noise: float = 0.02,
    source: str = "standard library of Python 3.11.2",
) -> Path:
    """states: (label, seed) -> what differs in status.json; spread: of documents, common to all labels and lengths;
    noise: of every document at every length."""
    config = StudyConfig(
        encodings=tuple(bits), seeds=seeds, test_lengths=lengths, train_length=train_length, methods=methods,
        documents=documents, steps=200, batch_size=16,
    )  # fmt: skip
    random = np.random.default_rng(0)
    common = random.normal(0, spread, documents)
    path.mkdir(parents=True, exist_ok=True)
    rows: list[Row] = []
    for label, values in bits.items():
        for seed in seeds:
            folder = path / "cells" / f"{safe(label)}-{seed}"
            folder.mkdir(parents=True)
            status = {
                "status": "done", "label": label, "seed": seed, "encoding": label, "step": config.steps,
                "steps": config.steps, "reason": None, "parameters": 1_085_000, "training_seconds": 43.2,
                "measuring_seconds": 12.9,
            } | (states or {}).get((label, seed), {})  # fmt: skip
            (folder / "status.json").write_text(json.dumps(status))
            (folder / "losses.jsonl").write_text("".join(_losses(config, values, status["step"], random)))
            if status["status"] != "done":
                continue
            sums = _sums(config, label, seed, values, common, noise, random)
            columns = ["label", "seed", "method", "length", "document", "nats", "tokens", "bytes"]
            frame = pd.DataFrame(sums, columns=columns)
            frame.to_parquet(folder / "documents.parquet", index=False)
            rows += _rows(config, label, seed, frame, values)
    write_rows(rows, path / "results.parquet")
    study = {
        "schema": 1,
        "begun": "2026-01-31T12:00:00+00:00",
        "versions": {"python": "3.11.2", "longitude": "0.1.0", "torch": "2.13.0+cpu", "accelerate": None},
        "commit": "0123456789abcdef0123456789abcdef01234567",
        "machine": {"system": "Linux x86_64", "cpu": "A processor", "cores": 2, "threads": 2, "gpu": None},
        "continued": [],
        "configuration": json.loads(json.dumps(asdict(config))),
        "data": {
            "source": source, "sha256": "ab" * 32, "bytes": 12_345_678, "documents": 590,
            "left_out": "tests", "unit": "documents", "training_documents": 500, "training_bytes": 10_000_000,
            "training_documents_too_short": 66, "validation_documents": documents, "validation_bytes": 98_304,
            "validation_names": [f"module_{i}.py" for i in range(documents)],
        },
    }  # fmt: skip
    (path / "study.json").write_text(json.dumps(study))
    return path


def _losses(config, values, steps, random):
    floor = (values[0] or 2.6) * math.log(2)
    for step in range(1, steps + 1):
        loss = floor + 3.4 * math.exp(-step / 28) + 0.4 * math.exp(-step / 90) + random.normal(0, 0.04)
        tokens = step * config.batch_size * config.train_length
        yield json.dumps({"step": step, "loss": loss, "learning_rate": 1e-3, "tokens": tokens}) + "\n"


def _sums(config, label, seed, values, common, noise, random):
    own = random.normal(0, noise / 2)
    for method in ("non-overlapping", "sliding"):
        if method not in config.methods:
            continue
        for length, bits in zip(config.test_lengths, values, strict=True):
            if bits is None:
                continue
            for document, shift in enumerate(common):
                size = config.longest * (1 + document % 3)
                each = bits + shift + own + random.normal(0, noise) - 0.05 * (method == "sliding")
                yield label, seed, method, length, document, each * math.log(2) * size, size, size


def _rows(config, label, seed, frame, values):
    shared = {"task": "text", "encoding": label, "label": label, "seed": seed, "train_length": config.train_length}
    shared |= {"metric": "bits_per_byte", "weighting": "token", "bos": "none", "dtype": "float32", "backend": "auto"}
    for (method, length), group in frame.groupby(["method", "length"], sort=False):
        value, low, high = interval(group["nats"], group["bytes"])
        yield Row(**shared, method=method, length=length, window=length, value=value, low=low, high=high)
    longest = config.test_lengths[-1]
    if "per-position" not in config.methods or values[-1] is None:
        return
    for start, stop in pairwise(default_bins(longest)):
        past = max(0.0, math.log2((start + stop) / 2 / config.train_length + 1) - 0.6) if start else 0.0
        bits = values[0] + 3.5 / (start + 1) ** 0.6 + (values[-1] - values[0]) * past / 2
        yield Row(
            **shared, method="per-position", length=longest, window=longest, position_from=start, position_to=stop,
            value=bits, low=bits - 0.06, high=bits + 0.06,
        )  # fmt: skip


@pytest.fixture(scope="session")
def synthetic() -> SimpleNamespace:
    """The builder and its numbers: synthetic.write(path, bits, ...) -> path."""
    write: Callable[..., Path] = write_run
    return SimpleNamespace(write=write, bits=BITS)
