"""How far data walks: Python calls and files of the package from a user's call to the kernel, and the time of a decoded token.

    python benchmarks/walks.py [--json] [--no-times]

Calls of functions in src/longitude are counted by sys.setprofile, after one call of the same kind has filled what is made once.
A decoded token's time is compared with a stock Llama of the same shape, token by token in turns. Exit code 1: a walk is longer
than wanted (times are shown and do not count, because a busy machine changes them).
"""

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import longitude as lg

SOURCE = str(Path(lg.__file__).parent)
NAMED = ("choose", "cheapest", "refuses", "spans", "raw_request", "require_causal", "length_parts", "prepare")
"""Functions whose calls are told one by one."""
WANTED = {  # calls counted before the house was redrawn, then what is wanted: (calls, files), None: no more than before
    "attend": ((170, 15), (170, 8)),
    "training step": ((473, 22), (473, 22)),
    "decoded token": ((433, None), (433, None)),
    "study, before its first model": ((None, 27), (None, 14)),
}


class Found(Exception):
    """The walk ends here."""


def walk(of: Callable[[], Any], until: str | None = None) -> tuple[Counter[str], Counter[str]]:
    """Calls of each function, and of each file, that `of` makes in the package; only those before the function `until`."""
    functions: Counter[str] = Counter()
    files: Counter[str] = Counter()

    def seen(frame: Any, event: str, _: Any) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(SOURCE):
            if until is not None and frame.f_code.co_qualname == until:
                raise Found
            functions[frame.f_code.co_qualname.rsplit(".", 1)[-1]] += 1
            files[frame.f_code.co_filename.removeprefix(SOURCE + "/")] += 1

    sys.setprofile(seen)
    try:
        of()
    except Found:
        pass
    finally:
        sys.setprofile(None)
    return functions, files


def attend() -> Callable[[], Any]:
    """One call with a bias and a window."""
    q, k, v = (torch.randn(1, 4, 64, 16, generator=torch.Generator().manual_seed(n)) for n in range(3))
    encoding, mask = lg.ALiBi(num_heads=4), lg.Window(16)
    return lambda: lg.attend(q, k, v, encoding=encoding, mask=mask)


def decoder(encoding: str, layers: int, hidden: int = 64) -> Any:
    torch.manual_seed(0)
    config = lg.LongitudeConfig(
        vocab_size=256, hidden_size=hidden, num_hidden_layers=layers, num_attention_heads=4, intermediate_size=2 * hidden,
        max_position_embeddings=1024, encoding=encoding,
    )  # fmt: skip
    return lg.LongitudeForCausalLM(config)


def training_step() -> Callable[[], Any]:
    """Forward and backward of two layers with T5's bias."""
    model, ids = decoder("t5", 2).train(), torch.arange(64)[None]
    return lambda: model(input_ids=ids, labels=ids).loss.backward()


def decoding(model: Any, batch: int = 1, past: int = 64) -> Callable[[], Any]:
    """The next token, with a cache; each call is one token further."""
    from transformers import DynamicCache

    cache, ids = DynamicCache(config=model.config), torch.arange(past).expand(batch, -1) % 256
    model.eval()
    with torch.inference_mode():
        model(input_ids=ids, past_key_values=cache)

    def token() -> None:
        with torch.inference_mode():
            model(input_ids=ids[:, -1:], past_key_values=cache)

    return token


def study() -> tuple[Counter[str], Counter[str]]:
    """`longitude study` up to its first model."""
    from longitude.study.config import StudyConfig
    from longitude.study.plan import plan
    from longitude.study.tasks.base import TASKS

    TASKS.load()

    with tempfile.TemporaryDirectory() as folder:
        return walk(lambda: plan(StudyConfig(), Path(folder) / "study"), until="LongitudeModel.__init__")


def llama(layers: int, hidden: int) -> Any:
    """A stock model of the same shape."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=256, hidden_size=hidden, num_hidden_layers=layers, num_attention_heads=4, intermediate_size=2 * hidden,
        max_position_embeddings=1024, tie_word_embeddings=True,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def token_times(layers: int, hidden: int, batch: int, turns: int = 40, tokens: int = 10) -> tuple[float, float]:
    """CPU seconds of a decoded token of ours and of a stock Llama: medians over blocks of tokens, in turns."""
    both = decoding(decoder("rope", layers, hidden), batch), decoding(llama(layers, hidden), batch)
    times: tuple[list[float], list[float]] = [], []
    for turn in range(turns):
        for which in (0, 1) if turn % 2 else (1, 0):
            both[which]()
            start = time.process_time()
            for _ in range(tokens):
                both[which]()
            times[which].append((time.process_time() - start) / tokens)
    return statistics.median(times[0][3:]), statistics.median(times[1][3:])


def walks() -> dict[str, tuple[Counter[str], Counter[str]]]:
    """Every walk that is counted, by name."""
    made = {"attend": attend(), "training step": training_step(), "decoded token": decoding(decoder("rope", 4))}
    found = {}
    for name, of in made.items():
        of()
        found[name] = walk(of)
    return found | {"study, before its first model": study()}


def main() -> int:
    parser = argparse.ArgumentParser(
        description="Calls and files of the walks that matter, and a decoded token's time."
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument("--no-times", action="store_true", help="count only")
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows, longer = [], False
    for name, (functions, files) in walks().items():
        before, wanted = WANTED[name]
        counted = functions.total(), len(files)
        longer = longer or any(most is not None and got > most for got, most in zip(counted, wanted, strict=True))
        named = {function: functions[function] for function in NAMED if functions[function]}
        rows.append(
            {"walk": name, "calls": counted[0], "files": counted[1], "before": before, "wanted": wanted, **named}
        )
    times = []
    for layers, hidden, batch in () if options.no_times else ((4, 64, 1), (4, 64, 4), (4, 256, 1), (4, 256, 4)):
        ours, stock = token_times(layers, hidden, batch)
        times.append({"layers": layers, "hidden": hidden, "batch": batch, "ours": ours, "llama": stock})
    if options.json:
        print(json.dumps({"walks": rows, "times": times}, indent=1))
        return int(longer)
    print(f"{'walk':<30} {'calls':>6} {'files':>6}   before (calls, files), wanted (calls, files)")
    for row in rows:
        named = ", ".join(f"{function} {row[function]}" for function in NAMED if function in row)
        print(f"{row['walk']:<30} {row['calls']:>6} {row['files']:>6}   {row['before']}, {row['wanted']}; {named}")
    for row in times:
        shape = f"{row['layers']} layers of {row['hidden']}, batch {row['batch']}"
        print(
            f"decoded token, {shape:<24} {row['ours'] * 1e3:.3f} ms, stock Llama {row['llama'] * 1e3:.3f} ms: "
            f"{row['ours'] / row['llama']:.2f} of it, wanted 1.0"
        )
    return int(longer)


if __name__ == "__main__":
    sys.exit(main())
