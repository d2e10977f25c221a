"""Builds the documentation site: `python site/build.py`, or `make docs`.

Sphinx reads pages from one folder, and the site is made of several: the pages of docs/, files of the repository that
they link to, and the reference, which is written from the docstrings. They are put into build/docs/source, with their
links. The site is in build/site; build/site/index.html opens without a server.

Every warning is an error, and so is a link that leads nowhere.
"""

from __future__ import annotations

import argparse
import filecmp
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import jupytext
import links
import reference

from replicax import __version__
from replicax._base import doc_pages

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
STAGED = ROOT / "build" / "docs" / "staged"
SOURCE = ROOT / "build" / "docs" / "source"
SITE = ROOT / "build" / "site"

# Files outside of docs/ that are pages of the site.
PAGES = {
    "benchmarks/RESULTS.md": "project/benchmark-results.md",
    "CHANGELOG.md": "project/changelog.md",
    "CODE_OF_CONDUCT.md": "project/code-of-conduct.md",
    "CONTRIBUTING.md": "project/contributing.md",
    "SECURITY.md": "project/security.md",
}
# Pages that `reference` writes, to which others link.
GENERATED_NAMES = (
    "reference/api/index.rst",
    "reference/tf/index.rst",
    "reference/command-line.md",
    "reference/environment.md",
    "reference/exit-codes.md",
)
GENERATED = {DOCS / name: Path(name) for name in GENERATED_NAMES}
# Sections: their index pages list their pages in the order of the site's navigation.
SECTIONS = ("start", "tutorials", "how-to", "explanation", "reference")
LANGUAGES = {".py": "python", ".sh": "bash", ".yaml": "yaml", ".yml": "yaml", ".toml": "toml"}
# Where the first page shows a section of the README, and the version.
SHARED = re.compile(r"<!-- README.md: (.*) -->")
VERSION = "<!-- version -->"
HOME = os.environ.get("REPLICAX_HOME", "").rstrip("/")  # the address of the repository, as for hatch_build.py
LINK = re.compile(r"\]\(([^()\s]+)\)")
TITLE = re.compile(r"^# .*$", re.MULTILINE)
# Page -> words that find it in the search, beside those of its title.
KEYWORDS: dict[str, list[str]] = tomllib.loads((Path(__file__).parent / "keywords.toml").read_text(encoding="utf-8"))


def stage() -> None:
    """Writes the pages, with their links and their order, into `STAGED`."""
    shutil.rmtree(STAGED, ignore_errors=True)
    files = {path: path.relative_to(DOCS) for path in DOCS.rglob("*") if path.is_file()}
    files |= {ROOT / name: Path(place) for name, place in PAGES.items() if (ROOT / name).is_file()}
    shown: dict[Path, Path] = {}  # files of the repository that pages link to
    for path, place in files.items():
        target = STAGED / place
        target.parent.mkdir(parents=True, exist_ok=True)
        if path.suffix != ".md":
            shutil.copy(path, target)
            continue
        text = relink(path.read_text(encoding="utf-8"), path, place, files, shown)
        if path == DOCS / "index.md":
            for title in SHARED.findall(text):
                part = section((ROOT / "README.md").read_text(encoding="utf-8"), title)
                part = relink(part, ROOT / "README.md", place, files, shown)
                text = text.replace(f"<!-- README.md: {title} -->", part)
            text = text.replace(VERSION, version_line())
        if place.name == "index.md":
            text += navigation(text, place)
        if "\nkernelspec:" in text[:200]:
            text = with_notebook(text, target)
        text = with_keywords(text, KEYWORDS.get(place.with_suffix("").as_posix(), []))
        target.write_text(text, encoding="utf-8")
    for path, place in shown.items():
        show(path, STAGED / place)
    list_other_files(STAGED / "examples" / "index.md", sorted(place.as_posix() for place in shown.values()))


