"""`longitude extend`."""

from contextlib import nullcontext
from pathlib import Path
from typing import Annotated, Any

import tyro

from longitude.cli.shared import DONE, print_json, stderr_console
from longitude.extend.config import ExtendConfig


def extend(
    model: Annotated[str, tyro.conf.Positional],
    config: Annotated[ExtendConfig, tyro.conf.arg(name="")],
    out: Path | None = None,
    json: bool = False,
) -> int:
    """Write a checkpoint that takes longer texts, for plain transformers; say what changed and what short texts pay.

    Args:
        model: Folder of a Hugging Face checkpoint, or a name on the hub.
        config: How.
        out: Folder of the new checkpoint; it must not exist.
        json: Print JSON instead of tables.
    """
    from longitude.extend.config import checked, require_out

    config = checked(config)
    if not model:
        raise ValueError("expected MODEL, the folder of a checkpoint or a name on the hub, got an empty one")
    if out is None and not config.dry_run:
        raise ValueError("expected --out, the folder of the new checkpoint (or --dry-run), got none")
    if out is not None:
        require_out(out, model)
    console = stderr_console()
    with console.status("reading the checkpoint") if console.is_terminal else nullcontext():
        from longitude.extend import show
        from longitude.extend.run import ExtendPlan, run
        from longitude.runs.files import is_first_process

    def say(plan: ExtendPlan) -> None:
        if not json:
            _print(show.parts(plan))

    with _Bar(console) as bar:
        outcome = run(model, config, out, say, bar, bar.note)
    if not is_first_process():
        return DONE
    if json:
        print_json(show.as_json(outcome, out))
    else:
        _print(show.results(outcome, config, out))
    return DONE


def _print(parts: Any) -> None:
    from rich.console import Console

    console = Console()
    if not console.is_terminal:  # a file has no margin to wrap at
        console = Console(width=200)
    for part in parts:
        console.print(part, highlight=False, markup=False, soft_wrap=not hasattr(part, "columns"))


class _Bar:
    """A progress bar that tells what is done, on a terminal."""

    def __init__(self, console: Any):
        from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

        columns = (TextColumn("{task.description}"), BarColumn(), TimeRemainingColumn())
        self.bar = Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
        self.tasks: dict[str, Any] = {}

    def __enter__(self) -> "_Bar":
        self.bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.bar.stop()

    def note(self, sentence: str) -> None:
        self.bar.console.print(sentence, highlight=False, markup=False)

    def __call__(self, what: str, done: float, total: float) -> None:
        if what not in self.tasks:
            for task in self.tasks.values():
                self.bar.update(task, visible=False)
            self.tasks[what] = self.bar.add_task(what)
        self.bar.update(self.tasks[what], completed=done, total=total)
