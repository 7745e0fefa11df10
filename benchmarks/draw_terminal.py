"""docs/terminal.svg: the terminal of `longitude study` in 15 seconds, from a recording, results/DATE-study-terminal.json.

python benchmarks/draw_terminal.py     # record again, with tmux; minutes. Then: python benchmarks/draw.py terminal
"""

import json
import subprocess
import sys
import tempfile
import time
from datetime import date
from itertools import groupby
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

from rich.console import Console
from rich.terminal_theme import SVG_EXPORT_THEME
from rich.text import Text

from fill_numbers import RESULTS, ending, newest
from longitude.runs.provenance import machine
from pictures import Picture

COMMAND, COLUMNS, ROWS = "longitude study", 100, 34
FRAMES, SECONDS, LAST, PLAYS = 25, 0.4, 5.0, 3
"""How many screens are kept; seconds of each, and of the last; how often all are played."""
LETTER, LINE, EDGE = 7.2, 17, 12
BACK, INK = "#141a21", "#dfe5ea"


# ---- record ------------------------------------------------------------------------------------------------------------
def record() -> Path:
    """Run the study in a terminal, and keep its screen whenever it changed, thinned to FRAMES."""
    with tempfile.TemporaryDirectory() as folder:
        size = ["-x", str(COLUMNS), "-y", str(ROWS)]
        tmux("new-session", "-d", *size, "-c", folder, "bash --norc")
        tmux("send-keys", "PS1='$ '; clear", "Enter")
        time.sleep(1)
        tmux("send-keys", COMMAND, "Enter")
        start, screens = time.monotonic(), []
        while not screens or len(screens[-1]["lines"]) < 3 or screens[-1]["lines"][-1].strip() != "$":
            lines = tmux("capture-pane", "-p", "-e").rstrip("\n").split("\n")
            if not screens or screens[-1]["lines"] != lines:
                screens.append({"at": round(time.monotonic() - start, 1), "lines": lines})
            time.sleep(1)
        tmux("kill-server")
    path = RESULTS / f"{date.today()}{ending('study-terminal')}"
    return keep(screens, path)


def keep(screens: list[dict[str, Any]], path: Path) -> Path:
    """Write the screens nearest to even steps of time."""
    steps = [screens[-1]["at"] * i / (FRAMES - 1) for i in range(FRAMES)]
    nearest = [min(screens, key=lambda each: abs(each["at"] - step)) for step in steps]
    kept = [each for each, _ in groupby(nearest, key=lambda each: each)]
    result = {"made": str(date.today()), "command": COMMAND, "machine": machine(), "screens": kept}
    path.write_text(json.dumps(result, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    return path


def tmux(*arguments: str) -> str:
    done = subprocess.run(["tmux", "-L", "longitude", *arguments], check=True, capture_output=True, text=True)
    return done.stdout


# ---- draw --------------------------------------------------------------------------------------------------------------
def found() -> dict[str, Any]:
    path = newest("study-terminal")
    assert path is not None
    return json.loads(path.read_text(encoding="utf-8"))


def words(recorded: dict[str, Any]) -> str:
    last = [" ".join(Text.from_ansi(line).plain.split()) for line in recorded["screens"][-1]["lines"]]
    text = " / ".join(filter(None, last))
    return f"The terminal of {recorded['command']}: the models that are trained, with their progress, then: {text}"


def chart(recorded: dict[str, Any]) -> str:
    """One group of lines for each screen, shown in turn; where readers want no motion, the last alone."""
    screens = recorded["screens"]
    whole = SECONDS * (len(screens) - 1) + LAST
    width, height = round(COLUMNS * LETTER + 2 * EDGE), ROWS * LINE + 2 * EDGE
    style = (
        f"text {{ font: 12px 'DejaVu Sans Mono', Menlo, Consolas, monospace; fill: {INK}; white-space: pre; }} "
        ".b { font-weight: 700; } "
        f".screen {{ visibility: hidden; animation: screen {whole:g}s step-end {PLAYS}; }} "
        f".last {{ visibility: visible; animation: last {whole:g}s step-end {PLAYS}; }} "
        f"@keyframes screen {{ 0% {{ visibility: visible; }} {100 * SECONDS / whole:.3f}% {{ visibility: hidden; }} }} "
        f"@keyframes last {{ 0% {{ visibility: hidden; }} {100 * (1 - LAST / whole):.3f}% {{ visibility: visible; }} }} "
        "@media (prefers-reduced-motion: reduce) { .screen, .last { animation: none; } }"
    )
    groups = []
    for i, screen in enumerate(screens[:-1]):
        groups.append(f'<g class="screen" style="animation-delay: {i * SECONDS:g}s">{_screen(screen["lines"])}</g>')
    groups.append(f'<g class="last">{_screen(screens[-1]["lines"])}</g>')
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}">'
        f'<style>{style}</style><rect width="{width}" height="{height}" rx="8" fill="{BACK}"/>{"".join(groups)}</svg>'
    )


def _screen(lines: list[str]) -> str:
    console = Console(width=COLUMNS, color_system="truecolor")
    parts = []
    for row, line in enumerate(lines):
        at = 0
        for segment in Text.from_ansi(line).render(console):
            text = segment.text.rstrip("\n")
            if text.strip():
                start = at + len(text) - len(text.lstrip())
                parts.append(_run(text.strip(), start, row, segment.style))
            at += len(text)
    return "".join(parts)


def _run(text: str, column: int, row: int, style: Any) -> str:
    """Words in one style; their length is fixed, whatever font the reader has."""
    place = f'x="{EDGE + column * LETTER:.1f}" y="{EDGE + row * LINE + 13}" textLength="{len(text) * LETTER:.1f}"'
    color = (
        style.color.get_truecolor(SVG_EXPORT_THEME).hex
        if style and style.color and not style.color.is_default
        else None
    )
    ink = f' style="fill: {color}"' if color else ""
    bold = ' class="b"' if style and style.bold else ""
    return f"<text {place}{bold}{ink}>{escape(text)}</text>"


TERMINAL = Picture("terminal", "The terminal of a study", found, chart, words, both=True)

if __name__ == "__main__":
    sys.exit(print(record()))
