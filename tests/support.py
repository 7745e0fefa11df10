"""What many test files share: closeness, random tensors that a seed decides, encodings with random parameters."""

import json
import re
import subprocess
import sys
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import import_module
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import longitude as lg
from longitude.attention.backends import BACKENDS
from longitude.attention.backends.table import band
from longitude.errors import UsageError
from longitude.positions.base import resolved
from longitude.positions.composed import compose

GENERAL = [name for name in BACKENDS if name not in ("transport", "split", "triton")]
"""Backends that take plain attention: the others need reflections, a pattern, 128 queries, a GPU."""
needs_c = pytest.mark.skipif(not band.available(torch.float32), reason="no C kernels here")
"""For tests of what the C kernels do. A test that asks for the backend `table` by name is skipped without it (conftest.py)."""


def close(got: Any, want: Any, atol: float = 1e-12, rtol: float = 0.0) -> None:
    """Equal up to rounding in float64, and of the same shape and dtype."""
    torch.testing.assert_close(got, want, atol=atol, rtol=rtol)


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    """Normal numbers of a shape, drawn in float64 so that every dtype sees the same ones."""
    generator = torch.Generator().manual_seed(seed)  # of the CPU, whatever the default device is
    return torch.randn(shape, generator=generator, dtype=torch.float64, device="cpu").to(dtype)


def golden(name: str) -> Any:
    """The tables of tests/golden/NAME.json."""
    return json.loads((Path(__file__).parent / "golden" / f"{name}.json").read_text())


def heads(
    length: int,
    batch: int = 2,
    num_heads: int = 4,
    num_kv_heads: int = 2,
    head_dim: int = 8,
    seed: int = 0,
    dtype: torch.dtype = torch.float64,
) -> tuple[Tensor, Tensor, Tensor]:
    """q [batch, num_heads, length, head_dim]; k, v [batch, num_kv_heads, length, head_dim]."""
    shapes = [(batch, h, length, head_dim) for h in (num_heads, num_kv_heads, num_kv_heads)]
    q, k, v = (random(*shape, seed=seed + n, dtype=dtype) for n, shape in enumerate(shapes))
    return q, k, v


def built(label: str, known: Mapping[str, int], seed: int = 0, dtype: torch.dtype = torch.float64) -> lg.Composed:
    """The encodings of "rope+fox", one from each name, with what is known of the model and uniform random parameters."""
    torch.default_generator.manual_seed(seed)
    known = {"layout": "half", **known}
    encoding = compose([lg.encoding(name, **resolved(name, {}, **known)) for name in label.split("+")]).to(dtype)
    for parameter in encoding.parameters():
        parameter.data.uniform_(0.1, 1.0)
    return encoding


def gradients(output: Tensor, inputs: list[Tensor], seed: int = 7) -> list[Tensor]:
    """Of inputs that require them, along one random direction of the output; zeros where nothing depends on an input."""
    direction = random(*output.shape, seed=seed, dtype=output.dtype).to(output.device)
    found = torch.autograd.grad((output * direction).sum(), inputs, allow_unused=True, retain_graph=True)
    return [torch.zeros_like(x) if grad is None else grad for x, grad in zip(inputs, found)]


def parameter_gradients(loss: Tensor, model: nn.Module) -> list[Tensor]:
    """Of every learned number, zero where the loss does not depend on it."""
    found = torch.autograd.grad(loss, list(model.parameters()), allow_unused=True, materialize_grads=True)
    return list(found)


class Reads(TorchDispatchMode):
    """Counts numbers that the host waits for, and all operations."""

    def __init__(self):
        super().__init__()
        self.count = self.operations = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        aten = torch.ops.aten
        self.count += function in (aten._local_scalar_dense.default, aten.nonzero.default, aten.equal.default)
        self.operations += 1
        return function(*args, **(kwargs or {}))


