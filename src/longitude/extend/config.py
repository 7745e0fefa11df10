"""What is extended, and how: the options of `longitude extend` and their checks. Importing this loads neither torch nor
transformers.
"""

from dataclasses import dataclass
from pathlib import Path

from longitude.errors import unknown

METHODS = ("linear", "ntk", "dynamic", "ntk-by-parts", "yarn", "longrope", "llama3", "base")
LAYOUTS = ("half", "interleaved")
POSITIONS = ("contiguous", "randomized", "skipped")
FARTHEST = 2**24
"""transformers counts positions in float32, which holds every whole number up to here and not beyond."""


@dataclass(frozen=True, kw_only=True)
class ExtendConfig:
    """A checkpoint for longer texts: what changes, and where the numbers come from."""

    to: int | None = None
    """The length, in tokens, that it shall take."""
    method: str | None = None
    """linear, ntk, dynamic, ntk-by-parts, yarn, longrope, llama3 or base; a learned table is stretched with linear."""
    factor: float | None = None
    """Factor of the scheme; by default --to over the original length. Llama 3.1 has 8 from 8192 to 131072."""
    base: float | None = None
    """With --method base: the new base of the frequencies (rope_theta), such as 500000."""
    original: int | None = None
    """The length it was trained at, where its configuration does not say it; needed to extend what is extended already."""
    convert_layout: str | None = None
    """half or interleaved: the rotary layout to bring the weights into, from the other one."""
    text: str = "stdlib"
    """Text of the measured cost: a file, a folder, datasets:NAME, or the sources of Python's standard library."""
    no_measure: bool = False
    """Leave out the measured cost: no model is loaded, and the tokenizer may be missing."""
    budget: float = 4.0
    """With --method longrope: minutes to search, in all; 32 candidates are tried at least, however long they take."""
    seed: int = 0
    """Of the search and of fine-tuning."""
    fine_tune: str | None = None
    """Text to train on after extending, full or with --lora: a file, a folder, stdlib or datasets:NAME. Without --to, MODEL is
    trained as it is."""
    steps: int | None = None
    """With --fine-tune: how many."""
    lora: bool = False
    """With --fine-tune: train low-rank matrices only (peft), merged at the end."""
    positions: str = "contiguous"
    """With --fine-tune: where positions of a window come from: contiguous, or randomized or skipped over the whole length."""
    window: int | None = None
    """With --fine-tune: tokens of a window; by default the new length, with other positions the original one."""
    batch: int = 1
    """With --fine-tune: windows per step on each device."""
    learning_rate: float = 2e-5
    """With --fine-tune: after 5 % of the steps, in which it rises."""
    gradient_checkpointing: bool = False
    """With --fine-tune: less memory, a third more time."""
    dry_run: bool = False
    """Print what would change, and write nothing."""
    allow_pickle: bool = False
    """Take weights that are saved as a pickle, which can run code as it is read; they are written as safetensors."""


def checked(config: ExtendConfig) -> ExtendConfig:
    """The configuration after every check that needs no model. ValueError for the user."""
    if config.convert_layout is not None and config.convert_layout not in LAYOUTS:
        raise unknown("layout", config.convert_layout, LAYOUTS, "--convert-layout takes one of them.")
    if not config.budget > 0:
        raise ValueError(f"--budget: expected minutes above 0, got {config.budget}")
    if config.convert_layout is not None and config.to is not None:
        raise ValueError(
            "--convert-layout changes the weights and --to the configuration: expected one of them, got both"
        )
    check_fine_tuning(config)
    if config.to is None:
        if config.convert_layout is None and config.fine_tune is None:
            raise ValueError("expected --to, the length in tokens, and --method; got neither --to nor --convert-layout")
        for name in ("method", "factor", "base", "original"):
            if getattr(config, name) is not None:
                raise ValueError(f"--{name} is about the length: expected --to beside it, got none")
        return config
    if not 1 <= config.to <= FARTHEST:
        raise ValueError(
            f"--to: expected a length of 1 to {FARTHEST} tokens, got {config.to}; beyond, transformers' float32 positions "
            f"are no whole numbers"
        )
    if config.method is None:
        raise ValueError(f"expected --method beside --to, got none; there are: {', '.join(METHODS)}")
    if config.method not in METHODS:
        raise unknown("method", config.method, METHODS, f"--method takes one of: {', '.join(METHODS)}.")
    if config.base is not None and config.method != "base":
        raise ValueError(f"--base is the new base of --method base, got it with --method {config.method}")
    if config.base is not None and not config.base > 1:
        raise ValueError(f"--base: expected a number above 1, got {config.base}")
    if config.factor is not None and not config.factor > 1:
        raise ValueError(
            f"--factor: expected more than 1, got {config.factor}; a factor below one would shorten the context"
        )
    if config.factor is not None and config.method in ("base", "longrope"):
        raise ValueError(f"--factor is none of --method {config.method}'s; leave it out")
    if config.original is not None and config.original < 2:
        raise ValueError(f"--original: expected a length of 2 or more tokens, got {config.original}")
    return config


def check_fine_tuning(config: ExtendConfig) -> None:
    """ValueError for options of --fine-tune without it, or wrong ones."""
    default = ExtendConfig()
    if config.fine_tune is None:
        for name in ("steps", "lora", "positions", "window", "batch", "learning_rate", "gradient_checkpointing"):
            if getattr(config, name) != getattr(default, name):
                raise ValueError(
                    f"--{name.replace('_', '-')} is about fine-tuning: expected --fine-tune TEXT beside it, got none"
                )
        return
    if config.convert_layout is not None:
        raise ValueError("--convert-layout goes without --fine-tune; convert first, then fine-tune what was written")
    if config.steps is None or config.steps < 1:
        raise ValueError(f"--fine-tune: expected --steps of 1 or more, got {config.steps or 'none'}")
    if config.positions not in POSITIONS:
        raise unknown("positions", config.positions, POSITIONS, "--positions takes one of them.")
    if config.batch < 1 or not config.learning_rate > 0:
        raise ValueError(
            f"--fine-tune: expected --batch of 1 or more and --learning-rate above 0, got {config.batch} and "
            f"{config.learning_rate}"
        )


def require_out(out: Path, model: str) -> None:
    """ValueError unless `out` is a new folder outside of the model's: better now than after minutes of work."""
    import os

    if out.exists() or out.is_symlink():
        raise ValueError(f"--out {out} exists already, and nothing is written over; name another")
    folder = Path(model).expanduser()
    if folder.is_dir() and out.absolute().resolve().is_relative_to(folder.resolve()):
        raise ValueError(f"--out {out} lies inside the model's own folder {model}; name one outside of it")
    parent = out.absolute().parent
    while not parent.exists():
        parent = parent.parent
    if not parent.is_dir() or not os.access(parent, os.W_OK):
        raise ValueError(f"--out {out}: {parent} is not a directory that can be written to; choose another --out")
