"""The settings of Sphinx for the documentation site; `make docs` builds it (site/build.py)."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import replicax

sys.path.insert(0, str(Path(__file__).parent))

import about_pages

project = "replicax"
author = "the authors of replicax"
copyright = f"{author}; licensed under the Apache License 2.0"
version = release = replicax.__version__
language = "en"

extensions = [
    "myst_nb",  # pages in Markdown, and tutorials that are executed
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",  # docstrings with Args:, Returns: and Raises:
    "sphinx.ext.viewcode",  # links from names to their source
    "sphinx_copybutton",
    "names",  # links from names in text to the reference
    "about_pages",  # descriptions for search engines and previews, links to edit a page
]

# Markdown.
myst_heading_anchors = 4
myst_enable_extensions = ["attrs_block", "colon_fence", "deflist"]
source_suffix = {".md": "myst-nb", ".rst": "restructuredtext"}
exclude_patterns = ["**/*.ipynb"]  # notebooks to download, written from the tutorials

# Tutorials run from top to bottom, each in a folder of its own. An exception in a cell ends the build.
nb_execution_mode = "cache"
nb_execution_raise_on_error = True
nb_execution_timeout = 300
nb_execution_in_temp = True
nb_execution_show_tb = True
nb_merge_streams = True

# Docstrings.
default_role = "name"
autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
autodoc_preserve_defaults = True
python_use_unqualified_type_names = True
add_module_names = False
maximum_signature_line_length = 88
toc_object_entries_show_parents = "hide"
smartquotes_action = "De"  # dashes, which napoleon writes as two hyphens, and ellipses; quotation marks stay
napoleon_use_ivar = True
napoleon_use_rtype = False
viewcode_line_numbers = True

# The look: https://pydata-sphinx-theme.readthedocs.io
html_theme = "pydata_sphinx_theme"
html_title = f"replicax {release}"
html_baseurl = about_pages.base_address(release)
html_static_path = ["static"]
templates_path = ["templates"]
html_css_files = ["site.css"]
html_js_files = ["versions.js", "accessible.js"]
html_favicon = "static/icon.svg"
html_search_scorer = str(Path(__file__).with_name("scorer.js"))
html_copy_source = False
html_show_sourcelink = False
home = os.environ.get("REPLICAX_HOME", "").rstrip("/")  # the repository, as for hatch_build.py
html_theme_options = {
    "logo": {"text": "replicax", "image_light": "static/icon.svg", "image_dark": "static/icon.svg", "alt_text": ""},
    "header_links_before_dropdown": 6,
    "navbar_align": "left",
    "navbar_end": ["versions", "navbar-icon-links", "theme-switcher"],
    "navigation_with_keys": False,
    "icon_links": [{"name": "Repository", "url": home, "icon": "fa-solid fa-code-branch"}] if home else [],
    "use_edit_page_button": bool(home),
    "secondary_sidebar_items": {"**": ["page-toc", "edit-this-page"], "index": []},
    "show_nav_level": 1,
    "show_toc_level": 2,
    "footer_start": ["copyright"],
    "footer_end": [],
    "pygments_light_style": "a11y-high-contrast-light",
    "pygments_dark_style": "a11y-high-contrast-dark",
}
html_context = {"default_mode": "auto"}  # light or dark, as the reader's system is
if home:
    html_context["edit_page_url_template"] = f"{home}/edit/main/docs/{{{{ file_name }}}}"
html_sidebars = dict.fromkeys(("index", "troubleshooting", "choosing-a-tool", "search"), [])  # pages without a section
copybutton_prompt_text = r">>> |\.\.\. |\$ "
copybutton_prompt_is_regexp = True
copybutton_only_copy_prompt_lines = True

# `make docs-links` asks for each address that is outside of the site.
linkcheck_timeout = 20
linkcheck_workers = 4
