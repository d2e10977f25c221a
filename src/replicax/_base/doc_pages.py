"""Libraries to install and pages to read, as messages name them."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from pathlib import Path

# Pages under their old names: `replicax docs` shows them, and the site redirects to them.
MOVED = {
    "how-to/find-errors": "how-to/debugging",
    "how-to/from-tensorflow": "how-to/migrate-from-tensorflow",
    "which-tool": "choosing-a-tool",
}

_PACKAGE = Path(__file__).parents[1]
_FENCE = re.compile(r"^(`{3,})")
_HEADING = re.compile(r"^(#+) +(.*?) *$")


def install(extra: str) -> str:
    """Returns the command that installs the libraries of one of replicax's extras.

    >>> install("autograph")
    "pip install diastatic-malt (replicax's extra 'autograph')"
    """
    import importlib.metadata  # only now: it takes a tenth of the launcher's start

    libraries: list[str] = []
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        for requirement in importlib.metadata.requires("replicax") or ():
            name, _, marker = requirement.partition(";")
            if re.search(rf"extra\s*==\s*['\"]{extra}['\"]", marker):
                libraries.append(name.strip())
    wanted = " ".join(f"'{name}'" if re.search(r"[<>=!~\[]", name) else name for name in libraries)
    return f"pip install {wanted} (replicax's extra '{extra}')" if wanted else f"pip install 'replicax[{extra}]'"


def page(name: str) -> str:
    """Returns where a page of the documentation is read: its address in the site, or the command that shows it.

    A release knows the site's address from its metadata. Elsewhere it is the command, which shows the copy of the page
    that is installed with the package.

    Args:
        name: a page such as "how-to/launch", which may be followed by "#" and the anchor of one of its sections.

    >>> page("how-to/launch#slurm")
    '`replicax docs how-to/launch#slurm`'
    """
    site = _site()
    if site is None:
        return f"`replicax docs {name}`"
    path, _, anchor = name.partition("#")
    return f"{site}/{path}.html" + (f"#{anchor}" if anchor else "")


def _site() -> str | None:
    """Returns the address of this version's site, or None where the package's metadata has none."""
    import importlib.metadata

    try:
        metadata = importlib.metadata.metadata("replicax")
    except importlib.metadata.PackageNotFoundError:
        return None
    for entry in metadata.get_all("Project-URL") or ():
        label, _, address = entry.partition(",")
        if label.strip() == "Documentation":
            version = metadata["Version"]
            return f"{address.strip().rstrip('/')}/{'dev' if 'dev' in version else version}"
    return None


def folder() -> Path:
    """Returns the folder of the documentation's pages: the package's copy, or the checkout's."""
    installed = _PACKAGE / "docs"
    return installed if installed.is_dir() else _PACKAGE.parents[1] / "docs"


def headings(text: str) -> Iterator[tuple[int, int, str]]:
    """Yields the line, the level and the title of each heading of a page, without comments in blocks of code.

    >>> list(headings("# A page\\n```\\n# a comment\\n```\\n## Last"))
    [(0, 1, 'A page'), (4, 2, 'Last')]
    """
    fence = ""
    for number, line in enumerate(text.splitlines()):
        if found := _FENCE.match(line):
            fence = "" if fence and found[1].startswith(fence) else fence or found[1]
        elif not fence and (heading := _HEADING.match(line)):
            yield number, len(heading[1]), heading[2]


def anchor(title: str) -> str:
    """Returns the anchor of a heading, as forges and the site make it.

    >>> anchor("What `rx.function` does")
    'what-rxfunction-does'
    """
    return re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-")
