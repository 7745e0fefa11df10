"""Whether GPU kernels run here, by the environment and the GPU, and on which stream."""

from __future__ import annotations

import importlib.util
import os
import warnings
from collections.abc import Callable
from importlib.metadata import version

import torch

from longitude.errors import one_line_of


def switched_off() -> set[str]:
    """Backends after a minus in LONGITUDE_BACKENDS, such as "-triton,-table".

    ValueError for another form, and for `reference`, which supports what no other backend does.
    """
    named = os.environ.get("LONGITUDE_BACKENDS", "")
    switches = [name.strip() for name in named.split(",") if name.strip()]
    if any(not name.startswith("-") or name == "-reference" for name in switches):
        raise ValueError(
            "LONGITUDE_BACKENDS: expected backends to switch off, all but reference, each after a minus, such as "
            f"-triton,-table; got {named!r}"
        )
    return {name[1:] for name in switches}


def why_no_triton() -> str | None:
    """Why kernels in Triton cannot be loaded, and what to install; None if they can."""
    if importlib.util.find_spec("triton") is None:
        return "it needs the package triton: pip install 'longitude[gpu]'"
    return None


def why_not_on(device: torch.device, what: str, call: Callable[[], object]) -> str | None:
    """Try Triton's kernels in a small call: why they do not run on this GPU, with a warning; None if they do.

    ValueError while a CUDA graph is captured, in which nothing runs.
    """
    if captured(device):
        raise ValueError(
            f"{what}: expected a call before a CUDA graph is captured, as torch asks for, because the first compiles kernels and "
            "tries them; got the first one while capturing"
        )
    try:
        call()
        torch.cuda.synchronize(device)
    except Exception as error:
        where = f"{torch.cuda.get_device_name(device)} (torch {torch.__version__}, triton {version('triton')})"
        why = f"its kernels do not run on {where}: {type(error).__name__}: {one_line_of(error)}"
        warnings.warn(f"{what}: {why}; LONGITUDE_BACKENDS=-triton switches it off", stacklevel=3)
        return why
    return None


def captured(device: torch.device) -> bool:
    """Whether a CUDA graph captures calls on this device: nothing runs before its replay, and new tensors belong to it."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def stream_of(device: torch.device) -> int:
    """Handle of the device's current CUDA stream; 0 on other devices."""
    return torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0
