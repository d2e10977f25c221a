"""Libraries to install and pages to read, as messages name them in a checkout and in an installed package."""

from __future__ import annotations

import contextlib
import re
from pathlib import Path

_PACKAGE = Path(__file__).parents[1]


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
    """Returns the path of a page of the documentation: in the installed package, or in the checkout that it runs from.

    >>> page("guide.md").endswith("docs/guide.md")
    True
    """
    folders = (_PACKAGE / "docs", _PACKAGE.parents[1] / "docs")
    found = next((folder / name for folder in folders if (folder / name).is_file()), Path("docs") / name)
    return found.as_posix()
