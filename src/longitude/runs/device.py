"""Which device computes. Importing this does not load torch."""

from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    import torch

Device = Literal["auto", "cpu", "cuda", "mps"]
"""auto: an accelerator where there is one."""


def device_of(name: str = "auto") -> "torch.device":
    """The device of an option --device. ValueError when this machine does not have it."""
    import torch

    available = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available(), "cpu": True}
    if name == "auto":
        name = next(each for each, there in available.items() if there)
    if not available.get(name):
        raise ValueError(f"--device {name}: this machine has none that torch {torch.__version__} can use; try cpu")
    return torch.device(name)
