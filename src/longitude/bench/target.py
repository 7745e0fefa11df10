"""What a target is: a number that some measurements must not exceed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from longitude.bench import memory
from longitude.bench.cases import AttentionShape, Case, Inputs, ours, plain
from longitude.bench.clock import CLOCKS, interleaved
from longitude.bench.peers import Peer, installed
from longitude.bench.rows import FAILED, Row, sized, timed

USUAL_TURNS = 7


@dataclass(frozen=True)
class Session:
    """How the targets are measured, the same for all of them.

    repeats: 7 gives each target the turns that it asks for, 14 twice as many. shrink: lengths are divided by it, to try
    everything out. say: told what happens.
    """

    threads: int
    clock: str = "wall"
    repeats: int = USUAL_TURNS
    memory: bool = True
    peers: bool = True
    shrink: int = 1
    say: Callable[[str], None] = field(default=lambda words: None, compare=False)

    def told(self) -> dict[str, Any]:
        """What another process is told of it: all that JSON can say."""
        return {field.name: getattr(self, field.name) for field in fields(self) if field.name != "say"}

    def turns(self, asked: int) -> int:
        return max(1, round(asked * self.repeats / USUAL_TURNS))

    def work(self, length: int, batch: int = 1, heads: int = 8, head_dim: int = 64) -> AttentionShape:
        return AttentionShape(batch, heads, heads, head_dim, max(16, length // self.shrink))

    def compare(
        self,
        cases: Mapping[str, tuple[str, str, Callable[[], object]]],
        against: str | Mapping[str, str],
        work: AttentionShape,
        passed: str,
        turns: int,
        what: str = "attention",
        score: Callable[[str, float], float] | None = None,
    ) -> list[Row]:
        """Time cases in turn: name -> (kind, backend, call). against: the case that ratios are to, or one for each.

        score: what of a name and its ratio the target limits; by default the ratio.
        """
        calls = {name: call for name, (_, _, call) in cases.items()}
        count = self.turns(turns)
        timings = interleaved(
            calls, against, count, CLOCKS[self.clock], lambda name: self.say(f"{passed} at {work.length}: {name}")
        )
        protocol = {"work": what, "passed": passed, "threads": self.threads, "clock": self.clock, "turns": count}
        rows = []
        for name, (kind, backend, _) in cases.items():
            base = against if isinstance(against, str) else against.get(name, name)
            fields = timed(timings[name], base)
            if score is not None and "ratio" in fields:
                fields["score"] = score(name, fields["ratio"])
            rows.append(Row(name=name, kind=kind, backend=backend, **protocol, **sized(work), **fields))
        return rows

    def attention(
        self, labels: list[str], work: AttentionShape, passed: str, turns: int, beside: tuple[str, ...] = ()
    ) -> list[Row]:
        """Encodings and the peers of these names over plain causal attention."""
        inputs, backward = Inputs.of(work), passed != "forward"
        made = [plain(inputs), *(ours(label, "auto", inputs, backward) for label in labels)]
        made += [peer.case(inputs) for peer in self.peers_of(beside, work)]
        return self.compare(called(made, backward), "plain", work, passed, turns)

    def peers_of(self, names: tuple[str, ...], work: AttentionShape) -> list[Peer]:
        """The installed ones of these names that fit into memory."""
        here = installed() if self.peers else {}
        found = [here[name] for name in names if name in here]
        return [peer for peer in found if peer.bytes(work) < memory.available()]


def called(cases: list[Case], backward: bool) -> dict[str, tuple[str, str, Callable[[], object]]]:
    """As `compare` takes them."""
    kinds = {case.name: "peer" if case.peer else "plain" if case.name == "plain" else "ours" for case in cases}
    return {case.name: (kinds[case.name], case.backend, case.step(backward)) for case in cases}


@dataclass(frozen=True)
class Target:
    """A name, what may not be exceeded, and how it is measured.

    measure: session -> rows; those of kind "ours" count, each by its `score`, by default its ratio. of: what the number is
    a multiple of, in words. environment: variables that a process of its own is started with.
    """

    name: str
    limit: float
    of: str
    measure: Callable[[Session], list[Row]]
    environment: Mapping[str, str] = field(default_factory=dict)

    def rows(self, session: Session) -> list[Row]:
        """Its measurements; a note instead of numbers where something raised."""
        try:
            found = self.elsewhere(session) if self.environment else self.measure(session)
        except Exception as error:
            reason = f"{FAILED}: {type(error).__name__}: {(str(error).splitlines() or ['no message'])[0]}"
            empty = {"work": "", "passed": "", **sized(session.work(16)), "turns": 0}
            found = [
                Row(name=self.name, kind="ours", backend="", note=reason, threads=session.threads,
                    clock=session.clock, **empty)
            ]  # fmt: skip
        return [Row(**{**asdict(row), "group": self.name}) for row in found]

    def elsewhere(self, session: Session) -> list[Row]:
        """Measured in a process of its own, with its environment."""
        question = json.dumps({"target": self.name, "session": session.told()})
        command = [sys.executable, "-m", "longitude.bench.targets", question]
        done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, **self.environment})
        if done.returncode:
            raise RuntimeError((done.stderr.strip().splitlines() or [f"code {done.returncode}"])[-1])
        return [Row(**row) for row in json.loads(done.stdout)]

    def outcome(self, rows: list[Row]) -> dict[str, Any]:
        """What came of it: measured is the worst of ours."""
        scored = [(score_of(row), row) for row in rows if row.kind == "ours" and score_of(row) is not None]
        measured, worst = max(scored, key=lambda pair: pair[0] or 0.0, default=(None, None))
        return {
            "name": self.name,
            "limit": self.limit,
            "of": self.of,
            "measured": measured,
            "met": None if measured is None else measured <= self.limit,
            "worst": None if worst is None else f"{worst.name}, {short(worst.passed)}, {worst.length}",
            "environment": dict(self.environment),
            "how": " ".join((self.measure.__doc__ or "").split()),
        }


def short(passed: str) -> str:
    """The name of a pass, for narrow places."""
    return {"forward": "fwd", "forward+backward": "fwd+bwd"}.get(passed, passed)


def score_of(row: Row) -> float | None:
    return row.ratio if row.score is None else row.score
