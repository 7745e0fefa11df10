"""Writes contextual.json: attention as independent implementations compute it, inputs and outputs as numbers.

pip install torch einops flash-linear-attention x-transformers
python tests/golden/make_contextual.py
"""

from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType

import tables
import torch
import torch.nn.functional as F
from tables import listed
from torch import Tensor
from x_transformers.x_transformers import CoPE, DataDependentAlibi

LENGTH, HEADS, KV_HEADS, WIDTH = 9, 2, 1, 3
CHUNK = 4


def naive(operation: str) -> ModuleType:
    """A naive form of flash-linear-attention, by its file: the package itself wants triton."""
    package = find_spec("fla")
    assert package is not None and package.submodule_search_locations is not None
    path = Path(package.submodule_search_locations[0]) / "ops" / operation / "naive.py"
    spec = spec_from_file_location(f"naive_{operation}", path)
    assert spec is not None and spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def numbers(*shape: int) -> Tensor:
    return tables.numbers(*shape, seed=sum(shape))


def gated() -> dict:
    """q, k, v, w [tokens, heads, width], b and the logarithms g of the gates [tokens, heads] -> output [tokens, heads, width]."""
    q, k = numbers(1, LENGTH, HEADS, WIDTH), numbers(1, LENGTH, KV_HEADS, WIDTH)
    v, w = numbers(1, LENGTH, KV_HEADS, WIDTH).flip(1), F.normalize(numbers(1, LENGTH, KV_HEADS, WIDTH).flip(3), dim=-1)
    b = 2 * torch.sigmoid(numbers(1, LENGTH, KV_HEADS))
    g = F.logsigmoid(1 + numbers(1, LENGTH, HEADS))
    scale = WIDTH**-0.5
    path = naive("path_attn").naive_path_attn
    outs = {
        "path": path(q, k, v, w, b, torch.zeros_like(g), scale, CHUNK),
        "path_fox": path(q, k, v, w, b, g, scale, CHUNK),
        "fox": naive("forgetting_attn").naive_forgetting_attn(q, k, v, g, scale),
    }
    columns = {"q": q, "k": k, "v": v, "w": w, "b": b, "g": g}
    return {name: listed(x[0]) for name, x in (columns | outs).items()}


def forgetting() -> dict:
    """Tokens x [tokens, dim] -> G_i - G_j [heads, tokens, tokens]."""
    gate, x = DataDependentAlibi(dim=5, heads=HEADS), numbers(1, LENGTH, 5)
    weight, bias = numbers(HEADS, 5), numbers(HEADS)
    with torch.no_grad():
        gate.to_forget_gates[0].weight.copy_(weight)
        gate.to_forget_gates[0].bias.copy_(bias)
        return {"x": listed(x[0]), "weight": listed(weight), "bias": listed(bias), "difference": listed(gate(x)[0])}


def counted() -> dict:
    """q, k [heads, tokens, width] and a table [width, positions] -> what is added to the scaled scores, 0 in the future."""
    places = 4
    cope, q, k = CoPE(WIDTH, HEADS, places), numbers(1, HEADS, LENGTH, WIDTH), numbers(1, HEADS, WIDTH, LENGTH).mT
    table = numbers(places, WIDTH)
    ahead = torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1)
    scores = (q @ k.mT * WIDTH**-0.5).masked_fill(ahead, -torch.finfo(torch.float32).max)
    with torch.no_grad():
        cope.pos_emb.copy_(table)
        added = cope(q, scores).masked_fill(ahead, 0)
    return {"q": listed(q[0]), "k": listed(k[0].contiguous()), "table": listed(table.mT), "added": listed(added[0])}


if __name__ == "__main__":
    tables.save(
        "contextual",
        "torch flash-linear-attention x-transformers",
        gated=gated(),
        forgetting=forgetting(),
        counted=counted(),
    )
