"""Finds where Python code uses names of TensorFlow, without running it."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from replicax.tf import _members

_TENSORFLOW = "tensorflow"
_CATCHING = {"ImportError", "ModuleNotFoundError", "AttributeError", "Exception", "BaseException"}


class Use(NamedTuple):
    """A place where code uses a name.

    Attributes:
        line: its line.
        name: the name in `tensorflow`, such as "keras.layers.Dense"; that of a library where it is another's.
        keywords: the names of the arguments, where it is called.
        caught: whether the code goes on if the name is not there.
        library: whether it is the import of another library.
        member: whether it is a member of an object, by its name alone.
    """

    line: int
    name: str
    keywords: tuple[str, ...] = ()
    caught: bool = False
    library: bool = False
    member: bool = False


def uses(code: str | bytes, filename: str) -> list[Use]:
    """Returns the uses of TensorFlow's names, and imports of other libraries, in the order of the lines.

    Raises:
        SyntaxError: the code is not Python's.
    """
    module = ast.parse(code, filename)
    reader = _Reader(_members.values(module))
    reader.visit(module)
    of_keras = any(not use.member and (not use.library or use.name.startswith("keras")) for use in reader.found)
    return sorted(
        use for use in reader.found if not use.member or (of_keras and use.name.partition("(")[0] not in reader.methods)
    )


class _Scope(dict[str, str | None]):
    """What names of a module, class or function are: names in `tensorflow`, or None for anything else."""

    is_class = False


class _Reader(ast.NodeVisitor):
    """Follows names from their imports, through assignments to other names, to where they are used."""

    def __init__(self, assigned: Mapping[str, ast.expr]) -> None:
        self.found: list[Use] = []
        self._assigned = assigned
        self.methods: set[str] = set()  # names of functions that the code defines
        self._scopes = [_Scope()]
        self._caught = 0

    def _use(self, node: ast.AST, name: str, keywords: tuple[str, ...] = (), library: bool = False) -> None:
        if name:
            self.found.append(Use(getattr(node, "lineno", 0), name, keywords, bool(self._caught), library))

    def _member(self, node: ast.AST, name: str | None) -> None:
        if name is not None:
            self.found.append(Use(getattr(node, "lineno", 0), name, caught=bool(self._caught), member=True))

    def _name(self, node: ast.AST) -> str | None:
        """Returns the name in `tensorflow` that an expression is; "" for `tensorflow` itself."""
        if isinstance(node, ast.Name):
            for place, scope in enumerate(reversed(self._scopes)):
                if node.id in scope and (not scope.is_class or place == 0):
                    return scope[node.id]
        elif isinstance(node, ast.Attribute) and (outer := self._name(node.value)) is not None:
            return _joined(outer, node.attr)
        return None

    # Imports

    def visit_Import(self, node: ast.Import) -> None:
        for alias in node.names:
            root = alias.name.partition(".")[0]
            inner = _inside(alias.name)
            if inner is None:
                self._use(node, alias.name, library=True)
            else:
                self._use(node, inner)
            self._scopes[-1][alias.asname or root] = inner if alias.asname else _inside(root)

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        inner = None if node.level else _inside(node.module or "")
        if node.level == 0 and inner is None:
            self._use(node, node.module or "", library=True)
        for alias in node.names:
            name = None if inner is None else _joined(inner, alias.name)
            if name is not None and alias.name != "*":
                self._use(node, name)
            self._scopes[-1][alias.asname or alias.name] = name

    # Uses

    def visit_Attribute(self, node: ast.Attribute) -> None:
        name = self._name(node)
        if name is None:
            self._member(node, _members.of_attribute(node, self._assigned))
            self.generic_visit(node)
        else:
            self._use(node, name)

    def visit_Name(self, node: ast.Name) -> None:
        if isinstance(node.ctx, ast.Load):
            self._use(node, self._name(node) or "")

    def visit_Call(self, node: ast.Call) -> None:
        for entry in _members.of_call(node, self._assigned):
            self._member(node, entry)
        name = self._name(node.func)
        if name:
            self._use(node.func, name, tuple(each.arg for each in node.keywords if each.arg))
        else:
            self.visit(node.func)
        match node:
            case ast.Call(func=ast.Name(id="getattr"), args=[base, ast.Constant(value=str(attribute)), *default]):
                if (outer := self._name(base)) is not None:
                    self._caught += bool(default)
                    self._use(node, _joined(outer, attribute))
                    self._caught -= bool(default)
        for argument in [*node.args, *node.keywords]:
            self.visit(argument)

    # What may be missing

    def visit_Try(self, node: ast.Try) -> None:
        catches = any(_catches(handler.type) for handler in node.handlers)
        self._caught += catches
        for statement in node.body:
            self.visit(statement)
        self._caught -= catches
        for other in [*node.handlers, *node.orelse, *node.finalbody]:
            self.visit(other)

    def visit_If(self, node: ast.If) -> None:
        asks = any(isinstance(part, ast.Name) and part.id == "hasattr" for part in ast.walk(node.test))
        self._caught += asks
        self.generic_visit(node)
        self._caught -= asks

    # Names that are given other values

    def visit_Assign(self, node: ast.Assign) -> None:
        self.visit(node.value)
        nothing = isinstance(node.value, ast.Constant) and node.value.value is None  # `tf = None` if it is not there
        for target in node.targets:
            if isinstance(target, ast.Name):
                if not nothing:
                    self._scopes[-1][target.id] = self._name(node.value)
            else:
                self.visit(target)
                for name in _stored([target]):
                    self._scopes[-1][name] = None

    def visit_FunctionDef(self, node: ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda) -> None:
        arguments = node.args
        self.methods.add(getattr(node, "name", ""))
        for outside in [*arguments.defaults, *arguments.kw_defaults, *getattr(node, "decorator_list", [])]:
            if outside is not None:
                self.visit(outside)
        every = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs, arguments.vararg, arguments.kwarg]
        for annotation in [*(each.annotation for each in every if each), getattr(node, "returns", None)]:
            if annotation is not None:
                self.visit(annotation)
        body: list[ast.AST] = [node.body] if isinstance(node, ast.Lambda) else [*node.body]
        scope = _Scope.fromkeys([*(each.arg for each in every if each), *_stored(body)])
        self._in_scope(_Scope(scope), body)

    visit_AsyncFunctionDef = visit_FunctionDef
    visit_Lambda = visit_FunctionDef

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        for outside in [*node.decorator_list, *node.bases, *node.keywords]:
            self.visit(outside)
        scope = _Scope()
        scope.is_class = True
        self._in_scope(scope, [*node.body])

    def _in_scope(self, scope: _Scope, body: list[ast.AST]) -> None:
        self._scopes.append(scope)
        for statement in body:
            self.visit(statement)
        self._scopes.pop()


def _inside(module: str) -> str | None:
    """Returns the name in `tensorflow` of an imported module, which may be `tf_keras`; None for another library's."""
    root, _, inner = module.partition(".")
    if root == "tf_keras":
        return _joined("keras", inner) if inner else "keras"
    return inner if root == _TENSORFLOW else None


def _joined(outer: str, name: str) -> str:
    return f"{outer}.{name}" if outer else name


def _catches(kind: ast.expr | None) -> bool:
    """Returns whether a handler for these errors catches that of a name that is missing."""
    kinds = kind.elts if isinstance(kind, ast.Tuple) else [kind]
    return any(each is None or (isinstance(each, ast.Name) and each.id in _CATCHING) for each in kinds)


def _stored(body: list[ast.AST]) -> Iterator[str]:
    """Yields the names that statements assign, without those of functions and classes in them."""
    for node in body:
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda, ast.Import)):
            yield from _stored([*ast.iter_child_nodes(node)])
        elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            yield node.name