def relink(text: str, path: Path, place: Path, files: dict[Path, Path], shown: dict[Path, Path]) -> str:
    """Returns a page's text with the links to files of the repository turned to their pages in the site."""

    def link(found: re.Match[str]) -> str:
        name, _, anchor = found[1].partition("#")
        if not name or ":" in name:
            return found[0]
        aim = (path.parent / name).resolve()
        if aim not in files and aim.is_file():
            inside = aim.relative_to(ROOT)
            if inside.parts[0] in ("examples", "benchmarks"):
                shown.setdefault(aim, Path("examples", *inside.parts[1:]).with_suffix(inside.suffix + ".md"))
            elif inside.name == "LICENSE":
                shown.setdefault(aim, Path("project/license.md"))
        goal = files.get(aim) or shown.get(aim) or GENERATED.get(aim)
        if goal is None:
            raise SystemExit(f"{path.relative_to(ROOT)} links to {found[1]}, which is no page of the site")
        return f"]({os.path.relpath(goal, place.parent)}{'#' if anchor else ''}{anchor})"

    blocks = re.split(r"(^```.*?^```)", text, flags=re.MULTILINE | re.DOTALL)
    return "".join(part if part.startswith("```") else LINK.sub(link, part) for part in blocks)


def section(text: str, title: str) -> str:
    """Return a section of a page, with its heading.

    >>> section("# A\\n\\n## B\\n\\nWords.\\n\\n## C\\n", "B")
    '## B\\n\\nWords.'
    """
    _, heading, rest = text.partition(f"\n## {title}\n")
    if not heading:
        raise SystemExit(f"README.md has no section {title!r}, which docs/index.md shows")
    return f"{heading}{rest.partition(chr(10) + '## ')[0]}".strip()


def version_line() -> str:
    """Return the version, with links to the repository, if its address is known, and to the changes."""
    repository = [f"[Repository]({HOME})"] * bool(HOME)
    return " · ".join([f"Version {__version__}", *repository, "[Changes](project/changelog.md)"])


def navigation(text: str, place: Path) -> str:
    """Returns the hidden table of contents of an index page: the pages that it links to, in their order.

    A section's index has the section's own pages, and the first page has the sections.
    """
    names = [os.path.normpath(place.parent / name.partition("#")[0]) for name in LINK.findall(text) if ":" not in name]
    home = place.parent == Path()
    own = [name for name in dict.fromkeys(names) if home or place.parent in Path(name).parents]
    if home:
        own = [*(f"{section}/index.md" for section in SECTIONS), *(name for name in own if "/" not in name)]
        own += ["examples/index.md", "project/index.md"]
    own = [name for name in dict.fromkeys(own) if name != place.as_posix()]
    entries = "\n".join(f"/{name.rpartition('.')[0]}" for name in own)
    return f"\n```{{toctree}}\n:hidden:\n\n{entries}\n```\n"


def with_notebook(text: str, page: Path) -> str:
    """Returns a tutorial with a link to itself as a notebook, which is written beside it."""
    notebook = page.with_suffix(".ipynb")
    jupytext.write(jupytext.reads(text, "md:myst"), notebook)
    link = f"{{download}}`This tutorial as a notebook <{notebook.name}>`"
    return TITLE.sub(lambda title: f"{title[0]}\n\n{link}", text, count=1)


def with_keywords(text: str, keywords: list[str]) -> str:
    """Return a page with main entries in the index for its keywords, which the search puts first.

    >>> with_keywords("# Title\\n\\nText.", ["a word", "another"])
    '# Title\\n\\n```{index} ! a word, ! another\\n```\\n\\nText.'
    """
    entries = ", ".join(f"! {word}" for word in keywords)
    return TITLE.sub(lambda title: f"{title[0]}\n\n```{{index}} {entries}\n```", text, count=1) if keywords else text


def show(path: Path, target: Path) -> None:
    """Writes a page that shows a file of the repository."""
    target.parent.mkdir(parents=True, exist_ok=True)
    text = path.read_text(encoding="utf-8")
    fence = "`" * (max((len(run) for run in re.findall(r"`{3,}", text)), default=2) + 1)
    name = path.relative_to(ROOT).as_posix()
    target.write_text(
        f"# {name}\n\n{fence}{LANGUAGES.get(path.suffix, 'text')}\n{text.rstrip()}\n{fence}\n", encoding="utf-8"
    )


def list_other_files(index: Path, pages: list[str]) -> None:
    """Append the files that other pages show to the index of the examples, which lists its own."""
    text = index.read_text(encoding="utf-8")
    others = [page for page in pages if page.startswith("examples/") and f"/{page.removesuffix('.md')}\n" not in text]
    titles = "\n".join(f"- [{Path(page).stem}](/{page})" for page in others)
    names = "\n".join(f"/{page.removesuffix('.md')}" for page in others)
    text += f"\n## Other files that pages name\n\n{titles}\n\n```{{toctree}}\n:hidden:\n\n{names}\n```\n"
    index.write_text(text, encoding="utf-8")


