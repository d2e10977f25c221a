"""Makes the tables and the pictures of RESULTS.md from the numbers that all.py wrote.

    python benchmarks/report.py results.json                # into RESULTS.md, and docs/images
    python benchmarks/report.py results.json --print        # the tables alone, to the terminal
    python benchmarks/report.py --redraw                    # the pictures alone, from the tables of the page

Both also write the summary of RESULTS.md into docs/explanation/performance.md.

A table stands between two comments, `<!-- table: NAME -->` and `<!-- end -->`, and is put in the place of what was
between them. A benchmark that is not in the file leaves its tables and its picture as they are.
"""

from __future__ import annotations

import argparse
import importlib
import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import pictures
from sides import HERE, TARGET_COLUMNS, TENSORFLOW, Table, Target, ratio

PAGE = HERE / "RESULTS.md"
SUMMARY_PAGE = HERE.parent / "docs" / "explanation" / "performance.md"
IMAGES = HERE.parent / "docs" / "images"


class Benchmark(NamedTuple):
    """A script here, what all.py tells it, and which of all.py's interpreters it takes."""

    script: str
    arguments: tuple[str, ...] = ()
    takes: tuple[str, ...] = ("tensorflow",)


BENCHMARKS = {
    "step": Benchmark("step"),
    "variables": Benchmark("variables", ("--programs", "add"), ()),
    "train": Benchmark("variables", ("--programs", "train", "--variables", "500", "--replicas", "4"), ()),
    "epoch": Benchmark("epoch"),
    "uneven": Benchmark("uneven", (), ()),
    "first": Benchmark(
        "step",
        ("--first-step", "1,8,64,256,512", "--models", "transformer", "--contenders", "replicax; by hand, packed"),
    ),
    "input": Benchmark("input"),
    "servers": Benchmark("parameter_servers"),
    "memory": Benchmark("memory", (), ()),
    "sharded": Benchmark("sharded", (), ()),
    "start": Benchmark("start"),
    "gpu": Benchmark("gpu", (), ("torch",)),
    "tpu": Benchmark("tpu", (), ()),
    "gpu steps": Benchmark("gpu_compiler", (), ()),
}


def tables(name: str, found: dict[str, Any]) -> dict[str, Table]:
    script = BENCHMARKS[name].script
    made = input_tables(found) if script == "input" else importlib.import_module(script).tables(found)
    return {key if key != "variables" else name: table for key, table in made.items()}


def targets(name: str, found: dict[str, Any]) -> list[Target]:
    script = BENCHMARKS[name].script
    if script == "input":
        return input_targets(found)
    made = getattr(importlib.import_module(script), "targets", lambda found: [])(found)
    return [] if name == "train" else made


def input_tables(found: dict[str, Any]) -> dict[str, Table]:
    module = importlib.import_module("input")
    results = found["input"]
    made = {"input": ("Milliseconds of a pass", *module.table(results, list(results[0]["rounds"])))}
    if found.get("steps"):
        made["input steps"] = ("Milliseconds of a step and its input", *module.step_table(found["steps"]))
    return made


def input_targets(found: dict[str, Any]) -> list[Target]:
    shuffled = {
        r["dataset"]: ratio(r["rounds"], TENSORFLOW, "replicax")
        for r in found["input"]
        if r["dataset"].startswith("shuffle")
    }
    made = [Target("shuffled batches a second against TensorFlow's", 5, shuffled, least=True)]
    module = importlib.import_module("input")
    steps = {module.case(r): module.added(r, "replicax") for r in found.get("steps", [])}
    return [*made, Target("a step with its input against that step alone", 1.02, steps)] if steps else made


