"""Check the sizes of modules, functions and classes.

python scripts/budget.py            fail if anything is over its limit and not listed in budget.toml
python scripts/budget.py --shrink   lower the figures of budget.toml, and drop entries that are no longer needed
python scripts/budget.py --members  print TensorFlow's names, for tensorflow_members.json (needs TensorFlow)

A class is counted over its whole MRO (classes of replicax only). It is imported first, so that methods that loops and
decorators create count too. budget.toml lists exceptions with their figures: none may
grow, and an entry with too large a figure is an error too.
"""

from __future__ import annotations

import ast
import enum
import functools
import importlib
import inspect
import json
import pkgutil
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
SOURCE = ROOT / "src" / "replicax"
EXCEPTIONS = ROOT / "scripts" / "budget.toml"
MEMBERS = ROOT / "scripts" / "tensorflow_members.json"

LIMITS = {"module lines": 450, "function lines": 60, "class methods": 25, "class lines": 300}
# TensorFlow dictates names of these classes and of their subclasses (see `record_members`). Methods with other names:
DICTATED_LIMITS = {"class methods": 45, "class lines": 600}
DICTATED = {
    "replicax._base.specs.TensorShape": "TensorShape",
    "replicax._data.dataset.Dataset": "data.Dataset",
    "replicax._engine.function.Function": "function",
    "replicax._data.ragged.RaggedTensor": "RaggedTensor",
    "replicax._strategies.extended.StrategyExtended": "distribute.StrategyExtended",
    "replicax._strategies.strategy.Strategy": "distribute.Strategy",
    "replicax._values.errors.NotATensor": "operators",
    "replicax._values.arrays.ArrayOperators": "operators",
    "replicax._variables.interface.Interface": "Variable",
    "replicax._variables.variable.Variable": "Variable",
    "replicax.tf._host.HostTensor": "Tensor",
    "replicax.tf._test_case.TestCase": "test.TestCase",
}
IN_TENSORFLOWS_PYTHON = {"replicax._export.to_tensorflow"}

Figures = dict[str, dict[str, int]]  # for each kind of limit, the figure of each module, function or class


def source_figures() -> Figures:
    """Count the lines of each module, and of each function without its docstring."""
    modules, functions = {}, {}
    for path in sorted(SOURCE.rglob("*.py")):
        name = str(path.relative_to(ROOT))
        modules[name] = path.read_text(encoding="utf-8").count("\n")
        for node in ast.walk(parse(path)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                key = f"{name}: {node.name}"
                functions[key] = max(functions.get(key, 0), code_lines(node))
    return {"module lines": modules, "function lines": functions}


@functools.cache
def parse(path: Path) -> ast.Module:
    """Parse a file."""
    return ast.parse(path.read_text(encoding="utf-8"), str(path))


def code_lines(node: Any) -> int:
    """Count the lines of a function or class without docstrings."""
    lines: int = node.end_lineno - node.lineno + 1
    for child in ast.walk(node):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) and ast.get_docstring(child):
            docstring: Any = child.body[0]
            lines -= docstring.end_lineno - docstring.lineno + 1
    return lines


def class_figures() -> tuple[Figures, dict[str, int]]:
    """Count methods and lines of each class over its MRO; also return all methods of classes that TensorFlow dictates.

    The methods of a class that TensorFlow dictates are counted without TensorFlow's names.
    """
    methods, lines, totals = {}, {}, {}
    for kind in sorted(set(classes()), key=full_name):
        key, names, dictated = full_name(kind), method_names(kind), names_from_tensorflow(kind)
        methods[key] = len(names - dictated)
        lines[key] = sum(code_lines(node) for base in own_mro(kind) if (node := class_node(base)))
        if dictated:
            totals[key] = len(names)
    return {"class methods": methods, "class lines": lines}, totals


def classes() -> Iterator[type]:
    """Import every module of replicax and yield the classes, also those inside of classes."""
    sys.path.insert(0, str(SOURCE.parent))
    package = importlib.import_module("replicax")
    for module in pkgutil.walk_packages(package.__path__, "replicax."):
        if module.name not in IN_TENSORFLOWS_PYTHON and not module.name.endswith("__main__"):
            yield from classes_in(importlib.import_module(module.name), module.name, "")


def classes_in(holder: Any, module: str, prefix: str) -> Iterator[type]:
    """Yield the classes that a module or class defines."""
    for value in list(vars(holder).values()):
        if isinstance(value, type) and value.__module__ == module and value.__qualname__ == prefix + value.__name__:
            yield value
            yield from classes_in(value, module, f"{value.__qualname__}.")


def own_mro(kind: type) -> list[type]:
    """Return the classes of replicax in a class's MRO."""
    return [base for base in kind.__mro__ if base.__module__.partition(".")[0] == "replicax"]


def full_name(kind: type) -> str:
    """Return the name of a class with its module."""
    return f"{kind.__module__}.{kind.__qualname__}"


def class_node(kind: type) -> ast.AST | None:
    """Return the definition of a class in its module's source."""
    node: Any = parse(Path(inspect.getfile(sys.modules[kind.__module__])))
    for part in kind.__qualname__.split("."):
        nodes = (child for child in ast.walk(node) if isinstance(child, ast.ClassDef) and child.name == part)
        if (node := next(nodes, None)) is None:
            return None
    return node


