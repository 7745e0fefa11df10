"""`longitude extend`."""

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from longitude.cli.shared import DONE, changed, print_json
from longitude.errors import UsageError, Within, check_bounds

TARGET = ("to", "method", "factor", "base", "original")
"""Options that describe an extension."""
ALL = "all"
"""The method that compares the others."""
COMPARES = "it compares methods and writes nothing; choose one of them first"


@dataclass(frozen=True, kw_only=True)
class ExtendOptions:
    """A checkpoint for longer texts: what changes, and where the numbers come from.

    Args:
        to: The new length in tokens.
        method: linear, ntk, dynamic, ntk-by-parts, yarn, longrope, llama3, drope, base, all or another registered RoPE scaling
            method. all compares the methods that need neither training nor a search on MODEL, by position, and writes nothing.
        factor: Factor of the RoPE scaling method; by default --to over the original length. Llama 3.1 has 8 from 8192 to
            131072.
        base: With --method base: the new base of the frequencies (rope_theta), such as 500000.
        original: The training length, if the configuration does not contain it; needed for a model that is already extended.
        text: Text of the measured cost: a file, a folder, datasets:NAME, or the sources of Python's standard library.
        cost_minutes: Minutes for the measured cost, about, of both models, or of all methods: with more of them longer windows
            and more text are read.
        no_measure: Leave out the measured cost: no model is loaded, and the tokenizer may be missing.
        budget: With --method longrope: minutes to search, in all; 32 candidates are tried at least, however long they take.
        seed: Seed for the search and for fine-tuning.
        fine_tune: Text to train on after extending, full or with --lora: a file, a folder, stdlib or datasets:NAME. Without
            --to, MODEL is trained as it is.
        steps: With --fine-tune: how many.
        lora: With --fine-tune: train low-rank matrices only (peft), merged at the end.
        positions: With --fine-tune: where positions of a window come from: contiguous, or randomized or skipped over the whole
            length.
        window: With --fine-tune: tokens of a window; by default the new length, with other positions or --method drope the
            original one.
        batch: With --fine-tune: windows per step.
        learning_rate: With --fine-tune: after 5% of the steps, in which it rises.
        gradient_checkpointing: With --fine-tune: less memory, a third more time.
        dry_run: Print what would change, and write nothing.
        for_: Write nothing; print the line by which this engine serves the original weights at the new length. A config.json is
            enough, and --method is yarn by default.
    """

    to: int | None = None
    method: str | None = None
    factor: Annotated[float | None, Within(above=1)] = None
    base: float | None = None
    original: Annotated[int | None, Within(2)] = None
    text: str = "stdlib"
    cost_minutes: Annotated[float, Within(above=0)] = 1.0
    no_measure: bool = False
    budget: Annotated[float, Within(above=0)] = 4.0
    seed: int = 0
    fine_tune: str | None = None
    steps: Annotated[int | None, Within(1)] = None
    lora: bool = False
    positions: Literal["contiguous", "randomized", "skipped"] = "contiguous"
    window: int | None = None
    batch: Annotated[int, Within(1)] = 1
    learning_rate: Annotated[float, Within(above=0)] = 2e-5
    gradient_checkpointing: bool = False
    dry_run: bool = False
    for_: Literal["vllm", "sglang", "llama.cpp", "transformers", "mlx"] | None = None

    def check(self) -> None:
        """ValueError for options that exclude each other."""
        check_bounds(self)
        self._require("--to, the new length", self.to, ("method", "factor", "base", "original"))
        tuning = ("steps", "lora", "positions", "window", "batch", "learning_rate", "gradient_checkpointing")
        self._require("--fine-tune TEXT", self.fine_tune, tuning)
        if self.to is None and self.fine_tune is None:
            raise ValueError("expected --to, the length in tokens, and --method; got neither --to nor --fine-tune")
        if self.to is not None and self.method is None:
            raise ValueError("expected --method with --to, got none; `longitude extend --help` lists the methods")
        searches = self.method not in (None, ALL) and _method(str(self.method)).searched
        self._require("a method that searches, such as longrope", searches or None, ("budget",))
        self._require("--fine-tune or a method that searches", searches or self.fine_tune or None, ("seed",))
        self._require("a measured cost, without --no-measure", not self.no_measure or None, ("text", "cost_minutes"))
        if self.method == ALL and (refused := changed(self, ("fine_tune", "base", "no_measure", "dry_run"))):
            raise UsageError("--method all", "no option but those of measuring", refused[0], COMPARES)
        if self.fine_tune is not None and self.steps is None:
            raise UsageError("--fine-tune", "--steps, how many to train", "none")

    def chosen(self, *names: str) -> dict[str, Any]:
        """These options by name."""
        return {name: getattr(self, name) for name in names}

    def _require(self, what: str, value: Any, names: tuple[str, ...]) -> None:
        if value is None and (needy := changed(self, names)):
            raise ValueError(f"{needy[0]} needs {what}, got none")


def _method(name: str) -> Any:
    from longitude.positions.scaling.base import method_of  # it loads torch

    return method_of(name)


GROUPS = {
    "method": "to method factor base original budget seed",
    "evaluation": "text cost_minutes no_measure",
    "training": "fine_tune steps lora positions window batch learning_rate gradient_checkpointing",
    "execution": "dry_run for_",
}
EXAMPLES = """  longitude extend models/llama --to 1024 --method yarn --out models/llama-yarn
  longitude extend models/llama/config.json --to 131072 --for vllm"""


