"""A Sphinx extension: what search engines and previews show of a page, and its link to edit it.

The description of a page is its first paragraph. The addresses of the site and of the repository come from
REPLICAX_DOCS and REPLICAX_HOME, as for hatch_build.py; without them there is no preview picture and no link to edit.
The picture is site/static/preview.png, which `python site/browser.py --preview` draws.
"""

from __future__ import annotations

import os
from html import escape
from pathlib import Path
from typing import Any

from docutils import nodes
from sphinx.application import Sphinx

DOCS = Path(__file__).parents[1] / "docs"
LONGEST = 200  # letters of a description


def description_of(doctree: nodes.document) -> str:
    """Return the first paragraph of a page, cut at a word."""
    paragraphs = (node for node in doctree.findall(nodes.paragraph) if not isinstance(node.parent, nodes.list_item))
    text = next((" ".join(node.astext().split()) for node in paragraphs if len(node.astext()) > 40), "")
    return text if len(text) <= LONGEST else f"{text[:LONGEST].rpartition(' ')[0]} …"


def add_meta_tags(app: Sphinx, page: str, template: str, context: dict[str, Any], doctree: Any) -> None:
    """Add the tags of a page's description and preview, and hide the link to edit a page without a source in docs."""
    if not (DOCS / f"{page}.md").is_file():
        context["theme_use_edit_page_button"] = False
    if doctree is None:
        return
    title = nodes.Text(context["title"]).astext()
    tags = {"og:title": title, "og:type": "website", "og:site_name": "replicax"}
    if description := description_of(doctree):
        tags["og:description"] = description
        context["metatags"] += f'<meta name="description" content="{escape(description)}" />\n'
    if app.config.html_baseurl:
        tags["og:url"] = f"{app.config.html_baseurl}{page}.html"
        tags["og:image"] = f"{app.config.html_baseurl}_static/preview.png"
    for name, content in tags.items():
        context["metatags"] += f'<meta property="{name}" content="{escape(content)}" />\n'


def setup(app: Sphinx) -> dict[str, bool]:
    """Register the extension."""
    app.connect("html-page-context", add_meta_tags)
    return {"parallel_read_safe": True, "parallel_write_safe": True}


def base_address(version: str) -> str:
    """Return the address of this version's folder of the site, or "" where it is not known."""
    address = os.environ.get("REPLICAX_DOCS", "").rstrip("/")
    return f"{address}/{'dev' if 'dev' in version else version}/" if address else ""
