"""Opens every page of the built site in a browser: `python site/browser.py`, or `make docs-browser`.

Each page is opened from the disk, at the width of a desk and of a phone, in light and in dark. It may report no error,
ask for nothing that is not there and be no wider than the screen, nor its title and the list of its headings wider than
their columns; axe-core may find nothing that keeps people out (contrast, headings, alternative texts, names of
controls). The search has to find names, the words of a message and what people look for, and old addresses have to lead
to the pages of today.

Playwright drives the browser; CHROMIUM in the environment names one, by default that of the machine.
"""

from __future__ import annotations

import argparse
import functools
import multiprocessing
import os
import shutil
import sys
import tomllib
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from urllib.parse import quote

from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Browser, Page, Playwright, TimeoutError, sync_playwright

from replicax._base import doc_pages

SITE = Path(__file__).parents[1] / "build" / "site"
DESK, PHONE = {"width": 1280, "height": 900}, {"width": 390, "height": 844}
# What to search for, and the page that has to be among the first three results; for FIRST, the first of them.
FIRST = {
    "uneven batch": "explanation/uneven-batches.html",
    "checkpoint": "how-to/checkpoints.html",
    "MirroredStrategy": "reference/api/replicax.MirroredStrategy.html",
    "tf.math.reduce_std": "reference/tf/tf.math.html",
    "There is no device": "troubleshooting.html",
}
SEARCHES = FIRST | {
    "async checkpoint": "how-to/checkpoints.html",
    "save and restore": "how-to/checkpoints.html",
    "Slurm": "how-to/launch.html",
    "kubernetes": "how-to/launch.html",
    "TF_CONFIG": "how-to/launch.html",
    "multi node": "tutorials/several-machines.html",
    "multi gpu": "how-to/launch.html",
    "docker": "how-to/launch.html",
    "fsdp": "how-to/large-models.html",
    "out of memory": "how-to/large-models.html",
    "pmap": "tutorials/from-jax.html",
    "NamedSharding": "tutorials/from-jax.html",
    "torch ddp": "tutorials/from-pytorch.html",
    "migrate from tensorflow": "how-to/migrate-from-tensorflow.html",
    "preemption": "how-to/preemption.html",
    "profiling": "how-to/profiling.html",
    "nan loss": "how-to/debugging.html",
    "gradient clipping": "how-to/gradients.html",
    "learning rate schedule": "how-to/gradients.html",
    "data loading": "how-to/input.html",
    "tfrecord": "how-to/records.html",
    "serving": "how-to/saved-models.html",
    "onnx": "how-to/saved-models.html",
    "install": "start/install.html",
    "all-reduce": "explanation/communication.html",
    "flax": "how-to/nnx.html",
    "keras callbacks": "how-to/keras.html",
    "equinox": "how-to/equinox.html",
    "flax linen": "how-to/linen.html",
    "haiku": "how-to/haiku.html",
    "mixed precision": "how-to/mixed-precision.html",
    "EarlyStopping": "how-to/early-stopping.html",
    "wandb": "how-to/logging.html",
    "tensorboard": "how-to/logging.html",
    "notebook": "how-to/notebooks.html",
    "colab": "how-to/notebooks.html",
    "exponential moving average": "how-to/cookbook.html",
}
# The beginnings of titles, and of lists of a page's headings, that are wider than their column.
TOO_WIDE = """[...document.querySelectorAll('.bd-article h1, .page-toc > .section-nav')]
    .filter(element => element.scrollWidth > element.clientWidth + 1).map(element => element.innerText.slice(0, 60))"""
SEARCH_ENDED = "!document.querySelector('#search-progress, .search-summary.searching')"
# Without `preload`, since axe would load style sheets, which a browser refuses to pages from the disk.
RULES = {
    "preload": False,
    "runOnly": {"type": "tag", "values": ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "best-practice"]},
}
CONTRAST = {"preload": False, "runOnly": ["color-contrast"]}
# Blocks of code after the fifth are left out: axe takes a hundredth of a second for each of their words, whose colours
# are those of the first blocks.
SKIPPED = "data-skipped"
SKIP = f"[...document.querySelectorAll('div.highlight')].slice(5).forEach(block => block.setAttribute('{SKIPPED}', ''))"


def open_browser(playwright: Playwright) -> Browser:
    """Returns the browser of the machine."""
    program = os.environ.get("CHROMIUM") or shutil.which("chromium") or shutil.which("google-chrome")
    return playwright.chromium.launch(executable_path=program, args=["--no-sandbox", "--disable-gpu"])


def barriers(tab: Page, rules: dict[str, object]) -> list[str]:
    """Returns what axe-core finds on the page that is open, a line for each rule."""
    lines = []
    for violation in Axe().run(tab, {"exclude": [f"[{SKIPPED}]"]}, rules).response["violations"]:
        places = [(node["target"][0], node["failureSummary"].splitlines()[-1].strip()) for node in violation["nodes"]]
        nodes = [f"{place} ({why})" for place, why in places]
        lines.append(f"{violation['id']} ({violation['impact']}): {'; '.join(nodes[:3])}")
    return lines


def look(tab: Page, path: Path) -> list[str]:
    """Opens a page, looks at it in light, in dark and at the width of a phone, and returns a line for each problem."""
    noted: list[str] = []
    tab.on("console", lambda message: noted.append(message.text) if message.type == "error" else None)
    tab.on("pageerror", lambda error: noted.append(str(error)))
    tab.on("requestfailed", lambda request: noted.append(f"{request.url} is not there"))
    tab.goto(path.as_uri())
    tab.evaluate(SKIP)
    found = barriers(tab, RULES)
    tab.emulate_media(color_scheme="dark")
    found += [f"in dark: {line}" for line in barriers(tab, CONTRAST)]
    found += [f"on a desk: wider than its column: {text}" for text in tab.evaluate(TOO_WIDE)]
    tab.set_viewport_size(PHONE)
    found += [f"on a phone: wider than its column: {text}" for text in tab.evaluate(TOO_WIDE)]
    wide = tab.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth")
    if wide > 1:
        found.append(f"on a phone: {wide} pixels wider than the screen")
    return [f"{path.relative_to(SITE)}: {problem}" for problem in found + noted]


