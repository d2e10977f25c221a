"""Makes the tables and the pictures of docs/explanation/performance.md from the numbers that all.py wrote.

    python benchmarks/report.py results.json                # into docs/explanation/performance.md and docs/images
    python benchmarks/report.py results.json --print        # the tables alone, to the terminal

A table stands between two comments, `<!-- table: NAME -->` and `<!-- end -->`, and is put in the place of what was
between them. A benchmark that is not in the file leaves its tables and its picture as they are.
"""

from __future__ import annotations

import argparse
import importlib
import json
import re
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from sides import BARS, BY_HAND, HERE, TENSORFLOW, Bar, Table, best, ratio

PAGE = HERE.parent / "docs" / "explanation" / "performance.md"
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
}


def tables(name: str, found: dict[str, Any]) -> dict[str, Table]:
    script = BENCHMARKS[name].script
    made = input_tables(found) if script == "input" else importlib.import_module(script).tables(found)
    return {key if key != "variables" else name: table for key, table in made.items()}


def bars(name: str, found: dict[str, Any]) -> list[Bar]:
    script = BENCHMARKS[name].script
    if script == "input":
        return input_bars(found)
    made = getattr(importlib.import_module(script), "bars", lambda found: [])(found)
    return [] if name == "train" else made


def input_tables(found: dict[str, Any]) -> dict[str, Table]:
    module = importlib.import_module("input")
    results = found["input"]
    made = {"input": ("Milliseconds of a pass", *module.table(results, list(results[0]["rounds"])))}
    if found.get("steps"):
        made["input steps"] = ("Milliseconds of a step and its input", *module.step_table(found["steps"]))
    return made


def input_bars(found: dict[str, Any]) -> list[Bar]:
    shuffled = {
        r["dataset"]: ratio(r["rounds"], TENSORFLOW, "replicax")
        for r in found["input"]
        if r["dataset"].startswith("shuffle")
    }
    made = [Bar("shuffled batches a second against TensorFlow's", 5, shuffled, least=True)]
    module = importlib.import_module("input")
    steps = {module.case(r): module.added(r, "replicax") for r in found.get("steps", [])}
    return [*made, Bar("a step with its input against that step alone", 1.02, steps)] if steps else made


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


# Pictures: one for each of these, of the numbers of one benchmark.


def draw_step(axes: Any, found: dict[str, Any]) -> None:
    models = list(dict.fromkeys(r["model"] for r in found["steps"]))
    numbers = sorted({r["replicas"] for r in found["steps"]})
    for i, n in enumerate(numbers):
        heights = [
            float(ratio(r["rounds"], "replicax", best(r["rounds"], BY_HAND)))
            for model in models
            for r in found["steps"]
            if (r["model"], r["replicas"]) == (model, n)
        ]
        places = [m + (i - (len(numbers) - 1) / 2) * 0.8 / len(numbers) for m in range(len(heights))]
        axes.bar(places, heights, 0.8 / len(numbers), label=f"{n} replica{'s' if n > 1 else ''}")
    axes.axhline(1, color="black", linewidth=0.8)
    axes.set_xticks(range(len(models)), models)
    axes.set_ylabel("time of a step / best form by hand")
    axes.legend(loc="lower right")


def draw_epoch(axes: Any, found: dict[str, Any]) -> None:
    from training import STEPS

    last = found["epochs"][-1]
    medians = {name: 1e6 * statistics.median(times) / STEPS for name, times in last["rounds"].items()}
    names = list(medians)[::-1]
    colours = {"by hand": "tab:gray", "TensorFlow": "tab:orange"}
    axes.barh(names, [medians[n] for n in names], color=[colours.get(n.split(",")[0], "tab:blue") for n in names])
    axes.set_xlabel(f"µs of a step, input included, {last['replicas']} replicas")


def draw_first(axes: Any, found: dict[str, Any]) -> None:
    for name in dict.fromkeys(r["contender"] for r in found["first_steps"]):
        points = [(r["replicas"], r["total"]) for r in found["first_steps"] if r["contender"] == name]
        axes.plot(*zip(*points), marker="o", label=name)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xlabel("replicas")
    axes.set_ylabel("seconds to the first step")
    axes.legend()


def draw_variables(axes: Any, found: dict[str, Any]) -> None:
    most = max(r["replicas"] for r in found["variables"])
    results = [r for r in found["variables"] if r["replicas"] == most]
    for name in results[0]["rounds"]:
        points = [(r["variables"], 1e6 * statistics.median(r["rounds"][name])) for r in results]
        axes.plot(*zip(*points), marker="o", label=name)
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlabel(f"variables, on {most} replicas")
    axes.set_ylabel("µs of a call")
    axes.legend()


# Benchmark -> how its picture is drawn, and the table below which it stands.
PICTURES: dict[str, tuple[Callable[[Any, dict[str, Any]], None], str]] = {
    "step": (draw_step, "steps"),
    "epoch": (draw_epoch, "epoch"),
    "first": (draw_first, "first_steps"),
    "variables": (draw_variables, "variables"),
}


def draw(results: dict[str, Any], folder: Path) -> None:
    """A picture of each benchmark that there is one for, as SVG that is the same for the same numbers."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    folder.mkdir(parents=True, exist_ok=True)
    with plt.rc_context({"svg.fonttype": "none", "svg.hashsalt": "replicax", "font.size": 9}):
        for name, (drawn, _) in PICTURES.items():
            if name in results:
                figure, axes = plt.subplots(figsize=(6, 3), layout="constrained")
                drawn(axes, results[name])
                axes.spines[["top", "right"]].set_visible(False)
                figure.savefig(folder / f"{name}.svg", metadata={"Date": None})
                plt.close(figure)


def blocks_of(results: dict[str, Any]) -> dict[str, str]:
    """The text between each pair of comments: what was measured on, how the bars fare, tables and their pictures."""
    made = {key: table for name, found in results.items() for key, table in tables(name, found).items()}
    rows = [bar.row() for name, found in results.items() for bar in bars(name, found)]
    made["bars"] = "Bars", BARS, rows
    blocks = {"machine": machine(results), **{key: markdown(table) for key, table in made.items()}}
    for name, (_, key) in PICTURES.items():
        if name in results:
            blocks[key] += f"\n\n![{made[key][0]}](images/{name}.svg)"
    return blocks


def main() -> None:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("results", type=Path)
    made.add_argument("--print", action="store_true", help="show the tables, change no file")
    options = made.parse_args()
    results = json.loads(options.results.read_text())
    blocks = blocks_of(results)
    if options.print:
        for key, block in blocks.items():
            print(f"\n{key}\n\n{block}")
        return
    page = PAGE.read_text(encoding="utf-8")
    if not {*results} >= {*BENCHMARKS} - {"gpu", "tpu"}:
        del blocks["machine"]  # the page says itself what was measured when
    blocks["bars"] = with_rows(page.split("<!-- table: bars -->\n")[1].split("<!-- end -->")[0], blocks["bars"])
    draw(results, IMAGES)
    PAGE.write_text(filled(page, blocks), encoding="utf-8")


if __name__ == "__main__":
    main()
