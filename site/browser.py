"""Opens every page of the built site in a browser: `python site/browser.py`, or `make docs-browser`.

Each page is opened from the disk, at the width of a desk and of a phone, in light and in dark. It may report no error,
ask for nothing that is not there and be no wider than the screen; axe-core may find nothing that keeps people out
(contrast, headings, alternative texts, names of controls). The search has to find names, and the words of a message.

Playwright drives the browser; CHROMIUM in the environment names one, by default that of the machine.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
from collections import Counter
from pathlib import Path

from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Browser, Page, sync_playwright

SITE = Path(__file__).parents[1] / "build" / "site"
DESK, PHONE = {"width": 1280, "height": 900}, {"width": 390, "height": 844}
# What to search for, and a page that has to be among the results.
SEARCHES = {
    "MirroredStrategy": "replicax.MirroredStrategy.html",
    "uneven batches": "explanation/uneven-batches.html",
    "tf.math.reduce_std": "reference/tf/tf.math.html",
    "Slurm": "how-to/launch.html",
    "There is no device": "troubleshooting.html",
}
# Without `preload`, since axe would load style sheets, which a browser refuses to pages from the disk.
RULES = {
    "preload": False,
    "runOnly": {"type": "tag", "values": ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "best-practice"]},
}


def problems_of(page: Page, axe: Axe | None) -> list[str]:
    """Returns what is wrong with the page that is open."""
    found = []
    wide = page.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth")
    if wide > 1:
        found.append(f"is {wide} pixels wider than the screen")
    if axe:
        for violation in axe.run(page, options=RULES).response["violations"]:
            places = [node["target"][0] for node in violation["nodes"]]
            found.append(f"{violation['impact']}: {violation['help']} ({violation['id']}): {places[:3]}")
    return found


def visit(browser: Browser, pages: list[Path], scheme: str, size: dict[str, int], axe: Axe | None) -> list[str]:
    """Opens the pages one after the other, and returns a line for each problem."""
    context = browser.new_context(color_scheme=scheme, viewport=size)  # type: ignore[arg-type]
    tab = context.new_page()
    noted: list[str] = []
    tab.on("console", lambda message: noted.append(message.text) if message.type == "error" else None)
    tab.on("pageerror", lambda error: noted.append(str(error)))
    tab.on("requestfailed", lambda request: noted.append(f"{request.url} is not there"))
    lines = []
    for path in pages:
        noted.clear()
        tab.goto(path.as_uri())
        for problem in [*problems_of(tab, axe), *noted]:
            lines.append(f"{path.relative_to(SITE)} ({scheme}, {size['width']} wide) {problem}")
    context.close()
    return lines


def search(browser: Browser) -> list[str]:
    """Searches from the disk, and returns a line for each search that does not find its page."""
    lines = []
    tab = browser.new_page()
    for words, wanted in SEARCHES.items():
        tab.goto(f"{(SITE / 'search.html').as_uri()}?q={words.replace(' ', '+')}")
        tab.wait_for_selector("#search-results .search li a", timeout=30_000)
        tab.wait_for_function("!document.querySelector('#search-progress, .search-summary.searching')")
        links = tab.eval_on_selector_all("#search-results .search li a", "all => all.map(one => one.href)")
        if not any(wanted in link for link in links):
            lines.append(f"a search for {words!r} does not find {wanted}, but {links[:3]}")
    tab.close()
    return lines


def main() -> int:
    """Looks at the site, and returns the exit status."""
    options = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    options.add_argument("--pictures", type=Path, help="a folder for pictures of some pages")
    options.add_argument("--only", default="*", help="a pattern for the paths of pages, such as 'how-to/*'")
    options.add_argument("--source", action="store_true", help="look at the pages of source too")
    chosen = options.parse_args()
    pages = sorted(path for path in SITE.rglob("*.html") if "_static" not in path.parts)
    if not chosen.source:
        pages = [path for path in pages if "_modules" not in path.parts]
    pages = [path for path in pages if path.relative_to(SITE).match(chosen.only)]
    program = os.environ.get("CHROMIUM") or shutil.which("chromium") or shutil.which("google-chrome")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program, args=["--no-sandbox", "--disable-gpu"])
        lines = search(browser)
        lines += visit(browser, pages, "light", DESK, Axe())
        lines += visit(browser, pages, "dark", DESK, Axe())
        lines += visit(browser, pages, "light", PHONE, None)
        if chosen.pictures:
            photograph(browser, chosen.pictures)
        browser.close()
    print("\n".join(lines))
    kinds = Counter(line.partition(") ")[2].partition(": [")[0] for line in lines)
    print("\n".join(f"{count:5} {kind}" for kind, count in kinds.most_common()))
    print(f"{len(pages)} pages, {len(lines)} problems")
    return 1 if lines else 0


def photograph(browser: Browser, folder: Path) -> None:
    """Takes pictures of some pages, on a desk and on a phone, in light and in dark."""
    folder.mkdir(parents=True, exist_ok=True)
    names = ["index", "start/the-idea", "tutorials/first-loop", "how-to/index", "which-tool", "troubleshooting"]
    names += [
        "reference/api/index",
        "reference/api/replicax.Variable",
        "reference/tf/tf.math",
        "explanation/performance",
    ]
    for scheme in ("light", "dark"):
        for label, size in (("desk", DESK), ("phone", PHONE)):
            context = browser.new_context(color_scheme=scheme, viewport=size)  # type: ignore[arg-type]
            tab = context.new_page()
            for name in names:
                tab.goto((SITE / f"{name}.html").as_uri())
                tab.screenshot(path=folder / f"{name.replace('/', '-')}-{label}-{scheme}.png")
            context.close()


if __name__ == "__main__":
    sys.exit(main())
