"""A target is a number that some measurements must not exceed; a set of them is measured by one command."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import date
from pathlib import Path
from typing import Any

import transformers

from fill_numbers import RESULTS, promises
from longitude.bench import report
from longitude.bench.cases import PLAIN, AttentionShape, Case, Inputs, ours, plain
from longitude.bench.measurement import CLOCKS, FAILED, Row, interleaved
from longitude.errors import one_line_of
from longitude.runs.files import write_json
from longitude.runs.machine import available_memory, threads, version_of
from longitude.runs.terminal import Progress
from peers import PEERS, Peer, installed

USUAL_TURNS = 7
Call = tuple[str, str, Callable[[], object]]
"""kind ("plain", "ours" or "peer"), backend, and what is timed."""


@dataclass(frozen=True)
class Session:
    """How targets are measured, the same for all of them.

    repeats: 7 gives each target its own number of turns, 14 twice as many. shrink: lengths are divided by it, to try everything
    out. on_progress: called with what is measured now.
    """

    threads: int
    clock: str = "wall"
    repeats: int = USUAL_TURNS
    memory: bool = True
    peers: bool = True
    shrink: int = 1
    on_progress: Callable[[str], object] = field(default=lambda text: None, compare=False)

    def as_json(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "on_progress"}

    def turns(self, usual: int) -> int:
        return max(1, round(usual * self.repeats / USUAL_TURNS))

    def shape(self, length: int, batch: int = 1, heads: int = 8, head_dim: int = 64) -> AttentionShape:
        return AttentionShape(batch, heads, heads, head_dim, max(16, length // self.shrink))

    def compare(
        self,
        calls: Mapping[str, Call],
        against: str | Mapping[str, str],
        shape: AttentionShape,
        passed: str,
        turns: int,
        work: str = "attention",
        score: Callable[[float], float] | None = None,
    ) -> list[Row]:
        """Time calls in turns. against: the name that ratios are to, or one for each. score: what of a ratio is limited."""
        steps, turns = {name: call for name, (_, _, call) in calls.items()}, self.turns(turns)
        title = f"{passed} at {shape.length}"
        timings = interleaved(
            steps, against, turns, CLOCKS[self.clock], lambda name: self.on_progress(f"{title}: {name}")
        )
        rows = []
        for name, (kind, backend, _) in calls.items():
            fields = timings[name]
            if score is not None and "ratio" in fields:
                fields["score"] = score(fields["ratio"])
            rows.append(self.row(name, kind, shape, work, passed, backend=backend, turns=turns, **fields))
        return rows

    def row(self, name: str, kind: str, shape: AttentionShape, work: str, passed: str, **fields: Any) -> Row:
        protocol = {"threads": self.threads, "clock": self.clock, "backend": "auto", "turns": 1} | asdict(shape)
        return Row(name=name, kind=kind, work=work, passed=passed, **(protocol | fields))

    def attention(
        self, labels: list[str], shape: AttentionShape, passed: str, turns: int, peers: tuple[str, ...] = ()
    ) -> list[Row]:
        """Encodings and the peers of these names over plain causal attention."""
        inputs, backward = Inputs.of(shape), passed != "forward"
        cases = [plain(inputs), *(ours(label, "auto", inputs, backward) for label in labels)]
        cases += [peer.case(inputs) for peer in self.peers_of(peers, shape)]
        return self.compare(calls_of(cases, backward), PLAIN, shape, passed, turns)

    def peers_of(self, names: tuple[str, ...], shape: AttentionShape) -> list[Peer]:
        """The installed ones of these names that fit into memory."""
        here = installed() if self.peers else {}
        return [here[name] for name in names if name in here and here[name].bytes(shape) < available_memory()]


def calls_of(cases: list[Case], backward: bool) -> dict[str, Call]:
    """As `compare` takes them."""
    return {case.name: (case.kind, case.backend, case.step(backward)) for case in cases}


@dataclass(frozen=True)
class Target:
    """A name, what may not be exceeded, and how it is measured.

    measure: session -> rows; those of kind "ours" count, each by its `score`, by default its ratio. of: what the number is
    a multiple of. environment: variables that a process of its own is started with.
    """

    name: str
    limit: float
    of: str
    measure: Callable[[Session], list[Row]]
    environment: Mapping[str, str] = field(default_factory=dict)

    def rows(self, session: Session) -> list[Row]:
        """Its measurements; a note instead of numbers where something raised."""
        try:
            rows = self._in_a_process(session) if self.environment else self.measure(session)
        except Exception as error:
            note = f"{FAILED}: {type(error).__name__}: {one_line_of(error)}"
            rows = [session.row(self.name, "ours", session.shape(16), "", "", backend="", turns=0, note=note)]
        return [replace(row, group=self.name) for row in rows]

    def _in_a_process(self, session: Session) -> list[Row]:
        """Measured by the same command in a process of its own, with its environment."""
        command = [sys.executable, str(Path(__file__).with_name("targets.py")), "--only", self.name]
        command += ["--session", json.dumps(session.as_json())]
        done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, **self.environment})
        if done.returncode:
            raise RuntimeError((done.stderr.strip().splitlines() or [f"code {done.returncode}"])[-1])
        return [Row(**row) for row in json.loads(done.stdout)]

    def outcome(self, rows: list[Row]) -> dict[str, Any]:
        """Compared with its limit: measured is the worst of ours."""
        scored = [(score, row) for row in rows if row.kind == "ours" and (score := score_of(row)) is not None]
        measured, worst = max(scored, key=lambda pair: pair[0], default=(None, None))
        return {
            "name": self.name,
            "limit": self.limit,
            "of": self.of,
            "measured": measured,
            "met": None if measured is None else measured <= self.limit,
            "worst": None if worst is None else f"{worst.name}, {report.short(worst.passed)}, {worst.length}",
            "environment": dict(self.environment),
        }


def score_of(row: Row) -> float | None:
    return row.ratio if row.score is None else row.score


# ---- the command -----------------------------------------------------------------------------------------------------
def parser(description: str | None, name: str) -> argparse.ArgumentParser:
    """Options of every command that times: where to, how often, by which clock."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    place = RESULTS / f"{date.today()}{name}.json"
    parser.add_argument("--out", type=Path, default=place, help="the JSON")
    parser.add_argument("--threads", type=int, help="of torch; by default one per core")
    parser.add_argument(
        "--cpu-time", action="store_true", help="processor seconds: for a busy machine, with --threads 1"
    )
    parser.add_argument("--repeats", type=int, default=USUAL_TURNS, help="7: each its usual turns; 14: twice as many")
    return parser