@functools.cache
def browser_here() -> Browser:
    """Returns the browser of this process."""
    return open_browser(sync_playwright().start())


def visit(path: Path) -> list[str]:
    """Looks at a page in the browser of this process."""
    # Without motion, since axe would measure colours in the middle of a transition.
    context = browser_here().new_context(color_scheme="light", reduced_motion="reduce", viewport=DESK)  # type: ignore[arg-type]
    lines = look(context.new_page(), path)
    context.close()
    return lines


def search(browser: Browser) -> list[str]:
    """Search from the disk, and return a line for each search that does not find its page."""
    keywords = tomllib.loads(Path(__file__).with_name("keywords.toml").read_text(encoding="utf-8"))
    lines = [
        f"keywords.toml names {page}, which is no page" for page in keywords if not (SITE / f"{page}.html").is_file()
    ]
    tab = browser.new_page()
    for words, wanted in SEARCHES.items():
        tab.goto(f"{(SITE / 'search.html').as_uri()}?q={quote(words)}")
        tab.wait_for_selector("#search-results .search li a, #search-results .search-summary", timeout=30_000)
        tab.wait_for_function(SEARCH_ENDED)
        links = tab.eval_on_selector_all("#search-results .search li a", "all => all.map(one => one.href)")
        places = [link.removeprefix(f"{SITE.as_uri()}/").partition("?")[0] for link in links]
        few = [place.partition("#")[0] for place in places[: 1 if words in FIRST else 3]]
        if wanted not in few:
            lines.append(f"a search for {words!r} finds {few} first, and not {wanted}")
    tab.close()
    return lines


def follow_redirects(browser: Browser) -> list[str]:
    """Open the old addresses of pages, and return a line for each that does not lead to the new one."""
    lines = []
    tab = browser.new_page()
    for old, new in doc_pages.MOVED.items():
        tab.goto(f"{(SITE / old).as_uri()}.html#anchor")
        try:
            tab.wait_for_url(f"{(SITE / new).as_uri()}.html#anchor", timeout=10_000)
        except TimeoutError:
            lines.append(f"{old}.html leads to {tab.url}, and not to {new}.html")
    tab.close()
    return lines


PREVIEW = """<body style="margin:0;width:1200px;height:630px;background:#fff;color:#1f2328;font-family:sans-serif">
<div style="padding:56px 72px"><img src="{static}/icon.svg" width="64" style="vertical-align:-14px">
<b style="font-size:60px;margin-left:20px">replicax</b>
<p style="font-size:32px;margin:16px 0 20px">The programming model of tf.distribute, on JAX</p>
<img src="{images}/doors_jax.svg" width="860"></div>"""


def draw_preview(browser: Browser) -> None:
    """Draw the picture that other sites show beside a link to the documentation."""
    root = Path(__file__).parents[1]
    static = root / "site" / "static"
    page = SITE.parent / "preview.html"
    page.write_text(
        PREVIEW.format(static=static.as_uri(), images=(root / "docs" / "images").as_uri()), encoding="utf-8"
    )
    tab = browser.new_page(viewport={"width": 1200, "height": 630})
    tab.goto(page.as_uri())
    tab.screenshot(path=static / "preview.png")
    tab.close()


def main() -> int:
    """Looks at the site, and returns the exit status."""
    options = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    options.add_argument("--pictures", type=Path, help="a folder for pictures of some pages")
    options.add_argument("--only", default="*", help="a pattern for the paths of pages, such as 'how-to/*'")
    options.add_argument("--source", action="store_true", help="look at the pages of source too")
    options.add_argument("--preview", action="store_true", help="draw site/static/preview.png, and nothing else")
    chosen = options.parse_args()
    pages = sorted(path for path in SITE.rglob("*.html") if "_static" not in path.parts)
    moved = {SITE / f"{old}.html" for old in doc_pages.MOVED}
    pages = [path for path in pages if path not in moved]
    if not chosen.source:
        pages = [path for path in pages if "_modules" not in path.parts]
    pages = [path for path in pages if path.relative_to(SITE).match(chosen.only)]
    with sync_playwright() as playwright:
        browser = open_browser(playwright)
        if chosen.preview:
            draw_preview(browser)
            return 0
        lines = search(browser) + follow_redirects(browser)
        if chosen.pictures:
            photograph(browser, chosen.pictures)
        browser.close()
    print("\n".join(lines), flush=True)
    # Large pages take many seconds, so they come first.
    pages.sort(key=lambda path: path.stat().st_size, reverse=True)
    with ProcessPoolExecutor(os.cpu_count(), multiprocessing.get_context("spawn")) as processes:
        for found in processes.map(visit, pages):
            lines += found
            for line in found:
                print(line, flush=True)
    print(f"{len(pages)} pages, {len(lines)} problems")
    return 1 if lines else 0


def photograph(browser: Browser, folder: Path) -> None:
    """Takes pictures of some pages, on a desk and on a phone, in light and in dark."""
    folder.mkdir(parents=True, exist_ok=True)
    names = ["index", "start/the-idea", "tutorials/first-loop", "how-to/index", "choosing-a-tool", "troubleshooting"]
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
