"""How `make docs` builds the site: Sphinx with MyST, from the pages in this folder and the package's docstrings."""

from __future__ import annotations

import tomllib
from pathlib import Path

PROJECT = tomllib.loads((Path(__file__).resolve().parents[1] / "pyproject.toml").read_text("utf-8"))["project"]

project = "Checkpoint workbench"
author = "the ckpt-workbench authors"
release = version = PROJECT["version"]
copyright = author

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
source_suffix = {".md": "markdown"}
exclude_patterns = ["images"]
nitpicky = False  # numpy's and torch's names are links only where their inventories are, which takes a network

html_theme = "furo"
html_title = project
html_copy_source = False
html_show_sourcelink = False
html_theme_options = {"navigation_with_keys": True}
pygments_style, pygments_dark_style = "a11y-high-contrast-light", "a11y-high-contrast-dark"

myst_heading_anchors = 3
myst_links_external_new_tab = False

suppress_warnings = ["misc.highlighting_failure"]  # examples that leave something out say … there

autodoc_typehints = "signature"
autodoc_member_order = "bysource"
autodoc_preserve_defaults = True
napoleon_google_docstring, napoleon_numpy_docstring = True, False
napoleon_use_ivar = True  # fields of dataclasses are told once, under Attributes
python_display_short_literal_types = True
python_use_unqualified_type_names = True
