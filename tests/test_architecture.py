"""docs/explanation/architecture.md names packages, files and functions that are there."""

from __future__ import annotations

import ast
import re
import textwrap
from pathlib import Path

import pytest
from module_state import state_of
from test_layers import GRAPH, PACKAGES

from replicax._strategies.replicated import MirroringExtended, ReplicatedExtended

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "explanation" / "architecture.md").read_text(encoding="utf-8")
SOURCE = ROOT / "src" / "replicax"
LONGEST = 8  # files in a walk


def section(title: str) -> str:
    return PAGE.split(f"\n## {title}\n")[1].split("\n## ")[0]


def rows(text: str) -> list[list[str]]:
    cells = [re.split(r"\s*\|\s*", line.strip("| ")) for line in text.splitlines() if line.startswith("|")]
    return cells[2:]  # after the head


WALKS = {walk.split("\n", 1)[0]: rows(walk) for walk in section("Seven walks").split("\n### ")[1:]}


def test_the_table_of_packages_has_all_of_them_in_their_order():
    named = [name.strip("`") for name, _ in rows(section("The packages"))]
    assert [name for name in named if name in PACKAGES] == list(PACKAGES)


def test_the_table_of_state_has_all_that_modules_keep():
    listed = set()
    for _, where, why in rows(section("What a process keeps")):
        assert why
        for group in where.split("; "):
            module, names = group.split(": ")
            listed |= {f"{module.strip('`')}.{name}" for name in re.findall(r"`(\w+)`", names)}
    kept = state_of(GRAPH.trees)
    assert kept == listed, (
        "The table under 'What a process keeps' in docs/explanation/architecture.md differs from the source. Not "
        f"listed: {sorted(kept - listed)}; gone: {sorted(listed - kept)}. Rather give new state to an object."
    )


def test_state_of_modules_is_found():
    source = """
        import functools
        LIMITS, constant = {"a": 1}, ("a",)
        count = 0
        known = {}

        class Counter:
            def add(self): self.n += 1

        class Point:
            def __init__(self): self.x = 1

        counter = Counter()
        point = Point()
        listed = []

        @functools.cache
        def cached(x): return LIMITS[x]

        def change():
            global count
            count += 1
            listed.append(1)
            known["a"] = 2
            local = []
            local.append(1)
        """
    trees = {
        "package.one": ast.parse(textwrap.dedent(source)),
        "two": ast.parse("def f():\n    one.far.add(1)\nfar = []"),
    }
    trees["three.one"] = ast.parse("far: set[int] = set()")
    found = {"package.one." + name for name in ("count", "counter", "listed", "cached", "known")}
    assert state_of(trees) == found | {"three.one.far"}


def test_there_are_seven_walks():
    assert len(WALKS) == 7


@pytest.mark.parametrize("walk", WALKS)
def test_each_walk_leads_through_names_that_are_there(walk):
    files = [row[0].strip("`") for row in WALKS[walk]]
    assert 0 < len(files) <= LONGEST and len(set(files)) == len(files)
    for file, names, _ in WALKS[walk]:
        tree = ast.parse((SOURCE / file.strip("`")).read_text(encoding="utf-8"))
        defined = {getattr(node, "name", None) for node in ast.walk(tree)}
        missing = set(re.findall(r"`(\w+)`", names)) - defined
        assert names.startswith("`") and not missing, f"{walk}: {file} has no {missing}"


def test_the_page_lists_the_abstract_methods_of_strategies():
    text = section("Where to add what").split("| name | what it is |")[1].split("\n\n")[0]
    named = set(re.findall(r"`(\w+)", "".join(line.split("|")[1] for line in text.splitlines()[2:])))
    assert named - {"_variables_live_once"} == ReplicatedExtended.__abstractmethods__
    assert not MirroringExtended.__abstractmethods__


def test_files_that_the_page_names_are_there():
    named = set(re.findall(r"`((?:_?\w+/)+\w+\.py|\w+\.py)`", PAGE))
    places = [SOURCE, ROOT, *(SOURCE / package for package in PACKAGES)]
    gone = [name for name in named if not any((place / name).is_file() for place in places)]
    assert named and not gone, f"docs/explanation/architecture.md names files that are not there: {gone}"