def markdown(table: Table) -> str:
    _, head, rows = table
    numeric = [all(re.match(r"[\d–]", row[i]) for row in rows) for i in range(len(head))]
    lines = [head, ["--:" if right else "---" for right in numeric], *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def machine(results: dict[str, Any]) -> str:
    """On what, when and with what all of it was measured."""
    dates = sorted({found["date"] for found in results.values()})
    versions: dict[str, str] = {}
    for found in results.values():
        versions |= found["versions"]
    on = next(iter(results.values()))["machine"]
    quick = " Short rounds (`--quick`): these numbers show that it works, and nothing else." if _quick(results) else ""
    said = ", ".join(f"{name} {number}" for name, number in versions.items())
    return f"{dates[0] if len(dates) == 1 else f'{dates[0]} to {dates[-1]}'}; {on}; {said}.{quick}"


def _quick(results: dict[str, Any]) -> bool:
    return any(found.get("quick") for found in results.values())


def filled(page: str, blocks: dict[str, str]) -> str:
    """The page, with these blocks between their comments.

    >>> filled("<!-- table: a -->\\nold\\n<!-- end -->", {"a": "new"})
    '<!-- table: a -->\\nnew\\n<!-- end -->'
    """
    for name, text in blocks.items():
        pattern = re.compile(rf"(<!-- table: {re.escape(name)} -->\n).*?(<!-- end -->)", re.DOTALL)
        page = pattern.sub(lambda found, text=text: f"{found[1]}{text}\n{found[2]}", page)
    return page


def with_rows(table: str, other: str) -> str:
    """A table in which the rows of another one take the place of those with the same first cell, or come last.

    >>> with_rows("| a | 1 |\\n| b | 2 |", "| b | 3 |\\n| c | 4 |")
    '| a | 1 |\\n| b | 3 |\\n| c | 4 |'
    """
    rows = {row.split("|")[1]: row for text in (table, other) for row in text.strip().splitlines()}
    return "\n".join(rows.values())


def draw(page: str, names: Iterable[str], folder: Path) -> None:
    """Draws pictures of these benchmarks, from the tables of the page."""
    folder.mkdir(parents=True, exist_ok=True)
    tables = pictures.tables_of(page)
    for name in names:
        pictures.PICTURES[name][0](tables).save(folder / f"{name}.svg")
        if name == "step":
            pictures.step(tables, replicas="4").save(folder / "summary.svg")


def summary(page: str) -> Table:
    """Return the table of performance.md: how much time or memory replicax takes, as a multiple of something else's."""
    tables = pictures.tables_of(page)

    def spread_of(name: str, column: str, **cells: str) -> str:
        texts = [row[column] for row in tables[name] if all(row[key] == cell for key, cell in cells.items())]
        values = [float(text.partition(" ")[0]) for text in texts if text[0].isdigit()]
        least, most = f"{min(values):.2f}", f"{max(values):.2f}"
        return least if least == most else f"{least} to {most}"

    sharded = spread_of("sharded", "replicax / it", contender="NamedSharding")
    rows = [
        ["a training step", "JAX by hand", spread_of("steps", "replicax / best")],
        ["a training step", "TensorFlow", spread_of("steps", "/ TensorFlow")],
        ["a step with sharded variables", "JAX with `NamedSharding`", sharded],
        ["short steps, 32 in a call", "JAX by hand", spread_of("epoch", "/ by hand", contender="several")],
        ["memory of a device", "JAX by hand", spread_of("memory", "device / best", contender="replicax")],
    ]
    return "Summary", ["what", "compared with", "replicax takes"], rows


def write_summary(page: str) -> None:
    """Write the summary of a page into performance.md."""
    text = filled(SUMMARY_PAGE.read_text(encoding="utf-8"), {"summary": markdown(summary(page))})
    SUMMARY_PAGE.write_text(text, encoding="utf-8")


def blocks_of(results: dict[str, Any]) -> dict[str, str]:
    """The text between each pair of comments: what was measured on, how the targets fare, tables and their pictures."""
    made = {key: table for name, found in results.items() for key, table in tables(name, found).items()}
    rows = [target.row() for name, found in results.items() for target in targets(name, found)]
    made["targets"] = "Targets", TARGET_COLUMNS, rows
    blocks = {"machine": machine(results), **{key: markdown(table) for key, table in made.items()}}
    for name, (_, key) in pictures.PICTURES.items():
        if name in results:
            blocks[key] += f"\n\n![{made[key][0]}](../docs/images/{name}.svg)"
    return blocks


def main() -> None:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("results", type=Path, nargs="?")
    made.add_argument("--redraw", action="store_true", help="draw all pictures anew, from the tables of the page")
    made.add_argument("--print", action="store_true", help="show the tables, change no file")
    options = made.parse_args()
    if options.results is None:
        if not options.redraw:
            made.error("name the file with the results, or pass --redraw")
        page = PAGE.read_text(encoding="utf-8")
        write_summary(page)
        return draw(page, pictures.PICTURES, IMAGES)
    results = json.loads(options.results.read_text())
    blocks = blocks_of(results)
    if options.print:
        for key, block in blocks.items():
            print(f"\n{key}\n\n{block}")
        return
    page = PAGE.read_text(encoding="utf-8")
    if not {*results} >= {*BENCHMARKS} - {"gpu", "tpu", "gpu steps"}:
        del blocks["machine"]  # the page says itself what was measured when
    blocks["targets"] = with_rows(
        page.split("<!-- table: targets -->\n")[1].split("<!-- end -->")[0], blocks["targets"]
    )
    page = filled(page, blocks)
    PAGE.write_text(page, encoding="utf-8")
    write_summary(page)
    draw(page, [name for name in pictures.PICTURES if name in results], IMAGES)


if __name__ == "__main__":
    main()
