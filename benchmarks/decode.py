"""The cost of a generated token after a long context: time of a step and bytes of the cache, for each mixer in a small decoder.

    python benchmarks/decode.py [--contexts 512 1024 ...] [--mixers all] [--out FILE.json]

Mixers are named by labels as a study names its models: rope+window:size=64, mamba, mamba+attention. Every cache is filled by a
chunked prefill, the way a prompt fills it.
"""

from __future__ import annotations

import copy
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

import longitude as lg
from fill_numbers import protocol
from longitude.attention.mixer import list_mixers
from longitude.bench import report
from longitude.bench.measurement import CLOCKS, Clock, interleaved
from longitude.labels import parse_label
from longitude.measure.config import check_ascending, check_each_once
from longitude.report.table import markdown
from longitude.runs.files import write_json
from longitude.runs.machine import threads
from longitude.runs.terminal import Progress
from longitude.testing.mixers import bytes_held
from networks import HEADS, LAYERS, VOCABULARY, WIDTH
from target import Session, parser

CHUNK = 512
"""Tokens of one call of the prefill."""
GROWTHS = ("O(1)", "O(log N)", "O(N)")
TURNS = 5
"""A step of decoding is short: this many turns for each of --repeats."""
LABELS = {"attention": "rope+attention", "window": "window:size=512", "chunks": "chunks:size=512"}
"""Labels of mixers that need more than their name."""
PROTOCOL = (
    f"A decoder of {LAYERS} layers, {WIDTH} wide, random weights, float32, one sequence. Each cache is filled by a prefill in "
    f"chunks of {CHUNK} tokens. Each turn takes one step, a token in and logits out, with every label behind every context, in "
    "one process; the first turn is not counted, and a turn makes each context one token longer. seconds: the median of a step. "
    "ratio: to the step of the same label behind `against` tokens in the same turn, its median and quartiles over turns. "
    "cache_bytes: the memory behind every tensor of the cache, spare capacity included, before the first step. growth: of the "
    "cache with the tokens N, as the mixers declare it, the steepest of a hybrid."
)


def configuration(label: str, longest: int) -> lg.LongitudeConfig:
    """Of a decoder of 4 layers, 256 wide. ValueError for a label that means none."""
    return lg.LongitudeConfig(
        vocab_size=VOCABULARY, hidden_size=WIDTH, num_hidden_layers=LAYERS, num_attention_heads=HEADS,
        max_position_embeddings=longest, **parse_label(label).options(LAYERS),
    )  # fmt: skip


class Decoder:
    """Such a decoder with random weights, and tokens for it."""

    def __init__(self, label: str, longest: int):
        torch.manual_seed(0)
        self.label, self.config = label, configuration(label, longest)
        self.model: Any = lg.LongitudeForCausalLM(self.config).eval()
        self.mixers = [block.mixer for block in self.model.model.layers]
        self.ids = torch.randint(VOCABULARY, (1, longest), generator=torch.Generator().manual_seed(0))

    @property
    def growth(self) -> str:
        return max((mixer.growth for mixer in self.mixers), key=GROWTHS.index)

    @torch.no_grad()
    def filled(
        self, contexts: Sequence[int], clock: Clock = time.perf_counter
    ) -> Iterator[tuple[lg.LongitudeCache, float]]:
        """For each context, ascending: a cache of its own that holds it, and the seconds since the one before."""
        cache, past = lg.LongitudeCache([mixer.cache_layer() for mixer in self.mixers]), 0
        for context in contexts:
            start = clock()
            for a in range(past, context, CHUNK):
                self.model.model(self.ids[:, a : min(a + CHUNK, context)], cache=cache, use_cache=True)
            spent, past = clock() - start, context
            yield copy.deepcopy(cache), spent

    def step(self, cache: lg.LongitudeCache) -> Callable[[], object]:
        """One more token, and the logits of the next."""
        token = self.ids[:, :1]
        return torch.no_grad()(lambda: self.model(token, cache=cache, use_cache=True).logits)


