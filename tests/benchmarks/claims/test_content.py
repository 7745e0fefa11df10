"""The claims themselves, on results that were made up: as the sources say, the other way round, and too noisy to tell.

An expected side that is the wrong way round fails here. What a source says is written a second time, as numbers: losses in bits
per byte beside 2.5, within 0.1 of it, and shares of right answers.
"""

import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from claims.base import CONFIRMED, REFUTED, UNDECIDED, list_claims
from claims.evidence import Evidence, Measured, NotRun
from claims.protocol import preset_of
from longitude.statistics.estimates import Sums
from longitude.study.criterion import Effective

LENGTHS = (128, 256, 512, 1024, 2048)
RISING = (0.0, 0.06, 0.08, 0.09, 0.1)
HOLDING = (0.0, -0.002, -0.004, -0.005, -0.005)
BELOW = tuple(x - 0.02 - 0.005 * i for i, x in enumerate(HOLDING))  # and further with the length


def by_length(
    losses: dict[str, tuple[float, ...]], study: str = "ladder-a", method: str | None = None, first: int = LENGTHS[0]
) -> dict[Measured, float]:
    return {
        Measured(study, label, length, method): loss
        for label, each in losses.items()
        for length, loss in zip((length for length in LENGTHS if length >= first), each, strict=False)
    }


RUNG = by_length(
    {
        "sinusoidal": RISING, "rope": RISING, "rope:base=72": RISING, "alibi": HOLDING, "fox": HOLDING,
        "clipped:max_distance=16": RISING, "clipped:max_distance=128": RISING,
        "kerple_log": BELOW, "sandwich": BELOW, "fire": BELOW,
    }
)  # fmt: skip
SHAW = {
    Measured("shaw", label, 128): loss for label, loss in (("shaw:values=false", 0.005), ("shaw", 0.01), ("t5", 0.005))
}
EARLY = {
    key: loss
    for method, losses in (("non-overlapping", (0.0, -0.02, -0.04)), ("sliding", (0.0, 0.003, 0.004)))
    for key, loss in by_length({"alibi": losses}, "early", method, first=256).items()
}
EXTENSION = {
    Measured("extension", label, length, method): loss
    for label in ("rope", "rope:base=72")
    for length in (256, 512, 1024)
    for method, loss in {
        "linear": 0.06,
        "ntk": 0.04,
        "yarn": 0.01,
        "linear-floor": 0.08,
        "ntk-book": 0.05,
        "longrope": -0.01,
    }.items()
} | {
    Measured("extension", "rope:base=72", 128): 0.005,
}
TABLES = {
    Measured("tables", "sinusoidal", 128): 0.0,
    Measured("tables", "learned", 128): 0.005,
    **{
        Measured("tables", label, length, "linear"): -0.02
        for label in ("sinusoidal", "learned")
        for length in (256, 512)
    },
}
TUNED = {
    Measured("fine-tuned", "rope:base=72,scaling=yarn,factor=4,original_max_length=128,beta_fast=5", 512): -0.02,
    Measured("fine-tuned", "rope:base=72,scaling=linear,factor=4", 512): 0.02,
    Measured("fine-tuned", "rope:base=72,scaling=ntk,factor=4", 512): 0.01,
    Measured("fine-tuned", "rope:base=72", 512): 0.01,
}
SHARES = (
    {Measured("copy", label, 18): 0.8 if label == "nope" else 0.3
     for label in ("nope", "sinusoidal", "rope", "alibi", "t5:max_distance=32")}
    | {Measured("copy-randomized", label, 18): 0.6 for label in ("sinusoidal", "rope", "alibi")}
    | {Measured("flip-flop-1", label, 40, method): 0.99 if label == "path" else 0.6
       for label in ("path", "rope", "fox") for method in ("forward", "sparse", "dense")}
    | {Measured("parity-1", "path", 40): 0.99, Measured("parity-1", "rope", 40): 0.6, Measured("parity-2", "rope", 40): 0.7}
    | {Measured("addition", label, length): 0.99 if label in ("abacus:max_start=16+fire", "coupled:max_start=16") else 0.6
       for label in ("nope", "fire", "abacus:max_start=16+fire", "coupled:max_start=16") for length in (5, 10)}
    | {Measured("recall", label, 64): 0.99 if label == "rope" else 0.4 for label in ("rope", "mamba2", "rwkv6", "retention")}
    | {Measured("recall", label, length): right
       for label, right in (("alibi", 0.9), ("alibi+hierarchical:window=16", 0.99)) for length in (64, 128)}
    | {Measured("lookback", "rope", 64): 0.99, Measured("lookback", "alibi", 64): 0.4}
)  # fmt: skip
TEMPERATURE = {
    Measured("temperature", label, length, method): loss
    for (label, method), losses in {
        ("nope", "non-overlapping"): RISING, ("nope", "temperatures"): BELOW, ("rope:base=72", "temperatures"): RISING,
    }.items()
    for length, loss in zip(LENGTHS, losses, strict=True)
}  # fmt: skip
LESS = (0.0, 0.03, 0.06, 0.075, 0.09)
BASE = by_length(
    {"rope": RISING, "rope:base=72": RISING, "rope:base=500": RISING, "rope:base=16": LESS, "rope:base=500000": LESS},
    "base",
)
STAGED = {
    Measured("staged", label, 512): -0.05
    for label in (
        "rope:base=518",
        "rope:base=72,scaling=linear,factor=4",
        "rope:base=72,scaling=ntk,factor=4",
        "rope:base=72,scaling=yarn,factor=4,original_max_length=128,beta_fast=5",
    )
} | {
    Measured(study, label, length): loss
    for study, label, loss in (
        ("staged", "rope:base=72", -0.02),
        ("staged-long", "rope:base=518", 0.02),
        ("staged-long", "rope:base=72", 0.02),
        ("mixed", "rope:base=518", 0.01),
    )
    for length in (128, 512, 1024)
}
GATES = {
    Measured("gates", label, length, method): loss
    for label, losses in (("rope:base=72", RISING), ("rope:base=72+attention:output_gate=true", BELOW))
    for length, loss in zip(LENGTHS, losses, strict=True)
    for method in (None, "yarn")
}
LOSSES = GATES | STAGED | SHAW | RUNG | EARLY | EXTENSION | TABLES | TUNED | TEMPERATURE | BASE
KEYS = {key: i for i, key in enumerate([*LOSSES, *SHARES])}
FIRST = {"early": "non-overlapping"}
"""The method of a study that stands for none."""


