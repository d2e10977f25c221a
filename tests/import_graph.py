"""The graph of a package's own imports, as its source says them; nothing is imported to know it."""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple


class Import(NamedTuple):
    """One import statement's module: its dotted name, the line, and when it is imported.

    `top_level`: importing the importer imports it. `for_types`: only type checkers import it.
    """

    module: str
    line: int
    top_level: bool
    for_types: bool


class Graph:
    """The modules of a package, by their dotted names inside of it, and their imports.

    A folder's `__init__` has the folder's name; that of the package itself is `__init__`. Sources are parsed when
    `trees` or `imports` is first asked for.
    """

    def __init__(self, package: Path):
        self.package = package
        self.paths = dict(sorted((self._name(path), path) for path in package.rglob("*.py")))

    @functools.cached_property
    def trees(self) -> dict[str, ast.Module]:
        """The syntax trees of the modules."""
        return {name: ast.parse(path.read_text(encoding="utf-8")) for name, path in self.paths.items()}

    @functools.cached_property
    def imports(self) -> dict[str, list[Import]]:
        """The imports of each module."""
        return {name: list(self._imports(name)) for name in self.paths}

    def _name(self, path: Path) -> str:
        parts = path.relative_to(self.package).with_suffix("").parts
        return ".".join(parts[:-1] if parts[-1] == "__init__" and len(parts) > 1 else parts)

    def _imports(self, module: str) -> Iterator[Import]:
        """Yields all imports of a module: at its top, inside of functions, and for type checkers."""
        here = [self.package.name, *self.paths[module].relative_to(self.package).with_suffix("").parts]
        waiting: list[tuple[ast.AST, bool, bool]] = [(self.trees[module], True, False)]
        while waiting:
            node, top, types = waiting.pop()
            if isinstance(node, ast.Import):
                yield from (Import(alias.name, node.lineno, top, types) for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                start = here[: len(here) - node.level] if node.level else []
                base = ".".join([*start, *filter(None, [node.module])])
                # `from package import name` may import a module of the package.
                yield from (Import(f"{base}.{alias.name}", node.lineno, top, types) for alias in node.names)
            elif isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
                waiting += [(child, top, True) for child in node.body]
                waiting += [(child, top, types) for child in node.orelse]
            else:
                top = top and not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
                waiting += [(child, top, types) for child in ast.iter_child_nodes(node)]

    def own_module(self, name: str) -> str | None:
        """Returns the module of this package that importing `name` is about; None for other packages."""
        parts = name.split(".")
        if parts[0] != self.package.name:
            return None
        for end in range(len(parts), 1, -1):
            if (module := ".".join(parts[1:end])) in self.paths:
                return module
        return "__init__"

    def edges(self) -> dict[str, set[str]]:
        """Returns the modules of this package that each module imports, anywhere in it and for types too."""
        found: dict[str, set[str]] = {}
        for module, all_of_them in self.imports.items():
            targets = {self.own_module(imported.module) for imported in all_of_them}
            found[module] = {target for target in targets if target is not None and target != module}
        return found


def circles(edges: Mapping[str, set[str]]) -> list[list[str]]:
    """Returns the groups of two or more nodes that reach each other, each sorted: Tarjan's algorithm.

    >>> circles({"a": {"b"}, "b": {"c"}, "c": {"b"}, "d": {"a"}})
    [['b', 'c']]
    """
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found: list[list[str]] = []

    def visit(node: str) -> None:
        index[node] = low[node] = len(index)
        stack.append(node)
        for target in sorted(edges.get(node, ())):
            if target not in index:
                visit(target)
                low[node] = min(low[node], low[target])
            elif target in stack:
                low[node] = min(low[node], index[target])
        if low[node] == index[node]:
            group = stack[stack.index(node) :]
            del stack[stack.index(node) :]
            if len(group) > 1:
                found.append(sorted(group))

    for node in sorted(edges):
        if node not in index:
            visit(node)
    return sorted(found)
