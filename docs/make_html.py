"""What the site does beyond Sphinx: links from `lg.attend` to its docstring and pictures in two colorings."""

import re
from pathlib import Path
from typing import Any

from docutils import nodes
from sphinx.util.nodes import make_refnode

from longitude.report.figure import DARK

WIDE = '<span class="picture" tabindex="0" role="group" aria-label="Picture">'
"""Around a picture, which scrolls where the page is narrower than its lettering allows."""
BOTH = 'class="themed"'
TO_PAGE = re.compile(r'href="([\w/-]+)\.md(#[\w-]+)?')
NAME = re.compile(r"lg((?:\.\w+)+)")


def connect(app: Any) -> None:
    """Sphinx calls these."""
    app.connect("doctree-read", dark_pictures, priority=400)  # before Sphinx looks for its pictures
    app.connect("doctree-read", name_corners)
    app.connect("doctree-resolved", link_names)
    app.connect("doctree-resolved", short_types)
    app.connect("missing-reference", public_name)


# ---- names -------------------------------------------------------------------------------------------------------------
def link_names(app: Any, doctree: Any, page: str) -> None:
    """`lg.attend` and `lg.attend(q, k, v)` lead to the docstring."""
    objects = app.env.domains.python_domain.objects
    for literal in [*doctree.findall(nodes.literal)]:
        found = NAME.match(literal.astext())
        entry = objects.get(f"longitude{found[1]}") if found else None
        if entry is None or isinstance(literal.parent, nodes.reference):
            continue
        link = make_refnode(app.builder, page, entry.docname, entry.node_id, literal.deepcopy())
        literal.replace_self(link)


def public_name(app: Any, env: Any, reference: Any, content: Any) -> Any:
    """What stands in an annotation by the module that defines it is documented as `import longitude` has it."""
    last = reference.get("reftarget", "").rpartition(".")[2]
    objects = env.domains.python_domain.objects
    same = sorted((name for name in objects if name.rpartition(".")[2] == last), key=len)
    if reference.get("refdomain") != "py" or not same:
        return None
    entry = objects[same[0]]
    return make_refnode(app.builder, reference["refdoc"], entry.docname, entry.node_id, content)


def short_types(app: Any, doctree: Any, page: str) -> None:
    """Types by their last name, where Sphinx leaves the sign that asks for it: "~collections.abc.Sequence"."""
    for text in [*doctree.findall(nodes.Text)]:
        if "~" in text and text.parent.tagname in ("literal_emphasis", "emphasis"):
            text.parent.replace(text, nodes.Text(re.sub(r"~(\w+\.)*", "", text)))


# ---- anchors -----------------------------------------------------------------------------------------------------------
def slug(heading: str) -> str:
    """Where links to a heading lead: as on GitHub."""
    return re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-")


# ---- tables ------------------------------------------------------------------------------------------------------------
def name_corners(app: Any, doctree: Any) -> None:
    """A heading without words, above names of rows, has a word for screen readers."""
    for head in doctree.findall(nodes.thead):
        for entry in head.findall(nodes.entry):
            if not entry.astext().strip():
                entry.children = [nodes.paragraph("", "", nodes.inline("", "row", classes=["visually-hidden"]))]


# ---- pictures ----------------------------------------------------------------------------------------------------------
def dark_pictures(app: Any, doctree: Any) -> None:
    """Each SVG in two colorings, of which the theme shows one; one that has both itself stands in the page, with its links."""
    for image in [*doctree.findall(nodes.image)]:
        if not image["uri"].endswith(".svg"):
            continue
        path = Path(app.env.relfn2path(image["uri"], app.env.docname)[1])
        app.env.note_dependency(str(path))  # drawn again: the page is read again
        light = path.read_text(encoding="utf-8")
        if BOTH in light:
            image.replace_self(nodes.raw("", TO_PAGE.sub(r'href="\1.html\2', light), format="html"))
            continue
        wide = [nodes.raw("", WIDE, format="html"), image, nodes.raw("", "</span>", format="html")]
        place = image.parent.index(image)
        dark = path.with_suffix(".dark.svg")
        text = recolored(light)
        if not dark.exists() or dark.read_text(encoding="utf-8") != text:
            dark.write_text(text, encoding="utf-8")
        twin = image.deepcopy()
        twin["uri"] = image["uri"].removesuffix(".svg") + ".dark.svg"
        for each, when in ((image, "only-light"), (twin, "only-dark")):
            each["classes"], each["loading"] = [*each.get("classes", []), when], "lazy"
        wide.insert(2, twin)
        image.parent[place : place + 1] = wide


def recolored(svg: str) -> str:
    """With the colors of dark pages."""
    return re.sub("|".join(DARK), lambda found: DARK[found[0].lower()], svg, flags=re.IGNORECASE)
