"""Finds links of a built site that lead nowhere: to files that are not there, or to anchors that no element has."""

from __future__ import annotations

import functools
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit


class Page(HTMLParser):
    """The links and the anchors of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.links: list[str] = []
        self.anchors: set[str] = {""}
        self.feed(text)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        for name, value in attributes:
            if name in ("href", "src", "srcset") and value is not None and tag != "base":
                self.links.append(value)
            elif name in ("id", "name") and value:
                self.anchors.add(value)


def broken(site: Path) -> list[str]:
    """Returns a line for each link of the site's pages that leads nowhere in the site.

    Addresses outside of the site are left to Sphinx's `linkcheck`.
    """
    page = functools.cache(lambda path: Page(path.read_text(encoding="utf-8")))
    lines = []
    for path in sorted(site.rglob("*.html")):
        for link in dict.fromkeys(page(path).links):
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                continue
            aim = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            if not aim.is_file():
                lines.append(f"{path.relative_to(site)}: {link} is not there")
            elif aim.suffix == ".html" and unquote(parts.fragment) not in page(aim).anchors:
                lines.append(f"{path.relative_to(site)}: {link} has no such anchor")
    return lines


if __name__ == "__main__":
    found = broken(Path(sys.argv[1]).resolve())
    print("\n".join(found) or "no broken link")
    sys.exit(bool(found))