def project() -> None:
    """Writes the list of the pages about the project."""
    pages = sorted(path for path in (STAGED / "project").glob("*.md") if path.name != "index.md")
    names = "\n".join(f"/project/{page.stem}" for page in pages)
    text = f"# The project\n\n```{{toctree}}\n\n{names}\n```\n"
    (STAGED / "project" / "index.md").write_text(text, encoding="utf-8")


def synchronize() -> None:
    """Makes `SOURCE` the same as `STAGED`, and leaves files that are the same: Sphinx need not read them again."""
    for old in [path for path in SOURCE.rglob("*") if path.is_file()]:
        if not (STAGED / old.relative_to(SOURCE)).is_file():
            old.unlink()
    for new in [path for path in STAGED.rglob("*") if path.is_file()]:
        target = SOURCE / new.relative_to(STAGED)
        if not (target.is_file() and filecmp.cmp(new, target, shallow=False)):
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(new, target)


def tidy(site: Path) -> None:
    """Removes what leads nowhere in a built site.

    Pages of source link back to the reference under the module that documents the first of their names, which is not
    that of the others; and the theme has a template among its files.
    """
    for path in (site / "_modules").rglob("*.html"):
        text = path.read_text(encoding="utf-8")
        path.write_text(re.sub(r'<a class="viewcode-back".*?</a>', "", text), encoding="utf-8")
    (site / "_static" / "webpack-macros.html").unlink(missing_ok=True)


REDIRECT = """<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><title>This page has moved</title>
<script>location.replace("{target}" + location.search + location.hash)</script>
<meta http-equiv="refresh" content="1; url={target}"><link rel="canonical" href="{target}"></head>
<body><p>This page has moved: <a href="{target}">{target}</a></p></body></html>
"""


def redirect(site: Path) -> None:
    """Write a page at each old address that leads to the new one; a script keeps the anchor."""
    for old, new in doc_pages.MOVED.items():
        page = site / f"{old}.html"
        target = os.path.relpath(site / f"{new}.html", page.parent)
        page.write_text(REDIRECT.format(target=target), encoding="utf-8")


def main() -> int:
    """Builds the site, and returns the exit status."""
    options = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    options.add_argument("--builder", default="html", help="of Sphinx; linkcheck asks for the addresses outside")
    options.add_argument("--fast", action="store_true", help="do not execute the tutorials")
    chosen = options.parse_args()
    stage()
    reference.write(STAGED / "reference")
    project()
    synchronize()
    out = SITE if chosen.builder == "html" else ROOT / "build" / "docs" / chosen.builder
    if chosen.builder == "html":
        shutil.rmtree(out, ignore_errors=True)
    command = [sys.executable, "-m", "sphinx", "-b", chosen.builder, "-c", str(ROOT / "site"), "-W", "--keep-going"]
    command += ["-q", "-d", str(ROOT / "build" / "docs" / "trees")]
    if chosen.fast:  # the language of cells is known when they are executed
        command += ["-D", "nb_execution_mode=off", "-D", "suppress_warnings=myst-nb.lexer"]
    # Cells start `python` and `replicax` by name: those of this environment.
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    # What they print does not depend on how busy the machine is.
    quiet = {
        "REPLICAX_LOG_COMPILES": "off",
        "REPLICAX_HINT_SHORT_STEPS": "off",
        "REPLICAX_PROGRESS": "0",
        "NO_COLOR": "1",
    }
    environment = os.environ | {"PYTHONPATH": str(ROOT / "site"), "PATH": path} | quiet
    status = subprocess.run([*command, str(SOURCE), str(out)], env=environment, check=False).returncode
    if status == 0 and chosen.builder == "html":
        tidy(out)
        redirect(out)
        wrong = links.broken(out)
        print("\n".join(wrong))
        status = 1 if wrong else 0
        print(f"{len(list(out.rglob('*.html')))} pages are in {out.relative_to(ROOT)}" if not wrong else "")
    return status


if __name__ == "__main__":
    sys.exit(main())