class World(Evidence):
    """Results of 3 seeds: what a statement reads is made up.

    turn: 1 for what the sources say; below 0, the other way round. noise: of the seeds, with the mean 0.
    """

    def __init__(self, turn: float, noise: float = 0.0) -> None:
        self.turn, self.noise = turn, noise

    def criterion(self, study: str) -> SimpleNamespace:
        """Other bases hold further than 10,000, or the other way round, or none can be told from the other."""

        def effective(labels: list[str]) -> Effective:
            further = (labels[0] != "rope") == (self.turn > 0)
            return Effective(192, 128, 512) if self.noise else Effective(*[192 if further else 144] * 3)

        run, finding = self.run(study), lambda label, length, method: label
        return SimpleNamespace(metric="mean", run=run, finding=finding, effective=effective)

    def run(self, study: str) -> SimpleNamespace:
        shape = {"reference": 128, "methods": ("non-overlapping",), "lengths": (128, 512)}
        return SimpleNamespace(study={"data": {"sha256": "made up"}}, untrained=lambda label: None, **shape)

    def bench(self, name: str) -> dict[str, Any]:
        """Full attention and Shaw's vectors take 100 times as long as others, and grow; or the other way round."""
        if name == "retrieval":
            return {"rows": self.answers()}
        if name == "attention":
            return {"rows": self.scores()}

        def row(name: str, context: int, **where: Any) -> dict[str, Any]:
            slow = (name in ("rope+attention", "attention", "shaw")) == (self.turn > 0)
            seconds, ratio = (100, 5.0) if slow else (1, 1.0)
            spread = 200 if self.noise else 0
            times = {"seconds": seconds, "seconds_low": seconds - spread, "seconds_high": seconds + spread}
            more = {
                "ratio": ratio,
                "ratio_low": ratio - spread,
                "ratio_high": ratio + spread,
                "against": "plain",
                "turns": 7,
            }
            return {"label" if context else "name": name, "context": context, **where, **times, **more}

        where = {"passed": "forward+backward", "backend": "table", "group": "hierarchical attention, 8192 and 16384"}
        mixers = ("rope+attention", "hierarchical", "mamba", "rwkv4", "mamba2", "rwkv6", "retention")
        lengths = [
            (each, length)
            for each in ("attention", "hierarchical", "t5", "shaw")
            for length in (2048, 4096, 8192, 16384)
        ]
        steps, passes = (
            [row(each, 32768) for each in mixers],
            [row(each, 0, length=length, **where) for each, length in lengths],
        )
        rows = steps if name == "decode" else passes
        return {"rows": rows, "machine": {"cpu": ""}, "made": ""}

    def answers(self) -> list[dict[str, Any]]:
        """Of three models the one of the lowest loss answers least, or most, of many or few questions."""
        losses = {"yarn": 1.0, "ntk": 1.2, "dynamic": 1.201}
        shares = (
            {"yarn": 0.5, "ntk": 0.5, "dynamic": 0.9} if self.turn > 0 else {"yarn": 0.9, "ntk": 0.5, "dynamic": 0.5}
        )
        scores = [{"length": 2048, "count": 4 if self.noise else 1000}]
        return [
            {
                "method": each,
                "steps": 0,
                "bits": {"2048": bits},
                "means": {"2048": {"value": shares[each]}},
                "scores": scores,
            }
            for each, bits in losses.items()
        ]

    def scores(self) -> list[dict[str, Any]]:
        """Scores fall by one from the first to the last octave of the distance with RoPE, and by nothing without; or rise."""
        return [
            {"label": label, "seed": seed, "shuffled": shuffled, "octaves": [[0.0, 1.0, 0.5, fall]] * 8}
            for label in ("rope", "rope:base=72", "nope")
            for shuffled in (False, True)
            for seed in range(3)
            for fall in [1.0 - (label != "nope") * self.turn + self.noise * (seed - 1) * (2 + len(label))]
        ]

    def sums(self, of: Measured) -> Sums:
        key = of if of in KEYS else of._replace(method=FIRST.get(of.study))
        if key not in KEYS:
            raise NotRun(f"nothing is made up for {of}")
        phase = 2 * math.pi * (KEYS[key] * 0.618 + np.arange(3) / 3)
        seeds = self.noise * np.cos(phase)
        if key in LOSSES:
            values = (2.5 + self.turn * LOSSES[key] + 1.5 * seeds)[:, None] * np.linspace(0.999, 1.001, 40)
        else:
            right = SHARES[key] if self.turn > 0 else 1 - SHARES[key]
            values = np.repeat((0.5 + seeds / 2 if self.noise else np.full(3, right))[:, None], 400, 1)
        return Sums((0, 1, 2), values, np.ones_like(values))


RUN = [claim for claim in list_claims() if claim.statements]


@pytest.mark.parametrize("claim", RUN, ids=lambda claim: claim.name)
@pytest.mark.parametrize(
    ("world", "verdict"), [(World(1), CONFIRMED), (World(-18), REFUTED), (World(1, noise=1), UNDECIDED)]
)
def test_verdicts(claim, world, verdict):
    judged = claim.judged(world)
    assert judged.verdict == verdict, [
        (statement.words, outcome) for statement, outcome in zip(claim.statements, judged.outcomes, strict=True)
    ]


@pytest.mark.parametrize("claim", RUN, ids=lambda claim: claim.name)
def test_what_a_claim_reads_is_in_its_preset(claim):
    for each in (each for statement in (*claim.statements, *claim.varied) for each in statement.reads):
        config = preset_of(each.study, {})
        assert each.label in config.encodings and each.length in config.test_lengths
        assert each.method is None or each.method in config.methods
