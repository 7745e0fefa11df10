"""What the site does beyond Sphinx: links from `lg.attend` to its docstring, pictures in two colourings, formulas as MathML."""

import re
from pathlib import Path
from typing import Any

from docutils import nodes
from docutils.utils.math.latex2mathml import tex2mathml
from sphinx.util.nodes import make_refnode

from longitude.report.figure import DARK

NAME = re.compile(r"lg((?:\.\w+)+)")


def connect(app: Any) -> None:
    """Sphinx calls these."""
    app.connect("doctree-read", dark_pictures, priority=400)  # before Sphinx looks for its pictures
    app.connect("doctree-resolved", link_names)
    app.connect("missing-reference", public_name)
    app.add_html_math_renderer("mathml", inline_renderers=(inline_math, None), block_renderers=(block_math, None))


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


# ---- pictures ----------------------------------------------------------------------------------------------------------
def dark_pictures(app: Any, doctree: Any) -> None:
    """Each SVG in two colourings, of which the theme shows one."""
    for image in [*doctree.findall(nodes.image)]:
        if not image["uri"].endswith(".svg"):
            continue
        path = Path(app.env.relfn2path(image["uri"], app.env.docname)[1])
        dark = path.with_suffix(".dark.svg")
        text = recoloured(path.read_text(encoding="utf-8"))
        if not dark.exists() or dark.read_text(encoding="utf-8") != text:
            dark.write_text(text, encoding="utf-8")
        twin = image.deepcopy()
        twin["uri"] = image["uri"].removesuffix(".svg") + ".dark.svg"
        for each, when in ((image, "only-light"), (twin, "only-dark")):
            each["classes"] = [*each.get("classes", []), when]
        image.parent.insert(image.parent.index(image) + 1, twin)


def recoloured(svg: str) -> str:
    """With the colours of dark pages."""
    return re.sub("|".join(DARK), lambda found: DARK[found[0].lower()], svg, flags=re.IGNORECASE)


# ---- formulas ----------------------------------------------------------------------------------------------------------
def inline_math(translator: Any, node: Any) -> None:
    _math(translator, node, False)


def block_math(translator: Any, node: Any) -> None:
    _math(translator, node, True)


def _math(translator: Any, node: Any, block: bool) -> None:
    """MathML, which browsers and screen readers read."""
    translator.body.append(tex2mathml(node.astext(), as_block=block))
    raise nodes.SkipNode
