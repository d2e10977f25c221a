"""Places a built documentation site into a checkout of the branch that is published.

    python scripts/publish_docs.py build/site build/gh-pages --version 0.1.0

The branch has a folder for each version, `dev` for what is not released yet, `stable` with the newest release, the list
`versions.json` that the site's version switcher reads, and an `index.html` that leads to `stable`. Committing and
pushing is left to the caller.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
from pathlib import Path

_REDIRECT = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<title>replicax</title>
<meta http-equiv="refresh" content="0; url={folder}/">
<link rel="canonical" href="{folder}/">
</head>
<body><p>The documentation is <a href="{folder}/">here</a>.</p></body>
</html>
"""


def publish(site: Path, branch: Path, version: str) -> None:
    """Writes the folder of a version, and what depends on the set of versions.

    Args:
        site: the built site, which has an `index.html`.
        branch: the checkout. It may be empty.
        version: a version such as `0.1.0`, or `dev`.

    Raises:
        ValueError: `site` is no site, or `version` is neither `dev` nor a version.
    """
    if not (site / "index.html").is_file():
        raise ValueError(f"{site} has no index.html. Build the site first: make docs")
    if version != "dev" and not _key(version):
        raise ValueError(f"expected a version such as 0.1.0 or 0.2.0rc1, or dev, got {version!r}")
    _replace(site, branch / version)
    versions = sorted((folder.name for folder in branch.iterdir() if _key(folder.name)), key=_key, reverse=True)
    final = [name for name in versions if name.replace(".", "").isdecimal()]
    if final and final[0] == version:
        _replace(site, branch / "stable")
    # Names and folders, in the order of the switcher.
    listed = {"dev": "dev"} if (branch / "dev").is_dir() else {}
    listed |= {f"stable ({final[0]})": "stable"} if final else {}
    listed |= {name: name for name in versions}
    entries = [{"name": name, "version": folder} for name, folder in listed.items()]
    (branch / "versions.json").write_text(json.dumps(entries, indent=2) + "\n", encoding="utf-8")
    first = "stable" if final else entries[0]["version"]
    (branch / "index.html").write_text(_REDIRECT.format(folder=first), encoding="utf-8")
    (branch / ".nojekyll").touch()  # folders whose names begin with an underscore are published too


def _key(version: str) -> tuple[int, int, int, bool, str, int] | None:
    """Returns what versions are sorted by; None for a name that is no version."""
    match = re.fullmatch(r"(\d+)\.(\d+)\.(\d+)(?:(a|b|rc)(\d+))?", version)
    if match is None:
        return None
    major, minor, patch, stage, number = match.groups()
    return int(major), int(minor), int(patch), stage is None, stage or "", int(number or 0)


def _replace(site: Path, folder: Path) -> None:
    if folder.exists():
        if not (folder / "index.html").is_file():  # somebody's own: `branch` is not the published branch
            raise ValueError(f"{folder} is no published site, as it has no index.html; it is left as it is")
        shutil.rmtree(folder)
    shutil.copytree(site, folder)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("site", type=Path, help="the built site")
    parser.add_argument("branch", type=Path, help="a checkout of the branch that is published")
    parser.add_argument("--version", required=True, help="a version such as 0.1.0, or dev")
    options = parser.parse_args(arguments)
    try:
        publish(options.site, options.branch, options.version)
    except ValueError as error:
        parser.error(str(error))


if __name__ == "__main__":
    main()
