"""`longitude bench`."""

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import tyro

from longitude.bench.config import BenchConfig
from longitude.cli.shared import DONE, FAILURES, print_json

GROUPS = {
    "data": "encodings lengths backends batch heads kv_heads head_dim dtype passes",
    "timing": "threads cpu_time repeats no_memory",
}
EXAMPLES = """  longitude bench --encodings rope alibi t5 --lengths 1024 4096
  longitude bench --backends table reference --out runs/table.json"""


def bench(
    config: Annotated[BenchConfig, tyro.conf.arg(name="")],
    out: Path = Path("runs/bench.json"),
    json: bool = False,
) -> int:
    """Measure time and memory of encodings, beside PyTorch SDPA.

    Args:
        config: What to measure.
        out: The file of the JSON.
        json: Print the JSON instead of the table.
    """
    from longitude.bench.config import checked
    from longitude.runs.terminal import Progress

    config = checked(config)
    with Progress() as progress:
        progress.update("loading", 0)
        import transformers

        from longitude.bench import report
        from longitude.bench.sweep import sweep
        from longitude.report.table import show
        from longitude.runs.files import write_json

        transformers.utils.logging.set_verbosity_error()
        report.require_place(out)
        rows = sweep(config, progress)
    measured = report.document(asdict(config), report.PROTOCOL, rows=[asdict(row) for row in rows])
    out.parent.mkdir(parents=True, exist_ok=True)
    write_json(out, measured)
    if json:
        print_json(measured)
    else:
        show(*report.parts(rows), f"rows: {out}")
    return FAILURES if report.has_failed(rows) else DONE