def all_labels() -> list[str]:
    """Every mixer, with the positions that it takes by itself."""
    return [LABELS.get(name, name) for name in list_mixers()]


def decode(labels: Sequence[str], contexts: Sequence[int], session: Session) -> dict[str, list[dict[str, Any]]]:
    """Measure -> lines, one per label, and rows, one per label and context. Every turn takes one step with each."""
    clock, turns = CLOCKS[session.clock], TURNS * session.repeats
    against = 1024 if 1024 in contexts else contexts[0]
    decoders = {label: Decoder(label, contexts[-1] + turns + 1) for label in labels}
    steps, rows = {}, {}
    for label, decoder in decoders.items():
        for context, (cache, seconds) in zip(contexts, decoder.filled(contexts, clock), strict=True):
            steps[label, context] = decoder.step(cache)
            held = bytes_held(cache.layers)
            rows[label, context] = {"cache_bytes": held, "bytes_per_token": held / context, "prefill": seconds}
            session.on_progress(f"prefill of {context}: {label}")
    # Every step follows one of another model, so that none finds its weights in the processor's caches and others do not.
    order = [(label, context) for context in contexts for label in labels]
    name = lambda case: f"{case[0]} behind {case[1]}"  # noqa: E731
    baselines = {name(case): name((case[0], against)) for case in order}
    timings = interleaved({name(case): steps[case] for case in order}, baselines, turns, clock, session.on_progress)
    protocol = {"against": str(against), "threads": session.threads, "clock": session.clock, "turns": turns}
    for label, context in rows:
        fields = {"label": label, "context": context, "ratio": None, "ratio_low": None, "ratio_high": None}
        rows[label, context] |= fields | timings[name((label, context))] | protocol
    return {"lines": [{"label": label, "growth": decoders[label].growth} for label in labels], "rows": [*rows.values()]}


def table(measured: dict[str, Any]) -> str:
    """A token at the context length that ratios are to, and at the longest; as docs/mixers.md has it."""
    rows = {(row["label"], row["context"]): row for row in measured["rows"]}
    near, far = int(measured["rows"][0]["against"]), max(row["context"] for row in measured["rows"])
    lines = []
    for line in measured["lines"]:
        first, last = rows[line["label"], near], rows[line["label"], far]
        times = [f"{row['seconds'] * 1e3:.2f}" for row in (first, last)]
        megabytes = f"{last['cache_bytes'] / 1e6:.3g}"
        lines.append([f"`{line['label']}`", line["growth"], *times, f"{last['ratio']:.2f}", megabytes])
    headings = ["mixer", "cache", f"ms at context {near}", f"ms at context {far}", "ratio", f"MB of cache at {far}"]
    return f"{markdown(headings, lines)}\n\n{protocol(measured)}"


def main() -> int:
    options = parser(__doc__, "-decode")
    options.add_argument(
        "--contexts", type=int, nargs="+", default=[2**n for n in range(9, 16)], help="tokens, ascending"
    )
    options.add_argument("--mixers", nargs="+", default=all_labels(), help="labels; by default every mixer")
    asked = options.parse_args()
    check_ascending("--contexts", asked.contexts, 1)
    check_each_once("--mixers", asked.mixers)
    report.require_place(asked.out)
    total = len(asked.mixers) * len(asked.contexts) * (TURNS * asked.repeats + 2)
    with threads(asked.threads) as count, Progress(total=total) as progress:
        clock = "processor" if asked.cpu_time else "wall"
        session = Session(count, clock, asked.repeats, on_progress=progress.advance)
        steps = decode(asked.mixers, asked.contexts, session)
    options = {"mixers": asked.mixers, "contexts": asked.contexts, "repeats": asked.repeats}
    measured = report.document(options, PROTOCOL, **steps)
    write_json(asked.out, measured)
    print(table(measured))
    return 0


if __name__ == "__main__":
    sys.exit(main())
