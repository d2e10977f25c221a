"""Checks that a tag can be released, and prints what the changelog says about it.

    python scripts/release_notes.py v0.1.0

The tag, the version of the package and the newest heading of the changelog have to agree, and so does CITATION.cff.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
VERSION_FILE = "src/replicax/_base/version.py"


def version(root: Path = ROOT) -> str:
    """Returns the version of the package, without importing it."""
    return re.search(r'__version__ = "(.+)"', (root / VERSION_FILE).read_text(encoding="utf-8"))[1]


def sections(root: Path = ROOT) -> dict[str, tuple[str, str]]:
    """Returns the date and the text of each version in the changelog, the newest first."""
    text = (root / "CHANGELOG.md").read_text(encoding="utf-8")
    parts = re.split(r"^## \[(.+?)\](?: - (\S+))?$", text, flags=re.MULTILINE)[1:]
    return {name: (date or "", body.strip()) for name, date, body in zip(parts[::3], parts[1::3], parts[2::3])}


def cited(root: Path = ROOT) -> tuple[str, str]:
    """Returns the version and the date in CITATION.cff."""
    text = (root / "CITATION.cff").read_text(encoding="utf-8")
    return tuple(re.search(rf'^{key}: "?([^"\n]+)"?$', text, re.MULTILINE)[1] for key in ("version", "date-released"))


def notes(tag: str, root: Path = ROOT) -> str:
    """Returns the changelog's section about a tag.

    Raises:
        ValueError: something does not agree with the tag; the message says what to change.
    """
    own = version(root)
    if tag != f"v{own}":
        raise ValueError(f"the tag is {tag}, and the version in {VERSION_FILE} is {own}: expected the tag v{own}")
    found = sections(root)
    if not found.get(own, ("", ""))[1]:
        raise ValueError(
            f"CHANGELOG.md says nothing about {own}: add a section with the heading ## [{own}] - YYYY-MM-DD"
        )
    date, text = found[own]
    if not re.fullmatch(r"\d{4}-\d\d-\d\d", date):
        raise ValueError(f"the heading of {own} in CHANGELOG.md needs a date: ## [{own}] - YYYY-MM-DD")
    if found.get("Unreleased", ("", ""))[1]:
        raise ValueError(f"CHANGELOG.md has entries under [Unreleased]: move them to the section of {own}")
    if cited(root) != (own, date):
        raise ValueError(f"CITATION.cff has version and date {cited(root)}, and CHANGELOG.md {(own, date)}")
    return text


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python scripts/release_notes.py TAG")
    try:
        print(notes(sys.argv[1]))
    except ValueError as error:
        sys.exit(f"This cannot be released: {error}.")
