"""What of a generated token is operators that every model of Llama's shape calls, and what comes to it: printed as a table.

    python benchmarks/token_cost.py          # a minute; processor time of one thread

Generation is that of `make bench`: 128 tokens after 128, 4 layers of 256, one sequence and eight. The operators alone are the
linear maps, norms, attention with a bias over 192 keys, the MLP's product and sums of residuals, called one behind the other.
"""

import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch.profiler import ProfilerActivity, profile

from longitude.bench.clock import CLOCKS, interleaved
from longitude.bench.sweep import threads
from networks import HEADS, VOCABULARY, WIDTH, generating, of_ours, of_transformers

LENGTH, KEYS, TURNS = 128, 192, 9
LLAMA, OPERATORS = "transformers' Llama", "operators alone"


def operators(model: Any, batch: int) -> Callable[[], object]:
    """LENGTH steps of one token each, without a cache, checks, or anything else of a model's own."""
    head_dim = WIDTH // HEADS
    k, v = torch.randn(2, batch, HEADS, KEYS, head_dim)
    ids, bias = torch.zeros(batch, 1, dtype=torch.long), torch.randn(1, HEADS, 1, KEYS)

    def step() -> torch.Tensor:
        x = model.model.embed_tokens(ids)
        for block in model.model.layers:
            mixer, mlp, y = block.mixer, block.mlp, block.mixer_norm(x)
            q, _, _ = (project(y) for project in (mixer.q_proj, mixer.k_proj, mixer.v_proj))
            out = F.scaled_dot_product_attention(q.view(batch, HEADS, 1, head_dim), k, v, attn_mask=bias)
            x = x + mixer.o_proj(out.reshape(batch, 1, -1))
            y = block.mlp_norm(x)
            x = x + mlp.down(F.silu(mlp.gate(y)) * mlp.up(y))
        return model.lm_head(model.model.norm(x))

    return lambda: [step() for _ in range(LENGTH)]


def called(model: Any) -> int:
    """Operators of torch that a step behind LENGTH tokens calls, those inside of others not counted."""
    ids, mask = torch.zeros(1, LENGTH, dtype=torch.long), torch.ones(1, LENGTH + 1, dtype=torch.long)
    cache = model.eval()(input_ids=ids, use_cache=True).cache
    with profile(activities=[ProfilerActivity.CPU]) as seen:
        model(input_ids=ids[:, :1], attention_mask=mask, cache=cache, use_cache=True)
    return sum(event.name.startswith("aten::") and event.cpu_parent is None for event in seen.events() or ())


@torch.no_grad()
def main() -> int:
    for batch in (1, 8):
        prompt = torch.randint(VOCABULARY, (batch, LENGTH), generator=torch.Generator().manual_seed(0))
        models = {LLAMA: of_transformers("Llama", 2 * LENGTH)}
        models |= {label: of_ours(label, 2 * LENGTH) for label in ("rope", "alibi", "t5")}
        counts = {name: called(model) for name, model in models.items()} if batch == 1 else {}
        calls = {name: generating(model, prompt) for name, model in models.items()}
        calls[OPERATORS] = operators(models["alibi"], batch)
        with threads(1):
            timings = interleaved(calls, LLAMA, TURNS, CLOCKS["processor"])
        for name, timing in timings.items():
            ratio = 1.0 if timing.ratio is None else timing.ratio.median
            count = f", {counts[name]} operators" if name in counts else ""
            ms = 1e3 * timing.seconds.median / LENGTH
            print(f"batch {batch}  {name:22s} {ms:6.3f} ms a token, {ratio:.2f} of Llama's{count}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
