"""The pictures of README.md and docs, drawn from what is committed here.

python benchmarks/draw.py                # write all
python benchmarks/draw.py keeps study    # some, by name
python benchmarks/draw.py --check        # exit code 1 where one has other numbers than the results
"""

import sys

from draw_choice import CHOICE
from draw_keeps import KEEPS
from draw_study import STUDY
from draw_terminal import TERMINAL

PICTURES = {each.name: each for each in (STUDY, CHOICE, KEEPS, TERMINAL)}


def main(asked: list[str]) -> int:
    """Write, or with --check compare."""
    if "--check" not in asked:
        for name in asked or PICTURES:
            PICTURES[name].write()
        return 0
    found = [name for each in PICTURES.values() for name in each.differing()]
    print("\n".join(found) or "the pictures are those of the results")
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
