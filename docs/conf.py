"""The site, for Sphinx. Its source is what make_site.py puts together; nothing here or there asks a network."""

from typing import Any

import make_html
import make_words
from longitude import __version__

project, author, release = "Longitude", "The Longitude authors", __version__
copyright = author
extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
    "sphinx_copybutton",
]
source_suffix = {".md": "myst-nb", ".ipynb": "myst-nb", ".rst": "restructuredtext"}
exclude_patterns = ["_build"]
pygments_style = "a11y-high-contrast-light"

# ---- Markdown and notebooks: as GitHub shows them ----------------------------------------------------------------------
nb_execution_mode = "off"
myst_heading_anchors = 4
myst_heading_slug_func = "make_html.slug"
myst_links_external_new_tab = False
suppress_warnings = ["myst.header"]  # a page may begin with a table's level of headings

# ---- the API -----------------------------------------------------------------------------------------------------------
napoleon_numpy_docstring = False
napoleon_custom_sections = ["Source"]
napoleon_use_rtype = False
napoleon_use_ivar = True
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented"
autodoc_member_order = "bysource"
add_module_names = False
nitpick_ignore_regex = [
    ("py:.*", r"(?!longitude|lg\.).*"),  # other libraries have sites of their own
    (
        "py:class",
        r"longitude\..*\.(Factory|Test|Scheme|Kind|Module|Model|Options|Selection|Layers|Unused"
        r"|Method|Pictures|Running|\w+Inputs)",
    ),  # type variables, names of one module, and dicts of keywords
]

# ---- the theme ---------------------------------------------------------------------------------------------------------
html_theme = "pydata_sphinx_theme"
html_title = "Longitude"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_copy_source = False
html_show_sourcelink = False
CHILDLESS = ("find-your-model", "choose", "performance", "errata", "CHANGELOG", "CONTRIBUTING")
html_sidebars: dict[str, list[str]] = {page: [] for page in CHILDLESS}  # they would stand next to an empty list
html_theme_options: dict[str, Any] = {
    "logo": {"text": "Longitude"},
    "navbar_end": ["theme-switcher"],
    "secondary_sidebar_items": ["page-toc"],
    "footer_start": ["copyright"],
    "footer_end": [],
    "show_prev_next": False,
    "header_links_before_dropdown": 7,  # in one line of 1280 pixels
    "pygments_light_style": "a11y-high-contrast-light",
    "pygments_dark_style": "a11y-high-contrast-dark",
}


def setup(app: Any) -> None:
    """What Sphinx does not do by itself."""
    make_html.connect(app)
    app.connect("autodoc-process-docstring", make_words.plain_to_rst, priority=400)  # napoleon's is 500