class LargestTensor(TorchDispatchMode):
    """Remembers the most memory, in elements, behind any tensor that an operation made inside."""

    elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for x in result if isinstance(result, tuple | list) else [result]:
            if isinstance(x, Tensor):
                self.elements = max(self.elements, x.untyped_storage().nbytes() // x.element_size())
        return result


PROSE = re.compile(r"[a-z]{2,},? [a-z]{2,}")


def require_words(message: str, *words: str) -> None:
    """The message has each of these key names and numbers, which are no prose."""
    for word in words:
        assert not PROSE.search(word), f"prose pins the wording: {word!r}"
        assert re.search(rf"(?<!\w){re.escape(word)}(?!\w)", message), f"expected {word!r} in {message!r}"


@contextmanager
def refused(*words: str, **fields: str) -> Iterator[pytest.ExceptionInfo[Any]]:
    """The block raises a ValueError whose message has these key names and numbers; with fields or no words, a UsageError.

    No prose: the wording of a message is tested once for its kind, in test_errors.py, so that it can be improved."""
    with pytest.raises(UsageError if fields or not words else ValueError) as caught:
        yield caught
    require_words(str(caught.value), *words)
    found = {name: getattr(caught.value, name) for name in fields}
    assert found == fields, f"expected the fields {fields}, got {found}"


def refused_calls(cases: Sequence[tuple[Any, ...]]) -> Callable[..., None]:
    """A test for each (call, *words): the call is refused with these words."""

    split = [(call, words) for call, *words in cases]

    @pytest.mark.parametrize(("call", "words"), split, ids=[" ".join(words) for _, words in split])
    def test(call: Callable[[], Any], words: list[str]) -> None:
        with refused(*words):
            call()

    return test


def printed(code: str) -> str:
    """What `code` prints in a Python of its own."""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def edit_config(folder: Path, **changes: Any) -> dict[str, Any]:
    """config.json with these keys, None to remove one, in place; what it has now."""
    file = folder / "config.json"
    keys = {key: value for key, value in (json.loads(file.read_text()) | changes).items() if value is not None}
    file.write_text(json.dumps(keys, indent=2))
    return keys


# ---- models of transformers, layer by layer --------------------------------------------------------------------------
def random_model(kind: type, config: Any, std: float = 0.1) -> nn.Module:
    """A model in eval mode whose parameters, biases and norms included, are moved by normal numbers."""
    torch.manual_seed(0)
    model = kind(config).eval()
    for parameter in model.parameters():
        parameter.data += std * torch.randn_like(parameter)
    return model


def recorded(model: nn.Module, outputs: str, last: str) -> dict[str, dict[str, Tensor]]:
    """Per attention layer, filled by each pass: outputs of some of its modules, and "mixed", the input of its last projection.

    [B, L, ...], joined over the passes, so that tokens decoded with a cache read as a whole sequence."""
    seen: dict[str, dict[str, Tensor]] = defaultdict(dict)

    def keep(layer: str, name: str, x: Tensor) -> None:
        seen[layer][name] = torch.cat([seen[layer][name], x], 1) if name in seen[layer] else x

    for name, module in model.named_modules():
        layer, _, own = name.rpartition(".")
        if own in outputs.split():
            module.register_forward_hook(lambda _, __, out, at=(layer, own): keep(*at, out))
        if own == last:
            module.register_forward_pre_hook(lambda _, given, at=layer: keep(at, "mixed", given[0]))
    return seen


def in_pieces(model: Any, ids: Tensor, cuts: Sequence[int], **inputs: Tensor) -> Tensor:
    """Logits of tokens [B, L] in pieces up to each cut, with a cache. inputs: of all tokens, of a mask those so far."""
    cache, parts = None, []
    for start, stop in pairwise((0, *cuts)):
        named = {name: x[:, :stop] if name == "attention_mask" else x[:, start:stop] for name, x in inputs.items()}
        out = model(ids[:, start:stop], cache=cache, use_cache=True, **named)
        cache = out.cache
        parts.append(out.logits)
    return torch.cat(parts, 1)


def by_head(x: Tensor, count: int) -> Tensor:
    """[B, L, count * head_dim] -> [B, count, L, head_dim]."""
    return x.unflatten(-1, (count, -1)).transpose(1, 2)


def from_fla(module: str, name: str) -> Any:
    """A reference function of flash-linear-attention, which warns of all that it lacks when it is imported."""
    pytest.importorskip("triton", "3.4", reason="flash-linear-attention needs it, on Linux")
    pytest.importorskip("fla", reason="flash-linear-attention, of Linux, is not installed")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return getattr(import_module(f"fla.ops.{module}"), name)
