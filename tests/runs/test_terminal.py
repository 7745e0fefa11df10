"""What a terminal gets: no sign of a file, a name or a server controls it, while bars and colors of ours still do."""

import io
import sys

import pytest
from rich.console import Console

from longitude.cli import main
from longitude.report.table import show, table
from longitude.runs.terminal import Cleaned, Progress, Screen, clean

EVIL = "a\x1b]0;title\x07b\x1b[2K\x1b[1A\x9b31mc\x08\x7f\u202ed\r"
CONTROLS = [chr(code) for code in (*range(32), *range(127, 160), 0x202E, 0x2066) if chr(code) not in "\n\t"]


def harmless(text: str) -> bool:
    return not any(sign in text for sign in CONTROLS)


def test_control_signs_are_written_out_and_others_stay() -> None:
    assert harmless(clean("".join(CONTROLS))) and clean("\x1b") == "\\x1b"
    assert clean("é ± 日本\n\t\u200d") == "é ± 日本\n\t\u200d"


def test_tables_notes_and_prints(monkeypatch) -> None:
    """Also from inside a progress bar, through which rich sends what is printed."""
    out = io.StringIO()
    monkeypatch.setattr(sys, "stdout", out)
    shown = table(EVIL, "number", title=EVIL, caption=EVIL)
    shown.add_row(EVIL, "1")
    show(shown, EVIL)
    print(EVIL, file=Cleaned(out))
    Progress(Screen(file=out)).note(EVIL)
    assert harmless(out.getvalue()) and out.getvalue().count("title") == 7


def test_a_terminal_keeps_the_colors_and_bars_of_ours(monkeypatch) -> None:
    out = io.StringIO()
    monkeypatch.setattr(sys, "stderr", Cleaned(out))
    console = Screen(stderr=True, force_terminal=True, color_system="standard", _environ={"TERM": "xterm"})
    with Progress(console, total=1) as bar:
        bar.update(EVIL, 0.5)
        bar.note(EVIL)
        print(EVIL, file=sys.stderr)
    console.print("red", style="red")
    text = out.getvalue()
    assert "\x1b[31mred" in text and "\x1b[?25l" in text
    assert not any(sign in text for sign in ("\x1b]", "\x07", "\x9b", "\x08", "\x7f", "\u202e"))
    plain = io.StringIO()
    Console(file=plain, force_terminal=True).print(EVIL)
    assert not harmless(plain.getvalue()), "rich alone does not clean"


@pytest.mark.parametrize("arguments", [["show", EVIL], ["list", "--" + EVIL]])
def test_errors_of_the_command_line(arguments: list[str], capsys) -> None:
    assert main(arguments) == 2
    told = capsys.readouterr()
    assert harmless(told.err + told.out) and "title" in told.err
