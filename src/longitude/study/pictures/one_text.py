"""The figure of one text under every model of a study, colored by loss."""

import math
from collections.abc import Iterator

from longitude.report import passage
from longitude.report.figure import Figure
from longitude.report.wording import papers
from longitude.study.analysis import Analysis
from longitude.study.pictures import PICTURES


@PICTURES.register("one-text")
def one_text(analysis: Analysis) -> Iterator[Figure]:
    """One text under the first seed of each label, as far as its window was measured."""
    run = analysis.run
    names, panels = papers(run.labels), {}
    for label in run.labels:
        done = next((trial for trial in run.of(label) if trial.status == "done"), None)
        if done and done.window is not None:
            bits = done.window["nats"].to_numpy() / math.log(2)
            panels[names[label]] = passage.Panel([*done.window["text"]], bits, run.train_length, label)
    if panels:
        longest = max(len(panel.pieces) for panel in panels.values())
        caption = f"One held-out text of {longest:,} {run.task.unit}, of median compressed size. Models: the first seed of each."
        yield passage.figure(passage.Passage(caption=caption, unit=run.task.unit.removesuffix("s"), panels=panels))
