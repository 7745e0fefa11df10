"""Progress where nobody watches: a few plain lines."""

import io

from rich.console import Console

from longitude.runs.progress import Progress


def lines_of(**options) -> tuple[Progress, io.StringIO]:
    file = io.StringIO()
    return Progress(Console(file=file, width=200), **options), file


def test_plain_lines_are_even_over_the_work_and_say_what_is_left():
    progress, file = lines_of(total=100, lines=4)
    with progress:
        progress.update("earlier", 30)  # done before this process
        for done in range(31, 101):
            progress.update("training [1]", done)
        progress.note("[done]")
    lines = file.getvalue().splitlines()
    assert [line.split(" of all")[0] for line in lines[:-1]] == [
        "earlier, 30%", "training [1], 50%", "training [1], 75%", "training [1], 100%",
    ]  # fmt: skip
    assert all(line.endswith(" min left") for line in lines[1:-1]) and lines[-1] == "[done]"


def test_without_lines_only_notes_are_written():
    progress, file = lines_of()
    with progress:
        for _ in range(3):
            progress.advance("loading")
        progress.update("measuring", 1, total=2)  # the next part of the work
        progress.note("noted")
    assert file.getvalue() == "noted\n" and (progress.done, progress.total) == (1, 2)
