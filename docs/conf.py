"""How the site is made of these pages: ``make docs``. Nothing is fetched, and a warning is an error."""

from __future__ import annotations

import re
from pathlib import Path

from sphinx.application import Sphinx

import tfos_nb

project = "tfos_nb"
author = "the tfos_nb maintainers"
copyright = "the tfos_nb maintainers, Apache-2.0"
version = release = tfos_nb.__version__

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
    "sphinx_external_toc",  # the order of the pages is in _toc.yml, so that GitHub shows plain Markdown
]
exclude_patterns = ["_toc.yml"]

myst_heading_anchors = 3
myst_enable_extensions = ["attrs_inline"]

napoleon_google_docstring = False
napoleon_use_rtype = False
napoleon_use_ivar = True  # a property is described once
autodoc_typehints = "none"  # the docstrings say them, in words
autodoc_member_order = "bysource"
autodoc_class_signature = "mixed"

html_theme = "furo"
html_title = "tfos_nb"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_copy_source = False
html_show_sphinx = False
pygments_style = "friendly"
pygments_dark_style = "github-dark"
html_theme_options = {
    "navigation_with_keys": True,
    "top_of_page_buttons": [],
    "light_css_variables": {"color-brand-primary": "#1b6ec2", "color-brand-content": "#1b6ec2"},
    "dark_css_variables": {"color-brand-primary": "#6cb2f5", "color-brand-content": "#6cb2f5"},
}


def setup(app: Sphinx) -> None:
    """Where a picture has a dark sister, show that one on a dark page."""
    app.connect("source-read", _show_dark)


def _show_dark(app: Sphinx, page: str, source: list[str]) -> None:
    def both(found: re.Match[str]) -> str:
        dark = re.sub(r"(?=\.\w+$)", "-dark", found["path"])
        if not (Path(app.srcdir) / dark).exists():
            return found[0]
        return f"{found[0]}{{.only-light}}\n![{found['text']}]({dark}){{.only-dark}}"

    source[0] = re.sub(r"!\[(?P<text>[^]]*)\]\((?P<path>pictures/[^)]*)\)", both, source[0])