def method_names(kind: type) -> set[str]:
    """Return the names of the methods and properties that replicax gives a class."""
    return {name for base in own_mro(kind) for name, value in vars(base).items() if is_method(base, name, value)}


def is_method(kind: type, name: str, value: Any) -> bool:
    """Return whether a class attribute is a method or property of ours, not one of dataclasses, enum or typing."""
    if isinstance(value, type) or (issubclass(kind, enum.Enum) and name.startswith("_")):
        return False
    for attribute in ("fget", "func", "__func__", "__wrapped__"):
        value = getattr(value, attribute, None) or value
    if inspect.isfunction(value):
        return Path(value.__code__.co_filename).is_relative_to(SOURCE)
    return callable(value) or (hasattr(type(value), "__get__") and type(value).__module__.startswith("replicax."))


@functools.cache
def tensorflow_members() -> dict[str, list[str]]:
    """Return the names of TensorFlow's classes, as `record_members` has recorded them."""
    names: dict[str, list[str]] = json.loads(MEMBERS.read_text(encoding="utf-8"))
    return names


def names_from_tensorflow(kind: type) -> set[str]:
    """Return the names that TensorFlow dictates for a class."""
    originals = [DICTATED[name] for base in own_mro(kind) if (name := full_name(base)) in DICTATED]
    return {name for original in originals for name in tensorflow_members()[original]}


def record_members() -> dict[str, list[str]]:
    """Return the public names and special methods of TensorFlow's classes, and Python's operators on arrays."""
    import numpy as np
    import tensorflow as tf

    classes = {
        path: functools.reduce(getattr, path.split("."), tf) for path in DICTATED.values() if path != "operators"
    }
    names = {path: set(dir(kind)) for path, kind in classes.items()}
    names["Variable"] |= {*dir(tf.Variable(1.0))}  # `numpy` and the like are in a subclass
    names["function"] = {*dir(tf.function(abs))}
    names["Tensor"] |= {*dir(tf.constant(1.0))}
    names["operators"] = {name for name in dir(np.ndarray) if name.startswith("__")}
    return {
        path: sorted(name for name in members if name.startswith("__") or not name.startswith("_"))
        for path, members in sorted(names.items())
    }


def limit_of(kind: str, name: str, totals: dict[str, int]) -> int:
    """Return the limit for a module, function or class."""
    return DICTATED_LIMITS.get(kind, LIMITS[kind]) if name in totals else LIMITS[kind]


def check(figures: Figures, totals: dict[str, int], exceptions: Figures) -> list[str]:
    """Return a line for each figure over its limit, and for each exception with too large a figure."""
    errors = []
    for kind, counts in figures.items():
        listed = exceptions.get(kind, {})
        for name, figure in counts.items():
            limit = listed.get(name, limit_of(kind, name, totals))
            if figure > limit:
                errors.append(f"{name}: {figure} {kind}, at most {limit}")
        errors += [
            f"{name}: {counts.get(name, 0)} {kind}, but budget.toml lists {figure}: run scripts/budget.py --shrink"
            for name, figure in listed.items()
            if counts.get(name, 0) < figure
        ]
    return errors


def shrink(figures: Figures, totals: dict[str, int], exceptions: Figures) -> Figures:
    """Return the exceptions with lower figures where these have become smaller, without needless ones."""
    return {
        kind: {
            name: min(figure, figures[kind][name])
            for name, figure in listed.items()
            if figures[kind].get(name, 0) > limit_of(kind, name, totals)
        }
        for kind, listed in exceptions.items()
    }


def write(exceptions: Figures) -> None:
    """Write budget.toml."""
    lines = ["# Exceptions from the limits of budget.py, with their figures. Entries may only shrink."]
    for kind, listed in exceptions.items():
        lines += ["", f'["{kind}"]', *(f'"{name}" = {figure}' for name, figure in sorted(listed.items()))]
    EXCEPTIONS.write_text("\n".join(lines) + "\n", encoding="utf-8")


def report(figures: Figures, totals: dict[str, int], exceptions: Figures) -> None:
    """Print the limits, the classes that TensorFlow dictates, and how many exceptions there are."""
    print("Limits:", ", ".join(f"{limit} {kind}" for kind, limit in LIMITS.items()))
    dictated = ", ".join(f"{limit} {kind}" for kind, limit in DICTATED_LIMITS.items())
    print(f"Limits of classes that TensorFlow dictates: {dictated}. All their methods, and those with other names:")
    for name, total in totals.items():
        if figures["class methods"][name] > LIMITS["class methods"] or name in DICTATED:
            print(f"  {name}: {total}, {figures['class methods'][name]}")
    print("Exceptions in scripts/budget.toml:", sum(map(len, exceptions.values())))


def main() -> None:
    """Check the sizes, or follow the option."""
    if "--members" in sys.argv:
        print("{\n" + ",\n".join(f" {json.dumps(k)}: {json.dumps(v)}" for k, v in record_members().items()) + "\n}")
        return
    of_classes, totals = class_figures()
    figures = {**source_figures(), **of_classes}
    exceptions = tomllib.loads(EXCEPTIONS.read_text(encoding="utf-8"))
    if "--shrink" in sys.argv:
        exceptions = shrink(figures, totals, exceptions)
        write(exceptions)
    report(figures, totals, exceptions)
    if errors := check(figures, totals, exceptions):
        sys.exit("\n".join(errors))


if __name__ == "__main__":
    main()
