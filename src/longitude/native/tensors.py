"""What a kernel requires of tensors: plain memory, and dtypes and shapes that agree, because it reads by their sizes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn

from longitude.errors import UsageError

LITERALS = {"1": 1, "2": 2, "3": 3, "5": 5} | {
    name: getattr(torch, name) for name in ("float32", "uint8", "int32", "int64")
}


class Signature:
    """Dtypes and shapes of a kernel's tensors, which must agree.

    Args:
        kernel: Name of the kernel, for the message.
        shapes: Dtype and dimensions of each tensor, for example "float32 heads length". A name stands for the same dtype or size
            in all of them; "1|heads" means either.
        fits: Further condition of the dtypes and sizes by name.
        needs: The condition in words.
    """

    def __init__(
        self,
        kernel: str,
        shapes: Mapping[str, str],
        fits: Callable[[dict[str, Any]], bool] = lambda sizes: True,
        needs: str = "",
    ) -> None:
        self.kernel, self.fits, self.needs = kernel, fits, needs
        self.shapes = {name: [word.split("|") for word in shape.split()] for name, shape in shapes.items()}
        self.checked = lru_cache(4096)(self._checked)  # layers have the same shapes

    def require(self, tensors: Iterable[Tensor | None], **sizes: Any) -> None:
        """Raise unless the kernel can read the tensors.

        Args:
            tensors: The arguments in the order of the shapes; None is not checked.
            sizes: Dtypes and sizes that are known from elsewhere, by name.

        Raises:
            UsageError: A tensor has another dtype, shape or device than the tensors before it require.
        """
        of_tensors = [None if x is None else (x.dtype, x.device, x.shape) for x in tensors]
        self.checked(tuple(of_tensors), tuple(sizes.items()))

    def _checked(self, of_tensors: tuple[tuple | None, ...], sizes: tuple[tuple[str, Any], ...]) -> None:
        known, (_, first, _) = LITERALS | dict(sizes), next(x for x in of_tensors if x is not None)
        for (name, declared), of_tensor in zip(self.shapes.items(), of_tensors, strict=True):
            if of_tensor is None:
                continue
            dtype, device, shape = of_tensor
            agree = device == first and len(declared) == 1 + len(shape)
            if agree:
                for either, value in zip(declared, (dtype, *shape), strict=True):
                    for word in either:
                        # A growing cache has new lengths for each token: no function is called here.
                        if known.setdefault(word, value) == value:
                            break
                    else:
                        agree = False
                        break
            if not agree:
                used = [word for either in declared for word in either if word in known and word not in LITERALS]
                kind, *dimensions = map("|".join, declared)
                raise UsageError(
                    f"{self.kernel}, {name}",
                    f"{kind} [{', '.join(dimensions)}] with {', '.join(f'{word} = {known[word]}' for word in used)}, "
                    "all tensors on one device",
                    f"{list(shape)} of {dtype} on {device}",
                )
        if not self.fits(known):
            raise UsageError(self.kernel, self.needs, {name: known[name] for name in known.keys() - LITERALS.keys()})


def needs_operator(*tensors: Tensor | None) -> bool:
    """Whether a graph, a mode, a trace, a transform or a subclass of tensors need an operator: they have no plain memory."""
    if torch.compiler.is_compiling():
        return True
    if torch._C._len_torch_dispatch_stack() > 0 or torch._C._are_functorch_transforms_active():
        return True
    if torch._C._get_tracing_state() is not None:
        return True
    for x in tensors:  # noqa: SIM110 (every layer of a decoding step asks)
        if x is not None and (type(x) not in (Tensor, nn.Parameter) or x.is_neg()):
            return True
    return False


def in_memory(*tensors: Tensor) -> bool:
    """Whether C may read the tensors: they have memory on the CPU."""
    if needs_operator(*tensors):
        return False
    for x in tensors:  # noqa: SIM110 (as above)
        if not x.is_cpu:
            return False
    return True
