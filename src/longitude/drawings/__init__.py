"""Drawings of encodings, mixers and checkpoints, computed by the classes that run.

    lg.show("alibi", "t5")                                   # in a notebook: the first picture
    lg.show("alibi", "t5", picture="bias").save("bias.svg")  # one picture, for a slide

`subjects` makes the drawings of a name as data. Two back ends draw them: `terminal` as braille dots, `charts` as Altair charts
for files, pages and notebooks.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from longitude.errors import UsageError, unknown

ALL = "all"


class Pictures:
    """Pictures that a notebook displays.

    Attributes:
        drawings: The drawings, as data.
        others: Names of the pictures that are left out.
    """

    def __init__(self, drawings: Sequence[Any], others: Sequence[str]) -> None:
        self.drawings, self.others = drawings, others

    def __repr__(self) -> str:
        shown = "; ".join(f"{drawing.name}: {drawing.title}" for drawing in self.drawings)
        return shown + f" (picture={', '.join(map(repr, [*self.others, ALL]))} shows others)" * bool(self.others)

    def _repr_svg_(self) -> str:
        from longitude.drawings.charts import svg

        return svg(self.drawings)

    def save(self, path: str | Path) -> None:
        """Write the pictures to a file, each with its title and caption.

        Args:
            path: A file that ends in .svg or .png.

        Raises:
            ValueError: For another suffix, or a folder that does not exist.
        """
        from longitude.drawings.charts import write

        write(Path(path), self.drawings)


def show(*names: str, picture: str | None = None, **sizes: int) -> Pictures:
    """Draw what encodings, mixers or checkpoints do with position, side by side.

    Args:
        names: Model specs such as "alibi" or "rope:base=500000", and checkpoints.
        picture: Name of the picture, such as "bias"; "all" for all; by default the first.
        sizes: length, heads and head_dim, as options of `longitude show`.

    Returns:
        The pictures. A notebook displays them, and `save("alibi.svg")` writes them.

    Raises:
        ValueError: For an unknown name, picture or size, and where nothing can be drawn.
    """
    from longitude.drawings.drawing import side_by_side
    from longitude.drawings.subjects import subjects

    if not names:
        raise UsageError("show", "a name, such as lg.show('alibi')", "none")
    if others := {*sizes} - {"length", "heads", "head_dim"}:
        raise unknown("size", min(others), ["length", "heads", "head_dim"], "")
    shown = [*subjects(names, sizes)]
    every = side_by_side({subject.label: subject.drawings for subject in shown})
    if not every:
        raise ValueError(nothing_of(names))
    chosen = chosen_of(every, picture) if picture else every[:1]
    return Pictures(chosen, [drawing.name for drawing in every if drawing not in chosen])


def nothing_of(names: Sequence[str]) -> str:
    """Why there is no picture."""
    why = "expected fixed numbers: learned ones are noise before training, and weights of checkpoints are not read"
    return f"nothing is drawn of {', '.join(names)}: {why}"


def chosen_of(drawings: Sequence[Any], picture: str) -> list[Any]:
    """The drawings of a name, or all. ValueError, with the nearest, for an unknown one."""
    known = {drawing.name: drawing for drawing in drawings}
    if picture != ALL and picture not in known:
        raise unknown("picture", picture, [*known, ALL], "")
    return [*drawings] if picture == ALL else [known[picture]]