def extend(
    model: Annotated[str, tyro.conf.Positional],
    config: Annotated[ExtendOptions, tyro.conf.arg(name="")],
    out: Path | None = None,
    json: bool = False,
) -> int:
    """Write a checkpoint for longer texts; show changes and the cost on short ones.

    Args:
        model: Folder of a Hugging Face checkpoint, or a name on the hub.
        config: How.
        out: Folder of the new checkpoint; it must not exist. By default one in runs/extend, named after the model, the
            method and the length.
        json: Print JSON instead of tables.
    """
    if config.for_ is not None:
        return _print_line(model, config, out, json)
    config.check()
    if not model:
        raise ValueError("expected MODEL, the folder of a checkpoint or a name on the hub, got an empty one")
    if config.method == ALL and out is not None:
        raise UsageError("--method all", "no --out", f"--out {out}", COMPARES)
    if config.method == ALL:
        return _compare(model, config, json)
    if out is None and not config.dry_run:
        out = place_of(model, config)
    if out is not None:
        require_new(out, model)
    from longitude.runs.terminal import Progress

    with Progress() as bar:
        bar.update("reading the checkpoint", 0)
        return _extend(model, config, out, json, bar)


def _print_line(model: str, config: ExtendOptions, out: Path | None, json: bool) -> int:
    """The line of an engine, and no more."""
    check_bounds(config)
    others = [option.name for option in fields(config) if option.name not in (*TARGET, "for_")]
    if refused := ["--out"] * (out is not None) + changed(config, others):
        raise UsageError("--for", f"no option but {', '.join(f'--{name}' for name in TARGET)}", refused[0])
    if config.to is None:
        raise UsageError("--for", "--to, the length in tokens", "none")
    from longitude.extend.plan import Target
    from longitude.extend.serve import line_for

    chosen = {name: value for name, value in config.chosen(*TARGET).items() if value is not None}
    line = line_for(str(config.for_), model, Target(**{"method": "yarn", **chosen}))
    print_json({"engine": config.for_, "line": line}) if json else print(line)
    return DONE


def _compare(model: str, config: ExtendOptions, json: bool) -> int:
    """Compare the methods on a checkpoint. The results are kept beside the default place until all are there."""
    from longitude.extend import compare, show
    from longitude.extend.units import working
    from longitude.report.table import show as display
    from longitude.runs.terminal import Progress

    assert config.to is not None  # `check` has asked for it
    minutes = config.cost_minutes
    with Progress() as bar:
        bar.update("reading the checkpoint", 0)
        chosen = compare.candidates(model, config.to, config.factor, config.original)
        with working(place_of(model, config)) as store:
            how: dict[str, Any] = {"text": config.text, "minutes": minutes}
            comparison = compare.compare(chosen, store, **how, on_progress=bar.update, on_note=bar.note)
    if json:
        print_json(show.comparison_json(comparison))
    else:
        display(*show.comparison_parts(comparison))
    return DONE


def _extend(model: str, config: ExtendOptions, out: Path | None, json: bool, bar: Any) -> int:
    from longitude.extend import extend, fine_tune, serve, show
    from longitude.report.table import show as display

    calls: dict[str, Any] = {"on_progress": bar.update, "on_note": bar.note}
    written = None if config.dry_run else out
    text = None if config.no_measure else config.text
    tuning = None if config.fine_tune is None else _tuning(config) | calls
    plan = training = None
    costs: list[Any] = []
    if config.to is not None:
        extension = extend(
            model,
            written,
            text=text,
            minutes=config.cost_minutes,
            train=tuning,
            on_plan=lambda plan: display(*([] if json else show.plan_parts(plan))),
            **calls | config.chosen(*TARGET, "budget", "seed"),
        )
        plan, training, costs = extension.plan, extension.training, extension.costs
    elif written is not None and tuning is not None:
        training = fine_tune(Path(model), out=written, cost_text=text, minutes=config.cost_minutes, **tuning)
        costs = training.costs
    if json:
        print_json(show.as_json(plan, training, costs, None if written is None else str(written)))
        return DONE
    if training is not None:
        display(show.training_line(training))
    for cost in costs:
        display(*show.cost_parts(cost))
    if written is not None:
        display(f"\nwritten: {written}", *(serve.terminal(plan, str(written)) if plan else ()))
    else:
        display("\nnothing was written (--dry-run)")
    return DONE


def _tuning(config: ExtendOptions) -> dict[str, Any]:
    """Options of `fine_tune`."""
    names = ("steps", "lora", "positions", "batch", "learning_rate", "gradient_checkpointing", "seed")
    return {"text": str(config.fine_tune), "length": config.window, **config.chosen(*names)}


def place_of(model: str, config: ExtendOptions) -> Path:
    """Default folder of the new checkpoint, without --out. An existing folder raises an error; it is not overwritten."""
    parts = [Path(model).resolve().name, config.method, config.to]
    parts += ["tuned"] * (config.fine_tune is not None)
    return Path("runs/extend") / "-".join(str(word) for word in parts if word is not None)


def require_new(out: Path, model: str) -> None:
    """ValueError unless `out` is a new folder outside of the model's."""
    from longitude.runs.files import require_writable

    if out.exists() or out.is_symlink():
        raise ValueError(f"--out {out} exists already, and nothing is written over; name another")
    folder = Path(model).expanduser()
    if folder.is_dir() and out.absolute().resolve().is_relative_to(folder.resolve()):
        raise ValueError(f"--out {out} is inside the model's own folder {model}; name one outside of it")
    require_writable(out)