def main(targets: Sequence[Target], description: str | None, name: str) -> int:
    """Measure a set of targets, write them with a chart, and print the table. name: the end of the file's name."""
    options = parser(description, name)
    options.add_argument("--only", metavar="NAME", default="", help="the targets whose name begins like this")
    options.add_argument("--shrink", type=int, default=1, help="divide all lengths by it, to try everything out")
    options.add_argument("--session", type=json.loads, help=argparse.SUPPRESS)
    asked = options.parse_args()
    transformers.utils.logging.set_verbosity_error()
    targets = [target for target in targets if target.name.startswith(asked.only)]
    if asked.session:  # of another process: rows to standard output
        with threads(asked.session["threads"]):
            print(json.dumps([asdict(row) for target in targets for row in target.measure(Session(**asked.session))]))
        return 0
    report.require_place(asked.out)
    rows, outcomes = [], []
    with threads(asked.threads) as count, Progress(total=len(targets)) as progress:
        clock = "processor" if asked.cpu_time else "wall"
        session = Session(count, clock, asked.repeats, shrink=asked.shrink)
        for n, target in enumerate(targets):
            start, name = time.monotonic(), target.name
            session = replace(session, on_progress=lambda text, n=n, name=name: progress.update(f"{name}: {text}", n))
            measured = target.rows(session)
            rows += measured
            outcomes.append(target.outcome(measured) | {"took": round(time.monotonic() - start, 1)})
            measured = outcomes[-1]["measured"]
            progress.note(f"{target.name}: <= {target.limit:.2f}, measured {measured and round(measured, 2)}")
    documented = [asdict(row) for row in rows]
    measured = report.document(session.as_json(), report.PROTOCOL, targets=outcomes, rows=documented)
    measured["versions"] |= {peer.package: version_of(peer.package) for peer in PEERS}
    write_json(asked.out, measured)
    print("\n".join([promises(measured), *report.remarks(rows)]))
    return int(report.has_failed(rows))
