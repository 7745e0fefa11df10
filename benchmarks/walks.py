"""How far data walks: Python calls and files of the package from a user's call to the kernel.

Calls of functions in src/longitude are counted by sys.setprofile, after one call of the same kind has filled what is made once.
What is wanted is advice: no test asks for it.
"""

import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import longitude as lg

SOURCE = str(Path(lg.__file__).parent)
WANTED = {
    "attend": (80, 8),
    "training step": (347, 22),
    "decoded token": (220, 20),
    "study, before its first model": (1000, 14),
}
"""Calls and files at most."""


class Reached(Exception):
    """The walk ends here."""


def walk(of: Callable[[], Any], until: str | None = None) -> tuple[Counter[str], Counter[str]]:
    """Calls of each function, and of each file, that `of` makes in the package; only those before the function `until`."""
    functions: Counter[str] = Counter()
    files: Counter[str] = Counter()

    def seen(frame: Any, event: str, _: Any) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(SOURCE):
            if until is not None and frame.f_code.co_qualname == until:
                raise Reached
            functions[frame.f_code.co_qualname.rsplit(".", 1)[-1]] += 1
            files[frame.f_code.co_filename.removeprefix(SOURCE + "/")] += 1

    sys.setprofile(seen)
    try:
        of()
    except Reached:
        pass
    finally:
        sys.setprofile(None)
    return functions, files


def attend() -> Callable[[], Any]:
    """One call with a bias and a window."""
    q, k, v = (torch.randn(1, 4, 64, 16, generator=torch.Generator().manual_seed(n)) for n in range(3))
    encoding, mask = lg.ALiBi(num_heads=4), lg.Window(16)
    return lambda: lg.attend(q, k, v, encoding=encoding, mask=mask)


def decoder(encoding: str, layers: int, hidden: int = 64, heads: int = 4) -> Any:
    torch.manual_seed(0)
    config = lg.LongitudeConfig(
        vocab_size=256, hidden_size=hidden, num_hidden_layers=layers, num_attention_heads=heads, intermediate_size=2 * hidden,
        max_position_embeddings=1024, encoding=encoding,
    )  # fmt: skip
    return lg.LongitudeForCausalLM(config)


def training_step() -> Callable[[], Any]:
    """Forward and backward of two layers with T5's bias."""
    model, ids = decoder("t5", 2).train(), torch.arange(64)[None]
    return lambda: model(input_ids=ids, labels=ids).loss.backward()


def decoding(model: Any, batch: int = 1, context: int = 64) -> Callable[[], Any]:
    """The next token behind a context of random keys and values; each call is one token further."""
    config, ids = model.config, torch.zeros(batch, 1, dtype=torch.long)
    shape = batch, config.num_key_value_heads, context, config.hidden_size // config.num_attention_heads
    layers, random = config.num_hidden_layers, torch.Generator().manual_seed(0)
    cache = lg.LongitudeCache(layers)
    model.eval()
    with torch.inference_mode():
        for layer in range(layers):
            cache.update(torch.randn(shape, generator=random), torch.randn(shape, generator=random), layer)

    def token() -> None:
        with torch.inference_mode():
            model(input_ids=ids, cache=cache)

    return token


def study() -> tuple[Counter[str], Counter[str]]:
    """`longitude study` up to its first model."""
    from longitude.study.config import StudyConfig
    from longitude.study.plan import plan
    from longitude.study.tasks.base import TASKS

    TASKS.load()

    with tempfile.TemporaryDirectory() as folder:
        return walk(lambda: plan(StudyConfig(), Path(folder) / "study"), until="LongitudeModel.__init__")


def walks() -> dict[str, tuple[Counter[str], Counter[str]]]:
    """Every walk that is counted, by name."""
    made = {"attend": attend(), "training step": training_step(), "decoded token": decoding(decoder("rope", 4))}
    counts = {}
    for name, of in made.items():
        of()
        counts[name] = walk(of)
    return counts | {"study, before its first model": study()}


def main() -> int:
    torch.set_num_threads(1)
    print(f"{'walk':<30} {'calls':>6} {'files':>6}   wanted (calls, files)")
    for name, (functions, files) in walks().items():
        print(f"{name:<30} {functions.total():>6} {len(files):>6}   {WANTED[name]}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
