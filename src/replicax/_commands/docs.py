"""`replicax docs`: shows the pages of the documentation that are installed with the package."""

from __future__ import annotations

import argparse
import difflib
import re
import sys
from collections.abc import Collection, Sequence
from pathlib import Path

from replicax._base import doc_pages
from replicax._report.terminal import is_terminal


def parser(program: str) -> argparse.ArgumentParser:
    """Returns the parser of the command line."""
    result = argparse.ArgumentParser(
        program, description="Show a page of the documentation, or one of its sections, in this terminal."
    )
    result.add_argument(
        "page",
        nargs="*",
        help="a page such as how-to/launch, a section such as how-to/launch#slurm, or words to search for",
    )
    result.add_argument("--search", metavar="WORDS", help="list the sections that have these words, such as an error's")
    return result


def main(arguments: Sequence[str], program: str) -> int:
    """Shows a page, the list of pages or the sections with some words, and returns the exit status."""
    options = parser(program).parse_args(arguments)
    pages = {path.relative_to(doc_pages.folder()).with_suffix("").as_posix(): path for path in _paths()}
    if not pages:
        print(f"{program}: this installation has no documentation in {doc_pages.folder()}.", file=sys.stderr)
        return 1
    if options.search is not None:
        found = _search(options.search, pages)
        if not found:
            print(f"{program}: no page has {options.search!r}.", file=sys.stderr)
        return int(not found)
    if not options.page:
        _list(pages, program)
        return 0
    asked = " ".join(options.page)
    name, _, anchor = asked.replace(" ", "-").removesuffix(".md").partition("#")
    name = _full_name(name.removesuffix(".html"), pages)
    if name not in pages:
        name = doc_pages.MOVED.get(_full_name(name, doc_pages.MOVED), name)
    if name not in pages:
        near = difflib.get_close_matches(name, [*pages, *(page.rpartition("/")[2] for page in pages)], 1)
        if not near and _search(asked, pages):
            return 0
        hint = f". Did you mean {_full_name(near[0], pages)}?" if near else ", and none has these words."
        print(f"{program}: there is no page {asked}{hint} `{program}` lists all pages.", file=sys.stderr)
        return 1
    text = pages[name].read_text(encoding="utf-8")
    if anchor:
        section = _section(text, anchor)
        if section is None:
            known = [doc_pages.anchor(title) for _, _, title in doc_pages.headings(text)]
            near = known if len(known) <= 3 else difflib.get_close_matches(anchor, known, 3, 0.3) or known[:3]
            others = " and others" * (len(known) > len(near))
            titles = ", ".join(f"#{one}" for one in near)
            print(f"{program}: {name} has no section #{anchor}. It has {titles}{others}.", file=sys.stderr)
            return 1
        text = section
    _show(text)
    return 0


def _paths() -> list[Path]:
    return sorted(doc_pages.folder().rglob("*.md"))


def _full_name(name: str, pages: Collection[str]) -> str:
    """Returns the name of the only page whose last part is `name`, or `name` itself."""
    ending = [page for page in pages if page.rpartition("/")[2] == name]
    return ending[0] if len(ending) == 1 and name not in pages else name


def _section(text: str, anchor: str) -> str | None:
    """Returns a section with its subsections, or None where there is none with that anchor."""
    headings = list(doc_pages.headings(text))
    for place, (number, level, title) in enumerate(headings):
        if doc_pages.anchor(title).strip("-") == anchor.strip("-"):
            end = next((line for line, other, _ in headings[place + 1 :] if other <= level), None)
            return "\n".join(text.splitlines()[number:end]).rstrip() + "\n"
    return None


def _list(pages: dict[str, Path], program: str) -> None:
    width = max(map(len, pages))
    section = ""
    for name in sorted(pages, key=lambda name: ("/" in name, name)):
        title = next((title for _, _, title in doc_pages.headings(pages[name].read_text(encoding="utf-8"))), "")
        if name.rpartition("/")[0] != section:
            section = name.rpartition("/")[0]
            print()
        print(f"  {name:{width}}  {title}")
    print(f"\n`{program} PAGE` shows a page, `{program} WORDS` finds the words of an error message.")


def _search(words: str, pages: dict[str, Path]) -> bool:
    """Lists the sections about the message that the words are; else those that have the words, the nearest first.

    Troubleshooting comes first among equals, since most words are those of a message. Returns whether there are any.
    """
    message: dict[str, str] = {}
    others: dict[str, tuple[int, str]] = {}
    whole = _plain(words)
    for name, path in sorted(pages.items(), key=lambda page: (page[0] != "troubleshooting", page[0])):
        text = path.read_text(encoding="utf-8")
        lines, headings = text.splitlines(), [*doc_pages.headings(text)]
        for place, (number, _, title) in enumerate(headings):
            end = headings[place + 1][0] if place + 1 < len(headings) else len(lines)
            address = f"{name}#{doc_pages.anchor(title)}" if place else name
            if _is_message(whole, _plain(title)):
                message[address] = title
            distance = _distance(whole, _plain(title), _plain(" ".join(lines[number:end])))
            if distance is not None:
                others[address] = distance, title
    nearest = {address: title for address, (_, title) in sorted(others.items(), key=lambda other: other[1][0])}
    for address, title in (message or nearest).items():
        print(f"  {address}\n      {title}")
    return bool(message or nearest)


def _distance(words: str, title: str, text: str) -> int | None:
    """Returns how far a section is from the words, 0 for the nearest, or None where it lacks some.

    Whole words are nearer than parts of words, and those of the title than those of the text, which has the title too.

    >>> _distance("ema", "ema of the weights", "..."), _distance("ema", "schemas", "schemas")
    (0, 3)
    """
    single_words = words.split()
    nearest = [
        _has_words(title, [words]),
        _has_words(title, single_words),
        _has_words(text, [words]),
        words in text,
        _has_words(text, single_words),
        all(word in text for word in single_words),
    ]
    return nearest.index(True) if True in nearest else None


def _has_words(text: str, words: Sequence[str]) -> bool:
    return all(re.search(rf"(?<!\w){re.escape(word)}(?!\w)", text) for word in words)


def _plain(text: str) -> str:
    return " ".join(text.lower().replace("`", "").split())


def _is_message(words: str, title: str) -> bool:
    """Whether a heading, in which "..." stands for any words, is the beginning of a message in `words`.

    >>> _is_message("deviceerror: there is no device gpu:9. there are gpu:0", "there is no device ...")
    True
    """
    if "..." not in title or sum(len(part.split()) for part in title.split("...")) < 3:
        return False
    return re.search(".*?".join(re.escape(part.strip()) for part in title.split("...")), words) is not None


def _show(text: str) -> None:
    """Prints Markdown: laid out by rich on a terminal where it is installed, else as it is written."""
    text = re.sub(r"\A---\n.*?\n---\n+", "", text, flags=re.DOTALL)  # the head of a tutorial
    text = re.sub(r"^(`{3,})\{code-cell\}.*$", r"\1python", text, flags=re.MULTILINE)
    if is_terminal(sys.stdout):
        try:
            from rich.console import Console
            from rich.markdown import Markdown
        except ImportError:
            pass
        else:
            console = Console()
            with console.pager(styles=True, links=False):
                console.print(Markdown(text))
            return
    print(text, end="")
