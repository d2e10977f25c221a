"""Functions rewritten by diastatic-malt, loaded in memory, with the lines and the names of the user's source.

malt itself writes the new source to a temporary file and imports it from there. Here the nodes of the new syntax tree
get the lines of those that they were made of, so that tracebacks, debuggers, profilers and JAX's messages show the
user's file.
"""

from __future__ import annotations
import __future__

import ast
import types
from collections.abc import Iterator

from malt.core import converter
from malt.impl import api
from malt.pyct import origin_info, parser, transpiler

_FUTURE = 0  # the flags of code under `from __future__ import ...`
for _name in __future__.all_feature_names:
    _FUTURE |= getattr(__future__, _name).compiler_flag

_codes: dict[int, types.CodeType] = {}  # rewritten code, by its id


def is_rewritten(code: types.CodeType) -> bool:
    """Returns True for code that was made by rewriting a user's function."""
    return id(code) in _codes


class Transpiler(api.PyToPy):  # type: ignore[misc]  # malt may be missing
    """Rewrites functions, for which `operators` is the module `ag__`."""

    def __init__(self, operators: types.SimpleNamespace, options: converter.ConversionOptions):
        super().__init__()
        self._operators, self._options = operators, options

    def rewritten(self, function: types.FunctionType) -> types.FunctionType:
        """Returns the function rewritten, with the same globals, closure and defaults."""
        with self._cache_lock:
            if not self._cache.has(function, self._options):
                self._cache[function][self._options] = self._factory(function)
            factory, names = self._cache[function][self._options]
        cells = dict(zip(function.__code__.co_freevars, function.__closure__ or ()))
        bound = types.FunctionType(factory, function.__globals__, closure=tuple(cells[name] for name in names))
        new: types.FunctionType = bound(self._operators)
        new.__defaults__, new.__kwdefaults__ = function.__defaults__, function.__kwdefaults__
        return new

    def _factory(self, function: types.FunctionType) -> tuple[types.CodeType, tuple[str, ...]]:
        """Returns code that makes the rewritten function from `ag__`, and the names of its closure's cells."""
        context = converter.ProgramContext(self._options)
        node, details = transpiler.GenericTranspiler.transform_function(self, function, context)
        name = details.info.name
        if isinstance(node, ast.Lambda):
            node = ast.Assign(targets=[ast.Name(name, ctx=ast.Store())], value=node)
        else:
            node.name = name
        source = parser.unparse(node)
        origins = origin_info.create_source_map((node,), source, "")
        body = ast.parse(source).body
        _set_lines(body, {place.lineno: origin for place, origin in origins.items()}, function.__code__)
        free = function.__code__.co_freevars
        module = ast.parse(
            "def outer():\n"
            + "".join(f"    {each} = None\n" for each in free)  # so that it is a cell of the function
            + f"    def make(ag__):\n        return {name}\n    return make"
        )
        outer_function = module.body[0]
        assert isinstance(outer_function, ast.FunctionDef)
        make = outer_function.body[-2]
        assert isinstance(make, ast.FunctionDef)
        make.body[:0] = body
        filename = function.__code__.co_filename
        code = compile(module, filename, "exec", flags=function.__code__.co_flags & _FUTURE, dont_inherit=True)
        code = _renamed(code, set(_names(function.__code__)), function.__code__.co_name)
        (outer,) = (each for each in code.co_consts if isinstance(each, types.CodeType))
        (factory,) = (each for each in outer.co_consts if isinstance(each, types.CodeType))
        return factory, factory.co_freevars


def _set_lines(body: list[ast.stmt], origins: dict[int, origin_info.OriginInfo], code: types.CodeType) -> None:
    """Sets the lines of nodes to those of the user's source; a node that has none gets the line before it."""
    places: dict[int, tuple[int, int, int]] = {}
    last = code.co_firstlineno, 0, 0
    for number in range(1, max(statement.end_lineno or 0 for statement in body) + 1):
        if number in origins:
            text = origins[number].source_code_line.rstrip()
            last = origins[number].loc.lineno, len(text) - len(text.lstrip()), len(text.encode())
        places[number] = last
    for statement in body:
        for node in ast.walk(statement):
            if isinstance(node, (ast.stmt, ast.expr, ast.excepthandler, ast.arg, ast.keyword, ast.alias, ast.pattern)):
                node.lineno, node.col_offset, node.end_col_offset = places[node.lineno]
                node.end_lineno = node.lineno


def _names(code: types.CodeType) -> Iterator[str]:
    yield code.co_name
    for inner in code.co_consts:
        if isinstance(inner, types.CodeType):
            yield from _names(inner)


def _renamed(code: types.CodeType, known: set[str], name: str) -> types.CodeType:
    """Returns code with the user's names: functions that rewriting has added are named like the one around them."""
    inside = [
        _renamed(inner, known, inner.co_name if inner.co_name in known else name)
        if isinstance(inner, types.CodeType)
        else inner
        for inner in code.co_consts
    ]
    new = code.replace(co_consts=tuple(inside), co_name=name, co_qualname=name)
    _codes[id(new)] = new
    return new
