"""What modules keep between calls, as their source says: variables that functions change, and caches.

Constants are no state, and neither are locks, which guard some.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping

CONTAINERS = {"dict", "list", "set", "defaultdict", "deque", "OrderedDict", "Counter", "count"}
WEAK = {"WeakKeyDictionary", "WeakSet", "WeakValueDictionary"}
CHANGES = {
    "add", "append", "appendleft", "clear", "discard", "extend", "insert", "pop", "popitem", "popleft", "remove",
    "setdefault", "update",
}  # fmt: skip
DISPLAYS = ast.Dict | ast.List | ast.Set | ast.DictComp | ast.ListComp | ast.SetComp
FUNCTIONS = ast.FunctionDef | ast.AsyncFunctionDef
MUTABLE_BASES = {"local", "dict", "list", "set"}


def state_of(trees: Mapping[str, ast.Module]) -> set[str]:
    """Returns the dotted names of the state of modules, by their syntax trees."""
    classes: dict[str, list[ast.ClassDef]] = {}
    for tree in trees.values():
        for node in tree.body:
            if isinstance(node, ast.ClassDef):
                classes.setdefault(node.name, []).append(node)
    everywhere = {change for tree in trees.values() for change in _changed(tree)}
    return {
        f"{module}.{name}"
        for module, tree in trees.items()
        for name in _state(module.rpartition(".")[2], tree, classes, everywhere)
    }


def _state(
    module: str, tree: ast.Module, classes: Mapping[str, list[ast.ClassDef]], everywhere: set[str]
) -> Iterator[str]:
    changed = {name for function in _functions(tree) for name in _changed(function)}
    rebound = {name for node in ast.walk(tree) if isinstance(node, ast.Global) for name in node.names}
    for name, value in _assigned(tree.body):
        kind = _called(value)
        is_container = isinstance(value, DISPLAYS) or kind in CONTAINERS
        if (
            name in rebound
            or kind in WEAK
            or (is_container and (name in changed or f"{module}.{name}" in everywhere))
            or (kind in classes and _is_mutable(kind, classes))
        ):
            yield name
    for node in tree.body:
        if isinstance(node, FUNCTIONS) and any("cache" in ast.unparse(one) for one in node.decorator_list):
            yield node.name


def _functions(tree: ast.AST) -> Iterator[ast.AST]:
    return (node for node in ast.walk(tree) if isinstance(node, FUNCTIONS | ast.Lambda))


def _changed(tree: ast.AST) -> Iterator[str]:
    """Yields the names, with dots, of which code changes an element or an attribute."""
    for node in ast.walk(tree):
        targets: list[ast.expr] = []
        if isinstance(node, ast.Assign | ast.Delete):
            targets = [target.value for target in node.targets if isinstance(target, ast.Subscript | ast.Attribute)]
        elif isinstance(node, ast.AugAssign):
            targets = [node.target.value] if isinstance(node.target, ast.Subscript | ast.Attribute) else []
        elif isinstance(node, ast.Call):
            if isinstance(node.func, ast.Attribute) and node.func.attr in CHANGES:
                targets = [node.func.value]
            elif isinstance(node.func, ast.Name) and node.func.id == "next":
                targets = node.args[:1]
        yield from (ast.unparse(target) for target in targets)


def _assigned(body: list[ast.stmt]) -> Iterator[tuple[str, ast.expr | None]]:
    """Yields the variables of a module, with their values."""
    for node in body:
        if isinstance(node, ast.Assign):
            for target in node.targets:
                names = target.elts if isinstance(target, ast.Tuple) else [target]
                value = None if isinstance(target, ast.Tuple) else node.value
                yield from ((name.id, value) for name in names if isinstance(name, ast.Name))
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            yield node.target.id, node.value
        elif not isinstance(node, FUNCTIONS | ast.ClassDef):
            for part in ("body", "orelse", "finalbody"):
                yield from _assigned(getattr(node, part, []))


def _called(value: ast.expr | None) -> str:
    """Returns the name of the class or function that a value comes from; an empty text for other values."""
    if not isinstance(value, ast.Call):
        return ""
    function = value.func.value if isinstance(value.func, ast.Subscript) else value.func
    return ast.unparse(function).rpartition(".")[2]


def _is_mutable(name: str, classes: Mapping[str, list[ast.ClassDef]], below: tuple[str, ...] = ()) -> bool:
    """Returns whether methods of a class change its objects after they were made."""
    if name in MUTABLE_BASES | WEAK:
        return True
    for node in classes.get(name, []) if name not in below else []:
        methods = [one for one in node.body if isinstance(one, FUNCTIONS) and one.name not in ("__init__", "__new__")]
        if any(change.split(".")[0].split("[")[0] == "self" for method in methods for change in _changed(method)):
            return True
        bases = [ast.unparse(base).partition("[")[0].rpartition(".")[2] for base in node.bases]
        if any(_is_mutable(base, classes, (*below, name)) for base in bases):
            return True
    return False
