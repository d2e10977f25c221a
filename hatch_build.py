"""Makes the parts of the package's metadata that depend on where the project lives: its links, and the README's.

The environment says where that is. Neither variable is needed; without them the package has no links.

REPLICAX_HOME: the address of the repository on its forge, such as `https://github.com/OWNER/NAME`.
REPLICAX_DOCS: the address of the documentation site, which has one folder for each version.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from hatchling.metadata.plugin.interface import MetadataHookInterface


class MetadataHook(MetadataHookInterface):
    """Fills in `readme` and `urls`. A wheel that is built from an sdist takes them from the sdist instead."""

    PLUGIN_NAME = "custom"

    def update(self, metadata: dict) -> None:
        """Adds the two fields to the project's metadata."""
        place = {
            "home": os.environ.get("REPLICAX_HOME", "").rstrip("/"),
            "docs": os.environ.get("REPLICAX_DOCS", "").rstrip("/"),
            "version": metadata["version"],
        }
        if "urls" not in metadata:
            metadata["urls"] = urls(**place)
        if "readme" not in metadata:
            text = Path(self.root, "README.md").read_text(encoding="utf-8")
            metadata["readme"] = {"content-type": "text/markdown", "text": standalone(text, **place)}


def urls(home: str, docs: str, version: str) -> dict[str, str]:
    """Returns the project's links, as far as they are known.

    >>> sorted(urls("https://forge.example/rx", "", "1.0"))
    ['Changelog', 'Homepage', 'Issues', 'Source']
    >>> urls("", "https://rx.example", "1.1.dev0")
    {'Homepage': 'https://rx.example', 'Documentation': 'https://rx.example'}
    >>> urls("", "", "1.0")
    {}
    """
    found = {"Homepage": docs or home, "Documentation": docs}
    if home:
        changelog = f"{home}/blob/{tag_of(version)}/CHANGELOG.md"
        found |= {"Source": home, "Issues": f"{home}/issues", "Changelog": changelog}
    return {name: url for name, url in found.items() if url}


def folder_of(version: str) -> str:
    """Returns the folder of the documentation site that describes a version."""
    return "dev" if "dev" in version else version


def tag_of(version: str) -> str:
    """Returns the revision in the repository that a version was built from."""
    return "HEAD" if "dev" in version else f"v{version}"


# Code, which stays as it is; a picture, or a link, whose text may hold code and pictures; an attribute in HTML.
_CODE = r"^```.*?^```|`[^`\n]+`"
_PICTURE = r"!\[[^\]]*\]\((?P<picture>[^)\s]+)\)"
_LINK = r"\[(?P<text>(?:!\[[^\]]*\]\([^)]*\)|`[^`\n]+`|[^\[\]`])*)\]\((?P<link>[^)\s]+)\)"
_ATTRIBUTE = r"\b(?P<name>href|src|srcset)=\"(?P<value>[^\"]*)\""
_PARTS = re.compile(f"{_CODE}|{_PICTURE}|{_LINK}|{_ATTRIBUTE}", re.MULTILINE | re.DOTALL)


def standalone(text: str, home: str, docs: str, version: str) -> str:
    """Returns the README with links that work outside of the repository.

    Pages in `docs` are linked on the documentation site, and other files in the repository. What cannot be linked
    becomes plain text, and pictures that cannot be shown are left out. Code is left as it is.

    >>> where = {"home": "https://forge.example/rx", "docs": "https://rx.example", "version": "1.0"}
    >>> standalone("the [guide](docs/guide.md#run) ![](a.svg)", **where)
    'the [guide](https://rx.example/1.0/guide.html#run) ![](https://forge.example/rx/raw/v1.0/a.svg)'
    >>> standalone("the [`guide`](docs/guide.md) ![](a.svg)`[a](b)`", home="", docs="", version="1.0")
    'the `guide` `[a](b)`'
    """

    def address(path: str, kind: str) -> str:
        page = re.fullmatch(r"docs/(.+)\.md(#.*)?", path)
        if re.match(r"[a-z]+:|#", path):
            return path
        if page and docs:
            return f"{docs}/{folder_of(version)}/{page[1]}.html{page[2] or ''}"
        return f"{home}/{kind}/{tag_of(version)}/{path.removeprefix('./')}" if home else ""

    def replace(match: re.Match[str]) -> str:
        if match["picture"]:
            url = address(match["picture"], "raw")
            return match[0].removesuffix(f"{match['picture']})") + f"{url})" if url else ""
        if match["link"]:
            inner, url = _PARTS.sub(replace, match["text"]), address(match["link"], "blob")
            return f"[{inner}]({url})" if url and inner else inner
        if match["name"]:
            url = address(match["value"], "blob" if match["name"] == "href" else "raw")
            return f'{match["name"]}="{url}"'
        return match[0]

    text = _PARTS.sub(replace, text)
    text = re.sub(r'<(?:img|source)\b[^>]*\b(?:src|srcset)=""[^>]*>', "", text)
    return re.sub(r'<a href="">(.*?)</a>', r"\1", text, flags=re.DOTALL)
